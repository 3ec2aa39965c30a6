"""Elementwise distributions with a cdf, and the equally weighted mixture over a leading axis of one.

Each is a `torch.distributions.Distribution` with an empty event shape and without argument checks, so that densities
can be traced by `torch.func` and by `torch.compile(fullgraph=True)`; arguments are checked where users give them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributions
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

from plausible.core.special import betainc, double, stirling_error, student_t_cdf

_MAX_DOUBLINGS = 1100  # more than the binary exponents of float64: a bracket always ends
_MAX_STEPS = 600
_ONE = torch.Size()


class StudentT(distributions.StudentT):
    """p(y) = Γ(ν+½) / (Γ(ν)·σ·√(2πν)) · (1 + z²/2ν)^−(ν+½) with ν = df/2, z = (y − loc)/σ: `torch`'s, with a cdf.

    The variance is inf for df ≤ 2, the mean NaN for
    df ≤ 1. The normaliser is written with Stirling errors: it stays exact in float32 as df → ∞ (the Gaussian limit).
    """

    def __init__(self, df: Tensor, loc: Tensor, scale: Tensor) -> None:
        self._narrow_df = df  # before broadcasting: the normaliser is computed once, not for each element
        self.df, self.loc, self.scale = broadcast_all(df, loc, scale)
        distributions.Distribution.__init__(self, self.df.shape, validate_args=False)

    @property
    def _chi2(  # type: ignore[override]
        self,
    ) -> distributions.Chi2:  # only to sample: its constructor copies from the host, which no graph can capture
        return distributions.Chi2(self.df, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> StudentT:
        return StudentT(self._narrow_df, self.loc.expand(batch_shape), self.scale.expand(batch_shape))

    @property
    def mean(self) -> Tensor:
        return torch.where(self.df > 1, self.loc, math.nan)

    @property
    def variance(self) -> Tensor:
        """σ²·df/(df − 2); infinite for df ≤ 2."""
        heavy = self.df <= 2
        return torch.where(heavy, math.inf, self.scale.square() * self.df / torch.where(heavy, 1.0, self.df - 2))

    def log_prob(self, value: Tensor) -> Tensor:
        half = 0.5 * self._narrow_df
        stirling = half * torch.log1p(0.5 / half) + stirling_error(half + 0.5) - stirling_error(half)
        normaliser = stirling - 0.5 * (1 + math.log(2 * math.pi))
        z = (value - self.loc) / self.scale
        return normaliser - self.scale.log() - (half + 0.5) * torch.log1p(z * z / self._narrow_df)

    def cdf(self, value: Tensor) -> Tensor:
        return student_t_cdf((value - self.loc) / self.scale, self._narrow_df)


class Poisson(distributions.Poisson):
    """P(k) = e^{kη − e^η} / k! with η = log rate: `torch`'s, held by its logarithm (no overflow to −inf), with a cdf.

    F(k) = Q(⌊k⌋ + 1, e^η), the regularised upper incomplete gamma function.
    """

    def __init__(self, log_rate: Tensor) -> None:
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Poisson:
        return Poisson(self.log_rate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return value * self.log_rate - self.rate - torch.lgamma(value + 1)

    def cdf(self, value: Tensor) -> Tensor:
        k, rate = broadcast_all(*double(value, self.rate))
        # the cdf of counts is a step function: constant between integers
        below = torch.special.gammaincc(k.floor().clamp(min=0) + 1, rate)
        return torch.where(k < 0, 0.0, below).to(self.rate.device, self.rate.dtype)


class NegativeBinomial(distributions.NegativeBinomial):
    """P(k) = Γ(k+r)/(k!·Γ(r)) · (r/(r+μ))^r · (μ/(r+μ))^k, by mean μ and dispersion r: variance μ + μ²/r.

    F(k) = I_{r/(r+μ)}(r, ⌊k⌋ + 1). r → ∞ is the Poisson distribution, and the log probability stays exact on the way:
    Γ(k+r)/Γ(r) is written with Stirling errors, nothing of the size r·log r is subtracted.
    """

    def __init__(self, log_mean: Tensor, log_dispersion: Tensor) -> None:
        self.log_mean, self.log_dispersion = broadcast_all(log_mean, log_dispersion)
        super().__init__(self.log_dispersion.exp(), logits=self.log_mean - self.log_dispersion, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> NegativeBinomial:
        return NegativeBinomial(self.log_mean.expand(batch_shape), self.log_dispersion.expand(batch_shape))

    @property
    def mean(self) -> Tensor:
        return self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        return self.mean + torch.exp(2 * self.log_mean - self.log_dispersion)

    def log_prob(self, value: Tensor) -> Tensor:
        r, logits = self.total_count, self.logits
        rising = (r + value - 0.5) * torch.log1p(value / r) + value * (self.log_dispersion - 1)
        rising = rising + stirling_error(r + value) - stirling_error(r)
        return rising - torch.lgamma(value + 1) + value * F.logsigmoid(logits) - r * F.softplus(logits)

    def cdf(self, value: Tensor) -> Tensor:
        k, r, logits = broadcast_all(*double(value, self.total_count, self.logits))
        below = betainc(r, k.floor().clamp(min=0) + 1, torch.sigmoid(-logits), torch.sigmoid(logits))
        return torch.where(k < 0, 0.0, below).to(self.logits.device, self.logits.dtype)


class Affine(distributions.Distribution):
    """Y = loc + scale·Z with Z ~ base, elementwise: log p(y) = log p_Z((y − loc)/scale) − log|scale|.

    `loc` and `scale` (nonzero) broadcast against the base's batch shape, which they do not enlarge. Unlike
    `TransformedDistribution` it keeps mean and variance.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.real

    def __init__(self, base: distributions.Distribution, loc: Tensor, scale: Tensor) -> None:
        self.base, self.loc, self.scale = base, loc, scale
        super().__init__(base.batch_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self.base.has_rsample

    def expand(self, batch_shape: Any, _instance: Any = None) -> Affine:
        return Affine(self.base.expand(batch_shape), self.loc, self.scale)

    @property
    def mean(self) -> Tensor:
        return self.loc + self.scale * self.base.mean

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self.base.variance

    def rsample(self, sample_shape: Any = _ONE) -> Tensor:
        return self.loc + self.scale * self.base.rsample(sample_shape)

    def sample(self, sample_shape: Any = _ONE) -> Tensor:
        with torch.no_grad():
            return self.loc + self.scale * self.base.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.base.log_prob((value - self.loc) / self.scale) - self.scale.abs().log()

    def cdf(self, value: Tensor) -> Tensor:
        below = self.base.cdf((value - self.loc) / self.scale)
        return torch.where(self.scale > 0, below, 1 - below)


class Mixture(distributions.Distribution):
    """p(y) = Σ_q w_q p_q(y), elementwise: a weighted mixture over the leading axis of `base`, of which an axis of length 1 stays.

    Its components may be the nodes of an integral; `order` then says which moments exist: those below it. `weight` is [Q], Σ w = 1.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, base: distributions.Distribution, weight: Tensor, order: float = math.inf) -> None:
        self.base, self.order = base, order
        self.weight = weight.reshape(-1, *(1,) * (len(base.batch_shape) - 1))
        super().__init__(torch.Size((1, *base.batch_shape[1:])), validate_args=False)

    def average(self, values: Tensor) -> Tensor:
        """Σ_q w_q values_q, [Q, …] → [1, …]."""
        return (self.weight * values).sum(0, keepdim=True)

    @property
    def mean(self) -> Tensor:
        """Σ w_q E[y | q]; NaN where there is none."""
        mean = self.average(self.base.mean)
        return mean if self.order > 1 else torch.full_like(mean, math.nan)

    @property
    def variance(self) -> Tensor:
        """Σ w_q (Var[y | q] + (E[y | q] − E[y])²); infinite where there is none."""
        mean = self.base.mean
        variance = self.average(self.base.variance + (mean - self.average(mean)).square())
        return variance if self.order > 2 else torch.full_like(variance, math.inf)

    def log_prob(self, value: Tensor) -> Tensor:
        return (self.base.log_prob(value) + self.weight.log()).logsumexp(0, keepdim=True)

    def cdf(self, value: Tensor) -> Tensor:
        return self.average(self.base.cdf(value))


def aligned(name: str, outputs: Tensor, weights: Mapping[str, Tensor] | None, own_axes: int) -> Tensor:
    """The noise weight `name`, [*draws, *own], shaped to broadcast against outputs [*draws, N, *O].

    `own_axes` counts the trailing axes that belong to the weight itself (0, or 1 for one value per output). The others
    are draws: they are matched with the leading axes of the outputs, never with inputs or outputs of the same length.
    """
    if weights is None or name not in weights:
        raise ValueError(f"a learned noise needs its weight: pass weights={{{name!r}: ...}} along with the outputs")
    weight = weights[name]
    draws = weight.ndim - own_axes
    missing = outputs.ndim - weight.ndim
    if missing < 1 or weight.shape[:draws] != outputs.shape[:draws] or weight.shape[draws:] not in ((), outputs.shape[-1:]):
        raise ValueError(
            f"weight {name!r} of shape {list(weight.shape)} does not fit outputs of shape {list(outputs.shape)}: "
            f"expected the draws' axes of the outputs{', then one value per output' * own_axes}"
        )
    # axes of inputs are put between those of draws and of outputs
    return weight.reshape(weight.shape[:draws] + (1,) * missing + weight.shape[draws:])


def constant(name: str, value: float | tuple[float, ...], like: Tensor, shape: Sequence[int]) -> Tensor:
    """A number, or one number per element of the last axis of `shape`, as a tensor with type and device of `like`.

    Filled on the device: a copy from the host could not be captured in a CUDA graph.
    """
    if not isinstance(value, tuple):
        return like.new_full((), value)
    if not shape or shape[-1] != len(value):
        raise ValueError(f"{name} has {len(value)} values, one per output, but targets have shape {list(shape)}")
    return torch.stack([like.new_full((), v) for v in value])


def location_scale(distribution: distributions.Distribution) -> tuple[Tensor, Tensor]:
    """Centre and width of each element, finite also where mean or variance do not exist."""
    if isinstance(distribution, Affine):
        loc, scale = location_scale(distribution.base)
        return distribution.loc + distribution.scale * loc, distribution.scale.abs() * scale
    if isinstance(distribution, distributions.Normal | distributions.StudentT):
        return distribution.loc, distribution.scale
    if isinstance(distribution, Mixture):
        loc, scale = location_scale(distribution.base)
        centre = distribution.average(loc)
        return centre, distribution.average(scale.square() + (loc - centre).square()).sqrt()
    return distribution.mean, distribution.stddev


def components(distribution: distributions.Distribution) -> tuple[distributions.Distribution, Tensor]:
    """What is mixed over the leading axis, [S, …], and the weights, [S, 1, …] or one for all."""
    if isinstance(distribution, Mixture):
        return distribution.base, distribution.weight
    if isinstance(distribution, Affine) and isinstance(distribution.base, Mixture):
        mixed = distribution.base
        return Affine(mixed.base, distribution.loc, distribution.scale), mixed.weight
    count = distribution.batch_shape[0]
    return distribution, torch.full((1,) * len(distribution.batch_shape), 1 / max(1, count), dtype=torch.float64)


def mixture_cdf(distribution: distributions.Distribution, value: Tensor) -> Tensor:
    """F(y) = (1/S) Σ_s F_s(y): the cdf of the equally weighted mixture over the leading axis. [S, …], [...] → [...]."""
    return distribution.cdf(value).mean(0)


def mixture_quantile(distribution: distributions.Distribution, q: float | Tensor) -> Tensor:
    """F⁻¹(q) of the equally weighted mixture of continuous distributions over the leading axis: [S, …] → [...].

    q is one number, or numbers that broadcast with [...].

    The root of F(y) = q: a bracket around all components grows until it holds the root; then Newton steps where they stay
    inside it and at least halve from one to the next, and bisections elsewhere. Ends at |F(y) − q| ≤ 1e-12·min(q, 1−q), or
    where the numbers have no finer resolution: mostly 10 to 30 evaluations of F. A single Gaussian is inverted in closed form.
    """
    if (exact := _normal_quantile(distribution, q)) is not None:
        return exact
    loc, scale = location_scale(distribution)
    low, high, width = loc.amin(0), loc.amax(0), scale.amax(0)
    # a component without spread would leave a bracket that never grows
    width = torch.maximum(width, 1e-6 * torch.maximum(low.abs(), high.abs()))
    for _ in range(_MAX_DOUBLINGS):
        above, below = mixture_cdf(distribution, low) > q, mixture_cdf(distribution, high) < q
        if not bool((above | below).any()):
            break
        low, high = torch.where(above, low - width, low), torch.where(below, high + width, high)
        width = torch.where(above | below, 2 * width, width)
    y = 0.5 * (low + high)
    level = torch.as_tensor(q, dtype=y.dtype, device=y.device)
    tolerance = (1e-12 * torch.minimum(level, 1 - level)).clamp(min=2 * torch.finfo(y.dtype).eps)
    done, move = torch.zeros_like(y, dtype=torch.bool), high - low
    for _ in range(_MAX_STEPS):
        error = mixture_cdf(distribution, y) - q
        low, high = torch.where(error < 0, y, low), torch.where(error < 0, high, y)
        middle = 0.5 * (low + high)
        # the middle is an end: there are no numbers between them
        done |= (error.abs() <= tolerance) | ~((low < middle) & (middle < high))
        if bool(done.all()):
            break
        newton = y - error / distribution.log_prob(y).exp().mean(0)
        # Newton where it converges, halving where it would wander
        good = (low < newton) & (newton < high) & (2 * (newton - y).abs() < move)
        target = torch.where(done, y, torch.where(good, newton, middle))
        y, move = target, (target - y).abs()
    return y


def _normal_quantile(distribution: distributions.Distribution, q: float | Tensor) -> Tensor | None:
    """μ + σΦ⁻¹(q) where the mixture is a single Gaussian, also in other units; None where it is not."""
    if isinstance(distribution, Affine):
        if (upright := _normal_quantile(distribution.base, q)) is None:
            return None
        turned = 2 * distribution.base.mean[0] - upright  # the quantile at 1 − q
        return distribution.loc + distribution.scale * torch.where(distribution.scale > 0, upright, turned)
    if not isinstance(distribution, distributions.Normal) or distribution.batch_shape[0] != 1:
        return None
    loc, scale = distribution.loc[0], distribution.scale[0]
    level = double(q)[0] if isinstance(q, Tensor) else torch.tensor(q, dtype=torch.float64)
    return loc + scale * torch.special.ndtri(level).to(loc)


def mixture_count_quantile(distribution: distributions.Distribution, q: float | Tensor) -> Tensor:
    """The smallest integer k with F(k) ≥ q, for a mixture of counts over the leading axis: [S, …] → [...]; q as above."""
    high = distribution.mean.amax(0).ceil().clamp(min=1)
    low = torch.full_like(high, -1.0)
    for _ in range(_MAX_DOUBLINGS):
        below = mixture_cdf(distribution, high) < q
        if not bool(below.any()):
            break
        low, high = torch.where(below, high, low), torch.where(below, 2 * high, high)
    for _ in range(_MAX_DOUBLINGS):
        middle = torch.floor(0.5 * (low + high))
        # integers: done where both ends are neighbours
        going = (low < middle) & (middle < high)
        if not bool(going.any()):
            break
        below = mixture_cdf(distribution, middle) < q
        low, high = torch.where(going & below, middle, low), torch.where(going & ~below, middle, high)
    return high
