"""Variational inference refined by a sampler: a Gaussian guess, moved by Langevin or Hamiltonian steps inside the bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.refinement import log_initial, refine, slope_in_training
from plausible.blocks.stochastic import Noise
from plausible.blocks.variational import entropy
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule, as_schedule, rate
from plausible.core.serialise import check_count, check_number, register
from plausible.core.transforms import transformed, value_and_gradient
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.posteriors.refined import RefinedPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data
    from plausible.engine import Fitted
    from plausible.posteriors.base import Posterior

SCALE, STEP = "log scale of ", "log step size"


class RefinedState(NamedTuple):
    """Means (and weights trained as points), log scales, log ε, buffers, the optimiser's state, the key of the noise, the step."""

    weights: Weights
    log_scales: Weights
    log_step_size: Tensor
    buffers: Weights
    optimiser: Any
    key: Tensor
    step: Tensor


@register
@dataclass(frozen=True)
class Refined(Method):
    """w_0 ~ q₀ = Π N(μ_i, σ_i²),  w_T = T refinements of w_0 by a sampler,  maximising  E log W ≤ log p(D) over μ, σ and ε

    Independent Gaussians whose draws are refined by a few sampler steps inside the bound (VIS, Gallego & Ríos Insua 2021).

    A refinement is a Langevin step (`sampler="sgld"`) or a trajectory of `leapfrog` steps ("hmc"), in units of q₀'s scales:
    w + ½ε²σ²∘∇ log p(w, D) + εσ∘r with r ~ N(0, I). The gradient of the log joint is part of the objective, which is
    differentiated through it. With `entropy="extended"` that is E log W, W = p(w_T, D) Π N(r'_t) / (q₀(w_0) Π N(r_t)), r'_t the
    momentum at the end: a bound on the evidence, of all refined and auxiliary variables (Salimans et al. 2015). With "initial" it
    is the paper's E log p(w_T, D) + H(q₀), which ignores what the sampler does to the entropy and bounds nothing. The result is
    `draws_kept` refined draws, on all data where batches are the whole data and else each on a batch of its own, with `further`
    refinements beyond the T of the bound: Metropolis-adjusted on all data, as they are on batches. Cost:
    `samples`·(1 + T·leapfrog) gradients a step, differentiated.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3))
    samples: int = 1
    refinements: int = 3
    sampler: Literal["sgld", "hmc"] = "sgld"
    leapfrog: int = 3
    step_size: float = 0.1
    learn_step_size: bool = True
    entropy: Literal["extended", "initial"] = "extended"
    initial_scale: float = 0.02
    draws_kept: int = 100
    further: int = 0
    optimiser: Optimiser = field(default_factory=AdamW)

    name: ClassVar[str] = "refined"
    divisible: ClassVar[bool] = False
    keeps_draws: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits(
        noisy=True, mixed_precision=False, bias="independent weights, as far as the refinements do not make up for it"
    )
    tolerance: ClassVar[float] = 0.1

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        for name, least in (("samples", 1), ("refinements", 0), ("leapfrog", 1), ("draws_kept", 1), ("further", 0)):
            check_count(self, name, at_least=least)
        check_number(self, "step_size", above=0)
        check_number(self, "initial_scale", above=0)
        for name, known in (("sampler", ("sgld", "hmc")), ("entropy", ("extended", "initial"))):
            if getattr(self, name) not in known:
                raise ValueError(f"Refined: {name} must be '{known[0]}' or '{known[1]}', got {getattr(self, name)!r}")
        if not isinstance(self.learn_step_size, bool):
            raise TypeError(f"Refined: learn_step_size must be True or False, got {self.learn_step_size!r}")
        if not isinstance(self.optimiser, Optimiser):
            raise TypeError(
                f"Refined: optimiser must be one of plausible.optimisers, such as AdamW() or SGD(), got {self.optimiser!r}"
            )

    @property
    def trajectory(self) -> int:
        """Leapfrog steps of one refinement; one of them is a Langevin step."""
        return self.leapfrog if self.sampler == "hmc" else 1

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; the final state is what draws are refined from."""
        return plan_epochs(self, num_data, per_epoch)

    def prepare(self, model: Model, data: Data) -> Model:
        """Hold on to the data, on which draws are refined at the end."""
        return model.with_prepared(data)

    def start(self, model: Model, key: Tensor) -> RefinedState:
        """Means at the module's weights, narrow scales."""
        weights = clone(model.initial)
        scales = {name: torch.full_like(weights[name], math.log(self.initial_scale)) for name in model.random}
        first = next(iter(weights.values()))
        step_size = torch.full((), math.log(self.step_size), dtype=first.dtype, device=first.device)
        optimiser = self.optimiser.init(self._parameters(weights, scales, step_size))
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        return RefinedState(weights, scales, step_size, clone(model.buffers), optimiser, key, step)

    def _parameters(self, weights: Weights, log_scales: Weights, log_step_size: Tensor) -> Weights:
        learnt = {STEP: log_step_size} if self.learn_step_size and self.refinements else {}
        return {**weights, **{SCALE + name: value for name, value in log_scales.items()}, **learnt}

    def step(self, model: Model, state: RefinedState, batch: Batch) -> tuple[RefinedState, dict[str, Tensor]]:
        """One step up the gradient of the objective, divided by N."""
        names = model.random

        def objective(
            parameters: Weights, part: Batch, buffers: Weights, log_step_size: Tensor, key: Tensor, step: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            points, means = select(parameters, model.points), select(parameters, names)
            scales = {name: parameters[SCALE + name].exp() for name in names}
            step_size = parameters.get(STEP, log_step_size).exp()
            slope = slope_in_training(model, points, buffers, part)
            bounds, values, moved = [], [], buffers
            for noise in Noise.several(key, step, self.samples):
                numbers = noise.normals({f"{t} {n}": m for t in range(self.refinements + 1) for n, m in means.items()})
                standard, *momenta = ({n: numbers[f"{t} {n}"] for n in names} for t in range(self.refinements + 1))
                drawn = {n: torch.addcmul(means[n], scales[n], standard[n]) for n in names}
                end = refine(slope, drawn, scales, momenta, step_size, self.trajectory)
                bounds.append(end.value + end.ratio - log_initial(standard, scales, end.value))
                values.append(end.value)
                moved = end.buffers
            bound, value = torch.stack(bounds).mean(), torch.stack(values).mean()
            aim = bound if self.entropy == "extended" else value + entropy(scales)
            return -aim / model.num_data, (bound.detach(), value.detach(), {n: b.detach() for n, b in moved.items()})

        parameters = self._parameters(state.weights, state.log_scales, state.log_step_size)
        arguments = (parameters, batch, state.buffers, state.log_step_size, state.key, state.step)
        if transformed():  # also stacked: differentiating through vmap loses terms of a gradient of batch norm
            grads, (loss, (bound, value, moved)) = torch.func.grad_and_value(objective, has_aux=True)(*arguments)
        else:
            loss, (bound, value, moved), grads = value_and_gradient(objective, *arguments)
        lr = rate(self.lr, state.step, model.steps)
        parameters, optimiser = self.optimiser.update(parameters, grads, state.optimiser, lr)
        log_scales = {name: parameters[SCALE + name] for name in names}
        log_step_size = parameters.get(STEP, state.log_step_size)
        new = RefinedState(
            select(parameters, state.weights), log_scales, log_step_size, moved, optimiser, state.key, state.step + 1
        )
        info = {"elbo": bound, "log_joint": value, "step_size": log_step_size.exp()}
        return new, info if self.entropy == "extended" else {**info, "objective": -loss * model.num_data}

    def kept(self, model: Model, state: RefinedState) -> Weights:  # noqa: ARG002
        """None: they are refined at the end."""
        return {}

    @classmethod
    def conforming(cls) -> Refined:
        """Full batches, and so many adjusted refinements behind the bound's that the draws follow the posterior."""
        return cls(epochs=250, batch_size=None, lr=Cosine(0.05), refinements=1, initial_scale=0.1, draws_kept=1000, further=30)

    def quick(self) -> Refined:
        """Few epochs, few draws."""
        return replace(
            self, epochs=min(self.epochs or 10, 10), draws_kept=min(self.draws_kept, 20), further=min(self.further, 1)
        )

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """Refined draws from the last state."""
        return RefinedPosterior.of(self, model, fitted)
