"""Sweeps: stacked settings train as each would alone, groups follow shapes, and a killed sweep goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible.apps.cli import app
from plausible.apps.sweep import Grid, Sweep, files
from plausible.apps.sweep.grid import Recipe, applied
from plausible.apps.sweep.stacked import Stacked
from plausible.core import random
from plausible.core.data import as_data
from plausible.engine.method import Run


def problem() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(160, 4)
    y = (x[:, 0] + x[:, 1] ** 2 > 0.5).long()
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return net, (x[:120], y[:120]), (x[120:], y[120:])


MIXTURE = pl.priors.ScaleMixture(0.5, 1.0, 0.05)
SETTINGS = (
    {"lr": 0.02, "prior.pi": 0.25, "prior.sigma2": 0.05, "temperature": 1.0, "kl_weights": 1.0},
    {"lr": 0.005, "prior.pi": 0.75, "prior.sigma2": 0.2, "temperature": 0.5, "kl_weights": 0.3},
    {"lr": 0.01, "prior.pi": 0.5, "prior.sigma2": 2.0, "temperature": 2.0, "kl_weights": 1.0},
)


@pytest.mark.parametrize("estimator", ["weights", "local"])
@pytest.mark.parametrize("samples", [1, 2])
def test_stacked_steps_equal_single_ones(estimator: Any, samples: int) -> None:
    net, data, _ = problem()
    method = pl.MeanField(epochs=3, batch_size=None, estimator=estimator, samples=samples)
    prepared = as_data(data, dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Categorical(), MIXTURE, prepared.all(), num_data=120)
    stacked = Stacked(method, SETTINGS)
    run = Run.alone(stacked, model, prepared)
    state = stacked.start(model, run, random.key(0))
    looped = stacked.start(model, run, random.key(0))
    for _ in range(3):
        state, info = stacked.step(model, run, state, prepared.all())
        looped, expected = stacked.looped_step(model, run, looped, prepared.all())
        for name, value in info.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
    assert state.inner.rhos  # which are among the weights
    for name, value in state.inner.weights.items():
        torch.testing.assert_close(value, looped.inner.weights[name], rtol=1e-4, atol=1e-5)


def test_point_estimates_reach_what_each_setting_reaches_alone() -> None:
    net, data, held = problem()
    method = pl.MAP(epochs=200, batch_size=None, lr=0.05)
    found = pl.sweep(
        net, data, method, {"prior.scale": [0.1, 1.0], "lr": [0.05, 0.02]}, held, prior=pl.priors.Gaussian(), progress=False
    )
    assert len(found.groups) == 1
    for row in found.rows:
        alone = pl.fit(net, data, found.method(row), prior=found.prior(row), progress=False)
        pred = alone.predict(held[0])
        assert row["scores"]["nll"] == pytest.approx(-float(pl.metrics.log_likelihood(pred, held[1])), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "grid"),
    [
        (pl.Laplace(mode=pl.MAP(epochs=20, batch_size=None)), {"prior.scale": [0.3, 1.0]}),
        (pl.Ensemble(pl.MAP(epochs=20, batch_size=None), members=2), {"method.lr": [0.05, 0.02]}),
        (pl.NUTS(draws=4, warmup=4, chains=2), {"prior.scale": [0.3, 1.0]}),
    ],
    ids=["stages", "members", "chains"],
)
def test_what_cannot_be_stacked_runs_setting_by_setting(method: pl.Method, grid: dict[str, list[float]]) -> None:
    net, data, held = problem()
    scores = lambda posterior: {"loss": -float(pl.metrics.log_likelihood(posterior.predict(held[0], seed=3), held[1]))}  # noqa: E731
    found = pl.sweep(net, data, method, grid, held, score=scores, prior=pl.priors.Gaussian(), compile=False, progress=False)
    assert len(found.groups) == 2
    for row in found.rows:
        alone = pl.fit(net, data, found.method(row), prior=found.prior(row), compile=False, progress=False)
        assert row["scores"]["loss"] == pytest.approx(scores(alone)["loss"], rel=1e-6)


def test_groups_follow_the_shapes_of_the_program() -> None:
    base = Recipe(pl.MeanField(lr=pl.schedules.Cosine(0.01)), MIXTURE)
    grid = Grid({"samples": [1, 2], "lr.start": [0.1, 0.01], "estimator": ["weights", "local"], "prior.pi": [0.2, 0.4]})
    groups = grid.groups(base)
    assert len(grid) == 16
    assert sorted(map(len, groups)) == [4] * 4
    for group in groups:
        assert len({(s["samples"], s["estimator"]) for s in group}) == 1
    assert applied(base, {"lr.start": 0.3}).method.lr == pl.schedules.Cosine(0.3)


def test_a_setting_that_diverges_harms_no_other() -> None:
    net, data, held = problem()
    method = pl.MeanField(epochs=5, optimiser=pl.optimisers.SGD(momentum=0.0), estimator="weights", batch_size=40)
    found = pl.sweep(net, data, method, {"lr": [1e30, 0.05]}, held, progress=False)
    lost, good = found.rows
    assert lost["scores"]["nll"] is None
    assert found.best() is good
    alone = pl.sweep(net, data, method, {"lr": [0.05]}, held, progress=False)
    assert good["scores"]["nll"] == pytest.approx(alone.rows[0]["scores"]["nll"], abs=0.3)
    assert "diverged" in str(found)


def test_a_killed_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, held = problem()
    arguments: Any = (net, data, pl.MeanField(epochs=4, batch_size=30), {"samples": [1, 2], "lr": [0.02, 0.01]}, held)
    whole = pl.sweep(*arguments, progress=False)
    from plausible.apps.sweep import running

    fits = []
    real = running.fit

    def second_dies(*positional: Any, **keywords: Any) -> Any:
        if not isinstance(positional[2], Stacked):
            return real(*positional, **keywords)
        fits.append(1)
        if len(fits) == 2:

            def kill(step: int, info: dict[str, float]) -> None:
                if step == 9:
                    raise KeyboardInterrupt

            keywords["callbacks"] = [*keywords["callbacks"], kill]
            keywords["checkpoint"] = replace(keywords["checkpoint"], steps=4)
        return real(*positional, **keywords)

    monkeypatch.setattr(running, "fit", second_dies)
    with pytest.raises(KeyboardInterrupt):
        pl.sweep(*arguments, out=tmp_path, progress=False)
    assert (tmp_path / "group-000.json").exists()
    assert (tmp_path / "group-001" / "checkpoint.json").exists()
    again = pl.sweep(*arguments, out=tmp_path, progress=False)
    assert len(fits) == 3  # the first group was not trained again
    assert [row["scores"] for row in again.rows] == [row["scores"] for row in whole.rows]
    other: Any
    for other, changes in (
        (arguments, {"seed": 1}),
        (arguments, {"likelihood": pl.likelihoods.Categorical()}),
        ((net, (data[0] * 2, data[1]), *arguments[2:]), {}),
        ((*arguments[:4], (held[0] * 2, held[1])), {}),
        ((torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), *arguments[1:]), {}),
    ):
        with pytest.raises(ValueError, match="another sweep"):
            pl.sweep(*other, out=tmp_path, progress=False, **changes)


def test_ctrl_c_keeps_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data, held = problem()
    from plausible.apps.sweep import running

    real = running.fit

    def interrupted(*positional: Any, **keywords: Any) -> Any:
        posterior = real(*positional, **keywords)
        if isinstance(positional[2], Stacked):
            posterior.run["interrupted"] = True
        return posterior

    monkeypatch.setattr(running, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped in group 1 of 1"):
        pl.sweep(net, data, pl.MAP(epochs=2), {"lr": [0.01]}, held, out=tmp_path, progress=False)
    assert not (tmp_path / "group-000.json").exists()
    assert (tmp_path / "group-000" / "checkpoint.json").exists()


def test_numbers_that_shape_the_run_are_groups_of_their_own() -> None:
    net, data, held = problem()
    count = {"score": lambda posterior: {"draws": float(len(posterior))}, "progress": False}
    found = pl.sweep(net, data, pl.SGLD(epochs=10, lr=1e-5), {"burn_in": [0.1, 0.9]}, held, **count)  # type: ignore[arg-type]
    assert found.rows[0]["scores"]["draws"] > found.rows[1]["scores"]["draws"]
    grid = Grid({"adversarial": [0.0, 0.1], "lr": [0.1, 0.2]})
    assert list(map(len, grid.groups(Recipe(pl.MAP(), pl.priors.Gaussian())))) == [2, 2]
    grid = Grid({"prior_scale": [0.1, 0.5], "lr": [0.1, 0.2]})  # which its family holds
    assert list(map(len, grid.groups(Recipe(pl.Rank1(), pl.priors.Gaussian())))) == [2, 2]
    with pytest.raises(ValueError, match="patience"):
        pl.sweep(net, data, pl.MAP(epochs=2, patience=1), {"lr": [0.1]}, held)


@pytest.mark.parametrize(
    "validation",
    [lambda x, y: (x[:, :2], y), lambda x, y: (x, y[:-1]), lambda x, y: (x * math.nan, y), lambda x, y: (x[:0], y[:0])],
    ids=["columns", "lengths", "nan", "empty"],
)
def test_validation_data_are_checked_before_the_work(validation: Any) -> None:
    net, data, held = problem()
    with pytest.raises((ValueError, TypeError), match="validation"):
        pl.sweep(net, data, pl.MAP(epochs=10**6), {"lr": [0.1]}, validation(*held))


def test_scores_are_asked_for_by_their_names() -> None:
    rows = [{"settings": {"lr": lr}, "scores": {"nll": value}} for lr, value in ((0.1, 2.0), (0.2, 1.0), (0.3, None))]
    found = Sweep(rows, Recipe(pl.MAP(), pl.priors.Gaussian()))
    assert found.best()["settings"] == {"lr": 0.2}
    assert found.method(found.best()).lr == 0.2  # type: ignore[attr-defined]
    assert found.temperature(found.best()) == 1.0
    with pytest.raises(ValueError, match="there are nll"):
        found.best("error")
    with pytest.raises(ValueError, match="every setting diverged"):
        Sweep([rows[2]]).best()


def test_bad_grids_are_refused() -> None:
    net, data, held = problem()
    for grid, words in (
        ({}, "must map"),
        ({"lr": 0.1}, "list of values"),
        ({"lr": []}, "list of values"),
        ({"rate": [0.1]}, "not a setting"),
        ({"prior.sigma": [0.1]}, "not a setting"),
        ({"lr": [-1.0]}, "positive"),
        ({"temperature": [0.0]}, "temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            pl.sweep(net, data, pl.MeanField(epochs=1), grid, held)
    with pytest.raises(TypeError, match="validation"):
        pl.sweep(net, data, pl.MeanField(epochs=1), {"lr": [0.1]}, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at_once"):
        pl.sweep(net, data, pl.MeanField(epochs=1), {"lr": [0.1]}, held, at_once=0)


ROOT = Path(__file__).parents[2]


def test_the_file_is_the_grid_of_the_paper() -> None:
    plan = files.read(ROOT / "experiments" / "sweeps" / "blundell-2015.toml")
    grid = Grid(plan.grid)
    assert len(grid) == 324
    assert sorted(round(-math.log(v)) for v in plan.grid["prior.sigma2"]) == [6, 7, 8]
    assert sorted(round(-math.log(v)) for v in plan.grid["prior.sigma1"]) == [0, 1, 2]
    assert [v / 128 for v in plan.grid["lr"]] == pytest.approx([1e-3, 1e-4, 1e-5])
    groups = grid.groups(Recipe(pl.MeanField(), pl.priors.ScaleMixture()))
    assert list(map(len, groups)) == [81] * 4


def test_the_page_tells_what_is_stored() -> None:
    docs = ROOT / "docs"
    stored = Sweep.read(docs / "sweeps" / "blundell-2015.json")
    text = (docs / "sweep.md").read_text(encoding="utf-8")
    for group, samples in zip(stored.groups, (1, 2, 5, 10)):
        best = [
            min(r["scores"]["error"] for r in stored.rows if r["settings"]["samples"] == samples and r["settings"]["lr"] == lr)
            for lr in (0.128, 0.0128, 0.00128)
        ]
        cells = " | ".join(f"{100 * value:.2f} %" for value in best)
        assert f"| {samples} | {group['members']} | {group['seconds']:.0f} | {cells} |" in text
    assert f"{sum(group['seconds'] for group in stored.groups):.0f} s in one run" in text


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)], catch_exceptions=False)


def test_the_command_writes_table_and_results(tmp_path: Path) -> None:
    if not pl.datasets.available("yacht"):
        pytest.skip("the yacht data are not here: set PLAUSIBLE_DATA")
    start = tmp_path / "start.toml"
    start.write_text(command("--show").output)
    assert "9 settings of mean-field on yacht" in command(start, "--show").output
    result = command(start, "--epochs", 2, "--device", "cpu", "--out", tmp_path, "--top", 3)
    assert result.exit_code == 0, result.output
    assert "9 settings" in result.output
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["rows"]) == 9
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 10
    assert (tmp_path / "sweep.png").exists()


def test_the_command_explains_errors(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    for text, words in (
        ("dataset = 'mnist'", "grid is missing"),
        ("dataset = 'mnist'\ngird = 3", "gird"),
        ("dataset = 'yacht'\nvalidation = 50\n[grid]\nlr = [0.1]\n[prior]\nname = 'Gauss'", "Gauss"),
        ("dataset = [", "TOML"),
    ):
        if "yacht" in text and not pl.datasets.available("yacht"):
            continue
        file.write_text(text)
        result = command(file, "--device", "cpu", "--out", tmp_path / "out")
        assert result.exit_code == 1
        assert words in result.output
    assert "blundel-2015" in command("blundel-2015").output
    assert "--show prints one to start from" in command("--out", tmp_path).output
