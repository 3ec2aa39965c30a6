"""Tensors and JSON on disk: atomic, checked, never pickle; and stores of draws in memory or in shards.

A file appears under its name only when it is whole (temporary file, flush, rename), and every tensor file's sha256 stands in
the JSON beside it, so that a truncated or altered file is an error and not a wrong posterior.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from plausible.weights import Weights, concatenate, index, stack


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Named tensors → a safetensors file; returns its sha256."""
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path, sha256: str | None = None) -> Weights:
    """A safetensors file → named tensors, refused where it is missing, truncated or not the one that was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the folder is incomplete") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is damaged or was changed: its checksum is not the one recorded when it was written")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A dict → JSON with its own checksum."""
    sealed = {**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()}
    write_atomically(path, (json.dumps(sealed, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """JSON written by `write_json`, checked."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: is {path.parent} a folder written by plausible?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object")
    recorded = content.pop("sha256", None)
    if recorded != hashlib.sha256(_canonical(content)).hexdigest():
        raise ValueError(f"{path} is damaged or was changed: its checksum does not fit its content")
    return content


def prepare_folder(path: str | Path, *, overwrite: bool = False, name: str = "path") -> Path:
    """A new or empty folder that can be written, or an error that says what is in the way."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{name}={str(folder)!r} is a file, expected a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{name}={str(folder)!r} exists and is not empty; choose another, or pass overwrite=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise PermissionError(f"{name}={str(folder)!r} cannot be written: {error.strerror or error}") from None
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Stores of draws


class DrawStore(Protocol):
    """Stacked draws of named tensors, asked for by index."""

    def __len__(self) -> int: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        ...

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis."""
        ...

    def shards(self) -> Iterable[Weights]:
        """All draws in pieces."""
        ...


class MemoryDraws:
    """Draws held as stacked tensors."""

    def __init__(self, stacked: Weights):
        self.stacked = stacked

    def __len__(self) -> int:
        return len(next(iter(self.stacked.values())))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        return {name: tuple(value.shape[1:]) for name, value in self.stacked.items()}

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis."""
        if list(rows) == list(range(len(self))):
            return {name: value.to(device) for name, value in self.stacked.items()}
        where = torch.as_tensor(list(rows), device=next(iter(self.stacked.values())).device)
        return {name: value.index_select(0, where).to(device) for name, value in self.stacked.items()}

    def shards(self) -> Iterable[Weights]:
        """All draws as one piece."""
        yield self.stacked


class DiskDraws:
    """Draws in shard files, read when asked for, a few shards kept in memory."""

    KEPT = 2

    def __init__(self, folder: Path, shards: Sequence[Mapping[str, Any]], tail: Weights | None = None):
        self.folder, self.files = folder, [dict(shard) for shard in shards]
        self.tail = tail if tail else None
        self._cache: dict[int, Weights] = {}
        self._starts = [0]
        for shard in self.files:
            self._starts.append(self._starts[-1] + int(shard["draws"]))

    def __len__(self) -> int:
        return self._starts[-1] + (0 if self.tail is None else len(next(iter(self.tail.values()))))

    def _shard(self, number: int) -> Weights:
        if number == len(self.files):
            assert self.tail is not None
            return self.tail
        if number not in self._cache:
            while len(self._cache) >= self.KEPT:
                self._cache.pop(next(iter(self._cache)))
            shard = self.files[number]
            self._cache[number] = read_tensors(self.folder / shard["file"], shard["sha256"])
        return self._cache[number]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        return {name: tuple(value.shape[1:]) for name, value in self._shard(0).items()}

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis; shards are read in turn, so memory holds the rows asked for and a shard."""
        found: dict[int, Weights] = {}
        for number in range(len(self.files) + (self.tail is not None)):
            low = self._starts[number]
            high = self._starts[number + 1] if number < len(self.files) else len(self)
            for row in {r for r in rows if low <= r < high}:
                found[row] = {n: v.clone() for n, v in index(self._shard(number), row - low).items()}
        return {name: value.to(device) for name, value in stack([found[row] for row in rows]).items()}

    def shards(self) -> Iterable[Weights]:
        """All draws, a shard at a time."""
        for number in range(len(self.files) + (self.tail is not None)):
            yield self._shard(number)


class DrawWriter:
    """Collects draws; with a folder, streams them to shard files of bounded size.

    Memory holds at most one shard. What is pending (not yet in a shard) belongs to the checkpoint, so that a killed run resumes
    without losing or repeating a draw.
    """

    SHARD_BYTES = 64 * 2**20

    def __init__(self, folder: Path | None = None, shard_bytes: int | None = None):
        self.folder, self.shard_bytes = folder, shard_bytes or self.SHARD_BYTES
        self.files: list[dict[str, Any]] = []
        self.pending: list[Weights] = []

    def __len__(self) -> int:
        return sum(int(shard["draws"]) for shard in self.files) + len(self.pending)

    def add(self, draw: Weights) -> None:
        """Keep one draw (the tensors must not be written to afterwards)."""
        self.pending.append(draw)
        if self.folder is not None:
            size = sum(v.numel() * v.element_size() for v in draw.values())
            if size * len(self.pending) >= self.shard_bytes:
                self.flush()

    def flush(self) -> None:
        """Write the pending draws as a shard."""
        if not self.pending or self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"draws-{len(self.files):05d}.safetensors"
        sha256 = write_tensors(self.folder / name, stack(self.pending))
        self.files.append({"file": name, "draws": len(self.pending), "sha256": sha256})
        self.pending = []

    def store(self) -> DrawStore | None:
        """What was collected, or None."""
        if not len(self):
            return None
        if not self.files:
            return MemoryDraws(stack(self.pending))
        assert self.folder is not None
        return DiskDraws(self.folder, self.files, stack(self.pending) if self.pending else None)


def gather(store: DrawStore) -> Weights:
    """All draws of a store as stacked tensors in memory."""
    return concatenate(list(store.shards()))
