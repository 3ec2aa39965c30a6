"""What chains by stochastic gradients share: batches, step sizes, burn-in, thinning, temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Joint, Model
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import check_count
from plausible.core.transforms import hold
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Fitted, Info, Method, Plan, Run, Traits, check_training, plan_epochs
from plausible.posteriors.draws import DrawsPosterior


class StochasticState(NamedTuple):
    """`momenta` is whatever the dynamics carry beside the weights (friction, preconditioners, …): a tree of tensors."""

    weights: Weights
    buffers: Weights
    momenta: Any
    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class StochasticGradientChain(Method):
    """θ' = dynamics(θ, ∇̂ log p(θ, D), ξ),  ∇̂ from a batch of B of the N examples, its likelihood scaled by N/B

    The base of samplers whose steps see minibatches: a subclass says `move`, and `carry` where it has momenta.

    `lr` is in units of the full-data log joint. The first `burn_in` fraction of the steps is dropped, then every `thin`-th state is
    kept (None: about 100 draws in all). `temperature` 1 targets the posterior.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = 1e-4
    burn_in: float = 0.5
    thin: int | None = None
    temperature: float = 1.0

    traits: ClassVar[Traits] = Traits(noisy=True, bias="of the order of the step size")

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_training(self)
        as_schedule(self.lr)
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"{who}: burn_in is a fraction of the steps, in [0, 1), got {self.burn_in}")
        if self.thin is not None:
            check_count(self, "thin", at_least=1)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"{who}: temperature must be at least 0 and finite, got {self.temperature}")

    def carry(self, model: Model) -> Any:
        """The momenta to start with; none here."""
        return ()

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

    def start(self, model: Model, run: Run[Any], key: Tensor) -> StochasticState:
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return StochasticState(clone(model.initial), clone(model.buffers), self.carry(model), key, step)

    def step(self, model: Model, run: Run[Any], state: StochasticState, batch: Batch) -> tuple[StochasticState, Info]:
        joint = model.gradient(state.weights, batch, buffers=state.buffers, train=True)
        lr = rate(self.lr, state.step, run.steps)
        noise = random.normal(state.key, state.step, select(state.weights, model.random))  # points move without
        weights, momenta = self.move(state, joint, noise, lr, hold((lr * self.temperature).sqrt()))
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return StochasticState(weights, joint.buffers, momenta, state.key, state.step + 1), info

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted)
