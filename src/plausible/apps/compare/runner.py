"""Run the cells of a study in parallel processes, one file of results each, so that a killed study goes on where it stood."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from plausible.apps.compare.study import Cell, Study
from plausible.core.storage import write_atomically
from plausible.core.words import log
from plausible.posteriors.doubts import FitWarning

Told = Callable[[int, int, Cell, dict[str, Any]], None]


def run(study: Study, folder: str | Path, *, jobs: int = 1, told: Told | None = None) -> dict[Cell, dict[str, Any]]:
    """All results, those that lie in `folder` with the same settings read and the others computed.

    A cell that fails leaves its error in its place and the rest goes on; failed cells are tried again by the next run. `told` hears
    (cells done, cells in all, the cell, its result) after each.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    folder = Path(folder)
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    write(folder / "study.json", study.plain())
    cells = list(study.cells())
    there = {cell: stored(study, folder, cell) for cell in cells}
    results = {cell: result for cell, result in there.items() if result is not None and "error" not in result}
    todo = [cell for cell in cells if cell not in results]
    for cell, result in _compute(study, todo, min(jobs, len(todo))):
        result["fingerprint"] = study.fingerprint(cell)
        write(_file(folder, cell), result)
        results[cell] = result
        if told is not None:
            told(len(results), len(cells), cell, result)
    return {cell: results[cell] for cell in cells}


def stored(study: Study, folder: Path, cell: Cell) -> dict[str, Any] | None:
    try:
        result = json.loads(_file(folder, cell).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(result, dict) and ("error" in result or _whole(result, study.shown))
    return result if whole and result.get("fingerprint") == study.fingerprint(cell) else None


def _whole(result: dict[str, Any], shown: Sequence[str]) -> bool:
    try:
        numbers = [*result["metrics"].values(), *result["seconds"].values(), result["train_rows"], result["test_rows"]]
        return all(name in result["metrics"] for name in shown) and bool([float(number) for number in numbers])
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _file(folder: Path, cell: Cell) -> Path:
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in cell.label)
    # Labels that differ in other characters must not share a file; Python's hash is another one in every process.
    code = functools.reduce(lambda value, byte: (value * 131 + byte) % 2**32, cell.label.encode(), 0)
    tag = "" if safe == cell.label else f"-{code:08x}"
    return folder / "cells" / cell.dataset / f"{safe}{tag}-{cell.split:02d}.json"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(jsonable(value), indent=1, allow_nan=False).encode())


def jsonable(value: Any) -> Any:
    """Numbers that JSON does not know become the words that `float` reads."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _Worker:
    """A process that computes one cell after the other."""

    def __init__(self, context: Any, study: Study):
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, study), daemon=True)
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None  # Ctrl-C is the parent's, also while it starts
        try:
            self.process.start()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
        theirs.close()
        self.cell: Cell | None = None

    def ask(self, cell: Cell) -> None:
        self.cell = cell
        self.connection.send(cell)

    def answer(self) -> dict[str, Any] | None:
        """Its result, or None where the process died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _compute(study: Study, cells: list[Cell], jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    if not cells:
        return
    # Not fork: the threads that torch has started do not survive it.
    context = multiprocessing.get_context("spawn")
    queue = list(reversed(cells))
    workers: dict[Connection, _Worker] = {}

    def employ() -> None:
        worker = _Worker(context, study)
        workers[worker.connection] = worker
        worker.ask(queue.pop())

    with _one_thread(jobs):
        try:
            for _ in range(jobs):
                employ()
            while workers:
                for connection in wait(list(workers)):
                    worker = workers[connection]  # type: ignore[index]
                    cell, result = worker.cell, worker.answer()
                    assert cell is not None
                    if result is not None and queue:
                        worker.ask(queue.pop())
                        yield cell, result
                        continue
                    del workers[connection]  # type: ignore[arg-type]
                    if result is not None:
                        worker.stop()
                    else:
                        worker.process.join()
                        result = {"error": _death(worker.process.exitcode)}
                        if queue:
                            employ()
                    yield cell, result
        finally:
            for worker in workers.values():
                worker.stop()


@contextlib.contextmanager
def _one_thread(jobs: int) -> Iterator[None]:
    """Processes side by side have one thread each: small networks gain nothing from two, and lose much by sharing cores."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    if jobs > 1:
        os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"the process was ended by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"the process ended by itself (exit code {code})"


def _serve(connection: Connection, study: Study) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    logging.getLogger("plausible").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FitWarning)  # the scores say it
    from plausible.apps.compare import protocol

    protocol.warm_up()
    while True:
        try:
            connection.send(attempt(study, connection.recv()))
        except (EOFError, OSError):
            return


def attempt(study: Study, cell: Cell) -> dict[str, Any]:
    from plausible.apps.compare import protocol

    began = time.perf_counter()
    try:
        return protocol.run(study, cell)
    except Exception as error:
        log.debug("%s failed", cell, exc_info=True)
        text = " ".join(str(error).split()) or type(error).__name__
        return {"error": f"{type(error).__name__}: {text}", "seconds": {"fit": time.perf_counter() - began}}
