"""Candidates in processes of their own, perhaps of other environments, that take turns: how long, and how much memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def resident() -> tuple[int, int]:
    """The resident set now, and its highest since `forget_peak`, in bytes."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        return int(values["VmRSS"]) * 1024, int(values["VmHWM"]) * 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return highest, highest


def forget_peak() -> None:
    """Give back what can be given back, and start the highest resident set anew (Linux; elsewhere it is that of the process)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def serve(run: Callable[[], Any], **questions: Callable[[], dict[str, Any]]) -> None:
    """Answer lines of standard input: "run" with the seconds and bytes that `run` takes, other words by their function."""
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    for word in map(str.strip, sys.stdin):
        if word == "run":
            forget_peak()
            before, begun, used = resident()[0], time.perf_counter(), time.process_time()
            kept = run()
            found: dict[str, Any] = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used}
            del kept
            found["bytes"] = resident()[1] - before
        else:
            found = questions[word]()
        print(json.dumps(found), file=answers, flush=True)


class Worker:
    """A process that serves; where it fails or takes longer than `limit` seconds it is ended, and answers None.

    `times` are the seconds of its turns by number, `used` those of processors, `bytes` what the first took at most beyond what was
    there before.
    """

    def __init__(self, words: Sequence[str], limit: float, quiet: bool = False):
        self.limit, self.times, self.used, self.bytes = limit, dict[int, float](), dict[int, float](), 0
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        self.process: subprocess.Popen[str] | None = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
        )
        self.ready = self._answer() is not None

    def ask(self, word: str) -> dict[str, Any] | None:
        """What the process answers to a word."""
        if self.process is None or self.process.stdin is None:
            return None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._answer()

    def turn(self, number: int) -> None:
        """Do the work once. Turn 0 is for the memory, and counts as a measurement only if it is long."""
        if number > 1 and self.times and self.seconds > 5:
            return
        if (found := self.ask("run")) is None:
            return
        if number == 0:
            self.bytes = found["bytes"]
        if number or found["seconds"] > 5:
            self.times[number], self.used[number] = found["seconds"], found["cpu"]

    @property
    def seconds(self) -> float:
        """The median over turns."""
        return statistics.median(self.times.values()) if self.times else float("nan")

    @property
    def cpu(self) -> float:
        """The median over turns of the processors' seconds."""
        return statistics.median(self.used.values()) if self.used else float("nan")

    def ratio(self, base: Worker) -> float:
        """The median over turns of this time over that of `base` in the same turn."""
        found = [seconds / base.times.get(number, base.seconds) for number, seconds in self.times.items()]
        return statistics.median(found) if found else float("nan")

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answer(self) -> dict[str, Any] | None:
        if self.process is None or self.process.stdout is None:
            return None
        ready, _, _ = select.select([self.process.stdout], [], [], self.limit)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
        return json.loads(line) if line else None
