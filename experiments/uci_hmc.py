"""Small regression sets by Hamiltonian Monte Carlo: what exact inference gives for one layer of 50 units, and whether chains agree.

Yacht and boston under the protocol of Hernández-Lobato and Adams (2015): the standard splits, inputs and targets standardised by
the training rows, scores in the units of the targets. Four chains start from independent initialisations. The noise is sampled
along, with log σ ~ N(0, 3²) of the standardised targets. The cells `…-held-out` compare activations and priors on a fifth of the
training rows of split 0; the prior of the second layer was chosen for chains to agree, as the page says. Three splits of yacht are
sampled by parallel tempering as well. Scores of HMC for the same networks are those of Bui et al. (2016), quoted from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, Values
from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.compare import read
from plausible.apps.tables import mlp
from plausible.blocks.chains import convergence
from plausible.core import priors, random
from plausible.core.likelihoods import Gaussian
from plausible.fitting import fit
from plausible.methods import HMC, ParallelTempering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plausible.apps.datasets.results import Split

Table = Literal["yacht", "boston"]
Activation = Literal["tanh", "relu"]
Second = Literal["unit", "fan-in"]
METHODS: dict[Size, dict[Table, HMC]] = {
    "full": {
        "yacht": HMC(draws=1000, warmup=1000, chains=4, leapfrogs=1000),
        "boston": HMC(draws=1000, warmup=700, chains=4, leapfrogs=250),
    },
    "reduced": dict.fromkeys(("yacht", "boston"), HMC(draws=200, warmup=300, chains=4, leapfrogs=100)),
    "tiny": dict.fromkeys(("yacht", "boston"), HMC(draws=8, warmup=8, chains=2, leapfrogs=4)),
}
"""The noise of yacht is so small that steps are tiny, and trajectories must be long."""
TEMPERED: dict[Size, ParallelTempering] = {
    "full": ParallelTempering(draws=2000, warmup=1000, chains=8, temperatures=40, hottest=0.1, leapfrogs=300, trajectory=4.0),
    "reduced": ParallelTempering(draws=100, warmup=150, chains=2, temperatures=12, hottest=0.1, leapfrogs=100),
    "tiny": ParallelTempering(draws=8, warmup=8, chains=2, temperatures=3, hottest=0.1, leapfrogs=4),
}
"""For yacht, where chains without replicas stay in modes of f. Powers go below 0.2, where replicas leave the fit to the data."""
TEMPERED_SPLITS: dict[Size, int] = {"full": 3, "reduced": 1, "tiny": 1}


@dataclass(frozen=True)
class Chained:
    """Chains over one split: `second` is the prior of the second layer, N(0, 1) or N(0, 1/50); the first layer has N(0, 1)."""

    data: Table
    split: int
    method: HMC | ParallelTempering
    activation: Activation = "tanh"
    second: Second = "fan-in"


@dataclass(frozen=True)
class HeldOut:
    """Pairs of activation and prior of the second layer, compared on a fifth of the training rows of split 0."""

    data: Table
    method: HMC
    tried: tuple[tuple[Activation, Second], ...] = (("tanh", "unit"), ("tanh", "fan-in"), ("relu", "unit"))


def sampled(settings: Chained, data: tuple[Tensor, Tensor], seed: int, request: Request) -> Any:
    """The posterior of standardised rows."""
    x, y = data
    with random.isolated(seed):
        network = mlp(x.shape[1], (50,), y.shape[1], settings.activation)
    unit, last = priors.Gaussian(1.0), list(dict(network.named_parameters()))[-2].rpartition(".")[0]
    second = unit if settings.second == "unit" else priors.FanIn(unit)
    prior = priors.Patterns((("likelihood.*", priors.Gaussian(3.0)), (f"{last}.weight", second), ("*", unit)))
    return fit(
        network,
        (x, y),
        settings.method,
        likelihood=Gaussian("learned", initial=0.3),
        prior=prior,
        seed=seed,
        device="cpu" if isinstance(settings.method, HMC) else request.device,
        compile=request.compile,
        progress=request.progress,
    )


def run(settings: Chained, request: Request) -> dict[str, Any]:
    """Test log-likelihood, error and coverage for each seed, and R̂ and effective draws of f(x) at the test inputs."""
    table = datasets.uci(settings.data)
    raw = table.split(settings.split)
    split, found = raw.standardised(), dict[str, list[float]]()
    for seed in range(request.seed, request.seed + request.seeds):
        posterior = sampled(settings, split.train, seed + 1000 * settings.split, request)
        scores = metrics.summary(split.restore(posterior.predict(split.test[0], seed=seed)), raw.test[1])
        for name, value in {**scores, **converged(posterior, split, settings.method)}.items():
            found.setdefault(name, []).append(float(value))
    return found


def converged(posterior: Any, split: Split, method: HMC | ParallelTempering) -> dict[str, float]:
    """Of f at the test inputs: the median and the worst R̂, effective draws likewise; the noise; acceptance, step, divergences."""
    f = posterior.functions(split.test[0]).cpu().flatten(1).unflatten(0, (-1, method.chains)).transpose(0, 1)
    rhat, size, statistics = convergence.rhat(f), convergence.ess_bulk(f), posterior.statistics
    noise = posterior.weights()["likelihood.log_scale"].exp()
    return {
        "rhat": float(rhat.max()),
        "rhat_median": float(rhat.median()),
        "below": float((rhat <= 1.05).double().mean() * 100),
        "ess": float(size.min()),
        "ess_median": float(size.median()),
        "noise": float(noise.mean()),
        "acceptance": float(statistics["acceptance"].mean()),
        "step_size": float(statistics["step_size"].mean()),
        "divergent": float(statistics["divergent"].sum()),
    }


def choose(settings: HeldOut, request: Request) -> dict[str, Any]:
    """Log-likelihood (of standardised targets) on the held-out fifth, for each pair."""
    x, y = datasets.uci(settings.data).split(0).standardised().train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    outer, inner = order[: len(x) // 5], order[len(x) // 5 :]
    found: dict[str, list[float]] = {}
    for activation, second in settings.tried:
        own = Chained(settings.data, 0, settings.method, activation, second)
        for seed in range(request.seed, request.seed + request.seeds):
            posterior = sampled(own, (x[inner], y[inner]), seed, request)
            value = metrics.log_likelihood(posterior.predict(x[outer]), y[outer])
            found.setdefault(f"{activation}, {second}", []).append(float(value))
    return {"held_out": found}


# ---------------------------------------------------------------------------------------------------------------------
# What the results say


def over(cells: Sequence[str], name: str) -> Values:
    """A number of each split that was run, the mean over its seeds."""

    def values(results: Results) -> Sequence[float] | None:
        there = [results[cell][name] for cell in cells if cell in results]
        return [sum(own) / len(own) for own in there] or None

    return values


def sheets(data: Table, cells: Sequence[str], tempered: Sequence[str] = ()) -> Any:
    """Every split, those by parallel tempering, and what was tried on held-out rows."""

    def made(results: Results) -> list[Sheet]:
        columns = {
            "log-likelihood": ("log_likelihood", ".3f"),
            "RMSE": ("rmse", ".3f"),
            "coverage of 90 %": ("coverage_90", ".2f"),
            "noise": ("noise", ".3f"),
            "R̂, median": ("rhat_median", ".3f"),
            "R̂, worst": ("rhat", ".3f"),
            "% with R̂ ≤ 1.05": ("below", ".0f"),
            "effective, median": ("ess_median", ".0f"),
            "effective, worst": ("ess", ".0f"),
            "acceptance": ("acceptance", ".2f"),
            "divergences": ("divergent", ".0f"),
        }

        def rows(of: Sequence[str]) -> tuple[tuple[str, ...], ...]:
            return tuple(
                (
                    cell.rpartition("-")[2],
                    *(f"{results[cell][n][0]:{form}}".replace("-", "−") for n, form in columns.values()),
                    f"{results[cell]['seconds'] / 60:.1f}",
                )
                for cell in of
                if cell in results
            )

        head = ("split", *columns, "minutes")
        found = [Sheet(f"{data}: the splits that were run", head, rows(cells))]
        if there := rows(tempered):
            found.append(Sheet(f"{data}, by parallel tempering", head, there))
        if (held := results.get(f"{data}-held-out")) is not None:
            tried = tuple((pair, f"{values[0]:.3f}".replace("-", "−")) for pair, values in held["held_out"].items())
            titles = ("activation, prior of the second layer", "log-likelihood of standardised targets")
            found.append(Sheet(f"{data}: a fifth of the training rows of split 0", titles, tried))
        return found

    return made


def draw(cells: dict[Table, list[str]]) -> Any:
    """Test log-likelihoods of the splits beside published means, and the R̂ of f."""

    def drawn(results: Results) -> Figure:
        published = read(Path(__file__).parent / "studies" / "uci.toml").published
        figure, axes = figures.new(1, len(cells), (1.5 + 4.2 * len(cells), 4.0), squeeze=False)
        for ax, (data, own) in zip(axes[0], cells.items()):
            there = [cell for cell in own if cell in results]
            values, rhats = ([results[cell][key][0] for cell in there] for key in ("log_likelihood", "rhat_median"))
            points = ax.scatter(rhats, values, color="C0", label="a split, by HMC")
            for i, (name, value) in enumerate(published[data].items()):
                if name in ("MC dropout 2018", "DVI", "HMC"):
                    ax.axhline(
                        value["log_likelihood"].value,
                        color=f"C{i + 1}",
                        linestyle="--",
                        linewidth=1,
                        label=f"{name}, published mean",
                    )
            if values:
                ax.axhline(sum(values) / len(values), color=points.get_facecolor()[0], linewidth=1.5, label="our mean")
            ax.axvline(1.05, color="0.7", linewidth=1)
            ax.set(title=data, xlabel="R̂ of f(x) at the median test input", ylabel="test log-likelihood")
            ax.legend(fontsize=8)
        return figure

    return drawn


SPLITS: dict[Size, int] = {"full": 20, "reduced": 2, "tiny": 1}
AIMS: dict[Table, tuple[float, float, float]] = {"yacht": (-1.25, -1.62, 0.67), "boston": (-2.40, -2.27, 2.90)}
"""Log-likelihoods of MC dropout (Mukhoti et al. 2018) and HMC (Bui et al. 2016), RMSE of MC dropout."""


def build() -> Reproduction:
    """A table for each set, and a figure of both."""
    cells: list[Cell] = []
    parts: list[Part] = []
    named: dict[Table, list[str]] = {}
    for data, (dropout, hmc, error) in AIMS.items():
        own = [
            Cell(f"{data}-{split:02d}", run, {s: Chained(data, split, METHODS[s][data]) for s in SIZES if split < SPLITS[s]})
            for split in range(SPLITS["full"])
        ]
        hot = [
            Cell(
                f"{data}-tempered-{split:02d}",
                run,
                {s: Chained(data, split, TEMPERED[s]) for s in SIZES if split < TEMPERED_SPLITS[s]},
            )
            for split in range(TEMPERED_SPLITS["full"] if data == "yacht" else 0)
        ]
        short = {s: METHODS["reduced" if s == "full" else s][data] for s in SIZES}
        chosen = Cell(f"{data}-held-out", choose, {s: HeldOut(data, short[s]) for s in SIZES})
        cells += [chosen, *own, *hot]
        named[data], replicas = [cell.name for cell in own], [cell.name for cell in hot]
        claims = {
            size: [
                Bound(
                    "test log-likelihood, mean over splits",
                    over(named[data], "log_likelihood"),
                    f"{hmc} (HMC)".replace("-", "−"),
                    low=None if size == "tiny" else dropout,
                    unit="",
                ),
                Bound("RMSE, mean over splits", over(named[data], "rmse"), f"{error} (MC dropout)", unit=""),
                Bound(
                    "R̂ of f at the median test input",
                    over(named[data], "rhat_median"),
                    high=1.05 if size == "full" else None,
                    unit="",
                ),
                Bound(
                    "R̂ of f at the worst test input", over(named[data], "rhat"), high=1.05 if size == "full" else None, unit=""
                ),
                Bound("share of test inputs with R̂ ≤ 1.05", over(named[data], "below")),
                *(
                    [
                        Bound(
                            "by parallel tempering: test log-likelihood",
                            over(replicas, "log_likelihood"),
                            unit="",
                            low=None if size == "tiny" else dropout,
                        ),
                        Bound(
                            "by parallel tempering: R̂ of f at the worst test input",
                            over(replicas, "rhat"),
                            unit="",
                            high=1.05 if size == "full" else None,
                        ),
                    ]
                    if replicas
                    else []
                ),
            ]
            for size in SIZES
        }
        needed = {s: [chosen.name, *named[data][: SPLITS[s]], *replicas[: TEMPERED_SPLITS[s]]] for s in SIZES}
        parts.append(Part("table", data, data.capitalize(), needed, claims, sheets(data, named[data], replicas)))
    every: dict[Size, list[str]] = {s: [name for own in named.values() for name in own[: SPLITS[s]]] for s in SIZES}
    parts.append(Part("figure", "splits", "Test log-likelihood of each split", every, draw=draw(named)))
    return Reproduction(
        "uci-hmc",
        "Small regression sets by Hamiltonian Monte Carlo",
        "Probabilistic backpropagation for scalable learning of Bayesian neural networks. José Miguel Hernández-Lobato and "
        "Ryan P. Adams. ICML, 2015.",
        tuple(cells),
        tuple(parts),
        "uci-hmc",
        {"full": 1, "reduced": 1, "tiny": 1},
    )


REPRODUCTIONS = {"uci-hmc": build()}
