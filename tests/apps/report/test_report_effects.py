"""What the columns do, the confusion of classes, training against validation: by hand, and on the page."""

import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import plausible as pl
from plausible.apps import dates
from plausible.apps.preparing import TableOptions, prepare
from plausible.apps.report import effects, figures
from plausible.apps.report.findings import Findings, Output
from plausible.core import storage


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Three draws of a linear model, f = 3a + k·[c = x] + year, and the rows that it was given."""
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal():.4f},{'xy'[i % 2]},20{10 + i % 9}-07-02,{rng.normal():.4f}" for i in range(80)]
    path = tmp_path_factory.mktemp("effects") / "t.csv"
    path.write_text("a,c,day,y\n" + "\n".join(lines) + "\n")
    data = prepare(TableOptions(path, ("y",), test_fraction=0))
    network = nn.Linear(len(data.preprocessor.features), 1)
    given = (torch.from_numpy(data.inputs[0]), torch.from_numpy(data.target.encode(data.train)))
    posterior = pl.fit(network, given, pl.Ensemble(pl.MAP(epochs=1, patience=None), 3), progress=False)
    return posterior, data, path


def test_effects_of_a_linear_model_by_hand(fitted):
    posterior, data, _ = fitted
    found = {effect.name: effect for effect in effects.effects(posterior, data)}
    assert set(found) == {"a", "c", "day"}
    assert [found[name].kind for name in ("a", "c", "day")] == ["number", "category", "date"]
    weights = posterior.weights()["weight"][:, 0].double().numpy() * data.target.scale[0]  # [draws, inputs]
    (a, *_), where = data.preprocessor.columns, data.preprocessor.features.index
    x, curve = found["a"].arrays["x"], found["a"].arrays["effect"]
    slopes = weights[:, where("a")] / a.std
    np.testing.assert_allclose(np.diff(curve[1, 0]) / np.diff(x), slopes.mean(), rtol=1e-4)
    assert (curve[0] <= curve[1]).all()
    assert (curve[1] <= curve[2]).all()
    steps = weights[:, where("c=x")] - weights[:, where("c=y")]
    np.testing.assert_allclose(
        found["c"].arrays["effect"][1, 0, 0] - found["c"].arrays["effect"][1, 0, 1], steps.mean(), rtol=1e-4
    )
    assert found["c"].labels == ("x", "y")
    # √(½ E (w z − w z′)²) over pairs of standardised values is near |w|
    np.testing.assert_allclose(found["a"].arrays["importance"][1], np.abs(weights[:, where("a")]).mean(), rtol=0.25)
    assert found["day"].arrays["x"][0] == pytest.approx(2010.5, abs=0.01)


def test_the_most_important_column_comes_first(fitted):
    posterior, data, _ = fitted
    sizes = [effect.arrays["importance"][1] for effect in effects.effects(posterior, data)]
    assert sizes == sorted(sizes, reverse=True)


def test_days_in_years():
    days = np.array([dates.day(text, dates.ISO) for text in ("2024-01-01", "2024-07-02", "2023-12-31")])
    np.testing.assert_allclose(dates.in_years(days), [2024, 2024.5, 2024 - 1 / 365])


def test_effects_are_stored_and_older_runs_have_none(runs, tmp_path):
    found = Findings.read(runs["classes"])
    assert found.effects
    assert found.effects[0].arrays["effect"].shape[1] == len(found.outputs[0].classes)
    found.write(tmp_path)
    again = Findings.read(tmp_path)
    np.testing.assert_array_equal(again.effects[0].arrays["effect"], found.effects[0].arrays["effect"])
    assert again.trained == found.trained
    content = storage.read_json(tmp_path / "evidence.json")
    storage.write_json(tmp_path / "evidence.json", {k: v for k, v in content.items() if k not in ("effects", "trained")})
    assert Findings.read(tmp_path).effects == ()


def test_columns_are_on_the_page(pages):
    for name in ("curve", "classes", "several"):
        text = pages[name].text
        assert "What the columns do" in text
        assert "Importance of columns" in text
    assert "Partial dependence on x" in pages["nothing"].source  # which needs no held-out rows


def test_confusion_counts_what_was_taken_for_what():
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    arrays = {"y": np.array([0, 1, 1, 0]), "probs": probs}
    shown = figures.confusion(Output("kind", "classes", ("cat", "dog"), arrays))
    assert shown.rows == [("cat", "2", "0"), ("dog", "1", "1")]
    assert "1 of dog taken for cat" in shown.chart
    many = tuple(map(str, range(16)))
    assert figures.confusion(Output("kind", "classes", many, {"y": np.zeros(1, int), "probs": np.eye(16)[:1]})) is None


def test_training_is_shown_against_validation():
    history = {
        "log_likelihood": [-300.0, -100.0, -90.0],
        "held_out_log_likelihood": [-3.0, -1.2, -1.5],
        "log_prior": [-1.0, -1.0, -2.0],
    }
    first, *rest = figures.training(history, 100)
    assert first.name == "Training against validation"
    assert "at epoch 2, the best, −1 on training rows and −1.20 on rows held out" in first.chart
    assert "have 0.200 more" in first.caption
    assert [figure.name for figure in rest] == ["log prior"]
    assert "Training against validation" not in {
        figure.name for figure in figures.training({"log_likelihood": [1.0, 2.0]}, 100)
    }


def test_nothing_about_regression_on_a_page_about_classes(pages):
    for name in ("classes", "binary"):
        for word in (
            "CRPS",
            "RMSE",
            "quantile",
            "interval of",
            "units of the target",
            "heteroscedastic",
            "probability integral",
        ):
            assert word not in pages[name].text, (name, word)
        assert "Confusion" in pages[name].text
    assert "Brier" not in pages["curve"].text
    assert "Confusion" not in pages["curve"].text


def test_names_of_columns_are_not_broken():
    style = (resources.files("plausible.apps") / "templates" / "style.css").read_text()
    rules = [rule for rule in style.split("}") if re.search(r"\bth\b", rule.partition("{")[0])]
    assert rules
    assert not any("anywhere" in rule or "white-space: normal; overflow" in rule for rule in rules)


def test_a_report_of_a_table_with_a_date(tmp_path: Path, fitted):
    from typer.testing import CliRunner

    from plausible.apps.cli import app

    options = ("-t", "y", "-o", str(tmp_path / "run"), "-m", "map", "--epochs", "2", "--hidden", "3", "-q")
    assert CliRunner().invoke(app, ["fit", str(fitted[2]), *options]).exit_code == 0
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "date, 2010-07-02 to 2018-07-02" in text
    assert "Partial dependence on day" in text
