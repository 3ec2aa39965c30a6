"""Hamiltonian Monte Carlo: trajectories of Hamilton's equations as proposals, accepted by their energy error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation, Slope, Warmup, first_step
from plausible.blocks.chains.density import Density, Evaluation, Point
from plausible.blocks.chains.integrators import gradients, integrate, scheme_for
from plausible.blocks.chains.masses import Kind, Metric, check_metric
from plausible.blocks.chains.trees import DIVERGENT
from plausible.core.serialise import check_number, register
from plausible.methods.chains.base import Chains, ChainState, check_count


@register
@dataclass(frozen=True)
class HMC(Chains):
    """p ~ N(0, M),  (q*, p*) = L leapfrogs of size ε from (q, p),  accepted with min{1, exp(H(q, p) − H(q*, p*))}

    Hamiltonian Monte Carlo with trajectories of a given number of steps (Duane et al. 1987; Neal 1996).

    H(q, p) = −log p(q, D) + ½pᵀM⁻¹p. Each transition takes L steps of an `integrator`, L drawn anew between (1 −
    `jitter`) and (1 + `jitter`) times `leapfrogs`, which keeps trajectories from closing on themselves. In warm-up the
    step size of each chain is found by dual averaging for an acceptance of `target_acceptance`, and the masses
    (`metric`: "diag", "dense", "lowrank", "unit") from windows of draws and gradients. `adapt=False` keeps `step_size`
    and unit masses from the first transition on. Cost of a transition: L gradients over all data, for all chains at
    once.
    """

    leapfrogs: int = 50
    jitter: float = 0.4
    target_acceptance: float = 0.8
    metric: Kind = "diag"
    integrator: str = "leapfrog"
    step_size: float | None = None
    adapt: bool = True

    slopes: ClassVar[Slope] = "each"
    name: ClassVar[str] = "hmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("HMC", "leapfrogs", self.leapfrogs, 1)
        check_number(self, "jitter", at_least=0.0, below=1.0)
        check_adapting(self)
        scheme_for(self.integrator)

    @classmethod
    def conforming(cls) -> HMC:
        """Many short chains."""
        return cls(draws=150, chains=16, warmup=60, leapfrogs=5)

    def begin(self, target: Density, state: ChainState) -> ChainState:
        """A first step size, and the unit metric."""
        return begin_adapting(self, target, state)

    def transition(self, target: Density, state: ChainState) -> ChainState:
        """One trajectory of all chains."""
        adapted: Adaptation = state.adaptation
        spread = 2 * float(state.uniform(2, state.position[0, :1])) - 1
        count = max(1, math.floor(self.leapfrogs * (1 + self.jitter * spread) + 0.5))
        start = Point(
            state.position,
            adapted.metric.momentum(state.normal(1, state.position)),
            state.log_likelihood,
            state.log_prior,
            state.gradient,
        )
        end = integrate(target, adapted.metric, start, adapted.step, count, self.integrator)
        before, after = energy(target, adapted, start), energy(target, adapted, end)
        level = state.uniform(3, state.log_prior).log()
        new, acceptance = chosen(state, end, before - after, level)
        statistics = {
            "acceptance": acceptance,
            "divergent": divergent(before - after),
            "step_size": adapted.step.clone(),
            "leapfrogs": torch.full_like(acceptance, count * gradients(self.integrator)),
            "energy": before,
        }
        return adapted_after(self, target, new._replace(statistics=statistics), state)


# ---------------------------------------------------------------------------------------------------------------------
# What samplers by trajectories share


def check_adapting(method: object) -> None:
    """Checks of the settings that `begin_adapting` reads."""
    who = type(method).__name__
    step, metric = getattr(method, "step_size"), getattr(method, "metric")  # noqa: B009
    check_number(method, "target_acceptance", above=0.0, below=1.0)
    if step is not None:
        check_number(method, "step_size", above=0.0)
    if not getattr(method, "adapt") and step is None:  # noqa: B009
        raise ValueError(f"{who}: adapt=False needs a step_size")
    check_metric(who, metric)


def warmup_of(method: Chains) -> Warmup:
    """How long, and for what, a sampler adapts."""
    return Warmup(
        method.warmup if method.adapt else 0,  # type: ignore[attr-defined]
        method.target_acceptance,  # type: ignore[attr-defined]
        method.metric,  # type: ignore[attr-defined]
        slopes=method.slopes,
    )


def begin_adapting(method: Chains, target: Density, state: ChainState) -> ChainState:
    """The state with a first step size for each chain and the unit metric."""
    given: float | None = method.step_size  # type: ignore[attr-defined]
    adapted = adaptation.begin(warmup_of(method), state.position, given or 0.1)
    if given is None:
        step = _found(method, target, state)(adapted.metric, adapted.step)
        adapted = adaptation.begin(warmup_of(method), state.position, step)
    none = torch.zeros_like(state.log_prior)
    statistics = {name: none.clone() for name in ("acceptance", "divergent", "step_size", "leapfrogs", "energy")}
    return state._replace(adaptation=adapted, statistics=statistics)


def _found(method: Chains, target: Density, state: ChainState) -> adaptation.Find:
    scheme = getattr(method, "integrator", "leapfrog")

    def find(metric: Metric, step: Tensor) -> Tensor:
        found = Evaluation(state.log_likelihood, state.log_prior, state.gradient)
        return first_step(target, metric, state.position, found, state.normal(90, state.position), step, scheme)

    return find


def adapted_after(method: Chains, target: Density, new: ChainState, old: ChainState) -> ChainState:
    """The new state with what its transition taught, in warm-up."""
    if not method.adapt or not method.warming(old):  # type: ignore[attr-defined]
        return new
    find = _found(method, target, new) if method.step_size is None else None  # type: ignore[attr-defined]
    changed = adaptation.update(
        old.adaptation, warmup_of(method), int(old.step), new.position, new.gradient, new.statistics["acceptance"], find
    )
    return new._replace(adaptation=changed)


def energy(target: Density, adapted: Adaptation, point: Point) -> Tensor:
    """H = −log π(q) + ½pᵀM⁻¹p: `[chains]`, float64; infinite where it cannot be computed."""
    found = adapted.metric.kinetic(point.momentum) - target.value(point.log_likelihood, point.log_prior)
    return found.nan_to_num(nan=torch.inf)


def divergent(gain: Tensor) -> Tensor:
    """1 where a trajectory gained more than `DIVERGENT` nats of energy."""
    return (gain < -DIVERGENT).double()


def chosen(state: ChainState, end: Point, gain: Tensor, level: Tensor) -> tuple[ChainState, Tensor]:
    """The end of the trajectory where log u < H − H*, else where it started; and the probabilities of acceptance."""
    accept = level < gain
    row = accept.unsqueeze(-1)
    return state._replace(
        position=torch.where(row, end.position, state.position),
        gradient=torch.where(row, end.gradient, state.gradient),
        log_likelihood=torch.where(accept, end.log_likelihood, state.log_likelihood),
        log_prior=torch.where(accept, end.log_prior, state.log_prior),
    ), gain.clamp(max=0).exp()


__all__ = ["HMC", "adapted_after", "begin_adapting", "check_adapting", "chosen", "divergent", "energy", "warmup_of"]
