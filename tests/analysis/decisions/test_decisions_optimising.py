"""Scores for optimisation: closed forms, quadrature, Monte Carlo, and the probability of being best."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import plausible as pl
from plausible.analysis.decisions import expected_improvement, probability_of_improvement, thompson, upper_confidence_bound
from plausible.core.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from plausible.posteriors.predictive import Predictive

MEANS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIGMA = 0.4
PREDICTIVE = Predictive.from_functions(MEANS, Gaussian(SIGMA))
BOTH = pytest.mark.parametrize("maximise", [True, False])


@BOTH
def test_expected_improvement_by_quadrature_and_by_the_formula(maximise):
    best = 0.3
    value = expected_improvement(PREDICTIVE, best, maximise=maximise)
    for n in range(6):
        each = []
        for mean in MEANS[:, n].tolist():
            law, sign = stats.norm(mean, SIGMA), 1 if maximise else -1
            gain = lambda y, law=law, sign=sign: max(sign * (y - best), 0) * law.pdf(y)  # noqa: E731
            by_quadrature = integrate.quad(gain, mean - 12 * SIGMA, mean + 12 * SIGMA, points=[best], epsabs=1e-13)[0]
            z = sign * (mean - best) / SIGMA
            assert by_quadrature == pytest.approx(SIGMA * (stats.norm.pdf(z) + z * stats.norm.cdf(z)), abs=1e-9)
            each.append(by_quadrature)
        assert float(value[n]) == pytest.approx(np.mean(each), abs=1e-9)


@BOTH
@pytest.mark.parametrize("likelihood", [Gaussian(SIGMA), StudentT(df=5.0, scale=SIGMA), Poisson()])
def test_improvement_by_monte_carlo(likelihood, maximise):
    predictive = Predictive.from_functions(MEANS, likelihood)
    y, best = predictive.sample(100_000, seed=2).double(), torch.linspace(0.0, 1.0, 6, dtype=torch.float64)
    gain = ((y - best) * (1 if maximise else -1)).clamp(min=0)
    error = 5 * gain.std(0) / math.sqrt(len(y)) + 1e-4
    assert ((expected_improvement(predictive, best, maximise=maximise) - gain.mean(0)).abs() < error).all()
    torch.testing.assert_close(expected_improvement(y, best, maximise=maximise), gain.mean(0))
    share = (gain > 0).double().mean(0)
    chance = probability_of_improvement(predictive, best, maximise=maximise)
    assert ((chance - share).abs() < 5 * 0.5 / math.sqrt(len(y))).all()
    torch.testing.assert_close(probability_of_improvement(y, best, maximise=maximise), share)


@BOTH
def test_improvement_of_the_function_leaves_noise_out(maximise):
    sign = 1 if maximise else -1
    gain = (sign * (MEANS - 0.3)).clamp(min=0)
    torch.testing.assert_close(expected_improvement(PREDICTIVE, 0.3, maximise=maximise, of="function"), gain.mean(0))
    torch.testing.assert_close(expected_improvement(MEANS, 0.3, maximise=maximise), gain.mean(0))
    chance = probability_of_improvement(PREDICTIVE, 0.3, maximise=maximise, of="function")
    torch.testing.assert_close(chance, (gain > 0).double().mean(0))
    assert (expected_improvement(PREDICTIVE, 0.3, maximise=maximise) >= gain.mean(0)).all()  # Jensen


@BOTH
def test_many_gaussian_draws_tend_to_the_pair(maximise):
    """Function draws from N(μ, τ²) have the improvement of that Gaussian."""
    mean, spread = torch.tensor([0.0, 1.0, -0.5], dtype=torch.float64), torch.tensor([1.0, 0.3, 2.0]).double()
    draws = mean + spread * torch.randn(200_000, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    predictive = Predictive.from_functions(draws, Gaussian(SIGMA))
    options = {"maximise": maximise}
    pair = expected_improvement((mean, spread), 0.4, **options)
    error = 5 * spread / math.sqrt(200_000)
    assert ((expected_improvement(predictive, 0.4, of="function", **options) - pair).abs() < error).all()
    noisy = expected_improvement((mean, (spread**2 + SIGMA**2).sqrt()), 0.4, **options)
    assert ((expected_improvement(predictive, 0.4, **options) - noisy).abs() < error).all()
    chance = probability_of_improvement((mean.numpy(), spread.numpy()), 0.4, **options)
    away = ((mean - 0.4) if maximise else (0.4 - mean)) / spread
    torch.testing.assert_close(chance, torch.special.ndtr(away))


def test_a_known_value_improves_by_what_it_is():
    mean, std = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert expected_improvement((mean, std), 1.5).tolist() == [0.0, 0.5]
    assert expected_improvement((mean, std), 1.5, maximise=False).tolist() == [0.5, 0.0]
    assert probability_of_improvement((mean, std), 1.5).tolist() == [0.0, 1.0]
    assert probability_of_improvement((mean, std), 1.0).tolist() == [0.0, 1.0]


def test_counts_improve_strictly():
    predictive = Predictive.from_functions(torch.zeros(1, 1, dtype=torch.float64), Poisson())
    law = stats.poisson(1.0)
    assert float(probability_of_improvement(predictive, 2.0)) == pytest.approx(law.sf(2))
    for best, below in ((2.0, law.cdf(1)), (2.5, law.cdf(2))):
        chance = probability_of_improvement(predictive, best, maximise=False)
        assert float(chance) == pytest.approx(below)


def test_bounds():
    up = upper_confidence_bound(PREDICTIVE, 1.5)
    torch.testing.assert_close(up, PREDICTIVE.mean + 1.5 * PREDICTIVE.std)
    down = upper_confidence_bound(PREDICTIVE, 1.5, maximise=False, of="function")
    torch.testing.assert_close(down, -PREDICTIVE.mean + 1.5 * PREDICTIVE.epistemic.sqrt())
    torch.testing.assert_close(upper_confidence_bound(MEANS.numpy(), 1.5, maximise=False), down)
    pair = (PREDICTIVE.mean, PREDICTIVE.std)
    torch.testing.assert_close(upper_confidence_bound(pair, 1.5), up)


@pytest.mark.parametrize("gap", [0.0, 0.5, 1.5])
def test_thompson_draws_with_the_probability_of_being_best(gap):
    """f₁ − f₂ ~ N(gap, τ²) for two correlated Gaussian values: candidate 0 is best with probability Φ(gap/τ)."""
    count = 40_000
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    draws = torch.stack([gap + noise[:, 0], 0.6 * noise[:, 0] + 0.8 * noise[:, 1]], 1)
    spread = math.sqrt(1 + 1 - 2 * 0.6)
    chance = stats.norm.cdf(gap / spread)
    error = 5 * math.sqrt(chance * (1 - chance) / count)
    assert float((thompson(draws) == 0).double().mean()) == pytest.approx(chance, abs=error)
    assert float((thompson(draws, maximise=False) == 1).double().mean()) == pytest.approx(chance, abs=error)
    picked = thompson(draws.numpy(), 30_000, seed=1)
    assert float((picked == 0).double().mean()) == pytest.approx(chance, abs=2 * error)
    assert torch.equal(picked, thompson(draws, 30_000, seed=1))
    assert not torch.equal(picked, thompson(draws, 30_000, seed=2))


def test_thompson_follows_whole_functions_of_a_posterior():
    x = torch.linspace(-1, 1, 12)[:, None]
    net = torch.nn.Linear(1, 1)
    posterior = pl.fit(net, (x, x + 0.1), pl.Ensemble(pl.MAP(epochs=2), members=4), compile=False, seed=1)
    functions = posterior.functions(x)[..., 0]
    expected = functions.argmax(1)
    assert torch.equal(thompson(posterior.predict(x)), expected)
    assert torch.equal(thompson(posterior.functions(x)), expected)
    assert set(expected.tolist()) <= {0, 11}  # a line is highest at an end
    noisy = Predictive.from_functions(
        torch.cat([functions[..., None], 5 * torch.randn(4, 12, 1)], -1), HeteroscedasticGaussian()
    )
    assert torch.equal(thompson(noisy), expected)  # the mean, not the outputs


def test_bad_input():
    for function in (expected_improvement, probability_of_improvement):
        with pytest.raises(ValueError, match="best must be finite"):
            function(PREDICTIVE, math.nan)
        with pytest.raises(ValueError, match=r"best has shape \[4\]"):
            function(PREDICTIVE, np.zeros(4))
        with pytest.raises(ValueError, match=r"best has shape \[4\]"):
            function(MEANS, np.zeros(4))
        with pytest.raises(ValueError, match="of must be one of 'outcome', 'function'"):
            function(PREDICTIVE, 0.0, of="noise")
        with pytest.raises(ValueError, match="expected a pair"):
            function((MEANS, MEANS, MEANS), 0.0)
        with pytest.raises(ValueError, match="std must be finite and not negative; got -1"):
            function((np.zeros(2), np.array([1.0, -1.0])), 0.0)
        with pytest.raises(ValueError, match="mean must be finite"):
            function((np.array([np.nan, 0.0]), np.ones(2)), 0.0)
        with pytest.raises(ValueError, match="one value for each target"):
            function((np.zeros(2), np.ones(3)), 0.0)
    scores = [
        lambda p: expected_improvement(p, 0.0),
        lambda p: expected_improvement(p, 0.0, of="function"),
        lambda p: probability_of_improvement(p, 0.0),
        lambda p: probability_of_improvement(p, 0.0, of="function"),
        upper_confidence_bound,
        thompson,
    ]
    for score in scores:
        with pytest.raises(TypeError, match="classes targets"):
            score(Predictive.from_functions(torch.zeros(2, 3, 2), Categorical()))
        with pytest.raises(ValueError, match="predictive is empty"):
            score(Predictive.from_functions(torch.zeros(2, 0), Gaussian(1.0)))
        with pytest.raises(ValueError, match="predictive is empty"):
            score(np.zeros((3, 0)))
        with pytest.raises(ValueError, match="finite"):
            score(Predictive.from_functions(torch.full((2, 3), math.nan), Gaussian(1.0)))
        with pytest.raises(ValueError, match="finite"):
            score(np.full((3, 2), np.nan))
        with pytest.raises(ValueError, match="expected samples"):
            score(np.zeros(3))
    for bad in (-1, math.inf, True, "two"):
        with pytest.raises(ValueError, match="weight must be a finite number"):
            upper_confidence_bound(PREDICTIVE, bad)
    with pytest.raises(ValueError, match="draws must be an integer of at least 1"):
        thompson(PREDICTIVE, 0)
    with pytest.raises(ValueError, match=r"expected one number per input, \[draws, N\]"):
        thompson(np.zeros((3, 4, 2)))
