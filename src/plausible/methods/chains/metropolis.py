"""Random-walk Metropolis: Gaussian steps in the shape of the posterior, accepted or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Metric
from plausible.core.serialise import register
from plausible.methods.chains.adapting import check_adapting, chosen, warmup_of
from plausible.methods.chains.base import Chains, ChainState

METRICS = ("diag", "dense", "unit")


@register
@dataclass(frozen=True)
class Metropolis(Chains):
    """w' = w + s L z, z ~ N(0, I), accepted with probability min(1, p(w', D)/p(w, D))

    A random walk over the posterior (Metropolis et al. 1953), the baseline of all chains.

    In the warm-up each chain's scale s is set by dual averaging so that `target_acceptance` of the steps are taken (0.234
    is best in many dimensions; Roberts, Gelman & Gilks 1997), and LLᵀ becomes the covariance of the draws in growing
    windows, all of it ("dense") or its diagonal ("diag"); with "unit" it stays I. `step_size` is the s to start from; None:
    2.38/√P. No gradients are taken. Cost: one likelihood a transition, and of the order of P transitions for an independent
    draw.
    """

    target_acceptance: float = 0.234
    metric: Literal["diag", "dense", "unit"] = "diag"
    step_size: float | None = None
    adapt: bool = True

    name: ClassVar[str] = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_adapting(self)
        if self.metric not in METRICS:
            raise ValueError(f"Metropolis: metric must be one of {', '.join(map(repr, METRICS))}, got {self.metric!r}")

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """The unit shape; no gradient is kept."""
        start = adaptation.begin(warmup_of(self), state.position, self.step_size or _best(target.size))
        none = torch.zeros_like(state.log_prior)
        names = ("acceptance", "divergent", "step_size", "leapfrogs", "energy")
        return state._replace(
            gradient=torch.zeros_like(state.position), adaptation=start, statistics={name: none.clone() for name in names}
        )

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """One step of every chain."""
        now: Adaptation = state.adaptation
        noise = now.metric.velocity(now.metric.momentum(state.normal(0, state.position)))  # M⁻¹p has covariance M⁻¹ = LLᵀ
        position = state.position + now.step.unsqueeze(-1).to(target.dtype) * noise
        end = Point(position, noise, *target.densities(position), state.gradient)
        before, after = (-target.value(there.log_likelihood, there.log_prior) for there in (state, end))
        new, acceptance = chosen(state, end, before - after, state.uniform(1, before).log())
        none = torch.zeros_like(before)
        statistics = {
            "acceptance": acceptance,
            "divergent": none,
            "step_size": now.step.clone(),
            "leapfrogs": none + 1,
            "energy": before,
        }

        def afresh(_: Metric, step: Tensor) -> Tensor:
            return torch.full_like(step, 0.1 * _best(target.size))  # tries are drawn to ten times as much

        learned = adaptation.update(now, warmup_of(self), int(state.step), new.position, new.gradient, acceptance, afresh)
        return new._replace(adaptation=learned, statistics=statistics)

    @classmethod
    def conforming(cls) -> Metropolis:
        """Many chains, as each of them mixes slowly."""
        return cls(draws=120, chains=128, warmup=120, metric="dense")


def _best(size: int) -> float:
    """The scale that is optimal on a Gaussian of known covariance."""
    return 2.38 / math.sqrt(size)
