"""What averages along the path of an optimiser share: collecting on the way, and batch-norm statistics of what was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.batch_norm import BatchNorms
from plausible.core.data import Batch, Data, num_rows
from plausible.core.model import Model
from plausible.core.optimisers import SGD, AdamW, Optimiser, as_optimiser
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import check_count
from plausible.core.transforms import transformed
from plausible.core.weights import Weights, clone, index, select, stack, tree_map
from plausible.engine.method import BatchSize, Fitted, Info, Method, Plan, Run, Stage, Traits, check_training, plan_epochs
from plausible.engine.passes import Pass, PassState
from plausible.methods.points.map import MAP
from plausible.posteriors.draws import IndependentDraws

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

EPOCHS, STEPS, MOST = 50, 500, 100
"""Where nobody says: so many epochs of averaging, and steps at least; and so many snapshots at most."""
PATIENCE = 10
"""Snapshots without a better mean on the rows that were held out."""
CHUNK = 128
"""Rows of the batches whose statistics are averaged."""
SNAPSHOTS, VARIANCE, DEVIATIONS = "collected/snapshots", "variance/", "deviations/"
"""What collecting leaves beside the means: the number of snapshots, and under these prefixes."""


@dataclass(frozen=True)
class OnPath(Method):
    """The base of methods that go on with an optimiser after `mode` has trained, and keep something of its path.

    `mode` None: start at the weights as they are, or at `init=` of `fit`. What it holds out is held out on the path too. A subclass
    says its stages, the last of them `Drawing`, and what is `drawn` from what the path left.
    """

    mode: MAP | None = field(default_factory=MAP)
    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = 5e-3
    optimiser: Optimiser = field(default_factory=AdamW)

    traits: ClassVar[Traits] = Traits(divisible=False, keeps_draws=False)

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        object.__setattr__(self, "optimiser", as_optimiser(self.optimiser))
        if self.mode is not None and not isinstance(self.mode, MAP):
            raise TypeError(
                f"{type(self).__name__}: mode must be MAP(…), which trains before, or None for the weights as they are, got "
                f"{self.mode!r}"
            )

    @property
    def training(self) -> tuple[Stage, ...]:
        return () if self.mode is None else (self.mode,)

    def drawn(self, model: Model, left: Mapping[str, Tensor], key: Tensor) -> Weights:
        """Weights [S, …] by what the path left."""
        raise NotImplementedError

    def holdout(self, num_data: int, per_epoch: int | None = None) -> float:
        return 0.0 if self.mode is None else self.mode.plan(num_data, per_epoch).holdout

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The mode, without spread: what full batches come to rest at."""
        mean, covariance = problem.posterior()
        return mean, torch.zeros_like(covariance)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> IndependentDraws:
        return IndependentDraws.left(self, model, fitted)


@dataclass(frozen=True)
class TrajectoryAverage(OnPath):
    """θ̄ = mean of θ_t at every `every`-th step of an optimiser with a constant rate, after `mode` has trained

    The base of methods that average weights on the way: a subclass says what is `drawn` from the averages.

    `optimiser` goes on with the rate `lr` for `epochs` (None: 50, on small data as many as 500 steps take), and every so many steps
    (None: once an epoch, at most 100 times) a snapshot enters the averages. Where `mode` has patience, averaging ends when 10
    snapshots did not make the mean better on the rows that it holds out, and the mean is the one that was best.
    """

    every: int | None = None

    rank: ClassVar[int | None] = None  # how many deviations are kept; None: no variances either
    traits: ClassVar[Traits] = replace(OnPath.traits, shaping=("rank",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None:
            check_count(self, "every")

    def stages(self) -> tuple[Stage, ...]:
        return (*self.training, Collecting(self), Drawing(self))

    @classmethod
    def conforming(cls) -> Method:
        return cls(MAP.conforming(), epochs=600, batch_size=None, lr=0.02, optimiser=SGD(), every=1)


# ---------------------------------------------------------------------------------------------------------------------
# Collecting


class Averages(NamedTuple):
    """Of the snapshots so far: their number, mean squared deviation from their mean, and the last K deviations [K, …]."""

    snapshots: Tensor
    variance: Weights
    deviations: Weights

    def seen(self, before: Weights, weights: Weights, due: Tensor) -> tuple[Weights, Averages]:
        """The mean, and the rest, with one more snapshot where one is due. Deviations are from the mean with it in."""
        count = self.snapshots + due
        part = torch.where(due, 1 / count.clamp(min=1), 0.0)
        mean = {name: torch.lerp(old, weights[name], part.to(old.dtype)) for name, old in before.items()}
        # Welford's sum: squares less a square would leave nothing but rounding of small variances
        variance = {
            name: torch.lerp(old, (weights[name] - before[name]) * (weights[name] - mean[name]), part.to(old.dtype))
            for name, old in self.variance.items()
        }
        deviations = {}
        for name, old in self.deviations.items():
            here = torch.arange(len(old), device=old.device) == torch.remainder(count - 1, len(old))
            new = (weights[name] - mean[name]).unsqueeze(0)
            deviations[name] = torch.where((here & due).view(-1, *[1] * (old.ndim - 1)), new, old)
        return mean, Averages(count, variance, deviations)


class CollectingState(NamedTuple):
    """`weights` are the mean of the snapshots, which held-out rows judge, and `position` is where the optimiser is."""

    weights: Weights
    position: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor
    averages: Averages


@dataclass(frozen=True)
class Collecting(Stage):
    """The optimiser goes on with a constant rate, and snapshots on its way enter the averages."""

    method: TrajectoryAverage

    traits: ClassVar[Traits] = Traits(keeps_draws=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        plan = plan_epochs(self.method, num_data, per_epoch, holdout=self.method.holdout(num_data, per_epoch))
        if self.method.epochs is None:
            epochs = max(EPOCHS, -(-STEPS // plan.per_epoch))
            plan = replace(plan, steps=epochs * plan.per_epoch)
        if self.method.mode is not None and self.method.mode.plan(num_data, per_epoch).patience:
            epochs = -(-PATIENCE * self.every(plan.steps, plan.per_epoch) // plan.per_epoch)
            plan = replace(plan, patience=epochs)
        if plan.steps < 2 * self.every(plan.steps, plan.per_epoch):
            raise ValueError(
                f"{type(self.method).__name__}: every={self.every(plan.steps, plan.per_epoch)} collects fewer than 2 snapshots in "
                f"{plan.steps} steps; run more epochs, or collect more often"
            )
        return plan

    def every(self, steps: int, per_epoch: int) -> int:
        return self.method.every or (max(per_epoch, steps // MOST) if steps >= 2 * per_epoch else 1)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> CollectingState:
        before = index(run.before, 0) if run.before else {**model.initial, **model.buffers}
        weights = clone(select(before, model.initial))
        rank, zeros = self.method.rank, tree_map(torch.zeros_like, weights)
        random = {} if rank is None else select(zeros, model.random)
        deviations = {name: zero.new_zeros(rank, *zero.shape) for name, zero in random.items()} if rank else {}
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        averages = Averages(step.clone(), clone(random), deviations)
        optimiser = self.method.optimiser.init(weights)
        return CollectingState(weights, clone(weights), clone(select(before, model.buffers)), optimiser, step, averages)

    def step(self, model: Model, run: Run[Any], state: CollectingState, batch: Batch) -> tuple[CollectingState, Info]:
        scale = -1.0 / model.num_data
        joint = model.gradient(state.position, batch, buffers=state.buffers, train=True, scale=scale, leave_l2=True)
        lr = rate(self.method.lr, state.step, run.steps)
        position, optimiser = self.method.optimiser.update(state.position, joint.grads, state.optimiser, lr, joint.l2)
        step, mean, averages = state.step + 1, state.weights, state.averages
        due = torch.remainder(step, self.every(run.steps, run.batches(batch))) == 0
        # where the host can look at the number of the step, nothing is moved in between
        if transformed() or step.device.type != "cpu" or bool(due):
            mean, averages = averages.seen(mean, position, due)
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return CollectingState(mean, position, joint.buffers, optimiser, step, averages), info

    def kept(self, model: Model, run: Run[Any], state: CollectingState) -> Weights:
        count, variance, deviations = state.averages
        left = {SNAPSHOTS: count, **state.weights, **state.buffers}
        left |= {VARIANCE + name: value for name, value in variance.items()}
        left |= {DEVIATIONS + name: value for name, value in deviations.items()}
        return {name: value.unsqueeze(0) for name, value in left.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Drawing, and the statistics of batch norm


class DrawnState(PassState):
    """Draws of the weights [S, …], and the pass in which the statistics of their batch norms are added up."""

    def __init__(self, estimator: Statistics | None, data: Data, draws: Weights):
        super().__init__(estimator, data)
        self.draws = draws


@dataclass(frozen=True)
class Drawing(Pass):
    """Draws from what was collected; where the network has batch norm, one pass over the data for the statistics of all."""

    method: OnPath

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return replace(super().plan(num_data, per_epoch), holdout=self.method.holdout(num_data, per_epoch))

    def start(self, model: Model, run: Run[Any], key: Tensor) -> DrawnState:
        draws = self.method.drawn(model, index(run.before, 0), key)
        norms = BatchNorms.of(model)
        return DrawnState(Statistics(norms, draws) if norms else None, run.data, draws)

    def kept(self, model: Model, run: Run[Any], state: PassState) -> Weights:
        assert isinstance(state, DrawnState)
        count = len(next(iter(state.draws.values())))
        buffers = {name: run.before[name].expand(count, *run.before[name].shape[1:]).clone() for name in model.buffers}
        return {**state.draws, **buffers, **(state.result or {})}


class Statistics:
    """For every draw the means, over batches, of the statistics that its batch norms see (Izmailov et al. 2018, §3.2)."""

    passes = 1
    chunk = CHUNK
    note = "statistics of batch norm"

    def __init__(self, norms: BatchNorms, draws: Weights):
        self.norms, self.draws, self.rows = norms, draws, 0
        count, buffers = len(next(iter(draws.values()))), norms.model.buffers
        self.sums = {name: buffers[name].new_zeros(count, *buffers[name].shape) for name in norms.shares}

    def add(self, batch: Batch) -> None:
        rows = num_rows(batch.x)
        if rows < 2 and self.rows:
            return  # one row has no variance
        for k in range(len(next(iter(self.draws.values())))):
            for name, value in self.norms.statistics(index(self.draws, k), batch.x).items():
                self.sums[name][k] += rows * value
        self.rows += rows

    def next_pass(self) -> bool:
        return False

    def finish(self) -> Weights:
        return {name: total / self.rows for name, total in self.sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {**{f"sums/{name}": value for name, value in self.sums.items()}, "rows": torch.tensor(self.rows)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.rows = int(tensors["rows"])
        self.sums = {name: tensors[f"sums/{name}"].to(value) for name, value in self.sums.items()}


def stacked_mean(model: Model, left: Mapping[str, Tensor], count: int) -> Weights:
    """The mean that collecting left, `count` times: [S, …]."""
    return stack([select(left, model.initial)] * count)
