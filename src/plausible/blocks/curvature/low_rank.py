"""C ≈ Σ_k λ_k v_kv_kᵀ: the leading eigenpairs of a curvature matrix over the data, from products alone.

Block Lanczos with a random start, full re-orthogonalisation and thick restarts (Wu & Simon 2000; Musco & Musco 2015 on random
starts): products with a block of rank + oversample vectors widen an orthonormal basis, and the matrix seen through it, small and in
float64, gives the pairs. Its eigenvalues are lower bounds of those of C (of the largest ones, for the Hessian).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from plausible.blocks.curvature.products import Kind, Product
from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import Data
from plausible.core.memory import available
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.engine.progress import Progress

log = logging.getLogger("plausible")

_START = 0x6C6F7772  # the path of the random start below the seed


def leading(
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
    progress: bool | None = False,
) -> tuple[Tensor, Weights]:
    """The largest eigenvalues of C = Σ_n weight_n J_nᵀF_nJ_n (or another `kind`), [k] falling, and vectors {name: [k, *shape]}.

    At most `rank` of them; fewer where C has fewer that are positive: zeros are left out, and so are negative ones of a
    Hessian, with a warning that counts them. Vectors are orthonormal over all random weights, and zero for a learned noise.

    Ends when |Cv_k − λ_kv_k| ≤ tolerance · λ_k for all k, or after `iterations` products with rank + oversample vectors, each at
    about 2.5 gradients of the full data per vector. Memory: the basis, (rank + oversample) · P numbers for each of up to
    `iterations` blocks, or for as many as half of the free memory holds, at least 2; and what a product needs.
    """
    rank, iterations = _whole("rank", rank, 1), _whole("iterations", iterations, 1)
    product = Product(model, weights, data, kind, chunk=chunk)
    like = {name: weights[name].detach() for name in model.random if name not in model.likelihood_names}
    noise = {name: weights[name] for name in model.random if name in model.likelihood_names}
    total = tree.num_elements(like)
    width = min(rank + _whole("oversample", oversample, 0), total)

    def multiply(rows: Tensor) -> Tensor:
        fixed = {name: w.new_zeros(len(rows), *w.shape) for name, w in noise.items()}
        return tree.flatten(tree.select(product({**tree.unflatten(rows, like), **fixed}), like), 1)

    first = next(iter(like.values()))
    depth = _depth(total * width * first.element_size(), iterations, first.device, rank)
    start = random.normals(seed, _START, count=width * total, like=first).view(width, total)
    lanczos = _Lanczos(_orthonormal(start, 0.0)[0], width)
    with Progress(f"eigenpairs of the {kind}", iterations, "products", show=progress) as bar:
        for done in range(1, iterations + 1):
            lanczos.widen(multiply(lanczos.block))
            error = lanczos.residual(rank)
            bar.update(done, f"residual {error:.1e}")
            if error <= tolerance or not len(lanczos.block):
                break
            if done < iterations and len(lanczos.basis) + len(lanczos.block) > depth * width:
                lanczos.restart()
        else:
            log.info("eigenpairs of the %s: relative residual %.1e after %s products", kind, error, iterations)
    if kind == "hessian" and lanczos.negative:
        log.warning(
            "%s negative eigenvalues of the Hessian were met and left out, down to %.3g where the largest is %.3g: at these "
            "weights the likelihood curves upwards, so they are no mode of it (train longer, or use the Gauss-Newton matrix)",
            lanczos.negative,
            lanczos.lowest,
            float(lanczos.values[0]),
        )
    values, rows = lanczos.pairs(rank)
    vectors = tree.unflatten(rows, like)
    whole = {
        name: vectors[name] if name in vectors else noise[name].new_zeros(len(rows), *noise[name].shape)
        for name in model.random
    }
    return values.to(first.dtype), whole


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
        again = self.basis @ rest.T
        rest -= again.T @ self.basis
        columns = (columns + again).double()
        corner = (columns[old:] + columns[old:].T) / 2
        self.matrix = torch.cat([torch.cat([self.matrix, columns[:old].T]), torch.cat([columns[:old], corner])], 1)
        values, small = torch.linalg.eigh(self.matrix)
        self.values, self.small = values.flip(0), small.flip(1)
        self.noise = 100 * torch.finfo(product.dtype).eps * float(self.values.abs().max())
        self.negative = max(self.negative, int((self.values < -self.noise).sum()))
        self.lowest = min(self.lowest, float(self.values[-1]))
        self._last = len(self.block)
        self.block, self._coupling = _orthonormal(rest, self.noise, against=self.basis)

    def residual(self, rank: int) -> float:
        """max_k |Cv_k − λ_kv_k| / λ_k over the positive ones of the first `rank` pairs; rounding alone counts as none."""
        count = self._positive(rank)
        beyond = (self._coupling @ self.small[-self._last :, :count]).norm(dim=0)
        return max([0.0, *torch.where(beyond > self.noise, beyond / self.values[:count], 0.0).tolist()])

    def restart(self) -> None:
        """Keep the leading vectors alone; the next block goes on from them as it would have done."""
        kept = self.small[:, : self.width]
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
    u, lengths, _ = torch.linalg.svd(r.double())
    basis = u[:, lengths > noise].T.to(q) @ q.T
    if against is not None and len(basis):  # short remainders are orthogonal to what they are left of only roughly
        basis = torch.linalg.qr((basis - (basis @ against.T) @ against).T)[0].T.contiguous()
    return basis, (basis @ rows.T).double()


def _depth(block: int, iterations: int, device: torch.device, rank: int) -> int:
    """Blocks of `block` bytes that the basis may hold; MemoryError where 2 of them, and 4 for a product, clearly do not fit."""
    free = available(device)
    if free is None:
        return iterations
    if 6 * block > free:
        raise MemoryError(
            f"{rank} eigenpairs: about {6 * block / 2**30:,.1f} GiB are needed and {free / 2**30:,.1f} GiB are free on {device}; "
            "ask for a lower rank, for fewer random weights (where=), or use another device"
        )
    return max(2, min(iterations, free // 2 // block))


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value
