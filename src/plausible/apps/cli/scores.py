"""Held-out scores of a run, by the names of its targets; the formulas are those of `plausible.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.analysis import metrics

if TYPE_CHECKING:
    from plausible.apps.responses import Response
    from plausible.posteriors.predictive import Predictive


def class_probs(target: Response, predictive: Predictive) -> list[Tensor]:
    """Probabilities `[N, classes]`, one tensor per target; a yes/no target has the two classes (1 − p, p)."""
    probs = predictive.probs.cpu()
    if target.likelihood == "categorical":
        return [probs]
    return [torch.stack([1 - column, column], -1) for column in probs.unbind(-1)]


def held_out(target: Response, predictive: Predictive, observed: Tensor, level: float = 0.9) -> dict[str, Any]:
    """All scores that fit the task: `rows` and `log_likelihood` for the whole, the others for each target."""
    each = metrics.summary_by_output(predictive, observed, level=level)
    total = metrics.log_likelihood(predictive, observed)
    return {"rows": len(observed), "log_likelihood": total, "targets": dict(zip(target.names, each))}
