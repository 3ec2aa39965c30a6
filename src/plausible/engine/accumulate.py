"""Accumulate: the sum of a function of the batches over one pass of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from plausible.core.data import Batch, Data


def accumulate(function: Callable[[Batch], Any], data: Data, *, chunk: int = 1024) -> Any:
    """Σ_batches function(batch) for a tree of tensors; memory is bounded by one chunk of the data.

    `function` must return sums over its batch (not means), so that the result does not depend on `chunk`.
    """
    total: Any = None
    with torch.no_grad():
        for batch in data.chunks(chunk):
            value = function(batch)
            total = value if total is None else pytree.tree_map(lambda a, b: a + b, total, value)
    return total
