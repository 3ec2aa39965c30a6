"""The headline metrics of a kind of task in one call: what reports, comparisons and the command line show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plausible.analysis.metrics.calibration import (
    LEVELS,
    classwise_ece,
    coverage,
    ece,
    interval_width,
    intervals,
    pit,
    quantile_gap,
    quantile_levels,
)
from plausible.analysis.metrics.detection import aurc, curve, uncertainty_score
from plausible.analysis.metrics.inputs import NUMBERS, labelled, predictive_targets, probability_kind
from plausible.analysis.metrics.ranked import crps_values
from plausible.analysis.metrics.scaling import calibrated_log_loss
from plausible.analysis.metrics.scores import accuracy, brier, log_likelihood, mae, rmse
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive


def summary(predictive: Any, y: Any, *, level: float = 0.9, mask: Any = None) -> dict[str, float]:
    """The headline metrics by name, in a fixed order; those of `level` carry it in their name, in percent.

    Classes and yes/no targets, also plain probabilities: log_likelihood, accuracy, brier, ece, classwise_ece,
    calibrated_log_loss (left out for a single input, which cannot be halved), aurc. Numbers and counts, a `Predictive` only:
    log_likelihood, rmse, mae, crps, coverage_90, width_90, quantile_calibration, aurc.
    """
    scores = {"log_likelihood": log_likelihood(predictive, y, mask=mask)}
    if probability_kind(predictive):
        return scores | _of_classes(predictive, y, mask)
    measured = _Measured(predictive, y, level, mask)
    return scores | measured.summary(measured.observed)


def summary_by_output(predictive: Any, y: Any, *, level: float = 0.9, mask: Any = None) -> list[dict[str, float]]:
    """`summary` without the log-likelihood, which is one for all outputs, for each index of the last axis of y [N, ..., K].

    Targets of shape [N], and classes, have one output. An output that is masked everywhere is refused.
    """
    if isinstance(predictive, Predictive):
        kind, observed = predictive.likelihood.kind, predictive_targets(predictive, y, mask)[1]
    else:
        answers = labelled(predictive, y, mask)
        kind, observed = "binary" if answers.binary else "classes", answers.observed
    measured = _Measured(predictive, y, level, mask) if kind in NUMBERS else None
    results = []
    for output in range(observed.shape[-1] if observed.ndim > 1 and kind != "classes" else 1):
        keep = observed
        if observed.ndim > 1 and kind != "classes":
            keep = torch.zeros_like(observed)
            keep[..., output] = observed[..., output]
        if not bool(keep.any()):
            raise ValueError(f"mask hides every target of output {output}: nothing is left to measure")
        results.append(measured.summary(keep) if measured else _of_classes(predictive, y, keep))
    return results


def _of_classes(predictive: Any, y: Any, mask: Any) -> dict[str, float]:
    scores = {
        "accuracy": accuracy(predictive, y, mask=mask),
        "brier": brier(predictive, y, mask=mask),
        "ece": ece(predictive, y, mask=mask),
        "classwise_ece": classwise_ece(predictive, y, mask=mask),
    }
    if len(labelled(predictive, y, mask).rows.unique()) > 1:
        scores["calibrated_log_loss"] = calibrated_log_loss(predictive, y, mask=mask)
    scores["aurc"] = aurc(predictive, y, mask=mask)
    return scores


class _Measured:
    """What the metrics of numbers need, computed once for all outputs; each shaped like y."""

    def __init__(self, predictive: Predictive, y: Any, level: float, mask: Any) -> None:
        target, self.observed = predictive_targets(predictive, y, mask, NUMBERS, "a distribution of numbers")
        self.target, self.mean = target.double(), double(predictive.mean)[0].cpu()
        self.percent = f"{100 * level:.4g}"
        self.low, self.high = intervals(predictive, level)
        self.variance = uncertainty_score(predictive, "variance")
        self.pit = pit(predictive, y, mask=mask)
        # Quantiles, F(y) and CRPS of a mixture cost many passes over the draws: once here, and not once for each output.
        self.crps = torch.full_like(self.target, torch.nan)
        self.crps[self.observed] = crps_values(predictive, y, mask=mask)

    def summary(self, keep: Tensor) -> dict[str, float]:
        """The metrics over the targets to keep."""
        mean, target, bounds = self.mean[keep], self.target[keep], (self.low[keep], self.high[keep])
        return {
            "rmse": rmse(mean, target),
            "mae": mae(mean, target),
            "crps": float(self.crps[keep].mean()),
            f"coverage_{self.percent}": coverage(bounds, target),
            f"width_{self.percent}": interval_width(bounds),
            "quantile_calibration": quantile_gap(self.pit[keep], quantile_levels(LEVELS)),
            "aurc": float(curve((mean - target).square(), self.variance[keep]).risk.mean()),
        }
