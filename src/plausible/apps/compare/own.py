"""A table of one's own in the place of published data sets: folds of its rows, read as `plausible fit` reads a table."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plausible.apps.compare.study import Candidate, Study
from plausible.apps.preparing import TableOptions, divided, read_sheet
from plausible.apps.responses import Response
from plausible.core.likelihoods import Categorical, Gaussian
from plausible.core.words import plural
from plausible.posteriors.predictive import Predictive

FOLDS = 5
METHODS = ("auto", "ensemble", "laplace", "mean-field")
BASELINES = {
    "linear": Candidate("linear", "laplace", likelihood="auto", prior_scale=None, hidden=()),
    "constant": Candidate("constant", "constant", likelihood="auto", prior_scale=None),
}
"""What a network should be better than: a Bayesian linear or logistic model, its precision by the evidence; and no inputs."""


@dataclass(frozen=True)
class OwnTable:
    """The table, what is predicted and how it is read; `digest` is that of the file, so that another one is fitted again."""

    options: TableOptions
    digest: str
    hidden: tuple[int, ...]
    classes: bool
    rows: int
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        kept = {key: value for key, value in asdict(self.options).items() if key not in ("data", "test_fraction", "seed")}
        return {"file": self.options.data.name, "sha256": self.digest, "hidden": self.hidden, **kept}


class Parts(NamedTuple):
    """One split: training rows as the network sees them, test rows, and the way back to the units of the target."""

    train: tuple[Tensor, Tensor]
    test: Tensor
    observed: Tensor
    restore: Callable[[Predictive], Predictive]
    hidden: tuple[int, ...]
    response: Response | None = None


def read(options: TableOptions, hidden: tuple[int, ...]) -> OwnTable:
    """Look at the whole table once: what is wrong with it is said before anything is fitted."""
    if len(options.targets) != 1:
        raise ValueError(f"compare takes one --target, got {', '.join(options.targets) or 'none'}")
    options = replace(options, data=options.data.resolve())
    sheet = read_sheet(options)
    if sheet.table.rows < 2 * FOLDS:
        raise ValueError(f"{options.data} has {plural(sheet.table.rows)}; {2 * FOLDS} are needed for {FOLDS} folds")
    digest = hashlib.sha256(options.data.read_bytes()).hexdigest()[:16]
    return OwnTable(options, digest, hidden, bool(sheet.target.classes), sheet.table.rows, sheet.notes)


def study(table: OwnTable, methods: Sequence[str], time: str | None = None, **settings: Any) -> Study:
    """The methods, at their defaults, and the baselines on folds of the table; `time` is that of `auto`."""
    name = re.sub(r"\W+", "-", table.options.data.name.partition(".")[0]).strip("-") or "table"
    labels = list(dict.fromkeys([*(methods or METHODS), *BASELINES]))
    candidates = [BASELINES.get(label) or Candidate(label, label, likelihood="auto", prior_scale=None) for label in labels]
    if time is not None:
        candidates = [replace(each, settings={"time": time}) if each.method == "auto" else each for each in candidates]
    settings["splits"] = settings.get("splits") or FOLDS
    title = f"{table.options.targets[0]} of {table.options.data.name}"
    return Study((name,), tuple(candidates), kind="folds", title=title, own=table, **settings)


def fold(rows: int, split: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows of a split: fold k of a shuffle, and after `FOLDS` of these folds of the next shuffle."""
    order = np.random.default_rng([seed, split // FOLDS]).permutation(rows)
    test = np.zeros(rows, dtype=bool)
    test[order[split % FOLDS :: FOLDS]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)


def parts(table: OwnTable, split: int, seed: int) -> Parts:
    sheet = read_sheet(table.options)
    train, test = fold(sheet.table.rows, split, seed)
    prepared = divided(sheet, train, test)
    target = prepared.target
    x, held = map(torch.from_numpy, prepared.inputs)
    y, observed = torch.from_numpy(target.encode(prepared.train)), torch.from_numpy(target.observed(prepared.test))
    return Parts((x, y), held, observed, target.restore, table.hidden, target)


def constant(parts: Parts) -> Predictive:
    """The same for every row: mean and standard deviation of the training rows, or frequencies of their classes (+ 1)."""
    y, rows = parts.train[1], len(parts.test)
    if parts.response is not None and parts.response.classes:
        counts = torch.bincount(y, minlength=parts.response.outputs).double() + 1
        return Predictive.from_functions((counts / counts.sum()).log().expand(1, rows, -1), Categorical())
    y = y.double()
    outputs = y.mean(0).expand(1, rows, -1)
    return parts.restore(Predictive.from_functions(outputs, Gaussian(float(y.std(correction=0).clamp(min=1e-6)))))
