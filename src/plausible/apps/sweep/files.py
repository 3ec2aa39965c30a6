"""Sweeps from TOML files: which data, which network, which method, which grid."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plausible.apps.sweep.grid import Grid
from plausible.apps.tables import listed, nearest


@dataclasses.dataclass(frozen=True)
class SweepFile:
    """One sweep: a data set by name, a perceptron, a method with settings, a prior, and the grid over them.

    `validation` of the training rows (a sixth by default; the last ones of image sets and random ones of tables) are held out for
    the scores. `divide` divides raw pixels 0 … 255; tables are standardised, so scores of numbers are in standard deviations. The
    test rows are never used.
    """

    dataset: str
    grid: Mapping[str, Any]
    method: str = "mean-field"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prior: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "Gaussian"})
    likelihood: Mapping[str, Any] | None = None
    hidden: tuple[int, ...] = (50,)
    activation: str = "relu"
    divide: float = 255.0
    validation: int | None = None
    draws: int = 10
    every: int | None = None
    at_once: int = 128
    seed: int = 0
    title: str = "Sweep"

    def run(self, **options: Any) -> Any:
        """The sweep itself; `options` go to `plausible.sweep` (device, out, compile, precision, progress)."""
        from plausible.apps.assembling import assemble
        from plausible.apps.sweep.running import sweep
        from plausible.apps.tables import mlp
        from plausible.core import likelihoods, optimisers, priors, schedules

        train, held = self.data()
        settings = {k: _named(v, k, optimisers, schedules) if isinstance(v, Mapping) else v for k, v in self.settings.items()}
        classes = not train[1].is_floating_point()
        outputs = int(max(train[1].max(), held[1].max())) + 1 if classes else train[1].shape[1]
        if self.likelihood is None:
            likelihood = likelihoods.Categorical() if classes else likelihoods.Gaussian()
        else:
            likelihood = _named(self.likelihood, "likelihood", likelihoods)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = mlp(train[0].shape[1], self.hidden, outputs, self.activation)
        return sweep(
            network,
            train,
            assemble(self.method, settings),
            Grid(self.grid),
            held,
            likelihood=likelihood,
            prior=_named(self.prior, "prior", priors),
            draws=self.draws,
            every=self.every,
            at_once=self.at_once,
            seed=self.seed,
            **options,
        )

    def data(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        from plausible.apps import datasets

        if self.dataset in IMAGES:
            x, y = datasets.load(self.dataset, raw=True).train
            x = x.reshape(len(x), -1).float() / self.divide
        else:
            x, y = datasets.load(self.dataset).split(0).standardised().train
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
            x, y = x[order], y[order]
        held = max(1, len(x) // 6) if self.validation is None else self.validation
        if not 0 < held < len(x):
            raise ValueError(f"validation must lie between 1 and {len(x) - 1}, got {held}")
        cut = len(x) - held
        return (x[:cut], y[:cut]), (x[cut:], y[cut:])


IMAGES = ("mnist", "fashion-mnist", "cifar10")


def example() -> str:
    """A small sweep to start from, as TOML."""
    return (resources.files("plausible.apps") / "templates" / "sweep.toml").read_text(encoding="utf-8")


def read(path: str | Path) -> SweepFile:
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error


def parse(text: str, source: str = "the sweep") -> SweepFile:
    """A sweep from TOML; errors name the place."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not valid TOML: {error}") from error
    known = [field.name for field in dataclasses.fields(SweepFile)]
    for key in raw:
        if key not in known:
            raise ValueError(f"{source}: {key!r} is not known{nearest(key, known)}; known are {', '.join(known)}")
    for key in ("dataset", "grid"):
        if key not in raw:
            raise ValueError(f"{source}: {key} is missing")
    if not isinstance(raw["grid"], Mapping):
        raise ValueError(f"{source}: grid must be a table of lists, got {raw['grid']!r}")
    for key, value in raw["grid"].items():
        if not isinstance(value, list) or not value or any(isinstance(v, (dict, list)) for v in value):
            raise ValueError(
                f'{source}: grid.{key} must be a list of numbers or words, got {value!r}; of a schedule vary a part, "lr.start"'
            )
    kinds: dict[str, tuple[type, str]] = {
        "settings": (dict, "a table"),
        "prior": (dict, 'a table such as { name = "Gaussian", scale = 1.0 }'),
        "likelihood": (dict, 'a table such as { name = "StudentT" }'),
        "hidden": (list, "a list of whole numbers"),
        "title": (str, "text"),
        **dict.fromkeys(("validation", "draws", "every", "at_once", "seed"), (int, "a whole number")),
        **dict.fromkeys(("dataset", "method", "activation"), (str, "a name")),
    }
    for key, (kind, words) in kinds.items():
        if key in raw and (not isinstance(raw[key], kind) or isinstance(raw[key], bool)):
            raise ValueError(f"{source}: {key} must be {words}, got {raw[key]!r}")
    if "hidden" in raw:
        raw["hidden"] = tuple(raw["hidden"])
        if not all(isinstance(width, int) and width > 0 for width in raw["hidden"]):
            raise ValueError(f"{source}: hidden must be a list of whole numbers, got {list(raw['hidden'])!r}")
    return SweepFile(**raw)


def _named(value: Mapping[str, Any], what: str, *homes: Any) -> Any:
    """`{name = "SGD", momentum = 0.0}` → SGD(momentum=0.0)."""
    arguments = dict(value)
    name = arguments.pop("name", None)
    public = {n: made for home in homes for n, made in vars(home).items() if n[:1].isupper()}
    makers: dict[str, Any] = {n: made for n, made in public.items() if dataclasses.is_dataclass(made)}
    if name not in makers:
        known = sorted(makers)
        raise ValueError(f'{what}: name must be one of {listed(known, 30)}, got {name!r}; write {{ name = "{known[0]}" }}')
    try:
        return makers[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{what}: {error}") from error
