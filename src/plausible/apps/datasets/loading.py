"""`load` by name, `available`, and the table of loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from plausible.apps.datasets import images, places, text, toys
from plausible.apps.datasets.catalogue import CATALOGUE, UCI, entry
from plausible.apps.datasets.classical import LAYOUTS, small
from plausible.apps.datasets.tables import uci

LOADERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(images, name) for name in ("mnist", "fashion_mnist", "cifar10", "cifar10_hmc")},
    **{name: getattr(text, name) for name in ("imdb", "sst2", "sst5", "trec", "subj")},
    **{known.name: partial(uci, known.name) for known in UCI},
    **{name: partial(small, name) for name in LAYOUTS},
    **{known.name: getattr(toys, known.name) for known in CATALOGUE.values() if known.toy},
}


def load(name: str, **options: Any) -> Any:
    """The data set of this name, as its own function gives it with these options.

    A `Dataset` for images and text, a `Table` for UCI and small sets, `(x, y)` or a density for toys. Files are looked for in
    `PLAUSIBLE_DATA`, then in the cache, then downloaded from their public origin and checked.
    """
    loader = LOADERS[entry(name).name]
    known = inspect.signature(loader).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise TypeError(f"data set {name!r} has no option {unknown[0]!r}: {takes}")
    return loader(**options)


def available(name: str) -> bool:
    """Whether the set can be loaded without a download (its files are not read)."""
    return not places.missing(entry(name))
