"""Where batches come from: the whole data, shuffled rows of resident data, rows of a data set, or a loader's stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from plausible.core.data import ArrayData, Batch, Data, Order, StreamData, num_rows, select_rows
from plausible.engine.method import Plan

EMPTY = "data is empty: the loader gave no batch (a generator can be passed over only once; give a DataLoader)"


def share(rows: int, rank: int, size: int) -> slice:
    """Which of a batch's rows are this rank's: neighbouring ones, ⌈rows/size⌉ or ⌊rows/size⌋ of them."""
    if rows < size:
        raise ValueError(
            f"a batch of {rows} examples cannot be divided among {size} ranks; use larger batches or fewer ranks (and "
            "drop_last=True where a loader's last batch is short)"
        )
    return slice(rank * rows // size, (rank + 1) * rows // size)


class Source:
    """Batches by number: batch t is the same whenever it is asked for (a loader's pass is replayed from its random state).

    `members` get batches of their own; `numbers` are those of them that run here, where some run on other ranks. `place` is
    (rank, size) where each batch is divided among ranks; `divided` says that the loader has done that already.
    """

    def __init__(
        self,
        data: Data,
        plan: Plan,
        seed: int,
        members: int | None,
        numbers: range | None = None,
        place: tuple[int, int] | None = None,
    ):
        self.place, self.divided = place, False
        self.data, self.plan = data, plan
        self.whole = plan.batch_size is None
        # what is resident is gathered on its device, by row numbers
        self.minibatch = not self.whole and isinstance(data, ArrayData)
        self.stream = isinstance(data, StreamData) and not data.indexable
        self._device: Any = data.batch.y.device if isinstance(data, ArrayData) else data.device
        self._order: Order | None = None
        if not self.whole and not self.stream:
            assert plan.batch_size is not None
            # a data set's rows are read one by one: all members see the same, so that each is read once
            stacked = None if isinstance(data, StreamData) else members
            self._order = Order(data.num_data, plan.batch_size, seed, stacked)
            self._numbers = numbers if stacked else None
        if self.whole:
            self._all = self._part(data.all())
        self._iterator: Iterator[Batch] | None = None
        self.pass_state: Tensor | None = None
        self.pass_position = self.pass_number = 0
        loader = data.source if self.stream else None  # type: ignore[union-attr]
        self.generator = loader.generator if isinstance(loader, DataLoader) else None
        sampler = loader.sampler if isinstance(loader, DataLoader) else None
        self.sampler: Any = sampler if isinstance(sampler, DistributedSampler) else None
        self._generator_start = None if self.generator is None else self.generator.get_state()

    def _part(self, batch: Batch) -> Batch:
        """The rows of a batch that are this rank's."""
        if self.place is None or self.divided:
            return batch
        return select_rows(batch, share(num_rows(batch.x), *self.place))

    def _block(self, first: int, count: int) -> Tensor:
        """Row indices, where the order gives them."""
        assert self._order is not None
        if self._numbers:  # the order of some members' rows is theirs whoever else runs here
            rows = torch.stack([self._order.rows_of(member, first, count) for member in self._numbers], dim=1)
        else:
            rows = self._order(first, count)
        return rows if self.place is None else rows[..., share(rows.shape[-1], *self.place)]

    def index_block(self, first: int, count: int) -> Tensor:
        """Row indices of batches first … first+count−1 on the data's device: [count, (members,) batch]."""
        return self._block(first, count).to(self._device, non_blocking=True)

    def batches(self, first: int, count: int) -> Iterator[Batch]:
        """Batches first … first+count−1."""
        if self.whole:
            for _ in range(count):
                yield self._all
        elif self.stream:
            for _ in range(count):
                yield self._part(self._next())
        else:
            block = self.index_block(first, count) if self.minibatch else self._block(first, count)
            for index in block.unbind(0):
                yield self.data.rows(index)

    def peek(self) -> Batch:
        """A batch to try things on; nothing is consumed."""
        if not self.stream:
            return next(iter(self.batches(0, 1)))
        assert isinstance(self.data, StreamData)
        before = None if self.generator is None else self.generator.get_state()
        try:
            with torch.random.fork_rng(devices=[]), contextlib.closing(self.data.passes()) as trial:  # type: ignore[type-var]
                batch = next(trial, None)
        finally:
            if self.generator is not None and before is not None:
                self.generator.set_state(before)
        if batch is None:
            raise ValueError(EMPTY)
        return batch

    def _start_pass(self) -> None:
        assert isinstance(self.data, StreamData)
        # the state from which the loader shuffles, and not the order, is what a checkpoint can hold of a pass
        self.pass_state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        self.pass_position = 0
        if self.divided and self.sampler is not None:
            self.sampler.set_epoch(self.pass_number)
        self._iterator = self.data.passes()

    def _next(self) -> Batch:
        for _ in range(2):  # behind the last batch of a pass stands the first of the next
            if self._iterator is None:
                self._start_pass()
            assert self._iterator is not None
            batch = next(self._iterator, None)
            if batch is not None:
                self.pass_position += 1
                return batch
            # a pass without any batch: the loader is used up
            if self.pass_position == 0:
                break
            self._iterator = None
            self.pass_number += 1
        raise ValueError(EMPTY)

    def rewind(self) -> None:
        """Back to before the first batch (a trial step may have taken some)."""
        self._iterator, self.pass_state, self.pass_position, self.pass_number = None, None, 0, 0
        if self.generator is not None and self._generator_start is not None:
            self.generator.set_state(self._generator_start)

    def restart(self, state: Tensor, position: int, number: int) -> None:
        """Go to a position inside a pass: start it from its random state and skip what was consumed."""
        self.pass_number = number
        (torch.set_rng_state if self.generator is None else self.generator.set_state)(state)
        self._start_pass()
        for _ in range(position):
            self._next()


class WholeData(Source):
    """The source of stages that sample or accumulate, whose steps take no batches: each is given all of the data.

    Where a loader has the data it is given None: those stages read them from `run.data` themselves.
    """

    stream = minibatch = False  # type: ignore[assignment]

    def __init__(self, data: Data):
        self.data = data
        self.everything = data.batch if isinstance(data, ArrayData) else None
        self.sampler, self.pass_state, self.pass_position = None, None, 0

    def batches(self, first: int, count: int) -> Iterator[Any]:  # noqa: ARG002
        return iter([self.everything] * count)
