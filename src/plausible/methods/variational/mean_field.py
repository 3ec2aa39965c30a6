"""Mean-field variational inference: independent Gaussians over the weights, by sampled gradients of the evidence bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.stochastic import Noise, gaussians, log_density, survey
from plausible.blocks.variational import HALF_LOG_2PIE, entropy, expected_log_prior, inverse_softplus, joins, kl_weight
from plausible.core.data import Batch, num_rows, take
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.priors.composed import precision_of
from plausible.core.schedules import Cosine, Schedule
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights, clone, flatten, select, unflatten
from plausible.engine.method import BatchSize, Fitted, Run, Traits, check_choice
from plausible.methods.variational.bound import INDEPENDENT, RHO, Bound, Terms, check_sampling, log_prior_of_points
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


class NoiseWays(NamedTuple):
    """For each weight how its noise is drawn, and whether the samples of a step are one stacked pass."""

    ways: dict[str, str]
    stacked: bool


@register
@dataclass(frozen=True)
class MeanField(Bound):
    """q(w) = Π N(w_i; μ_i, σ_i²),  σ = softplus(ρ),  maximising  E_q log p(D | w) − KL(q ‖ p)

    Independent Gaussians over the weights by stochastic gradients of the evidence bound (Bayes by Backprop, Blundell et al. 2015).

    Means start at the module's weights, scales at `initial_scale`, or with `relative_scale` δ at δ·|w|. `estimator` says how
    noise enters: "weights" (one draw of them a step), "local" (reparameterised outputs) or "flipout"; weights to which these
    do not apply are sampled. `kl_weights` is "uniform" (the bound), "blundell" (2^{M−i}/(2^M − 1) within an epoch of M
    batches), a number or a schedule. The KL is a sum in nats: in closed form for Gaussian, Laplace and flat priors. `landing`
    samples all of it and lets the gradient flow through the weights alone (Roeder et al. 2017). `empirical_bayes` takes for
    each weight tensor the best scale of a centred Gaussian prior, with "shared" one mean and one scale for all (Graves 2011).
    Cost: `samples` forward and backward passes a step, twice that for the last two estimators.
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
    traits: ClassVar[Traits] = replace(Bound.traits, bias=INDEPENDENT)

    def __post_init__(self) -> None:
        super().__post_init__()
        who = type(self).__name__
        check_sampling(self)
        if self.relative_scale is not None:
            check_number(self, "relative_scale", above=0)
        check_choice(self, "estimator", ("weights", "local", "flipout"))
        if self.landing and self.estimator != "weights":
            raise ValueError(f"{who}: landing=True needs sampled weights, estimator='weights', got {self.estimator!r}")
        if self.landing and self.empirical_bayes:
            raise ValueError(f"{who}: landing=True samples the KL that empirical_bayes has in closed form; use one of them")
        if self.empirical_bayes not in (False, True, "shared"):
            raise ValueError(f"{who}: empirical_bayes must be False, True or 'shared', got {self.empirical_bayes!r}")

    def prepare(self, model: Model, run: Run[Any]) -> NoiseWays:
        if self.empirical_bayes and not fitted_names(model):
            raise ValueError(
                f"{type(self).__name__}: empirical_bayes fits the scales of centred Gaussian priors, and no weight of the network "
                "has one; give prior=priors.Gaussian() or leave empirical_bayes=False"
            )
        means = select(model.initial, model.random)
        x = next(iter(run.data.chunks(3))).x
        fixed, rows = {**select(model.initial, model.points), **model.buffers}, num_rows(x)

        def outputs(drawn: Weights, count: int = 2) -> Tensor:
            return model.outputs({**fixed, **drawn}, take(x, [i % rows for i in range(count)]))

        ways = survey(outputs, means, self.estimator, lambda drawn: outputs(drawn, 3))
        return NoiseWays(ways, self._stackable(model, outputs, means))

    def _stackable(self, model: Model, outputs: Callable[[Weights], Tensor], means: Weights) -> bool:
        """Whether the samples of a step can be one pass: several of them, no running statistics, and a network that vmap takes."""
        few = self.samples < 3 and _first(means).device.type == "cpu"  # where two passes cost less than vmap
        # running statistics follow one pass after the other, and antithetic noise needs its mirror image
        if self.samples == 1 or few or self.antithetic or model.buffers:
            return False
        # vmap says only when it is tried what it cannot do; a fallback member by member would cost more than it saves
        two = {name: mean.expand(2, *mean.shape) for name, mean in means.items()}
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*batching rule.*")
                torch.func.vmap(outputs, randomness="different")(two)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, UserWarning):
            return False
        return True

    def parameters(self, model: Model, run: Run[NoiseWays], key: Tensor) -> Weights:
        weights, rhos = clone(model.initial), {}
        for name in model.random:
            scale = torch.full_like(weights[name], self.initial_scale)
            if self.relative_scale is not None:
                # a weight of exactly 0 would have no noise, and an infinite KL
                scale = (self.relative_scale * weights[name].abs()).clamp_min(1e-6)
            rhos[RHO + name] = inverse_softplus(scale)
        return {**weights, **rhos}

    def estimate(
        self, model: Model, run: Run[NoiseWays], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        means = select(parameters, model.random)
        together = joins(means) and not set(run.prepared.ways.values()) & {"local", "flipout"}
        scales = softplus_of({name: parameters[RHO + name] for name in model.random}, together)
        fixed = {**select(parameters, model.points), **buffers}
        closed, rest = self._closed(model, means, scales)

        def one(noise: Noise) -> tuple[Tensor, Tensor]:
            """From one draw: the scaled log-likelihood, and the part of the KL that has no closed form."""
            if together:
                weights = drawn_together(means, scales, noise)
            else:
                weights = gaussians(means, scales, noise, run.prepared.ways or self.estimator)
            value = model.scaled_log_likelihood({**fixed, **weights}, batch, train=True)
            drawn = noise.drawn
            if self.landing:
                density = log_density(select(drawn, means), means, scales, detached=True)
                return value, density - model.prior.log_prob(select(drawn, means)) / model.temperature
            if not rest:
                return value, torch.zeros_like(value)
            # where the noise went into outputs, weights are drawn for the prior alone
            extra = {n: means[n] + scales[n] * noise.normal(f"{n}: prior", means[n]) for n in rest if n not in drawn}
            return value, -model.prior.log_prob(select({**drawn, **extra}, rest)) / model.temperature

        if run.prepared.stacked:  # one pass with a leading axis of samples
            keys = torch.stack([noise.key for noise in Noise.several(key, step, self.samples)])
            totals, parts = torch.func.vmap(lambda sample: one(Noise(sample, step)), randomness="different")(keys)
        else:
            samples = [one(noise) for noise in Noise.several(key, step, self.samples, antithetic=self.antithetic)]
            totals, parts = (torch.stack(values) for values in zip(*samples))
        total, kl = totals.mean(), closed + parts.mean()
        bound = total / model.temperature - kl_weight(self.kl_weights, step, run.steps, run.batches(batch)) * kl
        info = {"elbo": total.detach() / model.temperature - kl.detach(), "log_likelihood": total, "kl": kl}
        return Terms(bound + log_prior_of_points(model, parameters), info, buffers)

    def _closed(self, model: Model, means: Weights, scales: Weights) -> tuple[Tensor, tuple[str, ...]]:
        """The part of −H(q) − E_q log p(w)/T that has a closed form, and the names of the weights that it leaves out."""
        expected, rest = _first(means).new_zeros(()), tuple(means)
        if self.landing:
            return expected, rest
        names = fitted_names(model) if self.empirical_bayes else ()
        given, rest = {name: mean for name, mean in means.items() if name not in names}, ()
        if given:
            expected, rest = expected_log_prior(model.prior, given, scales)
        if names:
            chosen = select(means, names)
            count = sum(mean.numel() for mean in chosen.values())
            # the prior's best mean and scale are functions of q, so that the KL has a closed form without them
            if self.empirical_bayes == "shared":
                # the best N(m, s²) in closed form
                centre = torch.stack([mean.sum() for mean in chosen.values()]).sum() / count
                spread = [((m - centre).square() + scales[n].square()).sum() for n, m in chosen.items()]
                fitted = 0.5 * count * (torch.stack(spread).sum() / count).log()
            else:  # the best scale of each tensor in closed form, put into the KL: its gradient through the scale is 0
                fits = [(0.5 * m.numel()) * (m * m + scales[n] * scales[n]).mean().log() for n, m in chosen.items()]
                fitted = torch.stack(fits).sum()
            expected = expected - fitted - count * HALF_LOG_2PIE
        return -entropy(scales) - expected / model.temperature, rest

    @classmethod
    def conforming(cls) -> MeanField:
        # full batches, so that noise comes from the weights alone
        return cls(epochs=300, batch_size=None, lr=Cosine(0.1), samples=2, initial_scale=0.1)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        return problem.mean_field()

    def posterior(self, model: Model, run: Run[NoiseWays], fitted: Fitted) -> LawPosterior:
        scales = {name: F.softplus(rho) for name, rho in fitted.state.rhos.items()}
        return LawPosterior.of(self, model, fitted, DiagonalGaussian.of(model, fitted, scales, run.prepared.ways))


@register
@dataclass(frozen=True)
class Graves(MeanField):
    """max over q, m, s of  E_q log p(D | w) − KL(Π N(μ_i, σ_i²) ‖ N(m, s²)):  m = mean(μ),  s² = mean(σ² + (μ − m)²)

    Practical variational inference (Graves 2011): `MeanField` with sampled weights and one prior N(m, s²) for all of them, whose
    mean and variance take their best values, in closed form, at every step.

    The prior given to `fit` must be a centred Gaussian and is replaced. The bound is then, up to a sign, the description length of
    data and weights, with the two numbers of the prior sent for free. Graves estimated the gradient for σ² by squared gradients of
    the loss; here it is the exact reparameterised one, of the same objective. Cost: as `MeanField`.
    """

    estimator: Literal["weights", "local", "flipout"] = "weights"
    empirical_bayes: bool | Literal["shared"] = "shared"

    name: ClassVar[str] = "graves"

    @classmethod
    def conforming(cls) -> Graves:
        return cls(epochs=300, batch_size=None, lr=Cosine(0.1), samples=2, estimator="local", initial_scale=0.1)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The fixed point: q is the mean-field optimum under N(m, s²), and m, s² are the moments of q's weights."""
        x, y, w = problem.data()
        data, pull = x.T @ (w[:, None] * x) / problem.noise**2, (x.T @ (w[:, None] * y) / problem.noise**2).squeeze(1)
        centre, variance = torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype)
        for _ in range(2000):
            precision = data + torch.eye(len(data), dtype=x.dtype) / variance
            mean = torch.linalg.solve(precision, pull + centre / variance)
            spread = 1 / precision.diagonal()
            centre, variance = mean.mean(), (spread + (mean - mean.mean()) ** 2).mean()
        return mean, torch.diag(spread)


def fitted_names(model: Model) -> tuple[str, ...]:
    """The random weights whose prior empirical Bayes replaces: centred Gaussian ones of the network, not of the likelihood."""
    return tuple(
        name
        for name in model.random
        if not name.startswith("likelihood.") and (precision_of(model.prior, name, model.initial[name]) or 0) > 0
    )


def softplus_of(rhos: Weights, together: bool) -> Weights:
    """σ = log(1 + e^ρ) by name."""
    if together:
        return unflatten(F.softplus(flatten(rhos)), rhos)
    return {name: F.softplus(rho) for name, rho in rhos.items()}


def drawn_together(means: Weights, scales: Weights, noise: Noise) -> Weights:
    """`gaussians` that are all sampled, by a few kernels."""
    numbers = noise.normals(means)
    drawn = unflatten(torch.addcmul(flatten(means), flatten(scales), flatten(numbers)), means)
    noise.drawn.update(drawn)
    return drawn


def _first(weights: Weights) -> Tensor:
    return next(iter(weights.values()))
