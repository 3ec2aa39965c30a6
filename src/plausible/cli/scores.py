"""Held-out scores of a predictive distribution, each a plain number.

    log-likelihood  1/N Σ log p(y_i | x_i, D)               (targets of one row summed)
    RMSE            √(1/N Σ (m_i − y_i)²),  MAE  1/N Σ |m_i − y_i|,  m the predictive mean
    coverage        1/N Σ 1[low_i ≤ y_i ≤ high_i]
    accuracy        1/N Σ 1[argmax_k p_ik = y_i]
    Brier           1/N Σ Σ_k (p_ik − 1[y_i = k])²           (Brier 1950, over all classes: from 0 to 2)
    ECE             Σ_b n_b/N |accuracy_b − confidence_b|    (Naeini et al. 2015; equal bins of the largest probability)

Shapes: `mean`, `low`, `high`, `targets` `[N]`; `probs` `[N, K]` with `targets` integers `[N]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from plausible.cli.targets import Target
    from plausible.predictive import Predictive


def log_likelihood(predictive: Predictive, targets: Tensor) -> float:
    """The mean over rows of log p(y | x, D), in nats."""
    return float(predictive.log_prob(targets).double().mean())


def rmse(mean: Tensor, targets: Tensor) -> float:
    """The root of the mean squared error of the predictive mean."""
    return float((mean - targets).double().square().mean().sqrt())


def mae(mean: Tensor, targets: Tensor) -> float:
    """The mean absolute error of the predictive mean."""
    return float((mean - targets).double().abs().mean())


def coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    """The fraction of targets inside their interval."""
    return float(((low <= targets) & (targets <= high)).double().mean())


def accuracy(probs: Tensor, targets: Tensor) -> float:
    """The fraction of rows whose most probable class is the true one."""
    return float((probs.argmax(-1) == targets).double().mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    """The squared distance between the probabilities and the indicator of the true class."""
    truth = torch.nn.functional.one_hot(targets, probs.shape[-1])
    return float((probs.double() - truth).square().sum(-1).mean())


def ece(probs: Tensor, targets: Tensor, bins: int = 15) -> float:
    """The expected calibration error with `bins` equal bins (low, high] of the confidence."""
    confidence, predicted = probs.double().max(-1)
    hit = (predicted == targets).double()
    which = (confidence * bins).ceil().clamp(1, bins).long() - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, which, hit - confidence)
    return float(gaps.abs().sum() / len(targets))


def class_probs(target: Target, predictive: Predictive) -> list[Tensor]:
    """Probabilities `[N, classes]`, one tensor per target; a yes/no target has the two classes (1 − p, p)."""
    probs = predictive.probs.cpu()
    if target.likelihood == "categorical":
        return [probs]
    return [torch.stack([1 - column, column], -1) for column in probs.unbind(-1)]


def held_out(target: Target, predictive: Predictive, observed: Tensor, level: float = 0.9) -> dict[str, Any]:
    """All scores that fit the task: `rows` and `log_likelihood` for the whole, the others for each target."""
    scores: dict[str, dict[str, float]] = {}
    truths = observed.cpu()
    if target.classes:
        columns = [truths] if target.likelihood == "categorical" else list(truths.long().unbind(-1))
        for name, probs, truth in zip(target.names, class_probs(target, predictive), columns):
            scores[name] = {
                "accuracy": accuracy(probs, truth),
                "brier": brier(probs, truth),
                "ece": ece(probs, truth),
            }
    else:
        mean, (low, high) = predictive.mean.cpu(), predictive.interval(level)
        for index, name in enumerate(target.names):
            truth = truths[:, index]
            scores[name] = {
                "rmse": rmse(mean[:, index], truth),
                "mae": mae(mean[:, index], truth),
                f"coverage_{100 * level:.0f}": coverage(low.cpu()[:, index], high.cpu()[:, index], truth),
            }
    total = log_likelihood(predictive, observed)
    return {"rows": len(observed), "log_likelihood": total, "targets": scores}
