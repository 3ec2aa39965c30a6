"""What ensembles along one path share: a rate that comes and goes, and a member wherever it has come down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core.data import Batch
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.optimisers import SGD
from plausible.core.schedules import Schedule
from plausible.core.serialise import check_count
from plausible.core.transforms import hold, transformed
from plausible.core.weights import Weights, clone, index, num_bytes, select
from plausible.engine.method import Info, Method, Plan, Run, Stage, Traits, plan_epochs
from plausible.methods.averages.base import Drawing, OnPath
from plausible.methods.points.map import MAP

EPOCHS, STEPS = 4, 50
"""Where nobody says: epochs of a cycle, and steps of it at least."""
MEMBER = "member/"
"""What the names of members, stacked, begin with among the tensors that cycles leave."""


@dataclass(frozen=True)
class PathEnsemble(OnPath):
    """The weights at the lowest rate of every one of `cycles`, one after the other: a subclass says the `wave`.

    `lr` is the highest rate. `mode` trains first; None: start at the weights as they are, or at `init=` of `fit`.
    """

    lr: float = 0.02
    cycles: int = 10

    traits: ClassVar[Traits] = replace(OnPath.traits, shaping=("cycles",), bias="networks that SGD passes by")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lr, Schedule):
            raise TypeError(f"{type(self).__name__}: lr is the highest rate of a cycle, a number, got {self.lr!r}")
        check_count(self, "cycles")

    @classmethod
    def conforming(cls) -> Method:
        return cls(MAP.conforming(), epochs=600, batch_size=None, optimiser=SGD(), cycles=3)

    def wave(self, progress: Tensor) -> Tensor:
        """The share of `lr` at this progress through a cycle, in (0, 1]: t = 1/c for the first of its c steps, 1 for the last."""
        raise NotImplementedError

    def lowest(self, length: int) -> int:
        """After how many of the steps of a cycle its member is taken."""
        return length

    def stages(self) -> tuple[Stage, ...]:
        return (*self.training, Cycling(self), Drawing(self))

    def drawn(self, model: Model, left: Mapping[str, Tensor], key: Tensor) -> Weights:
        return {name: left[MEMBER + name] for name in model.initial}


class CyclingState(NamedTuple):
    weights: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor
    members: Weights


@dataclass(frozen=True)
class Cycling(Stage):
    """The optimiser goes on with a rate that comes and goes; members are the weights where it is lowest."""

    method: PathEnsemble

    traits: ClassVar[Traits] = Traits(keeps_draws=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        method = self.method
        plan = plan_epochs(method, num_data, per_epoch, holdout=method.holdout(num_data, per_epoch))
        if method.epochs is None:
            epochs = method.cycles * max(EPOCHS, -(-STEPS // plan.per_epoch))
            plan = replace(plan, steps=epochs * plan.per_epoch)
        if plan.steps < 2 * method.cycles:
            raise ValueError(
                f"{type(method).__name__}: {plan.steps} steps cannot have {method.cycles} cycles; run more epochs, or fewer cycles"
            )
        return plan

    def start(self, model: Model, run: Run[Any], key: Tensor) -> CyclingState:
        before = index(run.before, 0) if run.before else {**model.initial, **model.buffers}
        weights = clone(select(before, model.initial))
        count = self.method.cycles
        require_memory(count * num_bytes(weights), key.device, f"{type(self.method).__name__}: {count:,} members")
        members = {name: weight.new_zeros(count, *weight.shape) for name, weight in weights.items()}
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        optimiser = self.method.optimiser.init(weights)
        return CyclingState(weights, clone(select(before, model.buffers)), optimiser, step, members)

    def step(self, model: Model, run: Run[Any], state: CyclingState, batch: Batch) -> tuple[CyclingState, Info]:
        method = self.method
        length = math.ceil(run.steps / method.cycles)
        place = torch.remainder(state.step, length) + 1
        lr = hold(method.lr * method.wave(place.float() / length))
        scale = -1.0 / model.num_data
        joint = model.gradient(state.weights, batch, buffers=state.buffers, train=True, scale=scale, leave_l2=True)
        weights, optimiser = method.optimiser.update(state.weights, joint.grads, state.optimiser, lr, joint.l2)
        members = state.members
        due = place == method.lowest(length)
        # where the host can look at the number of the step, nothing is moved in between
        if transformed() or place.device.type != "cpu" or bool(due):
            number = torch.arange(method.cycles, device=place.device)
            here = due & (number == torch.div(state.step, length, rounding_mode="floor"))
            members = {
                name: torch.where(here.view(-1, *[1] * (old.ndim - 1)), weights[name].unsqueeze(0), old)
                for name, old in members.items()
            }
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return CyclingState(weights, joint.buffers, optimiser, state.step + 1, members), info

    def kept(self, model: Model, run: Run[Any], state: CyclingState) -> Weights:
        length = math.ceil(run.steps / self.method.cycles)
        count = sum(k * length + self.method.lowest(length) <= int(state.step) for k in range(self.method.cycles))
        members = index(state.members, slice(count))
        if not count:  # interrupted in the first cycle
            members = {name: weight.unsqueeze(0) for name, weight in state.weights.items()}
        left = {name: value.unsqueeze(0) for name, value in state.buffers.items()}
        return left | {MEMBER + name: value.unsqueeze(0) for name, value in members.items()}
