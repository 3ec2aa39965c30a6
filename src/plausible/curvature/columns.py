"""Columns of the outputs' Fisher: which of them are worth a backward pass, and examples in an order that spares the others.

    H = Σ_n Σ_k J_nᵀ s_nk s_nkᵀ J_n,   Σ_k s_nk s_nkᵀ = F_n,   and column k of example n adds at most ‖s_nk‖²·‖J_n‖² to its trace

A network that is sure of an example has short columns there, so a fit costs what the network is unsure of, not what it could say:
of C classes those that compete. Left out are the shortest columns, up to a share (`negligible`) of Σ_n tr F_n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plausible.data import Batch, Data, num_rows, select_rows
from plausible.special import flushed
from plausible.weights import num_bytes

if TYPE_CHECKING:
    from plausible.curvature.output_fisher import OutputFisher

MEMORY = 2**26
"""Bytes for the lengths of the columns (and inputs that are not in memory anyway) of examples that are ordered together."""
WORTH = 0.8
"""Examples are ordered where that leaves at most this share of the columns."""
FEW = 8
"""Chunks by which it is judged whether a data set is worth ordering."""


def default_negligible(dtype: torch.dtype) -> float:
    """100 roundings: about what sums over a data set lose anyway."""
    return 100 * torch.finfo(dtype).eps


class Columns:
    """S of a chunk, [K, B, *O], made slice by slice: `first`, a gradient, if there is one, then √weight times a root of F.

    `count` are the longest of each example's own; None stands for all.
    """

    def __init__(self, fisher: OutputFisher, count: int | None, weight: Tensor | None, first: Tensor | None = None):
        self._fisher, self._count, self._first = fisher, count, first
        self._scale = None if weight is None else weight.sqrt().reshape(1, -1, *[1] * (len(fisher.shape) - 1))

    def __len__(self) -> int:
        own = self._fisher.num_roots if self._count is None else min(self._count, self._fisher.num_roots)
        return own + (self._first is not None)

    def __getitem__(self, wanted: slice) -> Tensor:
        start, stop, _ = wanted.indices(len(self))
        skipped = int(self._first is not None)
        own = slice(max(start - skipped, 0), max(stop - skipped, 0))
        found = self._fisher.root(own) if self._count is None else self._fisher.leading(own)
        found = found if self._scale is None else found * self._scale.to(found)
        if self._first is not None and not start:
            found = torch.cat([self._first[None], found])
        return flushed(found)


class Portions:
    """The data in chunks, each with the number of columns that its examples need (None: all).

    `fisher` gives F of a batch, `sizes` how many examples with so many columns are looked at together, and `first` is any batch.
    The mean of tr F over the examples so far stands for that of all, so that one pass is enough. Where the first examples do not
    spare enough, the others are taken as they come.
    """

    def __init__(
        self, fisher: Callable[[Batch], OutputFisher], sizes: Callable[[int], int], first: Batch, negligible: float
    ):
        self._fisher, self._sizes, self._negligible = fisher, sizes, negligible
        self.columns = fisher(first).num_roots
        self.used = 0
        """Columns that were given out, over all examples."""
        self._input = num_bytes(first.x) // num_rows(first.x)
        self._size = sizes(self.columns)
        self._trace, self._count = 0.0, 0

    def __call__(self, data: Data) -> Iterator[tuple[Batch, int | None]]:
        """One pass."""
        if self._negligible <= 0 or self.columns < 3:
            for batch in data.chunks(self._size):
                yield from self._plain(batch)
            return
        many = max(self._size, MEMORY // (32 * self.columns + (0 if data.resident else self._input)))
        worth: bool | None = None
        for large in data.chunks(many):
            rows = num_rows(large.x)
            pieces = [large] if worth is not None else _parted(large, [0, min(FEW * self._size, rows), rows])
            for piece in pieces:
                ordered = None if worth is False else self._ordered(piece)
                worth = ordered is not None if worth is None else worth
                yield from ordered or self._plain(piece)

    def _plain(self, batch: Batch) -> Iterator[tuple[Batch, int | None]]:
        rows = num_rows(batch.x)
        self.used += rows * self.columns
        for part in _parted(batch, [*range(0, rows, self._size), rows]):
            yield part, None

    def _ordered(self, batch: Batch) -> Iterator[tuple[Batch, int | None]] | None:
        """By falling numbers of columns; None where that spares little."""
        needed, order = self.needed(batch).sort(descending=True, stable=True)
        counts, cuts = needed.tolist(), [0]
        while cuts[-1] < len(counts):
            cuts.append(min(cuts[-1] + self._sizes(counts[cuts[-1]]), len(counts)))
        total = sum((stop - start) * counts[start] for start, stop in pairwise(cuts))
        if total > WORTH * len(counts) * self.columns:
            return None
        self.used += total
        return ((select_rows(batch, order[start:stop]), counts[start]) for start, stop in pairwise(cuts))

    @torch.no_grad()
    def needed(self, batch: Batch) -> Tensor:
        """How many columns each example needs, [B]: all but the shortest that together are negligible, and one at least."""
        rows, found = num_rows(batch.x), []
        for part in _parted(batch, [*range(0, rows, 4 * self._size), rows]):  # a forward pass alone takes less memory
            own = self._fisher(part).sizes()
            found.append(own if part.weight is None else own * part.weight.to(own)[:, None])
        lengths = torch.cat(found)
        self._trace += float(lengths.sum(dtype=torch.float64))
        self._count += rows
        rising = lengths.flatten().sort().values
        allowed = self._negligible * rows * self._trace / self._count
        spared = min(int((rising.double().cumsum(0) <= allowed).sum()), len(rising) - 1)
        return (lengths >= rising[spared]).sum(1).clamp(min=1)


def _parted(batch: Batch, cuts: Sequence[int]) -> Iterator[Batch]:
    """What lies between these row numbers."""
    return (select_rows(batch, slice(start, stop)) for start, stop in pairwise(cuts) if start < stop)
