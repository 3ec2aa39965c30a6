"""Machine code for perceptrons says what `ModelDensity` says, and stays away where it cannot."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from plausible import likelihoods
from plausible.blocks.chains.density import ModelDensity, Point
from plausible.blocks.kernels import native_source as build
from plausible.blocks.kernels.native import NativeDensity, native_density
from plausible.blocks.moments.expectations import LogVarianceGaussian
from plausible.core.data import ArrayData, Batch
from plausible.core.model import Model
from plausible.core.priors import FanIn, Gaussian, Laplace, Patterns, Prior

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("compiler")]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of this module's own, shared by its tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAUSIBLE_CACHE", str(folder))
        yield folder


def model_target(
    network: nn.Module,
    likelihood: likelihoods.Likelihood,
    *,
    inputs: int = 3,
    n: int = 21,
    dtype: torch.dtype = torch.float64,
    prior: Prior | None = None,
    weights: bool = False,
    temperature: float = 1.0,
    **settings,
) -> ModelDensity:
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(n, inputs, generator=stream, dtype=torch.float64).to(dtype)
    network = network.to(dtype)
    with torch.no_grad():
        outputs = network(x)
    if isinstance(likelihood, likelihoods.Categorical):
        y = torch.randint(outputs.shape[1], (n,), generator=stream)
    elif isinstance(likelihood, likelihoods.Bernoulli):
        y = torch.randint(2, outputs.shape, generator=stream).to(dtype)
    else:
        y = torch.randn(likelihood.target_shape(outputs.shape), generator=stream, dtype=torch.float64).to(dtype)
    weight = torch.rand(n, generator=stream, dtype=torch.float64).to(dtype) * 2 if weights else None
    batch = Batch(x, y, weight)
    model = Model.build(network, likelihood, prior or Gaussian(0.7), batch, num_data=n, **settings)
    return ModelDensity(model.tempered(temperature), ArrayData(batch, n), chains=4)


def both(*arguments, threads: int = 1, **keywords) -> tuple[ModelDensity, NativeDensity]:
    plain = model_target(*arguments, **keywords)
    fast = native_density(plain, threads=threads)
    assert isinstance(fast, NativeDensity)
    return plain, fast


def positions(target: ModelDensity, chains: int, scale: float = 0.8) -> Tensor:
    stream = torch.Generator().manual_seed(chains)
    return scale * torch.randn(chains, target.size, generator=stream, dtype=torch.float64).to(target.dtype)


def check_equal(plain: ModelDensity, fast: ModelDensity, position: Tensor, tolerance: float | None = None) -> None:
    """Values and gradients relative to their sizes; float32 is judged against float64."""
    tolerance = tolerance or (1e-12 if plain.dtype == torch.float64 else 3e-6)
    expected, found = plain.evaluate(position), fast.evaluate(position)
    for a, b in zip(expected, found):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * max(float(a.abs().max()), 1.0))
    for a, b in zip(found[:2], fast.densities(position)):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


def tanh(inputs: int = 3, hidden: int = 7, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


GAUSSIAN = likelihoods.Gaussian("learned")

# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients

ACTIVATIONS = {
    "tanh": nn.Tanh(),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(2.0, 15.0),
    "leaky": nn.LeakyReLU(0.1),
    "elu": nn.ELU(1.3),
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_float32_over_their_whole_range(name: str) -> None:
    # One example with y = 0 and σ = 1: log p = −½ a(b)² − ½ log 2π at bias b, so that chains of different biases trace a(b)².
    network = nn.Sequential(nn.Linear(1, 1), ACTIVATIONS[name])
    nn.init.ones_(network[0].bias)
    target = model_target(network, likelihoods.Gaussian(1.0), inputs=1, n=1, dtype=torch.float32, prior=Gaussian(1e10))
    target.data.batch.x.zero_()
    target.data.batch.y.zero_()
    fast = native_density(target, threads=1)
    size = torch.logspace(-6, 2, 600, dtype=torch.float64)
    bias = torch.cat([-size, torch.zeros(1, dtype=torch.float64), size]).float()
    found = fast.evaluate(torch.stack([torch.zeros_like(bias), bias], dim=1))
    leaf = bias.double().requires_grad_()
    exact = ACTIVATIONS[name](leaf)
    (slope,) = torch.autograd.grad(exact.sum(), leaf)
    square = -2 * found.log_likelihood - torch.tensor(2 * torch.pi, dtype=torch.float64).log()
    value, size = exact.detach().abs(), leaf.detach().abs()
    assert bool(((square.clamp(min=0).sqrt() - value).abs() <= 1e-6 * value + 2e-7 * size.clamp(1, 6)).all())
    # Relative to the product of value and slope; a slope is a difference from 1, and so are tails of the two GELUs.
    tails = 4e-7 * size.clamp(max=6) * slope.abs() * (leaf < -1) if "gelu" in name else 0.0
    bound = 2e-6 * (value * slope).abs() + 3e-7 * value + tails + 1e-12
    assert bool(((found.gradient[:, 1] + exact.detach() * slope).abs() <= bound).all())


def test_activations_in_float64_one_behind_the_other_with_classes() -> None:
    torch.manual_seed(1)
    names = ("tanh", "sigmoid", "softplus", "elu", "gelu")  # each with a function of its own
    modules = [module for name in names for module in (nn.Linear(2, 2), ACTIVATIONS[name])]
    plain, fast = both(
        nn.Sequential(nn.Flatten(), *modules, nn.Linear(2, 4)), likelihoods.Categorical(), inputs=2, n=37, weights=True
    )
    check_equal(plain, fast, positions(plain, 3))


def test_bernoulli_outputs_without_biases_behind_an_activation_used_twice() -> None:
    elu = nn.ELU()
    network = nn.Sequential(
        nn.Sequential(nn.Linear(3, 4, bias=False), elu, nn.Identity()), nn.Dropout(0.3), nn.Linear(4, 3), elu
    )
    plain, fast = both(network.eval(), likelihoods.Bernoulli(), weights=True)
    check_equal(plain, fast, positions(plain, 3, 2.0))


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (likelihoods.StudentT(df="learned"), 1),
        (likelihoods.StudentT(df="learned", scale="per-output"), 2),
        (likelihoods.StudentT(df=3.0), 2),
        (likelihoods.StudentT(df=5.0, scale=0.3), 1),
        (likelihoods.HeteroscedasticGaussian(), 4),
        (likelihoods.HeteroscedasticGaussian(minimum=0.2), 2),
        (likelihoods.HeteroscedasticStudentT(), 4),
        (likelihoods.HeteroscedasticStudentT(df=3.0), 2),
        (likelihoods.Scaled(likelihoods.HeteroscedasticStudentT(), (1.0, -2.0), (3.0, -0.5)), 4),
        (likelihoods.Scaled(likelihoods.StudentT(df="learned"), (1.0, -2.0), (3.0, -0.5)), 2),
        (likelihoods.Scaled(likelihoods.Gaussian(), 2.0, 3.0), 2),
        (likelihoods.Scaled(likelihoods.Gaussian((0.5, 0.2)), 2.0, (3.0, 4.0)), 2),
    ],
    ids=str,
)
def test_heavy_tails_and_other_units(likelihood: likelihoods.Likelihood, outputs: int) -> None:
    plain, fast = both(tanh(outputs=outputs), likelihood, n=150, weights=True)
    check_equal(plain, fast, positions(plain, 3))


@pytest.mark.parametrize("scale", [(0.5, 2.0), "per-output"], ids=["fixed", "learned"])
def test_gaussian_scales_of_their_own_over_several_tiles(scale: tuple[float, float] | str) -> None:
    network = nn.Linear(3, 2) if scale == "per-output" else tanh(outputs=2)
    plain, fast = both(network, likelihoods.Gaussian(scale), n=1100, weights=True)
    check_equal(plain, fast, positions(plain, 2))


@pytest.mark.parametrize(
    "prior",
    [
        Gaussian(0.3),
        FanIn(Gaussian(1.5)),
        Patterns({"*.bias": Gaussian(3.0), "0.*": FanIn(Gaussian(2.0)), "*": Gaussian(0.2)}),
        Gaussian(1.0, loc=0.4),
        Laplace(0.5),
    ],
    ids=["gaussian", "fan-in", "patterns", "not centred", "laplace"],
)
def test_priors(prior: Prior) -> None:
    plain, fast = both(tanh(), GAUSSIAN, prior=prior, temperature=0.5)
    check_equal(plain, fast, positions(plain, 3))
    at = positions(plain, 3)
    start, step, mass = (Point(at, positions(plain, 3), *plain.evaluate(at)), torch.full((3,), 0.01), torch.ones(plain.size))
    check_paths(plain.leapfrogs(start, step, mass.double(), 5), fast.leapfrogs(start, step, mass.double(), 5), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_powers_and_precisions(dtype: torch.dtype) -> None:
    plain, fast = both(tanh(), GAUSSIAN, dtype=dtype, temperature=2.0)
    at = positions(plain, 3)
    beta = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    shared = torch.linspace(0.1, 4.0, plain.size, dtype=dtype)
    own = shared * torch.tensor([[1.0], [2.0], [0.5]], dtype=dtype)
    for settings in ({"beta": beta}, {"precision": shared}, {"beta": beta, "precision": own}, {"precision": own[:, :1]}):
        check_equal(plain.bound(**settings), fast.bound(**settings), at)
    assert fast.beta is None
    assert fast.precision is None


def test_densities_that_cannot_be_computed_are_seen() -> None:
    plain, fast = both(tanh(), GAUSSIAN)
    at = positions(plain, 3)
    at[0, 4], at[1, -1] = torch.nan, -1e4
    found = fast.evaluate(at)
    value = fast.value(found.log_likelihood, found.log_prior)
    assert torch.isneginf(value[:2]).all()
    assert torch.isfinite(value[2])
    torch.testing.assert_close(found.log_likelihood[2], plain.evaluate(at[2:]).log_likelihood[0])


# ---------------------------------------------------------------------------------------------------------------------
# Paths


def check_paths(expected: Point, found: Point, tolerance: float) -> None:
    for a, b in zip(expected, found):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * max(float(a.abs().max()), 1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chains", [1, 5])
def test_paths(chains: int, dtype: torch.dtype) -> None:
    plain, fast = both(tanh(), GAUSSIAN, dtype=dtype, threads=2)
    at = positions(plain, chains, 0.3)
    start = Point(at, positions(plain, chains, 1.0), *plain.evaluate(at))
    step = torch.linspace(-0.02, 0.03, chains + 2, dtype=torch.float64)[:chains]
    shared = torch.linspace(0.5, 2.0, plain.size, dtype=dtype)
    own = shared * torch.linspace(0.6, 1.2, chains, dtype=dtype)[:, None]
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    beta = torch.linspace(0.2, 1.0, chains, dtype=torch.float64)
    for mass, settings in ((shared, {}), (own, {"beta": beta, "precision": own})):
        bound = [target.bound(**settings) for target in (plain, fast)]
        for keep in (False, True):
            expected, found = (target.leapfrogs(start, step, mass, 7, keep=keep) for target in bound)
            check_paths(expected, found, tolerance)
            if keep:
                last = bound[1].leapfrogs(start, step, mass, 7)
                assert all(torch.equal(part[:, -1], end) for part, end in zip(found, last))


def test_threads_do_not_change_a_bit_and_paths_go_back() -> None:
    plain, fast = both(tanh(), GAUSSIAN, n=300)
    at = positions(plain, 6)
    start = Point(at, positions(plain, 6), *fast.evaluate(at))
    before = [part.clone() for part in start]
    step, mass = torch.full((6,), 0.01, dtype=torch.float64), torch.ones(plain.size, dtype=torch.float64)
    ends = []
    for threads in (1, 2, 3):
        fast.threads = threads
        ends.append(fast.leapfrogs(start, step, mass, 20))
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end))
    assert all(torch.equal(a, b) for a, b in zip(start, before))
    back = fast.leapfrogs(ends[0], -step, mass, 20)
    torch.testing.assert_close(back.position, start.position, rtol=1e-9, atol=1e-9)
    assert copy.deepcopy(fast).kernel is fast.kernel


def test_examples_of_one_chain_over_threads() -> None:
    plain, fast = both(tanh(), GAUSSIAN, n=60_000, weights=True, threads=3)
    check_equal(plain, fast, positions(plain, 1), 1e-11)
    one = fast.evaluate(positions(plain, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, fast.evaluate(positions(plain, 1))))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((None,), id="any machine"),
        pytest.param(
            ("-march=haswell",),
            id="avx2",
            marks=pytest.mark.skipif("avx2" not in build._processor() or platform.machine() != "x86_64", reason="no AVX2 here"),
        ),
    ],
)
def test_other_instructions(flags: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TUNED", flags)
    plain, fast = both(tanh(hidden=13, outputs=3), likelihoods.Categorical(), n=133, dtype=torch.float32)
    check_equal(plain, fast, positions(plain, 2, 0.5), 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling, and where there is nothing to compile


def _build(folder: str, answers) -> None:
    os.environ["PLAUSIBLE_CACHE"] = folder
    build._loaded.cache_clear()
    target = model_target(tanh(hidden=4), GAUSSIAN)
    fast = native_density(target)
    answers.put(None if fast is None else fast.evaluate(positions(target, 1)).log_likelihood.item())


def test_processes_that_compile_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [context.Process(target=_build, args=(str(tmp_path), answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(30)
    target = model_target(tanh(hidden=4), GAUSSIAN)
    assert found[0] == found[1] == pytest.approx(target.evaluate(positions(target, 1)).log_likelihood.item(), rel=1e-12)
    files = list((tmp_path / "native").iterdir())
    assert [file.suffix for file in files] == [".so"], "one file, and nothing left over"


def test_a_spoilt_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(build, "_compile", lambda program, compiler, path: made.append(path) or path.write_bytes(b"no library"))
    monkeypatch.setenv("PLAUSIBLE_CACHE", str(tmp_path))
    assert native_density(model_target(tanh(), GAUSSIAN)) is None
    assert native_density(model_target(tanh(), GAUSSIAN)) is None
    assert len(made) == 2


def _frozen() -> nn.Module:
    network = tanh()
    network[0].bias.requires_grad_(False)
    return network


def _tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


def _hooked() -> nn.Module:
    network = tanh()
    network[1].register_forward_hook(lambda module, inputs, output: output * 2)
    return network


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


REFUSED = {
    "another module": lambda: model_target(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), GAUSSIAN),
    "a forward of its own": lambda: model_target(_Residual(nn.Linear(3, 3), nn.Tanh()), GAUSSIAN),
    "batch norm": lambda: model_target(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), GAUSSIAN),
    "convolution": lambda: model_target(nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3), nn.Flatten()), GAUSSIAN),
    "two activations": lambda: model_target(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.ReLU()), GAUSSIAN),
    "an activation first": lambda: model_target(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), GAUSSIAN),
    "another likelihood": lambda: model_target(tanh(outputs=2), LogVarianceGaussian()),
    "frozen": lambda: model_target(_frozen(), GAUSSIAN),
    "tied": lambda: model_target(_tied(), GAUSSIAN),
    "hooks": lambda: model_target(_hooked(), GAUSSIAN),
    "points": lambda: model_target(tanh(), GAUSSIAN, where="2.*"),
    "a function of the output": lambda: model_target(tanh(), GAUSSIAN, output=lambda f: 2 * f),
    "half precision": lambda: model_target(tanh(), GAUSSIAN, dtype=torch.float32, precision=torch.bfloat16),
    "a large layer": lambda: model_target(nn.Sequential(nn.Linear(3, 1000), nn.Tanh(), nn.Linear(1000, 1000)), GAUSSIAN),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="plausible"):
        assert native_density(REFUSED[name]()) is None
    assert "no machine code for this density: " in caplog.text


def test_masks_are_refused() -> None:
    target = model_target(tanh(), GAUSSIAN)
    batch = target.data.batch
    masked = batch._replace(mask=torch.ones_like(batch.y, dtype=torch.bool))
    assert native_density(ModelDensity(target.model, ArrayData(masked, len(batch.y)), 1)) is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build._compiler.cache_clear()
    try:
        assert native_density(model_target(tanh(hidden=9), GAUSSIAN)) is None
    finally:
        build._compiler.cache_clear()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit 0\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    build._compiler.cache_clear()
    try:
        assert native_density(model_target(tanh(hidden=9), GAUSSIAN)) is None
    finally:
        build._compiler.cache_clear()


def test_positions_of_another_type() -> None:
    plain, fast = both(tanh(), GAUSSIAN)
    with pytest.raises(ValueError, match=r"must be torch.float64 of shape \[chains, 37\], got torch.float32"):
        fast.evaluate(positions(plain, 2).float())


@pytest.mark.parametrize("attack", ["damaged", "link", "writable by others", "another library"])
def test_compiled_code_that_is_not_ours_as_it_was_sealed_is_made_anew(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAUSIBLE_CACHE", str(tmp_path))
    assert native_density(model_target(tanh(), GAUSSIAN)) is not None
    (file,) = (tmp_path / "native").iterdir()
    whole = file.read_bytes()
    file.rename(tmp_path / "loaded.so")  # which this process still runs
    file.write_bytes(whole)
    file.chmod(0o700)
    assert build._trusted(file)
    if attack == "damaged":
        file.write_bytes(whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :])
    elif attack == "link":
        file.rename(tmp_path / "elsewhere.so")
        file.symlink_to(tmp_path / "elsewhere.so")
    elif attack == "writable by others":
        file.chmod(0o777)
    else:
        file.write_bytes(whole[:-32])
    assert not build._trusted(file)
    build._loaded.cache_clear()
    assert native_density(model_target(tanh(), GAUSSIAN)) is not None
    assert build._trusted(file)
    assert file.read_bytes() == whole


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    assert build._writable(tmp_path / "native") != tmp_path / "native"
