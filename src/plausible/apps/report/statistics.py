"""What chance alone explains: exact tests behind the verdicts of a report, so that none is given without support.

Null distributions are those of predictions that are right: hits are Bernoulli with the stated probabilities, the
probability integral transform is uniform, uncertainty and error are unrelated.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import scipy.special

SUPPORT = 0.01
"""A deviation is called one where a right prediction would show it, in either direction, less often than this."""

_EXACT_UP_TO = 20_000  # trials; beyond it the normal approximation, whose error is then far below SUPPORT


class Test(NamedTuple):
    """The two-sided p-value, and the direction of the deviation: −1 below, +1 above what was expected."""

    p: float
    direction: int

    @property
    def supported(self) -> bool:
        return self.p < SUPPORT

    def among(self, tests: int) -> Test:
        """One of several tests behind one verdict, any of which may decide it: p·tests (Bonferroni)."""
        return Test(min(1.0, tests * self.p), self.direction)


def wilson(share: float, count: int, z: float = 1.6449) -> tuple[float, float]:
    """(s + z²/2n ± z √(s(1 − s)/n + z²/4n²)) / (1 + z²/n), the interval of Wilson (1927) for a share s of n; 90 %."""
    shrink, centre = 1 + z * z / count, share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink)


def hits(probabilities: np.ndarray, count: int) -> Test:
    """P(|Σ_i b_i − E| at least as extreme as `count`) for independent b_i ~ Bernoulli(p_i): the Poisson binomial law.

    Equal probabilities give the binomial test. The law is built trial by trial, O(N²), up to 20,000 trials.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    expected, variance = float(p.sum()), float((p * (1 - p)).sum())
    if len(p) <= _EXACT_UP_TO:
        law = np.zeros(len(p) + 1)
        # Trial by trial the law of the sum is exact, where a normal approximation of few unequal trials is not.
        law[0] = 1.0
        for number, chance in enumerate(p, start=1):
            law[1 : number + 1] = law[1 : number + 1] * (1 - chance) + law[:number] * chance
            law[0] *= 1 - chance
        below, above = float(law[: count + 1].sum()), float(law[count:].sum())
    else:
        spread = math.sqrt(2 * max(variance, 1e-300))
        below = 0.5 * math.erfc((expected - count - 0.5) / spread)
        above = 0.5 * math.erfc((count - 0.5 - expected) / spread)
    return Test(min(1.0, 2 * min(below, above)), 1 if count > expected else -1)


def powerless(probabilities: np.ndarray, direction: int, tests: int = 1) -> bool:
    """Whether `hits` can call no count on one side: even all hits (or none) have 2 ∏ p_i (or 2 ∏ (1 − p_i)) ≥ SUPPORT."""
    p = np.asarray(probabilities, dtype=np.float64)
    return 2 * tests * float(np.prod(p if direction > 0 else 1 - p)) >= SUPPORT


def normal(z: float) -> Test:
    """The two-sided test of a standard normal z."""
    return Test(math.erfc(abs(z) / math.sqrt(2)), 1 if z > 0 else -1)


def uniform(values: np.ndarray) -> Test:
    """Kolmogorov's test of values [N] in [0, 1], with the correction of Stephens (1970); direction of the mean."""
    ordered, count = np.sort(np.asarray(values, dtype=np.float64)), len(values)
    steps = np.arange(1, count + 1) / count
    distance = float(max((steps - ordered).max(), (ordered - steps + 1 / count).max()))
    reach = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    return Test(float(scipy.special.kolmogorov(reach)), 1 if ordered.mean() > 0.5 else -1)


def spread(values: np.ndarray) -> Test:
    """S = Σ_i (2u_i − 1)² of values u [N] against its law for uniform u_i; +1 where they lie further from ½ than that.

    With the cumulants K(t) = log ∫₀¹ exp(t v²) dv of one term and the saddlepoint K'(t) = S/N, the tail beyond S is
    Φ(−|r|) + φ(r) (1/|q| − 1/|r|), r = √(2N (t K' − K)), q = t √(N K''): Lugannani & Rice (1980). Tails of 0.05 to
    10 % come out within 4 % of themselves from N = 5 on, 12 % below. Where |t| > 2,000 the tail at that bound, which is
    larger, is taken.
    """
    count = len(values)
    target = float(((2 * np.clip(np.asarray(values, dtype=np.float64), 0, 1) - 1) ** 2).mean())
    squares, weights = _quadrature()

    def cumulants(t: float) -> tuple[float, float, float]:
        # The largest exponent is taken out: t goes to ±2,000.
        tilted = weights * np.exp(t * squares - max(t, 0.0))
        total = float(tilted.sum())
        mean = float((tilted * squares).sum()) / total
        return math.log(total) + max(t, 0.0), mean, float((tilted * (squares - mean) ** 2).sum()) / total

    # K' grows with t, so halving the interval cannot miss the saddlepoint.
    low, high = -2000.0, 2000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulants(middle)[1] < target else (low, middle)
    log_moment, mean, variance = cumulants(low)
    r = math.sqrt(2 * count * max(0.0, low * mean - log_moment))
    if r < 1e-3:
        return Test(1.0, 1 if low > 0 else -1)
    q = abs(low) * math.sqrt(count * variance)
    tail = math.erfc(r / math.sqrt(2)) / 2 + math.exp(-r * r / 2) / math.sqrt(2 * math.pi) * (1 / q - 1 / r)
    return Test(min(1.0, max(0.0, 2 * min(tail, 1 - tail))), 1 if low > 0 else -1)


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    """v² and weights of 128 Gauss–Legendre nodes v in [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(128)
    return ((nodes + 1) / 2) ** 2, weights / 2


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks 1…N of values [N], ties sharing their mean rank."""
    # Not scipy.stats.rankdata: that module takes longer to import than a plot to draw.
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place.reshape(-1)]


def association(first: np.ndarray, second: np.ndarray) -> tuple[float, Test] | None:
    """Spearman's ρ of two arrays [N] and its test by ρ√(N − 1) ~ N(0, 1); None where one of them does not vary."""
    one, two = ranks(first), ranks(second)
    if len(one) < 3 or not one.std() or not two.std():
        return None
    rho = float(np.corrcoef(one, two)[0, 1])
    return rho, normal(rho * math.sqrt(len(one) - 1))


def improvement(losses: np.ndarray, baseline: np.ndarray) -> Test:
    """The paired t-test of mean(baseline − losses) = 0, losses [N] each: +1 where they are below the baseline.

    t with ν = N − 1 becomes normal by z = √(ν log(1 + t²/ν)) (8ν + 1)/(8ν + 3) (Wallace 1959). Gains that are all the
    same have no spread, and are judged by their signs.
    """
    gains = np.asarray(baseline, dtype=np.float64) - losses
    if len(gains) < 2 or not gains.std():
        return signs(losses, baseline)
    free = len(gains) - 1
    t = float(gains.mean() / (gains.std(ddof=1) / math.sqrt(len(gains))))
    return normal(math.copysign(math.sqrt(free * math.log1p(t * t / free)) * (8 * free + 1) / (8 * free + 3), t))


def signs(losses: np.ndarray, baseline: np.ndarray) -> Test:
    """The sign test: Binomial(n, ½) rows have the smaller loss, of the n rows whose losses differ; +1 where they are more.

    Unlike a mean of squares it is not ruled by the few largest ones.
    """
    gains = np.asarray(baseline, dtype=np.float64) - losses
    return hits(np.full(int((gains != 0).sum()), 0.5), int((gains > 0).sum()))


def chance_ece(confidence: np.ndarray, bins: int = 15, level: float = 0.99, rounds: int = 1000, seed: int = 0) -> float:
    """The calibration error that predictions with these confidences [N] stay below with probability `level` if right.

    Consistency resampling (Bröcker & Smith 2007): hits are drawn from the stated confidences, and the error over bins of
    equal width is computed for each round. Cost: `rounds`·N random numbers.
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    place = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], confidence)
    stated = np.bincount(place, confidence, bins)
    random = np.random.default_rng(seed)
    errors = np.empty(rounds)
    # One round at a time: all of them at once would be `rounds`·N numbers in memory.
    for index in range(rounds):
        right = np.bincount(place, random.random(len(confidence)) < confidence, bins)
        errors[index] = np.abs(right - stated).sum() / len(confidence)
    return float(np.quantile(errors, level))


def count_range(trials: int, chance: float, level: float = 0.99) -> tuple[int, int]:
    """The equal-tailed range of a Binomial(trials, chance) count that holds at least `level` of its probability."""
    if trials > _EXACT_UP_TO:
        centre, spread = trials * chance, 2.5758 * math.sqrt(trials * chance * (1 - chance))
        return math.floor(centre - spread), math.ceil(centre + spread)
    below = scipy.special.bdtr(np.arange(trials + 1), trials, chance)
    tail = (1 - level) / 2
    return int(np.searchsorted(below, tail)), min(trials, int(np.searchsorted(below, 1 - tail)))


def rank_shares(values: np.ndarray, bins: int = 20) -> np.ndarray:
    """Densities of the ranks of each chain's draws among those of all chains, [chains, bins], 1 where chains agree.

    values: [chains, draws, quantities]; ranks are taken for each quantity and counted together. Fewer bins where there
    are few draws (Vehtari et al. 2021).
    """
    chains, draws, count = values.shape
    bins = max(2, min(bins, draws // 5))
    place = values.reshape(-1, count).argsort(0, kind="stable").argsort(0).reshape(values.shape)
    place = place * bins // (chains * draws)
    counts = np.stack([np.bincount(place[chain].reshape(-1), minlength=bins) for chain in range(chains)])
    return counts * bins / (draws * count)
