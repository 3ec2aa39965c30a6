"""Stochastic weight averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.engine.method import Traits
from plausible.methods.averages.base import TrajectoryAverage, stacked_mean


@register
@dataclass(frozen=True)
class SWA(TrajectoryAverage):
    """θ̄ = (1/n) Σ_i θ_i over snapshots of an optimiser with a constant rate   (Izmailov et al. 2018)

    One network, in the middle of the region that the optimiser wanders about in.

    After the training by `mode` (None: from the weights as they are) `optimiser` goes on with the rate `lr` for `epochs` (None:
    50, on small data as many as 500 steps take), and every so many steps (`every` None: once an epoch, at most 100 times) the
    weights enter the mean. Batch norm gets its statistics anew, at the mean, in a last pass over the data. `lr` may be a schedule,
    such as the cycles of the paper. Cost: that of the training and of the averaging, and a forward pass of all data where there is
    batch norm; one more copy of the weights.
    """

    name: ClassVar[str] = "swa"
    traits: ClassVar[Traits] = replace(
        TrajectoryAverage.traits, deterministic=True, bias="a point: the epistemic variance is zero"
    )

    def drawn(self, model: Model, left: Mapping[str, Tensor], key: Tensor) -> Weights:
        return stacked_mean(model, left, 1)
