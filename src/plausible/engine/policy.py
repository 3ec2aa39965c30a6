"""When compiling or capturing pays: a table of measured break-even points, never a clock.

The decision is a pure function of the number of steps, the size of the model, the number of stacked replicas and the device, so
that the same call gives the same bits.
"""

from __future__ import annotations

import os
import shutil
from typing import Literal

import torch

Mode = Literal["eager", "captured", "compiled", "compiled+captured"]

# Steps above which compiling repays itself on a CPU (docs/performance.md): (weights per model, for one model, for stacked ones).
# Small steps are ruled by overhead, which compiling removes; large ones by arithmetic, which it leaves.
CPU_BREAK_EVEN = ((20_000, 20_000, 4_000), (2_000_000, 40_000, 4_000))
CAPTURE_BREAK_EVEN = 200
CUDA_COMPILE_BREAK_EVEN = 20_000


def has_compiler(device: torch.device) -> bool:
    """Whether `torch.compile` can build kernels for this device."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return False
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def decide(
    compile: Literal["auto"] | bool,
    *,
    steps: int,
    elements: int,
    members: int | None,
    device: torch.device,
    resident: bool,
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
