"""Where files are looked for: the data folder, then the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

from plausible.apps.datasets.catalogue import Entry, File
from plausible.core import folders

Place = Literal["data folder", "cache"]


class Found(NamedTuple):
    path: Path
    place: Place


def data_folder() -> Path | None:
    """`PLAUSIBLE_DATA`, where it is set; it need not exist."""
    name = os.environ.get("PLAUSIBLE_DATA", "")
    return Path(name).expanduser() if name else None


def cache_folder() -> Path:
    """Where downloads are kept, laid out as the data folder."""
    return folders.cache_folder() / "data"


def find(file: File) -> Found | None:
    """A file where it is first found, packed or unpacked."""
    roots: list[tuple[Path | None, Place]] = [(data_folder(), "data folder"), (cache_folder(), "cache")]
    for root, place in roots:
        for name in dict.fromkeys((file.path, file.unpacked)):
            if root is not None and (root / name).is_file():
                return Found(root / name, place)
    return None


def missing(entry: Entry) -> tuple[File, ...]:
    return tuple(file for file in entry.files if find(file) is None)
