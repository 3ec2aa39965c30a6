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
from plausible.apps.cli.files import read_table, write_csv
from plausible.apps.responses import Response
from plausible.apps.tables import Table, listed
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
) -> int:
    """Predict every row of `data` and write them in its order; `out=None` is stdout. Returns the number of rows."""
    if not 0 < level < 1:
        raise ValueError(f"--level must be between 0 and 1, got {level}; 0.9 is a 90 % interval")
    if draws is not None and draws < 1:
        raise ValueError(f"--draws must be at least 1, got {draws}")
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file")
    if out is not None and out.exists() and not overwrite:
        raise ValueError(f"--out {out} exists; choose another file or add --overwrite")
    record = runs.read_record(run)
    table = read_table(data)
    extra = [name for name in table.columns if name not in record.preprocessor.names]
    if extra:
        note(f"columns not used by this run: {listed(extra, 10)}")
    features = record.preprocessor.transform(table, strict=strict)
    for line in features.notes:
        note(line)
    skipped = int((~features.kept).sum())
    if skipped == table.rows:
        raise ValueError(f"every row of {data} has missing values, and this run leaves such rows out")
    if skipped:
        note(f"{skipped} of {table.rows} rows with missing values get empty cells (the run was fitted by --missing drop)")
    _, posterior = runs.load(run, device)
    predictive = record.target.restore(posterior.predict(torch.from_numpy(features.inputs), draws=draws, seed=seed))
    predicted = columns(record.target, predictive, level)
    if skipped:
        places = np.cumsum(features.kept) - 1
        for name, values in predicted.items():
            predicted[name] = [values[place] if kept else None for place, kept in zip(places, features.kept)]
    write_csv(out, predicted)
    return table.rows
