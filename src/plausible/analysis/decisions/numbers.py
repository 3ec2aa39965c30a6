"""Amounts to choose under asymmetric losses: the quantile action, the newsvendor, LINEX, and E(Y − t)₊ and E(t − Y)₊ behind them.

    Gaussian             σ·(φ(z) + z·Φ(z))                          z = (μ − t)/σ
    Student-t, df ν > 1  σ·((ν + z²)/(ν − 1)·f(z) − z·F(−z))        z = (t − μ)/σ
    counts               μ·P(Y′ ≥ k) − t·P(Y > k)                   k = ⌊t⌋; Y′ = Y for Poisson, dispersion r + 1 for NB

The mixture over draws has the mean of its components. Both the best action and what it is expected to cost have closed forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.decisions.inputs import aligned, filled, gathered, need, refuse, rows_of, target_shape
from plausible.analysis.metrics.inputs import NUMBERS, sampled
from plausible.core.distributions import (
    Affine,
    Mixture,
    NegativeBinomial,
    Poisson,
    StudentT,
    mixture_count_quantile,
    mixture_quantile,
)
from plausible.posteriors.predictive import Predictive

Distance = Callable[[distributions.Distribution, Tensor], Tensor]


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


def _through(given: Affine | Mixture, threshold: Tensor, side: Distance, other: Distance) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class Amount:
    """The best amount for each target, `action`, and its `expected_utility`, both shaped like the targets."""

    action: Tensor
    expected_utility: Tensor

    @property
    def expected_cost(self) -> Tensor:
        return -self.expected_utility


def quantile_action(predictive: Any, under: Any = 1.0, over: Any = 1.0) -> Amount:
    """argmin_a E[under·(y − a)₊ + over·(a − y)₊] = F⁻¹(under/(under + over)), with its expected cost.

    The pinball loss (Koenker & Bassett 1978): `under` is the cost of each unit that a is too small, `over` of each that it is
    too large; equal costs give the median. Each is a positive number or one per input [N]. `predictive` is a `Predictive` of
    numbers or counts (the smallest optimal integer), or samples of y [S, N, ...]. Both are of the mixture itself, not of a
    Gaussian fitted to it. Cost: 10 to 30 passes over the draws.
    """
    shape = _shape(predictive)
    low, high = _positive(under, shape, "under"), _positive(over, shape, "over")
    action = _quantile(predictive, (low / (low + high)).expand(shape[:1]))
    return Amount(action, -quantile_cost(predictive, action, under, over))


def quantile_cost(predictive: Any, action: Any, under: Any = 1.0, over: Any = 1.0) -> Tensor:
    """E[under·(y − a)₊ + over·(a − y)₊] of any action, shaped like the targets.

    `action` is a number, one per input, or one per target. Closed forms as in `expected_excess`. What an action really cost is
    `quantile_cost(y[None], action, …)`, y taken as a single sample.
    """
    shape = _shape(predictive)
    low, high = _per_row(_positive(under, shape, "under"), shape), _per_row(_positive(over, shape, "over"), shape)
    place = aligned(action, shape, "action")
    return low * expected_excess(predictive, place) + high * expected_shortfall(predictive, place)


def newsvendor(predictive: Any, price: Any, cost: Any, *, salvage: Any = 0.0, shortage: Any = 0.0) -> Amount:
    """q* = max(0, F⁻¹(c_u/(c_u + c_o))) units to stock against a demand y, with the expected profit as utility.

    A unit is bought at `cost`, sold at `price`, worth `salvage` when left over, and each unit of demand that is not met costs
    `shortage` in goodwill: c_u = price − cost + shortage is lost by stocking one too few, c_o = cost − salvage by one too many
    (Arrow, Harris & Marschak 1951). Numbers, or one per input. For counts q* is a whole number.
    """
    shape = _shape(predictive)
    _, under, over = _prices(shape, price, cost, salvage, shortage)
    quantity = _quantile(predictive, (under / (under + over)).expand(shape[:1])).clamp(min=0)
    profit = newsvendor_profit(predictive, quantity, price, cost, salvage=salvage, shortage=shortage)
    return Amount(quantity, profit)


def newsvendor_profit(
    predictive: Any, quantity: Any, price: Any, cost: Any, *, salvage: Any = 0.0, shortage: Any = 0.0
) -> Tensor:
    """E[price·min(q, y) + salvage·(q − y)₊ − shortage·(y − q)₊ − cost·q] of any quantity, shaped like the targets.

    = (price − cost)·E[y] − c_u·E(y − q)₊ − c_o·E(q − y)₊. What was really earned is `newsvendor_profit(y[None], …)`, y taken as a
    single sample.
    """
    shape = _shape(predictive)
    margin, under, over = (_per_row(value, shape) for value in _prices(shape, price, cost, salvage, shortage))
    place = aligned(quantity, shape, "quantity")
    lost = under * expected_excess(predictive, place) + over * expected_shortfall(predictive, place)
    return margin * _mean(predictive) - lost


def linex_action(predictive: Any, shape: float) -> Amount:
    """argmin_a E[e^{k(a−y)} − k(a − y) − 1] = −(1/k)·log E e^{−ky}, with k = `shape`, and its expected cost k·(E[y] − a*).

    The LINEX loss (Varian 1975; Zellner 1986): exponential on one side, linear on the other. k > 0 fears too large an action
    and stays below the mean, k < 0 above it; |k| → 0 gives the mean and half the squared error times k². For Gaussian,
    Poisson and negative binomial likelihoods exact over the mixture; a Student-t has no such expectation. A plain array is
    samples of y. Cost: one pass.
    """
    k = _shape_number(shape)
    action = -_log_moment(predictive, -k) / k
    return Amount(action, -k * (_mean(predictive) - action))


def linex_cost(predictive: Any, action: Any, shape: float) -> Tensor:
    """E[e^{k(a−y)} − k(a − y) − 1] of any action, shaped like the targets, k = `shape`."""
    k = _shape_number(shape)
    place = aligned(action, _shape(predictive), "action")
    return torch.exp(k * place + _log_moment(predictive, -k)) - k * (place - _mean(predictive)) - 1


def _shape(predictive: Any) -> tuple[int, ...]:
    if isinstance(predictive, Predictive):
        need(predictive, NUMBERS, "but amounts are numbers", "decide with a utility matrix")
        return target_shape(predictive)
    return tuple(sampled(filled(predictive, "predictive")).shape[1:])


def _mean(predictive: Any) -> Tensor:
    if not isinstance(predictive, Predictive):
        return sampled(predictive).mean(0)
    mean = gathered(predictive, lambda _, given: given.mean.mean(0), what="a mean")
    refuse(~torch.isfinite(mean), "the mean of predictive must be finite")
    return mean


def _quantile(predictive: Any, levels: Tensor) -> Tensor:
    """F⁻¹(level_n) for each input n, shaped like the targets."""
    if not isinstance(predictive, Predictive):
        ordered = sampled(predictive).sort(0).values
        # the smallest x with F(x) ≥ q: 1e-9 forgives the rounding of q·S
        ranks = torch.ceil(levels * len(ordered) - 1e-9).long().clamp(1, len(ordered)) - 1
        return torch.stack([ordered[rank, row] for row, rank in enumerate(ranks.tolist())])
    find = mixture_count_quantile if predictive.likelihood.kind == "counts" else mixture_quantile
    shape = (-1, *(1,) * (len(target_shape(predictive)) - 1))
    action = gathered(predictive, lambda rows, law: find(law, levels[rows].reshape(shape).to(law.mean)), what="a quantile")
    refuse(~torch.isfinite(action), "the quantiles of predictive must be finite")
    return action


def _log_moment(predictive: Any, t: float) -> Tensor:
    """Log E e^{ty} over the mixture."""
    if not isinstance(predictive, Predictive):
        drawn = sampled(filled(predictive, "predictive"))
        return (t * drawn).logsumexp(0) - math.log(len(drawn))
    need(predictive, NUMBERS, "but amounts are numbers", "decide with a utility matrix")

    def average(_: slice, given: Any) -> Tensor:
        return log_moment(given, torch.full_like(given.mean, t)).logsumexp(0) - math.log(given.batch_shape[0])

    value = gathered(predictive, average, what="an exponential moment")
    refuse(~torch.isfinite(value), f"E exp({t:g}·y) must be finite", "choose a shape nearer to 0")
    return value


def log_moment(given: distributions.Distribution, t: Tensor) -> Tensor:
    """Log E e^{tY} elementwise: tμ + t²σ²/2, λ(eᵗ − 1), −r·log(1 − (μ/r)(eᵗ − 1)); infinite where there is none."""
    if isinstance(given, Affine):
        return t * given.loc + log_moment(given.base, t * given.scale)
    if isinstance(given, Mixture) and given.order == math.inf:
        each = log_moment(given.base, t.expand(given.base.batch_shape)) + given.weight.log()
        unbounded = isinstance(given.base, Poisson | NegativeBinomial)  # for each e^f there is a larger one
        return torch.where((t > 0) & unbounded, math.inf, each.logsumexp(0, keepdim=True))
    if isinstance(given, distributions.Normal):
        return t * given.loc + 0.5 * (t * given.scale).square()
    if isinstance(given, Poisson):
        return given.mean * torch.expm1(t)
    if isinstance(given, NegativeBinomial):
        ratio = torch.exp(given.log_mean - given.log_dispersion) * torch.expm1(t)
        return torch.where(ratio < 1, -given.log_dispersion.exp() * torch.log1p(-ratio.clamp(max=1)), math.inf)
    raise TypeError(
        f"LINEX needs E exp(−k·y), which {type(given).__name__} does not have or is not known here: use quantile_action, "
        "or pass samples of y, predictive.sample(10_000), where the expectation exists"
    )


def _positive(value: Any, shape: tuple[int, ...], name: str) -> Tensor:
    given = _one_per_input(value, shape, name)
    refuse(given <= 0, f"{name} must be positive", values=given)
    return given


def _one_per_input(value: Any, shape: tuple[int, ...], name: str) -> Tensor:
    given = aligned(value, shape[:1], name)
    return given.reshape(()) if given.numel() == 1 else given


def _per_row(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[] or [N] → shaped to broadcast with the targets."""
    return value.reshape(-1, *(1,) * (len(shape) - 1)) if value.ndim else value


def _prices(shape: tuple[int, ...], price: Any, cost: Any, salvage: Any, shortage: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Margins: price − cost, c_u and c_o, checked: a stock must be worth having, and worth limiting."""
    named = {"price": price, "cost": cost, "salvage": salvage, "shortage": shortage}
    sold, paid, left, missed = (_one_per_input(value, shape, name) for name, value in named.items())
    refuse(missed < 0, "shortage must not be negative", values=missed)
    under, over = torch.broadcast_tensors(sold - paid + missed, paid - left)
    refuse(under <= 0, "price + shortage must exceed cost, or nothing should be stocked", values=under)
    refuse(over <= 0, "cost must exceed salvage, or no stock would be too large", values=over)
    return sold - paid, under, over


def _shape_number(shape: Any) -> float:
    if isinstance(shape, bool) or not isinstance(shape, Real) or not math.isfinite(shape) or shape == 0:
        raise ValueError(f"shape must be a finite number other than 0 (above 0: too large is worse), got {shape!r}")
    return float(shape)
