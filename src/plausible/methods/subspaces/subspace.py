"""Subspace inference: any method, on a plane of few dimensions through the space of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks import curves
from plausible.blocks.subspaces import Plane, PlaneModel
from plausible.core import random
from plausible.core.data import ArrayData, Batch, Data
from plausible.core.model import Model
from plausible.core.priors import Gaussian, Prior
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights, flatten, index, num_elements, select
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Stage, Traits, check_choice, create
from plausible.methods.averages.base import DEVIATIONS, SNAPSHOTS, Collecting
from plausible.methods.averages.swag import SWAG
from plausible.methods.chains.elliptical_slice import EllipticalSlice, gaussian_prior
from plausible.methods.chains.nuts import NUTS
from plausible.methods.ensembles.ensemble import Stacked
from plausible.methods.points.map import MAP
from plausible.methods.subspaces.connecting import ENDS, Connecting
from plausible.posteriors.base import record_of
from plausible.posteriors.draws import DrawsPosterior, IndependentDraws
from plausible.posteriors.subspaces import SubspacePosterior

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior

DIMENSIONS = 5
ROWS = 1024
"""Rows whose statistics batch norms take, at most."""
BEFORE = "before/"
"""What the names of tensors begin with that a plane is made of, among those that one stage on it leaves for the next."""


@register
@dataclass(frozen=True)
class Subspace(Method):
    """w = w̄ + Σ_k z_k d_k,  z ~ p(z | D) ∝ p(D | w(z)) p(z)

    Inference on a plane of few dimensions through the space of weights (Izmailov et al. 2019).

    `path` trains: its `mode` finds w̄, around which basis="random" takes random directions. With "pca" SGD goes on from there as in
    `SWAG`: w̄ is the mean of its path, and the directions are the principal components of the last `path.rank` deviations from it.
    With "curve" two networks are trained and connected by a curve of low loss: the plane is that of the curve, and w̄ its middle.
    On the plane `method`, any method of the library, finds the posterior of the coordinates z, under the prior of the weights: a
    Gaussian one is a Gaussian there too, N(z; 0, I) in the right coordinates. A `prior` of its own is one of coordinates around w̄
    along orthonormal directions. The weights of the likelihood are inferred beside z. At most `draws` draws are left, evenly
    thinned. Batch norms have the statistics of up to 1,024 rows at the very weights. Cost: that of the path, and of `method`.
    """

    method: Method = field(default_factory=lambda: NUTS(draws=200, warmup=200, metric="dense", max_depth=5))
    basis: Literal["random", "pca", "curve"] = "pca"
    dimensions: int | None = None
    path: SWAG = field(default_factory=SWAG)
    prior: Prior | None = None
    draws: int = 400

    name: ClassVar[str] = "subspace"

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", create(self.method))
        if not isinstance(self.method, Method) or self.method.traits.verb == "choose":
            raise TypeError(f"Subspace: method must be a method such as NUTS() or MeanField(), got {self.method!r}")
        if isinstance(self.method, Subspace) or not self.method.traits.has_weights:
            raise TypeError(f"Subspace: method must infer weights, here coordinates, got {self.method!r}")
        if not isinstance(self.path, SWAG):
            raise TypeError(f"Subspace: path must be SWAG(…), whose mode and path span the plane, got {self.path!r}")
        if self.prior is not None and not isinstance(self.prior, Prior):
            raise TypeError(
                f"Subspace: prior must be a prior of the coordinates, such as priors.Gaussian(), got {self.prior!r}"
            )
        check_choice(self, "basis", ("random", "pca", "curve"))
        check_count(self, "draws")
        if self.dimensions is not None:
            check_count(self, "dimensions")
        if self.basis == "curve" and (self.path.mode is None or self.dimensions not in (None, 2)):
            raise ValueError("Subspace: basis='curve' trains two networks, which path.mode=None forbids, and has 2 dimensions")
        if self.basis == "pca" and self.size > self.path.rank:
            raise ValueError(
                f"Subspace: dimensions={self.size} of the {self.path.rank} deviations that path keeps; raise path=SWAG(rank=…)"
            )

    @property
    def size(self) -> int:
        """K."""
        return 2 if self.basis == "curve" else self.dimensions or DIMENSIONS

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(self.method.traits, verb="sample", divisible=False, bias="the posterior on a plane")

    def stages(self) -> tuple[Stage, ...]:
        begin = self.path.training
        if self.basis == "pca":
            begin = (*begin, Collecting(self.path))
        elif self.basis == "curve":
            assert self.path.mode is not None
            begin = (Stacked(self.path.mode, 2, "fresh"), Connecting(self.path))
        inner = self.method.stages()
        return (*begin, *(Inside(self, stage, k == 0, k == len(inner) - 1) for k, stage in enumerate(inner)))

    def laid(self, model: Model, left: Mapping[str, Tensor], run: Run[Any]) -> PlaneModel:
        """The model on the plane that the training left."""
        noise = set(model.likelihood_names)
        like = {name: model.initial[name] for name in model.random if name not in noise}
        if self.basis == "curve" and len(like) + len(noise) < len(model.initial):
            raise ValueError("Subspace: basis='curve' connects whole networks: leave where= out, or take 'random' or 'pca'")
        held = index(left, 0) if left else {**model.initial, **model.buffers}
        if self.basis == "curve":
            first, second = ({name: left[ENDS + name][end] for name in model.initial} for end in (0, 1))
            halfway = curves.point(curves.shares("bezier", torch.tensor(0.5)), first, select(held, model.initial), second)
            one, two, here = (flatten(select(place, like)) for place in (first, second, halfway))
            columns, held = torch.stack([one - two, here - (one + two) / 2]), {**held, **halfway}
        elif self.basis == "pca":
            columns = self._components(left, like)
        else:
            size = num_elements(like)
            if self.size > size:
                raise ValueError(f"Subspace: dimensions={self.size} is more than the {size} random weights of the network")
            template = flatten(like).new_zeros(self.size, size)
            columns = random.normal(random.fold(random.key(run.seed, device=model.device), 17), 0, template)
        around = model.starting_at(held)
        prior = None
        if self.prior is None:
            prior = gaussian_prior(
                model, "Subspace", "or the coordinates a prior of their own, Subspace(prior=priors.Gaussian())"
            )
        centre = {name: value for name, value in around.initial.items() if name not in noise}
        plane = Plane.through(centre, columns, like, prior)
        return PlaneModel.on(around, plane, self.prior or Gaussian(), _rows(run.data))

    def _components(self, left: Mapping[str, Tensor], like: Weights) -> Tensor:
        """The first K principal components of the deviations that the path left, [K, P], not normalised."""
        deviations = torch.cat([left[DEVIATIONS + name][0].flatten(1) for name in like], dim=1)
        known = min(int(left[SNAPSHOTS]), self.path.rank)
        if known < self.size:
            raise ValueError(
                f"Subspace: the path has {known} snapshots, too few for {self.size} dimensions: give path more epochs, or let it "
                "collect more often with every"
            )
        # by the small matrix of products: [rank, rank] instead of [P, P]
        _, vectors = torch.linalg.eigh((deviations @ deviations.T).double())
        return vectors[:, -self.size :].T.to(deviations.dtype) @ deviations

    @classmethod
    def conforming(cls) -> Subspace:
        # All dimensions that there are: on this plane the posterior is the exact one
        sampler = EllipticalSlice.conforming()
        return cls(sampler, "random", 3, SWAG(MAP.conforming()), draws=sampler.draws * sampler.chains)  # type: ignore[arg-type]

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        """The draws of `method` on the plane, evenly thinned, as draws of the network."""
        there, inner = run.prepared
        found = self.method.posterior(there, inner, fitted)
        record = {**record_of(fitted), "subspace": found.diagnostics()}
        if isinstance(found, DrawsPosterior) and found.ordered:
            held = select(found.store.get(evenly(len(found), found.chains, self.draws), model.device), there.initial)
            posterior: DrawsPosterior = SubspacePosterior(self, there.full, record, there.draws(held), found.chains)
        else:
            posterior = IndependentDraws(self, there.full, record, there.draws(found.weights(self.draws, run.seed)))
        posterior.log_evidence = found.log_evidence
        return posterior


class OnPlane(NamedTuple):
    """The model on the plane, and what the stage that runs on it sees of the run."""

    model: PlaneModel
    run: Run[Any]

    @property
    def mode(self) -> str:
        """How the kernels of a sampler run there."""
        return getattr(self.run.prepared, "mode", "eager")


@dataclass(frozen=True)
class Inside(Stage):
    """A stage of a method on the plane: the `first` is there when the plane is laid, the `last` leaves the draws."""

    method: Subspace
    stage: Stage
    first: bool
    last: bool

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(self.stage.traits, divisible=False)

    @property
    def members(self) -> int | None:  # type: ignore[override]
        return self.stage.members

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.stage.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> OnPlane:
        laid_by = {
            name.removeprefix(BEFORE): value for name, value in run.before.items() if self.first or name.startswith(BEFORE)
        }
        there = self.method.laid(model, laid_by, run)
        left = {} if self.first else {name: value for name, value in run.before.items() if not name.startswith(BEFORE)}
        inner = replace(run, prepared=None, before=left, starts=None)
        return OnPlane(there, replace(inner, prepared=self.stage.prepare(there, inner)))

    def start(self, model: Model, run: Run[OnPlane], key: Tensor) -> Any:
        there, inner = run.prepared
        return self.stage.start(there, inner, key)

    def step(self, model: Model, run: Run[OnPlane], state: Any, batch: Batch) -> tuple[Any, Info]:
        there, inner = run.prepared
        return self.stage.step(there, inner, state, batch)

    def looped_step(self, model: Model, run: Run[OnPlane], state: Any, batch: Batch) -> tuple[Any, Info]:
        there, inner = run.prepared
        return self.stage.looped_step(there, inner, state, batch)  # type: ignore[attr-defined]

    def finished(self, state: Any) -> bool:
        return self.stage.finished(state)

    def caption(self, state: Any) -> str | None:
        return self.stage.caption(state)

    def kept(self, model: Model, run: Run[OnPlane], state: Any) -> Weights:
        there, inner = run.prepared
        left = self.stage.kept(there, inner, state)
        if self.last:
            return left
        laid_by = {BEFORE + n.removeprefix(BEFORE): v for n, v in run.before.items() if self.first or n.startswith(BEFORE)}
        return {**left, **laid_by}


def evenly(count: int, chains: int, most: int) -> list[int]:
    """The numbers of at most so many of `count` draws, of each chain the same and at least one (draw r: chain r mod chains)."""
    each = count // chains
    every = min(each, max(1, math.ceil(each * chains / most)))
    return [row for row in range(each * chains) if (row // chains + 1) % every == 0]


def _rows(data: Data) -> Any:
    """Inputs of up to `ROWS` rows, evenly spaced: data may be sorted. Of a loader the first that it gives."""
    if isinstance(data, ArrayData):
        step = -(-data.num_data // ROWS)
        return data.rows(slice(None, None, step)).x
    return next(iter(data.chunks(ROWS))).x
