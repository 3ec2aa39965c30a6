"""Annealed importance sampling: weights of independent paths, unbiased however badly the moves mix."""

from __future__ import annotations

import math

import pytest
import torch

import plausible as pl
from plausible.blocks.chains.tempering import effective
from plausible.methods.chains.ais import descend
from plausible.methods.chains.annealed import anneal
from plausible.testing import LinearGaussian
from tests.helpers.conjugate import TARGET, TRUTH, from_prior, log_likelihood, moments

Z = 4.5


@pytest.mark.parametrize("trajectory", [1.5, 0.05], ids=["mixing", "hardly moving"])
def test_evidence_is_unbiased_whatever_the_moves(trajectory: float) -> None:
    """Each path is independent: the mean of its weight is p(D), also where it hardly moves."""
    method = pl.AnnealedImportance(particles=3000, pilots=10, temperatures=12, leapfrogs=2, trajectory=trajectory)
    state = anneal(method, TARGET, from_prior(method.rows), 1)
    ratio = (state.log_weights - TRUTH).exp()
    error = float(ratio.std()) / math.sqrt(3000)
    assert abs(float(ratio.mean()) - 1) < Z * error
    assert error < 0.1
    assert state.ancestors.tolist() == list(range(3000))
    value, said = method.evidence(state)
    assert value == pytest.approx(TRUTH + math.log(float(ratio.mean())))
    assert said == pytest.approx(error / float(ratio.mean()))


def test_moves_make_weights_more_equal() -> None:
    shares = []
    for trajectory in (0.05, 1.5):
        method = pl.AnnealedImportance(particles=1000, pilots=20, temperatures=60, trajectory=trajectory)
        shares.append(effective(anneal(method, TARGET, from_prior(method.rows), 2).log_weights) / 1000)
    assert shares[1] > 0.55
    assert shares[1] > 2 * shares[0]


def test_one_temperature_is_importance_sampling_from_the_prior() -> None:
    method = pl.AnnealedImportance(particles=50, pilots=0, temperatures=1)
    draws = from_prior(50)
    state = anneal(method, TARGET, draws, 0)
    assert torch.allclose(state.log_weights, log_likelihood(draws))


@pytest.mark.parametrize("spacing", ["power", "sigmoid", "geometric"])
def test_weighted_moments(spacing: str) -> None:
    method = pl.AnnealedImportance(particles=2000, pilots=50, temperatures=25, spacing=spacing)  # type: ignore[arg-type]
    state = anneal(method, TARGET, from_prior(method.rows), 4)
    mean, variance = moments(1.0)
    weights = state.log_weights.softmax(0)
    own, count = state.position[:2000], effective(state.log_weights)
    assert count > 400
    assert float(((weights @ own - mean) / (variance / count).sqrt()).abs().max()) < Z
    assert float((weights @ (own - mean).square() / variance - 1).abs().max()) < Z * math.sqrt(2 / count)


def test_linear_gaussian_network() -> None:
    problem = LinearGaussian()
    posterior = problem.fit(pl.AnnealedImportance(particles=300, pilots=40, temperatures=80))
    report = posterior.diagnostics()
    assert posterior.log_evidence == pytest.approx(problem.log_evidence(), abs=Z * report["log_evidence_error"])
    assert report["log_evidence_error"] < 0.15
    assert len(report["temperatures"]) == 80
    assert report["effective"] == pytest.approx(300 / (1 + 299 * report["log_evidence_error"] ** 2))
    assert len(posterior.weights()["weight"]) == 300  # type: ignore[arg-type]


def from_posterior(rows: int, seed: int = 0) -> torch.Tensor:
    """Exact draws `[rows, 2]`."""
    mean, variance = moments(1.0)
    return mean + variance.sqrt() * from_prior(rows, seed)


@pytest.mark.parametrize("pilots", [0, 20])
@pytest.mark.parametrize("trajectory", [1.5, 0.7], ids=["mixing", "moving little"])
def test_paths_back_to_the_prior_give_the_inverse_of_the_evidence(trajectory: float, pilots: int) -> None:
    """E W = 1/p(D), with moves of any kind that keep the weights' variance finite."""
    method = pl.AnnealedImportance(
        particles=4000, pilots=pilots, temperatures=100, leapfrogs=3, trajectory=trajectory, spacing="sigmoid"
    )
    value, error = descend(method, TARGET, from_posterior(method.rows), 1)
    assert abs(math.exp(TRUTH - value) - 1) < Z * error
    assert error < 0.1


@pytest.mark.slow
def test_paths_there_and_back_bracket_the_evidence() -> None:
    """Few paths of few steps err to known sides: below on the way there, above on the way back."""
    method = pl.AnnealedImportance(particles=4, pilots=10, temperatures=4, leapfrogs=3)
    low = torch.tensor([method.evidence(anneal(method, TARGET, from_prior(14, seed), seed))[0] for seed in range(60)])
    high = torch.tensor([descend(method, TARGET, from_posterior(14, seed), seed)[0] for seed in range(60)])
    for values, side in ((low, -1), (high, 1)):
        assert side * (float(values.mean()) - TRUTH) > 2 * float(values.std()) / math.sqrt(60)


@pytest.mark.slow
def test_upper_bound_of_chains_that_started_elsewhere() -> None:
    problem = LinearGaussian()
    chains = problem.fit(pl.HMC(draws=40, warmup=40, chains=2), init=problem.fit(pl.MAP(epochs=2)))
    value, error = pl.AnnealedImportance(particles=20, pilots=10, temperatures=10).upper_bound(chains)
    assert math.isfinite(value)
    assert error > 0


@pytest.mark.slow
def test_upper_bound_of_a_network() -> None:
    problem = LinearGaussian()
    method = pl.AnnealedImportance(particles=300, pilots=40, temperatures=200)
    chains = problem.fit(pl.HMC(draws=50, chains=8, warmup=100, leapfrogs=6))
    value, error = method.upper_bound(chains)
    assert value == pytest.approx(problem.log_evidence(), abs=Z * error)
    assert error < 0.15
    assert method.upper_bound(chains) == (value, error)
    assert method.upper_bound(chains, seed=1) != (value, error)
    with pytest.raises(ValueError, match="400 draws, and particles and pilots start at 600"):
        pl.AnnealedImportance(particles=500, pilots=100).upper_bound(chains)
    with pytest.raises(ValueError, match="must be one of chains"):
        method.upper_bound(problem.fit(pl.MAP(epochs=2)))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="AnnealedImportance: spacing"):
        pl.AnnealedImportance(spacing="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AnnealedImportance: temperatures"):
        pl.AnnealedImportance(temperatures=0)
