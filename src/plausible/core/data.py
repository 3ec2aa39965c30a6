"""Data on its way to the model: tensors, arrays, frames, data sets and loaders → batches on the device.

`as_data` turns whatever the user has into one of two kinds. `ArrayData` is resident on the device and is indexed there;
`StreamData` (a `Dataset` or a `DataLoader`) is fetched batch by batch and never copied whole. Which rows make up batch `t` is a
pure function of the seed, so that a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from plausible.core.conversion import as_example_weights, as_inputs, as_targets, is_frame, refuse_nothing_left
from plausible.core.random import generator, isolated, permutation
from plausible.core.weights import clone, tensors, tree_map
from plausible.core.words import log


class Batch(NamedTuple):
    """Inputs (a tensor or a tree of tensors), targets, and optional example weights and mask of observed targets."""

    x: Any
    y: Tensor
    weight: Tensor | None = None
    mask: Tensor | None = None


def num_rows(x: Any) -> int:
    return x.shape[0] if isinstance(x, Tensor) else len(pytree.tree_leaves(x)[0])


def take(x: Any, rows: Any) -> Any:
    return x[rows] if isinstance(x, Tensor) else tree_map(lambda leaf: leaf[rows], x)


def typical(x: Any) -> Any:
    """One input like these: their mean, of whole numbers their minimum; on the CPU."""

    def one(values: Tensor) -> Tensor:
        values = values.detach()
        real = values.is_floating_point() or values.is_complex()
        return (values.mean(0, keepdim=True) if real else values.amin(0, keepdim=True)).cpu()

    return pytree.tree_map_only(Tensor, one, x)


def select_rows(batch: Batch, rows: Any) -> Batch:
    return Batch(*(None if part is None else take(part, rows) for part in batch))  # type: ignore[arg-type]


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
            # a batch may reach back into the epoch before, never further
            self._cache = {k: v for k, v in self._cache.items() if k[1] >= epoch - 1}
            # a pure function of these numbers, so that a resumed run sees the same rows
            stream = generator(self.seed, 3, 0 if self.members is None else member + 1, epoch)
            self._cache[member, epoch] = torch.randperm(self.num_data, generator=stream)
        return self._cache[member, epoch]

    def rows_of(self, member: int, first: int, count: int) -> Tensor:
        """Row indices of batches first … first+count−1 of one member: [count, batch]."""
        start, stop = first * self.batch_size, (first + count) * self.batch_size
        parts = []
        while start < stop:
            # epochs laid end to end: no batch is short, no row is left out
            epoch, offset = divmod(start, self.num_data)
            length = min(stop - start, self.num_data - offset)
            parts.append(self._permutation(member, epoch)[offset : offset + length])
            start += length
        return torch.cat(parts).view(count, self.batch_size)

    def __call__(self, first: int, count: int) -> Tensor:
        """Row indices of batches first … first+count−1: [count, batch], or [count, members, batch]."""
        if self.members is None:
            return self.rows_of(0, first, count)
        return torch.stack([self.rows_of(member, first, count) for member in range(self.members)], dim=1)


def _num_held_out(fraction: float, count: int) -> int:
    held = max(1, round(fraction * count))
    if held >= count:
        raise ValueError(f"holdout={fraction} of {count} examples leaves nothing to train on")
    return held


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
        return self.batch

    def chunks(self, size: int) -> Iterator[Batch]:
        for start in range(0, self.num_data, size):
            yield self.rows(slice(start, start + size))

    def split(self, fraction: float, seed: int) -> tuple[ArrayData, ArrayData]:
        held = _num_held_out(fraction, self.num_data)
        # a stream of its own: no batch has this permutation
        order = permutation(seed, 2**31 - 1, self.num_data).to(self.batch.y.device)
        return ArrayData(self.rows(order[held:]), self.num_data - held), ArrayData(self.rows(order[:held]), held)

    def fingerprint(self) -> str:
        """A hash of shapes, types and values (of evenly spaced rows where there are many)."""
        digest = hashlib.blake2b(digest_size=16)
        for leaf in tensors(tuple(self.batch)):
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            # about 64 MiB are hashed, however large the data
            stride = max(1, leaf.numel() * leaf.element_size() // 2**26)
            digest.update(leaf[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
        return digest.hexdigest()


@dataclass
class StreamData:
    """Examples that arrive batch by batch, from a map-style `Dataset` or from a loader; `check` looks at each batch's targets."""

    source: Any
    num_data: int
    dtype: torch.dtype
    device: torch.device
    mask: Any = None
    check: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None
    told: bool = False

    resident = False

    @property
    def indexable(self) -> bool:
        """True for a map-style data set, whose rows can be asked for."""
        return not isinstance(self.source, DataLoader) and hasattr(self.source, "__getitem__")

    def convert(self, item: Any) -> Batch:
        """A collated item (x, y), (x, y, weights) or {…, "labels"} → a checked batch on the device."""
        item = taken_apart(item)
        _refuse_graphs(item)
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            kind = f"{type(item).__name__} of length {len(item)}" if hasattr(item, "__len__") else type(item).__name__
            raise ValueError(
                f"data must yield (x, y), (x, y, weights) or a mapping with 'labels', got a {kind}; wrap your data set so that "
                "it does"
            )
        x, y, *rest = item
        x = as_inputs(x, dtype=self.dtype, device=self.device)
        y, observed = as_targets(y, self.mask, dtype=self.dtype)
        if num_rows(x) != len(y):
            raise ValueError(f"x has {num_rows(x)} examples and y has {len(y)} in one batch: they must be equally many")
        if self.check is not None:
            y, observed = self.check(y, observed)
        weight = as_example_weights(rest[0], len(y), self.dtype).to(self.device) if rest else None
        return Batch(x, y.to(self.device), weight, None if observed is None else observed.to(self.device))

    def rows(self, index: Tensor) -> Batch:
        # data sets are made for Python integers
        items = [self.source[int(i)] for i in index]
        try:
            return self.convert(collated(items))
        except RuntimeError as error:
            raise ValueError(f"data: examples cannot be put into one batch, do they differ in shape? {error}") from None

    def passes(self) -> Iterator[Batch]:
        """One pass over the source in its own order."""
        if self.indexable:
            yield from self.chunks(256)
            return
        seen = largest = 0
        for item in self.source:
            batch = self.convert(item)
            seen, largest = seen + len(batch.y), max(largest, len(batch.y))
            yield batch
        # drop_last and uneven last batches are no reason to speak; ranks see a share each
        if abs(seen - self.num_data) >= largest and not self.told and not torch.distributed.is_initialized():
            self.told = True
            known = f"{seen:,} examples, but num_data is {self.num_data:,}"
            log.warning("one pass over the data gave %s, by which the likelihood is scaled; pass num_data=%s", known, seen)

    def chunks(self, size: int) -> Iterator[Batch]:
        """One pass in pieces of about `size`."""
        if not self.indexable:
            yield from self.passes()
            return
        for start in range(0, self.num_data, size):
            yield self.rows(torch.arange(start, min(start + size, self.num_data)))

    def all(self) -> Batch:
        raise ValueError(
            "this needs the whole data at once (batch_size=None, or a full-data sampler) and got a streamed data set; "
            "pass tensors or arrays, or a batch_size"
        )

    def split(self, fraction: float, seed: int) -> tuple[StreamData, StreamData]:
        if not self.indexable:
            raise ValueError(
                "early stopping needs a held-out part, which a loader cannot give; pass arrays or a map-style Dataset"
            )
        held = _num_held_out(fraction, self.num_data)
        order = permutation(seed, 2**31 - 1, self.num_data).tolist()
        train, rest = (torch.utils.data.Subset(self.source, rows) for rows in (order[held:], order[:held]))
        return replace(self, source=train, num_data=len(train)), replace(self, source=rest, num_data=held)

    def fingerprint(self) -> str:
        """Kind and length: the values of a stream are not read for this."""
        return f"{type(self.source).__name__}:{self.num_data}"


Data = ArrayData | StreamData


def as_data(data: Any, *, dtype: torch.dtype, device: torch.device, mask: Any = None, num_data: int | None = None) -> Data:
    """Whatever the user has → `ArrayData` or `StreamData`, checked.

    `(x, y)` or `(x, y, weights)` of tensors, arrays or frames (x may be a tree of them); a `TensorDataset`, any map-style
    `Dataset`, or a `DataLoader` (an iterable one needs `num_data`). Where y would be, a mapping may have it as "labels" or "label".
    """
    if isinstance(data, (ArrayData, StreamData)):
        return data
    if num_data is not None and (isinstance(num_data, bool) or not hasattr(num_data, "__index__")):
        raise ValueError(f"num_data must be a whole number of at least 1, got {num_data!r}")
    data = taken_apart(data)
    _refuse_graphs(data[0] if isinstance(data, (tuple, list)) and data else data)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, (tuple, list)):
        return _as_arrays(data, dtype=dtype, device=device, mask=mask, num_data=num_data)
    if not _is_dataset(data):
        hint = "; for a data frame pass (frame[inputs], frame[[target]])" if is_frame(data) else ""
        raise TypeError(f"data must be (x, y), (x, y, weights), a Dataset or a DataLoader, got {type(data).__name__}{hint}")
    if mask is not None and not isinstance(mask, str):
        raise ValueError("mask= as an array goes with data given as arrays; for data sets and loaders use mask='nan'")
    known, certain = _length(data)
    if known is None and num_data is None:
        raise ValueError("data has no known length: pass num_data=, the number of examples in one pass")
    # a sampler or an iterable may well have another length than it says
    if certain and num_data not in (None, known):
        raise ValueError(f"num_data={num_data} contradicts the length {known} of the data set")
    total = known if num_data is None else num_data
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ValueError(f"num_data must be a whole number of at least 1, got {num_data!r}")
    if total == 0:
        raise ValueError("data is empty: the data set has no examples")
    source = DataLoader(data, batch_size=128) if isinstance(data, IterableDataset) else data
    return StreamData(source, total, dtype, device, mask)


def _refuse_graphs(item: Any) -> None:
    if hasattr(item, "edge_index"):
        raise ValueError(
            "data are graphs, whose nodes share one axis, so that examples could not be told apart: make them dense with "
            "torch_geometric.utils, ({'x': to_dense_batch(…), 'adj': to_dense_adj(…)}, y), for layers such as DenseGCNConv"
        )


def taken_apart(item: Any) -> Any:
    """A mapping with "labels" (or "label") as (inputs, targets), the inputs by name; anything else as it is."""
    if not isinstance(item, Mapping) or is_frame(item):
        return item
    name = next((name for name in ("labels", "label") if name in item), None)
    return item if name is None else ({key: value for key, value in item.items() if key != name}, item[name])


def collated(items: list[Any]) -> Any:
    """Examples as one batch; the lists of numbers that mappings hold in some data sets are arrays."""
    if isinstance(items[0], Mapping):
        given = ({k: v for k, v in item.items() if v is not None} for item in items)
        items = [{k: torch.as_tensor(v) if isinstance(v, list) else v for k, v in item.items()} for item in given]
    return default_collate(items)


def _is_dataset(data: Any) -> bool:
    """Whether this is a loader, or has rows that can be asked for and is no array."""
    if isinstance(data, (DataLoader, Dataset)):
        return True
    array = isinstance(data, (Mapping, tuple, list, Tensor, np.ndarray, str, bytes)) or hasattr(data, "to_numpy")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not array


def read_inputs(x: Any, *, dtype: torch.dtype, device: torch.device | str, own: bool = False) -> Any:
    """`as_inputs`, also of a data set or a loader: read once, in its order and into memory, targets and weights left out.

    With `own` nothing of it lies in the caller's memory.
    """
    if isinstance(x, TensorDataset):
        x = x.tensors[0]
    if not _is_dataset(x) or hasattr(x, "__array__"):
        inputs = as_inputs(x, dtype=dtype, device=device)
        return clone(inputs) if own else inputs
    loader = x if isinstance(x, DataLoader) else DataLoader(x, batch_size=256, collate_fn=collated)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)):
        raise ValueError("x is a loader that shuffles, so nobody could tell which row a prediction is for; use shuffle=False")
    with isolated(0):  # loaders draw from torch's global generator, and rows that are augmented should be the same each time
        parted = map(taken_apart, loader)
        items = [item[0] if isinstance(item, (tuple, list)) and 1 <= len(item) <= 3 else item for item in parted]
    if not items:
        raise ValueError("x is empty: there is nothing to predict")
    parts = [as_inputs(item, dtype=dtype, device=device) for item in items]
    try:
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"x: the batches of the loader do not fit together; go through them one by one: {error}") from None


def _as_arrays(data: Any, *, dtype: torch.dtype, device: torch.device, mask: Any, num_data: int | None) -> ArrayData:
    if len(data) not in (2, 3):
        raise ValueError(f"data must be (x, y) or (x, y, weights), got {len(data)} parts")
    x, y, *rest = data
    x = as_inputs(x, dtype=dtype, device=device)
    count = num_rows(x)
    y, observed = as_targets(y, mask, dtype=dtype)
    if count != len(y):
        raise ValueError(f"x has {count} examples and y has {len(y)}: they must be equally many")
    if count == 0:
        raise ValueError("data is empty: x and y have no examples")
    if num_data not in (None, count):
        raise ValueError(f"num_data={num_data} contradicts the {count} examples given; leave it out for arrays")
    weight = as_example_weights(rest[0], count, dtype) if rest and rest[0] is not None else None
    refuse_nothing_left(weight, observed)
    move = lambda part: None if part is None else part.to(device)  # noqa: E731
    return ArrayData(Batch(x, y.to(device), move(weight), move(observed)), count)


def _length(data: Any) -> tuple[int | None, bool]:
    """The number of examples that a data set or a loader draws from, where it is known, and whether that is certain.

    A sampler of a part of the data set, such as `SubsetRandomSampler`, counts for its own length; a loader without a batch size
    yields batches that somebody else has made, of a number of examples that nobody has said.
    """
    if not isinstance(data, DataLoader):
        length = len(data) if hasattr(data, "__len__") else None
        return length, length is not None and not isinstance(data, IterableDataset)
    if data.batch_sampler is None:
        return None, False
    length, certain = _length(data.dataset)
    sampler = data.sampler
    if isinstance(data.dataset, IterableDataset) or isinstance(sampler, (SequentialSampler, RandomSampler)):
        return length, certain and type(data.batch_sampler) is BatchSampler
    partial = hasattr(sampler, "__len__") and not isinstance(sampler, (WeightedRandomSampler, DistributedSampler))
    return len(sampler) if partial else length, False  # type: ignore[arg-type]


Result = TypeVar("Result", covariant=True)
Watch = Callable[[int, str], None] | None  # told the number of examples so far, and a note


def accumulate(function: Callable[[Batch], Any], data: Data, *, chunk: int = 1024) -> Any:
    """Σ_batches function(batch) for a tree of tensors; memory is bounded by one chunk of the data.

    `function` must return sums over its batch (not means), so that the result does not depend on `chunk`; or None, where it
    adds up by itself.
    """
    total: Any = None
    with torch.no_grad():
        for batch in data.chunks(chunk):
            value = function(batch)
            if value is not None:
                # not sum(): the first value may be any tree
                total = value if total is None else pytree.tree_map(lambda a, b: a + b, total, value)
    return total


class Estimator(Protocol[Result]):
    """Something that is known after one or more passes over the data: `add` every batch, then ask for the `next_pass`."""

    passes: int  # how many there are, at most

    @property
    def chunk(self) -> int:
        """Examples to be added together in this pass."""

    @property
    def note(self) -> str:
        """A few words on how it stands, for a progress bar."""

    def add(self, batch: Batch) -> None: ...

    def next_pass(self) -> bool:
        """Called when all data were added; returns whether they are needed once more."""

    def finish(self) -> Result:
        """The result, after the last pass."""

    def tensors(self) -> dict[str, Tensor]:
        """All that was added up so far; between two batches."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from there, in an estimator that was started with the same settings."""


def run_passes(estimator: Estimator[Result], data: Data, watch: Watch = None) -> Result:
    """Feed the data to the estimator, pass after pass until it needs no more, and return what it found."""
    done = 0

    def add(batch: Batch) -> None:
        nonlocal done
        estimator.add(batch)
        done += num_rows(batch.x)
        if watch is not None:
            watch(done, estimator.note)

    more = True
    while more:
        accumulate(add, data, chunk=estimator.chunk)
        more = estimator.next_pass()
    return estimator.finish()
