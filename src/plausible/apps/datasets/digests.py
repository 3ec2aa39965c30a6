"""Checksums: of a file's bytes, and of what it holds whatever its packing.

A set that was packed anew (an archive cut into files, single files put into one archive) cannot have the bytes of the original
packing. What it holds can still be checked to the last digit: `canonical` undoes the packing and blanks, and its digest is in
the catalogue.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plausible.apps.datasets.catalogue import File

if TYPE_CHECKING:
    import numpy as np

PACKING = (lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)
DAMAGED = (*PACKING, OSError, EOFError, ValueError, KeyError, IndexError)
"""What the readers of packed files raise where a file is truncated or is something else."""

UNUSED = ("n_epochs.txt", "n_hidden.txt", "n_splits.txt", "dropout_rates.txt", "tau_values.txt")
"""Members of the UCI archives that nothing here reads."""


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Whatever goes wrong while a file of the set `name` is read is an error that says what to do about it."""
    try:
        yield
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged or not the file it should be ({error}); "
            f"`plausible data where {name} --check` compares it with its checksum; replace it, or delete it and run "
            f"`plausible data get {name}`"
        ) from None


def unpacked(path: Path) -> bytes:
    raw = path.read_bytes()
    return lzma.decompress(raw) if path.suffix == ".xz" else raw


def numbers(raw: bytes, rows: int) -> np.ndarray:
    """Text with this many rows of equally many numbers → float64 `[rows, columns]`."""
    import numpy as np

    return np.array(raw.split(), dtype=np.float64).reshape(rows, -1)


def canonical(path: str, raw: bytes) -> bytes:
    """The content of a file whatever its packing: by the ending of `path`.

    `.xz`, `.gz`: decompressed. `.tar.gz`: names and normalised text of the members, by name. `.csv`: cells, so that quotes
    do not count. Other text: lines with single blanks. Costs the size of the content in memory.
    """
    if path.endswith(".tar.gz"):
        return b"".join(name.encode() + b"\n" + text(member) for name, member in sorted(members(raw).items()))
    if path.endswith(".xz"):
        return lzma.decompress(raw)
    if path.endswith(".gz"):
        return gzip.decompress(raw)
    if path.endswith(".csv"):
        rows = list(csv.reader(io.StringIO(raw.decode("utf-8"), newline="")))
        if rows and rows[0][:1] == [""]:  # older exports leave the running number without a heading
            rows[0][0] = "rownames"
        return "\n".join("\t".join(row) for row in rows if row).encode()
    if path.endswith((".bin", ".jsonl", ".npz")):
        return raw
    return text(raw)


def _refuse_bomb(path: str, raw: bytes, most: int) -> None:
    """ValueError where packed bytes hold more than the file could; they are unpacked piece by piece, and nothing is kept."""
    opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix)
    if opened is None:
        return
    size = 0
    with opened(io.BytesIO(raw)) as file:
        while piece := file.read(1 << 20):
            size += len(piece)
            if size > most:
                raise ValueError(f"it unpacks to more than {most:,} bytes")


def text(raw: bytes) -> bytes:
    """Lines with single blanks between words and none at the ends."""
    lines = (b" ".join(line.split()) for line in raw.split(b"\n"))
    return b"".join(line + b"\n" for line in lines if line)


def members(raw: bytes) -> dict[str, bytes]:
    """The files of a `.tar.gz`, without those that nothing reads."""
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
        for member in archive:
            if member.isfile() and not member.name.endswith(UNUSED):
                handle = archive.extractfile(member)
                contents[member.name] = handle.read() if handle else b""
    return contents


def digest(raw: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, raw, usedforsecurity=False).hexdigest()}"


def problem(file: File, path: str, raw: bytes) -> str | None:
    """Why these bytes, named `path`, are not the file of the catalogue; None where they are."""
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 == file.sha256:
        return None
    if file.content is None:
        return f"sha256 {sha256[:16]}…, expected {file.sha256[:16]}… ({len(raw):,} bytes, expected {file.size:,})"
    algorithm = file.content.partition(":")[0]
    try:
        _refuse_bomb(path, raw, 200 * file.size)
        content = digest(canonical(path, raw), algorithm)
    except DAMAGED as error:
        return f"it cannot be read: {error or type(error).__name__}"
    if content == file.content:
        return None
    return f"its content has {shortened(content)}, expected {shortened(file.content)}"


def shortened(digest: str) -> str:
    """`sha256:0123…` → `sha256 0123456789abcdef…`."""
    algorithm, _, value = digest.partition(":")
    return f"{algorithm} {value[:16]}…"
