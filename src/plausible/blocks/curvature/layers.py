"""Layers of weights, what one knows of Jacobians (rows of gradients, columns of inputs), and sums of their products in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plausible.blocks.curvature.recording import Kind
from plausible.core.weights import Weights

BLOCK = 2**24  # numbers of a Jacobian that may stand in memory at once
STRIPS = 5  # in how many strips a CPU computes a symmetric sum: narrow ones do little below the diagonal, wide ones run faster
# bytes of a block that teaches the C library to keep freed memory: the largest that does (32 MiB with its header)
RETAINED = 2**25 - 2**16


@dataclass(frozen=True)
class Layer:
    """Weights that belong together: a matrix with the bias that it is used with, a table, or a vector.

    `shapes` are those of the weights in `names`. A matrix is seen as [groups, out, in], with the bias as one more column;
    `transposed` says that its first axis holds the inputs, as in transposed convolutions. A table's rows are found by number.
    """

    names: tuple[str, ...]
    kind: Kind
    shapes: tuple[tuple[int, ...], ...]
    biased: bool = False
    weighted: bool = True
    transposed: bool = False
    groups: int = 1

    @property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """[groups, out, in], the bias among the inputs."""
        if not self.weighted:
            return 1, self.shapes[0][0], 1
        first, *rest = self.shapes[0]
        if self.kind == "table":
            return 1, rest[0], first
        inner = torch.Size(rest).numel()
        if self.transposed:
            return self.groups, inner, first // self.groups
        return self.groups, first // self.groups, inner + self.biased

    def matrix(self, weights: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """The weights as [*lead, groups, out, in]; those of a vector as [*lead, size]."""
        values = [weights[name] for name in self.names]
        front = values[0].shape[:lead]
        if self.kind == "vector":
            return torch.cat([value.reshape(*front, -1) for value in values], -1)
        groups, out, into = self.matrix_shape
        if not self.weighted:
            return values[0].reshape(*front, 1, out, 1)
        if self.kind == "table":
            return values[0].reshape(*front, 1, into, out).transpose(-1, -2)
        if self.transposed:
            return values[0].reshape(*front, groups, into, out).transpose(-1, -2)
        whole = values[0].reshape(*front, groups, out, into - self.biased)
        return torch.cat([whole, values[1].reshape(*front, groups, out, 1)], -1) if self.biased else whole

    def weights(self, matrix: Tensor) -> Weights:
        front = matrix.shape[:-3]
        if not self.weighted or self.transposed or self.kind == "table":
            return {self.names[0]: matrix.transpose(-1, -2).reshape((*front, *self.shapes[0]))}
        if not self.biased:
            return {self.names[0]: matrix.reshape((*front, *self.shapes[0]))}
        parts = matrix[..., :-1], matrix[..., -1]
        return {n: part.reshape((*front, *shape)) for n, part, shape in zip(self.names, parts, self.shapes)}

    def named(self, total: Tensor) -> Weights:
        """Weights from a sum over examples: [G, out, in], [in, out] of a table, or [size] of a vector."""
        if self.kind == "vector":
            return self.split(total)
        return self.weights(total) if self.kind == "matrix" else {self.names[0]: total}

    def split(self, flat: Tensor) -> Weights:
        parts = flat.split_with_sizes(self.sizes, dim=-1)
        return {n: part.reshape((*flat.shape[:-1], *s)) for n, part, s in zip(self.names, parts, self.shapes)}


@dataclass
class Part:
    """What one layer knows of JᵀS for a batch of B examples and K columns.

    Matrices: `columns` [B, T, G, in] (with ones for the bias), `rows` [K, B, T, G, out]. Tables: `columns` are numbers [B, T],
    −1 for none. Vectors: `rows` is the Jacobian itself, [K, B, size].
    """

    layer: Layer
    columns: Tensor
    rows: Tensor

    def jacobian(self) -> Tensor:
        """JᵀS written down: [K, B, size], in the order of the layer's weights."""
        if self.layer.kind == "vector":
            return self.rows
        named = self.layer.weights(self.matrices())
        lead = self.rows.shape[:2]
        return torch.cat([value.reshape(*lead, -1) for value in named.values()], -1)

    def matrices(self) -> Tensor:
        """JᵀS as matrices [K, B, G, out, in]."""
        if self.layer.kind == "table":
            _, out, into = self.layer.matrix_shape
            count, batch = self.rows.shape[:2]
            # a table's Jacobian is zero but for the rows that were looked up
            whole = self.rows.new_zeros(count, batch, into, out)
            index = self.columns.clamp(min=0)[None, :, :, None].expand(count, -1, -1, out)
            # −1 stands for padding, whose row is never learned
            kept = self.rows[:, :, :, 0] * (self.columns >= 0)[None, :, :, None]
            return whole.scatter_add_(2, index, kept).transpose(-1, -2)[:, :, None]
        return torch.einsum("kbtgo,btgi->kbgoi", self.rows, self.columns)

    def summed(self, total: Tensor | None = None) -> Tensor:
        """Σ JᵀS over columns and examples, added to a total in place: [G, out, in], [in, out] of a table, or [size] of a vector."""
        layer, rows = self.layer, self.rows[0] if len(self.rows) == 1 else self.rows.sum(0)
        groups, out, into = layer.matrix_shape if layer.kind != "vector" else (0, 0, layer.size)
        if total is None:
            total = rows.new_zeros({"vector": (into,), "table": (into, out), "matrix": (groups, out, into)}[layer.kind])
        if layer.kind == "vector":
            total += rows.sum(0)
        elif layer.kind == "table":
            kept = (rows[:, :, 0] * (self.columns >= 0)[:, :, None]).flatten(0, 1)
            # no [in, out] for each example: only the rows that were used are touched
            total.index_add_(0, self.columns.clamp(min=0).flatten(), kept)
        else:
            add_products(total, rows, self.columns)
        return total

    @property
    def shared(self) -> bool:
        return self.rows.ndim > 3 and self.rows.shape[2] > 1

    def blocks(self) -> Sequence[Part]:
        """The same in parts of so many examples that the Jacobian of one is of bounded size."""
        count, batch = self.rows.shape[:2]
        size = max(1, BLOCK // max(1, count * self.layer.size))
        if size >= batch:
            return [self]
        starts = range(0, batch, size)
        return [Part(self.layer, self.columns[s : s + size], self.rows[:, s : s + size]) for s in starts]


# ---------------------------------------------------------------------------------------------------------------------
# Sums over examples, added up in place
def keep_freed_memory() -> None:
    """Let every chunk use the memory of the chunk before it.

    glibc gives freed memory back to the system beyond a limit that it learns from the largest block that was freed; at first that
    is less than a chunk, each page of which then has to be had and cleared anew. This block is never written to, so it takes none.
    """
    # freed at once; glibc remembers its size as the new threshold
    torch.empty(RETAINED, dtype=torch.uint8)


def add_products(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add to a total [G, m, n]: Σ a bᵀ by groups, over the leading axes of a [..., G, m] and b [..., G, n]."""
    if a.shape[-2] == 1:
        # in place and without a temporary, which for wide layers would be as large as the total
        total[0].addmm_(a.reshape(-1, a.shape[-1]).T, b.reshape(-1, b.shape[-1]))
    else:
        total += torch.einsum("ngi,ngj->gij", a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))


def add_gram(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The same for a symmetric Σ a bᵀ; what is below the diagonal of the total is then not to be looked at.

    Cost on a CPU: 0.6·2Nn² multiplications and additions for N vectors with `STRIPS` = 5, and no memory where the total has the
    type of a and b.
    """
    if a.shape[-2] > 1 or (total.device.type != "cpu" and total.dtype == a.dtype):
        return add_products(total, a, b)
    a, b, whole = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), total[0]
    if total.dtype != a.dtype:
        # of another type there is no addmm_: float32 products, summed in float64
        whole += a.T @ b
        return None
    width = max(64, 16 * -(-len(whole) // (16 * STRIPS)))  # kernels work on multiples of 16
    for start in range(0, len(whole), width):
        whole[start : start + width, start:].addmm_(a[:, start : start + width].T, b[:, start:])
    return None
