"""Means, paired differences and ranks against closed forms and SciPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from plausible.apps.compare import Candidate, Cell, Study, summarise
from plausible.apps.compare.tables import Mean, difference, mean

pytestmark = pytest.mark.usefixtures("data_folder")


def test_a_mean_has_the_standard_error_of_the_literature() -> None:
    values = [1.0, 2.0, 4.0, 7.0]
    found = mean(values)
    assert found.value == pytest.approx(3.5)
    assert found.error == pytest.approx(stats.sem(values))
    assert math.isnan(mean([1.0]).error)
    assert mean([]).splits == 0


def test_text_has_the_digits_that_the_error_allows() -> None:
    assert Mean(-2.4123, 0.0567, 20).text() == "−2.412 ± 0.057"
    assert Mean(31.2, 1.23, 20).text() == "31.20 ± 1.23"
    assert Mean(1.0, math.nan, 1).text() == "1.00"
    assert Mean(math.nan, math.nan, 0).text() == "–"


@pytest.mark.parametrize("higher", [True, False])
def test_a_difference_is_that_of_a_corrected_paired_t_test(higher: bool) -> None:
    stream = np.random.default_rng(0)
    theirs = stream.normal(size=20)
    ours = theirs + 0.5 + 0.1 * stream.normal(size=20)
    found = difference(list(ours), list(theirs), 1 / 9, higher)
    plain = stats.ttest_rel(ours, theirs)
    # the plain statistic is mean/(s/√J); the corrected one shrinks it by √(1 + J·n_test/n_train)
    assert found.value / found.error == pytest.approx(plain.statistic / math.sqrt(1 + 20 / 9))
    assert found.verdict == ("better" if higher else "worse")
    assert difference(list(theirs), list(ours), 1 / 9, higher).verdict == ("worse" if higher else "better")
    assert difference([1.0, 2.0], [1.0, 2.0], 0.1, higher).verdict == "no difference"
    assert difference([1.0], [2.0], 0.1, higher).verdict == ""


@pytest.mark.parametrize("splits", [2, 3, 5, 20])
def test_noise_alone_is_seldom_called_a_difference(splits: int) -> None:
    """Two equal methods whose differences have the correlation that the correction assumes: called at 5 %, whatever the splits."""
    stream = np.random.default_rng(1)
    ratio = 1 / 9
    share = ratio / (1 + ratio)  # correlation of the differences of two splits
    calls = 0
    for _ in range(2000):
        gaps = math.sqrt(share) * stream.normal() + math.sqrt(1 - share) * stream.normal(size=splits)
        calls += difference(list(gaps), [0.0] * splits, ratio, True).verdict not in ("no difference", "")
    assert calls <= 100 + 4 * math.sqrt(2000 * 0.05 * 0.95)


@pytest.mark.parametrize("splits", [2, 3, 5, 20, 60])
def test_a_difference_is_called_from_the_quantile_of_students_t_on(splits: int) -> None:
    noise = np.random.default_rng(2).normal(size=splits)
    noise -= noise.mean()
    limit = stats.t.ppf(0.975, splits - 1) * math.sqrt((1 / splits + 0.1) * noise.var(ddof=1))
    for share, verdict in ((0.999, "no difference"), (1.001, "better")):
        assert difference(list(noise + share * limit), [0.0] * splits, 0.1, True).verdict == verdict


def test_results_that_are_not_finite_are_shown() -> None:
    assert mean([-math.inf, 1.0]).text() == "−inf"
    assert difference([-math.inf, 1.0], [0.0, 0.0], 0.1, True).verdict == ""
    assert mean([1e7, 1e7]).text() == "1e+07"


def test_a_row_says_how_many_splits_it_has() -> None:
    study = _study(datasets=("yacht",), splits=3)
    results = {cell: _result(1.0 + cell.split) for cell in study.cells()}
    del results[Cell("yacht", 0, "a")]
    results[Cell("yacht", 1, "b")] = {"error": "no"}
    rows = {row.label: row.title for row in summarise(study, results).rows}
    assert rows == {"a": "a (2 of 3 splits)", "b": "b (2 of 3 splits)", "c": "c"}


def _study(**changes: Any) -> Study:
    candidates = tuple(Candidate(label, "map") for label in ("a", "b", "c"))
    return Study(**{"datasets": ("yacht", "energy"), "candidates": candidates, "splits": 2, **changes})


def _result(value: float) -> dict[str, Any]:
    metrics = {"log_likelihood": value, "rmse": -value, "crps": 1.0, "coverage_90": 0.9, "quantile_calibration": 0.0}
    return {"metrics": metrics, "train_rows": 90, "test_rows": 10, "seconds": {"fit": 1.0, "predict": 1.0}, "peak_bytes": 2**20}


def test_summary_of_cells_with_failures_and_ties() -> None:
    study = _study()
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    results = {cell: _result(values[cell.label] + 0.1 * cell.split) for cell in study.cells()}
    results[Cell("energy", 1, "c")] = {"error": "ValueError: no"}
    del results[Cell("energy", 0, "b")]
    found = summarise(study, results)
    row = found.row("energy", "c")
    assert row.failures == ("split 1: ValueError: no",)
    assert row.missing == 0
    assert found.row("energy", "b").missing == 1
    assert found.row("yacht", "b").metrics["log_likelihood"].value == pytest.approx(2.05)
    assert found.row("yacht", "b").differences["log_likelihood"].value == pytest.approx(1.0)
    assert found.row("yacht", "b").differences["log_likelihood"].verdict == "better"
    assert found.row("yacht", "b").differences["rmse"].verdict == "better"
    assert found.row("yacht", "a").differences == {}
    assert found.row("yacht", "a").seconds == pytest.approx(2.0)
    # ranked where all three have a result: both splits of yacht only
    assert found.ranked == 2
    assert found.ranks["log_likelihood"] == {"a": 3.0, "b": 2.0, "c": 1.0}
    assert found.ranks["crps"] == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert found.plain()["rows"][0]["method"] == "a"


def test_a_summary_is_shown_as_a_table() -> None:
    study = _study(datasets=("yacht",))
    found = summarise(study, {cell: _result(float("abc".index(cell.label)) + 0.1 * cell.split) for cell in study.cells()})
    table = found.as_table()
    assert [row[:2] for row in table.rows] == [("yacht", label) for label in "abc"]
    assert table.rows[2][2] == "2.050 ± 0.050 ▲"
    assert "mean ranks by log-likelihood: c 1.00, b 2.00, a 3.00" in str(found)
    assert "<td>2.050 ± 0.050 ▲</td>" in found._repr_html_()
    frame = found.to_pandas().set_index("method")
    assert frame.loc["b", "log_likelihood"] == pytest.approx(1.05)
    assert frame.loc["b", "log_likelihood_error"] == pytest.approx(0.05)
    nothing = summarise(study, {})
    assert nothing.as_table().rows[0][2] == "–"


def test_the_reference_can_be_chosen() -> None:
    study = _study(reference="b", datasets=("yacht",))
    found = summarise(study, {cell: _result(float("abc".index(cell.label)) + 0.1 * cell.split) for cell in study.cells()})
    assert found.row("yacht", "a").differences["log_likelihood"].verdict == "worse"
    assert found.row("yacht", "b").differences == {}
