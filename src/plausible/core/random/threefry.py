"""Threefry-2x32 with 20 rounds: (key, counter) → two random 32-bit words.

A keyed bijection of 64-bit counters whose outputs pass every test of BigCrush (Salmon, Moraes, Dror & Shaw 2011,
"Parallel random numbers: as easy as 1, 2, 3"). One round, on words x₀ and x₁:

    x₀ ← x₀ + x₁ mod 2³²,   x₁ ← rotate(x₁, r) ⊕ x₀,

and after every fourth round the next two of the three key words (k₀, k₁, k₀ ⊕ k₁ ⊕ 0x1BD11BDA) and the number of the
injection are added. There is no state: any number of any stream can be computed alone, on any thread, in any order.

The same rounds are written three times, for three kinds of number: `threefry` (readable; Python integers, int64
arrays and tensors), `threefry_rows` (NumPy in place) and `threefry_lanes` (int32 tensors, to be compiled).
"""

from __future__ import annotations

from typing import TypeVar

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
    `x0`, `x1`, `spare` are uint32 [R, 128]. 110 NumPy calls, about 0.15 ns each per element while they fit the cache.
    """
    k0, k1, first, second = rows[:, :, None]
    words = (k0, k1, k0 ^ k1 ^ np.uint32(PARITY))
    add, left, right, either, differ = np.add, np.left_shift, np.right_shift, np.bitwise_or, np.bitwise_xor
    add(first + k0, _LANE, x0)
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
