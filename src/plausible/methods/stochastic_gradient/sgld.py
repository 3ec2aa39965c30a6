"""Stochastic-gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plausible.core.model import Joint
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.methods.stochastic_gradient.base import StochasticGradientChain, StochasticState

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class SGLD(StochasticGradientChain):
    """θ' = θ + (ε/2) ∇ log p(θ, D) + √(ε T) ξ,  ξ ~ N(0, I)   (Welling & Teh 2011)

    Langevin dynamics driven by minibatch gradients of the full log joint (likelihood scaled by N/B).

    `lr` is ε, in units of the *full-data* log joint, so good values fall like 1/N; "auto" finds a stable one during the
    burn-in, 4T/Var[∇̂], and keeps it. `temperature` T = 1 targets the posterior, below 1 a cold one. With a constant ε the law is
    biased: on a Gaussian of precision Λ, in full batches, its variance is Λ⁻¹(1 − εΛ/4)⁻¹; minibatches add at most
    (ε/4)·Var[∇̂]Λ⁻¹ to first order. Unstable above ε = 4/λ_max. Weights that `where` leaves out follow without noise. Parallel
    chains: `Ensemble(SGLD(…), members=4)`. Cost: one forward and one backward pass and P normal numbers a step.
    """

    name: ClassVar[str] = "sgld"

    def move(self, state: StochasticState, joint: Joint, noise: Weights, lr: Tensor, spread: Tensor) -> tuple[Weights, Any]:
        weights, drift = {}, 0.5 * lr
        for name, weight in state.weights.items():
            moved = weight + drift * joint.grads[name]
            weights[name] = moved + spread * noise[name] if name in noise else moved
        return weights, ()

    @classmethod
    def conforming(cls) -> SGLD:
        # Full batches, for which the bias is known exactly
        return cls(epochs=3600, batch_size=None, lr=3.2e-3, burn_in=0.05, thin=2)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """T·Λ⁻¹(I − εΛ/4)⁻¹ around the exact mean: the stationary law of full-batch steps of a constant size."""
        mean, covariance = problem.posterior()
        precision = problem.precision()
        biased = torch.linalg.inv(torch.eye(len(mean), dtype=mean.dtype) - self.constant_rate() / 4 * precision)
        return mean, self.temperature * covariance @ biased
