"""Elliptical slice sampling: moves along ellipses through a draw from a Gaussian prior, without anything to tune."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, ModelDensity
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.engine.method import Run
from plausible.methods.chains.base import STATISTICS, Chains, ChainState

SHRINKAGES = 100  # after so many the bracket has closed: the chain stays where it is
PROBES = (0.0, 1.0, -2.0, 5.0)  # points at which the prior's slope must lie on one line


class Ellipse(NamedTuple):
    """The prior's means and standard deviations: `[P]` each."""

    centre: Tensor
    scale: Tensor


@register
@dataclass(frozen=True)
class EllipticalSlice(Chains):
    """w' = μ + (w − μ) cos θ + (ν − μ) sin θ, ν ~ N(μ, Σ) the prior, θ from the slice {log p(D | w') > log p(D | w) + log u}

    Slice sampling on the ellipse through the current weights and a draw from a Gaussian prior (Murray, Adams & MacKay
    2010).

    Needs independent Gaussian priors of any mean and scale, and no gradients; nothing is adapted, and every transition moves.
    Statistics: `step_size` is |θ|, `leapfrogs` the likelihoods evaluated, `acceptance` one over them. Cost: about log₂ of how
    much narrower than the prior the likelihood is, in evaluations; chains that are done wait for the slowest.
    """

    name: ClassVar[str] = "elliptical-slice"

    def prepare(self, model: Model, run: Run[Any]) -> ModelDensity:
        """Refuse priors that are not Gaussian before anything is computed."""
        prepared = super().prepare(model, run)
        if prepared.hierarchy is None and getattr(model.prior, "precision", None) is None:
            gaussian_prior(model)
        return prepared

    def begin(self, target: Density, state: ChainState) -> ChainState:
        return state._replace(
            gradient=torch.zeros_like(state.position), adaptation=prior_of(target), statistics=state.no_statistics()
        )

    def transition(self, target: Density, state: ChainState) -> ChainState:
        centre, scale = state.adaptation if target.precision is None else prior_of(target)
        away = state.position - centre
        drawn = scale * state.normal(0, state.position)
        blank = torch.zeros_like(state.log_likelihood)
        level = target.value(state.log_likelihood, blank) + state.uniform(1, blank).log()
        angle = 2 * math.pi * state.uniform(2, blank)
        low, high = angle - 2 * math.pi, angle
        position, likelihood, prior = state.position, state.log_likelihood, state.log_prior
        moved, tried, searching = blank, blank, torch.ones_like(blank, dtype=torch.bool)
        for i in range(SHRINKAGES):
            turn = angle.unsqueeze(-1)
            proposal = centre + away * turn.cos().to(away.dtype) + drawn * turn.sin().to(away.dtype)
            there = target.densities(proposal)
            tried = tried + searching
            taken = searching & (target.value(there[0], blank) > level) & torch.isfinite(there[1])
            position = torch.where(taken.unsqueeze(-1), proposal, position)
            likelihood, prior = (torch.where(taken, *pair) for pair in zip(there, (likelihood, prior)))
            moved = torch.where(taken, angle, moved)
            searching = searching & ~taken
            if not bool(searching.any()):
                break
            # the bracket always holds θ = 0, where the chain is: the search cannot fail, and the law is left invariant
            low, high = torch.where(angle < 0, angle, low), torch.where(angle < 0, high, angle)
            angle = low + (high - low) * state.uniform(3 + i, blank)
        statistics = dict(zip(STATISTICS, (1 / tried, blank, moved.abs(), tried, -target.value(likelihood, prior))))
        return state._replace(position=position, log_likelihood=likelihood, log_prior=prior, statistics=statistics)

    @classmethod
    def conforming(cls) -> EllipticalSlice:
        # Many chains, as each of them mixes slowly
        return cls(draws=30, chains=256, warmup=40)


def prior_of(target: Density) -> Ellipse:
    """Means and scales of the Gaussian prior of a target: that of its model, or centred ones of the precisions it is bound to."""
    if target.precision is not None:
        scale = target.precision.to(target.dtype).rsqrt()
        centre = torch.zeros_like(scale)
    elif isinstance(target, ModelDensity):
        centre, scale = (torch.cat([part[name].reshape(-1) for name in target.like]) for part in gaussian_prior(target.model))
    else:
        raise ValueError(
            "EllipticalSlice: the target must say its Gaussian prior; bind the precisions: target.bound(precision=torch.ones(P))"
        )
    temperature = target.model.temperature if isinstance(target, ModelDensity) else 1.0
    return Ellipse(centre.to(target.dtype), (scale * math.sqrt(temperature)).to(target.dtype))


OTHERWISE = "or use NUTS or HMC, which take any"


def gaussian_prior(
    model: Model, who: str = "EllipticalSlice", otherwise: str = OTHERWISE
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """μ and σ of each random weight's prior, whatever it is made of; ValueError where it is not Gaussian.

    A density is Gaussian where its slope −(w − μ)/σ² is a falling line: the slopes at four points say so, and what μ and σ are.
    """
    centres, scales = {}, {}
    for name in model.random:
        like = model.initial[name].double()
        slopes = []
        for probe in PROBES:
            leaf = torch.full_like(like, probe).requires_grad_()
            with torch.enable_grad():
                try:
                    # adding 0·w: a flat prior has no graph of its own
                    total = model.prior.elementwise(name, leaf).sum() + 0 * leaf.sum()
                except (NotImplementedError, ValueError, TypeError):
                    raise _refusal(model, name, "which has no density for single weights", who, otherwise) from None
                slopes.append(torch.autograd.grad(total, leaf)[0])
        precision = slopes[0] - slopes[1]
        straight = all(
            torch.allclose(slope, slopes[0] - probe * precision, rtol=1e-9, atol=1e-12) for probe, slope in zip(PROBES, slopes)
        )
        if not straight or not bool((precision > 0).all()):
            raise _refusal(model, name, "which is not Gaussian", who, otherwise)
        centres[name], scales[name] = slopes[0] / precision, precision.rsqrt()
    return centres, scales


def _refusal(model: Model, name: str, why: str, who: str, otherwise: str) -> ValueError:
    return ValueError(
        f"{who}: the prior of {name!r} is {model.prior.rule(name)}, {why}; give every weight a Gaussian prior, such as "
        f"priors.Gaussian(scale=1.0), {otherwise}"
    )
