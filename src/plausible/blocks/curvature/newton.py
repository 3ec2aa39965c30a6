"""To a mode with the curvature's help: damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plausible.blocks.curvature.blocks import Dense, flat, flat_precision, named
from plausible.blocks.curvature.structures import Curvature
from plausible.core.weights import Weights

LIMIT = 2000
"""Weights up to which factorising the curvature at every step is worth it."""
SETTLED = 1e-6
"""Mean squared distance to the mode, in posterior standard deviations, at which climbing ends."""

At = Callable[[Weights], tuple[Curvature, Weights, Tensor]]
Joint = Callable[[Weights], tuple[Tensor, Weights]]


def climbs(size: int) -> bool:
    """Whether so many weights are few enough."""
    return size <= LIMIT


def climbed(weights: Weights, at: At, joint: Joint, iterations: int) -> Weights:
    """Weights ← weights + (Λ + μ diag Λ)⁻¹ ∇ log p(w, D), at most `iterations` times, where that raises the log joint.

    `at` gives the curvature (of `Dense` blocks), the precisions of the prior and the scale of the likelihood at some weights,
    `joint` the log joint and its gradient. μ falls where the log joint rises as the quadratic model says, and grows where it
    does not (Nielsen 1999). Plain gradients creep along the valleys of small networks; this arrives. Cost of a step: the
    curvature, one factorisation, one gradient.
    """
    value, slope = joint(weights)
    damping, growth = 1e-3, 2.0
    curvature, precision, scale = at(weights)
    for _ in range(iterations):
        step, expected = _solved(curvature, slope, precision, scale, damping)
        moved = {**weights, **{name: weights[name] + step[name] for name in step}}
        reached, next_slope = joint(moved)
        gain = float(reached - value)
        if not gain >= 0:  # nan too
            damping, growth = damping * growth, 2 * growth
            if damping > 1e12:
                break
            continue
        decrement = sum(float((step[name] * slope[name]).sum()) for name in step)
        weights, value, slope = moved, reached, next_slope
        if decrement < SETTLED * curvature.size:
            break
        damping *= max(1 / 5, 1 - (2 * min(gain / max(expected, 1e-300), 1.0) - 1) ** 3)
        growth = 2.0
        curvature, precision, scale = at(weights)
    return weights


def _solved(
    curvature: Curvature, slope: Mapping[str, Tensor], precision: Weights, scale: Tensor, damping: float
) -> tuple[Weights, float]:
    """(Λ + μ diag Λ)⁻¹ g =: s by name, and gᵀs − ½sᵀΛs, by which the log joint should rise."""
    found: Weights = {}
    expected = 0.0
    for block in curvature.blocks:
        assert isinstance(block, Dense)
        assert block.matrix is not None
        right = flat(block.layers, {name: slope[name][None] for name in block.names}).double()[0]
        matrix = (scale * block.matrix + torch.diag(flat_precision(block.layers, precision))).double()
        extra = damping * matrix.diagonal().clamp(min=1e-12)
        step = torch.linalg.solve(matrix + torch.diag(extra), right)
        expected += float(0.5 * (step * (right + extra * step)).sum())
        found |= named(block.layers, step.to(slope[block.names[0]].dtype))
    return found, expected
