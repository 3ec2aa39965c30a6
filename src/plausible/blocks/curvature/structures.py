"""Curvature in blocks, one for each layer or for several together: H added up over the data, and what Λ = s·H + diag(τ) is for.

Every block, and the `Curvature` that is made of them, answers the same questions: log det Λ, the diagonal of Λ⁻¹, draws of N(0,
Λ⁻¹), products Λv, and the covariance JΛ⁻¹Jᵀ of functions, for any positive s (a scale of the likelihood) and τ (precisions of
the prior: one number for each weight tensor, or one for each element). Everything but the sums is differentiable in s and τ.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from plausible.blocks.curvature.layers import Layer, Part, add_products
from plausible.core.special import widest
from plausible.core.weights import Weights

StructureName = Literal["diag", "block", "kron", "ekfac", "lowrank", "full"]
CurvatureName = Literal["ggn", "fisher", "empirical", "hessian"]
STRUCTURES = ("diag", "block", "kron", "ekfac", "lowrank", "full")
CURVATURES = ("ggn", "fisher", "empirical", "hessian")
KINDS: dict[str, type[Block]] = {}  # the kinds of blocks, by the names under which they are saved


class Block(ABC):
    """The curvature of the weights in `layers`; `sums` are what was added up so far."""

    kind: ClassVar[str]

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)
        self.sums: dict[str, Tensor] = {}

    def __init_subclass__(cls) -> None:
        # files name blocks by kind; a subclass is known as soon as its module is imported
        KINDS[cls.kind] = cls

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for layer in self.layers for name in layer.names)

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def chosen(self) -> int:
        return self.size

    @classmethod
    @abstractmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """How many numbers such a block keeps."""

    @abstractmethod
    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        """Add Σ JᵀS SᵀJ of a batch; `weight` [B] are example weights, which are in S already.

        `again` says that these are further columns of the examples that were added last.
        """

    def close(self) -> None:  # noqa: B027
        """Called when all columns of these examples were added."""

    @abstractmethod
    def finish(self) -> None:
        """Called when all data were added: make of the `sums` what the block keeps."""

    @abstractmethod
    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Log det Λ."""

    @abstractmethod
    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """The diagonal of Λ⁻¹."""

    @abstractmethod
    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ^{-1/2} ξ for standard normal ξ with a leading axis of draws."""

    @abstractmethod
    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ v, for v with a leading axis."""

    @abstractmethod
    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """vᵀΛ⁻¹v for one v, in float64: 0-d."""

    @abstractmethod
    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """SᵀJ Λ⁻¹ JᵀS for each example: [B, K, K]."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What is saved."""

    @classmethod
    @abstractmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`."""

    def scaled(self, scale: Tensor | float) -> Self:
        """s·H; what is linear in H are eigenvalues and matrices, and vectors are not."""
        linear = ("matrix", "values")
        return self.restored(self.layers, {n: scale * v if n in linear else v for n, v in self.tensors().items()})

    @abstractmethod
    def plus(self, other: Self) -> Self:
        """H₁ + H₂ in the same structure."""

    def to(self, device: torch.device) -> Self:
        return self.restored(self.layers, {name: value.to(device) for name, value in self.tensors().items()})


def flat_precision(layers: Sequence[Layer], precision: Mapping[str, Tensor]) -> Tensor:
    """The precision of each element, end to end: [size]."""
    return torch.cat(
        [precision[name].expand(shape).reshape(-1) for layer in layers for name, shape in zip(layer.names, layer.shapes)]
    )


def flat(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> Tensor:
    """Weights with a leading axis, end to end: [V, size]."""
    return torch.cat([weights[name].reshape(len(weights[name]), -1) for layer in layers for name in layer.names], 1)


def named(layers: Sequence[Layer], vectors: Tensor) -> Weights:
    """The inverse of `flat`."""
    parts = vectors.split_with_sizes([layer.size for layer in layers], dim=-1)
    return {name: value for layer, part in zip(layers, parts) for name, value in layer.split(part).items()}


def weighted_gram(part: Part, v: Tensor) -> Tensor:
    """Σ_w v_w J_kw J_lw for each example, with v the variances of the layer's weights, as `Layer.matrix`: [B, K, K]."""
    if part.layer.kind == "vector":
        return torch.einsum("kbp,p,lbp->bkl", part.rows, v, part.rows)
    if not part.shared and part.layer.kind == "matrix":
        # (r_k ⊗ c)² = r_k² ⊗ c² where a weight is used once: the Jacobian is never written down
        r, inner = part.rows[:, :, 0], torch.einsum("bgi,goi->bgo", part.columns[:, 0].square(), v)
        return torch.einsum("kbgo,bgo,lbgo->bkl", r, inner, r)
    grams = []
    for block in part.blocks():
        j = block.matrices().flatten(2)
        grams.append(torch.einsum("kbp,p,lbp->bkl", j, v.reshape(-1), j))
    return torch.cat(grams)


class Diagonal(Block):
    """H ≈ diag(h)."""

    kind = "diagonal"

    def __init__(self, layers: Sequence[Layer], values: Weights | None = None):
        super().__init__(layers)
        self.values: Weights = values or {}
        self._open: dict[Layer, tuple[Tensor, Tensor]] = {}

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        return sum(layer.size for layer in layers)

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:  # noqa: ARG002
        """Squares of the Jacobian, summed; those of rows over all columns, before they meet the inputs."""
        for part in parts:
            if part.layer.kind != "matrix" or part.shared:
                self.sums[part.layer.names[0]] = squares(part, self.sums.get(part.layer.names[0]))
                continue
            rows = part.rows[:, :, 0]
            if not again:
                self._open[part.layer] = rows.new_zeros(rows.shape[1:]), part.columns[:, 0]
            for row in rows:  # one column after the other: each fits into a cache, all of them do not
                self._open[part.layer][0].addcmul_(row, row)

    def close(self) -> None:
        # Σ_k (r_k ⊗ c)² = (Σ_k r_k²) ⊗ c²: one product for all columns of an example
        for layer, (rows, columns) in self._open.items():
            if layer.names[0] not in self.sums:
                self.sums[layer.names[0]] = rows.new_zeros(layer.matrix_shape)
            add_products(self.sums[layer.names[0]], rows, columns.square())
        self._open = {}

    def finish(self) -> None:
        self.values = {n: v for layer in self.layers for n, v in layer.named(self.sums[layer.names[0]]).items()}
        self.sums = {}

    def _precisions(self, precision: Mapping[str, Tensor], scale: Tensor) -> Iterator[tuple[str, Tensor]]:
        """s·h + τ, one weight after the other."""
        return ((name, scale * value + precision[name]) for name, value in self.values.items())

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return torch.stack([value.log().sum() for _, value in self._precisions(precision, scale)]).sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return {name: 1 / value for name, value in self._precisions(precision, scale)}

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return {name: noise[name] * value.rsqrt() for name, value in self._precisions(precision, scale)}

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return {name: vectors[name] * value for name, value in self._precisions(precision, scale)}

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        wide = widest(scale.device)
        inner = self._precisions(precision, scale)
        return torch.stack([(vector[name].square() / value).sum(dtype=wide) for name, value in inner]).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        variances = self.variances(precision, scale)
        return torch.stack([weighted_gram(part, part.layer.matrix(variances)) for part in parts]).sum(0)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.values)

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        return cls(layers, dict(tensors))

    def scaled(self, scale: Tensor | float) -> Self:
        return type(self)(self.layers, {name: scale * value for name, value in self.values.items()})

    def plus(self, other: Self) -> Self:
        return type(self)(self.layers, {name: value + other.values[name] for name, value in self.values.items()})


def squares(part: Part, total: Tensor | None = None) -> Tensor:
    """Σ_{k,b} (JᵀS)² where positions are shared, added to a total in place, in the shapes of `Part.summed`."""
    if part.layer.kind == "table":
        _, out, into = part.layer.matrix_shape
        batch, positions = part.columns.shape
        # positions of one example that picked the same row are summed before they are squared
        keys = part.columns + into * torch.arange(batch, device=part.columns.device)[:, None]
        keys = torch.where(part.columns >= 0, keys, -1).reshape(-1)
        unique, inverse = keys.unique(return_inverse=True)
        rows = part.rows.reshape(len(part.rows), batch * positions, out)
        # a sum for each pair of example and row that occurs, and no others
        summed = rows.new_zeros(len(rows), len(unique), out).index_add_(1, inverse, rows)
        kept = unique >= 0
        total = rows.new_zeros(into, out) if total is None else total
        return total.index_add_(0, unique[kept] % into, summed.square().sum(0)[kept])
    if part.layer.kind == "vector":
        value = part.rows.square().sum((0, 1))
    else:
        value = torch.stack([block.matrices().square().sum((0, 1)) for block in part.blocks()]).sum(0)
    return value if total is None else total.add_(value)


class Curvature:
    """H of all random weights, in blocks."""

    def __init__(self, blocks: Sequence[Block], structure: str):
        self.blocks, self.structure = list(blocks), structure

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for block in self.blocks for name in block.names)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def chosen(self) -> int:
        """How many numbers are random: all, or those of a subnetwork."""
        return sum(block.chosen for block in self.blocks)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        # determinants of millions of weights are compared to fractions of a nat
        return torch.stack([block.log_det(precision, scale).double() for block in self.blocks]).sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return _joined(block.variances(precision, scale) for block in self.blocks)

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return _joined(block.draw(noise, precision, scale) for block in self.blocks)

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        return _joined(block.product(vectors, precision, scale) for block in self.blocks)

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return torch.stack([block.quadratic(vector, precision, scale) for block in self.blocks]).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        each = zip(self.blocks, assigned(self.blocks, parts))
        return functools.reduce(operator.add, (block.covariance(of_block, precision, scale) for block, of_block in each))

    def effective(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """1 − τ (Λ⁻¹)_ii: how far the data, and not the prior, determine each weight (MacKay 1992); between 0 and 1."""
        variances = self.variances(precision, scale)
        # elements outside of a subnetwork have no variance, and nothing is determined of them
        return {n: torch.where(v > 0, 1 - precision[n] * v, 0.0) for n, v in variances.items()}

    def to(self, device: torch.device) -> Curvature:
        return Curvature([block.to(device) for block in self.blocks], self.structure)

    def tensors(self) -> dict[str, Tensor]:
        """What is saved: names are `number.name`."""
        return {f"{i}.{name}": v for i, block in enumerate(self.blocks) for name, v in block.tensors().items()}

    def describe(self) -> list[dict[str, Any]]:
        """The kinds and layers of the blocks, as JSON."""
        return [{"kind": block.kind, "layers": [asdict(layer) for layer in block.layers]} for block in self.blocks]

    @classmethod
    def restored(cls, structure: str, description: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Curvature:
        blocks = []
        for i, entry in enumerate(description):
            layers = []
            for record in entry["layers"]:  # JSON has no tuples
                shapes = tuple(tuple(int(n) for n in shape) for shape in record["shapes"])
                layers.append(Layer(**{**record, "names": tuple(record["names"]), "shapes": shapes}))
            # names of weights have dots themselves
            stored = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == str(i)}
            blocks.append(KINDS[entry["kind"]].restored(layers, stored))
        return cls(blocks, structure)


def added(first: Curvature, second: Curvature, scales: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)) -> Curvature:
    """s₁H₁ + s₂H₂ in the same structure: what the data of one task and those of the next say together.

    Diagonals and dense matrices add up exactly; what becomes of Kronecker factors and of low rank stands at their `plus`.
    Nothing is seen of the data.
    """
    if [block.layers for block in first.blocks] != [block.layers for block in second.blocks]:
        raise ValueError(
            f"curvatures of other weights cannot be added: one is of {', '.join(first.names)}, the other of "
            f"{', '.join(second.names)}; fit the same network with the same structure= and where= each time"
        )
    sums = []
    for one, two in zip(first.blocks, second.blocks):
        if one.kind != two.kind or one.kind == "subset":
            raise ValueError(
                f"curvatures of kinds {one.kind!r} and {two.kind!r} cannot be added: use one structure= for all tasks"
            )
        # scales differ where the two fits tuned their noise apart
        sums.append(one.scaled(scales[0]).plus(two.scaled(scales[1])))
    return Curvature(sums, first.structure)


def _joined(parts: Iterator[Weights]) -> Weights:
    return {name: value for part in parts for name, value in part.items()}


def assigned(blocks: Sequence[Block], parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that each block is about; a layer whose bias is in a block of its own is divided."""
    # a prior that treats weight and bias apart has made two layers of one
    known = {part.layer.names: part for part in parts}

    def part_of(layer: Layer) -> Part:
        if layer.names in known:
            return known[layer.names]
        whole = next(part for part in parts if set(layer.names) <= set(part.layer.names))
        if layer.weighted:
            return Part(layer, whole.columns[..., :-1], whole.rows)
        # a bias has one group, whatever its weight has
        rows = whole.rows.flatten(3).unsqueeze(3)
        return Part(layer, rows.new_ones(*rows.shape[1:4], 1), rows)

    return [[part_of(layer) for layer in block.layers] for block in blocks]


def apart(layer: Layer) -> list[Layer]:
    """The weight and the bias of a layer as two layers."""
    weight = replace(layer, names=layer.names[:1], shapes=layer.shapes[:1], biased=False)
    return [weight, Layer(layer.names[1:], "matrix", layer.shapes[1:], biased=True, weighted=False)]
