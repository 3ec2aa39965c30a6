"""Tempered sequential Monte Carlo: a cloud of particles carried from the prior to the posterior, with the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plausible.blocks.chains.tempering import ladder, next_power
from plausible.core.serialise import register
from plausible.methods.chains.annealed import Annealed
from plausible.methods.chains.base import check_counts


@register
@dataclass(frozen=True)
class SMC(Annealed):
    """log p(D) ≈ Σ_t log mean_i p(D | w_i)^(β_t − β_{t−1}),  w_i ~ p(D | w)^β_{t−1} p(w)   (Del Moral, Doucet & Jasra 2006)

    Tempered sequential Monte Carlo: particles walk from prior to posterior, are weighted, resampled and moved.

    The next power β is chosen so that a share `ess` of the weights stays effective, up to `limit` temperatures; `temperatures`
    takes that many instead, β_k = (k/K)⁵, and resamples when the share falls below `ess`. Powers, step sizes and masses come
    from `pilots`, so that exp(log_evidence) is unbiased. Cost: temperatures × (1 + moves × leapfrogs) gradients of all
    particles and pilots.
    """

    temperatures: int | None = None
    ess: float = 0.7
    limit: int = 1000

    name: ClassVar[str] = "smc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperatures is not None:
            check_counts(self, temperatures=1)
        check_counts(self, limit=1)
        if not 0 < self.ess < 1:
            raise ValueError(f"SMC: ess is a share of the particles, in (0, 1), got {self.ess!r}")

    @property
    def longest(self) -> int:
        return self.limit if self.temperatures is None else self.temperatures

    def next_beta(self, beta: float, count: int, log_likelihood: Tensor) -> float:
        if count + 1 >= self.longest:
            return 1.0
        if self.temperatures is not None:
            return float(ladder(self.temperatures)[count + 1])
        return next_power(log_likelihood, beta, self.ess)

    def resamples(self, share: float, beta: float) -> bool:
        """Each time where powers are chosen, else when too few are effective; and at the end."""
        # powers that were chosen for a share of effective weights are meant to be resampled at once
        return self.temperatures is None or share < self.ess or beta >= 1

    @classmethod
    def conforming(cls) -> SMC:
        return cls(particles=1000, pilots=200, moves=4)
