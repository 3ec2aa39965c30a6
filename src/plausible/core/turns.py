"""Threads take turns: with a network that others share, and with PyTorch's global generators.

Weights are put into one private copy of a network, and noise inside networks comes from generators that the process has once. So
whoever uses either is `alone`: a prediction for its block, a fit for a segment of steps. Between segments the fit lets predictions
of other threads pass (`let_pass`); other fits wait for its end (`one_fit`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class _Turns:
    """A lock that its thread may take again, and that is fair: whoever waits holds the gate, before which later ones wait."""

    def __init__(self) -> None:
        self.fits, self.gate, self.turn = threading.RLock(), threading.Lock(), threading.Lock()
        self.owner, self.depth = 0, 0

    def take(self, depth: int = 1) -> None:
        if self.owner != threading.get_ident():
            with self.gate:
                self.turn.acquire()
            self.owner = threading.get_ident()
        self.depth += depth

    def give(self, depth: int = 1) -> None:
        self.depth -= depth
        if not self.depth:
            self.owner = 0
            self.turn.release()


_turns = _Turns()


def _renew() -> None:
    """A forked process has one thread: no other will ever give its turn back."""
    global _turns
    _turns = _Turns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside the block no other thread is; a thread may enter again."""
    turns = _turns
    turns.take()
    try:
        yield
    finally:
        turns.give()


@contextlib.contextmanager
def one_fit() -> Iterator[None]:
    """Inside the block no other thread fits, or is `alone` unless this one lets it pass."""
    with _turns.fits, alone():
        yield


def let_pass() -> None:
    """Give the turn to other threads that wait for it, and take it again."""
    turns = _turns
    if turns.owner == threading.get_ident() and turns.gate.locked():
        depth = turns.depth
        turns.give(depth)
        turns.take(depth)


class cached(functools.cached_property[T]):
    """A cached property without the lock that Python 3.11 has for all objects of a class.

    What is computed may wait for its turn, and whoever has that may wait for the lock.
    """

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None
        if self.attrname not in vars(instance):
            vars(instance)[self.attrname] = self.func(instance)
        return vars(instance)[self.attrname]
