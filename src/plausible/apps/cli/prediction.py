"""`plausible predict`: a saved run and a new table → one row of predictions for each row of the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plausible.analysis import metrics
from plausible.apps.cli import runs
from plausible.apps.cli.errors import note
from plausible.apps.files import check_writable, read_table, write_table
from plausible.apps.responses import Response
from plausible.apps.tables import Column, Table, complete, listed
from plausible.posteriors import showing

if TYPE_CHECKING:
    from plausible.posteriors.predictive import Predictive


def held_out(target: Response, predictive: Predictive, observed: Tensor, level: float = 0.9) -> dict[str, Any]:
    """All scores that fit the task: `rows` and `log_likelihood` for the whole, the others for each target."""
    each = metrics.summary_by_output(predictive, observed, level=level)
    total = metrics.log_likelihood(predictive, observed)
    return {"rows": len(observed), "log_likelihood": total, "targets": dict(zip(target.names, each))}


def held_out_columns(target: Response, table: Table, predictive: Predictive, level: float) -> dict[str, list[Any]]:
    """Row numbers and true cells of held-out rows, beside what was predicted."""
    rows = [table[target.names[0]].row(index) for index in range(table.rows)]
    actual = {f"actual_{name}": list(table[name].cells) for name in target.names}
    return {"row": rows, **actual, **columns(target, predictive, level)}


def columns(target: Response, predictive: Predictive, level: float) -> dict[str, list[Any]]:
    """Predictions as named columns: see `plausible.posteriors.showing`."""
    return showing.columns(predictive, level, target.names, target.classes or None)


def predict(
    run: Path,
    data: Path,
    out: Path | None,
    *,
    level: float,
    draws: int | None,
    seed: int,
    strict: bool,
    overwrite: bool,
    device: str,
    encoding: str | None = None,
) -> tuple[runs.Record, int, dict[str, Any] | None]:
    """Predict every row of `data` and write them in its order; `out=None` is stdout.

    Returns the run's record, the number of rows, and the scores of those that have a target (None: there are none).
    """
    if not 0 < level < 1:
        raise ValueError(f"--level must be between 0 and 1, got {level}; 0.9 is a 90 % interval")
    if draws is not None and draws < 1:
        raise ValueError(f"--draws must be at least 1, got {draws}")
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file")
    if out is not None and out.exists() and not overwrite:
        raise ValueError(f"--out {out} exists; choose another file or add --overwrite")
    check_writable(out)
    record = runs.read_record(run)
    target, preprocessor = record.target, record.preprocessor
    table = read_table(data, encoding)
    known = {*preprocessor.names, *preprocessor.aside, *target.names}
    if extra := [name for name in table.columns if name not in known]:
        note(f"columns not used by this run: {listed(extra, 10)}")
    features = preprocessor.transform(table, strict=strict)
    for line in features.notes:
        note(line)
    skipped = int((~features.kept).sum())
    if skipped == table.rows:
        raise ValueError(f"every row of {data} has missing values, and this run leaves such rows out")
    if skipped:
        note(f"{skipped} of {table.rows} rows with missing values get empty cells (the run was fitted by --missing drop)")
    _, posterior = runs.load(run, device)
    inputs = torch.from_numpy(features.inputs)
    predicted = columns(target, target.restore(posterior.predict(inputs, draws=draws, seed=seed)), level)
    if skipped:
        places = np.cumsum(features.kept) - 1
        for name, values in predicted.items():
            predicted[name] = [values[place] if kept else None for place, kept in zip(places, features.kept)]
    named = (table[name] for name in preprocessor.aside if name in table.columns)
    write_table(out, {column.name: _as_written(column) for column in named if column.kind != "empty"} | predicted)
    seen = _with_target(target, table, features.kept)
    if seen is None:
        return record, table.rows, None
    if data.name == record.settings.get("data"):
        note(f"warning: {data} may hold rows that the run was fitted to, whose errors are too small")
    # predicted again, row by row where the target is known: scores need more than the columns that were written
    of_these = torch.from_numpy(seen[features.kept])
    predictive = target.restore(posterior.predict(inputs[of_these], draws=draws, seed=seed))
    observed = torch.from_numpy(target.observed(table.take(seen)))
    return record, table.rows, held_out(target, predictive, observed.to(posterior.device), level)


def _as_written(column: Column) -> list[Any]:
    """The cells of an identifier: whole numbers as such, but for those with zeros in front, which are names."""
    whole = column.kind == "integer" and all(str(int(level)) == level for level in column.levels)
    return [int(cell) if whole and cell is not None else cell for cell in column.cells]


def _with_target(target: Response, table: Table, kept: np.ndarray) -> np.ndarray | None:
    """Which of the kept rows have every target, as the run knows it: bool `[N]`; None where there is no such row."""
    if not all(name in table.columns for name in target.names):
        return None
    cells = [table[name] for name in target.names]
    for column in cells if not target.classes else ():
        if column.unreadable:
            row, text = column.unreadable
            note(f"no scores: target {column.name!r} must hold numbers, but row {row} is {text!r}")
            return None
    seen = kept & complete(table, target.names)
    for column, labels in zip(cells, target.classes):
        seen &= np.array([cell in labels for cell in column.cells])
    return seen if seen.any() else None
