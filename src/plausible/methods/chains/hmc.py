"""Hamiltonian Monte Carlo: trajectories of Hamilton's equations as proposals, accepted by their energy error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from plausible.blocks.chains.density import Density
from plausible.blocks.chains.integrators import Kind, scheme_for
from plausible.core.serialise import check_number, register
from plausible.methods.chains.base import Adapting, ChainState, check_counts


@register
@dataclass(frozen=True)
class HMC(Adapting):
    """p ~ N(0, M),  (q*, p*) = L leapfrogs of size ε from (q, p),  accepted with min{1, exp(H(q, p) − H(q*, p*))}

    Hamiltonian Monte Carlo with trajectories of a given number of steps (Duane et al. 1987; Neal 1996).

    H(q, p) = −log p(q, D) + ½pᵀM⁻¹p. L is drawn anew between (1 − `jitter`) and (1 + `jitter`) times `leapfrogs`, which keeps
    trajectories from closing on themselves. In warm-up each chain's step size is found for an acceptance of
    `target_acceptance`, and the masses (`metric`: "diag", "dense", "lowrank", "unit") from windows of draws and gradients.
    `adapt=False` keeps `step_size` and unit masses. Cost of a transition: L gradients over all data.
    """

    leapfrogs: int = 50
    jitter: float = 0.4
    target_acceptance: float = 0.8
    metric: Kind = "diag"
    integrator: str = "leapfrog"
    step_size: float | None = None
    adapt: bool = True

    name: ClassVar[str] = "hmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, leapfrogs=1)
        check_number(self, "jitter", at_least=0.0, below=1.0)
        scheme_for(self.integrator)

    @classmethod
    def conforming(cls) -> HMC:
        return cls(draws=25, chains=100, warmup=60, leapfrogs=5)

    def transition(self, target: Density, state: ChainState) -> ChainState:
        # one length for all chains, which move in step
        spread = 2 * float(state.uniform(2, state.position[0, :1])) - 1
        count = max(1, math.floor(self.leapfrogs * (1 + self.jitter * spread) + 0.5))
        noise, level = state.normal(1, state.position), state.uniform(3, state.log_prior)
        new, _, _ = self.trajectory(target, state, state.adaptation, noise, level, count)
        return self.learned(target, new, state)
