"""Variational inference refined by a sampler: a Gaussian guess, moved by Langevin or Hamiltonian steps inside the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.refinement import GroupSlopes, Guess, log_initial, refine, refined_group, slope_in_training
from plausible.blocks.stochastic import Noise
from plausible.blocks.variational import entropy
from plausible.core.data import ArrayData, Batch, StreamData
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule
from plausible.core.serialise import check_count, check_number, check_switch, register
from plausible.core.transforms import transformed
from plausible.core.weights import Weights, clone, index, num_elements, select
from plausible.engine.method import BatchSize, Fitted, Info, Plan, Run, Stage, Traits, check_choice
from plausible.methods.variational.bound import Bound, BoundState, Terms
from plausible.posteriors.refined import LOG_WEIGHTS, MEAN, SPREAD, STEP_SIZE, WHOLE, RefinedPosterior

SCALE, STEP = "log scale of ", "log step size"


@register
@dataclass(frozen=True)
class Refined(Bound):
    """w_0 ~ q₀ = Π N(μ_i, σ_i²),  w_T = T refinements of w_0 by a sampler,  maximising  E log W ≤ log p(D) over μ, σ and ε

    Independent Gaussians whose draws are refined by a few sampler steps inside the bound (VIS, Gallego & Ríos Insua 2021).

    A refinement is a Langevin step (`sampler="sgld"`) or a trajectory of `leapfrog` steps ("hmc"), in units of q₀'s scales: w
    + ½ε²σ²∘∇ log p(w, D) + εσ∘r with r ~ N(0, I); the objective is differentiated through it. With `entropy="extended"` that
    is E log W, W = p(w_T, D) Π N(r'_t) / (q₀(w_0) Π N(r_t)), r'_t the momentum at the end: a bound on the evidence (Salimans
    et al. 2015). With "initial" it is the paper's E log p(w_T, D) + H(q₀), which bounds nothing. The result is `draws_kept`
    refined draws, on all data where batches are, with `further` refinements: Metropolis-adjusted on all data. Cost:
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
    bias: ClassVar[str] = "independent weights, as far as the refinements do not make up for it"
    traits: ClassVar[Traits] = replace(Bound.traits, mixed_precision=False, tolerance=0.1, bias=bias)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("samples", 1), ("refinements", 0), ("leapfrog", 1), ("draws_kept", 1), ("further", 0)):
            check_count(self, name, at_least=least)
        check_number(self, "step_size", above=0)
        check_number(self, "initial_scale", above=0)
        check_choice(self, "sampler", ("sgld", "hmc"))
        check_choice(self, "entropy", ("extended", "initial"))
        check_switch(self, "learn_step_size")

    @property
    def trajectory(self) -> int:
        """Leapfrog steps of one refinement; one of them is a Langevin step."""
        return self.leapfrog if self.sampler == "hmc" else 1

    def stages(self) -> tuple[Stage, ...]:
        return (self, Refining(self))

    def parameters(self, model: Model, run: Run[Any], key: Tensor) -> Weights:
        weights = clone(model.initial)
        scales = {SCALE + name: torch.full_like(weights[name], math.log(self.initial_scale)) for name in model.random}
        learnt = {}
        if self.learn_step_size and self.refinements:
            learnt = {STEP: next(iter(weights.values())).new_full((), math.log(self.step_size))}
        return {**weights, **scales, **learnt}

    def estimate(
        self, model: Model, run: Run[Any], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        names = model.random
        points, means = select(parameters, model.points), select(parameters, names)
        scales = {name: parameters[SCALE + name].exp() for name in names}
        given = torch.full_like(next(iter(means.values())).flatten()[0].detach(), math.log(self.step_size))
        step_size = parameters.get(STEP, given).exp()
        # differentiable itself: the objective is differentiated through the sampler's gradients
        slope = slope_in_training(model, points, buffers, batch)
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
        info = {"elbo": bound, "log_joint": value, "step_size": step_size}
        if self.entropy != "extended":
            info["objective"] = aim
        return Terms(aim, info, {n: b.detach() for n, b in moved.items()})

    def _differentiated(self, objective: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Tensor], Weights, Weights]:
        if not transformed():
            return super()._differentiated(objective, *arguments)
        # also stacked: differentiating through vmap loses terms of a gradient of batch norm
        grads, (_, (info, moved)) = torch.func.grad_and_value(objective, has_aux=True)(*arguments)
        return info, moved, grads

    def kept(self, model: Model, run: Run[Any], state: BoundState) -> Weights:
        """What draws are refined from: all parameters, and the network's buffers."""
        return {name: value.unsqueeze(0) for name, value in {**state.weights, **state.buffers}.items()}

    @classmethod
    def conforming(cls) -> Refined:
        # Full batches, and so many adjusted refinements behind the bound's that the draws follow the posterior
        return cls(epochs=150, batch_size=None, lr=Cosine(0.08), refinements=1, initial_scale=0.1, draws_kept=700, further=30)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> RefinedPosterior:
        return RefinedPosterior.of(self, model, fitted)


class Sources(NamedTuple):
    """What draws are refined from: q₀ with the sampler, and slopes of the log joint, on all data or on batches."""

    guess: Guess
    slopes: GroupSlopes
    group: int


class RefiningState(NamedTuple):
    """Draws so far (rows behind `done` are empty), the log W of each, and how many groups there have been."""

    draws: Weights
    log_weights: Tensor
    done: Tensor
    groups: Tensor
    key: Tensor


@dataclass(frozen=True)
class Refining(Stage):
    """Draws of q₀ refined in groups: on all data where the bound saw all of it, else each on a batch of its own."""

    method: Refined

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False, keeps_draws=False, noisy=True, mixed_precision=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return Plan(steps=self.method.draws_kept, per_epoch=self.method.draws_kept, batch_size=None, unit="groups of draws")

    def prepare(self, model: Model, run: Run[Any]) -> Sources:
        method, data = self.method, run.data
        left = index(run.before, 0)
        means = {name: left[name] for name in model.random}
        scales = {name: left[SCALE + name].exp() for name in model.random}
        step_size = float(left[STEP].exp()) if STEP in left else method.step_size
        guess = Guess(means, scales, step_size, method.refinements, method.trajectory)
        size = None if isinstance(data, StreamData) else method.plan(data.num_data).batch_size
        # on all data refinements have a known target, and importance weights give the evidence
        whole = isinstance(data, ArrayData) and size in (None, data.num_data)
        slopes = GroupSlopes(model, select(left, (*model.points, *model.buffers)), data, whole=whole, size=size)
        return Sources(guess, slopes, slopes.group(method.draws_kept, num_elements(means)))

    def start(self, model: Model, run: Run[Sources], key: Tensor) -> RefiningState:
        count, means = self.method.draws_kept, run.prepared.guess.means
        draws = {name: torch.zeros((count, *mean.shape), dtype=mean.dtype, device=mean.device) for name, mean in means.items()}
        zero = torch.zeros((), dtype=torch.int64)
        return RefiningState(draws, torch.zeros(count, dtype=torch.float64), zero, zero.clone(), key.clone())

    def step(self, model: Model, run: Run[Sources], state: RefiningState, batch: Batch) -> tuple[RefiningState, Info]:
        sources, done, number = run.prepared, int(state.done), int(state.groups)
        # the key as one whole number, from which the noise of groups is seeded
        high, low = state.key.tolist()
        count = min(sources.group, self.method.draws_kept - done)
        drawn, log_weights = refined_group(
            sources.guess, sources.slopes, count, (high << 32) + low, number, self.method.further
        )
        for name, value in drawn.items():
            state.draws[name][done : done + count] = value
        state.log_weights[done : done + count] = log_weights
        new = state._replace(done=state.done + count, groups=state.groups + 1)
        return new, {"log_weight": log_weights[log_weights.isfinite()].mean().nan_to_num()}

    def finished(self, state: RefiningState) -> bool:
        return int(state.done) >= self.method.draws_kept

    def kept(self, model: Model, run: Run[Sources], state: RefiningState) -> Weights:
        """Draws by name with those of points and buffers, log W, and q₀ with its sampler: what the posterior is made of."""
        guess, fixed, done = run.prepared.guess, run.prepared.slopes.fixed, int(state.done)
        left = {name: value[:done] for name, value in state.draws.items()}
        # points and buffers are the same in every draw, and take no memory for it
        left |= {name: value.expand(done, *value.shape) for name, value in fixed.items()}
        left[LOG_WEIGHTS] = state.log_weights[:done]
        left |= {f"{MEAN}{name}": value.unsqueeze(0) for name, value in guess.means.items()}
        left |= {f"{SPREAD}{name}": value.unsqueeze(0) for name, value in guess.scales.items()}
        left[STEP_SIZE] = torch.tensor([guess.step_size], dtype=torch.float64)
        left[WHOLE] = torch.tensor([run.prepared.slopes.whole])
        return left
