"""Calibration: do things that are given probability p happen with frequency p?

Classes: bins of the confidence (`reliability`, `ece`, `classwise_ece`). Numbers: the probability integral transform
u = F(y), uniform where the predictive is right (`pit`, `quantile_calibration`), and intervals (`coverage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.analysis.metrics.inputs import NUMBERS, chosen, labelled, numeric, predictive_targets, sampled, whole
from plausible.core import random
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

LEVELS = 19
"""Quantiles looked at by `quantile_calibration`: 5 %, 10 %, …, 95 %."""

_PIT = 0x706974


class Reliability(NamedTuple):
    """One entry per bin, [bins]: mean confidence, share of hits, numbers of examples; NaN where a bin is empty."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def reliability(predictive: Any, y: Any, bins: int = 15, binning: str = "width", *, mask: Any = None) -> Reliability:
    """Mean confidence max_k p_k and accuracy in each bin of the confidence: the reliability diagram.

    Bins are (low, high]. "width": equal parts of [0, 1]. "mass": between quantiles of the confidence, as many examples
    in each as ties allow; equal confidences share a bin, so the order of the examples does not matter.
    """
    answers = labelled(predictive, y, mask)
    confidence, top = answers.probs.max(-1)
    sums = _binned(confidence[:, None], (top == answers.labels).double()[:, None], bins, binning)
    return Reliability(*(column.squeeze(-1) for column in sums))


def ece(predictive: Any, y: Any, bins: int = 15, binning: str = "width", *, mask: Any = None) -> float:
    """Σ_b n_b/M |accuracy_b − confidence_b| over bins of the confidence: expected calibration error (Naeini et al. 2015).

    `bins` and `binning` as in `reliability`. For finite data it is above 0 even for the true probabilities, the more so
    the more bins, and predicting the base rate everywhere makes it small: report a proper score with it. "mass" is the
    adaptive variant (Nixon et al. 2019).
    """
    return _gap(*reliability(predictive, y, bins, binning, mask=mask))


def classwise_ece(predictive: Any, y: Any, bins: int = 15, binning: str = "width", *, mask: Any = None) -> float:
    """1/C Σ_c Σ_b n_bc/M |share of class c − mean p_c| over bins of p_c: all probabilities, not the largest (Kull et al. 2019)."""
    answers = labelled(predictive, y, mask)
    return _gap(*_binned(answers.probs, answers.truth, bins, binning)) / answers.probs.shape[-1]


def pit(predictive: Any, y: Any, *, seed: int = 0, mask: Any = None) -> Tensor:
    """F(y) of each target on its own, float64 shaped like y: uniform on [0, 1] where the predictive is right (Dawid 1984).

    Counts, randomised: u = F(y − 1) + v·(F(y) − F(y − 1)) with v uniform (Czado, Gneiting & Held 2009). Plain samples
    [S, *y]: the rank of y among them, v again breaking ties, uniform for every S. `seed` decides v. NaN where masked.
    """
    if not isinstance(predictive, Predictive):
        samples, target, observed = numeric(predictive, y, mask, samples=True)
        below, at_most = (samples < target).sum(0), (samples <= target).sum(0)
        low, high = below / (len(samples) + 1), (at_most + 1) / (len(samples) + 1)
    else:
        target, observed = predictive_targets(predictive, y, mask, NUMBERS, "a cumulative distribution")
        high = double(predictive.cdf(target))[0].cpu()
        low = high
        if predictive.likelihood.kind == "counts":
            low = torch.where(target > 0, double(predictive.cdf((target - 1).clamp(min=0)))[0].cpu(), 0.0)
        if bool(high.isnan().any()):
            raise ValueError("predictive gives a cumulative probability of NaN: its outputs are not finite")
    # Where F jumps, u is drawn inside the jump: only then is it uniform for counts and for ranks among samples.
    level = torch.rand(target.shape, generator=random.generator(seed, _PIT), dtype=torch.float64)
    return torch.where(observed, low + level * (high - low), torch.nan)


def quantile_calibration(
    predictive: Any, y: Any, levels: int | Sequence[float] = LEVELS, *, seed: int = 0, mask: Any = None
) -> float:
    """1/L Σ_l |share of targets below their q_l quantile − q_l|: mean absolute calibration error (after Kuleshov et al. 2018).

    `levels` are quantiles strictly between 0 and 1, or a number L of equidistant ones, l/(L + 1). Counts and samples
    through the randomised `pit`, hence `seed`. At most ½, and about 0.31/√M for M targets of a perfect predictive.
    """
    q = quantile_levels(levels)
    values = pit(predictive, y, seed=seed, mask=mask)
    return quantile_gap(values[~values.isnan()], q)


def quantile_gap(values: Tensor, q: Tensor) -> float:
    """1/L Σ_l |share of PIT values [M] at most q_l − q_l| for levels q [L]."""
    return float(((values[:, None] <= q).double().mean(0) - q).abs().mean())


def quantile_levels(levels: int | Sequence[float]) -> Tensor:
    """The levels themselves, or so many equidistant ones, l/(L + 1); [L]."""
    if isinstance(levels, Integral):
        number = whole("levels", levels, 1)
        return torch.arange(1, number + 1, dtype=torch.float64) / (number + 1)
    q = torch.as_tensor(levels, dtype=torch.float64)
    if q.ndim != 1 or not len(q) or not bool(((q > 0) & (q < 1)).all()):
        raise ValueError(f"levels must be an integer or numbers strictly between 0 and 1, got {levels!r}")
    return q


def coverage(predictive: Any, y: Any, level: float = 0.9, *, mask: Any = None) -> float:
    """1/M Σ 1[low ≤ y ≤ high]: the share of targets inside their equal-tailed interval of probability `level`.

    It should be near `level`, and above it for counts, whose intervals end at integers. Takes plain samples [S, *y] as
    well, or a pair (low, high) of arrays shaped like y, for which `level` means nothing. Read it with `interval_width`.
    """
    if isinstance(predictive, Predictive):
        target, observed = predictive_targets(predictive, y, mask, NUMBERS, "an interval")
        low, high = intervals(predictive, level)
    elif isinstance(predictive, tuple):
        low, high = _pair(predictive)
        low, target, observed = numeric(low, y, mask, samples=False, name="low")
        high = numeric(high, y, mask, samples=False, name="high")[0]
        if bool((low > high)[observed].any()):
            raise ValueError("low lies above high in some places: pass (low, high), in this order")
    else:
        samples, target, observed = numeric(predictive, y, mask, samples=True)
        low, high = intervals(samples, level)
    return float(((low <= target) & (target <= high))[observed].double().mean())


def interval_width(predictive: Any, level: float = 0.9) -> float:
    """1/M Σ (high − low): the mean width of the equal-tailed intervals, in the units of the target.

    Of two predictives with the right coverage the one with the narrower intervals knows more (Gneiting et al. 2007).
    Takes what `coverage` takes.
    """
    low, high = intervals(predictive, level)
    return float((high - low).mean())


def intervals(predictive: Any, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """The bounds (low, high) of a `Predictive`, of plain samples [S, *y], or as they are given; float64."""
    if isinstance(level, bool) or not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1 (0.9 for a 90 % interval), got {level!r}")
    if isinstance(predictive, Predictive):
        if not predictive.num_inputs:
            raise ValueError("predictive is empty: a metric needs at least one example")
        low, high = (double(bound)[0].cpu() for bound in predictive.interval(level))
        if bool((low.isnan() | high.isnan()).any()):
            raise ValueError("predictive gives an interval of NaN: its outputs are not finite")
        return low, high
    if isinstance(predictive, tuple):
        low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in _pair(predictive))
        if bool((low > high).any()) or low.shape != high.shape:
            raise ValueError("predictive is a pair (low, high): expected arrays of one shape with low ≤ high everywhere")
        return low, high
    levels = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(sampled(predictive), levels, dim=0)
    return low, high


def _pair(bounds: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(bounds) != 2:
        raise ValueError(f"predictive as a tuple must be the pair (low, high), got {len(bounds)} values")
    return bounds


def _binned(confidence: Tensor, hit: Tensor, bins: int, binning: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean confidence, mean hit and count in each bin, [bins, K], for columns [M, K] on their own."""
    whole("bins", bins, 1)
    count, columns = confidence.shape
    if chosen("binning", binning, ("width", "mass")) == "width":
        edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1].repeat(columns, 1)
    else:
        last = (torch.arange(1, bins) * count + bins - 1) // bins - 1  # the ⌈kM/B⌉-th smallest closes bin k
        edges = confidence.sort(0).values[last.clamp(min=0)].T.contiguous()
    # The first edge that is not below closes the bin, (low, high], so that a confidence of 1 has a bin.
    place = torch.searchsorted(edges, confidence.T.contiguous()).T  # the first edge that is not below: (low, high]
    sums = [
        torch.zeros(bins, columns, dtype=torch.float64).scatter_add(0, place, value)
        for value in (confidence, hit, torch.ones_like(confidence))
    ]
    return sums[0] / sums[2], sums[1] / sums[2], sums[2]


def _gap(confidence: Tensor, accuracy: Tensor, count: Tensor) -> float:
    """Σ n_b |a_b − c_b| / M over all columns; empty bins weigh nothing."""
    gaps = torch.where(count > 0, count * (accuracy - confidence).abs(), 0.0)
    return float(gaps.sum() / (count.sum() if count.ndim == 1 else count[:, 0].sum()))
