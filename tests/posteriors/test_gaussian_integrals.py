"""Integrals over Gaussian outputs: laws of numbers and counts against numerical integration, where either part is the sharper."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from plausible.blocks.moments import LogVarianceGaussian
from plausible.core.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood, NegativeBinomial, Poisson, StudentT
from plausible.posteriors.gaussian_integrals import Counts, root
from plausible.posteriors.gaussian_predictive import GaussianPredictive


def gaussian(mean: float, variance: float, likelihood: Likelihood, **settings: Any) -> GaussianPredictive:
    """One input with one output."""
    values = (torch.tensor([v], dtype=torch.float64) for v in (mean, variance))
    return GaussianPredictive.from_moments(*values, likelihood, **settings)


def test_a_covariance_with_rounding_below_zero_is_taken_as_it_was_meant() -> None:
    direction = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    covariance = (torch.outer(direction, direction) - 1e-12 * torch.eye(3))[None]
    predictive = GaussianPredictive.from_moments(torch.zeros(1, 3, dtype=torch.float64), covariance, Gaussian(1e-3))
    exact = stats.multivariate_normal(np.zeros(3), covariance[0].numpy() + 1e-6 * np.eye(3))
    y = direction[None] * 0.3
    assert predictive.log_prob(y).item() == pytest.approx(exact.logpdf(y[0].numpy()), rel=1e-6)
    half = root(covariance)[0]
    torch.testing.assert_close(half @ half.T, covariance[0], rtol=0, atol=1e-11)
    assert root(torch.full((1, 3, 3), math.nan)).isnan().all()  # not an error: metrics name it


def _blurred(of: Any, y: float, spread: float) -> float:
    """E of(y − spread·z), by quadrature on both sides of where it is sharp."""
    if not spread:
        return float(of(y))
    sharp = [0.0, (y - 1) / spread] if abs(y - 1) < 12 * spread else [0.0]
    value = integrate.quad(lambda z: stats.norm.pdf(z) * of(y - spread * z), -12, 12, epsabs=1e-14, points=sharp, limit=400)
    return float(value[0])


@pytest.mark.parametrize("df", [0.5, 1.5, 4.0, 300.0])
@pytest.mark.parametrize("variance", [0.0, 0.01, 25.0])
def test_student_noise_against_integration(df: float, variance: float) -> None:
    """A tenth of the noise, and ten times it: with either the convolution is smooth."""
    predictive, noise = gaussian(1.0, variance, StudentT(df=df, scale=0.5)), stats.t(df, 1.0, 0.5)
    for y in (-40.0, 0.0, 1.3, 9.0):
        value = torch.tensor([y], dtype=torch.float64)
        expected = [_blurred(of, y, math.sqrt(variance)) for of in (noise.pdf, noise.cdf)]
        assert predictive.log_prob(value).exp().item() == pytest.approx(expected[0], rel=1e-7, abs=1e-16)
        assert predictive.cdf(value).item() == pytest.approx(expected[1], rel=1e-7, abs=1e-13)
    assert predictive.variance.isinf().item() == (df <= 2)
    assert predictive.mean.isnan().item() == (df <= 1)
    assert predictive.cdf(predictive.quantile(0.01)).item() == pytest.approx(0.01, abs=1e-9)


@pytest.mark.parametrize("dispersion", [math.inf, 0.7, 40.0])
@pytest.mark.parametrize(
    ("mean", "variance", "count"),
    [(0, 1.0, 0), (0.3, 0.5, 4), (5, 0.25, 200), (9, 1.0, 20_000), (9, 1e-8, 8_100), (2, 9.0, 0), (0.5, 0.0, 2)],
)
def test_counts_against_integration(dispersion: float, mean: float, variance: float, count: int) -> None:
    """Also where P(k | f) is a hundred times narrower than f: sums over 200,001 points, which resolve both."""
    likelihood = Poisson() if dispersion == math.inf else NegativeBinomial(dispersion)
    predictive = gaussian(mean, variance, likelihood)
    z = np.linspace(-14, 14, 200_001)
    weight = stats.norm.pdf(z) / stats.norm.pdf(z).sum()
    rate = np.exp(mean + math.sqrt(variance) * z)
    if dispersion == math.inf:
        given: Any = stats.poisson(rate)
    else:
        given = stats.nbinom(dispersion, dispersion / (dispersion + rate))
    y = torch.tensor([count])
    expected = special.logsumexp(given.logpmf(count), b=weight)
    assert predictive.log_prob(y).item() == pytest.approx(expected, abs=1e-8)
    assert predictive.cdf(y).item() == pytest.approx((weight * given.cdf(count)).sum(), abs=1e-8)
    np.testing.assert_allclose(predictive.mean, (weight * rate).sum(), rtol=1e-9)
    np.testing.assert_allclose(predictive.aleatoric, (weight * given.var()).sum(), rtol=1e-8)
    np.testing.assert_allclose(predictive.epistemic, weight @ (rate - weight @ rate) ** 2, rtol=1e-8, atol=1e-12)
    k = predictive.quantile(0.7)
    assert predictive.cdf(k) >= 0.7 > predictive.cdf((k - 1).clamp(min=0)) * (k > 0)


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(3.0)], ids=str)
def test_probabilities_of_counts_add_up(likelihood: Likelihood) -> None:
    k = torch.arange(500.0, dtype=torch.float64)
    counts = Counts(likelihood, torch.ones_like(k), torch.full_like(k, 0.3), {})
    p = counts.log_prob(k).exp()[0]
    assert p.sum().item() == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(p.cumsum(0), counts.cdf(k)[0], rtol=0, atol=1e-9)
    assert (p * k).sum().item() == pytest.approx(counts.mean[0, 0].item(), rel=1e-7)
    assert (p * (k - counts.mean[0]).square()).sum().item() == pytest.approx(counts.variance[0, 0].item(), rel=1e-4)
    assert (counts.cdf(torch.full_like(k, -0.5)) == 0).all()


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(0.1), LogVarianceGaussian()], ids=str)
def test_noise_that_goes_with_the_mean(likelihood: Likelihood) -> None:
    """A raw scale that is correlated with the mean skews y: against a double sum, which forgetting the correlation fails."""
    mean, covariance = torch.tensor([[0.5, -0.3]]).double(), torch.tensor([[[1.0, 0.6], [0.6, 0.8]]]).double()
    predictive = GaussianPredictive.from_moments(mean, covariance, likelihood)
    z = torch.linspace(-8, 8, 321, dtype=torch.float64)
    grid = torch.cartesian_prod(z, z)
    weight = (-0.5 * grid.square().sum(-1)).softmax(0)
    given = likelihood(mean + grid @ torch.linalg.cholesky(covariance[0]).T)
    for y in (-2.0, 0.4, 3.0):
        value = torch.tensor([[y]], dtype=torch.float64)
        expected = (weight * given.log_prob(value).exp().squeeze(-1)).sum()
        assert predictive.log_prob(value).exp().item() == pytest.approx(expected.item(), rel=1e-6)
        below = (weight * given.cdf(value).squeeze(-1)).sum()
        assert predictive.cdf(value).item() == pytest.approx(below.item(), rel=1e-6)
    assert predictive.aleatoric.item() == pytest.approx((weight * given.variance.squeeze(-1)).sum().item(), rel=1e-7)
    apart = GaussianPredictive.from_moments(mean, covariance.diagonal(dim1=1, dim2=2), likelihood)
    assert abs((predictive.quantile(0.99) - apart.quantile(0.99)).item()) > 0.05
