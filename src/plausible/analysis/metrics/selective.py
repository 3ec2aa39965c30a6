"""Selective prediction: the risk among the examples one is most certain about, as the rest are handed to somebody else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.analysis.metrics.detection import uncertainty_score
from plausible.analysis.metrics.inputs import labelled, point_predictions, predictive_targets, probability_kind
from plausible.posteriors.predictive import Predictive


class RiskCoverage(NamedTuple):
    """`risk[k]` is the mean loss of the k + 1 most certain of M examples, a share `coverage[k]` of them; float64 [M]."""

    coverage: Tensor
    risk: Tensor


def risk_coverage(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None) -> RiskCoverage:
    """risk(k/M) = 1/k Σ_{i ≤ k} loss_(i), examples in the order of their uncertainty (Geifman & El-Yaniv 2017).

    The loss is the error, 0 or 1, for classes, and the squared error of the mean for numbers. `score` names the
    uncertainty as in `uncertainty_score`; None is "max_probability" for classes and "variance" for numbers. Examples of
    equal uncertainty are averaged, as if in random order: the curve does not depend on the order of the rows.
    """
    if probability_kind(predictive):
        answers = labelled(predictive, y, mask)
        losses, observed = (answers.probs.argmax(-1) != answers.labels).double(), answers.observed
    else:
        mean, target = point_predictions(predictive, y, mask)
        losses, observed = (mean - target).square(), predictive_targets(predictive, y, mask)[1]
    if not isinstance(predictive, Predictive) and score in (None, "max_probability", "entropy", "variance"):
        # already checked and averaged over draws, whatever the shape was
        values = uncertainty_score(answers.probs, score or "max_probability")
    else:
        score = score or ("max_probability" if probability_kind(predictive) else "variance")
        values = uncertainty_score(predictive, score)[observed]
    return curve(losses, values)


def curve(losses: Tensor, uncertainty: Tensor) -> RiskCoverage:
    """The curve of losses [M] by uncertainty [M]: within a tie every example has the mean loss of the tie."""
    levels, place, counts = uncertainty.unique(return_inverse=True, return_counts=True)
    # Within a tie any order is as good; the mean loss is what a random one has on average.
    mean_loss = torch.zeros(len(levels), dtype=torch.float64).scatter_add(0, place, losses) / counts
    number = torch.arange(1, len(losses) + 1, dtype=torch.float64)
    return RiskCoverage(number / len(losses), mean_loss.repeat_interleave(counts).cumsum(0) / number)


def aurc(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None) -> float:
    """1/M Σ_k risk(k/M): the area under the risk-coverage curve, lower is better (Geifman, Uziel & El-Yaniv 2019).

    Useless uncertainty gives the plain risk; so compare it with the error rate (or the squared RMSE) of the same predictions.
    """
    return float(risk_coverage(predictive, y, score, mask=mask).risk.mean())
