"""The method that all reparameterised families share: gradients of the evidence bound through draws of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from plausible.blocks.families import Family
from plausible.blocks.variational import kl_weight
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule
from plausible.core.weights import Weights, clone, index, select
from plausible.engine.method import BatchSize, Fitted, Run
from plausible.methods.variational.bound import Bound, Terms, check_sampling, log_prior_of_points
from plausible.posteriors.laws import FamilyLaw, LawPosterior

THETA = "q of "
COPIES = 6
"""What a step holds of each parameter: itself, its gradient, two moments of the optimiser, and two while it is used."""


@dataclass(frozen=True, kw_only=True)
class Reparameterised(Bound):
    """E_q log p(D | w) − KL(q ‖ p) → max over θ,  w = w(θ, ε)

    Base of the methods with a variational family: a subclass adds its settings and says `family(weights)`.

    The KL is a sum in nats: entropy and expectations of log p in closed form where the family and the prior have one, otherwise
    over the draws of the step. `landing` ("sticking the landing", Roeder et al. 2017) samples both instead and holds θ fixed inside
    log q: the gradient has no noise left where q is the posterior. Cost: `samples` forward and backward passes a step (times the
    components of a mixture), and the draws.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3))
    samples: int = 1
    kl_weights: Literal["uniform", "blundell"] | float | Schedule = "uniform"
    initial_scale: float = 0.02
    antithetic: bool = False
    landing: bool = False
    optimiser: Optimiser = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("antithetic", "landing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{type(self).__name__}: {name} must be True or False, got {getattr(self, name)!r}")
        check_sampling(self)

    def family(self, weights: Weights) -> Family:
        """The family over weights of these names, shapes and types."""
        raise NotImplementedError

    def memory(self, weights: Weights) -> tuple[int, str]:
        """Bytes that a step holds of the family's parameters, and words for them; 0 where they are about as many as the weights."""
        return 0, ""

    def prepare(self, model: Model, run: Run[Any]) -> Family:
        weights = select(model.initial, model.random)
        needed, words = self.memory(weights)
        if needed:  # refused before anything is allocated
            require_memory(needed, model.device, f"{type(self).__name__}: {words}")
        family = self.family(weights)
        if self.landing and not family.has_density:
            raise ValueError(
                f"{type(self).__name__}: landing=True needs log q(w) at given weights, which this family does not have; "
                "leave landing unset"
            )
        return family

    def parameters(self, model: Model, run: Run[Family], key: Tensor) -> Weights:
        theta = run.prepared.start(clone(select(model.initial, model.random)), self.initial_scale, key)
        return {**clone(select(model.initial, model.points)), **{THETA + name: p for name, p in theta.items()}}

    def estimate(
        self, model: Model, run: Run[Family], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        family, temperature = run.prepared, model.temperature
        theta = parameters_of(parameters)
        fixed = {**select(parameters, model.points), **buffers}
        closed = family.open(theta) if self.landing else family.closed(model.prior, theta, temperature)
        # log q(w) looks back from w to its noise, which single precision loses where q is narrow in some direction
        wide = _double(theta) if self.landing else theta
        likelihoods, rests = [], []
        # every component of a mixture takes part in every sample: its bound is the mean of theirs
        for noise in self._noises(family, theta, key, step):
            for component in range(family.components):
                normals = _double(index(noise, component)) if self.landing else index(noise, component)
                drawn = family.draw(wide, normals, component)
                weights = {name: value.to(model.initial[name].dtype) for name, value in drawn.weights.items()}
                likelihoods.append(model.scaled_log_likelihood({**fixed, **weights}, batch, train=True))
                if closed.density or closed.names:
                    rest = family.sampled(model.prior, wide, drawn, closed, temperature, normals if self.landing else None)
                    rests.append(rest.to(closed.value.dtype))
        total = torch.stack(likelihoods).mean()
        # the closed part is exact, and only the rest has the noise of the draws
        kl = closed.value + torch.stack(rests).mean() if rests else closed.value
        bound = total / temperature - kl_weight(self.kl_weights, step, run.steps, run.batches(batch)) * kl
        bound = bound + log_prior_of_points(model, parameters)
        if (points := family.log_prior_of_points(model.prior, theta)) is not None:
            bound = bound + points / temperature
        info = {"elbo": total.detach() / temperature - kl.detach(), "log_likelihood": total, "kl": kl}
        return Terms(bound, info, buffers)

    def _noises(self, family: Family, theta: Weights, key: Tensor, step: Tensor) -> list[Weights]:
        """The noise of each sample, with a leading axis of components; with `antithetic` the second half mirrors the first."""
        count = self.samples // 2 if self.antithetic else self.samples
        shape = (count, family.components)
        like = {name: value.detach().expand(*shape, *value.shape) for name, value in family.noise(theta).items()}
        drawn = random.normal(key, step, like)
        # drawn in one call, with a leading axis of samples
        noises = [index(drawn, i) for i in range(count)]
        return noises + [family.mirrored(noise) for noise in noises] if self.antithetic else noises

    def posterior(self, model: Model, run: Run[Family], fitted: Fitted) -> LawPosterior:
        parameters = clone(parameters_of(fitted.state.weights))
        return LawPosterior.of(self, model, fitted, FamilyLaw(self.family, select(model.initial, model.random), parameters))


def _double(values: Weights) -> Weights:
    return {name: value.double() for name, value in values.items()}


def parameters_of(weights: Weights) -> Weights:
    """θ among the weights of a state."""
    return {name.removeprefix(THETA): value for name, value in weights.items() if name.startswith(THETA)}
