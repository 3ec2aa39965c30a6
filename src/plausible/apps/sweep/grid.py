"""A grid of settings: products of values by dotted names, and which of them can be numbers of one stacked program."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from plausible.core.priors import Prior
from plausible.engine.method import Method

Settings = dict[str, Any]


class Recipe(NamedTuple):
    """What settings apply to."""

    method: Method
    prior: Prior
    temperature: Any = 1.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """All combinations of `values`, e.g. `Grid({"lr": (1e-3, 1e-4), "samples": (1, 2), "prior.pi": (0.25, 0.5)})`.

    A name is a setting of the method ("lr", "samples"), of one of its parts ("lr.start", "optimiser.beta1"), of the prior
    ("prior.scale"), or "temperature". Numbers that may have fractions are stacked; whole numbers, words and objects shape the
    program, so each combination of those is a group of its own.
    """

    values: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or not self.values:
            raise ValueError(f'grid must map settings to lists of values, such as {{"lr": [1e-3, 1e-4]}}, got {self.values!r}')
        for name, values in self.values.items():
            if not isinstance(name, str):
                raise TypeError(f'grid: names of settings are text, such as "lr", got {name!r}')
            if hasattr(values, "tolist"):
                what = type(values).__name__
                raise TypeError(f"grid: {name!r} must have a list of values, got {what}: write values.tolist()")
            if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not len(values):
                raise ValueError(f"grid: {name!r} must have a list of values, got {values!r}")

    def __len__(self) -> int:
        return math.prod(map(len, self.values.values()))

    def __iter__(self) -> Iterator[Settings]:
        for values in itertools.product(*self.values.values()):
            yield dict(zip(self.values, values))

    def groups(self, base: Recipe) -> list[list[Settings]]:
        """The combinations, those that can be stacked together in one list; every setting is checked."""
        groups: dict[str, list[Settings]] = {}
        for settings in self:
            method = applied(base, settings).method
            fixed = {name: value for name, value in settings.items() if not stackable(base, name, value)}
            # a stackable number may still change how many steps a run has, or which it keeps
            key = repr((fixed, [stage.plan(1000) for stage in method.stages()]))
            groups.setdefault(key, []).append(settings)
        return list(groups.values())


def stackable(base: Recipe, name: str, value: Any) -> bool:
    """Whether this setting can be a tensor: a real number where the setting may be one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    if name == "temperature":
        return True
    part, (*inside, field) = _path(name)
    owner = functools.reduce(getattr, inside, getattr(base, part))
    if isinstance(owner, Method) and field in owner.traits.shaping:
        return False
    kind = next((str(f.type) for f in dataclasses.fields(owner) if f.name == field), "")
    return "float" in kind


def applied(base: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Method, prior and temperature with these settings, checked as their constructors check them."""
    for name, value in settings.items():
        if name == "temperature":
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < float("inf"):
                raise ValueError(f"grid: temperature must be positive and finite, got {value!r}")
            base = base._replace(temperature=value)
            continue
        part, path = _path(name)
        base = base._replace(**{part: _replaced(getattr(base, part), path, value, name)})
    return base


def filled(base: Recipe, tensors: Mapping[str, Tensor]) -> Recipe:
    """The same with 0-d tensors in the place of numbers, past the checks: for use inside `vmap`."""
    for name, value in tensors.items():
        if name == "temperature":
            base = base._replace(temperature=value)
            continue
        part, path = _path(name)
        base = base._replace(**{part: _filled(getattr(base, part), path, value)})
    return base


def _path(name: str) -> tuple[str, list[str]]:
    """`prior.scale` → the prior and `[scale]`; `lr.start` → the method and `[lr, start]`."""
    path = name.split(".")
    return ("prior", path[1:]) if path[0] == "prior" and path[1:] else ("method", path)


def _replaced(thing: Any, path: Sequence[str], value: Any, name: str) -> Any:
    known = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    if path[0] not in known:
        from plausible.apps.tables import nearest

        who = type(thing).__name__
        inner = getattr(thing, "method", None)
        hint = f"; those of {type(inner).__name__} are written method.{path[0]}" if inner is not None else ""
        raise ValueError(
            f"grid: {name!r} is not a setting: {who} has {', '.join(known) or 'none'}{nearest(path[0], known)}{hint}; "
            'numbers of the prior are written "prior.scale", and there is "temperature"'
        )
    inner = value if len(path) == 1 else _replaced(getattr(thing, path[0]), path[1:], value, name)
    return dataclasses.replace(thing, **{path[0]: inner})


def _filled(thing: Any, path: Sequence[str], value: Tensor) -> Any:
    kind = type(thing)
    new = object.__new__(kind)  # not copy.copy, which the compiler does not follow
    for name in kind.__dataclass_fields__:
        object.__setattr__(new, name, getattr(thing, name))
    inner = value if len(path) == 1 else _filled(getattr(thing, path[0]), path[1:], value)
    object.__setattr__(new, path[0], inner)
    return new
