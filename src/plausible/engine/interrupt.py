"""Ctrl-C ends a run after the current step; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While entered, the first SIGINT only sets `requested`; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if self._previous is not signal.SIG_IGN and self._previous is not None:
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self._restore()
            raise KeyboardInterrupt
        self.requested = True

    def _restore(self) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)
            self._installed = False

    def __exit__(self, *_: object) -> None:
        self._restore()
