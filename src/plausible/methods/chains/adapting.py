"""What samplers by trajectories share: a step size and masses that adapt, energies, acceptance."""

from __future__ import annotations

import torch
from torch import Tensor

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import Adaptation, Warmup, first_step
from plausible.blocks.chains.density import Density, Evaluation, Point
from plausible.blocks.chains.integrators import Metric, check_metric
from plausible.blocks.chains.trees import DIVERGENT
from plausible.core.serialise import check_number
from plausible.methods.chains.base import Chains, ChainState


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
