"""Moments of activations: φ(a) for Gaussian a, by closed forms where there are some and by quadrature elsewhere.

Covariances are a series in the correlations (Mehler's formula). With c_k = E φ(μ + σz) He_k(z)/√k!, the Hermite coefficients,

    Cov(φ(a), φ(b)) = Σ_{k ≥ 1} ρ^k c_k(a) c_k(b),        Var φ(a) = Σ_{k ≥ 1} c_k(a)²

for jointly Gaussian a and b of correlation ρ. Cut after a few terms it is a sum of positive semi-definite matrices; the diagonal is
put to the exact variances, which are larger, so that the result is a covariance for any number of terms. The first term alone
is the linearisation E φ'(a) E φ'(b) Cov(a, b).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plausible.blocks.moments.gaussians import Moments, Weight
from plausible.blocks.moments.quadrature import along, nodes, projection, root

SCALE_NODES = 10
"""Nodes for a random scale in front of an activation."""


class Expansion(NamedTuple):
    """Mean and variance of φ(a), [N, D], and the coefficients c_1 … c_K, each [N, D]."""

    mean: Tensor
    variance: Tensor
    coefficients: tuple[Tensor, ...]


Rule = Callable[[nn.Module, Tensor, Tensor, int], Expansion]


def rectified(mean: Tensor, variance: Tensor, terms: int) -> Expansion:
    """max(a, 0) for a ~ N(μ, σ²): exact, with r = μ/σ, g(r) = r Φ(r) + φ(r).

    mean = σ g(r),  variance = σ² (Φ(r) − g(r) g(−r)),  c_1 = σ Φ(r),  c_k = σ φ(r) He_{k−2}(−r)/√k!.
    The variance is written so that nothing large cancels for |μ| ≫ σ.
    """
    scale = root(variance)
    ratio = mean / scale
    density = torch.exp(-0.5 * ratio * ratio) * (1 / math.sqrt(2 * math.pi))
    below, above = (0.5 * torch.special.erfc(sign * ratio * math.sqrt(0.5)) for sign in (-1.0, 1.0))  # Φ(r), Φ(−r)
    up, down = (ratio * below + density).clamp_min(0), (density - ratio * above).clamp_min(0)
    spread = variance * (below - up * down).clamp_min(0)
    coefficients, polynomial, before = [scale * below], torch.ones_like(ratio), torch.zeros_like(ratio)
    for k in range(2, terms + 1):
        coefficients.append(scale * density * polynomial * (1 / math.sqrt(math.factorial(k))))
        polynomial, before = -ratio * polynomial - (k - 2) * before, polynomial
    return Expansion(scale * up, spread, tuple(coefficients[:terms]))


def _relu(module: nn.Module, mean: Tensor, variance: Tensor, terms: int) -> Expansion:  # noqa: ARG001
    return rectified(mean, variance, terms)


def _leaky(module: nn.Module, mean: Tensor, variance: Tensor, terms: int) -> Expansion:
    """s·a + (1 − s)·max(a, 0), whose covariance with a is σ² Φ(r)."""
    slope = float(module.negative_slope)  # type: ignore[arg-type]
    up = rectified(mean, variance, max(terms, 1))
    first = up.coefficients[0]
    spread = slope**2 * variance + (1 - slope) ** 2 * up.variance + 2 * slope * (1 - slope) * root(variance) * first
    linear = slope * root(variance) + (1 - slope) * first
    rest = tuple((1 - slope) * c for c in up.coefficients[1:])
    return Expansion(slope * mean + (1 - slope) * up.mean, spread, (linear, *rest)[:terms])


def _smooth(module: nn.Module, mean: Tensor, variance: Tensor, terms: int) -> Expansion:
    """By quadrature in the module itself, which acts on each element alone."""
    points, weight = along((mean, variance))
    values = module.forward(points)  # [Q, N, D]
    centre = (weight * values).sum(0)
    residual = values - centre
    spread = (weight * residual * residual).sum(0)
    if not terms:
        return Expansion(centre, spread, ())
    table = projection(mean, terms)[1:]  # [terms, Q]
    found = (table @ residual.flatten(1)).reshape(terms, *mean.shape)
    return Expansion(centre, spread, tuple(found.unbind(0)))


RULES: dict[type[nn.Module], Rule] = {nn.ReLU: _relu, nn.LeakyReLU: _leaky}
RULES |= dict.fromkeys(
    (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.Mish, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink, nn.ELU, nn.CELU),
    _smooth,
)


def elementwise(module: type[nn.Module]) -> type[nn.Module]:
    """Declare a module type of your own as a smooth function of each element alone, so that moments go through it by quadrature.

    Usable as a decorator of the class. Where closed forms are known, put a rule into `RULES` instead.
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise TypeError(f"elementwise: expected a class derived from torch.nn.Module, got {module!r}")
    RULES[module] = _smooth
    return module


def activated(module: nn.Module, a: Moments, terms: int) -> Moments:
    """Moments of φ(a), taking a as Gaussian: independent elements stay so, covariances are cut after `terms` terms.

    Cost with covariances: `terms` products of [N, D, D], element by element.
    """
    rule = RULES[type(module)]
    if a.covariance is None:
        return Moments(module.forward(a.mean))
    if a.covariance.ndim == a.mean.ndim:
        found = rule(module, a.mean, a.covariance, 0)
        return Moments(found.mean, found.variance)
    found = rule(module, a.mean, a.variance, terms)
    inverse = 1 / root(a.variance)
    correlation = (a.covariance * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)).clamp(-1.0, 1.0)
    series = torch.zeros_like(correlation)
    for c in reversed(found.coefficients):
        series = (series + c.unsqueeze(-1) * c.unsqueeze(-2)) * correlation
    missing = found.variance - series.diagonal(dim1=-2, dim2=-1)
    return Moments(found.mean, series + torch.diag_embed(missing))


def activated_after_scale(module: nn.Module, a: Moments, scale: Weight, shift: Weight | None) -> Moments:
    """Moments of φ(s ∘ a + t) for independent Gaussian s, t and independent elements of a: by quadrature over s.

    The product s·a is not Gaussian, but given s it is, and then the rule of the activation holds. Cost: `SCALE_NODES` times it.
    """
    z, weight = (part.reshape(-1, *(1,) * a.mean.ndim) for part in nodes(a.mean, SCALE_NODES))
    s = scale.mean if scale.variance is None else scale.mean + root(scale.variance) * z  # [Q, 1, D]
    mean, variance = s * a.mean, s * s * a.variance
    if shift is not None:
        mean = mean + shift.mean
        variance = variance if shift.variance is None else variance + shift.variance
    found = RULES[type(module)](module, mean, variance, 0)
    centre = (weight * found.mean).sum(0)
    spread = (weight * (found.variance + (found.mean - centre) * (found.mean - centre))).sum(0)
    return Moments(centre, spread)
