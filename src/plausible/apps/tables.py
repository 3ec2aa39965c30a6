"""Tables to network inputs: z = (v − mean)/std for numbers, one-hot for categories, the calendar's view of dates, and a rule for
what is missing.

A `Table` is a set of named columns of text cells (a missing cell is None), as a CSV file gives them; whether a column
is numeric is read off its cells. A `Preprocessor` is fitted on the training rows, is plain data (JSON, no pickle), and
turns any later table with the same columns into the matrix the network was trained on.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import nn

from plausible.apps import dates

MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"})
"""Cells read as missing, whatever their case and the blanks around them."""

MAX_LEVELS = 100
ID_ROWS = 20
FEW = 20
"""Different numbers up to which a column of numbers with words in it may mean categories (`1`, `2`, `3+`)."""
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
    """Text cells with None where a value is missing; `numbers`, `dates` and `kind` are read off them.

    rows: where the cells stood in the file, counted from 1 below the header; None for 1, 2, 3, …
    unit: the currency or % that all numbers had, and that was taken off.
    """

    name: str
    cells: tuple[str | None, ...]
    rows: tuple[int, ...] | None = None
    unit: str = ""

    def row(self, index: int) -> int:
        return index + 1 if self.rows is None else self.rows[index]

    def take(self, indices: Sequence[int]) -> Column:
        """The column of these cells, in the order given; they keep their row numbers."""
        cells = tuple(self.cells[index] for index in indices)
        return replace(self, cells=cells, rows=tuple(self.row(index) for index in indices))

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
    def strays(self) -> tuple[str, ...]:
        """The words in a column of numbers or dates: half of its cells or more are such, and the words are no categories.

        They may be (`1`, `2`, `3+`) where the numbers are few and some word stands in more than one cell in a hundred.
        """
        if self.kind != "text":
            return ()
        known = {level for level in self.levels if _NUMBER.fullmatch(level)}
        if not self.slip and (found := dates.read(self.levels)):
            known = set(found.days)
            if 2 * sum(cell in known for cell in self.cells) < len(self.cells) - int(self.missing.sum()):
                return ()
        elif not self.slip:
            return ()
        elif len(known) <= min(FEW, len(self.cells) / 2):
            words = Counter(cell for cell in self.cells if cell is not None and cell not in known)
            if len(self.cells) < ID_ROWS or max(words.values()) > max(1, len(self.cells) / 100):
                return ()
        return tuple(level for level in self.levels if level not in known)

    @cached_property
    def calendar(self) -> dates.Reading | None:
        """The cells as dates by text, where all are, in one format."""
        found = dates.read(self.levels) if self.kind == "text" else None
        return found if found and len(found.days) == len(self.levels) else None

    def without_strays(self, words: Iterable[str] | None = None) -> Column:
        """The column with its strays, or with these words, as missing cells."""
        words = set(self.strays if words is None else words)
        return replace(self, cells=tuple(None if cell in words else cell for cell in self.cells)) if words else self

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

    def with_column(self, column: Column) -> Table:
        """The table with this column in the place of the one of its name."""
        return Table({**self.columns, column.name: column}.values())

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
            why = "looks like an identifier or free text: turn it into numbers"
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


@dataclass(frozen=True)
class Dates:
    """d → (d − mean)/std in days, its calendar `parts` that varied in training, and 1[d missing] where `indicator`.

    first, last: the range of the training rows, in days since 1970-01-01; beyond it the first input goes on growing, so that
    draws which agree inside may part. A missing d → `fill` (the training median).
    """

    name: str
    format: str
    first: float
    last: float
    mean: float
    std: float
    fill: float
    parts: tuple[str, ...] = ()
    indicator: bool = False

    @classmethod
    def fit(cls, column: Column, found: dates.Reading, missing: str) -> Dates:
        days = np.array([found.days[cell] for cell in column.cells if cell is not None])
        varied = tuple(name for name, values in dates.parts(days).items() if np.ptp(values, axis=0).max() > 1e-9)
        indicator = missing == "impute" and bool(column.missing.any())
        first, last, mean, std, fill = map(float, (days.min(), days.max(), days.mean(), days.std() or 1.0, np.median(days)))
        return cls(column.name, found.format, first, last, mean, std, fill, varied, indicator)

    @property
    def features(self) -> list[str]:
        named = [f"{self.name}: {part}" for name in self.parts for part in dates.NAMES[name]]
        return [self.name, *named, *[f"{self.name} missing"] * self.indicator]

    def encode(self, column: Column, notes: list[str]) -> np.ndarray:
        """`[N]` cells → `[N, 1 + parts (+ 1)]`."""
        gaps = column.missing
        if gaps.any() and not self.indicator:
            notes.append(f"column {self.name!r} was complete in training: {gaps.sum()} gaps become its median")
        read = {level: dates.day(level, self.format) for level in column.levels}
        if bad := {level for level, day in read.items() if day is None}:
            row, text = next((column.row(index), cell) for index, cell in enumerate(column.cells) if cell in bad)
            written = dates.FORMATS[self.format]
            raise ValueError(f"column {self.name!r} must hold dates ({written}) as in training, but row {row} is {text!r}")
        days = np.array([self.fill if cell is None else read[cell] for cell in column.cells], dtype=np.float64)
        if beyond := int(((days < self.first) | (days > self.last)).sum()):
            seen = f"{dates.written(self.first)} to {dates.written(self.last)}"
            reach = f"{dates.written(days.min())} to {dates.written(days.max())}"
            notes.append(
                f"column {self.name!r} leaves the range of training ({seen}) in {beyond} of {len(days)} rows ({reach}): these are "
                "extrapolations, look at their epistemic part"
            )
        calendar = dates.parts(days)
        calendar["year"] = (calendar["year"] - self.mean) / self.std
        blocks = [((days - self.mean) / self.std)[:, None], *(calendar[name] for name in self.parts)]
        return np.concatenate([*blocks, *[gaps[:, None].astype(np.float64)] * self.indicator], axis=1)


Encoder = Numeric | Categories | Dates
KINDS: dict[str, type[Encoder]] = {"numeric": Numeric, "categories": Categories, "dates": Dates}


class Features(NamedTuple):
    """`inputs` float32 `[kept rows, D]`; `kept` bool `[N]`, False for rows left out; `notes` for the user."""

    inputs: np.ndarray
    kept: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preprocessor:
    """Columns → inputs `[N, D]`: numbers standardised, texts one-hot, dates by the calendar, missing cells by one stated rule.

    columns: the encoders, in the order of the inputs.
    aside: identifiers, which are no inputs but go with the predictions.
    missing: `refuse` (a missing cell is an error), `drop` (its row is left out) or `impute` (the median or a category
        of its own, with an indicator where the training rows had gaps).
    notes: what was decided while fitting.
    """

    columns: tuple[Encoder, ...]
    missing: str = "refuse"
    notes: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        table: Table,
        inputs: Sequence[str] | None = None,
        *,
        missing: str = "refuse",
        categorical: Iterable[str] = (),
        aside: Sequence[str] = (),
        dated: Mapping[str, dates.Reading] | None = None,
    ) -> Preprocessor:
        """Read means, medians and levels off the rows; columns in `categorical` are categories even if numeric or dates.

        dated: how the dates of a larger table were read, where the rows alone would leave it open.
        """
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
        columns: list[Encoder] = []
        notes: list[str] = []
        for name in names:
            column = table[name]
            if len(column.levels) == 0:
                notes.append(f"column {name!r} is empty and left out")
            elif len(column.levels) == 1 and not column.missing.any():
                notes.append(f"column {name!r} is constant ({column.levels[0]}) and left out")
            else:
                columns.append(encoder(column, missing, name in categorical, (dated or {}).get(name), notes))
        if not columns:
            raise ValueError("no input column is left: every one is constant, empty or dropped")
        return cls(tuple(columns), missing, tuple(notes), tuple(aside))

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
        notes: list[str] = []
        problems: list[str] = []
        table = self.readable(table, notes)
        if self.missing == "refuse":
            advice = "fill those cells, or fit again with missing='impute' (--missing impute)"
            attempt(problems, lambda: refuse_gaps(table, self.names, advice))
        # Columns that training had complete may have gaps here: the rule of the fit decides.
        kept = complete(table, self.names) if self.missing == "drop" else np.ones(table.rows, dtype=bool)
        table = table if kept.all() else table.take(kept)
        for column in self.columns if strict else ():
            if isinstance(column, Categories) and (unseen := column.unknown(table[column.name])):
                problems.append(f"{unseen}; known are {listed(column.levels, 10)}")
        blocks = [attempt(problems, partial(column.encode, table[column.name], notes)) for column in self.columns]
        refuse(problems)
        with np.errstate(over="ignore"):
            inputs = np.concatenate(blocks, axis=1).astype(np.float32)
        if wild := [name for name, values in zip(self.features, inputs.T) if not np.isfinite(values).all()]:
            raise ValueError(f"values in {listed(wild)} are too far from those seen in training to compute with")
        return Features(inputs, kept, tuple(notes))

    def readable(self, table: Table, notes: list[str]) -> Table:
        """The table with words among numbers as missing cells, where the rule for these is another than refusing them."""
        for column in self.columns if self.missing != "refuse" else ():
            cells = table[column.name]
            numeric = isinstance(column, Numeric)
            known = _NUMBER.fullmatch if numeric else lambda text: any(map(str.isdigit, text))
            words = [] if isinstance(column, Categories) else [level for level in cells.levels if not known(level)]
            if words:
                what = f"words that are no {'numbers' if numeric else 'dates'}"
                notes.append(f"column {column.name!r} holds {what}, taken as missing: {listed(map(repr, words), 5)}")
                table = table.with_column(cells.without_strays(words))
        return table

    def to_dict(self) -> dict[str, Any]:
        kinds = {kind: name for name, kind in KINDS.items()}
        return {
            "columns": [{"kind": kinds[type(column)], **vars(column)} for column in self.columns],
            "missing": self.missing,
            "notes": list(self.notes),
            "aside": list(self.aside),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Preprocessor:
        """The inverse of `to_dict`; anything else is a ValueError."""
        try:
            columns = [_encoder(dict(entry)) for entry in data["columns"]]
            notes, aside = (tuple(map(str, data.get(key, ()))) for key in ("notes", "aside"))
            return cls(tuple(columns), str(data["missing"]), notes, aside)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the description of a preprocessor: {error!r}") from error


def encoder(column: Column, missing: str, categorical: bool, found: dates.Reading | None, notes: list[str]) -> Encoder:
    """What turns this column into inputs: dates where all cells are such, categories where texts are or where asked for."""
    found = None if categorical else found or column.calendar
    if found:
        rival = f", not {found.rival}, which would fit as well" if found.rival else ""
        notes.append(f"column {column.name!r} holds dates, read as {dates.FORMATS[found.format]}{rival}")
        return Dates.fit(column, found, missing)
    if column.kind == "text" or categorical:
        chosen = Categories.fit(column, missing)
        if slip := column.slip:
            notes.append(f"column {column.name!r} is read as categories: {slip}, not a number")
        return chosen
    return Numeric.fit(column, missing)


def _encoder(entry: dict[str, Any]) -> Encoder:
    """An encoder from its stored fields, each of the type that its class declares."""
    kind = KINDS.get(str(entry.pop("kind")))
    if kind is None:
        raise ValueError(f"unknown kind of column {entry.get('name')!r}")
    readers: dict[str, Any] = {
        "str": str,
        "float": float,
        "bool": bool,
        "tuple[str, ...]": lambda value: tuple(map(str, value)),
    }
    return kind(**{field.name: readers[str(field.type)](entry[field.name]) for field in fields(kind)})


def attempt(problems: list[str], check: Callable[[], Any]) -> Any:
    """What the check returns; None where it refuses, with the reason among the problems."""
    try:
        return check()
    except ValueError as error:
        problems.append(str(error))
    return None


def refuse(problems: Sequence[str], where: object = "the table") -> None:
    """All problems in one ValueError; none, nothing happens."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        told = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
        raise ValueError(f"{where} has {len(problems)} problems: {told}")


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
