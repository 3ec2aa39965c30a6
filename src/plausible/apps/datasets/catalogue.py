"""The catalogue: every data set by name, read from `catalogue.toml`, whose head says what its keys mean."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True)
class Direct:
    """The file lies at one of these addresses as it is; the first that gives the right bytes wins."""

    urls: tuple[str, ...]


@dataclass(frozen=True)
class Pieces:
    """A `.tar.gz` made here of single files: (name inside, address) for each."""

    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Archive:
    """One published archive that holds several files of a set; `unpack` names how they are cut out of it."""

    urls: tuple[str, ...]
    digest: str
    unpack: Literal["cifar10", "imdb"]


@dataclass(frozen=True)
class File:
    """One file of a data set.

    path: below the data folder, with forward slashes; in the cache the same, without a final `.xz`.
    sha256, size: of the file in the data folder.
    content: digest of what it holds whatever its packing (see `digests.canonical`), where another packing is accepted.
    source: how to get it from its public origin; None where no origin gives this content.
    """

    path: str
    size: int
    sha256: str
    content: str | None = None
    source: Direct | Pieces | Archive | None = None

    @property
    def unpacked(self) -> str:
        """The path without compression that adds nothing: where a converted download is kept."""
        return self.path.removesuffix(".xz")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    """One data set: its files and what to know about it. A toy has no files.

    examples: training, validation and test examples, `60,000 + 10,000`; empty for a density without data.
    reader: which kind of file it is: images, uci, text, small; toys are made.
    features, targets: names of the columns of a table; `labels` says that the target is a class. train: the first rows are
    for training by custom. hidden: hidden units that the literature uses.
    """

    name: str
    task: str
    examples: str = ""
    description: str = ""
    licence: str = ""
    citation: str = ""
    origin: str = ""
    files: tuple[File, ...] = ()
    aliases: tuple[str, ...] = ()
    reader: str = ""
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    labels: bool = False
    train: int | None = None
    hidden: int | None = None

    @property
    def count(self) -> int:
        return sum(int(part.replace(",", "")) for part in self.examples.split(" + ") if part)

    @property
    def toy(self) -> bool:
        return not self.files

    @property
    def downloadable(self) -> bool:
        return all(file.source is not None for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of all files, packed as in the data folder."""
        return sum(file.size for file in self.files)


def _counted(name: str) -> list[str]:
    """`a_{0..2}.txt` → `a_0.txt`, `a_1.txt`, `a_2.txt`; a name without braces is itself."""
    match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)
    if match is None:
        return [name]
    before, first, last, after = match.groups()
    return [f"{before}{number}{after}" for number in range(int(first), int(last) + 1)]


def _file(table: dict[str, Any], archives: dict[str, Archive]) -> File:
    source: Direct | Pieces | Archive | None = None
    if "urls" in table:
        source = Direct(tuple(table.pop("urls")))
    elif "pieces" in table:
        members = []
        for folder in table.pop("pieces"):
            names = [name for pattern in folder["names"] for name in _counted(pattern)]
            members += [(f"{folder['inside']}/{name}", f"{folder['address']}/{name}") for name in names]
        source = Pieces(tuple(members))
    elif "archive" in table:
        source = archives[table.pop("archive")]
    return File(**table, source=source)


def _read() -> dict[str, Entry]:
    raw = tomllib.loads((resources.files(__package__) / "catalogue.toml").read_text(encoding="utf-8"))
    archives = {name: Archive(tuple(table["urls"]), table["digest"], name) for name, table in raw["archives"].items()}
    entries = {}
    for name, table in raw["sets"].items():
        table["files"] = tuple(_file(file, archives) for file in table.get("files", ()))
        table["aliases"] = tuple(table.get("aliases", ()))
        for columns in ("features", "targets"):
            table[columns] = tuple(table.get(columns, "").split())
        entries[name] = Entry(name, **table)
    return entries


CATALOGUE: dict[str, Entry] = _read()
"""Every data set by name, toys last."""

UCI = tuple(entry for entry in CATALOGUE.values() if entry.reader == "uci")

_NAMES = {alias.lower(): entry.name for entry in CATALOGUE.values() for alias in (entry.name, *entry.aliases)}


def entry(name: str) -> Entry:
    """The entry of this name or alias; an unknown one is refused with the nearest names."""
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a data set, got {type(name).__name__}")
    known = _NAMES.get(name.lower()) or _NAMES.get(name.lower().replace("-", "_"))
    if known is None:
        near = difflib.get_close_matches(name.lower(), _NAMES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CATALOGUE)}"
        raise ValueError(f"no data set is called {name!r}: {hint}")
    return CATALOGUE[known]
