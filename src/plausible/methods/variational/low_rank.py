"""Low-rank variational inference: a diagonal covariance and a few directions shared by all random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from plausible.blocks.families.gaussian import LowRankFamily
from plausible.blocks.variational import maximise
from plausible.core import random
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights, num_elements
from plausible.engine.method import Traits
from plausible.methods.variational.reparameterised import COPIES, Reparameterised

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class LowRank(Reparameterised):
    """q(w) = N(μ, D² + U Uᵀ),  w = μ + d∘ε + U z,  maximising  E_q log p(D | w) − KL(q ‖ p)

    One Gaussian over all random weights, its covariance a diagonal and `rank` directions (Ong, Nott & Smith 2018).

    Between `MeanField` (rank 0) and `FullRank`. The entropy is exact, by the determinant lemma. Means start at the module's
    weights, d at `initial_scale`, U at short random directions. Cost: P·(rank + 2) numbers for P random weights, P·rank
    multiplications a draw and P·rank² for the entropy, beside the `samples` forward and backward passes.
    """

    rank: int = 10

    name: ClassVar[str] = "low-rank"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits, bias="correlations in `rank` directions only, the others are left out"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "rank", at_least=1)

    def family(self, weights: Weights) -> LowRankFamily:
        return LowRankFamily(weights, self.rank)

    def memory(self, weights: Weights) -> tuple[int, str]:
        size, width = num_elements(weights), max(w.element_size() for w in weights.values())
        words = f"{self.rank:,} directions of {size:,} random weights (lower rank, or where='last' infers fewer)"
        return COPIES * width * size * self.rank, words

    @classmethod
    def conforming(cls) -> LowRank:
        # two directions make any covariance of three weights
        return cls(rank=2, epochs=200, batch_size=None, lr=Cosine(0.1), initial_scale=0.1, landing=True)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The exact mean, and the D² + U Uᵀ that maximises ½ log det S − ½ tr ΛS: the exact covariance from rank dims − 1 on."""
        mean, covariance = problem.posterior()
        # a diagonal and d − 1 directions make any covariance of d weights
        if self.rank >= len(mean) - 1:
            return mean, covariance
        precision = torch.linalg.inv(covariance)
        family = self.family({"w": mean})

        def bound(theta: Weights) -> Tensor:
            spread = family.covariance(theta)
            return 0.5 * torch.logdet(spread) - 0.5 * (precision * spread).sum()

        start = family.start({"w": mean}, float(precision.diagonal().rsqrt().mean()), random.key(0))
        return mean, family.covariance(maximise(bound, start))
