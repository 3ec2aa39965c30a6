"""MC dropout: dropout left on when predicting, as draws from an approximate posterior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from plausible.blocks.unit_noise import Site
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.engine.method import Fitted, Run
from plausible.methods.dropout.base import RATE, Sites, UnitDropout, check_rate
from plausible.posteriors.base import Posterior
from plausible.posteriors.masked import MaskedPosterior, has_dropout


@register
@dataclass(frozen=True, kw_only=True)
class MCDropout(UnitDropout):
    """max over θ of  E_m log p(D | θ diag(m)/(1 − p)) + log p(θ/√(1 − p)),  m_i ~ Bernoulli(1 − p)

    Dropout as an approximate posterior (Gal & Ghahramani 2016): trained with it, and left on when predicting.

    A network with dropout of its own (Dropout, Dropout1d to 3d, AlphaDropout, in attention) is trained as it is; a draw is a set of
    masks that all inputs share, so that functions are coherent. Elsewhere dropout with `rate` (None: 0.1) enters before each
    linear, convolutional (whole channels), recurrent or attention layer but the first, or before those that `where` names; a draw
    is then a draw of the weights. Training ends as that of `MAP`, by held-out rows. Cost: one forward and one backward pass a step.
    """

    rate: float | None = None

    name: ClassVar[str] = "mc-dropout"
    kind: ClassVar[str] = "dropout"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self)

    def prepare(self, model: Model, run: Run[Any]) -> Sites:
        example = next(iter(run.data.chunks(2)))
        if not has_dropout(model, example.x):
            return super().prepare(model, run)
        if self.rate is not None or self.where is not None:
            raise ValueError(
                "MCDropout: the network has dropout of its own, which is used as it is; leave rate and where unset, or take the "
                "dropout out of the network"
            )
        return Sites({})

    def rates(self, parameters: Weights, sites: dict[str, Site]) -> Weights:  # type: ignore[override]
        rate = RATE if self.rate is None else self.rate
        return {name: torch.full((), rate, dtype=parameters[name].dtype, device=parameters[name].device) for name in sites}

    def posterior(self, model: Model, run: Run[Sites], fitted: Fitted) -> Posterior:  # type: ignore[override]
        return super().posterior(model, run, fitted) if run.prepared.sites else MaskedPosterior.of(self, model, fitted)

    @staticmethod
    def precision(rate: float, length_scale: float, num_data: int, weight_decay: float) -> float:
        """τ = (1 − p)l²/(2Nλ): the precision of the noise that dropout p and weight decay λ stand for.

        Of a network trained on the loss ½·mean squared error + λ‖M‖², read as a Gaussian process of length scale 1/l
        (Gal & Ghahramani 2016, eq. 7): its predictive variance is 1/τ and the variance over masks.
        """
        return (1 - rate) * length_scale**2 / (2 * num_data * weight_decay)
