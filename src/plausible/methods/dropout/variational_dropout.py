"""Variational dropout: Gaussian noise proportional to each weight, whose variance is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from plausible.core.model import Model
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights, clone
from plausible.engine.method import Run, check_choice
from plausible.methods.dropout.weight_noise import TINY, Ways, WeightDropout

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

ALPHA = "log α of "
"""What the names of shared parameters begin with."""


@register
@dataclass(frozen=True, kw_only=True)
class VariationalDropout(WeightDropout):
    """max over θ, α of  E_q log p(D | w) − KL(q ‖ p),  q(w) = Π N(θ_i, α_i θ_i²),  p(w) ∝ 1/|w|

    Gaussian dropout whose variance is learned: one α for each layer, input or weight (Kingma, Salimans & Welling 2015).

    The prior on weights with two axes or more is log-uniform, so that the KL depends on α alone; one that is given to `fit` is
    taken instead. Other weights are trained as points. Noise enters the outputs of layers (local reparameterisation). `alpha`: one
    for each "layer", "neuron" (input) or "weight", starting at `initial_alpha`, with log α below `limit`. `kl`: "exact", or the
    approximation of "molchanov" or "kingma", the latter for α ≤ 1. Training ends as that of `MAP`, by held-out rows. Cost: two
    forward and backward passes a step.
    """

    alpha: Literal["layer", "neuron", "weight"] = "layer"
    initial_alpha: float = 0.05

    name: ClassVar[str] = "variational-dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "alpha", ("layer", "neuron", "weight"))
        check_number(self, "initial_alpha", above=0)

    def parameters(self, model: Model, run: Run[Ways], key: Tensor) -> Weights:
        if self.alpha == "weight":
            return super().parameters(model, run, key)
        weights, logs = clone(model.initial), {}
        for name in run.prepared.ways:
            weight = weights[name]
            shape = () if self.alpha == "layer" else (1, weight.shape[1], *[1] * (weight.ndim - 2))
            logs[ALPHA + name] = weight.new_full(shape, math.log(self.initial_alpha))
        return {**weights, **logs}

    def log_variance(self, weight: Tensor) -> float:
        return math.log(self.initial_alpha) + math.log(max(float(weight.square().mean()), TINY))

    def log_alpha(self, parameters: Weights, name: str) -> Tensor:
        return super().log_alpha(parameters, name) if self.alpha == "weight" else parameters[ALPHA + name].clamp(max=self.most)

    def scale(self, parameters: Weights, name: str) -> Tensor:
        if self.alpha == "weight":
            return super().scale(parameters, name)
        return (0.5 * self.log_alpha(parameters, name)).exp() * (parameters[name].square() + TINY).sqrt()

    @classmethod
    def conforming(cls) -> VariationalDropout:
        return cls(epochs=600, batch_size=None, lr=Cosine(0.1), alpha="weight")

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """With one α for each weight and a Gaussian prior: independent Gaussians."""
        return problem.mean_field()
