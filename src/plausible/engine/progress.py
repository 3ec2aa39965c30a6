"""A progress bar with loss, rate and time left, on a terminal only."""

from __future__ import annotations

import sys
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
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            console = Console(stderr=True)
            start = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self.unit)]
            note = [TextColumn("{task.fields[note]}")]
            end = [TextColumn("left"), TimeRemainingColumn()]
            if console.width > NARROW:
                note, end = [TextColumn("{task.fields[rate]}"), *note], [TimeElapsedColumn(), *end]
            self._bar = Progress(*start, *note, *end, console=console, refresh_per_second=8)
            self._bar.start()
            self._task = self._bar.add_task(self.description, total=self.total, completed=self.start, note="", rate="")
        return self

    def update(self, done: int, note: str = "") -> None:
        """Set how much is done, with a short note such as the loss."""
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            rate = f"{speed:,.0f}/s" if speed and speed >= 10 else f"{speed:.1f}/s" if speed else ""
            self._bar.update(self._task, completed=done, note=note, rate=rate)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
