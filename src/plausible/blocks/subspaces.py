"""Planes through the space of weights, and the log joint of a model on one of them.

w(z) = origin + Σ_k z_k d_k,        log p(z, D) = log p(D | w(z)) + log p(z)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from plausible.blocks.batch_norm import BatchNorms, Renormed
from plausible.core.model import Model
from plausible.core.priors import Prior
from plausible.core.priors.composed import by_name
from plausible.core.storage import DrawStore
from plausible.core.weights import Weights, flatten, index, select, unflatten

COORDINATES = "coordinates"
"""The name of z among the weights of a `PlaneModel`; those of the likelihood are beside it."""
NEAR = 0.1
"""How far from there chains start, in units of the prior."""
SHARD = 32
"""Draws of the whole network that are made of their coordinates at once."""


class Plane(NamedTuple):
    """`origin` has all weights of the network, `directions` [K, …] those that move, `start` [K] is where the plane was laid."""

    origin: Weights
    directions: Weights
    start: Tensor

    @classmethod
    def through(
        cls, centre: Mapping[str, Tensor], columns: Tensor, like: Weights, prior: tuple[Weights, Weights] | None
    ) -> Self:
        """The plane through `centre` that `columns` [K, P] span, in the order of the weights `like`.

        `prior` are the means μ and scales s of independent Gaussians: directions are then orthonormal in units of s, d_k = s∘q_k,
        and the origin is the point of the plane where their density is highest, w̄ − s∘QQᵀ(w̄ − μ)/s. On the plane that density is
        N(z; 0, I) but for a constant. Without a prior directions are orthonormal, and the origin is w̄.
        """
        middle = flatten(select(centre, like))
        scale = torch.ones_like(middle) if prior is None else flatten(select(prior[1], like)).to(middle)
        basis, _ = torch.linalg.qr((columns / scale).T.double())  # [P, K]
        basis = basis.to(middle.dtype)
        start = basis.new_zeros(basis.shape[1])
        if prior is not None:
            start = basis.T @ ((middle - flatten(select(prior[0], like)).to(middle)) / scale)
        directions = unflatten(scale * basis.T, like)
        origin = unflatten(middle - scale * (basis @ start), like)
        return cls({**{name: value.clone() for name, value in centre.items()}, **origin}, directions, start)

    def weights(self, z: Tensor) -> Weights:
        """All weights at the coordinates z [K], or [S, K] for stacked ones."""
        moved = {n: self.origin[n] + torch.tensordot(z, d, dims=([z.ndim - 1], [0])) for n, d in self.directions.items()}
        leading = z.shape[:-1]
        return {n: moved[n] if n in moved else value.expand(*leading, *value.shape) for n, value in self.origin.items()}


class OnPlane(nn.Module):
    """A network whose weights are a function of others: its layers can be seen, and nobody takes it for a perceptron."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network


@dataclass(frozen=True, eq=False)
class PlaneModel(Model):
    """Model → Model: the log joint as a function of coordinates on a plane, and of the likelihood's own weights.

    The network runs in evaluation mode, also in training. Its batch norms have the statistics of some rows at the very weights, so
    that it is one function of z.
    """

    full: Model = None  # type: ignore[assignment]
    plane: Plane = None  # type: ignore[assignment]
    norms: BatchNorms | None = None
    renormed: Renormed | None = None

    @classmethod
    def on(cls, model: Model, plane: Plane, prior: Prior, rows: Any) -> Self:
        """The model on this plane; its noise starts where that of `model` does."""
        initial = {COORDINATES: plane.start, **model.noise(model.initial)}
        norms = BatchNorms.of(model)
        return cls(
            OnPlane(model.network),
            model.likelihood,
            by_name({COORDINATES: prior}, model.prior),
            model.num_data,
            initial,
            tuple(initial),
            {},
            output_shape=model.output_shape,
            target_ndim=model.target_ndim,
            temperature=model.temperature,
            full=model,
            plane=plane,
            norms=norms,
            renormed=None if norms is None else Renormed(model, norms.shares, rows),
        )

    def outputs(self, weights: Mapping[str, Tensor], x: Any, *, train: bool = False) -> Tensor:  # noqa: ARG002
        here = {**self.full.buffers, **self.plane.weights(weights[COORDINATES])}
        return self.full.outputs(here, x) if self.renormed is None else self.renormed.outputs(here, x)

    def reinitialised(self, generator: torch.Generator) -> Weights:
        """Near where the plane was laid: farther off a network is as bad as an untrained one, and chains may stay there."""
        start = self.plane.start
        noise = torch.randn(start.shape, generator=generator, dtype=start.dtype, device=generator.device).to(start)
        return {**{name: value.clone() for name, value in self.initial.items()}, COORDINATES: start + NEAR * noise}

    def not_reinitialisable(self) -> list[str]:
        return []

    def draws(self, stacked: Weights) -> PlaneDraws:
        """Draws of coordinates, and of the weights of the likelihood, as draws of all weights and buffers of the network."""
        count, buffers = len(stacked[COORDINATES]), dict(self.full.buffers)
        whole = {n: value.expand(count, *value.shape).clone() for n, value in buffers.items()}
        if self.norms is not None and self.renormed is not None:
            for k in range(count):
                here = self.plane.weights(stacked[COORDINATES][k])
                for name, value in self.norms.statistics(here, self.renormed.rows).items():
                    whole[name][k] = value
        return PlaneDraws(self.plane, {**stacked, **whole})


class PlaneDraws(DrawStore):
    """Draws of a network that are held as coordinates on a plane: the weights are made when they are asked for."""

    def __init__(self, plane: Plane, stacked: Weights):
        self.plane, self.stacked = plane, stacked

    def __len__(self) -> int:
        return len(self.stacked[COORDINATES])

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        where = torch.as_tensor(list(rows), device=self.stacked[COORDINATES].device)
        held = index(self.stacked, where)
        whole = {**self.plane.weights(held.pop(COORDINATES)), **held}
        return {name: value.to(device) for name, value in whole.items()}

    def shards(self) -> Iterable[Weights]:
        device = self.stacked[COORDINATES].device
        for first in range(0, len(self), SHARD):
            yield self.get(range(first, min(first + SHARD, len(self))), device)
