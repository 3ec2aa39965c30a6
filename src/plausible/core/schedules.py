"""Numbers that change while training runs: learning rates, temperatures, weights of a term.

A schedule is called with the number of steps already made (a 0-d integer tensor, 0 at the first step) and the number of steps
planned, and gives a 0-d float32 tensor on the same device. It consists of tensor operations alone and can sit inside a
compiled, captured or vmapped step. Beyond the planned steps it keeps its last value.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from plausible.core.serialise import check_count, check_number, register
from plausible.core.transforms import hold

__all__ = ["Constant", "Cosine", "Cyclical", "Exponential", "Linear", "Polynomial", "Ramp", "Schedule", "Steps", "as_schedule"]


class Schedule(ABC):
    """A function of the step; subclasses are frozen dataclasses."""

    @abstractmethod
    def __call__(self, step: Tensor, total: int) -> Tensor:
        """The value at `step` (0-d, counted from 0) of `total` steps."""


def _progress(step: Tensor, total: int) -> Tensor:
    """step/total, held within [0, 1]."""
    return (step.float() / max(total, 1)).clamp(0.0, 1.0)


def _half_wave(left: Tensor) -> Tensor:
    """(1 + cos(π(1 − left)))/2 as sin²(π·left/2), which keeps its digits where the wave comes down to 0."""
    return torch.sin(0.5 * math.pi * left).square()


@register
@dataclass(frozen=True)
class Constant(Schedule):
    """value."""

    value: float

    def __post_init__(self) -> None:
        check_number(self, "value", above=0)

    def __call__(self, step: Tensor, total: int) -> Tensor:  # noqa: ARG002
        return torch.full((), self.value, dtype=torch.float32, device=step.device)


@register
@dataclass(frozen=True)
class Linear(Schedule):
    """start + (end − start)·t/T."""

    start: float
    end: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "start", "end", at_least=0)

    def __call__(self, step: Tensor, total: int) -> Tensor:
        return self.start + (self.end - self.start) * _progress(step, total)


@register
@dataclass(frozen=True)
class Ramp(Schedule):
    """0 up to the share `start` of the steps, then along a line to `value` at the share `end`, and there it stays.

    For the weight of a divergence: the data are heard first (Sønderby et al. 2016, Molchanov et al. 2017).
    """

    value: float = 1.0
    start: float = 0.025
    end: float = 0.1

    def __post_init__(self) -> None:
        check_number(self, "value", above=0)
        check_number(self, "start", at_least=0, below=1)
        check_number(self, "end", above=self.start, at_most=1)

    def __call__(self, step: Tensor, total: int) -> Tensor:
        return self.value * ((_progress(step, total) - self.start) / (self.end - self.start)).clamp(0.0, 1.0)


@register
@dataclass(frozen=True)
class Cosine(Schedule):
    """end + (start − end)·(1 + cos(π s))/2, with s the progress after the warm-up.

    Loshchilov & Hutter (2017), SGDR, without restarts. During the first `warmup` part of the steps (a fraction of the
    total, W steps) the value grows linearly: start·(t + 1)/W.
    """

    start: float
    end: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "start", above=0)
        check_number(self, "end", at_least=0)
        check_number(self, "warmup", at_least=0, below=1)

    def __call__(self, step: Tensor, total: int) -> Tensor:
        warm = math.ceil(self.warmup * total)
        # counted from the end, so that the last step comes down to `end` exactly
        wave = self.end + (self.start - self.end) * _half_wave(_progress(total - step, total - warm))
        return torch.where(step < warm, self.start * _progress(step + 1, warm), wave) if warm else wave


@register
@dataclass(frozen=True)
class Exponential(Schedule):
    """start·(end/start)^(t/T): the same factor at every step."""

    start: float
    end: float

    def __post_init__(self) -> None:
        check_number(self, "start", "end", above=0)

    def __call__(self, step: Tensor, total: int) -> Tensor:
        return self.start * torch.exp(math.log(self.end / self.start) * _progress(step, total))


@register
@dataclass(frozen=True)
class Steps(Schedule):
    """value·factor^k, with k the number of milestones passed; milestones are fractions of the total."""

    value: float
    milestones: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_number(self, "value", "factor", above=0)
        # files give lists, users one number
        given = self.milestones if isinstance(self.milestones, list | tuple) else (self.milestones,)
        for milestone in given:
            if isinstance(milestone, bool) or not isinstance(milestone, numbers.Real) or not 0 < milestone < 1:
                raise ValueError(f"Steps: milestones must be fractions of the run between 0 and 1, got {milestone!r}")
        object.__setattr__(self, "milestones", tuple(sorted(float(milestone) for milestone in given)))

    def __call__(self, step: Tensor, total: int) -> Tensor:
        value = torch.full((), self.value, dtype=torch.float32, device=step.device)
        for milestone in self.milestones:
            # no branch on the step: it is a tensor of a compiled program
            value = torch.where(step >= math.ceil(milestone * total), value * self.factor, value)
        return value


@register
@dataclass(frozen=True)
class Polynomial(Schedule):
    """a·(b + t)^(−gamma): Σε = ∞ and Σε² < ∞ for gamma in (½, 1].

    Welling & Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics. It depends on the step alone, not
    on the number planned; `Polynomial.between` finds a and b from the first and the last value.
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        check_number(self, "a", "b", "gamma", above=0)

    @classmethod
    def between(cls, start: float, end: float, total: int, gamma: float = 0.55) -> Polynomial:
        """The schedule that is `start` at step 0 and `end` at step `total`."""
        if not 0 < end < start < math.inf:
            raise ValueError(f"Polynomial.between needs 0 < end < start, got start={start!r}, end={end!r}")
        if total < 1:
            raise ValueError(f"Polynomial.between: total must be at least 1, got {total!r}")
        # from a·b^(−γ) = start and a·(b + T)^(−γ) = end; expm1 keeps digits where the two are close
        b = total / math.expm1(math.log(start / end) / gamma)
        return cls(a=start * b**gamma, b=b, gamma=gamma)

    def __call__(self, step: Tensor, total: int) -> Tensor:  # noqa: ARG002
        # a·(b + t)^(−γ) = start·e^(−γ log(1 + t/b)): exact at t = 0
        start = self.a * self.b**-self.gamma
        return start * torch.exp(-self.gamma * torch.log1p(step.float() / self.b))


@register
@dataclass(frozen=True)
class Cyclical(Schedule):
    """start/2·(cos(π·mod(t, ⌈T/M⌉)/⌈T/M⌉) + 1): M waves that each begin at `start` and fall towards 0.

    Zhang et al. (2020), Cyclical stochastic gradient MCMC; their k counts from 1, our t = k − 1 from 0.
    """

    start: float
    cycles: int = 4

    def __post_init__(self) -> None:
        check_number(self, "start", above=0)
        check_count(self, "cycles")

    def __call__(self, step: Tensor, total: int) -> Tensor:
        length = max(math.ceil(total / self.cycles), 1)
        # beyond the plan the value stays, rather than a new wave
        place = torch.remainder(step.clamp(max=max(total - 1, 0)), length)
        return self.start * _half_wave((length - place).float() / length)


def rate(value: float | Schedule, step: Tensor, total: int) -> Tensor:
    """The value at `step`: a number stands for itself. A 0-d float32 tensor on the device of `step`."""
    if isinstance(value, Schedule):
        # computed once in a compiled step, not for every weight that it multiplies
        return hold(value.__call__(step, total))
    if isinstance(value, Tensor):  # stacked settings
        return value.to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=step.device)


def as_schedule(value: float | Schedule, name: str = "lr") -> Schedule:
    """A schedule as it is, a positive number as a `Constant`; `name` is the argument that messages speak of."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a positive number or a schedule such as plausible.schedules.Cosine(0.01), "
            f"got {value!r} of type {type(value).__qualname__}"
        )
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return Constant(float(value))
