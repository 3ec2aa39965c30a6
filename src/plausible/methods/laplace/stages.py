"""The stages of a Laplace approximation: train, settle at the mode on all data, add up the curvature there, tune, and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    from plausible.methods.laplace.laplace import Laplace


TAU, NOW, BEST, CHOSEN, ENDED = "tau/", "now/", "best/", "chosen/", "ended/"
"""What names begin with, among the tensors that stages leave: tuned precisions, the last mode and the best, and so on."""


def below(prefix: str, left: Mapping[str, Tensor]) -> Weights:
    return {name.removeprefix(prefix): value[0] for name, value in left.items() if name.startswith(prefix)}


def named(prefix: str, tensors: Mapping[str, Tensor]) -> Weights:
    return {prefix + name: value.unsqueeze(0) for name, value in tensors.items()}


class GivenState(NamedTuple):
    """The module's weights, as they are."""

    weights: Weights
    buffers: Weights


@dataclass(frozen=True)
class Training(Stage):
    """To a mode by stochastic gradients, or none where the weights are given; before it all is refused that can be."""

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
        return None if self.method.mode is None else self.method.mode.prepare(model, run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        if self.method.mode is None:
            return GivenState(dict(model.initial), dict(model.buffers))
        return self.method.mode.start(model, run, key)

    def step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, Info]:
        return (state, {}) if self.method.mode is None else self.method.mode.step(model, run, state, batch)

    def finished(self, state: Any) -> bool:
        return self.method.mode is None


@dataclass(frozen=True)
class Later(Stage):
    """What stages behind the training share: where they are, and under which prior."""

    method: Laplace

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False, keeps_draws=False, mixed_precision=False)
    most: ClassVar[int] = 1  # the most steps there can be

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        # on the rows that the training saw
        return Plan(steps=self.most, per_epoch=self.most, batch_size=None, holdout=self.method.holdout)

    def ended(self, run: Run[Any]) -> bool:
        """Whether tuning ended before: what came then stands."""
        return ENDED in run.before

    def model(self, model: Model, run: Run[Any]) -> Model:
        """The model under the precisions that were tuned so far."""
        tau = below(TAU, run.before)
        return with_precision(model, tau, self.method.names(model, run.data)) if tau else model

    def weights(self, model: Model, run: Run[Any]) -> Weights:
        return {name: run.before[name][0] for name in (*model.initial, *model.buffers)}

    def held(self, model: Model, run: Run[Any]) -> tuple[str, ...]:
        """A noise that was tuned stays as it is."""
        return model.likelihood_names if below(TAU, run.before) and tunable_noise(model) else ()


class Course(NamedTuple):
    """The model at hand, the weights to start from, those that move, how many iterations at most (0: none), examples at a time."""

    model: Model
    weights: Weights
    free: tuple[str, ...]
    limit: int
    chunk: int = 0


class SettlingState(NamedTuple):
    search: Any  # a tree of tensors that says when it is `over`
    iterations: Tensor


@dataclass(frozen=True)
class Settling(Later):
    """To the mode by iterations on all data; the `turn` is that among several settlings in a row."""

    turn: int = 0

    @property
    def most(self) -> int:  # type: ignore[override]
        return 1000 if self.method.polish is None else self.method.polish

    def finished(self, state: SettlingState) -> bool:
        return bool(state.search.over)


@dataclass(frozen=True)
class Polishing(Settling):
    """L-BFGS on the log joint of all data, in evaluation mode; the best weights that were met are kept.

    With dense structures of few weights only those move that are points, and `Climbing` follows, three times in turn.
    """

    def prepare(self, model: Model, run: Run[Any]) -> Course:
        at, names = self.model(model, run), self.method.names(model, run.data)
        weights, held = self.weights(model, run), self.held(model, run)
        check_deterministic(at, weights, run.data)
        limit = 0 if self.ended(run) else self.method.iterations(model)
        if self.method.climbs(model, names):  # the others climb
            # only points are left for L-BFGS to move, and where there are none it has nothing to do
            limit = min(limit, 100) if set(model.initial) - set(names) - set(held) else 0
        elif self.turn:
            limit = 0
        if isinstance(run.data, StreamData):  # each iteration reads all of the data again
            limit = min(limit, 10)
        # chosen once: it takes a forward pass of its own, a fifth of an iteration of a small network
        chunk = choose_chunk(at, weights, run.data, 0) if limit else 0
        return Course(at, weights, tuple(n for n in model.initial if n not in held), limit, chunk)

    def _function(self, run: Run[Course]) -> Any:
        way = run.prepared
        like = {name: way.weights[name] for name in way.free}

        def loss(place: Tensor) -> tuple[float, Tensor]:
            weights = {**way.weights, **unflatten(place, like)}
            value, gradient = log_joint_gradient(way.model, weights, run.data, chunk=way.chunk)
            slope = flatten({name: -gradient[name] / way.model.num_data for name in way.free})
            return -float(value) / way.model.num_data, slope

        return loss

    def start(self, model: Model, run: Run[Course], key: Tensor) -> SettlingState:
        way, none = run.prepared, torch.zeros((), dtype=torch.int64)
        place = flatten({name: way.weights[name].detach() for name in way.free})
        if not way.limit:
            # stages are listed before it is known which are needed: one that is not starts where it ends
            empty = begin_descent(place[:1], lambda at: (0.0, torch.zeros_like(at)), 1)
            return SettlingState(empty._replace(over=torch.ones_like(empty.over)), none)
        memory = 100 if place.numel() < 10**5 else 10  # pairs of steps and slopes, each as large as the weights
        return SettlingState(begin_descent(place, self._function(run), memory), none)

    def step(self, model: Model, run: Run[Course], state: SettlingState, batch: Batch) -> tuple[SettlingState, Info]:
        limit = run.prepared.limit
        descent: Descent = descend(state.search, self._function(run), 2 * limit)
        iterations = state.iterations + 1
        descent = descent._replace(over=descent.over | (iterations >= limit))
        return SettlingState(descent, iterations), {"log_joint": -descent.best_loss * run.prepared.model.num_data}

    def kept(self, model: Model, run: Run[Course], state: SettlingState) -> Weights:
        way = run.prepared
        # weights from which no finite loss was met are no better than those before
        if not way.limit or not bool(torch.isfinite(state.search.best_loss)):
            return run.before
        moved = unflatten(state.search.best, {name: way.weights[name] for name in way.free})
        return {**run.before, **named("", moved)}


class Ridge:
    """What a climb sees: the log joint, and the curvature where it last was, which a refused step asks for again."""

    def __init__(self, way: Course, names: tuple[str, ...], method: Laplace, run: Run[Any]):
        self.way, self.names, self.run = way, names, run
        # away from the mode a Hessian may be indefinite, and its steps lead down
        self.method = replace(method, curvature="ggn") if method.curvature == "hessian" else method
        self._known: tuple[Weights, Any] | None = None

    def joint(self, weights: Weights) -> tuple[Tensor, Weights]:
        return log_joint_gradient(self.way.model, weights, self.run.data)

    def curved(self, weights: Weights) -> tuple[Curvature, Weights, Tensor]:
        # a refused step asks for the same curvature again, with more damping
        if self._known is None or any(not torch.equal(weights[n], value) for n, value in self._known[0].items()):
            estimator, finished = Mode.started(self.method, self.way.model, weights, self.run.data, self.names)
            mode = finished(run_passes(estimator, self.run.data))
            self._known = dict(weights), (mode.curvature, mode.precision, mode.factor)
        return self._known[1]


@dataclass(frozen=True)
class Climbing(Settling):
    """Damped Gauss-Newton steps for dense structures of few weights."""

    def prepare(self, model: Model, run: Run[Any]) -> Ridge:
        names = self.method.names(model, run.data)
        points = set(model.initial) - set(names) - set(self.held(model, run))
        active = self.method.climbs(model, names) and (self.turn == 0 or points) and not self.ended(run)
        limit = self.method.iterations(model) if active else 0
        way = Course(self.model(model, run), self.weights(model, run), names, limit)
        return Ridge(way, names, self.method, run)

    def start(self, model: Model, run: Run[Ridge], key: Tensor) -> SettlingState:
        way, none = run.prepared.way, torch.zeros((), dtype=torch.int64)
        if not way.limit:
            number = torch.zeros((), dtype=torch.float64)
            return SettlingState(Climb({}, number, {}, number, number, torch.ones((), dtype=torch.bool)), none)
        return SettlingState(begin_climb(way.weights, run.prepared.joint), none)

    def step(self, model: Model, run: Run[Ridge], state: SettlingState, batch: Batch) -> tuple[SettlingState, Info]:
        new = climb(state.search, run.prepared.curved, run.prepared.joint)
        iterations = state.iterations + 1
        new = new._replace(over=new.over | (iterations >= run.prepared.way.limit))
        return SettlingState(new, iterations), {"log_joint": new.value.double().cpu()}

    def kept(self, model: Model, run: Run[Ridge], state: SettlingState) -> Weights:
        return {**run.before, **named("", state.search.weights)}


class LaterPass(Later, Pass):
    traits: ClassVar[Traits] = Pass.traits

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return replace(Pass.plan(self, num_data, per_epoch), holdout=self.method.holdout)


@dataclass(frozen=True)
class Ranking(LaterPass):
    """A diagonal curvature, by which the elements with the largest variance are found."""

    def estimator(self, model: Model, run: Run[Any]) -> Estimator[Curvature] | None:
        if self.ended(run):
            return None
        at, method = self.model(model, run).restricted(self.method.names(model, run.data)), self.method
        kind = "ggn" if method.curvature == "hessian" else method.curvature
        weights = self.weights(model, run)
        return start(at, weights, run.data, structure="diag", curvature=kind, negligible=method.negligible)

    def concluded(self, model: Model, run: Run[Any], result: Curvature) -> Tensor:
        names = self.method.names(model, run.data)
        at = self.model(model, run).restricted(names)
        precision = prior_precision(at, self.weights(model, run), names, self.method.structure)
        return widest_elements(result, precision, int(self.method.where))

    def kept(self, model: Model, run: Run[Any], state: PassState) -> Weights:
        return run.before if state.result is None else {**run.before, CHOSEN: state.result.unsqueeze(0)}


@dataclass(frozen=True)
class AddingUp(LaterPass):
    """The curvature at the weights, and the evidence there; the best of all rounds so far is kept beside the last.

    Where the mode moves, the curvature does too, and the evidence may fall: each round is only the best at its own mode.
    """

    turn: int = 0

    def prepare(self, model: Model, run: Run[Any]) -> dict[str, Any]:
        at, weights = self.model(model, run), self.weights(model, run)
        check_deterministic(at, weights, run.data)
        return {"model": at, "weights": weights}

    def estimator(self, model: Model, run: Run[dict[str, Any]]) -> Estimator[Curvature] | None:
        if self.ended(run):
            return None
        at, weights = run.prepared["model"], run.prepared["weights"]
        names, chosen = self.method.names(model, run.data), run.before.get(CHOSEN)
        try:
            estimator, run.prepared["finished"] = Mode.started(
                self.method, at, weights, run.data, names, None if chosen is None else chosen[0]
            )
        except ValueError as error:
            if not self.turn:
                raise
            log.warning("tuning ended early: %s", error)
            return None
        return estimator

    def concluded(self, model: Model, run: Run[dict[str, Any]], result: Curvature) -> Any:
        mode: Mode = run.prepared["finished"](result)
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
        return {**others, **named(NOW, tensors), **named(BEST, best)}


def restored(method: Laplace, model: Model, run: Run[Any], tensors: Mapping[str, Tensor]) -> Mode:
    """The mode that `AddingUp` left, under the prior that it was found with."""
    names = method.names(model, run.data)
    tau = {n.removeprefix("tau."): v for n, v in tensors.items() if n.startswith("tau.")}
    at = with_precision(model, tau, names) if tau else model
    mode = {n: v for n, v in tensors.items() if not n.startswith("tau.")}
    return Mode.restored(method, at, run.data, names, mode)


class TuningState(NamedTuple):
    precision: Weights
    weights: Weights
    over: Tensor


@dataclass(frozen=True)
class Tuning(Later):
    """The precisions of the prior, and the noise, that maximise the evidence at the last mode."""

    def start(self, model: Model, run: Run[Any], key: Tensor) -> TuningState:
        names = self.method.names(model, run.data)
        like = below(f"{NOW}precision.", run.before)
        shaped = self.method.tune == "weight"
        # the shapes of what will come, into which a checkpoint restores
        precision = {n: torch.zeros_like(model.initial[n] if shaped else like[n]) for n in names}
        weights = {name: value.clone() for name, value in self.weights(model, run).items()}
        return TuningState(precision, weights, torch.tensor(self.ended(run)))

    def step(self, model: Model, run: Run[Any], state: TuningState, batch: Batch) -> tuple[TuningState, Info]:
        now = restored(self.method, model, run, below(NOW, run.before))
        try:
            precision, weights = now.tuned(self.method.tune)
        except ValueError as error:
            log.warning("tuning ended early: %s", error)
            return state._replace(precision={}, over=torch.ones_like(state.over)), {}
        return TuningState(precision, weights, torch.ones_like(state.over)), {}

    def finished(self, state: TuningState) -> bool:
        return bool(state.over)

    def kept(self, model: Model, run: Run[Any], state: TuningState) -> Weights:
        if self.ended(run) or not state.precision:
            return {**run.before, ENDED: torch.ones(1, dtype=torch.bool)}
        return {**run.before, **named("", state.weights), **named(TAU, state.precision)}


class Onward(NamedTuple):
    model: Model
    inner: Any


@dataclass(frozen=True)
class Online(Later):
    """A few more epochs of the training, under the new prior; a noise that was tuned stays."""

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        assert self.method.mode is not None
        return replace(self.method.mode.traits, keeps_draws=False)

    @property
    def mode(self) -> Any:
        return replace(self.method.mode, epochs=self.method.online)  # type: ignore[type-var]

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Onward:
        at = self.model(model, run).starting_at(self.weights(model, run))
        return Onward(at, self.mode.prepare(at, run))

    def _inner(self, run: Run[Onward]) -> Run[Any]:
        return replace(run, prepared=run.prepared.inner)

    def start(self, model: Model, run: Run[Onward], key: Tensor) -> Any:
        return self.mode.start(run.prepared.model, self._inner(run), key)

    def step(self, model: Model, run: Run[Onward], state: Any, batch: Batch) -> tuple[Any, Info]:
        return self.mode.step(run.prepared.model, self._inner(run), state, batch)

    def kept(self, model: Model, run: Run[Onward], state: Any) -> Weights:
        if self.ended(run):
            return run.before
        # training moves the noise too, which was tuned to another value
        noise = {name: run.before[name] for name in self.held(model, run)}
        moved = index(self.mode.kept(run.prepared.model, self._inner(run), state), slice(0, 1))
        return {**run.before, **moved, **noise}
