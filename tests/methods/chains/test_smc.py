"""Sequential Monte Carlo and the pieces it is made of: weights, resampling, moves, an evidence that is unbiased."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.blocks.chains.density import FunctionDensity
from plausible.blocks.chains.tempering import Place, effective, hamiltonian, ladder, next_power, relative_variance, systematic
from plausible.methods.chains.annealed import anneal
from plausible.testing import LinearGaussian
from tests.helpers.conjugate import TARGET, TRUTH, from_prior, log_likelihood, moments

Z = 4.5


def normals(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_systematic_resampling_is_unbiased_and_never_off_by_more_than_one() -> None:
    logs = normals(7, seed=0) * 2
    expected = 7 * logs.softmax(0)
    offsets = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    counts = torch.stack([systematic(logs, u).bincount(minlength=7) for u in offsets])
    assert torch.allclose(counts.double().mean(0), expected, atol=2 / 4000 * 7)
    assert bool((counts >= expected.floor()).all() and (counts <= expected.ceil()).all())
    assert systematic(torch.full((9,), 3.7, dtype=torch.float64), 0.3).tolist() == list(range(9))


def test_next_power_keeps_the_share_that_was_asked_for() -> None:
    likelihood = 30 * normals(400, seed=1)
    beta = next_power(likelihood, 0.2, 0.6)
    assert effective((beta - 0.2) * likelihood) == pytest.approx(0.6 * 400, rel=1e-6)
    assert next_power(0.1 * likelihood.sign(), 0.2, 0.6) == 1.0  # nearly equal weights: all the way
    assert effective(torch.full((5,), -math.inf)) == 0


@pytest.mark.parametrize("spacing", ["power", "sigmoid", "geometric"])
def test_ladders_rise_from_the_prior_to_the_posterior(spacing: Any) -> None:
    betas = ladder(10, spacing)
    assert len(betas) == 11
    assert betas[0] == 0
    assert betas[-1] == 1
    assert bool((betas.diff() > 0).all())
    assert ladder(1, spacing).tolist() == [0.0, 1.0]


def test_variance_from_ancestors_without_resampling_is_that_of_independent_weights() -> None:
    logs = normals(50, seed=2)
    weights = logs.exp() / logs.exp().mean()
    found = relative_variance(logs, torch.arange(50))
    assert found == pytest.approx(float(weights.var(unbiased=True)) / 50)
    assert relative_variance(logs, torch.zeros(50, dtype=torch.int64)) == pytest.approx(1.0)  # one ancestor: unknown


def test_moves_leave_each_row_at_its_power() -> None:
    """From exact draws at two powers, with steps so long that a quarter is rejected, the moments stay."""
    half, powers = 20_000, (0.3, 1.0)
    position = torch.cat(
        [mean + variance.sqrt() * normals(half, 2, seed=k) for k, (mean, variance) in enumerate(map(moments, powers))]
    )
    target = TARGET.bound(beta=torch.tensor(powers, dtype=torch.float64).repeat_interleave(half))
    found = target.evaluate(position)
    place = Place(position, found.log_likelihood, found.log_prior, found.gradient)
    scale = torch.stack([moments(beta)[1] for beta in powers]).repeat_interleave(half, 0)
    step = torch.tensor([1.5, 1.7], dtype=torch.float64).repeat_interleave(half)
    for move in range(3):
        level = torch.rand(2 * half, generator=torch.Generator().manual_seed(60 + move), dtype=torch.float64)
        moved = hamiltonian(target, place, normals(2 * half, 2, seed=50 + move), level, step, scale, 2)
        place = moved.place
    assert 0.5 < float(moved.acceptance.mean()) < 0.95
    again = target.evaluate(place.position)
    assert torch.allclose(again.gradient, place.gradient)
    assert torch.allclose(again.log_likelihood, place.log_likelihood)
    for k, beta in enumerate(powers):
        mean, variance = moments(beta)
        own = place.position[k * half : (k + 1) * half]
        assert float(((own.mean(0) - mean) / (variance / half).sqrt()).abs().max()) < Z
        assert float((((own - mean).square().mean(0) / variance) - 1).abs().max()) < Z * math.sqrt(2 / half)


SMALL = pl.SMC(particles=12, pilots=6, moves=1, leapfrogs=2, ess=0.5)


@pytest.mark.parametrize("method", [SMALL, replace(SMALL, temperatures=5)], ids=["chosen", "fixed"])
def test_evidence_is_unbiased(method: pl.SMC) -> None:
    """The mean of Ẑ/Z over many clouds of a dozen particles is 1, whose log is off by far more."""
    runs = 70
    found = [method.evidence(anneal(method, TARGET, from_prior(method.rows, s), s))[0] for s in range(runs)]
    ratio = (torch.tensor(found, dtype=torch.float64) - TRUTH).exp()
    error = float(ratio.std()) / math.sqrt(runs)
    assert error < 0.12
    assert abs(float(ratio.mean()) - 1) < Z * error


def test_standard_error_is_that_of_repeated_runs() -> None:
    method = pl.SMC(particles=100, pilots=20, moves=1, leapfrogs=4, ess=0.5)
    found = [method.evidence(anneal(method, TARGET, from_prior(method.rows, s), s)) for s in range(40)]
    values, errors = torch.tensor(found, dtype=torch.float64).unbind(1)
    assert float(values.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=0.5)  # 4.5/√80


def test_moments_of_the_particles() -> None:
    method = pl.SMC(particles=4000, pilots=200, moves=4)
    state = anneal(method, TARGET, from_prior(method.rows), 3)
    mean, variance = moments(1.0)
    own = state.position[:4000]
    assert float(((own.mean(0) - mean) / (variance / 4000).sqrt()).abs().max()) < Z * 1.5  # they are not quite independent
    assert float(((own.var(0) / variance) - 1).abs().max()) < Z * 1.5 * math.sqrt(2 / 4000)
    used = state.trace[: int(state.passed), 0]
    assert bool((used.diff() > 0).all())
    assert float(used[-1]) == 1
    assert method.evidence(state)[0] == pytest.approx(TRUTH, abs=Z * method.evidence(state)[1])


def test_one_temperature_is_importance_sampling_from_the_prior() -> None:
    method = replace(SMALL, temperatures=1)
    draws = from_prior(method.rows)
    state = anneal(method, TARGET, draws, 0)
    assert float(state.log_evidence) == pytest.approx(float(log_likelihood(draws[:12]).logsumexp(0)) - math.log(12))


def test_likelihood_that_is_zero_somewhere() -> None:
    """p(D | w) = 1 for w > 1 and else 0: the evidence is P(w > 1) under the prior, and all particles end up there."""
    target = FunctionDensity(
        lambda w: torch.where(w[:, 0] > 1, 0.0 * w[:, 0], -torch.inf), 1, prior=lambda w: -0.5 * w.square().sum(-1)
    )
    method = pl.SMC(particles=2000, pilots=200)
    state = anneal(method, target, from_prior(method.rows)[:, :1], 0)
    assert bool((state.position[:2000] > 1).all())
    value, error = method.evidence(state)
    assert 0 < error < 0.1
    assert value == pytest.approx(math.log(0.158655), abs=Z * error)
    with pytest.raises(ValueError, match="likelihood is 0 at all draws"):
        anneal(method, target, -from_prior(method.rows)[:, :1].abs(), 0)


def test_linear_gaussian_network() -> None:
    problem = LinearGaussian()
    posterior = problem.fit(pl.SMC(particles=800, pilots=100, moves=3))
    report = posterior.diagnostics()
    assert posterior.log_evidence == pytest.approx(problem.log_evidence(), abs=Z * report["log_evidence_error"])
    assert report["temperatures"][-1] == 1
    assert len(report["temperatures"]) == posterior.run["steps"]
    assert report["log_evidence_error"] < 0.15
    assert 50 < report["effective"] < 800
    assert 0.6 < report["acceptance"] < 0.95
    assert {len(values) for values in posterior.history.values()} == {posterior.run["steps"]}


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(12, 1, generator=stream)
    return nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)), (x, torch.sin(2 * x))


def test_steps_after_the_last_temperature_change_nothing_and_runs_resume(tmp_path: Path) -> None:
    """Where segments are cut depends on the clock; and a run that was killed between temperatures ends with the same bits."""
    net, data = small()
    method = pl.SMC(particles=30, pilots=10, moves=1, limit=40)
    settings: dict[str, Any] = {"seed": 2, "progress": False, "compile": False, "likelihood": pl.likelihoods.Gaussian(0.3)}
    whole = pl.fit(net, data, method, **settings)
    one_by_one = pl.fit(net, data, method, callbacks=[lambda *_: None], **settings)
    assert whole.run["steps"] == one_by_one.run["steps"] < 40
    assert whole.history == one_by_one.history
    assert whole.log_evidence == one_by_one.log_evidence
    place = pl.Checkpoint(tmp_path / "run", steps=1)

    class Killed(Exception):
        pass

    def kill(step: int, _: Any) -> None:
        if step == 3:
            raise Killed

    with contextlib.suppress(Killed):
        pl.fit(net, data, method, checkpoint=place, callbacks=[kill], **settings)
    resumed = pl.fit(net, data, method, checkpoint=place, **settings)
    assert torch.equal(whole.functions(data[0]), resumed.functions(data[0]))
    assert resumed.log_evidence == whole.log_evidence
    assert resumed.run["annealing"] == whole.run["annealing"]


def test_saved_moved_and_compared(tmp_path: Path) -> None:
    net, data = small()
    fits = {
        name: pl.fit(
            net,
            data,
            pl.SMC(particles=40, pilots=8, moves=1),
            likelihood=pl.likelihoods.Gaussian(scale),
            progress=False,
            compile=False,
        )
        for name, scale in (("narrow", 0.3), ("wide", 3.0))
    }
    fits["narrow"].save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", net)
    assert loaded.diagnostics() == fits["narrow"].diagnostics()
    assert loaded.log_evidence == fits["narrow"].log_evidence
    assert fits["narrow"].to("cpu").diagnostics() == fits["narrow"].diagnostics()
    rows = pl.evidence.compare(fits).rows
    assert not any(row.bound for row in rows)  # an estimate, and no bound
    assert [row.error for row in rows] == [fits[row.name].diagnostics()["log_evidence_error"] for row in rows]
    assert rows[0].note == f"± {rows[0].error:.2g}"


def test_what_cannot_be_annealed_is_refused() -> None:
    net, data = small()
    with pytest.raises(ValueError, match="improper"):
        pl.fit(net, data, "smc", prior=pl.priors.Flat(), progress=False)
    start = pl.fit(net, data, pl.MAP(epochs=2), progress=False)
    with pytest.raises(ValueError, match="init="):
        pl.fit(net, data, "smc", init=start, progress=False)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"particles": 1}, "particles"),
        ({"moves": 0}, "moves"),
        ({"pilots": 1}, "pilots"),
        ({"leapfrogs": True}, "leapfrogs"),
        ({"ess": 1.0}, "ess"),
        ({"temperatures": 0}, "temperatures"),
        ({"limit": 0}, "limit"),
        ({"trajectory": -1.0}, "trajectory"),
        ({"target_acceptance": 1.0}, "target_acceptance"),
    ],
)
def test_bad_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"SMC: {word}"):
        pl.SMC(**settings)
