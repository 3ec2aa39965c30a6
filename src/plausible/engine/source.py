"""Where batches come from: the whole data, shuffled rows of resident data, rows of a data set, or a loader's stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from plausible.data import ArrayData, Batch, Data, Order, StreamData
from plausible.methods.base import Plan


class Source:
    """Batches by number: batch t is the same whenever it is asked for (a loader's pass is replayed from its random state)."""

    def __init__(self, data: Data, plan: Plan, *, seed: int, members: int | None):
        self.data, self.plan = data, plan
        self.whole = plan.batch_size is None
        self.minibatch = not self.whole and isinstance(data, ArrayData)
        self.stream = isinstance(data, StreamData) and not data.indexable
        self._device: Any = data.batch.y.device if isinstance(data, ArrayData) else data.device
        self._order: Order | None = None
        if not self.whole and not self.stream:
            assert plan.batch_size is not None
            shared = isinstance(data, StreamData)
            self._order = Order(data.num_data, plan.batch_size, seed, None if shared else members)
        if self.whole:
            self._all = data.all()
        self._iterator: Iterator[Batch] | None = None
        self.pass_state: Tensor | None = None
        self.pass_position = 0
        loader = data.source if self.stream else None  # type: ignore[union-attr]
        self._own = loader.generator if isinstance(loader, DataLoader) else None
        self._own_start = None if self._own is None else self._own.get_state()

    # Resident data

    def index_block(self, first: int, count: int) -> Tensor:
        """Row indices of batches first … first+count−1 on the data's device: [count, (members,) batch]."""
        assert self._order is not None
        return self._order(first, count).to(self._device, non_blocking=True)

    def rows(self, first: int, count: int) -> Iterator[Tensor]:
        """The same, batch by batch."""
        yield from self.index_block(first, count).unbind(0)

    # Any data

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Batches first … first+count−1."""
        if self.whole:
            for _ in range(count):
                yield self._all
        elif self.stream:
            for _ in range(count):
                yield self._next()
        else:
            block = self.index_block(first, count) if self.minibatch else self._order(first, count)  # type: ignore[misc]
            for index in block.unbind(0):
                yield self.data.rows(index)

    def peek(self) -> Batch:
        """A batch to try things on; nothing is consumed."""
        if not self.stream:
            return next(iter(self.batches(0, 1)))
        assert isinstance(self.data, StreamData)
        own = None if self._own is None else self._own.get_state()
        try:
            with torch.random.fork_rng(devices=[]), contextlib.closing(self.data.passes()) as trial:  # type: ignore[type-var]
                batch = next(trial, None)
        finally:
            if self._own is not None and own is not None:
                self._own.set_state(own)
        if batch is None:
            raise ValueError(_EMPTY)
        return batch

    # A loader's stream

    def _start_pass(self) -> None:
        assert isinstance(self.data, StreamData)
        self.pass_state = torch.get_rng_state() if self._own is None else self._own.get_state()
        self.pass_position = 0
        self._iterator = self.data.passes()

    def _next(self) -> Batch:
        for _ in range(2):
            if self._iterator is None:
                self._start_pass()
            assert self._iterator is not None
            batch = next(self._iterator, None)
            if batch is not None:
                self.pass_position += 1
                return batch
            if self.pass_position == 0:
                break
            self._iterator = None
        raise ValueError(_EMPTY)

    def rewind(self) -> None:
        """Back to before the first batch (a trial step may have taken some)."""
        self._iterator, self.pass_state, self.pass_position = None, None, 0
        if self._own is not None and self._own_start is not None:
            self._own.set_state(self._own_start)

    def restart(self, state: Tensor, position: int) -> None:
        """Go to a position inside a pass: start it from its random state and skip what was consumed."""
        (torch.set_rng_state if self._own is None else self._own.set_state)(state)
        self._start_pass()
        for _ in range(position):
            self._next()


_EMPTY = "data is empty: the loader gave no batch (a generator can be passed over only once; give a DataLoader)"
