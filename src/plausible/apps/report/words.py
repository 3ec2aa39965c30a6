"""Numbers and shares as text, the same everywhere on the page."""

from __future__ import annotations

import math
import re

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


def number(value: float, digits: int = 3) -> str:
    """Three digits, with a thin space between thousands: `1 234`, `0.0123`, `1.2e-07`."""
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: "−∞"}.get(value, "not a number")
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e7:
        return f"{value:,.0f}".replace(",", "\u202f").replace("-", "−")
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 7:
        text = f"{value:,.{max(0, digits - 1 - size)}f}".replace(",", "\u202f")
    else:
        text = f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return text.replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    """`83 %`; never 100 % or 0 % for a share that is neither."""
    text = f"{100 * share:.{digits}f}"
    if text == f"{100:.{digits}f}" and share < 1:
        return f">{100 - 10.0**-digits:.{digits}f}\u00a0%"
    if text == f"{0:.{digits}f}" and share > 0:
        return f"<{10.0**-digits:.{digits}f}\u00a0%"
    return f"{text}\u00a0%"


def plural(count: int, noun: str = "row") -> str:
    """`1 row`, `1,234 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
    """Which way a score should point."""
    kind, _, level = key.rpartition("_")
    if kind == "coverage":
        return f"{level} % or a little more" if kind_of_target == "counts" else f"near {level} %"
    return "higher" if key in HIGHER else "lower"


def score(key: str, value: float) -> str:
    """A score as text: shares in percent."""
    return percent(value, 1) if key == "accuracy" or key.startswith("coverage_") else number(value, 4)
