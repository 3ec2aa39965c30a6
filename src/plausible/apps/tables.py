"""Tables to network inputs: z = (v − mean)/std for numbers, one-hot for categories, and a rule for what is missing.

A `Table` is a set of named columns of text cells (a missing cell is None), as a CSV file gives them; whether a column
is numeric is read off its cells. A `Preprocessor` is fitted on the training rows, is plain data (JSON, no pickle), and
turns any later table with the same columns into the matrix the network was trained on.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import nn

MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"})
"""Cells read as missing, whatever their case and the blanks around them."""

MAX_LEVELS = 100
ID_ROWS = 20
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU}

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?inf(?:inity)?", re.IGNORECASE)


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, activation: str = "relu") -> nn.Sequential:
    """f(x) = W_L φ(… φ(W_1 x + b_1) …) + b_L: x `[N, inputs]` → `[N, outputs]`; `hidden=()` is a linear model."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    widths = (inputs, *hidden, outputs)
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"layer widths must be integers of at least 1, got {widths} (inputs, *hidden, outputs)")
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'price'?)` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name.casefold(), {word.casefold(): word for word in known}, n=1)
    matches = [word for word in known if close and word.casefold() == close[0]]
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def listed(names: Iterable[str], limit: int = 8) -> str:
    """The names, comma separated; beyond `limit` only how many more there are."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass(frozen=True)
class Column:
    """Text cells with None where a value is missing; `numbers` and `kind` are read off them.

    rows: where the cells stood in the file, counted from 1 below the header; None for 1, 2, 3, …
    """

    name: str
    cells: tuple[str | None, ...]
    rows: tuple[int, ...] | None = None

    def row(self, index: int) -> int:
        return index + 1 if self.rows is None else self.rows[index]

    def take(self, indices: Sequence[int]) -> Column:
        """The column of these cells, in the order given; they keep their row numbers."""
        cells = tuple(self.cells[index] for index in indices)
        return Column(self.name, cells, tuple(self.row(index) for index in indices))

    @cached_property
    def missing(self) -> np.ndarray:
        """Where cells are missing: bool `[N]`."""
        return np.array([cell is None for cell in self.cells], dtype=bool)

    @cached_property
    def levels(self) -> tuple[str, ...]:
        """The distinct values, sorted as numbers where all are integers and as text otherwise."""
        distinct = {cell for cell in self.cells if cell is not None}
        # Codes such as 2 and 10 sort as numbers, so that classes come in the order people expect.
        if all(_INTEGER.fullmatch(cell) for cell in distinct):
            return tuple(sorted(distinct, key=lambda cell: (int(cell), cell)))
        return tuple(sorted(distinct))

    @cached_property
    def kind(self) -> Literal["integer", "float", "text", "empty"]:
        """`integer` or `float` where every present cell is written so, `empty` where there is none, else `text`."""
        if not self.levels:
            return "empty"
        if all(_INTEGER.fullmatch(level) for level in self.levels):
            return "integer"
        return "float" if self.unreadable is None else "text"

    @cached_property
    def unreadable(self) -> tuple[int, str] | None:
        """Row and text of the first present cell that is not a number; None where all are numbers."""
        bad = {level for level in self.levels if not _NUMBER.fullmatch(level)}
        return next(
            ((self.row(index), cell) for index, cell in enumerate(self.cells) if cell is not None and cell in bad), None
        )

    @property
    def slip(self) -> str:
        """`row 3 is 'x'`: the first cell that is not a number, where at least half of the others are; empty elsewhere."""
        good = {level for level in self.levels if _NUMBER.fullmatch(level)}
        share = sum(cell in good for cell in self.cells) / max(1, int((~self.missing).sum()))
        return f"row {self.unreadable[0]} is {self.unreadable[1]!r}" if self.unreadable and share >= 0.5 else ""

    @cached_property
    def numbers(self) -> np.ndarray:
        """The cells as float64 `[N]`, NaN where missing; text and infinite values are refused."""
        if self.unreadable is not None:
            row, text = self.unreadable
            raise ValueError(f"column {self.name!r} must hold numbers, but row {row} is {text!r}; mend or empty that cell")
        numbers = np.array([math.nan if cell is None else float(cell) for cell in self.cells], dtype=np.float64)
        if (endless := np.flatnonzero(np.isinf(numbers))).size:
            raise ValueError(
                f"column {self.name!r} has {endless.size} infinite values, first in row {self.row(int(endless[0]))}; "
                "replace them by finite numbers or leave those cells empty"
            )
        return numbers

    @property
    def counts_up(self) -> bool:
        return self.kind == "integer" and not self.missing.any() and bool((np.diff(self.numbers) == 1).all())


class Table:
    """Named columns of equal length."""

    def __init__(self, columns: Iterable[Column]):
        self.columns = {column.name: column for column in columns}
        lengths = {len(column.cells) for column in self.columns.values()}
        if len(lengths) > 1:
            raise ValueError(f"columns must have equal lengths, got {sorted(lengths)}")
        self.rows = lengths.pop() if lengths else 0

    @classmethod
    def from_values(cls, columns: Mapping[str, Iterable[Any]]) -> Table:
        """From texts or any values, taken as Python prints them; None, NaN and the words in `MISSING` are missing."""

        def cell(value: Any) -> str | None:
            value = value.item() if isinstance(value, np.generic) else value
            text = "" if value is None else str(value).strip()
            return None if text.lower() in MISSING else text

        return cls(Column(str(name), tuple(map(cell, values))) for name, values in columns.items())

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise ValueError(f"no column {name!r}{nearest(name, self.columns)}; there are: {listed(self.columns, 20)}")
        return self.columns[name]

    def take(self, rows: np.ndarray) -> Table:
        indices = (np.flatnonzero(rows) if rows.dtype == bool else rows).tolist()
        return Table(column.take(indices) for column in self.columns.values())

    def without(self, names: Iterable[str]) -> Table:
        dropped = {self[name].name for name in names}
        return Table(column for name, column in self.columns.items() if name not in dropped)

    def gaps(self, names: Iterable[str]) -> dict[str, int]:
        """How many cells are missing, for those of the named columns that have any."""
        return {name: count for name in names if (count := int(self[name].missing.sum()))}


@dataclass(frozen=True)
class Numeric:
    """v → (v − mean)/std, a missing v → `fill` (the training median), and 1[v missing] where `indicator`."""

    name: str
    mean: float
    std: float
    fill: float
    indicator: bool = False

    @classmethod
    def fit(cls, column: Column, missing: str) -> Numeric:
        present = column.numbers[~column.missing]
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = float(present.mean()), float(present.std())
        if not math.isfinite(mean) or not math.isfinite(std):
            raise ValueError(f"column {column.name!r} has values too large for arithmetic; rescale it")
        indicator = missing == "impute" and bool(column.missing.any())
        return cls(column.name, mean, std if std > 0 else 1.0, float(np.median(present)), indicator)

    @property
    def features(self) -> list[str]:
        return [self.name, f"{self.name} missing"] if self.indicator else [self.name]

    def encode(self, column: Column, notes: list[str]) -> np.ndarray:
        """`[N]` cells → `[N, 1 or 2]`."""
        gaps = column.missing
        if gaps.any() and not self.indicator:
            notes.append(f"column {self.name!r} was complete in training: {gaps.sum()} gaps become its median")
        values = (np.where(gaps, self.fill, column.numbers) - self.mean) / self.std
        return np.stack([values, gaps.astype(np.float64)] if self.indicator else [values], axis=1)


@dataclass(frozen=True)
class Categories:
    """v → (1[v = level])_level, and 1[v missing] where `gap_level`; a level that is not known → all zeros."""

    name: str
    levels: tuple[str, ...]
    gap_level: bool = False

    @classmethod
    def fit(cls, column: Column, missing: str) -> Categories:
        """The levels of the present cells; columns that look like identifiers are refused."""
        levels, rows = len(column.levels), int((~column.missing).sum())
        if levels > MAX_LEVELS or (levels == rows >= ID_ROWS):
            why = "looks like an identifier, a date or free text: turn it into numbers"
            if slip := column.slip:
                why = f"is mostly numbers, but {slip}: mend the file"
            raise ValueError(
                f"column {column.name!r} has {levels} different texts in {rows} rows (at most {MAX_LEVELS} categories) "
                f"and {why}, or leave it out (command line: --drop-columns {column.name!r})"
            )
        return cls(column.name, column.levels, missing == "impute" and bool(column.missing.any()))

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={level}" for level in self.levels] + [f"{self.name} missing"] * self.gap_level

    def unknown(self, column: Column) -> str | None:
        """A sentence about the categories that training has not seen; None where there are none."""
        new = set(column.levels) - set(self.levels)
        rows = sum(cell in new for cell in column.cells)
        named = listed(map(repr, sorted(new)), 5)
        where = f"in {rows} of {len(column.cells)} rows"
        return f"column {self.name!r} has categories not seen in training: {named}, {where}" if new else None

    def encode(self, column: Column, notes: list[str]) -> np.ndarray:
        """`[N]` cells → one-hot `[N, levels (+ 1)]`."""
        if unseen := self.unknown(column):
            notes.append(f"{unseen}; they are encoded as none of the known")
        if column.missing.any() and not self.gap_level:
            notes.append(f"column {self.name!r} was complete in training: {column.missing.sum()} gaps become no category")
        index = {level: position for position, level in enumerate(self.levels)}
        encoded = np.zeros((len(column.cells), len(self.features)))
        for row, cell in enumerate(column.cells):
            if cell in index:
                encoded[row, index[cell]] = 1.0
            elif cell is None and self.gap_level:
                encoded[row, -1] = 1.0
        return encoded


class Features(NamedTuple):
    """`inputs` float32 `[kept rows, D]`; `kept` bool `[N]`, False for rows left out; `notes` for the user."""

    inputs: np.ndarray
    kept: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessor:
    """Columns → inputs `[N, D]`: numbers standardised, texts one-hot, missing cells by one stated rule.

    columns: the encoders, in the order of the inputs.
    missing: `refuse` (a missing cell is an error), `drop` (its row is left out) or `impute` (the median or a category
        of its own, with an indicator where the training rows had gaps).
    notes: what was decided while fitting.
    """

    columns: tuple[Numeric | Categories, ...]
    missing: str = "refuse"
    notes: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls, table: Table, inputs: Sequence[str] | None = None, *, missing: str = "refuse", categorical: Iterable[str] = ()
    ) -> Preprocessor:
        """Read means, medians and levels off the rows; columns in `categorical` are categories even if numeric."""
        categorical = set(categorical)
        if missing not in ("refuse", "drop", "impute"):
            raise ValueError(f"missing must be 'refuse', 'drop' or 'impute', got {missing!r}")
        names = list(table.columns) if inputs is None else list(inputs)
        if unknown := sorted(categorical - set(names)):
            raise ValueError(f"categorical columns must be inputs, got {listed(unknown)}{nearest(unknown[0], names)}")
        if missing == "refuse":
            refuse_gaps(table, names)
        if missing == "drop":
            table = table.take(complete(table, names))
        if table.rows == 0:
            raise ValueError("no rows are left to learn from; check the columns that are mostly missing")
        columns: list[Numeric | Categories] = []
        notes: list[str] = []
        for name in names:
            column = table[name]
            if len(column.levels) == 0:
                notes.append(f"column {name!r} is empty and left out")
            elif len(column.levels) == 1 and not column.missing.any():
                notes.append(f"column {name!r} is constant ({column.levels[0]}) and left out")
            elif column.kind == "text" or name in categorical:
                columns.append(Categories.fit(column, missing))
                if slip := column.slip:
                    notes.append(f"column {name!r} is read as categories: {slip}, not a number")
            else:
                columns.append(Numeric.fit(column, missing))
        if not columns:
            raise ValueError("no input column is left: every one is constant, empty or dropped")
        return cls(tuple(columns), missing, tuple(notes))

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def features(self) -> list[str]:
        return [feature for column in self.columns for feature in column.features]

    def transform(self, table: Table, *, strict: bool = False) -> Features:
        """Inputs for the rows of `table`. Unknown categories give zeros and a note, or an error where `strict`."""
        if absent := [name for name in self.names if name not in table.columns]:
            raise ValueError(
                f"missing input columns: {listed(absent, 20)}{nearest(absent[0], table.columns)}; "
                f"there are: {listed(table.columns, 20)}"
            )
        if self.missing == "refuse":
            refuse_gaps(table, self.names, "fill those cells, or fit again with missing='impute' (--missing impute)")
        # Columns that training had complete may have gaps here: the rule of the fit decides.
        kept = complete(table, self.names) if self.missing == "drop" else np.ones(table.rows, dtype=bool)
        notes: list[str] = []
        table = table if kept.all() else table.take(kept)
        for column in self.columns if strict else ():
            if isinstance(column, Categories) and (unseen := column.unknown(table[column.name])):
                raise ValueError(f"{unseen}; known are {listed(column.levels, 10)}")
        blocks = [column.encode(table[column.name], notes) for column in self.columns]
        with np.errstate(over="ignore"):
            inputs = np.concatenate(blocks, axis=1).astype(np.float32)
        if wild := [name for name, values in zip(self.features, inputs.T) if not np.isfinite(values).all()]:
            raise ValueError(f"values in {listed(wild)} are too far from those seen in training to compute with")
        return Features(inputs, kept, tuple(notes))

    def to_dict(self) -> dict[str, Any]:
        kinds = {Numeric: "numeric", Categories: "categories"}
        return {
            "columns": [{"kind": kinds[type(column)], **vars(column)} for column in self.columns],
            "missing": self.missing,
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Preprocessor:
        """The inverse of `to_dict`; anything else is a ValueError."""
        try:
            columns: list[Numeric | Categories] = []
            for entry in data["columns"]:
                name = str(entry["name"])
                if entry["kind"] == "numeric":
                    mean, std, fill = (float(entry[key]) for key in ("mean", "std", "fill"))
                    columns.append(Numeric(name, mean, std, fill, bool(entry["indicator"])))
                elif entry["kind"] == "categories":
                    columns.append(Categories(name, tuple(map(str, entry["levels"])), bool(entry["gap_level"])))
                else:
                    raise ValueError(f"unknown kind {entry['kind']!r} of column {name!r}")
            return cls(tuple(columns), str(data["missing"]), tuple(map(str, data["notes"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the description of a preprocessor: {error!r}") from error


def complete(table: Table, names: Iterable[str]) -> np.ndarray:
    """Which rows have no missing cell in the named columns: bool `[N]`."""
    return ~np.logical_or.reduce([table[name].missing for name in names])


def refuse_gaps(
    table: Table,
    names: Iterable[str],
    advice: str = "fill them in by missing='impute' (median, or a category of its own) or leave the rows out by "
    "missing='drop' (command line: --missing impute, --missing drop)",
) -> None:
    """A ValueError that counts the missing cells of each column, where there are any."""
    if gaps := table.gaps(names):
        counts = listed([f"{name} ({count})" for name, count in gaps.items()], 12)
        raise ValueError(f"missing values in {counts} of {table.rows} rows; {advice}")
