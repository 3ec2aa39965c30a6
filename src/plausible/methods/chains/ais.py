"""Annealed importance sampling: independent paths from the prior to the posterior, with weights that give the evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density
from plausible.blocks.chains.tempering import SPACINGS, Spacing, ladder, log_mean, relative_variance, systematic
from plausible.core import random
from plausible.core.serialise import register
from plausible.engine.method import Run
from plausible.methods.chains.annealed import Annealed
from plausible.methods.chains.base import check_counts


@register
@dataclass(frozen=True)
class AnnealedImportance(Annealed):
    """p(D) ≈ mean_i Π_t p(D | w_{t−1,i})^(β_t − β_{t−1}),  w_t ~ T_t(w_{t−1}, ·),  w_0 ~ p(w)   (Neal 2001)

    Annealed importance sampling: independent paths over many small steps from prior to posterior, never resampled on the way.

    `temperatures` powers of the likelihood, spaced by `spacing` ("power": (k/K)⁵; "sigmoid"; "geometric"), with `moves`
    Hamiltonian moves at each. A path's weight corrects for what its moves did not mix, so that exp(log_evidence) is unbiased
    however few they are. Draws are resampled once, by the weights. Cost: temperatures × (1 + moves × leapfrogs) gradients of
    all particles and pilots.
    """

    particles: int = 256
    moves: int = 1
    pilots: int = 64
    temperatures: int = 500
    spacing: Spacing = "power"

    name: ClassVar[str] = "ais"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, temperatures=1)
        if self.spacing not in SPACINGS:
            raise ValueError(
                f"AnnealedImportance: spacing must be one of {', '.join(map(repr, SPACINGS))}, got {self.spacing!r}"
            )

    @property
    def longest(self) -> int:
        return self.temperatures

    def next_beta(self, beta: float, count: int, log_likelihood: Tensor) -> float:
        return float(ladder(self.temperatures, self.spacing)[count + 1])

    def resamples(self, share: float, beta: float) -> bool:
        return False

    def upper_bound(self, posterior: Any, seed: int = 0) -> tuple[float, float]:
        """Log p(D) ≈ −log mean_i Π_t p(D | w_t,i)^(β_{t−1} − β_t), w_K ~ p(w | D), and its standard error: from above.

        Paths lead from draws of the posterior back to the prior; E W = 1/p(D), so that by Jensen's inequality the estimate lies
        above log p(D) on average, as `log_evidence` lies below: together they bracket it (Grosse, Ghahramani and Adams 2015). It
        holds as far as the draws follow the posterior. `posterior` is that of chains, with the data they were fitted to and
        `particles` + `pilots` draws at least; the standard error takes them for independent. Cost: that of a fit by this method.
        """
        # the bound is on the evidence of the data that the draws were fitted to, and of no others
        data = getattr(posterior, "data", None)
        if data is None:
            raise ValueError(
                "AnnealedImportance: posterior must be one of chains (HMC, NUTS, …) that still holds its data, got "
                f"{posterior!r}: fit it in this process, files hold no data"
            )
        if len(posterior) < self.rows:
            raise ValueError(
                f"AnnealedImportance: posterior has {len(posterior):,} draws, and particles and pilots start at {self.rows:,}: "
                "posterior.extend(…), or take fewer"
            )
        target = Run.alone(self, replace(posterior.model, num_data=data.num_data), data, seed).prepared
        return descend(self, target, target.flatten(posterior.weights(self.rows, seed)), seed)

    @classmethod
    def conforming(cls) -> AnnealedImportance:
        # Weights that are nearly equal
        return cls(particles=800, pilots=100, temperatures=60)


def descend(method: AnnealedImportance, target: Density, position: Tensor, seed: int = 0) -> tuple[float, float]:
    """Log of the normalising constant, from above, and its standard error: paths from draws `[rows, P]` at β = 1 down to β = 0.

    Each power's moves come before its weight, the forward paths run backwards; pilots are resampled, particles never.
    """
    particles, betas = method.particles, ladder(method.temperatures, method.spacing).flip(0).tolist()
    with torch.no_grad(), random.isolated(seed, position.device):
        state = method.started(target, position, random.key(seed, device=position.device))
        offsets = random.uniform(random.fold(state.key, 0), 0, state.trace.new_empty(len(betas)))
        for number, (here, below) in enumerate(pairwise(betas)):
            state = state._replace(beta=torch.full_like(state.beta, here), passed=state.passed + 1)
            # run backwards: moves first, at the power that the draws follow, then the weight of the step down
            state = method._moved(target, state, torch.zeros_like(state.trace[0]))
            gained = (below - here) * state.log_likelihood
            rows = torch.arange(method.rows, device=position.device)
            if method.pilots:
                rows[particles:] = particles + systematic(gained[particles:], offsets[number])
            state = state._replace(
                position=state.position[rows],
                log_likelihood=state.log_likelihood[rows],
                log_prior=state.log_prior[rows],
                log_weights=state.log_weights + gained[:particles],
            )
    return -float(log_mean(state.log_weights)), relative_variance(state.log_weights, state.ancestors) ** 0.5
