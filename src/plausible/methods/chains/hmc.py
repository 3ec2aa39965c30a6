"""Hamiltonian Monte Carlo: trajectories of Hamilton's equations as proposals, accepted by their energy error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from plausible.blocks.chains.adaptation import Adaptation, Slope
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Kind, gradients, integrate, scheme_for
from plausible.core.serialise import check_number, register
from plausible.methods.chains.adapting import adapted_after, begin_adapting, check_adapting, chosen, divergent, energy
from plausible.methods.chains.base import Chains, ChainState, check_count


@register
@dataclass(frozen=True)
class HMC(Chains):
    """p ~ N(0, M),  (q*, p*) = L leapfrogs of size ε from (q, p),  accepted with min{1, exp(H(q, p) − H(q*, p*))}

    Hamiltonian Monte Carlo with trajectories of a given number of steps (Duane et al. 1987; Neal 1996).

    H(q, p) = −log p(q, D) + ½pᵀM⁻¹p. Each transition takes L steps of an `integrator`, L drawn anew between (1 −
    `jitter`) and (1 + `jitter`) times `leapfrogs`, which keeps trajectories from closing on themselves. In warm-up the
    step size of each chain is found by dual averaging for an acceptance of `target_acceptance`, and the masses
    (`metric`: "diag", "dense", "lowrank", "unit") from windows of draws and gradients. `adapt=False` keeps `step_size`
    and unit masses from the first transition on. Cost of a transition: L gradients over all data, for all chains at
    once.
    """

    leapfrogs: int = 50
    jitter: float = 0.4
    target_acceptance: float = 0.8
    metric: Kind = "diag"
    integrator: str = "leapfrog"
    step_size: float | None = None
    adapt: bool = True

    slopes: ClassVar[Slope] = "each"
    name: ClassVar[str] = "hmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("HMC", "leapfrogs", self.leapfrogs, 1)
        check_number(self, "jitter", at_least=0.0, below=1.0)
        check_adapting(self)
        scheme_for(self.integrator)

    @classmethod
    def conforming(cls) -> HMC:
        """Many short chains."""
        return cls(draws=150, chains=16, warmup=60, leapfrogs=5)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size, and the unit metric."""
        return begin_adapting(self, target, state)

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """One trajectory of all chains."""
        adapted: Adaptation = state.adaptation
        spread = 2 * float(state.uniform(2, state.position[0, :1])) - 1
        count = max(1, math.floor(self.leapfrogs * (1 + self.jitter * spread) + 0.5))
        start = Point(
            state.position,
            adapted.metric.momentum(state.normal(1, state.position)),
            state.log_likelihood,
            state.log_prior,
            state.gradient,
        )
        end = integrate(target, adapted.metric, start, adapted.step, count, self.integrator)
        before, after = energy(target, adapted, start), energy(target, adapted, end)
        level = state.uniform(3, state.log_prior).log()
        new, acceptance = chosen(state, end, before - after, level)
        statistics = {
            "acceptance": acceptance,
            "divergent": divergent(before - after),
            "step_size": adapted.step.clone(),
            "leapfrogs": torch.full_like(acceptance, count * gradients(self.integrator)),
            "energy": before,
        }
        return adapted_after(self, target, new._replace(statistics=statistics), state)
