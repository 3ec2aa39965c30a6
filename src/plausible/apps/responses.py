"""What is predicted: numbers (standardised), counts, one of several classes, or yes and no, decided by stated rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.apps.tables import Column, Table, listed

if TYPE_CHECKING:
    from plausible.core.likelihoods import Likelihood
    from plausible.posteriors.predictive import Predictive

CLASSIFICATION = ("categorical", "bernoulli")
COUNTS = ("poisson", "negative-binomial")
CONTINUOUS = ("gaussian", "student-t", "heteroscedastic")
LIKELIHOODS = ("auto", *CONTINUOUS, *CLASSIFICATION, *COUNTS)
FEW = 20


@dataclass(frozen=True)
class Response:
    """Response columns and how they enter the network; predictions leave it in original units.

    likelihood: a name of `LIKELIHOODS` other than `auto`.
    loc, scale: one per target, z = (y − loc)/scale; empty where nothing is standardised.
    classes: the labels in the order of the network's outputs, one tuple per target; empty for numbers.
    """

    names: tuple[str, ...]
    likelihood: str
    loc: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()

    @property
    def task(self) -> str:
        return "classification" if self.classes else "regression"

    @property
    def outputs(self) -> int:
        if self.likelihood == "categorical":
            return len(self.classes[0])
        return len(self.names) * (2 if self.likelihood == "heteroscedastic" else 1)

    def observed(self, table: Table) -> np.ndarray:
        """Targets in original units: int64 `[N]` for classes, float32 `[N, targets]` for the rest."""
        if self.classes:
            codes = []
            for name, labels in zip(self.names, self.classes):
                index = {label: code for code, label in enumerate(labels)}
                codes.append([index[str(cell)] for cell in table[name].cells])
            if self.likelihood == "categorical":
                return np.array(codes[0], dtype=np.int64)
            return np.array(codes, dtype=np.float32).T
        return np.stack([table[name].numbers for name in self.names], axis=1)

    def encode(self, table: Table) -> np.ndarray:
        """Targets as the network is trained on them: standardised where they are continuous."""
        observed = self.observed(table)
        if self.loc:
            observed = (observed - np.array(self.loc)) / np.array(self.scale)
        return observed if self.likelihood == "categorical" else observed.astype(np.float32)

    def restore(self, predictive: Predictive) -> Predictive:
        return predictive.rescaled(self.loc, self.scale) if self.loc else predictive

    def make_likelihood(self) -> Likelihood:
        """The library's likelihood of that name; noise is learned, one per target where there are several."""
        from plausible.core import likelihoods

        noise = "learned" if len(self.names) == 1 else "per-output"
        makers: dict[str, Callable[[], Likelihood]] = {
            "gaussian": lambda: likelihoods.Gaussian(noise),
            "student-t": lambda: likelihoods.StudentT(scale=noise),
            "heteroscedastic": likelihoods.HeteroscedasticGaussian,
            "categorical": likelihoods.Categorical,
            "bernoulli": likelihoods.Bernoulli,
            "poisson": likelihoods.Poisson,
            "negative-binomial": likelihoods.NegativeBinomial,
        }
        return makers[self.likelihood]()

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Response:
        """The inverse of `to_dict`; anything else is a ValueError."""
        try:
            target = cls(
                tuple(map(str, data["names"])),
                str(data["likelihood"]),
                tuple(map(float, data["loc"])),
                tuple(map(float, data["scale"])),
                tuple(tuple(map(str, labels)) for labels in data["classes"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the description of a target: {error!r}") from error
        if target.likelihood not in LIKELIHOODS[1:] or len(target.loc) != len(target.scale):
            raise ValueError(f"not the description of a target: {data!r}")
        return target


def decide(table: Table, names: Sequence[str], task: str, likelihood: str) -> tuple[Response, list[str]]:
    """The kind of each target by these rules, and a line for each rule that could surprise.

    Text is classification. Integers with at most 20 different values are classification, unless these are more than half as
    many as the rows. Other numbers are regression.
    `task` or `likelihood` overrule this. Several targets are all numbers, or all of two classes each.
    """
    implied = "classification" if likelihood in CLASSIFICATION else "auto" if likelihood == "auto" else "regression"
    if "auto" not in (task, implied) and task != implied:
        raise ValueError(f"--likelihood {likelihood} is for {implied}, but --task is {task}; leave one of them out")
    task = implied if task == "auto" else task
    notes: list[str] = []
    tasks = {name: task if task != "auto" else guess(table[name], notes) for name in names}
    if len(set(tasks.values())) > 1:
        kinds = ", ".join(f"{name} ({kind})" for name, kind in tasks.items())
        raise ValueError(f"several targets must be of one kind, got {kinds}; say --task, or fit them one by one")
    if set(tasks.values()) == {"classification"}:
        return classification(table, names, likelihood), notes
    return regression(table, names, "gaussian" if likelihood == "auto" else likelihood), notes


def guess(column: Column, notes: list[str]) -> str:
    distinct = len(column.levels)
    if column.kind == "text":
        if slip := column.slip:
            instead = "mend the file, or say --task classification if every different text is a class"
            raise ValueError(f"target {column.name!r} is mostly numbers, but {slip}; {instead}")
        if column.calendar:
            instead = "turn them into numbers (days since a start) in the file, or say --task classification"
            raise ValueError(f"target {column.name!r} holds dates, which are neither numbers nor classes; {instead}")
        return "classification"
    few = distinct <= min(FEW, max(2, len(column.cells) / 2))
    if column.kind == "integer" and few:
        notes.append(f"target {column.name!r} has {distinct} different integers, taken as classes; numbers: --task regression")
        return "classification"
    if few:
        notes.append(f"target {column.name!r} has only {distinct} values, taken as numbers; classes: --task classification")
    return "regression"


def classification(table: Table, names: Sequence[str], likelihood: str) -> Response:
    """Classes are the distinct cells of all rows, held out or not."""
    classes = tuple(table[name].levels for name in names)
    for name, labels in zip(names, classes):
        if len(labels) < 2:
            only = f"the same value in every row ({labels[0]!r})" if labels else "no values"
            raise ValueError(f"target {name!r} has {only}; there is nothing to learn")
        if len(labels) > max(2, table.rows / 2):
            counted = f"{len(labels)} classes in {table.rows} rows"
            raise ValueError(f"target {name!r} has {counted}; is it the right column? (numbers: --task regression)")
    binary = likelihood == "bernoulli" or len(names) > 1
    if binary and (wide := [name for name, labels in zip(names, classes) if len(labels) > 2]):
        what = "--likelihood bernoulli needs" if likelihood == "bernoulli" else "several targets need"
        raise ValueError(f"{what} two classes per target, but {listed(wide)} has more; fit such a target by itself")
    if len(names) > 1 and likelihood == "categorical":
        raise ValueError("--likelihood categorical takes one target; several yes/no targets: --likelihood bernoulli")
    return Response(tuple(names), "bernoulli" if binary else "categorical", classes=classes)


def regression(table: Table, names: Sequence[str], likelihood: str) -> Response:
    """Numbers; `standardised` adds the location and the scale, which are those of the training rows alone."""
    for name in names:
        column = table[name]
        if column.unreadable is not None:
            row, text = column.unreadable
            raise ValueError(f"target {name!r} must hold numbers for regression, but row {row} is {text!r}")
        if len(column.levels) < 2 or len(set(column.numbers)) < 2:
            raise ValueError(f"target {name!r} is constant; there is nothing to learn")
        if likelihood in COUNTS:
            bad = np.flatnonzero((column.numbers < 0) | (column.numbers != np.round(column.numbers)))
            if bad.size:
                raise ValueError(
                    f"--likelihood {likelihood} needs counts (0, 1, 2, …), but row {column.row(int(bad[0]))} of target "
                    f"{name!r} is {column.cells[bad[0]]}"
                )
    return Response(tuple(names), likelihood)


def standardised(target: Response, table: Table) -> Response:
    """The target with z = (y − mean)/std read off the (training) rows of `table`, where it is continuous."""
    if target.likelihood not in CONTINUOUS:
        return target
    values = target.observed(table)
    with np.errstate(over="ignore", invalid="ignore"):
        loc, scale = values.mean(axis=0), values.std(axis=0)
    if wide := [name for name, spread in zip(target.names, scale) if not np.isfinite(spread)]:
        raise ValueError(f"target {listed(wide)} cannot be standardised: its values are too large; use another unit")
    if flat := [name for name, spread in zip(target.names, scale) if not spread > 0]:
        raise ValueError(f"target {listed(flat)} cannot be standardised: it does not vary in the training rows")
    return Response(target.names, target.likelihood, tuple(loc.tolist()), tuple(scale.tolist()))
