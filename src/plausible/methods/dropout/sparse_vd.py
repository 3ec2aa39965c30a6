"""Sparse variational dropout: noise that grows until weights, or whole units, say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks import stochastic
from plausible.blocks.stochastic import Noise, gaussians
from plausible.blocks.unit_noise import Site, survey, with_noisy_inputs
from plausible.blocks.variational import entropy
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.priors import Gaussian
from plausible.core.schedules import Cosine, Ramp, Schedule
from plausible.core.serialise import check_number, check_switch, register
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import Fitted, Patience, Run, Traits
from plausible.methods.dropout.weight_noise import TINY, VARIANCE, WeightDropout, divergence, scale_free
from plausible.methods.variational.bound import Terms
from plausible.posteriors.laws import LawPosterior
from plausible.posteriors.unit_noise import UnitNoise

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

UNIT, UNIT_VARIANCE = "scale of units of ", "log variance of units of "
LOG_VARIANCE = -10.0
"""At which noise starts (Molchanov et al. 2017)."""


class Grouped(NamedTuple):
    """Whose units have a scale, and how the noise before it is drawn, by the name of the weight."""

    sites: dict[str, Site]
    ways: dict[str, str]


@register
@dataclass(frozen=True, kw_only=True)
class SparseVD(WeightDropout):
    """max over θ, σ of  E_q log p(D | w) − β KL(q ‖ p),  q(w) = Π N(θ_i, σ_i²),  p(w) ∝ 1/|w|;  w_i = 0 where log σ_i²/θ_i² > 3

    Sparse variational dropout (Molchanov et al. 2017): a noise for each weight, and those that are noise alone are pruned.

    Means and variances are parameters of their own (additive noise), the latter starting at log σ² = −10; β rises from 0 to 1 early
    in training. With `groups` each input unit or channel has a scale besides, with the log-uniform prior, and N(0, 1) or the prior
    given to `fit` before it; whole units go (Bayesian compression: Louizos, Ullrich & Welling 2017). The posterior is pruned above
    `threshold`; its `compress()` is a plain, smaller module. Training does not stop early, since weights go late. Cost: two forward
    and backward passes a step.
    """

    kl_weights: float | Schedule = field(default_factory=Ramp)
    patience: Patience = None
    threshold: float = 3.0
    groups: bool = False

    name: ClassVar[str] = "sparse-vd"
    traits: ClassVar[Traits] = replace(WeightDropout.traits, shaping=("holdout", "groups"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "threshold")
        check_switch(self, "groups")
        if self.kl == "kingma":
            raise ValueError("SparseVD: kl='kingma' holds for α ≤ 1, where nothing is pruned; use 'exact' or 'molchanov'")
        if not self.threshold < self.limit:
            raise ValueError(f"SparseVD: threshold={self.threshold} must lie below limit={self.limit}, or nothing is pruned")

    def log_variance(self, weight: Tensor) -> float:
        return LOG_VARIANCE

    # -----------------------------------------------------------------------------------------------------------------
    # Groups: w = (θ + σ ∘ ε) diag(c ∘ ξ), with N(0, 1) for what stands in front of the scale c ∘ ξ

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        if not self.groups:
            return super().prepare(model, run)
        example = next(iter(run.data.chunks(2)))
        weights = {name: value for name, value in select(model.initial, model.random).items() if value.ndim > 1}
        fixed = {**model.initial, **model.buffers}
        sites = survey(lambda noisy: model.outputs({**fixed, **noisy}, example.x), weights)
        if not sites:
            raise ValueError(
                "SparseVD: groups=True needs linear, convolutional, recurrent or attention layers, whose units can go"
            )
        noisy = select(weights, tuple(sites))
        return Grouped(sites, stochastic.survey(lambda drawn: model.outputs({**fixed, **drawn}, example.x), noisy, "local"))

    def parameters(self, model: Model, run: Run[Any], key: Tensor) -> Weights:
        if not self.groups:
            return super().parameters(model, run, key)
        weights, extra = clone(model.initial), {}
        for name, site in run.prepared.sites.items():
            extra[VARIANCE + name] = torch.full_like(weights[name], LOG_VARIANCE)
            extra[UNIT_VARIANCE + name] = weights[name].new_full((site.units,), LOG_VARIANCE)
            extra[UNIT + name] = weights[name].new_ones(site.units)
        return {**weights, **extra}

    def estimate(
        self, model: Model, run: Run[Any], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        if not self.groups:
            return super().estimate(model, run, parameters, batch, buffers, key, step)
        (sites, ways), weights = run.prepared, {name: parameters[name] for name in model.initial}
        noise = Noise(key, step)
        means, spreads = select(weights, tuple(sites)), _spreads(parameters, sites)
        logs = self._log_alphas(parameters, sites)
        # p with α = p/(1 − p)
        rates = {name: log_alpha.sigmoid() for name, log_alpha in logs.items()}
        drawn = with_noisy_inputs(
            gaussians(_scaled(means, parameters, sites), _scaled(spreads, parameters, sites), noise, ways),
            sites,
            rates,
            noise,
            "gaussian",
        )
        total = model.scaled_log_likelihood({**weights, **buffers, **drawn}, batch, train=True)
        expected = self.expected(Gaussian() if scale_free(model, tuple(sites)) else model.prior, means, spreads)
        units = torch.stack([divergence(log_alpha, self.kl).sum() for log_alpha in logs.values()]).sum()
        return self._terms(model, run, weights, buffers, total, units - entropy(spreads) - expected, batch, step, sites)

    def _log_alphas(self, parameters: Weights, sites: Mapping[str, Site]) -> Weights:
        """Log α of units: of the variance of their scale and the square of its mean, which are parameters of their own."""
        squares = {name: parameters[UNIT + name].square() + TINY for name in sites}
        return {
            name: (parameters[UNIT_VARIANCE + name] - square.log()).clamp(max=self.limit) for name, square in squares.items()
        }

    # -----------------------------------------------------------------------------------------------------------------

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> LawPosterior:
        if not self.groups:
            return super().posterior(model, run, fitted).prune(threshold=self.threshold, by="log_alpha")
        state, sites = fitted.state.weights, run.prepared.sites
        logs = {name: log_alpha.detach() for name, log_alpha in self._log_alphas(state, sites).items()}
        means = clone(_scaled(state, state, sites))
        spreads = clone(_scaled(_spreads(state, sites), state, sites))
        law = UnitNoise(means, {name: value.sigmoid() for name, value in logs.items()}, sites, "gaussian", spreads)
        whole = LawPosterior.of(self, model.restricted(sites), fitted, law)
        kept = {name: (value <= self.threshold).to(means[name]) for name, value in logs.items()}
        return whole.masked({name: site.scaled(torch.ones_like(means[name]), kept[name]) > 0 for name, site in sites.items()})

    @classmethod
    def conforming(cls) -> SparseVD:
        return cls(epochs=600, batch_size=None, lr=Cosine(0.1), kl_weights=1.0, threshold=7.9)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        return problem.mean_field()


def _spreads(parameters: Weights, sites: Mapping[str, Site]) -> Weights:
    return {name: (0.5 * parameters[VARIANCE + name]).exp() for name in sites}


def _scaled(values: Weights, parameters: Weights, sites: Mapping[str, Site]) -> Weights:
    """Values of each weight times the mean scale of their unit."""
    return {name: site.scaled(values[name], parameters[UNIT + name]) for name, site in sites.items()}
