"""A curve of low loss between two networks, trained like a network (Garipov et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks import curves
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.schedules import rate
from plausible.core.transforms import hold
from plausible.core.weights import Weights, clone, index, select, tree_map
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Stage, Traits
from plausible.methods.averages.base import Collecting, TrajectoryAverage
from plausible.posteriors.draws import DrawsPosterior

ENDS = "ends/"
"""What the names of the two ends [2, …] begin with, among the tensors that are left beside the bend."""


class CurveState(NamedTuple):
    """`weights` are those of the bend."""

    weights: Weights
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class Connecting(Stage):
    """min over the bend θ of  E_t −log p(w(t), D),  t ~ U(0, 1),  w(t) on the curve from w₁ by θ to w₂

    The ends are what the stage before left, or where the run starts, and stay. The bend begins halfway, and moves by the optimiser,
    the rate and for the epochs of the path of `method`. Batch norms see the statistics of their batches, at every t.
    """

    method: TrajectoryAverage
    kind: str = "bezier"

    traits: ClassVar[Traits] = Traits(divisible=False, keeps_draws=False, noisy=True)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return Collecting(self.method).plan(num_data, per_epoch)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> CurveState:
        middle = tree_map(lambda ends: ends.mean(0) if ends.is_floating_point() else ends[0].clone(), _ends(run))
        weights = clone(select(middle, model.initial))
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return CurveState(weights, clone(select(middle, model.buffers)), self.method.optimiser.init(weights), key, step)

    def step(self, model: Model, run: Run[Any], state: CurveState, batch: Batch) -> tuple[CurveState, Info]:
        like = next(iter(state.weights.values())).new_zeros(())
        parts = hold(curves.shares(self.kind, random.uniform(state.key, state.step, like)))
        first, second = (index(_ends(run), end) for end in (0, 1))
        here = curves.point(parts, first, state.weights, second)
        joint = model.gradient(here, batch, buffers=state.buffers, train=True, scale=-1.0 / model.num_data)
        grads = {name: parts[1] * grad for name, grad in joint.grads.items()}
        lr = rate(self.method.lr, state.step, run.steps)
        weights, optimiser = self.method.optimiser.update(state.weights, grads, state.optimiser, lr, {})
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return CurveState(weights, joint.buffers, optimiser, state.key, state.step + 1), info

    def kept(self, model: Model, run: Run[Any], state: CurveState) -> Weights:
        left = {name: value.unsqueeze(0) for name, value in {**state.weights, **state.buffers}.items()}
        return left | {ENDS + name: _ends(run)[name] for name in model.initial}


def _ends(run: Run[Any]) -> Weights:
    """Both ends, stacked."""
    return run.before or run.starts or {}


@dataclass(frozen=True)
class Connection(Method):
    """The bend of a curve between the two networks at which the run starts, as its only draw."""

    path: TrajectoryAverage
    kind: str = "bezier"

    traits: ClassVar[Traits] = Connecting.traits

    def stages(self) -> tuple[Stage, ...]:
        return (Connecting(self.path, self.kind),)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted)
