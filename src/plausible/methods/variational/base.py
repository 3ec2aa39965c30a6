"""The method that all reparameterised families share: gradients of the evidence bound through draws of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.families import Family
from plausible.blocks.variational import kl_weight
from plausible.core import random
from plausible.core.data import num_rows
from plausible.core.differentiation import value_and_gradient
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_count, check_number
from plausible.core.weights import Weights, clone, index, select
from plausible.engine.method import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.posteriors.laws import FamilyLaw, LawPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posteriors.base import Posterior

THETA = "q of "
COPIES = 6
"""What a step holds of each parameter: itself, its gradient, two moments of the optimiser, and two while it is used."""


class FamilyState(NamedTuple):
    """Weights trained as points and the family's parameters (named `THETA + name`), buffers, optimiser, key of the noise, step."""

    weights: Weights
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class Reparameterised(Method):
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

    divisible: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(noisy=True)
    tolerance: ClassVar[float] = 0.05

    def __post_init__(self) -> None:
        who = type(self).__name__
        check_training(self)
        as_schedule(self.lr)
        check_count(self, "samples", at_least=1)
        check_number(self, "initial_scale", above=0)
        if isinstance(self.kl_weights, str) and self.kl_weights not in ("uniform", "blundell"):
            raise ValueError(
                f"{who}: kl_weights must be 'uniform', 'blundell', a number or a schedule, got {self.kl_weights!r}"
            )
        if not isinstance(self.kl_weights, str):
            as_schedule(self.kl_weights, "kl_weights")
        for name in ("antithetic", "landing"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{who}: {name} must be True or False, got {getattr(self, name)!r}")
        if self.antithetic and self.samples % 2:
            raise ValueError(f"{who}: antithetic pairs need an even number of samples, got samples={self.samples}")
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"{who}: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )

    def family(self, weights: Weights) -> Family:
        """The family over weights of these names, shapes and types."""
        raise NotImplementedError

    def check_size(self, model: Model) -> None:
        """Refuse, before anything is allocated, what would not fit into memory."""

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is the result."""
        return plan_epochs(self, num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:  # noqa: ARG002
        """Make the family once."""
        return model.with_prepared(self.family(select(model.initial, model.random)))

    def _family(self, model: Model) -> Family:
        known = model.prepared
        return known if isinstance(known, Family) else self.family(select(model.initial, model.random))

    def start(self, model: Model, key: Tensor) -> FamilyState:
        """Centred at the module's weights, narrow."""
        self.check_size(model)
        family = self._family(model)
        if self.landing and not family.has_density:
            raise ValueError(
                f"{type(self).__name__}: landing=True needs log q(w) at given weights, which this family does not have; "
                "leave landing unset"
            )
        theta = family.start(clone(select(model.initial, model.random)), self.initial_scale, key)
        weights = {**clone(select(model.initial, model.points)), **{THETA + name: p for name, p in theta.items()}}
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return FamilyState(weights, clone(model.buffers), self.optimiser.init(weights), key, step)

    def step(self, model: Model, state: FamilyState, batch: Batch) -> tuple[FamilyState, dict[str, Tensor]]:
        """One step up the gradient of the bound, divided by N."""
        family, temperature = self._family(model), model.temperature
        batches = model.per_epoch or -(-model.num_data // num_rows(batch.x))

        def objective(
            variables: Weights, part: Batch, buffers: Weights, key: Tensor, step: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            moving = {name: b.clone() for name, b in buffers.items()}
            points, theta = select(variables, model.points), parameters_of(variables)
            fixed = {**points, **moving}
            closed = family.open(theta) if self.landing else family.closed(model.prior, theta, temperature)
            # log q(w) looks back from w to its noise, which single precision loses where q is narrow in some direction
            wide = _double(theta) if self.landing else theta
            likelihoods, rests = [], []
            for noise in self._noises(family, theta, key, step):
                for component in range(family.components):
                    own = index(noise, component)
                    own = _double(own) if self.landing else own
                    drawn = family.draw(wide, own, component)
                    weights = {name: value.to(model.initial[name].dtype) for name, value in drawn.weights.items()}
                    likelihoods.append(model.scaled_log_likelihood({**fixed, **weights}, part, train=True))
                    if closed.density or closed.names:
                        rest = family.sampled(model.prior, wide, drawn, closed, temperature, own if self.landing else None)
                        rests.append(rest.to(closed.value.dtype))
            total = torch.stack(likelihoods).mean()
            kl = closed.value + torch.stack(rests).mean() if rests else closed.value
            bound = total / temperature - kl_weight(self.kl_weights, step, model.steps, batches) * kl
            if points:
                bound = bound + model.prior.log_prob(points) / temperature
            own_points = family.log_prior_of_points(model.prior, theta)
            if own_points is not None:
                bound = bound + own_points / temperature
            return -bound / model.num_data, (total.detach(), kl.detach(), moving)

        _, (total, kl, moved), grads = value_and_gradient(objective, state.weights, batch, state.buffers, state.key, state.step)
        lr = rate(self.lr, state.step, model.steps)
        weights, optimiser = self.optimiser.update(state.weights, grads, state.optimiser, lr)
        new = FamilyState(weights, moved, optimiser, state.key, state.step + 1)
        return new, {"elbo": total / temperature - kl, "log_likelihood": total, "kl": kl}

    def _noises(self, family: Family, theta: Weights, key: Tensor, step: Tensor) -> list[Weights]:
        """The noise of each sample, with a leading axis of components; with `antithetic` the second half mirrors the first."""
        count = self.samples // 2 if self.antithetic else self.samples
        shape = (count, family.components)
        like = {name: value.detach().expand(*shape, *value.shape) for name, value in family.noise(theta).items()}
        drawn = random.normal(key, step, like)
        noises = [index(drawn, i) for i in range(count)]
        return noises + [family.mirrored(noise) for noise in noises] if self.antithetic else noises

    def kept(self, model: Model, state: FamilyState) -> Weights:  # noqa: ARG002
        """None: they are drawn when they are asked for."""
        return {}

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """The parameters of the last step."""
        parameters = clone(parameters_of(fitted.state.weights))
        return LawPosterior.of(self, model, fitted, FamilyLaw(self.family, select(model.initial, model.random), parameters))


def _double(values: Weights) -> Weights:
    return {name: value.double() for name, value in values.items()}


def parameters_of(weights: Weights) -> Weights:
    """θ among the weights of a state."""
    return {name.removeprefix(THETA): value for name, value in weights.items() if name.startswith(THETA)}
