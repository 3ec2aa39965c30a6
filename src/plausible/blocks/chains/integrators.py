"""Masses, K(p) = ½ pᵀM⁻¹p, and paths of Hamilton's equations by splitting: kicks of the momentum and drifts of the position.

    kick(b):   p ← p + b ε ∇ log π(q)        drift(a):   q ← q + a ε M⁻¹p
    step  =  kick(b₀) drift(a₀) kick(b₁) … drift(a_{s−1}) kick(b_s)

Every scheme is a palindrome of such maps: it preserves volume, and with the momentum turned round it leads back to its start.
The last gradient of a step is the first of the next, so that a scheme of s drifts costs s gradients a step. The error of the
energy H = −log π + K over a path is of order ε², or ε⁴ where `order` says so.

The best inverse mass is the covariance of the target. Metrics are named tuples of tensors, so that they are part of a state and
of its checkpoints; the axes of chains in front are optional: one matrix for all chains, or one for each.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.chains.density import Density, Point

Kind = Literal["diag", "dense", "lowrank", "unit"]
KINDS: tuple[Kind, ...] = ("diag", "dense", "lowrank", "unit")
DIVERGENT = 1000.0  # nats of energy gained from which a path has run away; trees.cpp has the same number


def _energy(momentum: Tensor, velocity: Tensor) -> Tensor:
    """½ pᵀv, summed in float64 over the last axis."""
    return 0.5 * (momentum * velocity).sum(-1, dtype=torch.float64)


def _facing(values: Tensor, momentum: Tensor) -> Tensor:
    """`[P]` or `[chains, P]` so that it broadcasts over `[chains, P]` and over paths `[chains, steps, P]`."""
    # chains are the first axis of both, steps of a path the second
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
        return _facing(self.inverse_mass, momentum) * momentum

    def momentum(self, noise: Tensor) -> Tensor:
        """Momenta p ~ N(0, M) from standard normals of the same shape."""
        return _facing(self.inverse_mass, noise).rsqrt() * noise

    def kinetic(self, momentum: Tensor) -> Tensor:
        return _energy(momentum, self.velocity(momentum))

    def rows(self, index: Tensor) -> Self:
        return self._replace(inverse_mass=self.inverse_mass[index]) if self.inverse_mass.ndim == 2 else self


class Dense(NamedTuple):
    """M⁻¹ = Σ = LLᵀ: `covariance` and its Cholesky `factor`, `[P, P]` or `[chains, P, P]`. Cost: P² a step, P³ to build."""

    covariance: Tensor
    factor: Tensor

    def velocity(self, momentum: Tensor) -> Tensor:
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
        scale = _facing(self.scale, momentum)
        return scale * self._stretched(scale * momentum, self.values)

    def momentum(self, noise: Tensor) -> Tensor:
        """D⁻¹(I + V(Λ^(−½) − I)Vᵀ)ξ ~ N(0, M)."""
        return self._stretched(noise, self.values.rsqrt()) / _facing(self.scale, noise)

    def kinetic(self, momentum: Tensor) -> Tensor:
        return _energy(momentum, self.velocity(momentum))

    def rows(self, index: Tensor) -> Self:
        return self if self.scale.ndim == 1 else type(self)(*(part[index] for part in self))

    def _stretched(self, vector: Tensor, values: Tensor) -> Tensor:
        """(I + V(diag(values) − I)Vᵀ) x."""
        along = _times(vector, self.vectors) * (_facing(values, vector) - 1)
        return vector + _times(along, self.vectors.mT)


Metric = Diagonal | Dense | LowRank


def check_metric(who: str, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{who}: metric must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")


def metric_for(kind: Kind, like: Tensor, rank: int = 10) -> Metric:
    """The unit metric of this kind, for positions `[…, P]` like `like`."""
    check_metric("metric_for", kind)
    ones = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    if kind == "dense":
        # the identity is its own Cholesky factor
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
    # off the diagonal it shrinks towards 0
    towards = torch.eye(len(variance), dtype=variance.dtype, device=variance.device) if variance.ndim == 2 else 1.0
    return (weight * variance + 5e-3 * towards) / (weight + 5)


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
    # wide directions are seen in draws, narrow ones in gradients: the basis has both
    leading = [torch.linalg.svd(x, full_matrices=False)[2][:many] for x in (wide, steep)]
    basis = torch.linalg.qr(torch.cat(leading).mT)[0]  # [P, up to 4·rank]
    unit = torch.eye(basis.shape[1], dtype=basis.dtype, device=basis.device)
    # as if one more draw were of N(0, I): positive definite, however few there are
    inside, slopes = (((x @ basis).mT @ (x @ basis) + unit) / (count + 1) for x in (wide, steep))
    values, vectors = torch.linalg.eigh(_geometric_mean(inside, slopes))
    chosen = values.log().abs().argsort(descending=True)[:rank]
    values, vectors = values[chosen], basis @ vectors[:, chosen]
    # directions near the unit metric gain less than they cost
    outside = values.log().abs() > math.log(cutoff)
    values, vectors = torch.where(outside, values, 1.0), torch.where(outside, vectors, 0.0)
    # of constant shape: states cannot change theirs between windows
    missing = (0, rank - len(values))
    vectors, values = F.pad(vectors, missing), F.pad(values, missing, value=1.0)
    return LowRank(scale.to(dtype), vectors.to(dtype), values.to(dtype))


def _geometric_mean(covariance: Tensor, slopes: Tensor) -> Tensor:
    """The positive S with S·slopes·S = covariance: slopes^(−½) (slopes^½ · covariance · slopes^½)^½ slopes^(−½)."""
    # by eigenvalues, since matrix roots are needed of both signs of ½
    values, vectors = torch.linalg.eigh(slopes)
    half, inverse = ((vectors * values.pow(power)) @ vectors.mT for power in (0.5, -0.5))
    values, vectors = torch.linalg.eigh(half @ covariance @ half)
    middle = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    mean = inverse @ middle @ inverse
    return 0.5 * (mean + mean.mT)


class Scheme(NamedTuple):
    """Coefficients of the kicks (one more than drifts) and of the drifts, each summing to 1, and the order of the error."""

    kicks: tuple[float, ...]
    drifts: tuple[float, ...]
    order: int


def _palindrome(kicks: tuple[float, ...], drifts: tuple[float, ...], stages: int, order: int) -> Scheme:
    """A symmetric scheme from the first coefficients: what is missing in the middle makes the sums 1."""
    even = stages % 2 == 0
    # what is symmetric is time-reversible, which detailed balance needs
    inner_kick = (1 - 2 * sum(kicks),) if even else (0.5 - sum(kicks),) * 2
    inner_drift = (0.5 - sum(drifts),) * 2 if even else (1 - 2 * sum(drifts),)
    return Scheme(kicks + inner_kick + kicks[::-1], drifts + inner_drift + drifts[::-1], order)


# cancels the error of second order of three leapfrogs
_JUMP = 1 / (2 - 2 ** (1 / 3))

SCHEMES: dict[str, Scheme] = {
    # velocity Verlet
    "leapfrog": _palindrome((), (), 1, 2),
    # McLachlan 1995; Omelyan, Mryglod & Folk 2002: the smallest error constant of two stages as ε → 0
    "minimum-norm": _palindrome((0.1931833275037836,), (), 2, 2),
    # Blanes, Casas & Sanz-Serna 2014: the smallest expected energy error over steps up to half the stability limit
    "two-stage": _palindrome((0.21178,), (), 2, 2),
    "three-stage": _palindrome((0.11888010966548,), (0.29619504261126,), 3, 2),
    # Forest & Ruth 1990, Yoshida 1990: three leapfrogs, the middle one backwards
    "forest-ruth": _palindrome((_JUMP / 2,), (_JUMP,), 3, 4),
    # Omelyan, Mryglod & Folk 2002: fourth order with small error constants, in four and in five stages
    "omelyan": _palindrome((0.1644986515575760, 1.235692651138917), (0.5 + 0.02094333910398989,), 4, 4),
    "omelyan-five": _palindrome((0.083983152628767, 0.682236533571909), (0.253978510841060, -0.032302867652700), 5, 4),
}


def scheme_for(name: str) -> Scheme:
    if name not in SCHEMES:
        raise ValueError(f"integrator must be one of {', '.join(map(repr, SCHEMES))}, got {name!r}")
    return SCHEMES[name]


def gradients(scheme: str) -> int:
    return len(scheme_for(scheme).drifts)


@functools.lru_cache
def stability(scheme: str) -> float:
    """The first ε ω at which the scheme is unstable on a harmonic oscillator of frequency ω: 2 for leapfrog.

    A step there is a matrix of determinant 1, stable while |trace| ≤ 2. Divide by `gradients` to compare schemes at equal cost.
    """
    kicks, drifts, _ = scheme_for(scheme)

    def trace(step: float) -> float:
        matrix = torch.eye(2, dtype=torch.float64)
        for i, kick in enumerate(kicks):
            matrix = torch.tensor([[1, 0], [-kick * step, 1]], dtype=torch.float64) @ matrix
            if i < len(drifts):
                matrix = torch.tensor([[1, drifts[i] * step], [0, 1]], dtype=torch.float64) @ matrix
        return float(matrix.trace())

    # first crossing, not any: beyond it there may be islands of stability
    low = 0.0
    while abs(trace(low + 0.01)) <= 2:
        low += 0.01
    high = low + 0.01
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if abs(trace(middle)) <= 2 else (low, middle)
    return low


def integrate(
    density: Density, metric: Metric, point: Point, step: Tensor, count: int, scheme: str = "leapfrog", keep: bool = False
) -> Point:
    """`count` steps of size `step` `[chains]` (negative: backwards in time) from `point`, whose gradient is the density's there.

    Returns the end, or with `keep` the whole path behind the start: `[chains, count, …]`. Leapfrog with diagonal masses is left
    to `density.leapfrogs`, which may be a compiled kernel. Cost: `count · gradients(scheme)` gradients.
    """
    # the only pair for which there are compiled kernels
    if scheme == "leapfrog" and isinstance(metric, Diagonal):
        return density.leapfrogs(point, step, metric.inverse_mass, count, keep=keep)
    kicks, drifts, _ = scheme_for(scheme)
    size = step.unsqueeze(-1).to(density.dtype)
    position, momentum, *_, gradient = point
    path: list[Point] = []
    pending = 0.0  # the kick that ends a step waits for the one that begins the next: both use the same gradient
    for i in range(count):
        for kick, drift in zip(kicks, drifts):
            momentum = momentum + ((pending + kick) * size) * gradient
            position = position + (drift * size) * metric.velocity(momentum)
            at = density.evaluate(position)
            gradient, pending = at.gradient, 0.0
        pending = kicks[-1]
        if keep or i == count - 1:
            path.append(Point(position, momentum + (pending * size) * gradient, *at))
    return Point(*(torch.stack(parts, dim=1) for parts in zip(*path))) if keep else path[-1]
