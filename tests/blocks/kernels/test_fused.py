"""Fused trajectories say what `ModelDensity` says: the kernel's text run on tensors without Triton, and by Triton on a GPU."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plausible.blocks.chains.compiled import faster
from plausible.blocks.chains.density import ModelDensity, Point
from plausible.blocks.kernels import fused
from plausible.blocks.kernels.native import own_precision, perceptron
from plausible.core.data import ArrayData, Batch
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from plausible.core.model import Model
from plausible.core.priors import FanIn, Laplace, Prior
from plausible.core.priors import Gaussian as GaussianPrior

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


class _Pointer:
    """A tensor's memory and a place, or many, in it."""

    def __init__(self, memory: Tensor, place: Any = 0):
        self.memory, self.place = memory.view(-1), place

    def __add__(self, further: Any) -> _Pointer:
        return _Pointer(self.memory, self.place + further)


def _load(pointer: _Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(mask))
    return torch.where(mask, pointer.memory[torch.where(mask, place, 0)], other).to(pointer.memory.dtype)


def _store(pointer: _Pointer, value: Tensor, mask: Any = True) -> None:
    place, mask, value = torch.broadcast_tensors(torch.as_tensor(pointer.place), torch.as_tensor(mask), value)
    pointer.memory[place[mask]] = value[mask]


class _Launched:
    def __init__(self, function: Any):
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, num_stages: int, **settings: Any) -> None:
            given = [_Pointer(a) if isinstance(a, Tensor) else a for a in arguments]
            for program in range(grid[0]):
                self.function.__globals__["tl"].program = torch.tensor(program)
                self.function(*given, **settings)

        return launch


@pytest.fixture
def tensors_for_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the kernel calls of Triton's language, by PyTorch."""
    language: Any = types.ModuleType("triton.language")
    for name in ("exp", "log", "abs", "sigmoid", "erf", "where", "arange", "float32", "float64", "int32", "int64"):
        setattr(language, name, getattr(torch, name))
    language.load, language.store, language.constexpr = _load, _store, bool
    language.program_id = lambda axis: language.program
    language.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    language.full = lambda shape, value, dtype: torch.full(shape, value, dtype=dtype)
    language.dot = lambda a, b, input_precision, out_dtype: (a @ b).to(out_dtype)
    language.trans = lambda a: a.T
    language.sum = lambda a, axis=None: a.sum() if axis is None else a.sum(axis)
    language.max = lambda a, axis: a.amax(axis)
    language.maximum = lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype))
    language.minimum = lambda a, b: torch.minimum(a, torch.as_tensor(b, dtype=a.dtype))
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = _Launched, language
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    fused.compiled.cache_clear()
    yield
    fused.compiled.cache_clear()


def target(
    network: nn.Module,
    likelihood: Likelihood,
    *,
    n: int = 100,
    prior: Prior | None = None,
    temperature: float = 1.0,
    device: str = "cpu",
    weighted: bool = False,
    chains: int = 3,
) -> ModelDensity:
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(n, 5, generator=stream)
    outputs = network(x)
    if isinstance(likelihood, Categorical):
        y = torch.randint(outputs.shape[1], (n,), generator=stream)
    elif isinstance(likelihood, Bernoulli):
        y = torch.randint(2, outputs.shape, generator=stream).float()
    else:
        y = torch.randn(outputs.shape, generator=stream)
    weight = 2 * torch.rand(n, generator=stream).to(device) if weighted else None
    batch = Batch(x.to(device), y.to(device), weight)
    model = Model.build(network, likelihood, prior or GaussianPrior(0.7), batch, num_data=n, device=device)
    return ModelDensity(model.tempered(temperature), ArrayData(batch, n), chains=chains)


def check(plain: ModelDensity, fast: ModelDensity, *, keep: bool = False, tolerance: float = 5e-6) -> None:
    """Values, gradients and ends of trajectories, relative to their sizes."""
    stream = torch.Generator().manual_seed(1)
    size = plain.size
    q, p = (0.5 * torch.randn(3, size, generator=stream).to(plain.device) for _ in range(2))
    expected = plain.evaluate(q)
    step = torch.tensor([1e-3, -2e-3, 3e-3], device=plain.device)
    mass = 0.5 + torch.rand(size, generator=stream).to(plain.device)
    point = Point(q, p, *expected)
    pairs = [
        *zip(expected, fast.evaluate(q)),
        *zip(expected[:2], fast.densities(q)),
        *zip(plain.leapfrogs(point, step, mass, 3, keep=keep), fast.leapfrogs(point, step, mass, 3, keep=keep)),
    ]
    for a, b in pairs:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=0, atol=tolerance * float(a.abs().max()))


def perceptrons(activation: nn.Module | None = None, outputs: int = 1, hidden: tuple[int, ...] = (7,)) -> nn.Sequential:
    torch.manual_seed(0)
    widths, layers = (5, *hidden), list[nn.Module]()
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), activation or nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


ACTIVATIONS = (
    nn.Tanh(),
    nn.ReLU(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.Softplus(2.0, 3.0),
    nn.LeakyReLU(0.1),
    nn.ELU(1.3),
    nn.GELU(),
    nn.GELU("tanh"),
)
CASES: dict[str, tuple[nn.Module, Likelihood, dict[str, Any]]] = {
    **{repr(a): (perceptrons(a), Gaussian(0.3), {}) for a in ACTIVATIONS},
    "learned": (perceptrons(), Gaussian("learned"), {}),
    "learned, three outputs": (perceptrons(outputs=3), Gaussian("learned"), {"weighted": True}),
    "per output": (perceptrons(outputs=3), Gaussian("per-output"), {}),
    "per output, one": (perceptrons(), Gaussian("per-output"), {}),
    "scales": (perceptrons(outputs=3), Gaussian((0.1, 0.2, 0.4)), {"weighted": True}),
    "classes": (perceptrons(outputs=3), Categorical(), {"weighted": True}),
    "bernoulli": (perceptrons(), Bernoulli(), {"weighted": True}),
    "bernoulli, three outputs": (perceptrons(outputs=3), Bernoulli(), {}),
    "two layers": (perceptrons(hidden=(20, 16)), Gaussian("learned"), {"prior": FanIn(GaussianPrior(1.0))}),
    "no biases": (nn.Sequential(nn.Linear(5, 16, bias=False), nn.ReLU(), nn.Linear(16, 2, bias=False)), Gaussian(0.3), {}),
    "linear": (nn.Sequential(nn.Linear(5, 1)), Bernoulli(), {}),
    "activation last": (nn.Sequential(nn.Linear(5, 1), nn.Tanh()), Gaussian(0.3), {}),
    "temperature": (perceptrons(), Gaussian("learned"), {"temperature": 0.4}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("tensors_for_triton")
def test_the_kernels_text_computes_the_log_joint(name: str) -> None:
    network, likelihood, settings = CASES[name]
    plain = target(network, likelihood, **settings)
    for way in (None, fused.Way(16, 1, "ieee")):
        check(plain, fused.FusedDensity(plain, perceptron(plain), own_precision(plain), way), keep=way is None)


@pytest.mark.usefixtures("tensors_for_triton")
@pytest.mark.parametrize("keep", [False, True])
def test_powers_and_precisions_of_each_chain(keep: bool) -> None:
    plain = target(perceptrons(outputs=2), Gaussian("learned"), temperature=0.7)
    fast = fused.FusedDensity(plain, perceptron(plain), own_precision(plain))
    power = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    for precision in (0.5 + torch.rand(plain.size), 0.5 + torch.rand(3, plain.size)):
        settings = {"beta": power, "precision": precision}
        check(plain.bound(**settings), fast.bound(**settings), keep=keep)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_triton_on_a_gpu(name: str) -> None:
    network, likelihood, settings = CASES[name]
    plain = target(network.cpu(), likelihood, device="cuda", **settings)
    fast, mode = faster(plain, True, 10_000)
    assert mode == "fused"
    check(plain, fast, keep=True)
    check(plain, fast)


@pytest.mark.cuda
@needs_cuda
def test_chains_that_diverge_leave_the_others_alone_on_a_gpu() -> None:
    plain = target(perceptrons(), Gaussian(0.3), device="cuda")
    fast = fused.fused_density(plain)
    assert fast is not None
    q = torch.randn(3, plain.size, device="cuda")
    point = Point(q, torch.zeros_like(q), *plain.evaluate(q))
    wild = torch.tensor([1e-3, 1e6, 1e-3], device="cuda")
    ended, tame = (fast.leapfrogs(point, step, torch.ones_like(q[0]), 20) for step in (wild, wild.clamp(max=1e-3)))
    assert torch.equal(ended.position[::2], tame.position[::2])
    assert not torch.isfinite(fast.value(ended.log_likelihood, ended.log_prior)[1]) or ended.log_likelihood[1] < -1e6


def test_where_there_is_no_kernel() -> None:
    assert fused.fused_density(target(perceptrons(), Gaussian(0.3))) is None  # on a CPU
    assert fused.pays(rows=500, held=1_088, weights=601, chains=1)
    assert fused.pays(rows=10_000, held=1_088, weights=601, chains=1024)
    assert not fused.pays(rows=10_000, held=1_088, weights=601, chains=4)


@pytest.mark.cuda
@needs_cuda
def test_what_has_no_kernel_is_captured_on_a_gpu() -> None:
    for network, prior in ((perceptrons(), Laplace(1.0)), (perceptrons(hidden=(300,)), None)):
        plain = target(network, Gaussian(0.3), device="cuda", prior=prior)
        fast, mode = faster(plain, "auto", 10_000)
        assert mode == "captured"
        check(plain, fast)
