"""What to compare: methods × data sets × splits, from a TOML file or the command line."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plausible.apps.tables import listed, nearest

if TYPE_CHECKING:
    from plausible.apps.compare.own import OwnTable

LIKELIHOODS = ("gaussian", "heteroscedastic", "student-t", "auto")
HEADLINE = {False: ("log_likelihood", "rmse", "crps"), True: ("log_likelihood", "accuracy", "brier")}
SHOWN = {False: (*HEADLINE[False], "coverage_90", "quantile_calibration"), True: (*HEADLINE[True], "ece")}
"""What methods are ranked by, and what is shown of them, for numbers and for classes."""
ACTIVATIONS = ("relu", "tanh", "silu", "gelu")
KEYS = ("title", "datasets", "splits", "kind", "seed", "reference", "methods", "published")
MODEL_KEYS = ("method", "likelihood", "prior_scale", "hidden", "activation", "grid", "validation")


@dataclass(frozen=True)
class Candidate:
    """One row of the comparison: a method with its settings, and the model it is given.

    `grid` maps settings to lists of values: the combination with the best log-likelihood on `validation` of the *training*
    rows is fitted again to all of them. The test rows are never looked at for that.
    """

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    likelihood: str = "gaussian"
    prior_scale: float | None = 1.0
    hidden: tuple[int, ...] | None = None
    activation: str = "relu"
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    validation: float = 0.2

    def variants(self) -> list[dict[str, Any]]:
        """The combinations of the grid, as settings that override; one empty one without a grid."""
        return [dict(zip(self.grid, values)) for values in itertools.product(*self.grid.values())]

    def with_(self, changes: Mapping[str, Any]) -> Candidate:
        """The candidate with these settings, some of which may be the model's."""
        model = {k: v for k, v in changes.items() if k in MODEL_KEYS}
        settings = {**self.settings, **{k: v for k, v in changes.items() if k not in MODEL_KEYS}}
        return replace(self, settings=settings, grid={}, **model)

    def build(self) -> Any:
        """The method; None for the baseline that looks at no inputs."""
        if self.method == "constant":
            return None
        from plausible.apps.assembling import assemble
        from plausible.core import serialise

        decoded = {k: serialise.decode(v) if isinstance(v, Mapping) else v for k, v in self.settings.items()}
        return assemble(self.method, decoded)

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "label"}


class Published(NamedTuple):
    """A published mean and its standard error, NaN where none was printed."""

    value: float
    error: float = math.nan

    def __str__(self) -> str:
        shown = f"{self.value:.2f}".replace("-", "−")
        return shown if math.isnan(self.error) else f"{shown} ± {self.error:.2f}"


class Cell(NamedTuple):
    """One fit: a candidate on one split of one data set."""

    dataset: str
    split: int
    label: str

    def __str__(self) -> str:
        return f"{self.dataset}, split {self.split}, {self.label}"


@dataclass(frozen=True)
class Study:
    """A comparison: candidates × data sets × splits. `splits` None means all that were published; `kind` "random" or "gap".

    `own` is a table of the user's in the place of published sets, with `kind` "folds".
    `published`: data set → source → metric → result, to be shown beside ours where the splits are the random ones.
    """

    datasets: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    splits: tuple[int, ...] | int | None = None
    kind: str = "random"
    seed: int = 0
    title: str = "Comparison"
    reference: str | None = None
    published: Mapping[str, Mapping[str, Mapping[str, Published]]] = field(default_factory=dict)
    own: OwnTable | None = None

    def __post_init__(self) -> None:
        from plausible.apps.datasets.catalogue import UCI

        known = [entry.name for entry in UCI] if self.own is None else list(self.datasets)
        _need(bool(self.datasets), "datasets: at least one is needed")
        _need(bool(self.candidates), "methods: at least one is needed")
        for name in self.datasets:
            _need(name in known, f"datasets: {name!r} is not a UCI set{nearest(name, known)}; known: {listed(known, 20)}")
        _need(len(set(self.datasets)) == len(self.datasets), "datasets: one is named twice")
        _need(self.own or self.kind in ("random", "gap"), f"kind must be 'random' or 'gap', got {self.kind!r}")
        labels = [candidate.label for candidate in self.candidates]
        _need(len(set(labels)) == len(labels), "methods: two have the same label")
        _need(isinstance(self.title, str), f"title must be text, got {self.title!r}")
        _need(_is_count(self.seed, 0), f"seed must be a whole number of at least 0, got {self.seed!r}")
        if self.reference is not None:
            _need(self.reference in labels, f"reference: no method is called {self.reference!r}; there are {listed(labels)}")
        for candidate in self.candidates:
            _check(candidate)

    @property
    def headline(self) -> tuple[str, ...]:
        """The scores that methods are ranked by."""
        return HEADLINE[self.own is not None and self.own.classes]

    @property
    def shown(self) -> tuple[str, ...]:
        return SHOWN[self.own is not None and self.own.classes]

    @property
    def against(self) -> str:
        """The candidate that the others are compared with: the reference, or the first."""
        return self.reference or self.candidates[0].label

    def candidate(self, label: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def cells(self) -> Iterator[Cell]:
        """All fits, split by split, so that an interrupted study has compared everything on some splits."""
        sizes = self._sizes()
        numbers = range(max(sizes.values()))
        wanted = range(self.splits) if isinstance(self.splits, int) else numbers if self.splits is None else self.splits
        for split, name, candidate in itertools.product(numbers, self.datasets, self.candidates):
            if split < sizes[name] and split in wanted:
                yield Cell(name, split, candidate.label)

    def _sizes(self) -> dict[str, int]:
        """How many splits there are of each data set; of an own table as many as are asked for."""
        if self.own is not None:
            wanted = self.splits if isinstance(self.splits, int) else max(self.splits or (0,)) + 1
            return dict.fromkeys(self.datasets, wanted)
        from plausible.apps import datasets

        tables = {name: datasets.uci(name) for name in self.datasets}
        return {name: len(table.splits if self.kind == "random" else table.gap_splits) for name, table in tables.items()}

    def fingerprint(self, cell: Cell) -> str:
        """What a cell's result depends on; a stored result with another one is computed again."""
        depends = [cell.dataset, cell.split, self.kind, self.seed, self.candidate(cell.label).plain()]
        text = json.dumps([*depends, *([] if self.own is None else [self.own.plain()])], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def plain(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "datasets": list(self.datasets),
            "kind": self.kind,
            "seed": self.seed,
            "splits": list(self.splits) if isinstance(self.splits, tuple) else self.splits,
            "reference": self.reference,
            **({} if self.own is None else {"table": self.own.plain()}),
            "methods": {c.label: c.plain() for c in self.candidates},
        }


def example() -> str:
    """A small study to start from, as TOML."""
    return (resources.files("plausible.apps") / "templates" / "study.toml").read_text(encoding="utf-8")


def read(path: str | Path) -> Study:
    """A study from a TOML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error
    return parse(text, str(path))


def parse(text: str, source: str = "the study") -> Study:
    """A study from TOML; every error names the place."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not valid TOML: {error}") from error
    try:
        for key in raw:
            _need(key in KEYS, f"{key} is not known{nearest(key, KEYS)}; known: {', '.join(KEYS)}")
        _need("datasets" in raw, "datasets is missing: a list of names such as ['yacht', 'boston']")
        names, methods = raw["datasets"], raw.get("methods")
        named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        _need(named, f"datasets must be a list of names, got {names!r}")
        _need(isinstance(methods, dict) and methods, "methods is missing: tables such as [methods.map] with method = 'map'")
        splits = raw.get("splits")
        if isinstance(splits, list):
            _need(bool(splits) and all(_is_count(s, 0) for s in splits), f"splits must be whole numbers from 0, got {splits}")
            splits = tuple(splits)
        elif splits == "all":
            splits = None
        elif splits is not None:
            _need(_is_count(splits, 1), f"splits must be a number of splits, a list of them or 'all', got {splits!r}")
        return Study(
            datasets=tuple(names),
            candidates=tuple(_candidate(label, table) for label, table in methods.items()),  # type: ignore[union-attr]
            splits=splits,
            published=_published(raw.get("published", {})),
            **{k: raw[k] for k in ("kind", "seed", "title", "reference") if k in raw},
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from error


def _published(raw: Any) -> dict[str, dict[str, dict[str, Published]]]:
    """`{boston = {PBP = {rmse = [3.01, 0.18]}}}`, each metric a mean and, where there is one, its standard error."""
    published: dict[str, dict[str, dict[str, Published]]] = {}
    _need(isinstance(raw, dict), "published must be tables such as [published.boston]")
    for dataset, sources in raw.items():
        _need(isinstance(sources, dict), f"published.{dataset} must be a table of sources, got {sources!r}")
        for source, metrics in sources.items():
            where = f"published.{dataset}.{source}"
            _need(isinstance(metrics, dict), f"{where} must be a table such as {{rmse = [3.01, 0.18]}}, got {metrics!r}")
            for metric, numbers in metrics.items():
                _need(metric in ("log_likelihood", "rmse"), f"{where}.{metric} is not known: there are log_likelihood and rmse")
                good = isinstance(numbers, list) and len(numbers) in (1, 2) and all(isinstance(n, int | float) for n in numbers)
                _need(good, f"{where}.{metric} must be [mean] or [mean, standard error], got {numbers!r}")
                published.setdefault(dataset, {}).setdefault(source, {})[metric] = Published(*map(float, numbers))
    return published


def _candidate(label: str, table: Any) -> Candidate:
    _need(isinstance(table, dict), f"methods.{label} must be a table, got {table!r}")
    table = {key.replace("-", "_"): value for key, value in table.items()}
    model = {key: table.pop(key) for key in MODEL_KEYS if key in table}
    model.setdefault("method", label)
    grid = model.pop("grid", {})
    _need(isinstance(grid, dict), f"methods.{label}.grid must be a table of lists, got {grid!r}")
    for key, values in grid.items():
        _need(isinstance(values, list) and bool(values), f"methods.{label}.grid.{key} must be a list of values, got {values!r}")
    if "hidden" in model:
        model["hidden"] = _widths(label, model["hidden"])
    values = {k.replace("-", "_"): tuple(_widths(label, v) if k == "hidden" else v for v in vs) for k, vs in grid.items()}
    return Candidate(label, settings=table, grid=values, **model)


def _check(candidate: Candidate) -> None:
    """Every variant of the grid can be built; an error names the candidate."""
    where = f"methods.{candidate.label}"
    share = candidate.validation
    _need(isinstance(share, float) and 0 < share < 1, f"{where}.validation must lie between 0 and 1, got {share}")
    for changes in candidate.variants():
        variant = candidate.with_(changes)
        scale = variant.prior_scale
        usable = scale is None or (isinstance(scale, int | float) and not isinstance(scale, bool) and 1e-30 < scale < 1e30)
        _need(usable, f"{where}.prior_scale must be a positive number of a size that floats can square, got {scale!r}")
        for name, known in (("likelihood", LIKELIHOODS), ("activation", ACTIVATIONS)):
            value = getattr(variant, name)
            _need(value in known, f"{where}.{name}: {value!r} is not known; there are {', '.join(known)}")
        try:
            variant.build()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error


def _widths(label: str, value: Any) -> tuple[int, ...]:
    widths = [value] if isinstance(value, int) else value
    good = isinstance(widths, Sequence) and not isinstance(widths, str) and all(_is_count(w, 1) for w in widths)
    _need(good, f"methods.{label}.hidden must be layer widths such as [50], got {value!r}")
    return tuple(widths)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _need(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
