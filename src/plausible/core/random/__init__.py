"""Randomness as a pure function of a key and a counter.

    noise = f(key, counter),   key = two 32-bit words derived from a seed,   counter = the number of the step

On the CPU the noise comes from a counter-based generator (`threefry.py`), so the same seed gives the same bits, replicas and
ranks fold their index into the key, a resumed run just goes on, and nobody's global generator is touched. On a GPU PyTorch's
own generator is the fast one: `normal` and `uniform` use it there, and `isolated` seeds it and gives it back as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random as builtin
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from plausible.core.random.threefry import fold_words, use_compiled
from plausible.core.turns import alone

__all__ = ["fold", "generator", "isolated", "key", "normal", "normals", "permutation", "uniform", "use_compiled"]

_FOLD, _NORMAL, _UNIFORM = (getattr(torch.ops.plausible, name).default for name in ("fold", "normal", "uniform"))
_ISOLATED, _PERMUTATION = 0x69736F6C, 0x7065726D  # first steps of the paths used inside this module


def key(seed: int, *path: int, device: torch.device | str = "cpu") -> Tensor:
    """The key of `seed`, folded with each integer of `path`: an int64 tensor [2] of 32-bit words.

    `key(seed, a, b)` equals `fold(key(seed), a, b)`. Any integer is a seed, negative and huge ones too.
    """
    return torch.tensor(_words(seed, path), dtype=torch.int64, device=device)


def fold(key: Tensor, *data: int | Tensor) -> Tensor:
    """A new key, as good as independent of the old one: key ← Threefry(key, datum) for each datum in turn.

    `key` is int64 [*K, 2]; a datum is an integer or an integer tensor whose shape broadcasts with *K: a key [2] folded
    with `torch.arange(members)` gives one key per member. Works under `torch.func.vmap` and in a compiled step.
    Costs about 15 µs per datum on the CPU; on other devices 140 small operations: fold before the loop there.
    """
    for datum in data:
        if not isinstance(datum, Tensor):
            datum = torch.full((), _signed(datum, "data"), dtype=torch.int64, device=key.device)
        elif datum.is_floating_point() or datum.is_complex():
            raise TypeError(f"data: got a {datum.dtype} tensor, expected integers; pass a counter, or datum.long()")
        datum = datum.to(torch.int64)
        if key.device.type == "cpu":
            key = _FOLD(key, datum)
        else:
            key = torch.stack(fold_words(key[..., 0], key[..., 1], datum), dim=-1)
    return key


@overload
def normal(key: Tensor, counter: Tensor | int, like: Tensor) -> Tensor: ...
@overload
def normal(key: Tensor, counter: Tensor | int, like: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
def normal(key: Tensor, counter: Tensor | int, like: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """N(0, 1) noise, independent, shaped like each tensor of `like`.

    `key` int64 [*K, 2] and `counter` int64 [*K] broadcast; the noise is [*K, *shape], and on the CPU the i-th number over all
    tensors, in their order, is a pure function of (key, counter, i). It is drawn in float32 and converted: float64 weights get
    the same noise as float32 ones. Under `torch.func.vmap` map the key or the counter, or all replicas share their noise.
    Elsewhere than on the CPU it is `torch.randn` of the global generator (seed it by `isolated`; under vmap say
    randomness="different"). Not differentiable.
    """
    return _noise(_NORMAL, torch.randn, key, counter, like)


@overload
def uniform(key: Tensor, counter: Tensor | int, like: Tensor) -> Tensor: ...
@overload
def uniform(key: Tensor, counter: Tensor | int, like: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
def uniform(key: Tensor, counter: Tensor | int, like: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """U(0, 1) noise, both ends excluded, independent, shaped like each tensor of `like`; otherwise as `normal`.

    On the CPU each number is an odd multiple of 2⁻²⁴. For one key and counter it is independent of what `normal` draws.
    """
    native = lambda shape, dtype, device: torch.rand(shape, dtype=dtype, device=device).clamp_min(torch.finfo(dtype).tiny)  # noqa: E731
    return _noise(_UNIFORM, native, key, counter, like)


def _noise(draw: Any, native: Callable[..., Tensor], key: Tensor, counter: Tensor | int, like: Any) -> Any:
    if not isinstance(like, Tensor):
        tensors = list(like.values())
        return dict(zip(like, _noise_list(draw, native, key, counter, tensors))) if tensors else {}
    return _noise_list(draw, native, key, counter, [like])[0]


def _noise_list(
    draw: Any, native: Callable[..., Tensor], key: Tensor, counter: Tensor | int, like: Sequence[Tensor]
) -> list[Tensor]:
    device = like[0].device
    for tensor in like:
        if not tensor.is_floating_point():
            raise TypeError(f"like: got a {tensor.dtype} tensor, expected floating point; leave it out of `like`")
        if tensor.device != device:
            raise ValueError(f"like: got tensors on {device} and {tensor.device}, expected one device")
    if not isinstance(counter, Tensor):
        counter = torch.full((), _signed(counter, "counter"), dtype=torch.int64, device=key.device)
    # Threefry would be 140 small kernels there, and the native generator one
    if device.type != "cpu":
        batch = torch.broadcast_shapes(key.shape[:-1], counter.shape)
        if len({tensor.dtype for tensor in like}) > 1:
            return [native((*batch, *tensor.shape), dtype=tensor.dtype, device=device) for tensor in like]
        # one kernel for all of them
        flat = native((*batch, sum(tensor.numel() for tensor in like)), dtype=like[0].dtype, device=device)
        parts = flat.split_with_sizes([tensor.numel() for tensor in like], -1)
        return [part.view(*batch, *tensor.shape) for part, tensor in zip(parts, like)]
    sizes = [tensor.numel() for tensor in like]
    flat = draw(key, counter, sum(sizes))  # [*K, n]
    numbers = []
    for part, tensor in zip(flat.split_with_sizes(sizes, -1), like):
        noise = part.view(flat.shape[:-1] + tensor.shape).to(tensor.dtype)
        if draw is _UNIFORM and tensor.dtype not in (torch.float32, torch.float64):  # half precision rounds the largest up to 1
            noise = noise.clamp(max=1 - torch.finfo(tensor.dtype).eps / 2)
        numbers.append(noise)
    return numbers


@contextlib.contextmanager
def isolated(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global generators of PyTorch (CPU and `device`), Python and NumPy inside the block, and restore them after it.

    For code that draws from them: modules that initialise themselves, dropout, noise on a GPU, data sets that augment. The
    generators of other devices are left alone. Threads take turns.
    """
    with alone():
        yield from _isolated(seed, torch.device(device))


def _isolated(seed: int, device: torch.device) -> Iterator[None]:
    number = _number(seed, (_ISOLATED,))
    state, python, numpy = torch.default_generator.get_state(), builtin.getstate(), np.random.get_state()  # noqa: NPY002
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    # torch.mps has one device and takes no index
    where = () if module is None or device.type == "mps" else (device,)
    device_state = None if module is None else module.get_rng_state(*where)
    try:
        torch.default_generator.manual_seed(number)
        builtin.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002
        if module is not None:
            with module.device(device) if where else contextlib.nullcontext():
                module.manual_seed(number)
        yield
    finally:
        torch.default_generator.set_state(state)
        builtin.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if module is not None:
            module.set_rng_state(device_state, *where)


def generator(seed: int, *path: int) -> torch.Generator:
    """A CPU generator seeded by a hash of `seed` and `path`, for code that takes a `torch.Generator`.

    PyTorch's CPU generator keeps 32 bits of its seed: among s streams two agree with probability s² / 2³³.
    """
    made = torch.Generator()
    made.manual_seed(_number(seed, path))
    return made


def normals(seed: int, *path: int, count: int, like: Tensor) -> Tensor:
    """N(0, 1): `count` numbers of the type and on the device of `like`, on each kind of device a function of `seed` and `path`.

    For many numbers outside of steps, drawn where they are used.
    """
    made = torch.Generator(device=like.device)
    made.manual_seed(_number(seed, path))
    return torch.randn(count, generator=made, device=like.device, dtype=like.dtype)


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, _PERMUTATION, epoch))


def _words(seed: int, path: Sequence[int]) -> tuple[int, int]:
    seed = _integer(seed, "seed")
    # neighbouring seeds get unrelated keys; any integer will do
    digest = hashlib.blake2b(str(seed).encode(), digest_size=8, person=b"plausible").digest()
    # little-endian on every machine: the same seed, the same bits
    words = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    for step in path:
        words = fold_words(*words, _signed(step, "path"))
    return words


def _number(seed: int, path: Sequence[int]) -> int:
    """Sixty-three hashed bits."""
    high, low = _words(seed, path)
    return (high & 0x7FFFFFFF) << 32 | low


def _integer(value: int, argument: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: got {value!r}, expected an integer") from None


def _signed(value: int, argument: str) -> int:
    """The integer with the same last 64 bits that an int64 can hold."""
    return (_integer(value, argument) + 2**63) % 2**64 - 2**63
