"""The loop: runs a method's step over batches, keeps draws, watches for divergence, writes checkpoints, obeys Ctrl-C."""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch, Data, StreamData, num_rows
from plausible.core.model import Model
from plausible.core.storage import DrawStore, DrawWriter, MemoryDraws, WriterMark
from plausible.core.weights import clone, copy_into, num_bytes, num_elements
from plausible.engine import checkpoint as checkpoints
from plausible.engine.accumulate import accumulate
from plausible.engine.checkpoint import Checkpoint, Checkpointer
from plausible.engine.interrupt import Interrupt
from plausible.engine.method import Method, Plan
from plausible.engine.monitoring import Monitor
from plausible.engine.policy import Mode, decide, threads
from plausible.engine.progress import Progress
from plausible.engine.ranks import Team, Vote
from plausible.engine.source import Elsewhere, Source
from plausible.engine.stepper import Captured, Eager, Info, Stepper, make

log = logging.getLogger("plausible")
Callback = Callable[[int, dict[str, float]], Any]


class DivergenceError(ArithmeticError):
    """Training met NaN or infinity. `step` and `term` say where; `posterior` is that of the last good state, or None."""

    def __init__(self, message: str, step: int, term: str):
        super().__init__(message)
        self.step, self.term = step, term
        self.posterior: Any = None
        self.fitted: Fitted | None = None


@dataclass(frozen=True)
class Options:
    """What the caller decides about a run, none of which changes the law that is sampled."""

    seed: int = 0
    compile: Literal["auto"] | bool = "auto"
    progress: bool | None = None
    checkpoint: Checkpoint | None = None
    callbacks: Sequence[Callback] = ()
    identity: dict[str, Any] = field(default_factory=dict)
    team: Team = field(default_factory=Team)


class Fitted(NamedTuple):
    """What a run leaves behind: the last state, kept draws, history per epoch, how it was run, what `prepare` found out."""

    state: Any
    draws: DrawStore | None
    history: dict[str, list[float]]
    steps: int
    seconds: float
    mode: str
    interrupted: bool = False
    prepared: Any = None
    progress: bool | None = None


def iterate(method: Method, model: Model, data: Data, options: Options) -> Fitted:
    """Iterate a step over batches: optimisers, stochastic-gradient samplers, variational methods."""
    if method.verb != "iterate":
        raise ValueError(f"{type(method).__name__} samples chains on the full data: use sample()")
    return run(method, model, data, options)


def sample(method: Method, model: Model, data: Data, options: Options) -> Fitted:
    """Sample chains: each step is one transition that sees the full data."""
    if method.verb != "sample":
        raise ValueError(f"{type(method).__name__} steps over batches: use iterate()")
    return run(method, model, data, options)


def run(method: Method, model: Model, data: Data, options: Options) -> Fitted:
    """Run a method to its end (or to Ctrl-C) and return what it left. The verbs differ in the plan alone."""
    device = next(iter(model.initial.values())).device
    team = options.team
    method = team.part(method)
    if team.divides and not method.divisible:
        who = type(method).__name__
        instead = f"use Ensemble({who}(…), members=…), whose members are split over them, or " * (method.verb == "iterate")
        raise ValueError(
            f"{who} cannot be divided among ranks; {instead}set PLAUSIBLE_RANKS=alone to fit in each process by itself, with "
            "a seed of its own"
        )
    plan = _plan(method, data)
    held: Data | None = None
    if plan.patience is not None:
        data, held = data.split(plan.holdout, options.seed)
        plan = _plan(method, data)
    model = method.prepare(
        model.for_run(num_data=data.num_data, steps=plan.steps, seed=options.seed, per_epoch=plan.per_epoch), data
    )
    state = method.start(model, random.key(options.seed, device=device))
    mode = team.mode(
        decide(
            options.compile,
            steps=plan.steps,
            elements=num_elements(model.initial),
            members=method.members,
            device=device,
            resident=not isinstance(data, StreamData),
        )
    )
    model = team.model(model)
    writer = DrawWriter()
    keeper = None
    resumed = None
    checkpoint = team.checkpoint(options.checkpoint)
    if checkpoint is not None:
        keeper = Checkpointer(checkpoint, {**team.identity, **options.identity})
        writer = DrawWriter(keeper.draws_folder)
        resumed = keeper.load(writer)
    members = None if method.shares_batches else method.members
    source = (
        Elsewhere(data)
        if method.kernels and method.members is None
        else Source(
            data,
            plan,
            seed=options.seed,
            members=members,
            numbers=team.member_numbers,
            place=(team.rank, team.size) if team.divides else None,
        )
    )
    resumed = team.ready(source, plan, resumed)
    rows = (plan.batch_size or data.num_data) * (method.members or 1)
    x = None if isinstance(data, StreamData) else data.batch.x
    with threads(model.network, x, work=num_elements(model.initial) * rows, device=device):
        try:
            fitted = _Run(method, model, plan, source, state, mode, writer, keeper, options, held).go(resumed)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                "batch norm in training needs at least two examples in every batch, and one has a single example: use a larger "
                "batch_size, or drop_last=True in a loader whose last batch is that short"
            ) from error
    return team.gather(method, model, fitted)


def _plan(method: Method, data: Data) -> Plan:
    if isinstance(data, StreamData) and not data.indexable:
        loader = data.source
        size = getattr(loader, "batch_size", None)
        try:
            per_epoch = len(loader)
        except TypeError:
            size = size or num_rows(next(iter(data.passes())).x)  # batches made by the data set itself
            per_epoch = -(-data.num_data // size)
        plan = method.plan(data.num_data, per_epoch)
        if plan.batch_size is None and not method.kernels:
            data.all()  # says why not
        return plan
    return method.plan(data.num_data)


class _Mark(NamedTuple):
    """A moment of a run to which it can go back."""

    done: int
    state: Any
    draws: WriterMark
    lengths: dict[str, int]
    sums: dict[str, float]
    random: dict[str, Tensor]
    passes: tuple[Tensor | None, int]


class _Run:
    """One run: the loop's variables in one place."""

    MAX_SEGMENT = 256
    TWO_MARKS = 2**28  # bytes of state up to which the start of the segment before is kept too

    def __init__(
        self,
        method: Method,
        model: Model,
        plan: Plan,
        source: Source,
        state: Any,
        mode: Mode,
        writer: DrawWriter,
        keeper: Checkpointer | None,
        options: Options,
        held: Data | None,
    ):
        self.method, self.model, self.plan, self.source = method, model, plan, source
        self.state, self.mode, self.writer, self.keeper = state, mode, writer, keeper
        self.options, self.held, self.team = options, held, options.team
        self.resting = not self.team.works  # nothing is left to do here, but others may be at work
        self.device = next(iter(model.initial.values())).device
        self.history: dict[str, list[float]] = {}
        self.sums: dict[str, float] = {}
        self.stale: Tensor | None = None
        self.held_weight: float | None = None
        self.done = 0
        self.seconds = 0.0

    # -----------------------------------------------------------------------------------------------------------------

    def go(self, resumed: checkpoints.Resumed | None) -> Fitted:
        if resumed is not None:
            self._resume(resumed)
            self.resting = self.resting or resumed.finished
        if self.resting:
            return self._rest()
        started = time.monotonic() - self.seconds
        step = self._choose_step()
        if self.method.kernels:  # its target is compiled, and control flow stays in Python
            self.model, used = self.method.compiled(self.model, self.options.compile)
            self.mode = self.mode if resumed is not None else used
            stepper: Stepper = Eager(step, self.model, self.state, self.source)
        else:
            stepper, used = make(self.mode, step, self.model, self.state, self.source)
        if used != self.mode and self.keeper is not None and resumed is not None:
            raise ValueError(
                f"the checkpoint was written by {self.mode} steps, which are not available here: results would differ"
            )
        self.mode = used
        self._place_generators(resumed)
        self.team.step = self.done
        unit = "steps" if self.method.verb == "iterate" else "transitions"
        segment, stale = 1, False
        good: _Mark | None = None  # the latest moment from which a step is known to have been finite
        show = self.options.progress if self.team.rank == 0 else False
        bar = Progress(type(self.method).__name__, self.plan.steps, unit, show, start=self.done)
        with Interrupt() as interrupt, bar, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")  # said when the step was chosen
            while True:
                wish = self._segment(segment, stepper) if self.done < self.plan.steps else 0
                verdict = self.team.meet(Vote(self.done, wish, interrupt.requested, stale), stepper.state)
                if verdict.over:
                    break
                count = verdict.target - self.done
                if count <= 0:  # others have to catch up
                    continue
                mark = self._mark(stepper)
                clock = time.monotonic()
                infos = stepper.advance(mark.done, count, lambda n: self._after(n, stepper, interrupt))
                self.seconds = time.monotonic() - started
                rows = self._read(infos)
                bad = self._first_bad(rows)
                if bad is not None:
                    self._diverged(bad, good if bad[0] == 0 and good is not None else mark, mark.done)
                bad = self._bad_weights(stepper.state, len(infos))
                if bad is not None:
                    self._diverged(bad, mark, mark.done)
                good = mark if num_bytes(mark.state) <= self.TWO_MARKS else None
                self.done = mark.done + len(infos)
                self.state = stepper.state
                self._note(rows, mark.done)
                stale = self._validate(stepper) or self.method.finished(stepper.state)
                self._observe(last=stale or self.done >= self.plan.steps)
                self.seconds = time.monotonic() - started
                taken = time.monotonic() - clock
                segment = (
                    min(2 * segment, self.MAX_SEGMENT) if taken < 0.1 else max(1, segment // 2) if taken > 0.5 else segment
                )
                bar.update(self.done, self._caption(rows))
                last = stale or self.done >= self.plan.steps  # the final checkpoint follows at once
                if self.keeper is not None and self.keeper.due(self.done) and not last:
                    self._save(finished=False)
        interrupted = verdict.interrupted
        self.state = stepper.state
        if not interrupted and not self.plan.thin:
            self._keep()
        if self.keeper is not None:
            self._save(finished=not interrupted)
        if interrupted and not self.plan.thin:
            self._keep()
        return self._fitted(interrupted)

    def _rest(self) -> Fitted:
        """Be there for the others until they are done."""
        with Interrupt() as interrupt:
            while not (verdict := self.team.meet(Vote(self.done, 0, interrupt.requested), self.state)).over:
                pass
        return self._fitted(verdict.interrupted)

    def _place_generators(self, resumed: checkpoints.Resumed | None) -> None:
        """Generators and stream where they stood, whatever a trial step has consumed."""
        if self.source.stream:
            self.source.rewind()
            if resumed is not None and "random.pass" in resumed.tensors:
                position = int(resumed.record["pass_position"])
                number = (self.done - position) // self.plan.per_epoch
                self.source.restart(resumed.tensors["random.pass"], position, number)
        if resumed is not None:
            checkpoints.set_random_states(resumed.tensors, self.device)

    def _mark(self, stepper: Stepper) -> _Mark:
        return _Mark(
            self.done,
            clone(stepper.state),
            self.writer.mark(),
            {n: len(v) for n, v in self.history.items()},
            dict(self.sums),
            checkpoints.random_states(self.device),
            (self.source.pass_state, self.source.pass_position),
        )

    def _choose_step(self) -> Any:
        """Vmapped steps for stacked members, or a loop over them where vmap has no rule."""
        if self.method.members is None:
            return self.method.step
        probe = clone(self.state)
        batch = self.source.peek()
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with warnings.catch_warnings(record=True) as said, torch.random.fork_rng(devices=devices), torch.no_grad():
                warnings.filterwarnings("always", message=".*batching rule.*")
                self.method.step(self.model, probe, batch)
            for name in sorted({found for message in said for found in re.findall(r"aten::\w+", str(message.message))}):
                log.info("vmap has no rule for %s: that operation runs member by member", name)
            return self.method.step
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                self.method.looped_step(self.model, clone(self.state), batch)  # type: ignore[attr-defined]
            reason = str(error).strip().splitlines()[0][:160]
            log.warning("members run one after the other: vmap cannot stack this network (%s)", reason)
            return self.method.looped_step  # type: ignore[attr-defined]

    def _segment(self, wish: int, stepper: Stepper) -> int:
        """How many steps to run before looking up again; never past an event that needs the loop."""
        count = min(wish, self.plan.steps - self.done)
        if self.held is not None or self.options.callbacks:
            count = min(count, self.plan.per_epoch - self.done % self.plan.per_epoch)
        if self.keeper is not None and self.keeper.settings.steps is not None:
            count = min(count, self.keeper.last_step + self.keeper.settings.steps - self.done)
        if isinstance(stepper, Captured):
            count = min(max(count, self._to_event()), stepper.LENGTH, self.plan.steps - self.done)
            if self.plan.thin:
                count = min(count, self.plan.next_draw(self.done) - self.done)
        return max(1, count)

    def _to_event(self) -> int:
        return self.plan.per_epoch - self.done % self.plan.per_epoch

    def _after(self, number: int, stepper: Stepper, interrupt: Interrupt) -> bool:
        self.team.step = number
        if self.plan.keeps(number):
            self.state = stepper.state
            self._keep()
        return interrupt.requested and self.team.size == 1  # several ranks stop between segments, at the same step

    def _keep(self) -> None:
        if not self.team.keeps:
            return
        if draws := self.method.kept(self.model, self.state):
            self.writer.add_block(clone(draws))

    # -----------------------------------------------------------------------------------------------------------------
    # What the steps said

    def _read(self, infos: list[Info]) -> dict[str, Tensor]:
        """Terms × steps (× members), on the CPU in float64."""
        return {name: torch.stack([info[name] for info in infos]).to("cpu", torch.float64) for name in infos[0]}

    def _first_bad(self, rows: dict[str, Tensor]) -> tuple[int, str, str] | None:
        """The first step of these (from 0) with a term that is not finite, that term, and what it became."""
        worst: tuple[int, str, str] | None = None
        for name, values in rows.items():
            finite = torch.isfinite(values).reshape(len(values), -1)
            if not bool(finite.all()):
                at = int((~finite.all(1)).nonzero()[0])
                if worst is None or at < worst[0]:
                    member = int((~finite[at]).nonzero()[0])
                    whose = f" in member {getattr(self.method, 'first', 0) + member}" if values.ndim > 1 else ""
                    worst = (at, name, f"{float(values[at].reshape(-1)[member])}{whose}")
        return worst

    def _bad_weights(self, state: Any, steps: int) -> tuple[int, str, str] | None:
        """The same for the weights that the last step left, which no term has seen yet."""
        named = {**getattr(state, "weights", {}), **getattr(state, "buffers", {})}
        named = {name: value for name, value in named.items() if value.is_floating_point()}
        if named and not bool(torch.stack([torch.isfinite(value).all() for value in named.values()]).all()):
            name = next(n for n, value in named.items() if not bool(torch.isfinite(value).all()))
            return steps - 1, name, "NaN or infinite"
        return None

    def _diverged(self, bad: tuple[int, str, str], mark: _Mark, before: int) -> None:
        offset, term, value = bad
        step = before + offset + 1
        self.state, self.done, self.sums = mark.state, mark.done, mark.sums
        self.history = {n: v[: mark.lengths[n]] for n, v in self.history.items() if n in mark.lengths}
        self.writer.back_to(mark.draws)
        kept = ""
        if self.keeper is not None:
            self._save(finished=False, mark=mark)
            kept = f"; the last good state, after step {mark.done}, is in {str(self.keeper.folder)!r}"
        error = DivergenceError(
            f"{term} became {value} at step {step} of {self.plan.steps} (epoch {(step - 1) // self.plan.per_epoch + 1}); "
            + (
                "the starting weights give it already: are the targets very large? standardise them"
                if step == 1
                else "a smaller lr usually helps"
            )
            + kept,
            step,
            term,
        )
        if not self.plan.thin:
            self._keep()
        error.fitted = self._fitted(interrupted=True) if len(self.writer) else None
        raise error

    def _note(self, rows: dict[str, Tensor], before: int) -> None:
        """History: the mean of each term over each epoch; callbacks hear of every step.

        Added up step by step, so that the result does not depend on where segments, which follow the clock, were cut.
        """
        per_epoch = self.plan.per_epoch
        means = {name: values.reshape(len(values), -1).numpy().mean(axis=1).tolist() for name, values in rows.items()}
        for name, values in means.items():
            for step, value in enumerate(values, start=before + 1):
                self.sums[name] = self.sums.get(name, 0.0) + value
                if step % per_epoch == 0:
                    self.history.setdefault(name, []).append(self.sums.pop(name) / per_epoch)
        if self.options.callbacks:
            for i in range(len(next(iter(means.values())))):
                info = {name: values[i] for name, values in means.items()}
                for callback in self.options.callbacks:
                    callback(before + i + 1, dict(info))

    def _observe(self, last: bool) -> None:
        """Show the posterior so far to the monitors among the callbacks, at the end of an epoch."""
        monitors = [callback for callback in self.options.callbacks if isinstance(callback, Monitor)]
        if not monitors or (self.done % self.plan.per_epoch and not last):
            return
        epoch = -(-self.done // self.plan.per_epoch)
        due = [monitor for monitor in monitors if monitor.due(epoch, last)]
        if not due:
            return
        fitted = self._fitted(interrupted=False)._replace(state=clone(self.state), history=dict(self.history))
        if not self.plan.thin:  # the draws that the run would end with
            ending = clone(self.method.kept(self.model, self.state))
            fitted = fitted._replace(draws=MemoryDraws(ending) if ending else None)
        elif fitted.draws is None and self.method.keeps_draws:
            return  # nothing kept yet
        posterior = self.method.posterior(self.model, fitted)
        generators = checkpoints.random_states(self.device)
        for monitor in due:
            monitor.observe(epoch, posterior)
        checkpoints.set_random_states({f"random.{name}": state for name, state in generators.items()}, self.device)

    def _caption(self, rows: dict[str, Tensor]) -> str:
        if (said := self.method.caption(self.state)) is not None:
            return said
        if not rows:
            return ""
        name, values = next(iter(rows.items()))
        value = float(values[-1].mean())
        return f"{name.replace('_', ' ')} {value:,.1f}" if abs(value) < 1e7 else f"{name.replace('_', ' ')} {value:.3g}"

    def _validate(self, stepper: Stepper) -> bool:
        """Held-out log-likelihood at the end of an epoch; True when patience has run out for all members.

        A member whose patience has run out is not judged again, however long the others train.
        """
        if self.held is None or self.done % self.plan.per_epoch or self.plan.patience is None:
            return False
        total = accumulate(lambda batch: self.method.held_out(self.model, stepper.state, batch), self.held)
        value = total / self._held_weight()
        over = torch.zeros_like(value, dtype=torch.bool) if self.stale is None else self.stale >= self.plan.patience
        new, self.stale = self.method.validated(stepper.state, torch.where(over, -torch.inf, value))
        if isinstance(stepper.state, tuple) and self.mode != "eager":
            copy_into(stepper.state, new)
        else:
            stepper.state = new
        self.state = stepper.state
        self.history.setdefault("held_out_log_likelihood", []).append(float(value.mean()))
        return bool((self.stale >= self.plan.patience).all())

    def _held_weight(self) -> float:
        """The number of held-out examples, or the sum of their weights."""
        assert self.held is not None
        if self.held_weight is None:

            def count(batch: Batch) -> Tensor:
                return torch.tensor(float(num_rows(batch.x)) if batch.weight is None else float(batch.weight.sum()))

            self.held_weight = float(accumulate(count, self.held)) or 1.0
        return self.held_weight

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def _save(self, *, finished: bool, mark: _Mark | None = None) -> None:
        assert self.keeper is not None
        started, position = (self.source.pass_state, self.source.pass_position) if mark is None else mark.passes
        states = dict(checkpoints.random_states(self.device) if mark is None else mark.random)
        if started is not None:
            states["pass"] = started
        record = {
            "history": {n: [_json_number(v) for v in values] for n, values in self.history.items()},
            "sums": {n: _json_number(v) for n, v in self.sums.items()},
            "seconds": self.seconds,
            "mode": self.mode,
            "pass_position": position,
            "stale": None if self.stale is None else self.stale.tolist(),
            "monitors": _json_tree([c.records for c in self.options.callbacks if isinstance(c, Monitor)]),
        }
        self.keeper.save(self.done, self.state, self.writer, record, states, finished=finished)

    def _resume(self, resumed: checkpoints.Resumed) -> None:
        checkpoints.restore(self.state, resumed.tensors)
        record = resumed.record
        self.done = resumed.step
        self.history = {n: [float(v) for v in values] for n, values in record["history"].items()}
        self.sums = {n: float(v) for n, v in record["sums"].items()}
        self.seconds = float(record["seconds"])
        self.mode = record["mode"]
        monitors = [callback for callback in self.options.callbacks if isinstance(callback, Monitor)]
        for monitor, records in zip(monitors, record.get("monitors", [])):
            monitor.records = _from_json_tree(records)
        self.stale = None if record["stale"] is None else torch.tensor(record["stale"], device=self.device)
        self.writer.pending = [{n: v.to(self.device) for n, v in draw.items()} for draw in self.writer.pending]

    def _fitted(self, interrupted: bool) -> Fitted:
        return Fitted(
            self.state,
            self.writer.store(),
            self.history,
            self.done,
            self.seconds,
            self.mode,
            interrupted,
            self.model.prepared,
            self.options.progress,
        )


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _json_tree(value: Any) -> Any:
    """Numbers, lists and mappings as strict JSON: what is not finite becomes {"number": "nan"}."""
    if isinstance(value, dict):
        return {str(key): _json_tree(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_tree(inner) for inner in value]
    if isinstance(value, Tensor):
        return _json_tree(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value


def _from_json_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["number"]) if set(value) == {"number"} else {k: _from_json_tree(v) for k, v in value.items()}
    return [_from_json_tree(inner) for inner in value] if isinstance(value, list) else value


__all__ = ["DivergenceError", "Fitted", "Options", "iterate", "replace", "run", "sample"]
