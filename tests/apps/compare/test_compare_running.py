"""Running studies: resumed after a kill, failures in their place, the same numbers as by hand."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible import compare
from plausible.apps.cli.app import app
from plausible.apps.compare import page, protocol, runner
from plausible.apps.tables import mlp

pytestmark = pytest.mark.usefixtures("data_folder")

SMALL = """
datasets = ["yacht"]
splits = 2
[methods.map]
epochs = 2
[methods.bad]
method = "map"
epochs = 2
lr = 1e30
"""


def _runs(monkeypatch: pytest.MonkeyPatch) -> list[compare.Cell]:
    """Run cells in this process and take note of them."""
    seen: list[compare.Cell] = []

    def compute(study: compare.Study, cells: list[compare.Cell], _: int) -> Any:
        for cell in cells:
            seen.append(cell)
            yield cell, runner.attempt(study, cell)

    monkeypatch.setattr(runner, "_compute", compute)
    return seen


def test_a_cell_is_the_protocol_done_by_hand() -> None:
    study = compare.parse('datasets = ["yacht"]\nsplits = 1\n[methods.map]\nepochs = 3\nprior_scale = 0.7\n')
    cell = next(study.cells())
    found = protocol.run(study, cell)
    raw = pl.datasets.uci("yacht").split(0)
    x, y = raw.train
    loc, scale = y.double().mean(), y.double().std(correction=0)
    inputs = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    torch.manual_seed(0)
    network = mlp(6, (50,), 1)
    posterior = pl.fit(
        network,
        (inputs.float(), ((y - loc) / scale).float()),
        pl.MAP(epochs=3),
        likelihood=pl.likelihoods.Gaussian(),
        prior=pl.priors.Gaussian(scale=0.7),
        seed=0,
        progress=False,
    )
    tests = ((raw.test[0].double() - x.double().mean(0)) / x.double().std(0, correction=0)).float()
    predictive = posterior.predict(tests)
    by_hand = (predictive.log_prob(((raw.test[1] - loc) / scale).float()) - scale.log()).mean()
    assert found["metrics"]["log_likelihood"] == pytest.approx(float(by_hand), rel=1e-4)
    error = (predictive.mean.double() * scale + loc - raw.test[1]).square().mean().sqrt()
    assert found["metrics"]["rmse"] == pytest.approx(float(error), rel=1e-4)
    assert (found["train_rows"], found["test_rows"]) == (277, 31)
    assert found["chosen"] == {}


def test_the_grid_is_judged_on_training_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'datasets = ["yacht"]\nsplits = 1\n[methods.map]\nepochs = 30\ngrid = {lr = [1e-9, 1e-2, 1e30]}\n'
    study = compare.parse(text)
    seen = []
    plain = protocol.train
    monkeypatch.setattr(protocol, "train", lambda c, data, *rest: seen.append(len(data[1])) or plain(c, data, *rest))
    found = protocol.run(study, next(study.cells()))
    assert found["chosen"] == {"lr": 1e-2}
    assert [v["settings"]["lr"] for v in found["validation"]] == [1e-2, 1e-9, 1e30]
    assert found["validation"][-1]["log_likelihood"] == float("-inf")
    assert seen == [222, 222, 222, 277]  # 80 % of the training rows each time, then all of them
    hopeless = compare.parse(text.replace("[1e-9, 1e-2, 1e30]", "[1e30]"))
    assert "every combination of the grid" in runner.attempt(hopeless, next(hopeless.cells()))["error"]


def test_stored_cells_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _runs(monkeypatch)
    study = compare.parse(SMALL)
    first = compare.run(study, tmp_path)
    assert len(seen) == 4
    assert "DivergenceError" in first[compare.Cell("yacht", 0, "bad")]["error"]
    seen.clear()
    again = compare.run(study, tmp_path)
    assert {cell.label for cell in seen} == {"bad"}  # what failed is tried again
    assert again[compare.Cell("yacht", 1, "map")] == json.loads(json.dumps(first[compare.Cell("yacht", 1, "map")]))
    seen.clear()
    compare.run(compare.parse(SMALL.replace("epochs = 2", "epochs = 3", 1)), tmp_path)
    assert {cell.label for cell in seen} == {"map", "bad"}  # a changed candidate is fitted again
    changed = compare.parse(SMALL.replace("epochs = 2", "epochs = 3", 1))
    damaged = next((tmp_path / "cells").rglob("map-00.json"))
    whole = json.loads(damaged.read_text())
    broken = [
        "{",
        *(json.dumps({k: v for k, v in whole.items() if k != part}) for part in ("metrics", "seconds", "train_rows")),
    ]
    for text in broken:
        damaged.write_text(text)
        seen.clear()
        compare.run(changed, tmp_path)
        assert compare.Cell("yacht", 0, "map") in seen


def test_labels_that_differ_in_signs_alone_have_files_of_their_own(tmp_path: Path) -> None:
    names = {runner._file(tmp_path, compare.Cell("yacht", 0, label)).name for label in ("a b", "a/b", "a_b", "../a")}
    assert len(names) == 4
    assert all("/" not in name for name in names)


def test_processes_one_of_which_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process costs its cell and no other."""
    study = compare.parse('datasets = ["yacht"]\nsplits = 3\n[methods.map]\nepochs = 1\n')
    plain = runner._Worker.ask
    asked = []

    def ask(self: Any, cell: Any) -> None:
        asked.append(cell)
        plain(self, cell)
        if len(asked) == 1:
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(runner._Worker, "ask", ask)
    results = compare.run(study, tmp_path, jobs=1)
    assert results[asked[0]]["error"] == "the process was ended by SIGKILL: out of memory?"
    assert all("metrics" in results[cell] for cell in asked[1:])


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('datasets = ["yacht"]\nsplits = 6\n[methods.map]\nepochs = 60\n')
    command = [
        sys.executable,
        "-m",
        "plausible",
        "compare",
        str(tmp_path / "study.toml"),
        "-o",
        str(tmp_path / "out"),
        "-j",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "out" / "cells").rglob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "out" / "cells").rglob("*.json")}
    assert 2 <= len(done) < 6
    subprocess.run(command, check=True, capture_output=True)
    assert len(list((tmp_path / "out" / "cells").rglob("*.json"))) == 6
    assert all(p.stat().st_mtime_ns == t for p, t in done.items())
    assert not list((tmp_path / "out").rglob("*.part"))


# ---------------------------------------------------------------------------------------------------------------------
# The command


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", *arguments], catch_exceptions=False)


def test_the_command_shows_failures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(monkeypatch)
    (tmp_path / "study.toml").write_text(SMALL)
    result = _invoke(str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "failed" in result.output
    assert "DivergenceError" in result.output
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["rows"][0]["metrics"]["log_likelihood"]["splits"] == 2
    assert len(stored["rows"][1]["failures"]) == 2
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<svg" in page
    assert "[[" not in page
    assert "DivergenceError" in page


BROWSER = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to look at the page with")
def test_the_page_renders_in_silence(tmp_path: Path) -> None:
    study = compare.parse(
        'title = "<script>1</script>"\ndatasets = ["yacht"]\nsplits = 2\n[methods.map]\n[methods."<b>"]\nmethod = "map"\n'
    )
    scores = {"log_likelihood": -1.0, "rmse": 2.0, "crps": 1.0, "coverage_90": 0.9, "quantile_calibration": 0.1}
    results = {
        cell: {
            "metrics": {k: v + 0.1 * cell.split + 0.3 * (cell.label == "map") for k, v in scores.items()},
            "train_rows": 90,
            "test_rows": 10,
            "seconds": {"fit": 1.0},
            "peak_bytes": None,
        }
        for cell in study.cells()
    }
    page.write(tmp_path / "index.html", study, compare.summarise(study, results))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={tmp_path / 'page.png'}",
    ]
    found = subprocess.run(
        [str(BROWSER), *flags, f"file://{tmp_path / 'index.html'}"], capture_output=True, text=True, timeout=100
    )
    assert "CONSOLE" not in found.stderr, found.stderr  # a script or a request would be refused there
    assert (tmp_path / "page.png").stat().st_size > 10_000
    text = (tmp_path / "index.html").read_text()
    assert "<script>" not in text
    assert "<b></th>" not in text


def test_options_narrow_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _runs(monkeypatch)
    (tmp_path / "study.toml").write_text(SMALL)
    result = _invoke(str(tmp_path / "study.toml"), "--methods", "map", "--splits", "1", "-o", str(tmp_path / "out"), "-q")
    assert (result.exit_code, result.stdout) == (0, "")
    assert seen == [("yacht", 0, "map")]


UCI_SMALL = str(Path(__file__).parents[3] / "experiments" / "studies" / "uci-small.toml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to compare"),
        (("--datasets", "yacht", "--methods", "mop"), "mop"),
        ((UCI_SMALL, "--methods", "mop"), "neither in the study"),
        ((UCI_SMALL, "--splits", "many"), "--splits takes"),
        ((UCI_SMALL, "--datasets", "mnist"), "'mnist' is not a UCI set"),
        (("none.toml",), "none.toml"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = _invoke(*arguments, "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert len(result.output.strip().splitlines()) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = _invoke("--datasets", "yacht", "--methods", "map", "-o", str(tmp_path))
    assert result.exit_code == 1
    assert "not empty" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_study_to_start_from_can_be_seen() -> None:
    study = compare.parse(_invoke("--show").stdout)
    assert compare.parse(compare.example()) == study
    assert study.published["boston"]["PBP"]["rmse"] == (3.01, 0.18)
