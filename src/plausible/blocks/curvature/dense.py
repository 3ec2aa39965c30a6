"""Curvature that is written down: the matrix of one layer, of all weights, or of some of their elements alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.products import Product
from plausible.blocks.curvature.structures import Block, Curvature, flat, flat_precision, named
from plausible.core.data import Batch, Data
from plausible.core.model import Model
from plausible.core.special import widest
from plausible.core.weights import Weights
from plausible.core.words import log

# weights up to which a Hessian is read off its products with unit vectors, and how many of those go into one pass
HESSIAN_LIMIT, UNITS = 20_000, 64


class Dense(Block):
    """H [P, P], written down: of one layer, or of all of them."""

    kind = "dense"

    def __init__(self, layers: Sequence[Layer], matrix: Tensor | None = None):
        super().__init__(layers)
        self.matrix = matrix
        self._known: tuple[Mapping[str, Tensor], float, Tensor] | None = None

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """P² in float64, and two copies while it is solved."""
        return 6 * sum(layer.size for layer in layers) ** 2

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:  # noqa: ARG002
        """Products of the Jacobian; without it, and "turned" (the bias among the columns), for one layer used at one position."""
        first = parts[0]
        outer = len(parts) == 1 and first.layer.kind == "matrix" and not first.shared and first.layer.groups == 1
        name, size, device = "turned" if outer else "matrix", sum(part.layer.size for part in parts), first.rows.device
        if name not in self.sums:
            self.sums[name] = torch.zeros(size, size, dtype=widest(device), device=device)
        total = self.sums[name]
        if outer:
            _, out, into = first.layer.matrix_shape
            _add_outer(first, total.view(out, into, out, into))
            return
        for j in _jacobians(parts, 2**24):
            j = j.flatten(0, 1).to(total.dtype)
            total.addmm_(j.T, j)

    def finish(self) -> None:
        """Bring the rows and columns into the order of the weights, with the bias behind the matrix."""
        turned, self.matrix = self.sums.pop("turned", None), self.sums.pop("matrix", None)
        if turned is None:
            return
        layer = self.layers[0]
        if layer.biased and layer.weighted:
            # push the numbers of the elements through the layout to learn the permutation
            numbers = torch.arange(layer.size, device=turned.device).view(layer.matrix_shape)
            order = torch.cat([v.reshape(-1) for v in layer.weights(numbers).values()])
            turned = turned[order][:, order]
        self.matrix = turned if self.matrix is None else self.matrix.add_(turned)

    def _whole(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        assert self.matrix is not None
        whole = scale.double() * self.matrix.double()
        whole.diagonal().add_(flat_precision(self.layers, precision))  # in place: these matrices are large
        return whole

    def _factor(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The Cholesky factor; that of the last question is kept."""
        if self._known is not None and self._known[0] is precision and self._known[1] == float(scale):
            return self._known[2]
        factor, info = torch.linalg.cholesky_ex(self._whole(precision, scale))
        if bool(info.any()):
            raise ValueError(
                "the curvature plus the prior's precision is not positive definite: these weights are no maximum of the "
                "posterior; train longer, use curvature='ggn', or a stronger prior"
            )
        if not factor.requires_grad:
            self._known = (precision, float(scale), factor)
        return factor

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return 2 * self._factor(precision, scale).diagonal().log().sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        inverse = torch.cholesky_inverse(self._factor(precision, scale))
        return named(self.layers, inverse.diagonal().to(scale.dtype))

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """L⁻ᵀξ with LLᵀ = Λ."""
        xi = flat(self.layers, noise)
        factor = self._factor(precision, scale)
        # Λ = LLᵀ gives L⁻ᵀξ the covariance Λ⁻¹; no inverse is formed
        draws = torch.linalg.solve_triangular(factor.T, xi.double().T, upper=True).T
        return named(self.layers, draws.to(xi.dtype))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        v = flat(self.layers, vectors)
        return named(self.layers, (v.double() @ self._whole(precision, scale)).to(v.dtype))

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """‖L⁻¹v‖²."""
        v = flat(self.layers, {name: vector[name][None] for name in self.names}).double().T
        return torch.linalg.solve_triangular(self._factor(precision, scale), v, upper=False).square().sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Gram matrices of L⁻¹Jᵀ."""
        factor = self._factor(precision, scale)
        grams = []
        for j in _jacobians(parts, 2**23):
            half = torch.linalg.solve_triangular(factor, j.flatten(0, 1).T.double(), upper=False)
            half = half.view(self.size, len(j), -1)
            grams.append(torch.einsum("pkb,plb->bkl", half, half))
        return torch.cat(grams).to(parts[0].rows.dtype)

    def tensors(self) -> dict[str, Tensor]:
        assert self.matrix is not None
        return {"matrix": self.matrix}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        return cls(layers, tensors["matrix"])

    def plus(self, other: Self) -> Self:
        return type(self)(self.layers, self.tensors()["matrix"] + other.tensors()["matrix"])


def _jacobians(parts: Sequence[Part], numbers: int) -> Iterator[Tensor]:
    """Jacobians of all parts, [K, b, P], of so few examples b that they have about so many `numbers`."""
    count, batch = parts[0].rows.shape[:2]
    step = max(1, numbers // max(1, count * sum(part.layer.size for part in parts)))
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        yield torch.cat([Part(p.layer, p.columns[rows], p.rows[:, rows]).jacobian() for p in parts], -1)


def _add_outer(part: Part, whole: Tensor) -> None:
    """Add Σ_n M_n ⊗ c_n c_nᵀ with M = Σ_k r_k r_kᵀ to [out, in, out, in]: no Jacobian, for a layer used at one position."""
    r, c = part.rows[:, :, 0, 0].to(whole.dtype), part.columns[:, 0, 0].to(whole.dtype)
    # [B, out, out]: small beside [B, out·in] of the Jacobian
    inner = torch.einsum("kbo,kbp->bop", r, r)
    out, into = r.shape[-1], c.shape[-1]
    for o in range(out):
        # one output row at a time bounds the memory; the lower half follows by symmetry
        left = (inner[:, o, o:, None] * c[:, None]).flatten(1)  # [B, (out − o)·in]
        strip = (left.T @ c).view(out - o, into, into)
        whole[o, :, o:] += strip.permute(1, 0, 2)
        if o + 1 < out:
            whole[o + 1 :, :, o] += strip[1:].permute(0, 2, 1)


class Subset(Block):
    """H [k, k] of the elements number `index` [k] of all weights of `layers`, end to end (Daxberger et al. 2021).

    The other elements are points: they have no variance, and log det Λ is that of the chosen ones.
    """

    kind = "subset"

    def __init__(self, layers: Sequence[Layer], index: Tensor, matrix: Tensor | None = None):
        super().__init__(layers)
        self.index, self.inner = index, Dense([Layer(("chosen",), "vector", ((len(index),),))], matrix)
        # one dict: what the inner block adds up is what a checkpoint writes
        self.sums = self.inner.sums

    @property
    def chosen(self) -> int:
        return len(self.index)

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        return sum(layer.size for layer in layers)

    def _precision(self, precision: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"chosen": flat_precision(self.layers, precision)[self.index]}

    def _parts(self, parts: Sequence[Part]) -> list[Part]:
        jacobian = torch.cat([j[..., self.index] for j in _jacobians(parts, 2**24)], 1)
        return [Part(self.inner.layers[0], jacobian[:0], jacobian)]

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        self.inner.add(self._parts(parts), weight, again)

    def finish(self) -> None:
        self.inner.finish()

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return self.inner.log_det(self._precision(precision), scale)

    def _spread(self, values: Tensor) -> Weights:
        whole = values.new_zeros(*values.shape[:-1], self.size)
        whole[..., self.index] = values
        return named(self.layers, whole)

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return self._spread(self.inner.variances(self._precision(precision), scale)["chosen"])

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        xi = {"chosen": flat(self.layers, noise)[:, self.index]}
        return self._spread(self.inner.draw(xi, self._precision(precision), scale)["chosen"])

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λv among the chosen elements, zero for the others."""
        v = {"chosen": flat(self.layers, vectors)[:, self.index]}
        return self._spread(self.inner.product(v, self._precision(precision), scale)["chosen"])

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        v = flat(self.layers, {name: vector[name][None] for name in self.names})[0, self.index]
        return self.inner.quadratic({"chosen": v}, self._precision(precision), scale)

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return self.inner.covariance(self._parts(parts), self._precision(precision), scale)

    def tensors(self) -> dict[str, Tensor]:
        return {"index": self.index, **self.inner.tensors()}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        return cls(layers, tensors["index"], tensors["matrix"])

    def plus(self, other: Self) -> Self:
        raise NotImplementedError("subsets of two fits are of other elements")


class ExactHessian:
    """An `Estimator` of the exact Hessian in `Dense` or `Diagonal` blocks: each pass is a product with `UNITS` unit vectors."""

    note = ""

    def __init__(
        self, model: Model, weights: Weights, data: Data, blocks: Sequence[Block], structure: str, chunk: int | None = None
    ):
        if structure not in ("diag", "block", "full"):
            raise ValueError(
                f"curvature='hessian' has no Kronecker factors (structure={structure!r}): use structure='diag', 'block', 'full' or "
                "'lowrank', or curvature='ggn'"
            )
        if (size := sum(block.size for block in blocks)) > HESSIAN_LIMIT:
            raise ValueError(
                f"curvature='hessian' takes a pass over the data for every weight, and there are {size:,}; use curvature='ggn', "
                "structure='lowrank', or fewer weights (where='last')"
            )
        self.structure, self.blocks = structure, list(blocks)
        self.like = {name: weights[name] for block in blocks for name in block.names}
        self.product = Product(model, weights, data, "hessian", chunk=chunk)
        self.spans = [(i, k) for i, block in enumerate(self.blocks) for k in range(0, block.size, UNITS)]
        self.passes, self.rows = len(self.spans), list[Tensor]()
        self._multiply()

    @property
    def chunk(self) -> int:
        return self.product.chunk

    def _multiply(self) -> None:
        number, first = self.spans[len(self.rows)]
        block, like = self.blocks[number], next(iter(self.like.values()))
        unit = torch.zeros(min(UNITS, block.size - first), block.size, dtype=like.dtype, device=like.device)
        # rows first … of the identity
        unit[:, first:].fill_diagonal_(1.0)
        # a block needs H within itself alone: all other weights stand still
        vectors = {n: torch.zeros(len(unit), *v.shape).to(v) for n, v in self.like.items()}
        self.product.start({**vectors, **named(block.layers, unit)})

    def add(self, batch: Batch) -> None:
        self.product.add(batch)

    def next_pass(self) -> bool:
        number, first = self.spans[len(self.rows)]
        rows = flat(self.blocks[number].layers, self.product.finish())
        self.rows.append(rows if isinstance(self.blocks[number], Dense) else rows[:, first:].diagonal())
        if len(self.rows) == self.passes:
            return False
        self._multiply()
        return True

    def finish(self) -> Curvature:
        for i, block in enumerate(self.blocks):
            whole = torch.cat([rows for (number, _), rows in zip(self.spans, self.rows) if number == i])
            if isinstance(block, Dense):
                # rounding leaves products with unit vectors slightly asymmetric
                block.matrix = (whole + whole.T) / 2
                continue
            if negative := int((whole < 0).sum()):
                log.warning("%d of %d diagonal entries of the Hessian are negative and were set to 0", negative, block.size)
            block.values = block.layers[0].split(whole.clamp(min=0))  # type: ignore[attr-defined]
        return Curvature(self.blocks, self.structure)

    def tensors(self) -> dict[str, Tensor]:
        rows = {f"rows {i}": rows for i, rows in enumerate(self.rows)}
        return {**rows, **{f"sum.{name}": v for name, v in self.product.sums.items()}}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.rows = [tensors[f"rows {i}"] for i in range(sum(name.startswith("rows ") for name in tensors))]
        self._multiply()
        self.product.sums = {name.removeprefix("sum."): v for name, v in tensors.items() if name.startswith("sum.")}
