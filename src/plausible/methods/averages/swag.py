"""SWA-Gaussian."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.model import Model
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights
from plausible.engine.method import Traits
from plausible.methods.averages.base import DEVIATIONS, SNAPSHOTS, VARIANCE, TrajectoryAverage, stacked_mean


@register
@dataclass(frozen=True)
class SWAG(TrajectoryAverage):
    """w = θ̄ + 2^{-½} Σ_diag^{½} z₁ + (2(K − 1))^{-½} D z₂,  z ~ N(0, I)   (Maddox et al. 2019)

    A Gaussian with the mean and the covariance of the path of an optimiser: variances by weight, and its last K deviations.

    Training, averaging and the mean θ̄ are those of `SWA`. Σ_diag are the variances of the snapshots, and the columns of D the
    deviations of the last K = `rank` of them from the mean so far. `rank=0` is SWAG-Diag, w = θ̄ + Σ_diag^{½} z₁. `draws` are
    made at the end of the fit, and each gets statistics of batch norm of its own, in one pass over the data for all. MultiSWAG is
    `Ensemble(SWAG())`. The paper's optimiser is `SGD(momentum=0.9)`: how wide the law is follows its rate and the size of
    batches. Weights that `where` leaves out are at their mean. Cost: that of the training and of the averaging, and `draws`
    forward passes of all data where there is batch norm; K + 2 more copies of the weights.
    """

    rank: int = 20  # type: ignore[misc]
    draws: int = 30

    name: ClassVar[str] = "swag"
    traits: ClassVar[Traits] = replace(
        TrajectoryAverage.traits, noisy=True, bias="the spread of the optimiser's path, which its rate and batches set"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "rank", at_least=0)
        check_count(self, "draws")
        if self.rank == 1:
            raise ValueError("SWAG: rank=1 is one deviation, which has no covariance: use 2 or more, or 0 for variances alone")

    def drawn(self, model: Model, left: Mapping[str, Tensor], key: Tensor) -> Weights:
        draws = stacked_mean(model, left, self.draws)
        scales = {name: left[VARIANCE + name].clamp(min=0).sqrt() for name in model.random}
        deviations = {name: left[DEVIATIONS + name].reshape(self.rank, -1) for name in model.random} if self.rank else {}
        known = min(int(left[SNAPSHOTS]), self.rank)
        along = torch.zeros(self.rank, device=key.device)
        for k in range(self.draws):
            noise = random.normal(key, k, scales)
            shared = random.normal(random.fold(key, 1), k, along)
            for name, scale in scales.items():
                moved = scale * noise[name]
                if self.rank:
                    direction = (shared.to(scale.dtype) @ deviations[name]).view_as(scale)
                    moved = 0.5**0.5 * moved + (2 * max(known - 1, 1)) ** -0.5 * direction
                draws[name][k] += moved
        return draws
