"""Paths of Hamilton's equations by splitting: kicks of the momentum and drifts of the position, in turn.

    kick(b):   p ← p + b ε ∇ log π(q)        drift(a):   q ← q + a ε M⁻¹p
    step  =  kick(b₀) drift(a₀) kick(b₁) … drift(a_{s−1}) kick(b_s)

Every scheme is a palindrome of such maps: it preserves volume, and with the momentum turned round it leads back to its start.
The last gradient of a step is the first of the next, so that a scheme of s drifts costs s gradients a step. The error of the
energy H = −log π + K over a path is of order ε², or ε⁴ where `order` says so.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.masses import Diagonal, Metric


class Scheme(NamedTuple):
    """Coefficients of the kicks (one more than drifts) and of the drifts, each summing to 1, and the order of the error."""

    kicks: tuple[float, ...]
    drifts: tuple[float, ...]
    order: int


def _palindrome(kicks: tuple[float, ...], drifts: tuple[float, ...], stages: int, order: int) -> Scheme:
    """A symmetric scheme from the first coefficients: what is missing in the middle makes the sums 1."""
    even = stages % 2 == 0
    inner_kick = (1 - 2 * sum(kicks),) if even else (0.5 - sum(kicks),) * 2
    inner_drift = (0.5 - sum(drifts),) * 2 if even else (1 - 2 * sum(drifts),)
    return Scheme(kicks + inner_kick + kicks[::-1], drifts + inner_drift + drifts[::-1], order)


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
    """Gradients that one step costs."""
    return len(scheme_for(scheme).drifts)


@functools.lru_cache
def stability(scheme: str) -> float:
    """The first ε ω at which the scheme is unstable on a harmonic oscillator of frequency ω: 2 for leapfrog.

    A step there is a matrix of determinant 1, stable while |trace| ≤ 2. Divide by `gradients` to compare schemes at equal cost.
    """
    kicks, drifts, _ = scheme_for(scheme)

    def trace(step: float) -> float:
        found = torch.eye(2, dtype=torch.float64)
        for i, kick in enumerate(kicks):
            found = torch.tensor([[1, 0], [-kick * step, 1]], dtype=torch.float64) @ found
            if i < len(drifts):
                found = torch.tensor([[1, drifts[i] * step], [0, 1]], dtype=torch.float64) @ found
        return float(found.trace())

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
            found = density.evaluate(position)
            gradient, pending = found.gradient, 0.0
        pending = kicks[-1]
        if keep or i == count - 1:
            path.append(Point(position, momentum + (pending * size) * gradient, *found))
    return Point(*(torch.stack(parts, dim=1) for parts in zip(*path))) if keep else path[-1]


__all__ = ["SCHEMES", "Scheme", "gradients", "integrate", "scheme_for", "stability"]
