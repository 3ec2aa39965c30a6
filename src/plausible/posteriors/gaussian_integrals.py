"""p(y | x) = ∫ p(y | f) N(f; m, V) df for Gaussian outputs f(x): laws, moments and joint densities of y, without a seed.

| likelihood | law of one target |
|---|---|
| `Gaussian` | N(m, v + σ²): exact |
| `StudentT` | a scale mixture: ∫ N(m, v + σ²/λ) Gamma(λ; df/2, df/2) dλ, by the trapezoidal rule in log λ |
| `HeteroscedasticGaussian`, `LogVarianceGaussian` | the mean given the raw scale is Gaussian; the rule over the raw scale |
| `Poisson`, `NegativeBinomial` | moments in closed form; the rule in f, or in what makes the count, whichever is smoother |
| others with one output a target | the rule over that output |
| others | points that fill N(m, V) evenly: `scattered` |

`Scaled` ones are those of what they scale. The trapezoidal rule converges exponentially for smooth integrands that vanish at both
ends; each is set up so that no function is sharper than the law that it is integrated against.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, distributions

from plausible.blocks.moments.expectations import LogVarianceGaussian
from plausible.blocks.moments.gaussians import Moments
from plausible.core import likelihoods, random
from plausible.core.distributions import Affine, Mixture, NegativeBinomial, Poisson, constant
from plausible.core.likelihoods import Likelihood, unscaled

NODES, WIDTH = 129, 8.0
"""Nodes of the trapezoidal rule over one output, and how many standard deviations it reaches."""

_CHOSEN, _REACH = 97, 12.0  # of the rule around the mode of a count, in its own widths
_SHARP = 30.0  # from this precision of log y on, the law of what makes a count is close to a Gaussian
_TINY = 1e-150
Noise = Mapping[str, Tensor]


def law(likelihood: Likelihood, f: Moments, output_shape: tuple[int, ...], noise: Noise) -> distributions.Distribution:
    """The law of each target on its own, [1, n, *targets], the axis of the mixture being integrated over."""
    if isinstance(likelihood, likelihoods.Scaled):
        base = law(likelihood.likelihood, f, output_shape, noise)
        loc, scale = (constant(n, getattr(likelihood, n), f.mean, base.batch_shape) for n in ("loc", "scale"))
        return Affine(base, loc, scale)
    mean, variance = _shaped(f, output_shape)
    if isinstance(likelihood, likelihoods.Gaussian):
        spread = (variance + likelihood(mean, noise).variance).sqrt()
        return distributions.Normal(mean[None], spread[None], validate_args=False)
    if isinstance(likelihood, likelihoods.StudentT):
        scale, df = likelihood(mean, noise).scale, float(likelihoods.degrees(likelihood.df, mean, noise))
        precision, share = (mean.new_tensor(part) for part in _gamma_rule(df))
        spread = (variance + scale.square() / precision.reshape(-1, *(1,) * mean.ndim)).sqrt()
        return Mixture(distributions.Normal(mean, spread, validate_args=False), share, order=df)
    if isinstance(likelihood, likelihoods.HeteroscedasticGaussian | LogVarianceGaussian):
        return _heteroscedastic(likelihood, f, output_shape)
    if isinstance(likelihood, likelihoods.Poisson | likelihoods.NegativeBinomial):
        return Counts(likelihood, mean, variance, noise)
    return Mixture(*_components(likelihood, f, output_shape, noise))


def summary(likelihood: Likelihood, f: Moments, output_shape: tuple[int, ...], noise: Noise) -> tuple[Tensor, ...]:
    """E[y], E Var[y | f] and Var E[y | f], each [n, *targets]: in closed form but for noise that the outputs decide."""
    if isinstance(likelihood, likelihoods.Scaled):
        mean, inside, between = summary(likelihood.likelihood, f, output_shape, noise)
        loc, scale = (constant(n, getattr(likelihood, n), mean, mean.shape) for n in ("loc", "scale"))
        return loc + scale * mean, scale.square() * inside, scale.square() * between
    mean, variance = _shaped(f, output_shape)
    if isinstance(likelihood, likelihoods.Gaussian | likelihoods.StudentT):
        given = likelihood(mean, noise)
        return given.mean, given.variance, variance
    if isinstance(likelihood, likelihoods.HeteroscedasticGaussian | LogVarianceGaussian):
        points, weight = along(*(part.chunk(2, -1)[1] for part in (mean, variance)))
        inside = (weight * _noise_scale(likelihood, points).square()).sum(0)
        return mean.chunk(2, -1)[0], inside, variance.chunk(2, -1)[0]
    if isinstance(likelihood, likelihoods.Poisson | likelihoods.NegativeBinomial):
        counts = Counts(likelihood, mean, variance, noise)
        return counts.mean[0], counts.noise, counts.rate_variance
    each, weight = _components(likelihood, f, output_shape, noise)
    centre = (weight * each.mean).sum(0)
    return centre, (weight * each.variance).sum(0), (weight * (each.mean - centre).square()).sum(0)


def log_density(
    likelihood: Likelihood, f: Moments, output_shape: tuple[int, ...], noise: Noise, y: Tensor, observed: Tensor | None
) -> Tensor:
    """Log of ∫ Π_o p(y_o | f) N(f; m, V) df of all targets of an input together, [n]; of the `observed` ones with a mask.

    Exact for Gaussian noise: the density of N(m, V + σ²). For other likelihoods by `law` where an input has one target, or outputs
    that are independent; otherwise by `scattered` points, whose error grows where the noise is small beside V.
    """
    seen = torch.ones_like(y, dtype=torch.bool) if observed is None else observed
    if isinstance(likelihood, likelihoods.Scaled):
        loc, scale = (constant(n, getattr(likelihood, n), f.mean, y.shape) for n in ("loc", "scale"))
        inner = log_density(likelihood.likelihood, f, output_shape, noise, (y.to(f.mean) - loc) / scale, observed)
        return inner - torch.where(seen, scale.abs().log(), 0.0).reshape(len(y), -1).sum(-1)
    single = y.numel() == len(y)
    if isinstance(likelihood, likelihoods.Gaussian) and not single and matrix(f) is not None:
        given = likelihood(f.mean.reshape(-1, *output_shape), noise)
        return _normal_density(f, given.variance.reshape(f.mean.shape), y.reshape(f.mean.shape), seen.flatten(1))
    if (single or matrix(f) is None) and likelihood.kind not in ("classes", "binary"):
        each = law(likelihood, f, output_shape, noise).log_prob(y.to(f.mean))[0]
        return torch.where(seen, each, 0.0).reshape(len(y), -1).sum(-1)
    points = scattered(f).reshape(-1, len(y), *output_shape)
    each = torch.where(seen, likelihood.log_prob(points, y, noise), 0.0)
    return each.reshape(len(points), len(y), -1).sum(-1).logsumexp(0) - math.log(len(points))


def scattered(f: Moments, count: int | None = None, seed: int = 0) -> Tensor:
    """Points of N(m, V) that fill it evenly, [Q, n, P]: Sobol's sequence, scrambled by `seed`, and its reflection at m.

    Functions of which the odd part about m integrates to nothing are integrated without it; the mean is exact. Cost: Q·n·P², for
    independent outputs Q·n·P.
    """
    size = f.mean.shape[-1]
    z = _sobol(size, count or scattered_count(size), seed).to(f.mean)
    covariance = matrix(f)
    if covariance is None:
        return f.mean + f.variance.clamp(min=0).sqrt() * z[:, None]
    half = root(covariance)
    return f.mean + (z @ half.reshape(-1, size).T).reshape(-1, *f.mean.shape)  # [Q, n·P], classes next to one another


def scattered_count(size: int) -> int:
    """How many points `scattered` takes: 1,024 for up to 64 outputs, fewer for more, at least 64."""
    return 2 ** int(math.log2(min(1024, max(64, 2**16 // max(1, size)))))


def located(likelihood: Likelihood) -> bool:
    """Whether E[y | f] is an output or, in other units, a line in it: then it is Gaussian as f is."""
    inner = unscaled(likelihood)
    student = isinstance(inner, likelihoods.StudentT) and (inner.df == "learned" or inner.df > 1)
    noisy = likelihoods.Gaussian | likelihoods.HeteroscedasticGaussian | LogVarianceGaussian
    return student or isinstance(inner, noisy)


def matrix(f: Moments) -> Tensor | None:
    """The covariance [n, P, P] where there is one: not for independent outputs, nor for a single one."""
    return f.covariance if f.covariance is not None and f.covariance.ndim == 3 and f.mean.shape[-1] > 1 else None


def root(covariance: Tensor) -> Tensor:
    """R with R·Rᵀ = V, [n, P, P]: by Cholesky, by eigenvalues (negative ones, which are rounding, as 0) where that fails."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    bad = info != 0
    if bool(bad.any()):
        finite = covariance.isfinite().flatten(1).all(-1)
        # eigh would raise for the whole batch on one matrix that is not finite
        factor[bad & ~finite] = math.nan
        values, vectors = torch.linalg.eigh(covariance[bad & finite])
        factor[bad & finite] = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return factor


def along(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Points m + √v·z_q, [Q, *shape], and weights [Q, 1, …] of the trapezoidal rule."""
    z = _grid(WIDTH, NODES, mean)
    return mean + variance.clamp(min=0).sqrt() * z, (-0.5 * z * z).softmax(0)


class Counts(Mixture):
    """Counts whose mean is e^f with f ~ N(m, v): E = e^{m + v/2}, Var = E + E²·(e^v − 1) + E²·e^v/r (no last term for Poisson).

    log P(k) is summed around the mode of P(k | f) N(f; m, v), which is log-concave in f. F(k) = P(f < T_k), T_k being the log of a
    Gamma(k + 1) variable, for NB the log of r times the odds against a Beta(r, k + 1) variable: summed over f where T is the wider
    of the two, over T where f is.
    """

    def __init__(self, likelihood: Likelihood, mean: Tensor, variance: Tensor, noise: Noise) -> None:
        points, weight = along(mean, variance)
        given = likelihood(points, noise)
        assert isinstance(given, Poisson | NegativeBinomial)
        super().__init__(given, weight)
        self.log_mean, self.scale = mean, variance.clamp(min=0).sqrt()
        self._make = lambda f: likelihood(f, noise)
        infinite = mean.new_full((), math.inf)  # the dispersion of Poisson
        self.dispersion = given.total_count[0] if isinstance(given, NegativeBinomial) else infinite

    @property
    def mean(self) -> Tensor:
        return torch.exp(self.log_mean + 0.5 * self.scale.square())[None]

    @property
    def noise(self) -> Tensor:
        """E Var[y | f], [n, …]."""
        return self.mean[0] + self.mean[0].square() * self.scale.square().exp() / self.dispersion

    @property
    def rate_variance(self) -> Tensor:
        """Var e^f, [n, …]."""
        return self.mean[0].square() * torch.expm1(self.scale.square())

    @property
    def variance(self) -> Tensor:
        return (self.noise + self.rate_variance)[None]

    def log_prob(self, value: Tensor) -> Tensor:
        value = value.to(self.log_mean)
        middle = self._mode(value)
        width = torch.rsqrt(1 + self.scale.square() * self._slope(value, self.log_mean + self.scale * middle)[1])
        # centred at the mode and scaled by the curvature there: the integrand may be far narrower than N(m, v)
        z = middle + width * _grid(_REACH, _CHOSEN, middle)
        inside = self._make(self.log_mean + self.scale * z).log_prob(value) - 0.5 * z * z
        constant = math.log(2 * _REACH / (_CHOSEN - 1)) - 0.5 * math.log(2 * math.pi)
        return (inside.logsumexp(0) + width.log() + constant)[None]

    def _slope(self, k: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """d/df log P(k | f), and minus the second derivative."""
        rate = f.exp()
        share = 1 / (1 + rate / self.dispersion)  # 1 for Poisson
        return k - (k / self.dispersion + 1) * rate * share, (k / self.dispersion + 1) * rate * share.square()

    def _mode(self, k: Tensor) -> Tensor:
        """argmax_z log P(k | m + sz) − z²/2, to about 1e-9 of the bracket: between 0 and where the counts alone would put it."""
        mean, scale = self.log_mean, self.scale.clamp(min=_TINY)
        counts = (k.clamp(min=1e-17).log() - mean) / scale
        pull = scale * self._slope(k, mean)[0]
        # the mode lies between the prior's and where the counts alone would put it, and no further than the slope pulls
        far = torch.where(pull > 0, torch.minimum(pull, counts), torch.maximum(pull, counts))
        low, high = far.clamp(max=0), far.clamp(min=0)
        # bisection: the slope is monotone, and Newton's steps may overshoot
        for _ in range(60):
            middle = 0.5 * (low + high)
            rising = scale * self._slope(k, mean + scale * middle)[0] > middle
            low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
        return 0.5 * (low + high)

    def cdf(self, value: Tensor) -> Tensor:
        k = value.to(self.log_mean).floor()
        above = k.clamp(min=0) + 1
        against = 1 / (1 + above / self.dispersion)  # 1 for Poisson
        precision = above * against
        away = _grid(WIDTH, NODES, precision) * precision.rsqrt()  # T_k from its mode
        if isinstance(self.base, Poisson):
            logs = above * (away - torch.expm1(away))
        else:
            logs = above * away - (above + self.dispersion) * torch.log1p((1 - against) * torch.expm1(away))
        place = (above.log() + away - self.log_mean) / self.scale.clamp(min=_TINY)
        made = (logs.softmax(0) * torch.special.ndtr(place)).sum(0)
        # the rule must be finer than what it integrates: over the narrower of the two laws it would miss it
        sharp = (precision > _SHARP) & (precision * self.scale.square() > 1)
        below = torch.where(sharp, made, super().cdf(k)[0])
        return torch.where(k < 0, 0.0, below)[None]


def _shaped(f: Moments, output_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and variance, [n, *O]."""
    return f.mean.reshape(-1, *output_shape), f.variance.clamp(min=0).reshape(-1, *output_shape)


def _grid(width: float, count: int, like: Tensor) -> Tensor:
    """−width … width, [count, 1, …] to broadcast against `like`."""
    return torch.linspace(-width, width, count, dtype=like.dtype, device=like.device).reshape(-1, *(1,) * like.ndim)


def _components(
    likelihood: Likelihood, f: Moments, output_shape: tuple[int, ...], noise: Noise
) -> tuple[distributions.Distribution, Tensor]:
    """p(y | f_q) and weights at the nodes of a rule for any likelihood: over each output where it has its own target."""
    shape = (len(f.mean), *output_shape)
    if likelihood.target_shape(shape) == shape:
        points, weight = along(*_shaped(f, output_shape))
    else:
        points = scattered(f).reshape(-1, *shape)
        weight = points.new_full((len(points), *(1,) * len(likelihood.target_shape(shape))), 1 / len(points))
    return likelihood(points, noise), weight


def _noise_scale(likelihood: Likelihood, raw: Tensor) -> Tensor:
    """The scale of the noise that a raw scale stands for."""
    given = likelihood(torch.cat([raw, raw], -1))
    assert isinstance(given, distributions.Normal)
    return given.scale


def _heteroscedastic(likelihood: Likelihood, f: Moments, output_shape: tuple[int, ...]) -> Mixture:
    """The law of y, which given the raw scale r is N(E[m | r], Var[m | r] + s(r)²)."""
    (centre, raw), (spread, raw_spread) = (part.chunk(2, -1) for part in _shaped(f, output_shape))
    crossed = torch.zeros_like(centre)
    if (covariance := matrix(f)) is not None:
        places = torch.arange(f.mean.shape[-1], device=raw.device).reshape(output_shape).chunk(2, -1)
        crossed = covariance[:, places[0].flatten(), places[1].flatten()].reshape(centre.shape)
    # the regression of the mean on the raw scale; none where the raw scale is known
    slope = torch.where(raw_spread > 0, crossed / raw_spread.clamp(min=_TINY), 0.0)
    points, weight = along(raw, raw_spread)
    variance = (spread - slope * crossed).clamp(min=0) + _noise_scale(likelihood, points).square()
    middle = centre + slope * (points - raw)
    return Mixture(distributions.Normal(middle, variance.sqrt(), validate_args=False), weight)


def _normal_density(f: Moments, noise: Tensor, y: Tensor, observed: Tensor) -> Tensor:
    """Log N(y; m, V + σ²) of the observed outputs, [n]: the others are made independent, with variance 1 and no residual."""
    residual = torch.where(observed, y.to(f.mean) - f.mean, 0.0)
    both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
    noises = torch.diag_embed(torch.where(observed, noise, 1.0))
    covariance = torch.where(both, f.covariance, 0.0)  # type: ignore[arg-type]
    factor, info = torch.linalg.cholesky_ex(covariance + noises)
    # rounding can make V indefinite by a little, and the noise is too small to cover it
    if bool((info != 0).any()):
        half = root(covariance)
        factor = torch.linalg.cholesky(half @ half.mT + noises)
    z = torch.linalg.solve_triangular(factor, residual.unsqueeze(-1), upper=False).squeeze(-1)
    scale = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * z.square().sum(-1) - scale - 0.5 * math.log(2 * math.pi) * observed.sum(-1).to(scale)


@lru_cache(maxsize=16)
def _gamma_rule(df: float) -> tuple[list[float], list[float]]:
    """Nodes λ and weights of a Gamma(df/2, rate df/2) variable: the trapezoidal rule in u = log λ, to where nothing is left.

    The log density of u is a(u − e^u) + const with a = df/2, highest at 0 and falling like a·u to the left.
    """
    a = 0.5 * df
    left, right = -(40 / a + 1), min(math.log1p(40 / a) + 1, math.sqrt(100 / a) + 0.1)
    left = max(left, -math.sqrt(100 / a) - 100 / a)
    # fine enough for wide laws of few degrees of freedom too
    u = np.linspace(left, right, max(NODES, math.ceil((right - left) / 0.3)))
    logs = a * (u - np.expm1(u))
    weight = np.exp(logs - logs.max())
    return np.exp(u).tolist(), (weight / weight.sum()).tolist()


@lru_cache(maxsize=16)
def _sobol(size: int, count: int, seed: int) -> Tensor:
    """Standard normal points, [count, size] in float64 on the CPU, each with its reflection."""
    half = (count + 1) // 2
    if size > torch.quasirandom.SobolEngine.MAXDIM:
        z = random.normals(seed, 23, count=half * size, like=torch.empty(0, dtype=torch.float64)).reshape(half, size)
    else:
        # points that fill the space evenly: the error falls almost like 1/Q and not like 1/√Q
        engine = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed % 2**31)
        z = torch.special.ndtri(engine.draw(half, dtype=torch.float64).clamp(2**-31, 1 - 2**-31))
    return torch.cat([z, -z])[:count]
