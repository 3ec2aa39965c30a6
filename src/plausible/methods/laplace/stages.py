"""The stages of a Laplace approximation: train, settle at the mode on all data, add up the curvature there, tune, and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from plausible.blocks.ascent import Climb, Descent, begin_climb, begin_descent, climb, descend
from plausible.blocks.curvature.estimating import start
from plausible.blocks.curvature.products import choose_chunk, log_joint_gradient
from plausible.blocks.curvature.structures import Curvature
from plausible.core.data import Batch, Estimator, StreamData, run_passes
from plausible.core.model import Model
from plausible.core.weights import Weights, flatten, index, unflatten
from plausible.core.words import log
from plausible.engine.method import Info, Plan, Run, Stage, Traits
from plausible.engine.passes import Pass, PassState
from plausible.methods.laplace.mode import (
    Mode,
    check_deterministic,
    prior_precision,
    tunable_noise,
    widest_elements,
    with_precision,
)

if TYPE_CHECKING:
    from plausible.blocks.curvature.tuning import Tune
    from plausible.methods.laplace.laplace import Laplace


# The tensors that one stage leaves to the next (`run.before`): the weights by their names, and under these prefixes
TAU = "tau/"  # precisions of the prior that were tuned
NOW, BEST = "now/", "best/"  # the mode that was found last, and the one with the highest evidence so far
CHOSEN = "chosen/"  # which elements get a posterior, where a number of them was asked for
ENDED = "ended/"  # tuning has ended early: the later stages have nothing to do


def below(prefix: str, left: Mapping[str, Tensor]) -> Weights:
    """The tensors under a prefix, without it and without the leading axis of draws."""
    return {name.removeprefix(prefix): value[0] for name, value in left.items() if name.startswith(prefix)}


def named(prefix: str, tensors: Mapping[str, Tensor]) -> Weights:
    """The inverse of `below`."""
    return {prefix + name: value.unsqueeze(0) for name, value in tensors.items()}


class GivenState(NamedTuple):
    """The module's weights, as they are."""

    weights: Weights
    buffers: Weights


class TrainingTask(NamedTuple):
    """The model under the prior of the stage, and what the training's own `prepare` found out."""

    model: Model
    inner: Any


def inner(run: Run[TrainingTask]) -> Run[Any]:
    """The run as the training sees it."""
    return replace(run, prepared=run.prepared.inner)


@dataclass(frozen=True)
class Training(Stage):
    """To a mode by stochastic gradients, or no step at all where the weights are given.

    Before the first step everything is refused that the later stages could not do.
    """

    method: Laplace

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        mode = self.method.mode
        return Traits(keeps_draws=False) if mode is None else replace(mode.traits, keeps_draws=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        if self.method.mode is None:
            return Plan(steps=1, per_epoch=1, batch_size=1 if per_epoch is None else -1)
        return self.method.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        self.method.check(model, run.data)
        return TrainingTask(model, None if self.method.mode is None else self.method.mode.prepare(model, run))

    def start(self, model: Model, run: Run[TrainingTask], key: Tensor) -> Any:
        if self.method.mode is None:
            return GivenState(dict(model.initial), dict(model.buffers))
        return self.method.mode.start(run.prepared.model, inner(run), key)

    def step(self, model: Model, run: Run[TrainingTask], state: Any, batch: Batch) -> tuple[Any, Info]:
        mode = self.method.mode
        return (state, {}) if mode is None else mode.step(run.prepared.model, inner(run), state, batch)

    def finished(self, state: Any) -> bool:
        return self.method.mode is None


@dataclass(frozen=True)
class AfterTraining(Stage):
    """What the stages behind the training share: the weights that the one before left, and the prior that was tuned so far."""

    method: Laplace

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False, keeps_draws=False, mixed_precision=False)
    most: ClassVar[int] = 1  # the most steps there can be

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        # the same rows that the training saw: what it held out is held out again
        return Plan(steps=self.most, per_epoch=self.most, batch_size=None, holdout=self.method.holdout(num_data, per_epoch))

    def ended(self, run: Run[Any]) -> bool:
        """Whether tuning has ended early, so that this stage has nothing to do."""
        return ENDED in run.before

    def model(self, model: Model, run: Run[Any]) -> Model:
        """The model under the precisions that were tuned so far."""
        tau = below(TAU, run.before)
        return with_precision(model, tau, self.method.names(model, run.data)) if tau else model

    def weights(self, model: Model, run: Run[Any]) -> Weights:
        """All weights and buffers, as the stage before left them."""
        return {name: run.before[name][0] for name in (*model.initial, *model.buffers)}

    def held(self, model: Model, run: Run[Any]) -> tuple[str, ...]:
        """The weights that do not move any more: a noise that was tuned."""
        return model.likelihood_names if below(TAU, run.before) and tunable_noise(model) else ()


class SettlingTask(NamedTuple):
    """What there is to settle: the model under its present prior, the weights to start from, and the names of those that move."""

    model: Model
    weights: Weights
    free: tuple[str, ...]
    limit: int  # iterations at most; 0: there is nothing to do
    chunk: int = 0  # examples at a time


class SettlingState(NamedTuple):
    search: Any  # a tree of tensors that says when it is `over`
    iterations: Tensor


@dataclass(frozen=True)
class Settling(AfterTraining):
    """To the mode by iterations on all data; `turn` counts the stages of one kind where points and random weights take turns."""

    turn: int = 0

    @property
    def most(self) -> int:  # type: ignore[override]
        return 1000 if self.method.polish is None else self.method.polish

    def finished(self, state: SettlingState) -> bool:
        return bool(state.search.over)


@dataclass(frozen=True)
class Polishing(Settling):
    """L-BFGS on the log joint of all data, in evaluation mode; the best weights that were met are kept.

    Where `Climbing` moves the random weights (dense structures of few weights) the two take turns, three times, and L-BFGS is
    short: it is there for the points.
    """

    def prepare(self, model: Model, run: Run[Any]) -> SettlingTask:
        tuned, names = self.model(model, run), self.method.names(model, run.data)
        weights, held = self.weights(model, run), self.held(model, run)
        check_deterministic(tuned, weights, run.data)
        # early stopping means not to go to the mode of the training rows
        limit = 0 if self.ended(run) or run.held is not None else self.method.iterations(model)
        if self.method.climbs(model, names):  # the others climb
            # L-BFGS is there for the points, which climbing does not move; where there are none it has nothing to do
            limit = min(limit, 100) if set(model.initial) - set(names) - set(held) else 0
        elif self.turn:
            limit = 0
        if isinstance(run.data, StreamData):  # each iteration reads all of the data again
            limit = min(limit, 10)
        # chosen once: it takes a forward pass of its own, a fifth of an iteration of a small network
        chunk = choose_chunk(tuned, weights, run.data, 0) if limit else 0
        return SettlingTask(tuned, weights, tuple(n for n in model.initial if n not in held), limit, chunk)

    def _loss(self, run: Run[SettlingTask]) -> Any:
        """−log p(w, D)/N and its gradient, of the weights that move, as one vector."""
        task = run.prepared
        like = {name: task.weights[name] for name in task.free}

        def loss(place: Tensor) -> tuple[float, Tensor]:
            weights = {**task.weights, **unflatten(place, like)}
            value, gradient = log_joint_gradient(task.model, weights, run.data, chunk=task.chunk)
            slope = flatten({name: -gradient[name] / task.model.num_data for name in task.free})
            return -float(value) / task.model.num_data, slope

        return loss

    def start(self, model: Model, run: Run[SettlingTask], key: Tensor) -> SettlingState:
        task, none = run.prepared, torch.zeros((), dtype=torch.int64)
        place = flatten({name: task.weights[name].detach() for name in task.free})
        if not task.limit:
            # stages are listed before it is known which are needed: one that is not starts where it ends
            empty = begin_descent(place[:1], lambda at: (0.0, torch.zeros_like(at)), 1)
            return SettlingState(empty._replace(over=torch.ones_like(empty.over)), none)
        memory = 100 if place.numel() < 10**5 else 10  # pairs of steps and slopes, each as large as the weights
        return SettlingState(begin_descent(place, self._loss(run), memory), none)

    def step(self, model: Model, run: Run[SettlingTask], state: SettlingState, batch: Batch) -> tuple[SettlingState, Info]:
        limit = run.prepared.limit
        descent: Descent = descend(state.search, self._loss(run), 2 * limit)
        iterations = state.iterations + 1
        descent = descent._replace(over=descent.over | (iterations >= limit))
        return SettlingState(descent, iterations), {"log_joint": -descent.best_loss * run.prepared.model.num_data}

    def kept(self, model: Model, run: Run[SettlingTask], state: SettlingState) -> Weights:
        task = run.prepared
        # weights from which no finite loss was met are no better than those before
        if not task.limit or not bool(torch.isfinite(state.search.best_loss)):
            return run.before
        moved = unflatten(state.search.best, {name: task.weights[name] for name in task.free})
        return {**run.before, **named("", moved)}


class ClimbingTask:
    """What a climb asks: the log joint, and the curvature; that of the last weights is remembered."""

    def __init__(self, task: SettlingTask, names: tuple[str, ...], method: Laplace, run: Run[Any]):
        self.task, self.names, self.run = task, names, run
        # away from the mode a Hessian may be indefinite, and its steps lead down
        self.method = replace(method, curvature="ggn") if method.curvature == "hessian" else method
        self._known: tuple[Weights, Any] | None = None

    def joint(self, weights: Weights) -> tuple[Tensor, Weights]:
        return log_joint_gradient(self.task.model, weights, self.run.data)

    def curved(self, weights: Weights) -> tuple[Curvature, Weights, Tensor]:
        # a refused step asks for the same curvature again, with more damping
        if self._known is None or any(not torch.equal(weights[n], value) for n, value in self._known[0].items()):
            estimator, conclude = Mode.started(self.method, self.task.model, weights, self.run.data, self.names)
            mode = conclude(run_passes(estimator, self.run.data))
            self._known = dict(weights), (mode.curvature, mode.precision, mode.factor)
        return self._known[1]


@dataclass(frozen=True)
class Climbing(Settling):
    """Damped Gauss-Newton steps for dense structures of few weights."""

    def prepare(self, model: Model, run: Run[Any]) -> ClimbingTask:
        names = self.method.names(model, run.data)
        points = set(model.initial) - set(names) - set(self.held(model, run))
        active = self.method.climbs(model, names) and (self.turn == 0 or points) and not self.ended(run)
        limit = self.method.iterations(model) if active and run.held is None else 0
        task = SettlingTask(self.model(model, run), self.weights(model, run), names, limit)
        return ClimbingTask(task, names, self.method, run)

    def start(self, model: Model, run: Run[ClimbingTask], key: Tensor) -> SettlingState:
        task, none = run.prepared.task, torch.zeros((), dtype=torch.int64)
        if not task.limit:
            number = torch.zeros((), dtype=torch.float64)
            return SettlingState(Climb({}, number, {}, number, number, torch.ones((), dtype=torch.bool)), none)
        return SettlingState(begin_climb(task.weights, run.prepared.joint), none)

    def step(self, model: Model, run: Run[ClimbingTask], state: SettlingState, batch: Batch) -> tuple[SettlingState, Info]:
        new = climb(state.search, run.prepared.curved, run.prepared.joint)
        iterations = state.iterations + 1
        new = new._replace(over=new.over | (iterations >= run.prepared.task.limit))
        return SettlingState(new, iterations), {"log_joint": new.value.double().cpu()}

    def kept(self, model: Model, run: Run[ClimbingTask], state: SettlingState) -> Weights:
        return {**run.before, **named("", state.search.weights)}


class PassAfterTraining(AfterTraining, Pass):
    traits: ClassVar[Traits] = Pass.traits

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return replace(Pass.plan(self, num_data, per_epoch), holdout=self.method.holdout(num_data, per_epoch))


@dataclass(frozen=True)
class Ranking(PassAfterTraining):
    """A diagonal curvature, by which the elements with the largest variance are found."""

    def estimator(self, model: Model, run: Run[Any]) -> Estimator[Curvature] | None:
        if self.ended(run):
            return None
        tuned, method = self.model(model, run).restricted(self.method.names(model, run.data)), self.method
        kind = "ggn" if method.curvature == "hessian" else method.curvature
        weights = self.weights(model, run)
        return start(
            tuned, weights, run.data, structure="diag", curvature=kind, negligible=method.negligible, columns=method.columns
        )

    def concluded(self, model: Model, run: Run[Any], result: Curvature) -> Tensor:
        names = self.method.names(model, run.data)
        tuned = self.model(model, run).restricted(names)
        precision = prior_precision(tuned, self.weights(model, run), names, self.method.structure)
        return widest_elements(result, precision, int(cast("int", self.method.where)))

    def kept(self, model: Model, run: Run[Any], state: PassState) -> Weights:
        return run.before if state.result is None else {**run.before, CHOSEN: state.result.unsqueeze(0)}


@dataclass(frozen=True)
class AddingUp(PassAfterTraining):
    """The curvature at the weights, and the evidence there.

    Beside the last mode the one with the highest evidence of all rounds is kept: a round tunes the prior at its own mode, and
    where the mode then moves, the curvature does too, and the evidence may fall.
    """

    turn: int = 0

    def prepare(self, model: Model, run: Run[Any]) -> dict[str, Any]:
        tuned, weights = self.model(model, run), self.weights(model, run)
        check_deterministic(tuned, weights, run.data)
        return {"model": tuned, "weights": weights}

    def estimator(self, model: Model, run: Run[dict[str, Any]]) -> Estimator[Curvature] | None:
        if self.ended(run):
            return None
        tuned, weights = run.prepared["model"], run.prepared["weights"]
        names, chosen = self.method.names(model, run.data), run.before.get(CHOSEN)
        try:
            estimator, run.prepared["conclude"] = Mode.started(
                self.method, tuned, weights, run.data, names, None if chosen is None else chosen[0]
            )
        except ValueError as error:
            if not self.turn:
                raise
            log.warning("tuning ended early: %s", error)
            return None
        return estimator

    def concluded(self, model: Model, run: Run[dict[str, Any]], result: Curvature) -> Any:
        mode: Mode = run.prepared["conclude"](result)
        try:
            mode.judge()
        except ValueError as error:  # the noise or a precision ran away; what came before stands
            if not self.turn:
                raise
            log.warning("tuning ended early: %s", error)
            return "none"
        return mode

    def kept(self, model: Model, run: Run[dict[str, Any]], state: PassState) -> Weights:
        if not isinstance(state.result, Mode):
            return {**run.before, ENDED: torch.ones(1, dtype=torch.bool)}
        now = state.result
        # tuning goes on from the last mode; the posterior is made of the best
        best = below(BEST, run.before)
        tensors = now.tensors() | {f"tau.{n}": v for n, v in below(TAU, run.before).items()}
        others = {n: v for n, v in run.before.items() if not n.startswith((NOW, BEST))}
        if not best or now.better(restored(self.method, model, run, best)):
            best = tensors
        if self.turn and run.held is not None and not self.method.online:  # weights that stay where they are: once is enough
            others[ENDED] = torch.ones(1, dtype=torch.bool)
        return {**others, **named(NOW, tensors), **named(BEST, best)}


def restored(method: Laplace, model: Model, run: Run[Any], tensors: Mapping[str, Tensor]) -> Mode:
    """The mode that `AddingUp` left, under the prior that it was found with."""
    names = method.names(model, run.data)
    tau = {n.removeprefix("tau."): v for n, v in tensors.items() if n.startswith("tau.")}
    tuned = with_precision(model, tau, names) if tau else model
    mode = {n: v for n, v in tensors.items() if not n.startswith("tau.")}
    return Mode.restored(method, tuned, run.data, names, mode)


class TuningState(NamedTuple):
    precision: Weights
    weights: Weights
    over: Tensor


@dataclass(frozen=True)
class Tuning(AfterTraining):
    """The precisions of the prior, and the noise, that maximise the evidence at the last mode."""

    def prepare(self, model: Model, run: Run[Any]) -> tuple[Tune | None, bool]:
        return self.method.tuning(model, self.method.names(model, run.data))

    def start(self, model: Model, run: Run[Any], key: Tensor) -> TuningState:
        names = self.method.names(model, run.data)
        like = below(f"{NOW}precision.", run.before)
        how, active = run.prepared
        shaped = how == "weight"
        # the shapes of what will come, into which a checkpoint restores
        precision = {n: torch.zeros_like(model.initial[n] if shaped else like[n]) for n in names}
        weights = {name: value.clone() for name, value in self.weights(model, run).items()}
        if not active:  # "auto" found nothing to set
            return TuningState({}, weights, torch.ones((), dtype=torch.bool))
        return TuningState(precision, weights, torch.tensor(self.ended(run)))

    def step(self, model: Model, run: Run[Any], state: TuningState, batch: Batch) -> tuple[TuningState, Info]:
        now = restored(self.method, model, run, below(NOW, run.before))
        try:
            precision, weights = now.tuned(run.prepared[0])
        except ValueError as error:
            log.warning("tuning ended early: %s", error)
            return state._replace(precision={}, over=torch.ones_like(state.over)), {}
        return TuningState(precision, weights, torch.ones_like(state.over)), {}

    def finished(self, state: TuningState) -> bool:
        return bool(state.over)

    def kept(self, model: Model, run: Run[Any], state: TuningState) -> Weights:
        # interrupted before the step: its precisions are still the zeros that it started from
        if self.ended(run) or not state.precision or not bool(state.over):
            return {**run.before, ENDED: torch.ones(1, dtype=torch.bool)}
        return {**run.before, **named("", state.weights), **named(TAU, state.precision)}


@dataclass(frozen=True)
class Online(AfterTraining):
    """A few more epochs of the training, under the new prior; a noise that was tuned stays."""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        assert self.method.mode is not None
        return replace(self.method.mode.traits, keeps_draws=False)

    @property
    def mode(self) -> Any:
        """The method that trains, for these few epochs."""
        return replace(self.method.mode, epochs=self.method.online)  # type: ignore[type-var]

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> TrainingTask:
        tuned = self.model(model, run).starting_at(self.weights(model, run))
        return TrainingTask(tuned, self.mode.prepare(tuned, run))

    def start(self, model: Model, run: Run[TrainingTask], key: Tensor) -> Any:
        return self.mode.start(run.prepared.model, inner(run), key)

    def step(self, model: Model, run: Run[TrainingTask], state: Any, batch: Batch) -> tuple[Any, Info]:
        return self.mode.step(run.prepared.model, inner(run), state, batch)

    def kept(self, model: Model, run: Run[TrainingTask], state: Any) -> Weights:
        if self.ended(run):
            return run.before
        # training moves the noise too, which was tuned to another value
        noise = {name: run.before[name] for name in self.held(model, run)}
        moved = index(self.mode.kept(run.prepared.model, inner(run), state), slice(0, 1))
        return {**run.before, **moved, **noise}
