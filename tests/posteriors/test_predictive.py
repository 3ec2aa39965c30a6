"""The predictive mixture: closed forms, laws of total variance and entropy, quantiles, samples, and bounded memory."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import plausible as pl
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
from plausible.posteriors.predictive import Draws, Predictive

LOG_SCALE, LOG_DISPERSION = "likelihood.log_scale", "likelihood.log_dispersion"
S, N, K = 7, 5, 2

# likelihood, shape of the outputs for one input
CASES: list[tuple[Likelihood, tuple[int, ...]]] = [
    (Categorical(), (4,)),
    (Categorical(), (3, 2, 4)),
    (Bernoulli(), ()),
    (Bernoulli(), (K,)),
    (Gaussian(), (K,)),
    (Gaussian(), ()),
    (Gaussian("per-output"), (K,)),
    (Gaussian((0.5, 2.0)), (K,)),
    (HeteroscedasticGaussian(), (2 * K,)),
    (HeteroscedasticStudentT(), (2 * K,)),
    (StudentT(df=4.0), (K,)),
    (StudentT(df="learned"), (K,)),
    (Scaled(StudentT(df=5.0), (1.0, -2.0), (3.0, -0.5)), (K,)),
    (Poisson(), (K,)),
    (NegativeBinomial(), (K,)),
]
each_case = pytest.mark.parametrize(("likelihood", "output"), CASES, ids=lambda v: str(v))
ORDERED = [c for c in CASES if c[0].kind in ("continuous", "counts")]
each_ordered_case = pytest.mark.parametrize(("likelihood", "output"), ORDERED, ids=lambda v: str(v))


def draws(likelihood: Likelihood, output: tuple[int, ...], seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(S, N, *output, generator=generator, dtype=torch.float64)
    initial = likelihood.initial_weights(output, dtype=torch.float64, device="cpu")
    weights = {
        name: 0.3 * torch.randn((S, *start.shape), generator=generator, dtype=torch.float64) for name, start in initial.items()
    }
    return outputs, weights


def targets_for(likelihood: Likelihood, outputs: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return likelihood(outputs, weights).sample()[0]


class Recorder:
    """A source that remembers which slices it was asked for."""

    def __init__(self, outputs: Tensor, weights: Mapping[str, Tensor]) -> None:
        self.outputs, self.weights = outputs, weights
        self.asked: list[slice] = []

    def __call__(self, rows: slice) -> Draws:
        self.asked.append(rows)
        return Draws(self.outputs[:, rows], self.weights)

    def predictive(self, likelihood: Likelihood, **settings: Any) -> Predictive:
        count, inputs, *output = self.outputs.shape
        return Predictive(likelihood, self, num_inputs=inputs, num_draws=count, output_shape=tuple(output), **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms


def test_mixture_of_gaussians_in_closed_form() -> None:
    outputs, weights = draws(Gaussian(), (1,))
    predictive = Predictive.from_functions(outputs, Gaussian(), weights)
    components = stats.norm(outputs.numpy(), weights[LOG_SCALE].exp().numpy()[:, None, None])
    y = torch.linspace(-2, 2, N, dtype=torch.float64)[:, None]
    np.testing.assert_allclose(predictive.log_prob(y), np.log(components.pdf(y.numpy()).mean(0))[:, 0], rtol=1e-12)
    np.testing.assert_allclose(predictive.cdf(y), components.cdf(y.numpy()).mean(0), rtol=1e-12)
    np.testing.assert_allclose(predictive.mean, outputs.mean(0), rtol=1e-12)
    for q in (1e-9, 0.025, 0.5, 0.9, 1 - 1e-9):
        at = components.cdf(predictive.quantile(q).numpy()).mean(0)
        np.testing.assert_allclose(at, q, rtol=1e-6, atol=0)
        np.testing.assert_allclose(1 - at, 1 - q, rtol=1e-6, atol=0)


def test_quantiles_are_those_of_the_mixture_and_not_of_a_fitted_gaussian() -> None:
    """Two narrow peaks at ±10: the 75 % quantile is the median of the right one, far from mean + 0.67 std."""
    predictive = Predictive.from_functions(torch.tensor([[[-10.0]], [[10.0]]], dtype=torch.float64), Gaussian(0.1))
    assert predictive.quantile(0.75).item() == pytest.approx(10.0, abs=1e-9)
    low, high = predictive.interval(0.5)
    assert low.item() == pytest.approx(-10.0, abs=1e-9)
    assert high.item() == pytest.approx(10.0, abs=1e-9)
    assert -9 < predictive.quantile(0.5).item() < 9  # anywhere in the gap is a median
    assert predictive.std.item() == pytest.approx(math.hypot(10, 0.1), rel=1e-12)


@each_ordered_case
def test_cdf_at_the_quantile_is_q(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, weights = draws(likelihood, output)
    predictive = Predictive.from_functions(outputs, likelihood, weights)
    levels = [1e-6, 0.05, 0.3, 0.5, 0.95, 1 - 1e-6]
    values = predictive.quantile(levels)
    assert values.shape[0] == len(levels)
    assert (values.diff(dim=0) >= 0).all()
    for q, value in zip(levels, values):
        torch.testing.assert_close(predictive.quantile(q), value, rtol=0, atol=0)
        below = likelihood(outputs, weights).cdf(value).mean(0)
        if likelihood.kind == "continuous":
            torch.testing.assert_close(below, torch.full_like(below, q), rtol=0, atol=1e-10)
        else:
            assert torch.equal(value, value.round())
            assert (below >= q).all()
            assert (likelihood(outputs, weights).cdf(value - 1).mean(0) < q).all()


def test_count_quantiles_against_scipy() -> None:
    rates = torch.tensor([0.01, 0.7, 5.0, 300.0, 1e5], dtype=torch.float64)
    predictive = Predictive.from_functions(rates.log()[None], Poisson())
    for q in (0.001, 0.2, 0.5, 0.99):
        np.testing.assert_array_equal(predictive.quantile(q), stats.poisson(rates.numpy()).ppf(q))


@pytest.mark.parametrize("df", [0.5, 1.0, 2.0, 3.0, 100.0])
def test_heavy_tailed_quantiles_against_scipy(df: float) -> None:
    likelihood = StudentT(df=df, scale=2.0)
    predictive = Predictive.from_functions(torch.tensor([[[3.0]]], dtype=torch.float64), likelihood)
    for q in (1e-4, 0.1, 0.5, 0.999):
        assert predictive.quantile(q).item() == pytest.approx(stats.t(df, 3.0, 2.0).ppf(q), rel=1e-8)
    assert predictive.variance.item() == pytest.approx(stats.t(df, 3.0, 2.0).var(), rel=1e-9) if df > 2 else True
    if 1 < df <= 2:
        assert predictive.variance.item() == math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Laws


@each_case
def test_total_variance_is_the_sum_of_its_parts(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, weights = draws(likelihood, output)
    predictive = Predictive.from_functions(outputs, likelihood, weights)
    assert torch.equal(predictive.variance, predictive.aleatoric + predictive.epistemic)
    assert torch.equal(predictive.std, predictive.variance.sqrt())
    if likelihood.kind in ("classes", "binary"):
        torch.testing.assert_close(predictive.variance, predictive.probs * (1 - predictive.probs))
    alone = Predictive.from_functions(outputs[:1], likelihood, {name: w[:1] for name, w in weights.items()})
    assert (alone.epistemic == 0).all()  # one draw does not disagree with itself
    same = Predictive.from_functions(outputs[:1].expand_as(outputs), Gaussian(1.0)) if output == (K,) else None
    assert same is None or (same.epistemic < 1e-30).all()


@each_case
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_have_the_moments_of_the_mixture(likelihood: Likelihood, output: tuple[int, ...], seed: int) -> None:
    count = 20_000
    outputs, weights = draws(likelihood, output, seed)
    predictive = Predictive.from_functions(outputs, likelihood, weights)
    samples = predictive.sample(count, seed=seed)
    if likelihood.kind == "classes":
        samples = torch.nn.functional.one_hot(samples, 4)
    samples = samples.double()
    assert samples.shape == (count, *predictive.mean.shape)
    error = (samples.mean(0) - predictive.mean).abs() / (predictive.std / math.sqrt(count))
    assert error.max() < 5
    squares = (samples - predictive.mean).square()
    if not isinstance(likelihood, StudentT | Scaled):  # their fourth moment is infinite, or nearly
        error = (squares.mean(0) - predictive.variance).abs() / (squares.std(0) / math.sqrt(count))
        assert error.max() < 5


def test_a_sample_is_one_coherent_draw() -> None:
    """Draws far apart and nearly no noise: inputs and outputs of a sample share one draw, each as often."""
    outputs = 100.0 * torch.arange(4.0)[:, None, None].expand(4, N, K)
    samples = Predictive.from_functions(outputs, Gaussian(1e-3)).sample(4000, seed=3)
    component = (samples / 100).round()
    assert torch.equal(component, component[:, :1, :1].expand_as(component))
    share = (component[:, 0, 0, None] == torch.arange(4.0)).double().mean(0)
    assert ((share - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / 4000)).all()
    noise = samples - outputs[component[:, 0, 0].long()]
    assert (noise.std(0) > 0.9e-3).all()
    correlation = torch.corrcoef(torch.stack([component[:, 0, 0], noise[:, 0, 0]]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(4000)  # which draw, and what noise, are independent


def test_samples_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    outputs, weights = draws(StudentT(), (K,))
    predictive = Predictive.from_functions(outputs, StudentT(), weights)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = predictive.sample(10, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(predictive.sample(10, seed=1), first)
    assert not torch.equal(predictive.sample(10, seed=2), first)


@each_case
def test_jensen(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    """log E p ≥ E log p, and the mixture explains each input at most S times worse than its best draw."""
    outputs, weights = draws(likelihood, output)
    y = targets_for(likelihood, outputs, weights)
    mixture = Predictive.from_functions(outputs, likelihood, weights).log_prob(y)
    assert mixture.shape == (N,)
    each = likelihood(outputs, weights).log_prob(y).reshape(S, N, -1).sum(-1)
    assert (mixture > each.mean(0)).all()
    assert (mixture <= each.amax(0)).all()
    assert (mixture >= each.amax(0) - math.log(S) - 1e-12).all()


def test_log_prob_sums_outputs_inside_a_draw() -> None:
    """Draws at (0, 0) and (9, 9): the target (0, 9) is explained by neither, though each output is by one."""
    outputs = torch.tensor([[[0.0, 0.0]], [[9.0, 9.0]]])
    predictive = Predictive.from_functions(outputs, Gaussian(1.0))
    expected = -math.log(2 * math.pi) - 81 / 2
    assert predictive.log_prob(torch.tensor([[0.0, 9.0]])).item() == pytest.approx(expected, rel=1e-6)


def test_log_prob_is_stable_far_out() -> None:
    outputs = torch.tensor([[[0.0]], [[1.0]]])
    value = Predictive.from_functions(outputs, Gaussian(1e-3)).log_prob(torch.tensor([[100.0]])).item()
    exact = -0.5 * (99 / 1e-3) ** 2 - math.log(1e-3) - 0.5 * math.log(2 * math.pi) - math.log(2)
    assert value == pytest.approx(exact, rel=1e-6)


def test_entropies_of_classes() -> None:
    """Certain draws that disagree have no aleatoric part; equal uncertain draws no epistemic one. 0·log 0 is 0."""
    certain = torch.full((2, 1, 3), -math.inf)
    certain[0, :, 0] = certain[1, :, 1] = 0.0
    predictive = Predictive.from_functions(certain, Categorical())
    torch.testing.assert_close(predictive.probs, torch.tensor([[0.5, 0.5, 0.0]]))
    assert predictive.entropy.item() == pytest.approx(math.log(2))
    assert predictive.expected_entropy.item() == 0
    assert predictive.mutual_information.item() == pytest.approx(math.log(2))
    uncertain = Predictive.from_functions(torch.zeros(4, 2, 3), Categorical())
    torch.testing.assert_close(uncertain.entropy, torch.full((2,), math.log(3)))
    assert (uncertain.mutual_information == 0).all()
    binary = Predictive.from_functions(torch.tensor([[-1000.0, 0.0], [1000.0, 0.0]]), Bernoulli())
    torch.testing.assert_close(binary.entropy, torch.full((2,), math.log(2)))
    torch.testing.assert_close(binary.mutual_information, torch.tensor([math.log(2), 0.0]))


@pytest.mark.parametrize(("likelihood", "output"), [c for c in CASES if c[0].kind in ("classes", "binary")])
def test_entropies_against_scipy(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, _ = draws(likelihood, output)
    predictive = Predictive.from_functions(outputs, likelihood)
    p = outputs.softmax(-1) if likelihood.kind == "classes" else torch.stack([outputs.sigmoid(), (-outputs).sigmoid()], -1)
    np.testing.assert_allclose(predictive.entropy, stats.entropy(p.mean(0).numpy(), axis=-1), rtol=1e-12)
    np.testing.assert_allclose(predictive.expected_entropy, stats.entropy(p.numpy(), axis=-1).mean(0), rtol=1e-12)
    assert predictive.entropy.shape == p.shape[1:-1]
    assert (predictive.mutual_information >= 0).all()
    assert torch.equal(predictive.mean, predictive.probs)


def test_learned_noise_stays_with_its_draw() -> None:
    """Three draws, inputs and outputs: a scale that slid to another axis would change each of these numbers."""
    scales = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    outputs = torch.zeros(3, 3, 3, dtype=torch.float64)
    predictive = Predictive.from_functions(outputs, Gaussian(), {LOG_SCALE: scales.log()})
    torch.testing.assert_close(predictive.aleatoric, scales.square().mean().expand(3, 3))
    expected = stats.norm(0, scales.numpy()).logpdf(2.0) * 3
    np.testing.assert_allclose(predictive.log_prob(torch.full((3, 3), 2.0)), np.log(np.exp(expected).mean()), rtol=1e-10)
    per_output = torch.stack([scales, 2 * scales, 3 * scales])  # [draw, output]
    predictive = Predictive.from_functions(outputs, Gaussian("per-output"), {LOG_SCALE: per_output.log()})
    torch.testing.assert_close(predictive.aleatoric, per_output.square().mean(0).expand(3, 3))


@each_ordered_case
def test_rescaled_speaks_in_other_units(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, weights = draws(likelihood, output)
    predictive = Predictive.from_functions(outputs, likelihood, weights)
    if likelihood.kind == "counts":
        with pytest.raises(TypeError, match="continuous"):
            predictive.rescaled(1.0, 2.0)
        return
    rescaled = predictive.rescaled(5.0, 2.0)
    torch.testing.assert_close(rescaled.mean, 5 + 2 * predictive.mean)
    torch.testing.assert_close(rescaled.epistemic, 4 * predictive.epistemic)
    torch.testing.assert_close(rescaled.aleatoric, 4 * predictive.aleatoric)
    torch.testing.assert_close(rescaled.quantile(0.2), 5 + 2 * predictive.quantile(0.2))
    torch.testing.assert_close(rescaled.sample(4), 5 + 2 * predictive.sample(4))
    y = targets_for(likelihood, outputs, weights)
    size = y[0].numel()
    torch.testing.assert_close(rescaled.log_prob(5 + 2 * y), predictive.log_prob(y) - size * math.log(2))
    if output == (K,):
        loc, scale = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        torch.testing.assert_close(predictive.rescaled(loc, scale).mean, loc + scale * predictive.mean)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks and memory


@each_case
def test_block_by_block_equals_all_at_once(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, weights = draws(likelihood, output)
    whole = Predictive.from_functions(outputs, likelihood, weights)
    source = Recorder(outputs, weights)
    blocks = source.predictive(likelihood, budget_bytes=1)
    names = ["mean", "aleatoric", "epistemic", "variance", "std", "functions"]
    if likelihood.kind in ("classes", "binary"):
        names += ["probs", "entropy", "expected_entropy", "mutual_information"]
    for name in names:
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), rtol=1e-12, atol=1e-14)
    y = targets_for(likelihood, outputs, weights)
    torch.testing.assert_close(blocks.log_prob(y), whole.log_prob(y), rtol=1e-12, atol=1e-14)
    if likelihood.kind in ("continuous", "counts"):
        torch.testing.assert_close(blocks.quantile([0.1, 0.7]), whole.quantile([0.1, 0.7]), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(blocks.cdf(y), whole.cdf(y), rtol=1e-12, atol=1e-14)
    assert blocks.sample(3).shape == whole.sample(3).shape


def test_draws_that_do_not_fit_are_never_held_together() -> None:
    outputs, weights = torch.randn(10, 100, 3, generator=torch.Generator().manual_seed(0)), {}
    source = Recorder(outputs, weights)
    per_input = 10 * 3 * 8
    predictive = source.predictive(Gaussian(1.0), budget_bytes=per_input * 40)  # 100 inputs do not fit
    _ = predictive.mean, predictive.std, predictive.epistemic, predictive.aleatoric
    first_pass = len(source.asked)
    assert all(rows.stop - rows.start <= 10 for rows in source.asked)  # 40 inputs of float64, with copies on the way
    covered = [n for rows in source.asked for n in range(rows.start, rows.stop)]
    assert covered == list(range(100))  # one pass for all summaries, each input once
    predictive.log_prob(torch.zeros(100, 3))
    assert len(source.asked) == 2 * first_pass  # nothing was kept
    assert predictive._whole is None


def test_draws_that_fit_are_computed_once() -> None:
    outputs, _ = torch.randn(10, 100, 3, generator=torch.Generator().manual_seed(0)), {}
    source = Recorder(outputs, {})
    predictive = source.predictive(Gaussian(1.0))
    assert source.asked == []  # nothing before the first question
    _ = predictive.mean, predictive.log_prob(torch.zeros(100, 3)), predictive.sample(5), predictive.interval(0.8)
    _ = predictive.rescaled(0.0, 2.0).mean, predictive.functions
    assert source.asked == [slice(0, 100)]


def test_a_source_of_the_wrong_shape_is_named() -> None:
    for outputs, weights in (
        (torch.zeros(3, 4, 2), {}),
        (torch.zeros(2, 4, 1), {}),
        (torch.zeros(2, 4, 2), {"a": torch.zeros(3)}),
    ):
        predictive = Predictive(
            Gaussian(1.0), lambda rows, o=outputs, w=weights: Draws(o, w), num_inputs=4, num_draws=2, output_shape=(2,)
        )
        with pytest.raises(ValueError, match=r"expected|leading axis"):
            _ = predictive.mean


# ---------------------------------------------------------------------------------------------------------------------
# Types and errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_come_in_the_type_of_the_outputs(dtype: torch.dtype) -> None:
    expected = torch.float32 if dtype == torch.bfloat16 else dtype
    predictive = Predictive.from_functions(torch.zeros(3, 4, 2, dtype=dtype), Gaussian(1.0))
    for value in (predictive.mean, predictive.std, predictive.quantile(0.3), predictive.sample(2)):
        assert value.dtype == expected
    assert predictive.log_prob(np.zeros((4, 2))).dtype == expected
    classes = Predictive.from_functions(torch.zeros(3, 4, 2, dtype=dtype), Categorical())
    assert classes.sample(2).dtype == torch.int64
    assert classes.log_prob(np.array([0, 1, 1, 0])).dtype == expected


def test_questions_without_an_answer_say_what_to_ask() -> None:
    continuous = Predictive.from_functions(torch.zeros(3, 4, 2), Gaussian(1.0))
    for name in ("probs", "entropy", "expected_entropy", "mutual_information"):
        with pytest.raises(TypeError, match=f"{name} does not exist for the continuous targets.*use "):
            getattr(continuous, name)
    for likelihood in (Categorical(), Bernoulli()):
        predictive = Predictive.from_functions(torch.zeros(3, 4, 2), likelihood)
        for ask in (lambda p: p.quantile(0.5), lambda p: p.interval(0.5), lambda p: p.cdf(torch.zeros(4))):
            with pytest.raises(TypeError, match="no order; use probs"):
                ask(predictive)
        with pytest.raises(TypeError, match="continuous"):
            predictive.rescaled(0.0, 1.0)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.5, math.nan, [0.5, 1.0], [[0.5]]])
def test_bad_quantiles_are_refused(q: Any) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        Predictive.from_functions(torch.zeros(3, 4, 2), Gaussian(1.0)).quantile(q)


def test_other_bad_arguments_are_refused() -> None:
    predictive = Predictive.from_functions(torch.zeros(3, 4, 1), Gaussian(1.0))
    for level in (0.0, 1.0, 90, -0.5, math.nan):
        with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
            predictive.interval(level)
    for n in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="n must be a positive integer"):
            predictive.sample(n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"y\.unsqueeze\(-1\)"):
        predictive.log_prob(torch.zeros(4))
    with pytest.raises(ValueError, match="4 inputs and 5 targets"):
        predictive.log_prob(torch.zeros(5, 1))
    with pytest.raises(ValueError, match="finite"):
        predictive.log_prob(torch.full((4, 1), math.nan))
    for outputs in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int64), [[0.0]]):
        with pytest.raises(ValueError, match="floating-point tensor of shape"):
            Predictive.from_functions(outputs, Gaussian(1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_draws"):
        Predictive.from_functions(torch.zeros(0, 4), Gaussian(1.0))
    with pytest.raises(ValueError, match=r"likelihood\.log_scale.*leading axis of 3 draws"):
        Predictive.from_functions(torch.zeros(3, 4, 1), Gaussian(), {LOG_SCALE: torch.zeros(())})
    with pytest.raises(ValueError, match="loc has 3 values"):
        _ = predictive.rescaled([1.0, 2.0, 3.0], 1.0).mean


def test_quantiles_of_several_levels_lead_and_counts_keep_large_numbers() -> None:
    predictive = Predictive.from_functions(torch.zeros(3, 4, 2), Gaussian(1.0))
    assert predictive.quantile([0.1, 0.2, 0.3]).shape == (3, 4, 2)
    assert torch.equal(predictive.quantile(torch.tensor([0.5])), predictive.quantile(0.5)[None])
    big = 2**30 + 1  # not a float32
    counts = Predictive.from_functions(torch.full((1, 1), math.log(big), dtype=torch.float64), Poisson())
    exact = stats.poisson(math.exp(math.log(big))).logpmf(big)
    assert counts.log_prob(torch.tensor([big])).item() == pytest.approx(exact, abs=1e-5)


def test_length_repr_and_no_gradients() -> None:
    outputs = torch.zeros(3, 4, 2, requires_grad=True)
    predictive = Predictive.from_functions(outputs, Gaussian(1.0))
    assert len(predictive) == 4
    assert repr(predictive) == "Predictive(Gaussian(scale=1.0, initial=1.0), inputs=4, draws=3, outputs=[2])"
    assert not predictive.mean.requires_grad
    assert not predictive.log_prob(torch.zeros(4, 2)).requires_grad


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@each_case
def test_on_a_gpu_everything_stays_there_and_agrees(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    outputs, weights = draws(likelihood, output)
    here = Predictive.from_functions(outputs, likelihood, weights)
    there = Predictive.from_functions(outputs.cuda(), likelihood, {name: w.cuda() for name, w in weights.items()})
    y = targets_for(likelihood, outputs, weights)
    state = torch.cuda.get_rng_state()
    pairs = [(here.mean, there.mean), (here.std, there.std), (here.log_prob(y), there.log_prob(y))]
    if likelihood.kind in ("continuous", "counts"):
        pairs.append((here.quantile([0.1, 0.6]), there.quantile([0.1, 0.6])))
    for expected, value in pairs:
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-9, atol=1e-12)
    assert there.sample(3, seed=1).is_cuda
    assert torch.equal(there.sample(3, seed=1), there.sample(3, seed=1))
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_read_only_targets_are_fine() -> None:
    y = np.zeros((3, 1), dtype=np.float32)
    y.setflags(write=False)
    predictive = Predictive.from_functions(torch.zeros(2, 3, 1), Gaussian(scale=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predictive.log_prob(y).shape == (3,)


@pytest.mark.parametrize("offset", [0.0, 1e5, 1e9])
def test_an_offset_of_any_size_leaves_the_spread_alone(offset: float) -> None:
    plain = Predictive.from_functions(torch.randn(5, 7, 1, generator=torch.Generator().manual_seed(0)), Gaussian(scale=0.3))
    moved = plain.rescaled(offset, 2.0)
    assert moved.mean.dtype == torch.float64
    low, high = plain.interval(0.9)
    lower, upper = moved.interval(0.9)
    torch.testing.assert_close(upper - lower, 2 * (high - low).double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((moved.mean - offset) / 2, plain.mean.double(), rtol=1e-5, atol=1e-6)
    y = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        moved.log_prob(offset + 2 * y) + math.log(2), plain.log_prob(y.float()).double(), rtol=1e-4, atol=1e-5
    )


def test_predictions_are_of_what_was_given_whatever_becomes_of_the_buffer() -> None:
    x = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
    fixed = pl.likelihoods.Gaussian(scale=0.5)
    for method in (pl.MAP(epochs=2), pl.Laplace(mode=pl.MAP(epochs=2))):
        posterior = pl.fit(nn.Linear(2, 1), (x.copy(), x[:, :1].copy()), method, likelihood=fixed, progress=False)
        buffers: list[Any] = [x.copy(), torch.from_numpy(x.copy())]
        truth = posterior.predict(x).mean
        for buffer in buffers:
            pred = posterior.predict(buffer)
            buffer[:] = 7.0  # the next batch
            assert torch.equal(pred.mean, truth)


@pytest.mark.parametrize("level", ["a", None, [0.5], True, 1.5, float("nan")])
def test_levels_that_mean_nothing_are_named(level) -> None:
    law = pl.Predictive.from_functions(torch.randn(3, 4, 1), pl.likelihoods.Gaussian(scale=1.0))
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
        law.interval(level)
    with pytest.raises(ValueError, match="q must be a number or a list of numbers"):
        law.quantile([] if level == [0.5] else "a" if level is True else level)
