"""Ranks: one run on several processes, started by `torchrun` or by hand.

    members k of an ensemble → rank r holds a block of them;     one chain → rank r holds a part of every batch

A `Team` is what the engine asks wherever other processes might matter: which members run here, which rows of a batch, how far to
go next. The base class is a process on its own and answers "all of them, and just go on"; `SplitMembers` (here) and
`DividedBatches` (in `plausible.engine.data_parallel`, with `assemble`, which chooses between the three) answer for one rank of
several. What ranks do in common is here: agree on what to run, meet between segments, fail together, and gather the result, so
that every rank returns the whole posterior. Between meetings the members of a split ensemble need nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import StreamData
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.core.words import log
from plausible.engine import gathering
from plausible.engine.checkpoint import Checkpoint, Resumed, differences
from plausible.engine.method import DivergenceError, Method, Plan, Run
from plausible.engine.source import Source
from plausible.engine.stepper import StepMode

Note = TypeVar("Note")
PATIENCE = timedelta(days=7)  # for a rank at work; one that dies closes its connections and is noticed at once
AGREED = ("method", "likelihood", "prior", "seed", "device", "num_data", "data", "weights", "random", "temperature")


class RankError(RuntimeError):
    """Another rank failed; the message is the one of that rank."""


@dataclass(frozen=True)
class Vote:
    """What a rank says between two segments: the steps it has done and wants to do next (0: nothing is left), and why to stop."""

    done: int = 0
    wish: int = 0
    stop: bool = False
    stale: bool = False
    fingerprint: int | None = None
    error: tuple[str, dict[str, Any]] | None = None
    note: Any = None


class Outcome(NamedTuple):
    """What follows from all votes: go on to step `target`, or stop, because that was all or because somebody interrupted."""

    target: int
    over: bool
    interrupted: bool


def count_votes(votes: Sequence[Vote]) -> Outcome:
    """The same answer on every rank. A rank that is behind (a resumed one) catches up first; patience ends for all at once."""
    # all go to the nearest wish, so that nobody runs past an event of another
    wishes = [vote.done + vote.wish for vote in votes if vote.wish]
    finished = all(vote.stale or not vote.wish for vote in votes)
    stopped = any(vote.stop for vote in votes)
    return Outcome(min(wishes, default=0), finished or stopped, stopped and not finished)


class Team:
    """A process on its own: every question has the answer that changes nothing. It is entered for the length of a fit."""

    rank, size = 0, 1
    step = 0  # how many steps have been done
    works = True  # whether there are steps to run here
    keeps = True  # whether draws are kept here
    member_numbers: range | None = None  # which members of the ensemble run here; None: all
    divides = False  # whether batches are divided among the ranks
    identity: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        return None

    def device(self, device: Any, network: Any) -> Any:  # noqa: ARG002
        """The device asked for, or this rank's own of several."""
        return device

    def seed(self, seed: int) -> int:
        """The seed of torch's global generators on this rank."""
        return seed

    def first(self, note: Note) -> Note:
        """What the first rank found, on every one: where each sees other data and all must go by the same."""
        return note

    def part(self, method: Method) -> Method:
        """What of the method runs here: all of it, or some of its members."""
        return method

    def model(self, model: Model) -> Model:
        """The model that the steps are given; one that averages gradients over ranks where batches are divided."""
        return model

    def mode(self, mode: StepMode) -> StepMode:
        """How steps can run here, where they would run in this mode on one process."""
        return mode

    def checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Where this rank writes its checkpoints."""
        return checkpoint

    def ready(self, source: Source, plan: Plan, resumed: Resumed | None) -> Resumed | None:  # noqa: ARG002
        """Before the first step: check that the ranks' data fit together; the checkpoint from which this rank goes on."""
        return resumed

    def meet(self, vote: Vote, state: Any) -> Outcome:  # noqa: ARG002
        """Between two segments: how far all go next."""
        return count_votes([vote])

    def gather(self, method: Method, model: Model, run: Run[Any], fitted: Any) -> Any:  # noqa: ARG002
        """What the ranks have left, put together; every rank gets the whole."""
        return fitted


class Ranks(Team):
    """One of several processes."""

    def __init__(self, method: Method):
        self.rank, self.size, self.group = dist.get_rank(), dist.get_world_size(), _control_group()
        self.method, self.broken = method, False
        self.identity = {"ranks": self.size}
        self._quiet = _Quiet()
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        if self.rank:
            log.addFilter(self._quiet)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        log.removeFilter(self._quiet)
        if error is not None and not self.broken:
            with contextlib.suppress(RankError):
                self._fail(error)

    # -----------------------------------------------------------------------------------------------------------------
    # Meetings

    def _votes(self, vote: Vote) -> list[Vote]:
        """Everybody's votes; where one of them is an error, all fail."""
        votes: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(votes, vote, group=self.group)
        except RuntimeError as error:
            raise self._lost(error) from error
        failed = [(rank, other.error) for rank, other in enumerate(votes) if other.error is not None]
        if failed:
            self.broken = True
            if vote.error is None:
                rank, (message, where) = failed[0]
                text = f"rank {rank} failed, and with it this run: {message}"
                raise DivergenceError(text, **where) if message.startswith("DivergenceError") else RankError(text)
        return votes

    def exchange(self, note: Any) -> list[Any]:
        """What every rank has to say, in their order."""
        return [vote.note for vote in self._votes(Vote(note=note))]

    def first(self, note: Note) -> Note:
        return self.exchange(note)[0]

    def _fail(self, error: BaseException) -> None:
        """Tell the others, who wait at their next meeting."""
        where = {name: getattr(error, name) for name in ("step", "term") if hasattr(error, name)}
        self._votes(Vote(error=(f"{type(error).__name__}: {error}".rstrip(": "), where)))

    def _lost(self, error: RuntimeError) -> RankError:
        self.broken = True
        reason = str(error).strip().splitlines()[0][:200]
        return RankError(f"rank {self.rank} lost the others: one of them has died or left the run ({reason})")

    def meet(self, vote: Vote, state: Any) -> Outcome:  # noqa: ARG002
        return count_votes(self._votes(vote))

    def agree(self, model: Model, starts: Weights | None, identity: Mapping[str, Any]) -> tuple[Model, Weights | None]:
        """Refuse ranks that were asked for different things; send the weights of rank 0 to all."""
        asked = self.exchange({name: identity[name] for name in AGREED} | {"init": starts is not None})
        for rank, other in enumerate(asked):
            if differing := differences(asked[0], other):
                where, old, new = differing[0]
                hint = "every rank must run the same script with the same seed"
                if where in ("data", "num_data"):
                    hint = "pass the whole data on every rank, the engine divides them"
                raise ValueError(f"the ranks do not agree: {where} is {old!r} on rank 0 and {new!r} on rank {rank}; {hint}")
        receive = functools.partial(self.send, 0)
        with torch.no_grad():
            for value in (*model.network.parameters(), *model.network.buffers()):
                value.copy_(receive(value))
        model = replace(model, initial=tree.tree_map(receive, model.initial), buffers=tree.tree_map(receive, model.buffers))
        return model, None if starts is None else tree.tree_map(receive, starts)

    def send(self, rank: int, value: Tensor) -> Tensor:
        """The value that `rank` has, on every rank; of the others' own `value` only shape, type and device count."""
        copy = value.detach().to("cpu", copy=True).contiguous()
        if copy.numel():
            try:  # as bytes, since gloo does not know all types
                dist.broadcast(copy.reshape(-1).view(torch.uint8), src=rank, group=self.group)
            except RuntimeError as error:
                raise self._lost(error) from error
        return copy.to(value.device)

    # -----------------------------------------------------------------------------------------------------------------
    # Where things are

    def device(self, device: Any, network: Any) -> Any:
        """A GPU that was asked for without a number is this rank's own."""
        parameters = network.parameters() if isinstance(network, torch.nn.Module) else iter(())
        first = next((p.device.type for p in parameters), "cpu") if device is None else str(device)
        if first in ("cuda", "auto") and torch.cuda.is_available():
            number = int(os.environ.get("LOCAL_RANK", dist.get_rank()))  # of this process on its machine
            return f"cuda:{number % torch.cuda.device_count()}"
        return device

    def checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """A folder for each rank inside the one given."""
        if checkpoint is None:
            return None
        folder = Path(checkpoint.path)
        if (folder / "checkpoint.json").exists():
            raise ValueError(
                f"checkpoint={str(folder)!r} holds a run of one process and there are {self.size} ranks now: "
                "resume it in one process, or use another folder"
            )
        foreign = sorted(p.name for p in folder.iterdir() if not p.name.startswith("rank-")) if folder.is_dir() else []
        if foreign:
            raise FileExistsError(
                f"checkpoint={str(folder)!r} is not empty and holds no checkpoint (but {foreign[0]!r}); choose another"
            )
        self._folder = folder / f"rank-{self.rank}"
        return replace(checkpoint, path=self._folder)

    def gather(self, method: Method, model: Model, run: Run[Any], fitted: Any) -> Any:
        return gathering.gather(self, method, model, run, fitted, self._folder)


class SplitMembers(Ranks):
    """Members of an ensemble in blocks: rank r holds ⌈K/W⌉ or ⌊K/W⌋ neighbouring ones, none where there are too few.

    Keys, starting points and the order of rows are those of the member's number in the whole, so the result does not depend on
    the number of ranks. Dropout and noise on a GPU come from torch's generators, which have a seed for each rank.
    """

    def __init__(self, method: Method):
        super().__init__(method)
        assert method.members is not None
        # the first ranks hold one more where it is not even
        few, more = divmod(method.members, self.size)
        first = self.rank * few + min(self.rank, more)
        self.member_numbers = range(first, first + few + (self.rank < more))
        self.works = self.keeps = bool(self.member_numbers)
        self.identity = {**self.identity, "rank": self.rank}

    def __enter__(self) -> Self:
        super().__enter__()
        if self.method.members < self.size:  # type: ignore[operator]
            log.warning("%d members on %d ranks: the other ranks wait for them", self.method.members, self.size)
        return self

    def seed(self, seed: int) -> int:
        return random.generator(seed, 13, self.rank).initial_seed() if self.rank else seed

    def part(self, method: Method) -> Method:
        """The members of this rank; a rank without any takes the first as a pattern and lets it rest."""
        return method.part(self.member_numbers or range(1))  # type: ignore[attr-defined]

    def ready(self, source: Source, plan: Plan, resumed: Resumed | None) -> Resumed | None:  # noqa: ARG002
        if isinstance(source.data, StreamData) and source.sampler is not None:
            raise ValueError(
                "the members of an ensemble are split over the ranks, and each needs all the data: pass a loader without a "
                "DistributedSampler"
            )
        self.exchange(None)
        return resumed


_groups: dict[int, tuple[Any, Any]] = {}


def leave() -> None:
    """Give the groups back while the interpreter still runs, so that their threads end here."""
    # a thread of gloo's that lets go of the last tensor of a message after the interpreter has begun to end aborts the process
    _groups.clear()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _control_group() -> Any:
    """The gloo group of all ranks by which they exchange messages, whatever backend the default group has; made once."""
    world = dist.group.WORLD
    if id(world) not in _groups or _groups[id(world)][0] is not world:
        _groups.clear()
        # a new default group has new processes behind it; ids are used again, so that the group itself is compared
        _groups[id(world)] = (world, dist.new_group(backend="gloo", timeout=PATIENCE))
    return _groups[id(world)][1]


class _Quiet(logging.Filter):
    """Lets only errors pass: the first rank logs for all of them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR
