"""Concrete dropout: rates that are learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import scipy.optimize
import torch
from torch import Tensor

from plausible.blocks.unit_noise import Site, entropy
from plausible.core.model import Model
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights
from plausible.engine.method import Run
from plausible.methods.dropout.base import RATE, Sites, UnitDropout

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

RATE_OF = "rate of "
"""What the names of the rates' logits begin with, among the parameters."""


@register
@dataclass(frozen=True, kw_only=True)
class ConcreteDropout(UnitDropout):
    """max over θ, p of  E_m log p(D | θ diag(m)/(1 − p)) + log p(θ/√(1 − p)) + Σ K·H(p),  H(p) = −p log p − (1 − p) log(1 − p)

    Dropout whose rates are learned, one for each layer (Gal, Hron & Kendall 2017).

    Masks are relaxed in training, m = 1 − σ((logit p + logit u)/0.1), so that gradients reach the rates; K is the number of a
    layer's inputs. For a N(0, 1/l²) prior the bound is, up to a constant, −l²‖θ‖²/(2(1 − p)) + K·H(p) besides the data: rates
    fall as data come in. They start at `initial_rate`. `where` as for `MCDropout`; dropout that the network has of its own acts in
    training alone. Cost: one forward and one backward pass a step.
    """

    initial_rate: float = RATE

    name: ClassVar[str] = "concrete-dropout"
    kind: ClassVar[str] = "concrete"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "initial_rate", above=0, below=1)

    def parameters(self, model: Model, run: Run[Sites], key: Tensor) -> Weights:
        weights = super().parameters(model, run, key)
        logit = torch.logit(torch.tensor(self.initial_rate, dtype=torch.float64))
        return {**weights, **{RATE_OF + name: logit.to(weights[name]) for name in run.prepared.sites}}

    def rates(self, parameters: Weights, sites: dict[str, Site]) -> Weights:  # type: ignore[override]
        # never so near to 0 or 1 that a logarithm or a division is lost
        return {name: torch.sigmoid(parameters[RATE_OF + name]).clamp(1e-6, 1 - 1e-4) for name in sites}

    def objective_of_rates(self, rates: Weights, sites: dict[str, Site]) -> Tensor:  # type: ignore[override]
        return torch.stack([sites[name].units * entropy(rate) for name, rate in rates.items()]).sum()

    @classmethod
    def conforming(cls) -> ConcreteDropout:
        return cls(epochs=600, batch_size=None, lr=Cosine(0.2))

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The rate at which the bound is highest, and ridge regression there."""
        x, y, w = problem.data()
        data = x.T @ (w[:, None] * x) / problem.noise**2

        def loss(logit: float) -> float:
            alpha = math.exp(logit)
            rate = torch.tensor(alpha / (1 + alpha), dtype=torch.float64)
            mean, _ = self.noisy_ridge(problem, alpha)
            misfit = (w * (y.squeeze(1) - x @ mean).square()).sum() / problem.noise**2
            spread = alpha * (data.diagonal() * mean**2).sum() + (1 + alpha) * (mean**2).sum() / problem.scale**2
            return float(0.5 * (misfit + spread) - problem.inputs * entropy(rate))

        best = scipy.optimize.minimize_scalar(loss, bounds=(-15.0, 5.0), method="bounded")
        mean, covariance = self.noisy_ridge(problem, math.exp(best.x))
        # of so rare masks no number of draws has one
        return mean, covariance if best.x > -10 else torch.zeros_like(covariance)
