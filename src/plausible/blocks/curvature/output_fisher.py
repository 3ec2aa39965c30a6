"""F_b, the Fisher of the outputs f_b, in three forms: elementwise, of a softmax, and as it stands.

Outputs are [B, *O], seen as [B, P, C]: P positions that do not interact, and one matrix [C, C] for each of them; n = P·C.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


class OutputFisher(ABC):
    """F_b for b = 1 … B; what each method gives stands in `losses`, whose functions are made of them."""

    shape: torch.Size
    """That of the outputs, [B, *O]."""
    positions: int
    rank: int
    """Columns of the root of one position."""
    device: torch.device

    @property
    def num_roots(self) -> int:
        """K, the columns of `root`."""
        return self.positions * self.rank

    def root(self, columns: slice | None = None) -> Tensor:
        """R[k, b], Σ_k RRᵀ = F_b: [K, B, *O]."""
        of = torch.arange(self.num_roots, device=self.device)[columns or slice(None)]
        position = of // self.rank
        values = self._columns(position, of % self.rank)  # [k, B, C]
        if self.positions > 1:
            here = F.one_hot(position, self.positions).to(values.dtype)  # [k, P]
            values = here[:, None, :, None] * values[:, :, None, :]
        return values.reshape(len(of), *self.shape)

    def shares(self, total: Tensor) -> Tensor:
        """max_j L[k, b]_j²/total_j of all columns of another root L, as uneven as it can easily be had: [B, K], for totals [P, C].

        With Σ_b diagonal() as the total: the share that a column has of what is known about any output, at most. Totals below
        1e-19, whose squares are no normal numbers, stand for nothing.
        """
        return self._shares(1 / total.clamp(min=1e-19)).flatten(1)

    def leading(self, columns: slice, total: Tensor) -> Tensor:
        """These of the columns of L, ordered for each example by their shares, the largest first: [k, B, *O]."""
        if self._order is None:
            self._order = self.shares(total).argsort(1, descending=True).T.contiguous()
        order = self._order[columns]  # [k, B]
        position = order // self.rank
        values = self._picked(position, order % self.rank)  # [k, B, C]
        if self.positions > 1:
            whole = values.new_zeros(*order.shape, self.positions, values.shape[-1])
            at = position[..., None, None].expand(*order.shape, 1, values.shape[-1])
            values = whole.scatter(2, at, values[:, :, None])
        return values.reshape(len(order), *self.shape)

    _order: Tensor | None = None

    def apply(self, vectors: Tensor) -> Tensor:
        """F_b v_b: [V, B, *O]."""
        return self._apply(self._placed(vectors, "vectors")).reshape(vectors.shape)

    def sketch(self, signs: Tensor) -> Tensor:
        """R_b ξ_b: [V, B, *O]."""
        return self._sketch(self._placed(signs, "signs")).reshape(signs.shape)

    def summed(self, weight: Tensor | None = None) -> Tensor:
        """Σ_b weight_b F_b: [n, n]."""
        if weight is not None and weight.shape != self.shape[:1]:
            raise ValueError(f"weight must have one number per example, [{self.shape[0]}], got {list(weight.shape)}")
        return _block_diagonal(self._summed(weight))

    def blocks(self) -> Tensor:
        """F_b: [B, n, n]."""
        return _block_diagonal(self._blocks())

    def _placed(self, vectors: Tensor, name: str) -> Tensor:
        if vectors.shape[1:] != self.shape:
            raise ValueError(
                f"{name} must have shape [V, *outputs.shape], here [V, {', '.join(map(str, self.shape))}], "
                f"got {list(vectors.shape)}"
            )
        return vectors.reshape(len(vectors), self.shape[0], self.positions, -1)  # [V, B, P, C]

    @abstractmethod
    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        """These columns of the roots of these positions: [k, B, C]."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of F_b: [B, P, C]."""

    @abstractmethod
    def _shares(self, scale: Tensor) -> Tensor:
        """[B, P, rank], for what the squares [P, C] are multiplied by."""

    @abstractmethod
    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        """Columns of L, of their own for each example: [k, B, C] for numbers [k, B]."""

    @abstractmethod
    def _apply(self, vectors: Tensor) -> Tensor: ...

    @abstractmethod
    def _sketch(self, signs: Tensor) -> Tensor: ...

    @abstractmethod
    def _summed(self, weight: Tensor | None) -> Tensor:
        """[P, C, C]."""

    @abstractmethod
    def _blocks(self) -> Tensor:
        """[B, P, C, C]."""


class Elementwise(OutputFisher):
    """F_b = diag(values_b), `values` [B, *O]."""

    def __init__(self, values: Tensor):
        self.shape, self._values = values.shape, values.reshape(len(values), -1)
        self.positions, self.rank = self._values.shape[1], 1
        self.device = values.device

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:  # noqa: ARG002
        return self._values.sqrt().T[position, :, None]

    def diagonal(self) -> Tensor:
        return self._values[..., None]

    def _shares(self, scale: Tensor) -> Tensor:
        return self._values[..., None] * scale

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:  # noqa: ARG002
        return self._values.sqrt().T.gather(0, position)[..., None]

    def _apply(self, vectors: Tensor) -> Tensor:
        return self._values[..., None] * vectors

    def _sketch(self, signs: Tensor) -> Tensor:
        return self._values.sqrt()[..., None] * signs

    def _summed(self, weight: Tensor | None) -> Tensor:
        return (self._values.sum(0) if weight is None else weight.to(self._values) @ self._values)[:, None, None]

    def _blocks(self) -> Tensor:
        return self._values[..., None, None]


class Softmax(OutputFisher):
    """F = diag(p) − ppᵀ at each position, `probabilities` [B, *positions, C]; all zero where nothing was observed.

    diag(√p) − p√pᵀ is a root whose C columns span C − 1 dimensions, since √p is in its null space. A Householder reflection
    that takes √p to the last axis leaves C − 1 columns, R_ij = √p_j·(δ_ij − (p_i + s·δ_iC)/(1 + s)) with s = √p_C.

    The Cholesky factor is another root (Tanabe & Sagae 1992): with classes by falling probability and q_j = Σ_{i>j} p_i its
    column j is √(p_j q_j/(p_j + q_j))·(e_j − Σ_{i>j} p_i e_i/q_j), the class j against those that are less probable.
    """

    def __init__(self, probabilities: Tensor):
        self.shape = probabilities.shape
        self._p = probabilities.reshape(len(probabilities), -1, probabilities.shape[-1])
        self.positions, self.rank = self._p.shape[1], self._p.shape[2] - 1
        self.device = probabilities.device

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        p = self._p[:, position].movedim(1, 0)  # [k, B, C]
        s = p[..., -1:].sqrt()
        common = torch.cat([p[..., :-1], p[..., -1:] + s], -1) / (1 + s)
        own = F.one_hot(column, self._p.shape[-1]).to(p.dtype)[:, None]
        return self._p[:, position, column].T[..., None].sqrt() * (own - common)

    @cached_property
    def _falling(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities in falling order, their classes, and q: [B, P, C] each."""
        p, classes = self._p.sort(-1, descending=True)
        return p, classes, _after(p)

    def diagonal(self) -> Tensor:
        """p(1 − p)."""
        return self._p - self._p.square()

    def _shares(self, scale: Tensor) -> Tensor:
        p, classes, q = self._falling
        tiny = torch.finfo(p.dtype).tiny
        scale = scale.to(p).expand_as(self._p).gather(-1, classes)
        others = F.pad((p.square() * scale)[..., 1:].flip(-1).cummax(-1).values.flip(-1), (0, 1))
        largest = torch.maximum(scale, others / q.square().clamp(min=tiny))
        return (p * (q / (p + q).clamp(min=tiny)) * largest)[..., :-1]

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        example = torch.arange(self.shape[0], device=self.device).expand_as(position)
        p, classes, q = (values[example, position] for values in self._falling)  # [k, B, C]
        tiny = torch.finfo(p.dtype).tiny
        here = column[..., None]
        after, own = q.gather(-1, here), p.gather(-1, here)
        place = torch.arange(p.shape[-1], device=self.device)
        values = torch.where(place > here, -p / after.clamp(min=tiny), (place == here).to(p.dtype))
        values = (own * (after / (own + after).clamp(min=tiny))).sqrt() * values
        return torch.zeros_like(values).scatter(-1, classes, values)

    def _apply(self, vectors: Tensor) -> Tensor:
        scaled = self._p * vectors
        return scaled - self._p * scaled.sum(-1, keepdim=True)

    def _sketch(self, signs: Tensor) -> Tensor:
        scaled = self._p.sqrt() * signs
        return scaled - self._p * scaled.sum(-1, keepdim=True)

    def _summed(self, weight: Tensor | None) -> Tensor:
        p = self._p.movedim(1, 0)  # [P, B, C]
        weighted = p if weight is None else p * weight.to(p)[:, None]
        return torch.diag_embed(weighted.sum(1)) - weighted.mT @ p

    def _blocks(self) -> Tensor:
        return torch.diag_embed(self._p) - self._p[..., :, None] * self._p[..., None, :]


class Dense(OutputFisher):
    """F as it stands at each position: `matrices` [B, P, C, C] for outputs of `shape`."""

    def __init__(self, matrices: Tensor, shape: torch.Size):
        self.shape, self._matrices = shape, matrices
        self.positions, self.rank = matrices.shape[1], matrices.shape[-1]
        self.device = matrices.device

    @cached_property
    def _root(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self._matrices)
        return vectors * values.clamp(min=0).sqrt()[..., None, :]

    def _columns(self, position: Tensor, column: Tensor) -> Tensor:
        return self._root[:, position, :, column]

    def diagonal(self) -> Tensor:
        return self._matrices.diagonal(dim1=-2, dim2=-1)

    def _shares(self, scale: Tensor) -> Tensor:
        return (self._root.square() * scale.to(self._root)[..., None]).amax(-2)

    def _picked(self, position: Tensor, column: Tensor) -> Tensor:
        example = torch.arange(self.shape[0], device=self.device).expand_as(position)
        return self._root[example, position, :, column]

    def _apply(self, vectors: Tensor) -> Tensor:
        return torch.einsum("bpij,vbpj->vbpi", self._matrices, vectors)

    def _sketch(self, signs: Tensor) -> Tensor:
        return torch.einsum("bpij,vbpj->vbpi", self._root, signs)

    def _summed(self, weight: Tensor | None) -> Tensor:
        f = self._matrices
        return f.sum(0) if weight is None else torch.einsum("b,bpij->pij", weight.to(f), f)

    def _blocks(self) -> Tensor:
        return self._matrices


def _after(values: Tensor) -> Tensor:
    """Σ_{i>j} of the last axis, from its end: no difference is taken, so that what is left of almost 1 is exact."""
    return F.pad(values[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))


def _block_diagonal(matrices: Tensor) -> Tensor:
    """[..., P, C, C] → [..., PC, PC]."""
    count, size = matrices.shape[-3], matrices.shape[-1]
    spread = torch.diag_embed(matrices.movedim(-3, -1), dim1=-4, dim2=-2) if count > 1 else matrices
    return spread.reshape(*matrices.shape[:-3], count * size, count * size)
