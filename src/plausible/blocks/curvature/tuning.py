"""Hyper-parameters by the evidence: precisions of a Gaussian prior and the noise of a Gaussian likelihood.

    log p(D) ≈ log p(D | w*) + log p(w* | τ) + ½P log 2π − ½ log det Λ,     Λ = s·H + diag(τ)

At fixed w* and H the maximum has τ_g = γ_g/Σ(w − loc)² and σ² = RSS/(N − γ), γ = Σ(1 − τ_i (Λ⁻¹)_ii) the number of weights that
the data determine (MacKay 1992, Bayesian interpolation; A practical Bayesian framework for backpropagation networks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.curvature.structures import Curvature
from plausible.core.networks import layer as layer_of
from plausible.core.priors.rules import LOG_2PI
from plausible.core.weights import Weights

Tune = Literal["global", "layer", "weight"]
SMALLEST, LARGEST = 1e-8, 1e12


class Evidence(NamedTuple):
    """Log p(D), taken apart: log p(D | w*), log p(w*), and log of the posterior's volume ½P log 2π − ½ log det Λ; 0-d tensors.

    The prior's density times that volume is the Occam factor: which part of what the prior thought possible is left.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    log_volume: Tensor

    @property
    def log_occam(self) -> Tensor:
        """The log of the Occam factor: the price of the model's freedom, in nats."""
        return self.log_prior + self.log_volume

    @property
    def total(self) -> Tensor:
        return self.log_likelihood + self.log_prior + self.log_volume


def gaussian_log_prior(residuals: Mapping[str, Tensor], precision: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensor:
    """Σ ½ log τ/2π − ½τ(w − loc)² in float64; `masks` leave elements out."""
    total = torch.zeros((), dtype=torch.float64, device=next(iter(residuals.values())).device)
    for name, residual in residuals.items():
        tau = precision[name].double()
        if not tau.ndim and name not in masks:
            # one number for the tensor: no float64 copy of it
            square = torch.linalg.vector_norm(residual, dtype=torch.float64).square()
            total = total + 0.5 * residual.numel() * (tau.log() - LOG_2PI) - 0.5 * tau * square
            continue
        each = 0.5 * (tau.log() - LOG_2PI) - 0.5 * tau * residual.double().square()
        total = total + (each[masks[name]] if name in masks else each).sum()
    return total


def groups(names: tuple[str, ...], tune: Tune, curvature: Curvature) -> dict[str, str]:
    if tune == "global":
        return dict.fromkeys(names, "all")
    owner = {n: layer.names[0] for block in curvature.blocks for layer in block.layers for n in layer.names}
    return {name: layer_of(name) or owner[name] for name in names}


def update(curvature: Curvature, residuals: Weights, precision: Weights, scale: Tensor, tune: Tune) -> tuple[Weights, float]:
    effective = curvature.effective(precision, scale)
    gamma = float(sum(value.double().sum() for value in effective.values()))
    if tune == "weight":
        # MacKay's fixed point, which runs away for weights that data say nothing of: hence the bounds
        new = {
            n: (effective[n].clamp(min=0) / residuals[n].square().clamp(min=1e-30)).clamp(SMALLEST, LARGEST) for n in residuals
        }
        return new, gamma
    by = groups(tuple(residuals), tune, curvature)
    sums: dict[str, list[float]] = {}
    for name, group in by.items():
        entry = sums.setdefault(group, [0.0, 0.0])
        entry[0] += float(effective[name].double().sum())
        entry[1] += float(residuals[name].double().square().sum())
    values = {group: min(max(max(g, 0.0) / max(s, 1e-30), SMALLEST), LARGEST) for group, (g, s) in sums.items()}
    first = next(iter(residuals.values()))
    return {n: torch.tensor(values[by[n]], dtype=first.dtype, device=first.device) for n in residuals}, gamma


class Tuned(NamedTuple):
    """Precisions, the factor of H, and the factor by which the noise variance grew."""

    precision: Weights
    scale: Tensor
    variance: float


def tune(
    curvature: Curvature,
    residuals: Weights,
    precision: Weights,
    scale: Tensor,
    how: Tune | None,
    squares: float | None = None,
    count: float = 0.0,
    iterations: int = 100,
    tolerance: float = 1e-4,
) -> Tuned:
    """The precisions `how` they are shared, and where `squares` (Σ residual²/σ² of the data) is given the noise, at the maximum.

    `count` is the number of targets. H belongs to the noise at the start: a variance v times as large has H/v. Ends where
    nothing moves by more than `tolerance`, relative; the variance moves by a factor of 20 at most.
    """
    variance = 1.0
    for _ in range(iterations):
        if how is not None:
            new, gamma = update(curvature, residuals, precision, scale / variance, how)
        else:
            effective = curvature.effective(precision, scale / variance)
            new, gamma = precision, float(sum(value.double().sum() for value in effective.values()))
        # γ weights are spent on the fit: RSS/(N − γ) is unbiased where RSS/N is not
        before, variance = (variance, variance if squares is None else min(max(squares / max(count - gamma, 1.0), 0.05), 20.0))
        # on the log scale, on which all precisions are alike
        moved = max(float((new[n] / precision[n]).log().abs().max()) for n in new) + abs(math.log(variance / before))
        precision = new
        if moved < tolerance:
            break
    return Tuned(precision, scale / variance, variance)
