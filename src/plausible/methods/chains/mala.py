"""The Metropolis-adjusted Langevin algorithm: a step up the gradient with noise, accepted or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plausible.blocks.chains.density import Density
from plausible.blocks.chains.integrators import Kind
from plausible.core.serialise import register
from plausible.methods.chains.base import Adapting, ChainState


@register
@dataclass(frozen=True)
class MALA(Adapting):
    """w' = w + (ε²/2) A ∇ log p(w, D) + ε A^½ z, z ~ N(0, I), accepted with min{1, p(w', D) q(w | w') / (p(w, D) q(w' | w))}

    Langevin steps corrected by Metropolis' rule, so that their law is exact (Rossky, Doll & Friedman 1978; Roberts &
    Tweedie 1996).

    One leapfrog step from p ~ N(0, A⁻¹) is such a proposal, and the ratio of densities its change of energy. In warm-up each
    chain's ε is set for `target_acceptance` (0.574 is best in many dimensions; Roberts & Rosenthal 1998), and A (`metric`)
    becomes the covariance of the draws. `adapt=False` keeps `step_size` and A = I. Cost: one gradient a transition, and of the
    order of P^⅓ for a draw.
    """

    target_acceptance: float = 0.574
    metric: Kind = "diag"
    step_size: float | None = None
    adapt: bool = True

    name: ClassVar[str] = "mala"

    @classmethod
    def conforming(cls) -> MALA:
        return cls(draws=50, chains=160, warmup=60)

    def transition(self, target: Density, state: ChainState) -> ChainState:
        noise, level = state.normal(0, state.position), state.uniform(1, state.log_prior)
        new, _, _ = self.trajectory(target, state, state.adaptation, noise, level, 1)
        return self.learned(target, new, state)
