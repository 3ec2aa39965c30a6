"""How steps are run: eagerly, compiled, or captured in a CUDA graph. All of them advance the same state by the same law.

`decide` says when compiling or capturing pays: by a table of measured break-even points and never a clock, so that the same call
gives the same bits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from plausible.core import random
from plausible.core.data import ArrayData, Batch, StreamData
from plausible.core.model import Model
from plausible.core.transforms import compiled as compiled_function
from plausible.core.weights import clone, copy_into
from plausible.core.words import log
from plausible.engine.method import Info, Run
from plausible.engine.source import Source

StepMode = Literal["eager", "captured", "compiled", "compiled+captured"]
Step = Callable[[Model, Run[Any], Any, Batch], tuple[Any, Info]]

# Steps above which compiling repays itself on a CPU (docs/performance.md): (weights per model, for one model, for stacked ones).
# Small steps are ruled by overhead, which compiling removes; large ones by arithmetic, which it leaves.
CPU_BREAK_EVEN = ((20_000, 20_000, 4_000), (2_000_000, 40_000, 4_000))
CAPTURE_BREAK_EVEN = 200
CUDA_COMPILE_BREAK_EVEN = 20_000
SINGLE_THREAD_WORK = 10**7  # weights × rows of a step up to which a second thread gains nothing (docs/performance.md)


def has_compiler(device: torch.device) -> bool:
    """Whether `torch.compile` can build kernels for this device."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return False
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def decide(
    compile: Literal["auto"] | bool, *, steps: int, elements: int, members: int | None, device: torch.device, resident: bool
) -> StepMode:
    """How the engine will run `steps` steps of a model with `elements` weights on `device`."""
    if compile not in ("auto", True, False):
        raise ValueError(f"compile must be 'auto', True or False, got {compile!r}")
    if compile is False or device.type not in ("cpu", "cuda"):
        return "eager"
    if device.type == "cuda":
        if compile is True:
            return "compiled+captured" if resident else "compiled"
        if not resident or steps < CAPTURE_BREAK_EVEN:
            return "eager"
        return "compiled+captured" if steps >= CUDA_COMPILE_BREAK_EVEN else "captured"
    if compile is True:
        return "compiled"
    for size, single, stacked in CPU_BREAK_EVEN:
        if elements <= size:
            return "compiled" if steps >= (single if members is None else stacked) else "eager"
    return "eager"


@contextlib.contextmanager
def threads(network: nn.Module, x: Any, *, work: int, device: torch.device) -> Iterator[None]:
    """One thread for steps of small perceptrons on the CPU, as many as PyTorch was told to use for all else."""
    # A second thread gains a small step nothing, and where other programs want the cores too it makes each operation wait for the
    # scheduler. `work`, weights × rows × members, counts multiplications only where all weights are in linear layers and an
    # example is one vector (x [N, inputs], None for streams): other networks keep their threads.
    linear = all(isinstance(m, nn.Linear) or not any(True for _ in m.parameters(recurse=False)) for m in network.modules())
    before = torch.get_num_threads()
    single = device.type == "cpu" and before > 1 and work <= SINGLE_THREAD_WORK and linear
    if not (single and isinstance(x, Tensor) and x.ndim == 2):
        yield
        return
    torch.set_num_threads(1)  # one setting for the whole process, so it is put back
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Stepper(Protocol):
    """Advances a state, which is current after every call."""

    state: Any

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        """Run steps first … first+count−1; `after(done)` is called after each, and ends the segment there by returning True."""


class Eager:
    """The step as it stands."""

    def __init__(self, step: Step, model: Model, run: Run[Any], state: Any, source: Source):
        self.step, self.model, self.run, self.state, self.source = step, model, run, state, source

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        infos = []
        with random.use_compiled(False), torch.no_grad():
            for number, batch in enumerate(self.source.batches(first, count), start=first + 1):
                self.state, info = self.step(self.model, self.run, self.state, batch)
                infos.append(info)
                if after(number):
                    break
        return infos


class Compiled:
    """The whole step as one graph: gather the batch, forward, backward, update, write the new state into the old buffers."""

    def __init__(self, step: Step, model: Model, run: Run[Any], state: Any, source: Source):
        self.state, self.source = state, source

        def whole(state: Any, batch_or_rows: Any) -> Info:
            batch = batch_or_rows if isinstance(batch_or_rows, Batch) else source.data.rows(batch_or_rows)
            new, info = step(model, run, state, batch)
            copy_into(state, new)
            return info

        self.call = compiled_function(whole, resident=isinstance(source.data, ArrayData))

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        infos = []
        # of resident data the graph is given row numbers and gathers the batch itself
        feed: Any = (
            self.source.index_block(first, count).unbind(0) if self.source.minibatch else self.source.batches(first, count)
        )
        with random.use_compiled(True), torch.no_grad():
            for number, item in enumerate(feed, start=first + 1):
                infos.append(self.call(self.state, item))
                if after(number):
                    break
        return infos


class Captured:
    """The step, eager or compiled, in one CUDA graph, with data and batch indices on the device.

    A replay gathers the rows named by `indices[cursor]`, steps, logs its terms into `log[cursor]` and advances the cursor, so that
    nothing crosses the bus between steps.
    """

    LENGTH = 256

    def __init__(self, step: Step, model: Model, run: Run[Any], state: Any, source: Source, *, compiled: bool):
        if not isinstance(source.data, ArrayData):
            raise TypeError("only resident data can be captured")
        self.state, self.source = state, source
        device = source.data.batch.y.device
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self.indices = source.index_block(0, self.LENGTH).clone() if source.minibatch else None
        everything = source.data.batch
        generator = torch.cuda.get_rng_state(device)
        first = everything if self.indices is None else source.data.rows(self.indices[0])
        with torch.no_grad():  # one step on a copy says what is logged, for which the buffers must be there before the capture
            _, info = step(model, run, clone(state), first)
        self.log = {name: torch.zeros((self.LENGTH, *v.shape), dtype=v.dtype, device=device) for name, v in info.items()}

        def whole(state: Any, cursor: Tensor, indices: Tensor | None, entries: Info) -> None:
            where = cursor.view(1)
            batch = everything if indices is None else source.data.rows(indices.index_select(0, where).squeeze(0))
            new, info = step(model, run, state, batch)
            copy_into(state, new)
            for name, value in info.items():
                entries[name].index_copy_(0, where, value.unsqueeze(0))
            cursor.add_(1)

        body = compiled_function(whole, resident=True) if compiled else whole
        snapshot = clone(state)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad():
            # lazily made handles, workspaces and compiled kernels must exist before the capture, which may allocate nothing else
            with torch.cuda.stream(stream):
                for _ in range(3):
                    body(state, self.cursor, self.indices, self.log)
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                body(state, self.cursor, self.indices, self.log)
        copy_into(
            state, snapshot
        )  # the steps that warmed up are undone: the graph holds on to the buffers, not to their values
        torch.cuda.set_rng_state(generator, device)

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        """Replay the graph; `count` is at most LENGTH, and `after` is called once, after the last step."""
        if self.indices is not None:
            self.indices[:count].copy_(self.source.index_block(first, count), non_blocking=True)
        self.cursor.zero_()
        for _ in range(count):
            self.graph.replay()
        after(first + count)
        logged = {name: value[:count].to("cpu", copy=True) for name, value in self.log.items()}
        return [{name: value[i] for name, value in logged.items()} for i in range(count)]


def make(mode: StepMode, step: Step, model: Model, run: Run[Any], state: Any, source: Source) -> tuple[Stepper, StepMode]:
    """A stepper for this mode, or an eager one (with a warning) where that mode is not possible; and the mode that it has."""
    if "compiled" in mode and not has_compiler(model.device):
        log.warning("no C++ compiler found: steps run uncompiled")
        mode = "captured" if "captured" in mode else "eager"
    if mode == "eager":
        return Eager(step, model, run, state, source), "eager"
    snapshot, generators = clone(state), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores.*")  # precision= is the caller's choice
            if "captured" in mode and not isinstance(source.data, StreamData):
                return Captured(step, model, run, state, source, compiled="compiled" in mode), mode
            compiled = Compiled(step, model, run, state, source)
            compiled.advance(0, 1, lambda _: False)  # compile now, on a state that is put back
            return compiled, "compiled"
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        log.warning("this step could not be %s (%s): it runs eagerly", "captured" if "captured" in mode else "compiled", reason)
        log.debug("the reason in full", exc_info=True)
        torch._C._autograd._saved_tensors_hooks_enable()  # which a transform that failed while it was traced has left disabled
        # from the state as it was: the failed attempt may have written into the old one
        return Eager(step, model, run, snapshot, source), "eager"
    finally:
        if "captured" not in mode:  # which has put its own back
            copy_into(state, snapshot)
        torch.set_rng_state(generators)
