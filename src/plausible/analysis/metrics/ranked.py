"""The continuous ranked probability score, CRPS(F, y) = ∫ (F(z) − 1[y ≤ z])² dz = E|Y − y| − ½ E|Y − Y′|.

In the units of the target; |ŷ − y| for a point. For a mixture of Gaussians (Grimit et al. 2006), with
A(m, v) = E|N(m, v)| = 2√v·φ(m/√v) + m·(2Φ(m/√v) − 1),

    CRPS = 1/S Σ_s A(y − μ_s, σ_s²) − 1/(2S²) Σ_s Σ_t A(μ_s − μ_t, σ_s² + σ_t²).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.metrics.inputs import NUMBERS, numeric, predictive_targets, whole
from plausible.core.distributions import Affine, components, location_scale
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

_REACH = 8.5  # standard deviations: Φ(−8.5) is 1e-17
_MESH = 0.5  # the trapezoidal rule for F(1 − F) with step hσ errs by about exp(−π²/h²): 7e-18


def crps(predictive: Any, y: Any, *, samples: int = 1000, seed: int = 0, mask: Any = None) -> float:
    """1/M Σ [E|Y − y| − ½ E|Y − Y′|]: strictly proper, lower is better (Matheson & Winkler 1976; Gneiting & Raftery 2007).

    Gaussian, heteroscedastic and rescaled Gaussian predictives: exact, in float64, `samples` and `seed` are not used.
    Other likelihoods: `samples` draws of y by `seed`, unbiased (Ferro 2014). Plain samples [S, *y], S ≥ 2, likewise. Cost:
    S² or S·G, whichever is less, for S draws and G ≈ 2·(range of the means)/(least σ) + 34; n log n for n samples.
    """
    return float(crps_values(predictive, y, samples=samples, seed=seed, mask=mask).mean())


def crps_values(predictive: Any, y: Any, *, samples: int = 1000, seed: int = 0, mask: Any = None) -> Tensor:
    """The score of each observed target, float64 [M]."""
    if not isinstance(predictive, Predictive):
        drawn, target, observed = numeric(predictive, y, mask, samples=True)
        return sample_crps(drawn[:, observed], target[observed])
    target, observed = predictive_targets(predictive, y, mask, NUMBERS, "a distribution of numbers")
    if _gaussian(predictive):
        exact = double(_mixture_crps(predictive, target))[0].cpu()[observed]
        if bool(exact.isnan().any()):
            raise ValueError("predictive gives a CRPS of NaN: its outputs are not finite")
        return exact
    drawn = double(predictive.sample(whole("samples", samples, 2), seed))[0].cpu()
    return sample_crps(drawn[:, observed], target[observed].double())


def sample_crps(drawn: Tensor, target: Tensor) -> Tensor:
    """1/n Σ_i |x_i − y| − 1/(2n(n−1)) Σ_i Σ_j |x_i − x_j| for samples [n, M], targets [M]: unbiased (Ferro 2014).

    Sorted, Σ_i Σ_j |x_i − x_j| = 2 Σ_i (2i − n − 1)·x_(i).
    """
    count = len(drawn)
    if count < 2:
        raise ValueError(f"predictive has {count} sample of y; the spread of a distribution needs at least 2")
    # Distances between samples do not change when y is subtracted, and sums of small numbers keep more digits.
    centred = (drawn - target).sort(0).values
    rank = 2 * torch.arange(1, count + 1, dtype=drawn.dtype)[:, None] - count - 1
    return centred.abs().mean(0) - (rank * centred).sum(0) / (count * (count - 1))


def _gaussian(predictive: Predictive) -> bool:
    """Whether this is a mixture of Gaussians, asked of the law of one input."""
    base: Any = components(predictive._first_law())[0]
    while isinstance(base, Affine):
        base = base.base
    return isinstance(base, distributions.Normal)


def _mixture_crps(predictive: Predictive, target: Tensor) -> Tensor:
    def score(rows: slice, law: Any) -> tuple[Tensor]:
        mixed, weight = components(law)
        mean, scale = torch.broadcast_tensors(*location_scale(mixed))
        y, weight = target[rows].to(mean), weight.to(mean)
        return ((weight * _expected_distance(y - mean, scale.square())).sum(0) - half_spread(mean, scale, weight=weight),)

    return predictive._over_laws(score, copies=3)[0]


def _expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """A(m, v) = E|Z| for Z ~ N(m, v), elementwise."""
    scale = variance.sqrt().clamp(min=torch.finfo(variance.dtype).tiny)
    z = mean / scale
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return 2 * scale * density + mean * torch.erf(z / math.sqrt(2))


def half_spread(mean: Tensor, scale: Tensor, how: str = "auto", weight: Tensor | None = None) -> Tensor:
    """½ E|Y − Y′| for two independent draws of the mixture Σ w_s N(mean_s, scale_s²), [S, …] → [...]; w [S, 1, …], None: equal.

    "pairs": the closed form over all pairs, by S/2 cyclic shifts. "grid": ∫ F(1 − F) dz by the trapezoidal rule, whose
    error for Gaussians falls so fast that it reaches rounding with steps of half the least scale.
    """
    draws = len(mean)
    weight = mean.new_full((1,) * mean.ndim, 1 / draws) if weight is None else weight
    reach = _REACH * scale.amax(0)
    low, width = mean.amin(0) - reach, mean.amax(0) - mean.amin(0) + 2 * reach
    need = float((width / (_MESH * scale.amin(0))).max())
    points = math.ceil(need) + 1 if math.isfinite(need) else draws
    # A point of the grid costs S and all pairs S²/2: many draws of similar means are cheaper on the grid.
    if how == "grid" or (how == "auto" and points < draws // 2):
        step = width / (points - 1)
        total = torch.zeros_like(low)
        for index in range(points):
            below = (weight * torch.special.ndtr((low + index * step - mean) / scale)).sum(0)
            total += below * (1 - below)
        return total * step
    variance = scale.square()
    total = (weight.square() * scale).sum(0) * (2 / math.sqrt(math.pi))  # s = t: A(0, 2σ²) = 2σ/√π
    # A shift meets each pair once and stands for both its orders; the half turn of an even S meets each twice already.
    for shift in range(1, draws // 2 + 1):
        pairs = _expected_distance(mean - mean.roll(shift, 0), variance + variance.roll(shift, 0))
        total = total + (weight * weight.roll(shift, 0) * pairs).sum(0) * (1 if 2 * shift == draws else 2)
    return 0.5 * total
