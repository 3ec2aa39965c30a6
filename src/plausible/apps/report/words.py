"""Numbers and shares as text, the same everywhere on the page."""

from __future__ import annotations

import re

from plausible.core.words import number as number
from plausible.core.words import percent as percent
from plausible.core.words import plural as plural

LABELS = {
    "log_likelihood": "log-likelihood (nats per row)",
    "rmse": "RMSE",
    "mae": "MAE",
    "crps": "CRPS",
    "accuracy": "accuracy",
    "brier": "Brier score",
    "ece": "calibration error (ECE, 15 bins)",
    "classwise_ece": "calibration error of each class, averaged",
    "calibrated_log_loss": "log loss at a fitted temperature",
    "quantile_calibration": "calibration error of quantiles",
    "aurc": "risk averaged over coverage (AURC)",
}
HIGHER = ("log_likelihood", "accuracy")


_FRACTION = re.compile(r"[+-]?0*((?:\d+\.\d*|\.\d+|\d+(?=[eE])))(?:[eE][+-]?\d+)?")


def cell(text: str, digits: int = 6) -> str:
    """The cell of a table as it is, but a number with a fraction to six digits; whole numbers may be names and stay."""
    match = _FRACTION.fullmatch(text.strip())
    if match is None or len(match[1].replace(".", "").lstrip("0")) <= digits:
        return text
    return f"{float(text):.{digits}g}"


def label(key: str, kind_of_target: str = "") -> str:
    """The words for a score; the intervals of counts are whole numbers, both ends included."""
    kind, _, level = key.rpartition("_")
    ends = ", both ends included" if kind_of_target == "counts" else ""
    words = {"coverage": f"inside the {level} % interval{ends}", "width": f"mean width of the {level} % interval"}
    return words.get(kind) or LABELS.get(key) or key.replace("_", " ")


def better(key: str, kind_of_target: str = "") -> str:
    kind, _, level = key.rpartition("_")
    if kind == "coverage":
        return f"{level} % or a little more" if kind_of_target == "counts" else f"near {level} %"
    return "higher" if key in HIGHER else "lower"


def score(key: str, value: float) -> str:
    return percent(value, 1) if key == "accuracy" or key.startswith("coverage_") else number(value, 4)
