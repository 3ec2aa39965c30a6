"""What the cells say: means with standard errors, paired differences, ranks.

The 20 splits of a data set share most of their training rows, so differences on them are not independent. The standard error
σ/√J of a mean over J splits, which the literature prints, is kept for the columns; whether one method is *better* than
another is judged by the corrected one, √((1/J + n_test/n_train) σ²), of their paired differences (Nadeau and Bengio 2003), against
Student's t with J − 1 degrees of freedom at 5 %, two-sided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import scipy.special

from plausible.apps.compare.study import Cell, Study
from plausible.core.tables import Table, Tabular, data_frame

HIGHER_IS_BETTER = ("log_likelihood", "accuracy")
NAMES = {
    "log_likelihood": "log-likelihood",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_90": "inside 90 %",
    "quantile_calibration": "calibration error",
    "accuracy": "accuracy",
    "brier": "Brier score",
    "ece": "calibration error",
}
MARKS = {"better": "▲", "worse": "▼", "no difference": "=", "": ""}


class Mean(NamedTuple):
    """A mean over splits and its standard error (NaN for one split)."""

    value: float
    error: float
    splits: int

    def text(self, digits: int = 2) -> str:
        """`−2.41 ± 0.06`; as many digits as the error asks for, at least `digits`."""
        return "–" if not self.splits else _with_error(self.value, self.error, digits)

    def short(self) -> str:
        """`text`, but of values from a thousand on, `23,029 ± 1,302`: whatever unit a table is in."""
        if not 1000 <= abs(self.value) < math.inf or not self.splits:
            return self.text()
        return f"{self.value:,.0f} ± {self.error:,.0f}".replace("-", "−").removesuffix(" ± nan")


class Difference(NamedTuple):
    """A mean paired difference (method less reference), its corrected standard error, and the verdict by Student's t."""

    value: float
    error: float
    splits: int
    verdict: str  # "better", "worse", "no difference", or "" where there are too few splits

    def text(self, digits: int = 2) -> str:
        """`+0.12 ± 0.05`."""
        return ("+" if self.value > 0 else "") + _with_error(self.value, self.error, digits)


def _with_error(value: float, error: float, digits: int) -> str:
    if not math.isfinite(value) or abs(value) >= 1e5:
        return f"{value:.3g}".replace("-", "−")
    if math.isfinite(error) and error > 0:
        digits = max(digits, min(6, 1 - math.floor(math.log10(error)) if error < 0.1 else digits))
    shown = f"{value:.{digits}f}".replace("-", "−")
    return shown if math.isnan(error) else f"{shown} ± {error:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """One method on one data set."""

    dataset: str
    label: str
    metrics: Mapping[str, Mean]
    differences: Mapping[str, Difference]
    seconds: float
    peak_bytes: float | None
    failures: tuple[str, ...]
    missing: int

    @property
    def title(self) -> str:
        wanted = len(self.failures) + self.missing + self.splits
        return self.label if self.splits == wanted or not self.splits else f"{self.label} ({self.splits} of {wanted} splits)"

    @property
    def splits(self) -> int:
        return next((value.splits for value in self.metrics.values()), 0)


@dataclass(frozen=True)
class Summary(Tabular):
    """All rows, the mean rank of each method by each headline metric, and how many splits it was ranked on."""

    rows: tuple[Row, ...]
    ranks: Mapping[str, Mapping[str, float]]
    ranked: int
    against: str

    def ranked_rows(self, dataset: str) -> list[Row]:
        """The rows of a data set by their mean log-likelihood, the best first; those without a result last."""
        rows = [row for row in self.rows if row.dataset == dataset]
        return sorted(rows, key=lambda row: -row.metrics["log_likelihood"].value if row.metrics else math.inf)

    def row(self, dataset: str, label: str) -> Row:
        return next(row for row in self.rows if (row.dataset, row.label) == (dataset, label))

    def as_table(self) -> Table:
        """Means with standard errors, a mark where the paired difference is real."""
        shown = [name for name in NAMES if any(name in row.metrics for row in self.rows)] or ["log_likelihood"]
        rows = []
        for row in self.rows:
            marks = {name: f" {MARKS[difference.verdict]}" for name, difference in row.differences.items()}
            cells = [row.metrics[name].text() + marks.get(name, "") if name in row.metrics else "–" for name in shown]
            rows.append((row.dataset, row.title, *cells, row.seconds))
        best = sorted(self.ranks.get("log_likelihood", {}).items(), key=lambda item: item[1])
        ranks = "; mean ranks by log-likelihood: " + ", ".join(f"{label} {rank:.2f}" for label, rank in best) if best else ""
        heads = ("data set", "method", *(NAMES[name] for name in shown), "seconds")
        note = f"▲ better, ▼ worse than {self.against}, = not to be told apart{ranks}"
        return Table(heads, rows, words=("data set", "method"), note=note)

    def to_pandas(self) -> Any:
        """A data frame with a row for each method on each data set; needs pandas."""
        records = []
        for row in self.rows:
            means = {name: value.value for name, value in row.metrics.items()}
            errors = {f"{name}_error": value.error for name, value in row.metrics.items()}
            records.append({"dataset": row.dataset, "method": row.label, **means, **errors, "seconds": row.seconds})
        return data_frame(records)

    def plain(self) -> dict[str, Any]:
        rows = [
            {
                "dataset": row.dataset,
                "method": row.label,
                "metrics": {k: v._asdict() for k, v in row.metrics.items()},
                f"differences from {self.against}": {k: v._asdict() for k, v in row.differences.items()},
                "seconds": row.seconds,
                "peak_bytes": row.peak_bytes,
                "failures": list(row.failures),
                "missing": row.missing,
            }
            for row in self.rows
        ]
        return {"rows": rows, "mean_ranks": {k: dict(v) for k, v in self.ranks.items()}, "ranked_splits": self.ranked}


def mean(values: Sequence[float]) -> Mean:
    if not values:
        return Mean(math.nan, math.nan, 0)
    spread = len(values) > 1 and all(map(math.isfinite, values))
    error = statistics.stdev(values) / math.sqrt(len(values)) if spread else math.nan
    return Mean(sum(values) / len(values), error, len(values))


def difference(ours: Sequence[float], theirs: Sequence[float], ratio: float, higher: bool) -> Difference:
    """The paired difference ours − theirs over splits with test rows per training row `ratio`, judged at 5 %, two-sided."""
    # Two scores of −∞ are equal, and their difference would be NaN.
    gaps = [0.0 if a == b else a - b for a, b in zip(ours, theirs, strict=True)]
    if len(gaps) < 2 or not all(map(math.isfinite, gaps)):
        return Difference(sum(gaps) / len(gaps) if gaps else math.nan, math.nan, len(gaps), "")
    value, spread = statistics.fmean(gaps), statistics.variance(gaps)
    error = math.sqrt((1 / len(gaps) + ratio) * spread)
    if abs(value) <= scipy.special.stdtrit(len(gaps) - 1, 0.975) * error or value == 0:
        verdict = "no difference"
    else:
        verdict = "better" if (value > 0) == higher else "worse"
    return Difference(value, error, len(gaps), verdict)


def summarise(study: Study, results: Mapping[Cell, Mapping[str, Any]]) -> Summary:
    """Rows and ranks from the cells that there are; missing and failed ones are counted."""
    rows = []
    good = {cell: result for cell, result in results.items() if "metrics" in result}
    for dataset in study.datasets:
        wanted = sorted({cell.split for cell in study.cells() if cell.dataset == dataset})
        for candidate in study.candidates:
            label = candidate.label
            ours = {s: good[Cell(dataset, s, label)] for s in wanted if Cell(dataset, s, label) in good}
            theirs = {s: good[Cell(dataset, s, study.against)] for s in ours if Cell(dataset, s, study.against) in good}
            names = list(next(iter(ours.values()))["metrics"]) if ours else []
            errors = {s: results.get(Cell(dataset, s, label), {}).get("error") for s in wanted}
            failures = tuple(f"split {s}: {error}" for s, error in errors.items() if error is not None)
            ratio = statistics.fmean(r["test_rows"] / r["train_rows"] for r in ours.values()) if ours else 0.0
            differences = {}
            for name in study.headline if theirs and label != study.against else ():
                if name in names:
                    a, b = ([float(side[s]["metrics"][name]) for s in theirs] for side in (ours, theirs))
                    differences[name] = difference(a, b, ratio, name in HIGHER_IS_BETTER)
            means = {name: mean([float(r["metrics"][name]) for r in ours.values()]) for name in names}
            seconds = statistics.fmean(sum(r["seconds"].values()) for r in ours.values()) if ours else math.nan
            peak = max((r["peak_bytes"] for r in ours.values() if r.get("peak_bytes") is not None), default=None)
            missing = len(wanted) - len(ours) - len(failures)
            rows.append(Row(dataset, label, means, differences, seconds, peak, failures, missing))
    ranks, count = _ranks(study, good)
    return Summary(tuple(rows), ranks, count, study.against)


def _ranks(study: Study, good: Mapping[Cell, Mapping[str, Any]]) -> tuple[dict[str, dict[str, float]], int]:
    """Mean ranks (1 is best, ties share) over the splits on which every method has a result, data sets weighing equally."""
    labels = [candidate.label for candidate in study.candidates]
    complete: dict[str, list[int]] = {}
    for dataset, split in dict.fromkeys((cell.dataset, cell.split) for cell in good):
        if all(Cell(dataset, split, label) in good for label in labels):
            complete.setdefault(dataset, []).append(split)
    ranks: dict[str, dict[str, float]] = {}
    for name in study.headline:
        sign = -1 if name in HIGHER_IS_BETTER else 1
        totals: dict[str, list[float]] = {label: [] for label in labels}
        for dataset, splits in complete.items():
            places: dict[str, list[float]] = {label: [] for label in labels}
            for split in splits:
                scores = {x: sign * float(good[Cell(dataset, split, x)]["metrics"].get(name, math.nan)) for x in labels}
                for x in labels:
                    below = sum(score < scores[x] for score in scores.values())
                    ties = sum(score == scores[x] for score in scores.values())
                    places[x].append(below + (ties + 1) / 2)
            for x in labels:
                totals[x].append(statistics.fmean(places[x]))
        if complete:
            ranks[name] = {x: statistics.fmean(v) for x, v in totals.items()}
    return ranks, sum(map(len, complete.values()))
