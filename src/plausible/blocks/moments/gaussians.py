"""Means and covariances of a layer's outputs, and how affine maps with independent Gaussian weights and activations change them.

Activations φ(a) of Gaussian a have closed forms where there are some, and quadrature elsewhere. Covariances are a series in the
correlations (Mehler's formula). With c_k = E φ(μ + σz) He_k(z)/√k!, the Hermite coefficients,

    Cov(φ(a), φ(b)) = Σ_{k ≥ 1} ρ^k c_k(a) c_k(b),        Var φ(a) = Σ_{k ≥ 1} c_k(a)²

for jointly Gaussian a and b of correlation ρ. Cut after a few terms it is a sum of positive semi-definite matrices; the
diagonal is put to the exact variances, which are larger, so that the result is a covariance for any number of terms. The first
term alone is the linearisation E φ'(a) E φ'(b) Cov(a, b).

The quadrature of `NODES` nodes is the trapezoidal rule, which converges exponentially on a normal density: with a step of 0.32
the mean of tanh(σz)² errs by 2e-9 for σ = 1 and by 4e-4 for σ = 3, where as many Gauss–Hermite nodes err by 4e-3. Shorter rules
are Gauss–Hermite's, exact for polynomials of degree below twice their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.special
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plausible.core.transforms import transformed


class Moments(NamedTuple):
    """Mean [N, D] and covariance of N random vectors, one for each example.

    The covariance is None for numbers that are certain, [N, D] for independent elements (their variances), [N, D, D] otherwise.
    """

    mean: Tensor
    covariance: Tensor | None = None

    @property
    def variance(self) -> Tensor:
        if self.covariance is None:
            return torch.zeros_like(self.mean)
        return self.covariance if self.covariance.ndim == self.mean.ndim else self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def matrix(self) -> Tensor:
        full = self.covariance is not None and self.covariance.ndim > self.mean.ndim
        return self.covariance if full else torch.diag_embed(self.variance)  # type: ignore[return-value]


class Weight(NamedTuple):
    """A weight of independent Gaussians: mean and variance of the same shape; None as variance is a point."""

    mean: Tensor
    variance: Tensor | None = None


def linear(x: Moments, weight: Weight, bias: Weight | None = None, *, full: bool = True) -> Moments:
    """Moments of Wx + b with independent W, b and x: exact, whatever the law of x.

    mean = W̄ m + b̄,  covariance = W̄ Σ W̄ᵀ + diag(V_W (m² + diag Σ) + V_b), V the variances of the weights. Outputs of certain
    or independent inputs with random weights alone are independent; otherwise they are not, and `full=False` leaves their
    covariances out, of inputs and outputs (the variances stay exact where inputs are independent). Cost: one matrix product
    with V more; with `full` N·D_in·D·(D_in + D) for D_in inputs and D outputs.
    """
    mean = F.linear(x.mean, weight.mean, None if bias is None else bias.mean)
    fresh: Tensor | None = None
    if weight.variance is not None:
        # E x² is all that a random weight sees of its input
        second = x.mean * x.mean if x.covariance is None else x.mean * x.mean + x.variance
        fresh = F.linear(second, weight.variance)
    if bias is not None and bias.variance is not None:
        fresh = bias.variance.expand_as(mean) if fresh is None else fresh + bias.variance
    if x.covariance is None:
        return Moments(mean, fresh)
    if not full:
        passed = F.linear(x.variance, weight.mean * weight.mean)
        return Moments(mean, passed if fresh is None else passed + fresh)
    if x.covariance.ndim == x.mean.ndim:
        # W diag(v) Wᵀ without writing diag(v)
        rows = weight.mean * x.covariance.unsqueeze(-2)  # [N, D, D_in]
    else:
        rows = weight.mean @ x.covariance
    matrix = rows @ weight.mean.transpose(-1, -2)
    return Moments(mean, matrix if fresh is None else matrix + torch.diag_embed(fresh))


def scaled(x: Moments, scale: Weight | None, shift: Weight | None) -> Moments:
    """Moments of scale ∘ x + shift, element by element, with independent scale, shift and x: exact.

    covariance = (s̄ s̄ᵀ) ∘ Σ + diag(V_s (m² + diag Σ) + V_shift).
    """
    mean, covariance = x.mean, x.covariance
    fresh: Tensor | None = None
    if scale is not None:
        if scale.variance is not None:
            fresh = scale.variance * (mean * mean + x.variance)
        if covariance is not None:
            both = scale.mean * scale.mean
            full = covariance.ndim > mean.ndim
            covariance = covariance * (scale.mean.unsqueeze(-1) * scale.mean.unsqueeze(-2) if full else both)
        mean = mean * scale.mean
    if shift is not None:
        mean = mean + shift.mean
        if shift.variance is not None:
            fresh = shift.variance.expand_as(mean) if fresh is None else fresh + shift.variance
    if fresh is not None:
        full = covariance is not None and covariance.ndim > mean.ndim
        covariance = fresh if covariance is None else covariance + (torch.diag_embed(fresh) if full else fresh)
    return Moments(mean, covariance)


NODES, WIDTH = 37, 5.76  # nodes of the trapezoidal rule, from −WIDTH to WIDTH


def _rule(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if count not in _rules:
        z, weight = np.polynomial.hermite_e.hermegauss(count)
        if count == NODES:
            z = np.linspace(-WIDTH, WIDTH, NODES)
            # equal steps: weights are the density, normalised
            weight = np.exp(-0.5 * z * z)
        _rules[count] = tuple(z.tolist()), tuple((weight / weight.sum()).tolist())
    return _rules[count]


def _projection(count: int, terms: int) -> tuple[float, ...]:
    """w_q He_k(z_q)/√k!, row k = 0 … terms after row."""
    if (count, terms) not in _projections:
        z, weight = (np.array(part) for part in _rule(count))
        scaled = [weight * scipy.special.eval_hermitenorm(k, z) / math.sqrt(math.factorial(k)) for k in range(terms + 1)]
        _projections[count, terms] = tuple(np.concatenate(scaled).tolist())
    return _projections[count, terms]


_rules: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {}
_projections: dict[tuple[int, int], tuple[float, ...]] = {}
_held: dict[tuple[tuple[float, ...], torch.dtype, torch.device], Tensor] = {}


def constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """The numbers as a tensor [count] of the type and device of `like`, kept for the next call.

    What is made inside a transform or by the compiler belongs to it and is not kept: see `prime`.
    """
    key = values, like.dtype, like.device
    if (held := _held.get(key)) is not None:
        return held
    # a tensor made inside a transform belongs to it and must not outlive it
    if transformed():
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    with torch.inference_mode(False):
        _held[key] = torch.tensor(values, dtype=like.dtype, device=like.device)
    return _held[key]


def prime(like: Tensor, terms: int, counts: tuple[int, ...]) -> None:
    """Make the constants of rules with this many nodes and terms ahead, so that no step computes them or copies them from the host.

    The compiler could not follow the one, nor a CUDA graph record the other.
    """
    for count in counts:
        nodes(like, count)
    projection(like, terms)


def nodes(like: Tensor, count: int = NODES) -> tuple[Tensor, Tensor]:
    """Nodes z and weights w, both [count], with E g(z) ≈ Σ w_q g(z_q) for z ~ N(0, 1)."""
    z, weight = _rule(count)
    return constant(z, like), constant(weight, like)


def projection(like: Tensor, terms: int, count: int = NODES) -> Tensor:
    """P [terms + 1, count] with Σ_q P_kq g(z_q) ≈ E g(z) He_k(z)/√k!, the k-th Hermite coefficient of g."""
    return constant(_projection(count, terms), like).reshape(terms + 1, count)


def along(moments: tuple[Tensor, Tensor], count: int = NODES) -> tuple[Tensor, Tensor]:
    """Points m + √v z_q, [count, *shape], and weights [count, 1, …], from a mean and a variance of the same shape."""
    mean, variance = moments
    z, weight = nodes(mean, count)
    shape = (count,) + (1,) * mean.ndim
    return mean + root(variance) * z.reshape(shape), weight.reshape(shape)


def root(variance: Tensor) -> Tensor:
    """√v with a finite gradient at 0."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.5).sqrt()


SCALE_NODES = 10  # nodes for a random scale in front of an activation


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
    # erfc on both sides: 1 − Φ would lose the tail
    below, above = (0.5 * torch.special.erfc(sign * ratio * math.sqrt(0.5)) for sign in (-1.0, 1.0))  # Φ(r), Φ(−r)
    up, down = (ratio * below + density).clamp_min(0), (density - ratio * above).clamp_min(0)
    spread = variance * (below - up * down).clamp_min(0)
    coefficients, polynomial, before = [scale * below], torch.ones_like(ratio), torch.zeros_like(ratio)
    for k in range(2, terms + 1):
        coefficients.append(scale * density * polynomial * (1 / math.sqrt(math.factorial(k))))
        polynomial, before = -ratio * polynomial - (k - 2) * before, polynomial
    return Expansion(scale * up, spread, tuple(coefficients[:terms]))


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
    # around the mean: nothing large cancels
    residual = values - centre
    spread = (weight * residual * residual).sum(0)
    if not terms:
        return Expansion(centre, spread, ())
    table = projection(mean, terms)[1:]  # [terms, Q]
    coefficients = (table @ residual.flatten(1)).reshape(terms, *mean.shape)
    return Expansion(centre, spread, tuple(coefficients.unbind(0)))


RULES: dict[type[nn.Module], Rule] = {nn.ReLU: lambda _, *moments: rectified(*moments), nn.LeakyReLU: _leaky}
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
        law = rule(module, a.mean, a.covariance, 0)
        return Moments(law.mean, law.variance)
    law = rule(module, a.mean, a.variance, terms)
    inverse = 1 / root(a.variance)
    # rounding may leave a correlation above 1, whose powers would grow
    correlation = (a.covariance * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)).clamp(-1.0, 1.0)
    series = torch.zeros_like(correlation)
    # Horner's scheme in ρ
    for c in reversed(law.coefficients):
        series = (series + c.unsqueeze(-1) * c.unsqueeze(-2)) * correlation
    # what the cut series lacks of the exact variance goes to the diagonal
    missing = law.variance - series.diagonal(dim1=-2, dim2=-1)
    return Moments(law.mean, series + torch.diag_embed(missing))


def activated_after_scale(module: nn.Module, a: Moments, scale: Weight, shift: Weight | None) -> Moments:
    """Moments of φ(s ∘ a + t) for independent Gaussian s, t and independent elements of a: by quadrature over s.

    The product s·a is not Gaussian, but given s it is, and then the rule of the activation holds. Cost: `SCALE_NODES` times it.
    """
    # given the scale the product is Gaussian again
    z, weight = (part.reshape(-1, *(1,) * a.mean.ndim) for part in nodes(a.mean, SCALE_NODES))
    s = scale.mean if scale.variance is None else scale.mean + root(scale.variance) * z  # [Q, 1, D]
    mean, variance = s * a.mean, s * s * a.variance
    if shift is not None:
        mean = mean + shift.mean
        variance = variance if shift.variance is None else variance + shift.variance
    law = RULES[type(module)](module, mean, variance, 0)
    centre = (weight * law.mean).sum(0)
    spread = (weight * (law.variance + (law.mean - centre) * (law.mean - centre))).sum(0)
    return Moments(centre, spread)
