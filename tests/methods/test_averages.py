"""SWA and SWAG: averages of the path against the path itself, the law of draws, and statistics of batch norm by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.apps.cli.diagnosing import _chains
from plausible.blocks.batch_norm import BatchNorms
from plausible.core import random
from plausible.core.data import Batch, Order, as_data
from plausible.methods.averages.base import DEVIATIONS, SNAPSHOTS, VARIANCE, Averages, Statistics
from plausible.optimisers import SGD
from tests.methods.test_sgld import COLUMNS, PRECISION, QUIET, Columns, N, Z, _data, _extra_variance, _mean, _settings


def _path(count: int, size: int = 6) -> Tensor:
    """A random walk [count, size] far from 0, where a mean of squares less a squared mean would cancel."""
    return 1000 + torch.randn(count, size, generator=torch.Generator().manual_seed(0)).double().cumsum(0)


def _averages(path: Tensor, rank: int, every: int = 1) -> tuple[Tensor, Averages]:
    zero = torch.zeros_like(path[0])
    deviations = {"w": zero.new_zeros(rank, len(zero))} if rank else {}
    mean, state = {"w": zero}, Averages(torch.tensor(0), {"w": zero.clone()}, deviations)
    for step, place in enumerate(path, start=1):
        mean, state = state.seen(mean, {"w": place}, torch.tensor(step % every == 0))
    return mean["w"], state


@pytest.mark.parametrize("every", [1, 3])
def test_running_moments_are_those_of_the_snapshots(every: int) -> None:
    path = _path(50)
    mean, state = _averages(path, rank=4, every=every)
    seen = path[every - 1 :: every]
    assert int(state.snapshots) == len(seen)
    torch.testing.assert_close(mean, seen.mean(0))
    torch.testing.assert_close(state.variance["w"], seen.var(0, correction=0), rtol=1e-6, atol=0)
    # the last four deviations, each from the mean as it was then, in a ring
    expected = {i % 4: seen[i] - seen[: i + 1].mean(0) for i in range(len(seen) - 4, len(seen))}
    torch.testing.assert_close(state.deviations["w"], torch.stack([expected[i] for i in range(4)]))


@pytest.mark.parametrize(("rank", "snapshots"), [(20, 60), (20, 7), (0, 60)])
def test_draws_have_the_stated_mean_and_covariance(rank: int, snapshots: int) -> None:
    x, y = _data()
    method = pl.SWAG(rank=rank, draws=20_000)
    model = pl.fit(Columns(6), (x, y[:, :6]), pl.MAP(epochs=1), **_settings()).model
    mean, state = _averages(_path(snapshots), rank)
    left = {SNAPSHOTS: state.snapshots, "theta": mean, VARIANCE + "theta": state.variance["w"]}
    if rank:
        left[DEVIATIONS + "theta"] = state.deviations["w"]
    draws = method.drawn(model, left, random.key(3))["theta"]
    exact = torch.diag(state.variance["w"])
    if rank:
        known = min(rank, snapshots)
        exact = exact / 2 + state.deviations["w"].T @ state.deviations["w"] / (2 * (known - 1))
    root = torch.linalg.inv(torch.linalg.cholesky(exact))
    white = (draws - mean) @ root.T
    error = Z / math.sqrt(len(draws))
    assert float(white.mean(0).abs().max()) < error
    assert float((white.T @ white / len(draws) - torch.eye(6)).abs().max()) < error * 2**0.5


def test_the_law_of_swag_is_that_of_sgd() -> None:
    # SGD on a Gaussian: SGLD's recursion without the noise, ε/2 = η/N
    x, y = _data()
    rate, epochs = 0.4, 400
    swag = pl.SWAG(None, epochs, batch_size=20, lr=rate * N / PRECISION, optimiser=SGD(momentum=0.0), every=1, rank=0, draws=60)
    draws = pl.fit(Columns(), (x, y), swag, **_settings()).weights()["theta"].double()
    exact = _extra_variance(y, 20, 2 * rate / PRECISION)
    ratio = ((draws - _mean(y)).square().mean(0) / exact)[exact > exact.median() / 10]
    assert abs(float(ratio.mean()) - 1) < Z * float(ratio.std()) / math.sqrt(COLUMNS) + 0.05  # the start is part of the path


@pytest.mark.parametrize("method", [pl.SWA(), pl.SWAG()])
def test_the_averaging_ends_before_it_follows_noise(method: pl.Method) -> None:
    """On targets that inputs say nothing about, the mean of a path that goes on is 17 nats worse than the constant, SWAG 0.8."""
    torch.manual_seed(0)
    x, y, new_x, new_y = torch.randn(60, 20), torch.randn(60, 1), torch.randn(1000, 20), torch.randn(1000, 1)
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
    found = pl.fit(net, (x, y), method, progress=False, compile=False)
    constant = torch.distributions.Normal(y.mean(), y.std()).log_prob(new_y).mean()
    assert float(found.predict(new_x).log_prob(new_y).mean()) > float(constant) - 0.1


def test_the_mean_that_was_best_on_held_out_rows_is_kept() -> None:
    x, y = _data()
    posterior = pl.fit(Columns(3), (x, y[:, :3]), pl.SWA(), **_settings())
    data = as_data((x, y[:, :3]), dtype=y.dtype, device="cpu")
    held = data.split(posterior.method.holdout(N), _settings().get("seed", 0))[1].all()
    values = posterior.history["collecting: held_out_log_likelihood"]
    weights = {name: value[0] for name, value in posterior.weights().items()}
    best = float(posterior.model.log_likelihood(weights, held).mean())
    assert math.isclose(best, max(values), rel_tol=1e-4)
    assert len(values) < 500


def test_swa_is_the_mean_of_the_path_that_the_optimiser_takes() -> None:
    x, y = _data()
    settings = _settings(seed=4)
    swa = pl.SWA(None, epochs=12, batch_size=20, lr=0.5, optimiser=SGD(), every=4)
    found = pl.fit(Columns(3), (x, y[:, :3]), swa, **settings).weights()["theta"]
    path = []
    theta, velocity = torch.zeros(3), torch.zeros(3)
    order = Order(N, 20, 4)
    for step in range(36):
        rows = order(step, 1)[0]
        gradient = (N / 20 * (theta - y[rows, :3]).sum(0) / 1.5**2 + theta / 4) / N
        velocity = 0.9 * velocity + gradient
        theta = theta - 0.5 * velocity
        if (step + 1) % 4 == 0:
            path.append(theta)
    torch.testing.assert_close(found, torch.stack(path).mean(0, keepdim=True), rtol=1e-4, atol=1e-5)


def _normed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    stream = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(90, 2, generator=stream)
    y = (x[:, :1] * x[:, 1:]).sin() + 0.1 * torch.randn(90, 1, generator=stream)
    norm = nn.BatchNorm1d(8, momentum=0.3)
    return nn.Sequential(nn.Linear(2, 8), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)), (x, y)


SMALL: dict[str, Any] = {"mode": pl.MAP(epochs=10, patience=None), "epochs": 20, "batch_size": 30, "lr": 0.02}


@pytest.mark.parametrize("momentum", [0.3, None])
def test_every_draw_has_the_statistics_of_its_own_activations(momentum: float | None) -> None:
    net, (x, y) = _normed()
    net[1].momentum = momentum
    posterior = pl.fit(net, (x, y), pl.SWAG(draws=5, **SMALL), likelihood=pl.likelihoods.Gaussian(), **QUIET)
    w, stored = posterior.weights(), posterior.store.get(range(5), torch.device("cpu"))
    assert float(w["0.weight"].std(0).min()) > 0
    for k in range(5):
        before = x @ w["0.weight"][k].T + w["0.bias"][k]
        torch.testing.assert_close(stored["1.running_mean"][k], before.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stored["1.running_var"][k], before.var(0), rtol=1e-4, atol=1e-5)
    # and predictions use them
    normed = (x @ w["0.weight"][2].T + w["0.bias"][2] - stored["1.running_mean"][2]) / (
        stored["1.running_var"][2] + 1e-5
    ).sqrt()
    hidden = torch.tanh(normed * w["1.weight"][2] + w["1.bias"][2])
    torch.testing.assert_close(posterior.functions(x)[2], hidden @ w["4.weight"][2].T + w["4.bias"][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method", [pl.SWA(**SMALL), pl.SWAG(draws=4, **SMALL), pl.Ensemble(pl.SWAG(draws=4, **SMALL), members=2)]
)
def test_a_loaded_posterior_predicts_the_same_bits(method: pl.Method, tmp_path: Path) -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, method, **QUIET)
    posterior.save(tmp_path / "averages")
    x = torch.randn(7, 2)
    assert torch.equal(pl.load(tmp_path / "averages", net).predict(x).mean, posterior.predict(x).mean)


def test_multiswag_is_a_mixture_of_members_that_differ() -> None:
    net, (x, y) = _normed()
    posterior = pl.fit(net, (x, y), pl.Ensemble(pl.SWAG(draws=6, **SMALL), members=3), **QUIET)
    means = torch.stack([part.functions(x).mean(0) for part in posterior.parts])
    assert float(means.std(0).mean()) > float(posterior.parts[0].functions(x).std(0).mean()) * 0.2
    assert all(len(part) == 6 for part in posterior.parts)


def test_draws_are_independent_and_are_judged_as_no_chain() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.SWAG(draws=8, **SMALL), **QUIET)
    assert "rhat" not in posterior.diagnostics(data[0])
    assert posterior.verdict() == "The 8 draws are independent: there is no chain that could fail to converge."


def test_the_command_line_has_nothing_to_diagnose() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.SWAG(draws=8, **SMALL), **QUIET)
    with pytest.raises(ValueError, match="a run by swag with 8 draws has no chains to diagnose"):
        _chains(SimpleNamespace(method="swag"), posterior)  # type: ignore[arg-type]


def test_it_starts_where_it_is_told_to() -> None:
    x, y = _data()
    start = pl.fit(Columns(3), (x, y[:, :3]), pl.MAP(epochs=300, batch_size=None, lr=0.1, patience=None), **_settings())
    still = pl.SWA(mode=None, epochs=5, lr=1e-9)
    there = pl.fit(Columns(3), (x, y[:, :3]), still, init=start, **_settings())
    torch.testing.assert_close(there.weights()["theta"], start.weights()["theta"])


def test_points_are_at_their_mean() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.SWAG(draws=4, **SMALL), where="4.*", **QUIET)
    stored = posterior.store.get(range(4), torch.device("cpu"))
    assert set(posterior.weights()) == {"4.weight", "4.bias"}
    assert bool((stored["0.weight"] == stored["0.weight"][:1]).all())
    assert float(stored["4.weight"].std(0).min()) > 0


def test_members_that_start_at_once_collect_as_they_would_alone() -> None:
    net, data = _normed()
    swag = pl.SWAG(**{**SMALL, "mode": None, "draws": 3})
    together = pl.fit(net, data, pl.Ensemble(swag, members=2, init="given"), **QUIET)
    assert float(together.functions(data[0]).std(0).mean()) > 0
    assert together.run["stages"][0][0] == "collecting"


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (pl.SWAG, {"rank": 1}, "rank=1 is one deviation"),
        (pl.SWAG, {"draws": 0}, "draws must be"),
        (pl.SWA, {"mode": pl.SGLD()}, "mode must be MAP"),
        (pl.SWA, {"every": 0}, "every must be"),
        (pl.SWA, {"lr": -1.0}, "lr must be positive"),
        (pl.SWA, {"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_bad_settings_are_refused_by_name(method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        method(**settings)


def test_too_few_snapshots_are_refused() -> None:
    x, y = _data()
    with pytest.raises(ValueError, match="every=9 collects fewer than 2 snapshots in 10 steps"):
        pl.fit(Columns(2), (x, y[:, :2]), replace(pl.SWAG(), epochs=10, batch_size=None, every=9), **_settings())


def test_a_pass_that_is_taken_up_again_finds_the_same_statistics() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.SWAG(draws=3, **SMALL), **QUIET)
    norms = BatchNorms.of(posterior.model)
    assert norms is not None
    assert norms.shares == {"1.running_mean": 0.3, "1.running_var": 0.3}
    whole, first, second = (Statistics(norms, posterior.weights()) for _ in range(3))
    batches = [Batch(data[0][i : i + 30], data[1][i : i + 30]) for i in (0, 30, 60)]
    for batch in batches:
        whole.add(batch)
    first.add(batches[0])
    second.restore(first.tensors())
    for batch in batches[1:]:
        second.add(batch)
    for name, value in whole.finish().items():
        assert torch.equal(second.finish()[name], value)
    whole.add(Batch(data[0][:1], data[1][:1]))  # a last batch of one row has no variance, and is left out
    assert whole.rows == 90
