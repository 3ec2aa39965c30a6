"""Amounts: closed forms against quadrature and sums, optima against their neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from plausible.analysis.decisions import (
    decide,
    expected_excess,
    expected_shortfall,
    linex_action,
    linex_cost,
    newsvendor,
    newsvendor_profit,
    quantile_action,
    quantile_cost,
)
from plausible.core.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    NegativeBinomial,
    Poisson,
    Scaled,
    StudentT,
)
from plausible.posteriors.predictive import Predictive

OUTPUTS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # 4 draws, 3 inputs


def mixture(likelihood, outputs=OUTPUTS):
    return Predictive.from_functions(outputs, likelihood)


def frozen(name):
    """A predictive, and the same mixture as frozen scipy distributions, [input][draw]."""
    if name == "gaussian":
        return mixture(Gaussian(0.6)), [[stats.norm(m, 0.6) for m in row] for row in OUTPUTS.T]
    if name == "student":
        return mixture(StudentT(df=3.0, scale=0.6)), [[stats.t(3.0, m, 0.6) for m in row] for row in OUTPUTS.T]
    if name == "turned":
        likelihood = Scaled(StudentT(df=4.0, scale=0.5), 2.0, -3.0)
        return mixture(likelihood), [[stats.t(4.0, 2 - 3 * m, 1.5) for m in row] for row in OUTPUTS.T]
    if name == "poisson":
        return mixture(Poisson(), OUTPUTS + 1), [[stats.poisson(math.exp(m + 1)) for m in row] for row in OUTPUTS.T]
    mean = (OUTPUTS + 1).exp()
    laws = [[stats.nbinom(2.5, 2.5 / (2.5 + m)) for m in row] for row in mean.T.tolist()]
    return mixture(NegativeBinomial(2.5), OUTPUTS + 1), laws


CONTINUOUS, COUNTS = ("gaussian", "student", "turned"), ("poisson", "negative binomial")


def away(law, t, above):
    """E(Y − t)₊ or E(t − Y)₊ by integrating the survival function or the cdf, or by summing over counts."""
    if hasattr(law, "pmf"):
        k = np.arange(2000)
        return float((np.clip(k - t if above else t - k, 0, None) * law.pmf(k)).sum())
    if above:
        return integrate.quad(law.sf, t, math.inf, epsabs=1e-12, limit=400)[0]
    return integrate.quad(law.cdf, -math.inf, t, epsabs=1e-12, limit=400)[0]


@pytest.mark.parametrize("name", CONTINUOUS + COUNTS)
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.7, 3.0, 3.4])
def test_expected_excess_and_shortfall(name, threshold):
    predictive, laws = frozen(name)
    above, below = expected_excess(predictive, threshold), expected_shortfall(predictive, threshold)
    for n, row in enumerate(laws):
        assert float(above[n]) == pytest.approx(np.mean([away(law, threshold, True) for law in row]), abs=1e-8)
        assert float(below[n]) == pytest.approx(np.mean([away(law, threshold, False) for law in row]), abs=1e-8)


def test_far_tails_keep_their_digits():
    point = mixture(Gaussian(1.0), torch.zeros(1, 1, dtype=torch.float64))
    # φ(t)/t²·(1 − 3/t² + 15/t⁴ − …)
    series = stats.norm.pdf(15) / 225 * (1 - 3 / 225 + 15 / 225**2)
    assert float(expected_excess(point, 15.0)) == pytest.approx(series, rel=1e-3)
    assert float(expected_shortfall(point, -15.0)) == pytest.approx(series, rel=1e-3)


def test_expectations_without_a_mean_are_infinite():
    heavy = mixture(StudentT(df=1.0, scale=1.0))
    with pytest.raises(ValueError, match="has no mean"):
        newsvendor(heavy, 2, 1)
    assert expected_excess(heavy, 0.0).isinf().all()


@pytest.mark.parametrize("name", CONTINUOUS + COUNTS)
def test_newsvendor_is_the_critical_fractile_and_beats_its_neighbours(name):
    predictive, _ = frozen(name)
    prices = {"price": 5.0, "cost": 3.0, "salvage": 1.0, "shortage": 0.5}
    best = newsvendor(predictive, **prices)
    fractile = (5 - 3 + 0.5) / (5 - 3 + 0.5 + 3 - 1)
    torch.testing.assert_close(best.action, predictive.quantile(fractile).clamp(min=0))
    torch.testing.assert_close(best.expected_utility, newsvendor_profit(predictive, best.action, **prices))
    for step in (1.0, 2.0, 5.0) if name in COUNTS else (0.05, 0.3, 2.0):
        for other in (best.action + step, (best.action - step).clamp(min=0)):
            assert (newsvendor_profit(predictive, other, **prices) <= best.expected_utility).all()


def test_newsvendor_profit_is_the_mean_of_what_is_earned():
    predictive, _ = frozen("negative binomial")
    demand = predictive.sample(200_000, seed=1).double()
    quantity = torch.tensor([2.0, 5.0, 9.0], dtype=torch.float64)
    earned = (
        5 * torch.minimum(demand, quantity)
        + (quantity - demand).clamp(min=0)
        - 0.5 * (demand - quantity).clamp(min=0)
        - 3 * quantity
    )
    exact = newsvendor_profit(predictive, quantity, 5.0, 3.0, salvage=1.0, shortage=0.5)
    assert ((earned.mean(0) - exact).abs() < 5 * earned.std(0) / math.sqrt(len(demand))).all()
    one = newsvendor_profit(demand[:1], quantity, 5.0, 3.0, salvage=1.0, shortage=0.5)
    torch.testing.assert_close(one, earned[0])
    torch.testing.assert_close(newsvendor_profit(demand, quantity, 5.0, 3.0, salvage=1.0, shortage=0.5), earned.mean(0))


def test_no_stock_is_negative():
    low = mixture(Gaussian(1.0), torch.full((2, 2), -50.0, dtype=torch.float64))
    best = newsvendor(low, price=2.0, cost=1.0)
    assert best.action.tolist() == [0, 0]


@pytest.mark.parametrize("name", CONTINUOUS + COUNTS)
def test_quantile_action(name):
    predictive, _ = frozen(name)
    best = quantile_action(predictive, under=3.0, over=1.0)
    torch.testing.assert_close(best.action, predictive.quantile(0.75))
    torch.testing.assert_close(best.expected_cost, quantile_cost(predictive, best.action, 3.0, 1.0))
    for step in (1.0, 4.0) if name in COUNTS else (0.01, 0.5):
        for other in (best.action + step, best.action - step):
            assert (quantile_cost(predictive, other, 3.0, 1.0) >= best.expected_cost - 1e-12).all()


def test_closed_form_agrees_with_decide_over_a_grid():
    predictive, _ = frozen("gaussian")
    grid = torch.linspace(-3, 3, 25)
    loss = lambda a, y: -torch.where(y > a, 3 * (y - a), a - y)  # noqa: E731
    sampled = decide(predictive, loss, actions=grid, samples=8000)
    exact = torch.stack([-quantile_cost(predictive, float(a), 3.0, 1.0) for a in grid], -1)
    assert ((sampled.utilities - exact).abs() < 5 * sampled.standard_error).all()


def test_costs_that_differ_between_inputs():
    predictive, _ = frozen("gaussian")
    under = np.array([1.0, 9.0, 1.0])
    together = quantile_action(predictive, under, 1.0)
    for n, each in enumerate(under):
        alone = quantile_action(predictive, float(each), 1.0)
        assert float(together.action[n]) == pytest.approx(float(alone.action[n]))
        assert float(together.expected_cost[n]) == pytest.approx(float(alone.expected_cost[n]))
    wide = mixture(HeteroscedasticGaussian(), torch.randn(4, 3, 4, dtype=torch.float64))
    both = quantile_action(wide, under, 1.0)
    assert both.action.shape == both.expected_cost.shape == (3, 2)
    torch.testing.assert_close(both.action[1], wide.quantile(0.9)[1])
    assert newsvendor(wide, price=np.array([2.0, 3.0, 4.0]), cost=1.0).action.shape == (3, 2)


def test_plain_samples_are_minimised_exactly():
    samples = torch.randn(101, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    best = quantile_action(samples, under=2.0, over=1.0)
    for candidate in samples.sort(0).values:
        assert (quantile_cost(samples, candidate, 2.0, 1.0) >= best.expected_cost - 1e-12).all()
    whole = quantile_action(torch.arange(1.0, 11.0)[:, None], under=1.0, over=4.0)  # q = 0.2 of 10: the second
    assert whole.action.tolist() == [2.0]
    varied = quantile_action(np.tile(np.arange(1.0, 11.0)[:, None], (1, 2)), under=np.array([1.0, 4.0]), over=1.0)
    assert varied.action.tolist() == [5.0, 8.0]


def expected_linex(law, a, k):
    """By the trapezoidal rule, which is exact to rounding for Gaussians, or by a sum over counts."""
    y = np.arange(400) if hasattr(law, "pmf") else np.linspace(law.mean() - 12 * law.std(), law.mean() + 12 * law.std(), 2001)
    weight = law.pmf(y) if hasattr(law, "pmf") else law.pdf(y) * (y[1] - y[0])
    return float(((np.exp(k * (a - y)) - k * (a - y) - 1) * weight).sum())


@pytest.mark.parametrize("k", [0.8, -0.8])
@pytest.mark.parametrize("name", ["gaussian", "scaled", "poisson", "negative binomial"])
def test_linex(name, k):
    if name == "scaled":
        predictive = mixture(Scaled(Gaussian(0.5), 1.0, -0.7))
        laws = [[stats.norm(1 - 0.7 * m, 0.35) for m in row] for row in OUTPUTS.T.tolist()]
    else:
        predictive, laws = frozen(name)
    if name == "negative binomial" and k < 0:
        with pytest.raises(ValueError, match="choose a shape nearer to 0"):
            linex_action(predictive, k)  # E exp(0.8·y) diverges
        return
    best = linex_action(predictive, k)
    for n, row in enumerate(laws):
        for a in (float(best.action[n]), 0.5):
            by_hand = np.mean([expected_linex(law, a, k) for law in row])
            assert float(linex_cost(predictive, a, k)[n]) == pytest.approx(by_hand, rel=1e-6)
    torch.testing.assert_close(best.expected_cost, linex_cost(predictive, best.action, k))
    for step in (-0.2, 0.2):
        assert (linex_cost(predictive, best.action + step, k) > best.expected_cost).all()
    assert ((best.action < predictive.mean) == (k > 0)).all()


def test_linex_tends_to_the_mean():
    predictive, _ = frozen("gaussian")
    best = linex_action(predictive, 1e-4)
    torch.testing.assert_close(best.action, predictive.mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(best.expected_cost, 0.5e-8 * predictive.variance, rtol=1e-2, atol=0)
    samples = predictive.sample(50, seed=0)
    torch.testing.assert_close(linex_action(samples, 0.5).action, -2 * torch.exp(-samples / 2).mean(0).log())


def test_bad_input():
    predictive, _ = frozen("gaussian")
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="under must be positive"):
            quantile_action(predictive, under=bad)
    with pytest.raises(ValueError, match=r"over has shape \[2\], expected a number, one for each of 3 inputs"):
        quantile_action(predictive, over=[1.0, 2.0])
    with pytest.raises(ValueError, match="action must be finite"):
        quantile_cost(predictive, math.nan)
    with pytest.raises(ValueError, match=r"price \+ shortage must exceed cost"):
        newsvendor(predictive, price=1.0, cost=2.0)
    with pytest.raises(ValueError, match="cost must exceed salvage"):
        newsvendor(predictive, price=2.0, cost=1.0, salvage=1.0)
    with pytest.raises(ValueError, match="shortage must not be negative"):
        newsvendor(predictive, price=2.0, cost=1.0, shortage=-1.0)
    for bad in (0, math.inf, True, "steep"):
        with pytest.raises(ValueError, match="shape must be a finite number other than 0"):
            linex_action(predictive, bad)
    with pytest.raises(TypeError, match="LINEX needs"):
        linex_action(frozen("student")[0], 0.5)
    classes = mixture(Categorical(), torch.zeros(2, 3, 2))
    for function in (quantile_action, lambda p: newsvendor(p, 2, 1), lambda p: linex_action(p, 1.0)):
        with pytest.raises(TypeError, match="decide with a utility matrix"):
            function(classes)
        with pytest.raises(ValueError, match="predictive is empty"):
            function(mixture(Gaussian(1.0), torch.zeros(2, 0)))
        with pytest.raises(ValueError, match="predictive is empty"):
            function(np.zeros((3, 0)))
        with pytest.raises(ValueError, match=r"finite|NaN"):
            function(mixture(Gaussian(1.0), torch.full((2, 3), math.nan)))
        with pytest.raises(ValueError, match="predictive must be finite"):
            function(np.full((3, 2), np.inf))
        with pytest.raises(ValueError, match="expected samples of y"):
            function(np.zeros(3))


def test_a_likelihood_without_closed_form_says_what_to_do():
    class Logistic(Gaussian):
        def __call__(self, outputs, weights=None):
            return torch.distributions.Laplace(outputs, 1.0)

    with pytest.raises(TypeError, match=r"predictive.sample\(10_000\)"):
        quantile_action(mixture(Logistic(1.0)), 2.0, 1.0)
