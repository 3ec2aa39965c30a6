"""Kronecker-factored curvature of one layer: H ≈ A ⊗ B/n, in the eigenbases of its factors.

Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature; with weight sharing in the
two senses of Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures; with
corrected eigenvalues by George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from plausible.blocks.curvature.layers import Layer, Part, add_gram
from plausible.blocks.curvature.structures import Block, squares, weighted_gram
from plausible.core.special import flushed, symmetric_eigen, widest
from plausible.core.weights import Weights

Sharing = Literal["expand", "reduce"]
EXACT = 128  # sizes up to which factors are added up in float64
WIDE = 256  # sizes up to which factors are decomposed in float64


class Kronecker(Block):
    """H ≈ Σ_g A_g ⊗ B_g / n: A = Σ ccᵀ of the layer's inputs, B = Σ rrᵀ of the gradients at its outputs, n = Σ 1.

    Where a weight is used at several positions, "expand" sums over positions as if they were examples, and "reduce" takes the
    mean of the inputs and the sum of the gradients over the positions first. `values` [G, out, in] are the eigenvalues, in the
    eigenbases `into` [G, in, in] (None: the standard one, of tables) and `out` [G, out, out].
    """

    kind = "kronecker"

    def __init__(self, layers: Sequence[Layer], sharing: Sharing = "expand"):
        super().__init__(layers)
        (self.layer,) = layers
        self.sharing = sharing
        self.dtype = torch.float32
        self.into: Tensor | None = None
        self.out: Tensor
        self.values: Tensor

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """Both factors and their eigenvectors, with copies while they are decomposed."""
        total = 0
        for layer in layers:
            groups, out, into = layer.matrix_shape
            inner = into if layer.kind == "table" else 3 * into**2
            total += groups * (inner + 3 * out**2 + out * into)
        return total

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        """Both factors; that of the inputs once."""
        (part,) = parts
        reduced = self.sharing == "reduce" and part.shared
        self.sums["b"] = _grown(self.sums.get("b"), part.rows.sum(2, keepdim=True) if reduced else part.rows)
        self.dtype = part.rows.dtype
        # inputs are the same for all columns of these examples: they count once
        if again:
            return
        c, batch = part.columns, part.rows.shape[1]
        total = float(batch if weight is None else weight.sum())
        if self.layer.kind == "table":
            a = self._counts(c, weight, reduced)
            self._add("a", a)
            count = total if reduced else float(a.sum())
        else:
            c = c.mean(1, keepdim=True) if reduced else c
            self.sums["a"] = _grown(self.sums.get("a"), c, weight)
            count = total * c.shape[1]
        self._add("count", torch.tensor(count, dtype=torch.float64))

    def add_final(self, columns: Tensor, b: Tensor, weight: Tensor | None) -> None:
        """The same from the inputs [B, in] of a last layer, whose B [out, out] of the examples was made elsewhere."""
        self.sums["a"] = _grown(self.sums.get("a"), columns[:, None], weight)
        self._add("b", b[None].to(_wide(b)))
        self.dtype = columns.dtype
        self._add("count", torch.tensor(float(len(columns) if weight is None else weight.sum()), dtype=torch.float64))

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def _counts(self, ids: Tensor, weight: Tensor | None, reduced: bool) -> Tensor:
        """The diagonal of A: how often each row was used, or squares of the shares of the positions that used it."""
        into = self.layer.matrix_shape[2]
        each = torch.ones_like(ids, dtype=torch.float64) if weight is None else weight[:, None].expand(ids.shape).double()
        kept = ids >= 0
        if not reduced:
            return torch.bincount(ids[kept], weights=each[kept], minlength=into)[None]
        batch, positions = ids.shape
        # a number for each pair of example and row, so that `unique` counts within examples
        keys = ids + into * torch.arange(batch, device=ids.device)[:, None]
        unique, counts = keys[kept].unique(return_counts=True)
        # the mean of one-hot columns is the share of positions that picked a row
        shares = (counts.double() / positions).square() * each[unique // into, 0]
        return torch.bincount(unique % into, weights=shares, minlength=into)[None]

    def finish(self) -> None:
        """Decompose the factors; in a second pass, take the corrected eigenvalues."""
        if "corrected" in self.sums:
            self.values = self.sums.pop("corrected")
            return
        # each factor is let go as soon as it is decomposed: they are the largest things in memory here
        values, self.out = eigen(self.sums.pop("b"), self.dtype)
        a, count = self.sums.pop("a"), float(self.sums.pop("count"))
        inner, self.into = (a, None) if self.layer.kind == "table" else eigen(a, self.dtype)
        self.values = ((values / max(count, 1e-30))[:, :, None] * inner[:, None, :]).to(self.dtype)

    def rotated(self, part: Part) -> Part:
        c = part.columns if self.into is None else torch.einsum("btgi,gij->btgj", part.columns, self.into)
        return Part(part.layer, c, torch.einsum("kbtgo,gop->kbtgp", part.rows, self.out))

    def correct(self, part: Part) -> None:
        """Add the second moments along the eigenvectors, which take the place of the products of eigenvalues."""
        turned = self.rotated(part)
        if self.layer.kind == "table":
            moments = squares(turned).T[None]
        elif turned.shared:
            moments = squares(turned)
        else:
            r, c = turned.rows[:, :, 0], turned.columns[:, 0]
            moments = torch.einsum("bgo,bgi->goi", r.square().sum(0), c.square())
        self._add("corrected", moments)

    # -----------------------------------------------------------------------------------------------------------------
    def _precisions(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        taus = [precision[name] for name in self.layer.names]
        if any(tau.ndim for tau in taus):
            raise ValueError(
                "Kronecker factors need one prior precision for each layer; one for each weight works with structure='diag', "
                "'block' or 'full'"
            )
        return scale * self.values + taus[0]

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        return self._precisions(precision, scale).log().sum()

    def _turn(self, matrices: Tensor, back: bool) -> Tensor:
        """Into the eigenbases, or back: [V, G, out, in]."""
        out = self.out if back else self.out.transpose(-1, -2)
        turned = out @ matrices
        if self.into is None:
            return turned
        return turned @ (self.into.transpose(-1, -2) if back else self.into)

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        # diag(U D Uᵀ) = U² d, without the matrix itself
        variances = self.out.square() @ (1 / self._precisions(precision, scale))
        variances = variances if self.into is None else variances @ self.into.square().transpose(-1, -2)
        return self.layer.weights(variances)

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """U_B (ξ/√(s·values + τ)) U_Aᵀ."""
        xi = self.layer.matrix(noise, lead=1)
        return self.layer.weights(self._turn(xi * self._precisions(precision, scale).rsqrt(), back=True))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        turned = self._turn(self.layer.matrix(vectors, lead=1), back=False)
        return self.layer.weights(self._turn(turned * self._precisions(precision, scale), back=True))

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        turned = self._turn(self.layer.matrix(vector)[None], back=False)[0]
        # millions of terms of one sign: in float32 the sum would lose digits
        return (turned.square_() / self._precisions(precision, scale)).sum(dtype=widest(turned.device))

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ_ij (u_iᵀc)² (v_jᵀr_k)(v_jᵀr_l)/(s·values_ij + τ): no Jacobian where weights are not shared."""
        return weighted_gram(self.rotated(parts[0]), 1 / self._precisions(precision, scale))

    def final(self, columns: Tensor, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The same for a layer whose outputs are those of the network, at its inputs [B, in]: variances [B, out] alone."""
        assert self.into is not None
        turned = (columns @ self.into[0]).square()
        inner = turned @ (1 / self._precisions(precision, scale))[0].T
        return inner @ self.out[0].square().T

    def tensors(self) -> dict[str, Tensor]:
        known = {"values": self.values, "out": self.out}
        return known if self.into is None else {**known, "into": self.into}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        block = cls(layers)
        block.values, block.out, block.into = tensors["values"], tensors["out"], tensors.get("into")
        return block

    def plus(self, other: Self) -> Self:
        """The sum in the eigenbases of its two partial traces, with its own diagonal there as eigenvalues.

        A sum of Kronecker products is none. This has its trace, is exact where both terms have the same bases, and takes the
        memory of one term however many there were. (Adding the factors, A₁ + A₂ and B₁ + B₂, would count A₁ ⊗ B₂ and A₂ ⊗ B₁
        too.) Cost: three decompositions of matrices of the layer's width.
        """
        terms = (self, other)
        outer = sum((term.out * term.values.sum(2)[:, None]) @ term.out.transpose(-1, -2) for term in terms)
        basis = {"out": eigen(outer, self.out.dtype)[1]}  # type: ignore[arg-type]
        if self.into is not None and other.into is not None:  # tables have the standard basis on that side
            bases = (self.into, other.into)
            inner = [(u * term.values.sum(1)[:, None]) @ u.transpose(-1, -2) for u, term in zip(bases, terms)]
            basis["into"] = eigen(inner[0] + inner[1], self.out.dtype)[1]
        values = torch.stack([term._diagonal(basis["out"], basis.get("into")) for term in terms]).sum(0)
        return self.restored(self.layers, {"values": values, **basis})

    def _diagonal(self, out: Tensor, into: Tensor | None) -> Tensor:
        """The diagonal of H in other bases: [G, out, in]."""
        diagonal = (out.transpose(-1, -2) @ self.out).square() @ self.values
        if into is None or self.into is None:
            return diagonal
        return diagonal @ (into.transpose(-1, -2) @ self.into).square().transpose(-1, -2)


def _wide(matrix: Tensor) -> torch.dtype:
    """float64 for small factors, for eigenvalues far below the largest."""
    return torch.float64 if matrix.shape[-1] <= WIDE and matrix.device.type != "mps" else matrix.dtype


def _grown(total: Tensor | None, vectors: Tensor, weight: Tensor | None = None) -> Tensor:
    """A sum [G, n, n], and above its diagonal Σ weight·vvᵀ of vectors [B, ..., G, n], for weights [B]."""
    groups, size = vectors.shape[-2:]
    if total is None:
        total = torch.zeros(groups, size, size, dtype=_wide(vectors), device=vectors.device)
    if groups == 1 and size <= EXACT:
        vectors = vectors.to(total.dtype)
    # on one side only: Σ w vvᵀ, and not w² of it
    weighted = vectors if weight is None else vectors * weight.to(vectors.dtype).reshape(-1, *[1] * (vectors.ndim - 1))
    add_gram(total, weighted, vectors)
    return total


def eigen(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Eigenvalues, not negative, and eigenvectors of this type, of symmetric matrices by their parts above the diagonal."""
    fast = matrix.device.type == "cuda" and matrix.shape[-1] <= 1024  # where cuSOLVER is slower in single precision
    values, vectors = symmetric_eigen(matrix.to(torch.float64 if fast else _wide(matrix)))
    return values.clamp(min=0), flushed(vectors.to(dtype).contiguous())  # as they are when they are read from a file
