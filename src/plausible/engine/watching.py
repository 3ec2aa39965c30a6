"""A run seen from outside: a progress bar, Ctrl-C, and monitors that look at the posterior so far."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

NARROW = 100
"""Columns of a terminal up to which the bar leaves out the rate and the time so far, so that nothing else is cut."""


class Progress:
    """A rich bar while it is entered, or nothing: `show` None means only where standard error is a terminal."""

    def __init__(self, description: str, total: int, unit: str, show: bool | None = None, start: int = 0):
        self.description, self.total, self.unit, self.start = description, total, unit, start
        self.show = (sys.stderr is not None and sys.stderr.isatty()) if show is None else show
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.show:
            # rich takes a while to import, and most runs in scripts show no bar
            from rich import progress as bars
            from rich.console import Console

            console = Console(stderr=True)
            start = [bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()]
            note = [bars.TextColumn(self.unit), bars.TextColumn("{task.fields[note]}")]
            end = [bars.TextColumn("left"), bars.TimeRemainingColumn()]
            if console.width > NARROW:
                note.insert(1, bars.TextColumn("{task.fields[rate]}"))
                end.insert(0, bars.TimeElapsedColumn())
            self._bar = bars.Progress(*start, *note, *end, console=console, refresh_per_second=8)
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.start, note="", rate="")
        return self

    def update(self, done: int, note: str = "") -> None:
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            rate = f"{speed:,.0f}/s" if speed and speed >= 10 else f"{speed:.1f}/s" if speed else ""
            self._bar.update(self._task, completed=done, note=note, rate=rate)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


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
