"""FGE and snapshot ensembles: the rates of their papers, the members against the path itself, batch norm."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plausible as pl
from plausible.core.data import Order
from plausible.methods.averages.cycles import PathEnsemble
from plausible.optimisers import SGD
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET, Columns, N, _data, _settings


def _triangle(i: int, c: int, high: float, low: float) -> float:
    """Garipov et al. (2018), §4, with i counted from 1."""
    t = ((i - 1) % c + 1) / c
    return (1 - 2 * t) * high + 2 * t * low if t <= 0.5 else (2 - 2 * t) * low + (2 * t - 1) * high


def _wave(i: int, c: int, high: float) -> float:
    """Huang et al. (2017), equation 2: with mod(i − 1, c) they begin at the full rate and do not end at 0."""
    return high / 2 * (math.cos(math.pi * (i % c or c) / c) + 1)


@pytest.mark.parametrize("kind", [pl.FGE, pl.Snapshots])
def test_members_are_the_path_at_the_lowest_rates(kind: type[PathEnsemble]) -> None:
    x, y = _data()
    method = kind(None, epochs=12, batch_size=20, lr=0.5, optimiser=SGD(), cycles=3)
    found = pl.fit(Columns(3), (x, y[:, :3]), method, **_settings(seed=4)).weights()["theta"]
    theta, velocity, members = torch.zeros(3), torch.zeros(3), []
    order = Order(N, 20, 4)
    for i in range(1, 37):
        rows = order(i - 1, 1)[0]
        gradient = (N / 20 * (theta - y[rows, :3]).sum(0) / 1.5**2 + theta / 4) / N
        velocity = 0.9 * velocity + gradient
        theta = theta - (_triangle(i, 12, 0.5, 0.005) if kind is pl.FGE else _wave(i, 12, 0.5)) * velocity
        if i % 12 == (6 if kind is pl.FGE else 0):
            members.append(theta)
    torch.testing.assert_close(found, torch.stack(members), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [pl.FGE, pl.Snapshots])
def test_every_member_has_statistics_of_its_own(kind: type[PathEnsemble], tmp_path: Path) -> None:
    net, (x, y) = _normed()
    method = kind(pl.MAP(epochs=10, patience=None), epochs=20, batch_size=30, cycles=4)
    posterior = pl.fit(net, (x, y), method, **QUIET)
    assert posterior.diagnostics() == {"draws": 4, "chains": 1, "divergences": 0}
    stored = posterior.store.get(range(4), "cpu")
    for k in range(4):
        hidden = x @ stored["0.weight"][k].T + stored["0.bias"][k]
        torch.testing.assert_close(stored["1.running_mean"][k], hidden.mean(0), rtol=1e-4, atol=1e-5)
    posterior.save(tmp_path / "run")
    assert torch.equal(pl.load(tmp_path / "run", net).functions(x), posterior.functions(x))


def test_several_paths_are_a_mixture_and_one_that_is_cut_short_keeps_what_it_has() -> None:
    net, (x, y) = _normed()
    short = pl.FGE(pl.MAP(epochs=5, patience=None), epochs=20, batch_size=30, cycles=4)
    assert pl.fit(net, (x, y), pl.Ensemble(short, members=2), **QUIET).predict(x).num_draws == 8

    def stop(step: int, _: Any) -> None:
        if step == 15 + 24:  # MAP takes 15 steps; the second of four cycles of 15 has had its lowest rate by then
            signal.raise_signal(signal.SIGINT)

    with pytest.warns(UserWarning, match="stopped by"):
        part = pl.fit(net, (x, y), short, callbacks=[stop], **QUIET)
    assert len(part) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycles": 0}, "cycles must be"),
        ({"lr": pl.schedules.Cosine(0.1)}, "lr is the highest rate of a cycle"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"mode": pl.SGLD()}, r"mode must be MAP"),
        ({"lowest_share": 1.0}, "lowest_share must"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.FGE(**settings)


def test_more_cycles_than_there_are_steps_for_are_refused() -> None:
    x, y = _data()
    with pytest.raises(ValueError, match="10 steps cannot have 6 cycles"):
        pl.fit(Columns(2), (x, y[:, :2]), pl.Snapshots(epochs=10, batch_size=None, cycles=6), **_settings())


def test_the_waves_are_those_of_the_papers() -> None:
    i = torch.arange(1, 13)
    exact = torch.tensor([_triangle(int(k), 12, 1.0, 0.01) for k in i])
    torch.testing.assert_close(pl.FGE().wave(i / 12), exact)
    end: Tensor = pl.Snapshots().wave(torch.tensor(1.0))
    assert float(end) == pytest.approx(0, abs=1e-6)
