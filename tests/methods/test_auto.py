"""The rule behind "auto": what it takes for which problem, that budgets are kept, and that what is given is left alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible.core.likelihoods import unscaled
from plausible.methods.automatic import rule
from plausible.methods.automatic.rule import Problem

SMALL = Problem(rows=200, weights=600, products=550)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, pl.NUTS),
        ({"rows": 3_000}, pl.HMC),  # trajectories of NUTS would take too long
        ({"rows": 10**5}, pl.Ensemble),
        ({"rows": 10**6}, pl.Laplace),  # five epochs of five members would take minutes
        ({"resident": False}, pl.Ensemble),  # from a loader
        ({"moving": True}, pl.Ensemble),  # batch norm
        ({"weights": 10**6, "products": 10**6, "perceptron": False}, pl.Ensemble),
        ({"weights": 10**6, "products": 10**6, "perceptron": False, "fresh": False}, pl.Laplace),
        ({"rows": 10**6, "weights": 10**7, "products": 10**9, "perceptron": False}, pl.Laplace),
    ],
)
def test_what_it_takes_in_a_minute(change: dict[str, Any], expected: type) -> None:
    best = rule.choose(replace(SMALL, **change))
    assert isinstance(best.method, expected)
    assert best.seconds <= rule.SECONDS or best.against


@pytest.mark.parametrize("rows", [20, 500, 5_000, 50_000])
@pytest.mark.parametrize("seconds", [5.0, 60.0, 3600.0])
def test_what_is_chosen_is_estimated_to_fit(rows: int, seconds: float) -> None:
    best = rule.choose(replace(SMALL, rows=rows), seconds)
    assert not best.against
    assert best.seconds <= seconds


def test_where_nothing_fits_it_takes_what_takes_least() -> None:
    best = rule.choose(replace(SMALL, rows=10**7), 1.0)
    assert best.against == f"about {rule.duration(best.seconds)} is more than 1 s"
    assert best.seconds == min(one.seconds for one in rule.candidates(replace(SMALL, rows=10**7), 1.0))


def test_more_time_never_gives_worse_chains() -> None:
    work = []
    for seconds in (2.0, 5.0, 20.0, 60.0, 600.0):
        method = rule.choose(replace(SMALL, rows=1000), seconds).method
        assert isinstance(method, pl.HMC | pl.NUTS)
        leapfrogs = rule.TREE if isinstance(method, pl.NUTS) else method.leapfrogs
        work.append((method.warmup + method.draws * method.thin) * leapfrogs)
    assert work == sorted(work)


@pytest.mark.parametrize("seconds", [1.0, 2.0, 5.0])
def test_chains_are_taken_where_they_can_adapt(seconds: float) -> None:
    for rows in (100, 300, 1000, 3000):
        method = rule.choose(replace(SMALL, rows=rows), seconds).method
        if isinstance(method, pl.HMC):
            assert method.warmup >= 200
            assert method.draws * method.thin >= 199
            assert method.leapfrogs >= rule.SHORTEST
    assert not isinstance(rule.choose(replace(SMALL, rows=10_000), seconds).method, pl.HMC | pl.NUTS)


def test_memory_is_a_budget_too() -> None:
    every = rule.candidates(replace(SMALL, weights=10**6, products=10**6, perceptron=False), 600.0, 50 * 2**20)
    ensemble = next(one for one in every if isinstance(one.method, pl.Ensemble))
    assert "GiB is more than" in ensemble.against
    assert not isinstance(every[0].method, pl.Ensemble)


def test_text_of_budgets() -> None:
    assert [rule.parse_seconds(text) for text in ("60", "60s", "2m", "1.5h", 3)] == [60, 60, 120, 5400, 3]
    assert [rule.parse_bytes(text) for text in ("1000", "4G", "500M", "2GiB")] == [1000, 4 * 2**30, 500 * 2**20, 2 * 2**30]
    for bad in ("", "soon", "-1s", 0, True, math.nan):
        with pytest.raises(ValueError, match="time must be a positive number, or one with a unit"):
            rule.parse_seconds(bad)


def data(rows: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(rows, 1) * 4 - 2
    return x, (2 * x).sin() + 0.1 * torch.randn(rows, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))


def test_a_fit_without_a_method_says_what_it_chose_and_keeps_it() -> None:
    posterior = pl.fit(net(), data(), time="1s", progress=False)
    assert isinstance(posterior.method, pl.HMC | pl.NUTS)
    assert posterior.run["choice"].startswith(f"{posterior.method.name}: 40 rows and ")
    assert posterior.model.prior == pl.priors.neal()
    assert isinstance(unscaled(posterior.likelihood), pl.likelihoods.StudentT)


def test_what_is_given_is_taken_as_it_is() -> None:
    x, y = data()
    prior, likelihood = pl.priors.Gaussian(scale=3.0), pl.likelihoods.Gaussian(scale=0.1)
    posterior = pl.fit(net(), (x, y), time="1s", prior=prior, likelihood=likelihood, progress=False)
    assert posterior.model.prior == prior
    assert posterior.likelihood == likelihood
    with pytest.raises(ValueError, match=r"time= is for method='auto'"):
        pl.fit(net(), (x, y), "map", time="1s")


def test_a_loader_and_a_trained_network_get_what_suits_them() -> None:
    x, y = data(64)
    loaded = pl.fit(net(), DataLoader(TensorDataset(x, y), batch_size=16), time="1s", progress=False)
    assert isinstance(loaded.method, pl.Ensemble)
    trained = net()
    optimiser = torch.optim.Adam(trained.parameters(), lr=0.02)
    for _ in range(500):
        optimiser.zero_grad()
        (trained(x) - y).square().mean().backward()
        optimiser.step()
    before = trained[2].weight.detach().clone()  # type: ignore[index, union-attr]
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    kept = pl.fit(trained, loader, time="1s", progress=False)
    assert isinstance(kept.method, pl.Laplace)
    assert kept.method.mode is None
    assert torch.equal(trained[2].weight, before)  # type: ignore[index, union-attr]


def test_the_same_call_gives_the_same_bits() -> None:
    first, second = (pl.fit(net_of(3), data(), time="1s", seed=1, progress=False).functions(data()[0]) for _ in range(2))
    assert torch.equal(first, second)


def net_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return net()
