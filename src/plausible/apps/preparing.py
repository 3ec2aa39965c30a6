"""A file with a table → training and held-out rows, ready for a network; everything that is wrong with it in one message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plausible.apps.dates import Reading
from plausible.apps.files import Ragged, read_table
from plausible.apps.responses import Response, decide, standardised
from plausible.apps.tables import (
    FEW,
    ID_ROWS,
    Column,
    Preprocessor,
    Table,
    attempt,
    complete,
    encoder,
    listed,
    refuse,
    refuse_gaps,
)

_ID = re.compile(r"(?i:(?:^|[_\s.-])(?:id|idx|index|key|uuid|guid|row))$|[a-z]I[dD]$|^unnamed [0-9]+$")
"""Names of columns that say which row this is: `id`, `house_id`, `PassengerId`, or none at all."""


@dataclass(frozen=True)
class TableOptions:
    """Which table, what to predict, and how to read the other columns."""

    data: Path
    targets: Sequence[str]
    task: str = "auto"
    likelihood: str = "auto"
    missing: str = "refuse"
    drop_columns: tuple[str, ...] = ()
    keep_columns: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    encoding: str | None = None
    test_fraction: float = 0.1
    seed: int = 0


class Sheet(NamedTuple):
    """A table whose columns are understood: its usable rows, the names of inputs and identifiers, and the target."""

    table: Table
    inputs: tuple[str, ...]
    aside: tuple[str, ...]
    categorical: frozenset[str]
    dated: dict[str, Reading]
    target: Response
    missing: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """Training and held-out rows, ready for the network."""

    preprocessor: Preprocessor
    target: Response
    train: Table
    test: Table
    inputs: tuple[np.ndarray, np.ndarray]
    notes: tuple[str, ...]


def prepare(options: TableOptions) -> Prepared:
    """Read the file, decide what each column is, split the rows, and fit the preprocessing on the training rows."""
    sheet = read_sheet(options)
    return divided(sheet, *split(sheet.table.rows, options.test_fraction, options.seed))


def divided(sheet: Sheet, train_rows: np.ndarray, test_rows: np.ndarray) -> Prepared:
    """The rows of either part as inputs, by what the training rows say."""
    train, test = sheet.table.take(train_rows), sheet.table.take(test_rows)
    preprocessor = Preprocessor.fit(
        train, sheet.inputs, missing=sheet.missing, categorical=sheet.categorical, aside=sheet.aside, dated=sheet.dated
    )
    encoded, held = preprocessor.transform(train), preprocessor.transform(test)
    notes = [*sheet.notes, *preprocessor.notes, *(f"held-out rows: {line}" for line in held.notes)]
    target = standardised(sheet.target, train)
    return Prepared(preprocessor, target, train, test, (encoded.inputs, held.inputs), tuple(dict.fromkeys(notes)))


def split(rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded training and held-out row indices, each in the order of the file."""
    held = round(rows * fraction) if fraction == 0 else max(1, round(rows * fraction))
    if rows - held < 2:
        raise ValueError(f"{rows} rows leave {max(0, rows - held)} to train on after --test-fraction {fraction}; 2 are needed")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def read_sheet(options: TableOptions) -> Sheet:
    """Read the file and decide what each column is; all that stands in the way is said at once."""
    problems, notes = list[str](), list[str]()
    try:
        table = read_table(options.data, options.encoding)
    except Ragged as error:  # the other lines may have problems of their own
        problems.append(str(error))
        table = error.rest
    if table.rows == 1 and not problems:
        raise ValueError(f"{options.data} has one row only; at least 2 are needed to train on, and one to score the fit by")
    if misnamed := _misnamed(table, options):
        refuse([*problems, *misnamed], options.data)
    table = table.without(options.drop_columns)
    aside = _identifiers(table, options, notes)
    inputs = [name for name in table.columns if name not in options.targets and name not in aside]
    if not inputs:
        named = f" but identifiers ({listed(aside)}; --keep-columns learns from them)" if aside else ""
        raise ValueError(f"{options.data} has no input columns besides the target{named}")
    notes += [f"column {name!r} is in {table[name].unit}" for name in (*options.targets, *inputs) if table[name].unit]

    if options.missing == "refuse":
        advice = "add --missing impute (median or a category) or --missing drop"
        attempt(problems, lambda: refuse_gaps(table, [*options.targets, *inputs], advice))
    read = table
    for name in inputs:
        column = _mended(table[name], options, notes, problems)
        read = read.with_column(column)
        if len(column.levels) > 1:
            attempt(problems, partial(encoder, column, options.missing, name in options.categorical, None, []))
    known = table.take(complete(table, options.targets))
    if known.rows:
        attempt(problems, lambda: decide(known, options.targets, options.task, options.likelihood))
    refuse(problems, options.data)

    usable = _usable(read, inputs, options, notes)
    target, lines = decide(usable, options.targets, options.task, options.likelihood)
    # What is text in the whole table is text in the training rows, even where those happen to look like numbers.
    dated = {name: found for name in inputs if name not in options.categorical and (found := read[name].calendar)}
    words = {name for name in inputs if read[name].kind == "text" and name not in dated}
    categorical = frozenset(words | set(options.categorical))
    return Sheet(usable, tuple(inputs), tuple(aside), categorical, dated, target, options.missing, (*notes, *lines))


def _misnamed(table: Table, options: TableOptions) -> list[str]:
    """Options that name columns which are not there, or twice."""
    problems: list[str] = []
    for option in ("targets", "drop_columns", "keep_columns", "categorical"):
        flag = "--target" if option == "targets" else f"--{option.replace('_', '-')}"
        for name in getattr(options, option):
            try:
                table[name]
            except ValueError as error:
                problems.append(f"{flag}: {error}")
    problems += [f"{name!r} is both --target and in --drop-columns" for name in options.targets if name in options.drop_columns]
    return problems


def _identifiers(table: Table, options: TableOptions, notes: list[str]) -> list[str]:
    """Columns that say which row this is and nothing about it: no inputs, but they go with the predictions."""
    aside = []
    for name, column in table.columns.items():
        if name in (*options.targets, *options.keep_columns, *options.categorical):
            continue
        if name.startswith("unnamed ") and (column.kind == "empty" or column.counts_up):
            what = "is empty" if column.kind == "empty" else "counts the rows"
            notes.append(f"column {name.removeprefix('unnamed ')} has no name and {what}: left out")
            aside.append(name)
        elif (why := _row_names(column, table.rows)) is not None:
            kept = f"; --keep-columns {name!r} learns from it" if column.kind == "integer" else ""
            notes.append(f"column {name!r} {why}: taken as an identifier, no input{kept}")
            aside.append(name)
        elif column.counts_up and table.rows >= ID_ROWS:
            notes.append(f"column {name!r} counts the rows; if it means nothing, add --drop-columns {name!r}")
    return aside


def _row_names(column: Column, rows: int) -> str | None:
    """Why this column names its rows; None where it may say more than that."""
    if len(column.levels) < rows or rows < ID_ROWS or column.kind not in ("integer", "text"):
        return None
    if _ID.search(column.name):
        return "counts the rows" if column.counts_up else "is called so and differs in every row"
    if column.kind == "text" and not column.slip and not column.calendar and not column.strays:
        return "is text that differs in every row"
    return None


def _mended(column: Column, options: TableOptions, notes: list[str], problems: list[str]) -> Column:
    """The column with words among numbers or dates as missing cells, which is said, or a problem where gaps are refused."""
    if column.name in options.categorical or not (strays := column.strays):
        return column
    count = sum(cell in strays for cell in column.cells)
    first = next(column.row(index) for index, cell in enumerate(column.cells) if cell in strays)
    said = f"column {column.name!r} holds {'numbers' if column.slip else 'dates'}, but {listed(map(repr, strays), 5)} in "
    said += f"{count} of {len(column.cells)} rows, first in row {first}"
    if options.missing == "refuse":
        categories = f"; if all are categories: --categorical {column.name!r}" if len(column.levels) <= FEW else ""
        problems.append(f"{said}: mend the file, or take it as missing by --missing impute or --missing drop{categories}")
    else:
        notes.append(f"{said}: taken as missing")
    return column.without_strays()


def _usable(table: Table, inputs: Sequence[str], options: TableOptions, notes: list[str]) -> Table:
    """The rows that can be learnt from, by the rule for missing values; a missing target is never filled in."""
    if options.missing == "refuse":
        return table
    needed = [*options.targets, *inputs] if options.missing == "drop" else list(options.targets)
    kept = complete(table, needed)
    lost = int((~kept).sum())
    if lost == table.rows:
        counts = listed([f"{name} ({count})" for name, count in table.gaps(needed).items()], 12)
        raise ValueError(f"every row has missing values: {counts} of {table.rows}; try --drop-columns or --missing impute")
    if lost:
        notes.append(f"{lost} of {table.rows} rows left out: missing {'values' if options.missing == 'drop' else 'targets'}")
    return table.take(kept) if lost else table
