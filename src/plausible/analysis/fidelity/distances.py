"""Distances between laws of one number: Wasserstein-2 of draws and Gaussians, total variation from distribution functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NODES = 65
"""Places at which the distribution function of each of two laws is compared, for the total variation of numbers."""
REACH = 3.7
"""The outermost place is sinh(REACH) ≈ 20 quartile deviations from the median."""


def wasserstein_squared(first: Tensor, second: Tensor) -> Tensor:
    """W₂² = ∫₀¹ (F⁻¹(q) − G⁻¹(q))² dq of the laws of draws [S, …] and [T, …], sorted along their first axis: [...].

    Exact for any S and T: both quantile functions are steps, and so is their difference, between at most S + T places. Cost:
    (S + T) for each law.
    """
    places, widths = _steps(len(first), len(second), first.device)
    apart = first[places[0]] - second[places[1]]
    return torch.tensordot(widths.to(apart), apart.square(), dims=1)


def wasserstein_squared_to_gaussian(draws: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """W₂² between the law of sorted draws r [S, …] and N(m, s²), [...] each, in closed form: [...].

        W₂² = (r̄ − m)² + Var r + s² − 2s Σ_i r_i (φ(z_{i−1}) − φ(z_i)),        z_i = Φ⁻¹(i/S)

    since ∫ Φ⁻¹(q) dq over a step is the difference of φ at its ends.
    """
    count = len(draws)
    levels = torch.arange(count + 1, dtype=torch.float64, device=draws.device) / count
    # The ends are ±∞ and have density 0.
    density = torch.exp(-0.5 * torch.special.ndtri(levels).square()) / math.sqrt(2 * math.pi)  # 0 at both ends
    middle = draws.mean(0)
    along = torch.tensordot((density[:-1] - density[1:]).to(draws), draws, dims=1)
    squared = (middle - mean).square() + draws.var(0, correction=0) + scale.square() - 2 * scale * along
    return squared.clamp(min=0)


def gaussian_wasserstein_squared(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    """W₂² = (m − m′)² + (s − s′)² of two Gaussians."""
    return (mean - other_mean).square() + (scale - other_scale).square()


def total_variation_of_cells(first: Tensor, second: Tensor) -> Tensor:
    """½ Σ_k |ΔF_k − ΔG_k| from distribution functions at sorted places, [K, …] → [...]; what lies outside is two more cells.

    At most the total variation ½ ∫ |f − g|, and equal to it where densities do not cross inside a cell.
    """
    apart = first - second
    edges = torch.cat([apart[:1], apart.diff(dim=0), -apart[-1:]])
    return 0.5 * edges.abs().sum(0)


def places_between(*quartiles: Tensor) -> Tensor:
    """Sorted places [K, …] that resolve laws with these quartiles, [3, …] each: `NODES` around each median, densest there."""
    steps = torch.linspace(-REACH, REACH, NODES, dtype=torch.float64).sinh()
    places = []
    for low, middle, high in (q.double() for q in quartiles):
        width = (high - low) / 1.349  # of a Gaussian: its standard deviation
        places.append(middle + steps.to(middle).reshape(-1, *[1] * middle.ndim) * width)
    return torch.cat(places).sort(dim=0).values


def _steps(first: int, second: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Which of `first` and of `second` equally likely draws lies at each step of both, and the widths of the steps."""
    # In whole units of 1/(S·T), so that ends which coincide are equal to the bit.
    ends = torch.cat([torch.arange(1, first + 1) * second, torch.arange(1, second + 1) * first]).unique()  # in 1/(S·T)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    places = (starts // second).to(device), (starts // first).to(device)
    return places, ((ends - starts).double() / (first * second)).to(device)
