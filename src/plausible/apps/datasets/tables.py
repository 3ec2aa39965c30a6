"""Tables: the nine UCI regression sets with their splits, and small classical sets."""

from __future__ import annotations

import csv
import datetime
import io
import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import CATALOGUE, UCI, entry
from plausible.apps.datasets.digests import members, numbers, reading
from plausible.apps.datasets.results import Table

SMALL = tuple(known.name for known in CATALOGUE.values() if known.reader == "small")


def uci(name: str, dtype: torch.dtype = torch.float32) -> Table:
    """One of boston, concrete, energy, kin8nm, naval, power, protein, wine, yacht, with the splits of the literature.

    x `[N, inputs]`, y `[N, 1]`. `split(k)` are the 20 random splits (5 for protein) of Hernández-Lobato and Adams 2015, 90 %
    for training; `gap(d)` those of Foong et al. 2019, where the middle third along input d is the test set. The custom is to
    standardise by the training rows and report in the units of the target:

        split = uci("boston").split(0).standardised()
        posterior = pl.fit(net, split.train)
        split.restore(posterior.predict(split.test[0]))  # against uci("boston").split(0).test[1]
    """
    known = entry(name)
    if known not in UCI:
        there = ", ".join(each.name for each in UCI)
        raise ValueError(f"{name!r} is not one of the UCI sets {there}; see plausible.datasets.load")
    (path,) = ensure(known)
    with reading(path, known.name):
        files = {member.partition("/")[2]: raw for member, raw in members(path.read_bytes()).items()}
        values = numbers(files["data/data.txt"], known.count)
        inputs, target = _whole(files["data/index_features.txt"]), _whole(files["data/index_target.txt"])
        if len(inputs) != len(known.features) or len(target) != 1:
            raise ValueError(f"{len(inputs)} inputs and {len(target)} targets, expected {len(known.features)} and 1")
        splits, gaps = (_splits(files, folder, len(values)) for folder in ("data", "gap"))
    x, y = (torch.from_numpy(values[:, columns]).to(dtype) for columns in (inputs, target))
    return Table(known.name, x, y, known.features, known.targets, splits, gaps, known.hidden)


def _whole(raw: bytes) -> np.ndarray:
    """Numbers separated by blanks or lines, all of them whole → int64."""
    values = numbers(raw, 1)[0]
    rounded = values.astype(np.int64)
    if (rounded != values).any():
        raise ValueError("an index is not a whole number")
    return rounded


def _splits(files: dict[str, bytes], folder: str, rows: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """`index_train_K.txt` and `index_test_K.txt` for K = 0, 1, … → row numbers in the order of the files."""
    splits: list[tuple[Tensor, Tensor]] = []
    while f"{folder}/index_train_{len(splits)}.txt" in files:
        train, test = (_whole(files[f"{folder}/index_{part}_{len(splits)}.txt"]) for part in ("train", "test"))
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(rows)):
            raise ValueError(f"split {len(splits)} of {folder} does not use every row once")
        splits.append((torch.from_numpy(train), torch.from_numpy(test)))
    return tuple(splits)


def small(name: str, missing: Literal["drop", "keep"] = "drop", dtype: torch.dtype = torch.float32) -> Table:
    """One of the small classical sets (`plausible data list` shows them) as a table.

    x `[N, inputs]`; y `[N, targets]`, or int64 labels `[N]`. Where the literature trains on the first rows, `split(0)` does.
    Rows with missing values (airquality, co2_weekly) are left out, or kept as NaN. Names of cars are left out. Dates
    are years with a fraction. `galaxies` is a density problem: its values are `y`, and `x` has no columns.
    """
    known = entry(name)
    if known.reader != "small":
        raise ValueError(f"{name!r} is not one of the small sets {', '.join(SMALL)}; see plausible.datasets.load")
    if missing not in ("drop", "keep"):
        raise ValueError(f"missing must be 'drop' or 'keep', got {missing!r}")
    features, targets = known.features, known.targets
    paths = ensure(known)
    # a set of two files has its inputs in the first and its targets in the second
    layout = [features + targets] if len(paths) == 1 else [features, targets]
    columns: list[np.ndarray] = []
    for path, names in zip(paths, layout):
        with reading(path, known.name):
            part = _read_csv(path, names) if path.suffix == ".csv" else list(numbers(path.read_bytes(), known.count).T)
            if len(part) != len(names) or len(part[0]) != known.count:
                raise ValueError(f"{len(part[0])} rows of {len(part)} columns, expected {known.count} of {len(names)}")
        columns += part
    values = np.stack(columns, axis=1)
    if missing == "drop":
        values = values[~np.isnan(values).any(1)]
    x = torch.from_numpy(values[:, : len(features)]).to(dtype)
    y = torch.from_numpy(values[:, len(features) :]).to(dtype)
    rows = torch.arange(len(values))
    splits = () if known.train is None else ((rows[: known.train], rows[known.train :]),)
    return Table(known.name, x, y[:, 0].long() if known.labels else y, features, targets, splits)


def _read_csv(path: Path, names: tuple[str, ...]) -> list[np.ndarray]:
    """Columns of a table with a header as float64; empty cells and NA are NaN, dates are years."""
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))

    def number(cell: str) -> float:
        return math.nan if cell in ("", "NA") else float(cell)

    return [np.array([(_date if name == "date" else number)(row[name]) for row in rows]) for name in names]


def _date(cell: str) -> float:
    """YYYYMMDD → the year with its fraction."""
    day = datetime.datetime.strptime(cell, "%Y%m%d")
    start, end = datetime.datetime(day.year, 1, 1), datetime.datetime(day.year + 1, 1, 1)
    return day.year + (day - start) / (end - start)
