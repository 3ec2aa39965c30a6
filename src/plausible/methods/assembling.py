"""Methods from plain settings: `"ensemble", {"epochs": 50, "members": 10}` → `Ensemble(MAP(epochs=50), members=10)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from plausible.methods.base import create, registry
from plausible.tabular import listed, nearest


def assemble(name: Any, settings: Mapping[str, Any]) -> Any:
    """The method with these settings, the inner one first where it is a combinator."""
    default: Any = create(name)
    own = {field.name for field in dataclasses.fields(default)}
    inner = getattr(default, "method", None) if "method" in own else None
    if inner is None:
        refuse_unknown(settings, own, type(default).__name__)
        return dataclasses.replace(default, **settings)
    chosen = settings.get("method", inner.name)
    if not isinstance(chosen, str):
        raise ValueError(f"method={chosen}: the name of a method was expected; known: {listed(registry)}")
    passed = {key.removeprefix("method."): value for key, value in settings.items() if key not in own}
    if chosen == inner.name:
        refuse_unknown(passed, {field.name for field in dataclasses.fields(inner)}, type(default).__name__, own)
        built = dataclasses.replace(inner, **passed)
    else:
        built = assemble(chosen, passed)
    kept = {key: value for key, value in settings.items() if key in own and key != "method"}
    return dataclasses.replace(default, method=built, **kept)


def refuse_unknown(settings: Mapping[str, Any], known: Iterable[str], who: str, outer: Iterable[str] = ()) -> None:
    """A ValueError for the first setting that nobody takes."""
    known = sorted({*known, *outer})
    for key in settings:
        if key not in known:
            raise ValueError(f"{who} has no setting {key!r}{nearest(key, known)}; it has {', '.join(known)}")
