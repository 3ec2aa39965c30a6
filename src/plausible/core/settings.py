"""What a setting may be, read off the annotations of its dataclass: one check for all that is registered."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import re
import sys
import types
import typing
from typing import Any, Literal, Union

import numpy as np
import torch

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "None",
}
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}


def checked(cls: type) -> None:
    """Let the constructor of a dataclass refuse values that its annotations do not allow, by the name of the field.

    The class's own checks come first: they know more, and say it better.
    """
    own = cls.__init__  # type: ignore[misc]

    @functools.wraps(own)
    def constructed(self: Any, *arguments: Any, **named: Any) -> None:
        if torch.compiler.is_compiling():  # a schedule made of a number inside of a step, which was checked outside
            own(self, *arguments, **named)
            return
        try:
            own(self, *arguments, **named)
        except (AttributeError, TypeError) as error:
            if " must " not in str(error) and not any(re.search(rf"\b{name}\b", str(error)) for name in _hints(cls)):
                refuse(self, cls)
            raise
        refuse(self, cls)

    cls.__init__ = constructed  # type: ignore[misc]


def refuse(owner: Any, cls: type) -> None:
    """TypeError for the first field whose value its annotation does not allow; of what was set so far."""
    for name, hint in _hints(cls).items():
        value = vars(owner).get(name, dataclasses.MISSING)
        if value is not dataclasses.MISSING and not fits(value, hint):
            kind = type(value).__qualname__
            raise TypeError(f"{type(owner).__qualname__}: {name} must be {words(hint)}, got {value!r} of type {kind}") from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Field → annotation; those that name what only type checkers import are left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
        try:
            known = {**vars(typing), **vars(sys.modules.get(owner.__module__, typing))}
            found[field.name] = eval(field.type, known) if isinstance(field.type, str) else field.type
        except (NameError, TypeError, AttributeError):
            continue
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a value; True where that cannot be told."""
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inside)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inside)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in _NUMBERS:  # tensors stand for stacked settings
        return isinstance(value, torch.Tensor) or (isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool))
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (list, tuple, collections.abc.Sequence):
        several = isinstance(value, collections.abc.Sequence | torch.Tensor | np.ndarray) and not isinstance(value, str)
        each = inside[0] if origin is not tuple or inside[1:] == (...,) else Any
        return several and (isinstance(value, torch.Tensor | np.ndarray) or all(fits(one, each) for one in value))
    if origin is not None:
        return not isinstance(origin, type) or isinstance(value, origin)
    plain = isinstance(hint, type) and not getattr(hint, "_is_protocol", False)
    return not plain or isinstance(value, hint)


def words(hint: Any) -> str:
    """An annotation, for a message."""
    if hint in _WORDS or hint is None:
        return _WORDS[types.NoneType if hint is None else hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in (Union, types.UnionType):
        return " or ".join(map(words, inside))
    if origin is collections.abc.Callable:
        return "a function"
    if origin in (list, tuple, collections.abc.Sequence):
        return f"several of: {words(inside[0])}"
    return getattr(origin or hint, "__name__", str(hint))
