"""Independent Gaussians over the weights, by sampled gradients of the evidence bound: what `MeanField` and `Graves` share."""

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
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule
from plausible.core.serialise import check_count, check_number
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Fitted, Run, Traits
from plausible.methods.variational.bound import RHO, Bound, BoundState, Terms, log_prior_of_points
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch
    from plausible.posteriors.base import Posterior
    from plausible.testing import LinearGaussian


class Prepared(NamedTuple):
    """For each weight how its noise is drawn, and whether the samples of a step are one stacked pass."""

    ways: dict[str, str]
    stacked: bool


@dataclass(frozen=True)
class Independent(Bound):
    """q(w) = Π N(w_i; μ_i, σ_i²),  σ = softplus(ρ): the base of mean-field methods by samples."""

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

    traits: ClassVar[Traits] = Traits(
        divisible=False,
        keeps_draws=False,
        noisy=True,
        tolerance=0.05,
        bias="independent weights: each scale is that of the weight given all others",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        who = type(self).__name__
        check_count(self, "samples", at_least=1)
        check_number(self, "initial_scale", above=0)
        if self.relative_scale is not None:
            check_number(self, "relative_scale", above=0)
        if self.estimator not in ("weights", "local", "flipout"):
            raise ValueError(f"{who}: estimator must be 'weights', 'local' or 'flipout', got {self.estimator!r}")
        if isinstance(self.kl_weights, str) and self.kl_weights not in ("uniform", "blundell"):
            raise ValueError(
                f"{who}: kl_weights must be 'uniform', 'blundell', a number or a schedule, got {self.kl_weights!r}"
            )
        if not isinstance(self.kl_weights, str):
            as_schedule(self.kl_weights)
        if self.antithetic and self.samples % 2:
            raise ValueError(f"{who}: antithetic pairs need an even number of samples, got samples={self.samples}")
        if self.landing and self.estimator != "weights":
            raise ValueError(f"{who}: landing=True needs sampled weights, estimator='weights', got {self.estimator!r}")
        if self.landing and self.empirical_bayes:
            raise ValueError(f"{who}: landing=True samples the KL that empirical_bayes has in closed form; use one of them")
        if self.empirical_bayes not in (False, True, "shared"):
            raise ValueError(f"{who}: empirical_bayes must be False, True or 'shared', got {self.empirical_bayes!r}")

    def prepare(self, model: Model, run: Run[Any]) -> Prepared:
        """Find out for which weights the estimator applies."""
        if self.empirical_bayes and not fitted_names(model):
            raise ValueError(
                f"{type(self).__name__}: empirical_bayes fits the scales of centred Gaussian priors, and no weight of the network "
                "has one; give prior=priors.Gaussian() or leave empirical_bayes=False"
            )
        means = select(model.initial, model.random)
        example = next(iter(run.data.chunks(2)))
        fixed = {**select(model.initial, model.points), **model.buffers}

        def outputs(drawn: Weights) -> Tensor:
            return model.outputs({**fixed, **drawn}, example.x)

        return Prepared(survey(outputs, means, self.estimator), self._stackable(model, outputs, means))

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

    def parameters(self, model: Model, run: Run[Prepared], key: Tensor) -> Weights:
        """Means at the module's weights, narrow scales."""
        weights, rhos = clone(model.initial), {}
        for name in model.random:
            scale = torch.full_like(weights[name], self.initial_scale)
            if self.relative_scale is not None:
                scale = (self.relative_scale * weights[name].abs()).clamp_min(1e-6)
            rhos[RHO + name] = inverse_softplus(scale)
        return {**weights, **rhos}

    def estimate(
        self, model: Model, run: Run[Prepared], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        means = select(parameters, model.random)
        scales = {name: F.softplus(parameters[RHO + name]) for name in model.random}
        fixed = {**select(parameters, model.points), **buffers}
        total, kl = self._estimated(model, run, means, scales, fixed, batch, key, step)
        bound = total / model.temperature - kl_weight(self.kl_weights, step, run.steps, run.batches(batch)) * kl
        info = {"elbo": total.detach() / model.temperature - kl.detach(), "log_likelihood": total, "kl": kl}
        return Terms(bound + log_prior_of_points(model, parameters), info, buffers)

    def _sampled(
        self,
        model: Model,
        run: Run[Prepared],
        means: Weights,
        scales: Weights,
        fixed: Weights,
        batch: Batch,
        noise: Noise,
        rest: Any,
    ) -> tuple[Tensor, Tensor]:
        """From one draw: the scaled log-likelihood, and the part of the KL that has no closed form."""
        ways, _ = run.prepared
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
        self,
        model: Model,
        run: Run[Prepared],
        means: Weights,
        scales: Weights,
        fixed: Weights,
        batch: Batch,
        key: Tensor,
        step: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The mean of the scaled log-likelihood over the samples, and the KL: exact as far as the prior has a closed form."""
        closed, rest = self._closed(model, means, scales)
        if run.prepared.stacked:  # one pass with a leading axis of samples

            def one(sample: Tensor) -> tuple[Tensor, Tensor]:
                return self._sampled(model, run, means, scales, fixed, batch, Noise(sample, step), rest)

            keys = [noise.key for noise in Noise.several(key, step, self.samples)]
            totals, parts = torch.func.vmap(one, randomness="different")(torch.stack(keys))
        else:
            noises = Noise.several(key, step, self.samples, antithetic=self.antithetic)
            estimates = [self._sampled(model, run, means, scales, fixed, batch, noise, rest) for noise in noises]
            totals, parts = (torch.stack(values) for values in zip(*estimates))
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
            chosen = select(means, names)
            count = sum(mean.numel() for mean in chosen.values())
            if self.empirical_bayes == "shared":
                centre = torch.stack([mean.sum() for mean in chosen.values()]).sum() / count
                spread = [((m - centre).square() + scales[n].square()).sum() for n, m in chosen.items()]
                fitted = 0.5 * count * (torch.stack(spread).sum() / count).log()
            else:
                fits = [(0.5 * m.numel()) * (m * m + scales[n] * scales[n]).mean().log() for n, m in chosen.items()]
                fitted = torch.stack(fits).sum()
            expected = expected - fitted - count * HALF_LOG_2PIE
        return -entropy(scales) - expected / model.temperature, rest

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The exact mean, and the variances 1/Λ_ii: the optimum of independent Gaussians (Bishop 2006, §10.1.2)."""
        mean, covariance = problem.posterior()
        return mean, torch.diag(1 / torch.linalg.inv(covariance).diagonal())

    def posterior(self, model: Model, run: Run[Prepared], fitted: Fitted) -> Posterior:
        state: BoundState = fitted.state
        scales = {name: F.softplus(rho) for name, rho in state.rhos.items()}
        return LawPosterior.of(self, model, fitted, DiagonalGaussian.of(model, fitted, scales, run.prepared.ways))


def fitted_names(model: Model) -> tuple[str, ...]:
    """The random weights whose prior empirical Bayes replaces: centred Gaussian ones of the network, not of the likelihood."""
    return tuple(
        name for name in model.random if not name.startswith("likelihood.") and (model.prior.rule(name).precision or 0) > 0
    )


def _first(weights: Weights) -> Tensor:
    return next(iter(weights.values()))
