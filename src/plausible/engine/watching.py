"""A run seen from outside: a progress bar, Ctrl-C, and monitors that look at the posterior so far."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from types import FrameType
from typing import Any

NARROW = 100
"""Columns of a terminal up to which the bar leaves out the rate and the time so far, so that nothing else is cut."""


EVERY = 0.125
"""Seconds between two looks of a notebook at the bar."""


class Progress:
    """A bar while it is entered, or nothing: `show` None means only on a terminal (standard error) and in a notebook."""

    def __init__(self, description: str, total: int, unit: str, show: bool | None = None, start: int = 0):
        self.description, self.total, self.unit, self.start = description, total, unit, start
        watched = in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
        self.show = watched if show is None else show
        self._bar: TerminalBar | NotebookBar | None = None

    def __enter__(self) -> Progress:
        if self.show:
            kind = NotebookBar if in_notebook() else TerminalBar
            self._bar = kind(self.description, self.total, self.unit, self.start)
        return self

    def update(self, done: int, note: str = "") -> None:
        if self._bar is not None:
            self._bar.update(done, note)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def in_notebook() -> bool:
    """Whether this is a kernel, which shows HTML; not IPython on a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class TerminalBar:
    """A bar by rich."""

    def __init__(self, description: str, total: int, unit: str, start: int):
        # rich takes a while to import, and most runs in scripts show no bar
        from rich import progress as bars
        from rich.console import Console

        console = Console(stderr=True)
        first = [bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()]
        note = [bars.TextColumn(unit), bars.TextColumn("{task.fields[note]}")]
        end = [bars.TextColumn("left"), bars.TimeRemainingColumn()]
        if console.width > NARROW:
            note.insert(1, bars.TextColumn("{task.fields[rate]}"))
            end.insert(0, bars.TimeElapsedColumn())
        self._bar = bars.Progress(*first, *note, *end, console=console, refresh_per_second=8)
        self._bar.start()
        self._task = self._bar.add_task(description, total=total, completed=start, note="", rate="")

    def update(self, done: int, note: str) -> None:
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, completed=done, note=note, rate=_rate(speed) if speed else "")

    def stop(self) -> None:
        self._bar.stop()


class NotebookBar:
    """A bar of plain HTML that is written over in its place and gone at the end: no widgets, which a notebook may not have."""

    def __init__(self, description: str, total: int, unit: str, start: int):
        from IPython.display import HTML, display

        self._html, self._words = HTML, (description, total, unit)
        self._start, self._began, self._shown = start, time.monotonic(), -math.inf
        self._place = display(HTML(self._line(start, "")), display_id=True)

    def update(self, done: int, note: str) -> None:
        now = time.monotonic()
        if now - self._shown >= EVERY:
            self._shown = now
            self._place.update(self._html(self._line(done, note)))

    def stop(self) -> None:
        self._place.update(self._html(""))

    def _line(self, done: int, note: str) -> str:
        description, total, unit = self._words
        seconds = time.monotonic() - self._began
        speed = (done - self._start) / seconds if seconds > EVERY else 0.0
        left = f"{_rate(speed)}, {max(0, total - done) / speed:,.0f} s left" if speed else ""
        words = " · ".join(escape(part) for part in (f"{done:,}/{total:,} {unit}", note, left) if part)
        return f'{escape(description)} <progress value="{done}" max="{total}"></progress> {words}'


def _rate(speed: float) -> str:
    return f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s"


class Interrupt:
    """While entered, the first SIGINT only sets `requested`, and the second one ends all at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Interrupt:
        # only the main thread may set handlers; a process that ignores SIGINT (nohup), or whose handler is in C, keeps it that way
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) not in (
            signal.SIG_IGN,
            None,
        ):
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self.__exit__()
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


class Monitor:
    """A callback that sees the posterior as it would be if the run ended now: `fit(…, callbacks=[Monitor(function)])`.

    `function(epoch, posterior)` is called at the end of every `every`-th epoch (and of the last one) and returns a mapping of
    numbers or lists, which `records` keeps beside the epoch: `[{"epoch": 1, "error": 0.12}, …]`. Records travel with checkpoints,
    so a resumed run has those from before it was killed. A posterior that is made in several stages, as that of `Laplace`, is
    shown once, when the last one is over. The function must leave the posterior alone; what it draws does not
    change the run. Cost: what the function costs, and one copy of the state.

        monitor = pl.Monitor(lambda epoch, posterior: {"error": error(posterior.predict(x, draws=10))}, every=10)
        posterior = pl.fit(net, data, pl.MeanField(epochs=100), callbacks=[monitor])
        monitor.records[-1]["error"]
    """

    def __init__(self, function: Callable[[int, Any], Mapping[str, Any] | None], every: int = 1):
        if not callable(function):
            raise TypeError(f"Monitor: function must be a function of (epoch, posterior), got {function!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Monitor: every must be a whole number of epochs of at least 1, got {every!r}")
        self.function, self.every = function, every
        self.records: list[dict[str, Any]] = []

    def __call__(self, step: int, info: Mapping[str, float]) -> None:
        """Called after every step, as callbacks are; a monitor only looks at epochs (`observe`)."""

    def due(self, epoch: int, last: bool) -> bool:
        return last or epoch % self.every == 0

    def observe(self, epoch: int, posterior: Any) -> None:
        """Call the function and keep what it says."""
        said = self.function(epoch, posterior)
        if said is not None and not isinstance(said, Mapping):
            raise TypeError(f"Monitor: the function must return a mapping of numbers, or None, got {said!r}")
        # a run that was resumed before this epoch looks at it again
        self.records = [record for record in self.records if record["epoch"] < epoch]
        self.records.append({"epoch": epoch, **{str(k): _plain(v) for k, v in (said or {}).items() if k != "epoch"}})


def _plain(value: Any) -> Any:
    """Python's own numbers for those of NumPy and PyTorch."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
