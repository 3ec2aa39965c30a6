"""E(Y − t)₊ and E(t − Y)₊ in closed form: what newsvendors, pinball losses and expected improvement are made of.

    Gaussian             σ·(φ(z) + z·Φ(z))                          z = (μ − t)/σ
    Student-t, df ν > 1  σ·((ν + z²)/(ν − 1)·f(z) − z·F(−z))        z = (t − μ)/σ
    counts               μ·P(Y′ ≥ k) − t·P(Y > k)                   k = ⌊t⌋; Y′ = Y for Poisson, dispersion r + 1 for NB

The mixture over draws has the mean of its components.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.decisions.inputs import aligned, filled, gathered, need, rows_of, target_shape
from plausible.analysis.metrics.inputs import NUMBERS, sampled
from plausible.core.distributions import Affine, Mixture, NegativeBinomial, Poisson, StudentT
from plausible.posteriors.predictive import Predictive

Side = Callable[[distributions.Distribution, Tensor], Tensor]


def expected_excess(predictive: Any, threshold: Any) -> Tensor:
    """E(y − t)₊ = 1/S Σ_s E[(y − t)₊ | f_s], shaped like the targets: how far y is above t, counting 0 where it is not.

    Exact for every likelihood of numbers and counts that comes with the library; infinite for Student-t with df ≤ 1. A plain
    array is samples of y, [S, N, ...], whose mean is taken. `threshold` is a number, one per input [N], or one per target.
    Cost: one pass over the draws.
    """
    return _average(predictive, threshold, above=True)


def expected_shortfall(predictive: Any, threshold: Any) -> Tensor:
    """E(t − y)₊ = E(y − t)₊ − E[y] + t, shaped like the targets: how far y stays below t. As `expected_excess`."""
    return _average(predictive, threshold, above=False)


def _average(predictive: Any, threshold: Any, above: bool) -> Tensor:
    if not isinstance(predictive, Predictive):
        drawn = sampled(filled(predictive, "predictive"))
        away = drawn - aligned(threshold, drawn.shape[1:], "threshold")
        return (away if above else -away).clamp(min=0).mean(0)
    need(predictive, NUMBERS, "but this is about numbers", "decide with a utility matrix")
    level = aligned(threshold, target_shape(predictive), "threshold")
    side = excess if above else shortfall
    expected = lambda rows, given: side(given, rows_of(level, rows, given.mean)).mean(0)  # noqa: E731
    return gathered(predictive, expected, what="an expected distance")


def excess(given: distributions.Distribution, threshold: Tensor) -> Tensor:
    """E(Y − t)₊ elementwise."""
    if isinstance(given, Affine | Mixture):
        return _through(given, threshold, excess, shortfall)
    if isinstance(given, distributions.Normal):
        # Far below the threshold φ(z) and z·Φ(z) cancel, and rounding may leave a little less than 0.
        z = (given.loc - threshold) / given.scale
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return (given.scale * (density + z * torch.special.ndtr(z))).clamp(min=0)
    if isinstance(given, StudentT):
        z, df = (threshold - given.loc) / given.scale, given.df
        # The tail is asked for as cdf(−z) and not as 1 − cdf(z), which has no digits left far out.
        standard = StudentT(df, torch.zeros_like(df), torch.ones_like(df))
        density, tail = standard.log_prob(z).exp(), standard.cdf(-z)
        inside = (df + z * z) / (df - 1) * density - z * tail
        return torch.where(df > 1, (given.scale * inside).clamp(min=0), math.inf)
    if isinstance(given, Poisson | NegativeBinomial):
        floor = torch.floor(threshold)
        above = 1 - _raised(given).cdf(floor - 1)  # P(Y′ ≥ k)
        return (given.mean * above - threshold * (1 - given.cdf(floor))).clamp(min=0)
    raise TypeError(f"no closed form is known for {type(given).__name__}: pass samples of y instead, predictive.sample(10_000)")


def shortfall(given: distributions.Distribution, threshold: Tensor) -> Tensor:
    """E(t − Y)₊ elementwise; by reflection where that is possible, so that small values keep their digits."""
    if isinstance(given, Affine | Mixture):
        return _through(given, threshold, shortfall, excess)
    if isinstance(given, distributions.Normal):
        return excess(distributions.Normal(-given.loc, given.scale, validate_args=False), -threshold)
    if isinstance(given, StudentT):
        return excess(StudentT(given.df, -given.loc, given.scale), -threshold)
    return (excess(given, threshold) - given.mean + threshold).clamp(min=0)


def _through(given: Affine | Mixture, threshold: Tensor, side: Side, other: Side) -> Tensor:
    """By the law inside: Σ_q w_q E(Y_q − t)₊, infinite where Y has no mean; a negative scale exchanges the sides."""
    if isinstance(given, Mixture):
        value = given.average(side(given.base, threshold))
        return value if given.order > 1 else torch.full_like(value, math.inf)
    inner = (threshold - given.loc) / given.scale
    return given.scale.abs() * torch.where(given.scale > 0, side(given.base, inner), other(given.base, inner))


def _raised(given: Poisson | NegativeBinomial) -> Poisson | NegativeBinomial:
    """The law of Y′ with y·P(Y = y) = μ·P(Y′ = y − 1)."""
    if isinstance(given, Poisson):
        return given
    more = torch.log1p(given.log_dispersion.exp())
    return NegativeBinomial(given.log_mean - given.log_dispersion + more, more)
