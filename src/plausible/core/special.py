"""Special functions that PyTorch lacks: SciPy's where nothing is differentiated or compiled, tensor operations elsewhere."""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg
import scipy.special
import torch
from torch import Tensor


def double(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64, moved to the CPU where their device has no float64 (Apple's MPS)."""
    return tuple(t.to("cpu" if t.device.type == "mps" else t.device, torch.float64) for t in tensors)


def widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


JITTERS = (0.0, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6)  # of the largest entry, on the diagonal of matrices that resist


def symmetric_eigen(matrix: Tensor, what: str = "the curvature") -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices [..., n, n] by their parts above the diagonal; never fails.

    LAPACK and cuSOLVER may not converge on ill-conditioned matrices, or leave NaN. Such are taken one by one, scaled, in float64 on
    the CPU, and with growing jitter. `what` is the matrix in the message of the ValueError where its entries are not finite.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix, UPLO="U")
        if bool(torch.isfinite(values.sum() + vectors.sum())):
            return values, vectors
    except torch.linalg.LinAlgError:
        pass
    if not bool(torch.isfinite(matrix.triu()).all()):
        raise ValueError(f"{what} is not finite: outputs or gradients are too large for their type; standardise the inputs")
    size = matrix.shape[-1]
    pairs = [_eigen_of_one(one) for one in matrix.detach().to("cpu", torch.float64).reshape(-1, size, size)]
    values, vectors = (torch.stack(part).to(matrix) for part in zip(*pairs))
    return values.reshape(matrix.shape[:-1]), vectors.reshape(matrix.shape)


def _eigen_of_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`symmetric_eigen` of one matrix [n, n] in float64 on the CPU, where the first attempt has failed."""
    scale = matrix.triu().abs().max().clamp(min=torch.finfo(matrix.dtype).tiny)
    scaled = matrix.triu() / scale
    for jitter in JITTERS:
        try:
            values, vectors = torch.linalg.eigh(scaled + jitter * torch.eye(len(matrix), dtype=matrix.dtype), UPLO="U")
        except torch.linalg.LinAlgError:
            continue
        if bool(torch.isfinite(values.sum() + vectors.sum())):
            return (values - jitter) * scale, vectors
    # iterations of another kind, which are slower and do not fail
    values, vectors = scipy.linalg.eigh(scaled.numpy(), lower=False, driver="ev")
    return torch.as_tensor(values) * scale, torch.as_tensor(vectors)


def stirling_error(a: Tensor) -> Tensor:
    """Δ(a) = log Γ(a) − [(a − ½) log a − a + ½ log 2π] for a > 0, small and smooth where log Γ itself is huge.

    The asymptotic series 1/(12a) − 1/(360a³) + … from a = 10 on (error below 1e-15), the definition below. Keeps the
    dtype; differentiable; traceable by `torch.func` and `torch.compile`, which is why it is not SciPy's.
    """
    large = a >= 10
    # both branches are differentiated: each gets arguments that suit it
    inverse = 1 / torch.where(large, a, torch.full_like(a, 10.0))
    square = inverse * inverse
    series = torch.zeros_like(a)
    for coefficient in (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12):
        series = series * square + coefficient
    small = torch.where(large, torch.ones_like(a), a)
    exact = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(large, series * inverse, exact)


def betainc(a: Tensor, b: Tensor, x: Tensor, complement: Tensor | None = None) -> Tensor:
    """I_x(a, b) = ∫₀ˣ tᵃ⁻¹(1−t)ᵇ⁻¹ dt / B(a, b), the regularised incomplete beta function, by SciPy in float64. No gradient.

    Arguments broadcast: a > 0, b > 0, x in [0, 1], and `complement` = 1 − x where the caller knows it better than the
    subtraction does (x near 1). The result has the floating-point type and the device of `x`.
    """
    shapes_and_x = [t.detach().cpu().double().numpy() for t in (a, b, x)]
    value = scipy.special.betainc(*shapes_and_x)
    if complement is not None:  # I_x(a, b) = 1 − I_{1−x}(b, a), where x rounds to 1 and 1 − x is known
        first, second, at = shapes_and_x
        beyond = scipy.special.betaincc(second, first, complement.detach().cpu().double().numpy())
        value = np.where(at > 0.5, beyond, value)
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.as_tensor(value, dtype=dtype, device=x.device)


def student_t_cdf(z: Tensor, df: Tensor) -> Tensor:
    """F(z) = ½·I_{df/(df+z²)}(df/2, ½) for z < 0, and 1 minus that above, by SciPy in float64. No gradient.

    df broadcasts with z; the result has the type and device of `z`.
    """
    value = scipy.special.stdtr(*(t.detach().cpu().double().numpy() for t in (df, z)))
    return torch.as_tensor(value, dtype=z.dtype, device=z.device)


EULER_GAMMA = 0.5772156649015329
_LOW, _HIGH, _STEP = -24.0, 24.0, 0.0625  # of log α in the table below


def _scale_free_table() -> Tensor:
    """Coefficients [cells, 4] of the cubics between the nodes, by values and slopes there in float64."""
    grid = np.arange(_LOW, _HIGH + _STEP / 2, _STEP)

    def slope(log_alpha: np.ndarray) -> np.ndarray:
        ratio = np.exp(-0.5 * log_alpha) / math.sqrt(2)
        return ratio * scipy.special.dawsn(ratio)

    nodes, weights = np.polynomial.legendre.leggauss(10)
    cells = 0.5 * _STEP * (slope(grid[:-1, None] + 0.5 * _STEP * (nodes + 1)) @ weights)
    # from the high end, where it is −δ²/2 up to its square
    values = np.append(-np.cumsum(cells[::-1])[::-1], 0.0) - 0.5 * math.exp(-_HIGH)
    left, right, rise = slope(grid[:-1]) * _STEP, slope(grid[1:]) * _STEP, np.diff(values)
    table = np.stack([values[:-1], left, 3 * rise - 2 * left - right, left + right - 2 * rise], 1)
    return torch.as_tensor(table)


_TABLE = _scale_free_table()


def scale_free_kl(log_alpha: Tensor) -> Tensor:
    """KL(N(θ, αθ²) ‖ 1/|w|), 0 where α is infinite: E log|1/√α + z| + (γ + log 2)/2 with z ~ N(0, 1), elementwise.

    The exact one, of which Kingma et al. (2015) and Molchanov et al. (2017) give approximations. Its derivative in log α is
    −x·D(x) with Dawson's function D and x = 1/√(2α); between nodes it is a cubic, right to 10⁻⁸. Differentiable, also twice.
    """
    inside = log_alpha.clamp(_LOW, _HIGH - 1e-4)
    place = (inside - _LOW) / _STEP
    cell = place.detach().long()
    along = place - cell.to(place.dtype)
    table = _TABLE.to(log_alpha)
    # not table[cell], which vmap does not take for single numbers
    a, b, c, d = table.index_select(0, cell.reshape(-1)).reshape(*cell.shape, 4).unbind(-1)
    value = a + along * (b + along * (c + along * d))
    # below the table it is −½ log α and a constant
    return -value - 0.5 * (log_alpha - _LOW).clamp(max=0.0)


def flushed(values: Tensor) -> Tensor:
    """0 instead of what is negligible beside the largest of the values and has a square below the normal numbers.

    Weights of units that are never used decay to such numbers, and products with them take a CPU up to a hundred times as long.
    """
    if values.device.type != "cpu" or not values.is_floating_point() or not values.numel():
        return values
    size = values.abs()
    # numbers whose square is normal are left alone
    limit = torch.clamp(1e-12 * size.max(), max=math.sqrt(torch.finfo(values.dtype).tiny))
    small = (size < limit).logical_and_(values != 0)
    return values.masked_fill(small, 0.0) if bool(small.any()) else values
