"""Methods from plain settings: `"ensemble", {"epochs": 50, "members": 10}` → `Ensemble(MAP(epochs=50), members=10)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from plausible.apps.tables import listed, nearest
from plausible.engine.method import Method
from plausible.methods import create, registry


def assemble(name: Any, settings: Mapping[str, Any]) -> Any:
    """The method with these settings, the inner one first where it is a combinator."""
    default: Any = create(name)
    own = {field.name for field in dataclasses.fields(default)}
    slot = next((name for name in ("method", "mode") if isinstance(getattr(default, name, None), Method)), "")
    whole = slot == "mode" and not isinstance(settings.get(slot, ""), str)  # given as an object, or none
    if not slot or whole:
        refuse_unknown(settings, own, type(default).__name__)
        return dataclasses.replace(default, **settings)
    inner = getattr(default, slot)
    chosen = settings.get(slot, inner.name)
    if not isinstance(chosen, str):
        raise ValueError(f"{slot}={chosen}: the name of a method was expected; known: {listed(registry)}")
    passed = {key.removeprefix(f"{slot}."): value for key, value in settings.items() if key not in own}
    if chosen == inner.name:
        refuse_unknown(passed, {field.name for field in dataclasses.fields(inner)}, type(default).__name__, own)
        built = dataclasses.replace(inner, **passed)
    else:
        built = assemble(chosen, passed)
    kept = {key: value for key, value in settings.items() if key in own and key != slot}
    return dataclasses.replace(default, **{slot: built}, **kept)


def refuse_unknown(settings: Mapping[str, Any], known: Iterable[str], who: str, outer: Iterable[str] = ()) -> None:
    """A ValueError for the first setting that nobody takes."""
    known = sorted({*known, *outer})
    for key in settings:
        if key not in known:
            raise ValueError(f"{who} has no setting {key!r}{nearest(key, known)}; it has {', '.join(known)}")
