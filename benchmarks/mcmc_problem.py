"""The posterior that chains are timed on: 500 rows, 10 inputs, one layer of 50 tanh units, 601 weights, in NumPy alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ROWS, INPUTS, HIDDEN = 500, 10, 50
SIZE = HIDDEN * INPUTS + 2 * HIDDEN + 1
NOISE = 0.1
"""The standard deviation of the noise, in the data and in the likelihood; weights have N(0, 1) priors."""
SHAPES = ((HIDDEN, INPUTS), (HIDDEN,), (1, HIDDEN), (1,))
"""Weights of the first layer, its biases, weights of the second, its bias: the order of positions."""


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs `[500, 10]`, targets `[500, 1]`, and the 50 inputs at which f(x) is watched; float32."""
    draw = np.random.default_rng(0)
    x, watched = draw.standard_normal((ROWS, INPUTS)), draw.standard_normal((50, INPUTS))
    direction = draw.standard_normal(INPUTS)
    y = np.sin(x @ direction / np.linalg.norm(direction))
    y = (y - y.mean()) / y.std() + NOISE * draw.standard_normal(ROWS)
    return x.astype(np.float32), y[:, None].astype(np.float32), watched.astype(np.float32)


def unpack(position: Any) -> list[Any]:
    """`[..., 601]` → the four arrays of weights with the same leading axes."""
    found, start = [], 0
    for shape in SHAPES:
        stop = start + math.prod(shape)
        found.append(position[..., start:stop].reshape(*position.shape[:-1], *shape))
        start = stop
    return found


def outputs(positions: np.ndarray, x: np.ndarray) -> np.ndarray:
    """f(x) `[..., rows]` at positions `[..., 601]`."""
    first, bias, second, last = unpack(np.asarray(positions, dtype=np.float32))
    hidden = np.tanh(np.einsum("ri,...hi->...rh", x, first, optimize=True) + bias[..., None, :])
    return (hidden @ np.swapaxes(second, -1, -2) + last[..., None, :])[..., 0]


def start(chains: int, seed: int = 1) -> np.ndarray:
    """Where chains begin: `[chains, 601]`, the scale of PyTorch's initial weights."""
    draw = np.random.default_rng(seed)
    parts = []
    for shape, fan in zip(SHAPES, (INPUTS, INPUTS, HIDDEN, HIDDEN)):
        parts.append(draw.uniform(-1, 1, (chains, math.prod(shape))) / np.sqrt(fan))
    return np.concatenate(parts, axis=-1).astype(np.float32)
