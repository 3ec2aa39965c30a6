"""Microcanonical Langevin Monte Carlo: motion at constant speed whose direction turns with the gradient and a little noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plausible.blocks.chains import convergence
from plausible.blocks.chains.adaptation import Variances
from plausible.blocks.chains.density import Density
from plausible.blocks.chains.integrators import DIVERGENT, gradients, scheme_for
from plausible.core.serialise import check_number, register
from plausible.engine.method import Traits, check_choice
from plausible.methods.chains.base import STATISTICS, Chains, ChainState, taken

WIDTH = 9.0  # logs of energy errors this far from the one that is wanted count e^(−½) as much
FIRST = 0.5  # energy variance per weight of the very first step
MEMORY = 150  # steps over which the step size is averaged, in warm-ups that are long enough
AUTOCORRELATION = 0.4  # L over the autocorrelation time of a coordinate
RECORD = 2**20  # numbers kept to estimate that
PHASES = (0.2, 0.5, 0.7)  # of the warm-up: steps alone; variances; steps in the new shape; then autocorrelations


class Motion(NamedTuple):
    """Directions, accumulated errors, and what the warm-up finds: steps ε and lengths L `[chains]`, scales of coordinates `[P]`.

    `weighted` and `weight` are the running sums behind ε, `limit` a step that was too long, `moments` those of the
    positions, `record` some coordinates of the last phase, `[transitions, chains, coordinates]`.
    """

    direction: Tensor
    error: Tensor
    step: Tensor
    length: Tensor
    scale: Tensor
    weighted: Tensor
    weight: Tensor
    limit: Tensor
    moments: Variances
    record: Tensor


@dataclass(frozen=True)
class Microcanonical(Chains):
    """The base of samplers by microcanonical Langevin steps: see `MCLMC`."""

    warmup: int = 5000
    thin: int = 10
    energy_variance: float = 5e-4
    initial_energy_variance: float | None = None
    integrator: str = "minimum-norm"
    metric: Literal["diag", "unit"] = "diag"
    step_size: float | None = None
    length: float | None = None

    traits: ClassVar[Traits] = replace(
        Chains.traits, bias="no step is refused: relative errors of variances of the order of √energy_variance"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme_for(self.integrator)
        check_number(self, "energy_variance", above=0)
        for name in ("initial_energy_variance", "step_size", "length"):
            if getattr(self, name) is not None:
                check_number(self, name, above=0)
        check_choice(self, "metric", ("diag", "unit"))

    def _bounds(self) -> tuple[int, ...]:
        """The transitions at which the phases of the warm-up end; short ones have only the first."""
        return tuple(int(part * self.warmup) for part in PHASES) if self.warmup >= 50 else (self.warmup,) * 3

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """Random directions, the first length √P, and steps whose energy errors are not wild."""
        chains, size = state.position.shape
        if size < 2:
            raise ValueError(
                f"{type(self).__name__}: needs at least two weights to have directions, got {size}; use NUTS or HMC"
            )
        blank = torch.zeros_like(state.log_prior)
        recorded = self.warmup - self._bounds()[-1]
        columns = max(1, min(size, RECORD // max(1, recorded * chains)))
        nothing = blank.new_zeros(chains, size)
        first = self.length or math.sqrt(size)
        tuning = Motion(
            unit(state.normal(0, state.position)),
            blank,
            torch.full_like(blank, self.step_size or 0.25 * first),
            torch.full_like(blank, first),
            torch.ones_like(state.position[0]),
            blank.clone(),
            blank.clone(),
            torch.full_like(blank, 1e6),
            Variances(blank[0].clone(), nothing, nothing.clone()),
            state.position.new_zeros(recorded, chains, columns),
        )
        # steps are halved until one of them keeps the energy, so that the first transitions do not leave where chains start
        for _ in range(60 if self.step_size is None else 0):
            _, change = self._integrated(target, state, tuning)
            wild = ~(change.square() <= FIRST * target.size)
            if not bool(wild.any()):
                break
            tuning = tuning._replace(step=torch.where(wild, 0.5 * tuning.step, tuning.step))
        return state._replace(adaptation=tuning, statistics=state.no_statistics())

    def transition(self, target: Density, state: ChainState) -> ChainState:
        now: Motion = state.adaptation
        moved, change = self._integrated(target, state, now)
        finite = torch.isfinite(change)  # in which the density and the gradient at the end are
        accept = finite & (change.abs() <= DIVERGENT)
        heading = torch.where(accept.unsqueeze(-1), moved.adaptation.direction, -now.direction)  # or back where it came from
        # so much noise that directions forget themselves over the length L, whatever the step
        spread = (torch.expm1(2 * now.step / now.length) / target.size).sqrt().unsqueeze(-1).to(target.dtype)
        direction = unit(heading + spread * state.normal(1, heading))
        change = torch.where(finite, change, torch.inf)
        now = now._replace(direction=direction, error=now.error + torch.where(accept, change, 0.0))
        cost = torch.full_like(change, gradients(self.integrator))
        statistics = dict(zip(STATISTICS, (accept.double(), (~accept).double(), now.step.clone(), cost, now.error)))
        new = taken(state, moved, accept)._replace(statistics=statistics)
        return new._replace(adaptation=self._learned(now, new, change) if self.warming(state) else now)

    def _integrated(self, target: Density, state: ChainState, now: Motion) -> tuple[ChainState, Tensor]:
        """One step of the scheme: the new state and its energy error `[chains]`, kinetic less gained log density."""
        kicks, drifts, _ = scheme_for(self.integrator)
        scale = now.step.unsqueeze(-1).to(target.dtype) * now.scale
        position, direction, slope = state.position, now.direction, state.gradient
        kinetic = torch.zeros_like(now.step)
        for i, kick in enumerate(kicks):
            direction, gained = turned(direction, now.scale * slope, kick * now.step)
            kinetic = kinetic + gained
            if i < len(drifts):
                position = position + drifts[i] * scale * direction
                there = target.evaluate(position)
                slope = there.gradient
        before = target.value(state.log_likelihood, state.log_prior)
        after = target.value(there.log_likelihood, there.log_prior)
        moved = state._replace(position=position, **there._asdict(), adaptation=now._replace(direction=direction))
        return moved, kinetic + before - after

    def _learned(self, now: Motion, new: ChainState, change: Tensor) -> Motion:
        """The motion adapted after a transition of the warm-up, whose energy errors were `change`, `[chains]`."""
        number = int(new.step)
        first, second, third = self._bounds()
        if number < third and self.step_size is None:
            now = self._stepped(now, change, number / max(third, 1))
        if first <= number < second:
            now = now._replace(moments=now.moments.add(new.position, new.gradient))
            if number == second - 1:
                now = self._reshaped(now)
        if number >= third and len(now.record):
            last, columns = new.position.shape[-1] - 1, now.record.shape[-1]
            # coordinates evenly spread over all weights stand for the others
            chosen = torch.linspace(0, last, columns, dtype=torch.float64, device=new.position.device).long()
            now.record[number - third] = new.position[:, chosen]
            if number == self.warmup - 1 and len(now.record) >= 16:
                now = self._lengthened(now)
        return now

    def _stepped(self, now: Motion, change: Tensor, part: float) -> Motion:
        """ε⁶ ∝ the wanted over the found energy variance, in a running average that doubts what is far off."""
        begun = self.initial_energy_variance or self.energy_variance
        # from the first energy variance to the final one, evenly in logarithms
        wanted = begun ** (1 - part) * self.energy_variance**part
        ratio = (change.square() / (now.direction.shape[-1] * wanted) + 1e-8).clamp(max=1e6)
        # errors many orders of magnitude off say little about the step that would be right
        trust = torch.exp(-0.5 * (ratio.log() / WIDTH).square())
        memory = min(MEMORY, 10 + self.warmup // 15)
        fade = (memory - 1) / (memory + 1)
        # the variance of energy errors grows like ε⁶, so the average is one of variance/ε⁶
        weighted = fade * now.weighted + trust * ratio / now.step**6
        weight = fade * now.weight + trust
        # a step that left the domain says nothing of ε⁶, only that it was too long
        limit = torch.where(torch.isfinite(change), now.limit, 0.8 * torch.minimum(now.step, now.limit))
        step = torch.minimum((weighted / weight).pow(-1 / 6), limit)
        return now._replace(step=step, weighted=weighted, weight=weight, limit=limit)

    def _reshaped(self, now: Motion) -> Motion:
        """Scales from the variances, L from their sum; the steps are sought anew around as large a part of L."""
        variance = now.moments.squares / (now.moments.count - 1).clamp(min=1)  # [chains, P]
        size = variance.shape[-1]
        length = variance.sum(-1).sqrt().clamp(min=1e-6)
        step, limit = now.step, now.limit
        if self.metric == "diag":
            scale = now.moments.metric(now.direction.dtype).inverse_mass.sqrt()  # type: ignore[union-attr]
            # lengths are measured in standard deviations from here on, and steps with them
            shrink = math.sqrt(size) / length
            length = torch.full_like(length, math.sqrt(size))
            now = now._replace(scale=scale, weighted=torch.zeros_like(step), weight=torch.zeros_like(step))
            if self.step_size is None:
                step, limit = step * shrink, torch.full_like(limit, 1e6)
        return now._replace(step=step, limit=limit, length=now.length if self.length is not None else length)

    def _lengthened(self, now: Motion) -> Motion:
        """L from autocorrelation times, of each chain the mean over its coordinates."""
        if self.length is not None:
            return now
        count, chains, columns = now.record.shape
        effective = convergence.ess(now.record.reshape(1, count, -1)).reshape(chains, columns)
        # a coordinate that never moves has no autocorrelation time: it counts as 1
        times = (count / effective.clamp(min=1)).nan_to_num(nan=1.0).mean(-1)
        return now._replace(length=AUTOCORRELATION * times * now.step)


@register
@dataclass(frozen=True)
class MCLMC(Microcanonical):
    """dw = u dt, du = (I − uuᵀ)(∇ log p(w, D)/(P − 1) dt + η dW), |u| = 1

    Langevin motion at constant speed, for which p(w | D) is stationary; steps are not corrected (Robnik et al. 2023).

    A transition is one step ε of an `integrator` and a partial refreshment of u that makes it forget itself over a length L.
    In warm-up each chain's ε is set so that the variance of the energy error is `energy_variance` per weight (from
    `initial_energy_variance` on), then coordinates are scaled (`metric="diag"`), and L becomes 0.4 autocorrelation times;
    `step_size` and `length` given are kept. The bias is, relative to variances, about √energy_variance. `energy` is the error
    so far. Cost: one or two gradients a transition.
    """

    name: ClassVar[str] = "mclmc"

    @classmethod
    def conforming(cls) -> MCLMC:
        # Steps so small that the bias drowns in the noise
        return cls(draws=10, chains=256, warmup=300, thin=3, energy_variance=1e-5, initial_energy_variance=0.1)


def unit(direction: Tensor) -> Tensor:
    return direction / direction.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(direction.dtype).tiny)


def turned(direction: Tensor, slope: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """The direction after `time` `[chains]` under a constant `slope` `[chains, P]`, exactly, and the kinetic energy gained.

    With e = slope/|slope| and δ = time·|slope|/(P − 1): u' = (u + e (sinh δ + e·u (cosh δ − 1)))/(cosh δ + e·u sinh δ), and
    (P − 1) log(cosh δ + e·u sinh δ) is gained. Written with ζ = e^(−|δ|), which does not overflow.
    """
    # sums over all weights in float64: energy errors are small differences of large numbers
    steep = (slope * slope).sum(-1, dtype=torch.float64).sqrt()
    along = (direction * slope).sum(-1, dtype=torch.float64)
    if slope.device.type != "cpu":
        kept, pull, gained = _turn(steep, along, time, slope.shape[-1], torch)
    else:  # a few numbers for each chain: NumPy needs a fifth of the time that tensors need
        parts = _turn(steep.numpy(), along.numpy(), time.numpy(), slope.shape[-1], np)
        kept, pull, gained = map(torch.from_numpy, parts)
    kept, pull = (part.unsqueeze(-1).to(direction.dtype) for part in (kept, pull))
    return torch.addcmul(kept * direction, pull, slope), gained


def _turn(steep: Any, along: Any, time: Any, size: int, backend: Any) -> tuple[Any, Any, Any]:
    """How much of the old direction and of the slope is in the new one, and the energy gained: `[chains]` each."""
    steep = steep + 1e-300  # where there is no slope, nothing turns
    away, cosine = backend.abs(time) * steep, backend.sign(time) * along / steep
    # ζ = e^{−δ} instead of sinh and cosh, which overflow where the slope is steep
    fallen = backend.exp(-away / (size - 1))
    lost = 1 - fallen
    norm = 1 + cosine + (1 - cosine) * fallen * fallen
    pull = backend.sign(time) * lost * (1 + fallen + cosine * lost) / (norm * steep)
    return 2 * fallen / norm, pull, away + (size - 1) * backend.log(0.5 * norm)
