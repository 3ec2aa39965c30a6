"""Uncertainty, taken apart into what more data would remove (epistemic) and what they would not (aleatoric).

numbers   Var[y] = E_s Var[y | f_s]  +  Var_s E[y | f_s]     law of total variance
classes   H[y]   = E_s H[y | f_s]    +  I[y; s]              chain rule of entropy (Houlsby et al. 2011)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plausible.analysis.metrics.inputs import class_probabilities, mutual_information
from plausible.posteriors.predictive import Predictive

if TYPE_CHECKING:
    import numpy as np


class Uncertainty(NamedTuple):
    """`total` = `aleatoric` + `epistemic`, none negative: variances [N, *O] for numbers, nats [N, ...] for classes."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def decompose(predictive: Predictive | Tensor | np.ndarray | Any) -> Uncertainty:
    """Total = aleatoric + epistemic, for each output of each input on its own.

    Numbers and counts: the variance, the expected variance and the variance of the expectation, shaped like the
    targets. Classes and yes/no targets: entropy, expected entropy and mutual information in nats, [N], dense
    [N, ...], several labels [N, L] (Depeweg et al. 2018).

    Takes a `Predictive`, or the class probabilities of S draws, [S, N, ..., C], each row summing to one: for yes/no
    targets stack (1 − p, p). A single draw has no epistemic part. Cost: one pass over the draws.
    """
    if isinstance(predictive, Predictive):
        if predictive.likelihood.kind not in ("classes", "binary"):
            return Uncertainty(predictive.variance, predictive.aleatoric, predictive.epistemic)
        # Rounding may leave an information just above the entropy, and the rest would be negative.
        entropy, information = predictive.entropy, torch.minimum(predictive.mutual_information, predictive.entropy)
        return Uncertainty(entropy, entropy - information, information)
    probs = class_probabilities(predictive, "predictive")
    if probs.ndim < 3:
        raise ValueError(
            f"predictive must be the class probabilities of several draws, [S, N, classes], got {list(probs.shape)}: "
            "averaged probabilities cannot be taken apart; pass a Predictive, or stack (1 − p, p) for yes/no targets"
        )
    entropy, information = mutual_information(probs)
    return Uncertainty(entropy, entropy - information, information)
