"""Annealed importance sampling: independent paths from the prior to the posterior, with weights that give the evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from plausible.methods.annealed import Annealed
from plausible.methods.chains import check_count
from plausible.sampling.tempering import SPACINGS, Spacing, ladder
from plausible.serialise import register


@register
@dataclass(frozen=True)
class AnnealedImportance(Annealed):
    """p(D) ≈ mean_i Π_t p(D | w_{t−1,i})^(β_t − β_{t−1}),  w_t ~ T_t(w_{t−1}, ·),  w_0 ~ p(w)   (Neal 2001)

    Annealed importance sampling: independent paths over many small steps from prior to posterior, never resampled on the way.

    There are `temperatures` powers of the likelihood, spaced by `spacing` ("power": (k/K)⁵; "sigmoid"; "geometric"), and `moves`
    Hamiltonian moves at each. A path's weight corrects for what its moves did not mix, so that exp(log_evidence) is unbiased
    however few they are. The posterior has `particles` draws, resampled once by the weights. See `Annealed` for moves and pilots.
    Cost: temperatures × (1 + moves × leapfrogs) gradients of all particles and pilots on all data.
    """

    particles: int = 256
    moves: int = 1
    pilots: int = 64
    temperatures: int = 500
    spacing: Spacing = "power"

    name: ClassVar[str] = "ais"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("AnnealedImportance", "temperatures", self.temperatures, 1)
        if self.spacing not in SPACINGS:
            raise ValueError(
                f"AnnealedImportance: spacing must be one of {', '.join(map(repr, SPACINGS))}, got {self.spacing!r}"
            )

    @property
    def longest(self) -> int:
        """`temperatures`."""
        return self.temperatures

    def next_beta(self, beta: float, count: int, log_likelihood: Tensor) -> float:  # noqa: ARG002
        """The next of the ladder."""
        return float(ladder(self.temperatures, self.spacing)[count + 1])

    def resamples(self, share: float, beta: float) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def quick(self) -> AnnealedImportance:
        """Few particles, few temperatures."""
        return replace(super().quick(), temperatures=min(self.temperatures, 8))

    @classmethod
    def conforming(cls) -> AnnealedImportance:
        """Weights that are nearly equal."""
        return cls(particles=800, pilots=100, temperatures=60)
