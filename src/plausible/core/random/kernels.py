"""Threefry words → float32 uniforms and normals, by NumPy or by a kernel that inductor compiles.

    uniform:  u = (⌊x / 2⁹⌋ + ½) / 2²³, in (0, 1) without its ends,
    normal:   z = √(−2 log u) · (cos θ, sin θ) with u = ((x₀ mod 2³¹) + ½) / 2³¹ and θ = 2π x₁ / 2³²,

the second by Box & Muller (1958, "A note on the generation of random normal deviates"). Thirty-one bits in u reach
|z| = 6.66, beyond which a standard normal has probability 3·10⁻¹¹. A row of 128 pairs fills 256 numbers: the 128 first
members of the pairs, then the 128 second ones.

Both backends make the same words and the same uniforms; their normals differ by rounding in log, cos and sin (10⁻⁶).
On one core of a 2.8 GHz Xeon a normal costs about 10 ns by NumPy, 3 ns compiled, and 4 ns by `torch.randn`; a call of the
compiled kernel costs some 50 µs besides.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from .threefry import LANES, threefry_lanes, threefry_rows

NUMBERS = 2 * LANES  # numbers made by one row
_CHUNK = 256  # rows NumPy works on at once: three buffers of 128 KiB stay in the second-level cache

_compiled: ContextVar[bool] = ContextVar("plausible_random_compiled", default=False)


@contextlib.contextmanager
def use_compiled(enabled: bool) -> Iterator[None]:
    """Choose, for draws on the CPU inside the block, the compiled kernel (True) or NumPy (False, the default).

    The choice is looked up at each draw, also by a draw inside a compiled step. The first compiled draw of a process
    waits for inductor (4 to 7 s; less from its disk cache); should that fail, NumPy takes over with a warning.
    """
    token = _compiled.set(bool(enabled))
    try:
        yield
    finally:
        _compiled.reset(token)


def compiled() -> bool:
    """Whether draws on the CPU use the compiled kernel here and now."""
    return _compiled.get() and not _broken


def fill(kind: str, rows: np.ndarray) -> Tensor:
    """Numbers of the given kind, float32 [R, 256], for uint32 `rows` [4, R] (see `threefry_rows`)."""
    if compiled():
        with contextlib.suppress(_KernelFailedError):
            return _fill_compiled(kind, rows)
    return _fill_numpy(kind, rows)


def _fill_numpy(kind: str, rows: np.ndarray) -> Tensor:
    transform = {"normal": _normal_numpy, "uniform": _uniform_numpy}[kind]
    count = rows.shape[1]
    out = torch.empty(count, NUMBERS, dtype=torch.float32)
    numbers = out.numpy().reshape(count, 2, LANES)
    x0, x1, spare = np.empty((3, min(count, _CHUNK), LANES), np.uint32)
    for start in range(0, count, _CHUNK):
        part = slice(start, min(start + _CHUNK, count))
        size = part.stop - part.start
        threefry_rows(rows[:, part], x0[:size], x1[:size], spare[:size])
        transform(x0[:size], x1[:size], spare[:size], numbers[part])
    return out


def _normal_numpy(x0: np.ndarray, x1: np.ndarray, spare: np.ndarray, out: np.ndarray) -> None:
    radius, angle = spare.view(np.float32), x0.view(np.float32)
    np.bitwise_and(x0, np.uint32(0x7FFFFFFF), x0)
    np.multiply(x0.view(np.int32), np.float32(2.0**-31), radius, casting="unsafe", dtype=np.float32)
    np.add(radius, np.float32(2.0**-32), radius)
    np.log(radius, radius)
    np.multiply(radius, np.float32(-2.0), radius)
    np.sqrt(radius, radius)
    np.multiply(x1.view(np.int32), np.float32(math.pi * 2.0**-31), angle, casting="unsafe", dtype=np.float32)
    np.cos(angle, out[:, 0])
    np.sin(angle, out[:, 1])
    np.multiply(out, radius[:, None], out)


def _uniform_numpy(x0: np.ndarray, x1: np.ndarray, spare: np.ndarray, out: np.ndarray) -> None:
    for column, word in enumerate((x0, x1)):
        np.right_shift(word, np.uint32(9), spare)
        np.multiply(spare.view(np.int32), np.float32(2.0**-23), out[:, column], casting="unsafe", dtype=np.float32)
    np.add(out, np.float32(2.0**-24), out)


def _normal_lanes(rows: Tensor, first: Tensor, second: Tensor) -> None:
    x0, x1 = threefry_lanes(rows)
    radius = torch.sqrt(-2.0 * torch.log((x0 & 0x7FFFFFFF).to(torch.float32) * 2.0**-31 + 2.0**-32))
    angle = x1.to(torch.float32) * 1.4629180792671596e-09  # π / 2³¹; a literal, or it would become an argument
    first.copy_(radius * torch.cos(angle))
    second.copy_(radius * torch.sin(angle))


def _uniform_lanes(rows: Tensor, first: Tensor, second: Tensor) -> None:
    x0, x1 = threefry_lanes(rows)
    first.copy_(((x0 >> 9) & 0x7FFFFF).to(torch.float32) * 2.0**-23 + 2.0**-24)
    second.copy_(((x1 >> 9) & 0x7FFFFF).to(torch.float32) * 2.0**-23 + 2.0**-24)


class _KernelFailedError(Exception):
    """The compiled kernel could not be built or called."""


_broken = False  # set once, when the compiled kernel fails: from then on every draw is by NumPy


@functools.cache
def _kernel(kind: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    # One dynamic size, the number of rows, so that every n runs the same machine code.
    return torch.compile({"normal": _normal_lanes, "uniform": _uniform_lanes}[kind], dynamic=True, fullgraph=True)


def _fill_compiled(kind: str, rows: np.ndarray) -> Tensor:
    global _broken
    count = rows.shape[1]
    if count == 1:  # a size of one would be compiled again, as a constant
        rows = np.repeat(rows, 2, axis=1)
    # No grad and no inference mode, whatever is around us: dynamo guards on both, and would compile again.
    with torch.inference_mode(False), torch.no_grad():
        out = torch.empty(rows.shape[1], NUMBERS, dtype=torch.float32)
        try:
            _kernel(kind)(torch.from_numpy(rows.view(np.int32)), out[:, :LANES], out[:, LANES:])
        except Exception as error:
            _broken = True
            message = f"the compiled noise kernel failed, noise is drawn by NumPy from here on: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            raise _KernelFailedError from error
    return out[:count]
