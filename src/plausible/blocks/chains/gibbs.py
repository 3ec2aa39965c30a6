"""Gibbs steps for the precisions of Gaussian priors: between two transitions of the weights, exactly and for all chains at once.

    τ_g | w ~ Gamma(a + n_g/2, b + ½ Σ_{i ∈ g} w_i²),        w | τ, D by the kernel under N(0, 1/τ)

(Neal 1996, Bayesian learning for neural networks, chapter 3.) Alternating both leaves p(w, τ | D) invariant. `Hierarchy` is
what is known of a prior for that: which weight has which precision. Cost: one pass over `[chains, P]` numbers, no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import scipy.special
import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, gaussian
from plausible.core import random
from plausible.core.priors import Gaussian, Hierarchical, Prior
from plausible.core.priors.composed import Leaf, leaves
from plausible.core.weights import Weights, flatten, select, unflatten
from plausible.core.words import log

if TYPE_CHECKING:
    from plausible.methods.chains.base import ChainState


STREAM = 0x6769  # what keys of this file are folded with
ATTEMPTS = 6
RANGE = (1e-30, 1e30)  # of precisions: what float32 can hold, with room for factors


@dataclass(frozen=True)
class Hierarchy:
    """Which of P weights have which of G unknown precisions, and the known precisions of the others.

    Weight i has precision `factor[i]·τ[label[i]]`, or `fixed[i]` where `label[i]` is G. `shape` and `rate` `[G]` are those of
    τ given the weights that do not move: the prior's, and what points of the same groups add.
    """

    names: tuple[str, ...]
    shape: Tensor
    rate: Tensor
    label: Tensor
    factor: Tensor
    fixed: Tensor

    @classmethod
    def of(cls, prior: Prior, weights: Mapping[str, Tensor], moving: tuple[str, ...] | None = None) -> Hierarchy | None:
        """From a prior over these weights, of which those in `moving` are sampled (None: all); None where there is nothing to do.

        That is where no part of the prior is `Hierarchical` with `sampled`, or where another part is neither that nor a centred
        Gaussian, which is said in the log: chains then move under the integrated density.
        """
        parts = [leaf for leaf in leaves(prior, weights) if set(leaf.factors) & set(moving or weights)]
        if not any(isinstance(leaf.prior, Hierarchical) and leaf.prior.sampled for leaf in parts):
            return None
        for leaf in parts:
            # a flat prior has precision 0, which is no Gaussian
            usable = leaf.prior.sampled if isinstance(leaf.prior, Hierarchical) else leaf.prior.precision
            if not usable or not isinstance(leaf.prior, Hierarchical | Gaussian):
                log.info(
                    "precisions are integrated out and not sampled: the prior of %s is %r, and Gibbs steps need centred Gaussians "
                    "beside hierarchical ones",
                    next(iter(leaf.factors)),
                    leaf.prior,
                )
                return None
        return cls._made(parts, weights, tuple(weights) if moving is None else moving)

    @classmethod
    def _made(cls, parts: list[Leaf], weights: Mapping[str, Tensor], moving: tuple[str, ...]) -> Hierarchy:
        names, shape, rate = list[str](), list[float](), list[float]()
        label, factor, fixed = Weights(), Weights(), Weights()
        for leaf in parts:
            members = {name: weights[name] for name in leaf.factors}
            blank = {name: torch.ones_like(value, dtype=torch.float64) for name, value in members.items()}
            factor |= {name: value * leaf.factors[name] for name, value in blank.items()}
            if not isinstance(leaf.prior, Hierarchical):
                label |= {name: torch.full_like(value, -1) for name, value in blank.items()}
                fixed |= {name: factor[name] * (leaf.prior.precision or 0.0) for name in members}
                continue
            groups, labels = leaf.prior.labels(members)
            label |= {name: value.double() + len(names) for name, value in labels.items()}
            fixed |= {name: torch.zeros_like(value) for name, value in blank.items()}
            names += [f"{leaf.path} {group}" if group in names else group for group in groups]
            shape += [leaf.prior.shape] * len(groups)
            rate += [leaf.prior.rate] * len(groups)
        label = {name: torch.where(value < 0, len(names), value).long() for name, value in label.items()}
        still = {name: value.double() for name, value in weights.items() if name in label and name not in moving}
        of_moving = [flatten(select(each, moving)) for each in (label, factor, fixed)]
        shapes, rates = (of_moving[1].new_tensor(values) for values in (shape, rate))
        if still:  # points of a group are seen members of it
            groups_of, factors = (flatten(select(each, still)) for each in (label, factor))
            count, square = _by_group(flatten(still)[None], groups_of, factors, len(names))
            shapes, rates = shapes + 0.5 * count, rates + 0.5 * square[0]
        return cls(tuple(names), shapes, rates, *of_moving)

    # -----------------------------------------------------------------------------------------------------------------
    def conditional(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes `[G]` and rates `[chains, G]` of the precisions given the weights `[chains, P]`, in float64."""
        count, square = _by_group(position.double(), self.label, self.factor, len(self.names))
        return self.shape + 0.5 * count, self.rate + 0.5 * square

    def draw(self, position: Tensor, key: Tensor, counter: Tensor | int) -> dict[str, Tensor]:
        """Precisions given the weights, `[chains]` each by the name of their group: a function of key and counter."""
        shape, rate = self.conditional(position)
        tau = gamma(shape.expand_as(rate), random.fold(key, STREAM), counter) / rate
        return dict(zip(self.names, tau.clamp(*RANGE).unbind(1)))

    def vector(self, precisions: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The precision of every weight: `[chains, P]`."""
        each = torch.stack([precisions[name] for name in self.names], 1)
        # one more column for weights of known precision: their label is G
        wide = torch.cat([each, torch.zeros_like(each[:, :1])], 1)
        return (wide[:, self.label] * self.factor + self.fixed).to(dtype)

    def bound(self, density: Density, precisions: Mapping[str, Tensor]) -> Density:
        return density.bound(precision=self.vector(precisions, density.dtype))

    def step(self, density: Density, state: ChainState) -> ChainState:
        """The state with new precisions, drawn given its weights, and with the log prior and the gradient under them."""
        drawn = self.draw(state.position, state.key, state.step)
        before, after = (self.vector(each, density.dtype) for each in (state.precisions, drawn))
        return state._replace(
            precisions=drawn,
            log_prior=gaussian(state.position, after),
            # ∇ of −½τw² changes by (τ − τ')w: no new pass over the data
            gradient=state.gradient + (before - after) * state.position,
        )


def sample_given(
    prior: Prior, weights: Mapping[str, Tensor], moving: tuple[str, ...], generator: torch.Generator, draws: int
) -> Weights:
    """w_moving ~ p(w_moving | w_others): draws of some weights given the others at their values, on a leading axis.

    Points of a hierarchical group are seen members of it: τ_g | w_others ~ Gamma(a + n/2, b + ½ Σ w²) over them, and weights
    given τ. Where weights are independent the others say nothing. Other priors that tie a moving weight to a point are refused.
    """
    drawn: Weights = {}
    for leaf in leaves(prior, weights):
        wanted = {name: weights[name] for name in leaf.factors if name in moving}
        if not wanted:
            continue
        if isinstance(leaf.prior, Hierarchical):
            known = Hierarchy._made([leaf], weights, tuple(wanted))
            shape = known.shape.expand(draws, -1).to(generator.device)
            tau = torch._standard_gamma(shape, generator=generator).to(known.rate.device) / known.rate
            noise = torch.randn(draws, len(known.label), generator=generator, dtype=torch.float64, device=generator.device)
            scale = known.vector(dict(zip(known.names, tau.clamp(*RANGE).unbind(1))), torch.float64).rsqrt()
            values = unflatten(scale * noise.to(scale.device), wanted)
            drawn |= {name: values[name].to(weight.dtype) for name, weight in wanted.items()}
            continue
        for name, point in ((n, p) for n in wanted for p in leaf.factors if p not in wanted):
            if not (rule := leaf.prior.rule(name)).independent and rule == leaf.prior.rule(point):
                raise ValueError(
                    f"the prior ties {name} to {point}, which where= holds at its value, and cannot be drawn from given it: choose "
                    "both, or a prior of independent weights"
                )
        values = leaf.prior.sample(wanted, generator, draws)
        drawn |= {name: value / leaf.factors[name] ** 0.5 for name, value in values.items()}
    return {name: drawn[name] for name in moving}


def _by_group(position: Tensor, label: Tensor, factor: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """How many weights each group has, `[G]`, and Σ factor·w², `[chains, G]`."""
    # the last column collects the weights without a group, and is dropped
    empty = position.new_zeros(len(position), groups + 1)
    square = empty.index_add(1, label, position.square() * factor)[:, :-1]
    return torch.bincount(label, minlength=groups + 1)[:-1].double(), square


def gamma(shape: Tensor, key: Tensor, counter: Tensor | int) -> Tensor:
    """Gamma(shape, 1) variates for any shapes: float64, a function of key and counter.

    Marsaglia and Tsang (2000): dv with v = (1 + x/√(9d))³, d = a − ⅓ and x ~ N(0, 1) is accepted if log u < ½x² + d − dv + d
    log v; a shape below 1 is raised by 1 and the variate multiplied by U^(1/a). Of `ATTEMPTS` proposals made at once the first
    that is accepted counts. With probability below 0.05^ATTEMPTS there is none; the distribution function is then inverted at
    another uniform number, so that the law is exact whatever happened before.
    """
    raised = torch.where(shape < 1, shape + 1, shape).double()
    d = raised - 1 / 3
    # a fixed number of proposals: loops until acceptance cannot be a function of key and counter
    several = raised.new_empty(ATTEMPTS, *shape.shape)
    normal = random.normal(random.fold(key, 0), counter, several)
    uniform = random.uniform(random.fold(key, 1), counter, several)
    v = (1 + normal / (9 * d).sqrt()).clamp(min=0).pow(3)
    accepted = (v > 0) & (uniform.log() < 0.5 * normal.square() + d - d * v + d * v.clamp(min=1e-300).log())
    first = accepted.int().argmax(0, keepdim=True)
    variate = (d * v).gather(0, first)[0]
    if not bool(accepted.any(0).all()):
        level = random.uniform(random.fold(key, 2), counter, raised)
        other = torch.as_tensor(scipy.special.gammaincinv(raised.cpu().numpy(), level.cpu().numpy())).to(raised)
        variate = torch.where(accepted.any(0), variate, other)
    if bool((shape < 1).any()):
        # U^(1/a) in logarithms, which for small shapes would underflow
        power = random.uniform(random.fold(key, 3), counter, raised).log() / shape
        variate = torch.where(shape < 1, variate * power.exp(), variate)
    return variate
