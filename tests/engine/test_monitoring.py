"""Monitors see the posterior of the moment, and their records survive a kill."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch

import plausible as pl


def problem() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    return torch.nn.Linear(3, 1), (x, x.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "method",
    [
        pl.MAP(epochs=5, batch_size=20),
        pl.MeanField(epochs=5, batch_size=20),
        pl.Ensemble(pl.MeanField(epochs=5, batch_size=20), members=2),
        pl.Ensemble(pl.MAP(epochs=5, batch_size=20), members=2),
    ],
    ids=["map", "mean-field", "ensemble of mean-field", "ensemble of map"],
)
def test_the_last_look_is_at_the_result(method: pl.Method) -> None:
    net, data = problem()
    monitor = pl.Monitor(lambda epoch, posterior: {"mean": posterior.predict(data[0]).mean.mean().item()}, every=2)
    posterior = pl.fit(net, data, method, callbacks=[monitor], progress=False)
    assert [record["epoch"] for record in monitor.records] == [2, 4, 5]
    assert monitor.records[-1]["mean"] == posterior.predict(data[0]).mean.mean().item()
    alone = pl.fit(net, data, method, progress=False)
    assert torch.equal(alone.predict(data[0]).mean, posterior.predict(data[0]).mean)  # looking changes nothing


def test_looks_of_a_sampler_begin_with_its_first_draw() -> None:
    net, data = problem()
    monitor = pl.Monitor(lambda epoch, posterior: {"draws": len(posterior)})
    pl.fit(net, data, pl.SGLD(epochs=10, batch_size=20, burn_in=0.5), callbacks=[monitor], progress=False)
    counts = [record["draws"] for record in monitor.records]
    assert monitor.records[0]["epoch"] > 5
    assert counts == sorted(counts)
    assert len(set(counts)) == len(counts)


def test_records_survive_a_kill(tmp_path: Path) -> None:
    net, data = problem()
    method = pl.MAP(epochs=8, batch_size=20)

    def look(epoch: int, posterior: pl.Posterior) -> dict[str, float]:
        return {"value": math.nan if epoch == 1 else posterior.predict(data[0]).mean.mean().item()}

    class Stop(Exception):
        pass

    def kill(step: int, info: dict[str, float]) -> None:
        if step == 14:
            raise Stop

    whole = pl.Monitor(look)
    pl.fit(net, data, method, callbacks=[whole], progress=False)
    place = pl.Checkpoint(tmp_path / "run", steps=3)
    with pytest.raises(Stop):
        pl.fit(net, data, method, callbacks=[pl.Monitor(look), kill], checkpoint=place, progress=False)
    again = pl.Monitor(look)
    pl.fit(net, data, method, callbacks=[again], checkpoint=place, progress=False)
    assert [record["epoch"] for record in again.records] == list(range(1, 9))
    assert math.isnan(again.records[0]["value"])
    assert again.records[1:] == whole.records[1:]


def test_bad_monitors_are_refused() -> None:
    with pytest.raises(TypeError, match="function of"):
        pl.Monitor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        pl.Monitor(print, every=0)
    net, data = problem()
    with pytest.raises(TypeError, match="mapping"):
        pl.fit(net, data, pl.MAP(epochs=1), callbacks=[pl.Monitor(lambda epoch, posterior: 3)], progress=False)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    "method",
    [
        pl.Laplace(mode=pl.MAP(epochs=5, batch_size=20)),
        pl.Ensemble(pl.Laplace(mode=pl.MAP(epochs=5, batch_size=20)), members=2),
        pl.Refined(epochs=5, batch_size=20),
    ],
    ids=["laplace", "ensemble of laplace", "refined"],
)
def test_a_posterior_of_several_stages_is_shown_when_it_is_whole(method: pl.Method) -> None:
    net, data = problem()
    monitor = pl.Monitor(lambda epoch, posterior: {"mean": posterior.predict(data[0]).mean.mean().item()}, every=2)
    posterior = pl.fit(net, data, method, likelihood=pl.likelihoods.Gaussian(1.0), callbacks=[monitor], progress=False)
    assert monitor.records == [{"epoch": 5, "mean": posterior.predict(data[0]).mean.mean().item()}]


def test_a_result_of_several_stages_is_made_once_and_warns_once() -> None:
    net, data = problem()
    seen = []
    method = pl.Laplace(mode=pl.MAP(epochs=1, lr=1e-4), polish=0)
    with pytest.warns(UserWarning, match="not at a mode") as said:
        posterior = pl.fit(net, data, method, callbacks=[pl.Monitor(lambda _, p: seen.append(p))], progress=False)
    assert len([one for one in said if "not at a mode" in str(one.message)]) == 1
    assert seen == [posterior]


def test_ctrl_c_in_an_early_stage_is_said_of_the_result() -> None:
    net, data = problem()

    def stop(step: int, info: dict[str, float]) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.warns(UserWarning, match="stopped by Ctrl-C after"):
        posterior = pl.fit(net, data, pl.Laplace(mode=pl.MAP(epochs=500)), callbacks=[stop], progress=False, compile=False)
    assert posterior.interrupted


@pytest.mark.filterwarnings("ignore:the network is not at a mode")
def test_epochs_are_those_of_the_rows_that_were_left_for_training() -> None:
    net, data = problem()
    monitor = pl.Monitor(lambda epoch, posterior: {"epoch": epoch})
    method = pl.Laplace(mode=pl.MAP(epochs=4, batch_size=10, patience=9, holdout=0.5))
    posterior = pl.fit(net, data, method, callbacks=[monitor], progress=False)
    assert posterior.run["stages"][0][1] == 12  # 30 of 60 rows
    assert [record["epoch"] for record in monitor.records] == [4]
