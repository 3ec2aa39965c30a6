"""The operators `plausible::normal`, `plausible::uniform` and `plausible::fold` for the CPU.

    normal(Tensor key, Tensor counter, int n) -> Tensor,   key int64 [*K, 2], counter int64 [*K] → float32 [*K, n],

where the batch axes *K of key and counter broadcast. PyTorch sees one opaque operator: `torch.compile(fullgraph=True)`
puts a call into its graph rather than hundreds of integer operations, `torch.func.vmap` turns it into one batched call,
and it is a constant to `torch.func.grad`. The i-th number depends on (key, counter, i) alone, not on n.

Small draws are made ahead: after two calls with consecutive counters for one key, the numbers of the next counters are
computed in the same pass and kept, since the cost of a small pass is that of its 110 NumPy calls. This changes no bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels import NUMBERS, compiled, fill
from .threefry import LANES, MASK, threefry

# Each use of a key enciphers with another variation of it, so that a draw never repeats the bits of a derived key.
_TAGS = {"normal": 0, "uniform": 0x2545F491, "fold": 0x6C078965, "epoch": 0x5BD1E995}
_AHEAD = 65536  # numbers computed in one pass of small draws: 256 KiB
_STREAMS = 32  # remembered streams: at most 8 MiB in all


def fold_words(k0: Any, k1: Any, datum: Any, tag: str = "fold") -> tuple[Any, Any]:
    """The key words derived from (k0, k1) and a 64-bit datum; integers, int64 arrays or int64 tensors."""
    return threefry(k0, k1 ^ _TAGS[tag], datum & MASK, (datum >> 32) & MASK)


def _fold(key: Tensor, data: Tensor) -> Tensor:
    if key.dim() == 1 and data.dim() == 0:
        k0, k1 = key.tolist()
        return torch.tensor(fold_words(k0, k1, data.item()), dtype=torch.int64)
    keys = key.numpy()
    return torch.from_numpy(np.stack(fold_words(keys[..., 0], keys[..., 1], data.numpy()), axis=-1))


def _draw(kind: str, key: Tensor, counter: Tensor, n: int) -> Tensor:
    if key.dim() == 1 and counter.dim() == 0 and n > 0:  # one key, the most frequent call: plain integers are fast
        words = key.tolist()
        return _draws(kind, tuple(words), int(counter.item()), [words], [0], n).view(n)
    batch = torch.broadcast_shapes(key.shape[:-1], counter.shape)
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
    ahead = _AHEAD // (len(keys) * _rows(n) * NUMBERS)
    if ahead < 2:
        return _numbers(kind, keys, position, 1, offsets, n)[0].contiguous()
    name = (kind, compiled(), n, *name)
    with _lock:
        stream = _streams.pop(name, None)
        step = -1 if stream is None else position - stream.first
        if stream is None or not 0 <= step < len(stream.numbers):
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
    return fill(kind, rows.reshape(4, -1)).view(*counters.shape, -1)[..., :n]


def _rows(n: int) -> int:
    return -(-n // NUMBERS)


def _normal(key: Tensor, counter: Tensor, n: int) -> Tensor:
    return _draw("normal", key, counter, n)


def _uniform(key: Tensor, counter: Tensor, n: int) -> Tensor:
    return _draw("uniform", key, counter, n)


def _fold_shape(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], data.shape), 2)


def _draw_shape(key: Tensor, counter: Tensor, n: int) -> Tensor:
    return key.new_empty(*torch.broadcast_shapes(key.shape[:-1], counter.shape), n, dtype=torch.float32)


def _batched(name: str) -> Any:
    """The vmap rule: put the mapped axes first, line the others up behind them, and call once."""

    def rule(_info: Any, in_dims: tuple[int | None, ...], key: Tensor, other: Tensor, *rest: int) -> tuple[Tensor, int]:
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
    ("normal", "Tensor key, Tensor counter, int n", _normal, _draw_shape),
    ("uniform", "Tensor key, Tensor counter, int n", _uniform, _draw_shape),
):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _implementation, "CPU")
    torch.library.register_fake(f"plausible::{_name}", _shape, lib=_library)
    torch.library.register_vmap(f"plausible::{_name}", _batched(_name), lib=_library)
