"""Cyclical step sizes: the exact law of every draw, modes that one chain finds, and which states are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core import schedules
from tests.methods.test_sgld import COLUMNS, PRECISION, QUIET, Columns, N, Z, _assert_law, _data, _run, _settings


def _laws(rates: Tensor, temperature: Tensor) -> Tensor:
    """The variance after each step, in units of Λ⁻¹: v' = (1 − εΛ/2)²v + εΛT, from a start far away that is forgotten."""
    v, laws = 1.0, []
    for rate, heat in zip(rates.tolist(), temperature.tolist()):
        v = (1 - rate / 2) ** 2 * v + rate * heat
        laws.append(v)
    return torch.tensor(laws, dtype=torch.float64)


@pytest.mark.parametrize(("exploration", "burn_in"), [(0.0, 0.5), (0.5, 0.5)])
def test_draws_of_every_place_in_a_cycle_have_its_law(exploration: float, burn_in: float) -> None:
    steps, cycles, start = 1600, 16, 2.0
    chain = pl.SGLD(epochs=steps, batch_size=None, lr=start / PRECISION, burn_in=burn_in, thin=1)
    draws, _ = _run(pl.Cyclical(chain, cycles=cycles, exploration=exploration))
    kept = 100 - int(burn_in * 100)
    assert draws.shape == (cycles * kept, COLUMNS)
    t = torch.arange(steps)
    rates = start / 2 * (torch.cos(math.pi * (t % 100) / 100) + 1)
    exact = _laws(rates, (t % 100 >= exploration * 100).double()).view(cycles, 100)[1:, -kept:]
    found = draws.view(cycles, kept, COLUMNS)[1:]
    _assert_law((found / exact.sqrt()[..., None]).reshape(-1, COLUMNS), 1.0)
    by_place = (found.square().mean(2) / exact).mean(0)  # at every place, over cycles and columns
    assert float((by_place - 1).abs().max()) < Z * math.sqrt(2 / (COLUMNS * (cycles - 1)))
    if exploration:
        assert float(exact[:, 0].max()) < 0.9 * float(exact[:, 2].min())  # the first of a cycle is one step from the cold


class Wells(nn.Module):
    """f(x) = sin θ: a mode of every column at each multiple of π."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(100))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.sin().expand(len(x), -1)


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_one_chain_finds_several_modes_where_the_chain_alone_stays(name: str) -> None:
    x, y = torch.zeros(10, 1), torch.zeros(10, 100)
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(scale=0.6), "prior": pl.priors.Gaussian(4.0), **QUIET}
    # the curvature of the modes is 10/0.36 = 28, the wall between them 14 nats high
    chain: Any = pl.SGLD(lr=0.5) if name == "sgld" else pl.SGHMC(lr=0.15, friction=0.3)
    chain = replace(chain, epochs=3000, batch_size=None, burn_in=0.8, thin=5)
    cyclical = pl.fit(Wells(), (x, y), pl.Cyclical(chain, cycles=15), **settings).weights()["theta"].double().view(15, 8, 100)
    modes = (cyclical / math.pi).round()
    assert float((modes[:, -4:] == modes[:, -1:]).double().mean()) > 0.99  # a cycle ends in one of them
    ends = modes[:, -1]
    assert min(len(column.unique()) for column in ends.T) >= 3
    assert abs(float(ends.mean())) < Z * float(ends.mean(0).std()) / 10
    spread = (cyclical[:, -1] - math.pi * ends).std() * 28**0.5
    assert 0.8 < float(spread) < 1.4  # as wide as the modes are, or as they were when steps became too small to settle
    calm = replace(chain, lr=0.02 if name == "sgld" else 0.003)
    assert float(pl.fit(Wells(), (x, y), calm, **settings).weights()["theta"].abs().max()) < math.pi / 2


@pytest.mark.parametrize(
    ("epochs", "cycles", "burn_in", "thin", "kept"),
    [
        (40, 4, 0.5, 5, [10, 20, 30, 40]),
        (40, 4, 0.5, 2, [8, 10, 18, 20, 28, 30, 38, 40]),
        (40, 2, 0.9, 1, [19, 20, 39, 40]),
        (10, 4, 0.5, 1, [2, 3, 5, 6, 8, 9]),  # ⌈10/4⌉ = 3: the last cycle is cut short
    ],
)
def test_the_end_of_every_cycle_is_kept(epochs: int, cycles: int, burn_in: float, thin: int, kept: list[int]) -> None:
    chain = pl.SGLD(epochs=epochs, batch_size=None, lr=1e-4, burn_in=burn_in, thin=thin)
    plan = pl.Cyclical(chain, cycles).plan(N)
    assert [t for t in range(1, plan.steps + 1) if plan.keeps(t)] == kept
    for t in range(kept[-1]):
        assert plan.next_draw(t) == min(k for k in kept if k > t)


def test_its_steps_are_those_of_the_chain_with_the_schedule() -> None:
    x, y = _data()
    chain = pl.SGLD(epochs=20, batch_size=20, lr=0.01, burn_in=0.0, thin=1)
    one = pl.fit(Columns(3), (x, y[:, :3]), pl.Cyclical(chain, cycles=4), **_settings())
    two = pl.fit(Columns(3), (x, y[:, :3]), replace(chain, lr=schedules.Cyclical(0.01, 4)), **_settings())
    torch.testing.assert_close(one.weights()["theta"], two.weights()["theta"])


def test_auto_finds_a_step_in_the_first_cycle_and_starts_each_with_n_over_b_times_as_much() -> None:
    x, y = _data()
    method = pl.Cyclical(pl.SGLD(epochs=1200, batch_size=20, burn_in=0.75), cycles=6)
    posterior = pl.fit(Columns(4), (x, y[:, :4]), method, **_settings())
    rates = torch.tensor(posterior.history["lr"])  # means over epochs, of 3 steps
    assert float(rates[400] / rates[500]) == pytest.approx(2 * 3**0.5, rel=0.03)  # cos at its half: ½·(N/B)^½
    torch.testing.assert_close(rates[200:400], rates[800:1000])
    assert 0.5 < float(posterior.weights()["theta"].double().var(0).mean() * PRECISION) < 2


def test_ensembles_of_it_and_any_chain_inside_run() -> None:
    x, y = _data()
    for inside in ("sghmc", "sgnht", "psgld"):
        chain = replace(pl.methods.create(inside), epochs=40, lr=1e-3, batch_size=20, burn_in=0.6, thin=None)
        method = pl.Ensemble(pl.Cyclical(chain, cycles=2, exploration=0.5), members=2)
        posterior = pl.fit(Columns(3), (x, y[:, :3]), method, **_settings())
        assert bool(posterior.weights()["theta"].isfinite().all())
    assert pl.Cyclical("sghmc").method == pl.SGHMC()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": pl.MAP()}, "a chain by stochastic gradients"),
        ({"cycles": 0}, "cycles must be"),
        ({"exploration": 1.0}, "exploration must be"),
        ({"exploration": 0.5}, "give the method an lr"),
        ({"exploration": 0.8, "method": pl.SGLD(lr=1e-3)}, "a burn_in of 0.8 or more"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.Cyclical(**settings)


def test_plans_without_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps cannot have 4 cycles"):
        pl.Cyclical(pl.SGLD(epochs=3, batch_size=None)).plan(N)
    with pytest.raises(ValueError, match="only 5 of the 10 steps of a cycle"):
        pl.Cyclical(pl.SGLD(epochs=40, batch_size=None, thin=6)).plan(N)
