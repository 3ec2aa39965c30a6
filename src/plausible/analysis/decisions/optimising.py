"""Where to try next when looking for the best input: expected improvement, its probability, bounds, Thompson draws.

Every score is higher for what should be tried first, whether the target is to be maximised or minimised. Scores look at the
outcome y, noise included, or with of="function" at E[y | f_s] alone: the second is right where trials are noisy and the best
*input* is wanted, for noise is no improvement.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.decisions.inputs import aligned, filled, function_draws, gathered, need, refuse, rows_of, target_shape
from plausible.analysis.decisions.numbers import excess, expected_excess, expected_shortfall
from plausible.analysis.metrics.inputs import NUMBERS, chosen, sampled, whole
from plausible.core import random
from plausible.core.distributions import mixture_cdf
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

OF = ("outcome", "function")


def expected_improvement(predictive: Any, best: Any, *, maximise: bool = True, of: str = "outcome") -> Tensor:
    """E(y − best)₊, to minimise E(best − y)₊: how much better than `best` it is expected to be, shaped like the targets.

    Močkus (1975); Jones, Schonlau & Welch (1998). For a Gaussian mixture 1/S Σ_s σ_s·(φ(z_s) + z_s·Φ(z_s)) with
    z_s = (μ_s − best)/σ_s, and the closed forms of `expected_excess` for other likelihoods. of="function":
    1/S Σ_s (E[y | f_s] − best)₊, without noise; in closed form where f is known to be Gaussian. `best` is a number, one per input,
    or one per target.

    `predictive` is a `Predictive`; draws or samples [S, N, ...], averaged; or a pair (mean, std) [N, ...], taken as a
    Gaussian: `(pred.mean, pred.epistemic.sqrt())` is the smooth version where there are few draws. Cost: one pass.
    """
    chosen("of", of, OF)
    if (gaussian := _pair(predictive, of)) is not None:
        mean, std = gaussian
        return _Reflected(mean, std, maximise).excess(aligned(best, mean.shape, "best"))
    if isinstance(predictive, Predictive) and of == "function":
        return _over_functions(predictive, best, lambda away: away.clamp(min=0), maximise)
    return (expected_excess if maximise else expected_shortfall)(predictive, _named(best, predictive))


def probability_of_improvement(predictive: Any, best: Any, *, maximise: bool = True, of: str = "outcome") -> Tensor:
    """P(y > best), to minimise P(y < best), shaped like the targets (Kushner 1964). Arguments as in `expected_improvement`.

    It asks how likely, not how large: small safe steps score high.
    """
    chosen("of", of, OF)
    if (gaussian := _pair(predictive, of)) is not None:
        mean, std = gaussian
        return _Reflected(mean, std, maximise).above(aligned(best, mean.shape, "best"))
    if not isinstance(predictive, Predictive):
        drawn = sampled(filled(predictive, "predictive"))
        level = aligned(best, drawn.shape[1:], "best")
        return (drawn > level if maximise else drawn < level).double().mean(0)
    if of == "function":
        return _over_functions(predictive, best, lambda away: (away > 0).to(away), maximise)
    need(predictive, NUMBERS, "but improvement is about numbers", "decide with a utility matrix")
    level = aligned(best, target_shape(predictive), "best")
    counts = predictive.likelihood.kind == "counts"

    def beyond(rows: slice, given: Any) -> Tensor:
        place = rows_of(level, rows, given.mean).expand(given.mean.shape[1:])
        if maximise:
            return 1 - mixture_cdf(given, place)
        # P(y < b) of counts is F at the largest whole number below b.
        return mixture_cdf(given, place.ceil() - 1 if counts else place)

    return gathered(predictive, beyond, what="a probability")


def upper_confidence_bound(predictive: Any, weight: float = 2.0, *, maximise: bool = True, of: str = "outcome") -> Tensor:
    """Mean + weight·std, to minimise −mean + weight·std, shaped like the targets (Srinivas et al. 2010).

    std is √Var[y], with of="function" √Var_s E[y | f_s], as in the theory. `predictive` as in `expected_improvement`.
    """
    chosen("of", of, OF)
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        raise ValueError(f"weight must be a finite number of at least 0, got {weight!r}")
    if (gaussian := _pair(predictive, of)) is not None:
        mean, std = gaussian
    elif isinstance(predictive, Predictive):
        need(predictive, NUMBERS, "but bounds are about numbers", "decide with a utility matrix")
        variance = predictive.epistemic if of == "function" else predictive.variance
        mean, std = (value.cpu() for value in double(predictive.mean, variance.sqrt()))
    else:
        drawn = sampled(filled(predictive, "predictive"))
        mean, std = drawn.mean(0), drawn.std(0, correction=0)
    refuse(~torch.isfinite(mean + std), "mean and standard deviation of predictive must be finite")
    return (mean if maximise else -mean) + weight * std


def thompson(predictive: Any, draws: int | None = None, *, seed: int = 0, maximise: bool = True) -> Tensor:
    """argmax_n f_s(x_n) for each draw s: which candidate each plausible function thinks best, int64 [draws].

    Thompson (1933). A candidate is drawn with the probability that it is the best; several draws make a batch that explores.
    f_s is E[y | f_s], coherent over all inputs: a `Predictive` of candidates, `posterior.predict(candidates, draws=20, seed=1)`,
    or an array [S, N], `posterior.functions(candidates, 20)[..., 0]`. `draws` None takes each once, a number picks that many
    at random by `seed`, with replacement. Of equal values the first wins. Cost: S·N.
    """
    functions = function_draws(predictive)
    best = functions.argmax(1) if maximise else functions.argmin(1)
    if draws is None:
        return best
    picks = torch.randint(len(best), (whole("draws", draws, 1),), generator=random.generator(seed, 17))
    return best[picks]


class _Reflected:
    """N(mean, std²), turned over where the target is to be minimised; a point where std is 0."""

    def __init__(self, mean: Tensor, std: Tensor, maximise: bool) -> None:
        self.sign = 1.0 if maximise else -1.0
        self.mean, self.std = self.sign * mean, std

    def excess(self, level: Tensor) -> Tensor:
        known = (self.mean - self.sign * level).clamp(min=0)
        spread = distributions.Normal(self.mean, torch.where(self.std > 0, self.std, 1.0), validate_args=False)
        return torch.where(self.std > 0, excess(spread, self.sign * level), known)

    def above(self, level: Tensor) -> Tensor:
        away = self.mean - self.sign * level
        return torch.where(self.std > 0, torch.special.ndtr(away / self.std.clamp(min=1e-300)), (away > 0).to(away))


def _over_functions(predictive: Predictive, best: Any, score: Any, maximise: bool) -> Tensor:
    """1/S Σ_s score(E[y | f_s] − best), of best − E[y | f_s] to minimise."""
    need(predictive, NUMBERS, "but improvement is about numbers", "decide with a utility matrix")
    level, sign = aligned(best, target_shape(predictive), "best"), 1 if maximise else -1

    def average(rows: slice, given: Any) -> Tensor:
        refuse(~torch.isfinite(given.mean), "the means of predictive must be finite")
        return score(sign * (given.mean - rows_of(level, rows, given.mean))).mean(0)

    return gathered(predictive, average, draws=predictive.num_draws)


def _named(best: Any, predictive: Any) -> Tensor:
    """`best`, checked under its own name before it is a threshold."""
    if isinstance(predictive, Predictive):
        need(predictive, NUMBERS, "but improvement is about numbers", "decide with a utility matrix")
        return aligned(best, target_shape(predictive), "best")
    return aligned(best, sampled(filled(predictive, "predictive")).shape[1:], "best")


def _pair(predictive: Any, of: str) -> tuple[Tensor, Tensor] | None:
    """(mean, std) of a tuple, checked, or of functions whose law is known to be Gaussian."""
    if isinstance(predictive, Predictive) and of == "function":
        predictive = predictive._law_of_functions()
    if not isinstance(predictive, tuple):
        return None
    if len(predictive) != 2:
        raise ValueError(f"predictive is a tuple of {len(predictive)}, expected a pair (mean, std)")
    mean, std = (filled(value, name).double().cpu() for value, name in zip(predictive, ("mean", "std")))
    if mean.shape != std.shape or not mean.ndim:
        raise ValueError(f"mean and std must have one value for each target: got shapes {list(mean.shape)}, {list(std.shape)}")
    refuse(~torch.isfinite(mean), "mean must be finite")
    refuse(~((std >= 0) & torch.isfinite(std)), "std must be finite and not negative", values=std)
    return mean, std
