"""Data-parallel steps: every rank sees its part of each batch, and the gradients are averaged.

    ∇ = Σ_r b_r ∇_r / Σ_r b_r,   ∇_r the gradient of the log joint estimated from the b_r rows of rank r,

which is the gradient of the whole batch, also for parts of different size, since each estimate is scaled by N/b_r. The state is
the same on all ranks: they start from the weights of the first, see the same gradient and draw the same noise.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import Batch, StreamData, num_rows
from plausible.core.model import Joint, Model
from plausible.core.optimisers import transformed
from plausible.core.words import log
from plausible.engine.checkpoint import Checkpoint, Resumed
from plausible.engine.method import Method, Plan
from plausible.engine.ranks import Outcome, Ranks, SplitMembers, Team, Vote, count_votes, leave
from plausible.engine.source import Source, share
from plausible.engine.stepper import StepMode


class DividedBatches(Ranks):
    """One chain on all ranks. Rank 0 keeps the draws and writes the checkpoints; the others hold the same state."""

    divides = True

    def __init__(self, method: Method):
        super().__init__(method)
        self.keeps = self.rank == 0
        self._sum: _Sum | None = None
        self._seed, self._calls = 0, (0, 0)

    def seed(self, seed: int) -> int:
        """The same on all ranks, whose methods draw the same noise."""
        self._seed = seed
        return seed

    def noise_seed(self) -> int:
        """A seed for the network's own noise: a function of seed, rank, step and how often it was asked in this step."""
        step, calls = self._calls
        self._calls = (self.step, calls + 1 if step == self.step else 0)
        # hashes of tuples of whole numbers are the same in every process
        return hash((self._seed, self.rank, *self._calls)) & (2**63 - 1)

    def mode(self, mode: StepMode) -> StepMode:
        if mode != "eager":
            log.info("steps of a data-parallel run are not compiled: gradients are averaged in each of them")
        return "eager"

    def model(self, model: Model) -> Model:
        if model.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(model.device)!r}: ranks share gradients on 'cpu' and 'cuda' only")
        self._sum = _Sum(model, self)
        return SharedModel(**{f.name: getattr(model, f.name) for f in fields(model) if f.init}, team=self)

    def checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        folder = super().checkpoint(checkpoint)
        return folder if self.rank == 0 else None  # the state is the same everywhere

    def ready(self, source: Source, plan: Plan, resumed: Resumed | None) -> Resumed | None:
        """Check that the ranks' batches are parts of one, and resume all from the checkpoint of the first."""
        if source.stream:
            self._check_stream(source, plan)
        else:
            share(plan.batch_size or source.data.num_data, self.rank, self.size)  # says why not
        assert self._sum is not None
        device = self._sum.buffer.device
        on_gpu = device.type == "cuda"
        gpus = self.exchange((socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)) if on_gpu else None)
        if None not in gpus and len(set(gpus)) == self.size:
            self._sum.group = None  # NCCL; it cannot serve ranks that share a GPU
        from_first = [resumed]
        dist.broadcast_object_list(from_first, src=0, group=self.group)
        self._sum.running = True
        return from_first[0]

    def _check_stream(self, source: Source, plan: Plan) -> None:
        """Each rank reads its own batches (a DistributedSampler, shards of an iterable), or all read the same and divide them."""
        sampler, data = source.sampler, source.data
        assert isinstance(data, StreamData)
        if sampler is not None and (sampler.num_replicas, sampler.rank) != (self.size, self.rank):
            raise ValueError(
                f"the loader's DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, "
                f"this is rank {self.rank} of {self.size}"
            )
        note = {"steps": plan.steps, "sampler": sampler is not None, "first": _number(source.peek().y)}
        notes = self.exchange(note)
        if len({note["steps"] for note in notes}) > 1:
            raise ValueError(
                f"the ranks' loaders differ in length: {[note['steps'] for note in notes]} steps in all; give each the same number "
                "of batches, say by DistributedSampler(…, drop_last=True)"
            )
        iterable = not isinstance(data.source, DataLoader) or isinstance(data.source.dataset, IterableDataset)
        same = len({note["first"] for note in notes}) == 1
        if not same and not iterable and not note["sampler"]:
            raise ValueError(
                "the ranks' loaders give different batches: let all of them give the same (the engine divides each batch), "
                "or give each its own rows by a DistributedSampler"
            )
        if note["sampler"] or not same:
            source.divided = True
            read = getattr(data.source, "dataset", data.source)
            if iterable and hasattr(read, "__len__") and len(read) == data.num_data:
                raise ValueError(
                    "the ranks' loaders give different batches: pass num_data=, the number of examples on all ranks together"
                )
            if self._folder is not None and (source.generator is not None or not note["sampler"]):
                raise ValueError(
                    "checkpoint: the position in a loader that differs between ranks cannot be kept, unless a DistributedSampler "
                    "decides its order; use one, without generator=, or leave checkpoint out"
                )

    # -----------------------------------------------------------------------------------------------------------------

    def meet(self, vote: Vote, state: Any) -> Outcome:
        """As for all ranks; and all must have come to the same weights."""
        assert self._sum is not None
        # ranks that are still inside a segment would wait here for gradients that do not come
        at_boundary, have_failed = self._sum.beat(boundary=True)
        if at_boundary + have_failed < self.size:
            raise RuntimeError(f"by step {vote.done} the ranks have called model.gradient or log_joint unequally often")
        held = {"weights": getattr(state, "weights", {}), "buffers": getattr(state, "buffers", {})}
        votes = self._votes(replace(vote, fingerprint=_number(held)))
        if len({vote.fingerprint for vote in votes}) > 1:
            raise RuntimeError(
                f"the ranks came to different weights by step {vote.done}: the step of {type(self.method).__name__} must take "
                "gradients by model.gradient, or values by model.log_joint, which are averaged over ranks, and noise from its key"
            )
        verdict = count_votes(votes)
        self._sum.running = not verdict.over
        return verdict

    def _fail(self, error: BaseException) -> None:
        if self._sum is not None and self._sum.running:
            self._sum.leave()
        super()._fail(error)

    def average(self, rows: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ_r rows_r · values_r / Σ_r rows_r, by name: weights' gradients, buffers and "total"."""
        assert self._sum is not None
        return self._sum.average(rows, values)


@dataclass(frozen=True, eq=False)
class SharedModel(Model):
    """A model that sees one rank's part of a batch and answers for the whole of it."""

    team: Any = None

    def gradient(self, weights: Mapping[str, Tensor], batch: Batch, **settings: Any) -> Joint:
        """The gradient of `Model`, averaged over ranks, and so are running statistics (batch norm itself sees one rank's rows)."""
        self._refuse_transforms()
        with self._own_noise():
            joint = super().gradient(weights, batch, **settings)
        moving = {f"buffer {name}": value for name, value in joint.buffers.items() if value.is_floating_point()}
        means = self.team.average(num_rows(batch.x), {**joint.grads, **moving, "total": joint.log_likelihood})
        total = means["total"]
        value = total + joint.log_prior
        return joint._replace(
            value=value if self.temperature == 1.0 else value / self.temperature,
            log_likelihood=total,
            grads={name: means[name] for name in joint.grads},
            buffers={name: means.get(f"buffer {name}", value) for name, value in joint.buffers.items()},
        )

    def log_joint(self, weights: Mapping[str, Tensor], batch: Batch, *, train: bool = False) -> Tensor:
        """The log joint of the whole batch; it cannot be differentiated."""
        self._refuse_transforms()
        with self._own_noise():
            value = super().log_joint(weights, batch, train=train)
        if value.requires_grad:
            raise TypeError("log_joint of a data-parallel run has no gradient over all ranks: use model.gradient")
        return self.team.average(num_rows(batch.x), {"total": value})["total"]

    def _refuse_transforms(self) -> None:
        if transformed():
            raise TypeError(
                "a data-parallel step cannot be inside torch.func or torch.compile, where ranks cannot talk to each other; "
                "set PLAUSIBLE_RANKS=alone to fit in each process by itself"
            )

    def _own_noise(self) -> Any:
        """Dropout differs between ranks; afterwards torch's generators stand where they stood, on all of them."""
        return random.isolated(self.team.noise_seed(), self.device)


class _Sum:
    """The one collective of a data-parallel step: a sum over ranks of a buffer that always has the same layout.

    Behind gradients, buffers, the log-likelihood and the number of rows stand two flags. A rank that has failed goes on adding
    zeros and raises `failed`, until the others come to a `boundary` (where they will hear of it) or have failed too. So
    nobody waits for a rank that does not come, and nobody reads a flag, which would hold up a GPU, within a segment.
    """

    def __init__(self, model: Model, team: DividedBatches):
        self.team, self.running = team, False
        first = next(iter(model.initial.values()))
        moving = {f"buffer {name}": value for name, value in model.buffers.items() if value.is_floating_point()}
        like = {**model.initial, **moving, "total": first.new_empty(())}
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in like.values()), torch.float32)
        self.sizes = {name: value.numel() for name, value in like.items()}
        self.shapes = {name: (value.shape, value.dtype) for name, value in like.items()}
        self.buffer = torch.zeros(sum(self.sizes.values()) + 3, dtype=dtype, device=first.device)
        self.parts = dict(zip(like, self.buffer[:-3].split(list(self.sizes.values()))))
        self.group: Any = team.group

    def _reduce(self) -> None:
        try:
            dist.all_reduce(self.buffer, group=self.group)
        except RuntimeError as error:
            raise self.team._lost(error) from error

    def average(self, rows: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.buffer.zero_()
        names = list(values)
        # one call for all tensors: a copy for each would cost a kernel launch each, as much as the sum itself
        torch._foreach_copy_([self.parts[name] for name in names], [values[name].reshape(-1) for name in names])
        self.buffer[:-3].mul_(rows)
        self.buffer[-3] = rows
        self._reduce()
        means = self.buffer[:-3] / self.buffer[-3]
        parts = dict(zip(self.sizes, means.split(list(self.sizes.values()))))
        return {name: parts[name].view(self.shapes[name][0]).to(self.shapes[name][1]) for name in names}

    def beat(self, *, boundary: bool = False, failed: bool = False) -> tuple[int, int]:
        """Take part in the sum with nothing to add; returns how many ranks are at a boundary and how many have failed."""
        self.buffer.zero_()
        self.buffer[-2:] = torch.tensor([float(boundary), float(failed)])
        self._reduce()
        at_boundary, have_failed = self.buffer[-2:].tolist()
        return int(at_boundary), int(have_failed)

    def leave(self) -> None:
        """Go on taking part in sums, so that no rank waits in vain, until the others have heard that this one has failed."""
        while True:
            at_boundary, have_failed = self.beat(failed=True)
            if at_boundary or have_failed == self.team.size:
                return


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _number(values: Any) -> int:
    """A number that changes with any bit of a tree of tensors."""
    total = 0
    for place, leaf in enumerate(tree.tensors(values), start=1):
        if leaf.dtype in (torch.complex64, torch.complex128):
            leaf = torch.view_as_real(leaf)
        words = leaf.detach().contiguous().reshape(-1).view(_WORDS[leaf.element_size()])
        # whole numbers add up in any order, and a swap of two tensors shows
        total += place * int(words.sum(dtype=torch.int64))
    return total


PATIENCE = 10.0
"""Seconds after which a process says that it waits for the others."""


@contextlib.contextmanager
def _not_in_silence() -> Iterator[None]:
    """Variables that an earlier torchrun left in the environment would make this process wait for others that never come."""
    others, place = int(os.environ["WORLD_SIZE"]) - 1, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    message = (
        f"waiting for {others} other processes at {place}, as RANK and WORLD_SIZE in the environment say: without torchrun, "
        "unset them, or set PLAUSIBLE_RANKS=alone"
    )
    told = threading.Timer(PATIENCE, log.warning, (message,))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def assemble(method: Method) -> Team:
    """The processes that run this fit together: those of `torch.distributed`, where there are several, or this one alone.

    Under `torchrun` (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) the process group is initialised where that has not
    been done: gloo for the CPU, NCCL for CUDA. PLAUSIBLE_RANKS=alone in the environment makes every process fit for itself.
    """
    wish = os.environ.get("PLAUSIBLE_RANKS", "together")
    if wish not in ("together", "alone"):
        raise ValueError(f"PLAUSIBLE_RANKS={wish!r} in the environment: use 'together' (the default) or 'alone'")
    if wish == "alone" or not dist.is_available():
        return Team()
    if not dist.is_initialized():
        launched = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        if not launched or int(os.environ["WORLD_SIZE"]) < 2:
            return Team()
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        with _not_in_silence():
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        atexit.register(leave)
    if dist.get_world_size() < 2:
        return Team()
    if method.members is None:
        return DividedBatches(method)
    if not hasattr(method, "part"):
        raise TypeError(
            f"{type(method).__name__} has members but no part(numbers) that says how to run some of them: it cannot be split "
            "over ranks; set PLAUSIBLE_RANKS=alone to run it whole in every process"
        )
    return SplitMembers(method)
