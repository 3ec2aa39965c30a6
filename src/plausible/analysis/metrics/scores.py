"""Scores of predictions, each one number: how probable the truth was, how far predictions were from it, or from a reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plausible.analysis.metrics.inputs import class_probabilities, labelled, point_predictions, predictive_targets
from plausible.posteriors.predictive import Predictive


def log_likelihood(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """1/N Σ_n log p(y_n | x_n, D), in nats, higher is better; for densities in the units of the target.

    The targets of one input belong together: they are summed inside a draw, before the mixture over draws is taken
    (labels and positions of plain probabilities are multiplied). The mean is over inputs with an observed target. A
    probability of exactly 0 for the truth gives −inf, nothing is clipped. Strictly proper (Good 1952).
    """
    if not isinstance(predictive, Predictive):
        answers = labelled(predictive, y, mask)
        each = answers.probs.gather(-1, answers.labels[:, None]).squeeze(-1).log()
        return float(each.sum() / len(answers.rows.unique()))
    target, observed = predictive_targets(predictive, y, mask)
    # The mean is over inputs with anything observed, not over all that were predicted.
    rows = observed.reshape(len(observed), -1).any(-1)
    whole = bool(observed.all())
    density = (predictive.log_prob(target) if whole else predictive._log_density(target, observed)).cpu()
    if bool(density[rows].isnan().any()):
        raise ValueError("predictive gives a log density of NaN: its outputs are not finite")
    return float(density[rows].double().mean())


def log_loss(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """−1/N Σ_n log p(y_n | x_n, D), in nats, lower is better: `log_likelihood` with the other sign."""
    return -log_likelihood(predictive, y, mask=mask)


def accuracy(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """1/M Σ 1[argmax_k p_k = y]: the share of examples whose most probable class is the true one.

    A tie counts as its first class; for yes/no targets p = ½ is a no. Every label or position is an example.
    """
    answers = labelled(predictive, y, mask)
    return float((answers.probs.argmax(-1) == answers.labels).double().mean())


def brier(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """1/M Σ Σ_k (p_k − 1[y = k])²: from 0 to 2, lower is better, summed over all classes (Brier 1950).

    For yes/no targets that is twice the (p − y)² that others report. Strictly proper, and bounded where the log loss
    is not.
    """
    answers = labelled(predictive, y, mask)
    return float((answers.probs - answers.truth).square().sum(-1).mean())


def rmse(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """√(1/M Σ (E[y] − y)²), in the units of the target, over all outputs; a plain array is the prediction itself."""
    mean, target = point_predictions(predictive, y, mask)
    return float((mean - target).square().mean().sqrt())


def mae(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """1/M Σ |E[y] − y|, in the units of the target, over all outputs.

    The mean is judged; the median is the best answer under this loss: `mae(predictive.quantile(0.5), y)`.
    """
    mean, target = point_predictions(predictive, y, mask)
    return float((mean - target).abs().mean())


def agreement(predictive: Any, reference: Any) -> float:
    """1/N Σ 1[argmax_k p_k = argmax_k q_k]: the share of inputs with the same most probable class (Izmailov et al. 2021)."""
    p, q = _both(predictive, reference)
    return float((p.argmax(-1) == q.argmax(-1)).double().mean())


def total_variation(predictive: Any, reference: Any) -> float:
    """1/N Σ ½ Σ_k |p_k − q_k|: the most by which the two differ about any event, from 0 to 1 (Izmailov et al. 2021)."""
    p, q = _both(predictive, reference)
    return float(0.5 * (p - q).abs().sum(-1).mean())


def _both(predictive: Any, reference: Any) -> tuple[Tensor, Tensor]:
    p, q = class_probabilities(predictive, "predictive"), class_probabilities(reference, "reference")
    if p.shape != q.shape:
        raise ValueError(
            f"predictive has probabilities of shape {list(p.shape)}, reference {list(q.shape)}: expected the same inputs "
            "and classes in the same order; average draws first"
        )
    return p, q
