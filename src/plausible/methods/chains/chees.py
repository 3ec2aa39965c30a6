"""ChEES-HMC: many chains in step, whose common trajectory length is tuned while they warm up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation, Slope, first_step
from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import Diagonal, Metric
from plausible.core.serialise import check_count, check_number, register
from plausible.methods.chains.base import Adapting, ChainState

SPEED = 0.025  # of Adam over log T
MEMORY = 0.95  # of Adam for squares of gradients; it has no momentum
LEAST = 0.1  # what an acceptance counts at least, so that one refusal does not decide for all chains
TYPICAL = 2.247  # the T of independent coordinates with the right masses
FADING = 0.6  # weights of the running average of log T fall like t^−FADING


class Length(NamedTuple):
    """log T in use and its running average, Adam's mean square and the transitions since masses were last set: 0-d each."""

    log_length: Tensor
    averaged: Tensor
    square: Tensor
    tried: Tensor

    def climbed(self, slope: Tensor, longest: Tensor) -> Length:
        """One step of Adam up the slope, which does not grow beyond `longest`."""
        count = self.tried + 1
        # Adam without momentum, as its authors use it here (Hoffman, Radul & Sountsov 2021)
        square = MEMORY * self.square + (1 - MEMORY) * slope.square()
        scaled = slope / (square / (1 - MEMORY**count)).sqrt().clamp(min=1e-300)
        log_length = torch.minimum(self.log_length + SPEED * scaled, torch.maximum(self.log_length, longest.log()))
        # later iterates count more, since masses and step sizes were still wrong for the first
        fade = count.pow(-FADING)
        return Length(log_length, fade * log_length + (1 - fade) * self.averaged, square, count)

    def restarted(self, old: Metric, new: Metric) -> Length:
        """Averages begun anew because masses were set, with T in the new unit of time: that of what was slowest in the old one.

        And not below `TYPICAL`, which all coordinates ask for once their masses are right.
        """
        assert isinstance(old, Diagonal)
        assert isinstance(new, Diagonal)
        slowest = 0.5 * (new.inverse_mass / old.inverse_mass).double().log().max()
        log_length = (self.log_length - slowest.clamp(min=0)).clamp(min=math.log(TYPICAL))
        return Length(log_length, log_length.clone(), torch.zeros_like(self.square), torch.zeros_like(self.tried))


class ChEESAdaptation(NamedTuple):
    """Step size and masses, common to all chains, and the trajectory length."""

    shared: Adaptation
    length: Length


@register
@dataclass(frozen=True)
class ChEES(Adapting):
    """(w, p) → n leapfrog steps of ε, n = ⌈h_t T/ε⌉, T = argmax E[(‖w' − E w'‖² − ‖w − E w‖²)²]

    HMC for many parallel chains, whose trajectory length is tuned by how far it changes the chains' distance from their
    mean.

    In the warm-up T climbs the gradient of the criterion over all chains, weighted by acceptance (Hoffman, Radul & Sountsov
    2021). All chains take the same number of steps; h_t is a low-discrepancy sequence in (0, 1). The common step size aims at
    a harmonic mean acceptance of `target_acceptance`. `step_size` is where the search for ε starts (None: 0.1), `length` a T
    to keep. Needs at least two chains, and likes sixteen. Cost: T/2ε gradients a transition on average, at most
    `max_leapfrogs`.
    """

    chains: int = 16
    target_acceptance: float = 0.651
    metric: Literal["diag", "unit"] = "diag"
    step_size: float | None = None
    length: float | None = None
    max_leapfrogs: int = 1000
    adapt: bool = True

    slopes: ClassVar[Slope] = "pooled"
    name: ClassVar[str] = "chees"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "max_leapfrogs", at_least=1)
        if self.metric not in ("diag", "unit"):
            raise ValueError(f"ChEES: metric must be 'diag' or 'unit', got {self.metric!r}; HMC and NUTS have the others")
        if self.length is not None:
            check_number(self, "length", above=0)
        if not self.adapt and self.length is None:
            raise ValueError("ChEES: adapt=False needs a length")
        if self.chains < 2:
            raise ValueError(
                f"ChEES: chains must be at least 2, got {self.chains}: the length is tuned across chains; for one use NUTS"
            )

    @classmethod
    def conforming(cls) -> ChEES:
        return cls(draws=100, chains=32, warmup=60)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size common to all chains, unit masses, and trajectories of a few steps."""
        state = super().begin(target, state)
        start = adaptation.begin(self.schedule, state.position, _common(state.adaptation.step))
        step = start.step[0]
        log_length = (4 * step).log() if self.length is None else torch.full_like(step, math.log(self.length))
        zero = torch.zeros_like(step)
        return state._replace(adaptation=ChEESAdaptation(start, Length(log_length, log_length.clone(), zero, zero.clone())))

    def transition(self, target: Density, state: ChainState) -> ChainState:
        tuned: ChEESAdaptation = state.adaptation
        step = tuned.shared.step
        warming = self.adapt and self.warming(state)
        # after the warm-up the average, which is less noisy than the last iterate
        length = tuned.length.log_length if warming else tuned.length.averaged
        wanted = van_der_corput(int(state.step) + 1) * float(length.exp() / step[0])
        count = max(1, min(math.ceil(wanted), self.max_leapfrogs))
        noise, level = state.normal(0, state.position), state.uniform(1, state.log_prior)
        new, start, end = self.trajectory(target, state, tuned.shared, noise, level, count)
        if warming:
            tuned = self._tuned(target, tuned, new, start, end, count * step[0])
        return new._replace(adaptation=tuned)

    def _tuned(
        self, target: Density, tuned: ChEESAdaptation, new: ChainState, start: Point, end: Point, time: Tensor
    ) -> ChEESAdaptation:
        """The step size by the harmonic mean of acceptances, masses in windows, T up the slope of the criterion."""
        now, acceptance = tuned.shared, new.statistics["acceptance"]
        # the harmonic mean is ruled by the worst chains, which a common step must serve too
        harmonic = (1 / (1 / acceptance.clamp(min=LEAST)).mean()).expand_as(acceptance)

        def find(metric: Metric, step: Tensor) -> Tensor:
            return _common(first_step(target, metric, new.position, new.evaluation, new.normal(2, new.position), step))

        again = find if self.step_size is None else None
        shared = adaptation.update(now, self.schedule, int(new.step), new.position, new.gradient, harmonic, again)
        length = tuned.length
        if self.length is None:
            slope = time * criterion_slope(now.metric, start, end, acceptance)
            length = length.climbed(slope, self.max_leapfrogs * now.averaging.final[0])
            if shared.metric is not now.metric:
                length = length.restarted(now.metric, shared.metric)
        return ChEESAdaptation(shared, length)


def _common(step: Tensor) -> Tensor:
    """The geometric mean for all chains."""
    return step.log().mean().exp().expand_as(step).clone()


def van_der_corput(number: int) -> float:
    """The digits of a number in base 2 mirrored at the point: ½, ¼, ¾, ⅛, … fill (0, 1) evenly."""
    mirrored, place = 0.0, 0.5
    while number:
        mirrored, place, number = mirrored + place * (number & 1), place / 2, number >> 1
    return mirrored


def criterion_slope(metric: Metric, start: Point, end: Point, acceptance: Tensor) -> Tensor:
    """d/dt of ¼ E[(‖x' − E x'‖² − ‖x − E x‖²)²] at the ends of the trajectories, in coordinates x of unit variance: 0-d.

    That is E[(‖x' − E x'‖² − ‖x − E x‖²) (x' − E x')ᵀẋ'], each chain times its acceptance probability: where all are
    refused, it says nothing.
    """
    assert isinstance(metric, Diagonal)
    # in units of the masses, so that no coordinate rules the criterion by its scale
    scale = metric.inverse_mass.double().sqrt()
    # a trajectory that ran away says nothing of where T should go
    usable = (acceptance > 0) & torch.isfinite(end.position).all(-1) & torch.isfinite(end.momentum).all(-1)
    weight = torch.where(usable, acceptance, 0.0)
    share = (weight / weight.sum().clamp(min=1e-300)).unsqueeze(-1)
    there = torch.where(usable.unsqueeze(-1), end.position.double() / scale, 0.0)
    velocity = torch.where(usable.unsqueeze(-1), end.momentum.double() * scale, 0.0)
    here = start.position.double() / scale
    there, here = there - (share * there).sum(0), here - here.mean(0)
    change = there.square().sum(-1) - here.square().sum(-1)
    return (weight * change * (there * velocity).sum(-1)).mean()
