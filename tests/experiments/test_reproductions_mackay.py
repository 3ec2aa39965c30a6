"""Architectures are chosen by their evidence alone, and judged by rows that it did not see."""

from __future__ import annotations

import math

import pytest
import torch

from experiments import mackay
from experiments.frame import Request
from experiments.mackay import Perceptron, best_start, chosen, correlation, family, network, regret, rows


def _result(evidence: list[float], likelihood: list[float], distance: list[float] | None = None, copies: float = 0.0) -> dict:
    count = len(evidence)
    zeros = [0.0] * count
    return {
        "log_evidence": evidence,
        "log_likelihood": likelihood,
        "distance": distance or zeros,
        "log_fit": zeros,
        "log_occam": zeros,
        "effective": zeros,
        "noise": zeros,
        "error": zeros,
        "weights": 10,
        "log_symmetries": copies,
    }


RESULTS = {
    "robot-3x1": _result([1.0, 5.0], [0.1, 0.2]),
    "robot-8x1": _result([9.0, 7.0], [0.9, 1.0]),
    "robot-4x2": _result([6.0, 99.0], [0.5, 0.0], [0.0, 4.0], copies=20.0),
}
CELLS = list(RESULTS)


def test_a_start_that_is_not_at_a_mode_does_not_count_where_another_is() -> None:
    assert [best_start(result) for result in RESULTS.values()] == [1, 0, 0]
    assert best_start(_result([1.0, 2.0], [0.0, 0.0], [5.0, 5.0])) == 1


def test_claims_are_about_the_best_start_of_each_architecture() -> None:
    assert correlation(CELLS)(RESULTS) == [pytest.approx(1.0)]
    assert regret(CELLS)(RESULTS) == [0.0]
    assert chosen(RESULTS, CELLS, symmetries=True)["robot-4x2"]["log_evidence"] == 26.0
    assert regret(CELLS, symmetries=True)(RESULTS) == [pytest.approx(0.4)]  # 4×2 has then the most evidence
    assert correlation(CELLS)({}) is None
    assert mackay.picked(CELLS, "log_likelihood")(RESULTS) == [0.9]
    (sheet,) = mackay.sheet(CELLS, "errors")(RESULTS)
    assert [row[0] for row in sheet.rows] == ["8×1", "4×2", "3×1"]
    assert sheet.rows[0][-1] == "7.0"
    assert sheet.title.endswith("at most 0 posterior standard deviations from its mode")


def test_families_have_a_cell_for_each_architecture() -> None:
    cells, names = family("robot", "robot_arm", mackay.ROBOT)
    assert names["tiny"] == ["robot-3x1", "robot-6x1", "robot-3x2"]
    assert {cell.name for cell in cells} == {name for own in names.values() for name in own}
    for cell in cells:
        for settings in cell.settings.values():
            assert cell.name == f"robot-{settings.widths[0]}x{len(settings.widths)}"


def test_a_cell_has_evidence_from_training_rows_and_scores_from_test_rows() -> None:
    settings = mackay.REPRODUCTIONS["neal"].cell("regression-3x1").settings["tiny"]
    try:
        (x, _), (x_test, _) = rows("neal_regression")
    except (ValueError, FileNotFoundError, OSError) as error:
        pytest.skip(str(error))
    assert (len(x), len(x_test)) == (100, 1000)
    torch.testing.assert_close(x.mean(0), torch.zeros(1, dtype=torch.float64), atol=1e-9, rtol=0)
    found = mackay.run(Perceptron("neal_regression", (3,), settings.method), Request(seeds=2, progress=False))
    assert {len(value) for value in found.values() if isinstance(value, list)} == {2}
    assert found["weights"] == sum(p.numel() for p in network((3,), 1, 1).parameters()) == 10
    assert found["log_symmetries"] == pytest.approx(math.log(6 * 8))
    for total, fit, occam in zip(found["log_evidence"], found["log_fit"], found["log_occam"]):
        assert total == pytest.approx(fit + occam)
        assert occam < 0
