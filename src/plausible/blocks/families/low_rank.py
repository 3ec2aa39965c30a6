"""One Gaussian over all random weights, whose covariance is a diagonal and a few directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, FlatFamily
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core import random
from plausible.core.weights import Weights

SHARE = 0.1
"""Scale of the directions at the start, as a part of that of the diagonal: at 0 they would have no gradient."""


class LowRankFamily(FlatFamily):
    """w = μ + d∘ε + U z, ε ~ N(0, I_P), z ~ N(0, I_R): N(μ, D² + U Uᵀ) with d = softplus(rho) > 0 and U [P, R].

    With V = D⁻¹U and C = I + VᵀV = K Kᵀ:  log det(D² + U Uᵀ) = 2 Σ log d + 2 Σ log K_ii  (determinant lemma), and
    rᵀ(D² + U Uᵀ)⁻¹r = |e|² − |K⁻¹Vᵀe|², e = D⁻¹r  (Woodbury). Memory P (R + 2), time of a draw P·R, of the entropy P·R².
    """

    gaussian: ClassVar[bool] = True

    def __init__(self, like: Mapping[str, Tensor], rank: int):
        super().__init__(like)
        self.rank = rank

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        """The weights, `scale` on the diagonal, and short random directions."""
        mean = self.vector(weights)
        directions = random.normal(random.fold(key, 17), 0, mean.new_empty(self.size, self.rank))
        return {
            "mean": mean,
            "rho": inverse_softplus(torch.full_like(mean, scale)),
            "directions": directions * (SHARE * scale / math.sqrt(self.rank)),
        }

    def noise(self, parameters: Weights) -> Weights:
        """ε [P] and z [R]."""
        return {"own": parameters["mean"], "shared": parameters["directions"][0]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """μ + d∘ε + U z."""
        diagonal, shared = F.softplus(parameters["rho"]), parameters["directions"] @ noise["shared"]
        return Drawn(self.named(parameters["mean"] + diagonal * noise["own"] + shared))

    def _small(self, parameters: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """The diagonal d [P], V [P, R] and K [R, R]."""
        diagonal = F.softplus(parameters["rho"])
        ratio = parameters["directions"] / diagonal[:, None]
        inner = torch.eye(self.rank, dtype=ratio.dtype, device=ratio.device) + ratio.T @ ratio
        return diagonal, ratio, torch.linalg.cholesky_ex(inner, check_errors=False).L  # without waiting for the device

    def entropy(self, parameters: Weights) -> Tensor:
        """Σ log d + Σ log K_ii + P/2 · log 2πe."""
        diagonal, _, inner = self._small(parameters)
        return diagonal.log().sum() + inner.diagonal().log().sum() + HALF_LOG_2PIE * self.size

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        """Log N(w; μ, D² + U Uᵀ)."""
        diagonal, ratio, inner = self._small(parameters)
        white = (self.vector(weights) - parameters["mean"]) / diagonal
        along = torch.linalg.solve_triangular(inner, (ratio.T @ white)[:, None], upper=False)
        quadratic = white.square().sum() - along.square().sum()
        logs = diagonal.log().sum() + inner.diagonal().log().sum()
        return -0.5 * quadratic - logs - 0.5 * math.log(2 * math.pi) * self.size

    def means(self, parameters: Weights) -> Weights:
        return self.named(parameters["mean"])

    def scales(self, parameters: Weights) -> Weights:
        """√(d² + Σ_r U_r²)."""
        return self.named((F.softplus(parameters["rho"]).square() + parameters["directions"].square().sum(1)).sqrt())

    def covariance(self, parameters: Weights) -> Tensor:
        """D² + U Uᵀ [P, P], in the order of the flattened weights."""
        directions = parameters["directions"]
        return torch.diag(F.softplus(parameters["rho"]).square()) + directions @ directions.T
