"""Checkpoints: the state as a tree of tensors, written atomically; a killed run goes on where the last one stands.

A folder holds `checkpoint.json` (settings, step, history, checksums), one `state-….safetensors` that it names, and the shards of
draws. The state's name has its checksum in it, so no write touches a file that the present JSON names, and the JSON is replaced
last: a kill at any moment leaves a consistent pair.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from plausible.core import serialise, storage
from plausible.core.attributes import attributes
from plausible.core.data import Data
from plausible.core.model import Model
from plausible.core.storage import DrawWriter
from plausible.core.weights import Weights, tensors

FORMAT = 3


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often to write checkpoints: every `seconds`, or every `steps` where that is given."""

    path: str | Path
    seconds: float = 30.0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)):
            raise TypeError(f"checkpoint path must be a folder, got {self.path!r}")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, numbers.Real):
            raise TypeError(f"checkpoint seconds must be a number, got {self.seconds!r}")
        if not self.seconds > 0:  # nor NaN
            raise ValueError(f"checkpoint seconds must be positive, got {self.seconds}")
        if self.steps is not None and (isinstance(self.steps, bool) or not isinstance(self.steps, numbers.Integral)):
            raise TypeError(f"checkpoint steps must be a whole number, got {self.steps!r}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"checkpoint steps must be at least 1, got {self.steps}")

    @classmethod
    def of(cls, given: str | Path | Checkpoint | None) -> Checkpoint | None:
        """The settings that `fit(checkpoint=…)` stands for."""
        if given is not None and not isinstance(given, (str, Path, Checkpoint)):
            raise TypeError(f"checkpoint must be a folder or a Checkpoint, got {type(given).__name__}")
        return cls(given) if isinstance(given, (str, Path)) else given


class Resumed(NamedTuple):
    """A checkpoint that was read: its step, whether the run was over, tensors by name, and the loop's record."""

    step: int
    finished: bool
    tensors: dict[str, Tensor]
    record: dict[str, Any]

    def restore(self, name: str, tree: Any) -> None:
        """Write the stored tensors into the buffers of a freshly made tree of the same structure."""
        for i, leaf in enumerate(tensors(tree)):
            stored = self.tensors.get(f"{name}.{i}")
            if stored is None or stored.shape != leaf.shape or stored.dtype != leaf.dtype:
                raise ValueError("the checkpoint's state does not fit this method and network: it belongs to another run")
            leaf.copy_(stored)

    def tree(self, name: str, device: torch.device) -> dict[str, Tensor]:
        """A stored mapping of named tensors."""
        names = self.record.get("names", {}).get(name, [])
        return {key: self.tensors[f"{name}.{i}"].to(device) for i, key in enumerate(names)}

    @property
    def random_states(self) -> dict[str, Tensor]:
        return {name.removeprefix("random."): value for name, value in self.tensors.items() if name.startswith("random.")}


class Checkpointer:
    """Writes and reads one run's checkpoints; inside its `with` block the folder is this run's alone.

    The state is in memory, so a checkpoint that cannot be written is no end of the run: it warns, and is tried again when the next
    one is due.
    """

    def __init__(self, settings: Checkpoint, identity: Mapping[str, Any]):
        self.settings, self.identity = settings, dict(identity)
        folder = Path(settings.path)
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "checkpoint.json").exists():
            # a run that was killed before its first checkpoint may have left these
            ours = (".", "state-")
            foreign = sorted(p.name for p in folder.iterdir() if p.name != "draws" and not p.name.startswith(ours))
            if foreign and foreign[0].startswith("rank-"):
                raise ValueError(
                    f"checkpoint={str(folder)!r} holds a run on several ranks ({foreign[0]!r}): resume it by torchrun with as "
                    "many, or use another folder"
                )
            if foreign:
                raise FileExistsError(
                    f"checkpoint={str(folder)!r} is not empty and holds no checkpoint (but {foreign[0]!r}); choose another"
                )
        self.folder = storage.prepare_folder(folder, overwrite=True, name="checkpoint")
        self.last_time, self.last_step = time.monotonic(), 0
        self._lock: storage.FolderLock | None = None
        self._failed = False

    def __enter__(self) -> Self:
        try:
            self._lock = storage.FolderLock(self.folder)
        except BlockingIOError:
            raise RuntimeError(
                f"checkpoint={str(self.folder)!r} is in use by another run: wait for its end, or use another folder"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def draws_folder(self) -> Path:
        return self.folder / "draws"

    def due(self, step: int) -> bool:
        if self.settings.steps is not None:
            return step - self.last_step >= self.settings.steps
        return time.monotonic() - self.last_time >= self.settings.seconds

    def save(
        self,
        step: int,
        trees: Mapping[str, Any],
        writer: DrawWriter,
        record: dict[str, Any],
        random: Mapping[str, Tensor],
        *,
        finished: bool,
    ) -> None:
        """Write a checkpoint atomically and remove the one before; warn where that fails. Of `trees`, plain mappings keep names."""
        try:
            self._return_to_folder()
            self._write(step, trees, writer, record, random, finished=finished)
            self._failed = False
        except OSError as error:
            if not self._failed or finished:
                problem = (
                    f"the checkpoint of step {step} could not be written to {str(self.folder)!r} ({error.strerror or error})"
                )
                then = "the result is in memory alone" if finished else "the run goes on and tries again"
                warnings.warn(f"{problem}: {then}", UserWarning, stacklevel=2)
            self._failed = True
        self.last_time, self.last_step = time.monotonic(), step

    def _return_to_folder(self) -> None:
        """Make the folder again, and lock it, where somebody has deleted it."""
        if self._lock is None or self._lock.in_place():
            return
        problem = f"the folder {str(self.folder)!r} was deleted while the run wrote its checkpoints to it"
        warnings.warn(f"{problem}: it is made again", UserWarning, stacklevel=2)
        self._lock.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = storage.FolderLock(self.folder)

    def _write(
        self,
        step: int,
        trees: Mapping[str, Any],
        writer: DrawWriter,
        record: dict[str, Any],
        random: Mapping[str, Tensor],
        *,
        finished: bool,
    ) -> None:
        writer.forget_deleted()
        writer.land()
        named = {f"{name}.{i}": leaf for name, tree in trees.items() for i, leaf in enumerate(tensors(tree))}
        record["names"] = {name: list(tree) for name, tree in trees.items() if isinstance(tree, dict)}
        named |= {f"random.{name}": value for name, value in random.items()}
        for i, draw in enumerate(writer.pending):
            named |= {f"pending.{i}.{name}": value for name, value in draw.items()}
        # under a name with its checksum, so that the file which the present JSON names is never written over
        packed, sha256 = storage.pack(named)
        file = f"state-{step:09d}-{sha256[:12]}.safetensors"
        storage.write_atomically(self.folder / file, packed)
        content = {
            "format": FORMAT,
            "identity": self.identity,
            "step": step,
            "finished": finished,
            "file": file,
            "state_sha256": sha256,
            "shards": writer.files,
            "pending": len(writer.pending),
            "record": plain(record),
        }
        storage.write_json(self.folder / "checkpoint.json", content)
        # older states, and what a killed process left half written, are no longer named by anything
        stale = [path for path in self.folder.glob("state-*.safetensors") if path.name != file]
        for pattern in (".state-*", ".checkpoint.json.*", ".writable*", "draws/.draws-*"):
            stale += self.folder.glob(pattern)
        for path in stale:
            path.unlink(missing_ok=True)

    def load(self, writer: DrawWriter) -> Resumed | None:
        """The checkpoint in the folder, or None; refuses one of another run."""
        path = self.folder / "checkpoint.json"
        if not path.exists():
            return None
        content = storage.read_json(path)
        if content.get("format") != FORMAT:
            raise ValueError(f"{path} has format {content.get('format')!r}, this version reads {FORMAT}")
        refuse_other(content["identity"], self.identity, path)
        named = storage.read_tensors(storage.inside(self.folder, content["file"]), content["state_sha256"])
        writer.files = list(content["shards"])
        for shard in writer.files:
            if not storage.inside(self.draws_folder, shard["file"]).is_file():
                raise ValueError(f"{self.draws_folder / shard['file']} is missing: the checkpoint is incomplete")
        writer.pending = []
        for i in range(content["pending"]):
            prefix = f"pending.{i}."
            # draws behind the last full shard travel in the state
            writer.pending.append({n.removeprefix(prefix): v for n, v in named.items() if n.startswith(prefix)})
        self.last_step = content["step"]
        return Resumed(content["step"], content["finished"], named, content["record"])


def plain(value: Any) -> Any:
    """The value for strict JSON: NaN and infinity, which that does not have, become strings that `float` reads."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for name, value in named:
        flat = value.detach().cpu().contiguous().reshape(-1)
        total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def identity(
    method: Any, model: Model, data: Data, seed: int, precision: str | None = None, starts: Weights | None = None
) -> dict[str, Any]:
    """What tells runs apart: a checkpoint can only be resumed by a run in which all of this is the same."""
    everything = (*model.network.named_parameters(), *model.network.named_buffers())
    fixed = [(name, value) for name, value in everything if name not in model.initial and name not in model.buffers]
    fixed += attributes(model.network, model.attributes).items()
    return {
        "method": serialise.encode(method, strict=False),
        "likelihood": serialise.encode(model.likelihood, strict=False),
        "prior": serialise.encode(model.prior, strict=False),
        "weights": {name: list(value.shape) for name, value in model.initial.items()},
        "random": list(model.random),
        "network": repr(model.network),
        "output": model.output is not None,
        "init": None if starts is None else digest(starts.items()),
        "fixed": digest(fixed),
        "temperature": model.temperature,
        "precision": "tf32" if precision == "tf32" else None if model.precision is None else "bfloat16",
        "seed": seed,
        "num_data": data.num_data,
        "data": data.fingerprint(),
        "device": model.device.type,
    }


def differences(old: Any, new: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Where two trees of settings differ: the place, the old value and the new one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        each: list[tuple[str, Any, Any]] = []
        for key in [*new, *sorted(set(old) - set(new))]:
            each += differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
        return each
    return [] if old == new else [(where, old, new)]


def refuse_other(stored: Mapping[str, Any], given: Mapping[str, Any], path: Path) -> None:
    """Name the first difference between the run that was checkpointed and this one."""
    if changed := differences(stored, given):
        where, old, new = changed[0]
        raise ValueError(
            f"the checkpoint in {str(path.parent)!r} belongs to another run: {where} was {old!r} and is now {new!r}"
            + (f" (and {len(changed) - 1} more)" if len(changed) > 1 else "")
            + "; use the same settings and data, or another folder"
        )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's global generators, of the CPU and of this device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
