"""When compiling or capturing pays: a table of measured break-even points, never a clock.

The decision is a pure function of the number of steps, the size of the model, the number of stacked replicas and the device, so
that the same call gives the same bits. Likewise how many threads a step on the CPU gets.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

Mode = Literal["eager", "captured", "compiled", "compiled+captured"]

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
) -> Mode:
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
    """One thread for steps of small perceptrons on the CPU, as many as PyTorch was told to use for all else.

    A second thread gains a small step nothing, and where other programs want the cores too it makes each operation wait for the
    scheduler. `work` is weights × rows × members, which counts multiplications only where all weights are in linear layers and an
    example is one vector (x `[N, inputs]`, None for streams); other networks keep their threads.
    PyTorch's setting is one for the process; it is put back at the end.
    """
    linear = all(isinstance(m, nn.Linear) or not any(True for _ in m.parameters(recurse=False)) for m in network.modules())
    before = torch.get_num_threads()
    single = device.type == "cpu" and before > 1 and work <= SINGLE_THREAD_WORK and linear
    if not (single and isinstance(x, Tensor) and x.ndim == 2):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
