"""What the natural-gradient methods share: draws of the weights, gradients in parts, the three updates, the posterior."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.natural_gradients import (
    Positive,
    Quadratic,
    bias_correction,
    descend,
    deviation,
    quadratic,
    retract,
    wide,
)
from plausible.blocks.stochastic import Noise
from plausible.blocks.variational import entropy, expected_log_prior, joins
from plausible.core.data import Batch, num_rows, select_rows
from plausible.core.model import Joint, Model
from plausible.core.optimisers import AdamW
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_count, check_number
from plausible.core.transforms import hold
from plausible.core.weights import Weights, clone, flatten, select, unflatten
from plausible.engine.method import BatchSize, Fitted, Info, Method, Plan, Run, Traits, check_training, plan_epochs
from plausible.methods.variational.bound import INDEPENDENT, Bound
from plausible.posteriors.laws import DiagonalGaussian, LawPosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

Priors = dict[str, Quadratic | None]
"""The prior of each random weight, where it is a quadratic."""
POINTS = AdamW()
"""What moves the weights that are trained as points."""


class NaturalState(NamedTuple):
    """Means (and weights trained as points), momentum, curvature s = h + δ, buffers, the optimiser of points, key, step."""

    weights: Weights
    momentum: Weights
    curvature: Weights
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor


class Draw(NamedTuple):
    """One draw of the weights: its noise ε, the weights m + σε, and the log joint with the gradient of the loss there."""

    noise: Weights
    weights: Weights
    joint: Joint
    gradients: Weights


@dataclass(frozen=True)
class NaturalGradient(Method):
    """m ← m − lr (g + δm)/s,  s ← s ρ((1 − β₂)(ĥ + δ − s)/s),  q = N(m, 1/(λs))

    Natural-gradient variational inference; a method says how it estimates ĥ and which ρ keeps s positive.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(0.1))
    samples: int = 1
    beta1: float = 0.9
    beta2: float = 0.995
    initial_hessian: float = 0.1
    damping: float = 0.0
    clip_radius: float = 0.1
    antithetic: bool = False
    microbatches: int = 1
    points_lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3))

    traits: ClassVar[Traits] = replace(Bound.traits, divisible=True, bias=INDEPENDENT)
    positive: ClassVar[Positive] = staticmethod(retract)

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        as_schedule(self.points_lr, "points_lr")
        check_count(self, "samples", at_least=1)
        check_count(self, "microbatches", at_least=1)
        check_number(self, "beta1", at_least=0, below=1)
        check_number(self, "beta2", at_least=0.5, below=1)
        check_number(self, "initial_hessian", above=0)
        check_number(self, "damping", at_least=0)
        if not (isinstance(self.clip_radius, float | int) and self.clip_radius > 0):
            raise ValueError(f"{type(self).__name__}: clip_radius must be positive or inf, got {self.clip_radius!r}")
        if self.antithetic and self.samples % 2:
            who = type(self).__name__
            raise ValueError(f"{who}: antithetic pairs need an even number of samples, got samples={self.samples}")

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return plan_epochs(self, num_data, per_epoch)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> NaturalState:
        """Means at the module's weights, no momentum, the curvature at `initial_hessian` + δ."""
        weights, priors = clone(model.initial), gaussian_parts(model)
        # curvatures are divided by, so that they are kept in float32 at least
        like = {name: weights[name].to(wide(weights[name])) for name in model.random}
        curvature = {n: torch.full_like(w, self.initial_hessian + decay_of(model, priors[n])) for n, w in like.items()}
        momentum = {name: torch.zeros_like(weight) for name, weight in like.items()}
        points = select(weights, model.points)
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        optimiser = POINTS.init(points) if points else ()
        return NaturalState(weights, momentum, curvature, clone(model.buffers), optimiser, key, step)

    def step(self, model: Model, run: Run[Any], state: NaturalState, batch: Batch) -> tuple[NaturalState, Info]:
        if self.microbatches > 1 and getattr(model, "team", None) is not None:
            raise ValueError(
                f"{type(self).__name__}: microbatches={self.microbatches} with several ranks, which divide each batch already; "
                "use microbatches=1, and more ranks or a smaller batch_size to save memory"
            )
        ess, priors = model.num_data / model.temperature, gaussian_parts(model)  # λ: how many examples the data are worth
        sigma = {name: deviation(s, ess) for name, s in state.curvature.items()}
        draws, estimates, buffers = [], [], state.buffers
        for noise in Noise.several(state.key, state.step, self.samples, antithetic=self.antithetic):
            draw = self._draw(model, state, sigma, priors, noise, batch, buffers)
            # running statistics follow the draws one after the other
            buffers = draw.joint.buffers
            estimates.append(self.estimate(model, state, draw, noise, priors, batch))
            draws.append(draw)
        new = self._moved(model, run, state, draws, estimates, priors)
        likelihood = _mean([draw.joint.log_likelihood for draw in draws])
        means = {name: state.weights[name].to(s.dtype) for name, s in state.curvature.items()}
        # for the record: the updates have the prior in closed form, or by its gradients
        expected, rest = expected_log_prior(model.prior, means, sigma)
        if rest:
            expected = expected + _mean([model.prior.log_prob(select(draw.weights, rest)) for draw in draws])
        kl = -entropy(sigma) - expected / model.temperature
        info = {"elbo": likelihood / model.temperature - kl, "log_likelihood": likelihood, "kl": kl}
        return new._replace(buffers=buffers, step=state.step + 1), info

    def estimate(self, model: Model, state: NaturalState, draw: Draw, noise: Noise, priors: Priors, batch: Batch) -> Weights:
        """ĥ by name: an estimate of the second derivatives of the mean loss at this draw."""
        raise NotImplementedError

    def _draw(
        self, model: Model, state: NaturalState, sigma: Weights, priors: Priors, noise: Noise, batch: Batch, buffers: Weights
    ) -> Draw:
        """Draw w = m + σε and take the gradient of the mean loss there, priors that are not Gaussian included."""
        normal = noise.normals(state.curvature)
        means = select(state.weights, tuple(sigma))
        if joins(sigma) and joins(means):
            flat = flatten(means) + flatten(sigma) * flatten(normal)
            drawn = {n: w.to(means[n].dtype) for n, w in unflatten(flat, means).items()}
        else:
            drawn = {n: (state.weights[n] + sigma[n] * e).to(state.weights[n].dtype) for n, e in normal.items()}
        joint = in_parts(model, {**state.weights, **drawn}, batch, buffers, self.microbatches)
        gradients = {}
        for name, weight in drawn.items():
            gradient, prior = joint.grads[name].to(sigma[name].dtype), priors[name]
            if prior is not None and model.closed is None:  # autograd has seen it: take it out again
                gradient = gradient - prior.precision / model.num_data * (weight - prior.centre)
            gradients[name] = gradient
        return Draw(normal, drawn, joint, gradients)

    def _moved(
        self, model: Model, run: Run[Any], state: NaturalState, draws: list[Draw], estimates: list[Weights], priors: Priors
    ) -> NaturalState:
        weights = dict(state.weights)
        momentum: Weights = {}
        curvature: Weights = {}
        lr = rate(self.lr, state.step, run.steps)
        # once a step, and not inlined into the loop over each weight by the compiler
        correction = hold(bias_correction(self.beta1, state.step + 1))
        gradients = {name: _mean([draw.gradients[name] for draw in draws]) for name in priors}
        curved = {name: _mean([each[name] for each in estimates]) for name in priors}
        for names in _together(priors, state):
            prior = priors[names[0]]
            parts = (state.weights, state.momentum, state.curvature, gradients, curved)
            moved = descend(
                *(_joined(part, names) for part in parts),
                lr=lr,
                correction=correction,
                beta1=self.beta1,
                beta2=self.beta2,
                decay=decay_of(model, prior),
                centre=0.0 if prior is None else prior.centre,
                damping=self.damping,
                clip_radius=self.clip_radius,
                positive=type(self).positive,
            )
            for new, part in zip((weights, momentum, curvature), moved):
                new.update({names[0]: part} if len(names) == 1 else unflatten(part, select(state.weights, names)))
        optimiser = state.optimiser
        if model.points:
            grads = {name: _mean([draw.joint.grads[name] for draw in draws]) for name in model.points}
            points, rate_here = select(state.weights, model.points), rate(self.points_lr, state.step, run.steps)
            points, optimiser = POINTS.update(points, grads, optimiser, rate_here, draws[0].joint.l2)
            weights.update(points)
        # in the order of the state, by which it is written back
        momentum, curvature = select(momentum, tuple(priors)), select(curvature, tuple(priors))
        return state._replace(weights=weights, momentum=momentum, curvature=curvature, optimiser=optimiser)

    def kept(self, model: Model, run: Run[Any], state: NaturalState) -> Weights:
        return {}

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        return problem.mean_field()

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> LawPosterior:
        ess = model.num_data / model.temperature
        state = fitted.state
        # σ is no parameter of its own: it is read off the curvature
        scales = {name: deviation(s, ess).to(state.weights[name].dtype) for name, s in state.curvature.items()}
        law = DiagonalGaussian.of(model, fitted, scales, dict.fromkeys(scales, "weights"))
        return LawPosterior.of(self, model, fitted, law)


def gaussian_parts(model: Model) -> Priors:
    return {name: quadratic(model.prior, name, model.initial[name]) for name in model.random}


def decay_of(model: Model, prior: Quadratic | None) -> float:
    """δ: the precision of the prior for each example; 0 where the gradients and estimates have the prior in them."""
    return 0.0 if prior is None else prior.precision / model.num_data


def in_parts(model: Model, weights: Weights, batch: Batch, buffers: Weights, parts: int) -> Joint:
    """The log joint and the gradient of −(log-likelihood + log prior)/N, T = 1, from a batch seen in so many parts.

    Each part is an estimate from its own rows; they are averaged by their sizes, so that the result is that of the whole batch
    up to rounding. A centred Gaussian prior is left out of the gradient (`Joint.l2` has it).
    """
    rows = num_rows(batch.x)
    settings: dict[str, Any] = {"train": True, "scale": -model.temperature / model.num_data, "leave_l2": True}
    parts = min(parts, rows)
    if parts == 1:
        return model.gradient(weights, batch, buffers=buffers, **settings)
    likelihood: Any = 0.0
    grads: Weights = {}
    for part in range(parts):
        first, last = rows * part // parts, rows * (part + 1) // parts
        joint = model.gradient(weights, select_rows(batch, slice(first, last)), buffers=buffers, **settings)
        buffers, share = joint.buffers, (last - first) / rows
        likelihood = likelihood + share * joint.log_likelihood
        grads = {name: share * grad + grads[name] if grads else share * grad for name, grad in joint.grads.items()}
    return joint._replace(log_likelihood=likelihood, grads=grads)


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean(0)


def _together(priors: Priors, state: NaturalState) -> list[list[str]]:
    """Names of weights that one call moves: on a GPU all under the same prior, elsewhere each by itself."""
    if not (joins(state.curvature) and joins(select(state.weights, tuple(priors)))):
        return [[name] for name in priors]
    groups: dict[Any, list[str]] = {}
    for name, prior in priors.items():
        # a centre by element is that of its own weight
        alike = prior is None or isinstance(prior.centre, int | float)
        groups.setdefault((prior if alike else name), []).append(name)
    return list(groups.values())


def _joined(values: Weights, names: list[str]) -> Tensor:
    return values[names[0]] if len(names) == 1 else flatten(select(values, names))
