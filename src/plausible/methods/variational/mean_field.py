"""Mean-field variational inference: independent Gaussians over the weights, by gradients of the evidence bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.stochastic import Noise, gaussians, log_density, survey
from plausible.blocks.variational import HALF_LOG_2PIE, entropy, expected_log_prior, inverse_softplus, kl_weight
from plausible.core.data import num_rows
from plausible.core.differentiation import value_and_gradient
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_count, check_number, register
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posteriors.base import Posterior
    from plausible.testing import LinearGaussian

RHO = "rho of "


class Prepared(NamedTuple):
    """For each weight how its noise is drawn, and whether the samples of a step are one stacked pass."""

    ways: dict[str, str]
    stacked: bool


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
    sum in nats: in closed form for Gaussian, Laplace and flat priors, by the sampled weights for others. `landing` estimates
    all of it by the sampled weights and lets the gradient flow through them alone ("sticking the landing", Roeder et al. 2017),
    which has no variance where q is exact. `empirical_bayes` takes for each weight tensor the scale of a centred Gaussian prior
    that maximises the bound, with "shared" one mean and one scale for all weights (Graves 2011). Cost: `samples` forward and
    backward passes a step (twice that for the last two estimators), and as many normal numbers as weights or outputs.
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
    landing: bool = False
    empirical_bayes: bool | Literal["shared"] = False
    optimiser: Optimiser = field(default_factory=AdamW)

    name: ClassVar[str] = "mean-field"
    divisible: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(noisy=True, bias="independent weights: each scale is that of the weight given all others")
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
        if self.landing and self.estimator != "weights":
            raise ValueError(f"MeanField: landing=True needs sampled weights, estimator='weights', got {self.estimator!r}")
        if self.landing and self.empirical_bayes:
            raise ValueError("MeanField: landing=True samples the KL that empirical_bayes has in closed form; use one of them")
        if self.empirical_bayes not in (False, True, "shared"):
            raise ValueError(f"MeanField: empirical_bayes must be False, True or 'shared', got {self.empirical_bayes!r}")
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"MeanField: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is the result."""
        return plan_epochs(self, num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """Find out for which weights the estimator applies."""
        if self.empirical_bayes and not fitted_names(model):
            raise ValueError(
                f"{type(self).__name__}: empirical_bayes fits the scales of centred Gaussian priors, and no weight of the network "
                "has one; give prior=priors.Gaussian() or leave empirical_bayes=False"
            )
        means = select(model.initial, model.random)
        example = next(iter(data.chunks(2)))
        fixed = {**select(model.initial, model.points), **model.buffers}

        def outputs(drawn: Weights) -> Tensor:
            return model.outputs({**fixed, **drawn}, example.x)

        ways = survey(outputs, means, self.estimator)
        return model.with_prepared(Prepared(ways, self._stackable(model, outputs, means)))

    def _stackable(self, model: Model, outputs: Callable[[Weights], Tensor], means: Weights) -> bool:
        """Whether the samples of a step can be one pass: several of them, no running statistics, and a network that vmap takes."""
        few = self.samples < 3 and _first(means).device.type == "cpu"  # where two passes cost less than vmap
        if self.samples == 1 or few or self.antithetic or model.buffers:
            return False
        two = {name: mean.expand(2, *mean.shape) for name, mean in means.items()}
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*batching rule.*")
                torch.func.vmap(outputs, randomness="different")(two)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, UserWarning):
            return False
        return True

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
        batches = model.per_epoch or -(-model.num_data // num_rows(batch.x))

        def objective(
            parameters: Weights, part: Batch, buffers: Weights, key: Tensor, step: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            moving = {name: b.clone() for name, b in buffers.items()}
            points = select(parameters, model.points)
            means = select(parameters, names)
            scales = {name: F.softplus(parameters[RHO + name]) for name in names}
            total, kl = self._estimated(model, means, scales, {**points, **moving}, part, key, step)
            bound = total / temperature - kl_weight(self.kl_weights, step, model.steps, batches) * kl
            if points:
                bound = bound + model.prior.log_prob(points) / temperature
            return -bound / model.num_data, (total.detach(), kl.detach(), moving)

        parameters = {**state.weights, **{RHO + name: rho for name, rho in state.rhos.items()}}
        _, (total, kl, moved), grads = value_and_gradient(objective, parameters, batch, state.buffers, state.key, state.step)
        lr = rate(self.lr, state.step, model.steps)
        parameters, optimiser = self.optimiser.update(parameters, grads, state.optimiser, lr)
        weights = select(parameters, state.weights)
        rhos = {name: parameters[RHO + name] for name in state.rhos}
        new = MeanFieldState(weights, rhos, moved, optimiser, state.key, state.step + 1)
        return new, {"elbo": total / temperature - kl, "log_likelihood": total, "kl": kl}

    def _sampled(
        self, model: Model, means: Weights, scales: Weights, fixed: Weights, batch: Batch, noise: Noise, rest: Any
    ) -> tuple[Tensor, Tensor]:
        """From one draw: the scaled log-likelihood, and the part of the KL that has no closed form."""
        ways, _ = model.prepared or Prepared({}, False)
        weights = gaussians(means, scales, noise, ways or self.estimator)
        total = model.scaled_log_likelihood({**fixed, **weights}, batch, train=True)
        drawn = noise.drawn
        if self.landing:
            prior = model.prior.log_prob(select(drawn, means))
            return total, log_density(select(drawn, means), means, scales, detached=True) - prior / model.temperature
        if not rest:
            return total, torch.zeros_like(total)
        # where the noise went into outputs, weights are drawn for the prior alone
        extra = {n: means[n] + scales[n] * noise.normal(f"{n}: prior", means[n]) for n in rest if n not in drawn}
        return total, -model.prior.log_prob(select({**drawn, **extra}, rest)) / model.temperature

    def _estimated(
        self, model: Model, means: Weights, scales: Weights, fixed: Weights, batch: Batch, key: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean of the scaled log-likelihood over the samples, and the KL: exact as far as the prior has a closed form."""
        closed, rest = self._closed(model, means, scales)
        stacked = model.prepared is not None and model.prepared.stacked
        if stacked:  # one pass with a leading axis of samples

            def one(own: Tensor) -> tuple[Tensor, Tensor]:
                return self._sampled(model, means, scales, fixed, batch, Noise(own, step), rest)

            keys = [noise.key for noise in Noise.several(key, step, self.samples)]
            totals, parts = torch.func.vmap(one, randomness="different")(torch.stack(keys))
        else:
            noises = Noise.several(key, step, self.samples, antithetic=self.antithetic)
            found = [self._sampled(model, means, scales, fixed, batch, noise, rest) for noise in noises]
            totals, parts = (torch.stack(values) for values in zip(*found))
        return totals.mean(), closed + parts.mean()

    def _closed(self, model: Model, means: Weights, scales: Weights) -> tuple[Tensor, tuple[str, ...]]:
        """The part of −H(q) − E_q log p(w)/T that has a closed form, and the names of the weights that it leaves out."""
        if self.landing:
            return torch.zeros((), dtype=_first(means).dtype, device=_first(means).device), tuple(means)
        names = fitted_names(model) if self.empirical_bayes else ()
        given = {name: mean for name, mean in means.items() if name not in names}
        expected = torch.zeros((), dtype=_first(means).dtype, device=_first(means).device)
        rest: tuple[str, ...] = ()
        if given:
            expected, rest = expected_log_prior(model.prior, given, scales)
        if names:
            own = select(means, names)
            count = sum(mean.numel() for mean in own.values())
            if self.empirical_bayes == "shared":
                centre = torch.stack([mean.sum() for mean in own.values()]).sum() / count
                spread = [((m - centre).square() + scales[n].square()).sum() for n, m in own.items()]
                fitted = 0.5 * count * (torch.stack(spread).sum() / count).log()
            else:
                fits = [(0.5 * m.numel()) * (m * m + scales[n] * scales[n]).mean().log() for n, m in own.items()]
                fitted = torch.stack(fits).sum()
            expected = expected - fitted - count * HALF_LOG_2PIE
        return -entropy(scales) - expected / model.temperature, rest

    def kept(self, model: Model, state: MeanFieldState) -> Weights:  # noqa: ARG002
        """None: they are drawn when they are asked for."""
        return {}

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
        return LawPosterior.of(self, model, fitted, DiagonalGaussian.of(model, fitted, scales, fitted.prepared.ways))


def fitted_names(model: Model) -> tuple[str, ...]:
    """The random weights whose prior empirical Bayes replaces: centred Gaussian ones of the network, not of the likelihood."""
    return tuple(
        name for name in model.random if not name.startswith("likelihood.") and (model.prior.rule(name).precision or 0) > 0
    )


def _first(weights: Weights) -> Tensor:
    return next(iter(weights.values()))
