"""Natural-gradient steps of a Gaussian with independent weights: pure updates of mean, momentum and curvature.

    q(w) = N(m, σ²),   σ² = 1/(λ s),   s = h + δ

λ is the effective number of examples (N over the temperature), h the curvature of the mean loss per example, δ the precision of
the prior over N. The natural gradients of the evidence bound with respect to mean and precision give (Khan & Rue 2023, "The
Bayesian learning rule")

    g ← β₁ g + (1 − β₁) ĝ
    s ← s · ρ(u),   u = (1 − β₂)(ĥ + δ − s)/s
    m ← m − lr · (g/(1 − β₁ᵗ) + δ (m − centre)) / (s + damping)

with ĝ the gradient of the mean loss at w = m + σε and ĥ an estimate of its second derivative there. IVON (Shen et al. 2024,
"Variational learning is effective for large deep networks") takes ĥ = ĝ ε/σ and ρ(u) = 1 + u + ½u², which is h ← β₂h + (1 −
β₂)ĥ + ½(1 − β₂)²(h − ĥ)²/(h + δ). VOGN (Khan et al. 2018, "Fast and scalable Bayesian deep learning by weight-perturbation in
Adam") takes a Gauss-Newton estimate and ρ(u) = 1 + u. The sum s is what is kept, not h: it is multiplied by a number of at
least ½, so that it stays positive in floating point too.

Everything here is elementwise, of any shape, and runs in `torch.func`, `torch.compile` and CUDA graphs. Mean, gradient and
curvature of one weight may differ in type; the arithmetic is that of the curvature, which `wide` makes float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from plausible.core.priors import FanIn, Flat, Gaussian, Prior
from plausible.core.priors.composed import _fan_in

Positive = Callable[[Tensor, Tensor, float], Tensor]


def wide(weight: Tensor) -> torch.dtype:
    """The type in which momentum and curvature of a weight are kept: its own, and float32 for half precision."""
    return torch.promote_types(weight.dtype, torch.float32)


def deviation(curvature: Tensor, ess: Tensor | float) -> Tensor:
    """σ = 1/√(λ s)."""
    return (ess * curvature).rsqrt()


def price(noise: Tensor, gradient: Tensor, curvature: Tensor, ess: Tensor | float) -> Tensor:
    """ĥ = ε ĝ/σ = ε ĝ √(λ s), whose mean over ε ~ N(0, 1) is that of the second derivative over q (Price 1958; Stein)."""
    return noise * gradient * (ess * curvature).sqrt()


def retract(curvature: Tensor, target: Tensor, rate: float) -> Tensor:
    """Return s (1 + u + ½u²) with u = rate·(target − s)/s: at least s/2, whatever the target (Lin, Schmidt & Khan 2020).

    The square adds about ½·rate·Var[target]/s to the stationary value: of the order of 1 − β₂.
    """
    u = rate * (target - curvature) / curvature
    # = s((1 + u)² + 1)/2 ≥ s/2
    return curvature * (1 + u + 0.5 * u * u)


def blend(curvature: Tensor, target: Tensor, rate: float) -> Tensor:
    """Return s (1 + u) = (1 − rate) s + rate·target, and s/2 where a negative estimate would leave less."""
    u = rate * (target - curvature) / curvature
    return curvature * (1 + u).clamp_min(0.5)


def bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 − βᵗ for t updates, by expm1: 0-d float32, 1 for β = 0."""
    return -torch.expm1(step.float() * math.log(beta)) if beta else torch.ones_like(step, dtype=torch.float32)


def descend(
    mean: Tensor,
    momentum: Tensor,
    curvature: Tensor,
    gradient: Tensor,
    estimate: Tensor,
    *,
    lr: Tensor | float,
    correction: Tensor | float,
    beta1: float,
    beta2: float,
    decay: Tensor | float,
    centre: float = 0.0,
    damping: float = 0.0,
    clip_radius: float = math.inf,
    positive: Positive = retract,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the three equations above: the new mean, momentum and curvature of one weight.

    `gradient` is ĝ and `estimate` is ĥ, both without the prior; `decay` is δ and `centre` where the prior is centred.
    `correction` is 1 − β₁ᵗ with this step counted. `clip_radius` bounds each element of the Newton step before the rate.
    """
    momentum = beta1 * momentum + (1 - beta1) * gradient.to(momentum.dtype)
    # before the mean moves: the step is scaled by what is known now
    curvature = positive(curvature, estimate.to(curvature.dtype) + decay, 1 - beta2)
    # half-precision means would lose small steps
    here = mean.to(curvature.dtype)
    move = (momentum / correction + decay * (here - centre)) / (curvature + damping)
    # no operation at all for the default
    if clip_radius < math.inf:
        move = move.clamp(-clip_radius, clip_radius)
    return (here - lr * move).to(mean.dtype), momentum, curvature


class Quadratic(NamedTuple):
    """log p(w) = −½ precision·(w − centre)² + constant."""

    precision: float
    centre: float


def quadratic(prior: Prior, name: str, weight: Tensor) -> Quadratic | None:
    """Precision and centre of the prior of one weight where it is Gaussian or flat (also by patterns and fan-in), else None."""
    rule = prior.rule(name)
    if isinstance(rule, FanIn):
        base, size = quadratic(rule.prior, name, weight), _fan_in(name, weight)
        return None if base is None else Quadratic(base.precision * size, base.centre / math.sqrt(size))
    if isinstance(rule, Flat):
        return Quadratic(0.0, 0.0)
    if isinstance(rule, Gaussian):
        return Quadratic(rule.scale**-2, rule.loc)
    return None if rule.precision is None else Quadratic(rule.precision, 0.0)
