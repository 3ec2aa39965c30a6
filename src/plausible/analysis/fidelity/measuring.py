"""`fidelity`: a posterior beside a reference, measure by measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plausible.analysis import metrics
from plausible.analysis.fidelity import distances, regions
from plausible.analysis.fidelity.result import Fidelity, Measure, Region
from plausible.analysis.fidelity.sides import CLASSES, FRESH, Side, divide, jackknife, stored
from plausible.blocks.chains import stein
from plausible.blocks.chains.density import ModelDensity
from plausible.core.data import ArrayData, Data, as_data, num_rows
from plausible.core.weights import Weights
from plausible.core.words import log
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior

STEIN = 1000
"""Most draws of weights that the Stein discrepancy looks at."""
COUNTS = 400
"""Counts up to which the total variation is a sum over all of them."""
_SMALL = 1e-12


def fidelity(
    posterior: Posterior,
    reference: Posterior,
    x: Any = None,
    y: Any = None,
    *,
    data: Any = None,
    regions: Mapping[str, Any] | None = None,
    draws: int | None = None,
    floor: bool = True,
    seed: int = 0,
) -> Fidelity:
    """How near an approximation is to a reference, such as long chains of `NUTS`, in predictions, functions and weights.

    agreement        1/N Σ 1[argmax p = argmax q]: share of the inputs with the same most probable class. Classes only.
    total_variation  1/N Σ ½ ∫ |p(y | x) − q(y | x)| dy, from 0 to 1. Exact for classes; numbers by distribution functions on a
                     grid, each output on its own.
    wasserstein      1/N Σ W₂(f(x), f′(x)) / sd f′(x): how far draws of f(x) must be moved to become the reference's, in its
                     standard deviations, input by input, exact for the draws; closed forms where f is Gaussian. A point at the
                     reference's mean has 1. Logits are taken less their mean over classes, which predictions do not see.
    stein            √KSD² · ℓ/√P of weight draws by the gradients of the reference's log joint (Gorham and Mackey 2017), ℓ the
                     median distance between its draws; in units of a point at a mode, which has 1. Needs `data`. It looks at
                     weights, not functions, and is blind to modes that are missing.
    log_likelihood   mean log p(y | x) less the reference's, in nats a row. Needs `y`.
    epistemic        in each region, the mean of Var E[y | f] over the reference's; below 1 is too sure.

    Every number comes with its Monte Carlo standard error, by the jackknife over blocks of draws, and with a `floor`: what two
    halves of the reference (half its chains and the others) score against each other; of the Stein discrepancy, one standard
    error above that of the reference's own draws. Being at the floor is being as good as the reference.

    Cost: S·N·outputs numbers of both posteriors in memory; sorting them; for numbers, about 150 distribution functions of them.
    The Stein discrepancy takes up to 1,000 gradients over the data.

    Args:
        posterior: the approximation.
        reference: what it is held against, a posterior of the same network, likelihood and prior.
        x: inputs [N, …] at which predictions and functions are compared. Default: the inputs of `data`.
        y: targets at x, for the log-likelihood.
        data: the training data as they were given to `fit`: for the Stein discrepancy and for finding the regions.
        regions: inputs by name, such as {"between": x_gap}. Default: found from `data` where inputs are arrays, see
            `plausible.fidelity.regions.find`.
        draws: how many of either posterior. Default: all that are stored, and 1,000 of those that are drawn anew; closed forms
            are used where there are any.
        floor: whether to compute the noise floor, which is half of the work.
        seed: of draws and regions.

    """
    _check(posterior, reference)
    rows = None
    if data is not None:
        first = next(iter(reference.model.initial.values()))
        rows = as_data(data, dtype=first.dtype, device=first.device)
    if x is None and y is not None:
        raise ValueError("y was given without x: pass the inputs that these targets belong to")
    places = regions_of(regions, rows, seed)
    if x is None:
        x = rows.all().x if isinstance(rows, ArrayData) else None
    if x is None:
        raise ValueError("x is missing: pass the inputs to compare at, or data=(x, y), whose inputs are taken then")
    one, two = Side.of(posterior, x, draws, seed, "posterior"), Side.of(reference, x, draws, seed, "reference")
    chains = isinstance(reference, DrawsPosterior) and reference.chains > 1
    # Chains that disagree are no truth, and everything looks as good as they are.
    if chains and (ratio := reference.diagnostics(x).get("rhat", math.nan)) > 1.05:
        noisy = "it is no truth to be held against, and its own noise, the floor, is large; run it longer"
        log.warning("the chains of the reference do not agree on f(x) (R̂ %.2f): %s", ratio, noisy)
    parts = _compared(one, two, y)
    split = two.halves() if floor else None
    floors = _compared(*split, y) if split is not None else {}
    exact = floor and two.closed_form  # no draws, no noise

    def measure(name: str, plain: Measure) -> Measure:
        level = plain.ideal if exact else floors[name].value if name in floors else None
        return plain if math.isnan(plain.value) else replace(plain, floor=level)

    looked = {}
    for name, at in places.items():
        mine, truth = (Side.of(side, at, draws, seed, f"regions[{name!r}]") for side in (posterior, reference))
        looked[name] = _region(mine, truth, truth.halves() if floor else None, exact)
    return Fidelity(
        **{name: measure(name, plain) for name, plain in parts.items()},
        stein=_stein(posterior, reference, rows, draws, floor, seed),
        epistemic=looked,
        inputs=one.predictive.num_inputs,
        draws=None if one.closed_form else len(one.blocks),
        reference_draws=None if two.closed_form else len(two.blocks),
        posterior=posterior.method_name,
        reference=reference.method_name,
    )


def _compared(one: Side, two: Side, y: Any) -> dict[str, Measure]:
    kind = one.predictive.likelihood.kind
    measures: dict[str, Measure] = {}
    if kind in CLASSES:
        measures |= _classes(one, two, kind == "binary")
    else:
        measures["agreement"] = Measure.missing("numbers have no most probable class", 1.0)
        measures["total_variation"] = _numbers(one, two)
    measures["wasserstein"] = _wasserstein(one, two)
    if y is None:
        measures["log_likelihood"] = Measure.missing("needs y, the targets at x")
    else:
        p, q = one.log_densities(y), two.log_densities(y)
        gain = lambda i, j: float((p.log_mean_exp(i) - q.log_mean_exp(j)).mean())  # noqa: E731
        measures["log_likelihood"] = Measure(*jackknife(gain, one.num_blocks, two.num_blocks))
    return measures


def _classes(one: Side, two: Side, binary: bool) -> dict[str, Measure]:
    p, q = one.expectations(), two.expectations()

    def over(metric: Any) -> tuple[float, float]:
        def statistic(i: int | None, j: int | None) -> float:
            pair = [side.mean(k)[0].clamp(0, 1) for side, k in ((p, i), (q, j))]
            if binary:
                pair = [torch.stack([1 - probs, probs], -1) for probs in pair]
            return metric(*(probs / probs.sum(-1, keepdim=True) for probs in pair))

        return jackknife(statistic, one.num_blocks, two.num_blocks)

    return {
        "agreement": Measure(*over(metrics.agreement), ideal=1.0),
        "total_variation": Measure(*over(metrics.total_variation)),
    }


def _numbers(one: Side, two: Side) -> Measure:
    # Sums over all counts are exact; a grid of places is for densities, and for counts too large to list.
    places = _whole_numbers(one, two)
    if places is None:
        places = distances.places_between(one.quartiles(), two.quartiles())
    p, q = one.below(places), two.below(places)

    def statistic(i: int | None, j: int | None) -> float:
        return float(distances.total_variation_of_cells(p.mean(i), q.mean(j)).mean())

    return Measure(*jackknife(statistic, one.num_blocks, two.num_blocks))


def _whole_numbers(one: Side, two: Side) -> Tensor | None:
    """0, 1, … up to what either law of counts hardly exceeds, [K, N, …]; None for other laws, and for large counts."""
    if one.predictive.likelihood.kind != "counts":
        return None
    top = torch.stack([side.predictive.quantile(1 - 1e-6).double().cpu() for side in (one, two)]).amax(0)
    if top.max() > COUNTS:
        return None
    return torch.arange(int(top.max()) + 1, dtype=torch.float64).reshape(-1, *[1] * top.ndim).expand(-1, *top.shape)


def _wasserstein(one: Side, two: Side) -> Measure:
    f, g = one.functions(), two.functions()
    spread = g.spread()
    # Where the reference does not move there is no unit to measure the distance in.
    moving = spread > _SMALL * (1 + (g.mean if g.mean is not None else g.draws.mean(0)).abs())  # type: ignore[union-attr]
    if not bool(moving.any()):
        return Measure.missing("the reference has no spread to measure by")

    def statistic(i: int | None, j: int | None) -> float:
        p, q = f.without(i), g.without(j)
        if p.draws is not None and q.draws is not None:
            squared = distances.wasserstein_squared(p.draws, q.draws)
        elif p.draws is None and q.draws is None:
            squared = distances.gaussian_wasserstein_squared(p.mean, p.scale, q.mean, q.scale)  # type: ignore[arg-type]
        else:
            drawn, law = (p, q) if p.draws is not None else (q, p)
            squared = distances.wasserstein_squared_to_gaussian(drawn.draws, law.mean, law.scale)  # type: ignore[arg-type]
        return float((squared.sqrt() / spread)[moving].mean())

    return Measure(*jackknife(statistic, one.num_blocks, two.num_blocks))


def _region(one: Side, two: Side, halves: tuple[Side, Side] | None, exact: bool) -> Region:
    def ratio(p: Side, q: Side) -> tuple[float, float, tuple[float, float]]:
        a, b = p.expectations(), q.expectations()

        def level(side: Any, closed: bool, without: int | None = None) -> float:
            first, second = side.mean(without)
            # The squares are around the mean of all blocks, which moves when one is left out.
            each = second if closed else second - (first - side.mean()[0]).square()
            return float((each.sum(-1) if p.predictive.likelihood.kind == "classes" else each).mean())

        levels = level(a, p.closed_form), level(b, q.closed_form)
        if not levels[1] > 0:
            return *levels, (math.nan, 0.0)
        share = lambda i, j: level(a, p.closed_form, i) / level(b, q.closed_form, j)  # noqa: E731
        return *levels, jackknife(share, p.num_blocks, q.num_blocks)

    mine, truth, (value, error) = ratio(one, two)
    against = Measure.missing("the reference has no epistemic variance there", 1.0)
    if not math.isnan(value):
        floor = 1.0 if exact else None if halves is None else ratio(*halves)[2][0]
        against = Measure(value, error, floor, 1.0)
    return Region(one.predictive.num_inputs, mine, truth, against)


def _stein(posterior: Posterior, reference: Posterior, data: Data | None, draws: int | None, floor: bool, seed: int) -> Measure:
    if data is None:
        return Measure.missing("needs data, the training data")
    target = ModelDensity(reference.model, data, 100)
    try:
        mine, blocks = _weight_draws(posterior, target, draws, seed)
    except (TypeError, ValueError, NotImplementedError, KeyError) as error:
        return Measure.missing(f"posterior has no draws of the reference's weights: {error}")
    try:
        truth, others = _weight_draws(reference, target, draws, seed)
    except (TypeError, ValueError, NotImplementedError, KeyError):
        truth, others = mine, blocks
    # The length comes from the reference, so that all approximations of it are measured by the same kernel.
    length = stein.median_length(truth, others) or stein.median_length(mine, blocks)
    if not length:
        return Measure.missing("neither posterior has two different draws to take a length from")
    level = sum(_discrepancy(target, truth, others, length)) if floor and truth is not mine else None
    return Measure(*_discrepancy(target, mine, blocks, length), level)


def _discrepancy(target: ModelDensity, draws: Tensor, blocks: Tensor, length: float) -> tuple[float, float]:
    """√KSD² · ℓ/√P, and by how much it grows where KSD² is one standard error larger."""
    scores = torch.cat([target.evaluate(part.to(target.device, target.dtype)).gradient.cpu() for part in draws.split(100)])
    squared, error = stein.discrepancy(stein.stein_matrix(draws, scores, length), blocks)
    unit = length / math.sqrt(draws.shape[1])
    value = math.sqrt(max(squared, 0.0)) * unit
    return value, math.sqrt(max(squared, 0.0) + error) * unit - value


def _weight_draws(posterior: Posterior, target: ModelDensity, draws: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Positions [n, P] and their blocks: at most `STEIN`, evenly spaced along the chains."""
    wanted = draws if draws is not None or stored(posterior) else FRESH
    named: Weights = posterior.weights(wanted, seed)
    for name, like in target.like.items():
        if name not in named:
            raise ValueError(f"{name!r} is missing")
        if named[name].shape[1:] != like.shape:
            raise ValueError(f"{name!r} has shape {list(named[name].shape[1:])}, expected {list(like.shape)}")
    positions = target.flatten(named).detach().cpu()
    _, blocks = divide(len(positions), getattr(posterior, "chains", 1) if wanted is None else 1)
    if len(positions) > STEIN:
        # In the order of blocks, so that every chain gives its share.
        kept = blocks.argsort(stable=True)[torch.linspace(0, len(positions) - 1, STEIN).long()]
        positions, blocks = positions[kept], blocks[kept]
    return positions, blocks.unique(return_inverse=True)[1]


def _check(posterior: Any, reference: Any) -> None:
    for name, given in (("posterior", posterior), ("reference", reference)):
        if not isinstance(given, Posterior):
            raise TypeError(f"{name} must be a posterior, as pl.fit returns it, got {type(given).__name__}")
    shapes = [tuple(each.model.output_shape) for each in (posterior, reference)]
    if shapes[0] != shapes[1]:
        both = f"posterior has outputs of shape {shapes[0]} per input, reference {shapes[1]}"
        raise ValueError(f"{both}: compare posteriors of the same network")
    kinds = [each.likelihood.kind for each in (posterior, reference)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"posterior has {kinds[0]} targets ({posterior.likelihood}), reference {kinds[1]} ones ({reference.likelihood}): "
            "compare posteriors with the same likelihood"
        )


def regions_of(asked: Any, data: Data | None, seed: int) -> dict[str, Any]:
    """The regions asked for, or those found in data that are arrays."""
    if asked is not None:
        if not isinstance(asked, dict) or not all(isinstance(name, str) for name in asked):
            raise TypeError(f"regions must be a dictionary from names to inputs, got {type(asked).__name__}")
        if not asked:
            raise ValueError("regions is empty: leave it out, or name at least one, such as {'between': x}")
        return dict(asked)
    inputs = data.all().x if isinstance(data, ArrayData) else None
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim > 1 and num_rows(inputs) > 1:
        return regions.find(inputs.cpu(), seed)
    return {}
