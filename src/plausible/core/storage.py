"""Tensors and JSON on disk: atomic, checked, never pickle; and stores of draws in memory or in shards.

A file appears under its name only when it is whole (temporary file, flush, rename), and every tensor file's sha256 stands in
the JSON beside it, so that a truncated or altered file is an error and not a wrong posterior.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from plausible.core.weights import Weights, clone, concatenate, num_bytes, to

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def beside(path: Path) -> Path:
    """A name in the same folder that nobody uses: hidden, and recognisable as a leftover of `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old one or the new one, never half of it."""
    temporary = beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            # a rename may reach the disk before the content does
            os.fsync(file.fileno())
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # where the system can open folders, a rename is made to survive a power cut
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one operation of the system, where it has one: nobody ever sees either of them missing."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # another system
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap(here, os.fsencode(one), here, os.fsencode(other), both) == 0


def read_file(path: Path) -> bytes:
    """The bytes of a file; what is no file (a pipe, a device, a folder) is refused before anything is read."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a file: the folder is damaged, or not one written by plausible")
        return file.read()


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _key(name: str) -> str:
    """A name as safetensors takes it: `__metadata__` is a word of its own there."""
    return f"{name}'" if name.rstrip("'") == "__metadata__" else name


def pack(tensors: Mapping[str, Tensor]) -> tuple[bytes, str]:
    """Named tensors → the bytes of a safetensors file and their sha256."""
    # safetensors refuses tensors that share memory
    plain = {_key(name): value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    content = save(plain, metadata={"names": json.dumps(list(tensors))})
    return content, hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    content, sha256 = pack(tensors)
    write_atomically(path, content)
    return sha256


def read_tensors(path: Path, sha256: str) -> Weights:
    """A safetensors file → named tensors, refused where it is missing, truncated or not the one that was written."""
    try:
        content = read_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the folder is incomplete") from None
    # a truncated file would be an error anyway, an altered one a wrong posterior
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is damaged or was changed: its checksum is not the one recorded when it was written")
    try:
        tensors = load(content)
        # safetensors sorts names; the order of weights is kept in its metadata
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return {
            name: tensors[_key(name)] for name in json.loads(header["__metadata__"]["names"])
        }  # in the order given to `pack`
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def inside(folder: Path, name: Any) -> Path:
    """The file of this name in a folder; a stored name that leads elsewhere is refused."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{str(folder)!r} is damaged: it refers to a file {name!r}, which is not a plain file name")
    return folder / name


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json(path: Path, content: dict[str, Any]) -> None:
    sealed = {**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()}
    write_atomically(path, (json.dumps(sealed, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """JSON written by `write_json`, checked."""

    def not_json(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = json.loads(read_file(path).decode("utf-8"), parse_constant=not_json)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: is {path.parent} a folder written by plausible?") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object")
    recorded = content.pop("sha256", None)
    if recorded != hashlib.sha256(_canonical(content)).hexdigest():
        raise ValueError(f"{path} is damaged or was changed: its checksum does not fit its content")
    return content


def as_path(path: str | Path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the name of a folder, got {path!r} of type {type(path).__qualname__}")
    return Path(path)


def prepare_folder(path: str | Path, *, overwrite: bool = False, name: str = "path") -> Path:
    """A new or empty folder that can be written, or an error that says what is in the way."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{name}={str(folder)!r} is a file, expected a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{name}={str(folder)!r} exists and is not empty; choose another, or pass overwrite=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # before hours of work, not after them
        probe = beside(folder / "writable")
        probe.touch(exist_ok=False)  # a new file: nothing that lies there already is opened
        probe.unlink()
    except OSError as error:
        raise PermissionError(f"{name}={str(folder)!r} cannot be written: {error.strerror or error}") from None
    return folder


class FolderLock:
    """A folder that one run alone writes to: the system holds the lock and lets it go with the process, however that ends.

    BlockingIOError where another holds it. Where the system or the file system has no such locks, nothing is held.
    """

    def __init__(self, folder: Path):
        self.folder, self._handle = folder, -1
        if fcntl is None:
            return
        self._handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:  # some network file systems
            self.release()

    def in_place(self) -> bool:
        """Whether the folder is still there, and the one that was locked."""
        if self._handle < 0:
            return self.folder.is_dir()
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self.folder))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for processes that were forked off and hold it too
            os.close(self._handle)
            self._handle = -1


# ---------------------------------------------------------------------------------------------------------------------
# Stores of draws
class DrawStore(Protocol):
    """Stacked draws of named tensors, asked for by index."""

    def __len__(self) -> int: ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape[1:]) for name, value in next(iter(self.shards())).items()}

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights: ...

    def shards(self) -> Iterable[Weights]: ...


class MemoryDraws(DrawStore):
    """Draws held as stacked tensors."""

    def __init__(self, stacked: Weights):
        self.stacked = stacked

    def __len__(self) -> int:
        return _length(self.stacked)

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        # all of them: no copy
        if list(rows) == list(range(len(self))):
            return {name: value.to(device) for name, value in self.stacked.items()}
        where = torch.as_tensor(list(rows), device=next(iter(self.stacked.values())).device)
        return {name: value.index_select(0, where).to(device) for name, value in self.stacked.items()}

    def shards(self) -> Iterable[Weights]:
        yield self.stacked


class DiskDraws(DrawStore):
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
        return self._starts[-1] + (0 if self.tail is None else _length(self.tail))

    def _shard(self, number: int) -> Weights:
        if number == len(self.files):
            assert self.tail is not None
            return self.tail
        if number not in self._cache:
            while len(self._cache) >= self.KEPT:
                # the oldest: draws are mostly read in order
                self._cache.pop(next(iter(self._cache)))
            shard = self.files[number]
            draws = read_tensors(inside(self.folder, shard["file"]), shard["sha256"])
            if {len(value) if value.ndim else 0 for value in draws.values()} != {int(shard["draws"])}:
                raise ValueError(f"{self.folder / shard['file']} is damaged: expected {shard['draws']} draws of each tensor")
            self._cache[number] = draws
        return self._cache[number]

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis; shards are read in turn, so memory holds the rows asked for and a shard."""
        rows = list(rows)
        if rows and not 0 <= min(rows) <= max(rows) < len(self):
            raise IndexError(f"draws 0 … {len(self) - 1} are stored, asked for {min(rows)} … {max(rows)}")
        chosen: Weights = {}
        for number, low, high in self._pieces():
            places = [place for place, row in enumerate(rows) if low <= row < high]
            if not places:
                continue
            where = torch.tensor([rows[place] - low for place in places])
            for name, value in self._shard(number).items():
                if name not in chosen:
                    chosen[name] = torch.empty((len(rows), *value.shape[1:]), dtype=value.dtype)
                # into place: what is held is the result and one shard
                chosen[name][places] = value.cpu().index_select(0, where)
        return {name: value.to(device) for name, value in chosen.items()}

    def _pieces(self) -> Iterable[tuple[int, int, int]]:
        """Number, first row and end of each shard, the tail last."""
        for number in range(len(self.files) + (self.tail is not None)):
            yield number, self._starts[number], self._starts[number + 1] if number < len(self.files) else len(self)

    def shards(self) -> Iterable[Weights]:
        for number, _, _ in self._pieces():
            yield self._shard(number)


class JoinedDraws(DrawStore):
    """Several stores one after the other."""

    def __init__(self, parts: Sequence[DrawStore]):
        self.parts = list(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        rows, pieces, first = list(rows), [], 0
        order: list[int] = []
        for part in self.parts:
            places = [i for i, row in enumerate(rows) if first <= row < first + len(part)]
            if places:
                pieces.append(part.get([rows[i] - first for i in places], device))
                order += places
            first += len(part)
        joined = concatenate(pieces)
        if order == list(range(len(rows))):
            return joined
        back = torch.tensor(order).argsort()  # the inverse permutation
        return {name: value[back.to(device)] for name, value in joined.items()}

    def shards(self) -> Iterable[Weights]:
        for part in self.parts:
            yield from part.shards()


class PrunedDraws(DrawStore):
    """The draws of another store, 0 where a mask is False: for stores that are too large to be written anew.

    Draw r belongs to chain r mod `chains`; masks of several chains are stacked on a leading axis.
    """

    def __init__(self, store: DrawStore, masks: Weights, chains: int):
        self.store, self.masks, self.chains = store, masks, chains

    def __len__(self) -> int:
        return len(self.store)

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        return self._zeroed(self.store.get(rows, device), rows)

    def shards(self) -> Iterable[Weights]:
        start = 0
        for shard in self.store.shards():
            yield self._zeroed(shard, range(start, start + _length(shard)))
            start += _length(shard)

    def _zeroed(self, stacked: Weights, rows: Sequence[int]) -> Weights:
        # draws of chains alternate
        chain = torch.tensor([row % self.chains for row in rows])
        zeroed = dict(stacked)
        for name, mask in self.masks.items():
            kept = mask if self.chains == 1 else mask[chain.to(mask.device)]
            zeroed[name] = torch.where(kept.to(stacked[name].device), stacked[name], 0.0)
        return zeroed


def pruned(store: DrawStore, masks: Weights, chains: int) -> DrawStore:
    """The draws with pruned weights at 0: in memory where they are there, else when they are read."""
    view = PrunedDraws(store.store if isinstance(store, PrunedDraws) else store, masks, chains)
    if not isinstance(store, MemoryDraws):
        return view
    return MemoryDraws(view.get(range(len(store)), next(iter(store.stacked.values())).device))


def moved(store: DrawStore, device: torch.device | str) -> DrawStore:
    """The store with what it holds in memory on another device; what lies on disk stays there until it is asked for."""
    if isinstance(store, MemoryDraws):
        return MemoryDraws({name: value.to(device) for name, value in store.stacked.items()})
    return JoinedDraws([moved(part, device) for part in store.parts]) if isinstance(store, JoinedDraws) else store


class Flight:
    """Draws on their way from a GPU to host memory, on a stream of its own; until they have `landed` a copy lies on the device."""

    def __init__(self, draws: Weights):
        self._copy = clone(draws)  # the state that they belong to is written over by the next step
        stream = _stream(next(iter(draws.values())).device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._host = {
                name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
                for name, value in self._copy.items()
            }
            self._done = stream.record_event()

    def landed(self) -> Weights:
        """The draws in host memory that can be paged; waits until they are there."""
        self._done.synchronize()
        return clone(self._host)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class WriterMark(NamedTuple):
    """What a writer held at some moment."""

    shards: list[dict[str, Any]]
    pending: list[Weights]


class DrawWriter:
    """Collects draws; with a folder, streams them to shard files of bounded size.

    Memory holds at most one shard. What is pending (not yet in a shard) belongs to the checkpoint, so that a killed run resumes
    without losing or repeating a draw. A writer that `retries` keeps draws in memory where a shard cannot be written, with a
    warning, and tries again when there are twice as many.

    Draws of a GPU that `leave` it are copied to host memory while the next steps run; at most two copies lie on the device at any
    time. At the end, where all of them are small, they come back, so that predictions need no transfer. Draws below a MiB stay:
    a step of such a network is shorter than what the copy costs.
    """

    SHARD_BYTES = 64 * 2**20
    FLYING = 2
    LIGHT, SMALL = 2**20, 2**28  # bytes of a draw, and of all draws together

    def __init__(self, folder: Path | None = None, shard_bytes: int | None = None, *, retries: bool = False):
        self.folder, self.shard_bytes, self.retries = folder, shard_bytes or self.SHARD_BYTES, retries
        self._patience = 1
        self._flying: list[Flight] = []
        self.files: list[dict[str, Any]] = []
        self.pending: list[Weights] = []

    def __len__(self) -> int:
        self.land()
        return sum(int(shard["draws"]) for shard in self.files) + sum(map(_length, self.pending))

    def leave(self, draws: Weights) -> None:
        """Keep a block of draws whose tensors will be written to: a copy, in host memory. Waits where two are on their way."""
        if not self._departs(draws):
            self.add_block(clone(draws))
            return
        self.land(self.FLYING - 1)
        self._flying.append(self._flight(draws))

    _flight = Flight

    def _departs(self, draws: Weights) -> bool:
        return next(iter(draws.values())).is_cuda and num_bytes(draws) >= self.LIGHT

    def return_to(self, device: torch.device) -> None:
        """Put draws that a checkpoint had back where they were: those that do not leave onto the device."""
        self.pending = [draws if num_bytes(draws) >= self.LIGHT else to(draws, device) for draws in self.pending]

    def land(self, flying: int = 0) -> None:
        """Wait until at most so many blocks are on their way."""
        while len(self._flying) > flying:
            self.add_block(self._flying.pop(0).landed())

    def add(self, draw: Weights) -> None:
        """Keep one draw (the tensors must not be written to afterwards)."""
        self.add_block({name: value.unsqueeze(0) for name, value in draw.items()})

    def add_block(self, draws: Weights) -> None:
        self.pending.append(draws)
        if self.folder is None or num_bytes(draws) * len(self.pending) < self._patience * self.shard_bytes:
            return
        try:
            self.flush()
            self._patience = 1
        except OSError as error:
            if not self.retries:
                raise
            if self._patience == 1:
                problem = f"draws could not be written to {str(self.folder)!r} ({error.strerror or error})"
                warnings.warn(f"{problem}: they stay in memory, and are tried again", UserWarning, stacklevel=2)
            self._patience *= 2

    def flush(self) -> None:
        if not self.pending or self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1 + int(self.files[-1]["file"][6:11]) if self.files else 0
        name = f"draws-{number:05d}.safetensors"
        sha256 = write_tensors(self.folder / name, concatenate(self.pending))
        self.files.append({"file": name, "draws": sum(map(_length, self.pending)), "sha256": sha256})
        self.pending = []

    def mark(self) -> WriterMark:
        """The present moment, for `back_to` (it keeps the pending draws alive, at most a shard of them)."""
        self.land()
        return WriterMark(list(self.files), list(self.pending))

    def back_to(self, mark: WriterMark) -> None:
        """Forget the draws kept since then; their shards, if any, are overwritten by later ones."""
        self._flying = []
        # files stay on disk and are written over: nothing refers to them
        self.files, self.pending = list(mark.shards), list(mark.pending)

    def forget_deleted(self) -> None:
        """Leave shards out that somebody has deleted, with a warning."""
        there = [shard for shard in self.files if self.folder is None or (self.folder / shard["file"]).is_file()]
        if lost := sum(int(shard["draws"]) for shard in self.files) - sum(int(shard["draws"]) for shard in there):
            problem = f"{lost:,} draws are lost: their files in {str(self.folder)!r} were deleted"
            warnings.warn(f"{problem}; the run goes on without them", UserWarning, stacklevel=2)
        self.files = there

    def store(self, home: torch.device | None = None) -> DrawStore | None:
        """The draws; on the device `home` where they are few enough to be there."""
        self.forget_deleted()
        if not len(self):
            return None
        if not self.files:
            whole = concatenate(self.pending)
            return MemoryDraws(whole if home is None or num_bytes(whole) > self.SMALL else to(whole, home))
        assert self.folder is not None
        return DiskDraws(self.folder, self.files, concatenate(self.pending) if self.pending else None)


def _length(draws: Weights) -> int:
    return len(next(iter(draws.values())))


def gather(store: DrawStore) -> Weights:
    return concatenate(list(store.shards()))
