"""CRPS: the closed form against integrals, samples against the closed form."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from plausible import metrics
from plausible.analysis.metrics.ranked import half_spread, sample_crps
from plausible.core.likelihoods import Gaussian, HeteroscedasticGaussian, Poisson, Scaled, StudentT
from plausible.posteriors.predictive import Predictive

oracle = pytest.importorskip("torchmetrics.functional.regression", reason="torchmetrics is not installed")


def integral(cdf, y: float, reach: float = 60.0) -> float:
    """∫ (F(z) − 1[y ≤ z])² dz, in two smooth pieces."""
    low = integrate.quad(lambda z: cdf(z) ** 2, y - reach, y, epsabs=1e-11, limit=400)[0]
    return low + integrate.quad(lambda z: (1 - cdf(z)) ** 2, y, y + reach, epsabs=1e-11, limit=400)[0]


def test_one_gaussian_in_closed_form():
    y, mean, scale = 1.3, 0.4, 2.0
    predictive = Predictive.from_functions(torch.tensor([[mean]], dtype=torch.float64), Gaussian(scale))
    z = (y - mean) / scale
    expected = scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert metrics.crps(predictive, torch.tensor([y], dtype=torch.float64)) == pytest.approx(expected, rel=1e-12)


def test_gaussian_mixture_is_the_integral():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 6, 2, generator=generator, dtype=torch.float64)
    predictive = Predictive.from_functions(outputs, HeteroscedasticGaussian())
    y = 2 * torch.randn(6, 1, generator=generator, dtype=torch.float64)
    scale = 1e-3 + torch.nn.functional.softplus(outputs[..., 1])
    expected = [
        integral(lambda z, n=n: stats.norm.cdf(z, outputs[:, n, 0], scale[:, n]).mean(), float(y[n, 0])) for n in range(6)
    ]
    assert metrics.crps(predictive, y) == pytest.approx(np.mean(expected), abs=1e-8)


@pytest.mark.parametrize(
    ("draws", "spread", "width"), [(1, 1.0, 0.1), (2, 5.0, 0.3), (7, 1.0, 1.0), (60, 3.0, 0.5), (61, 0.01, 0.2)]
)
def test_all_pairs_and_the_grid_agree_to_rounding(draws, spread, width):
    generator = torch.Generator().manual_seed(draws)
    mean = spread * torch.randn(draws, 20, generator=generator, dtype=torch.float64)
    scale = (width * torch.randn(draws, 20, generator=generator, dtype=torch.float64)).exp()
    pairs, grid = half_spread(mean, scale, "pairs"), half_spread(mean, scale, "grid")
    torch.testing.assert_close(pairs, grid, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(half_spread(mean, scale), pairs, rtol=1e-12, atol=1e-13)


def test_a_thousand_draws_take_the_grid_and_give_the_same():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(1000, 3, generator=generator, dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.float64)
    exact = metrics.crps(Predictive.from_functions(means, Gaussian(0.5)), y)
    spread = half_spread(means, torch.full_like(means, 0.5), "pairs")
    first = stats.foldnorm.mean(means.abs() / 0.5, scale=0.5).mean(0)  # E|Y − 0|
    assert exact == pytest.approx(float((torch.as_tensor(first) - spread).mean()), rel=1e-10)


def test_units_of_the_target(measured):
    means, predictive, y = measured
    scaled = Predictive.from_functions(means, Scaled(Gaussian((0.5, 2.0)), 7.0, -3.0))
    assert metrics.crps(scaled, 7 - 3 * y) == pytest.approx(3 * metrics.crps(predictive, y), rel=1e-12)
    point = Predictive.from_functions(means[:1], Gaussian(1e-9))
    assert metrics.crps(point, y) == pytest.approx(metrics.mae(means[0], y), rel=1e-6)


def test_samples_are_an_unbiased_estimate(measured):
    _, predictive, y = measured
    exact = metrics.crps(predictive, y)
    found = torch.tensor([metrics.crps(predictive.sample(20, seed=seed), y) for seed in range(100)])
    assert abs(float(found.mean()) - exact) < 4.5 * float(found.std()) / 10  # with 1/n² the bias would be 5 %


def test_samples_by_all_pairs_and_by_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    drawn, y = torch.randn(9, 5, generator=generator), torch.randn(5, generator=generator)
    distance = (drawn[:, None] - drawn[None]).abs().sum((0, 1)) / (2 * 9 * 8)
    expected = ((drawn - y).abs().mean(0) - distance).double()
    torch.testing.assert_close(sample_crps(drawn.double(), y.double()), expected, rtol=1e-5, atol=1e-6)
    biased = (drawn - y).abs().mean(0) - distance * 8 / 9
    assert float(oracle.continuous_ranked_probability_score(drawn.T, y)) == pytest.approx(float(biased.mean()), rel=1e-5)


def test_other_likelihoods_by_samples():
    location = torch.tensor([[0.0], [1.5]], dtype=torch.float64).repeat(1, 400)
    y = torch.full((400,), 0.7, dtype=torch.float64)
    student = Predictive.from_functions(location, StudentT(df=5.0, scale=1.0))
    expected = integral(lambda z: stats.t.cdf(z, 5.0, [0.0, 1.5]).mean(), 0.7, reach=400)
    assert metrics.crps(student, y, samples=400) == pytest.approx(expected, abs=0.01)  # deviation 0.9/√(400·400)
    counts = Predictive.from_functions(location, Poisson())
    k = np.arange(200)
    below = np.mean([stats.poisson.cdf(k, 1.0), stats.poisson.cdf(k, math.exp(1.5))], axis=0)
    exact = ((below - (k >= 2)) ** 2).sum()
    assert metrics.crps(counts, torch.full((400,), 2), samples=400) == pytest.approx(exact, abs=0.02)
    assert metrics.crps(counts, y.round() + 1, seed=1) == metrics.crps(counts, y.round() + 1, seed=1)


def test_the_truth_scores_best(measured):
    means, predictive, y = measured
    for other in (Gaussian((0.2, 0.8)), Gaussian((1.5, 6.0))):
        assert metrics.crps(Predictive.from_functions(means, other), y) > metrics.crps(predictive, y)


def test_refusals(measured):
    with pytest.raises(ValueError, match="at least 2"):
        metrics.crps(measured.means[:1], measured.y)
    with pytest.raises(ValueError, match=r"expected \['samples', 200, 2\]"):
        metrics.crps(measured.means[:, :9], measured.y)
    student = Predictive.from_functions(measured.means, StudentT(scale=1.0))
    with pytest.raises(ValueError, match="samples must be an integer of at least 2"):
        metrics.crps(student, measured.y, samples=1)
