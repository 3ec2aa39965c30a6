"""Run the cells of a reproduction, one file of results each: finished cells are read, interrupted ones resume."""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from experiments import load
from experiments.frame import Cell, Part, Reproduction, Request, Result, Size
from plausible.apps.compare.runner import jsonable
from plausible.core import storage
from plausible.core.serialise import encode

FORMAT = 1
Told = Callable[[str, Result, bool], None]
"""Hears of each cell: its name, its result, and whether it was computed now."""


@dataclass(frozen=True)
class Folder:
    """`OUT/NAME/SIZE`: a JSON for each cell, `checkpoints/` of those that run, figures."""

    out: Path
    name: str
    size: Size

    @property
    def path(self) -> Path:
        """The folder."""
        return self.out / self.name / self.size

    def file(self, cell: str) -> Path:
        """Where the result of a cell lies."""
        return self.path / f"{cell}.json"

    def result(self, cell: str) -> Result | None:
        """What is stored of a cell, or None."""
        if not self.file(cell).is_file():
            return None
        stored = storage.read_json(self.file(cell))
        return {**stored, "settings": as_written_now(stored["settings"])}

    def results(self, reproduction: Reproduction) -> dict[str, Result]:
        """What is stored of all cells."""
        found = {cell.name: self.result(cell.name) for cell in reproduction.cells}
        return {name: result for name, result in found.items() if result is not None}


def as_written_now(stored: Any) -> Any:
    """Stored settings in the words of today.

    A training of so many epochs said `patience=None, holdout=0.1` once, and held nothing out.
    """
    if isinstance(stored, list):
        return [as_written_now(part) for part in stored]
    if not isinstance(stored, dict):
        return stored
    now = {name: as_written_now(part) for name, part in stored.items()}
    if now.get("type") == "MAP" and now["epochs"] is not None and (now["patience"], now["holdout"]) == (None, 0.1):
        now |= {"patience": "auto", "holdout": None}
    return now


def wanted(reproduction: Reproduction, size: Size, parts: Sequence[Part], cells: Sequence[str] = ()) -> list[str]:
    """The cells that these parts need (all parts where none are given), or those of them that are asked for by name."""
    needed = {name for part in parts or reproduction.parts for name in part.cells.get(size, ())}
    there = [cell.name for cell in reproduction.cells if size in cell.settings and (cells or cell.name in needed)]
    for name in cells:
        reproduction.cell(name)
        if name not in there:
            raise ValueError(f"cell {name!r} of {reproduction.name} has no {size} version; there are: {', '.join(there)}")
    return [name for name in there if not cells or name in cells]


def run(
    reproduction: Reproduction,
    size: Size,
    cells: Sequence[str],
    folder: Folder,
    request: Request,
    *,
    jobs: int = 1,
    overwrite: bool = False,
    told: Told | None = None,
) -> dict[str, Result]:
    """The results of these cells: those that are stored are read, the others computed, in `jobs` processes.

    A stored result with other settings or another number of seeds is refused, since it may have cost hours; `overwrite` computes
    it again.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    done, todo = {}, []
    for name in cells:
        stored = None if overwrite else folder.result(name)
        if stored is None:
            todo.append(name)
        else:
            _same(stored, reproduction.cell(name), size, request, folder.file(name))
            done[name] = stored
            if told is not None:
                told(name, stored, False)
    for name, result in _computed(reproduction.name, size, todo, folder, request, jobs):
        done[name] = result
        if told is not None:
            told(name, result, True)
    return {name: done[name] for name in cells}


def plain(settings: Any) -> dict[str, Any]:
    """The settings of a cell as JSON."""
    return {field.name: encode(getattr(settings, field.name), strict=False) for field in fields(settings)}


def compute(name: str, size: Size, cell: str, folder: Folder, request: Request) -> Result:
    """Run one cell and write its file; its checkpoint is removed afterwards."""
    own = load(name).cell(cell)
    checkpoint = folder.path / "checkpoints" / cell
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    keep = None if request.keep is None else request.keep / name / size / cell
    settings, began = own.settings[size], time.perf_counter()
    numbers = own.run(settings, replace(request, checkpoint=checkpoint, keep=keep))
    numbers.setdefault("seconds", time.perf_counter() - began)
    identity = {"format": FORMAT, "reproduction": name, "cell": cell, "size": size, "settings": plain(settings)}
    result = {**identity, "seeds": request.seeds, "seed": request.seed, "versions": versions(request.device), **numbers}
    storage.write_json(folder.file(cell), jsonable(result))
    shutil.rmtree(checkpoint, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may run
        checkpoint.parent.rmdir()
    return storage.read_json(folder.file(cell))


def versions(device: str) -> dict[str, str]:
    """With what it was computed."""
    import torch

    import plausible

    gpu = torch.cuda.is_available() and not device.startswith("cpu")
    return {
        "plausible": plausible.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    }


def _computed(
    name: str, size: Size, cells: Sequence[str], folder: Folder, request: Request, jobs: int
) -> Iterator[tuple[str, Result]]:
    if jobs == 1 or len(cells) < 2:
        for cell in cells:
            yield cell, compute(name, size, cell, folder, request)
        return
    silent = replace(request, progress=False)
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(compute, name, size, cell, folder, silent): cell for cell in cells}
        for finished in as_completed(running):
            yield running[finished], finished.result()


def _same(stored: Result, cell: Cell, size: Size, request: Request, path: Path) -> None:
    found = [change for key in ("seeds", "seed") if (change := changed(stored[key], getattr(request, key), key))]
    found += [change for change in [changed(stored["settings"], cell.settings[size])] if change]
    if found:
        raise ValueError(
            f"{path} was computed with {found[0]}; --overwrite computes it again, --show shows it as it is, "
            "another --out leaves it alone"
        )


def changed(stored: Any, value: Any, where: str = "settings") -> str | None:
    """The first difference between stored settings and these, in words; fields that came later count if not at their default."""
    if not is_dataclass(value):
        now = jsonable(encode(value, strict=False))
        return None if stored == now else f"{where} = {stored!r}, which is now {now!r}"
    kind = encode(value, strict=False).get("type")
    if not isinstance(stored, dict) or stored.get("type") != kind:
        return f"{where} = {stored!r}, which is now {value!r}"
    for own in fields(value):
        default = own.default if own.default_factory is MISSING else own.default_factory()
        current = getattr(value, own.name)
        if own.name in stored:
            found = changed(stored[own.name], current, f"{where}.{own.name}")
        else:
            found = None if current == default else f"no {where}.{own.name}, which is now {current!r}"
        if found:
            return found
    return None
