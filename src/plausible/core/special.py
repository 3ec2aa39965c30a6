"""Special functions that PyTorch lacks, in tensor operations: on any device, over whole tensors at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHECK_EVERY = 8  # terms of the continued fraction between two looks at convergence
_MAX_TERMS = 100_000


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64, moved to the CPU where their device has no float64 (Apple's MPS)."""
    return tuple(t.to("cpu" if t.device.type == "mps" else t.device, torch.float64) for t in tensors)


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: float64, but float32 on Apple's MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def log1pmx(u: Tensor) -> Tensor:
    """log(1 + u) − u for u > −1, without the cancellation near u = 0.

    With r = u / (2 + u): log(1 + u) = 2 artanh(r), hence log(1 + u) − u = −u·r + 2r³(1/3 + r²/5 + r⁴/7 + …); the series
    is used for |u| < 1/4, where |r| ≤ 1/7. Elementwise, any shape.
    """
    near = u.abs() < 0.25
    v = torch.where(near, u, torch.zeros_like(u))
    r = v / (2 + v)
    square = r * r
    series = torch.zeros_like(r)
    for k in range(9, -1, -1):
        series = series * square + 1 / (2 * k + 3)
    return torch.where(near, -v * r + 2 * r * square * series, torch.log1p(u) - u)


def stirling_error(a: Tensor) -> Tensor:
    """Δ(a) = log Γ(a) − [(a − ½) log a − a + ½ log 2π] for a > 0, small and smooth where log Γ itself is huge.

    The asymptotic series 1/(12a) − 1/(360a³) + … from a = 10 on (error below 1e-15), the definition below. Keeps the
    dtype; differentiable; traceable by `torch.func` and `torch.compile`.
    """
    large = a >= 10
    inverse = 1 / torch.where(large, a, torch.full_like(a, 10.0))
    square = inverse * inverse
    series = torch.zeros_like(a)
    for coefficient in (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12):
        series = series * square + coefficient
    small = torch.where(large, torch.ones_like(a), a)
    exact = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(large, series * inverse, exact)


def _log_normaliser(a: Tensor, b: Tensor) -> Tensor:
    """½·log(ab / 2π(a+b)) − Δ(a) − Δ(b) + Δ(a+b), symmetric in a and b: see `_log_kernel`."""
    stirling = stirling_error(a) + stirling_error(b) - stirling_error(a + b)
    return 0.5 * (torch.log(a) + torch.log(b / (a + b)) - math.log(2 * math.pi)) - stirling


def _log_kernel(a: Tensor, b: Tensor, x: Tensor, y: Tensor, excess: Tensor) -> Tensor:
    """log[xᵃ yᵇ / B(a, b)] − `_log_normaliser`(a, b), with y = 1 − x and excess = a·y − b·x: no huge log Γ's cancel.

    xᵃyᵇ/B(a,b) = √(ab / 2π(a+b)) · exp{a·φ(−excess/a) + b·φ(excess/b) − Δ(a) − Δ(b) + Δ(a+b)} with φ(u) = log(1+u) − u
    and Δ the Stirling error: both φ's are ≤ 0, so nothing cancels (Loader 2000).
    """
    total = a + b
    u, v = -excess / a, excess / b
    # far from u = 0 the logarithm is taken of x itself: 1 + u would round a tiny x away
    left = torch.where(u.abs() < 0.25, log1pmx(u), torch.log(x * (total / a)) - u)
    right = torch.where(v.abs() < 0.25, log1pmx(v), torch.log(y * (total / b)) - v)
    return a * left + b * right


def _fraction(a: Tensor, b: Tensor, x: Tensor, excess: Tensor) -> Tensor:
    """The continued fraction β₀ + α₁/(β₁ + α₂/(β₂ + …)) of xᵃyᵇ / (B(a,b)·I_x(a,b)), by the modified Lentz algorithm.

    α_m = m(b−m)·(a+m−1)(a+b+m−1)·x² / (a+2m−1)²,
    β_m = m + m(b−m)x/(a+2m−1) + (a+m)(excess + 1 + m(2−x))/(a+2m+1)   (Didonato & Morris 1992).
    One-dimensional tensors; elements leave the loop as they converge.
    """
    value = a * (excess + 1) / (a + 1)
    result = value.clone()
    active = torch.arange(a.numel(), device=a.device)
    c, d = value.clone(), torch.zeros_like(value)
    for m in range(1, _MAX_TERMS):
        odd = a + (2 * m - 1)
        cross = m * (b - m) * x / odd
        alpha = cross * x * ((a + (m - 1)) / odd) * (a + b + (m - 1))
        beta = m + cross + (a + m) / (odd + 2) * (excess + 1 + m * (2 - x))
        d = 1 / (beta + alpha * d)
        c = beta + alpha / c
        change = c * d
        value = value * change
        if m % _CHECK_EVERY == 0:
            going = (change - 1).abs() > 1e-15  # a NaN counts as finished
            result[active] = value
            keep = going.nonzero().squeeze(-1)
            if keep.numel() == 0:
                break
            if keep.numel() < active.numel():
                active, a, b, x, excess = active[keep], a[keep], b[keep], x[keep], excess[keep]
                c, d, value = c[keep], d[keep], value[keep]
    return result


@torch.no_grad()
def betainc(a: Tensor, b: Tensor, x: Tensor, complement: Tensor | None = None) -> Tensor:
    """I_x(a, b) = ∫₀ˣ tᵃ⁻¹(1−t)ᵇ⁻¹ dt / B(a, b), the regularised incomplete beta function.

    A continued fraction (Didonato & Morris 1992, "Algorithm 708", ACM TOMS 18) in float64, with
    I_x(a,b) = 1 − I_{1−x}(b,a) where x > (a+1)/(a+b+2), so that it converges within O(√max(a,b)) terms. Absolute error
    near 1e-14 for moderate a and b, near 1e-12 at 1e10. No gradient.

    Arguments broadcast: a > 0, b > 0, x in [0, 1], and `complement` = 1 − x where the caller knows it better than the
    subtraction does (x near 1). The result has the floating-point type and the device of `x`.
    """
    if complement is None:
        complement = 1 - x.to(widest(x.device))
    wide = double(a, b, x, complement)
    normaliser = _log_normaliser(wide[0], wide[1])  # before broadcasting: the shapes are often the same everywhere
    everything = torch.broadcast_tensors(*wide, normaliser)
    wide_a, wide_b, wide_x, wide_y, normaliser = (t.reshape(-1) for t in everything)
    total = wide_a + wide_b + 2
    # x > (a+1)/(a+b+2), asked of the smaller of x and 1 − x, which is not rounded
    swap = torch.where(wide_x < 0.5, wide_x > (wide_a + 1) / total, wide_y < (wide_b + 1) / total)
    a1, b1 = torch.where(swap, wide_b, wide_a), torch.where(swap, wide_a, wide_b)
    x1, y1 = torch.where(swap, wide_y, wide_x), torch.where(swap, wide_x, wide_y)
    excess = a1 * y1 - b1 * x1
    value = torch.exp(normaliser + _log_kernel(a1, b1, x1, y1, excess)) / _fraction(a1, b1, x1, excess)
    value = torch.where(swap, 1 - value, value).clamp(0, 1).reshape(everything[0].shape)
    return value.to(x.device, x.dtype if x.is_floating_point() else torch.get_default_dtype())


def flushed(values: Tensor) -> Tensor:
    """0 instead of what is negligible beside the largest of the values and has a square below the normal numbers.

    Weights of units that are never used decay to such numbers, and products with them take a CPU up to a hundred times as long.
    """
    if values.device.type != "cpu" or not values.is_floating_point() or not values.numel():
        return values
    size = values.abs()
    limit = torch.clamp(1e-12 * size.max(), max=math.sqrt(torch.finfo(values.dtype).tiny))
    small = (size < limit).logical_and_(values != 0)
    return values.masked_fill(small, 0.0) if bool(small.any()) else values
