"""Annealed importance sampling: weights of independent paths, unbiased however badly the moves mix."""

from __future__ import annotations

import math

import pytest
import torch
from conjugate import TARGET, TRUTH, from_prior, log_likelihood, moments

import plausible as pl
from plausible.methods.annealed import anneal
from plausible.sampling.tempering import effective
from plausible.testing import LinearGaussian

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


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="AnnealedImportance: spacing"):
        pl.AnnealedImportance(spacing="linear")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AnnealedImportance: temperatures"):
        pl.AnnealedImportance(temperatures=0)
