"""Data sets: found in `PLAUSIBLE_DATA`, then in the user's cache, then downloaded from their public origin and checked.

`load(name)` gives any of them; `mnist`, `uci`, `imdb`, … are the same as functions with their options; `toys` are made from a
seed. Names are imported when they are first used, so that listing the catalogue does not load PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plausible.apps.datasets import toys
    from plausible.apps.datasets.catalogue import CATALOGUE, Entry
    from plausible.apps.datasets.images import cifar10, cifar10_hmc, fashion_mnist, mnist
    from plausible.apps.datasets.loading import available, load
    from plausible.apps.datasets.places import cache_folder, data_folder
    from plausible.apps.datasets.results import Dataset, Split, Table
    from plausible.apps.datasets.tables import small, uci
    from plausible.apps.datasets.text import Vocabulary, encode, imdb, sst2, sst5, subj, tokenise, trec

__all__ = [
    "CATALOGUE",
    "Dataset",
    "Entry",
    "Split",
    "Table",
    "Vocabulary",
    "available",
    "cache_folder",
    "cifar10",
    "cifar10_hmc",
    "data_folder",
    "encode",
    "fashion_mnist",
    "imdb",
    "load",
    "mnist",
    "small",
    "sst2",
    "sst5",
    "subj",
    "tokenise",
    "toys",
    "trec",
    "uci",
]

_HOMES = {
    "catalogue": ("CATALOGUE", "Entry"),
    "images": ("cifar10", "cifar10_hmc", "fashion_mnist", "mnist"),
    "loading": ("available", "load"),
    "places": ("cache_folder", "data_folder"),
    "results": ("Dataset", "Split", "Table"),
    "tables": ("small", "uci"),
    "text": ("Vocabulary", "encode", "imdb", "sst2", "sst5", "subj", "tokenise", "trec"),
}


def __getattr__(name: str) -> Any:
    if name == "toys":
        return import_module(f"{__name__}.toys")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'plausible.datasets' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
