"""Comparing on a table of one's own: folds, baselines, paired differences, classes, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from plausible.apps.cli.app import app
from plausible.apps.compare import own, protocol, runner, summarise
from plausible.apps.compare.study import Cell
from plausible.apps.compare.tables import mean
from plausible.apps.preparing import TableOptions


def plausible(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """y = 3a + noise of size 0.1, with an identifier, a category and a date."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=50)
    y = 3 * a + 0.1 * rng.normal(size=50) + 100
    lines = [f"H{i},{a[i]:.4f},{'xyz'[i % 3]},2024-{1 + i % 12:02d}-01,{y[i]:.4f}" for i in range(50)]
    path = tmp_path / "my houses.csv"
    path.write_text("house_id,a,kind,day,y\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    kinds = rng.choice(["iris", "lily", "rose"], 60)
    at = {"iris": -2.0, "lily": 0.0, "rose": 2.0}
    lines = [f"{at[kind] + 0.3 * rng.normal():.3f},{kind}" for kind in kinds]
    path = tmp_path / "flowers.csv"
    path.write_text("width,kind\n" + "\n".join(lines) + "\n")
    return path


def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run cells in this process."""
    monkeypatch.setattr(runner, "_compute", lambda study, cells, _: ((cell, runner.attempt(study, cell)) for cell in cells))


def test_folds_divide_the_rows() -> None:
    for start in (0, own.FOLDS):
        tests = [own.fold(23, start + k, seed=1)[1] for k in range(own.FOLDS)]
        assert sorted(np.concatenate(tests)) == list(range(23))
    train, test = own.fold(23, 3, seed=1)
    assert sorted([*train, *test]) == list(range(23))
    assert list(own.fold(23, 0, seed=1)[1]) != list(own.fold(23, own.FOLDS, seed=1)[1]) != list(own.fold(23, 0, seed=2)[1])


def test_parts_are_standardised_by_the_training_rows_alone(houses: Path) -> None:
    table = own.read(TableOptions(houses, ("y",)), (5,))
    parts = own.parts(table, 0, 0)
    x, y = parts.train
    assert len(x) == 40
    assert len(parts.test) == len(parts.observed) == 10
    torch.testing.assert_close(x[:, 0].double().mean(), torch.zeros((), dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.double().std(correction=0), torch.ones((), dtype=torch.float64), atol=1e-5, rtol=0)
    assert parts.observed.double().mean() > 90  # in the units of the table


def test_the_constant_is_the_mean_and_the_frequencies(houses: Path, flowers: Path) -> None:
    parts = own.parts(own.read(TableOptions(houses, ("y",)), (5,)), 0, 0)
    predictive = own.constant(parts)
    (loc,), (scale,) = parts.response.loc, parts.response.scale  # type: ignore[union-attr]
    torch.testing.assert_close(predictive.mean, torch.full((10, 1), loc, dtype=torch.float64))
    torch.testing.assert_close(predictive.std, torch.full((10, 1), scale, dtype=torch.float64), rtol=1e-5, atol=0)
    parts = own.parts(own.read(TableOptions(flowers, ("kind",)), (5,)), 0, 0)
    counts = torch.bincount(parts.train[1]).double() + 1
    torch.testing.assert_close(own.constant(parts).probs[0], counts / counts.sum())


def test_the_linear_baseline_finds_a_line_and_the_constant_does_not(houses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch)
    study = own.study(own.read(TableOptions(houses, ("y",)), (5,)), ["linear"], splits=2)
    assert [candidate.label for candidate in study.candidates] == ["linear", "constant"]
    results = runner.run(study, houses.parent / "cmp")
    summary = summarise(study, results)
    assert [row.label for row in summary.ranked_rows(study.datasets[0])] == ["linear", "constant"]
    linear = summary.row(study.datasets[0], "linear").metrics["log_likelihood"].value
    assert linear == pytest.approx(-math.log(0.1 * math.sqrt(2 * math.pi * math.e)), abs=0.5)
    difference = summary.row(study.datasets[0], "constant").differences["log_likelihood"]
    scores = {
        label: [results[Cell(study.datasets[0], s, label)]["metrics"]["log_likelihood"] for s in (0, 1)]
        for label in ("linear", "constant")
    }
    gaps = np.subtract(scores["constant"], scores["linear"])
    assert difference.value == pytest.approx(gaps.mean())
    assert difference.error == pytest.approx(math.sqrt((1 / 2 + 10 / 40) * gaps.var(ddof=1)))  # Nadeau and Bengio
    assert difference.text().startswith("−")


def test_the_command_ranks_and_writes_a_page(houses: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    here(monkeypatch)
    out, page = houses.parent / "cmp", houses.parent / "page.html"
    options = ("--methods", "map", "--hidden", 3, "--splits", 2, "--out", out, "--page", page)
    result = plausible("compare", houses, "-t", "y", *options)
    assert result.exit_code == 0, result.output
    assert "column 'house_id' is called so" in result.stderr
    order = [
        line.split()[0]
        for line in result.stdout.splitlines()
        if line.split()[:1] and line.split()[0] in ("map", "linear", "constant")
    ]
    assert order[0] == "linear"
    assert set(order) == {"map", "linear", "constant"}
    assert "less map's" in result.stdout
    assert "y of my houses.csv, 2 splits" in result.stdout
    text = page.read_text()
    for words in ("folds of the table", "log-likelihood less that of map", "inside 90 %", "CRPS"):
        assert words in text
    stored = json.loads((out / "results.json").read_text())
    assert stored["study"]["table"]["file"] == "my houses.csv"
    kept = plausible("compare", houses, "-t", "y", *options)
    assert "6 of 6 fits are in" in kept.stderr
    houses.write_text(houses.read_text().replace("H3,", "H3,9"))  # another table is fitted again
    assert "fits are in" not in plausible("compare", houses, "-t", "y", *options).stderr


def test_classes_are_ranked_by_their_scores(flowers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    here(monkeypatch)
    out = flowers.parent / "cmp"
    result = plausible("compare", flowers, "-t", "kind", "--methods", "map", "--hidden", 3, "--splits", 2, "--out", out)
    assert result.exit_code == 0, result.output
    assert "accuracy" in result.stdout
    assert "RMSE" not in result.stdout
    assert "Brier score" in (out / "index.html").read_text()
    rows = {row["method"]: row["metrics"] for row in json.loads((out / "results.json").read_text())["rows"]}
    assert rows["linear"]["accuracy"]["value"] > 0.9 > rows["constant"]["accuracy"]["value"]


def test_scores_in_large_units_are_short() -> None:
    assert mean([-0.5, -0.7]).short() == mean([-0.5, -0.7]).text() == "−0.60 ± 0.10"
    assert mean([20000.0, 30000.0]).short() == "25,000 ± 5,000"
    assert mean([2e6]).short() == "2,000,000"
    assert mean([math.inf, 1.0]).short() == "inf"


def test_time_is_that_of_auto(houses: Path) -> None:
    study = own.study(own.read(TableOptions(houses, ("y",)), (3,)), ["auto", "map"], "1s", splits=1)
    assert study.candidate("auto").build().time == "1s"
    result = protocol.run(study, Cell(study.datasets[0], 0, "auto"))
    assert result["chosen"]["method"] in ("hmc", "ensemble", "laplace", "ivon")


def test_what_is_refused(houses: Path) -> None:
    for arguments, words in (
        ((houses,), "is no study in TOML; if it is a table, name the column to predict: --target"),
        ((houses, "-t", "y", "-t", "a"), "compare takes one --target, got y, a"),
        ((houses, "-t", "z"), "--target: no column 'z'"),
        ((houses, "-t", "y", "--methods", "frob"), "unknown method 'frob'"),
        ((), "give a table with --target"),
    ):
        result = plausible("compare", *arguments)
        assert result.exit_code == 1
        assert words in " ".join(result.stderr.split())
