"""What loading gives: `Dataset` with fixed parts, `Table` with splits, `Split` of a table."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from plausible.posteriors.predictive import Predictive

Pair = tuple[Any, Any]
Value = TypeVar("Value", Tensor, "Predictive")


def arrays(pair: Pair) -> Pair:
    """A pair with NumPy arrays instead of tensors."""
    x, y = (value.numpy() if isinstance(value, Tensor) else value for value in pair)
    return x, y


@dataclass(frozen=True, eq=False)
class Dataset:
    """A set with fixed parts: `train`, `test` and, where published, `validation`, each a pair (x, y).

    Images: x float32 in [0, 1], `[N, channels, height, width]` (uint8 with `raw=True`); y int64 `[N]`. Text: x is a tuple of
    N documents; see `plausible.datasets.encode`. `classes` are the words for the labels 0, 1, ….
    """

    name: str
    train: Pair
    test: Pair
    validation: Pair | None = None
    classes: tuple[str, ...] = ()

    def numpy(self) -> Dataset:
        """The same with NumPy arrays."""
        validation = None if self.validation is None else arrays(self.validation)
        return replace(self, train=arrays(self.train), test=arrays(self.test), validation=validation)

    def __repr__(self) -> str:
        sizes = {part: getattr(self, part) for part in ("train", "validation", "test")}
        words = ", ".join(f"{part}={len(pair[1])}" for part, pair in sizes.items() if pair is not None)
        return f"Dataset({self.name!r}, {words}, classes={len(self.classes)})"


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of a table for training and for testing, each a pair (x, y).

    train_rows, test_rows: which rows of the table they are, int64. After `standardised()` inputs and targets are
    (value − loc) / scale with the mean and standard deviation of the training rows; before, loc is 0 and scale 1.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    train_rows: Tensor
    test_rows: Tensor
    x_loc: Tensor
    x_scale: Tensor
    y_loc: Tensor
    y_scale: Tensor
    is_standardised: bool = False

    def standardised(self) -> Split:
        """(v − mean) / std of the training rows, for inputs and for targets that are numbers; labels are left alone.

        The standard deviation divides by N. A column that is constant in the training rows is only centred: its scale is 1.
        Computed in float64. On a split that is standardised already nothing changes.
        """
        if self.is_standardised:
            return self
        x_loc, x_scale = moments(self.train[0])
        y_loc, y_scale = self.y_loc, self.y_scale
        if self.train[1].is_floating_point():
            y_loc, y_scale = moments(self.train[1])

        def scaled(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            x, y = pair
            if y.is_floating_point():
                y = ((y.double() - y_loc) / y_scale).to(y.dtype)
            return ((x.double() - x_loc) / x_scale).to(x.dtype), y

        moved = {"x_loc": x_loc, "x_scale": x_scale, "y_loc": y_loc, "y_scale": y_scale}
        return replace(self, train=scaled(self.train), test=scaled(self.test), is_standardised=True, **moved)

    def restore(self, value: Value) -> Value:
        """The values loc + scale·value: targets, or a predictive of standardised targets, in the units of the table."""
        if isinstance(value, Tensor):
            return (value.double() * self.y_scale + self.y_loc).to(value.dtype)
        return value.rescaled(self.y_loc, self.y_scale)

    def numpy(self) -> tuple[Pair, Pair]:
        """(train, test) with NumPy arrays."""
        return arrays(self.train), arrays(self.test)


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (divided by N) of each column in float64; 1 where a column is constant."""
    values = values.double()
    constant = (values == values[:1]).all(0)
    loc = torch.where(constant, values[0], values.mean(0))
    scale = values.std(0, correction=0)
    return loc, torch.where(constant | (scale == 0), torch.ones_like(scale), scale)


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of numbers with named columns and published splits.

    x: float32 `[N, inputs]`. y: float32 `[N, targets]`, or int64 labels `[N]`. splits, gap_splits: pairs (training rows,
    test rows), int64. hidden: hidden units that the literature uses, where there is a custom.
    """

    name: str
    x: Tensor
    y: Tensor
    features: tuple[str, ...]
    targets: tuple[str, ...]
    splits: tuple[tuple[Tensor, Tensor], ...] = ()
    gap_splits: tuple[tuple[Tensor, Tensor], ...] = ()
    hidden: int | None = None

    def split(self, index: int) -> Split:
        """Published split number `index`, from 0."""
        return self._taken(self.splits, index, "splits")

    def gap(self, index: int) -> Split:
        """The split along input `index`: training rows from its lower and upper third, test rows from the middle."""
        return self._taken(self.gap_splits, index, "gap splits")

    def random_split(self, test_fraction: float = 0.1, seed: int = 0) -> Split:
        """A split of one's own: round(test_fraction·N) test rows (at least one), a function of the seed."""
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        test = max(1, round(test_fraction * len(self.x)))
        return self._rows(order[test:], order[:test])

    def _taken(self, splits: Sequence[tuple[Tensor, Tensor]], index: int, kind: str) -> Split:
        if not splits:
            raise ValueError(f"{self.name} has no {kind}; use random_split(test_fraction, seed)")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(splits):
            raise ValueError(f"{self.name} has {kind} 0 to {len(splits) - 1}, got {index!r}")
        return self._rows(*splits[index])

    def _rows(self, train: Tensor, test: Tensor) -> Split:
        x, y = (torch.zeros(shape, dtype=torch.float64) for shape in (self.x.shape[1:], self.y.shape[1:]))
        pairs = (self.x[train], self.y[train]), (self.x[test], self.y[test])
        return Split(*pairs, train, test, x, torch.ones_like(x), y, torch.ones_like(y))

    def numpy(self) -> Pair:
        """(x, y) as NumPy arrays."""
        return self.x.numpy(), self.y.numpy()

    def __repr__(self) -> str:
        counts: dict[str, Sized] = {"row": self.x, "input": self.features, "target": self.targets}
        counts |= {"split": self.splits, "gap split": self.gap_splits}
        words = (f"{len(what)} {name}{'' if len(what) == 1 else 's'}" for name, what in counts.items())
        return f"Table({self.name!r}, {', '.join(words)})"
