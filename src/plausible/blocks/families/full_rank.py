"""One Gaussian over all random weights, with a full covariance."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, FlatFamily, positive_lower, raw_lower, sloping, standard_log_density
from plausible.blocks.variational import HALF_LOG_2PIE
from plausible.core.weights import Weights


class FullRankFamily(FlatFamily):
    """w = μ + L ε, ε ~ N(0, I): N(μ, L Lᵀ) with L lower triangular, its diagonal softplus of that of the parameter `factor` [P, P].

    H(q) = Σ log L_ii + P/2 · log 2πe. Memory P² for the factor; a draw P² multiplications.
    """

    gaussian: ClassVar[bool] = True

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:  # noqa: ARG002
        """The weights, and `scale` on the diagonal."""
        mean = self.vector(weights)
        return {"mean": mean, "factor": raw_lower(torch.diag(torch.full_like(mean, scale)))}

    def factor(self, parameters: Weights) -> Tensor:
        """L [P, P]."""
        return positive_lower(parameters["factor"])

    def noise(self, parameters: Weights) -> Weights:
        """ε [P]."""
        return {"noise": parameters["mean"]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """μ + L ε."""
        return Drawn(self.named(parameters["mean"] + self.factor(parameters) @ noise["noise"]))

    def entropy(self, parameters: Weights) -> Tensor:
        """Σ log L_ii + P/2 · log 2πe."""
        return F.softplus(parameters["factor"].diagonal()).log().sum() + HALF_LOG_2PIE * self.size

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        """Log N(w; μ, L Lᵀ)."""
        residual = (self.vector(weights) - parameters["mean"])[:, None]
        factor = self.factor(parameters)
        white = torch.linalg.solve_triangular(factor, residual, upper=False)
        return standard_log_density(white) - factor.diagonal().log().sum()

    def landing(self, parameters: Weights, drawn: Drawn, noise: Weights) -> Tensor:
        """Log N(ε; 0, I) − Σ log L_ii, with the slope −L⁻ᵀε.

        From the noise itself: the way back from the weights, L⁻¹(w − μ), loses all digits where L is badly conditioned, as
        triangular matrices with random entries are.
        """
        own, factor = noise["noise"], self.factor(parameters).detach()
        slope = -torch.linalg.solve_triangular(factor.T, own[:, None], upper=True).squeeze(1)
        value = standard_log_density(own) - factor.diagonal().log().sum()
        return sloping(value, self.named(slope), drawn.weights)

    def means(self, parameters: Weights) -> Weights:
        return self.named(parameters["mean"])

    def scales(self, parameters: Weights) -> Weights:
        """The roots of the diagonal of L Lᵀ."""
        return self.named(self.factor(parameters).square().sum(1).sqrt())

    def covariance(self, parameters: Weights) -> Tensor:
        """L Lᵀ [P, P], in the order of the flattened weights."""
        factor = self.factor(parameters)
        return factor @ factor.T
