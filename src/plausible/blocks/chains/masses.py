"""Mass matrices: which law momenta have, K(p) = ½ pᵀM⁻¹p, and what is learned of them while a chain warms up.

The best inverse mass is the covariance of the target. Metrics are named tuples of tensors, so that they are part of a state
and of its checkpoints; the axes of chains in front are optional: one matrix for all chains, or one for each.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

Kind = Literal["diag", "dense", "lowrank", "unit"]
KINDS: tuple[Kind, ...] = ("diag", "dense", "lowrank", "unit")


def _energy(momentum: Tensor, velocity: Tensor) -> Tensor:
    """½ pᵀv, summed in float64 over the last axis."""
    return 0.5 * (momentum * velocity).sum(-1, dtype=torch.float64)


def _facing(values: Tensor, momentum: Tensor) -> Tensor:
    """`[P]` or `[chains, P]` so that it broadcasts over `[chains, P]` and over paths `[chains, steps, P]`."""
    return values.unsqueeze(1) if values.ndim == 2 and momentum.ndim == 3 else values


def _times(momentum: Tensor, matrix: Tensor) -> Tensor:
    """Products p @ A of momenta `[chains, P]` or `[chains, steps, P]` with one matrix `[P, R]`, or one for each chain."""
    if matrix.ndim == 3 and momentum.ndim == 2:
        return (momentum.unsqueeze(1) @ matrix).squeeze(1)
    return momentum @ matrix


class Diagonal(NamedTuple):
    """M⁻¹ = diag(m): `inverse_mass` `[P]` or `[chains, P]`. Cost: P."""

    inverse_mass: Tensor

    def velocity(self, momentum: Tensor) -> Tensor:
        """M⁻¹p."""
        return _facing(self.inverse_mass, momentum) * momentum

    def momentum(self, noise: Tensor) -> Tensor:
        """Momenta p ~ N(0, M) from standard normals of the same shape."""
        return _facing(self.inverse_mass, noise).rsqrt() * noise

    def kinetic(self, momentum: Tensor) -> Tensor:
        """½ pᵀM⁻¹p over the last axis, float64."""
        return _energy(momentum, self.velocity(momentum))

    def rows(self, index: Tensor) -> Self:
        return self._replace(inverse_mass=self.inverse_mass[index]) if self.inverse_mass.ndim == 2 else self


class Dense(NamedTuple):
    """M⁻¹ = Σ = LLᵀ: `covariance` and its Cholesky `factor`, `[P, P]` or `[chains, P, P]`. Cost: P² a step, P³ to build."""

    covariance: Tensor
    factor: Tensor

    def velocity(self, momentum: Tensor) -> Tensor:
        """Σp."""
        return _times(momentum, self.covariance)

    def momentum(self, noise: Tensor) -> Tensor:
        """L⁻ᵀξ ~ N(0, Σ⁻¹)."""
        upper = self.factor.mT
        if upper.ndim == 2:  # one matrix, which is not copied for each chain
            return torch.linalg.solve_triangular(upper, noise.mT, upper=True).mT.contiguous()
        return torch.linalg.solve_triangular(upper, noise.unsqueeze(-1), upper=True).squeeze(-1)

    def kinetic(self, momentum: Tensor) -> Tensor:
        """½ |Lᵀp|²: never negative."""
        return 0.5 * _times(momentum, self.factor).square().sum(-1, dtype=torch.float64)

    def rows(self, index: Tensor) -> Self:
        return self if self.covariance.ndim == 2 else type(self)(self.covariance[index], self.factor[index])


class LowRank(NamedTuple):
    """M⁻¹ = D(I + V(Λ − I)Vᵀ)D: a diagonal of scales, and a few orthonormal directions in which variances are not 1.

    `scale` `[P]`, `vectors` `[P, R]`, `values` `[R]`, each with an axis of chains in front where chains differ; unused
    directions are zero vectors of value 1. Cost: P·R a step. (Bales, Pourzanjani, Vehtari and Petzold 2019.)
    """

    scale: Tensor
    vectors: Tensor
    values: Tensor

    def velocity(self, momentum: Tensor) -> Tensor:
        """M⁻¹p."""
        scale = _facing(self.scale, momentum)
        return scale * self._stretched(scale * momentum, self.values)

    def momentum(self, noise: Tensor) -> Tensor:
        """D⁻¹(I + V(Λ^(−½) − I)Vᵀ)ξ ~ N(0, M)."""
        return self._stretched(noise, self.values.rsqrt()) / _facing(self.scale, noise)

    def kinetic(self, momentum: Tensor) -> Tensor:
        """½ pᵀM⁻¹p over the last axis, float64."""
        return _energy(momentum, self.velocity(momentum))

    def rows(self, index: Tensor) -> Self:
        return self if self.scale.ndim == 1 else type(self)(*(part[index] for part in self))

    def _stretched(self, vector: Tensor, values: Tensor) -> Tensor:
        """(I + V(diag(values) − I)Vᵀ) x."""
        along = _times(vector, self.vectors) * (_facing(values, vector) - 1)
        return vector + _times(along, self.vectors.mT)


Metric = Diagonal | Dense | LowRank


def check_metric(who: str, kind: str) -> None:
    """Refuse a kind that there is not."""
    if kind not in KINDS:
        raise ValueError(f"{who}: metric must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def metric_for(kind: Kind, like: Tensor, rank: int = 10) -> Metric:
    """The unit metric of this kind, for positions `[…, P]` like `like`."""
    check_metric("metric_for", kind)
    ones = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    if kind == "dense":
        return Dense(torch.diag(ones), torch.diag(ones))
    if kind == "lowrank":
        rank = min(rank, len(ones))
        return LowRank(ones, ones.new_zeros(len(ones), rank), ones.new_ones(rank))
    return Diagonal(ones)


# ---------------------------------------------------------------------------------------------------------------------
# From draws


def shrunk(variance: Tensor, count: Tensor | float) -> Tensor:
    """(n V + 5·10⁻³)/(n + 5), for the diagonal of a matrix alone: what Stan makes of few draws."""
    weight = torch.as_tensor(count, dtype=variance.dtype, device=variance.device)
    towards = torch.eye(len(variance), dtype=variance.dtype, device=variance.device) if variance.ndim == 2 else 1.0
    return (weight * variance + 5e-3 * towards) / (weight + 5)


def diagonal_from(variance: Tensor, count: Tensor, dtype: torch.dtype) -> Diagonal:
    """From variances `[P]` of `count` draws."""
    return Diagonal(shrunk(variance, count).to(dtype))


def dense_from(covariance: Tensor, count: Tensor, dtype: torch.dtype) -> Dense:
    """From a covariance `[P, P]` of `count` draws, which need not have full rank; factored in float64."""
    found = shrunk(0.5 * (covariance + covariance.mT), count).double()
    return Dense(found.to(dtype), torch.linalg.cholesky(found).to(dtype))


def low_rank_from(positions: Tensor, gradients: Tensor, rank: int, dtype: torch.dtype, cutoff: float = 2.0) -> LowRank:
    """The metric of least Fisher divergence from centred draws `[n, P]` and the centred gradients there `[n, P]`.

    On a Gaussian, gradients have covariance Σ⁻¹: they show the narrow directions as draws show the wide ones. Scales are
    (Var q / Var ∇)^¼; in the span of the leading directions of both, Σ is the geometric mean of Cov(q) and Cov(∇)⁻¹, that is
    Σ Cov(∇) Σ = Cov(q); the `rank` eigenvalues farthest outside [1/cutoff, cutoff] are kept (Seyboldt, Carlson and Carpenter
    2024; Bales et al. 2019). Cost: n²P.
    """
    count, size = positions.shape
    rank = min(rank, size)
    wide, steep = (x.double() for x in (positions, gradients))
    floor = torch.finfo(torch.float32).tiny
    scale = ((wide.square().mean(0) + floor) / (steep.square().mean(0) + floor)).pow(0.25).clamp(1e-10, 1e10)
    wide, steep = wide / scale, steep * scale
    many = min(2 * rank, count, size)
    leading = [torch.linalg.svd(x, full_matrices=False)[2][:many] for x in (wide, steep)]
    basis = torch.linalg.qr(torch.cat(leading).mT)[0]  # [P, up to 4·rank]
    unit = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    inside, slopes = (
        ((x @ basis).mT @ (x @ basis) + unit) / (count + 1) for x in (wide, steep)
    )  # as if one draw were of N(0, I)
    values, vectors = torch.linalg.eigh(_geometric_mean(inside, slopes))
    chosen = values.log().abs().argsort(descending=True)[:rank]
    values, vectors = values[chosen], basis @ vectors[:, chosen]
    outside = values.log().abs() > math.log(cutoff)
    values, vectors = torch.where(outside, values, 1.0), torch.where(outside, vectors, 0.0)
    missing = rank - len(values)
    return LowRank(
        scale.to(dtype),
        torch.nn.functional.pad(vectors, (0, missing)).to(dtype),
        torch.nn.functional.pad(values, (0, missing), value=1.0).to(dtype),
    )


def _geometric_mean(covariance: Tensor, slopes: Tensor) -> Tensor:
    """The positive S with S·slopes·S = covariance: slopes^(−½) (slopes^½ · covariance · slopes^½)^½ slopes^(−½)."""
    values, vectors = torch.linalg.eigh(slopes)
    half, inverse = ((vectors * values.pow(power)) @ vectors.mT for power in (0.5, -0.5))
    values, vectors = torch.linalg.eigh(half @ covariance @ half)
    middle = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    found = inverse @ middle @ inverse
    return 0.5 * (found + found.mT)


__all__ = [
    "KINDS",
    "Dense",
    "Diagonal",
    "Kind",
    "LowRank",
    "Metric",
    "check_metric",
    "dense_from",
    "diagonal_from",
    "low_rank_from",
    "metric_for",
    "shrunk",
]
