"""Gaussian dropout: inputs of layers times N(1, α), in training and when predicting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plausible.blocks.unit_noise import Site
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.methods.dropout.base import RATE, UnitDropout, check_rate


@register
@dataclass(frozen=True, kw_only=True)
class GaussianDropout(UnitDropout):
    """max over θ of  E_ξ log p(D | θ diag(ξ)) + log p(θ√(1 + α)),  ξ_i ~ N(1, α),  α = p/(1 − p)

    Dropout with Gaussian noise of the same variance (Srivastava et al. 2014), left on when predicting.

    One number for each input of a layer. With a log-uniform prior the divergence does not depend on θ, and the first term alone is
    variational inference (Kingma, Salimans & Welling 2015). `rate` p (None: 0.1) and `where` as for `MCDropout`; dropout that the
    network has of its own acts in training alone. Cost: one forward and one backward pass a step.
    """

    rate: float | None = None

    name: ClassVar[str] = "gaussian-dropout"
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self)

    def rates(self, parameters: Weights, sites: dict[str, Site]) -> Weights:  # type: ignore[override]
        rate = RATE if self.rate is None else self.rate
        return {name: torch.full((), rate, dtype=parameters[name].dtype, device=parameters[name].device) for name in sites}
