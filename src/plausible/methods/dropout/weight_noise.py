"""What variational and sparse variational dropout share: Gaussian noise on each weight, whose variance is learned."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.stochastic import Noise, gaussians, survey
from plausible.blocks.variational import entropy, expected_log_prior, kl_weight
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.priors import Default, LogUniform, Patterns, Prior
from plausible.core.schedules import Schedule, as_schedule
from plausible.core.serialise import check_number
from plausible.core.special import scale_free_kl
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import Fitted, Run, Traits, check_choice
from plausible.methods.dropout.base import Patient
from plausible.methods.variational.bound import Terms
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

VARIANCE = "log σ² of "
"""What the names of the noise's parameters begin with."""
TINY = 1e-16

Divergence = Literal["exact", "molchanov", "kingma"]


def divergence(log_alpha: Tensor, kind: Divergence = "exact") -> Tensor:
    """KL(N(θ, αθ²) ‖ 1/|w|) of a weight, by log α: exact, or by one of the published approximations.

    Molchanov, Ashukha & Vetrov (2017), eq. 14; Kingma, Salimans & Welling (2015), eq. 12, for α ≤ 1, shifted to agree at α = 1.
    """
    if kind == "exact":
        return scale_free_kl(log_alpha)
    if kind == "molchanov":
        return 0.63576 * (1 - torch.sigmoid(1.87320 + 1.48695 * log_alpha)) + 0.5 * F.softplus(-log_alpha)
    alpha = log_alpha.exp()
    terms = 0.5 * log_alpha + alpha * (1.16145124 + alpha * (-1.50204118 + alpha * 0.58629921))
    return _KINGMA - terms


_KINGMA = 0.4266862 + 1.16145124 - 1.50204118 + 0.58629921


class Ways(NamedTuple):
    """How the noise of each weight is drawn, by name, in the order of the weights."""

    ways: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class WeightDropout(Patient):
    """max over θ, α of  E_q log p(D | w) − β KL(q ‖ p),  q(w) = Π N(θ_i, α_i θ_i²),  p(w) ∝ 1/|w|

    Base of the methods with a noise of its own for each weight, proportional to it: means, α or σ², the KL, the posterior.
    """

    kl: Divergence = "exact"
    kl_weights: float | Schedule = 1.0
    limit: float = 8.0

    traits: ClassVar[Traits] = replace(Patient.traits, bias="independent weights, whose scales are tied to their means")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "kl", ("exact", "molchanov", "kingma"))
        check_number(self, "limit", above=0)
        as_schedule(self.kl_weights, "kl_weights")

    @property
    def most(self) -> float:
        """The largest log α: Kingma's cubic holds up to α = 1."""
        return min(0.0, self.limit) if self.kl == "kingma" else self.limit

    def prepare(self, model: Model, run: Run[Any]) -> Ways:
        noisy = {name: value for name, value in select(model.initial, model.random).items() if value.ndim > 1}
        if not noisy:
            raise ValueError(f"{type(self).__name__}: no weight that is inferred has two axes or more, and others get no noise")
        example = next(iter(run.data.chunks(2)))
        fixed = {**model.initial, **model.buffers}
        return Ways(survey(lambda drawn: model.outputs({**fixed, **drawn}, example.x), noisy, "local"))

    def parameters(self, model: Model, run: Run[Ways], key: Tensor) -> Weights:
        weights = clone(model.initial)
        # mean and variance apart: gradients of the mean have no noise from it (Molchanov et al.)
        logs = {VARIANCE + n: torch.full_like(weights[n], self.log_variance(weights[n])) for n in run.prepared.ways}
        return {**weights, **logs}

    def log_variance(self, weight: Tensor) -> float:
        """Log σ² of this weight at the start."""
        raise NotImplementedError

    def log_alpha(self, parameters: Weights, name: str) -> Tensor:
        """Log α of a weight, of a shape that broadcasts with it."""
        mean = parameters[name]
        return (parameters[VARIANCE + name] - (mean * mean + TINY).log()).clamp(max=self.most)

    def scale(self, parameters: Weights, name: str) -> Tensor:
        """σ, at most as large as the largest α allows."""
        own = (0.5 * parameters[VARIANCE + name]).exp()
        return torch.minimum(own, math.exp(0.5 * self.most) * (parameters[name].square() + TINY).sqrt())

    def estimate(
        self, model: Model, run: Run[Ways], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        ways = run.prepared.ways
        weights = {name: parameters[name] for name in model.initial}
        means, scales = select(weights, tuple(ways)), {name: self.scale(parameters, name) for name in ways}
        noise = Noise(key, step)
        drawn = gaussians(means, scales, noise, ways)
        total = model.scaled_log_likelihood({**weights, **buffers, **drawn}, batch, train=True)
        kl = self._divergence(model, parameters, means, scales)
        return self._terms(model, run, weights, buffers, total, kl, batch, step, ways)

    def _terms(
        self,
        model: Model,
        run: Run[Any],
        weights: Weights,
        buffers: Weights,
        total: Tensor,
        kl: Tensor,
        batch: Batch,
        step: Tensor,
        noisy: Collection[str],
    ) -> Terms:
        """The bound by its parts; weights that have no noise keep their prior."""
        rest = [name for name in model.initial if name not in noisy]
        points = model.prior.log_prob(select(weights, rest)) / model.temperature if rest else 0.0
        bound = total / model.temperature + points - kl_weight(self.kl_weights, step, run.steps, run.batches(batch)) * kl
        info = {"elbo": total.detach() / model.temperature - kl.detach(), "log_likelihood": total, "kl": kl}
        return Terms(bound, info, buffers)

    def _divergence(self, model: Model, parameters: Weights, means: Weights, scales: Weights) -> Tensor:
        if not scale_free(model, tuple(means)):
            return -entropy(scales) - self.expected(model.prior, means, scales) / model.temperature
        terms = []
        for name, mean in means.items():
            each = divergence(self.log_alpha(parameters, name), self.kl)
            terms.append(each.sum() * (mean.numel() / each.numel()))
        return torch.stack(terms).sum() / model.temperature

    def expected(self, prior: Prior, means: Weights, scales: Weights) -> Tensor:
        """E log p(w), w ~ N(θ, σ²), where it has a closed form."""
        closed, rest = expected_log_prior(prior, means, scales)
        if rest:
            raise ValueError(
                f"{type(self).__name__}: the prior of {rest[0]!r} has no closed expectation under a Gaussian; give a Gaussian, "
                "Laplace or log-uniform prior, or none"
            )
        return closed

    def posterior(self, model: Model, run: Run[Ways], fitted: Fitted) -> LawPosterior:
        ways, state = run.prepared.ways, fitted.state.weights
        narrowed = model.restricted(ways)
        if scale_free(model, tuple(ways)):
            narrowed = replace(narrowed, prior=Patterns((*((name, LogUniform()) for name in ways), ("*", model.prior))))
        scales = {name: self.scale(state, name).detach() for name in ways}
        return LawPosterior.of(self, narrowed, fitted, DiagonalGaussian.of(narrowed, fitted, scales, ways))


def scale_free(model: Model, names: tuple[str, ...]) -> bool:
    """Whether the method's own prior holds for these weights: nobody gave one, or the log-uniform one was given."""
    rules = [model.prior.rule(name) for name in names]
    return isinstance(model.prior, Default) or all(isinstance(rule, LogUniform) and not rule.proper for rule in rules)
