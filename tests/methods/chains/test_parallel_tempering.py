"""Parallel tempering: exchanges that leave all powers invariant, modes that are visited in proportion, the evidence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.chains.density import FunctionDensity, run
from plausible.blocks.chains.tempering import Bridges, Place, bridged, log_ratio, no_bridges, respaced
from plausible.testing import LinearGaussian
from tests.helpers.conjugate import TARGET, TRUTH, from_prior, moments

Z = 4.5
LOG_2PI = math.log(2 * math.pi)


def exact(betas: Tensor, chains: int, seed: int) -> Tensor:
    """Exact draws at each power, `[powers · chains, 2]`."""
    noise = torch.randn(len(betas), chains, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = [mean + variance.sqrt() * own for own, (mean, variance) in zip(noise, map(moments, betas.tolist()))]
    return torch.cat(parts)


def check(position: Tensor, betas: Tensor, chains: int) -> None:
    """Moments at each power."""
    for own, beta in zip(position.reshape(len(betas), chains, 2), betas.tolist()):
        mean, variance = moments(beta)
        assert float(((own.mean(0) - mean) / (variance / chains).sqrt()).abs().max()) < Z
        assert float(((own - mean).square().mean(0) / variance - 1).abs().max()) < Z * math.sqrt(2 / chains)


def test_exchanges_leave_all_powers_invariant() -> None:
    chains = 20_000
    method = pl.ParallelTempering(chains=chains, temperatures=4)
    betas = torch.tensor([1.0, 0.4, 0.1, 0.0], dtype=torch.float64)
    position = exact(betas, chains, 0)
    found = TARGET.bound(beta=betas.repeat_interleave(chains)).evaluate(position)
    place = Place(position, found.log_likelihood, found.log_prior, found.gradient)
    for number in range(2):
        stream = torch.Generator().manual_seed(10 + number)
        level = torch.rand(4 * chains, generator=stream, dtype=torch.float64)
        place, rates, rows = method.exchanged(place, betas, level, number)
        taken = (rows.reshape(4, chains) != torch.arange(4 * chains).reshape(4, chains)).double().mean(1)
        pairs = {0: [(0, 1), (2, 3)], 1: [(1, 2)]}[number]  # even pairs, then odd ones
        for pair in pairs:
            assert float(taken[pair[0]]) == float(taken[pair[1]])  # an exchange has two sides
            error = math.sqrt(float(rates[pair[0]]) / chains)
            assert float(taken[pair[0]]) == pytest.approx(float(rates[pair[0]]), abs=Z * error)
        idle = set(range(4)) - {k for pair in pairs for k in pair}
        assert all(float(taken[k]) == 0 for k in idle)
        assert torch.allclose(TARGET.evaluate(place.position).log_likelihood, place.log_likelihood)
        check(place.position, betas, chains)
    assert float(rates.min()) > 0.1
    assert float(rates.max()) < 0.9


def test_whole_transitions_leave_all_powers_invariant() -> None:
    chains = 6000
    method = pl.ParallelTempering(chains=chains, temperatures=3, draws=4, warmup=0, leapfrogs=2, trajectory=2.5)
    betas = torch.tensor([1.0, 0.5**5, 0.0], dtype=torch.float64)  # the first ladder
    out = run(method, TARGET, exact(betas, chains, 1), 5)
    assert torch.allclose(out["state"].adaptation.betas, betas)
    check(out["position"][-1], betas, chains)
    bound = method.bind(TARGET, out["state"])
    assert torch.allclose(bound.evaluate(out["state"].position).gradient, out["state"].gradient)
    assert out["acceptance"].shape == (4, chains)  # of the chains at the posterior alone
    assert 0.4 < float(out["acceptance"].mean()) < 0.99


def test_powers_are_spaced_for_equal_rates() -> None:
    betas = torch.tensor([1.0, 0.5, 0.2, 0.0], dtype=torch.float64)
    found = respaced(betas, torch.tensor([0.1, 0.1, 0.7], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor([1.0, 0.2 - 0.2 / 7, 0.2 - 0.2 * 4 / 7, 0.0], dtype=torch.float64))
    even = respaced(betas, torch.full((3,), 0.3, dtype=torch.float64))
    assert torch.allclose(even, betas)
    method = pl.ParallelTempering(chains=32, temperatures=5, draws=100, warmup=150, leapfrogs=3)
    own = run(method, TARGET, from_prior(method.rows), 0)["state"].adaptation
    rates = own.accepted / own.seen
    assert float(rates.max() - rates.min()) < 0.2
    assert float(own.round_trips.min()) > 0
    assert float(own.betas[-1]) == 0
    assert float(own.betas[0]) == 1


def test_bridges_from_exact_draws() -> None:
    """Log Z_1/Z_K of a known density; its standard error is that of repeated estimates."""
    betas = torch.tensor([1.0, 0.3, 0.05, 0.0], dtype=torch.float64)
    found = []
    for seed in range(40):
        sums = no_bridges(4, 4, 8, torch.device("cpu"))
        for block in range(4):
            for turn in range(5):
                likelihood = TARGET.evaluate(exact(betas, 8, 1000 * seed + 10 * block + turn)).log_likelihood
                sums = bridged(sums, block, betas, likelihood.reshape(4, 8))
        found.append(log_ratio(sums))
    values, errors = torch.tensor(found, dtype=torch.float64).unbind(1)
    assert float(values.mean()) == pytest.approx(TRUTH, abs=Z * float(values.std()) / math.sqrt(40))
    assert float(values.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=0.5)
    assert math.isnan(log_ratio(no_bridges(4, 4, 8, torch.device("cpu")))[0])
    assert isinstance(sums, Bridges)


def two_modes(w: Tensor) -> Tensor:
    """Log 0.75·N(w; 3, 0.3²) + 0.25·N(w; −3, 0.3²), for both coordinates together."""
    parts = [math.log(share) - 0.5 * ((w - at) / 0.3).square().sum(-1) for share, at in ((0.75, 3.0), (0.25, -3.0))]
    return torch.logaddexp(*parts) - 2 * math.log(0.3) - LOG_2PI


BIMODAL = FunctionDensity(two_modes, 2, prior=lambda w: -0.5 * (w / 3).square().sum(-1) - 2 * math.log(3) - LOG_2PI)


@pytest.mark.slow
def test_modes_are_visited_in_proportion_where_one_chain_stays() -> None:
    right = torch.full((32, 2), 3.0, dtype=torch.float64)
    alone = run(pl.HMC(draws=100, chains=32, warmup=60, leapfrogs=5), BIMODAL, right)
    assert bool((alone["position"][..., 0] > 0).all())  # from one mode no chain finds the other

    method = pl.ParallelTempering(draws=150, chains=32, warmup=100, temperatures=6, leapfrogs=6)
    out = run(method, BIMODAL, right.repeat(6, 1), 1)
    side = (out["position"][:, :32, 0] > 0).double()
    share, error = float(side.mean()), float(side.mean(0).std()) / math.sqrt(32)
    assert error < 0.05
    assert share == pytest.approx(0.75, abs=Z * error)
    assert bool(((side.diff(dim=0) != 0).sum(0) > 0).all())  # every chain crosses
    value, said = log_ratio(out["state"].adaptation.bridges)
    variance = 9 + 0.3**2  # both modes are equally far from the prior's centre
    assert said < 0.15
    assert value == pytest.approx(-9 / variance - math.log(2 * math.pi * variance), abs=Z * said)


def test_linear_gaussian_network_and_going_on() -> None:
    problem = LinearGaussian()
    method = pl.ParallelTempering(draws=60, chains=12, warmup=60, temperatures=5, leapfrogs=4, trajectory=1.0)
    posterior = problem.fit(method)
    report = posterior.diagnostics()
    assert posterior.log_evidence == pytest.approx(problem.log_evidence(), abs=Z * report["log_evidence_error"])
    assert 0 < report["log_evidence_error"] < 0.5
    assert len(report["temperatures"]) == 5
    assert len(report["swap_rates"]) == 4
    assert len(report["round_trips"]) == 12
    assert report["barrier"] == pytest.approx(sum(1 - rate for rate in report["swap_rates"]))
    statistics = posterior.statistics  # type: ignore[attr-defined]
    assert statistics["swap"].shape == (12, 60)
    assert 0 < float(statistics["swap"].mean()) < 0.5
    longer = posterior.extend(draws=10)  # type: ignore[attr-defined]
    assert len(longer.weights()["weight"]) == 12 * 70
    assert longer.log_evidence != posterior.log_evidence
    assert longer.log_evidence == pytest.approx(problem.log_evidence(), abs=Z * longer.run["log_evidence_error"])


@pytest.mark.slow
def test_masses_and_steps_after_a_short_warm_up() -> None:
    # Densities of widths 1 and 0.001: inverse masses must span that, and steps must fit the new masses, not the ones before.
    widths = torch.tensor([1.0, 0.03, 0.001], dtype=torch.float64)
    target = FunctionDensity(
        lambda q: -0.5 * (q / widths).square().sum(-1), 3, prior=lambda q: -0.5 * q.square().sum(-1), dtype=torch.float64
    )
    method = pl.ParallelTempering(draws=50, warmup=150, chains=3, temperatures=4, hottest=0.2, leapfrogs=20)
    start = torch.randn(method.rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * widths
    found = run(method, target, start)
    assert 0.6 < float(found["acceptance"].mean()) < 0.97
    mass = found["state"].adaptation.inverse_mass[0]
    torch.testing.assert_close(mass, widths.square(), rtol=0.5, atol=0.0)


def test_without_a_replica_at_the_prior_there_is_no_evidence() -> None:
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(12, 1, generator=stream)
    net, data = nn.Linear(1, 1), (x, torch.sin(2 * x))
    settings: dict[str, Any] = {"progress": False, "compile": False, "prior": pl.priors.Flat()}
    with pytest.raises(ValueError, match="improper"):
        pl.fit(net, data, pl.ParallelTempering(draws=2, warmup=2), **settings)
    method = pl.ParallelTempering(draws=4, warmup=4, chains=2, temperatures=2, hottest=0.1)
    posterior = pl.fit(net, data, method, **settings)
    assert posterior.log_evidence is None
    assert posterior.diagnostics()["log_evidence"] is None
    assert posterior.diagnostics()["temperatures"][-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"temperatures": 1}, "temperatures"),
        ({"hottest": 1.0}, "hottest"),
        ({"leapfrogs": 0}, "leapfrogs"),
        ({"trajectory": 0.0}, "trajectory"),
        ({"target_acceptance": 0.0}, "target_acceptance"),
        ({"chains": 0}, "chains"),
    ],
)
def test_bad_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=f"ParallelTempering: {word}"):
        pl.ParallelTempering(**settings)
