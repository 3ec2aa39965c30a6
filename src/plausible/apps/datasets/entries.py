"""What the catalogue is made of: entries, their files, and where each file comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unpack = Literal["cifar10", "imdb"]


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
    unpack: Unpack


Source = Direct | Pieces | Archive


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
    source: Source | None = None

    @property
    def unpacked(self) -> str:
        """The name without compression that adds nothing: where a converted download is kept."""
        return self.path.removesuffix(".xz")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Entry:
    """One data set: its files and what to know about it. A toy has no files.

    examples: training, validation and test examples, `60,000 + 10,000`; empty for a density without data.
    """

    name: str
    task: str
    examples: str
    description: str
    licence: str
    citation: str
    origin: str = ""
    files: tuple[File, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """All examples together."""
        return sum(int(part.replace(",", "")) for part in self.examples.split(" + ") if part)

    @property
    def toy(self) -> bool:
        """Whether it is made by a formula instead of being read."""
        return not self.files

    @property
    def downloadable(self) -> bool:
        """Whether every file can be had from its public origin."""
        return all(file.source is not None for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of all files, packed as in the data folder."""
        return sum(file.size for file in self.files)
