"""Sums over examples that are added up in place: Σ_n a_n b_nᵀ, of which one half is computed where it is symmetric."""

from __future__ import annotations

import torch
from torch import Tensor

STRIPS = 5
"""In how many strips a CPU computes a symmetric sum: narrow ones do little below the diagonal, wide ones run faster."""
RETAINED = 2**25 - 2**16
"""Bytes of a block that teaches the C library to keep freed memory: the largest that does (32 MiB with its header)."""


def keep_freed_memory() -> None:
    """Let every chunk use the memory of the chunk before it.

    glibc gives freed memory back to the system beyond a limit that it learns from the largest block that was freed; at first that
    is less than a chunk, each page of which then has to be had and cleared anew. This block is never written to, so it takes none.
    """
    torch.empty(RETAINED, dtype=torch.uint8)


def add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add to a total [G, m, n]: Σ a bᵀ by groups, over the leading axes of a [..., G, m] and b [..., G, n]."""
    if a.shape[-2] == 1:
        total[0].addmm_(a.reshape(-1, a.shape[-1]).T, b.reshape(-1, b.shape[-1]))
    else:
        total += torch.einsum("ngi,ngj->gij", a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))


def add_gram(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The same for a symmetric Σ a bᵀ; what is below the diagonal of the total is then not to be looked at.

    Cost on a CPU: 0.6·2Nn² multiplications and additions for N vectors with `STRIPS` = 5, and no memory where the total has the
    type of a and b.
    """
    if a.shape[-2] > 1 or (total.device.type != "cpu" and total.dtype == a.dtype):
        return add_products(total, a, b)
    a, b, whole = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), total[0]
    if total.dtype != a.dtype:
        whole += a.T @ b
        return None
    width = max(64, 16 * -(-len(whole) // (16 * STRIPS)))  # kernels work on multiples of 16
    for start in range(0, len(whole), width):
        whole[start : start + width, start:].addmm_(a[:, start : start + width].T, b[:, start:])
    return None
