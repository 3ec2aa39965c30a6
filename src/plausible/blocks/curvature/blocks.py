"""Curvature of one layer, or of several together: H added up over the data, and what Λ = s·H + diag(τ) is needed for.

Every block answers the same questions: log det Λ, the diagonal of Λ⁻¹, draws of N(0, Λ⁻¹), products Λv, and the covariance JΛ⁻¹Jᵀ
of functions, for any positive s (a scale of the likelihood) and τ (precisions of the prior: one number for each weight tensor, or
one for each of its elements). Everything but the sums is differentiable in s and τ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from plausible.blocks.curvature.gram import add_products
from plausible.blocks.curvature.layers import Layer, Part
from plausible.core.special import widest
from plausible.core.weights import Weights

WIDE = 256
"""Sizes up to which factors are decomposed in float64."""


class Block(ABC):
    """The curvature of the weights in `layers`."""

    kind: ClassVar[str]

    def __init__(self, layers: Sequence[Layer]):
        self.layers = tuple(layers)

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it covers."""
        return tuple(name for layer in self.layers for name in layer.names)

    @property
    def size(self) -> int:
        """How many weights."""
        return sum(layer.size for layer in self.layers)

    @classmethod
    @abstractmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """How many numbers such a block keeps."""

    @abstractmethod
    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        """Add Σ JᵀS SᵀJ of a batch; `weight` [B] are example weights, which are in S already.

        `again` says that these are further columns of the examples that were added last.
        """

    def finish(self) -> None:  # noqa: B027
        """All data were added."""

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
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Block:
        """The inverse of `tensors`."""

    def to(self, device: torch.device) -> Block:
        """The same on another device."""
        return self.restored(self.layers, {name: value.to(device) for name, value in self.tensors().items()})


def flat_precision(layers: Sequence[Layer], precision: Mapping[str, Tensor]) -> Tensor:
    """τ of all weights of these layers, end to end."""
    return torch.cat(
        [precision[name].expand(shape).reshape(-1) for layer in layers for name, shape in zip(layer.names, layer.shapes)]
    )


def flat(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> Tensor:
    """Weights with a leading axis, end to end: [V, size]."""
    return torch.cat([weights[name].flatten(1) for layer in layers for name in layer.names], 1)


def named(layers: Sequence[Layer], vectors: Tensor) -> Weights:
    """The inverse of `flat`."""
    parts = vectors.split_with_sizes([layer.size for layer in layers], dim=-1)
    return {name: value for layer, part in zip(layers, parts) for name, value in layer.split(part).items()}


def weighted_gram(part: Part, variances: Mapping[str, Tensor]) -> Tensor:
    """Σ_w v_w J_kw J_lw for each example, with v the variances of the layer's weights: [B, K, K]."""
    layer = part.layer
    if layer.kind == "vector":
        v = torch.cat([variances[name].reshape(-1) for name in layer.names])
        return torch.einsum("kbp,p,lbp->bkl", part.rows, v, part.rows)
    v = layer.matrix(variances)
    if not part.shared and layer.kind == "matrix":
        r, c = part.rows[:, :, 0], part.columns[:, 0]
        inner = torch.einsum("bgi,goi->bgo", c.square(), v)
        return torch.einsum("kbgo,bgo,lbgo->bkl", r, inner, r)
    found = []
    for block in part.blocks():
        j = block.matrices().flatten(2)
        found.append(torch.einsum("kbp,p,lbp->bkl", j, v.reshape(-1), j))
    return torch.cat(found)


class Diagonal(Block):
    """H ≈ diag(h)."""

    kind = "diagonal"

    def __init__(self, layers: Sequence[Layer], values: Weights | None = None):
        super().__init__(layers)
        self.values: Weights = values or {}
        self._sums: dict[Layer, Tensor] = {}
        self._open: dict[Layer, tuple[Tensor, Tensor]] = {}

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """One number a weight."""
        return sum(layer.size for layer in layers)

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:  # noqa: ARG002
        """Squares of the Jacobian, summed; those of rows over all columns, before they meet the inputs."""
        for part in parts:
            if part.layer.kind != "matrix" or part.shared:
                self._sums[part.layer] = squares(part, self._sums.get(part.layer))
            elif again:
                _add_squares(self._open[part.layer][0], part.rows[:, :, 0])
            else:
                self._close(part.layer)
                self._open[part.layer] = sum_of_squares(part.rows[:, :, 0]), part.columns[:, 0]

    def _close(self, layer: Layer) -> None:
        """Add the examples that were added last."""
        if layer in self._open:
            rows, columns = self._open.pop(layer)
            if layer not in self._sums:
                self._sums[layer] = rows.new_zeros(layer.matrix_shape)
            add_products(self._sums[layer], rows, columns.square())

    def finish(self) -> None:
        """The sums, by weight."""
        for layer in self.layers:
            self._close(layer)
        self.values = {n: v for layer in self.layers for n, v in layer.named(self._sums[layer]).items()}
        self._sums = {}

    def _precisions(self, precision: Mapping[str, Tensor], scale: Tensor) -> Iterator[tuple[str, Tensor]]:
        """s·h + τ, one weight after the other."""
        return ((name, scale * value + precision[name]) for name, value in self.values.items())

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ log(s·h + τ)."""
        return torch.stack([value.log().sum() for _, value in self._precisions(precision, scale)]).sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """1/(s·h + τ)."""
        return {name: 1 / value for name, value in self._precisions(precision, scale)}

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """ξ/√(s·h + τ)."""
        return {name: noise[name] * value.rsqrt() for name, value in self._precisions(precision, scale)}

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """(s·h + τ)v."""
        return {name: vectors[name] * value for name, value in self._precisions(precision, scale)}

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ v²/(s·h + τ)."""
        wide = widest(scale.device)
        inner = self._precisions(precision, scale)
        return torch.stack([(vector[name].square() / value).sum(dtype=wide) for name, value in inner]).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ J²/(s·h + τ)."""
        variances = self.variances(precision, scale)
        return torch.stack([weighted_gram(part, variances) for part in parts]).sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """The diagonal."""
        return dict(self.values)

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Diagonal:
        """From the diagonal."""
        return cls(layers, dict(tensors))


def squares(part: Part, total: Tensor | None = None) -> Tensor:
    """Σ_{k,b} (JᵀS)² where positions are shared, added to a total in place, in the shapes of `Part.summed`."""
    layer = part.layer
    if layer.kind == "vector":
        return _plus(total, part.rows.square().sum((0, 1)))
    if layer.kind == "table":
        _, out, into = layer.matrix_shape
        batch, positions = part.columns.shape
        keys = part.columns + into * torch.arange(batch, device=part.columns.device)[:, None]
        keys = torch.where(part.columns >= 0, keys, -1).reshape(-1)
        unique, inverse = keys.unique(return_inverse=True)
        rows = part.rows.reshape(len(part.rows), batch * positions, out)
        summed = rows.new_zeros(len(rows), len(unique), out).index_add_(1, inverse, rows)
        kept = unique >= 0
        total = rows.new_zeros(into, out) if total is None else total
        return total.index_add_(0, unique[kept] % into, summed.square().sum(0)[kept])
    return _plus(total, torch.stack([block.matrices().square().sum((0, 1)) for block in part.blocks()]).sum(0))


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total.add_(value)


def sum_of_squares(rows: Tensor) -> Tensor:
    """Σ_k r_k² of rows [K, …]."""
    return _add_squares(rows.new_zeros(rows.shape[1:]), rows)


def _add_squares(total: Tensor, rows: Tensor) -> Tensor:
    """One column after the other: each fits into a cache, all of them do not."""
    for row in rows:
        total.addcmul_(row, row)
    return total


class Dense(Block):
    """H [P, P], written down: of one layer, or of all of them."""

    kind = "dense"

    def __init__(self, layers: Sequence[Layer], matrix: Tensor | None = None):
        super().__init__(layers)
        self.matrix = matrix
        self._turned = False
        self._known: tuple[Mapping[str, Tensor], float, Tensor] | None = None

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """P² in float64, and two copies while it is solved."""
        return 6 * sum(layer.size for layer in layers) ** 2

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:  # noqa: ARG002
        """Products of the Jacobian."""
        size = sum(part.layer.size for part in parts)
        if self.matrix is None:
            self.matrix = torch.zeros(size, size, dtype=widest(parts[0].rows.device), device=parts[0].rows.device)
        if len(parts) == 1 and parts[0].layer.kind == "matrix" and not parts[0].shared and parts[0].layer.groups == 1:
            _, out, into = parts[0].layer.matrix_shape
            _add_outer(parts[0], self.matrix.view(out, into, out, into))
            self._turned = True
            return
        count, batch = parts[0].rows.shape[:2]
        step = max(1, 2**24 // max(1, count * size))
        for start in range(0, batch, step):
            rows = slice(start, start + step)
            own = [Part(part.layer, part.columns[rows], part.rows[:, rows]).jacobian() for part in parts]
            j = torch.cat(own, -1).flatten(0, 1).to(self.matrix.dtype)
            self.matrix.addmm_(j.T, j)

    def finish(self) -> None:
        """Bring the rows and columns into the order of the weights, with the bias behind the matrix."""
        if self._turned and self.layers[0].biased and self.layers[0].weighted:
            assert self.matrix is not None
            layer = self.layers[0]
            numbers = torch.arange(layer.size, device=self.matrix.device).view(layer.matrix_shape)
            order = torch.cat([v.reshape(-1) for v in layer.weights(numbers).values()])
            self.matrix = self.matrix[order][:, order]
        self._turned = False

    def _whole(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        assert self.matrix is not None
        whole = scale.double() * self.matrix.double()
        whole.diagonal().add_(flat_precision(self.layers, precision))  # in place: these matrices are large
        return whole

    def _factor(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The Cholesky factor; that of the last question is kept."""
        if self._known is not None and self._known[0] is precision and self._known[1] == float(scale):
            return self._known[2]
        factor = self._cholesky(precision, scale)
        if not factor.requires_grad:
            self._known = (precision, float(scale), factor)
        return factor

    def _cholesky(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(self._whole(precision, scale))
        if bool(info.any()):
            raise ValueError(
                "the curvature plus the prior's precision is not positive definite: these weights are no maximum of the "
                "posterior; train longer, use curvature='ggn', or a stronger prior"
            )
        return factor

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """From the Cholesky factor."""
        return 2 * self._factor(precision, scale).diagonal().log().sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """The diagonal of the inverse."""
        inverse = torch.cholesky_inverse(self._factor(precision, scale))
        return named(self.layers, inverse.diagonal().to(scale.dtype))

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """L⁻ᵀξ with LLᵀ = Λ."""
        xi = flat(self.layers, noise)
        factor = self._factor(precision, scale)
        found = torch.linalg.solve_triangular(factor.T, xi.double().T, upper=True).T
        return named(self.layers, found.to(xi.dtype))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λv."""
        v = flat(self.layers, vectors)
        return named(self.layers, (v.double() @ self._whole(precision, scale)).to(v.dtype))

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """‖L⁻¹v‖²."""
        v = flat(self.layers, {name: vector[name][None] for name in self.names}).double().T
        return torch.linalg.solve_triangular(self._factor(precision, scale), v, upper=False).square().sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Gram matrices of L⁻¹Jᵀ."""
        factor = self._factor(precision, scale)
        count, batch = parts[0].rows.shape[:2]
        step = max(1, 2**23 // max(1, count * self.size))
        found = []
        for start in range(0, batch, step):
            rows = slice(start, start + step)
            j = torch.cat([Part(p.layer, p.columns[rows], p.rows[:, rows]).jacobian() for p in parts], -1)
            half = torch.linalg.solve_triangular(factor, j.flatten(0, 1).T.double(), upper=False)
            half = half.view(self.size, count, -1)
            found.append(torch.einsum("pkb,plb->bkl", half, half))
        return torch.cat(found).to(parts[0].rows.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The matrix."""
        assert self.matrix is not None
        return {"matrix": self.matrix}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Dense:
        """From the matrix."""
        return cls(layers, tensors["matrix"])


def _add_outer(part: Part, whole: Tensor) -> None:
    """Add Σ_n M_n ⊗ c_n c_nᵀ with M = Σ_k r_k r_kᵀ to [out, in, out, in]: no Jacobian, for a layer used at one position."""
    r, c = part.rows[:, :, 0, 0].to(whole.dtype), part.columns[:, 0, 0].to(whole.dtype)
    inner = torch.einsum("kbo,kbp->bop", r, r)
    out, into = r.shape[-1], c.shape[-1]
    for o in range(out):
        left = (inner[:, o, o:, None] * c[:, None]).flatten(1)  # [B, (out − o)·in]
        found = (left.T @ c).view(out - o, into, into)
        whole[o, :, o:] += found.permute(1, 0, 2)
        if o + 1 < out:
            whole[o + 1 :, :, o] += found[1:].permute(0, 2, 1)


KINDS: dict[str, Any] = {"diagonal": Diagonal, "dense": Dense}
