"""Inference methods, one file each, in folders by family. `registry` maps names to classes; `create` builds one from its name.

A file in a family's folder is found by itself: whatever `Method` it registers is a name here. Files are read when the first of
those names is asked for.
"""

import pkgutil
from importlib import import_module
from typing import Any

from plausible.core import serialise
from plausible.engine.method import Method as Method
from plausible.engine.method import Plan as Plan
from plausible.engine.method import Traits as Traits
from plausible.engine.method import create as create
from plausible.engine.method import registry as registry


def load() -> None:
    """Import every module of every family, so that all methods of the library are registered."""
    if _loaded:
        return
    for family in pkgutil.iter_modules(__path__):
        if family.ispkg:
            folder = import_module(f"{__name__}.{family.name}")
            for module in pkgutil.iter_modules(folder.__path__):
                import_module(f"{folder.__name__}.{module.name}")
    _loaded.append(True)


_loaded: list[bool] = []
registry.discover = load
serialise.discoveries.append(load)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for method in registry.values():
            if method.__name__ == name:
                return method
    raise AttributeError(f"module 'plausible.methods' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"Method", "Plan", "Traits", "create", "load", "registry", *(m.__name__ for m in registry.values())})
