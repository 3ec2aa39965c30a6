"""What chains say of themselves: their draws by name, a table with a row for each quantity, and the numbers of a whole run."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.blocks.chains import stein
from plausible.blocks.chains.convergence import (
    LIMIT,
    ebfmi,
    ess_bulk,
    ess_tail,
    mcse,
    mcse_quantile,
    mcse_sd,
    rhat,
    spaced,
    summarise,
    summary,
)
from plausible.blocks.chains.density import ModelDensity
from plausible.core.tables import Table, Tabular, data_frame
from plausible.posteriors.base import data_for

if TYPE_CHECKING:
    from plausible.posteriors.draws import DrawsPosterior

COLUMNS = ("mean", "sd", "mcse", "ess_bulk", "ess_tail", "rhat")
HEADS = {"ess_bulk": "ESS bulk", "ess_tail": "ESS tail", "rhat": "R̂"}
LEAST = 4
"""Draws of a chain below which nothing can be said about convergence."""


def stored(posterior: Any) -> DrawsPosterior:
    """The posterior, where it keeps draws in the order of its chains."""
    if not (hasattr(posterior, "store") and hasattr(posterior, "chains")):
        what = type(posterior).__name__ if hasattr(posterior, "functions") else f"object of type {type(posterior).__name__}"
        raise TypeError(f"a {what} has no chains: it does not keep draws in their order")
    return posterior


def by_chain(posterior: DrawsPosterior, values: Tensor) -> Tensor:
    """Values of all draws, [draws, …], as [chains, draws per chain, …]: draw r belongs to chain r mod chains."""
    each = len(posterior) // posterior.chains
    return values[: each * posterior.chains].unflatten(0, (each, posterior.chains)).transpose(0, 1)


def function_chains(posterior: DrawsPosterior, x: Any) -> Tensor:
    """f(x) of all draws: [chains, draws, inputs, *outputs]."""
    return by_chain(posterior, posterior.functions(x))


def chosen_weights(posterior: DrawsPosterior, names: str | Sequence[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Random weights whose name matches one of the patterns (`"0.*"`), with the shape of a draw; all by default."""
    shapes = posterior.store.shapes()
    patterns = [names] if isinstance(names, str) else ["*"] if names is None else names
    chosen: dict[str, tuple[int, ...]] = {}
    for pattern in patterns:
        matching = [name for name in posterior.model.random if name == pattern or fnmatch.fnmatch(name, pattern)]
        if not matching:
            raise ValueError(f"names: no random weight matches {pattern!r}; there are {', '.join(posterior.model.random)}")
        chosen |= {name: tuple(shapes[name]) for name in matching}
    return chosen


def weight_chains(
    posterior: DrawsPosterior, names: str | Sequence[str] | None = None, limit: int | None = None
) -> tuple[Tensor, list[str]]:
    """Draws of weights [chains, draws, quantities] and what each is called; evenly spaced ones where there are more than `limit`.

    Read shard by shard, so that memory is that of the quantities that are kept.
    """
    shapes = chosen_weights(posterior, names)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    # evenly spaced quantities stand for all where there are too many
    chosen = spaced(sum(sizes.values()), limit or sum(sizes.values()))
    places: dict[str, Tensor] = {}
    start = 0
    for name, size in sizes.items():
        inside = chosen[(chosen >= start) & (chosen < start + size)] - start
        if len(inside):
            places[name] = inside
        start += size
    pieces = [
        torch.cat([draws[name].reshape(len(draws[name]), -1)[:, at.to(draws[name].device)] for name, at in places.items()], 1)
        for draws in posterior.store.shards()
    ]
    words: list[str] = []
    for name, at in places.items():
        rows = torch.stack(torch.unravel_index(at, shapes[name] or (1,)), -1).tolist()
        words += [f"{name}[{','.join(map(str, row))}]" if shapes[name] else name for row in rows]
    return by_chain(posterior, torch.cat(pieces)), words


def quantities(
    posterior: DrawsPosterior, x: Any = None, names: str | Sequence[str] | None = None, limit: int | None = None
) -> tuple[Tensor, list[str]]:
    """Function values at `x`, or weights, as [chains, draws, quantities], and what each is called."""
    if x is None:
        return weight_chains(posterior, names, limit)
    if names is not None:
        raise ValueError("give x, to look at functions, or names, to look at weights, and not both")
    values = function_chains(posterior, x)
    places = [f"[{','.join(map(str, place))}]" for place in product(*map(range, values.shape[3:]))]
    places = places if len(places) > 1 else [""] * len(places)
    return values.flatten(2), [f"f(x{i}){place}" for i in range(values.shape[2]) for place in places]


@dataclass(frozen=True)
class SummaryTable(Tabular):
    """Quantities of chains: `names`, and `columns` of mean, sd, mcse, ess_bulk, ess_tail and rhat, [quantities] each in float64.

    `print` shows it, `table["rhat"]` is a column, `table.worst(10)` the ten rows that have converged least. NaN: not defined, for
    a quantity that never moves.
    """

    names: tuple[str, ...]
    columns: Mapping[str, Tensor]
    chains: int
    draws: int

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    def row(self, name: str) -> dict[str, float]:
        if name not in self.names:
            raise KeyError(f"{name!r} is not in the table, which has {', '.join(self.names[:8])}, …")
        place = self.names.index(name)
        return {column: float(values[place]) for column, values in self.columns.items()}

    def worst(self, count: int = 10) -> SummaryTable:
        """The rows with the largest R̂, those with the fewest effective draws first among equals."""
        size = torch.minimum(self["ess_bulk"], self["ess_tail"]).nan_to_num(torch.inf).tolist()
        rhats = [-math.inf if math.isnan(value) else round(value, 3) for value in self["rhat"].tolist()]
        order = sorted(range(len(self)), key=lambda i: (-rhats[i], size[i]))[:count]
        chosen = {name: values[order] for name, values in self.columns.items()}
        return SummaryTable(tuple(self.names[i] for i in order), chosen, self.chains, self.draws)

    def as_table(self) -> Table:
        values = zip(self.names, *(self.columns[name].tolist() for name in COLUMNS))
        rows = [[name, *map(_cell, COLUMNS, numbers)] for name, *numbers in values]
        heads = ["quantity", *(HEADS.get(name, name) for name in COLUMNS)]
        return Table(heads, rows, f"{self.chains} chains of {self.draws:,} draws", words=("quantity",))

    def to_pandas(self) -> Any:
        """A data frame with a row for each quantity; needs pandas."""
        return data_frame({"quantity": self.names, **{k: v.numpy() for k, v in self.columns.items()}}).set_index("quantity")


def _cell(column: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if column == "rhat":
        return f"{value:.3f}"
    return f"{value:,.0f}" if column.startswith("ess") else f"{value:.4g}".replace("-", "−")


def summary_table(posterior: Any, x: Any = None, names: str | Sequence[str] | None = None) -> SummaryTable:
    """One row for each function value f(x), or each weight: mean, sd, mcse, ess_bulk, ess_tail, rhat; see `SummaryTable`.

    x: inputs at which functions are looked at, where permuting hidden units does not matter. Without it the table has the random
    weights, or those whose names match `names` (patterns such as "0.*").
    """
    values, words = quantities(stored(posterior), x, names)
    return SummaryTable(tuple(words), summary(values), values.shape[0], values.shape[1])


def convergence(posterior: DrawsPosterior, x: Any = None) -> dict[str, Any]:
    """`draws`, `chains`, and where chains are long enough the worst R̂, effective sizes and standard error; see `summarise`."""
    counts: dict[str, Any] = {"draws": len(posterior), "chains": posterior.chains, "divergences": 0}
    if len(posterior) // posterior.chains < LEAST:
        return counts
    values, _ = quantities(posterior, x, limit=None if x is not None else LIMIT)
    return counts | summarise(values)


def stein_discrepancies(posteriors: Sequence[Any], data: Any, *, length: float | None = None) -> tuple[float, ...]:
    """How far the draws of each posterior are from the law whose log density the data give: √(mean of k_p over all pairs) · ℓ/√P.

    The kernel Stein discrepancy with the inverse multiquadric (Gorham & Mackey 2017). It is large for draws of a law that is too
    wide as well as for a chain that has not moved, so the smallest of chains with several step sizes is the best of them, which the
    most effective draws need not be: those grow with the step while the bias does. `data` are those of the fit. Give chains of
    equally many draws, since a finite number of exact ones has a discrepancy too, which falls like 1/√draws. `length` is ℓ, by
    default the median distance between all draws of all posteriors. Cost: the gradient by all rows for each draw, and the square of
    the number of draws.
    """
    if not posteriors or isinstance(posteriors, Mapping | str):
        raise ValueError("posteriors must be a list of posteriors with draws, such as one for each step size")
    if length is not None and not (math.isfinite(length) and length > 0):
        raise ValueError(f"length must be positive and finite, got {length}")
    model = stored(posteriors[0]).model
    if model.points or model.buffers:
        what = next(iter((*model.points, *model.buffers)))
        raise ValueError(
            f"{what!r} differs between draws without being inferred, so they are no draws of one law of the weights"
        )
    density = ModelDensity(model, data_for(model, data), 100)
    every = [density.flatten(stored(posterior).weights()).double().cpu() for posterior in posteriors]
    together = torch.cat(every)
    length = length or stein.median_length(together, torch.arange(len(together)))
    if not length:
        raise ValueError("all draws are the same, so there is no distance between them to take a length from: give length")
    found = []
    for draws in every:
        parts = (part.to(density.device, density.dtype) for part in draws.split(100))
        scores = torch.cat([density.evaluate(part).gradient.cpu() for part in parts])
        matrix = stein.stein_matrix(draws, scores, length)
        found.append(math.sqrt(max(float(matrix.mean()), 0.0)) * length / math.sqrt(draws.shape[1]))
    return tuple(found)


def transitions(posterior: Any) -> dict[str, Any]:
    """What the transitions of chains say, averaged or the worst; only what their kernel knows.

    `transitions` behind the draws and `divergences` among them (counts), `acceptance` (`acceptance_least`: of the chain with the
    least) with `target_acceptance`, `step_size`, `leapfrogs` (gradients a transition), `saturated` (the share of NUTS trees that
    grew to `max_depth`, of kept ones), `ebfmi` (the smallest over chains, for kernels with momenta).
    """
    known: Mapping[str, Tensor] = posterior.statistics
    thin = getattr(posterior.method, "thin", 1)
    numbers: dict[str, Any] = {
        "transitions": len(posterior) * thin,
        "divergences": int(known["divergent"].sum()) if "divergent" in known else 0,
    }
    for name, each in (("acceptance", 1), ("step_size", 1), ("leapfrogs", thin)):
        if name in known:
            numbers[name] = float(known[name].mean()) / each
    if "acceptance" in known:
        numbers["acceptance_least"] = float(known["acceptance"].mean(1).min())
    for setting in ("target_acceptance", "max_depth"):
        if isinstance(value := getattr(posterior.method, setting, None), int | float):
            numbers[setting] = value
    if "depth" in known and "max_depth" in numbers:
        numbers["saturated"] = float((known["depth"] >= numbers["max_depth"]).double().mean())
    if has_momenta(posterior, known):
        smallest = ebfmi(known["energy"], known.get("energy_change")).nan_to_num(torch.inf).min()
        numbers["ebfmi"] = float(smallest)
    return {name: value for name, value in numbers.items() if not isinstance(value, float) or math.isfinite(value)}


def has_momenta(posterior: Any, known: Mapping[str, Tensor]) -> bool:
    """Whether energies have a kinetic part, of mean and variance P/2; log joints and errors of steps have no E-BFMI."""
    if not {"energy", "log_likelihood", "log_prior"} <= set(known) or known["energy"].shape[1] < LEAST:
        return False
    if "acceptance" in known and bool((known["acceptance"] == 1).all()):
        return False  # nothing is ever refused: momenta are not drawn afresh, as by microcanonical steps
    kinetic = float((known["energy"] + known["log_likelihood"] + known["log_prior"]).mean())
    weights = sum(posterior.model.initial[name].numel() for name in posterior.model.random)
    return math.isfinite(kinetic) and min(kinetic, float(known["energy"].var())) > weights / 8


def report(posterior: Any, x: Any = None) -> dict[str, Any]:
    """All about a run of chains: `convergence` of f(x) or of the weights, `transitions`, seconds, effective draws a second."""
    numbers = convergence(posterior, x) | transitions(posterior)
    seconds = posterior.run.get("seconds")
    if seconds:
        numbers["seconds"] = float(seconds)
        if "ess_bulk" in numbers and math.isfinite(numbers["ess_bulk"]):
            numbers["ess_per_second"] = numbers["ess_bulk"] / float(seconds)
    return numbers


__all__ = [
    "SummaryTable",
    "by_chain",
    "convergence",
    "ebfmi",
    "ess_bulk",
    "ess_tail",
    "function_chains",
    "mcse",
    "mcse_quantile",
    "mcse_sd",
    "quantities",
    "report",
    "rhat",
    "stein_discrepancies",
    "summarise",
    "summary",
    "summary_table",
    "transitions",
]
