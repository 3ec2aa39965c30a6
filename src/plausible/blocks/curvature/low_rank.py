"""C ≈ Σ_k λ_k v_kv_kᵀ: the leading eigenpairs of a curvature matrix over the data, from products alone, and what they are good for.

Block Lanczos with a random start, full re-orthogonalisation and thick restarts (Wu & Simon 2000; Musco & Musco 2015 on random
starts): products with a block of rank + oversample vectors widen an orthonormal basis, and the matrix seen through it, small
and in float64, gives the pairs. Its eigenvalues are lower bounds of those of C (of the largest ones, for the Hessian).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.products import FEWER, Kind, Product
from plausible.blocks.curvature.structures import Block, flat, flat_precision, named, weighted_gram
from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import Batch, Data, Watch, run_passes
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.special import symmetric_eigen
from plausible.core.weights import Weights
from plausible.core.words import log

_START = 0x6C6F7772  # the path of the random start below the seed


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
        return sum(layer.size for layer in layers)

    def add(self, parts: Sequence[Part], weight: Tensor | None, again: bool = False) -> None:
        raise NotImplementedError("eigenvectors come from products with H: see `Eigenpairs`")

    def finish(self) -> None:
        pass

    def _whitened(self, precision: Mapping[str, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """√τ [P] and W √(s·diag(λ)) [P, k], in float64."""
        root = flat_precision(self.layers, precision).double().sqrt()
        stretch = (scale * self.values).double().clamp(min=0).sqrt()
        return root, flat(self.layers, self.vectors).double().T / root[:, None] * stretch

    def _eigen(self, precision: Mapping[str, Tensor], scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """√τ [P], Q [P, k] and μ [k], in float64."""
        root, w = self._whitened(precision, scale)
        if not bool((root > 0).all()):
            raise ValueError(
                "a curvature of low rank says nothing of most directions, so that every weight needs a prior that curves: use "
                "prior=priors.Gaussian(…), or structure='full'"
            )
        inner, turn = symmetric_eigen(w.T @ w)
        kept = inner > 1e-12 * inner.max()  # directions that rounding alone has made would be divided by almost nothing
        q = torch.where(kept, w @ turn / torch.where(kept, inner, 1.0).sqrt(), 0.0)
        return root, q, torch.where(kept, inner, 0.0)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Σ log τ + Σ log(1 + μ)."""
        root, w = self._whitened(precision, scale)
        inner = w.T @ w + torch.eye(len(self.values), dtype=torch.float64, device=w.device)
        return 2 * root.log().sum() + torch.linalg.slogdet(inner).logabsdet

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """(1 − Σ_k q_k² μ_k/(1 + μ_k))/τ."""
        root, q, mu = self._eigen(precision, scale)
        variances = (1 - (q.square() * (mu / (1 + mu))).sum(1)) / root.square()
        return named(self.layers, variances.to(self.values.dtype))

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """D^{-1/2}(ξ + Q((1 + μ)^{-1/2} − 1)Qᵀξ)."""
        root, q, mu = self._eigen(precision, scale)
        xi = flat(self.layers, noise).double()
        draws = (xi + (xi @ q) * ((1 + mu).rsqrt() - 1) @ q.T) / root
        return named(self.layers, draws.to(self.values.dtype))

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
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
        ids = [part.layer.kind == "table" for part in parts]  # their columns are numbers of rows
        wide = [Part(p.layer, p.columns if table else p.columns.double(), p.rows.double()) for p, table in zip(parts, ids)]
        prior = named(self.layers, 1 / root.square())
        total = torch.stack([weighted_gram(part, part.layer.matrix(prior)) for part in wide]).sum(0)
        along = named(self.layers, (q / root[:, None]).T)
        seen = torch.stack([projected(part, along) for part in wide]).sum(0)  # [k, K, B]
        return (total - torch.einsum("vkb,v,vlb->bkl", seen, mu / (1 + mu), seen)).to(parts[0].rows.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.values, **{f"vector.{name}": v for name, v in self.vectors.items()}}

    @classmethod
    def restored(cls, layers: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Self:
        vectors = {k.removeprefix("vector."): v for k, v in tensors.items() if k.startswith("vector.")}
        return cls(layers, tensors["values"], vectors)

    def plus(self, other: Self) -> Self:
        """The leading eigenpairs of the sum, as many as the larger term has."""
        vectors = torch.cat([flat(term.layers, term.vectors) for term in (self, other)]).double()
        # the sum has its eigenvectors in the span of both terms, a small problem
        basis, factor = torch.linalg.qr(vectors.T)
        values, turn = symmetric_eigen((factor * torch.cat([self.values, other.values]).double()) @ factor.T)
        kept = max(len(self.values), len(other.values))
        leading = (basis @ turn[:, -kept:]).T.to(self.values.dtype)
        return type(self)(self.layers, values[-kept:].to(self.values.dtype), named(self.layers, leading))


def projected(part: Part, vectors: Mapping[str, Tensor]) -> Tensor:
    """SᵀJ v for stacked v: [V, K, B]."""
    matrices = part.layer.matrix(vectors, lead=1)
    if part.layer.kind == "vector":
        return torch.einsum("kbp,vp->vkb", part.rows, matrices)
    if part.layer.kind == "table":
        picked = matrices[:, 0].transpose(-1, -2)[:, part.columns.clamp(min=0)]  # [V, B, T, out]
        picked = picked * (part.columns >= 0)[None, ..., None]
        return torch.einsum("kbto,vbto->vkb", part.rows[:, :, :, 0], picked)
    return torch.einsum("kbtgo,vbtgo->vkb", part.rows, torch.einsum("vgoi,btgi->vbtgo", matrices, part.columns))


# ---------------------------------------------------------------------------------------------------------------------
# Eigenpairs
class Eigenpairs:
    """An `Estimator` of the largest eigenvalues of C = Σ_n weight_n J_nᵀF_nJ_n (or another `kind`): each pass is a product with C.

    At most `rank` of them; fewer where C has fewer that are positive: zeros are left out, and so are negative ones of a
    Hessian, with a warning that counts them. Vectors are orthonormal over all random weights, and zero for a learned noise.

    Ends when |Cv_k − λ_kv_k| ≤ tolerance · λ_k for all k, or after `iterations` products with rank + oversample vectors, each
    at about 2.5 gradients of the full data per vector. Memory: the basis, (rank + oversample) · P numbers for each of up to
    `iterations` blocks, or for as many as half of the free memory holds, at least 2; and what a product needs.
    """

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Tensor],
        data: Data,
        rank: int,
        *,
        kind: Kind = "ggn",
        iterations: int = 12,
        oversample: int = 10,
        tolerance: float = 1e-2,
        chunk: int | None = None,
        seed: int = 0,
    ):
        self.rank, self.passes = _whole("rank", rank, 1), _whole("iterations", iterations, 1)
        self.model, self.kind, self.tolerance, self.note = model, kind, tolerance, ""
        self.product = Product(model, weights, data, kind, chunk=chunk)
        self.like = {name: weights[name].detach() for name in model.random if name not in model.likelihood_names}
        self.noise = {name: weights[name] for name in model.random if name in model.likelihood_names}
        total, first = tree.num_elements(self.like), next(iter(self.like.values()))
        width = min(rank + _whole("oversample", oversample, 0), total)
        block = total * width * first.element_size()
        # 2 blocks of the basis at least, and 4 for a product; more of them only make restarts rarer
        free = require_memory(6 * block, first.device, f"{rank} eigenpairs", FEWER)
        self.depth = iterations if free is None else max(2, min(iterations, free // 2 // block))
        start = random.normals(seed, _START, count=width * total, like=first).view(width, total)
        self.lanczos, self.done = _Lanczos(_orthonormal(start, 0.0)[0], width), 0
        self._multiply()

    @property
    def chunk(self) -> int:
        return self.product.chunk

    def _multiply(self) -> None:
        block = self.lanczos.block
        # products know of no learned noise, yet vectors are named after all random weights
        fixed = {name: w.new_zeros(len(block), *w.shape) for name, w in self.noise.items()}
        self.product.start({**tree.unflatten(block, self.like), **fixed})

    def add(self, batch: Batch) -> None:
        self.product.add(batch)

    def next_pass(self) -> bool:
        lanczos = self.lanczos
        lanczos.widen(tree.flatten(tree.select(self.product.finish(), self.like), 1))
        self.done += 1
        error = lanczos.residual(self.rank)
        self.note = f"residual {error:.1e}"
        if error <= self.tolerance or not len(lanczos.block):
            return False
        if self.done == self.passes:
            log.info("eigenpairs of the %s: relative residual %.1e after %s products", self.kind, error, self.passes)
            return False
        if len(lanczos.basis) + len(lanczos.block) > self.depth * lanczos.width:
            lanczos.restart()
        self._multiply()
        return True

    def finish(self) -> tuple[Tensor, Weights]:
        """Eigenvalues [k], falling, and vectors {name: [k, *shape]}."""
        lanczos = self.lanczos
        if self.kind == "hessian" and lanczos.negative:
            extremes = lanczos.lowest, float(lanczos.values[0])
            log.warning(
                "%s negative eigenvalues of the Hessian were met and left out, down to %.3g where the largest is %.3g: at these "
                "weights the likelihood curves upwards, so they are no mode of it (train longer, or use the Gauss-Newton matrix)",
                *(lanczos.negative, *extremes),
            )
        values, rows = lanczos.pairs(self.rank)
        vectors = {name: w.new_zeros(len(rows), *w.shape) for name, w in self.noise.items()} | tree.unflatten(rows, self.like)
        return values.to(rows.dtype), {name: vectors[name] for name in self.model.random}

    def tensors(self) -> dict[str, Tensor]:
        lanczos = self.lanczos
        numbers = torch.tensor([self.done, lanczos.negative, lanczos.lowest], dtype=torch.float64)
        parts = {"numbers": numbers, "basis": lanczos.basis, "block": lanczos.block, "matrix": lanczos.matrix}
        return {**parts, **{f"sum.{name}": v for name, v in self.product.sums.items()}}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        lanczos = self.lanczos
        done, negative, lanczos.lowest = tensors["numbers"].tolist()
        self.done, lanczos.negative = int(done), int(negative)
        lanczos.basis, lanczos.block, lanczos.matrix = tensors["basis"], tensors["block"], tensors["matrix"]
        if len(lanczos.matrix):
            lanczos.decompose()
        if len(lanczos.block):  # none is left where all pairs were found
            self._multiply()
        self.product.sums = {name.removeprefix("sum."): v for name, v in tensors.items() if name.startswith("sum.")}


def leading(
    model: Model, weights: Mapping[str, Tensor], data: Data, rank: int, *, watch: Watch = None, **settings: Any
) -> tuple[Tensor, Weights]:
    """The largest eigenvalues of C = Σ_n weight_n J_nᵀF_nJ_n, [k] falling, and vectors {name: [k, *shape]}: see `Eigenpairs`."""
    return run_passes(Eigenpairs(model, weights, data, rank, **settings), data, watch)


class _Lanczos:
    """CQᵀ = QᵀT + the rest, for an orthonormal basis Q [m, P] that grows by blocks; the rest is along the next block alone.

    `values` and `small` are the eigenpairs of T, falling.
    """

    def __init__(self, block: Tensor, width: int):
        self.block, self.width = block, width
        self.basis = block[:0]
        self.matrix = torch.zeros(0, 0, dtype=torch.float64, device=block.device)
        self.negative, self.lowest = 0, 0.0

    def widen(self, product: Tensor) -> None:
        """Take the block, whose product with C is given, into the basis; what the product has beyond it is the next block."""
        old = len(self.basis)
        self.basis = torch.cat([self.basis, self.block])
        columns = self.basis @ product.T  # [m, b]
        rest = product - columns.T @ self.basis
        if not bool(rest.isfinite().all()):
            raise ValueError("products with the curvature are not finite: are the weights and the outputs?")
        # Gram–Schmidt twice: once loses orthogonality where the rest is short (Parlett's "twice is enough")
        again = self.basis @ rest.T
        rest -= again.T @ self.basis
        columns = (columns + again).double()
        # C is symmetric, its products are so only up to rounding
        corner = (columns[old:] + columns[old:].T) / 2
        self.matrix = torch.cat([torch.cat([self.matrix, columns[:old].T]), torch.cat([columns[:old], corner])], 1)
        self.decompose()
        self.negative = max(self.negative, int((self.values < -self.noise).sum()))
        self.lowest = min(self.lowest, float(self.values[-1]))
        self._last = len(self.block)
        self.block, self._coupling = _orthonormal(rest, self.noise, against=self.basis)

    def decompose(self) -> None:
        """The eigenpairs of T, and how large a value rounding alone makes."""
        values, small = symmetric_eigen(self.matrix)
        self.values, self.small = values.flip(0), small.flip(1)
        # below this a value cannot be told from rounding
        self.noise = 100 * torch.finfo(self.basis.dtype).eps * float(self.values.abs().max())

    def residual(self, rank: int) -> float:
        """max_k |Cv_k − λ_kv_k| / λ_k over the positive ones of the first `rank` pairs; rounding alone counts as none."""
        count = self._positive(rank)
        beyond = (self._coupling @ self.small[-self._last :, :count]).norm(dim=0)
        return max([0.0, *torch.where(beyond > self.noise, beyond / self.values[:count], 0.0).tolist()])

    def restart(self) -> None:
        """Keep the leading vectors alone; the next block goes on from them as it would have done."""
        kept = self.small[:, : self.width]
        # thick restart: in its own eigenvectors T is diagonal, and the next product finds the coupling again
        self.basis = kept.T.to(self.basis) @ self.basis
        self.matrix = torch.diag(self.values[: self.width])

    def pairs(self, rank: int) -> tuple[Tensor, Tensor]:
        """The positive ones among the first `rank`: [k] and [k, P]."""
        count = self._positive(rank)
        return self.values[:count], self.small[:, :count].T.to(self.basis) @ self.basis

    def _positive(self, rank: int) -> int:
        return int((self.values[:rank] > self.noise).sum())


def _orthonormal(rows: Tensor, noise: float, against: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Q [r, P], orthonormal, and B [r, b] in float64 with rows = BᵀQ; directions shorter than `noise` are left out."""
    q, r = torch.linalg.qr(rows.T)  # [P, b], [b, b]
    # QR alone does not say which directions are numerically absent
    u, lengths, _ = torch.linalg.svd(r.double())
    basis = u[:, lengths > noise].T.to(q) @ q.T
    if against is not None and len(basis):  # short remainders are orthogonal to what they are left of only roughly
        basis = torch.linalg.qr((basis - (basis @ against.T) @ against).T)[0].T.contiguous()
    return basis, (basis @ rows.T).double()


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value
