"""Settings as JSON: registered dataclasses to plain data and back, with no code in between.

`encode` turns likelihoods, priors, schedules, optimisers and methods into lists, numbers, strings and objects that
`json` can write; `decode` rebuilds them by calling the constructors of *registered* classes only, so that a file can
choose among known classes and their fields and can do nothing else.

    {"type": "priors.Gaussian", "scale": 1.0, "loc": 0.0}      a registered dataclass, field by field
    {"type": "float", "value": "inf"}                          inf, -inf, nan: JSON has no such numbers
    {"opaque": "MyCallable"}                                   something that cannot be stored (`strict=False`)
    {"a": 1, "b": 2}                                           a mapping with names as keys
    [1, 2, 3]                                                  a sequence or a small tensor; read back as a tuple
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import numpy as np
import torch

from plausible.core import settings

INF = math.inf
LARGEST_TENSOR = 10_000  # tensors with more elements than this belong into the tensor file, not among the settings
LAYERS = ("core", "blocks", "engine", "posteriors", "methods", "analysis", "apps")
# called where a type is not known: each imports modules that register some (`plausible.methods` adds its own)
discoveries: list[Callable[[], None]] = []

_RESERVED = frozenset({"type", "opaque"})
_classes: dict[str, type] = {}
_names: dict[type, str] = {}

C = TypeVar("C", bound=type)


@dataclasses.dataclass(frozen=True)
class Opaque:
    """The place of an object that could not be stored: `name` is the name of its class or function."""

    name: str


@overload
def register(cls: C, *, name: str | None = None) -> C: ...
@overload
def register(cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...
def register(cls: Any = None, *, name: str | None = None) -> Any:
    """Make a dataclass known to `encode` and `decode`; used as `@register` or `@register(name="...")`.

    The name in the file is `module.Class`, as in "priors.Gaussian", whichever file of the package it lives in; methods, whose
    modules live under `plausible.methods`, go by the name of the class alone ("MAP").
    """
    if cls is None:
        return lambda decorated: register(decorated, name=name)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"register expects a dataclass, got {cls!r}; put @register above @dataclass(frozen=True)")
    # such a field could not be told from the mark of a type
    taken = sorted(_RESERVED & {field.name for field in dataclasses.fields(cls)})
    if taken:
        raise ValueError(f"{cls.__qualname__}: the field name {taken[0]!r} is reserved, it marks types in the file")
    if name is None:
        module = cls.__module__.split(".")
        inside = module[0] == "plausible"
        place = next(part for part in module[1:] if part not in LAYERS) if inside else module[-1]
        name = cls.__qualname__ if module[:2] == ["plausible", "methods"] else f"{place}.{cls.__qualname__}"
    known = _classes.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"the name {name!r} belongs to {known.__module__}.{known.__qualname__} already; "
            f'register {cls.__module__}.{cls.__qualname__} with @register(name="...")'
        )
    _classes[name], _names[cls] = cls, name
    settings.checked(cls)
    return cls


def encode(value: Any, *, strict: bool = True) -> Any:
    """Plain data for `json.dump`; `decode(encode(value)) == value` for everything that is accepted.

    Numbers, strings, None, registered dataclasses, mappings with string keys; lists, tuples and arrays become lists. Anything else
    (functions, modules, unregistered classes) raises TypeError, or with `strict=False` is stored as `{"opaque": "ClassName"}`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    # before int and float: np.float64 is a float
    if isinstance(value, np.generic):
        return encode(value.item(), strict=strict)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # JSON has no infinity, and Python's extension of it is read by nobody else
        return float(value) if math.isfinite(value) else {"type": "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor | np.ndarray):
        if math.prod(value.shape) <= LARGEST_TENSOR:
            return encode(value.tolist(), strict=strict)
        if not strict:
            return {"opaque": type(value).__qualname__}
        large = f"a tensor of shape {tuple(value.shape)} has more than {LARGEST_TENSOR} elements"
        raise TypeError(f"{large}, too many for settings in JSON")
    if isinstance(value, Opaque):
        return {"opaque": value.name}
    if type(value) in _names:
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"type": _names[type(value)], **{name: encode(getattr(value, name), strict=strict) for name in fields}}
    if isinstance(value, list | tuple):
        return [encode(item, strict=strict) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys of a stored mapping are strings, got {key!r}")
            if key in _RESERVED:
                raise ValueError(f"the key {key!r} marks types in the file and cannot name an entry of a mapping")
        return {key: encode(item, strict=strict) for key, item in value.items()}
    if not strict:
        return {"opaque": getattr(value, "__qualname__", type(value).__qualname__)}
    raise TypeError(
        f"{value!r} of type {type(value).__module__}.{type(value).__qualname__} cannot be stored as JSON; "
        "expected numbers, strings, sequences, mappings or a dataclass decorated with @plausible.core.serialise.register"
    )


def decode(data: Any, *, expect: type | tuple[type, ...] | None = None) -> Any:
    """The value that `encode` was given; sequences come back as tuples.

    Classes are rebuilt by their constructors, so their own checks run. Unknown types or fields, missing fields and
    refused values raise ValueError. `expect` states the type that must come out.
    """
    try:
        value = _decode(data)
    except RecursionError:
        raise ValueError("stored settings are nested too deeply to be read") from None
    if expect is not None and not isinstance(value, expect):
        kinds = " or ".join(kind.__qualname__ for kind in (expect if isinstance(expect, tuple) else (expect,)))
        raise ValueError(f"stored settings hold {value!r} where {kinds} is expected")
    return value


def _decode(data: Any) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list | tuple):
        return tuple(_decode(item) for item in data)
    if not isinstance(data, Mapping):
        raise ValueError(f"stored settings hold {data!r} of type {type(data).__qualname__}, which JSON does not have")
    # marks are checked before anything else, so that no file can smuggle a mapping past them
    if "opaque" in data and "type" not in data:
        if set(data) != {"opaque"} or not isinstance(data["opaque"], str):
            raise ValueError(f"an opaque entry has one field with a name, got {dict(data)!r}")
        return Opaque(data["opaque"])
    if "type" not in data:
        return {key: _decode(item) for key, item in data.items()}
    kind = data["type"]
    if kind == "float":
        if set(data) != {"type", "value"} or data["value"] not in ("inf", "-inf", "nan"):
            raise ValueError(f"a stored float is 'inf', '-inf' or 'nan', got {dict(data)!r}")
        return float(data["value"])
    if isinstance(kind, str) and kind not in _classes:  # perhaps a method whose file was not needed so far
        # only now: most files need no method that is not loaded yet
        for discover in discoveries:
            discover()
    if not isinstance(kind, str) or kind not in _classes:
        raise ValueError(
            f"unknown type {kind!r} in stored settings; known are {', '.join(sorted(_classes)) or 'none'} "
            "(import the module that registers it before loading)"
        )
    cls = _classes[kind]
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    unknown = sorted(set(data) - fields - {"type"})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r} for {kind}; its fields are {', '.join(sorted(fields))}")
    arguments = {name: _decode(item) for name, item in data.items() if name != "type"}
    try:
        # the constructor checks the values: a file is no more trusted than a user
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"stored {kind} cannot be rebuilt: {error}") from error


def check_number(
    owner: Any, *names: str, above: float = -INF, below: float = INF, at_least: float = -INF, at_most: float = INF
) -> None:
    """Store these fields of a frozen dataclass as floats, or say what they should have been; for `__post_init__`."""
    label, limits = type(owner).__qualname__, {"above": above, "at least": at_least, "below": below, "at most": at_most}
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{label}: {name} must be a number, got {value!r} of type {type(value).__qualname__}")
        number = float(value)
        if not (above < number < below and at_least <= number <= at_most):  # without bounds: refuses inf and nan alone
            bounds = [f"{word} {bound:g}" for word, bound in limits.items() if math.isfinite(bound)]
            raise ValueError(f"{label}: {name} must be {' and '.join(['finite', *bounds])}, got {name}={number!r}")
        object.__setattr__(owner, name, number)


def check_switch(owner: Any, *names: str) -> None:
    """Refuse what is neither True nor False: any text counts as true in Python, "no" as well."""
    for name in names:
        if not isinstance(value := getattr(owner, name), bool):
            raise TypeError(f"{type(owner).__qualname__}: {name} must be True or False, got {value!r}")


def check_count(owner: Any, name: str, *, at_least: int | None = 1) -> None:
    """Store this field of a frozen dataclass as an integer, or say what it should have been; for `__post_init__`."""
    value = getattr(owner, name)
    label = type(owner).__qualname__
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{label}: {name} must be a whole number, got {value!r} of type {type(value).__qualname__}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{label}: {name} must be at least {at_least}, got {name}={value!r}")
    object.__setattr__(owner, name, int(value))
