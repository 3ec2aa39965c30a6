"""The loop of one stage: runs its step over batches, keeps draws, watches for divergence, writes checkpoints, obeys Ctrl-C."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.core import turns
from plausible.core.model import Model
from plausible.core.storage import DrawWriter, MemoryDraws, WriterMark
from plausible.core.weights import clone, num_bytes, tensors
from plausible.core.words import log
from plausible.engine import checkpoint as checkpoints
from plausible.engine.checkpoint import Checkpointer
from plausible.engine.method import DivergenceError, Fitted, Info, Method, Plan, Run, Stage
from plausible.engine.ranks import Team, Vote
from plausible.engine.source import Source
from plausible.engine.stepper import Captured, Eager, StepMode, Stepper, make
from plausible.engine.stopping import Stopping
from plausible.engine.watching import Interrupt, Monitor, Progress

Callback = Callable[[int, dict[str, float]], Any]


class _Mark(NamedTuple):
    """A moment of a run to which it can go back: taken before each segment, used where a segment diverges."""

    done: int
    state: Any
    draws: WriterMark
    lengths: dict[str, int]  # of the history, by term
    sums: dict[str, float]
    random: dict[str, Tensor]  # the states of torch's global generators
    passes: tuple[Tensor | None, int]  # of a loader: the generator's state at the start of its pass, and the position in it


@dataclass
class StagePlace:
    """Where a stage stands in the run of its method: its number, and what the stages before it add up to."""

    method: Method
    number: int = 0
    last: bool = True
    steps: int = 0  # of the stages before: callbacks count on from here
    seconds: float = 0.0  # of the stages before
    record: Any = None  # what the stages before add to the checkpoint

    @property
    def single(self) -> bool:
        return self.number == 0 and self.last


class Loop:
    """The loop over the steps of one stage; `go` runs it.

    Steps run in *segments* of up to `MAX_SEGMENT`. Between two segments the ranks agree how far to go next, the loop looks at what
    the steps logged (and on a GPU waits for it), monitors see the posterior so far, and a checkpoint is written where one is due.
    A segment that met NaN or infinity is undone: the loop goes back to the mark that it took before it.
    """

    MAX_SEGMENT = 256
    TWO_MARKS = 2**28  # bytes of state up to which the start of the segment before is kept too

    def __init__(
        self,
        stage: Stage,
        model: Model,
        run: Run[Any],
        plan: Plan,
        source: Source,
        state: Any,
        mode: StepMode,
        writer: DrawWriter,
        keeper: Checkpointer | None,
        stopping: Stopping | None,
        place: StagePlace,
        team: Team,
        callbacks: tuple[Callback, ...] = (),
        progress: bool | None = None,
    ):
        self.stage, self.model, self.run, self.plan, self.source = stage, model, run, plan, source
        self.state, self.mode, self.writer, self.keeper = state, mode, writer, keeper
        self.stopping, self.place, self.callbacks, self.progress, self.team = stopping, place, callbacks, progress, team
        self.monitors = [callback for callback in callbacks if isinstance(callback, Monitor)]
        self.resting = not team.works  # nothing is left to do here, but others may be at work
        self.device = model.device
        self.history: dict[str, list[float]] = {}  # the mean of each term over each epoch
        self.sums: dict[str, float] = {}  # of each term, over the epoch that has not ended yet
        self.done = 0  # steps
        self.seconds = 0.0

    # -----------------------------------------------------------------------------------------------------------------

    def go(self, resumed: checkpoints.Resumed | None) -> Fitted:
        """Run the stage until it is over or interrupted, from the checkpoint `resumed` on where there is one."""
        if resumed is not None:
            self._resume(resumed)
            self.resting = self.resting or resumed.finished
        elif self.keeper is not None and self.place.number:
            self._save(finished=False)  # a later stage begins: what those before it took is safe from here on
        if self.resting:
            return self._rest()
        started = time.monotonic() - self.seconds  # time that was spent before a kill counts
        stepper = self._stepper(resumed)
        self._place_generators(resumed)
        self.team.step = self.done
        length, over = 1, self.stage.finished(self.state)  # length: how many steps the next segment should have
        good: _Mark | None = None  # the latest moment from which a step is known to have been finite
        with Interrupt() as interrupt, self._bar() as bar, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")  # said when the step was chosen
            while True:
                turns.let_pass()
                wish = self._segment(length, stepper) if self.done < self.plan.steps else 0
                outcome = self.team.meet(Vote(self.done, wish, interrupt.requested, over), stepper.state)
                if outcome.over:
                    break
                count = outcome.target - self.done
                if count <= 0:  # others have to catch up
                    continue
                mark = self._mark(stepper)
                clock = time.monotonic()
                infos = stepper.advance(mark.done, count, lambda n: self._after(n, stepper, interrupt))
                self.seconds = time.monotonic() - started
                rows = _stacked(infos)
                try:
                    self._refuse_divergence(rows, stepper.state, len(infos), mark, good)
                except DivergenceError as error:
                    # of methods that keep no draws the posterior is made of the last good state, by what `run` knows
                    if self.place.method.traits.keeps_draws or self.team.size > 1 or not self.done:
                        raise
                    return self._fitted(interrupted=True)._replace(error=error)
                good = mark if num_bytes(mark.state) <= self.TWO_MARKS else None
                self.done = mark.done + len(infos)
                self.state = stepper.state
                self._note(rows, mark.done, len(infos))
                over = self._validate() or self.stage.finished(self.state)
                last = over or self.done >= self.plan.steps
                self._observe(last)
                self.seconds = time.monotonic() - started
                # longer while segments are short: each costs a look at what was logged, and on a GPU a wait for it
                took = time.monotonic() - clock
                if took < 0.1:
                    length = min(2 * length, self.MAX_SEGMENT)
                elif took > 0.5:
                    length = max(1, length // 2)
                bar.update(getattr(self.state, "seen", self.done), self._caption(rows))  # a pass counts examples, not steps
                if self.keeper is not None and self.keeper.due(self.done) and not last:  # the final one follows at once
                    self._save(finished=False)
        self.state = stepper.state
        self._end(outcome.interrupted)
        return self._fitted(outcome.interrupted)

    def _end(self, interrupted: bool) -> None:
        """After the last step: the best weights where training stopped early, the draw of a plan that keeps one, a checkpoint."""
        if interrupted and self.keeper is not None:
            self._save(finished=False)  # before the best weights take the place of the last: a resumed run trains on
        if interrupted and self.stage.traits.verb == "accumulate":
            raise KeyboardInterrupt(
                f"stopped during a pass over the data ({label(self.stage)}), of which nothing is known before its end"
                + ("" if self.keeper is None else f"; resume with checkpoint={str(self.keeper.folder)!r}")
            )
        if self.stopping is not None:
            self.state = self.stopping.best_of(self.state)
        if self.place.last and not self.plan.thin:
            self._keep()
        if not interrupted and self.keeper is not None and self.place.last:
            self._save(finished=True)

    def _stepper(self, resumed: checkpoints.Resumed | None) -> Stepper:
        """What advances the state: the step compiled or captured, as the mode says.

        The step of a stage that samples or accumulates is run as it stands: what can be compiled there are its kernels, and
        `prepare` has decided how they run (`run.prepared.mode`).
        """
        if self.stage.traits.verb != "iterate":
            used: Any = getattr(self.run.prepared, "mode", "eager")
            self.mode = self.mode if resumed is not None else used
            stepper: Stepper = Eager(self.stage.step, self.model, self.run, self.state, self.source)
        else:
            stepper, used = make(self.mode, self._choose_step(), self.model, self.run, self.state, self.source)
        if used != self.mode and self.keeper is not None and resumed is not None:
            raise ValueError(
                f"the checkpoint was written by {self.mode} steps, which are not available here: results would differ"
            )
        self.mode = used
        return stepper

    def _bar(self) -> Progress:
        name = type(self.place.method).__name__
        if not self.place.single:
            name += f": {label(self.stage)}"
        show = False if self.team.rank or self.stage.finished(self.state) else self.progress
        total = getattr(self.state, "total", self.plan.steps)  # a pass counts examples
        return Progress(name, total, self.plan.unit, show, start=self.done)

    def _rest(self) -> Fitted:
        """Take part in the meetings of the other ranks until they are done, without a step of one's own."""
        with Interrupt() as interrupt:
            while not (outcome := self.team.meet(Vote(self.done, 0, interrupt.requested), self.state)).over:
                pass
        return self._fitted(outcome.interrupted)

    def _place_generators(self, resumed: checkpoints.Resumed | None) -> None:
        """Put torch's generators and the loader where the run stands: trial steps may have moved them."""
        if self.source.stream:
            self.source.rewind()
            if resumed is not None and "pass" in resumed.random_states:
                position = int(resumed.record["pass_position"])
                number = (self.done - position) // self.plan.per_epoch
                self.source.restart(resumed.random_states["pass"], position, number)
        if resumed is not None:
            checkpoints.set_random_states(resumed.random_states, self.device)

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
        if self.stage.members is None:
            return self.stage.step
        # vmap fails only when it is tried: one step on a copy, with generators put back
        probe = clone(self.state)
        batch = self.source.peek()
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with warnings.catch_warnings(record=True) as said, torch.random.fork_rng(devices=devices), torch.no_grad():
                warnings.filterwarnings("always", message=".*batching rule.*")
                self.stage.step(self.model, self.run, probe, batch)
            for name in sorted({name for message in said for name in re.findall(r"aten::\w+", str(message.message))}):
                log.info("vmap has no rule for %s: that operation runs member by member", name)
            return self.stage.step
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                self.stage.looped_step(self.model, self.run, clone(self.state), batch)  # type: ignore[attr-defined]
            reason = str(error).strip().splitlines()[0][:160]
            log.warning("members run one after the other: vmap cannot stack this network (%s)", reason)
            return self.stage.looped_step  # type: ignore[attr-defined]

    def _segment(self, wish: int, stepper: Stepper) -> int:
        """How many steps the next segment has, at most `wish`: never past a step after which the loop has something to do."""
        count = min(wish, self.plan.steps - self.done)
        to_epoch = self.plan.per_epoch - self.done % self.plan.per_epoch
        if self.stopping is not None or self.callbacks:
            count = min(count, to_epoch)
        # checkpoints every so many steps fall on those steps, not near them
        if self.keeper is not None and self.keeper.settings.steps is not None:
            count = min(count, self.keeper.last_step + self.keeper.settings.steps - self.done)
        if isinstance(stepper, Captured):
            # replays are cheap and cannot be looked into: as many as there is room for
            count = min(max(count, to_epoch), stepper.LENGTH, self.plan.steps - self.done)
            if self.plan.thin:
                count = min(count, self.plan.next_draw(self.done) - self.done)
        return max(1, count)

    def _after(self, number: int, stepper: Stepper, interrupt: Interrupt) -> bool:
        """After step `number` inside a segment: keep a draw where one is due; whether the segment ends here."""
        self.team.step = number
        if number % self.MAX_SEGMENT == 0:  # by the number of the step, not where segments end, which follows the clock
            flush(stepper.state)
        if self.plan.keeps(number):
            self.state = stepper.state
            self._keep()
        if self.team.size > 1:
            return False  # several ranks stop between segments, at the same step
        # Where segments end follows the clock: a stage that knows its end must not depend on it.
        return interrupt.requested or (self.stage.traits.verb != "iterate" and self.stage.finished(stepper.state))

    def _keep(self) -> None:
        """Store the draws that the present state stands for."""
        if not self.team.keeps:
            return
        if draws := self.stage.kept(self.model, self.run, self.state):
            if self.plan.thin:  # there are many
                self.writer.leave(draws)
            else:
                self.writer.add_block(clone(draws))

    # -----------------------------------------------------------------------------------------------------------------
    # What the steps logged

    def _refuse_divergence(self, rows: dict[str, Tensor], state: Any, steps: int, mark: _Mark, good: _Mark | None) -> None:
        """Raise where a term or a weight of the `steps` since `mark` is not finite; `good` is the mark before, if it was kept."""
        bad = self._first_bad(rows)
        if bad is not None:
            # a bad first step was made bad by the last update before the mark: go back one segment further
            self._diverged(bad, good if bad[0] == 0 and good is not None else mark, mark.done)
        bad = self._bad_weights(state, steps)
        if bad is not None:
            self._diverged(bad, mark, mark.done)

    def _first_bad(self, rows: dict[str, Tensor]) -> tuple[int, str, str] | None:
        """The first step of these (from 0) with a term that is not finite, that term, and what it became."""
        worst: tuple[int, str, str] | None = None
        for name, values in rows.items():
            # the earliest of all terms: those after it are bad because of it
            finite = torch.isfinite(values).reshape(len(values), -1)
            if not bool(finite.all()):
                at = int((~finite.all(1)).nonzero()[0])
                if worst is None or at < worst[0]:
                    member = int((~finite[at]).nonzero()[0])
                    whose = f" in member {getattr(self.stage, 'first', 0) + member}" if values.ndim > 1 else ""
                    worst = (at, name, f"{float(values[at].reshape(-1)[member])}{whose}")
        return worst

    def _bad_weights(self, state: Any, steps: int) -> tuple[int, str, str] | None:
        """As `_first_bad`, for the weights that the last of these `steps` left: no logged term depends on them yet."""
        named = {**getattr(state, "weights", {}), **getattr(state, "buffers", {})}
        named = {name: value for name, value in named.items() if value.is_floating_point()}
        if named and not bool(torch.stack([torch.isfinite(value).all() for value in named.values()]).all()):
            name = next(n for n, value in named.items() if not bool(torch.isfinite(value).all()))
            return steps - 1, name, "NaN or infinite"
        return None

    def _diverged(self, bad: tuple[int, str, str], mark: _Mark, before: int) -> None:
        """Go back to `mark`, save that, and raise; `bad` is the step (after the first `before`), its term, and what that became."""
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
        if self.place.last and self.place.method.traits.keeps_draws:
            if not self.plan.thin:
                self._keep()
            if len(self.writer):
                error.posterior = self.place.method.posterior(self.model, self.run, self._fitted(interrupted=True))
        raise error

    def _note(self, rows: dict[str, Tensor], before: int, count: int) -> None:
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
        if self.callbacks:
            for i in range(count):
                info = {name: values[i] for name, values in means.items()}
                for callback in self.callbacks:
                    callback(self.place.steps + before + i + 1, dict(info))

    def _observe(self, last: bool) -> None:
        """Show the posterior so far to the monitors among the callbacks, at the end of an epoch."""
        if not self.monitors or not self.place.last or (self.done % self.plan.per_epoch and not last):
            return
        if not self.place.single and not self.place.method.traits.keeps_draws:
            return  # made of what all stages leave: shown when the run is over
        epoch = -(-self.done // self.plan.per_epoch)
        due = [monitor for monitor in self.monitors if monitor.due(epoch, last)]
        if not due:
            return
        # the step may write into the buffers of its state, so monitors see a copy
        fitted = self._fitted(interrupted=False)._replace(state=clone(self.state), history=dict(self.history))
        if not self.plan.thin:  # the draws that the run would end with
            ending = clone(self.stage.kept(self.model, self.run, self.state))
            # a method that keeps its last state has kept nothing yet
            fitted = fitted._replace(draws=MemoryDraws(ending) if ending else None)
        elif fitted.draws is None and self.place.method.traits.keeps_draws:
            return  # nothing kept yet
        posterior = self.place.method.posterior(self.model, self.run, fitted)
        generators = checkpoints.random_states(self.device)
        for monitor in due:
            monitor.observe(epoch, posterior)
        checkpoints.set_random_states(generators, self.device)  # looking changes nothing

    def _caption(self, rows: dict[str, Tensor]) -> str:
        if (said := self.stage.caption(self.state)) is not None:
            return said
        if not rows:
            return ""
        name, values = next(iter(rows.items()))
        value = float(values[-1].mean())
        return f"{name.replace('_', ' ')} {f'{value:,.1f}' if abs(value) < 1e7 else f'{value:.3g}'}"

    def _validate(self) -> bool:
        """Held-out log-likelihood at the end of an epoch; True when patience has run out for all members."""
        if self.stopping is None or self.done % self.plan.per_epoch:
            return False
        value = self.stopping.judge(self.model, self.state)
        self.history.setdefault("held_out_log_likelihood", []).append(value)
        return self.stopping.over

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def _save(self, *, finished: bool, mark: _Mark | None = None) -> None:
        assert self.keeper is not None
        started, position = (self.source.pass_state, self.source.pass_position) if mark is None else mark.passes
        states = dict(checkpoints.random_states(self.device) if mark is None else mark.random)
        if started is not None:
            states["pass"] = started
        record = {
            "stage": self.place.number,
            "earlier": self.place.record,
            "history": self.history,
            "sums": self.sums,
            "seconds": self.seconds,
            "mode": self.mode,
            "pass_position": position,
            "monitors": _encoded([monitor.records for monitor in self.monitors]),
        }
        state = self.state.tensors() if self.stage.traits.verb == "accumulate" else self.state
        named = {"state": state, "before": self.run.before, "stopping": self.stopping and self.stopping.tree}
        self.keeper.save(self.done, named, self.writer, record, states, finished=finished)

    def _resume(self, resumed: checkpoints.Resumed) -> None:
        if self.stage.traits.verb == "accumulate":
            self.state.restore(resumed.tree("state", self.device))
            # sums are stored, and what was made of them is made anew, where need be from the data
            while resumed.finished and not self.stage.finished(self.state):
                self.state, _ = self.stage.step(self.model, self.run, self.state, self.source.peek())
        else:
            resumed.restore("state", self.state)
        if self.stopping is not None:
            resumed.restore("stopping", self.stopping.tree)
        record = resumed.record
        self.done = resumed.step
        self.history = {n: [float(v) for v in values] for n, values in record["history"].items()}
        self.sums = {n: float(v) for n, v in record["sums"].items()}
        self.seconds = float(record["seconds"])
        self.mode = record["mode"]
        for monitor, records in zip(self.monitors, record.get("monitors", [])):
            monitor.records = _decoded(records)
        self.writer.return_to(self.device)

    def _fitted(self, interrupted: bool) -> Fitted:
        return Fitted(
            self.state,
            self.writer.store(self.device),
            self.history,
            self.done,
            self.place.seconds + self.seconds,
            self.mode,
            interrupted,
        )


def flush(state: Any) -> None:
    """Write 0 over numbers of a state that are hardly normal any more, on a CPU.

    Under a prior, weights of units that have died decay without end. Products with denormal numbers take up to a hundred times as
    long, and a fit that met them ran seven times as slow.
    """
    for values in tensors(state):
        if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64, torch.bfloat16):
            small = values.abs() < torch.finfo(values.dtype).tiny * 1e8
            if bool((small & (values != 0)).any()):
                values.masked_fill_(small, 0.0)


def label(stage: Stage) -> str:
    """The name of a stage on the progress bar and in `run["stages"]`; a stage that wraps another is called after the inner one."""
    while (inner := getattr(stage, "stage", None)) is not None:
        stage = inner
    name = type(stage).__name__
    return name if isinstance(stage, Method) else name.lower()


def _stacked(infos: list[Info]) -> dict[str, Tensor]:
    """What each term was at each step: [steps] or [steps, members], on the CPU in float64."""
    names = infos[0] if infos else ()
    return {name: torch.stack([info[name] for info in infos]).to("cpu", torch.float64) for name in names}


def _encoded(value: Any) -> Any:
    """Records of monitors for JSON, which has no NaN: {"number": "nan"}, since the string "nan" may stand in a record as well."""
    if isinstance(value, dict):
        return {key: _encoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_encoded(inner) for inner in value]
    return {"number": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _decoded(value: Any) -> Any:
    """The inverse of `_encoded`."""
    if isinstance(value, dict):
        return float(value["number"]) if set(value) == {"number"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value
