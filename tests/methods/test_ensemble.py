"""Ensemble: independent members that start apart, stacked or looped, with their own batches, patience and posteriors."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible.core import random
from plausible.core.data import Order, as_data
from plausible.core.schedules import Cosine
from plausible.engine import stopping
from plausible.engine.method import Method, Run
from plausible.methods.ensembles.ensemble import Stacked

QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _data() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(4)
    x = torch.randn(24, 2, generator=stream)
    return x, (x[:, :1] * x[:, 1:]).tanh() + 0.1 * torch.randn(24, 1, generator=stream)


def _network(*, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        layers: list[nn.Module] = [nn.Linear(2, 6)]
        layers += [nn.BatchNorm1d(6)] if norm else []
        layers += [nn.Tanh()]
        layers += [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(*layers, nn.Linear(6, 1))


STILL = pl.MAP(epochs=1, batch_size=None, lr=1e-12)  # shows where the members start


def _spread(posterior: pl.Posterior) -> dict[str, float]:
    return {name: float(value.std(0).min()) for name, value in posterior.weights().items()}


# ---------------------------------------------------------------------------------------------------------------------
# Starting points


def test_fresh_members_start_apart_and_in_the_range_of_the_layers_own_initialisation() -> None:
    net = _network()
    weights = pl.fit(net, _data(), pl.Ensemble(STILL, members=100), **QUIET).weights()
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias", "likelihood.log_scale"}
    for name, fan_in in [("0.weight", 2), ("0.bias", 2), ("2.weight", 6), ("2.bias", 6)]:
        values = weights[name].flatten()
        assert float(values.abs().max()) <= fan_in**-0.5 + 1e-6  # U(−1/√fan_in, 1/√fan_in) of nn.Linear
        assert float(values.std()) == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.2)
        assert len(torch.unique(weights[name][:, ...].flatten(1), dim=0)) == 100


def test_members_from_the_prior_have_its_spread() -> None:
    prior = pl.priors.Gaussian(scale=0.3)
    weights = pl.fit(_network(), _data(), pl.Ensemble(STILL, members=100, init="prior"), prior=prior, **QUIET).weights()
    for value in weights.values():
        assert abs(float(value.std()) / 0.3 - 1) < 5 / (2 * value.numel()) ** 0.5
        assert abs(float(value.mean())) < 5 * 0.3 / value.numel() ** 0.5


def test_given_members_all_start_at_the_modules_weights() -> None:
    net = _network()
    weights = pl.fit(net, _data(), pl.Ensemble(STILL, members=3, init="given"), **QUIET).weights()
    for name, value in net.named_parameters():
        torch.testing.assert_close(weights[name], value.detach().expand(3, *value.shape))


def test_given_members_part_by_the_order_of_their_batches() -> None:
    method = pl.MAP(epochs=3, batch_size=6, lr=0.01)
    apart = pl.fit(_network(), _data(), pl.Ensemble(method, members=3, init="given"), **QUIET)
    assert min(_spread(apart).values()) > 0
    whole = pl.MAP(epochs=3, batch_size=None, lr=0.01)
    together = pl.fit(_network(), _data(), pl.Ensemble(whole, members=3, init="given"), **QUIET)
    assert max(_spread(together).values()) < 1e-6


def test_another_seed_gives_other_members() -> None:
    one, two = (pl.fit(_network(), _data(), pl.Ensemble(STILL, members=2), seed=s, **QUIET).weights() for s in (0, 1))
    assert not torch.equal(one["0.weight"], two["0.weight"])


class Bare(nn.Module):
    """A parameter that no layer owns, so nothing can re-initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 1), nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


def test_bare_parameters_are_named_in_a_warning_and_start_alike(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="plausible"):
        weights = pl.fit(Bare(), _data(), pl.Ensemble(STILL, members=3), **QUIET).weights()
    (record,) = [r for r in caplog.records if "reset_parameters" in r.message]
    assert "scale" in record.message
    assert "layer" not in record.message
    torch.testing.assert_close(weights["scale"], torch.full((3, 1), 1.5))
    assert float(weights["layer.weight"].std(0).min()) > 0
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="plausible"):
        pl.fit(Bare(), _data(), pl.Ensemble(STILL, members=3, init="prior"), **QUIET)
    assert not caplog.records


def test_frozen_parameters_stay_as_they_are() -> None:
    net = _network()
    net[0].requires_grad_(False)
    posterior = pl.fit(net, _data(), pl.Ensemble(STILL, members=2), **QUIET)
    assert "0.weight" not in posterior.weights()
    torch.testing.assert_close(posterior.model.network[0].weight, net[0].weight)


def test_continuing_gives_each_member_its_own_earlier_state() -> None:
    method = pl.MAP(epochs=2, batch_size=None, lr=0.01)
    earlier = pl.fit(_network(), _data(), pl.Ensemble(method, members=3), **QUIET)
    later = pl.fit(_network(), _data(), pl.Ensemble(STILL, members=3), init=earlier, **QUIET)
    for name, value in earlier.weights().items():
        torch.testing.assert_close(later.weights()[name], value)


# ---------------------------------------------------------------------------------------------------------------------
# A member is an independent run


def _by_hand(inner: Method, net: nn.Module, member: int, members: int, seed: int, steps: int, size: int | None) -> Any:
    """Member `member`, run alone with the inner method's own step, from its start over its batches."""
    x, y = _data()
    batch = pl.Batch(x, y)
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), batch, num_data=len(x))
    run = replace(Run.alone(inner, model, as_data((x, y), dtype=x.dtype, device=x.device), seed), steps=steps)
    fresh = model.starting_at({**model.buffers, **model.reinitialised(random.generator(seed, 5, member))})
    state = inner.start(fresh, run, random.fold(random.key(seed), member))
    rows = None if size is None else Order(len(x), size, seed, members)(0, steps)[:, member]
    with torch.no_grad():
        for t in range(steps):
            own = batch if rows is None else pl.Batch(x[rows[t]], y[rows[t]])
            state, _ = inner.step(model, run, state, own)
    return state


@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("name", ["map", "sgld"])
def test_a_member_is_an_independent_run(name: str, size: int | None) -> None:
    lr = Cosine(0.02) if name == "map" else 1e-3
    inner: Any = pl.MAP(epochs=4, batch_size=size, lr=lr) if name == "map" else None
    inner = inner or pl.SGLD(epochs=4, batch_size=size, lr=lr, burn_in=0.0, thin=1)
    model: dict[str, Any] = {"prior": pl.priors.Gaussian(), "likelihood": pl.likelihoods.Gaussian()}
    posterior = pl.fit(_network(), _data(), pl.Ensemble(inner, members=3), seed=2, **model, **QUIET)
    last = {n: v[-3:] for n, v in posterior.weights().items()}
    steps = 4 if size is None else 16
    for member in range(3):
        state = _by_hand(inner, _network(), member, 3, 2, steps, size)
        for n, value in state.weights.items():
            torch.testing.assert_close(last[n][member], value, rtol=1e-4, atol=1e-5)


def test_members_do_not_depend_on_how_many_there_are() -> None:
    method = pl.SGLD(epochs=5, batch_size=6, lr=1e-3, burn_in=0.0, thin=1)
    few, many = (pl.fit(_network(), _data(), pl.Ensemble(method, members=k), **QUIET).weights() for k in (2, 4))
    for n in few:
        torch.testing.assert_close(few[n].reshape(20, 2, -1), many[n].reshape(20, 4, -1)[:, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("inner", [pl.MAP(epochs=3, batch_size=6, lr=0.01), pl.SGLD(epochs=3, batch_size=6, lr=1e-3, thin=1)])
def test_vmapped_equals_looped(inner: Method, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble, net = pl.Ensemble(inner, members=3), _network(norm=norm)
    stacked = pl.fit(net, _data(), ensemble, **QUIET)
    calls = []

    def looped(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return self.looped_step(*arguments)

    monkeypatch.setattr(Stacked, "step", looped)
    one_by_one = pl.fit(net, _data(), ensemble, **QUIET)
    assert calls
    x, _ = _data()
    torch.testing.assert_close(stacked.functions(x), one_by_one.functions(x), rtol=1e-3, atol=1e-4)
    for name in stacked.history:
        torch.testing.assert_close(
            torch.tensor(stacked.history[name]), torch.tensor(one_by_one.history[name]), rtol=1e-3, atol=1e-3
        )


def test_dropout_differs_between_members() -> None:
    method = pl.MAP(epochs=2, batch_size=None, lr=0.01)
    posterior = pl.fit(_network(dropout=0.5), _data(), pl.Ensemble(method, members=3, init="given"), **QUIET)
    assert _spread(posterior)["0.weight"] > 0


def test_batch_norm_statistics_belong_to_each_member() -> None:
    method = pl.MAP(epochs=5, batch_size=8, lr=0.05)
    posterior = pl.fit(_network(norm=True), _data(), pl.Ensemble(method, members=3), **QUIET)
    stored = posterior.store.get([0, 1, 2], "cpu")
    assert float(stored["1.running_mean"].std(0).min()) > 0
    assert stored["1.num_batches_tracked"].tolist() == [15, 15, 15]


class Branching(nn.Module):
    """A branch on a value, which vmap cannot take for all members at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(self.layer.bias.detach().sum()) > 0 else -self.layer(x)


def test_networks_that_cannot_be_stacked_are_looped_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = _data()
    with caplog.at_level(logging.WARNING, logger="plausible"):
        posterior = pl.fit(Branching(), _data(), pl.Ensemble(pl.MAP(epochs=2, lr=0.01), members=4), **QUIET)
    assert any("one after the other" in r.message for r in caplog.records)
    assert posterior.functions(x).shape == (4, 24, 1)
    assert min(_spread(posterior)["layer.weight"], _spread(posterior)["layer.bias"]) > 0


class Recurrent(nn.Module):
    """A recurrent layer, for which vmap has no rule of its own."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]):
        super().__init__()
        self.cell, self.head = kind(1, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(-1))[0][:, -1])


class Distances(nn.Module):
    """An operation that vmap runs member by member, with a warning of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 2), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(torch.pdist(torch.cat([h, h]))[: len(x), None])


@pytest.mark.filterwarnings("error", "ignore::plausible.FitWarning")
def test_operations_without_a_rule_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "plausible"):
        pl.fit(Distances(), _data(), pl.Ensemble(pl.MAP(epochs=2, batch_size=8), members=2), compile=False, progress=False)
    assert sum("no rule for aten::pdist" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.filterwarnings("error", "ignore::plausible.FitWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_members_equal_looped_ones(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, _ = _data()
    method, net = pl.Ensemble(pl.MAP(epochs=3, batch_size=8, lr=0.01), members=3), Recurrent(kind)
    stacked = pl.fit(net, _data(), method, **QUIET)
    if "torch._dynamo" not in sys.modules:  # the compiler, once imported, brings rules for recurrent layers along
        assert any("one after the other" in r.getMessage() for r in caplog.records)
    monkeypatch.setattr(Stacked, "step", lambda self, *rest: self.looped_step(*rest))
    looped = pl.fit(net, _data(), method, **QUIET)
    torch.testing.assert_close(stacked.functions(x), looped.functions(x), rtol=1e-3, atol=1e-4)
    assert min(_spread(stacked).values()) > 0


def test_a_loader_feeds_all_members_the_same_stacked_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _data()
    method = pl.Ensemble(pl.MAP(epochs=3, lr=0.01), members=3)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)  # in order, the last batch short
    with monkeypatch.context() as patched:
        patched.setattr(Stacked, "looped_step", None)  # streamed members are stacked too
        stacked = pl.fit(_network(), loader, method, **QUIET)
    assert stacked.run["steps"] == 12
    monkeypatch.setattr(Stacked, "step", lambda self, *rest: self.looped_step(*rest))
    looped = pl.fit(_network(), loader, method, **QUIET)
    torch.testing.assert_close(stacked.functions(x), looped.functions(x), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Early stopping by member


def test_each_member_stops_as_it_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    original = stopping.accumulate

    def record(function: Any, held: Any) -> Tensor:
        found = original(function, held)
        if found.ndim:  # of members, and not the number of examples
            seen.append(found / held.num_data)
        return found

    monkeypatch.setattr(stopping, "accumulate", record)
    patience = 3
    method = pl.MAP(epochs=80, batch_size=6, lr=0.05, patience=patience, holdout=0.25)
    posterior = pl.fit(_network(), _data(), pl.Ensemble(method, members=6), **QUIET)
    values = torch.stack(seen)  # [epochs, members]
    expected, ends = [], []
    for member in range(6):
        best, stale = 0, 0
        for epoch in range(1, len(values)):
            better = bool(values[epoch, member] > values[best, member])
            best, stale = (epoch, 0) if better else (best, stale + 1)
            if stale == patience:
                break
        expected.append(values[best, member])
        ends.append(epoch + 1)
    assert max(ends) == len(values) < 80  # the last member ends the run
    assert min(ends) < max(ends)
    assert bool((values.max(0).values > torch.stack(expected)).any())  # training on would have moved an early one
    x, y = _data()
    rows = random.permutation(0, 2**31 - 1, len(x))[:6]
    draws = posterior.store.get(range(6), "cpu")
    kept = torch.stack(
        [
            posterior.model.log_likelihood({n: v[k] for n, v in draws.items()}, pl.Batch(x[rows], y[rows])).mean()
            for k in range(6)
        ]
    )
    torch.testing.assert_close(kept, torch.stack(expected), rtol=1e-4, atol=1e-4)
    means = values.mean(1).tolist()
    assert posterior.history["held_out_log_likelihood"] == pytest.approx(means, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members must be"),
        ({"members": 2.0}, "members must be"),
        ({"members": True}, "members must be"),
        ({"method": 3}, "method must be a Method"),
        ({"method": "mop"}, "unknown method"),
        ({"method": pl.MAP}, "method must be a Method"),
        ({"method": pl.Ensemble()}, "an ensemble of ensembles"),
        ({"init": "random"}, "init must be"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.Ensemble(**settings)


def test_more_members_than_memory_holds_are_refused_with_an_estimate() -> None:
    with pytest.raises(MemoryError, match=r"10,000,000,000 members.*GiB are needed and .* GiB are free") as caught:
        pl.fit(_network(), _data(), pl.Ensemble(STILL, members=10**10), **QUIET)
    assert "fewer members" in str(caught.value)
