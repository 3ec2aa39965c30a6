"""Passes over the data: the sum of a function of the batches, and estimators that are fed batch by batch.

An `Estimator` holds nothing but tensors between two batches, so that whoever runs it may show how far it is, interrupt it, or write
it to a file and go on elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plausible.core.data import Batch, Data, num_rows

Result = TypeVar("Result", covariant=True)


def accumulate(function: Callable[[Batch], Any], data: Data, *, chunk: int = 1024) -> Any:
    """Σ_batches function(batch) for a tree of tensors; memory is bounded by one chunk of the data.

    `function` must return sums over its batch (not means), so that the result does not depend on `chunk`; or None, where it adds
    up by itself.
    """
    total: Any = None
    with torch.no_grad():
        for batch in data.chunks(chunk):
            value = function(batch)
            if value is not None:
                # not sum(): the first value may be any tree
                total = value if total is None else pytree.tree_map(lambda a, b: a + b, total, value)
    return total


class Estimator(Protocol[Result]):
    """Something that is known after one or more passes over the data: `add` every batch, then ask for the `next_pass`."""

    passes: int
    """How many there are, at most."""

    @property
    def chunk(self) -> int:
        """Examples to be added together in this pass."""

    @property
    def note(self) -> str:
        """A few words on how it stands, for a progress bar."""

    def add(self, batch: Batch) -> None: ...

    def next_pass(self) -> bool:
        """All data were added; whether they are needed once more."""

    def finish(self) -> Result:
        """What was to be known, after the last pass."""

    def tensors(self) -> dict[str, Tensor]:
        """All that was added up so far; between two batches."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from there, in an estimator that was started with the same settings."""


def run(estimator: Estimator[Result], data: Data, watch: Callable[[int, str], None] | None = None) -> Result:
    done = 0

    def add(batch: Batch) -> None:
        nonlocal done
        estimator.add(batch)
        done += num_rows(batch.x)
        if watch is not None:
            watch(done, estimator.note)

    more = True
    while more:
        accumulate(add, data, chunk=estimator.chunk)
        more = estimator.next_pass()
    return estimator.finish()
