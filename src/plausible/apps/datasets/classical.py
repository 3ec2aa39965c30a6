"""Small classical sets as tables."""

from __future__ import annotations

import csv
import datetime
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import entry
from plausible.apps.datasets.digests import DAMAGED, damaged, numbers
from plausible.apps.datasets.results import Table


@dataclass(frozen=True)
class Layout:
    """Which columns are inputs and targets; `labels` are classes; the first `train` rows are for training by custom."""

    features: str
    targets: str
    labels: bool = False
    train: int | None = None


LAYOUTS = {
    "lynx": Layout("time", "value"),
    "airquality": Layout("Solar.R Wind Temp Month Day", "Ozone"),
    "ozone": Layout("vh wind humidity temp ibh dpg ibt vis doy", "O3"),
    "auto_fuel": Layout("cylinders displacement horsepower weight acceleration year origin", "mpg"),
    "nlschools": Layout("IQ class GS SES COMB", "lang"),
    "mcycle": Layout("times", "accel"),
    "galaxies": Layout("", "dat"),
    "co2_monthly": Layout("time", "value"),
    "co2_weekly": Layout("date", "co2"),
    "robot_arm": Layout("angle1 angle2", "hand1 hand2", train=200),
    "neal_regression": Layout("x", "y", train=100),
    "neal_binary": Layout("x1 x2", "class", labels=True, train=300),
    "neal_classes": Layout("x1 x2 x3 x4", "class", labels=True, train=400),
    "inbetween_axis": Layout("x1 x2", "y"),
    "inbetween_origin": Layout("x1 x2", "y"),
}


def small(name: str, missing: Literal["drop", "keep"] = "drop", dtype: torch.dtype = torch.float32) -> Table:
    """One of the small classical sets (`plausible data list` shows them) as a table.

    x `[N, inputs]`; y `[N, targets]`, or int64 labels `[N]`. Where the literature trains on the first rows, `split(0)` does.
    Rows with missing values (airquality, co2_weekly) are left out, or kept as NaN. Names of cars are left out. Dates
    are years with a fraction. `galaxies` is a density problem: its values are `y`, and `x` has no columns.
    """
    known = entry(name)
    if known.name not in LAYOUTS:
        raise ValueError(f"{name!r} is not one of the small sets {', '.join(LAYOUTS)}; see plausible.datasets.load")
    if missing not in ("drop", "keep"):
        raise ValueError(f"missing must be 'drop' or 'keep', got {missing!r}")
    paths = ensure(known)
    layout = LAYOUTS[known.name]
    features, targets = tuple(layout.features.split()), tuple(layout.targets.split())
    columns: dict[str, np.ndarray] = {}
    for path in paths:
        try:
            names = features + targets if len(paths) == 1 else features if path is paths[0] else targets
            if path.suffix == ".csv":
                found = read_csv(path, names)
            else:
                found = list(numbers(path.read_bytes(), known.count).T)
            if len(found) != len(names) or len(found[0]) != known.count:
                raise ValueError(f"{len(found[0])} rows of {len(found)} columns, expected {known.count} of {len(names)}")
        except DAMAGED as error:
            raise damaged(path, known.name, error) from None
        columns |= dict(zip(names, found))
    values = np.stack([columns[column] for column in features + targets], axis=1)
    if missing == "drop":
        values = values[~np.isnan(values).any(1)]
    x = torch.from_numpy(values[:, : len(features)]).to(dtype)
    y = torch.from_numpy(values[:, len(features) :]).to(dtype)
    rows = torch.arange(len(values))
    splits = () if layout.train is None else ((rows[: layout.train], rows[layout.train :]),)
    return Table(known.name, x, y[:, 0].long() if layout.labels else y, features, targets, splits)


def read_csv(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Columns of a table with a header as float64; empty cells and NA are NaN, dates are years."""
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    return [np.array([date(row[name]) if name == "date" else number(row[name]) for row in rows]) for name in names]


def number(cell: str) -> float:
    """A cell as a number."""
    return math.nan if cell in ("", "NA") else float(cell)


def date(cell: str) -> float:
    """YYYYMMDD → the year with its fraction."""
    day = datetime.datetime.strptime(cell, "%Y%m%d")
    start, end = datetime.datetime(day.year, 1, 1), datetime.datetime(day.year + 1, 1, 1)
    return day.year + (day - start) / (end - start)
