"""Pruning: the weights that say least are set to 0, in every draw.

A weight whose posterior is wide beside its mean can be left out at little cost (Graves 2011; Blundell et al. 2015, §5.1). What
is left out is said by one of three criteria of its mean μ and scale σ:

    snr          |μ|/σ                    the smallest go first
    magnitude    |μ|                      the smallest go first; needs no scales
    log_alpha    log σ² − log μ²          the largest go first: the order of snr, on the scale of Molchanov et al. (2017)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from plausible.core import weights as tree
from plausible.core.networks import Where, choose
from plausible.core.weights import Weights

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior

Criterion = Literal["snr", "magnitude", "log_alpha"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
NetworkMoments = tuple[Weights, Weights | None]
AnyPosterior = TypeVar("AnyPosterior", bound="Posterior")


def prune(
    posterior: AnyPosterior,
    fraction: float | None = None,
    *,
    threshold: float | None = None,
    by: Criterion = "snr",
    where: Where = None,
    per_layer: bool = False,
) -> AnyPosterior:
    """w_i = 0 in every draw for the weights that come last by `by`: a posterior of the same kind, with `masks`.

    fraction: the share of weights that are 0 afterwards, those that were pruned earlier among them.
    threshold: prune all with snr or magnitude below it, or log_alpha above it; d decibels are 10 ** (d / 20).
    by: "snr", "magnitude" or "log_alpha".
    where: the weights to choose from: None those of two axes or more (as Blundell et al. count them), "all", patterns of names,
        or a predicate of the name. The likelihood's own weights are never pruned.
    per_layer: the fraction holds in each weight tensor, and not only over all of them.

    Means and scales are those of the posterior; of stored draws, the mean and standard deviation over the draws of a chain. Each
    chain and each part of a mixture is pruned by itself, since their weights need not mean the same. Cost: a sort.
    """
    rule = _Rule(fraction, threshold, by, per_layer)
    if posterior.parts:
        pruned, settings = copy.copy(posterior), {"by": by, "where": where, "per_layer": per_layer}
        pruned.parts = [prune(part, fraction, threshold=threshold, **settings) for part in posterior.parts]  # type: ignore[arg-type]
        pruned.log_evidence = None
        return pruned
    networks = posterior.networks()
    names = choose_weights(posterior, where)
    old = tree.to(posterior.masks, "cpu")
    before = [old] if len(networks) == 1 else [tree.index(old, k) for k in range(len(networks))]
    masks = []
    for moments, earlier in zip(networks, before):
        values = _scores(moments, names, by)
        # log α of mean 0 is infinite and cannot be ranked below all: its order is that of the ratio
        order = _scores(moments, names, "snr") if by == "log_alpha" else values
        masks.append(rule.masks(values, order, earlier))
    return posterior.masked(tree.to(masks[0] if len(masks) == 1 else tree.stack(masks), posterior.device))


def scores(posterior: Posterior, by: Criterion = "snr", where: Where = None) -> Weights:
    """The criterion of each weight, by name, in float64 on the CPU; chains and parts stacked on a leading axis.

    A weight of mean 0, such as a pruned one, has no signal: snr 0 and log_alpha ∞.
    """
    _check_criterion(by)
    names = choose_weights(posterior, where)
    return _of_each(posterior, lambda moments: _scores(moments, names, by))


def means(posterior: Posterior) -> Weights:
    """μ of each random weight, by name; chains and parts stacked on a leading axis."""
    return _of_each(posterior, lambda moments: moments[0])


def zeroed(weights: Weights, masks: Weights) -> Weights:
    """Weights, or draws of them on a leading axis, with 0 where a mask is False."""
    if not masks:
        return weights
    return {name: torch.where(masks[name], w, 0.0) if name in masks else w for name, w in weights.items()}


def unpruned(values: Weights, masks: Weights) -> Weights:
    """What belongs to weights that were not pruned: [kept] for those that have a mask."""
    return {name: value[masks[name]] if name in masks else value for name, value in values.items()}


def _of_each(posterior: Posterior, function: Callable[[NetworkMoments], Weights]) -> Weights:
    """What the means and scales of each network give, stacked as its masks are."""
    if posterior.parts:
        return tree.stack([_of_each(part, function) for part in posterior.parts])
    values = [function(moments) for moments in posterior.networks()]
    return values[0] if len(values) == 1 else tree.stack(values)


@dataclass(frozen=True)
class _Rule:
    """What is kept, checked."""

    fraction: float | None
    threshold: float | None
    by: Criterion
    per_layer: bool

    def __post_init__(self) -> None:
        _check_criterion(self.by)
        if (self.fraction is None) == (self.threshold is None):
            given = "neither" if self.fraction is None else "both"
            raise ValueError(f"give either fraction or threshold, got {given}; fraction=0.75 sets 75 % of the weights to 0")
        if self.fraction is not None:
            check_fraction("fraction", self.fraction)
            return
        value = self.threshold
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"threshold must be a finite number, got {value!r}")
        if self.by != "log_alpha" and value < 0:
            raise ValueError(
                f"threshold of {self.by} must not be negative, got {value!r}; d decibels are the ratio 10 ** (d / 20)"
            )
        if self.per_layer:
            raise ValueError("per_layer goes with fraction: a threshold is the same for every layer anyway")

    def masks(self, values: Weights, order: Weights, before: Mapping[str, Tensor]) -> Weights:
        """True for what is kept, of one network: `values` of the criterion, `order` from the first to go, what was kept so far."""
        kept = {name: before.get(name, torch.ones_like(value, dtype=torch.bool)) for name, value in values.items()}
        if self.threshold is not None:
            worse = torch.gt if self.by == "log_alpha" else torch.lt
            left = {name: kept[name] & ~worse(value, self.threshold) for name, value in values.items()}
        else:
            # what was pruned before goes first, so that fractions count from the whole
            ranks = {name: torch.where(kept[name], value, -1.0) for name, value in order.items()}
            groups = [{name: rank} for name, rank in ranks.items()] if self.per_layer else [ranks]
            left = {name: kept[name] & mask for group in groups for name, mask in self._best(group).items()}
        return {**before, **left}

    def _best(self, ranks: Weights) -> Weights:
        """All but the `fraction` of the lowest ranks, ties in order."""
        flat = tree.flatten(ranks)
        mask = torch.ones_like(flat, dtype=torch.bool)
        assert self.fraction is not None
        mask[flat.argsort(stable=True)[: round(self.fraction * len(flat))]] = False
        return tree.unflatten(mask, ranks)


def _scores(moments: NetworkMoments, names: Iterable[str], by: Criterion) -> Weights:
    """The criterion of one network's weights."""
    means, scales = moments
    if scales is None and by != "magnitude":
        raise ValueError(
            f"by={by!r} compares each weight with its spread, and this posterior has one draw of each weight and no spread: "
            "use by='magnitude', or a method with a distribution over weights"
        )
    values = {}
    for name in names:
        mean = means[name].detach().cpu().double()
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"the mean of weight {name!r} contains NaN or infinity: it cannot be ranked")
        if by == "magnitude":
            values[name] = mean.abs()
            continue
        assert scales is not None
        scale = scales[name].detach().cpu().double()
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise ValueError(f"the scale of weight {name!r} contains NaN, infinity or negative numbers: it cannot be ranked")
        # 0/0 for a weight that was pruned: it has no signal
        ratio = torch.where(mean == 0, 0.0, mean.abs() / scale)
        values[name] = ratio if by == "snr" else -2 * ratio.log()
    return values


def choose_weights(posterior: Posterior, where: Where) -> tuple[str, ...]:
    """The names of the weights that may be pruned."""
    initial = posterior.model.initial
    candidates = {name: initial[name] for name in posterior.model.random if not name.startswith("likelihood.")}
    if isinstance(where, str) and where == "last":
        raise ValueError("where='last' is for fit; name the weights to prune by patterns, such as where='2.weight'")
    if where is None:
        names = tuple(name for name, weight in candidates.items() if weight.ndim > 1)
        if not names:
            raise ValueError(
                f"no random weight has two axes or more ({', '.join(candidates)}): pass where='all' or patterns to prune others"
            )
        return names
    return choose(candidates, where, (), "selects no weight to prune")


def _check_criterion(by: Any) -> None:
    if by not in CRITERIA:
        raise ValueError(f"by must be one of {', '.join(map(repr, CRITERIA))}, got {by!r}")


def check_fraction(name: str, value: Any) -> None:
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= number <= 1:
        hint = f"; {number:g} % is {number / 100:g}" if 1 < number <= 100 else ""
        raise ValueError(f"{name} must be a number from 0 (prune nothing) to 1 (prune everything), got {value!r}{hint}")
