"""Variational inference by moments: what `DVI` and `MDL` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plausible.blocks.moments.expectations import NOISE_NODES, expected_log_prob
from plausible.blocks.moments.gaussians import NODES, SCALE_NODES, Weight, prime
from plausible.blocks.moments.networks import Link, check, model_network, propagate
from plausible.blocks.variational import entropy, expected_log_prior
from plausible.core.data import Batch, num_rows
from plausible.core.model import Model
from plausible.core.serialise import check_number
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import Run, Traits
from plausible.methods.variational.bound import INDEPENDENT, RHO, Bound, Terms, log_prior_of_points

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

PRIOR = "prior's "
Layers = tuple[Link, ...]


class ByMoments(Bound):
    """q(w) = Π N(w_i; μ_i, σ_i²), maximising E_q log p(D | w) − KL(q ‖ p) without sampling: the base of `DVI` and `MDL`.

    Subclasses are dataclasses with the settings below; they say what weights cost (`weights_cost`), and may learn parameters of the
    prior (`prior_start`).
    """

    initial_scale: float
    warmup: float

    covariance: str = "full"
    normalises: ClassVar[bool] = True
    """Whether batch norm follows the batches; otherwise its statistics stay as they are."""
    traits: ClassVar[Traits] = Traits(
        divisible=False, keeps_draws=False, deterministic=True, mixed_precision=False, bias=INDEPENDENT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "initial_scale", above=0)
        check_number(self, "warmup", at_least=0, below=1)

    def weights_cost(self, model: Model, means: Weights, scales: Weights, prior: Weights) -> Tensor:
        """What the weights cost, in nats: KL(q ‖ p), or what stands for it."""
        raise NotImplementedError

    def prior_start(self, model: Model) -> Weights:
        """Parameters of the prior that are learned along, to start from; here none."""
        return {}

    def check_layers(self, model: Model, layers: tuple[Link, ...]) -> None:
        """Refuse networks and likelihoods that are not meant."""

    def prepare(self, model: Model, run: Run[Any]) -> tuple[Link, ...]:
        example = next(iter(run.data.chunks(2)))
        layers = check(model, example.x, type(self).__name__)
        self.check_layers(model, layers)
        means, scales = model.initial, {name: torch.ones_like(model.initial[name]) for name in model.random}
        with torch.no_grad():  # a likelihood or a prior without a rule is refused here
            self.expected(model, layers, means, scales, model.buffers, example, train=False)  # 1² = 1
            self.weights_cost(model, select(means, model.random), scales, self.prior_start(model))
        return layers

    def parameters(self, model: Model, run: Run[Any], key: Tensor) -> Weights:
        weights = clone(model.initial)
        # constants of the quadratures before the step, which the compiler could not follow and a CUDA graph not record
        prime(next(iter(weights.values())), max(self.series, 1), (NODES, NOISE_NODES, SCALE_NODES))
        rhos = {name: torch.full_like(weights[name], self.initial_scale).log() for name in model.random}
        prior = {PRIOR + name: value for name, value in self.prior_start(model).items()}
        return {**weights, **{RHO + name: rho for name, rho in rhos.items()}, **prior}

    def estimate(
        self, model: Model, run: Run[Any], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        scales = {name: torch.exp(parameters[RHO + name]) for name in model.random}
        variances = {name: scale * scale for name, scale in scales.items()}
        means = select(parameters, model.initial)
        total, moved = self.expected(model, run.prepared, means, variances, buffers, batch, train=True)
        prior = {name.removeprefix(PRIOR): value for name, value in parameters.items() if name.startswith(PRIOR)}
        cost = self.weights_cost(model, select(parameters, model.random), scales, prior)
        # the weights' cost rises to 1 over the warm-up; what is logged is the bound itself
        share = ((step + 1) / max(1.0, self.warmup * run.steps)).clamp(max=1.0).to(cost)
        bound = total / model.temperature - share * cost + log_prior_of_points(model, parameters)
        info = {"elbo": total.detach() / model.temperature - cost.detach(), "log_likelihood": total, "kl": cost}
        return Terms(bound, info, {name: value.clone() for name, value in {**buffers, **moved}.items()})

    @property
    def series(self) -> int:
        """Terms of the series in the correlations; 0: variances alone."""
        return 0

    def expected(
        self,
        model: Model,
        layers: Layers | None,
        means: Weights,
        variances: Weights,
        buffers: Weights,
        batch: Batch,
        train: bool,
    ) -> tuple[Tensor, Weights]:
        """(N/B) Σ weight_i E log p(y_i | f(x_i)), and the buffers that changed."""
        network = model_network(model, type(self).__name__, means, variances, buffers, layers)
        f, moved = propagate(
            network, batch.x, full=self.covariance == "full", terms=self.series, train=train and self.normalises
        )
        noise = {n: Weight(means[n], variances.get(n)) for n in model.likelihood_names}
        each = expected_log_prob(model.likelihood, f, batch.y, noise)
        if batch.mask is not None:
            # a target that was not observed says nothing
            each = torch.where(batch.mask, each, torch.zeros_like(each))
        if batch.weight is not None:
            each = (each.flatten(1).sum(1) if each.ndim > 1 else each) * batch.weight
        return each.sum() * (model.num_data / num_rows(batch.x)), moved

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        return problem.mean_field()


def kl(who: str, model: Model, means: Weights, scales: Weights) -> Tensor:
    """−H(q) − E_q log p(w)/T in nats, for priors with closed forms."""
    if not means:
        return torch.zeros(())
    expected, rest = expected_log_prior(model.prior, means, scales)
    if rest:
        # nothing is sampled here, so that there is no other way to the expectation
        raise ValueError(
            f"{who}: the prior of {', '.join(rest)} has no closed form under a Gaussian, and nothing is sampled here; choose "
            "priors.Gaussian, Laplace or Flat (also by patterns and fan-in), or use MeanField"
        )
    return -entropy(scales) - expected / model.temperature
