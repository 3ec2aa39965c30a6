"""Microcanonical Langevin Monte Carlo: motion at one speed along the gradient, its direction refreshed at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plausible.core.serialise import register
from plausible.methods.chains.microcanonical import Microcanonical


@register
@dataclass(frozen=True)
class MCLMC(Microcanonical):
    """dw = u dt, du = (I − uuᵀ)(∇ log p(w, D)/(P − 1) dt + η dW), |u| = 1

    Langevin motion at constant speed, for which p(w | D) is stationary; steps are not corrected (Robnik et al. 2023).

    A transition is one step ε of an `integrator`, kicks of the direction and drifts of the weights in turn, and a partial
    refreshment of u by noise that makes it forget itself over a length L. In warm-up each chain's ε is set so that the
    variance of the energy error of a step is `energy_variance` per weight (from `initial_energy_variance` on, where that is
    given), then coordinates are scaled by their standard deviations (`metric="diag"`), and L becomes 0.4 autocorrelation
    times. `step_size` and `length` given are kept. No step is refused, hence a bias that falls with ε: relative to
    variances, about the root of `energy_variance`. Statistics: `energy` is the energy error accumulated so far. Cost: one
    or two gradients a transition, whatever P; keep every `thin`-th.
    """

    name: ClassVar[str] = "mclmc"

    @classmethod
    def conforming(cls) -> MCLMC:
        """Steps so small that the bias drowns in the noise."""
        return cls(draws=50, chains=128, warmup=300, thin=3, energy_variance=1e-5, initial_energy_variance=0.1)
