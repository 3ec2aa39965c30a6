"""Columns of the outputs' Fisher: which of them are worth a backward pass, and examples in an order that spares the others.

    H = Σ_n Σ_k J_nᵀ s_nk s_nkᵀ J_n,   Σ_k s_nk s_nkᵀ = F_n

A network that is sure of an example has short columns there: of C classes those count that compete. Left out may be columns
that together have at most the share `negligible` of Σ_n F_n,jj for every output j, however rare its class or small its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plausible.core.data import Batch, num_rows, select_rows
from plausible.core.special import flushed
from plausible.core.weights import num_bytes

if TYPE_CHECKING:
    from plausible.blocks.curvature.losses import OutputFisher

# bytes for the shares of the columns (and inputs that are not in memory anyway) of examples that are ordered together
MEMORY = 2**26
WORTH = 0.8  # examples are ordered where that leaves at most this share of the columns


class Choice(NamedTuple):
    """So many columns of each example, those that have the largest shares of the totals [P, C]."""

    columns: int
    total: Tensor


class Columns:
    """S of a chunk, [K, B, *O], made slice by slice: `first`, a gradient, if there is one, then √weight times a root of F.

    `choice` are those of each example's own that count; None stands for all.
    """

    def __init__(self, fisher: Any, choice: Choice | None, weight: Tensor | None, first: Tensor | None = None):
        self._fisher, self._choice, self._first = fisher, choice, first
        self._scale = None if weight is None else weight.sqrt().reshape(1, -1, *[1] * (len(fisher.shape) - 1))

    def __len__(self) -> int:
        roots = self._fisher.num_roots if self._choice is None else self._choice.columns
        return roots + (self._first is not None)

    def __getitem__(self, wanted: slice) -> Tensor:
        start, stop, _ = wanted.indices(len(self))
        skipped = int(self._first is not None)
        roots = slice(max(start - skipped, 0), max(stop - skipped, 0))
        columns = self._fisher.root(roots) if self._choice is None else self._fisher.leading(roots, self._choice.total)
        columns = columns if self._scale is None else columns * self._scale.to(columns)
        if self._first is not None and not start:
            columns = torch.cat([self._first[None], columns])
        return flushed(columns)  # products with denormal numbers take a CPU up to a hundred times as long


class Portions:
    """The data in chunks, each with the columns that its examples need (None: all).

    `fisher` gives F of a batch, `sizes` how many examples with so many columns are looked at together, `first` is any batch,
    and `resident` says that inputs are in memory anyway. What is left out never has more than its share of the examples so far,
    so that one pass is enough.
    """

    def __init__(
        self,
        fisher: Callable[..., OutputFisher],
        sizes: Callable[[int], int],
        first: Batch,
        negligible: float,
        resident: bool = True,
    ):
        if not 0 <= negligible < 1:
            raise ValueError(f"negligible must be at least 0 and below 1, got {negligible!r}")
        self._fisher, self._sizes, self._negligible = fisher, sizes, negligible
        self.columns = fisher(first).num_roots
        self.used = 0
        """Columns that were given out, over all examples."""
        self._size = self.chunk = sizes(self.columns)
        """Examples that are ordered together."""
        self._orders = negligible > 0 and self.columns > 1
        if self._orders:
            # ordering wants many examples at once; streamed inputs have to be held meanwhile
            inputs = 0 if resident else num_bytes(first.x) // num_rows(first.x)
            self.chunk = max(self._size, MEMORY // (32 * self.columns + inputs))
        self._total: Tensor | None = None  # Σ_n F_n,jj so far: [P, C]
        self._lost = 0.0  # the largest share that was left out of any of them

    def of(self, batch: Batch) -> Iterator[tuple[Batch, Choice | None]]:
        """The examples of a batch, about `chunk` of them, in pieces that are looked at together."""
        if self._orders and (ordered := self._ordered(batch)) is not None:
            yield from ordered
            return
        self.used += num_rows(batch.x) * self.columns
        for part in parted(batch, self._size):
            yield part, None

    def tensors(self) -> dict[str, Tensor]:
        numbers = {"numbers": torch.tensor([self.used, self._lost], dtype=torch.float64)}
        return numbers if self._total is None else {**numbers, "total": self._total}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        used, self._lost = tensors["numbers"].tolist()
        self.used, self._total = int(used), tensors.get("total")

    def _ordered(self, batch: Batch) -> Iterator[tuple[Batch, Choice | None]] | None:
        """By falling numbers of columns; None where that spares little."""
        each, lost = self.needed(batch)
        needed, order = each.sort(descending=True, stable=True)
        counts, cuts = needed.tolist(), [0]
        while cuts[-1] < len(counts):
            cuts.append(min(cuts[-1] + self._sizes(counts[cuts[-1]]), len(counts)))
        total = sum((stop - start) * counts[start] for start, stop in pairwise(cuts))
        if total > WORTH * len(counts) * self.columns:
            return None
        self.used += total
        self._lost += lost
        assert self._total is not None
        against = self._total.clone()
        # rows of a chunk keep their order, so that those of resident data lie close to each other
        rows = {start: order[start:stop].sort().values for start, stop in pairwise(cuts)}
        return ((select_rows(batch, each), Choice(counts[start], against)) for start, each in rows.items())

    @torch.no_grad()
    def needed(self, batch: Batch) -> tuple[Tensor, float]:
        """How many columns each example needs, [B], at least one, and the sum of the shares of the others, the smallest of all."""
        # a forward pass alone takes less memory
        known = [(self._fisher(part), part.weight) for part in parted(batch, 4 * self._size)]
        sums = [_weighted(fisher.diagonal(), weight).sum(0, dtype=torch.float64) for fisher, weight in known]
        total = torch.stack(sums).sum(0)
        if self._total is not None:  # what was lost before is a smaller share of what is known now
            total += self._total
            self._lost *= float((self._total / total).nan_to_num(1.0).max())
        self._total = total
        shares = torch.cat([_weighted(fisher.shares(total), weight) for fisher, weight in known])
        # greedily: the smallest shares go first, up to what may be lost
        rising = shares.flatten().sort().values
        running = rising.double().cumsum(0)
        spared = min(int((running <= self._negligible - self._lost).sum()), len(rising) - 1)
        lost = float(running[spared - 1]) if spared else 0.0
        return (shares >= rising[spared]).sum(1).clamp(min=1), lost


def _weighted(values: Tensor, weight: Tensor | None) -> Tensor:
    return values if weight is None else values * weight.to(values).reshape(-1, *[1] * (values.ndim - 1))


def parted(batch: Batch, size: int) -> Iterator[Batch]:
    return (select_rows(batch, slice(start, start + size)) for start in range(0, num_rows(batch.x), size))
