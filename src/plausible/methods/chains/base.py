"""What samplers by Markov chains share: how they start, what a state is, what is kept of it, and the posterior they leave.

A kernel is a frozen dataclass with two functions: `begin(target, state)` prepares what it adapts, `transition(target, state)`
moves all chains once. Everything else is here and in the engine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation, Slope, Warmup, first_step
from plausible.blocks.chains.compiled import faster
from plausible.blocks.chains.density import Density, Evaluation, ModelDensity, Point
from plausible.blocks.chains.gibbs import Hierarchy
from plausible.blocks.chains.integrators import DIVERGENT, Metric, check_metric, gradients, integrate
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.serialise import check_number, check_switch
from plausible.core.weights import Weights, index, stack
from plausible.core.words import log
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Traits, check_choice
from plausible.posteriors.chains import PREFIX, ChainsPosterior

STATISTICS = ("acceptance", "divergent", "step_size", "leapfrogs", "energy")
"""What all kernels know of a transition; some know more."""
SUMMED, AVERAGED = ("divergent", "leapfrogs"), ("acceptance", "swap")
"""Statistics of a draw that are taken over all transitions since the one before; others are those of the latest."""


class Running(NamedTuple):
    """Number, means and sums of squares around them of each chain's log joint after warm-up: `[]`, `[chains]`, `[chains]`."""

    number: Tensor
    mean: Tensor
    squares: Tensor


class ChainState(NamedTuple):
    """Where all chains are: positions `[chains, P]`, densities there `[chains]` (float64), gradients, and what the kernel adapts.

    `gradient` is that of the bound target at `position`. `adaptation` is a tree of tensors of the kernel's own,
    `statistics` has one number for each chain, always by the same names: about the latest transition when it comes from the
    kernel, about all since the last kept draw once `Chains` has noted it. `precisions` are sampled hyper-parameters, by group.
    """

    position: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    gradient: Tensor
    precisions: dict[str, Tensor]
    adaptation: Any
    statistics: dict[str, Tensor]
    running: Running
    key: Tensor
    step: Tensor

    def normal(self, stream: int, like: Tensor) -> Tensor:
        """N(0, 1) shaped like `like`, a function of the key, the number of the transition and `stream`."""
        return random.normal(random.fold(self.key, stream), self.step, like)

    def uniform(self, stream: int, like: Tensor) -> Tensor:
        """U(0, 1) likewise."""
        return random.uniform(random.fold(self.key, stream), self.step, like)

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.log_likelihood, self.log_prior, self.gradient)

    def no_statistics(self, *more: str) -> dict[str, Tensor]:
        """Those of `STATISTICS` and more, before the first transition."""
        return {name: torch.zeros_like(self.log_prior) for name in (*STATISTICS, *more)}


@dataclass(frozen=True)
class Chains(Method):
    """w_1, w_2, … ~ p(w | D)

    The base of all samplers by Markov chains over the full data.

    `draws` are kept of each of `chains` chains, one every `thin` transitions, after `warmup` transitions in which the
    kernel adapts and of which nothing is kept. Chains start at weights initialised anew ("fresh"), drawn from the prior
    ("prior") or at the module's ("given"). Statistics of a thinned draw are sums (divergences, leapfrogs) and means
    (acceptance) over its `thin` transitions; `energy_change` is E_t − E_{t−1} of the last of them, which E-BFMI needs.
    """

    draws: int = 1000
    chains: int = 4
    warmup: int = 1000
    thin: int = 1
    init: Literal["fresh", "prior", "given"] = "fresh"

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False, noisy=True, mixed_precision=False)
    slopes: ClassVar[Slope] = "none"  # whether diagonal masses come from gradients too
    precisions_move: ClassVar[bool] = True  # whether `state.precisions` may change from one transition to the next

    def __post_init__(self) -> None:
        check_counts(self, draws=1, chains=1, warmup=0, thin=1)
        check_choice(self, "init", ("fresh", "prior", "given"))

    @property
    def rows(self) -> int:
        """Positions that move together: the chains, and for some kernels helpers beside them."""
        return self.chains

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """The state before the first transition: with `adaptation` and with `statistics` of the names that it will always have."""
        raise NotImplementedError

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """All chains moved once. `state.step` counts transitions from 0; below `warmup` the kernel may adapt."""
        raise NotImplementedError

    def bind(self, target: Density, state: ChainState) -> Density:
        """The density of this state's chains, where it depends on the state: powers of the likelihood, say."""
        return target

    def warming(self, state: ChainState) -> bool:
        return int(state.step) < self.warmup

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        steps = self.warmup + self.draws * self.thin  # history has at most some 1,000 entries
        return Plan(steps, max(1, steps // 1000), None, burn_in=self.warmup, thin=self.thin, unit="transitions")

    def prepare(self, model: Model, run: Run[Any]) -> ModelDensity:
        target = ModelDensity(model, run.data, self.rows)
        if self.precisions_move:
            hierarchy = Hierarchy.of(model.prior, model.initial, tuple(target.like))
            # given the weights, precisions have a conjugate law only at temperature 1
            if hierarchy is not None and model.temperature != 1.0:
                log.info("the model is tempered: precisions of the hierarchical prior are integrated out and not sampled")
                hierarchy = None
            target.hierarchy = hierarchy
        # a guess at the gradients of a transition, from which follows whether compiling pays; trees are rarely full
        each = getattr(self, "leapfrogs", 2 ** min(getattr(self, "max_depth", 3), 6))
        return fastest(target, run, self.plan(model.num_data).steps * each)

    def start(self, model: Model, run: Run[ModelDensity], key: Tensor) -> ChainState:
        target = run.prepared
        check_memory(self, target, "chains")
        return self.started(target, target.flatten(starting_points(model, run, self.rows, self.init)), key)

    def started(self, target: Density, position: Tensor, key: Tensor) -> ChainState:
        """The state at these positions before the first transition; precisions of a hierarchical prior are drawn given the weights.

        Needs a density and no model, so that `blocks.chains.density.run` can use it too.
        """
        precisions = {} if target.hierarchy is None else target.hierarchy.draw(position, random.fold(key, 1), 0)
        zero = torch.zeros(len(position), dtype=torch.float64, device=key.device)
        running, step = Running(zero[0].clone(), zero.clone(), zero.clone()), torch.zeros_like(zero[0], dtype=torch.int64)
        state = ChainState(position, zero, zero, position, precisions, (), {}, running, key, step)
        bound = self._bound(target, state)
        here = bound.evaluate(position)
        finite = torch.isfinite(here.log_likelihood + here.log_prior) & torch.isfinite(here.gradient).all(-1)
        if not bool(finite.all()):
            raise ValueError(
                f"{type(self).__name__}: the log joint or its gradient at the starting points is not finite: standardise inputs "
                "and targets, or start elsewhere (init='given', or init= an earlier posterior)"
            )
        # where the density changes from call to call, acceptance would compare two different ones
        check_function(type(self).__name__, bound, position, here.log_likelihood)
        state = state._replace(**here._asdict())
        # bound again: what the kernel adapts may decide the density, as powers of the likelihood do
        begun = self.begin(self._bound(target, state), state)
        return begun._replace(statistics=self._noted(begun, begun.statistics))

    def _bound(self, target: Density, state: ChainState) -> Density:
        """The density that a transition from this state moves over: at the state's own powers and precisions."""
        bound = self.bind(target, state)
        return bound if target.hierarchy is None else target.hierarchy.bound(bound, state.precisions)

    def step(self, model: Model, run: Run[ModelDensity], state: ChainState, batch: Batch) -> tuple[ChainState, Info]:
        return self.advanced(run.prepared, state)  # the target has the data

    def advanced(self, target: Density, state: ChainState) -> tuple[ChainState, Info]:
        """One transition over any target, then a Gibbs step of the precisions where the prior is hierarchical."""
        new = self.transition(self._bound(target, state), state)
        if target.hierarchy is not None:
            # precisions given the weights, exactly; the prior and its gradient are others afterwards
            new = target.hierarchy.step(target, new)
        # the untempered joint, also of kernels that move under powers of the likelihood
        joint = new.log_likelihood + new.log_prior
        running = new.running if self.warming(state) else _updated(new.running, joint)
        info = {"log_joint": joint, "log_likelihood": new.log_likelihood, "log_prior": new.log_prior, **new.statistics}
        noted = self._noted(state, new.statistics)
        return new._replace(statistics=noted, running=running, step=state.step + 1), info

    def _noted(self, state: ChainState, latest: dict[str, Tensor]) -> dict[str, Tensor]:
        """The statistics of the new state: over all transitions since the last draw, from those in `state` and the `latest`."""
        # sums and means travel in the state, so that a resumed run goes on with them
        if self.thin == 1:
            return latest
        before, noted = state.statistics, dict(latest)
        count = 0 if self.warming(state) else (int(state.step) - self.warmup) % self.thin
        if count:
            noted |= {name: before[name] + latest[name] for name in SUMMED if name in latest}
            noted |= {name: (count * before[name] + latest[name]) / (count + 1) for name in AVERAGED if name in latest}
        if "energy" in latest:
            noted["energy_change"] = latest["energy"] - before["energy"]
        return noted

    def about(self, state: ChainState) -> dict[str, Tensor]:
        """What is stored with a draw beside its weights, by name: its densities, statistics and precisions, `[chains]` each."""
        precisions = {f"precision.{name}": value for name, value in state.precisions.items()}
        joint = {"log_likelihood": state.log_likelihood, "log_prior": state.log_prior}
        return index({**joint, **state.statistics, **precisions}, slice(self.chains))

    def kept(self, model: Model, run: Run[ModelDensity], state: ChainState) -> Weights:
        target = run.prepared
        # weights that stay where they are, and buffers, are the same in every chain
        rest = {name: value.expand(self.chains, *value.shape) for name, value in target.rest.items()}
        weights = index(target.named(state.position), slice(self.chains))
        return {**rest, **weights, **{PREFIX + name: value for name, value in self.about(state).items()}}

    def caption(self, state: ChainState) -> str:
        parts = ["warm-up"] if int(state.step) <= self.warmup else []
        for name, form in (("acceptance", "acceptance {:.2f}"), ("step_size", "step {:.2g}")):
            if name in state.statistics:
                parts.append(form.format(float(state.statistics[name].double().mean())))
        if math.isfinite(ratio := live_rhat(state.running)):
            parts.append(f"R̂ {ratio:.2f}")
        return ", ".join(parts)

    def posterior(self, model: Model, run: Run[ModelDensity], fitted: Fitted) -> ChainsPosterior:
        return ChainsPosterior.of(self, model, run, fitted, chains=self.chains)


class Adapting(Chains):
    """The base of samplers whose step size and masses adapt; a subclass is a dataclass with the settings below."""

    target_acceptance: float
    metric: Any
    step_size: float | None
    adapt: bool
    integrator: str = "leapfrog"
    slopes: ClassVar[Slope] = "each"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "target_acceptance", above=0.0, below=1.0)
        if self.step_size is not None:
            check_number(self, "step_size", above=0.0)
        check_switch(self, "adapt")
        if not self.adapt and self.step_size is None:
            raise ValueError(f"{type(self).__name__}: adapt=False needs a step_size")
        check_metric(type(self).__name__, self.metric)

    @property
    def schedule(self) -> Warmup:
        """How long, and for what, the kernel adapts."""
        return Warmup(self.warmup if self.adapt else 0, self.target_acceptance, self.metric, slopes=self.slopes)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size for each chain, and the unit metric."""
        adapted = adaptation.begin(self.schedule, state.position, self.step_size or 0.1)
        # the search goes by factors of two, so that where it starts hardly matters
        if self.step_size is None:
            step = self._first_step(target, state)(adapted.metric, adapted.step)
            adapted = adaptation.begin(self.schedule, state.position, step)
        return state._replace(adaptation=adapted, statistics=state.no_statistics())

    def _first_step(self, target: Density, state: ChainState) -> adaptation.Find:
        """What finds step sizes for a metric at this state, from step sizes to begin the search with."""

        def find(metric: Metric, step: Tensor) -> Tensor:
            noise = state.normal(90, state.position)
            return first_step(target, metric, state.position, state.evaluation, noise, step, self.integrator)

        return find

    def trajectory(
        self, target: Density, state: ChainState, adapted: Adaptation, noise: Tensor, level: Tensor, count: int
    ) -> tuple[ChainState, Point, Point]:
        """`count` steps from p = M^½ `noise`, accepted where `level` < e^{H − H*}; with both ends of the trajectories."""
        start = Point(state.position, adapted.metric.momentum(noise), *state.evaluation)
        end = integrate(target, adapted.metric, start, adapted.step, count, self.integrator)
        # H = −log π(q) + ½pᵀM⁻¹p in float64; infinite where it cannot be computed, so that the end is refused
        before, after = (
            (adapted.metric.kinetic(at.momentum) - target.value(at.log_likelihood, at.log_prior)).nan_to_num(nan=torch.inf)
            for at in (start, end)
        )
        gain = before - after
        statistics = {
            "acceptance": gain.clamp(max=0).exp(),
            "divergent": (gain < -DIVERGENT).double(),
            "step_size": adapted.step.clone(),
            "leapfrogs": torch.full_like(gain, count * gradients(self.integrator)),
            "energy": before,
        }
        return taken(state, end, level.log() < gain)._replace(statistics=statistics), start, end

    def learned(self, target: Density, new: ChainState, old: ChainState) -> ChainState:
        """The new state, in warm-up with step sizes and masses that were adapted by what its transition showed."""
        if not self.adapt or not self.warming(old):
            return new
        # a step size that was given is where averaging starts, and is not sought again after a change of masses
        find = self._first_step(target, new) if self.step_size is None else None
        changed = adaptation.update(
            old.adaptation, self.schedule, int(old.step), new.position, new.gradient, new.statistics["acceptance"], find
        )
        return new._replace(adaptation=changed)


def taken(state: ChainState, end: Point | ChainState, accept: Tensor) -> ChainState:
    """The ends of trajectories where they are accepted, else where they started."""
    row = accept.unsqueeze(-1)
    return state._replace(
        position=torch.where(row, end.position, state.position),
        gradient=torch.where(row, end.gradient, state.gradient),
        log_likelihood=torch.where(accept, end.log_likelihood, state.log_likelihood),
        log_prior=torch.where(accept, end.log_prior, state.log_prior),
    )


def check_counts(method: Any, **least: int) -> None:
    """Refuse settings that are no whole numbers of at least so much."""
    for setting, lowest in least.items():
        value = getattr(method, setting)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ValueError(f"{type(method).__name__}: {setting} must be a whole number of at least {lowest}, got {value!r}")


def check_memory(method: Any, target: Density, what: str) -> None:
    """Refuse more rows than fit: positions, gradients and what trajectories hold, about eight copies."""
    needed = 8 * method.rows * target.size * torch.finfo(target.dtype).bits // 8
    require_memory(needed, target.device, f"{type(method).__name__}: {method.rows:,} {what} of {target.size:,} weights")


def check_function(who: str, target: Density, position: Tensor, log_likelihood: Tensor) -> None:
    """Refuse a density that has another value when it is asked again."""
    again, _ = target.densities(position)
    # up to rounding, which kernels that add up in another order leave
    gap = (again - log_likelihood).abs() / (1 + log_likelihood.abs())
    if float(gap.nan_to_num(nan=0.0).max()) > 1e-4:
        raise ValueError(
            f"{who}: the log-likelihood differs between two calls at the same weights, so there is no one posterior to sample: is "
            "there functional dropout (F.dropout without training=self.training), augmentation of inputs, or a loader with "
            "drop_last=True?"
        )


def starting_points(model: Model, run: Run[Any], count: int, init: str) -> Weights:
    """Starting weights of all chains, on a leading axis: those of an earlier posterior or stage, where there is one."""
    if given := run.starts or run.before:
        there = len(next(iter(given.values())))
        # more chains than earlier draws: they start there in turn
        return stack([index(given, c % there) for c in range(count)])
    if init == "given":
        return stack([model.initial] * count)
    fresh = model.reinitialised if init == "fresh" else functools.partial(model.prior.sample, model.initial)
    return stack([fresh(random.generator(run.seed, 5, c)) for c in range(count)])


def _updated(running: Running, value: Tensor) -> Running:
    # Welford's recursion: sums of squares would cancel, since log joints are large beside their spread
    number = running.number + 1
    delta = value - running.mean
    mean = running.mean + delta / number
    return Running(number, mean, running.squares + delta * (value - mean))


def live_rhat(running: Running) -> float:
    """√(((n−1)/n · W + B/n)/W) of the chains so far, without splits and ranks; NaN where there are too few."""
    count, chains = float(running.number), len(running.mean)
    if count < 4 or chains < 2:
        return math.nan
    # of the log joint alone, which costs nothing; the posterior judges functions and weights
    within = float((running.squares / (count - 1)).mean())
    between = float(running.mean.var(unbiased=True))
    return math.sqrt((count - 1) / count + between / within) if within > 0 else math.nan


def fastest(target: ModelDensity, run: Run[Any], gradients: int) -> ModelDensity:
    """The density in the form that pays for about so many gradients (see `faster`), with that form's name as its `mode`."""
    chosen, mode = faster(target, run.compile, gradients)
    chosen.mode = mode
    return chosen
