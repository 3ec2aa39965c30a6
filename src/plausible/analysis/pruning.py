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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from plausible.core import weights as tree
from plausible.core.networks import Where, choose
from plausible.core.storage import DrawStore, MemoryDraws
from plausible.core.weights import Weights
from plausible.posteriors.base import MixturePosterior, Posterior
from plausible.posteriors.predictive import Predictive

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Criterion = Literal["snr", "magnitude", "log_alpha"]
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
FRACTIONS = (0.0, 0.5, 0.75, 0.95, 0.98)
"""Those of Blundell et al. (2015), Table 2."""

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


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

    fraction: the share of weights that are 0 afterwards, from 0 to 1; ties go in the order of the weights. Weights that were
        pruned earlier count, so that pruning ½ and then ¾ is pruning ¾.
    threshold: instead of a fraction, prune all with snr or magnitude below it, or log_alpha above it. SNR is a ratio here:
        d decibels are `10 ** (d / 20)`.
    by: "snr", "magnitude" or "log_alpha".
    where: the weights to choose from: None those of two axes or more (matrices and kernels, as Blundell et al. count them; no
        biases, no norms), "all", patterns of names, or a predicate of the name. The likelihood's own weights are never pruned.
    per_layer: the fraction holds in each weight tensor, and not only over all of them.

    Means and scales are those of the posterior; of stored draws, the mean and standard deviation over the draws of a chain. Each
    chain and each part of a mixture is pruned by itself, since their weights need not mean the same. Cost: a sort.
    """
    rule = _Rule(fraction, threshold, by, per_layer)
    if isinstance(posterior, MixturePosterior):
        pruned = copy.copy(posterior)
        pruned.parts = [
            prune(p, fraction, threshold=threshold, by=by, where=where, per_layer=per_layer) for p in posterior.parts
        ]
        pruned.log_evidence = None
        return pruned
    moments = posterior._networks()
    names = _names(posterior, where)
    old = tree.to(posterior._masks, "cpu")
    kept = [old] if len(moments) == 1 else [tree.index(old, k) for k in range(len(moments))]
    found = [rule.masks(*_ranked(own, names, by), before) for own, before in zip(moments, kept)]
    return posterior._masked(tree.to(found[0] if len(found) == 1 else tree.stack(found), posterior.device))


def scores(posterior: Posterior, by: Criterion = "snr", where: Where = None) -> Weights:
    """The criterion of each weight, by name, in float64 on the CPU; chains and parts stacked on a leading axis.

    A weight of mean 0, such as a pruned one, has no signal: snr 0 and log_alpha ∞.
    """
    _check_criterion(by)
    names = _names(posterior, where)
    return _of_each(posterior, lambda moments: _scores(moments, names, by))


def means(posterior: Posterior) -> Weights:
    """μ of each random weight, by name; chains and parts stacked on a leading axis."""
    return _of_each(posterior, lambda moments: moments[0])


def _of_each(posterior: Posterior, function: Callable[[tuple[Weights, Weights | None]], Weights]) -> Weights:
    """What the means and scales of each network give, stacked as its masks are."""
    if isinstance(posterior, MixturePosterior):
        return tree.stack([_of_each(part, function) for part in posterior.parts])
    found = [function(moments) for moments in posterior._networks()]
    return found[0] if len(found) == 1 else tree.stack(found)


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
            _check_fraction("fraction", self.fraction)
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
            found = {name: kept[name] & ~worse(value, self.threshold) for name, value in values.items()}
        else:
            ranks = {name: torch.where(kept[name], value, -1.0) for name, value in order.items()}
            groups = [{name: rank} for name, rank in ranks.items()] if self.per_layer else [ranks]
            found = {name: kept[name] & mask for group in groups for name, mask in self._best(group).items()}
        return {**before, **found}

    def _best(self, ranks: Weights) -> Weights:
        """All but the `fraction` of the lowest ranks, ties in order."""
        flat = tree.flatten(ranks)
        mask = torch.ones_like(flat, dtype=torch.bool)
        assert self.fraction is not None
        mask[flat.argsort(stable=True)[: round(self.fraction * len(flat))]] = False
        return tree.unflatten(mask, ranks)


def _scores(moments: tuple[Weights, Weights | None], names: Iterable[str], by: Criterion) -> Weights:
    """The criterion of one network's weights."""
    means, scales = moments
    if scales is None and by != "magnitude":
        raise ValueError(
            f"by={by!r} compares each weight with its spread, and this posterior has one draw of each weight and no spread: "
            "use by='magnitude', or a method with a distribution over weights"
        )
    found = {}
    for name in names:
        mean = means[name].detach().cpu().double()
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"the mean of weight {name!r} contains NaN or infinity: it cannot be ranked")
        if by == "magnitude":
            found[name] = mean.abs()
            continue
        assert scales is not None
        scale = scales[name].detach().cpu().double()
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise ValueError(f"the scale of weight {name!r} contains NaN, infinity or negative numbers: it cannot be ranked")
        ratio = torch.where(mean == 0, 0.0, mean.abs() / scale)
        found[name] = ratio if by == "snr" else -2 * ratio.log()
    return found


def _ranked(moments: tuple[Weights, Weights | None], names: Sequence[str], by: Criterion) -> tuple[Weights, Weights]:
    """The criterion, and numbers of at least 0 in whose order weights go."""
    values = _scores(moments, names, by)
    return values, _scores(moments, names, "snr") if by == "log_alpha" else values


def _names(posterior: Posterior, where: Where) -> tuple[str, ...]:
    """The weights that may be pruned."""
    initial = posterior.model.initial
    own = {name: initial[name] for name in posterior.model.random if not name.startswith("likelihood.")}
    if isinstance(where, str) and where == "last":
        raise ValueError("where='last' is for fit; name the weights to prune by patterns, such as where='2.weight'")
    if where is None:
        names = tuple(name for name, weight in own.items() if weight.ndim > 1)
        if not names:
            raise ValueError(
                f"no random weight has two axes or more ({', '.join(own)}): pass where='all' or patterns to prune others"
            )
        return names
    return choose(own, where, (), "selects no weight to prune")


def _check_criterion(by: Any) -> None:
    if by not in CRITERIA:
        raise ValueError(f"by must be one of {', '.join(map(repr, CRITERIA))}, got {by!r}")


def _check_fraction(name: str, value: Any) -> None:
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= number <= 1:
        hint = f"; {number:g} % is {number / 100:g}" if 1 < number <= 100 else ""
        raise ValueError(f"{name} must be a number from 0 (prune nothing) to 1 (prune everything), got {value!r}{hint}")


# ---------------------------------------------------------------------------------------------------------------------
# Stored draws


def chain_moments(store: DrawStore, names: Sequence[str], chains: int) -> list[tuple[Weights, Weights | None]]:
    """Mean and standard deviation (n − 1 below) over the draws of each chain, float64 on the CPU; no deviation of a single draw.

    Draw r belongs to chain r mod `chains`. Two passes over the store, a shard in memory at a time.
    """
    counts = [len(range(k, len(store), chains)) for k in range(chains)]

    def sums(term: Callable[[str, Tensor, int], Tensor]) -> list[Weights]:
        found: list[Weights] = [{} for _ in range(chains)]
        start = 0
        for shard in store.shards():
            for k in range(chains):
                for name in names:
                    part = term(name, shard[name][(k - start) % chains :: chains].cpu().double(), k).sum(0)
                    found[k][name] = found[k][name] + part if name in found[k] else part
            start += len(next(iter(shard.values())))
        return found

    means = [{n: s / counts[k] for n, s in part.items()} for k, part in enumerate(sums(lambda _, draws, __: draws))]
    if min(counts) < 2:
        return [(mean, None) for mean in means]
    squares = sums(lambda name, draws, k: (draws - means[k][name]).square())
    scales = [{n: (s / (counts[k] - 1)).sqrt() for n, s in part.items()} for k, part in enumerate(squares)]
    return list(zip(means, scales))


class PrunedDraws:
    """The draws of another store, 0 where a weight was pruned: for stores that are too large to be written anew."""

    def __init__(self, store: DrawStore, masks: Weights, chains: int):
        self.store, self.masks, self.chains = store, masks, chains

    def __len__(self) -> int:
        return len(self.store)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        return self.store.shapes()

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis."""
        return self._zeroed(self.store.get(rows, device), rows)

    def shards(self) -> Iterable[Weights]:
        """All draws in pieces."""
        start = 0
        for shard in self.store.shards():
            count = len(next(iter(shard.values())))
            yield self._zeroed(shard, range(start, start + count))
            start += count

    def _zeroed(self, stacked: Weights, rows: Sequence[int]) -> Weights:
        chain = torch.tensor([row % self.chains for row in rows])
        found = dict(stacked)
        for name, mask in self.masks.items():
            own = mask if self.chains == 1 else mask[chain.to(mask.device)]
            found[name] = torch.where(own.to(stacked[name].device), stacked[name], 0.0)
        return found


def pruned_store(store: DrawStore, masks: Weights, chains: int) -> DrawStore:
    """The draws with pruned weights at 0: in memory where they are there, else when they are read."""
    pruned = PrunedDraws(store.store if isinstance(store, PrunedDraws) else store, masks, chains)
    return MemoryDraws(pruned.get(range(len(store)), _device(store))) if isinstance(store, MemoryDraws) else pruned


def _device(store: MemoryDraws) -> torch.device:
    return next(iter(store.stacked.values())).device


# ---------------------------------------------------------------------------------------------------------------------
# Size and error


@dataclass(frozen=True)
class Row:
    """One pruned posterior: weights and bytes of one network (of each chain or part), and its scores where there are data.

    weights: how many could be pruned, kept: how many of them are left. dense_bytes: all parameters of the network as they are.
    sparse_bytes: with only the kept ones of a pruned tensor and where they stand, a bit for each weight or four bytes for each
    kept one, whichever is less, and no more than dense. error: the share of wrong answers, for classes; rmse: for numbers;
    nll: the mean negative log-likelihood of a target, in nats.
    """

    by: str
    fraction: float
    weights: int
    kept: int
    dense_bytes: int
    sparse_bytes: int
    error: float | None = None
    rmse: float | None = None
    nll: float | None = None


@dataclass(frozen=True)
class PruningTable:
    """Rows by criterion and fraction; `print` shows them with the criteria side by side."""

    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"rows": [asdict(row) for row in self.rows]}

    def __rich__(self) -> RichTable:
        from rich import box
        from rich.table import Table

        criteria = list(dict.fromkeys(row.by for row in self.rows))
        measured = [score for score in ("error", "rmse", "nll") if getattr(self.rows[0], score) is not None]
        table = Table(box=box.SIMPLE_HEAD)
        several = len(criteria) > 1
        for heading in ("pruned" if several else f"pruned by {criteria[0]}", "weights left", "dense", "sparse"):
            table.add_column(heading, justify="right")
        for score in measured:
            words = {"error": "error", "rmse": "RMSE", "nll": "NLL (nats)"}[score]
            for by in criteria:
                table.add_column(f"{words} by {by}" if several else words, justify="right")
        for fraction in dict.fromkeys(row.fraction for row in self.rows):
            own = {row.by: row for row in self.rows if row.fraction == fraction}
            first = own[criteria[0]]
            cells = [_number(score, getattr(own[by], score)) for score in measured for by in criteria]
            sizes = [_bytes(first.dense_bytes), _bytes(first.sparse_bytes)]
            table.add_row(f"{100 * fraction:.4g} %", f"{first.kept:,}", *sizes, *cells)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200, color_system=None, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def table(
    posterior: Posterior,
    fractions: Sequence[float] = FRACTIONS,
    *,
    x: Any = None,
    y: Any = None,
    by: Criterion | Sequence[Criterion] = "snr",
    where: Where = None,
    per_layer: bool = False,
    draws: int | None = None,
    seed: int = 0,
    mask: Any = None,
    restore: Callable[[Predictive], Predictive] = lambda predictive: predictive,
) -> PruningTable:
    """Size, and with held-out inputs `x` and targets `y` the error, of a posterior pruned by each fraction.

    by: one criterion, or several to compare. where, per_layer: as in `prune`. draws, seed: of the predictions, the same for every
    row. mask: boolean, shaped like y, True where a target was observed. restore: predictions → predictions in the units of y.
    Cost: a prediction of x for each row.
    """
    from plausible.analysis import metrics

    criteria: tuple[Any, ...] = (by,) if isinstance(by, str) else tuple(by)
    if not criteria or not len(fractions):
        raise ValueError("table needs at least one fraction and one criterion, got none")
    if (x is None) != (y is None):
        raise ValueError(f"give x and y together: {'x' if x is None else 'y'} is missing")
    for fraction in fractions:
        _check_fraction("fractions", fraction)

    def measured(pruned: Posterior) -> dict[str, float]:
        predictive = restore(pruned.predict(x, draws, seed))
        if metrics.inputs.probability_kind(predictive):
            found = {"error": 1 - metrics.accuracy(predictive, y, mask=mask)}
        else:
            found = {"rmse": metrics.rmse(predictive, y, mask=mask)}
        return found | {"nll": metrics.log_loss(predictive, y, mask=mask)}

    rows: list[Row] = []
    for fraction in fractions:
        whole: dict[str, float] | None = None  # nothing pruned is the same by every criterion
        for criterion in criteria:
            pruned = prune(posterior, fraction, by=criterion, where=where, per_layer=per_layer)
            found = {} if x is None else whole or measured(pruned)
            whole = found if fraction == 0 else None
            weights, kept, dense, sparse = _sizes(pruned)
            rows.append(Row(criterion, float(fraction), weights, kept, dense, sparse, **found))
    return PruningTable(tuple(rows))


def _sizes(posterior: Posterior) -> tuple[int, int, int, int]:
    """Weights that could be pruned, those kept, and the bytes of one network, dense and sparse; the mean over chains or parts."""
    model, masks = posterior.model, posterior.masks
    parameters = dict(model.network.named_parameters())
    dense = tree.num_bytes(parameters)
    weights, kept, saved = 0, 0.0, 0.0
    for name, mask in masks.items():
        count, size = parameters[name].numel(), parameters[name].element_size()
        left = count * float(mask.double().mean())
        weights, kept = weights + count, kept + left
        saved += max(0.0, count * size - left * size - min(math.ceil(count / 8), 4 * left))
    return weights, round(kept), dense, round(dense - saved)


def _bytes(count: int) -> str:
    """`9.6 MB`."""
    power = min(3, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _number(score: str, value: float) -> str:
    return f"{100 * value:.2f} %" if score == "error" else f"{value:.4g}"
