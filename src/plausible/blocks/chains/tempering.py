"""Powers of the likelihood: what samplers share that walk from the prior to the posterior, or stand at several places between.

    π_β(w) ∝ p(D | w)^β p(w),        β from 0 (the prior) to 1 (the posterior)

Ladders of β, weights and resampling, a Hamiltonian move with a step size for each row, and ratios of normalising constants.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import DIVERGENT

Spacing = Literal["power", "sigmoid", "geometric"]
SPACINGS: tuple[Spacing, ...] = ("power", "sigmoid", "geometric")


# ---------------------------------------------------------------------------------------------------------------------
# Ladders
def ladder(steps: int, spacing: Spacing = "power") -> Tensor:
    """0 = β_0 < … < β_steps = 1: float64 `[steps + 1]`.

    "power": (k/K)⁵, dense near the prior, where the likelihood varies most (Friel and Pettitt 2008). "sigmoid": slow at both
    ends, Σ(4(2k/K − 1)) scaled to [0, 1] (Grosse, Ghahramani and Adams 2015). "geometric": 0, then equal ratios from 10⁻⁴ to 1.
    """
    place = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    if spacing == "power":
        return place**5
    if spacing == "sigmoid":
        curve = torch.sigmoid(4 * (2 * place - 1))
        return (curve - curve[0]) / (curve[-1] - curve[0])
    if spacing == "geometric":
        return torch.cat([place[:1], torch.logspace(-4, 0, steps, dtype=torch.float64)]) if steps > 1 else place
    raise ValueError(f"spacing must be one of {', '.join(map(repr, SPACINGS))}, got {spacing!r}")


def next_power(log_likelihood: Tensor, beta: float, share: float) -> float:
    """The next β' at which the weights p(D | w)^(β' − β) of `[N]` equally weighted particles have an ESS of `share` · N; at most 1.

    By bisection; the ESS falls with β' (Jasra, Stephens, Doucet and Tsagaris 2011).
    """
    wanted = share * len(log_likelihood)
    if effective((1 - beta) * log_likelihood) >= wanted:
        return 1.0
    # sixty halvings are the digits of float64
    low, high = 0.0, 1 - beta
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective(middle * log_likelihood) >= wanted else (low, middle)
    return beta + high


def respaced(betas: Tensor, rejections: Tensor) -> Tensor:
    """The ladder `[K]`, from high to low with the same ends, over which the communication barrier is cut into equal parts.

    Λ(β) = Σ of the rejection rates `[K − 1]` of swaps up to β, a function that does not depend on the ladder to first order: equal
    differences of Λ give equal rates of swaps (Syed, Bouchard-Côté, Deligiannidis and Doucet 2021). Linear between the rungs.
    """
    # pairs that always swapped keep some distance, or two rungs would fall together
    barrier = torch.cat([rejections.new_zeros(1), rejections.clamp(min=1e-3).cumsum(0)])
    wanted = torch.linspace(0, float(barrier[-1]), len(betas), dtype=barrier.dtype, device=barrier.device)
    upper = torch.searchsorted(barrier, wanted).clamp(1, len(betas) - 1)
    part = (wanted - barrier[upper - 1]) / (barrier[upper] - barrier[upper - 1])
    ladder = torch.lerp(betas[upper - 1], betas[upper], part)
    # rounding must not move the posterior itself
    ladder[0], ladder[-1] = betas[0], betas[-1]
    return ladder


# ---------------------------------------------------------------------------------------------------------------------
# Weights
def effective(log_weights: Tensor) -> float:
    """(Σw)²/Σw²: from 1, where one particle outweighs all, to N; 0 where no weight is positive."""
    # weights relative to the largest: exp of the others cannot overflow
    top = log_weights.max()
    if not math.isfinite(float(top)):
        return 0.0
    weights = (log_weights - top).exp()
    return float(weights.sum().square() / weights.square().sum())


def log_mean(log_weights: Tensor) -> Tensor:
    return log_weights.logsumexp(0) - math.log(len(log_weights))


def systematic(log_weights: Tensor, offset: Tensor | float) -> Tensor:
    """Rows `[N]`, ascending, of which row i comes up N·W_i times on average, rounded up or down; `offset` ~ U(0, 1).

    One uniform number moves a comb of N teeth over the weights laid end to end: unbiased, and less noisy than the usual schemes.
    """
    count = len(log_weights)
    # in float32 a cumulative sum of many weights would end short of 1
    ends = log_weights.double().softmax(0).cumsum(0)
    teeth = (torch.arange(count, dtype=torch.float64, device=log_weights.device) + offset) / count
    return torch.searchsorted(ends / ends[-1], teeth).clamp(max=count - 1)


def relative_variance(log_weights: Tensor, ancestors: Tensor) -> float:
    """Var(Ẑ)/Z² of the mean weight, from one run: (N Σ_a W_a² − 1)/(N − 1), W_a the share of weight that descends from particle a.

    First ancestors are independent draws, so what they leave behind shows the noise of all that came between (Chan and Lai 2013;
    Lee and Whiteley 2018). Without resampling it is (N/ESS − 1)/(N − 1), the variance of independent weights. `ancestors` `[N]`.
    """
    count = len(log_weights)
    shares = torch.zeros(count, dtype=torch.float64, device=log_weights.device)
    # descendants of one particle are one term: they are not independent of each other
    shares.index_add_(0, ancestors, log_weights.double().softmax(0))
    return max(0.0, (count * float(shares.square().sum()) - 1) / max(1, count - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Moves
class Place(NamedTuple):
    """Positions `[rows, P]` with what the density says there; `gradient` is that of the power it is bound to."""

    position: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    gradient: Tensor


class Moved(NamedTuple):
    """Where rows are after a move; acceptance probabilities, divergences (0 or 1) and energies, `[rows]` each in float64."""

    place: Place
    acceptance: Tensor
    divergent: Tensor
    energy: Tensor


def hamiltonian(
    density: Density, place: Place, noise: Tensor, level: Tensor, step: Tensor, inverse_mass: Tensor, count: int
) -> Moved:
    """`count` leapfrogs from p = M^½ `noise`, accepted where `level` < exp(H(start) − H(end)): leaves the bound density invariant.

    `noise` `[rows, P]` ~ N(0, I), `level` `[rows]` ~ U(0, 1), `step` `[rows]`, `inverse_mass` `[P]` or `[rows, P]`; the last
    two must not depend on `place`. Cost: `count` gradients of all rows.
    """
    momentum = noise * inverse_mass.rsqrt()
    end = density.leapfrogs(Point(place.position, momentum, *place[1:]), step, inverse_mass, count)

    def energy(point: Point) -> Tensor:
        kinetic = 0.5 * (inverse_mass.double() * point.momentum.double().square()).sum(-1)
        return kinetic - density.value(point.log_likelihood, point.log_prior)

    before, after = energy(Point(place.position, momentum, *place[1:])), energy(end)
    error = (after - before).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)  # both ends infinite: stay
    accept = level.double().log() < -error
    new = Place(end.position, end.log_likelihood, end.log_prior, end.gradient)
    # row by row: each has its own step and its own verdict
    kept = Place(*(torch.where(accept.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(new, place)))
    lost = (error > DIVERGENT).double()
    return Moved(kept, (-error).clamp(max=0).exp(), lost, torch.where(accept, after, before))


# ---------------------------------------------------------------------------------------------------------------------
# Ratios of normalising constants
class Bridges(NamedTuple):
    """Sums for log Z_k/Z_{k+1} between rungs of a ladder: logs of Σ exp(½Δβ ℓ) at the hotter one, of Σ exp(−½Δβ ℓ) at the colder.

    `hot` and `cold` `[blocks, K − 1, chains]`, `terms` `[blocks]` how many each sum has. A block is a stretch of the run;
    blocks of chains are nearly independent, which gives a standard error.
    """

    hot: Tensor
    cold: Tensor
    terms: Tensor


def no_bridges(blocks: int, rungs: int, chains: int, device: torch.device) -> Bridges:
    """Sums without a term: logarithms so low that they add nothing."""
    # −∞ would be refused as a state that is not finite
    nothing = torch.full((blocks, rungs - 1, chains), -1e300, dtype=torch.float64, device=device)
    return Bridges(nothing, nothing.clone(), torch.zeros(blocks, dtype=torch.float64, device=device))


def bridged(sums: Bridges, block: int, betas: Tensor, log_likelihood: Tensor) -> Bridges:
    """The sums with one more term in a block: `betas` `[K]` from high to low, `log_likelihood` `[K, chains]`."""
    # half of the way from each side: neither expectation has to reach across the whole gap
    half = 0.5 * (betas[:-1] - betas[1:]).unsqueeze(-1)
    hot, cold, terms = (part.clone() for part in sums)
    hot[block] = torch.logaddexp(hot[block], half * log_likelihood[1:])
    cold[block] = torch.logaddexp(cold[block], -half * log_likelihood[:-1])
    terms[block] += 1
    return Bridges(hot, cold, terms)


def log_ratio(sums: Bridges) -> tuple[float, float]:
    """Log Z_1/Z_K from geometric bridges, Σ_k log E_{k+1} e^{½Δβ ℓ} − log E_k e^{−½Δβ ℓ}, and its standard error.

    (Bennett 1976; Meng and Wong 1996.) Stepping stones from both sides: each pair of rungs meets in the middle between them.
    The error is the jackknife's over blocks and chains. NaN where there is no term yet, and as the error of a single one.
    """
    used = sums.terms > 0
    if not bool(used.any()):
        return math.nan, math.nan
    units = int(used.sum()) * sums.hot.shape[-1]
    hot, cold = (part[used].movedim(1, -1).reshape(units, -1) for part in (sums.hot, sums.cold))  # [units, K − 1]
    value = float((hot.logsumexp(0) - cold.logsumexp(0)).sum())  # both sides have equally many terms
    if units < 2:
        return value, math.nan
    # each unit left out in turn
    without = ~torch.eye(units, dtype=torch.bool, device=hot.device)
    left = torch.stack([hot[rows].logsumexp(0) - cold[rows].logsumexp(0) for rows in without]).sum(-1)
    return value, math.sqrt(float((left - left.mean()).square().sum()) * (units - 1) / units)
