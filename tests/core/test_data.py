"""Data on its way to the model: every kind of container, the order of batches, streams, and all that is refused."""

from __future__ import annotations

import datetime
import gc
import weakref
from collections import Counter, UserDict
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas
import polars
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import plausible as pl
from plausible.core.data import ArrayData, Batch, Order, StreamData, as_data, as_inputs, num_rows, select_rows, take

CPU = torch.device("cpu")
NUMBERS = np.array([[0.5, -1.25], [2.0, 3.0], [4.5, 0.0]])
NAN = float("nan")


def prepare(data: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return as_data(data, dtype=dtype, device=CPU, **settings)


def inputs(x: Any, dtype: torch.dtype = torch.float32) -> Any:
    return as_inputs(x, dtype=dtype, device="cpu")


def frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


# ---------------------------------------------------------------------------------------------------------------------
# Every container of the same numbers is the same data

CONTAINERS = {
    "tensor": torch.tensor(NUMBERS, dtype=torch.float32),
    "tensor float64": torch.tensor(NUMBERS),
    "tensor that requires a gradient": torch.tensor(NUMBERS, dtype=torch.float32, requires_grad=True),
    "parameter": nn.Parameter(torch.tensor(NUMBERS)),
    "float64": NUMBERS,
    "float16": NUMBERS.astype(np.float16),
    "long double": NUMBERS.astype(np.longdouble),
    "big-endian": NUMBERS.astype(">f8"),
    "read-only": frozen(NUMBERS),
    "reversed": NUMBERS[::-1].copy()[::-1],
    "columns first": np.asfortranarray(NUMBERS),
    "strided": np.repeat(NUMBERS, 2, axis=0)[::2],
    "objects": NUMBERS.astype(object),
    "decimals": [[Decimal(str(v)) for v in row] for row in NUMBERS],
    "lists": NUMBERS.tolist(),
    "list of tuples": [tuple(row) for row in NUMBERS.tolist()],
    "unmasked masked array": np.ma.masked_array(NUMBERS, mask=np.zeros_like(NUMBERS, dtype=bool)),
    "pandas": pandas.DataFrame(NUMBERS, columns=["a", "b"], index=[7, 3, 5]),
    "pandas nullable": pandas.DataFrame(NUMBERS, columns=["a", "b"]).astype("Float64"),
    "polars": polars.DataFrame(NUMBERS, schema=["a", "b"]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_containers_agree(kind: str, dtype: torch.dtype) -> None:
    data = prepare((CONTAINERS[kind], CONTAINERS[kind]), dtype)
    assert isinstance(data, ArrayData)
    assert data.num_data == 3
    for part in (data.batch.x, data.batch.y):
        assert part.dtype == dtype
        assert not part.requires_grad
        assert torch.equal(part, torch.tensor(NUMBERS, dtype=dtype))


LABELS = [0, 2, 1]
INTEGERS = {
    **{name: np.array(LABELS, dtype=name) for name in ("int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "big-endian": np.array(LABELS, dtype=">i4"),
    "list": LABELS,
    "objects": np.array(LABELS, dtype=object),
    "tensor uint8": torch.tensor(LABELS, dtype=torch.uint8),
    "tensor int32": torch.tensor(LABELS, dtype=torch.int32),
    "pandas": pandas.Series(LABELS),
    "pandas nullable": pandas.Series(LABELS, dtype="Int64"),
    "pandas objects": pandas.Series(LABELS, dtype=object),
    "pandas categories": pandas.Series(LABELS, dtype="category"),
    "polars": polars.Series(LABELS, dtype=polars.UInt8),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_targets_stay_integers(kind: str) -> None:
    y = prepare((NUMBERS, INTEGERS[kind])).batch.y
    assert y.dtype == torch.int64
    assert y.tolist() == LABELS


@pytest.mark.parametrize(
    "y",
    [
        [True, False, True],
        np.array([True, False, True]),
        np.array([True, False, True], dtype=object),
        pandas.Series([True, False, True]),
        pandas.Series([True, False, True], dtype="boolean"),
        polars.Series([True, False, True]),
    ],
    ids=lambda y: f"{type(y).__module__}.{type(y).__name__}",
)
def test_boolean_targets_stay_booleans(y: Any) -> None:
    found = prepare((NUMBERS, y)).batch.y
    assert found.dtype == torch.bool
    assert found.tolist() == [True, False, True]


def test_a_series_is_one_axis_and_a_frame_two() -> None:
    for frame in (pandas.DataFrame({"a": [1.0, 2.0]}), polars.DataFrame({"a": [1.0, 2.0]})):
        assert prepare((frame, frame["a"])).batch.y.shape == (2,)
        assert prepare((frame, frame[["a"]])).batch.y.shape == (2, 1)


def test_a_frame_of_numbers_and_booleans_is_numeric() -> None:
    for kind in (pandas, polars):
        x = inputs(kind.DataFrame({"a": [1.5, 2.0], "b": [True, False], "c": [3, 4]}))
        assert x.tolist() == [[1.5, 1.0, 3.0], [2.0, 0.0, 4.0]]


def test_integer_inputs_stay_integers() -> None:
    """Embeddings need them; images stay small in memory."""
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool):
        assert inputs(torch.ones(2, 3).to(dtype)).dtype == dtype
    assert inputs([[1, 2], [3, 4]]).dtype == torch.int64
    assert inputs(np.zeros((2, 3, 4, 4), dtype=np.uint8)).dtype == torch.uint8


def test_trees_of_inputs() -> None:
    x = {"a": NUMBERS, "b": [[1, 2], [3, 4], [5, 6]], "c": (torch.ones(3), {"d": pandas.Series([1.0, 2.0, 3.0])})}
    found = inputs(x)
    assert found["a"].dtype == torch.float32
    assert found["b"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found["c"][1]["d"].tolist() == [1.0, 2.0, 3.0]
    assert num_rows(found) == 3
    rows = take(found, torch.tensor([2, 0]))
    assert rows["a"].tolist() == NUMBERS[[2, 0]].tolist()
    assert rows["b"].tolist() == [[5, 6], [1, 2]]
    assert rows["c"][1]["d"].tolist() == [3.0, 1.0]
    assert isinstance(inputs([NUMBERS, NUMBERS]), list)
    assert inputs(UserDict(x))["b"].shape == (3, 2)


def test_the_users_data_are_left_alone() -> None:
    x, y = torch.randn(12, 2), torch.randn(12, 1)
    y[3] = NAN
    array, targets = x.double().numpy(), y.numpy()
    before = array.copy(), targets.copy()
    pl.fit(nn.Linear(2, 1), (array, targets), pl.MAP(epochs=2, batch_size=5), mask="nan", compile=False)
    np.testing.assert_array_equal(array, before[0])
    np.testing.assert_array_equal(targets, before[1])


# ---------------------------------------------------------------------------------------------------------------------
# What is not a number is refused

TEXT = {
    "words": ["a", "b", "c"],
    "numbers as words": ["1", "2", "3"],
    "bytes": [b"1", b"2", b"3"],
    "words as objects": np.array(["1", "2", "3"], dtype=object),
    "numpy's words as objects": np.array([np.str_(i) for i in "123"] + [None], dtype=object)[:3],
    "dates": np.array(["2020-01-01", "2020-01-02", "2020-01-03"], dtype="M8[D]"),
    "durations": np.array([1, 2, 3], dtype="m8[s]"),
    "python dates": [datetime.date(2020, 1, day) for day in (1, 2, 3)],
    "pandas dates": pandas.Series(pandas.to_datetime(["2020-01-01", "2020-01-02", "2020-01-03"])),
    "pandas words": pandas.Series(["a", "b", "c"]),
    "pandas categories": pandas.Series(["a", "b", "c"], dtype="category"),
    "polars words": polars.Series(["a", "b", "c"]),
    "records": np.array([(1, 2.0), (3, 4.0), (5, 6.0)], dtype=[("a", int), ("b", float)]),
}


@pytest.mark.parametrize("kind", TEXT)
def test_text_and_dates_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="x must be numeric"):
        prepare((TEXT[kind], np.zeros((3, 1))))
    with pytest.raises(TypeError, match="y must be numeric"):
        prepare((NUMBERS, TEXT[kind]))


@pytest.mark.parametrize("kind", [pandas, polars])
def test_the_column_that_is_not_numeric_is_named(kind: Any) -> None:
    with pytest.raises(TypeError, match="x must be numeric, got values of type str in column 'city'"):
        inputs(kind.DataFrame({"size": [1.0, 2.0], "city": ["Basel", "Bern"]}))


@pytest.mark.parametrize(
    ("x", "position"),
    [
        (torch.tensor([[1.0, 2.0], [3.0, NAN]]), r"NaN at \(1, 1\)"),
        (np.array([[1.0, 2.0], [np.inf, NAN]]), r"2 non-finite values, the first an infinity at \(1, 0\)"),
        ([[1.0, None], [3.0, 4.0]], r"NaN at \(0, 1\)"),
        ({"a": np.ones(2), "b": np.array([1.0, -np.inf])}, r"infinity at \(1,\)"),
        (pandas.DataFrame({"a": [1.0, None]}), r"NaN at \(1, 0\)"),
        (pandas.DataFrame({"a": pandas.array([1, None], dtype="Int64"), "b": [1.0, 2.0]}), r"NaN at \(1, 0\)"),
        (polars.DataFrame({"a": [None, 2]}), r"NaN at \(0, 0\)"),
    ],
)
def test_non_finite_inputs_are_refused_with_their_position(x: Any, position: str) -> None:
    with pytest.raises(ValueError, match=f"x contains .*{position}; remove or impute"):
        inputs(x)


def test_non_finite_targets_are_refused_with_their_position() -> None:
    y = torch.zeros(3, 2)
    y[2, 1] = NAN
    with pytest.raises(ValueError, match=r"y contains 1 non-finite value, the first a NaN at \(2, 1\).*mask='nan'"):
        prepare((NUMBERS, y))
    with pytest.raises(ValueError, match=r"y contains .* NaN at \(1,\)"):
        prepare((NUMBERS, [1.0, None, 2.0]))
    y[2, 1] = torch.inf
    with pytest.raises(ValueError, match=r"infinity at \(2, 1\)"):
        prepare((NUMBERS, y), mask="nan")  # infinity is not a missing value


WRONG = {
    "a scalar": (torch.tensor(1.0), ValueError, "leading axis"),
    "a number": (3.0, ValueError, "leading axis"),
    "nothing": ({}, ValueError, "leading axis"),
    "None": (None, TypeError, "None"),
    "a None inside": ((np.ones(3), None), TypeError, "None"),
    "rows of several lengths": ([[1.0, 2.0], [3.0]], ValueError, "x must be a rectangular array"),
    "inputs of several lengths": ({"a": np.ones(3), "b": np.ones(4)}, ValueError, r"lengths \[3, 4\]"),
    "a list of rows": ([torch.ones(2), torch.ones(3)], ValueError, "torch.stack"),
    "sparse": (torch.eye(3).to_sparse(), TypeError, "to_dense"),
    "without values": (torch.ones(3, 2, device="meta"), TypeError, "no values"),
    "masked": (np.ma.masked_array(NUMBERS, mask=NUMBERS > 4), TypeError, "masked array"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_inputs_that_are_no_arrays_are_refused(kind: str) -> None:
    x, error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        prepare((x, np.zeros((3, 1))))


def test_sizes_and_parts_are_checked() -> None:
    x, y = NUMBERS, np.zeros((3, 1))
    cases: list[tuple[Any, type[Exception], str]] = [
        ((x, y[:2]), ValueError, "x has 3 examples and y has 2"),
        ((x[:0], y[:0]), ValueError, "data is empty"),
        (([], []), ValueError, "data is empty"),
        ((pandas.DataFrame({"a": []}), pandas.Series([], dtype=float)), ValueError, "data is empty"),
        ((x,), ValueError, "got 1 parts"),
        ((x, y, y, y), ValueError, "got 4 parts"),
        ((x, 3.0), ValueError, "y must have a leading axis"),
        ((x, y + 1j), TypeError, "y must be real"),
        (pandas.DataFrame(x), TypeError, r"got DataFrame; for a data frame pass \(frame\[inputs\]"),
        (polars.DataFrame(x), TypeError, "for a data frame"),
        ({"x": x, "y": y}, TypeError, "got dict"),
        (x, TypeError, "got ndarray"),
        (torch.tensor(x), TypeError, "got Tensor"),
        ("data.csv", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        (((a, b) for a, b in zip(x, y)), TypeError, "got generator"),
    ]
    for data, error, message in cases:
        with pytest.raises(error, match=message):
            prepare(data)
    with pytest.raises(ValueError, match="num_data=4 contradicts the 3 examples"):
        prepare((x, y), num_data=4)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0, 2.0], ValueError, r"shape \(3,\)"),
        (np.ones((3, 1)), ValueError, r"shape \(3,\)"),
        ([1.0, -1.0, 1.0], ValueError, "negative"),
        ([1.0, NAN, 1.0], ValueError, r"weights contains .* NaN at \(1,\)"),
        ([0.0, 0.0, 0.0], ValueError, "all zero"),
        (["a", "b", "c"], TypeError, "weights must be numeric"),
    ],
)
def test_example_weights_are_checked(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare((NUMBERS, np.zeros((3, 1)), weights))


def test_example_weights_are_optional() -> None:
    y = np.zeros((3, 1))
    assert prepare((NUMBERS, y, None)).batch.weight is None
    assert prepare((NUMBERS, y, [1, 0, 2])).batch.weight.tolist() == [1.0, 0.0, 2.0]
    assert prepare((NUMBERS, y, [1, 0, 2]), torch.float64).batch.weight.dtype == torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def test_masks_hide_targets() -> None:
    y = np.array([[1.0, NAN], [NAN, 2.0], [3.0, 4.0]])
    for mask in ("nan", ~np.isnan(y), (~np.isnan(y)).tolist(), torch.tensor(~np.isnan(y)), pandas.DataFrame(~np.isnan(y))):
        batch = prepare((NUMBERS, y), mask=mask).batch
        assert batch.mask.tolist() == (~np.isnan(y)).tolist()
        assert batch.y.tolist() == [[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]
    classes = prepare((NUMBERS, [0, -1, 2]), mask=[True, False, True]).batch
    assert classes.y.tolist() == [0, 0, 2]
    assert classes.y.dtype == torch.int64
    assert prepare((NUMBERS, [0, 1, 2]), mask="nan").batch.mask.all()


def test_masks_are_checked() -> None:
    y = np.array([1.0, NAN, 3.0])
    cases: list[tuple[Any, type[Exception], str]] = [
        ("missing", ValueError, "'nan'"),
        ([1.0, 0.0, 1.0], TypeError, "boolean"),
        ([1, 0, 1], TypeError, "boolean"),
        ([True, False], ValueError, r"shape of y, \(3,\), got \(2,\)"),
        ([[True], [False], [True]], ValueError, "shape of y"),
        ([True, True, True], ValueError, r"NaN at \(1,\)"),
        ([False, False, False], ValueError, "hides every target"),
    ]
    for mask, error, message in cases:
        with pytest.raises(error, match=message):
            prepare((NUMBERS, y), mask=mask)
    with pytest.raises(ValueError, match="hides every target"):
        prepare((NUMBERS, [NAN, NAN, NAN]), mask="nan")


# ---------------------------------------------------------------------------------------------------------------------
# The order of batches


@pytest.mark.parametrize(("count", "batch"), [(10, 3), (7, 7), (12, 5), (9, 1), (5, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_visited_equally_often(count: int, batch: int, seed: int) -> None:
    rows = Order(count, batch, seed)(0, count)  # count batches of `batch` rows: `batch` epochs
    assert rows.shape == (count, batch)
    visits = Counter(rows.flatten().tolist())
    assert set(visits.values()) == {batch}
    for epoch in rows.flatten().split(count):  # each epoch is a permutation, so counts never differ by more than one
        assert sorted(epoch.tolist()) == list(range(count))


def test_batches_are_a_pure_function_of_seed_member_and_step() -> None:
    whole = Order(11, 4, 5)(0, 30)
    order = Order(11, 4, 5)
    for first, count in ((20, 5), (0, 3), (29, 1), (3, 17), (20, 5)):  # backwards too, as a resumed run may ask
        assert torch.equal(order(first, count), whole[first : first + count])
    assert not torch.equal(Order(11, 4, 6)(0, 30), whole)
    members = Order(11, 4, 5, members=3)(0, 30)
    assert members.shape == (30, 3, 4)
    assert torch.equal(Order(11, 4, 5, members=2)(0, 30), members[:, :2])  # a member's batches do not depend on the others
    assert len({tuple(members[:, k].flatten().tolist()) for k in range(3)}) == 3
    for k in range(3):
        assert set(Counter(members[:22, k].flatten().tolist()).values()) == {8}


def test_permutations_are_uniform() -> None:
    """Over many epochs each row is equally likely at each place: a χ² test at one in a million."""
    from scipy import stats

    epochs = 3000
    first = Order(6, 6, 0)(0, epochs)
    for place in (0, 5):
        counts = np.bincount(first[:, place].numpy(), minlength=6)
        assert stats.chisquare(counts).pvalue > 1e-6
    pairs = np.bincount((first[:-1, 0] * 6 + first[1:, 0]).numpy(), minlength=36)  # epochs are independent
    assert stats.chisquare(pairs).pvalue > 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Resident data


def test_chunks_and_rows() -> None:
    data = prepare(({"a": NUMBERS, "b": [1, 2, 3]}, [[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0]), mask=[[True], [False], [True]])
    assert data.all() is data.batch
    assert [len(chunk.y) for chunk in data.chunks(2)] == [2, 1]
    stacked = data.rows(torch.tensor([[0, 1], [2, 0]]))  # two members with batches of their own
    assert stacked.x["a"].shape == (2, 2, 2)
    assert stacked.weight.tolist() == [[1.0, 2.0], [3.0, 1.0]]
    assert stacked.mask.shape == (2, 2, 1)
    bare = select_rows(Batch(torch.arange(3), torch.arange(3)), slice(1, 3))
    assert (bare.weight, bare.mask) == (None, None)
    assert as_data(data, dtype=torch.float64, device=CPU) is data


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_split_keeps_every_row_once(kind: str) -> None:
    x = torch.arange(20.0)[:, None]
    data = prepare((x, 2 * x, x[:, 0] + 1) if kind == "arrays" else Items(x, 2 * x))
    train, held = data.split(0.25, seed=3)
    assert (train.num_data, held.num_data) == (15, 5)
    rows = [torch.cat([chunk.y for chunk in part.chunks(4)]).flatten() for part in (train, held)]
    assert sorted(torch.cat(rows).tolist()) == (2 * x).flatten().tolist()
    again = torch.cat([chunk.y for chunk in data.split(0.25, seed=3)[1].chunks(4)]).flatten()
    other = torch.cat([chunk.y for chunk in data.split(0.25, seed=4)[1].chunks(4)]).flatten()
    assert torch.equal(rows[1], again)
    assert not torch.equal(rows[1], other)
    if kind == "arrays":
        assert torch.equal(train.batch.weight, train.batch.x[:, 0] + 1)
    assert data.split(0.001, seed=0)[1].num_data == 1
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        data.split(0.99, seed=0)


def test_fingerprints_follow_the_values() -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    same = prepare((x, y)).fingerprint()
    assert prepare((x.T.contiguous().T, y.double().numpy())).fingerprint() == same
    changed = x.clone()
    changed[4, 1] += 1e-6
    others = [(changed, y), (x.flip(0), y), (x, y, np.ones(6)), ((x, x), y), (x, y[:, 0])]
    found = [prepare(data).fingerprint() for data in others]
    found += [prepare((x, y), torch.float64).fingerprint(), prepare((x, y), mask="nan").fingerprint()]
    assert len({same, *found}) == len(found) + 1
    assert prepare((x, [True, False, True, True, True, False])).fingerprint()


# ---------------------------------------------------------------------------------------------------------------------
# Streams


class Items(Dataset):
    """A map-style data set that remembers which rows were asked for and how many items were alive at once."""

    def __init__(self, x: Tensor, y: Tensor, weights: Tensor | None = None):
        self.parts = (x, y) if weights is None else (x, y, weights)
        self.asked: list[int] = []
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        item = tuple(part[i].clone() for part in self.parts)
        self.asked.append(i)
        self.alive.add(item[0])
        self.peak = max(self.peak, len(self.alive))
        return item


class Passing(IterableDataset):
    """Examples that only pass by."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(zip(self.x, self.y))


def problem(count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return x, x @ torch.tensor([[1.0], [-2.0]])


def trained(data: Any, method: Any = None, **settings: Any) -> Tensor:
    torch.manual_seed(0)
    method = method or pl.MAP(epochs=3, batch_size=8, lr=0.05)
    posterior = pl.fit(nn.Linear(2, 1), data, method, compile=False, **settings)
    return torch.cat([w.reshape(len(w), -1) for w in posterior.weights().values()], 1)


def test_a_tensor_data_set_is_its_tensors() -> None:
    x, y = problem()
    data = prepare(TensorDataset(x, y))
    assert isinstance(data, ArrayData)
    assert torch.equal(data.batch.x, x)
    assert torch.equal(trained(TensorDataset(x, y)), trained((x, y)))


def test_a_data_set_gives_the_same_bits_as_its_arrays() -> None:
    x, y = problem()
    weights = torch.linspace(0, 1, 40)
    assert torch.equal(trained(Items(x, y)), trained((x, y)))
    assert torch.equal(trained(Items(x, y, weights)), trained((x, y, weights)))
    assert torch.equal(trained(Subset(Items(x, y), range(5, 40))), trained((x[5:], y[5:])))
    y = y.clone()
    y[3] = NAN
    assert torch.equal(trained(Items(x, y), mask="nan"), trained((x, y), mask="nan"))


def test_a_data_set_is_never_held_whole() -> None:
    x, y = problem(400)
    items = Items(x, y)
    gc.collect()
    trained(items, pl.MAP(epochs=2, batch_size=10, lr=0.05))
    visits = Counter(items.asked)
    assert set(visits) == set(range(400))
    assert max(visits.values()) <= 4  # two epochs, and what shapes and the unit of the targets are learned from
    assert items.peak <= 2 * 10


def test_a_loader_is_never_held_whole() -> None:
    x, y = problem(400)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    peak = 0

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        nonlocal peak
        batch = torch.stack([item[0] for item in items])
        alive.add(batch)
        peak = max(peak, len(alive))
        return batch, torch.stack([item[1] for item in items])

    trained(DataLoader(Items(x, y), batch_size=10, shuffle=True, collate_fn=collate), pl.MAP(epochs=2, lr=0.05))
    assert 1 <= peak <= 4


def sizes(data: StreamData) -> list[int]:
    return [len(batch.y) for batch in data.passes()]


def test_loaders_keep_their_last_short_batch() -> None:
    x, y = problem(23)
    for shuffle in (False, True):
        data = prepare(DataLoader(TensorDataset(x, y), batch_size=10, shuffle=shuffle))
        assert (data.num_data, sizes(data)) == (23, [10, 10, 3])
        rows = torch.cat([batch.x for batch in data.passes()])
        assert torch.equal(rows, x) is not shuffle
        assert torch.equal(rows.sort(0).values, x.sort(0).values)


def test_the_number_of_data_is_that_of_the_sampler() -> None:
    """It scales the likelihood: half the data drawn from must not count as all."""
    x, y = problem(24)
    items = TensorDataset(x, y)

    def count(num_data: int | None = None, **settings: Any) -> int:
        return prepare(DataLoader(items, **settings), num_data=num_data).num_data

    assert count(batch_size=5, drop_last=True) == 24
    assert count(batch_size=5, sampler=SubsetRandomSampler(range(8))) == 8
    assert count(batch_size=5, sampler=RandomSampler(items, replacement=True, num_samples=100)) == 24
    assert count(batch_sampler=BatchSampler(SequentialSampler(items), 4, False)) == 24
    assert count(9, batch_size=5, sampler=SubsetRandomSampler(range(8))) == 9  # the user may know better
    assert prepare(DataLoader(Subset(items, range(6)), batch_size=5)).num_data == 6
    with pytest.raises(ValueError, match="num_data=9 contradicts the length 24"):
        count(9, batch_size=5)
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    with pytest.raises(ValueError, match="pass num_data="):  # two items of the data set, 24 examples
        prepare(DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    ready = prepare(DataLoader(batches, batch_size=None), num_data=24)  # type: ignore[arg-type]
    assert sizes(ready) == [10, 14]


def test_iterable_data_need_a_number() -> None:
    x, y = problem(23)
    for data in (Passing(x, y), DataLoader(Passing(x, y), batch_size=10)):
        with pytest.raises(ValueError, match="pass num_data="):
            prepare(data)
        assert prepare(data, num_data=23).num_data == 23
    assert sizes(prepare(DataLoader(Passing(x, y), batch_size=10), num_data=23)) == [10, 10, 3]
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match=r"num_data|empty"):
            prepare(Passing(x, y), num_data=wrong)
    passing = Passing(x, y)
    once = trained(DataLoader(passing, batch_size=10), pl.MAP(epochs=4, lr=0.05), num_data=23)
    assert 4 <= passing.passes <= 6  # four epochs, and looks at the first examples
    assert torch.equal(once, trained(DataLoader(Passing(x, y), batch_size=10), pl.MAP(epochs=4, lr=0.05), num_data=23))


def test_map_style_data_without_a_length_need_a_number() -> None:
    class Endless(Dataset):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return torch.tensor([float(i)]), torch.tensor([float(i)])

    with pytest.raises(ValueError, match="pass num_data="):
        prepare(Endless())
    assert [len(batch.y) for batch in prepare(Endless(), num_data=7).chunks(4)] == [4, 3]


def test_shuffled_loaders_follow_the_seed_and_leave_the_generator_alone() -> None:
    x, y = problem(23)
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    method = pl.MAP(epochs=2, lr=0.05)
    found = trained(loader, method, seed=1)
    state = torch.get_rng_state()
    torch.manual_seed(77)
    before = torch.get_rng_state()
    network = nn.Linear(2, 1)
    before = torch.get_rng_state()
    pl.fit(network, loader, method, seed=1, compile=False)
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    assert torch.equal(trained(loader, method, seed=1), found)
    assert not torch.equal(trained(loader, method, seed=2), found)


def test_streams_of_trees_weights_and_dicts() -> None:
    class Pairs(Dataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> Any:
            return {"a": np.full(2, i, dtype=np.float64), "b": i}, float(i)

    batch = next(iter(prepare(Pairs()).chunks(3)))
    assert batch.x["a"].dtype == torch.float32
    assert batch.x["b"].tolist() == [0, 1, 2]
    assert batch.y.tolist() == [0.0, 1.0, 2.0]


def test_a_batch_of_a_stream_may_be_empty_of_information() -> None:
    """A batch whose weights are all zero, or all of whose targets are masked, is no error in a stream."""
    x, y = problem(8)
    weights = torch.tensor([0.0] * 4 + [1.0] * 4)
    assert [batch.weight.sum() for batch in prepare(Items(x, y, weights)).chunks(4)] == [0, 4]
    y[:4] = NAN
    assert [int(batch.mask.sum()) for batch in prepare(Items(x, y), mask="nan").chunks(4)] == [0, 4]


def test_bad_streams_are_refused() -> None:
    x, y = problem(8)

    class Rows(Dataset):
        def __init__(self, item: Any):
            self.item = item

        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Any:
            return self.item(i)

    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda i: {"x": x[i], "y": y[i]}, ValueError, "got a dict of length 2"),
        (lambda i: x[i], ValueError, "must yield"),
        (lambda i: (x[i], y[i], 1.0, 2.0), ValueError, r"list of length 4|tuple of length 4"),
        (lambda i: (x[: i + 1], y[i]), ValueError, "cannot be put into one batch"),
        (lambda i: (x[i] * (NAN if i == 2 else 1), y[i]), ValueError, r"x contains .* NaN at \(2, 0\)"),
        (lambda i: (x[i], y[i], -1.0), ValueError, "negative"),
        (lambda i: (x[i], "a"), TypeError, "y must be numeric"),
    ]
    for item, error, message in cases:
        with pytest.raises(error, match=message):
            next(iter(prepare(Rows(item)).chunks(4)))
    with pytest.raises(ValueError, match="data is empty"):
        prepare(TensorDataset(x[:0], y[:0]))
    with pytest.raises(ValueError, match="data is empty"):
        prepare(Items(x[:0], y[:0]))
    with pytest.raises(ValueError, match="mask= as an array"):
        prepare(Items(x, y), mask=np.ones((8, 1), dtype=bool))
    with pytest.raises(ValueError, match="whole data at once"):
        prepare(Items(x, y)).all()
    with pytest.raises(ValueError, match="whole data at once"):
        trained(DataLoader(Items(x, y), batch_size=4), pl.MAP(epochs=1, batch_size=None))
    with pytest.raises(ValueError, match="held-out part"):
        trained(DataLoader(Items(x, y), batch_size=4), pl.MAP(epochs=1, patience=2))
    short = ((x[:4], y[:3]),)
    with pytest.raises(ValueError, match="4 examples and y has 3 in one batch"):
        next(prepare(DataLoader(short, batch_size=None), num_data=8).passes())  # type: ignore[arg-type]


def test_a_pass_that_contradicts_num_data_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter([(torch.ones(3), torch.zeros(1))] * 40)

    loader = torch.utils.data.DataLoader(Rows(), batch_size=16)
    for number, expected in ((10, 1), (400, 1), (40, 0), (45, 0)):  # a short last batch may have been dropped
        caplog.clear()
        pl.fit(torch.nn.Linear(3, 1), loader, pl.MAP(epochs=4), num_data=number, compile=False, progress=False)
        found = [r.getMessage() for r in caplog.records if "one pass over the data gave 40 examples" in r.getMessage()]
        assert len(found) == expected


def test_numbers_that_the_network_cannot_hold_are_called_large() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1).double()
    with pytest.raises(ValueError, match=r"y holds .*e\+39, which is too large for torch.float32: rescale it"):
        pl.fit(torch.nn.Linear(3, 1), (x, y * 1e39), pl.MAP(epochs=1), progress=False)
    with pytest.raises(ValueError, match=r"x holds .*, which is too large for torch.float32"):
        pl.fit(torch.nn.Linear(3, 1), (x.double() * 1e300, y), pl.MAP(epochs=1), progress=False)


class Pairs(Dataset):
    """Rows (x, y), fetched one by one."""

    def __init__(self, x: Any, y: Tensor):
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        return take(self.x, row), self.y[row]


class Duck:
    """A data set that is none of torch's, with weights."""

    def __init__(self, x: Tensor):
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], 0.0, 1.0


class Stream(IterableDataset):
    """Inputs alone."""

    def __init__(self, x: Tensor):
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x)


def test_predict_takes_what_fit_takes() -> None:
    x, y = torch.randn(300, 3), torch.randn(300, 1)
    method = pl.Laplace(mode=pl.MAP(epochs=30))
    posterior = pl.fit(nn.Linear(3, 1), (x, y), method, compile=False, progress=False)
    expected, functions = posterior.predict(x), posterior.functions(x, draws=3)
    loader = DataLoader(Pairs(x, y), batch_size=7)
    before = torch.get_rng_state()
    for given in (TensorDataset(x, y), TensorDataset(x), Pairs(x, y), loader, Duck(x), Stream(x), DataLoader(x)):
        found = posterior.predict(given)
        assert len(found) == 300
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.variance, expected.variance)
        assert torch.equal(posterior.functions(given, draws=3), functions)
        assert torch.equal(posterior.moments(given)[0], posterior.moments(x)[0])
    assert torch.equal(torch.get_rng_state(), before)
    sampled = pl.fit(nn.Linear(3, 1), (x, y), pl.SGLD(epochs=9, thin=2), compile=False, progress=False)
    assert sampled.diagnostics(loader) == sampled.diagnostics(x)
    prior = pl.prior_predictive(nn.Linear(3, 1), loader, pl.likelihoods.Gaussian())
    assert prior.num_inputs == 300


def test_predict_takes_loaders_of_nested_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.inner(x["a"] + x["b"])

    x, y = {"a": torch.randn(20, 3), "b": torch.randn(20, 3)}, torch.randn(20, 1)
    posterior = pl.fit(Sum(), (x, y), pl.MAP(epochs=1), compile=False, progress=False)
    assert torch.equal(posterior.predict(DataLoader(Pairs(x, y), batch_size=6)).mean, posterior.predict(x).mean)


def test_loaders_that_cannot_be_predicted() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    posterior = pl.fit(nn.Linear(3, 1), (x, y), pl.MAP(epochs=1), compile=False, progress=False)
    rows = Pairs(x, y)
    batches = BatchSampler(RandomSampler(rows), 4, drop_last=False)
    shuffled = [DataLoader(rows, shuffle=True), DataLoader(rows, batch_sampler=batches)]
    shuffled += [DataLoader(rows, sampler=s) for s in (SubsetRandomSampler(range(5)), WeightedRandomSampler([1.0] * 20, 9))]
    for loader in shuffled:
        with pytest.raises(ValueError, match="x is a loader that shuffles"):
            posterior.predict(loader)
    with pytest.raises(ValueError, match="x is empty"):
        posterior.predict(DataLoader(Pairs(x[:0], y[:0])))
    with pytest.raises(ValueError, match="batches of the loader do not fit together"):
        posterior.predict(DataLoader([x[:2], x[:3, :2]], batch_size=None))
    with pytest.raises(ValueError, match="x contains 1 non-finite value"):
        posterior.predict(TensorDataset(torch.tensor([[0.0, 1.0, torch.nan]])))
    with pytest.raises(TypeError, match=r"x must be inputs, got a .*pass its tensor"):
        pl.fit(nn.Linear(3, 1), (TensorDataset(x), y), pl.MAP(epochs=1))


# ---------------------------------------------------------------------------------------------------------------------
# Mappings with labels, and targets to leave out


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


IGNORING = pl.likelihoods.Categorical(ignore_index=-100)
WORDS = torch.randint(12, (20, 5), generator=torch.Generator().manual_seed(1))
THERE = torch.arange(5) < (torch.arange(20) % 5 + 1)[:, None]
TAGS = torch.where(THERE, WORDS % 3, -100)
SENTENCES = {"input_ids": WORDS, "attention_mask": THERE.long()}


class Sentences(Dataset):
    """Sentences as Hugging Face keeps them: mappings, of tensors or of plain lists."""

    def __init__(self, lists: bool, label: str):
        self.lists, self.label = lists, label

    def __len__(self) -> int:
        return len(WORDS)

    def __getitem__(self, i: int) -> Any:
        row = {name: value[i] for name, value in {**SENTENCES, self.label: TAGS}.items()}
        return {name: value.tolist() for name, value in row.items()} if self.lists else row


@pytest.mark.parametrize("method", [pl.MAP(epochs=3, batch_size=None), pl.MAP(epochs=3, batch_size=8)])
def test_ignored_targets_are_masked_ones(method: pl.MAP) -> None:
    left = pl.fit(Tagger(), (SENTENCES, TAGS), method, likelihood=IGNORING)
    masked = pl.fit(Tagger(), (SENTENCES, TAGS.clamp(min=0)), method, mask=THERE, likelihood=pl.likelihoods.Categorical())
    pred = left.predict(SENTENCES)
    assert torch.equal(pred.probs, masked.predict(SENTENCES).probs)
    other = left.predict(SENTENCES).log_prob(TAGS)
    known = pred.probs.log().gather(-1, TAGS.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(other, (known * THERE).sum(1))
    for metric in (pl.metrics.accuracy, pl.metrics.log_likelihood, pl.metrics.brier, pl.metrics.ece):
        assert metric(pred, TAGS) == metric(masked.predict(SENTENCES), TAGS.clamp(min=0), mask=THERE)


def test_curvature_leaves_ignored_targets_out() -> None:
    method = pl.Laplace(mode=pl.MAP(epochs=2, batch_size=None), structure="diag")
    left = pl.fit(Tagger(), (SENTENCES, TAGS), method, likelihood=IGNORING)
    masked = pl.fit(Tagger(), (SENTENCES, TAGS.clamp(min=0)), method, mask=THERE, likelihood=pl.likelihoods.Categorical())
    assert torch.equal(left.predict(SENTENCES).probs, masked.predict(SENTENCES).probs)


@pytest.mark.parametrize("label", ["labels", "label"])
@pytest.mark.parametrize("lists", [False, True])
def test_mappings_with_labels_are_inputs_and_targets(lists: bool, label: str) -> None:
    method, rows = pl.MAP(epochs=3, batch_size=20), Sentences(lists, label)
    arrays = pl.fit(Tagger(), (SENTENCES, TAGS), method, likelihood=IGNORING)
    fitted = pl.fit(Tagger(), rows, method, likelihood=IGNORING)
    assert torch.equal(fitted.predict(SENTENCES).probs, arrays.predict(SENTENCES).probs)
    assert torch.equal(fitted.predict(rows).probs, fitted.predict(SENTENCES).probs)
    batches = [UserDict({name: value[k : k + 5] for name, value in {**SENTENCES, label: TAGS}.items()}) for k in (0, 5, 10, 15)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # as a data collator leaves them
    streamed = pl.fit(Tagger(), loader, method, likelihood=IGNORING, num_data=20)
    assert streamed.run["steps"] > 0
    assert torch.equal(streamed.functions(loader), streamed.functions(SENTENCES))
    whole = pl.fit(Tagger(), {**SENTENCES, label: TAGS}, method, likelihood=IGNORING)
    assert torch.equal(whole.predict(SENTENCES).probs, arrays.predict(SENTENCES).probs)


def test_inputs_called_labels_stay_inputs_beside_targets() -> None:
    data = prepare(({"labels": NUMBERS}, [0, 1, 2]))
    assert list(data.batch.x) == ["labels"]


def test_nothing_but_ignored_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="ignore_index"):
        pl.fit(Tagger(), (SENTENCES, torch.full((20, 5), -100)), pl.MAP(epochs=1), likelihood=IGNORING)
    pred = pl.fit(Tagger(), (SENTENCES, TAGS), pl.MAP(epochs=1), likelihood=IGNORING).predict(SENTENCES)
    with pytest.raises(ValueError, match="nothing is left to measure"):
        pl.metrics.accuracy(pred, torch.full((20, 5), -100))
