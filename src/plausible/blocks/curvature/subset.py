"""Curvature of some elements of the weights alone: a subnetwork, the rest of which has no variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plausible.blocks.curvature.blocks import KINDS, Block, Dense, flat, flat_precision, named
from plausible.blocks.curvature.layers import Layer, Part
from plausible.core.weights import Weights


class Subset(Block):
    """H [k, k] of the elements number `index` [k] of all weights of `layers`, end to end (Daxberger et al. 2021).

    The other elements are points: they have no variance, and log det Λ is that of the chosen ones.
    """

    kind = "subset"

    def __init__(self, layers: Sequence[Layer], index: Tensor, matrix: Tensor | None = None):
        super().__init__(layers)
        self.index, self.inner = index, Dense([Layer(("chosen",), "vector", ((len(index),),))], matrix)

    @property
    def chosen(self) -> int:
        """How many elements are random."""
        return len(self.index)

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """Of the numbers that are chosen from."""
        return sum(layer.size for layer in layers)

    def _precision(self, precision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"chosen": flat_precision(self.layers, precision)[self.index]}

    def _parts(self, parts: Sequence[Part]) -> list[Part]:
        """The Jacobian with respect to the chosen elements, a few examples at a time."""
        count, batch = parts[0].rows.shape[:2]
        step = max(1, 2**24 // max(1, count * self.size))
        found = []
        for start in range(0, batch, step):
            rows = slice(start, start + step)
            own = [Part(p.layer, p.columns[rows], p.rows[:, rows]).jacobian() for p in parts]
            found.append(torch.cat(own, -1)[..., self.index])
        jacobian = torch.cat(found, 1)
        return [Part(self.inner.layers[0], jacobian[:0], jacobian)]

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        """Products of the Jacobian."""
        self.inner.add(self._parts(parts), weight, again)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Of the chosen elements."""
        return self.inner.log_det(self._precision(precision), scale)

    def _spread(self, values: Tensor) -> Weights:
        whole = values.new_zeros(*values.shape[:-1], self.size)
        whole[..., self.index] = values
        return named(self.layers, whole)

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Zero for the others."""
        return self._spread(self.inner.variances(self._precision(precision), scale)["chosen"])

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Zero for the others."""
        xi = {"chosen": flat(self.layers, noise)[:, self.index]}
        return self._spread(self.inner.draw(xi, self._precision(precision), scale)["chosen"])

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λv among the chosen elements, zero for the others."""
        v = {"chosen": flat(self.layers, vectors)[:, self.index]}
        return self._spread(self.inner.product(v, self._precision(precision), scale)["chosen"])

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Of the chosen elements."""
        v = flat(self.layers, {name: vector[name][None] for name in self.names})[0, self.index]
        return self.inner.quadratic({"chosen": v}, self._precision(precision), scale)

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """By the chosen elements alone."""
        return self.inner.covariance(self._parts(parts), self._precision(precision), scale)

    def tensors(self) -> dict[str, Tensor]:
        """Numbers of the elements, and the matrix."""
        return {"index": self.index, **self.inner.tensors()}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Subset:
        """From numbers and matrix."""
        return cls(layers, tensors["index"], tensors["matrix"])


KINDS["subset"] = Subset
