"""What chains by stochastic gradients share: batches, step sizes, burn-in, thinning, temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch, num_rows
from plausible.core.model import Joint, Model
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import check_count
from plausible.core.transforms import hold
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import (
    BatchSize,
    Fitted,
    Info,
    Method,
    Plan,
    Run,
    Traits,
    check_choice,
    check_training,
    plan_epochs,
)
from plausible.methods.stochastic_gradient import control_variates as variates
from plausible.posteriors.draws import DrawsPosterior

SHORT, MEMORY = 10, 100
"""Steps over which gradients are averaged: the last tenth of all, and from so many to so many."""


class Gradients(NamedTuple):
    """Running means of ∇̂ log p(θ, D) and of its squared norm."""

    mean: Weights
    square: Tensor

    def seen(self, grads: Weights, step: Tensor, learning: Tensor) -> Gradients:
        """One more gradient; nothing changes where there is nothing to learn any more."""
        part = torch.where(learning, 1 / torch.minimum(step + 1, (0.1 * step).clamp(SHORT, MEMORY)), 0.0)
        mean = {name: torch.lerp(old, grads[name].to(old.dtype), part.to(old.dtype)) for name, old in self.mean.items()}
        return Gradients(mean, hold(torch.lerp(self.square, _squared(grads, self.square), part)))

    def variance(self, step: Tensor) -> Tensor:
        """E‖∇̂‖² − ‖E∇̂‖²: what a gradient that only points downhill does not add to. At first not much below E‖∇̂‖²."""
        spread = self.square - _squared(self.mean, self.square)
        return torch.maximum(spread, self.square * 0.5 ** step.clamp(max=60))


def _squared(named: Weights, like: Tensor) -> Tensor:
    return sum((one.square().sum(dtype=torch.float32) for one in named.values()), torch.zeros_like(like))


class StochasticState(NamedTuple):
    """`momenta` is whatever the dynamics carry beside the weights (friction, preconditioners, …): a tree of tensors.

    `gradients` are what a step size is found by, () where it is given; `control` is what reduces the noise of batches, () without.
    """

    weights: Weights
    buffers: Weights
    momenta: Any
    key: Tensor
    step: Tensor
    gradients: Gradients | tuple[()]
    control: variates.Control | tuple[()] = ()


class Phase(NamedTuple):
    """Where a chain is: the share of its step size (None: all of it), its temperature, whether "auto" still learns, and how
    much of the way from N/B times the step size that it finds (1) to that step size (0) is ahead.
    """

    share: Tensor | None
    temperature: Tensor | float
    learning: Tensor
    ahead: Tensor


@dataclass(frozen=True)
class StochasticGradientChain(Method):
    """θ' = dynamics(θ, ∇̂ log p(θ, D), ξ),  ∇̂ from a batch of B of the N examples, its likelihood scaled by N/B

    The base of samplers whose steps see minibatches: a subclass says `move`, and `carry` where it has momenta.

    `lr` is in units of the full-data log joint; "auto" is cT/Var[∇̂ log p(θ, D)] with c from `stable`, the variances of all elements
    added up over the last tenth of the steps (10 to 100): N/B times as much at the start of the burn-in, constant from its end on.
    At a stationary law that sum is T times the trace of the curvature, plus the noise of batches, and so no direction is unstable.
    The first `burn_in` fraction of the steps is dropped, then every `thin`-th state is kept (None: about 100 draws in all).
    `temperature` 1 targets the posterior.

    `control` takes noise out of the gradients of batches: ∇̂(θ) − ∇̂(θ̂) + ∇(θ̂), with ∇ the gradient by all data. "start": θ̂ are the
    weights at which the chain starts, which should be a mode (`init=`; Baker et al. 2019); a second gradient a step. "svrg": θ̂ are
    those at the start of the epoch before (Dubey et al. 2016), whose gradient is added up in windows of rows; a third one.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule | Literal["auto"] = "auto"
    burn_in: float = 0.5
    thin: int | None = None
    temperature: float = 1.0
    control: Literal["start", "svrg"] | None = None

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return Traits(noisy=True, divisible=self.control is None, bias="of the order of the step size")

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_training(self)
        if not isinstance(self.lr, str):
            as_schedule(self.lr)
        elif self.lr != "auto":
            raise ValueError(f"{who}: lr must be a positive number, a schedule or 'auto', got {self.lr!r}")
        if self.control is not None:
            check_choice(self, "control", ("start", "svrg"))
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"{who}: burn_in is a fraction of the steps, in [0, 1), got {self.burn_in}")
        if self.thin is not None:
            check_count(self, "thin", at_least=1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"{who}: temperature must be at least 0 and finite, got {self.temperature}")
        if self.lr == "auto" and not (self.burn_in and self.temperature):
            raise ValueError(
                f"{who}: lr='auto' finds a step size while burning in, by the noise of the draws: give lr where there is neither"
            )

    def carry(self, model: Model) -> Any:
        """The momenta to start with; none here."""
        return ()

    def stable(self) -> float:
        """A step size of this over the trace of the curvature is stable everywhere, and batches at most double a variance."""
        return 4.0

    def seen(self, model: Model, state: StochasticState, joint: Joint, batch: Batch) -> Any:
        """The momenta that `move` finds in its state: those of the last step, or what this gradient makes of them."""
        return state.momenta

    def natural(self, momenta: Any, grads: Weights) -> Weights:
        """The gradient in coordinates in which the dynamics treat all directions alike."""
        return grads

    def move(self, state: StochasticState, joint: Joint, noise: Weights, lr: Tensor, spread: Tensor) -> tuple[Weights, Any]:
        """New weights and momenta. `noise` is N(0, 1) of the random weights; `spread` is √(lr · temperature)."""
        raise NotImplementedError

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        plan = plan_epochs(self, num_data, per_epoch)
        burn_in = int(self.burn_in * plan.steps)
        left = plan.steps - burn_in
        # neighbouring states are nearly the same: about a hundred of them say as much
        thin = max(1, left // 100) if self.thin is None else self.thin
        if thin > left:
            raise ValueError(
                f"{type(self).__name__}: thin={thin} keeps no draw: only {left} of {plan.steps} steps are left after burn-in; "
                "run more epochs or thin less"
            )
        return replace(plan, burn_in=burn_in, thin=thin)

    def prepare(self, model: Model, run: Run[Any]) -> None:
        if self.control is not None:
            variates.check(type(self).__name__, model, run, self.control == "svrg")

    def start(self, model: Model, run: Run[Any], key: Tensor) -> StochasticState:
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        gradients: Gradients | tuple[()] = ()
        if self.lr == "auto":
            nothing = torch.zeros((), dtype=torch.float32, device=key.device)
            gradients = Gradients({name: torch.zeros_like(weight) for name, weight in model.initial.items()}, nothing)
        known = () if self.control is None else variates.started(model, run, self.control == "svrg")
        return StochasticState(clone(model.initial), clone(model.buffers), self.carry(model), key, step, gradients, known)

    def step(self, model: Model, run: Run[Any], state: StochasticState, batch: Batch) -> tuple[StochasticState, Info]:
        burn_in = max(1, int(self.burn_in * run.steps))
        ahead = (1 - state.step / burn_in).clamp(min=0.0)
        return self.advance(model, run, state, batch, Phase(None, self.temperature, state.step < burn_in, ahead))

    def advance(
        self, model: Model, run: Run[Any], state: StochasticState, batch: Batch, phase: Phase
    ) -> tuple[StochasticState, Info]:
        """One step in this phase of a chain."""
        joint = model.gradient(state.weights, batch, buffers=state.buffers, train=True)
        known = state.control
        if isinstance(known, variates.Control):
            if self.control == "svrg":
                known = variates.renewed(model, run, known, state.weights, state.step, num_rows(batch.x))
            joint = variates.reduced(model, known, joint, batch)
        state = state._replace(momenta=self.seen(model, state, joint, batch))
        lr, gradients = self._rate(model, run, state, joint, batch, phase)
        noise = random.normal(state.key, state.step, select(state.weights, model.random))  # points move without
        weights, momenta = self.move(state, joint, noise, lr, hold((lr * phase.temperature).sqrt()))
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        if self.lr == "auto":
            info["lr"] = lr
        return StochasticState(weights, joint.buffers, momenta, state.key, state.step + 1, gradients, known), info

    def _rate(
        self, model: Model, run: Run[Any], state: StochasticState, joint: Joint, batch: Batch, phase: Phase
    ) -> tuple[Tensor, Gradients | tuple[()]]:
        """The step size, and the running moments of gradients that "auto" takes it from until the draws begin."""
        gradients: Gradients | tuple[()] = ()
        if isinstance(state.gradients, Gradients):
            gradients = state.gradients.seen(self.natural(state.momenta, joint.grads), state.step, phase.learning)
            larger = (model.num_data / num_rows(batch.x)) ** phase.ahead  # at first as if a batch were all data, to get near
            lr = hold(self.stable() * self.temperature * larger / gradients.variance(state.step))
        else:
            lr = rate(self.lr, state.step, run.steps)  # type: ignore[arg-type]
        return lr if phase.share is None else hold(phase.share * lr), gradients

    def constant_rate(self) -> float:
        """The step size, where it is known and stays the same."""
        assert not isinstance(self.lr, str), "only where the step is known"
        return float(as_schedule(self.lr)(torch.zeros(()), 1))

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted)


def rolled(
    state: StochasticState,
    joint: Joint,
    noise: Weights,
    lr: Tensor,
    spread: Tensor,
    velocity: Weights,
    friction: float | Tensor,
) -> tuple[Weights, Weights]:
    """Weights and velocities after a step with friction: v' = (1 − friction)v + lr ∇ + spread ξ, θ' = θ + v'."""
    weights, moved = {}, {}
    for name, weight in state.weights.items():
        v = (1 - friction) * velocity[name] + lr * joint.grads[name]
        moved[name] = v + spread * noise[name] if name in noise else v
        weights[name] = weight + moved[name]
    return weights, moved
