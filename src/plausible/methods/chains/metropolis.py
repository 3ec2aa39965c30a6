"""Random-walk Metropolis: Gaussian steps in the shape of the posterior, accepted or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation, Slope
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Metric
from plausible.core.serialise import register
from plausible.methods.chains.base import STATISTICS, Adapting, ChainState, taken

METRICS = ("diag", "dense", "unit")


@register
@dataclass(frozen=True)
class Metropolis(Adapting):
    """w' = w + s L z, z ~ N(0, I), accepted with probability min(1, p(w', D)/p(w, D))

    A random walk over the posterior (Metropolis et al. 1953), the baseline of all chains.

    In the warm-up each chain's scale s is set so that `target_acceptance` of the steps are taken (0.234 is best in many
    dimensions; Roberts, Gelman & Gilks 1997), and LLᵀ becomes the covariance of the draws ("dense") or its diagonal ("diag");
    `step_size` is the s to start from (None: 2.38/√P). Cost: one likelihood a transition, and of the order of P transitions
    for an independent draw.
    """

    target_acceptance: float = 0.234
    metric: Literal["diag", "dense", "unit"] = "diag"
    step_size: float | None = None
    adapt: bool = True

    slopes: ClassVar[Slope] = "none"  # no gradients are taken
    name: ClassVar[str] = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric not in METRICS:
            raise ValueError(f"Metropolis: metric must be one of {', '.join(map(repr, METRICS))}, got {self.metric!r}")

    def begin(self, target: Density, state: ChainState) -> ChainState:
        start = adaptation.begin(self.schedule, state.position, self.step_size or _best(target.size))
        return state._replace(gradient=torch.zeros_like(state.position), adaptation=start, statistics=state.no_statistics())

    def transition(self, target: Density, state: ChainState) -> ChainState:
        now: Adaptation = state.adaptation
        noise = now.metric.velocity(now.metric.momentum(state.normal(0, state.position)))  # M⁻¹p has covariance M⁻¹ = LLᵀ
        position = state.position + now.step.unsqueeze(-1).to(target.dtype) * noise
        # no momentum: the density alone decides, and the gradient stays what it was, zero
        end = Point(position, noise, *target.densities(position), state.gradient)
        before, after = (-target.value(there.log_likelihood, there.log_prior) for there in (state, end))
        gain, none = before - after, torch.zeros_like(before)
        acceptance = gain.clamp(max=0).exp()
        new = taken(state, end, state.uniform(1, before).log() < gain)
        statistics = dict(zip(STATISTICS, (acceptance, none, now.step.clone(), none + 1, before)))

        def afresh(_: Metric, step: Tensor) -> Tensor:
            return torch.full_like(step, 0.1 * _best(target.size))  # tries are drawn to ten times as much

        learned = adaptation.update(now, self.schedule, int(state.step), new.position, new.gradient, acceptance, afresh)
        return new._replace(adaptation=learned, statistics=statistics)

    @classmethod
    def conforming(cls) -> Metropolis:
        # many chains, as each of them mixes slowly
        return cls(draws=120, chains=128, warmup=120, metric="dense")


def _best(size: int) -> float:
    """The scale that is optimal on a Gaussian of known covariance."""
    return 2.38 / math.sqrt(size)
