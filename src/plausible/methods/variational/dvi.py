"""Deterministic variational inference: moments through the network instead of samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from plausible.blocks.variational import entropy
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.priors.composed import precision_of
from plausible.core.schedules import Cosine, Schedule
from plausible.core.serialise import check_count, check_number, register
from plausible.core.weights import Weights, select
from plausible.engine.method import BatchSize, Fitted, Run, check_choice
from plausible.methods.variational.by_moments import ByMoments, kl
from plausible.posteriors.laws import DiagonalGaussian
from plausible.posteriors.moments import MomentsPosterior


@register
@dataclass(frozen=True)
class DVI(ByMoments):
    """E_q log p(D | w) − KL(q ‖ p) with f(x) ≈ N(m(x), Σ(x)),  q(w) = Π N(w_i; μ_i, σ_i²)

    Independent Gaussians over the weights by exact gradients of the evidence bound: means and covariances of activations are
    carried through the network, and nothing is sampled (Wu et al. 2019).

    Linear layers are exact; activations get exact means and variances for Gaussian inputs, and covariances by the first
    `terms` terms of a series in the correlations; `covariance="diagonal"` leaves them out. `empirical_bayes` gives each weight
    tensor the centred Gaussian prior of variance s* = (Σ(μ² + σ²) + 2β)/(Ω + 2α + 2), Ω its number of weights, α and β the
    `shape` and `rate` of an inverse gamma law. Over the first `warmup` of the steps the KL's weight rises to 1. Cost a step,
    for a batch of B and layers of width D: B·D³ with covariances, B·D² without; memory: B·D² numbers a layer.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(1e-2))
    covariance: Literal["full", "diagonal"] = "full"
    terms: int = 4
    initial_scale: float = 0.02
    warmup: float = 0.0
    empirical_bayes: bool = False
    shape: float = 1.0
    rate: float = 10.0
    optimiser: Optimiser = field(default_factory=AdamW)

    name: ClassVar[str] = "dvi"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "covariance", ("full", "diagonal"))
        check_count(self, "terms", at_least=1)
        check_number(self, "shape", above=0)
        check_number(self, "rate", above=0)

    @property
    def series(self) -> int:
        return self.terms

    def weights_cost(self, model: Model, means: Weights, scales: Weights, prior: Weights) -> Tensor:
        """KL(q ‖ p); with `empirical_bayes` KL(q ‖ N(0, s*)) − log p(s*) for each weight tensor of the network."""
        if not self.empirical_bayes:
            return kl("DVI", model, means, scales)
        network = [name for name in means if not name.startswith("likelihood.")]
        if any(not precision_of(model.prior, name, means[name]) for name in network):
            raise ValueError("DVI: empirical_bayes replaces the scales of centred Gaussian priors, and this prior is another")
        rest = [name for name in means if name not in network]
        cost = kl("DVI", model, select(means, rest), select(scales, rest)) - entropy(select(scales, network))
        for name in network:
            # s* maximises the bound in closed form, for each weight tensor
            squares, count = (means[name].square() + scales[name].square()).sum(), means[name].numel()
            s = (squares + 2 * self.rate) / (count + 2 * self.shape + 2)
            density = 0.5 * count * (math.log(2 * math.pi) + s.log()) + 0.5 * squares / s
            hyper = self.shape * math.log(self.rate) - math.lgamma(self.shape) - (self.shape + 1) * s.log() - self.rate / s
            cost = cost + (density - hyper) / model.temperature
        return cost

    @classmethod
    def conforming(cls) -> DVI:
        return cls(epochs=200, batch_size=None, lr=Cosine(0.1))

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> MomentsPosterior:
        scales = {name: torch.exp(rho) for name, rho in fitted.state.rhos.items()}
        return MomentsPosterior.of(self, model, fitted, DiagonalGaussian.of(model, fitted, scales))
