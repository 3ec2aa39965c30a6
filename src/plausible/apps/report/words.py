"""Numbers and shares as text, the same everywhere on the page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

from plausible.core.words import number as number
from plausible.core.words import percent as percent
from plausible.core.words import plural as plural

escape = html.escape

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
    found = _FRACTION.fullmatch(text.strip())
    if found is None or len(found[1].replace(".", "").lstrip("0")) <= digits:
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


def table(caption: str, heads: Iterable[str], rows: Iterable[Iterable[str]], *, kind: str = "", hidden: bool = False) -> str:
    """A table with caption and scopes, in a frame that scrolls by itself; cells are HTML, the first names its row."""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    quiet = ' class="visually-hidden"' if hidden else ""
    return (
        f'<div class="scroll {kind}" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption{quiet}>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definitions(entries: Mapping[str, Any]) -> str:
    """A list of names and what they are; the values are HTML."""
    return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{v}</dd></div>" for k, v in entries.items()) + "</dl>"
