"""Gradients of many columns at once: ∂⟨S_k, f⟩/∂z for K columns S of the outputs, at tensors z inside a network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def gradients(outputs: Tensor, inner: Sequence[Tensor], columns: Tensor, together: bool, keep: bool = False) -> list[Tensor]:
    """[K, *z.shape] for each z in `inner`, for columns [K, *outputs.shape]; 0 where f does not depend on z.

    `together` is one batched backward pass, with matrix products of K times as many rows; else there are K passes. The graph is
    used up, unless it is to be kept.
    """
    if together:
        found = torch.autograd.grad(outputs, inner, columns, is_grads_batched=True, allow_unused=True, retain_graph=keep)
        return [z.new_zeros(len(columns), *z.shape) if g is None else g for z, g in zip(inner, found)]
    whole = [z.new_zeros(len(columns), *z.shape) for z in inner]
    for k, column in enumerate(columns):
        found = torch.autograd.grad(outputs, inner, column, retain_graph=keep or k + 1 < len(columns), allow_unused=True)
        for kept, grad in zip(whole, found):
            if grad is not None:
                kept[k] = grad
    return whole


def can_batch(outputs: Tensor, inner: Sequence[Tensor], columns: Tensor) -> bool:
    """Whether a batched backward pass works, without a loop inside, and agrees with a single one; tried on the first column."""
    if len(columns) < 2:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns of operations that have no rule, over which it loops
            found = torch.autograd.grad(
                outputs, inner, columns[:1], is_grads_batched=True, retain_graph=True, allow_unused=True
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, Warning):
        return False
    single = torch.autograd.grad(outputs, inner, columns[0], retain_graph=True, allow_unused=True)
    return all(
        torch.allclose(a[0], b, rtol=1e-3, atol=1e-5 * float(b.abs().max())) if a is not None and b is not None else a is b
        for a, b in zip(found, single)
    )
