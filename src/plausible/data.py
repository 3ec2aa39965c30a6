"""Data on its way to the model: tensors, arrays, frames, data sets and loaders → batches on the device.

`as_data` turns whatever the user has into one of two kinds. `ArrayData` is resident on the device and is indexed there;
`StreamData` (a `Dataset` or a `DataLoader`) is fetched batch by batch and never copied whole. Which rows make up batch `t` is a
pure function of the seed, so that a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from plausible import random
from plausible.weights import tree_map


class Batch(NamedTuple):
    """Inputs (a tensor or a tree of tensors), targets, and optional example weights and mask of observed targets."""

    x: Any
    y: Tensor
    weight: Tensor | None = None
    mask: Tensor | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Conversions


def _is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def _as_tensor(value: Any, name: str) -> Tensor:
    """One leaf → tensor; frames must be numeric."""
    if isinstance(value, Tensor):
        return value.detach()
    if _is_frame(value) or (hasattr(value, "to_numpy") and not isinstance(value, np.ndarray)):  # frames and series
        value = value.to_numpy()
    array = np.asarray(value)
    if array.dtype.kind in "OUSMm":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"{name} must be numeric, got values of type {array.dtype}; encode text, categories and dates as numbers first"
            ) from None
    if array.dtype == np.uint16 or array.dtype == np.uint32 or array.dtype == np.uint64:
        array = array.astype(np.int64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array)


def as_inputs(x: Any, *, dtype: torch.dtype, device: torch.device | str, name: str = "x") -> Any:
    """Inputs as a tree of tensors: floating leaves take the module's dtype, integers stay; NaN and infinity are refused."""

    def leaf(value: Any) -> Tensor:
        tensor = _as_tensor(value, name)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
            _check_finite(tensor, name)
        return tensor.to(device)

    is_leaf = lambda v: v is None or isinstance(v, (Tensor, np.ndarray)) or _is_frame(v) or hasattr(v, "to_numpy")  # noqa: E731
    if isinstance(x, list) and not any(isinstance(item, (Tensor, np.ndarray)) for item in x):
        x = np.asarray(x)  # a nested list of numbers is one array
    leaves, spec = pytree.tree_flatten(x, is_leaf=is_leaf)
    converted = [leaf(value) for value in leaves]
    lengths = {len(value) for value in converted if value.ndim}
    if not converted or any(value.ndim == 0 for value in converted):
        raise ValueError(f"{name} must have a leading axis of examples, got a scalar or nothing")
    if len(lengths) > 1:
        raise ValueError(f"all inputs must have the same number of examples, got lengths {sorted(lengths)}")
    return pytree.tree_unflatten(converted, spec)


def num_rows(x: Any) -> int:
    """Length of the leading axis of a tree of inputs."""
    if isinstance(x, Tensor):
        return x.shape[0]
    return len(pytree.tree_leaves(x)[0])


def take(x: Any, rows: Any) -> Any:
    """Select rows of every leaf of a tree of inputs."""
    if isinstance(x, Tensor):
        return x[rows]
    return tree_map(lambda leaf: leaf[rows], x)


def select_rows(batch: Batch, rows: Any) -> Batch:
    """Select rows of every part of a batch."""
    weight = None if batch.weight is None else batch.weight[rows]
    mask = None if batch.mask is None else batch.mask[rows]
    return Batch(take(batch.x, rows), batch.y[rows], weight, mask)


def _check_finite(tensor: Tensor, name: str, mask: Tensor | None = None) -> None:
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask
    if bool(bad.any()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        kind = "NaN" if bool(torch.isnan(tensor[first])) else "infinity"
        count = int(bad.sum())
        fix = (
            "remove or impute those rows, or pass mask= (True where a target was observed, or mask='nan')"
            if name == "y"
            else "remove or impute those rows"
        )
        raise ValueError(
            f"{name} contains {count} non-finite value{'s' * (count > 1)}, the first a {kind} at {first}; {fix}"
        )


def _as_targets(y: Any, mask: Any, *, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Targets and mask as tensors on the CPU; masked positions get a harmless value."""
    target = _as_tensor(y, "y")
    if target.ndim == 0:
        raise ValueError("y must have a leading axis of examples, got a scalar")
    if target.is_floating_point():
        target = target.to(dtype)
    elif target.dtype not in (torch.bool, torch.int64):
        target = target.long()
    observed: Tensor | None = None
    if isinstance(mask, str):
        if mask != "nan":
            raise ValueError(f"mask must be a boolean array shaped like y, or the string 'nan', got {mask!r}")
        observed = ~torch.isnan(target) if target.is_floating_point() else torch.ones_like(target, dtype=torch.bool)
    elif mask is not None:
        observed = _as_tensor(mask, "mask")
        if observed.dtype != torch.bool:
            raise TypeError(f"mask must be boolean (True where the target was observed), got {observed.dtype}")
        if observed.shape != target.shape:
            raise ValueError(f"mask must have the shape of y, {tuple(target.shape)}, got {tuple(observed.shape)}")
        observed = observed.to(target.device)
    if target.is_floating_point():
        _check_finite(target, "y", observed)
    if observed is not None:
        if not bool(observed.any()):
            raise ValueError("mask hides every target: nothing is left to learn from")
        target = torch.where(observed, target, torch.zeros_like(target))
    return target, observed


def _as_example_weights(weight: Any, count: int, dtype: torch.dtype) -> Tensor:
    tensor = _as_tensor(weight, "weights").to(dtype)
    if tensor.shape != (count,):
        raise ValueError(f"example weights must have shape ({count},), one per example, got {tuple(tensor.shape)}")
    _check_finite(tensor, "weights")
    if bool((tensor < 0).any()):
        raise ValueError("example weights must not be negative")
    if not bool((tensor > 0).any()):
        raise ValueError("example weights are all zero: nothing is left to learn from")
    return tensor


# ---------------------------------------------------------------------------------------------------------------------
# The two kinds of data


class Order:
    """Which rows make up batch t: epochs of fresh permutations, cut into batches of equal size across their borders.

    Every batch is full, every row is visited equally often, and batch t is a pure function of (seed, member, t).
    """

    def __init__(self, num_data: int, batch_size: int, seed: int, members: int | None = None):
        self.num_data, self.batch_size, self.seed, self.members = num_data, batch_size, seed, members
        self._cache: dict[tuple[int, int], Tensor] = {}

    def _permutation(self, member: int, epoch: int) -> Tensor:
        if (member, epoch) not in self._cache:
            self._cache = {k: v for k, v in self._cache.items() if k[1] >= epoch - 1}
            stream = random.generator(self.seed, 3, 0 if self.members is None else member + 1, epoch)
            self._cache[member, epoch] = torch.randperm(self.num_data, generator=stream)
        return self._cache[member, epoch]

    def _rows(self, member: int, first: int, count: int) -> Tensor:
        start, stop = first * self.batch_size, (first + count) * self.batch_size
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.num_data)
            length = min(stop - start, self.num_data - offset)
            parts.append(self._permutation(member, epoch)[offset : offset + length])
            start += length
        return torch.cat(parts).view(count, self.batch_size)

    def __call__(self, first: int, count: int) -> Tensor:
        """Row indices of batches first … first+count−1: [count, batch], or [count, members, batch]."""
        if self.members is None:
            return self._rows(0, first, count)
        return torch.stack([self._rows(member, first, count) for member in range(self.members)], dim=1)


@dataclass
class ArrayData:
    """Examples resident on the device as tensors."""

    batch: Batch
    num_data: int

    resident = True

    def rows(self, index: Tensor | slice) -> Batch:
        """The examples of these rows; an index [members, batch] gives stacked batches."""
        return select_rows(self.batch, index)

    def all(self) -> Batch:
        """The whole data as one batch."""
        return self.batch

    def chunks(self, size: int) -> Iterator[Batch]:
        """One pass in order."""
        for start in range(0, self.num_data, size):
            yield self.rows(slice(start, start + size))

    def split(self, fraction: float, seed: int) -> tuple[ArrayData, ArrayData]:
        """A seeded split into (training, held-out) parts."""
        held = max(1, round(fraction * self.num_data))
        if held >= self.num_data:
            raise ValueError(f"holdout={fraction} of {self.num_data} examples leaves nothing to train on")
        order = random.permutation(seed, 2**31 - 1, self.num_data).to(self.batch.y.device)
        return ArrayData(self.rows(order[held:]), self.num_data - held), ArrayData(self.rows(order[:held]), held)

    def fingerprint(self) -> str:
        """A hash of shapes, types and values (of evenly spaced rows where there are many)."""
        digest = hashlib.blake2b(digest_size=16)
        for leaf in pytree.tree_leaves(tuple(self.batch)):
            if not isinstance(leaf, Tensor):
                continue
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            stride = max(1, leaf.numel() * leaf.element_size() // 2**26)
            digest.update(
                leaf[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
            )
        return digest.hexdigest()


@dataclass
class StreamData:
    """Examples that arrive batch by batch, from a map-style `Dataset` or from a loader; `check` looks at each batch's targets."""

    source: Any
    num_data: int
    dtype: torch.dtype
    device: torch.device
    mask: Any = None
    check: Callable[[Tensor, Tensor | None], Tensor] | None = None

    resident = False

    @property
    def indexable(self) -> bool:
        """True for a map-style data set, whose rows can be asked for."""
        return not isinstance(self.source, DataLoader) and hasattr(self.source, "__getitem__")

    def convert(self, item: Any) -> Batch:
        """A collated item (x, y) or (x, y, weights) → a checked batch on the device."""
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            kind = f"{type(item).__name__} of length {len(item)}" if hasattr(item, "__len__") else type(item).__name__
            raise ValueError(
                f"data must yield (x, y) or (x, y, weights), got a {kind}; wrap your data set so that it does"
            )
        x, y, *rest = item
        x = as_inputs(x, dtype=self.dtype, device=self.device)
        y, observed = _as_targets(y, self.mask, dtype=self.dtype)
        if num_rows(x) != len(y):
            raise ValueError(f"x has {num_rows(x)} examples and y has {len(y)} in one batch: they must be equally many")
        if self.check is not None:
            y = self.check(y, observed)
        weight = _as_example_weights(rest[0], len(y), self.dtype).to(self.device) if rest else None
        return Batch(x, y.to(self.device), weight, None if observed is None else observed.to(self.device))

    def rows(self, index: Tensor) -> Batch:
        """The examples of these rows (map-style data sets only)."""
        return self.convert(default_collate([self.source[int(i)] for i in index]))

    def passes(self) -> Iterator[Batch]:
        """One pass over the source in its own order."""
        if self.indexable:
            yield from self.chunks(256)
            return
        for item in self.source:
            yield self.convert(item)

    def chunks(self, size: int) -> Iterator[Batch]:
        """One pass in pieces of about `size`."""
        if not self.indexable:
            yield from self.passes()
            return
        for start in range(0, self.num_data, size):
            yield self.rows(torch.arange(start, min(start + size, self.num_data)))

    def all(self) -> Batch:
        """A stream cannot be had whole."""
        raise ValueError(
            "this needs the whole data at once (batch_size=None, or a full-data sampler) and got a streamed data set; "
            "pass tensors or arrays, or a batch_size"
        )

    def split(self, fraction: float, seed: int) -> tuple[StreamData, StreamData]:
        """A seeded split of a map-style data set."""
        if not self.indexable:
            raise ValueError(
                "early stopping needs a held-out part, which a loader cannot give; pass arrays or a map-style Dataset"
            )
        held = max(1, round(fraction * self.num_data))
        order = random.permutation(seed, 2**31 - 1, self.num_data)
        parts = []
        for rows in (order[held:], order[:held]):
            subset = torch.utils.data.Subset(self.source, rows.tolist())
            parts.append(replace(self, source=subset, num_data=len(rows)))
        return parts[0], parts[1]

    def fingerprint(self) -> str:
        """Kind and length: the values of a stream are not read for this."""
        return f"{type(self.source).__name__}:{self.num_data}"


Data = ArrayData | StreamData


def as_data(
    data: Any, *, dtype: torch.dtype, device: torch.device, mask: Any = None, num_data: int | None = None
) -> Data:
    """Whatever the user has → `ArrayData` or `StreamData`, checked.

    `(x, y)` or `(x, y, weights)` of tensors, arrays or frames (x may be a tree of them); a `TensorDataset`, any map-style
    `Dataset`, or a `DataLoader` (an iterable one needs `num_data`).
    """
    if isinstance(data, (ArrayData, StreamData)):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        if len(data) not in (2, 3):
            raise ValueError(f"data must be (x, y) or (x, y, weights), got {len(data)} parts")
        x, y, *rest = data
        x = as_inputs(x, dtype=dtype, device=device)
        count = num_rows(x)
        y, observed = _as_targets(y, mask, dtype=dtype)
        if count != len(y):
            raise ValueError(f"x has {count} examples and y has {len(y)}: they must be equally many")
        if count == 0:
            raise ValueError("data is empty: x and y have no examples")
        if num_data not in (None, count):
            raise ValueError(f"num_data={num_data} contradicts the {count} examples given; leave it out for arrays")
        weight = _as_example_weights(rest[0], count, dtype).to(device) if rest else None
        return ArrayData(Batch(x, y.to(device), weight, None if observed is None else observed.to(device)), count)
    if isinstance(mask, str) or mask is None:
        if isinstance(data, DataLoader):
            known = None if isinstance(data.dataset, IterableDataset) else len(data.dataset)  # type: ignore[arg-type]
        elif isinstance(data, Dataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            known = None if isinstance(data, IterableDataset) else len(data)  # type: ignore[arg-type]
            if isinstance(data, IterableDataset):
                data = DataLoader(data, batch_size=128)
        else:
            raise TypeError(
                f"data must be (x, y), (x, y, weights), a Dataset or a DataLoader, got {type(data).__name__}; "
                "for a data frame pass (frame[inputs], frame[target])"
            )
        if known is None and num_data is None:
            raise ValueError("an iterable data set has no length: pass num_data=, the number of examples in one pass")
        if known is not None and num_data not in (None, known):
            raise ValueError(f"num_data={num_data} contradicts the length {known} of the data set")
        total = known if known is not None else num_data
        if not total or total < 0:
            raise ValueError("data is empty: the data set has no examples")
        return StreamData(data, int(total), dtype, device, mask)
    raise ValueError("mask= as an array goes with data given as arrays; for data sets and loaders use mask='nan'")
