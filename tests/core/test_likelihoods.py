"""Likelihoods: densities and cdfs against scipy, alignment of learned noise, tracing, and all that is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from plausible import likelihoods
from plausible.core import distributions
from plausible.core.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Likelihood,
    NegativeBinomial,
    Poisson,
    Scaled,
    StudentT,
)
from plausible.core.serialise import decode, encode

N, K, C, S = 6, 2, 4, 3
LOG_SCALE, LOG_DISPERSION, LOG_DF = "likelihood.log_scale", "likelihood.log_dispersion", "likelihood.log_df"

# likelihood, shape of the outputs for one input, shape of the targets for one input
CASES: list[tuple[Likelihood, tuple[int, ...], tuple[int, ...]]] = [
    (Categorical(), (C,), ()),
    (Categorical(), (3, 2, C), (3, 2)),
    (Bernoulli(), (), ()),
    (Bernoulli(), (K,), (K,)),
    (Gaussian(), (K,), (K,)),
    (Gaussian(), (), ()),
    (Gaussian("per-output", initial=0.7), (K,), (K,)),
    (Gaussian(0.5), (K,), (K,)),
    (Gaussian((0.5, 2.0)), (K,), (K,)),
    (HeteroscedasticGaussian(), (2 * K,), (K,)),
    (HeteroscedasticStudentT(df=3.0), (2 * K,), (K,)),
    (HeteroscedasticStudentT(minimum=0.3), (2 * K,), (K,)),
    (StudentT(), (K,), (K,)),
    (StudentT(df=1.5, scale=(0.5, 2.0)), (K,), (K,)),
    (Poisson(), (K,), (K,)),
    (NegativeBinomial(), (K,), (K,)),
    (NegativeBinomial(2.5), (K,), (K,)),
    (Scaled(Gaussian("per-output"), (1.0, -2.0), (3.0, 0.5)), (K,), (K,)),
    (Scaled(StudentT(scale=0.3), 5.0, -2.0), (K,), (K,)),
]
each_case = pytest.mark.parametrize(("likelihood", "output", "target"), CASES, ids=lambda v: str(v))


def problem(likelihood: Likelihood, output: tuple[int, ...], target: tuple[int, ...], draws: tuple[int, ...] = ()) -> Any:
    """Random outputs, targets and noise weights, the latter with one leading axis per draw axis."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(*draws, N, *output, generator=generator, dtype=torch.float64)
    if likelihood.kind == "continuous":
        targets = torch.randn(N, *target, generator=generator, dtype=torch.float64)
    else:
        high = {"classes": C, "binary": 2, "counts": 9}[likelihood.kind]
        targets = torch.randint(high, (N, *target), generator=generator)
    weights = {
        name: torch.randn((*draws, *start.shape), generator=generator, dtype=torch.float64)
        for name, start in likelihood.initial_weights(output, dtype=torch.float64, device="cpu").items()
    }
    targets = likelihood.check(outputs.shape[len(draws) :], targets)
    return outputs, targets if likelihood.kind == "classes" else targets.double(), weights


# ---------------------------------------------------------------------------------------------------------------------
# Laws


def oracle(likelihood: Likelihood, f: np.ndarray, weights: dict[str, Tensor]) -> Any:
    """The same distribution in scipy, for one draw."""
    scale: Any = weights[LOG_SCALE].exp().numpy() if LOG_SCALE in weights else getattr(likelihood, "scale", None)
    if isinstance(scale, tuple):
        scale = np.array(scale)
    match likelihood:
        case Gaussian():
            return stats.norm(f, scale)
        case StudentT():
            return stats.t(likelihood.df, f, scale)
        case HeteroscedasticStudentT():
            mean, raw = np.split(f, 2, -1)
            df = 2 + 6 * weights[LOG_DF].exp().item() if weights else likelihood.df
            return stats.t(df, mean, likelihood.minimum + np.log1p(np.exp(raw)))
        case HeteroscedasticGaussian():
            mean, raw = np.split(f, 2, -1)
            return stats.norm(mean, likelihood.minimum + np.log1p(np.exp(raw)))
        case Bernoulli():
            return stats.bernoulli(1 / (1 + np.exp(-f)))
        case Poisson():
            return stats.poisson(np.exp(f))
        case NegativeBinomial():
            r = weights[LOG_DISPERSION].exp().item() if weights else likelihood.dispersion
            return stats.nbinom(r, r / (r + np.exp(f)))
    raise AssertionError(likelihood)


@pytest.mark.parametrize(
    ("likelihood", "output", "target"), [c for c in CASES if not isinstance(c[0], Categorical | Scaled)], ids=lambda v: str(v)
)
def test_density_cdf_and_moments_against_scipy(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target)
    ours, theirs = likelihood(outputs, weights), oracle(likelihood, outputs.numpy(), weights)
    density = theirs.logpdf if likelihood.kind == "continuous" else theirs.logpmf
    np.testing.assert_allclose(ours.log_prob(y), density(y.numpy()), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(likelihood.log_prob(outputs, y, weights), density(y.numpy()), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(ours.mean, theirs.mean(), rtol=1e-11)
    np.testing.assert_allclose(ours.variance, theirs.var(), rtol=1e-11)
    if likelihood.kind in ("continuous", "counts"):
        np.testing.assert_allclose(ours.cdf(y), theirs.cdf(y.numpy()), rtol=0, atol=1e-12)
        far = torch.full_like(y, 1e8)
        torch.testing.assert_close(ours.cdf(far), torch.ones_like(far), rtol=0, atol=1e-9)
        torch.testing.assert_close(ours.cdf(-far), torch.zeros_like(far), rtol=0, atol=1e-9)


def test_categorical_is_the_log_softmax() -> None:
    outputs, y, _ = problem(Categorical(), (C,), ())
    expected = outputs.log_softmax(-1)[torch.arange(N), y]
    torch.testing.assert_close(Categorical()(outputs).log_prob(y), expected)
    torch.testing.assert_close(Categorical().log_prob(outputs, y), expected)


@each_case
def test_elementwise_shapes_and_draws_equal_a_loop(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target, draws=(S,))
    distribution = likelihood(outputs, weights)
    assert distribution.batch_shape == (S, N, *target)
    assert distribution.event_shape == ()
    assert distribution.sample().shape == (S, N, *target)
    together = likelihood.log_prob(outputs, y, weights)
    torch.testing.assert_close(together, distribution.log_prob(y))
    for s in range(S):
        one = likelihood(outputs[s], {name: weight[s] for name, weight in weights.items()}).log_prob(y)
        torch.testing.assert_close(together[s], one)


@each_case
def test_the_total_is_the_sum_with_its_gradients(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target)
    summed, total = (
        torch.func.grad_and_value(function, argnums=(0, 1))(outputs, weights)
        for function in (lambda f, w: likelihood.log_prob(f, y, w).sum(), lambda f, w: likelihood.total(f, y, w))
    )
    torch.testing.assert_close(total, summed)
    many, _, own = problem(likelihood, output, target, draws=(S,))
    torch.testing.assert_close(likelihood.total(many, y, own), likelihood.log_prob(many, y, own).sum())
    with pytest.raises(ValueError, match="targets have shape"):
        likelihood.total(outputs, torch.zeros(N, 7), weights)


def test_learned_noise_follows_its_draw_where_all_axes_have_the_same_length() -> None:
    """[S] scales with [S, S, S] outputs: broadcasting from the right would give each *output* its scale."""
    outputs = torch.zeros(3, 3, 3)
    scales = torch.tensor([1.0, 10.0, 100.0])
    for likelihood in (Gaussian(), StudentT()):
        distribution: Any = likelihood(outputs, {LOG_SCALE: scales.log()})
        torch.testing.assert_close(distribution.scale, scales[:, None, None].expand(3, 3, 3))
    per_output: Any = Gaussian("per-output")(outputs, {LOG_SCALE: torch.stack([scales, 2 * scales, 3 * scales]).log()})
    factor = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(per_output.scale, (factor[:, None, None] * scales).expand(3, 3, 3))
    counts = NegativeBinomial()(outputs, {LOG_DISPERSION: scales.log()})
    torch.testing.assert_close(counts.variance, (1 + 1 / scales)[:, None, None].expand(3, 3, 3))
    chains: Any = Gaussian()(torch.zeros(2, 3, 4, 1), {LOG_SCALE: torch.randn(2, 3)})  # two axes of draws
    assert (chains.scale == chains.scale[:, :, :1, :1]).all()


def test_noise_that_does_not_fit_the_draws_is_refused() -> None:
    with pytest.raises(ValueError, match=r"likelihood\.log_scale.*\[4\].*\[3, 5, 2\]"):
        Gaussian()(torch.zeros(3, 5, 2), {LOG_SCALE: torch.zeros(4)})
    with pytest.raises(ValueError, match="one value per output"):
        Gaussian("per-output")(torch.zeros(5, 2), {LOG_SCALE: torch.zeros(3)})
    with pytest.raises(ValueError, match="does not fit"):
        Gaussian()(torch.zeros(5), {LOG_SCALE: torch.zeros(5)})  # 5 draws of nothing, or 5 inputs: not a scalar
    with pytest.raises(ValueError, match=r"weights=.*likelihood\.log_scale"):
        Gaussian()(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="scale has 3 values"):
        Gaussian((1.0, 2.0, 3.0))(torch.zeros(5, 2))


def test_initial_weights() -> None:
    settings: Any = {"dtype": torch.float64, "device": "cpu"}
    start = Gaussian("per-output", initial=0.25).initial_weights((7,), **settings)[LOG_SCALE]
    assert start.shape == (7,)
    assert start.dtype == torch.float64
    torch.testing.assert_close(start.exp(), torch.full((7,), 0.25, dtype=torch.float64))
    assert StudentT().initial_weights((7,), **settings)[LOG_SCALE].shape == ()
    assert NegativeBinomial(initial=3.0).initial_weights((7,), **settings)[LOG_DISPERSION].item() == pytest.approx(math.log(3))
    assert Scaled(Gaussian(), 0.0, 1.0).initial_weights((7,), **settings).keys() == {LOG_SCALE}
    for likelihood in (Categorical(), Gaussian(1.0), NegativeBinomial(2.0), Poisson()):
        assert likelihood.initial_weights((7,), **settings) == {}
    with pytest.raises(ValueError, match="use scale='learned'"):
        Gaussian("per-output").initial_weights((), **settings)


def test_heavy_tails_have_infinite_variance_and_cauchy_no_mean() -> None:
    outputs = torch.zeros(1, 1)
    assert StudentT(df=2.0, scale=1.0)(outputs).variance.item() == math.inf
    assert StudentT(df=2.0, scale=1.0)(outputs).mean.item() == 0.0
    assert StudentT(df=1.0, scale=1.0)(outputs).variance.item() == math.inf
    assert math.isnan(StudentT(df=1.0, scale=1.0)(outputs).mean.item())


def test_limits_stay_exact_in_float32() -> None:
    """t → Gaussian as df → ∞, negative binomial → Poisson as r → ∞: a difference of log Γ's would be off by nats."""
    outputs, y = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)), torch.linspace(-4, 4, 50)[:, None]
    torch.testing.assert_close(
        StudentT(df=1e8, scale=0.5).log_prob(outputs, y), Gaussian(0.5).log_prob(outputs, y), rtol=1e-4, atol=1e-4
    )
    counts = torch.arange(50.0)[:, None]
    torch.testing.assert_close(
        NegativeBinomial(1e8).log_prob(outputs, counts), Poisson().log_prob(outputs, counts), rtol=1e-4, atol=1e-4
    )


def test_extreme_outputs_keep_finite_densities_and_gradients() -> None:
    for likelihood in (Poisson(), NegativeBinomial(1e-3), NegativeBinomial(1e6), Bernoulli()):
        outputs = torch.tensor([-80.0, -20.0, 0.0, 60.0], requires_grad=True)
        value = likelihood.log_prob(outputs, torch.tensor([1.0, 0.0, 1.0, 1.0]))
        (gradient,) = torch.autograd.grad(value.sum(), outputs)
        assert value.isfinite().all(), likelihood
        assert gradient.isfinite().all(), likelihood
        assert value[0].item() == pytest.approx(-80 + math.log(1e-3 / 1e-3), abs=0.02), likelihood


def test_heteroscedastic_halves_and_minimum() -> None:
    outputs = torch.tensor([[1.0, 2.0, -1000.0, 3.0]])
    distribution = HeteroscedasticGaussian(minimum=0.1)(outputs)
    assert distribution.mean.tolist() == [[1.0, 2.0]]
    torch.testing.assert_close(distribution.stddev, torch.tensor([[0.1, 0.1 + math.log1p(math.exp(3.0))]]))


def test_scaled_is_the_distribution_of_the_transformed_variable() -> None:
    outputs, y, weights = problem(Gaussian(), (K,), (K,))
    sigma = weights[LOG_SCALE].exp().numpy()
    loc, scale = np.array([10.0, -5.0]), np.array([4.0, -0.5])
    scaled = Scaled(Gaussian(), torch.from_numpy(loc), scale)
    ours, theirs = scaled(outputs, weights), stats.norm(loc + scale * outputs.numpy(), np.abs(scale) * sigma)
    np.testing.assert_allclose(ours.log_prob(y), theirs.logpdf(y), rtol=1e-12)
    np.testing.assert_allclose(ours.cdf(y), theirs.cdf(y), rtol=0, atol=1e-14)
    np.testing.assert_allclose(ours.mean, theirs.mean(), rtol=1e-14)
    np.testing.assert_allclose(ours.variance, theirs.var(), rtol=1e-12)
    twice = Scaled(scaled, 1.0, 2.0)(outputs, weights)
    np.testing.assert_allclose(twice.mean, 1 + 2 * theirs.mean(), rtol=1e-14)
    with pytest.raises(ValueError, match="loc has 3 values"):
        Scaled(Gaussian(1.0), (1.0, 2.0, 3.0), 1.0)(outputs)


@each_case
def test_samples_have_the_moments_and_the_cdf_of_their_distribution(likelihood: Likelihood, output: Any, target: Any) -> None:
    if isinstance(likelihood, Categorical):
        pytest.skip("torch's own sampler")
    outputs, y, weights = problem(likelihood, output, target)
    distribution = likelihood(outputs, weights)
    count = 20_000
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        samples = distribution.sample((count,))
    if distribution.variance.isfinite().all() and not isinstance(likelihood, StudentT | Scaled):
        error = (samples.mean(0) - distribution.mean).abs() / (distribution.stddev / math.sqrt(count))
        assert error.max() < 5
    if likelihood.kind in ("continuous", "counts"):
        p = distribution.cdf(y)
        error = ((samples <= y).double().mean(0) - p).abs()
        assert (error < 5 * (p * (1 - p) / count).sqrt() + 5 / count).all()


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


def gradients(likelihood: Likelihood, y: Tensor) -> Any:
    return torch.func.grad(lambda f, w: likelihood(f, w).log_prob(y).sum() + likelihood.log_prob(f, y, w).sum(), argnums=(0, 1))


@each_case
def test_vmapped_gradients_equal_looped_ones(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target, draws=(S,))
    gradient = gradients(likelihood, y)
    stacked = torch.func.vmap(gradient)(outputs, weights)
    for s in range(S):
        one = gradient(outputs[s], {name: weight[s] for name, weight in weights.items()})
        torch.testing.assert_close(one[0], stacked[0][s])
        torch.testing.assert_close(one[1], {name: value[s] for name, value in stacked[1].items()})


@each_case
def test_gradients_against_finite_differences(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target)
    names = list(weights)

    def density(f: Tensor, *own: Tensor) -> Tensor:
        return likelihood.log_prob(f, y, dict(zip(names, own)))

    inputs = [v.clone().requires_grad_() for v in (outputs, *weights.values())]
    assert torch.autograd.gradcheck(density, inputs)


@pytest.mark.parametrize("case", [0, 3, 4, 9, 10, 12, 13, 15])  # one of each class
def test_one_graph_without_breaks(case: int) -> None:
    """The log probability is traced whole; the eager backend runs what was traced."""
    likelihood, output, target = CASES[case]
    outputs, y, weights = problem(likelihood, output, target)
    torch._dynamo.reset()
    compiled = torch.compile(lambda f, w: likelihood(f, w).log_prob(y), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(outputs, weights), likelihood.log_prob(outputs, y, weights))


@pytest.mark.slow
@each_case
def test_stacked_gradients_are_one_graph(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target, draws=(S,))
    step = torch.func.vmap(gradients(likelihood, y))
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(outputs, weights), step(outputs, weights))


@each_case
def test_no_value_is_read_back_to_the_host(likelihood: Likelihood, output: Any, target: Any) -> None:
    """Tensors on the meta device have no values: looking at one raises."""
    outputs, y, weights = problem(likelihood, output, target)
    meta = {name: weight.to("meta") for name, weight in weights.items()}
    assert likelihood.log_prob(outputs.to("meta"), y.to("meta"), meta).shape == y.shape
    assert likelihood(outputs.to("meta"), meta).log_prob(y.to("meta")).shape == y.shape


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@each_case
def test_densities_can_be_captured_in_a_cuda_graph(likelihood: Likelihood, output: Any, target: Any) -> None:
    outputs, y, weights = problem(likelihood, output, target)
    f, t, w = outputs.cuda(), y.cuda(), {name: weight.cuda() for name, weight in weights.items()}
    likelihood.log_prob(f, t, w)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = likelihood.log_prob(f, t, w)
    graph.replay()
    torch.testing.assert_close(captured.cpu(), likelihood.log_prob(outputs, y, weights))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def test_a_target_that_would_broadcast_is_refused_with_the_fix() -> None:
    for likelihood in (Gaussian(), StudentT(), Bernoulli(), Poisson()):
        with pytest.raises(ValueError, match=r"\[5\].*\[5, 1\].*y\.unsqueeze\(-1\)"):
            likelihood.check((5, 1), torch.ones(5))
        with pytest.raises(ValueError, match=r"y\.squeeze\(-1\)"):
            likelihood.check((5,), torch.ones(5, 1))
        with pytest.raises(ValueError, match=r"y\.unsqueeze\(-1\)"):
            likelihood.log_prob(torch.zeros(5, 1), torch.ones(5), {LOG_SCALE: torch.zeros(())})
    with pytest.raises(ValueError, match=r"y\.unsqueeze\(-1\)"):
        HeteroscedasticGaussian().check((5, 2), torch.ones(5))
    with pytest.raises(ValueError, match=r"y\.unsqueeze\(-1\)"):
        Scaled(Gaussian(), 0.0, 1.0).check((5, 1), torch.ones(5))


F32, I64 = torch.float32, torch.int64
REFUSED: list[tuple[Likelihood, tuple[int, ...], Tensor, type[Exception], str]] = [
    (Gaussian(), (5, 2), torch.zeros(4, 2), ValueError, "5 inputs and 4 targets"),
    (Gaussian(), (5, 2), torch.zeros(5, 3), ValueError, r"\[5, 3\].*\[5, 2\]"),
    (Gaussian(), (5,), torch.zeros(5, dtype=I64), TypeError, r"torch\.int64.*targets\.float\(\)"),
    (StudentT(), (5,), torch.zeros(5, dtype=torch.bool), TypeError, r"targets\.float\(\)"),
    (HeteroscedasticGaussian(), (5, 2), torch.zeros(5, 1, dtype=I64), TypeError, r"targets\.float\(\)"),
    (HeteroscedasticGaussian(), (5, 3), torch.zeros(5, 1), ValueError, r"\[N, 2K\].*\[5, 3\]"),
    (HeteroscedasticGaussian(), (5,), torch.zeros(5), ValueError, r"\[N, 2K\]"),
    (Gaussian(), (3,), torch.tensor([0.0, math.nan, 1.0]), ValueError, r"finite, got nan at index \[1\].*mask="),
    (Gaussian(), (2,), torch.tensor([math.inf, 0.0]), ValueError, "finite, got inf"),
    (Scaled(Gaussian(), 0.0, 1.0), (2,), torch.tensor([math.inf, 0.0]), ValueError, "finite"),
    (Scaled(Gaussian(), 0.0, 1.0), (2,), torch.tensor([1, 0]), TypeError, r"targets\.float\(\)"),
    (Gaussian(), (2,), torch.zeros(2, dtype=torch.complex64), TypeError, "complex"),
    (Categorical(), (3, 4), torch.tensor([0, 4, 1]), ValueError, r"0\.\.3.*4 outputs, got 4 at index \[1\]"),
    (Categorical(), (3, 4), torch.tensor([0, 1, -1]), ValueError, r"got -1 at index \[2\]"),
    (Categorical(), (3, 4), torch.zeros(3), TypeError, r"targets\.long\(\).*likelihoods\.Gaussian\(\)"),
    (Categorical(), (3, 4), torch.zeros(3, dtype=torch.bool), TypeError, r"likelihoods\.Bernoulli\(\)"),
    (Categorical(), (3, 4), torch.zeros(3, 4, dtype=I64), ValueError, r"y\.argmax\(-1\)"),
    (Categorical(), (3, 4), torch.zeros(3, 1, dtype=I64), ValueError, r"y\.squeeze\(-1\)"),
    (Categorical(), (3, 1), torch.zeros(3, dtype=I64), ValueError, r"likelihoods\.Bernoulli\(\)"),
    (Categorical(), (3,), torch.zeros(3, dtype=I64), ValueError, r"\[N, classes\]"),
    (Categorical(), (3, 4, 8, 9), torch.zeros(3, 8, 9, dtype=I64), ValueError, r"movedim\(1, -1\)"),
    (Bernoulli(), (3,), torch.tensor([0.0, 1.0, 0.5]), ValueError, r"0 or 1, got 0\.5 at index \[2\]"),
    (Bernoulli(), (3,), torch.tensor([0, 1, 2]), ValueError, "Categorical"),
    (Poisson(), (2,), torch.tensor([1, -3]), ValueError, "counts.*got -3"),
    (Poisson(), (2,), torch.tensor([1.0, 2.5]), ValueError, r"counts.*got 2\.5"),
    (NegativeBinomial(), (2,), torch.tensor([-1.0, 2.0]), ValueError, "counts"),
]


@pytest.mark.parametrize(("likelihood", "shape", "targets", "error", "message"), REFUSED)
def test_bad_targets_are_refused_by_name(likelihood: Any, shape: Any, targets: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        likelihood.check(shape, targets)


def test_good_targets_come_back_in_their_type() -> None:
    assert Categorical().check((3, 4), torch.tensor([0, 3, 1], dtype=torch.uint8)).dtype == torch.int64
    for dtype in (torch.bool, torch.int32, torch.float32):
        assert Bernoulli().check((2,), torch.tensor([0, 1], dtype=dtype)).dtype == torch.float32
    assert Poisson().check((2,), torch.tensor([3, 0])).dtype == torch.float32
    assert Gaussian().check((2,), torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
    assert HeteroscedasticGaussian().check((2, 6), torch.zeros(2, 3)).shape == (2, 3)


def test_masked_targets_are_not_looked_at_and_come_back_harmless() -> None:
    mask = torch.tensor([True, False, True])
    bad = {
        Gaussian(): torch.tensor([1.0, math.nan, 2.0]),
        Bernoulli(): torch.tensor([1.0, -7.0, 0.0]),
        Poisson(): torch.tensor([1.0, -1.5, 4.0]),
    }
    for likelihood, targets in bad.items():
        assert torch.equal(likelihood.check((3,), targets, mask=mask), torch.where(mask, targets, 0.0))
    assert Categorical().check((3, 2), torch.tensor([1, -100, 0]), mask=mask).tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="finite"):
        Gaussian().check((3,), torch.tensor([math.nan, math.nan, 2.0]), mask=mask)
    for wrong in (torch.ones(2, dtype=torch.bool), torch.ones(3)):
        with pytest.raises(ValueError, match="mask must be boolean"):
            Gaussian().check((3,), torch.zeros(3), mask=wrong)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Gaussian(0.0), ValueError, r"scale must be positive and finite, got 0\.0"),
        (lambda: Gaussian(-1), ValueError, "scale"),
        (lambda: Gaussian(math.nan), ValueError, "scale"),
        (lambda: Gaussian(math.inf), ValueError, "scale"),
        (lambda: Gaussian(True), ValueError, "scale"),
        (lambda: Gaussian((1.0, 0.0)), ValueError, "scale"),
        (lambda: Gaussian(()), ValueError, "scale"),
        (lambda: Gaussian(None), TypeError, "scale must be a number"),
        (lambda: Gaussian([[1.0]]), TypeError, "scale must be a number"),
        (lambda: Gaussian("learnt"), ValueError, "'learned' or 'per-output', got 'learnt'"),
        (lambda: Gaussian(initial=0.0), ValueError, "initial must be positive"),
        (lambda: Gaussian(1.0, initial=2.0), ValueError, r"initial=2\.0 starts a learned scale"),
        (lambda: StudentT(df=0.0), ValueError, "df must be positive"),
        (lambda: StudentT(df=math.nan), ValueError, "df"),
        (lambda: StudentT(df=(1.0, 2.0)), ValueError, "df must be one number"),
        (lambda: StudentT(scale=-1.0), ValueError, "scale"),
        (lambda: HeteroscedasticGaussian(minimum=0.0), ValueError, "minimum"),
        (lambda: NegativeBinomial(0.0), ValueError, "dispersion"),
        (lambda: NegativeBinomial((1.0, 2.0)), ValueError, "dispersion must be one number"),
        (lambda: NegativeBinomial("per-output"), ValueError, "'learned', got 'per-output'"),
        (lambda: Scaled(Gaussian(), 0.0, 0.0), ValueError, "scale must be finite and nonzero"),
        (lambda: Scaled(Gaussian(), math.nan, 1.0), ValueError, "loc must be finite"),
        (lambda: Scaled(Poisson(), 0.0, 1.0), TypeError, "continuous"),
        (lambda: Scaled(Categorical(), 0.0, 1.0), TypeError, "continuous"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_settings_become_plain_numbers_and_survive_the_file() -> None:
    assert Gaussian(torch.tensor([1.0, 2.0])) == Gaussian(np.array([1.0, 2.0])) == Gaussian([1, 2])
    assert Gaussian(torch.tensor(2)).scale == 2.0
    for likelihood, _, _ in CASES:
        assert decode(encode(likelihood)) == likelihood
        hash(likelihood)
    assert encode(Gaussian())["type"] == "likelihoods.Gaussian"


def test_infer() -> None:
    assert likelihoods.infer(torch.tensor([1, 2])) == Categorical()
    assert likelihoods.infer(torch.tensor([True])) == Bernoulli()
    assert likelihoods.infer(torch.tensor([0.5], dtype=torch.float64)) == Gaussian("learned")


def test_distributions_expand() -> None:
    outputs = torch.randn(K, generator=torch.Generator().manual_seed(0))
    for likelihood in (StudentT(scale=1.0), Poisson(), NegativeBinomial(2.0), Scaled(Gaussian(1.0), 1.0, 2.0)):
        one = likelihood(outputs)
        many = one.expand((5, K))
        assert type(many) is type(one)
        assert many.batch_shape == (5, K)
        torch.testing.assert_close(many.log_prob(torch.ones(K))[3], one.log_prob(torch.ones(K)))
    assert isinstance(StudentT(scale=1.0)(outputs), distributions.StudentT)


def test_a_fit_by_gradient_finds_the_noise() -> None:
    """The maximum of the likelihood over the learned scale is the root mean square of the residuals."""
    generator = torch.Generator().manual_seed(0)
    y = 0.3 * torch.randn(200, 2, generator=generator) * torch.tensor([1.0, 3.0])
    log_scale = nn.Parameter(torch.zeros(2))
    optimiser = torch.optim.LBFGS([log_scale], max_iter=100)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -Gaussian("per-output").log_prob(torch.zeros(200, 2), y, {LOG_SCALE: log_scale}).sum()
        value.backward()
        return value

    optimiser.step(loss)
    torch.testing.assert_close(log_scale.detach().exp(), y.square().mean(0).sqrt(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Ignored classes


@pytest.mark.parametrize("shape", [(C,), (3, C)])
def test_ignored_classes_have_no_density_wherever_they_are_asked_for(shape: tuple[int, ...]) -> None:
    law = Categorical(ignore_index=-100)
    outputs = torch.randn(N, *shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(C, (N, *shape[:-1]))
    left_out = torch.arange(N) % 2 == 0
    marked = torch.where(left_out.view(-1, *[1] * (y.ndim - 1)), -100, y)
    each = law.log_prob(outputs, marked)
    assert bool((each[left_out] == 0).all())
    torch.testing.assert_close(each[~left_out], Categorical().log_prob(outputs, y)[~left_out])
    torch.testing.assert_close(law.total(outputs, marked), each.sum())
    (slope,) = torch.autograd.grad(each.sum(), outputs)
    assert bool((slope[left_out] == 0).all())
    assert bool((slope[~left_out] != 0).all())
    draws = torch.stack([outputs, 2 * outputs])  # draws in front
    torch.testing.assert_close(law.log_prob(draws, marked)[0], each)
    assert int(law.check(outputs.shape, marked).min()) == 0
    assert torch.equal(law.observed(marked, marked != 2), (marked != -100) & (marked != 2))


def test_ignore_index_is_stored_and_checked() -> None:
    law = Categorical(ignore_index=-100)
    assert decode(encode(law)) == law
    assert decode({"type": "likelihoods.Categorical"}) == Categorical()  # as it was stored before
    with pytest.raises(TypeError, match="ignore_index must be a whole number"):
        Categorical(ignore_index=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ignore_index=-100"):
        Categorical().check((2, C), torch.tensor([-100, 1]))
    with pytest.raises(ValueError, match=r"class labels must lie in 0\.\.3"):
        law.check((2, C), torch.tensor([-1, 1]))
