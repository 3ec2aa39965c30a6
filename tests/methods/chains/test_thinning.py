"""Thinned chains: the statistics of a draw tell of all transitions since the one before, not of the last of them alone."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.apps.report.words import percent
from plausible.blocks.chains import convergence as diagnostics
from plausible.blocks.chains.density import FunctionDensity, run
from plausible.methods.chains.base import Chains
from plausible.posteriors.verdicts import judged

THIN = 3
KERNELS: list[Any] = [
    pl.HMC(draws=24, chains=6, warmup=12, leapfrogs=8, step_size=0.7, adapt=False),
    pl.NUTS(draws=24, chains=6, warmup=12, max_depth=4, step_size=0.9, adapt=False),
    pl.ChEES(draws=24, chains=6, warmup=12, max_leapfrogs=10),
    pl.MALA(draws=24, chains=6, warmup=12),
    pl.Metropolis(draws=24, chains=6, warmup=12),
    pl.EllipticalSlice(draws=24, chains=6, warmup=12),
    pl.MCLMC(draws=24, chains=6, warmup=12, thin=1),
    pl.ParallelTempering(draws=24, chains=2, warmup=12, temperatures=3, leapfrogs=4),
]
IDS = [kernel.name for kernel in KERNELS]


def thinned(method: Any, thin: int = THIN) -> Any:
    """The same transitions, one of `thin` kept."""
    return replace(method, draws=method.draws // thin, thin=thin)


def funnel(q: Tensor) -> Tensor:
    return -0.5 * (q[:, 0] / 3).square() - 0.5 * (q[:, 1:].square() * (-q[:, :1]).exp() + q[:, :1]).sum(-1)


def by_draw(values: Tensor) -> Tensor:
    """Of all transitions [draws · thin, chains] those of each draw: [draws, thin, chains]."""
    return values.unflatten(0, (-1, THIN))


@pytest.mark.parametrize("method", KERNELS, ids=IDS)
def test_every_transition_counts(method: Chains) -> None:
    target = FunctionDensity(funnel, 5, prior=lambda q: -0.5 * q.square().sum(-1))
    if isinstance(method, pl.EllipticalSlice):
        target = FunctionDensity(funnel, 5).bound(precision=torch.ones(5, dtype=torch.float64))
    start = torch.randn(method.rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    every, some = run(method, target, start), run(thinned(method), target, start)
    last = {name: by_draw(value)[:, -1] for name, value in every.items() if name != "state"}
    assert torch.equal(some["position"], last["position"])
    for name in ("divergent", "leapfrogs"):
        torch.testing.assert_close(some[name], by_draw(every[name]).sum(1))
    torch.testing.assert_close(some["acceptance"], by_draw(every["acceptance"]).mean(1))
    for name in ("energy", "step_size", "log_joint"):
        assert torch.equal(some[name], last[name])
    torch.testing.assert_close(some["energy_change"], every["energy"].diff(dim=0)[THIN - 2 :: THIN])
    assert "energy_change" not in every
    if method.name in ("hmc", "nuts"):
        assert float(last["divergent"].sum()) < float(every["divergent"].sum())


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20)[:, None]
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)), (x, x.sin())


SETTINGS: dict[str, Any] = {"seed": 3, "progress": False, "compile": False, "likelihood": pl.likelihoods.Gaussian(0.3)}


@pytest.mark.slow
def test_diagnostics_are_of_all_transitions() -> None:
    net, data = small()
    method = pl.HMC(draws=300, chains=2, warmup=60, leapfrogs=6)
    every, some = (pl.fit(net, data, each, **SETTINGS) for each in (method, thinned(method)))
    one, two = every.diagnostics(), some.diagnostics()
    assert one["transitions"] == two["transitions"] == 600
    for name in ("divergences", "acceptance", "acceptance_least", "leapfrogs"):
        assert one[name] == pytest.approx(two[name])
    energy = every.statistics["energy"]
    exact = energy.diff(dim=1)[:, THIN - 2 :: THIN].square().mean(1) / energy[:, THIN - 1 :: THIN].var(dim=1)
    assert two["ebfmi"] == pytest.approx(float(exact.min()))
    alone = float(diagnostics.ebfmi(some.statistics["energy"]).min())  # as if thinned energies followed one another
    assert abs(two["ebfmi"] - one["ebfmi"]) < abs(alone - one["ebfmi"])


def test_divergences_are_a_share_of_transitions() -> None:
    found = {"chains": 4, "draws": 100, "transitions": 1000, "divergences": 5, "acceptance": 0.8, "rhat": 1.0}
    (said,) = [verdict for verdict in judged(found) if "diverged" in verdict.headline]
    assert said.headline == f"5 transitions of 1,000 ({percent(0.005, 1)}) diverged."
    assert said.tone == "unclear"


def test_a_run_that_was_stopped_between_two_draws_goes_on_as_one() -> None:
    net, data = small()
    method = pl.HMC(draws=8, chains=2, warmup=5, thin=THIN, leapfrogs=4)
    whole = pl.fit(net, data, method, **SETTINGS)

    def stop(step: int, _: Any) -> None:
        if step == method.warmup + 3 * THIN + 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.warns(UserWarning, match="Ctrl-C"):
        short = pl.fit(net, data, method, callbacks=[stop], **SETTINGS)
    assert len(short) == 6
    longer = short.extend(5, progress=False)
    assert torch.equal(longer.functions(data[0]), whole.functions(data[0]))
    for name, value in whole.statistics.items():
        assert torch.equal(longer.statistics[name], value), name
