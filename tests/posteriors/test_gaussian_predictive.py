"""The predictive of Gaussian functions: closed forms, quadrature and oracles, and agreement with mixtures over many draws."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

import plausible as pl
from plausible import decisions, metrics
from plausible.blocks.moments import LogVarianceGaussian, Moments
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
from plausible.posteriors.gaussian_integrals import root, scattered
from plausible.posteriors.gaussian_predictive import GaussianPredictive, _bridge, _dirichlet
from plausible.posteriors.predictive import Draws, Predictive

N, K = 4, 2
BATCHES, DRAWS = 20, 500
Z = 6.5  # standard errors from 20 batches: a t₁₉ variable is beyond in 3 of a million cases
LOG_SCALE = "likelihood.log_scale"


class Blunt(Likelihood):
    """One of the user's, with one output a target: double exponential noise."""

    kind = "continuous"

    def __call__(self, outputs: Tensor, weights: Any = None) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(outputs, 0.5, validate_args=False)


class Product(Blunt):
    """One whose targets need two outputs at once."""

    def __call__(self, outputs: Tensor, weights: Any = None) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(outputs[..., 0] * outputs[..., 1], 0.5, validate_args=False)

    def target_shape(self, outputs_shape: Any) -> tuple[int, ...]:
        return tuple(outputs_shape[:-1])


class Sharper(Likelihood):
    """One of classes."""

    kind = "classes"

    def __call__(self, outputs: Tensor, weights: Any = None) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=2 * outputs, validate_args=False)

    def target_shape(self, outputs_shape: Any) -> tuple[int, ...]:
        return tuple(outputs_shape[:-1])

    def log_prob(self, outputs: Tensor, targets: Tensor, weights: Any = None) -> Tensor:
        return Categorical().log_prob(2 * outputs, targets)


# likelihood, shape of the outputs for one input
CASES: list[tuple[Likelihood, tuple[int, ...]]] = [
    (Categorical(), (4,)),
    (Categorical(), (2,)),
    (Categorical(), (2, 3)),
    (Bernoulli(), ()),
    (Bernoulli(), (K,)),
    (Gaussian(), (K,)),
    (Gaussian(0.7), ()),
    (Gaussian("per-output"), (K,)),
    (HeteroscedasticGaussian(), (2,)),
    (HeteroscedasticGaussian(), (2 * K,)),
    (HeteroscedasticStudentT(), (2,)),
    (LogVarianceGaussian(), (2,)),
    (StudentT(df=5.0), (K,)),
    (StudentT(df="learned"), (K,)),
    (Scaled(StudentT(df=5.0), (1.0, -2.0), (3.0, -0.5)), (K,)),
    (Scaled(Gaussian(0.5), 1.0, -3.0), (1,)),
    (Poisson(), (K,)),
    (NegativeBinomial(), ()),
]
each_case = pytest.mark.parametrize(("likelihood", "output"), CASES, ids=lambda v: str(v))
CLASSES = ("classes", "binary")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(likelihood: Likelihood, output: tuple[int, ...], count: int = N) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Means, correlated covariances of unlike sizes, and the likelihood's weights."""
    size, stream = math.prod(output), generator(3)
    mean = torch.randn(count, *output, generator=stream, dtype=torch.float64)
    half = torch.randn(count, size, size + 1, generator=stream, dtype=torch.float64)
    covariance = half @ half.mT * torch.linspace(0.02, 0.6, count, dtype=torch.float64)[:, None, None] / size
    initial = likelihood.initial_weights(output, dtype=torch.float64, device="cpu")
    return mean, covariance, {name: start - 0.4 for name, start in initial.items()}


def targets(likelihood: Likelihood, mean: Tensor, noise: dict[str, Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return likelihood(mean, noise).sample()


def gaussian(mean: float, variance: float, likelihood: Likelihood, **settings: Any) -> GaussianPredictive:
    """One input with one output."""
    values = (torch.tensor([v], dtype=torch.float64) for v in (mean, variance))
    return GaussianPredictive.from_moments(*values, likelihood, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Agreement with the mixture over draws


@pytest.mark.parametrize(
    ("likelihood", "output"), [*CASES, (Blunt(), (K,)), (Product(), (2,)), (Sharper(), (3,))], ids=lambda v: str(v)[:40]
)
@pytest.mark.parametrize("full", [True, False], ids=["covariances", "variances"])
def test_agrees_with_the_mixture_over_many_draws(likelihood: Likelihood, output: tuple[int, ...], full: bool) -> None:
    """Every answer against batches of draws of N(m, V), by the spread between batches; a little for the bias of a batch."""
    mean, covariance, noise = problem(likelihood, output)
    spread = covariance if full else covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
    predictive = GaussianPredictive.from_moments(mean, spread, likelihood, noise)
    y = targets(likelihood, mean, noise)
    half = root(covariance) if full else torch.diag_embed(spread.reshape(N, -1).sqrt())
    seen = torch.rand(y.shape, generator=generator(5)) < 0.6
    quantile = predictive.mean if likelihood.kind in CLASSES else predictive.quantile(0.3)

    def answers(p: Predictive) -> dict[str, Tensor]:
        found = {name: getattr(p, name) for name in ("mean", "aleatoric", "epistemic", "std")}
        found |= {"log_prob": p.log_prob(y), "masked": p._log_density(y, seen)}
        if likelihood.kind in CLASSES:
            names = ("probs", "entropy", "expected_entropy", "mutual_information")
            return found | {name: getattr(p, name) for name in names} | {"log_probs": p._log_probs()}
        return found | {"cdf": p.cdf(y), "at the quantile": p.cdf(quantile)}

    batches = []
    for batch in range(BATCHES):
        z = torch.randn(DRAWS, N, half.shape[-1], generator=generator(100 + batch), dtype=torch.float64)
        f = mean + torch.einsum("npk,snk->snp", half, z).reshape(DRAWS, *mean.shape)
        drawn = Predictive.from_functions(f, likelihood, {n: w.expand(DRAWS, *w.shape) for n, w in noise.items()})
        batches.append(answers(drawn))
    for name, value in answers(predictive).items():
        each = torch.stack([batch[name] for batch in batches])
        expected = each.mean(0)
        if name == "at the quantile" and likelihood.kind == "continuous":
            torch.testing.assert_close(value, torch.full_like(value, 0.3), rtol=0, atol=1e-9)
        assert value.shape == expected.shape
        off = (value - expected).abs() / (each.std(0) / math.sqrt(BATCHES) + 5e-4 * (1 + expected.abs()))
        assert off.max() < Z, f"{name} is off by {off.max():.1f} standard errors"


@each_case
def test_total_variance_and_entropy_are_the_sums_of_their_parts(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    for way in ("integral", "probit", "bridge") if likelihood.kind in CLASSES else ("integral",):
        mean, covariance, noise = problem(likelihood, output)
        predictive = GaussianPredictive.from_moments(mean, covariance, likelihood, noise, way=way)
        assert torch.equal(predictive.variance, predictive.aleatoric + predictive.epistemic)
        assert (predictive.aleatoric > 0).all()
        assert (predictive.epistemic > 0).all()
        if likelihood.kind in CLASSES:
            torch.testing.assert_close(predictive.variance, predictive.probs * (1 - predictive.probs))
            total = predictive.expected_entropy + predictive.mutual_information
            torch.testing.assert_close(predictive.entropy, total)
            assert (predictive.mutual_information > 0).all()


@pytest.mark.parametrize(
    ("likelihood", "y"), [(Bernoulli(), [1.0, 1.0]), (Poisson(), [2.0, 3.0]), (StudentT(4.0, 0.5), [1.0, 1.5])], ids=str
)
def test_targets_of_one_input_are_explained_together(likelihood: Likelihood, y: list[float]) -> None:
    """Two outputs that move together, against a double sum; apart they would give another number."""
    mean, target = torch.tensor([[0.2, 0.4]], dtype=torch.float64), torch.tensor([y], dtype=torch.float64)
    covariance = 2 * torch.tensor([[[1.0, 0.95], [0.95, 1.0]]], dtype=torch.float64)
    z = torch.linspace(-8, 8, 641, dtype=torch.float64)
    grid = torch.cartesian_prod(z, z)
    weight = (-0.5 * grid.square().sum(-1)).softmax(0)
    f = mean + (grid @ torch.linalg.cholesky(covariance[0]).T)[:, None]
    exact = (likelihood.log_prob(f, target).sum((1, 2)).exp() * weight).sum().log().item()
    together = GaussianPredictive.from_moments(mean, covariance, likelihood)
    assert together.log_prob(target).item() == pytest.approx(exact, abs=0.02)
    apart = GaussianPredictive.from_moments(mean, torch.full_like(mean, 2.0), likelihood)
    assert abs(apart.log_prob(target).item() - exact) > 0.1
    first = torch.tensor([[True, False]])
    expected = GaussianPredictive.from_moments(mean[:, 0], covariance[:, 0, 0], likelihood).log_prob(target[:, 0])
    assert together._log_density(target, first).item() == pytest.approx(expected.item(), abs=0.02)


@each_case
def test_block_by_block_equals_all_at_once(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    mean, covariance, noise = problem(likelihood, output, 7)
    whole = GaussianPredictive.from_moments(mean, covariance, likelihood, noise, num_draws=5)
    blocks = GaussianPredictive.from_moments(mean, covariance, likelihood, noise, num_draws=5, budget_bytes=1)
    y = targets(likelihood, mean, noise)
    pairs = [(p.mean, p.aleatoric, p.epistemic, p.log_prob(y), p.functions) for p in (whole, blocks)]
    for one, other in zip(*pairs):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert blocks._kept is None


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and counts


def test_gaussian_noise_is_exact() -> None:
    mean, covariance, _ = problem(Gaussian(), (K,))
    noise = {LOG_SCALE: torch.tensor([-1.0, 0.3], dtype=torch.float64)}
    predictive = GaussianPredictive.from_moments(mean, covariance, Gaussian("per-output"), noise)
    variance = noise[LOG_SCALE].mul(2).exp()
    y = mean + torch.tensor([0.7, -2.0], dtype=torch.float64)
    joint = torch.distributions.MultivariateNormal(mean, covariance + torch.diag(variance))
    torch.testing.assert_close(predictive.log_prob(y), joint.log_prob(y))
    torch.testing.assert_close(predictive.epistemic, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(predictive.aleatoric, variance.expand(N, K))
    alone = stats.norm(mean.numpy(), predictive.std.numpy())
    np.testing.assert_allclose(predictive.cdf(y), alone.cdf(y.numpy()), rtol=1e-12)
    for q in (1e-9, 0.3, 0.99):
        np.testing.assert_allclose(predictive.quantile(q), alone.ppf(q), rtol=1e-10)
    low, high = predictive.interval(0.8)
    torch.testing.assert_close(predictive.cdf(high) - predictive.cdf(low), torch.full_like(low, 0.8))
    seen = torch.tensor([[True, False]] * N)
    np.testing.assert_allclose(predictive._log_density(y, seen), alone.logpdf(y.numpy())[:, 0], rtol=1e-12)
    turned = predictive.rescaled((5.0, -1.0), (2.0, -3.0))
    there = torch.tensor([5.0, -1.0]) + torch.tensor([2.0, -3.0]) * y
    torch.testing.assert_close(turned.log_prob(there), joint.log_prob(y) - math.log(6))
    torch.testing.assert_close(turned.cdf(there)[:, 1], 1 - predictive.cdf(y)[:, 1])
    torch.testing.assert_close(turned.quantile(0.2)[:, 1], -1 - 3 * predictive.quantile(0.8)[:, 1])


# ---------------------------------------------------------------------------------------------------------------------
# Classes


@pytest.mark.parametrize(
    ("mean", "variance", "exact", "probit"), [(1, 1, 0.69673, 0.70001), (2, 4, 0.77520, 0.77684), (0.5, 10, 0.55497, 0.55608)]
)
def test_mackays_values(mean: float, variance: float, exact: float, probit: float) -> None:
    assert gaussian(mean, variance, Bernoulli()).probs.item() == pytest.approx(exact, abs=6e-6)
    assert gaussian(mean, variance, Bernoulli(), way="probit").probs.item() == pytest.approx(probit, abs=6e-6)
    shared = torch.tensor([[[2.0, 1.0], [1.0, 0.0]]]).double()  # the difference has its variance less 2·1, and 1 more
    logits = torch.tensor([[0.3, 0.3 + mean]]).double()
    shared[0, 1, 1] = variance
    for way, expected in (("integral", exact), ("probit", probit)):
        pair = GaussianPredictive.from_moments(logits, shared, Categorical(), way=way)
        assert pair.probs[0, 1].item() == pytest.approx(expected, abs=6e-6)
        assert pair.log_prob([1]).item() == pytest.approx(math.log(expected), abs=1e-5)


@pytest.mark.parametrize("variance", [1e-4, 1.0, 100.0])
def test_yes_and_no_against_integration(variance: float) -> None:
    predictive = gaussian(1.3, variance, Bernoulli())
    z = np.linspace(-10, 10, 100_001)
    weight = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    p = special.expit(1.3 + math.sqrt(variance) * z)
    np.testing.assert_allclose(predictive.probs, weight @ p, rtol=1e-7)
    np.testing.assert_allclose(predictive.epistemic, weight @ (p - weight @ p) ** 2, rtol=1e-5)
    np.testing.assert_allclose(predictive.expected_entropy, weight @ stats.entropy([p, 1 - p]), rtol=1e-5)


def test_certain_logits_give_the_softmax_and_equal_ones_no_preference() -> None:
    mean = torch.randn(5, 6, generator=generator(), dtype=torch.float64)
    for way in ("integral", "probit"):
        sure = GaussianPredictive.from_moments(mean, torch.zeros(5, 6, 6).double(), Categorical(), way=way)
        torch.testing.assert_close(sure.probs, mean.softmax(-1))
        assert (sure.mutual_information.abs() < 1e-12).all()
    for way in ("integral", "probit", "bridge"):
        level = GaussianPredictive.from_moments(torch.zeros(1, 6), torch.ones(1, 6), Categorical(), way=way)
        torch.testing.assert_close(level.probs, torch.full((1, 6), 1 / 6), rtol=0, atol=2e-3)


def test_several_classes_converge_and_do_not_see_what_all_logits_share() -> None:
    mean, covariance, _ = problem(Categorical(), (5,))
    covariance = 4 * covariance
    fine = GaussianPredictive.from_moments(mean, covariance, Categorical(), nodes=2**15).probs
    usual = GaussianPredictive.from_moments(mean, covariance, Categorical()).probs
    drawn = scattered(Moments(mean, covariance), 2**15).softmax(-1).std(0) / math.sqrt(1024)  # of as many random draws
    assert ((usual - fine).abs() / drawn).pow(2).mean().sqrt() < 0.6
    shared = GaussianPredictive.from_moments(mean + 3, covariance + 5, Categorical()).probs
    torch.testing.assert_close(shared, fine, rtol=0, atol=5e-3)
    bridge = GaussianPredictive.from_moments(mean, covariance, Categorical(), way="bridge")
    again = GaussianPredictive.from_moments(mean + 3, covariance + 5, Categorical(), way="bridge")
    torch.testing.assert_close(again.probs, bridge.probs)
    other = GaussianPredictive.from_moments(mean, covariance, Categorical(), seed=1).probs
    assert not torch.equal(other, usual)
    torch.testing.assert_close(other, usual, rtol=0, atol=5e-3)


def test_the_bridge_returns_the_dirichlet_whose_gaussian_it_is_given() -> None:
    """Laplace's approximation of a Dirichlet in the softmax basis: m = log α less its mean, v_c = (1 − 2/C)/α_c + Σ 1/α_k / C²."""
    alpha = torch.tensor([[0.4, 1.0, 7.0], [30.0, 2.0, 2.0]], dtype=torch.float64)
    variance = (1 - 2 / 3) / alpha + (1 / alpha).sum(-1, keepdim=True) / 9
    centred = torch.eye(3).double() - 1 / 3
    full = centred @ torch.diag_embed(1 / alpha) @ centred  # with those variances, rows summing to 0
    torch.testing.assert_close(full.diagonal(dim1=1, dim2=2), variance)
    torch.testing.assert_close(_bridge(Moments(alpha.log() + 2, full)).exp(), alpha)
    independent = GaussianPredictive.from_moments(alpha.log(), 1 / alpha, Categorical(), way="bridge")  # centred: the same
    torch.testing.assert_close(independent.probs, alpha / alpha.sum(-1, keepdim=True))
    torch.testing.assert_close(independent.log_prob([2, 0]).exp(), independent.probs[[0, 1], [2, 0]])


def test_the_parts_of_a_dirichlet() -> None:
    for alpha in ([0.05, 0.2, 0.6], [3.0, 1.0, 8.0, 0.5], [1e9, 2e9, 3e9]):
        exact, found = stats.dirichlet(alpha), _dirichlet(torch.tensor([alpha], dtype=torch.float64).log())
        mean, inside, between, entropy, expected = (part[0].numpy() for part in found[1:])
        np.testing.assert_allclose(mean, exact.mean(), rtol=1e-12)
        np.testing.assert_allclose(between, exact.var(), rtol=1e-10)
        np.testing.assert_allclose(inside + between, mean * (1 - mean), rtol=1e-12)
        a = np.array(alpha)
        information = entropy - (special.digamma(a.sum() + 1) - (mean * special.digamma(a + 1)).sum())
        np.testing.assert_allclose(entropy, stats.entropy(exact.mean()), rtol=1e-12)
        np.testing.assert_allclose(entropy - expected, information, rtol=1e-6, atol=1e-13)
    far = torch.tensor([[50.0, 0, -50]])
    sure = GaussianPredictive.from_moments(far, torch.zeros_like(far), Categorical(), way="bridge")
    assert all(torch.isfinite(part).all() for part in (sure.probs, sure.entropy, sure.mutual_information, sure.std))


def test_probit_asks_for_no_integral_until_it_must() -> None:
    count, classes = 300, 3100
    mean = 3 * torch.randn(count, classes, generator=generator())
    predictive = GaussianPredictive.from_moments(mean, torch.ones_like(mean), Categorical(), way="probit")
    kappa = 1 / math.sqrt(1 + math.pi / 8)
    torch.testing.assert_close(predictive.probs, (kappa * mean).softmax(-1))
    _ = predictive.entropy, predictive.log_prob(mean.argmax(-1))
    assert "_classes" not in predictive.__dict__


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Recorder:
    """Moments that remember which slices they were asked for."""

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        self.mean, self.spread, self.asked = mean, spread, list[slice]()

    def __call__(self, rows: slice) -> tuple[Tensor, Tensor]:
        self.asked.append(rows)
        return self.mean[rows], self.spread[rows]

    def predictive(self, likelihood: Likelihood, **settings: Any) -> GaussianPredictive:
        shape = tuple(self.mean.shape[1:])
        return GaussianPredictive(likelihood, self, num_inputs=len(self.mean), output_shape=shape, **settings)


def test_moments_that_fit_are_asked_for_once_and_others_in_blocks() -> None:
    source = Recorder(torch.zeros(100, 3), torch.eye(3).expand(100, 3, 3))
    predictive = source.predictive(Gaussian(1.0))
    assert source.asked == []
    _ = predictive.mean, predictive.log_prob(torch.zeros(100, 3)), predictive.interval(), predictive.sample(5)
    _ = predictive.rescaled(0.0, 2.0).mean
    assert source.asked == [slice(0, 1), slice(0, 100)]  # what kind they are, and all of them
    source = Recorder(torch.zeros(100, 3), torch.eye(3).expand(100, 3, 3))
    predictive = source.predictive(Gaussian(1.0), budget_bytes=8 * 12 * 4 * 10)
    _ = predictive.mean, predictive.epistemic
    assert [(rows.start, rows.stop) for rows in source.asked[1:]] == [(k, k + 10) for k in range(0, 100, 10)]


def test_thousands_of_classes_need_variances_alone() -> None:
    """[24, 3100] integrated: blocks of a few inputs, no array of nodes × inputs × classes beyond the block, no covariance."""
    mean = 4 * torch.randn(24, 3100, generator=generator())
    source = Recorder(mean, torch.full_like(mean, 0.5))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel() * result.element_size())
            return result

    with Watch():
        predictive = source.predictive(Categorical())
        y = mean.argmax(-1)
        assert (predictive.log_prob(y) - predictive.probs.gather(-1, y[:, None]).squeeze(-1).log()).abs().max() < 1e-4
    assert largest <= 2**25
    torch.testing.assert_close(predictive.probs.sum(-1), torch.ones(24))


# ---------------------------------------------------------------------------------------------------------------------
# Draws, samples, decisions, metrics


def test_given_draws_are_what_functions_and_samples_are_made_of() -> None:
    drawn = 100.0 * torch.arange(4.0)[:, None, None].expand(4, N, K)
    mean, covariance, _ = problem(Gaussian(), (K,))
    predictive = GaussianPredictive(
        Gaussian(1e-3),
        lambda rows: (mean[rows], covariance[rows]),
        num_inputs=N,
        output_shape=(K,),
        draws=lambda rows: Draws(drawn[:, rows], {}),
        num_draws=4,
    )
    assert torch.equal(predictive.functions, drawn)
    component = (predictive.sample(50, seed=3) / 100).round()
    assert torch.equal(component, component[:, :1, :1].expand_as(component))
    torch.testing.assert_close(predictive.mean, mean)
    assert predictive.rescaled(0.0, 2.0).functions.shape == (4, N, K)


def test_inputs_are_drawn_apart_where_no_draws_are_given() -> None:
    mean, covariance, noise = problem(Gaussian(), (K,), 70)
    count = 4000
    f = GaussianPredictive.from_moments(mean, covariance, Gaussian(), noise, num_draws=count).functions
    error = (f.mean(0) - mean) / (covariance.diagonal(dim1=1, dim2=2) / count).sqrt()
    assert error.abs().max() < 5
    centred = f - mean
    found = torch.einsum("snp,snq->npq", centred, centred) / count
    variance = covariance.diagonal(dim1=1, dim2=2)
    scale = (variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()).sqrt() / math.sqrt(count)
    assert ((found - covariance) / scale).abs().max() < 5
    apart = torch.corrcoef(centred[..., 0].T)[~torch.eye(70, dtype=torch.bool)]
    assert apart.abs().max() < 6 / math.sqrt(count)
    again = GaussianPredictive.from_moments(mean, covariance, Gaussian(), noise, num_draws=3)
    assert torch.equal(again._source(slice(60, 67)).outputs, again.functions[:, 60:67])
    other = GaussianPredictive.from_moments(mean, covariance, Gaussian(), noise, num_draws=3, seed=1)
    assert not torch.equal(other.functions, again.functions)


@each_case
def test_metrics_and_decisions_take_it(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    """Close to those of the mixture over many of its own draws, and the exact ones where there are such."""
    mean, covariance, noise = problem(likelihood, output, 6)
    predictive = GaussianPredictive.from_moments(mean, covariance, likelihood, noise, num_draws=1000)
    weights = {n: w.expand(1000, *w.shape) for n, w in noise.items()}
    drawn = Predictive.from_functions(predictive.outputs, likelihood, weights)
    y = targets(likelihood, mean, noise)
    found, expected = metrics.summary(predictive, y), metrics.summary(drawn, y)
    assert found.keys() == expected.keys()
    smooth = {"log_likelihood", "brier", "rmse", "mae", "crps", "width_90", "calibrated_log_loss"}
    for name in smooth & found.keys() - ({"crps", "width_90"} if likelihood.kind == "counts" else set()):
        assert found[name] == pytest.approx(expected[name], rel=0.08, abs=0.03), name
    seen = torch.rand(y.shape, generator=generator(1)) < 0.7
    found, expected = (metrics.log_likelihood(p, y, mask=seen) for p in (predictive, drawn))
    assert found == pytest.approx(expected, abs=0.05)
    if likelihood.kind in CLASSES:
        classes = output[-1] if likelihood.kind == "classes" else 2
        decided = decisions.decide(predictive, np.eye(classes))
        torch.testing.assert_close(decided.expected_utility, metrics.inputs.class_probabilities(predictive).amax(-1))
        assert (decisions.value_of_epistemic_information(predictive, np.eye(classes)) >= 0).all()
        torch.testing.assert_close(decisions.bald(predictive), predictive.mutual_information)
        return
    for score in (decisions.expected_improvement, decisions.probability_of_improvement):
        for of in ("outcome", "function"):
            near = score(drawn, 0.2, of=of)
            slack = 0.05 * (1 + float(near.abs().max()))
            torch.testing.assert_close(score(predictive, 0.2, of=of), near, rtol=0.1, atol=slack)
    one, other = (decisions.newsvendor(p, 5.0, 1.0, shortage=0.5) for p in (predictive, drawn))
    torch.testing.assert_close(one.expected_utility, other.expected_utility, rtol=0.1, atol=0.3)
    if math.prod(y.shape[1:]) == 1:
        assert decisions.thompson(predictive).shape == (1000,)
        assert decisions.select_batch(predictive, 3).indices.unique().numel() == 3


def test_crps_improvement_and_information_in_closed_form() -> None:
    mean, variance = torch.linspace(-1, 1, 5).double(), torch.linspace(0.1, 2, 5).double()
    predictive = GaussianPredictive.from_moments(mean, variance, Gaussian(0.5), num_draws=3)
    total, y = (variance + 0.25).sqrt().numpy(), np.full(5, 0.3)
    z = (y - mean.numpy()) / total
    exact = total * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert metrics.crps(predictive, y) == pytest.approx(exact.mean(), rel=1e-10)
    std = variance.sqrt().numpy()
    u = (mean.numpy() - 0.4) / std
    improvement = decisions.expected_improvement(predictive, 0.4, of="function")
    np.testing.assert_allclose(improvement, std * (u * stats.norm.cdf(u) + stats.norm.pdf(u)), rtol=1e-10)
    above = decisions.probability_of_improvement(predictive, 0.4)
    np.testing.assert_allclose(above, stats.norm.cdf((mean.numpy() - 0.4) / total), rtol=1e-10)
    np.testing.assert_allclose(decisions.bald(predictive), 0.5 * np.log1p(variance.numpy() / 0.25), rtol=1e-10)
    amount = decisions.linex_action(predictive, 0.7)
    np.testing.assert_allclose(amount.action, mean.numpy() - 0.35 * total**2, rtol=1e-10)
    levels = decisions.quantile_action(predictive, under=torch.linspace(1, 3, 5), over=1.0).action
    at = np.linspace(1, 3, 5) / (1 + np.linspace(1, 3, 5))
    np.testing.assert_allclose(levels, mean.numpy() + total * stats.norm.ppf(at), rtol=1e-9)
    student = GaussianPredictive.from_moments(mean, variance, StudentT(df=3.0, scale=0.5))
    drawn = stats.norm(mean, std).rvs((100_000, 5), random_state=0) + stats.t(3, 0, 0.5).rvs((100_000, 5), random_state=1)
    assert metrics.crps(student, y) == pytest.approx(metrics.crps(drawn, y), rel=0.01)
    with pytest.raises(TypeError, match="LINEX needs"):
        decisions.linex_action(student, 0.7)
    with pytest.raises(ValueError, match="must be finite"):
        decisions.linex_action(GaussianPredictive.from_moments(mean, variance, Poisson()), -0.5)  # no E e^{y/2} exists


# ---------------------------------------------------------------------------------------------------------------------
# Types and errors


def test_types_lengths_names() -> None:
    for dtype, expected in ((torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)):
        mean = torch.zeros(4, 2, dtype=dtype)
        predictive = GaussianPredictive.from_moments(mean, torch.ones_like(mean), Gaussian(1.0))
        density = predictive.log_prob(np.zeros((4, 2)))
        for value in (predictive.mean, predictive.std, predictive.quantile([0.3, 0.4]), density):
            assert value.dtype == expected
        assert predictive.rescaled(1.0, 2.0).mean.dtype == torch.float64
        assert predictive.quantile([0.3, 0.4]).shape == (2, 4, 2)
    assert len(predictive) == 4
    assert repr(predictive) == "GaussianPredictive(Gaussian(scale=1.0, initial=1.0), inputs=4, draws=100, outputs=[2])"
    classes = GaussianPredictive.from_moments(torch.zeros(4, 2), torch.ones(4, 2), Categorical(), way="probit")
    assert repr(classes).endswith("way='probit')")
    assert classes.sample(3).dtype == torch.int64
    assert isinstance(GaussianPredictive.from_functions(torch.zeros(3, 4, 2), Gaussian(1.0)), Predictive)
    assert isinstance(predictive, pl.Predictive)


def test_bad_arguments_are_refused() -> None:
    mean, variance = torch.zeros(4, 2), torch.ones(4, 2)
    with pytest.raises(ValueError, match="way must be one of 'integral', 'probit', 'bridge', got 'mc'"):
        GaussianPredictive.from_moments(mean, variance, Categorical(), way="mc")
    with pytest.raises(ValueError, match="way='probit' is for the probabilities of Categorical and Bernoulli"):
        GaussianPredictive.from_moments(mean, variance, Gaussian(1.0), way="probit")
    for nodes in (1, 2.5, True):
        with pytest.raises(ValueError, match="nodes must be a whole number of at least 2"):
            GaussianPredictive.from_moments(mean, variance, Categorical(), nodes=nodes)
    with pytest.raises(ValueError, match="num_draws must be at least 1"):
        GaussianPredictive.from_moments(mean, variance, Gaussian(1.0), num_draws=0)
    for bad in (torch.ones(4), torch.ones(4, 3, 3), torch.ones(4, 2, 3)):
        with pytest.raises(ValueError, match=r"moments gave shapes .* mean \[1, 2\], and covariances \[1, 2, 2\]"):
            _ = GaussianPredictive.from_moments(mean, bad, Gaussian(1.0)).mean
    with pytest.raises(ValueError, match="mean must be a floating-point tensor"):
        GaussianPredictive.from_moments(torch.zeros(4, dtype=torch.int64), variance, Gaussian(1.0))
    with pytest.raises(ValueError, match="a learned noise needs its weight"):
        _ = GaussianPredictive.from_moments(mean, variance, Gaussian()).mean
    numbers = GaussianPredictive.from_moments(mean, variance, Gaussian(1.0))
    for name in ("probs", "entropy", "expected_entropy", "mutual_information"):
        with pytest.raises(TypeError, match=f"{name} does not exist for the continuous targets"):
            getattr(numbers, name)
    with pytest.raises(TypeError, match="no order"):
        GaussianPredictive.from_moments(mean, variance, Categorical()).quantile(0.5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@each_case
def test_on_a_gpu_everything_stays_there_and_agrees(likelihood: Likelihood, output: tuple[int, ...]) -> None:
    mean, covariance, noise = problem(likelihood, output)
    here = GaussianPredictive.from_moments(mean, covariance, likelihood, noise)
    moved = {name: w.cuda() for name, w in noise.items()}
    there = GaussianPredictive.from_moments(mean.cuda(), covariance.cuda(), likelihood, moved)
    y = targets(likelihood, mean, noise)
    pairs = [(here.mean, there.mean), (here.std, there.std), (here.log_prob(y), there.log_prob(y))]
    if likelihood.kind not in CLASSES:
        pairs.append((here.quantile([0.1, 0.6]), there.quantile([0.1, 0.6])))
    for expected, value in pairs:
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-8, atol=1e-10)
    assert there.sample(3, seed=1).is_cuda
