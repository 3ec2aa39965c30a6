"""E log p(y | f) for Gaussian outputs f, without sampling, and the likelihood whose noise has closed forms.

| likelihood | how | what it is |
|---|---|---|
| `Gaussian`, also under `Scaled`, noise fixed or learned | closed form | exact for any law of f with these moments |
| `LogVarianceGaussian` | closed form | exact for Gaussian f |
| `HeteroscedasticGaussian` | quadrature over the raw scale, the mean given it in closed form | exact for Gaussian f up to 1e-6 |
| `Poisson` | closed form | exact for Gaussian f |
| `Bernoulli`, `StudentT`, `NegativeBinomial`, others of single outputs | quadrature | exact for Gaussian f up to 1e-4 |
| `Categorical`, two classes | quadrature over the difference | exact for Gaussian f up to 1e-4 |
| `Categorical`, more classes | a lower bound | equal up to the first order in the covariance |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, distributions

from plausible.blocks.moments.gaussians import Moments, Weight, along, nodes, root
from plausible.core import likelihoods
from plausible.core.distributions import constant
from plausible.core.likelihoods import LOG_SCALE, Likelihood
from plausible.core.serialise import register

NOISE_NODES = 10
TILTS = 12  # iterations towards the best tilt of the bound for several classes
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@register
@dataclass(frozen=True)
class LogVarianceGaussian(likelihoods.MeanAndNoise):
    """p(y | f) = N(y; m, e^ℓ) with m the first half of the last axis of f and ℓ, the log variance, the second.

    Outputs [..., N, 2K], targets [N, K]. As `likelihoods.HeteroscedasticGaussian`, with the noise for which Wu et al. (2019)
    have closed forms.
    """

    second: ClassVar[str] = "log variances"

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Normal:  # noqa: ARG002
        mean, log_variance = outputs.chunk(2, -1)
        return distributions.Normal(mean, torch.exp(0.5 * log_variance), validate_args=False)


def expected_log_prob(likelihood: Likelihood, f: Moments, y: Tensor, noise: Mapping[str, Weight]) -> Tensor:
    """E log p(y | f) for each target, [*targets.shape], f and the likelihood's weights `noise` being Gaussian: see the table."""
    likelihood._refuse_broadcasting(f.mean, y)
    if isinstance(likelihood, likelihoods.Scaled):
        loc, scale = (constant(n, getattr(likelihood, n), f.mean, y.shape) for n in ("loc", "scale"))
        inner = expected_log_prob(likelihood.likelihood, f, (y.to(f.mean.dtype) - loc) / scale, noise)
        return inner - scale.abs().log()
    if isinstance(likelihood, likelihoods.Gaussian):
        return _gaussian(likelihood, f, y, noise)
    if isinstance(likelihood, likelihoods.MeanAndNoise):
        return _heteroscedastic(likelihood, f, y)
    if isinstance(likelihood, likelihoods.Poisson):
        # the mean of a log-normal
        rate = torch.exp(f.mean + 0.5 * f.variance)
        return y * f.mean - rate - torch.lgamma(y.to(f.mean.dtype) + 1)
    if isinstance(likelihood, likelihoods.Categorical):
        return f.mean.gather(-1, y.long().unsqueeze(-1)).squeeze(-1) - expected_logsumexp(f)
    if likelihood.target_shape(f.mean.shape) == tuple(f.mean.shape):
        return _single(likelihood, f, y, noise)
    raise ValueError(
        f"no expected log-likelihood is known for {type(likelihood).__name__}: each target must belong to one output; use MeanField"
    )


def noise_variance(likelihood: Likelihood, f: Moments, noise: Mapping[str, Weight]) -> Tensor:
    """E Var(y | f), the aleatoric variance, [N, K], of the likelihoods with Gaussian noise."""
    if isinstance(likelihood, likelihoods.Scaled):
        inner = noise_variance(likelihood.likelihood, f, noise)
        return inner * constant("scale", likelihood.scale, f.mean, inner.shape).square()
    if isinstance(likelihood, likelihoods.Gaussian):
        return _power(likelihood, f.mean, noise, 2).expand_as(f.mean)
    mean, raw = f.mean.chunk(2, -1)
    variance = f.variance.chunk(2, -1)[1]
    if isinstance(likelihood, LogVarianceGaussian):
        return torch.exp(raw + 0.5 * variance)
    assert isinstance(likelihood, likelihoods.HeteroscedasticGaussian)
    points, weight = along((raw, variance))
    return (weight * (likelihood.minimum + F.softplus(points)).square()).sum(0).expand_as(mean)


def located(likelihood: Likelihood, f: Moments) -> tuple[Tensor, Tensor]:
    """Mean of y and variance of E(y | f), both [N, K], of the likelihoods with Gaussian noise."""
    if isinstance(likelihood, likelihoods.Scaled):
        mean, variance = located(likelihood.likelihood, f)
        loc, scale = (constant(n, getattr(likelihood, n), f.mean, mean.shape) for n in ("loc", "scale"))
        return loc + scale * mean, variance * scale.square()
    if isinstance(likelihood, likelihoods.Gaussian):
        return f.mean, f.variance
    if isinstance(likelihood, likelihoods.MeanAndNoise):
        return f.mean.chunk(2, -1)[0], f.variance.chunk(2, -1)[0]
    raise ValueError(
        f"closed-form predictive moments are known for Gaussian noise alone, not for {type(likelihood).__name__}; "
        "predict(x) averages over draws for every likelihood"
    )


# ---------------------------------------------------------------------------------------------------------------------
def _power(likelihood: likelihoods.Gaussian, like: Tensor, noise: Mapping[str, Weight], power: int) -> Tensor:
    """E σ^power: e^{pμ + p²v/2} for a learned log σ ~ N(μ, v)."""
    if not isinstance(likelihood.scale, str):
        return constant("scale", likelihood.scale, like, like.shape) ** power
    log_scale = noise[LOG_SCALE]
    spread = 0 if log_scale.variance is None else log_scale.variance
    # log-normal moments of any power
    return torch.exp(power * log_scale.mean + 0.5 * power**2 * spread)


def _gaussian(likelihood: likelihoods.Gaussian, f: Moments, y: Tensor, noise: Mapping[str, Weight]) -> Tensor:
    """−½ log 2π − E log σ − ½ ((y − m)² + v) E σ⁻²."""
    if isinstance(likelihood.scale, str):
        log_scale = noise[LOG_SCALE].mean
    else:
        log_scale = constant("scale", likelihood.scale, f.mean, f.mean.shape).log()
    residual = y.to(f.mean.dtype) - f.mean
    squares = residual * residual + f.variance
    return -HALF_LOG_2PI - log_scale - 0.5 * squares * _power(likelihood, f.mean, noise, -2)


def _heteroscedastic(likelihood: Likelihood, f: Moments, y: Tensor) -> Tensor:
    """With ℓ the log variance: −½ [log 2π + ⟨ℓ⟩ + (Σ_mm + (⟨m⟩ − Σ_mℓ − y)²) e^{−⟨ℓ⟩ + Σ_ℓℓ/2}]   (Wu et al. 2019).

    For s = minimum + softplus(r): E over r of −log s − ½ E((y − m)² | r)/s², the mean m being Gaussian given r.
    """
    count = y.shape[-1]
    mean, raw = f.mean.chunk(2, -1)
    spread, raw_spread = f.variance.chunk(2, -1)
    crossed = torch.zeros_like(mean)
    if f.covariance is not None and f.covariance.ndim > f.mean.ndim:
        # a mean and its own scale; others do not meet in one target
        crossed = f.covariance[..., :count, count:].diagonal(dim1=-2, dim2=-1)
    target = y.to(mean.dtype)
    if isinstance(likelihood, LogVarianceGaussian):
        residual = mean - crossed - target
        inverse = torch.exp(-raw + 0.5 * raw_spread)
        return -HALF_LOG_2PI - 0.5 * (raw + (spread + residual * residual) * inverse)
    assert isinstance(likelihood, likelihoods.HeteroscedasticGaussian)
    points, weight = along((raw, raw_spread))
    # the mean given the raw scale is linear in it: Gaussian conditioning
    slope = crossed / raw_spread.clamp_min(torch.finfo(mean.dtype).tiny ** 0.5)
    residual = target - mean - slope * (points - raw)
    scale = likelihood.minimum + F.softplus(points)
    squares = residual * residual + (spread - slope * crossed).clamp_min(0)
    return (weight * (-HALF_LOG_2PI - scale.log() - 0.5 * squares / (scale * scale))).sum(0)


def expected_logsumexp(f: Moments) -> Tensor:
    """E log Σ e^{f_i} [N]: by quadrature for two classes, and an upper bound of it for more.

    For any a, E log Σ e^{f_i} = aᵀm + E log Σ e^{f_i − aᵀf} ≤ log Σ exp(m_i + ½ C_ii − (Ca)_i + ½ aᵀCa), by Jensen (Knowles &
    Minka 2011, for any covariance C). The best a solves a = softmax(m + ½ diag C − Ca), the minimum of a convex function,
    sought by damped iterations; a being whatever it is, the bound holds. For small C it is log Σ e^{m_i} + ½ (Σ p_i C_ii −
    pᵀCp) + …, the second-order expansion.
    """
    matrix = f.covariance is not None and f.covariance.ndim > f.mean.ndim
    if f.mean.shape[-1] == 2:
        difference = f.mean[..., 1] - f.mean[..., 0]
        spread = f.variance.sum(-1) - (2 * f.covariance[..., 0, 1] if matrix else 0)  # type: ignore[index]
        points, weight = along((difference, spread.clamp_min(0)))
        return f.mean[..., 0] + (weight * F.softplus(points)).sum(0)

    def through(a: Tensor, covariance: Tensor) -> Tensor:
        return (covariance @ a.unsqueeze(-1)).squeeze(-1) if matrix else covariance * a

    covariance = torch.zeros_like(f.mean) if f.covariance is None else f.covariance
    raised = f.mean + 0.5 * f.variance
    # at the optimum the bound does not move with a (envelope theorem), and elsewhere it still is a bound
    with torch.no_grad():
        fixed, level = covariance.detach(), raised.detach()
        a = f.mean.detach().softmax(-1)
        largest = (fixed.abs().sum(-1) if matrix else fixed).amax(-1, keepdim=True)  # no eigenvalue is larger
        # shorter steps where the covariance is large, and would make them overshoot
        pace = 1 / (1 + 0.25 * largest)
        for _ in range(TILTS):
            a = a + pace * ((level - through(a, fixed)).softmax(-1) - a)
    carried = through(a, covariance)
    return torch.logsumexp(raised - carried, -1) + 0.5 * (a * carried).sum(-1)


def _single(likelihood: Likelihood, f: Moments, y: Tensor, noise: Mapping[str, Weight]) -> Tensor:
    """By quadrature over each output, and over the likelihood's moving weights, of which a target sees one."""
    points, weight = along((f.mean, f.variance))
    random = {name: value for name, value in noise.items() if value.variance is not None}
    if not random:
        fixed = {name: value.mean.expand(len(points), *value.mean.shape) for name, value in noise.items()}
        return (weight * likelihood.log_prob(points, y, fixed)).sum(0)
    z, share = nodes(f.mean, NOISE_NODES)
    outer = len(points)
    whole = points.repeat(NOISE_NODES, *(1,) * f.mean.ndim)  # [noise × output nodes, N, O]
    shares = (share.reshape(-1, 1) * weight.reshape(1, -1)).reshape(-1, *(1,) * f.mean.ndim)
    moving = {}
    for name, value in noise.items():
        moved = value.mean.expand(NOISE_NODES, *value.mean.shape)
        if value.variance is not None:
            moved = moved + root(value.variance) * z.reshape(-1, *(1,) * value.mean.ndim)
        moving[name] = moved.repeat_interleave(outer, 0)
    return (shares * likelihood.log_prob(whole, y, moving)).sum(0)
