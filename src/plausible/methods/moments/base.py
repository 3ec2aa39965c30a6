"""Variational inference by moments: what `DVI` and `MDL` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.moments.activations import SCALE_NODES
from plausible.blocks.moments.expectations import NOISE_NODES, expected_log_prob
from plausible.blocks.moments.gaussians import Weight
from plausible.blocks.moments.networks import Layer, check, model_network, propagate
from plausible.blocks.moments.quadrature import NODES, prime
from plausible.blocks.variational import entropy, expected_log_prior
from plausible.core.data import num_rows
from plausible.core.model import Model
from plausible.core.optimisers import Optimiser
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import check_number
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Method, Plan, check_training, plan_epochs

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.testing import LinearGaussian

RHO, PRIOR = "log scale of ", "prior's "


class MomentsState(NamedTuple):
    """Means (and weights trained as points), log scales, what else is learned about the prior, buffers, the optimiser's state."""

    weights: Weights
    rhos: Weights
    prior: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor


class ByMoments(Method):
    """q(w) = Π N(w_i; μ_i, σ_i²), maximising E_q log p(D | w) − KL(q ‖ p) without sampling: the base of `DVI` and `MDL`.

    Subclasses are dataclasses with the settings below; they say what weights cost (`weights_cost`), and may learn parameters of the
    prior (`prior_start`).
    """

    epochs: int | None
    batch_size: BatchSize
    lr: float | Schedule
    initial_scale: float
    warmup: float
    optimiser: Optimiser

    covariance: str = "full"
    terms: int = 0
    normalises: ClassVar[bool] = True
    """Whether batch norm follows the batches; otherwise its statistics stay as they are."""
    divisible: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.02

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        check_number(self, "initial_scale", above=0)
        check_number(self, "warmup", at_least=0, below=1)
        if not isinstance(self.optimiser, Optimiser):
            who = type(self).__name__
            raise TypeError(
                f"{who}: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )

    # What subclasses say

    def weights_cost(self, model: Model, means: Weights, scales: Weights, prior: Weights) -> Tensor:
        """What the weights cost, in nats: KL(q ‖ p), or what stands for it."""
        raise NotImplementedError

    def prior_start(self, model: Model) -> Weights:  # noqa: ARG002
        """Parameters of the prior that are learned along, to start from; here none."""
        return {}

    def check_layers(self, model: Model, layers: tuple[Layer, ...]) -> None:
        """Refuse networks and likelihoods that are not meant."""

    # The method

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is the result."""
        return plan_epochs(self, num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """Look at the network: its layers, in order."""
        example = next(iter(data.chunks(2)))
        layers = check(model, example.x, type(self).__name__)
        self.check_layers(model, layers)
        model = model.with_prepared(layers)
        means, scales = model.initial, {name: torch.ones_like(model.initial[name]) for name in model.random}
        with torch.no_grad():  # a likelihood or a prior without a rule is refused here
            self._expected(model, means, {n: s * s for n, s in scales.items()}, model.buffers, example, train=False)
            self.weights_cost(model, select(means, model.random), scales, self.prior_start(model))
        return model

    def start(self, model: Model, key: Tensor) -> MomentsState:
        """Means at the module's weights, narrow scales."""
        weights = clone(model.initial)
        prime(next(iter(weights.values())), max(self.terms, 1), (NODES, NOISE_NODES, SCALE_NODES))
        rhos = {name: torch.full_like(weights[name], self.initial_scale).log() for name in model.random}
        prior = self.prior_start(model)
        parameters = {**weights, **_named(RHO, rhos), **_named(PRIOR, prior)}
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return MomentsState(weights, rhos, prior, clone(model.buffers), self.optimiser.init(parameters), step)

    def step(self, model: Model, state: MomentsState, batch: Batch) -> tuple[MomentsState, dict[str, Tensor]]:
        """One step up the gradient of the bound, divided by N."""
        names, temperature = model.random, model.temperature

        def objective(
            parameters: Weights, part: Batch, buffers: Weights, share: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            scales = {name: torch.exp(parameters[RHO + name]) for name in names}
            variances = {name: scale * scale for name, scale in scales.items()}
            total, moved = self._expected(model, select(parameters, state.weights), variances, buffers, part, train=True)
            prior = {name: parameters[PRIOR + name] for name in state.prior}
            cost = self.weights_cost(model, select(parameters, names), scales, prior)
            bound = total / temperature - share * cost
            if model.points:
                bound = bound + model.prior.log_prob(select(parameters, model.points)) / temperature
            return -bound / model.num_data, (total.detach(), cost.detach(), {**buffers, **moved})

        parameters = {**state.weights, **_named(RHO, state.rhos), **_named(PRIOR, state.prior)}
        share = ((state.step + 1) / max(1.0, self.warmup * model.steps)).clamp(max=1.0).to(next(iter(parameters.values())))
        _, (total, cost, moved), grads = value_and_gradient(objective, parameters, batch, state.buffers, share)
        lr = rate(self.lr, state.step, model.steps)
        parameters, optimiser = self.optimiser.update(parameters, grads, state.optimiser, lr)
        new = MomentsState(
            select(parameters, state.weights),
            {name: parameters[RHO + name] for name in state.rhos},
            {name: parameters[PRIOR + name] for name in state.prior},
            {name: value.clone() for name, value in moved.items()},
            optimiser,
            state.step + 1,
        )
        return new, {"elbo": total / temperature - cost, "log_likelihood": total, "kl": cost}

    def _expected(
        self, model: Model, means: Weights, variances: Weights, buffers: Weights, batch: Batch, *, train: bool
    ) -> tuple[Tensor, Weights]:
        """(N/B) Σ weight_i E log p(y_i | f(x_i)), and the buffers that changed."""
        network = model_network(model, type(self).__name__, means, variances, buffers)
        f, moved = propagate(
            network, batch.x, full=self.covariance == "full", terms=self.terms, train=train and self.normalises
        )
        noise = {n: Weight(means[n], variances.get(n)) for n in model.likelihood_names}
        each = expected_log_prob(model.likelihood, f, batch.y, noise)
        if batch.mask is not None:
            each = torch.where(batch.mask, each, torch.zeros_like(each))
        if batch.weight is not None:
            each = each.flatten(1).sum(1) if each.ndim > 1 else each
            each = each * batch.weight
        return each.sum() * (model.num_data / num_rows(batch.x)), moved

    def kept(self, model: Model, state: MomentsState) -> Weights:  # noqa: ARG002
        """None: they are drawn when they are asked for."""
        return {}

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The exact mean, and the variances 1/Λ_ii: the optimum of independent Gaussians (Bishop 2006, §10.1.2)."""
        mean, covariance = problem.posterior()
        return mean, torch.diag(1 / torch.linalg.inv(covariance).diagonal())


def kl(who: str, model: Model, means: Weights, scales: Weights) -> Tensor:
    """−H(q) − E_q log p(w)/T in nats, for priors with closed forms."""
    if not means:
        return torch.zeros(())
    expected, rest = expected_log_prior(model.prior, means, scales)
    if rest:
        raise ValueError(
            f"{who}: the prior of {', '.join(rest)} has no closed form under a Gaussian, and nothing is sampled here; choose "
            "priors.Gaussian, Laplace or Flat (also by patterns and fan-in), or use MeanField"
        )
    return -entropy(scales) - expected / model.temperature


def _named(prefix: str, values: Weights) -> Weights:
    return {prefix + name: value for name, value in values.items()}
