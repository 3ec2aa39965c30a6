"""Methods from plain settings: `"ensemble", {"epochs": 50, "members": 10}` → `Ensemble(MAP(epochs=50), members=10)`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from plausible.apps.tables import listed, nearest
from plausible.engine.method import Method
from plausible.methods import create, registry


def assemble(name: Any, settings: Mapping[str, Any]) -> Any:
    """The method with these settings, the inner one first where it is a combinator."""
    default: Any = create(name)
    outer = {field.name for field in dataclasses.fields(default)}
    slot = next((name for name in ("method", "mode") if isinstance(getattr(default, name, None), Method)), "")
    whole = slot == "mode" and not isinstance(settings.get(slot, ""), str)  # given as an object, or none
    if not slot or whole:
        refuse_unknown(settings, outer, type(default).__name__)
        return dataclasses.replace(default, **settings)
    inner = getattr(default, slot)
    chosen = settings.get(slot, inner.name)
    if not isinstance(chosen, str):
        raise ValueError(f"{slot}={chosen}: the name of a method was expected; known: {listed(registry)}")
    passed = {key.removeprefix(f"{slot}."): value for key, value in settings.items() if key not in outer}
    if chosen == inner.name:
        refuse_unknown(passed, {field.name for field in dataclasses.fields(inner)}, type(default).__name__, outer)
        built = dataclasses.replace(inner, **passed)
    else:
        built = assemble(chosen, passed)
    kept = {key: value for key, value in settings.items() if key in outer and key != slot}
    return dataclasses.replace(default, **{slot: built}, **kept)


def refuse_unknown(settings: Mapping[str, Any], known: Iterable[str], who: str, outer: Iterable[str] = ()) -> None:
    """A ValueError for the first setting that nobody takes."""
    known = sorted({*known, *outer})
    for key in settings:
        if key not in known:
            raise ValueError(f"{who} has no setting {key!r}{nearest(key, known)}; it has {', '.join(known)}")


def parse(text: str) -> tuple[str, Any]:
    """`key=value` → the key and the value: a number, true, false, none, text, or several of these with commas between.

    `optimiser` takes a name (`sgd`); objects of the library can be written as they are stored, in JSON:
    `lr={"type": "schedules.Cosine", "start": 0.01}`.
    """
    key, equals, value = text.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not key:
        raise ValueError(f"--set takes key=value, got {text!r}; for example --set members=10")
    if value.lstrip().startswith("{"):
        from plausible.core import serialise

        try:
            return key, serialise.decode(json.loads(value))
        except json.JSONDecodeError as error:
            raise ValueError(f"--set {key}: {value!r} is not JSON ({error})") from error
    if key.split(".")[-1] == "optimiser":
        from plausible.core.optimisers import as_optimiser

        return key, as_optimiser(value.strip().lower())
    parts = [literal(part.strip()) for part in value.split(",")]
    return key, parts[0] if len(parts) == 1 else tuple(parts)


def literal(text: str) -> Any:
    words = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def build(name: str, options: Mapping[str, Any], extras: Iterable[str] = ()) -> Any:
    """The method called `name` with the options that are not None and the `key=value` extras.

    A combinator (a method with a setting `method`) keeps the settings that are its own and hands the others to the
    method inside: `epochs` of an ensemble are those of its members. `method=sgld` chooses the method inside.
    """
    from plausible.apps.assembling import assemble

    settings = {key: value for key, value in options.items() if value is not None}
    for extra in extras:
        key, value = parse(extra)
        if key in settings:
            raise ValueError(f"{key} is given twice: by --set and by --{key.replace('_', '-')}")
        settings[key] = value
    return assemble(name, settings)
