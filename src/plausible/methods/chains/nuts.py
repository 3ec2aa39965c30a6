"""The no-U-turn sampler: trajectories of Hamilton's equations that end where they begin to turn back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from plausible.blocks.chains.adaptation import Adaptation, windows
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Kind
from plausible.blocks.chains.trees import block_length, explore, width
from plausible.core.serialise import register
from plausible.methods.chains.base import STATISTICS, Adapting, ChainState, check_counts

EARLY_DEPTH = 8  # before the first masses are known trajectories are cut at 2⁸ − 1 leapfrogs: steps are still too small


@register
@dataclass(frozen=True)
class NUTS(Adapting):
    """p ~ N(0, M),  (q*, p*) drawn by e^(−H) from a path that doubles until p♯_i · Σp ≤ 0 at an end of one of its halves

    The no-U-turn sampler (Hoffman & Gelman 2014), with the trees and the warm-up windows of Stan.

    H(q, p) = −log p(q, D) + ½pᵀM⁻¹p, p♯ = M⁻¹p. The path doubles forwards or backwards, at most `max_depth` times; states are
    drawn by their weights, later halves preferred (Betancourt 2017). In warm-up each chain's step size is found for a mean
    acceptance of `target_acceptance`, and the masses (`metric`: "diag", "dense", "lowrank", "unit") from windows of draws and
    gradients. `adapt=False` keeps `step_size` and unit masses. Cost of a transition: up to 2^max_depth − 1 gradients; chains
    that have finished wait.
    """

    target_acceptance: float = 0.8
    max_depth: int = 10
    metric: Kind = "diag"
    step_size: float | None = None
    adapt: bool = True

    name: ClassVar[str] = "nuts"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, max_depth=1)
        if self.max_depth > 20:
            raise ValueError(f"NUTS: max_depth counts doublings, at most 20 (a million leapfrogs), got {self.max_depth}")

    def begin(self, target: Density, state: ChainState) -> ChainState:
        begun = super().begin(target, state)
        return begun._replace(statistics={**begun.statistics, "depth": torch.zeros_like(state.log_prior)})

    def transition(self, target: Density, state: ChainState) -> ChainState:
        adapted: Adaptation = state.adaptation
        momentum = adapted.metric.momentum(state.normal(1, state.position))
        start = Point(state.position, momentum, *state.evaluation)
        ends = windows(self.warmup).ends
        early = self.adapt and ends and int(state.step) <= ends[0]
        length, depth = block_length(state.position), min(self.max_depth, EARLY_DEPTH) if early else self.max_depth
        # all the chances that a tree can need at once, so that noise does not depend on how deep it grows
        uniform = state.uniform(2, state.log_prior.new_empty(len(state.log_prior), width(depth, length)))
        tree = explore(target, adapted.metric, start, adapted.step, depth, uniform, length)
        known = {**tree._asdict(), "step_size": adapted.step.clone()}
        new = state._replace(
            position=tree.position,
            log_likelihood=tree.log_likelihood,
            log_prior=tree.log_prior,
            gradient=tree.gradient,
            statistics={name: known[name] for name in (*STATISTICS, "depth")},
        )
        return self.learned(target, new, state)

    @classmethod
    def conforming(cls) -> Self:
        # many short chains: as many effective draws in a fraction of the time
        return cls(draws=15, chains=120, warmup=40)
