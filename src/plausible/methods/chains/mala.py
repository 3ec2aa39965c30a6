"""The Metropolis-adjusted Langevin algorithm: a step up the gradient with noise, accepted or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plausible.blocks.chains.adaptation import Adaptation, Slope
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Kind, integrate
from plausible.core.serialise import register
from plausible.methods.chains.adapting import adapted_after, begin_adapting, check_adapting, chosen, divergent, energy
from plausible.methods.chains.base import Chains, ChainState


@register
@dataclass(frozen=True)
class MALA(Chains):
    """w' = w + (ε²/2) A ∇ log p(w, D) + ε A^½ z, z ~ N(0, I), accepted with min{1, p(w', D) q(w | w') / (p(w, D) q(w' | w))}

    Langevin steps corrected by Metropolis' rule, so that their law is exact (Rossky, Doll & Friedman 1978; Roberts &
    Tweedie 1996).

    One leapfrog step from a fresh momentum p ~ N(0, A⁻¹) is such a proposal, and the ratio of densities is its change of
    energy. In warm-up each chain's ε is set by dual averaging to `target_acceptance` (0.574 is best in many dimensions;
    Roberts & Rosenthal 1998), and the preconditioner A (`metric`: "diag", "dense", "lowrank", "unit") becomes the
    covariance of the draws, in growing windows. `adapt=False` keeps `step_size` and A = I. Cost: one gradient over all data
    a transition, and of the order of P^⅓ of them for an independent draw.
    """

    target_acceptance: float = 0.574
    metric: Kind = "diag"
    step_size: float | None = None
    adapt: bool = True

    slopes: ClassVar[Slope] = "each"
    name: ClassVar[str] = "mala"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adapting(self)

    @classmethod
    def conforming(cls) -> MALA:
        """Many short chains."""
        return cls(draws=120, chains=64, warmup=100)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size, and A = I."""
        return begin_adapting(self, target, state)

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """One leapfrog from a fresh momentum, taken or not."""
        adapted: Adaptation = state.adaptation
        momentum = adapted.metric.momentum(state.normal(0, state.position))
        start = Point(state.position, momentum, state.log_likelihood, state.log_prior, state.gradient)
        end = integrate(target, adapted.metric, start, adapted.step, 1)
        before, after = energy(target, adapted, start), energy(target, adapted, end)
        new, acceptance = chosen(state, end, before - after, state.uniform(1, before).log())
        statistics = {
            "acceptance": acceptance,
            "divergent": divergent(before - after),
            "step_size": adapted.step.clone(),
            "leapfrogs": torch.ones_like(before),
            "energy": before,
        }
        return adapted_after(self, target, new._replace(statistics=statistics), state)
