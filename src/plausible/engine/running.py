"""A run: the stages of a method, one after the other, each with its own plan, state and progress; and what they leave."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from plausible.core import random
from plausible.core.data import Data, StreamData, num_rows
from plausible.core.model import Model
from plausible.core.storage import DrawWriter
from plausible.core.weights import Weights, num_elements
from plausible.core.words import log
from plausible.engine.checkpoint import Checkpoint, Checkpointer, Resumed
from plausible.engine.loop import Callback, Loop, StagePlace, label
from plausible.engine.method import DivergenceError, Fitted, Method, Plan, Run, Stage
from plausible.engine.ranks import Team
from plausible.engine.source import Source, WholeData
from plausible.engine.stepper import decide, threads
from plausible.engine.stopping import Stopping
from plausible.engine.watching import Monitor


@dataclass(frozen=True)
class Options:
    """What the caller decides about a run, none of which changes the law that is sampled.

    `identity` is what a checkpoint must agree with to be this run's (see `engine.checkpoint.identity`); `starts` are weights to
    start at, stacked, of an earlier posterior; `team` are the processes that run together.
    """

    seed: int = 0
    compile: Literal["auto"] | bool = "auto"
    progress: bool | None = None
    checkpoint: Checkpoint | None = None
    callbacks: Sequence[Callback] = ()
    identity: dict[str, Any] = field(default_factory=dict)
    starts: Weights | None = None
    team: Team = field(default_factory=Team)


def run(method: Method, model: Model, data: Data, options: Options) -> tuple[Model, Run[Any], Fitted]:
    """Run all stages of a method: the model and the run of the last one, and what it left.

    Ctrl-C ends the stage at hand; the ones after it still run, on what there is, and leave the checkpoint alone. A resumed run
    begins with the stage that its checkpoint was written in. A divergence is raised; where no draws are kept it ends the stage
    likewise, for the error's posterior.
    """
    team = options.team
    method = team.part(method)  # of an ensemble that is split over ranks, the members of this one
    _check_divisible(method, team)
    checkpoint = team.checkpoint(options.checkpoint)
    keeper = None if checkpoint is None else Checkpointer(checkpoint, {**team.identity, **options.identity})
    with keeper or contextlib.nullcontext():
        return _run(method, model, data, options, keeper)


def _run(
    method: Method, model: Model, data: Data, options: Options, keeper: Checkpointer | None
) -> tuple[Model, Run[Any], Fitted]:
    team, resumed, writer, before = options.team, None, DrawWriter(), {}
    if keeper is not None:
        writer = DrawWriter(keeper.draws_folder, retries=True)
        if (resumed := keeper.load(writer)) is not None:
            before = resumed.tree("before", model.device)
    stages = method.stages()
    failed: DivergenceError | None = None
    earlier = _Earlier.of(resumed)
    first = len(earlier.stages)
    for number, stage in enumerate(stages[first:], start=first):
        place = StagePlace(method, number, number == len(stages) - 1, earlier.steps, earlier.seconds, earlier.record())
        # later stages of split members concern each rank alone: it waits for the others at the end
        alone = Team() if number else team
        if number and not team.works:
            continue
        model_here, run_here, fitted = _run_stage(
            stage,
            model,
            data,
            options,
            place=place,
            before=before,
            writer=writer,
            keeper=keeper,
            resumed=resumed if number == first else None,
            team=alone,
        )
        if fitted.interrupted:
            keeper = None  # what follows is built on a stage that a resumed run will go on with
            earlier.interrupted = True
        failed = failed or fitted.error
        # what is left is asked of the stage that ran, under the model and the data that it saw
        before = stage.kept(model_here, run_here, fitted.state) if len(stages) > 1 else {}
        earlier.add(stage, fitted)
    if failed is not None:
        try:
            failed.posterior = method.posterior(model_here, run_here, earlier.joined(fitted, before))
        except (RuntimeError, ValueError, ArithmeticError) as error:
            log.info("there is no posterior of the last good state: %s: %s", type(error).__name__, error)
        raise failed
    return model_here, run_here, team.gather(method, model_here, run_here, earlier.joined(fitted, before))


def show_result(method: Method, data: Data, posterior: Any, fitted: Fitted, callbacks: Sequence[Callback]) -> None:
    """Show monitors a posterior that is made of what several stages left, once the run is over; others they saw on the way."""
    stages = method.stages()
    if len(stages) > 1 and not method.traits.keeps_draws and not fitted.interrupted:
        # epochs are those of the first stage, which is the one that trains
        first = _plan(stages[0], data)
        if first.holdout:  # on the rows that were left to it
            first = _plan(stages[0], data.split(first.holdout, 0)[0])
        epochs = -(-fitted.steps // first.per_epoch)
        for monitor in (callback for callback in callbacks if isinstance(callback, Monitor)):
            monitor.observe(epochs, posterior)


def _run_stage(
    stage: Stage,
    model: Model,
    data: Data,
    options: Options,
    *,
    place: StagePlace,
    before: Weights,
    writer: DrawWriter,
    keeper: Checkpointer | None,
    resumed: Resumed | None,
    team: Team,
) -> tuple[Model, Run[Any], Fitted]:
    """One stage: plan, hold rows out, prepare, make the first state, choose how steps run and where batches come from; loop."""
    held: Data | None = None
    plan = _plan(stage, data)
    if plan.holdout:
        data, held = data.split(plan.holdout, options.seed)
        # batches are counted over the rows that are left; what is decided by all of them stays
        plan = replace(_plan(stage, data), holdout=plan.holdout, patience=plan.patience)
    model = replace(model, num_data=data.num_data)
    starts = None if before else options.starts  # a later stage starts where the one before ended
    run: Run[Any] = Run(data, options.seed, plan.steps, plan.per_epoch, None, before, starts, options.compile, held)
    run = replace(run, prepared=stage.prepare(model, run))
    state = stage.start(model, run, random.key(options.seed, device=model.device))
    wished = decide(
        options.compile,
        steps=plan.steps,
        elements=num_elements(model.initial),
        members=stage.members,
        device=model.device,
        resident=not isinstance(data, StreamData),
    )
    if stage.traits.verb == "iterate":
        members = None if stage.traits.shares_batches else stage.members
        place_in_batch = (team.rank, team.size) if team.divides else None
        source = Source(data, plan, options.seed, members, team.member_numbers, place_in_batch)
    else:  # stages that sample or accumulate see the data as a whole
        source = WholeData(data)
    stepping = team.model(model)  # the model that steps see, which may speak for all ranks
    resumed = team.ready(source, plan, resumed)
    stopping = None
    if held is not None and plan.patience is not None:
        stopping = Stopping(state, held, plan.patience, stage.members, partial(stage.judged, model, run))
    # by the arithmetic of a step, weights × rows, it gets one thread or several
    rows = (plan.batch_size or data.num_data) * (stage.members or 1)
    x = None if isinstance(data, StreamData) else data.batch.x
    with threads(model.network, x, work=num_elements(model.initial) * rows, device=model.device), _batch_norm_explained():
        loop = Loop(
            stage=stage,
            model=stepping,
            run=run,
            plan=plan,
            source=source,
            state=state,
            mode=team.mode(wished),
            writer=writer,
            keeper=keeper,
            stopping=stopping,
            place=place,
            team=team,
            callbacks=tuple(options.callbacks),
            progress=options.progress,
        )
        fitted = loop.go(resumed)
    return model, run, fitted


def _plan(stage: Stage, data: Data) -> Plan:
    """The stage's plan for these data; where a loader makes the batches, it says how many there are to an epoch."""
    if not isinstance(data, StreamData) or data.indexable:
        return stage.plan(data.num_data)
    loader = data.source
    size = getattr(loader, "batch_size", None)
    try:
        per_epoch = len(loader)
    except TypeError:
        size = size or num_rows(next(iter(data.passes())).x)  # batches made by the data set itself
        per_epoch = -(-data.num_data // size)
    plan = stage.plan(data.num_data, per_epoch)
    if plan.batch_size is None and stage.traits.verb == "iterate":
        data.all()  # raises: a loader has no whole data
    return plan


def _check_divisible(method: Method, team: Team) -> None:
    if not team.divides or method.traits.divisible:
        return
    who = type(method).__name__
    ensemble = f"use Ensemble({who}(…), members=…), whose members are split over them, or "
    instead = ensemble if method.traits.verb == "iterate" else ""
    raise ValueError(
        f"{who} cannot be divided among ranks; {instead}set PLAUSIBLE_RANKS=alone to fit in each process by itself, with "
        "a seed of its own"
    )


@contextlib.contextmanager
def _batch_norm_explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            "batch norm in training needs at least two examples in every batch, and one has a single example: use a larger "
            "batch_size, or drop_last=True in a loader whose last batch is that short"
        ) from error


@dataclass
class _Earlier:
    """What the stages before the one at hand have logged, and the time they took; it travels with checkpoints."""

    seconds: float = 0.0
    history: dict[str, list[float]] = field(default_factory=dict)
    stages: list[tuple[str, int, float]] = field(default_factory=list)
    mode: str = ""
    interrupted: bool = False

    @classmethod
    def of(cls, resumed: Resumed | None) -> _Earlier:
        stored = None if resumed is None else resumed.record.get("earlier")
        if stored is None:
            return cls()
        stages = [(str(name), int(steps), float(seconds)) for name, steps, seconds in stored["stages"]]
        history = {name: [float(v) for v in values] for name, values in stored["history"].items()}
        return cls(float(stored["seconds"]), history, stages, stored["mode"])

    def record(self) -> dict[str, Any]:
        history = {name: list(values) for name, values in self.history.items()}
        return {"seconds": self.seconds, "history": history, "stages": list(self.stages), "mode": self.mode}

    @property
    def steps(self) -> int:
        return sum(steps for _, steps, _ in self.stages)

    def add(self, stage: Stage, fitted: Fitted) -> None:
        """The first stage's history keeps its names; those of later ones say whose they are."""
        name = label(stage)
        for term, values in fitted.history.items():
            self.history[f"{name}: {term}" if self.stages else term] = values
        self.mode = self.mode or fitted.mode
        self.stages.append((name, fitted.steps, fitted.seconds - self.seconds))
        self.seconds = fitted.seconds

    def joined(self, last: Fitted, left: Weights) -> Fitted:
        """What the last stage left, with what all of them logged; `steps` and `mode` are those of the first, which trains."""
        return last._replace(
            interrupted=self.interrupted,
            history=self.history,
            steps=self.stages[0][1],
            seconds=self.seconds,
            mode=self.mode,
            left=left,
            stages=tuple(self.stages),
        )
