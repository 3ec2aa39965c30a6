"""Kernel Stein discrepancy: how far draws of weights are from a law of which only the gradient of the log density is known.

    KSD² = E k_p(w, w′),    k_p(w, w′) = s·s′ k + s·∇_{w′}k + s′·∇_w k + tr ∇_w∇_{w′}k,    s = ∇ log p(w, D)

with the inverse multiquadric k = (1 + ‖w − w′‖²/ℓ²)^−½, under which convergence of the discrepancy to 0 means convergence to p
(Gorham and Mackey 2017). Nothing has to be normalised, and no reference is needed but for the length ℓ.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stein_matrix(weights: Tensor, scores: Tensor, length: float) -> Tensor:
    """k_p of all pairs of draws [n, P] with scores [n, P]: [n, n] in float64. Cost: n² P."""
    weights, scores = weights.double(), scores.double()
    inverse = 1 / length**2
    squares = squared_distances(weights)
    base = 1 + inverse * squares
    products = scores @ weights.T  # [n, n]: s_i · w_j
    diagonal = products.diagonal()
    across = diagonal[:, None] + diagonal - products - products.T  # (s_i − s_j)·(w_i − w_j)
    trace = inverse * weights.shape[1] * base**-1.5 - 3 * inverse**2 * squares * base**-2.5
    return scores @ scores.T * base**-0.5 + inverse * across * base**-1.5 + trace


def squared_distances(weights: Tensor) -> Tensor:
    """‖w_i − w_j‖² of all pairs, [n, P] → [n, n]."""
    # ‖a‖² + ‖b‖² − 2a·b loses all digits where the weights are far from 0 and near each other.
    centred = weights - weights.mean(0)
    squares = centred.square().sum(1)
    return (squares[:, None] + squares - 2 * centred @ centred.T).clamp(min=0).fill_diagonal_(0)


def median_length(weights: Tensor, blocks: Tensor) -> float:
    """√ of the median of ‖w − w′‖² over pairs of different blocks: [n, P], [n]; 0 where all draws are the same."""
    apart = blocks[:, None] != blocks
    squares = squared_distances(weights.double())[apart]
    return float(squares.median().sqrt()) if len(squares) else 0.0


def discrepancy(matrix: Tensor, blocks: Tensor) -> tuple[float, float]:
    """KSD² and its standard error from k_p [n, n] of draws in `blocks` [n]: the mean over pairs of different blocks.

    Unbiased for blocks that are independent of one another, so that it may be negative. Draws of one block are neighbours in a
    chain, whose likeness says nothing about the law. Of a single draw it is k_p(w, w): the discrepancy of the law that is that
    point. The error is by the jackknife over blocks.
    """
    count = int(blocks.max()) + 1
    if count == 1:
        return float(matrix.mean()), 0.0
    member = torch.nn.functional.one_hot(blocks, count).to(matrix)  # [n, blocks]
    sums, pairs = member.T @ matrix @ member, torch.outer(member.sum(0), member.sum(0))
    # Pairs within a block are neighbours in a chain: they would pull the mean up, whatever the law.
    sums.fill_diagonal_(0)
    pairs.fill_diagonal_(0)
    value = float(sums.sum() / pairs.sum())
    if count < 3:
        return value, float(matrix.std() / len(matrix) * 2**0.5)
    left = (sums.sum() - 2 * sums.sum(0)) / (pairs.sum() - 2 * pairs.sum(0))  # without each of the blocks
    return value, float(((count - 1) / count * (left - left.mean()).square().sum()).sqrt())
