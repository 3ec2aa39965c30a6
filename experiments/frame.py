"""What a reproduction is made of: cells that are trained, claims about their numbers, tables and figures of both.

A claim takes one number for each seed from the results and says what the paper found, what is expected here, and whether that
was met. `Bound` sets limits to a mean; `Effect` asks for the sign of a paired difference, by Student's t.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from plausible.apps.compare.tables import Mean, mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Size = Literal["full", "reduced", "tiny"]
SIZES: tuple[Size, ...] = ("full", "reduced", "tiny")
SEEDS: Mapping[Size, int] = {"full": 5, "reduced": 3, "tiny": 2}
"""Runs from different starting points, stacked, where none are asked for."""

Result = Mapping[str, Any]
"""What the file of a cell holds: `settings`, `seeds`, `seconds`, `versions`, and the cell's own numbers."""
Results = Mapping[str, Result]
"""By cell; those that have not been run are missing."""
Values = Callable[[Results], Sequence[float] | None]
"""One number for each seed, or None where a result is missing."""


@dataclass(frozen=True)
class Request:
    """How to run a cell: nothing in here is part of the experiment, except the number of seeds and the first of them."""

    seeds: int = 5
    seed: int = 0
    device: str = "auto"
    compile: Literal["auto"] | bool = "auto"
    precision: Literal["float32", "tf32"] | None = None
    checkpoint: Path | None = None
    keep: Path | None = None
    progress: bool | None = None


@dataclass(frozen=True)
class Cell:
    """One training of one setting over all seeds; `settings` by size, and a size without settings leaves the cell out."""

    name: str
    run: Callable[[Any, Request], dict[str, Any]]
    settings: Mapping[Size, Any]


class Judged(NamedTuple):
    """A claim beside what came out: verdict "met", "not met", "holds", "refuted", "undecided", "not comparable" or "not run"."""

    label: str
    ours: Mean
    published: str
    expected: str
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Bound:
    """low ≤ mean over seeds ≤ high; with fewer than `seeds` seeds the mean is too uncertain to be judged."""

    label: str
    values: Values
    published: float | str | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 1
    unit: str = "%"

    def judge(self, results: Results) -> Judged:
        """Compare."""
        ours, published = _mean(self.values(results)), _shown(self.published, self.unit)
        limits = [f"≥ {_shown(self.low, self.unit)}"] if self.low is not None else []
        limits += [f"≤ {_shown(self.high, self.unit)}"] if self.high is not None else []
        if not ours.splits:
            return Judged(self.label, ours, published, " and ".join(limits), "not run")
        if not limits:
            return Judged(self.label, ours, published, "–", "not comparable")
        if ours.splits < self.seeds:
            note = f"{ours.splits} of {self.seeds} seeds"
            return Judged(self.label, ours, published, " and ".join(limits), "not comparable", note)
        low = -math.inf if self.low is None else self.low
        good = low <= ours.value <= (math.inf if self.high is None else self.high)
        return Judged(self.label, ours, published, " and ".join(limits), "met" if good else "not met")


@dataclass(frozen=True)
class Effect:
    """E(a − b) < 0 (`sign` −1) or > 0 (`sign` 1), from differences paired by seed: holds, refuted or undecided at p < 0.05."""

    label: str
    values: Values
    sign: Literal[-1, 1]
    published: float | str | None = None
    unit: str = "points"

    def judge(self, results: Results) -> Judged:
        """Student's t, two-sided."""
        found = self.values(results)
        ours, published = _mean(found), _shown(self.published, self.unit)
        expected = f"{'<' if self.sign < 0 else '>'} 0, p < 0.05"
        if not found:
            return Judged(self.label, ours, published, expected, "not run")
        if len(found) < 2:
            return Judged(self.label, ours, published, expected, "not comparable", "1 seed")
        p = paired_p_value(found)
        verdict = "undecided" if p >= 0.05 else "holds" if ours.value * self.sign > 0 else "refuted"
        return Judged(self.label, ours, published, expected, verdict, f"p = {p:.2g}")


class Sheet(NamedTuple):
    """A table of words."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Part:
    """A table or a figure: the cells it needs and its claims, by size; further tables; a function that draws it."""

    kind: Literal["table", "figure"]
    name: str
    title: str
    cells: Mapping[Size, Sequence[str]]
    claims: Mapping[Size, Sequence[Bound | Effect]] = field(default_factory=dict)
    sheets: Callable[[Results], Sequence[Sheet]] | None = None
    draw: Callable[[Results], Figure] | None = None

    @property
    def key(self) -> str:
        """`table-1`: the name of its files."""
        return f"{self.kind}-{self.name}"

    def judged(self, size: Size, results: Results) -> list[Judged]:
        """Every claim beside what came out."""
        return [claim.judge(results) for claim in self.claims.get(size, ())]


@dataclass(frozen=True)
class Reproduction:
    """A published experiment: its cells, and the tables and figures made of them. `page` is the file in docs/reproductions.

    `seeds` are those of each size, where none are asked for.
    """

    name: str
    title: str
    source: str
    cells: tuple[Cell, ...]
    parts: tuple[Part, ...]
    page: str
    seeds: Mapping[Size, int] = field(default_factory=lambda: SEEDS)

    def cell(self, name: str) -> Cell:
        """The cell of this name."""
        found = next((cell for cell in self.cells if cell.name == name), None)
        if found is None:
            known = ", ".join(cell.name for cell in self.cells)
            raise ValueError(f"{self.name} has no cell {name!r}; it has: {known}")
        return found

    def part(self, kind: str, name: str) -> Part:
        """The table or figure of this name."""
        found = next((part for part in self.parts if (part.kind, part.name) == (kind, name)), None)
        if found is None:
            known = [part.name for part in self.parts if part.kind == kind]
            has = f"its {kind}s are: {', '.join(known)}" if known else f"it has no {kind}s"
            raise ValueError(f"{self.name} has no {kind} {name!r}; {has}")
        return found


def number(cell: str, *path: str) -> Values:
    """The numbers that lie at this path in the result of a cell."""

    def values(results: Results) -> Sequence[float] | None:
        return None if (found := look(results, cell, *path)) is None else list(found)

    return values


def look(results: Results, cell: str, *path: str) -> Any:
    """What lies at this path in the result of a cell, or None."""
    found: Any = results.get(cell)
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def paired(first: Values, second: Values) -> Values:
    """First − second, seed by seed."""

    def values(results: Results) -> Sequence[float] | None:
        one, two = first(results), second(results)
        return None if one is None or two is None else [a - b for a, b in zip(one, two)]

    return values


def paired_p_value(differences: Sequence[float]) -> float:
    """P(|t| > observed), Student's t with n − 1 degrees of freedom, where the expected difference is 0."""
    import torch

    from plausible.core.special import betainc

    count, average = len(differences), statistics.fmean(differences)
    spread = statistics.stdev(differences)
    if spread == 0:
        return 1.0 if average == 0 else 0.0
    ratio = average**2 * count / spread**2
    freedom = count - 1
    arguments = (freedom / 2, 0.5, freedom / (freedom + ratio))
    return float(betainc(*(torch.tensor(value, dtype=torch.float64) for value in arguments)))


def _mean(values: Sequence[float] | None) -> Mean:
    return mean([float(value) for value in values or ()])


def _shown(value: float | str | None, unit: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:.4g}".replace("-", "−") + (f" {unit}" if unit else "")
