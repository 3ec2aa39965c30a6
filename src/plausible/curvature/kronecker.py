"""Kronecker-factored curvature of one layer: H ≈ A ⊗ B/n, in the eigenbases of its factors.

Martens & Grosse (2015), Optimizing neural networks with Kronecker-factored approximate curvature; with weight sharing in the two
senses of Eschenhagen et al. (2023), Kronecker-factored approximate curvature for modern neural network architectures; with
corrected eigenvalues by George et al. (2018), Fast approximate natural gradient descent in a Kronecker-factored eigenbasis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from plausible.curvature.blocks import KINDS, WIDE, Block
from plausible.curvature.layers import Layer, Part
from plausible.weights import Weights

Sharing = Literal["expand", "reduce"]
EXACT = 128
"""Sizes up to which factors are added up in float64."""


class Kronecker(Block):
    """H ≈ Σ_g A_g ⊗ B_g / n: A = Σ ccᵀ of the layer's inputs, B = Σ rrᵀ of the gradients at its outputs, n = Σ 1.

    Where a weight is used at several positions, "expand" sums over positions as if they were examples, and "reduce" takes the mean
    of the inputs and the sum of the gradients over the positions first. `values` [G, out, in] are the eigenvalues, in the
    eigenbases `into` [G, in, in] (None: the standard one, of tables) and `out` [G, out, out].
    """

    kind = "kronecker"

    def __init__(self, layers: Sequence[Layer], sharing: Sharing = "expand"):
        super().__init__(layers)
        (self.layer,) = layers
        self.sharing = sharing
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.count = 0.0
        self.dtype = torch.float32
        self._corrected: Tensor | None = None
        self.into: Tensor | None = None
        self.out: Tensor
        self.values: Tensor

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """Both factors and their eigenvectors, with copies while they are decomposed."""
        total = 0
        for layer in layers:
            groups, out, into = layer.matrix_shape
            own = into if layer.kind == "table" else 3 * into**2
            total += groups * (own + 3 * out**2 + out * into)
        return total

    def add(self, parts: Sequence[Part], weight: Tensor | None) -> None:
        """Both factors."""
        (part,) = parts
        c, r = part.columns, part.rows
        batch, positions = r.shape[1:3]
        reduced = self.sharing == "reduce" and positions > 1
        total = float(batch if weight is None else weight.sum())
        if self.layer.kind == "table":
            a = self._counts(c, weight, reduced)
            n = total if reduced else float(a.sum())
        else:
            if reduced:
                c = c.mean(1, keepdim=True)
            w = c if weight is None else c * weight[:, None, None, None]
            a = torch.einsum("ngi,ngj->gij", w.flatten(0, 1), c.flatten(0, 1)) if c.shape[2] > 1 else _gram(w, c)
            n = total * c.shape[1]
        if reduced:
            r, n = r.sum(2, keepdim=True), total
        b = _gram(r, r) if r.shape[3] == 1 else torch.einsum("kbtgo,kbtgp->gop", r, r)
        self.add_factors(a, b, n, part.rows.dtype)

    def add_factors(self, a: Tensor, b: Tensor, n: float, dtype: torch.dtype) -> None:
        """Sums that were made elsewhere, of a layer whose weights have this type; small ones are kept in float64."""
        self.dtype = dtype
        a, b = (v.double() if v.shape[-1] <= WIDE and v.device.type != "mps" else v for v in (a, b))
        self.a = a if self.a is None else self.a + a
        self.b = b if self.b is None else self.b + b
        self.count += n

    def _counts(self, ids: Tensor, weight: Tensor | None, reduced: bool) -> Tensor:
        """The diagonal of A: how often each row was used, or squares of the shares of the positions that used it."""
        into = self.layer.matrix_shape[2]
        each = (
            torch.ones_like(ids, dtype=torch.float64) if weight is None else weight[:, None].expand(ids.shape).double()
        )
        kept = ids >= 0
        if not reduced:
            return torch.bincount(ids[kept], weights=each[kept], minlength=into)[None]
        batch, positions = ids.shape
        keys = ids + into * torch.arange(batch, device=ids.device)[:, None]
        unique, counts = keys[kept].unique(return_counts=True)
        shares = (counts.double() / positions).square() * each[unique // into, 0]
        return torch.bincount(unique % into, weights=shares, minlength=into)[None]

    def finish(self) -> None:
        """Decompose the factors."""
        assert self.a is not None
        assert self.b is not None
        values, out = _eigen(self.b)
        inner, into = (self.a, None) if self.layer.kind == "table" else _eigen(self.a)
        self.values = (values[:, :, None] * inner[:, None, :] / max(self.count, 1e-30)).to(self.dtype)
        self.out = out.to(self.dtype).contiguous()  # as it is when it is read from a file
        self.into = None if into is None else into.to(self.dtype).contiguous()
        self.a = self.b = None

    def rotated(self, part: Part) -> tuple[Tensor, Tensor]:
        """Columns and rows in the eigenbases."""
        c = part.columns if self.into is None else torch.einsum("btgi,gij->btgj", part.columns, self.into)
        return c, torch.einsum("kbtgo,gop->kbtgp", part.rows, self.out)

    def correct(self, part: Part) -> None:
        """Add the second moments along the eigenvectors, which take the place of the products of eigenvalues."""
        if self.layer.kind == "table":
            rows = torch.einsum("kbtgo,gop->kbtgp", part.rows, self.out)
            from plausible.curvature.blocks import squares

            found = squares(Part(part.layer, part.columns, rows))[self.layer.names[0]].T[None]
        else:
            c, r = self.rotated(part)
            own = Part(part.layer, c, r)
            if not own.shared:
                found = torch.einsum("bgo,bgi->goi", r[:, :, 0].square().sum(0), c[:, 0].square())
            else:
                found = torch.stack([block.matrices().square().sum((0, 1)) for block in own.blocks()]).sum(0)
        self._corrected = found if self._corrected is None else self._corrected + found

    def corrected(self) -> None:
        """Take the corrected eigenvalues."""
        assert self._corrected is not None
        self.values, self._corrected = self._corrected, None

    # -----------------------------------------------------------------------------------------------------------------

    def _precisions(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """s·values + τ: [G, out, in]."""
        found = [precision[name] for name in self.layer.names]
        if any(value.ndim for value in found):
            raise ValueError(
                "Kronecker factors need one prior precision for each layer; one for each weight works with structure='diag', "
                "'block' or 'full'"
            )
        return scale * self.values + found[0]

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ log(s·values + τ)."""
        return self._precisions(precision, scale).log().sum()

    def _turn(self, matrices: Tensor, back: bool) -> Tensor:
        """Into the eigenbases, or back: [V, G, out, in]."""
        out = self.out if back else self.out.transpose(-1, -2)
        found = out @ matrices
        if self.into is None:
            return found
        return found @ (self.into.transpose(-1, -2) if back else self.into)

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """The diagonal of Λ⁻¹."""
        found = self.out.square() @ (1 / self._precisions(precision, scale))
        found = found if self.into is None else found @ self.into.square().transpose(-1, -2)
        return self.layer.weights(found)

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """U_B (ξ/√(s·values + τ)) U_Aᵀ."""
        xi = self.layer.matrix(noise, lead=1)
        return self.layer.weights(self._turn(xi * self._precisions(precision, scale).rsqrt(), back=True))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λv."""
        turned = self._turn(self.layer.matrix(vectors, lead=1), back=False)
        return self.layer.weights(self._turn(turned * self._precisions(precision, scale), back=True))

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """In the eigenbases."""
        turned = self._turn(self.layer.matrix(vector)[None], back=False)[0].double()
        return (turned.square() / self._precisions(precision, scale).double()).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ_ij (u_iᵀc)² (v_jᵀr_k)(v_jᵀr_l)/(s·values_ij + τ): no Jacobian where weights are not shared."""
        (part,) = parts
        v = 1 / self._precisions(precision, scale)
        if self.layer.kind == "table":
            rows = torch.einsum("kbtgo,gop->kbtgp", part.rows, self.out)
            turned = Part(part.layer, part.columns, rows)
        else:
            turned = Part(part.layer, *self.rotated(part))
            if not turned.shared:
                r, inner = turned.rows[:, :, 0], torch.einsum("bgi,goi->bgo", turned.columns[:, 0].square(), v)
                return torch.einsum("kbgo,bgo,lbgo->bkl", r, inner, r)
        found = []
        for block in turned.blocks():
            j = block.matrices().flatten(2)
            found.append(torch.einsum("kbp,p,lbp->bkl", j, v.reshape(-1), j))
        return torch.cat(found)

    def final(self, columns: Tensor, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The same for a layer whose outputs are those of the network, at its inputs [B, in]: variances [B, out] alone."""
        assert self.into is not None
        turned = (columns @ self.into[0]).square()
        inner = turned @ (1 / self._precisions(precision, scale))[0].T
        return inner @ self.out[0].square().T

    def tensors(self) -> dict[str, Tensor]:
        """Eigenvalues and eigenvectors."""
        own = {"values": self.values, "out": self.out}
        return own if self.into is None else {**own, "into": self.into}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Kronecker:
        """From eigenvalues and eigenvectors."""
        block = cls(layers)
        block.values, block.out, block.into = tensors["values"], tensors["out"], tensors.get("into")
        return block


def _gram(a: Tensor, b: Tensor) -> Tensor:
    """Σ abᵀ over all but the last axis: [1, n, n].

    Of a matrix with itself on the CPU by NumPy, which computes one half of the result.
    """
    alike, a, b = a is b, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if a.shape[-1] <= EXACT and a.device.type != "mps":  # for eigenvalues far below the largest
        a = a.double()
        b = a if alike else b.double()
    if alike and a.device.type == "cpu" and a.dtype in (torch.float32, torch.float64):
        own = a.detach().numpy()
        return torch.from_numpy(own.T @ own)[None]
    return (a.T @ b)[None]


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, not negative, and eigenvectors of symmetric matrices."""
    wide = matrix.double() if matrix.shape[-1] <= WIDE and matrix.device.type != "mps" else matrix
    values, vectors = torch.linalg.eigh((wide + wide.transpose(-1, -2)) / 2)
    return values.clamp(min=0), vectors


KINDS["kronecker"] = Kronecker
