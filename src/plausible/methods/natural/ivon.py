"""IVON: variational inference at the price of Adam, its curvature read off the noise in the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from plausible.blocks.natural_gradients import price
from plausible.blocks.stochastic import Noise
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.methods.natural.base import Draw, NaturalGradient, NaturalState, Priors


@register
@dataclass(frozen=True)
class IVON(NaturalGradient):
    """h ← β₂h + (1 − β₂)ĥ + ½(1 − β₂)²(h − ĥ)²/(h + δ),  ĥ = ĝε/σ;  m ← m − lr·(g + δm)/(h + δ);  σ² = 1/(λ(h + δ))

    Independent Gaussians over the weights by natural gradients, with the curvature from the noise itself (Shen et al. 2024).

    λ = N/temperature, and δ is the precision of the prior over N, so that σ² is the variance of the evidence bound's optimum.
    `lr` counts in Newton steps: with 1 and no momentum the mean jumps to the minimum of the local quadratic. Gaussian and flat
    priors (by patterns, fan-in and with any centre) enter exactly; other priors by their gradients at the drawn weights. Cost:
    `samples` forward and backward passes a step and as many normal numbers as weights; memory as Adam's, two numbers a weight.
    """

    name: ClassVar[str] = "ivon"

    def estimate(self, model: Model, state: NaturalState, draw: Draw, noise: Noise, priors: Priors, batch: Batch) -> Weights:
        ess = model.num_data / model.temperature
        return {name: price(e, draw.gradients[name], state.curvature[name], ess) for name, e in draw.noise.items()}

    @classmethod
    def conforming(cls) -> IVON:
        return cls(epochs=250, batch_size=None, lr=Cosine(0.2), beta2=0.99, clip_radius=math.inf, samples=4, antithetic=True)
