"""Full-rank variational inference: one Gaussian over all random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from plausible.blocks.families.gaussian import FullRankFamily
from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.core.weights import Weights, num_elements
from plausible.engine.method import Traits
from plausible.methods.variational.reparameterised import COPIES, Reparameterised


@register
@dataclass(frozen=True)
class FullRank(Reparameterised):
    """q(w) = N(μ, L Lᵀ),  w = μ + L ε,  maximising  E_q log p(D | w) − KL(q ‖ p)

    One Gaussian with a full covariance over all random weights (full-rank ADVI, Kucukelbir et al. 2017).

    L is lower triangular with a positive diagonal (softplus). The entropy Σ log L_ii + P/2·log 2πe is exact. Means start at
    the module's weights, the diagonal at `initial_scale`. Cost: a matrix of P² numbers for P random weights, with gradient and
    optimiser state six of them, so it is for small networks or a few layers (`where="last"`); what does not fit is refused.
    """

    name: ClassVar[str] = "full-rank"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits, bias="a Gaussian: of other posteriors the closest one in KL(q ‖ p)"
    )

    def family(self, weights: Weights) -> FullRankFamily:
        return FullRankFamily(weights)

    def memory(self, weights: Weights) -> tuple[int, str]:
        size, width = num_elements(weights), max(w.element_size() for w in weights.values())
        words = f"a covariance factor of {size:,} × {size:,} for all random weights (where='last' infers fewer, "
        return COPIES * width * size * size, f"{words}LowRank and MatrixNormal store less)"

    @classmethod
    def conforming(cls) -> FullRank:
        return cls(epochs=200, batch_size=None, lr=Cosine(0.1), initial_scale=0.1, landing=True)
