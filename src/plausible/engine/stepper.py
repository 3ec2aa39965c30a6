"""How steps are run: eagerly, compiled, or captured in a CUDA graph. All of them advance the same state by the same law."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import ArrayData, Batch, StreamData
from plausible.core.model import Model
from plausible.core.transforms import compiled as compiled_function
from plausible.core.weights import clone, copy_into
from plausible.engine.method import Run
from plausible.engine.policy import Mode, has_compiler
from plausible.engine.source import Source

log = logging.getLogger("plausible")
Step = Callable[[Model, Run[Any], Any, Batch], tuple[Any, dict[str, Tensor]]]
Info = dict[str, Tensor]


class Stepper(Protocol):
    """Advances a state; `state` is current after every call."""

    state: Any

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        """Run steps first … first+count−1; `after(done)` is called behind each and ends the run by returning True."""
        ...


class Eager:
    """The step as it stands."""

    def __init__(self, step: Step, model: Model, run: Run[Any], state: Any, source: Source):
        self.step, self.model, self.run, self.state, self.source = step, model, run, state, source

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        """Run the steps one by one."""
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
        """Run the steps; the gather is part of the graph where the data are resident."""
        infos = []
        feed = self.source.rows(first, count) if self.source.minibatch else self.source.batches(first, count)
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
        probe = clone(state)
        everything = source.data.batch
        generator = torch.cuda.get_rng_state(device)
        first = everything if self.indices is None else source.data.rows(self.indices[0])
        with torch.no_grad():
            _, info = step(model, run, probe, first)
        self.terms = list(info)
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
            with torch.cuda.stream(stream):
                for _ in range(3):
                    body(state, self.cursor, self.indices, self.log)
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                body(state, self.cursor, self.indices, self.log)
        copy_into(state, snapshot)
        torch.cuda.set_rng_state(generator, device)

    def advance(self, first: int, count: int, after: Callable[[int], bool]) -> list[Info]:
        """Replay; `count` is at most LENGTH, and `after` is asked once, behind the last step."""
        if self.indices is not None:
            self.indices[:count].copy_(self.source.index_block(first, count), non_blocking=True)
        self.cursor.zero_()
        for _ in range(count):
            self.graph.replay()
        after(first + count)
        logged = {name: value[:count].to("cpu", copy=True) for name, value in self.log.items()}
        return [{name: value[i] for name, value in logged.items()} for i in range(count)]


def make(mode: Mode, step: Step, model: Model, run: Run[Any], state: Any, source: Source) -> tuple[Stepper, Mode]:
    """A stepper for this mode, or an eager one, said once, where compiling or capturing is not possible."""
    if mode == "eager":
        return Eager(step, model, run, state, source), "eager"
    device = model.device
    if "compiled" in mode and not has_compiler(device):
        log.warning("no C++ compiler found: steps run uncompiled")
        mode = "captured" if "captured" in mode else "eager"
    if mode == "eager":
        return Eager(step, model, run, state, source), "eager"
    snapshot = clone(state)
    generators = torch.get_rng_state()
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores.*")
    try:
        if "captured" in mode and not isinstance(source.data, StreamData):
            return Captured(step, model, run, state, source, compiled="compiled" in mode), mode
        compiled = Compiled(step, model, run, state, source)
        compiled.advance(0, 1, lambda _: False)  # compile now, on a state that is put back
        return compiled, "compiled"
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning(
            "this step could not be %s (%s): it runs eagerly", "captured" if "captured" in mode else "compiled", reason[:200]
        )
        log.debug("the reason in full", exc_info=True)
        return Eager(step, model, run, snapshot, source), "eager"
    finally:
        quiet.__exit__(None, None, None)
        if "captured" not in mode:
            copy_into(state, snapshot)
        torch.set_rng_state(generators)
