"""Threefry-2x32 with 20 rounds: (key, counter) → two random 32-bit words.

A keyed bijection of 64-bit counters whose outputs pass every test of BigCrush (Salmon, Moraes, Dror & Shaw 2011,
"Parallel random numbers: as easy as 1, 2, 3"). One round, on words x₀ and x₁:

    x₀ ← x₀ + x₁ mod 2³²,   x₁ ← rotate(x₁, r) ⊕ x₀,

and after every fourth round the next two of the three key words (k₀, k₁, k₀ ⊕ k₁ ⊕ 0x1BD11BDA) and the number of the
injection are added. There is no state: any number of any stream can be computed alone, on any thread, in any order. The same
rounds are written three times, for three kinds of number: `threefry` (readable; Python integers, int64 arrays and tensors),
`threefry_rows` (NumPy in place) and `threefry_lanes` (int32 tensors, to be compiled).

    uniform:  u = (⌊x / 2⁹⌋ + ½) / 2²³, in (0, 1) without its ends,
    normal:   z = √(−2 log u) · (cos θ, sin θ) with u = ((x₀ mod 2³¹) + ½) / 2³¹ and θ = 2π x₁ / 2³²,

the second by Box & Muller (1958, "A note on the generation of random normal deviates"). Thirty-one bits in u reach |z| = 6.66,
beyond which a standard normal has probability 3·10⁻¹¹. A row of 128 pairs fills 256 numbers: the 128 first members of the
pairs, then the 128 second ones. Both backends make the same words and the same uniforms; their normals differ by rounding in
log, cos and sin (10⁻⁶). On one core of a 2.8 GHz Xeon a normal costs about 10 ns by NumPy, 3 ns compiled, and 4 ns by
`torch.randn`; a call of the compiled kernel costs some 50 µs besides.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
LANES = 128  # pairs of words in a row: a row of counters shares one key and gives 256 numbers

Word = TypeVar("Word", int, np.ndarray, Tensor)


def threefry(k0: Word, k1: Word, x0: Word, x1: Word) -> tuple[Word, Word]:
    """The two words of Threefry-2x32-20 for key (k0, k1) and counter (x0, x1).

    The arguments are integers in [0, 2³²): Python's, or int64 arrays or tensors that broadcast. About 6 µs for
    integers; some 140 elementwise operations for tensors.
    """
    words = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = (x0 + k0) & MASK, (x1 + k1) & MASK
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = (x0 + x1) & MASK
            x1 = ((x1 << rotation) & MASK | (x1 >> (32 - rotation))) ^ x0
        x0 = (x0 + words[(group + 1) % 3]) & MASK
        x1 = (x1 + words[(group + 2) % 3] + (group + 1)) & MASK
    return x0, x1


# Arrays, not scalars, since NumPy converts a Python number anew at each call. (left shift, right shift) per rotation.
_SHIFTS = {r: (np.array(r, np.uint32), np.array(32 - r, np.uint32)) for group in ROTATIONS for r in group}
_LANE = np.arange(LANES, dtype=np.uint32)


def threefry_rows(rows: np.ndarray, x0: np.ndarray, x1: np.ndarray, spare: np.ndarray) -> None:
    """Threefry words of whole rows, written into `x0` and `x1`.

    `rows` uint32 [4, R] holds k₀, k₁, the first lane's counter word and the second counter word of each row;
    `x0`, `x1`, `spare` are uint32 [R, 128], or [R, lanes] for the first lanes alone. 110 NumPy calls, about 0.15 ns each per
    element while they fit the cache.
    """
    k0, k1, first, second = rows[:, :, None]
    words = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    add, left, right, either, differ = np.add, np.left_shift, np.right_shift, np.bitwise_or, np.bitwise_xor
    add(first + k0, _LANE[: x0.shape[1]], x0)
    x1[...] = second + k1
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            up, down = _SHIFTS[rotation]
            add(x0, x1, x0)
            left(x1, up, spare)
            right(x1, down, x1)
            either(x1, spare, x1)
            differ(x1, x0, x1)
        add(x0, words[(group + 1) % 3], x0)
        add(x1, words[(group + 2) % 3] + np.uint32(group + 1), x1)


def threefry_lanes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Threefry words of whole rows as int32 tensors [R, 128], from int32 `rows` [4, R] laid out as above.

    Written for inductor. It copies the expression of a value into each of its uses, so twenty rounds would grow like
    2.5²⁰ (minutes of compiling); `_once` stops that. And it fuses only loops of the same shape: every piece between
    two `_once` must read a key word, else the piece becomes a flat loop of its own and its operands go through memory.
    Hence two rounds per piece, and the two halves of an injection in different pieces.
    """
    k0, k1, first, second = rows[:, :, None].unbind(0)
    words = (k0, k1, k0 ^ k1 ^ PARITY)
    x0 = first + torch.arange(LANES, dtype=torch.int32, device=rows.device) + k0
    x1 = (second + k1).expand(-1, LANES)
    for group in range(5):
        one, two, three, four = ROTATIONS[group % 2]
        x0, x1 = _round(*_round(x0, x1, one), two)
        x0, x1 = _round(*_round(_once(x0), _once(x1), three), four)
        x0, x1 = _once(x0 + words[(group + 1) % 3]), _once(x1)
        x1 = x1 + (words[(group + 2) % 3] + (group + 1))
    return x0, x1


def _round(x0: Tensor, x1: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    x0 = x0 + x1
    carried = (x1 >> (32 - rotation)) & ((1 << rotation) - 1)  # an int32 shift drags the sign along: mask it off
    return x0, ((x1 << rotation) | carried) ^ x0


def _once(x: Tensor) -> Tensor:
    """The same tensor as a view of itself: inductor then computes x once, and reads it from a register."""
    return x.as_strided(x.size(), x.stride())


NUMBERS = 2 * LANES  # numbers made by one row
_CHUNK = 256  # rows NumPy works on at once: three buffers of 128 KiB stay in the second-level cache

_compiled: ContextVar[bool] = ContextVar("plausible_random_compiled", default=False)


@contextlib.contextmanager
def use_compiled(enabled: bool) -> Iterator[None]:
    """Choose, for draws on the CPU inside the block, the compiled kernel (True) or NumPy (False, the default).

    The choice is looked up at each draw, also by a draw inside a compiled step. The first compiled draw of a process
    waits for inductor (4 to 7 s; less from its disk cache); should that fail, NumPy takes over with a warning.
    """
    # a context variable: threads and tasks do not see each other's choice
    token = _compiled.set(bool(enabled))
    try:
        yield
    finally:
        _compiled.reset(token)


def compiled() -> bool:
    return _compiled.get() and not _broken


def fill(kind: str, rows: np.ndarray, lanes: int = LANES) -> Tensor:
    """Numbers of the given kind, float32 [R, 256], for uint32 `rows` [4, R] (see `threefry_rows`).

    NumPy leaves out those of other lanes than the first `lanes`: [R, 2·lanes].
    """
    if compiled() and (made := _fill_compiled(kind, rows)) is not None:
        return made
    transform = {"normal": _normal_numpy, "uniform": _uniform_numpy}[kind]
    count = rows.shape[1]
    out = torch.empty(count, 2 * lanes, dtype=torch.float32)
    numbers = out.numpy().reshape(count, 2, lanes)
    chunk = _CHUNK * LANES // lanes
    # reused for all chunks: they stay in the cache
    x0, x1, spare = np.empty((3, min(count, chunk), lanes), np.uint32)
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        size = part.stop - part.start
        threefry_rows(rows[:, part], x0[:size], x1[:size], spare[:size])
        transform(x0[:size], x1[:size], spare[:size], numbers[part])
    return out


def _normal_numpy(x0: np.ndarray, x1: np.ndarray, spare: np.ndarray, out: np.ndarray) -> None:
    radius, angle = spare.view(np.float32), x0.view(np.float32)
    # 31 bits, so that the view as int32 is not negative
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


_broken = False  # set once, when the compiled kernel fails: from then on every draw is by NumPy


@functools.cache
def _kernel(kind: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    # One dynamic size, the number of rows, so that every n runs the same machine code.
    return torch.compile({"normal": _normal_lanes, "uniform": _uniform_lanes}[kind], dynamic=True, fullgraph=True)


def _fill_compiled(kind: str, rows: np.ndarray) -> Tensor | None:
    global _broken
    count = rows.shape[1]
    if count == 1:  # a size of one would be compiled again, as a constant
        rows = np.repeat(rows, 2, axis=1)
    # No grad and no inference mode, whatever is around us: dynamo guards on both, and would compile again.
    with torch.inference_mode(False), torch.no_grad():
        out = torch.empty(rows.shape[1], NUMBERS, dtype=torch.float32)
        try:
            _kernel(kind)(torch.from_numpy(rows.view(np.int32)), out[:, :LANES], out[:, LANES:])
        except Exception as error:  # there may be no compiler
            _broken = True
            message = f"the compiled noise kernel failed, noise is drawn by NumPy from here on: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None
    return out[:count]


# Each use of a key enciphers with another variation of it, so that a draw never repeats the bits of a derived key.
_TAGS = {"normal": 0, "uniform": 0x2545F491, "fold": 0x6C078965, "epoch": 0x5BD1E995}
_AHEAD = 65536  # numbers computed in one pass of small draws: 256 KiB
_STEPS = 256  # and for no more counters than so many
_STREAMS = 32  # remembered streams: at most 8 MiB in all


def fold_words(k0: Any, k1: Any, datum: Any, tag: str = "fold") -> tuple[Any, Any]:
    """The key words derived from (k0, k1) and a 64-bit datum; integers, int64 arrays or int64 tensors."""
    return threefry(k0, k1 ^ _TAGS[tag], datum & MASK, (datum >> 32) & MASK)


def _fold(key: Tensor, data: Tensor) -> Tensor:
    if key.dim() == 1 and data.dim() == 0:
        return torch.tensor(_folded(*key.tolist(), data.item()), dtype=torch.int64)
    keys, numbers = key.numpy(), data.numpy()
    if keys.nbytes + numbers.nbytes > _KNOWN_BYTES:
        return torch.from_numpy(np.stack(fold_words(keys[..., 0], keys[..., 1], numbers), axis=-1))
    return torch.from_numpy(_folded_arrays(keys.shape, keys.tobytes(), numbers.shape, numbers.tobytes()).copy())


# Chains fold the same few data into the same keys at every transition.
_KNOWN_BYTES = 2**14  # of keys and data whose folds are remembered


@functools.lru_cache(256)
def _folded(k0: int, k1: int, datum: int) -> tuple[int, int]:
    return fold_words(k0, k1, datum)


@functools.lru_cache(64)
def _folded_arrays(keys_shape: tuple[int, ...], keys: bytes, data_shape: tuple[int, ...], data: bytes) -> np.ndarray:
    words = np.frombuffer(keys, np.int64).reshape(keys_shape)
    return np.stack(fold_words(words[..., 0], words[..., 1], np.frombuffer(data, np.int64).reshape(data_shape)), axis=-1)


def _draw(kind: str, key: Tensor, counter: Tensor, n: int) -> Tensor:
    if key.dim() == 1 and counter.dim() == 0 and n > 0:  # one key, the most frequent call: plain integers are fast
        words = key.tolist()
        return _draws(kind, tuple(words), int(counter.item()), [words], [0], n).view(n)
    # not torch's, which would import a library of symbols and takes longer than the numbers
    batch = np.broadcast_shapes(key.shape[:-1], counter.shape)
    keys = key.expand(*batch, 2).reshape(-1, 2).numpy()
    counters = counter.expand(batch).reshape(-1).numpy()
    if len(keys) == 0 or n == 0:
        return torch.empty(*batch, n, dtype=torch.float32)
    offsets = counters - counters[0]
    draws = _draws(kind, (keys.tobytes(), offsets.tobytes()), int(counters[0]), keys, offsets, n)
    return draws.reshape(*batch, n)


@dataclass
class _Stream:
    """Numbers [K, n] for each of some consecutive counters, from `first` on; `asked` is the last one handed out."""

    first: int
    numbers: tuple[Tensor, ...]
    asked: int = 0


_streams: OrderedDict[tuple[Any, ...], _Stream] = OrderedDict()
_lock = threading.Lock()


def _draws(kind: str, name: tuple[Any, ...], position: int, keys: Any, offsets: Any, n: int) -> Tensor:
    """float32 [K, n] for keys [K, 2] at the counters `position` + offsets [K]; `name` stands for keys and offsets."""
    ahead = min(_AHEAD // (len(keys) * _rows(n) * 2 * _lanes(n)), _STEPS)
    if ahead < 2:
        return _numbers(kind, keys, position, 1, offsets, n)[0].contiguous()
    name = (kind, compiled(), n, *name)
    with _lock:
        stream = _streams.pop(name, None)
        step = -1 if stream is None else position - stream.first
        if stream is None or not 0 <= step < len(stream.numbers):
            # two consecutive counters are a pattern; one may be anything
            steps = ahead if stream is not None and step == stream.asked + 1 else 1
            stream, step = _Stream(position, _numbers(kind, keys, position, steps, offsets, n).unbind(0)), 0
        stream.asked = step
        _streams[name] = stream
        if len(_streams) > _STREAMS:
            _streams.popitem(last=False)
        return stream.numbers[step].clone(memory_format=torch.contiguous_format)  # the caller may write into it


def _numbers(kind: str, keys: Any, position: int, steps: int, offsets: Any, n: int) -> Tensor:
    """float32 [steps, K, n] for K keys, at the counters `position` + step + offset."""
    k0, k1 = np.asarray(keys, np.int64).T & MASK
    counters = position + np.arange(steps)[:, None] + np.asarray(offsets, np.int64)
    high = counters >> 32
    if high.any():  # the second counter word holds 32 bits: past them, each 2³² counters have a key of their own
        c0, c1 = fold_words(k0, k1, high, tag="epoch")
        k0, k1 = np.where(high == 0, k0, c0), np.where(high == 0, k1, c1)
    rows = np.empty((4, *counters.shape, _rows(n)), np.uint32)
    rows[0] = k0[..., None]
    rows[1] = (k1 ^ _TAGS[kind])[..., None]
    rows[2] = np.arange(0, _rows(n) * LANES, LANES)
    rows[3] = (counters & MASK)[..., None]
    return fill(kind, rows.reshape(4, -1), _lanes(n)).view(*counters.shape, -1)[..., :n]


def _rows(n: int) -> int:
    return -(-n // NUMBERS)


def _lanes(n: int) -> int:
    """How many lanes are needed: of a single row the first few, in whole vectors of a processor, so that bits stay the same."""
    return min(LANES, -(-n // 16) * 16)


def _fold_shape(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], data.shape), 2)


def _draw_shape(key: Tensor, counter: Tensor, n: int) -> Tensor:
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], counter.shape), n, dtype=torch.float32)


def _batched(name: str) -> Any:
    """The vmap rule: put the mapped axes first, line the others up behind them, and call once."""

    def rule(_info: Any, in_dims: tuple[int | None, ...], key: Tensor, other: Tensor, *rest: int) -> tuple[Tensor, int]:
        # unmapped arguments broadcast
        key = key.unsqueeze(0) if in_dims[0] is None else key.movedim(in_dims[0], 0)
        other = other.unsqueeze(0) if in_dims[1] is None else other.movedim(in_dims[1], 0)
        missing = key.dim() - 1 - other.dim()
        other = other[(slice(None), *[None] * max(missing, 0))]
        key = key[(slice(None), *[None] * max(-missing, 0))]
        return getattr(torch.ops.plausible, name)(key, other, *rest), 0

    return rule


# Registered at the lowest level: `torch.library.custom_op` would forbid the compiled kernel inside the implementation.
_library = torch.library.Library("plausible", "DEF")
for _name, _arguments, _implementation, _shape in (
    ("fold", "Tensor key, Tensor data", _fold, _fold_shape),
    ("normal", "Tensor key, Tensor counter, int n", functools.partial(_draw, "normal"), _draw_shape),
    ("uniform", "Tensor key, Tensor counter, int n", functools.partial(_draw, "uniform"), _draw_shape),
):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"plausible::{_name}", _shape, lib=_library)
    torch.library.register_vmap(f"plausible::{_name}", _batched(_name), lib=_library)
