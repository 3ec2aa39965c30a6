"""Curvature of low rank: H ≈ Σ_k λ_k v_k v_kᵀ over all weights, beside the prior's diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plausible.blocks.curvature.blocks import KINDS, Block, flat, flat_precision, named, weighted_gram
from plausible.blocks.curvature.layers import Layer, Part
from plausible.core.weights import Weights


class LowRank(Block):
    """H ≈ V diag(λ) Vᵀ with orthonormal columns: `values` [k], `vectors` by name [k, *shape].

    Λ = D^{1/2}(I + W s·diag(λ) Wᵀ)D^{1/2} with D = diag(τ) and W = D^{-1/2}V; in the eigenbasis Q of the inner matrix, with
    eigenvalues 1 + μ, everything costs O(Pk).
    """

    kind = "low-rank"

    def __init__(self, layers: Sequence[Layer], values: Tensor, vectors: Weights):
        super().__init__(layers)
        self.values, self.vectors = values, vectors

    @classmethod
    def elements(cls, layers: Sequence[Layer]) -> int:
        """Of one vector."""
        return sum(layer.size for layer in layers)

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        """Not here: eigenvectors come from products with H."""
        raise NotImplementedError

    def _eigen(self, precision: Mapping[str, Tensor], scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """√τ [P], Q [P, k] and μ [k], in float64."""
        root = flat_precision(self.layers, precision).double().sqrt()
        if not bool((root > 0).all()):
            raise ValueError(
                "a curvature of low rank says nothing of most directions, so that every weight needs a prior that curves: use "
                "prior=priors.Gaussian(…), or structure='full'"
            )
        w = flat(self.layers, self.vectors).double().T / root[:, None] * (scale * self.values).double().clamp(min=0).sqrt()
        inner, turn = torch.linalg.eigh(w.T @ w)
        kept = inner > 1e-12 * inner.max()
        q = torch.where(kept, w @ turn / torch.where(kept, inner, 1.0).sqrt(), 0.0)
        return root, q, torch.where(kept, inner, 0.0)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ log τ + Σ log(1 + μ)."""
        root = flat_precision(self.layers, precision).double().sqrt()
        w = flat(self.layers, self.vectors).double().T / root[:, None] * (scale * self.values).double().clamp(min=0).sqrt()
        inner = w.T @ w + torch.eye(len(self.values), dtype=torch.float64, device=w.device)
        return 2 * root.log().sum() + torch.linalg.slogdet(inner).logabsdet

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """(1 − Σ_k q_k² μ_k/(1 + μ_k))/τ."""
        root, q, mu = self._eigen(precision, scale)
        found = (1 - (q.square() * (mu / (1 + mu))).sum(1)) / root.square()
        return named(self.layers, found.to(self.values.dtype))

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """D^{-1/2}(ξ + Q((1 + μ)^{-1/2} − 1)Qᵀξ)."""
        root, q, mu = self._eigen(precision, scale)
        xi = flat(self.layers, noise).double()
        found = (xi + (xi @ q) * ((1 + mu).rsqrt() - 1) @ q.T) / root
        return named(self.layers, found.to(self.values.dtype))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λv."""
        v, basis = flat(self.layers, vectors), flat(self.layers, self.vectors)
        return named(self.layers, v * flat_precision(self.layers, precision) + (v @ basis.T) * (scale * self.values) @ basis)

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """In the units of the prior, less what the data say along Q."""
        root, q, mu = self._eigen(precision, scale)
        v = flat(self.layers, {name: vector[name][None] for name in self.names})[0].double() / root
        return v.square().sum() - ((v @ q).square() * mu / (1 + mu)).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """J D⁻¹ Jᵀ less what the data say along Q."""
        root, q, mu = self._eigen(precision, scale)
        wide = [
            Part(p.layer, p.columns.double() if p.columns.is_floating_point() else p.columns, p.rows.double()) for p in parts
        ]
        total = torch.stack([weighted_gram(part, named(self.layers, 1 / root.square())) for part in wide]).sum(0)
        along = named(self.layers, (q / root[:, None]).T)
        seen = torch.stack([projected(part, along) for part in wide]).sum(0)  # [k, K, B]
        return (total - torch.einsum("vkb,v,vlb->bkl", seen, mu / (1 + mu), seen)).to(parts[0].rows.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Eigenvalues and eigenvectors."""
        return {"values": self.values, **{f"vector.{name}": v for name, v in self.vectors.items()}}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> LowRank:
        """From eigenvalues and eigenvectors."""
        vectors = {k.removeprefix("vector."): v for k, v in tensors.items() if k.startswith("vector.")}
        return cls(layers, tensors["values"], vectors)


def projected(part: Part, vectors: Mapping[str, Tensor]) -> Tensor:
    """SᵀJ v for stacked v: [V, K, B]."""
    layer = part.layer
    if layer.kind == "vector":
        return torch.einsum("kbp,vp->vkb", part.rows, torch.cat([vectors[n].flatten(1) for n in layer.names], 1))
    matrices = layer.matrix(vectors, lead=1)
    if layer.kind == "table":
        found = matrices[:, 0].transpose(-1, -2)[:, part.columns.clamp(min=0)]  # [V, B, T, out]
        found = found * (part.columns >= 0)[None, ..., None]
        return torch.einsum("kbto,vbto->vkb", part.rows[:, :, :, 0], found)
    return torch.einsum("kbtgo,vbtgo->vkb", part.rows, torch.einsum("vgoi,btgi->vbtgo", matrices, part.columns))


KINDS["low-rank"] = LowRank
