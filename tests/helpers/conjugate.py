"""A conjugate density for samplers with powers of the likelihood: everything about it is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plausible.blocks.chains.density import FunctionDensity

LOG_2PI = math.log(2 * math.pi)
SEEN = torch.tensor([1.5, -0.5], dtype=torch.float64)
NOISE = torch.tensor([0.3, 0.5], dtype=torch.float64)


def log_likelihood(w: Tensor) -> Tensor:
    """Two coordinates seen with noise of different size."""
    return -0.5 * ((w - SEEN) / NOISE).square().sum(-1) - NOISE.log().sum() - LOG_2PI


def log_prior(w: Tensor) -> Tensor:
    """N(0, I)."""
    return -0.5 * w.square().sum(-1) - LOG_2PI


TARGET = FunctionDensity(log_likelihood, 2, prior=log_prior)
TRUTH = float((-0.5 * SEEN**2 / (1 + NOISE**2) - 0.5 * (1 + NOISE**2).log() - 0.5 * LOG_2PI).sum())
"""Log p(D)."""


def moments(beta: float) -> tuple[Tensor, Tensor]:
    """Means and variances of p(D | w)^β p(w)."""
    variance = 1 / (1 + beta / NOISE**2)
    return variance * beta * SEEN / NOISE**2, variance


def from_prior(rows: int, seed: int = 0) -> Tensor:
    """Draws `[rows, 2]`."""
    return torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
