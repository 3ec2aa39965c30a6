"""Which modes do chains visit? Parallel tempering beside Hamiltonian Monte Carlo on two moons, with two and three hidden units.

A layer of H tanh units has 2^H · H! copies of each function: units may change places and signs. A draw is given to the copy of the
best draw that it is closest to, and a chain changes copies when another one is half as far. Both samplers get the same number of
gradients for a draw. What matters for predictions is R̂ of f(x), where copies are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import (
    SIZES,
    Bound,
    Cell,
    Effect,
    Part,
    Reproduction,
    Request,
    Results,
    Sheet,
    Size,
    look,
    number,
    paired,
)
from plausible.apps.compare.tables import mean
from plausible.apps.datasets.toys import two_moons
from plausible.core import priors, random
from plausible.core.likelihoods import Bernoulli
from plausible.fitting import fit
from plausible.methods import HMC, Method, ParallelTempering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 3.0
"""Of the prior of every weight."""


@dataclass(frozen=True)
class Hopping:
    """A network of so many tanh units on two moons, by one sampler."""

    units: int
    method: Method
    examples: int = 100
    noise: float = 0.2


def rows(settings: Hopping) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test rows; inputs are standardised by the training rows."""
    x, y = two_moons(settings.examples, settings.noise, seed=0)
    other, label = two_moons(1000, settings.noise, seed=1)
    middle, spread = x.mean(0), x.std(0)
    return ((x - middle) / spread, y[:, None].float()), ((other - middle) / spread, label[:, None].float())


def run(settings: Hopping, request: Request) -> dict[str, Any]:
    """For each seed what `measured` says; and the path of the first over the copies, by chain."""
    train, (x, y) = rows(settings)
    found: dict[str, list[Any]] = {}
    path: list[list[int]] = []
    for seed in range(request.seed, request.seed + request.seeds):
        with random.isolated(seed):
            module = nn.Sequential(nn.Linear(2, settings.units), nn.Tanh(), nn.Linear(settings.units, 1))
        posterior: Any = fit(
            module,
            train,
            settings.method,
            likelihood=Bernoulli(),
            prior=priors.Gaussian(SCALE),
            seed=seed,
            device="cpu",
            compile=request.compile,
            progress=False,
        )
        labels = followed(posterior)
        path = path or labels.T.tolist()
        numbers = measured(posterior, labels, x, y)
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {**found, "path": path}


def measured(posterior: Any, labels: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    """What one run gave; copies and changes are means over chains, changes for a hundred draws."""
    function = posterior.diagnostics(x[:100])
    steps, chains = posterior.statistics["leapfrogs"], posterior.chains
    every = posterior.method.rows / chains
    return {
        "copies": sum(len(set(chain.tolist())) for chain in labels.T) / chains,
        "changes": 100 * float((labels.diff(dim=0) != 0).double().mean()),
        "rhat": function["rhat"],
        "ess": function["ess_bulk"],
        "rhat_weights": posterior.diagnostics()["rhat"],
        "log_likelihood": float(posterior.predict(x).log_prob(y).mean()),
        "gradients": float(steps.mean()) * every,
        "least_swap": min(function.get("swap_rates", [0.0])),
        "round_trips": mean(function.get("round_trips", [0.0])).value,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Copies


def units_of(posterior: Any) -> Tensor:
    """Incoming weights, bias and outgoing weight of each unit in each draw: [S, H, 4]."""
    w = posterior.weights()
    return torch.cat([w["0.weight"], w["0.bias"].unsqueeze(-1), w["2.weight"].transpose(1, 2)], dim=-1)


def copies(units: Tensor) -> Tensor:
    """All that a network's units [H, 4] become by changing places and signs: [2^H · H!, H, 4]."""
    count = len(units)
    return torch.stack(
        [
            units[list(order)] * units.new_tensor(signs).unsqueeze(-1)
            for order in itertools.permutations(range(count))
            for signs in itertools.product((1.0, -1.0), repeat=count)
        ]
    )


def followed(posterior: Any) -> Tensor:
    """The copy of the best draw at which each draw of each chain is: [draws, chains].

    A chain changes copies when another is less than half as far as the one it was at: draws between two copies do not count.
    """
    statistics, chains = posterior.statistics, posterior.chains
    joint = (statistics["log_likelihood"] + statistics["log_prior"]).T.reshape(-1)
    units = units_of(posterior).double()
    places = copies(units[int(joint.argmax())])
    distances = torch.cdist(units.flatten(1), places.flatten(1)).reshape(-1, chains, len(places))
    current = distances[0].argmin(-1)
    found = []
    for row in distances:
        nearest = row.argmin(-1)
        left = row.gather(1, nearest.unsqueeze(1)) < 0.5 * row.gather(1, current.unsqueeze(1))
        current = torch.where(left.squeeze(1), nearest, current)
        found.append(current)
    return torch.stack(found)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

WIDTHS = {"two": (2, 8), "three": (3, 48)}
"""Units and copies."""
SAMPLERS = {"hmc": "HMC", "tempering": "parallel tempering"}


def claims(size: Size) -> list[Bound | Effect]:
    """Tempering visits most copies, and its functions have converged."""
    found: list[Bound | Effect] = []
    judged = size != "tiny"
    for word, (units, total) in WIDTHS.items():
        if size == "tiny" and word != "two":
            continue
        name = f"{units} units"
        visited = {key: number(f"{word}-{key}", "copies") for key in SAMPLERS}
        found += [
            Bound(f"{name}: copies of {total} that a chain visits, HMC", visited["hmc"], unit=""),
            Bound(
                f"{name}: copies of {total} that a chain visits, tempering",
                visited["tempering"],
                low=total / 4 if judged else None,
                unit="",
            ),
            Effect(f"{name}: tempering visits more copies", paired(visited["tempering"], visited["hmc"]), 1, unit=""),
            Bound(f"{name}: R̂ of f(x), HMC", number(f"{word}-hmc", "rhat"), unit=""),
            Bound(f"{name}: R̂ of f(x), tempering", number(f"{word}-tempering", "rhat"), high=1.05 if judged else None, unit=""),
        ]
    return found


def sheets(results: Results) -> list[Sheet]:
    """All numbers."""
    body = []
    for name, result in results.items():
        word, _, key = name.partition("-")
        columns = [
            mean(result[column]).text(3)
            for column in ("copies", "changes", "rhat", "ess", "rhat_weights", "log_likelihood", "gradients")
        ]
        body.append((f"{WIDTHS[word][0]}", SAMPLERS[key], *columns))
    heads = (
        "units",
        "sampler",
        "copies visited by a chain",
        "changes in 100 draws",
        "R̂ of f",
        "effective draws of f",
        "R̂ of weights",
        "test log-likelihood",
        "gradients a draw",
    )
    return [Sheet("Mean over seeds", heads, tuple(body))]


def draw(results: Results) -> Figure:
    """At which copy each chain is, draw by draw, in the first run; a colour for each chain."""
    shown = [word for word in WIDTHS if any(look(results, f"{word}-{key}") is not None for key in SAMPLERS)]
    figure, axes = figures.new(
        max(1, len(shown)), 2, (9.5, 0.6 + 2.7 * max(1, len(shown))), squeeze=False, sharex=True, sharey="row"
    )
    for row, word in zip(axes, shown):
        units, total = WIDTHS[word]
        for ax, (key, words) in zip(row, SAMPLERS.items()):
            path = look(results, f"{word}-{key}", "path")
            for chain, labels in enumerate(path or ()):
                shift = 0.015 * total * (chain - (len(path) - 1) / 2)
                ax.plot([label + 1 + shift for label in labels], ".", color=f"C{chain}", markersize=1.6)
            ax.set(title=f"{words}, {units} units", ylim=(0, 1.04 * (total + 1)))
            ax.title.set_fontsize("medium")
            ax.grid(alpha=0.25)
        row[0].set_ylabel(f"copy (of {total})")
    for ax in axes[-1]:
        ax.set_xlabel("draw")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells

METHODS: dict[str, Method] = {
    "hmc": HMC(draws=500, warmup=500, chains=4, thin=5, leapfrogs=34),
    "tempering": ParallelTempering(draws=500, warmup=500, chains=4, temperatures=10, leapfrogs=16),
}
"""170 gradients for each draw of a chain, with either."""
CHANGES: dict[Size, dict[str, Any]] = {
    "full": {"draws": 3000, "warmup": 1000},
    "reduced": {},
    "tiny": {"draws": 6, "warmup": 4, "chains": 2},
}


def cell(word: str, key: str) -> Cell:
    """The cell by size."""
    units = WIDTHS[word][0]
    sizes = SIZES if word == "two" else SIZES[:2]
    return Cell(
        f"{word}-{key}",
        run,
        {size: Hopping(units, replace(METHODS[key], **CHANGES[size])) for size in sizes},  # type: ignore[type-var]
    )


ALL: dict[Size, Sequence[str]] = {
    size: tuple(f"{word}-{key}" for word in WIDTHS for key in SAMPLERS if size != "tiny" or word == "two") for size in SIZES
}
REPRODUCTIONS = {
    "two-moons-modes": Reproduction(
        "two-moons-modes",
        "Modes that chains visit on two moons",
        "No publication: what parallel tempering (Geyer 1991; Syed et al. 2022) does for the symmetric modes of small networks.",
        tuple(cell(word, key) for word in WIDTHS for key in SAMPLERS),
        (
            Part("table", "1", "Copies visited, and convergence of f(x)", ALL, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "copies", "The copy at which each chain is, draw by draw", ALL, draw=draw),
        ),
        "two-moons-modes",
    )
}
