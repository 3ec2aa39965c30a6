"""Maximum a posteriori: the weights of highest posterior density, by AdamW or SGD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.adversarial import input_range
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights, clone, tree_map
from plausible.engine.method import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.testing import LinearGaussian


class MAPState(NamedTuple):
    """Weights, the network's buffers, the optimiser's state, the step, and the best weights so far on held-out data."""

    weights: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor
    best: Weights
    best_value: Tensor
    stale: Tensor


@register
@dataclass(frozen=True)
class MAP(Method):
    """w* = argmax_w log p(D | w) + log p(w)

    The point of highest posterior density, found by stochastic gradients of −log p(w, D)/N.

    One draw, no epistemic uncertainty: the yardstick that every other method must beat. The prior does the regularising
    (a Gaussian one is L2 decay with the right constant); `optimiser=AdamW(weight_decay=…)` adds decoupled decay on top.
    `epochs` None means 200 epochs, and on small data as many as 2,000 steps take. With `patience` a fraction `holdout` of the
    data is set aside, and training stops after that many epochs without a better held-out log-likelihood, keeping the best
    weights. `adversarial` ε > 0 adds to each batch its copy moved by ε of each input's range to where it is least likely, as
    deep ensembles were proposed with. Cost: one forward and one backward pass a step, three with `adversarial`.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3))
    optimiser: Optimiser = field(default_factory=AdamW)
    patience: int | None = None
    holdout: float = 0.1
    adversarial: float = 0.0

    name: ClassVar[str] = "map"
    shaping: ClassVar[tuple[str, ...]] = ("adversarial", "holdout")
    traits: ClassVar[Traits] = Traits(bias="a point: the epistemic variance is zero")

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"MAP: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )
        if self.patience is not None and (
            isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1
        ):
            raise ValueError(f"MAP: patience must be a whole number of epochs of at least 1, or None, got {self.patience!r}")
        if not 0 < self.holdout < 1:
            raise ValueError(f"MAP: holdout must lie between 0 and 1, got {self.holdout}")
        check_number(self, "adversarial", at_least=0)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is the result."""
        return plan_epochs(self, num_data, per_epoch, patience=self.patience, holdout=self.holdout)

    def prepare(self, model: Model, data: Data) -> Model:
        """With `adversarial`, the model whose gradients see moved inputs too."""
        return model.attacked(self.adversarial * input_range(data)) if self.adversarial else model

    def start(self, model: Model, key: Tensor) -> MAPState:  # noqa: ARG002
        """Start at the module's weights."""
        weights, buffers = clone(model.initial), clone(model.buffers)
        first = next(iter(weights.values()))
        return MAPState(
            weights,
            buffers,
            self.optimiser.init(weights),
            torch.zeros((), dtype=torch.int64, device=first.device),
            clone({**weights, **buffers}) if self.patience is not None else {},
            torch.full((), -torch.inf, device=first.device),
            torch.zeros((), dtype=torch.int64, device=first.device),
        )

    def step(self, model: Model, state: MAPState, batch: Batch) -> tuple[MAPState, dict[str, Tensor]]:
        """One step down the gradient of −log p(w, D)/N."""
        joint = model.gradient(
            state.weights, batch, buffers=state.buffers, train=True, scale=-1.0 / model.num_data, leave_l2=True
        )
        lr = rate(self.lr, state.step, model.steps)
        weights, optimiser = self.optimiser.update(state.weights, joint.grads, state.optimiser, lr, joint.l2)
        new = state._replace(weights=weights, buffers=joint.buffers, optimiser=optimiser, step=state.step + 1)
        return new, {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}

    def validated(self, state: MAPState, value: Tensor) -> tuple[MAPState, Tensor]:
        """Keep the best weights by held-out log-likelihood (also for stacked members, `value` [members])."""
        better = value > state.best_value
        current = {**state.weights, **state.buffers}

        def choose(now: Tensor, best: Tensor) -> Tensor:
            return torch.where(better.reshape(better.shape + (1,) * (now.ndim - better.ndim)), now, best)

        new = state._replace(
            best=tree_map(choose, current, state.best),
            best_value=torch.where(better, value, state.best_value).to(state.best_value.dtype),
            stale=torch.where(better, 0, state.stale + 1),
        )
        return new, new.stale

    def kept(self, model: Model, state: MAPState) -> Weights:  # noqa: ARG002
        """The final weights, or the best ones where training stops early."""
        validated = self.patience is not None and bool(torch.isfinite(state.best_value))
        held = state.best if validated else {**state.weights, **state.buffers}
        return {name: value.unsqueeze(0) for name, value in held.items()}

    @classmethod
    def conforming(cls) -> MAP:
        """A few hundred steps over batches, the rate falling to nothing."""
        return cls(epochs=300, batch_size=20, lr=Cosine(0.05))

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The exact mean, and no spread."""
        mean, covariance = problem.posterior()
        return mean, torch.zeros_like(covariance)

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """A posterior of one draw."""
        return DrawsPosterior.of(self, model, fitted)
