"""Microcanonical Langevin ensembles: members are trained once, and chains start where they ended."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.engine import loop, running
from plausible.methods.ensembles.ensemble import Stacked

MODE = pl.MAP(epochs=80, batch_size=None, lr=0.05)
SMALL = pl.MILE(draws=5, chains=3, warmup=20, thin=2, mode=MODE)
SETTINGS: dict[str, Any] = {"progress": False, "compile": False, "likelihood": pl.likelihoods.Gaussian(scale=0.2)}


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    stream = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.sin(2 * x) + 0.2 * torch.randn(40, 1, generator=stream)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)), (x, y)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of members that were trained, once for each training that took its first step."""
    found: list[int] = []
    inner = Stacked.step

    def counted(self: Stacked, model: Any, run: Any, state: Any, batch: Any) -> Any:
        if not int(state.step.max()):
            found.append(self.members)
        return inner(self, model, run, state, batch)

    monkeypatch.setattr(loop.Loop, "_choose_step", lambda self: self.stage.step)  # without a trial step
    monkeypatch.setattr(Stacked, "step", counted)
    return found


def test_chains_start_at_the_members_of_an_ensemble(trainings: list[int]) -> None:
    """Tiny steps show where they started: at the weights of a deep ensemble with the same seed."""
    net, data = problem()
    still = pl.MILE(draws=1, chains=3, warmup=0, thin=1, step_size=1e-9, length=1.0, mode=MODE)
    chains = pl.fit(net, data, still, **SETTINGS, seed=3)
    members = pl.fit(net, data, pl.Ensemble(MODE, members=3), **SETTINGS, seed=3)
    torch.testing.assert_close(chains.functions(data[0]), members.functions(data[0]), rtol=0, atol=1e-5)
    assert trainings == [3, 3]


@pytest.mark.parametrize("wish", ["auto", True, False])
def test_training_is_compiled_as_fit_is_asked_to(wish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    inner = running.decide

    def looked_at(compile: Any, *, members: int | None, **settings: Any) -> Any:
        if members is not None:
            seen.append(compile)
        return inner(False, members=members, **settings)

    monkeypatch.setattr(running, "decide", looked_at)
    net, data = problem()
    pl.fit(net, data, pl.MILE(draws=1, chains=2, warmup=0, mode=pl.MAP(epochs=2)), **{**SETTINGS, "compile": wish})
    assert seen == [wish]


@pytest.mark.slow
def test_chains_leave_their_modes() -> None:
    """Members differ, and each chain has a spread of its own around where it started."""
    net, data = problem()
    posterior = pl.fit(net, data, pl.MILE(draws=40, chains=3, warmup=200, thin=2, mode=MODE), **SETTINGS)
    assert float(posterior.statistics["log_likelihood"].min()) > -60
    values = posterior.functions(data[0])[..., 0].reshape(40, 3, -1)
    assert float(values.std(0).mean()) > 0.02
    weights = posterior.weights()["0.weight"].reshape(40, 3, -1)
    assert float(weights.mean(0).var(0).mean()) > 2 * float(weights.var(0).mean())  # other modes


@pytest.mark.slow
def test_resumed_runs_do_not_train_again(trainings: list[int], tmp_path) -> None:
    net, data = problem()

    def kill(step: int, _: Any) -> None:
        if step >= 80 + 10:  # behind the training
            raise ZeroDivisionError

    place = pl.Checkpoint(tmp_path / "run", steps=4)
    whole = pl.fit(net, data, SMALL, **SETTINGS)
    with contextlib.suppress(ZeroDivisionError):
        pl.fit(net, data, SMALL, **SETTINGS, checkpoint=place, callbacks=[kill])
    assert trainings == [3, 3]
    resumed = pl.fit(net, data, SMALL, **SETTINGS, checkpoint=place)
    assert trainings == [3, 3]
    assert torch.equal(whole.functions(data[0]), resumed.functions(data[0]))
    longer = resumed.extend(draws=3)
    assert trainings == [3, 3]
    assert len(longer.functions(data[0])) == 24


def test_an_earlier_posterior_takes_the_place_of_training(trainings: list[int]) -> None:
    net, data = problem()
    members = pl.fit(net, data, pl.Ensemble(MODE, members=3), **SETTINGS)
    trainings.clear()
    still = pl.MILE(draws=1, chains=3, warmup=0, thin=1, step_size=1e-9, length=1.0)
    chains = pl.fit(net, data, still, init=members, **SETTINGS)
    assert trainings == []
    torch.testing.assert_close(chains.functions(data[0]), members.functions(data[0]), rtol=0, atol=1e-5)


def test_weights_outside_of_the_posterior_keep_their_values() -> None:
    """`where="last"`: members are trained around the module's own first layer, to ridge regression, and chains keep it."""
    net, (x, y) = problem()
    mode = pl.MAP(epochs=400, batch_size=None, lr=pl.schedules.Cosine(0.1))
    still = pl.MILE(draws=1, chains=2, warmup=0, thin=1, step_size=1e-9, length=1.0, mode=mode)
    posterior = pl.fit(net, (x, y), still, where="last", **SETTINGS)
    assert set(posterior.weights()) == {"2.weight", "2.bias"}
    features = torch.cat([net[:2](x), torch.ones_like(x)], 1).detach().double()
    best = torch.linalg.solve(features.T @ features / 0.04 + torch.eye(11), features.T @ y.double() / 0.04)
    found = torch.cat([posterior.weights()["2.weight"][:, 0], posterior.weights()["2.bias"]], 1).double()

    def log_joint(weights: torch.Tensor) -> torch.Tensor:
        return -0.5 * ((features @ weights - y.double()).square().sum(0) / 0.04 + weights.square().sum(0))

    torch.testing.assert_close(posterior.functions(x)[0], (features @ found[0, :, None]).float(), rtol=0, atol=1e-4)
    assert float((log_joint(best) - log_joint(found.T)).max()) < 50


def test_early_stopping_is_the_default() -> None:
    net, data = problem()
    method = pl.MILE(draws=2, chains=2, warmup=4, thin=1, mode=pl.MAP(epochs=30, patience=2))
    posterior = pl.fit(net, data, method, **SETTINGS)
    assert posterior.run["stages"][0][0] == "MAP"
    assert 1 <= len(posterior.history["held_out_log_likelihood"]) <= 30
    assert pl.MILE().mode == pl.MAP(patience=20)


def test_settings() -> None:
    with pytest.raises(TypeError, match="MILE: mode must be MAP"):
        pl.MILE(mode=pl.SGLD())  # type: ignore[arg-type]
    net, data = problem()
    with pytest.raises(ValueError, match="batch_size=64"):
        pl.fit(net, data, pl.MILE(mode=pl.MAP(batch_size=64)), **SETTINGS)
    assert (pl.MILE().initial_energy_variance, pl.MILE().energy_variance, pl.MILE().metric) == (0.5, 0.1, "unit")
