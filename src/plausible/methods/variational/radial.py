"""Radial variational inference: a uniform direction and a normal radius, so that draws stay near the mean in many dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from plausible.blocks.families.radial import RadialFamily
from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.engine.method import Traits
from plausible.methods.variational.reparameterised import Reparameterised

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class Radial(Reparameterised):
    """w = μ + σ∘(ε/|ε|)·r,  ε ~ N(0, I), r ~ N(0, 1),  maximising  E_q log p(D | w) − KL(q ‖ p)

    Weights around their mean in a random direction at a normal distance, for each weight tensor (Farquhar, Osborne & Gal 2020).

    A Gaussian in d dimensions lies at about √d scales from its mean; here a draw is as near as a single normal number is to 0.
    Entropy and log density are exact, Jacobian included. `posterior.scales` are those of single weights, σ/√d; `initial_scale`
    is their start. Cost: that of `MeanField(estimator="weights")`.
    """

    name: ClassVar[str] = "radial"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits,
        bias="uncorrelated weights: each scale is that of the weight given all others; heavy tails in many dimensions",
    )

    def family(self, weights: Weights) -> RadialFamily:
        return RadialFamily(weights)

    @classmethod
    def conforming(cls) -> Radial:
        return cls(epochs=250, batch_size=None, lr=Cosine(0.1), samples=4, antithetic=True, initial_scale=0.1)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        # the bound of a quadratic log joint is −½ Σ Λ_ii σ_i²/d + Σ log σ_i up to a constant: that of independent Gaussians
        return problem.mean_field()
