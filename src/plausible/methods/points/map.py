"""Maximum a posteriori: the weights of highest posterior density, by AdamW or SGD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.adversarial import input_range, with_neighbours
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights, clone
from plausible.engine.method import (
    BatchSize,
    Fitted,
    Info,
    Method,
    Patience,
    Plan,
    Run,
    Traits,
    check_patience,
    check_training,
    plan_patiently,
)
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


class MAPState(NamedTuple):
    weights: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor


@register
@dataclass(frozen=True)
class MAP(Method):
    """w* = argmax_w log p(D | w) + log p(w)

    The point of highest posterior density, found by stochastic gradients of −log p(w, D)/N.

    One draw, no epistemic uncertainty. The prior does the regularising; `optimiser=AdamW(weight_decay=…)` adds decoupled decay
    on top. With `patience` a part `holdout` of the data is set aside (None: a tenth, more where that is fewer than 20 rows, a
    quarter at most), and training stops after so many epochs without a better held-out log-likelihood: without it a learned noise
    shrinks on small data until intervals are far too narrow. `epochs` None means 200, and on small data as many as 2,000 steps
    take, stopped early: "auto" is then a patience of 20 epochs, of 200 steps at least, and none where `epochs` are given.
    `adversarial` ε > 0 adds to each batch its copy moved by ε of each input's range to where it is least likely. Cost: one
    forward and one backward pass a step, three with `adversarial`.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3, warmup=0.02))
    optimiser: Optimiser = field(default_factory=AdamW)
    patience: Patience = "auto"
    holdout: float | None = None
    adversarial: float = 0.0

    name: ClassVar[str] = "map"
    traits: ClassVar[Traits] = Traits(shaping=("adversarial", "holdout"), bias="a point: the epistemic variance is zero")

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"MAP: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )
        check_patience(self)
        check_number(self, "adversarial", at_least=0)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return plan_patiently(self, num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Tensor | None:
        return self.adversarial * input_range(run.data) if self.adversarial else None

    def start(self, model: Model, run: Run[Tensor | None], key: Tensor) -> MAPState:
        weights = clone(model.initial)
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return MAPState(weights, clone(model.buffers), self.optimiser.init(weights), step)

    def step(self, model: Model, run: Run[Tensor | None], state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        if run.prepared is not None:
            batch = with_neighbours(model, state.weights, batch, state.buffers, run.prepared, train=True)
        # a centred Gaussian prior is left to the optimiser as L2 decay: no gradient of it is computed
        scale = -1.0 / model.num_data
        joint = model.gradient(state.weights, batch, buffers=state.buffers, train=True, scale=scale, leave_l2=True)
        lr = rate(self.lr, state.step, run.steps)
        weights, optimiser = self.optimiser.update(state.weights, joint.grads, state.optimiser, lr, joint.l2)
        new = MAPState(weights, joint.buffers, optimiser, state.step + 1)
        return new, {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}

    @classmethod
    def conforming(cls) -> MAP:
        return cls(epochs=120, batch_size=20, lr=Cosine(0.1))

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        mean, covariance = problem.posterior()
        return mean, torch.zeros_like(covariance)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted)
