"""Curves through the space of weights: three points and how much of each there is at t ∈ [0, 1] (Garipov et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plausible.core.weights import Weights

KINDS = ("bezier", "chain")


def shares(kind: str, t: Tensor) -> Tensor:
    """How much of the first end, of the bend and of the second end there is at t, [3, *t.shape]: they add up to 1.

    bezier: (1 − t)², 2t(1 − t), t²        chain: straight from the first end to the bend, and on to the second
    """
    if kind == "bezier":
        return torch.stack(((1 - t).square(), 2 * t * (1 - t), t.square()))
    return torch.stack(((1 - 2 * t).clamp(min=0), 1 - (1 - 2 * t).abs(), (2 * t - 1).clamp(min=0)))


def point(parts: Tensor, first: Mapping[str, Tensor], bend: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Weights:
    """The weights at these shares [3]."""
    one, two, three = parts
    return {name: one * first[name] + two * bend[name] + three * second[name] for name in bend}
