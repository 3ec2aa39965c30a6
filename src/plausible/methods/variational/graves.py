"""Graves' variational inference of 2011: mean-field Gaussians whose prior's mean and scale follow the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.methods.variational.independent import Independent

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class Graves(Independent):
    """max over q, m, s of  E_q log p(D | w) − KL(Π N(μ_i, σ_i²) ‖ N(m, s²)):  m = mean(μ),  s² = mean(σ² + (μ − m)²)

    Practical variational inference (Graves 2011): `MeanField` with sampled weights and one prior N(m, s²) for all of them, whose
    mean and variance take their best values, in closed form, at every step.

    The prior given to `fit` must be a centred Gaussian and is replaced. The bound is then, up to a sign, the description length of
    data and weights, with the two numbers of the prior sent for free. Graves estimated the gradient for σ² by squared gradients of
    the loss; here it is the exact reparameterised one, of the same objective. Cost: as `MeanField`.
    """

    estimator: Literal["weights", "local", "flipout"] = "weights"
    empirical_bayes: bool | Literal["shared"] = "shared"

    name: ClassVar[str] = "graves"

    @classmethod
    def conforming(cls) -> Graves:
        return cls(epochs=800, batch_size=None, lr=Cosine(0.05), samples=2, estimator="local", initial_scale=0.1)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The fixed point: q is the mean-field optimum under N(m, s²), and m, s² are the moments of q's weights."""
        x, y, w = problem.data()
        data, pull = x.T @ (w[:, None] * x) / problem.noise**2, (x.T @ (w[:, None] * y) / problem.noise**2).squeeze(1)
        centre, variance = torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype)
        for _ in range(2000):
            precision = data + torch.eye(len(data), dtype=x.dtype) / variance
            mean = torch.linalg.solve(precision, pull + centre / variance)
            spread = 1 / precision.diagonal()
            centre, variance = mean.mean(), (spread + (mean - mean.mean()) ** 2).mean()
        return mean, torch.diag(spread)
