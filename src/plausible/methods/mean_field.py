"""Mean-field variational inference: independent Gaussians over the weights, by gradients of the evidence bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.data import num_rows
from plausible.differentiation import value_and_gradient
from plausible.gaussian_posterior import GaussianPosterior
from plausible.methods.base import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.model import Model
from plausible.optimisers import AdamW, Optimiser
from plausible.schedules import Cosine, Schedule, as_schedule, rate
from plausible.serialise import check_count, check_number, register
from plausible.stochastic import Noise, gaussians, survey
from plausible.variational import entropy, expected_log_prior, kl_weight
from plausible.weights import Weights, clone, select

if TYPE_CHECKING:
    from plausible.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posterior import Posterior
    from plausible.testing import LinearGaussian

RHO = "rho of "


class MeanFieldState(NamedTuple):
    """Means (and weights trained as points), raw scales, buffers, the optimiser's state, the key of the noise, the step."""

    weights: Weights
    rhos: Weights
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor


@register
@dataclass(frozen=True)
class MeanField(Method):
    """q(w) = Π N(w_i; μ_i, σ_i²),  σ = softplus(ρ),  maximising  E_q log p(D | w) − KL(q ‖ p)

    Independent Gaussians over the weights by stochastic gradients of the evidence bound (Bayes by Backprop, Blundell et al. 2015).

    Means start at the module's weights, scales at `initial_scale`, or with `relative_scale` δ at δ·|w| for pretrained weights.
    `estimator` says how noise enters: "weights" (one draw of the weights a step), "local" (reparameterised outputs) or "flipout";
    weights to which the last two do not apply are sampled, and `posterior.summary()` says which. `kl_weights` is "uniform" (the
    bound), "blundell" (2^{M−i}/(2^M − 1) within an epoch of M batches), a number, or a schedule such as a warm-up. The KL is a
    sum in nats: in closed form for Gaussian, Laplace and flat priors, by the sampled weights for others. `empirical_bayes` takes
    for each weight tensor the scale of a centred Gaussian prior that maximises the bound. Cost: `samples` forward and backward
    passes a step (twice that for the last two estimators), and as many normal numbers as weights or outputs.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3))
    samples: int = 1
    estimator: Literal["weights", "local", "flipout"] = "local"
    kl_weights: Literal["uniform", "blundell"] | float | Schedule = "uniform"
    initial_scale: float = 0.02
    relative_scale: float | None = None
    antithetic: bool = False
    empirical_bayes: bool = False
    optimiser: Optimiser = field(default_factory=AdamW)

    name: ClassVar[str] = "mean-field"
    keeps_draws: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(
        noisy=True, bias="independent weights: each scale is that of the weight given all others"
    )
    tolerance: ClassVar[float] = 0.05

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        check_count(self, "samples", at_least=1)
        check_number(self, "initial_scale", above=0)
        if self.relative_scale is not None:
            check_number(self, "relative_scale", above=0)
        if self.estimator not in ("weights", "local", "flipout"):
            raise ValueError(f"MeanField: estimator must be 'weights', 'local' or 'flipout', got {self.estimator!r}")
        if isinstance(self.kl_weights, str) and self.kl_weights not in ("uniform", "blundell"):
            raise ValueError(
                f"MeanField: kl_weights must be 'uniform', 'blundell', a number or a schedule, got {self.kl_weights!r}"
            )
        if not isinstance(self.kl_weights, str):
            as_schedule(self.kl_weights)
        if self.antithetic and self.samples % 2:
            raise ValueError(f"MeanField: antithetic pairs need an even number of samples, got samples={self.samples}")
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"MeanField: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is the result."""
        return plan_epochs(self, num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """Find out for which weights the estimator applies."""
        if self.empirical_bayes and any(model.prior.rule(name).precision is None for name in model.random):
            raise ValueError(
                "MeanField: empirical_bayes replaces the scales of centred Gaussian priors, and this prior is another"
            )
        means = select(model.initial, model.random)
        if self.estimator == "weights":
            return model.with_prepared(dict.fromkeys(means, self.estimator))
        example = next(iter(data.chunks(2)))
        fixed = {**select(model.initial, model.points), **model.buffers}
        ways = survey(lambda drawn: model.outputs({**fixed, **drawn}, example.x), means, self.estimator)
        return model.with_prepared(ways)

    def start(self, model: Model, key: Tensor) -> MeanFieldState:
        """Means at the module's weights, narrow scales."""
        weights, rhos = clone(model.initial), {}
        for name in model.random:
            scale = torch.full_like(weights[name], self.initial_scale)
            if self.relative_scale is not None:
                scale = (self.relative_scale * weights[name].abs()).clamp_min(1e-6)
            rhos[name] = inverse_softplus(scale)
        optimiser = self.optimiser.init({**weights, **{RHO + name: rho for name, rho in rhos.items()}})
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return MeanFieldState(weights, rhos, clone(model.buffers), optimiser, key, step)

    def step(self, model: Model, state: MeanFieldState, batch: Batch) -> tuple[MeanFieldState, dict[str, Tensor]]:
        """One step up the gradient of the bound, divided by N."""
        names, temperature = model.random, model.temperature
        batches = -(-model.num_data // num_rows(batch.x))

        def objective(
            parameters: Weights, part: Batch, buffers: Weights, key: Tensor, step: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            moving = {name: b.clone() for name, b in buffers.items()}
            points = select(parameters, model.points)
            means = select(parameters, names)
            scales = {name: F.softplus(parameters[RHO + name]) for name in names}
            total, drawn = self._expected(model, means, scales, {**points, **moving}, part, key, step)
            kl = self._kl(model, means, scales, drawn, key, step)
            bound = total / temperature - kl_weight(self.kl_weights, step, model.steps, batches) * kl
            if points:
                bound = bound + model.prior.log_prob(points) / temperature
            return -bound / model.num_data, (total.detach(), kl.detach(), moving)

        parameters = {**state.weights, **{RHO + name: rho for name, rho in state.rhos.items()}}
        _, (total, kl, moved), grads = value_and_gradient(
            objective, parameters, batch, state.buffers, state.key, state.step
        )
        lr = rate(self.lr, state.step, model.steps)
        parameters, optimiser = self.optimiser.update(parameters, grads, state.optimiser, lr)
        weights = select(parameters, state.weights)
        rhos = {name: parameters[RHO + name] for name in state.rhos}
        new = MeanFieldState(weights, rhos, moved, optimiser, state.key, state.step + 1)
        return new, {"elbo": total / temperature - kl, "log_likelihood": total, "kl": kl}

    def _expected(
        self, model: Model, means: Weights, scales: Weights, fixed: Weights, batch: Batch, key: Tensor, step: Tensor
    ) -> tuple[Tensor, list[Weights]]:
        """The mean of the scaled log-likelihood over the samples, and the weights that were drawn for it."""
        values, drawn = [], []
        for noise in Noise.several(key, step, self.samples, antithetic=self.antithetic):
            weights = gaussians(means, scales, noise, model.prepared or self.estimator)
            values.append(model.scaled_log_likelihood({**fixed, **weights}, batch, train=True))
            drawn.append(noise.drawn)
        return torch.stack(values).mean(), drawn

    def _kl(
        self, model: Model, means: Weights, scales: Weights, drawn: list[Weights], key: Tensor, step: Tensor
    ) -> Tensor:
        """−H(q) − E_q log p(w)/T: exact where the prior has a closed form, by the sampled weights for the rest."""
        if self.empirical_bayes:
            fits = [(0.5 * m.numel()) * (m * m + scales[n] * scales[n]).mean().log() for n, m in means.items()]
            count = sum(mean.numel() for mean in means.values())
            expected = -torch.stack(fits).sum() - count * 0.5 * math.log(2 * math.pi * math.e)
            return -entropy(scales) - expected / model.temperature
        expected, rest = expected_log_prior(model.prior, means, scales)
        if rest:
            missing = [name for name in rest if name not in drawn[0]]
            if missing:  # their noise went into outputs: draw weights for the prior alone
                noise = Noise(key, step)
                extra = {n: means[n] + scales[n] * noise.normal(f"{n}: prior", means[n]) for n in missing}
                drawn = [{**own, **extra} for own in drawn]
            expected = expected + torch.stack([model.prior.log_prob(select(own, rest)) for own in drawn]).mean()
        return -entropy(scales) - expected / model.temperature

    def draws(self, state: MeanFieldState) -> list[Weights]:  # noqa: ARG002
        """None: they are drawn when they are asked for."""
        return []

    @classmethod
    def conforming(cls) -> MeanField:
        """Full batches, so that noise comes from the weights alone, the rate falling to nothing."""
        return cls(epochs=800, batch_size=None, lr=Cosine(0.05), samples=2, initial_scale=0.1)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The exact mean, and the variances 1/Λ_ii: the optimum of independent Gaussians (Bishop 2006, §10.1.2)."""
        mean, covariance = problem.posterior()
        return mean, torch.diag(1 / torch.linalg.inv(covariance).diagonal())

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """The means and scales of the last step."""
        scales = {name: F.softplus(rho) for name, rho in fitted.state.rhos.items()}
        return GaussianPosterior.of(self, model, fitted, scales, fitted.prepared)


def inverse_softplus(value: Tensor) -> Tensor:
    """ρ with log(1 + e^ρ) = value, also for small and large values."""
    return value + torch.log(-torch.expm1(-value))
