"""Priors for particular ends: chains whose precisions the data decide about, and networks that were trained with weight decay."""

from __future__ import annotations

import math

from plausible.core.priors.composed import FanIn, Patterns
from plausible.core.priors.hierarchical import Hierarchical
from plausible.core.priors.rules import Gaussian


def neal(alpha: float = 1.0) -> Patterns:
    """Neal's (1996) prior for chains: unknown precisions by group of weights, one for each input, scaled by fan-in.

    Precisions of weights have mean 1 and the shape α/2, so vague that the data decide; a learned noise, degrees of freedom and the
    like follow N(0, 1) on their logarithms.
    """
    hierarchy = Hierarchical.with_width(1.0, alpha, groups="input")
    return Patterns((("likelihood.*", Gaussian()), ("*", FanIn(hierarchy))))


def from_weight_decay(weight_decay: float, num_data: int) -> Gaussian:
    """The prior under which a network was trained that minimised mean loss + ½·λ‖w‖² over N examples: N(0, 1/(λN)).

    λ is the `weight_decay` of `torch.optim.SGD` or `Adam`, whose loss is a mean; AdamW's decoupled decay has no exact counterpart,
    and is read the same way. For a post-hoc `Laplace(mode=None)`, whose weights are then at the mode of this posterior.
    """
    for name, value in (("weight_decay", weight_decay), ("num_data", num_data)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"from_weight_decay: {name} must be finite and above 0, got {value!r}")
    return Gaussian(scale=(weight_decay * num_data) ** -0.5)
