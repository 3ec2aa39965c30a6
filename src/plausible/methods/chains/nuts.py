"""The no-U-turn sampler: trajectories of Hamilton's equations that end where they begin to turn back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from plausible.blocks.chains.adaptation import Adaptation, Slope, windows
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Kind
from plausible.blocks.chains.trees import block_length, explore, width
from plausible.core.serialise import register
from plausible.methods.chains.adapting import adapted_after, begin_adapting, check_adapting
from plausible.methods.chains.base import Chains, ChainState, check_count

EARLY_DEPTH = 8  # before the first masses are known trajectories are cut at 2⁸ − 1 leapfrogs: steps are still too small


@register
@dataclass(frozen=True)
class NUTS(Chains):
    """p ~ N(0, M),  (q*, p*) drawn by e^(−H) from a path that doubles until p♯_i · Σp ≤ 0 at an end of one of its halves

    The no-U-turn sampler (Hoffman & Gelman 2014), with the trees and the warm-up windows of Stan.

    H(q, p) = −log p(q, D) + ½pᵀM⁻¹p, p♯ = M⁻¹p. The path doubles forwards or backwards in time, at most `max_depth` times,
    until it or one of its subtrees turns round; states are drawn by their weights, later halves preferred (Betancourt 2017).
    In warm-up the step size of each chain is found by dual averaging for a mean acceptance of `target_acceptance`, and the
    masses (`metric`: "diag", "dense", "lowrank", "unit") from windows of draws and gradients. `adapt=False` keeps `step_size`
    and unit masses from the first transition on. Cost of a transition: up to 2^max_depth − 1 gradients over all data; chains
    that have finished theirs wait for the others.
    """

    target_acceptance: float = 0.8
    max_depth: int = 10
    metric: Kind = "diag"
    step_size: float | None = None
    adapt: bool = True

    slopes: ClassVar[Slope] = "each"
    name: ClassVar[str] = "nuts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("NUTS", "max_depth", self.max_depth, 1)
        if self.max_depth > 20:
            raise ValueError(f"NUTS: max_depth counts doublings, at most 20 (a million leapfrogs), got {self.max_depth}")
        check_adapting(self)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size, and the unit metric."""
        begun = begin_adapting(self, target, state)
        return begun._replace(statistics={**begun.statistics, "depth": torch.zeros_like(state.log_prior)})

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """One tree of every chain."""
        adapted: Adaptation = state.adaptation
        start = Point(
            state.position,
            adapted.metric.momentum(state.normal(1, state.position)),
            state.log_likelihood,
            state.log_prior,
            state.gradient,
        )
        length, depth = block_length(state.position), self._depth(state)
        uniform = state.uniform(2, state.log_prior.new_empty(len(state.log_prior), width(depth, length)))
        found = explore(target, adapted.metric, start, adapted.step, depth, uniform, length)
        statistics = {
            "acceptance": found.acceptance,
            "divergent": found.divergent,
            "step_size": adapted.step.clone(),
            "leapfrogs": found.leapfrogs,
            "energy": found.energy,
            "depth": found.depth,
        }
        new = state._replace(
            position=found.position,
            log_likelihood=found.log_likelihood,
            log_prior=found.log_prior,
            gradient=found.gradient,
            statistics=statistics,
        )
        return adapted_after(self, target, new, state)

    def _depth(self, state: ChainState) -> int:
        """Doublings of this transition at most."""
        ends = windows(self.warmup).ends
        early = self.adapt and ends and int(state.step) <= ends[0]
        return min(self.max_depth, EARLY_DEPTH) if early else self.max_depth

    @classmethod
    def conforming(cls) -> Self:
        """Many short chains: as many effective draws in a fraction of the time."""
        return cls(draws=40, chains=50, warmup=60)
