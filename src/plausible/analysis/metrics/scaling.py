"""Log loss after temperature scaling, so that methods are compared by more than the sharpness of their softmax.

    p_T(c) ∝ p(c)^{1/T},   T* = argmin_T −Σ log p_T(y)

With β = 1/T the loss is logsumexp(β·z) − β·z_y, z = log p: convex, so one root of its derivative decides.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from plausible.analysis.metrics.inputs import Labelled, labelled, whole
from plausible.core import random

BOUNDS = (0.01, 100.0)
"""Temperatures looked at. A fit to examples that are all right has its optimum at 0, to all wrong at infinity."""

_STEPS = 200
_IMPOSSIBLE = -1e4  # e^−100 even at the highest temperature; −inf would turn sums into NaN
_SPLIT = 0x68616C66


def temperature(predictive: Any, y: Any, *, mask: Any = None) -> float:
    """T* = argmin_T −Σ log p_T(y) with p_T ∝ p^{1/T}, in [0.01, 100]: above 1 for overconfident predictions.

    The temperature belongs to the mixture over draws, not to each draw (Guo et al. 2017; Ashukha et al. 2020). Newton
    steps in 1/T kept inside a bracket, in float64: each costs a pass over [M, C]. Fit it on data that are not scored.
    """
    answers = labelled(predictive, y, mask)
    return 1 / _inverse_temperature(answers.log_probs(), answers.labels)


def calibrated_log_loss(
    predictive: Any, y: Any, *, held_out: tuple[Any, Any] | None = None, splits: int = 5, seed: int = 0, mask: Any = None
) -> float:
    """−1/N Σ log p_T(y_n) at the temperature that fits other data best (Ashukha et al. 2020).

    With `held_out=(predictive, y)`, predictions for data that are neither trained on nor scored, T is fitted there. Without
    it the inputs are parted into random halves `splits` times; each half is scored at the temperature of the other, and
    the mean over all is returned: no example helps to choose its own temperature. A half whose predictions are all right (or all
    wrong) has its optimum at no temperature; the other is then scored as it is. Halves are a function of `seed`.

    Labels or positions of one input stay in one half, and their losses are summed, as in `log_loss`.
    """
    whole("splits", splits, 1)
    answers = labelled(predictive, y, mask)
    logs = answers.log_probs()
    if held_out is not None:
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise TypeError(f"held_out must be a pair (predictive, y), got {type(held_out).__name__}")
        other = labelled(*held_out)
        if other.probs.shape[-1] != logs.shape[-1]:
            raise ValueError(f"held_out has {other.probs.shape[-1]} classes, predictive has {logs.shape[-1]}")
        inverse = _inverse_temperature(other.log_probs(), other.labels)
        return float(_loss(logs, answers.labels, inverse).sum() / len(answers.rows.unique()))
    return sum(_cross_fitted(answers, logs, seed, split) for split in range(splits)) / splits


def _cross_fitted(answers: Labelled, logs: Tensor, seed: int, split: int) -> float:
    inputs, place = answers.rows.unique(return_inverse=True)
    if len(inputs) < 2:
        raise ValueError("calibrated_log_loss needs at least 2 inputs to halve, got 1: pass held_out=(predictive, y)")
    # Inputs are halved and not examples: the labels of one input would tell the temperature about each other.
    first = torch.randperm(len(inputs), generator=random.generator(seed, _SPLIT, split)) < len(inputs) // 2
    inside = first[place]
    total = 0.0
    for fitted in (inside, ~inside):
        inverse = _inverse_temperature(logs[fitted], answers.labels[fitted])
        if not 1 / BOUNDS[1] < inverse < 1 / BOUNDS[0]:
            inverse = 1.0  # all right or all wrong: this half says nothing of the temperature of the other
        total += float(_loss(logs[~fitted], answers.labels[~fitted], inverse).sum())
    return total / len(inputs)


def _loss(logs: Tensor, labels: Tensor, inverse: float) -> Tensor:
    """−log p_T of the true class, [M], at β = 1/T."""
    scaled = inverse * logs
    return scaled.logsumexp(-1) - scaled.gather(-1, labels[:, None]).squeeze(-1)


def _inverse_temperature(logs: Tensor, labels: Tensor) -> float:
    """The root β of d/dβ mean loss = mean(E_β[z] − z_y), which grows by mean Var_β[z] ≥ 0."""
    logs = logs.clamp(min=_IMPOSSIBLE)
    centred = logs - logs.gather(-1, labels[:, None])

    def slope(inverse: float) -> tuple[float, float]:
        weights = (inverse * logs).softmax(-1)
        expected = (weights * centred).sum(-1)
        spread = (weights * (centred - expected[:, None]).square()).sum(-1)
        return float(expected.mean()), float(spread.mean())

    low, high = 1 / BOUNDS[1], 1 / BOUNDS[0]
    if slope(low)[0] >= 0:
        return low
    if slope(high)[0] <= 0:
        return high
    inverse = 1.0
    for _ in range(_STEPS):
        first, second = slope(inverse)
        low, high = (inverse, high) if first < 0 else (low, inverse)
        # Newton alone overshoots where the loss is nearly flat; outside the bracket the geometric mean of its ends is taken.
        newton = inverse - first / second if second > 0 else math.inf
        step = newton if low < newton < high else math.sqrt(low * high)
        if abs(step - inverse) <= 1e-12 * inverse:
            return step
        inverse = step
    return inverse
