"""What chains learn while they warm up: step sizes by dual averaging, masses from windows of draws.

    log ε_{t+1} = μ − (√t/γ) · mean error,    error = target − acceptance        (Hoffman and Gelman 2014)

Everything is a tree of tensors of constant shape. A kernel calls `begin` once and `update` after each transition of the
warm-up; the step sizes `[chains]` and the metric to use next are `adaptation.step` and `adaptation.metric`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Evaluation, Point
from plausible.blocks.chains.integrators import (
    Dense,
    Diagonal,
    Kind,
    Metric,
    check_metric,
    integrate,
    low_rank_from,
    metric_for,
    shrunk,
)

# ---------------------------------------------------------------------------------------------------------------------
# Step sizes
SPEED, DELAY, FADING = 0.05, 10.0, 0.75  # γ, t₀, κ


class DualAveraging(NamedTuple):
    """Log step sizes tried, their running averages, mean errors, and the centres they are drawn to: `[chains]`; a count."""

    log_step: Tensor
    averaged: Tensor
    error: Tensor
    centre: Tensor
    updates: Tensor

    @classmethod
    def begin(cls, step: Tensor) -> Self:
        """Before the first transition, from first step sizes `[chains]`; the sizes tried are pulled towards ten times as much."""
        log_step = step.double().log()
        zero = torch.zeros_like(log_step)
        # log 10: tries err on the bold side, since small steps cost more than a few rejections
        return cls(log_step, log_step.clone(), zero, log_step + 2.302585092994046, torch.zeros_like(log_step[..., 0]))

    def update(self, acceptance: Tensor, target: float) -> Self:
        """After a transition with these mean acceptance probabilities `[chains]`."""
        count = self.updates + 1
        weight = 1 / (count + DELAY)
        # a divergence has no acceptance: NaN counts as 0
        error = (1 - weight) * self.error + weight * (target - acceptance.double().nan_to_num(0.0).clamp(0, 1))
        log_step = self.centre - error * count.sqrt() / SPEED
        # late tries count more in the average: they are made near the answer
        fade = count.pow(-FADING)
        return self._replace(
            log_step=log_step, averaged=fade * log_step + (1 - fade) * self.averaged, error=error, updates=count
        )

    @property
    def step(self) -> Tensor:
        return self.log_step.exp()

    @property
    def final(self) -> Tensor:
        return self.averaged.exp()


def first_step(
    density: Density, metric: Metric, position: Tensor, here: Evaluation, noise: Tensor, start: Tensor, scheme: str = "leapfrog"
) -> Tensor:
    """Step sizes `[chains]` at which one step is accepted with a probability of about 0.8 (Hoffman and Gelman 2014).

    Each chain's is doubled or halved from `start` until its acceptance crosses 0.8, all chains together, with momenta from the
    standard normals `noise` `[chains, P]`. `here` is the density at `position`. Cost: one gradient for each doubling.
    """
    point = Point(position, metric.momentum(noise), *here)
    energy = metric.kinetic(point.momentum) - density.value(here.log_likelihood, here.log_prior)

    def accepted(step: Tensor) -> Tensor:
        end = integrate(density, metric, point, step, 1, scheme)
        there = metric.kinetic(end.momentum) - density.value(end.log_likelihood, end.log_prior)
        return (energy - there).nan_to_num(nan=-torch.inf) > -0.2231435513142097  # log 0.8

    step = start.double().clone()
    growing = accepted(step)
    factor = torch.where(growing, 2.0, 0.5).to(step.dtype)
    searching = torch.ones_like(growing)
    for _ in range(60):
        tried = torch.where(searching, step * factor, step)
        crossed = accepted(tried) != growing
        # a growing step stops below the crossing, a shrinking one behind it
        # all chains search together, so that each doubling is one batched gradient
        step = torch.where(searching & (~crossed | ~growing), tried, step)
        searching = searching & ~crossed & (step < 1e6)
        if not bool(searching.any()):
            break
    return step


# ---------------------------------------------------------------------------------------------------------------------
# Windows
class Windows(NamedTuple):
    """Transitions whose draws count for masses, from `first` on, and those after which masses are set: `ends`."""

    first: int
    ends: tuple[int, ...]


def windows(warmup: int, before: int = 75, window: int = 25, after: int = 50) -> Windows:
    """Stan's: 75 transitions for the steps alone, windows of 25, 50, 100, … for masses, 50 for the steps again.

    The last window takes what would not fill another twice its length. Warm-ups shorter than 150 are divided 15 : 75 : 10,
    those below 20 leave masses alone. For 1000: windows end after transitions 99, 149, 249, 449 and 949.
    """
    if warmup < 20:
        return Windows(warmup, ())
    if before + window + after > warmup:
        # Stan's shares where the warm-up is short
        before, after = int(0.15 * warmup), int(0.1 * warmup)
        window = warmup - before - after
    last = warmup - after - 1
    ends = [before + window - 1]
    while ends[-1] < last:
        window *= 2
        end = ends[-1] + window
        # no short window at the end: few draws would set the masses that stay
        ends.append(last if end == last or end + 2 * window >= warmup - after else end)
    return Windows(before, tuple(ends))


# ---------------------------------------------------------------------------------------------------------------------
# Moments of the draws of a window
def _joined(count: Tensor, mean: Tensor, squares: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squares around it with one more value, the `count`-th (Welford 1962)."""
    delta = value.double() - mean
    mean = mean + delta / count
    return mean, squares + delta * (value.double() - mean)


class Variances(NamedTuple):
    """Running means and sums of squares around them of each chain: a count, `[chains, P]` twice, float64."""

    count: Tensor  # type: ignore[assignment]
    mean: Tensor
    squares: Tensor

    def add(self, position: Tensor, gradient: Tensor) -> Self:  # noqa: ARG002
        count = self.count + 1
        return type(self)(count, *_joined(count, self.mean, self.squares, position))

    def metric(self, dtype: torch.dtype) -> Metric:
        variance = self.squares.mean(0) / (self.count - 1).clamp(min=1)
        return Diagonal(shrunk(variance, self.count * len(self.mean)).to(dtype))


Slope = Literal["none", "each", "pooled"]  # masses from draws alone; from gradients too, by chain or for all


class Slopes(NamedTuple):
    """Running means and sums of squares of draws and of the gradients there: a count, `[chains, P]` four times.

    On a Gaussian of precision Λ the gradient has variance Λ_ii: it shows how narrow the density is given all other
    weights, which is what a step has to fit, where the variance of draws shows how wide it is altogether, and takes
    long to be seen. `pooled` (0 or 1) makes one metric for all chains.
    """

    count: Tensor  # type: ignore[assignment]
    mean: Tensor
    squares: Tensor
    slope: Tensor
    slope_squares: Tensor
    pooled: Tensor

    def add(self, position: Tensor, gradient: Tensor) -> Self:
        count = self.count + 1
        wide = _joined(count, self.mean, self.squares, position)
        return type(self)(count, *wide, *_joined(count, self.slope, self.slope_squares, gradient), self.pooled)

    def metric(self, dtype: torch.dtype) -> Metric:
        """Inverse masses √(Var q / Var ∇), `[chains, P]` or `[P]` (Seyboldt, Carlson and Carpenter 2024)."""
        return Diagonal(self.inverse_mass(1, dtype)[0] if bool(self.pooled) else self.inverse_mass(len(self.mean), dtype))

    def inverse_mass(self, groups: int, dtype: torch.dtype) -> Tensor:
        """Inverse masses for so many groups of neighbouring chains, each from the mean variances of its chains: `[groups, P]`."""
        wide, steep = (part.unflatten(0, (groups, -1)).mean(1) for part in (self.squares, self.slope_squares))
        tiny = 1e-20 * self.count
        # a weight that never moved, or has no slope, keeps a mass of about 1
        return ((wide + tiny) / (steep + tiny)).sqrt().clamp(1e-10, 1e10).to(dtype)


class Covariances(NamedTuple):
    """Running means of each chain `[chains, P]` and one sum of products around them over all chains `[P, P]`, float64."""

    count: Tensor  # type: ignore[assignment]
    mean: Tensor
    products: Tensor

    def add(self, position: Tensor, gradient: Tensor) -> Self:  # noqa: ARG002
        count, delta = self.count + 1, position.double() - self.mean
        mean = self.mean + delta / count
        return self._replace(count=count, mean=mean, products=self.products + delta.mT @ (position.double() - mean))

    def metric(self, dtype: torch.dtype) -> Metric:
        chains = len(self.mean)
        pooled = self.products / (chains * (self.count - 1).clamp(min=1))
        # few draws leave it without full rank; shrunk and in float64 it has a factor
        covariance = shrunk(0.5 * (pooled + pooled.mT), self.count * chains).double()
        return Dense(covariance.to(dtype), torch.linalg.cholesky(covariance).to(dtype))


class Recent(NamedTuple):
    """The latest draws and gradients of all chains, `[length, chains, P]` each, and how many there were.

    The length R of `rank` is the number of directions that the metric is to have: a state holds tensors alone.
    """

    count: Tensor  # type: ignore[assignment]
    positions: Tensor
    gradients: Tensor
    rank: Tensor

    def add(self, position: Tensor, gradient: Tensor) -> Self:
        """With one more draw of each chain, in place of the oldest. In place: the buffers are the state's own."""
        # a ring: the state has one size, whatever the length of a window
        place = int(self.count) % len(self.positions)
        self.positions[place], self.gradients[place] = position, gradient
        return self._replace(count=self.count + 1)

    def metric(self, dtype: torch.dtype) -> Metric:
        there = min(int(self.count), len(self.positions))
        wide, steep = ((x[:there] - x[:there].mean(0)).flatten(0, 1) for x in (self.positions, self.gradients))
        return low_rank_from(wide, steep, len(self.rank), dtype)


Moments = Variances | Slopes | Covariances | Recent


def moments_for(kind: Kind, position: Tensor, rank: int = 10, slopes: Slope = "none") -> Moments:
    """Empty moments for draws at positions `[chains, P]`; with `slopes` diagonal masses come from gradients too."""
    chains, size = position.shape
    zero = torch.zeros((), dtype=torch.float64, device=position.device)
    if kind == "dense":
        return Covariances(zero, zero.new_zeros(chains, size), zero.new_zeros(size, size))
    if kind == "lowrank":
        # about 256 draws in all: enough for a few directions, little memory
        length = max(16, -(-256 // chains))
        recent = position.new_zeros(length, chains, size)
        return Recent(zero, recent, recent.clone(), zero.new_zeros(min(rank, size)))
    # nothing is learned: empty tensors keep the tree's structure
    size = 0 if kind == "unit" else size
    if slopes != "none" and kind == "diag":
        a, b, c, d = (zero.new_zeros(chains, size) for _ in range(4))
        return Slopes(zero, a, b, c, d, torch.full_like(zero, slopes == "pooled"))
    return Variances(zero, zero.new_zeros(chains, size), zero.new_zeros(chains, size))


# ---------------------------------------------------------------------------------------------------------------------
# Both
@dataclass(frozen=True)
class Warmup:
    """How a kernel adapts: over `length` transitions, to acceptance `target`, with masses of a `metric` kind of at most `rank`.

    `slopes` says whether diagonal masses come from gradients too, and whether each chain has its own.
    """

    length: int
    target: float = 0.8
    metric: Kind = "diag"
    rank: int = 10
    slopes: Slope = "none"

    def __post_init__(self) -> None:
        check_metric("Warmup", self.metric)
        if not 0 < self.target < 1:
            raise ValueError(f"Warmup: target_acceptance must lie in (0, 1), got {self.target}")


class Adaptation(NamedTuple):
    """Step sizes `[chains]` and the metric to use, with what they come from."""

    step: Tensor
    metric: Metric
    averaging: DualAveraging
    moments: Moments


Find = Callable[[Metric, Tensor], Tensor]


def begin(warmup: Warmup, position: Tensor, step: Tensor | float) -> Adaptation:
    """Before the first transition: the unit metric and these step sizes, `[chains]` or one for all."""
    chains = len(position)
    steps = torch.as_tensor(step, dtype=torch.float64, device=position.device).expand(chains).clone()
    metric = metric_for(warmup.metric, position, warmup.rank)
    # with an axis of chains from the start, so that the state never changes its shapes
    if warmup.slopes == "each" and warmup.metric == "diag":
        metric = Diagonal(torch.ones_like(position))
    moments = moments_for(warmup.metric, position, warmup.rank, warmup.slopes)
    return Adaptation(steps, metric, DualAveraging.begin(steps), moments)


def update(
    adaptation: Adaptation,
    warmup: Warmup,
    number: int,
    position: Tensor,
    gradient: Tensor,
    acceptance: Tensor,
    find: Find | None = None,
) -> Adaptation:
    """After transition `number` (from 0) of the warm-up, which ended at `position` with mean acceptance probabilities `[chains]`.

    At the end of a window the metric is set from its draws and the averaging of steps starts again, from `find(metric, step)`
    where it is given (`first_step`, say), else from the last. After the last transition steps are their averages. Beyond it,
    nothing changes.
    """
    if number >= warmup.length:
        return adaptation
    averaging = adaptation.averaging.update(acceptance, warmup.target)
    metric, moments = adaptation.metric, adaptation.moments
    first, ends = windows(warmup.length)
    if warmup.metric != "unit" and ends and first <= number <= ends[-1]:
        moments = moments.add(position, gradient)
        if number in ends and int(moments.count) > 1:
            metric = moments.metric(position.dtype)
            moments = moments_for(warmup.metric, position, warmup.rank, warmup.slopes)
            # steps of the old metric say little about the new one
            averaging = DualAveraging.begin(averaging.final if find is None else find(metric, averaging.final))
    step = averaging.final if number == warmup.length - 1 else averaging.step
    return Adaptation(step, metric, averaging, moments)
