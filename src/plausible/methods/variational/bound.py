"""What all methods share that maximise a bound on the evidence by stochastic gradients: one start, one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.optimisers import Optimiser
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import check_count, check_number
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Info, Method, Plan, Run, Traits, check_training, plan_epochs

INDEPENDENT = "independent weights: each scale is that of the weight given all others"
"""What to expect of methods whose weights are independent, in words."""
RHO = "rho of "
"""What the names of raw scales begin with, among the parameters."""


class Terms(NamedTuple):
    """The bound at some parameters (to be differentiated), numbers to log, and the network's buffers afterwards."""

    bound: Tensor
    info: dict[str, Tensor]
    buffers: Weights


class BoundState(NamedTuple):
    """`weights` are all parameters: weights trained as points by their names, those of q by names that say what they are."""

    weights: Weights
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor

    def part(self, prefix: str) -> Weights:
        """The parameters whose names begin so, without that beginning."""
        return {n.removeprefix(prefix): value for n, value in self.weights.items() if n.startswith(prefix)}

    @property
    def rhos(self) -> Weights:
        return self.part(RHO)


class Bound(Method):
    """max over θ of  E_q log p(D | w)/T − KL(q ‖ p)

    A subclass is a dataclass with these settings; it says its `parameters` to start from and how it `estimate`s the bound.
    """

    epochs: int | None
    batch_size: BatchSize
    lr: float | Schedule
    optimiser: Optimiser

    traits: ClassVar[Traits] = Traits(divisible=False, keeps_draws=False, noisy=True, tolerance=0.05)

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"{type(self).__name__}: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got "
                f"{self.optimiser!r}"
            )

    def parameters(self, model: Model, run: Run[Any], key: Tensor) -> Weights:
        raise NotImplementedError

    def estimate(
        self, model: Model, run: Run[Any], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        """The bound estimated from a batch. `buffers` are this call's own: the network may write to them."""
        raise NotImplementedError

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return plan_epochs(self, num_data, per_epoch)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> BoundState:
        parameters = self.parameters(model, run, key)
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return BoundState(parameters, clone(model.buffers), self.optimiser.init(parameters), key, step)

    def step(self, model: Model, run: Run[Any], state: BoundState, batch: Batch) -> tuple[BoundState, Info]:
        """One step up the gradient of the bound, divided by N."""

        def objective(
            parameters: Weights, part: Batch, buffers: Weights, key: Tensor, step: Tensor
        ) -> tuple[Tensor, tuple[dict[str, Tensor], Weights]]:
            moving = {name: b.clone() for name, b in buffers.items()}  # batch norm writes into them
            bound, info, moved = self.estimate(model, run, parameters, part, moving, key, step)
            return -bound / model.num_data, ({n: value.detach() for n, value in info.items()}, moved)

        # over N, so that learning rates mean the same for data of any size
        info, moved, grads = self._differentiated(objective, state.weights, batch, state.buffers, state.key, state.step)
        lr = rate(self.lr, state.step, run.steps)
        weights, optimiser = self.optimiser.update(state.weights, grads, state.optimiser, lr, network=model.initial)
        return BoundState(weights, moved, optimiser, state.key, state.step + 1), info

    def _differentiated(self, objective: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Tensor], Weights, Weights]:
        _, (info, moved), grads = value_and_gradient(objective, *arguments)
        return info, moved, grads

    def kept(self, model: Model, run: Run[Any], state: BoundState) -> Weights:
        return {}  # draws are made when they are asked for


def check_sampling(method: Any) -> None:
    """Checks of the settings that bounds estimated by draws of the weights share."""
    who = type(method).__name__
    check_count(method, "samples", at_least=1)
    check_number(method, "initial_scale", above=0)
    if not isinstance(method.kl_weights, str):
        as_schedule(method.kl_weights, "kl_weights")
    elif method.kl_weights not in ("uniform", "blundell"):
        raise ValueError(f"{who}: kl_weights must be 'uniform', 'blundell', a number or a schedule, got {method.kl_weights!r}")
    if method.antithetic and method.samples % 2:
        raise ValueError(f"{who}: antithetic pairs need an even number of samples, got samples={method.samples}")


def log_prior_of_points(model: Model, parameters: Weights) -> Tensor | float:
    """Log p(points)/T: what the weights that are trained as points add to a bound."""
    return model.prior.log_prob(select(parameters, model.points)) / model.temperature if model.points else 0.0
