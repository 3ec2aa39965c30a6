"""`load` by name, `available`, and the table of loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from plausible.apps.datasets import images, places, text, toys
from plausible.apps.datasets.catalogue import CATALOGUE, entry
from plausible.apps.datasets.tables import small, uci

_HOMES: dict[str, Any] = {"images": images, "text": text, "toys": toys}
_TABLES: dict[str, Callable[..., Any]] = {"uci": uci, "small": small}
LOADERS: dict[str, Callable[..., Any]] = {
    known.name: getattr(_HOMES[known.reader], known.name)
    if known.reader in _HOMES
    else partial(_TABLES[known.reader], known.name)
    for known in CATALOGUE.values()
}


def load(name: str, **options: Any) -> Any:
    """The data set of this name, as its own function gives it with these options.

    A `Dataset` for images and text, a `Table` for UCI and small sets, `(x, y)` or a density for toys. Files are looked for in
    `PLAUSIBLE_DATA`, then in the cache, then downloaded from their public origin and checked.
    """
    loader = LOADERS[entry(name).name]
    takes = inspect.signature(loader).parameters
    unknown = [option for option in options if option not in takes]
    if unknown:
        there = ", ".join(takes) or "none"
        raise TypeError(f"data set {name!r} has no option {unknown[0]!r}: it takes {there}")
    return loader(**options)


def available(name: str) -> bool:
    """Whether the set can be loaded without a download (its files are not read)."""
    return not places.missing(entry(name))
