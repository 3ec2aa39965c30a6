"""In-between uncertainty: how wide is the posterior of f between two clusters of data? (Foong et al. 2019.)

Of a network with one hidden layer of ReLU units and independent Gaussian weights, the variance of f between two points on a line
across the origin, or along an axis, is at most the sum of those at the points (Foong, Burt, Li and Turner 2020). The linearised
Laplace approximation, whose weights are correlated, has no such limit. They are held against the posterior of the network itself,
by Hamiltonian Monte Carlo, and against that of the Gaussian process to which wide networks with this prior tend, which is exact
algebra.

Distances are λ along the line through the centres of the clusters: −1 and 1 are the centres.
"""

from __future__ import annotations

import math
import warnings
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
    Values,
    look,
    number,
    paired,
)
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.blocks.chains.convergence import ess, rhat
from plausible.core import random
from plausible.core.likelihoods import Gaussian as Noise
from plausible.core.priors import FanIn, Gaussian, Patterns
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import HMC, MAP, Ensemble, Laplace, MeanField, Method
from plausible.posteriors.base import Posterior
from plausible.posteriors.linearised import LaplacePosterior
from plausible.posteriors.mixture import MixturePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = torch.linspace(-2, 2, 81)
BETWEEN = 0.25
"""|λ| up to which counts as between the clusters."""


@dataclass(frozen=True)
class Clusters:
    """One data set and one `method` (None: the Gaussian process), all with the same prior and noise.

    Weights are N(0, weight²/fan-in), biases N(0, bias²).
    """

    data: str
    method: Method | None
    units: int = 50
    weight: float = 4.0
    bias: float = 1.0
    noise: float = 0.1
    draws: int = 1000


def run(settings: Clusters, request: Request) -> dict[str, Any]:
    """Mean and standard deviation of f along the line and at the data, by seed; the data as places on the line."""
    x, y = clusters(settings.data)
    centres = torch.stack([x[: len(x) // 2].mean(0), x[len(x) // 2 :].mean(0)])
    middle, half = centres.mean(0), (centres[1] - centres[0]) / 2
    line = middle + GRID[:, None] * half
    places = (x - middle) @ half / half.square().sum()
    at = torch.cat([line, x])
    found: dict[str, Any] = {"mean": [], "std": [], "at_data": [], "rmse": [], "distance": []}
    if settings.method is None:
        laws = [limit(settings, (x, y), at)]
    elif isinstance(settings.method, HMC):
        laws, chains = _sampled(settings, (x, y), at, len(line), request)
        found |= chains
    else:
        laws, found["distance"] = _fitted(settings, (x, y), at, request)
    for f, std in laws:
        found["mean"].append(_list(f[: len(line)]))
        found["std"].append(_list(std[: len(line)]))
        found["at_data"].append(round(float(std[len(line) :].mean()), 6))
        found["rmse"].append(round(float((f[len(line) :] - y.flatten()).square().mean().sqrt()), 6))
    inside = GRID.abs() <= BETWEEN
    found["between"] = [round(float(torch.tensor(std)[inside].mean()), 6) for std in found["std"]]
    return {**found, "line": _list(GRID), "data": [_list(places), _list(y)]}


def clusters(name: str) -> tuple[Tensor, Tensor]:
    """Inputs [100, D] and targets [100, 1], half of the rows from each cluster; "origin" and "axis" are those of Foong et al."""
    if name == "curve":
        stream = random.generator(0, 81)
        x = torch.cat([low + 0.3 * torch.rand(50, 1, generator=stream) for low in (-1.0, 0.7)])
        return x, torch.cos(4 * x + 0.8) + 0.1 * torch.randn(100, 1, generator=stream)
    found = datasets.load(f"inbetween_{name}")
    return found.x, found.y


def _fitted(
    settings: Clusters, data: tuple[Tensor, Tensor], at: Tensor, request: Request
) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """Mean and standard deviation of f at these inputs, [N] each, by seed; how far from a mode Laplace approximations are.

    A mode of a ReLU network is often at the edge of a unit's half-space, where the gradient jumps and does not vanish: the
    distance is stored, and its warning kept quiet.
    """
    seeds = range(request.seed, request.seed + request.seeds)
    posteriors = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network is not at a mode", UserWarning)
        if isinstance(settings.method, Laplace):
            posteriors = [_fit(settings, data, settings.method, seed, request) for seed in seeds]
        else:
            assert settings.method is not None
            together = _fit(settings, data, Ensemble(settings.method, members=request.seeds), request.seed, request)
            posteriors = together.parts if isinstance(together, MixturePosterior) else [together]
    found = []
    for seed, posterior in zip(seeds, posteriors):
        predictive = posterior.predict(at, None if isinstance(settings.method, Laplace) else settings.draws, seed=seed)
        found.append((predictive.mean.flatten().cpu(), predictive.epistemic.flatten().sqrt().cpu()))
    return found, [round(p.report["distance"], 4) for p in posteriors if isinstance(p, LaplacePosterior)]


def _sampled(
    settings: Clusters, data: tuple[Tensor, Tensor], at: Tensor, along: int, request: Request
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """The same by chains, and how far to trust them: worst R̂ and effective draws of f along the line, the first `along` inputs."""
    assert isinstance(settings.method, HMC)
    laws = []
    found: dict[str, list[float]] = {name: [] for name in ("rhat", "ess", "divergences", "acceptance")}
    for seed in range(request.seed, request.seed + request.seeds):
        posterior: Any = _fit(settings, data, settings.method, seed, request)
        f = posterior.functions(at, None).flatten(1).double().cpu()
        chains = f[:, :along].reshape(-1, settings.method.chains, along).transpose(0, 1)
        laws.append((f.mean(0).float(), f.std(0).float()))
        found["rhat"].append(round(float(rhat(chains).max()), 4))
        found["ess"].append(round(float(ess(chains).min()), 1))
        found["divergences"].append(int(posterior.statistics["divergent"].sum()))
        found["acceptance"].append(round(float(posterior.statistics["acceptance"].mean()), 4))
    return laws, found


def _fit(settings: Clusters, data: tuple[Tensor, Tensor], method: Method, seed: int, request: Request) -> Posterior:
    prior = Patterns((("*weight", FanIn(Gaussian(settings.weight))), ("*bias", Gaussian(settings.bias))))
    with random.isolated(seed):
        module = nn.Sequential(nn.Linear(data[0].shape[1], settings.units), nn.ReLU(), nn.Linear(settings.units, 1))
    posterior = fit(
        module,
        data,
        method,
        likelihood=Noise(settings.noise),
        prior=prior,
        seed=seed,
        device=request.device,
        compile=request.compile,
        progress=request.progress,
    )
    if posterior.interrupted:
        raise KeyboardInterrupt("the network is trained anew by the next call")
    return posterior


def _list(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.flatten().tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# The limit of infinitely many units


def limit(settings: Clusters, data: tuple[Tensor, Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the Gaussian process with the `kernel` of the prior, given the data: float32 [N] each."""
    (x, y), own = data, (settings.weight**2, settings.bias**2)
    covariance = kernel(x, x, *own) + settings.noise**2 * torch.eye(len(x), dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance)
    half = torch.linalg.solve_triangular(factor, kernel(x, at, *own), upper=False)
    f = half.T @ torch.linalg.solve_triangular(factor, y.double(), upper=False)
    variance = torch.stack([kernel(row[None], row[None], *own)[0, 0] for row in at]) - half.square().sum(0)
    return f.flatten().float(), variance.clamp(min=0).sqrt().float()


def kernel(x: Tensor, other: Tensor, weight: float, bias: float, depth: int = 1) -> Tensor:
    """Cov(f(x), f(x')) = b + w/(2π)·√(k k')·(sin θ + (π − θ) cos θ), k from b + w·xᵀx'/D, for each of `depth` ReLU layers: [N, M].

    θ is the angle between the inputs of a layer, w and b the variances of its weights (times their number) and biases (Cho and
    Saul 2009; Lee et al. 2018). float64.
    """
    x, other = x.double(), other.double()
    cross = bias + weight * x @ other.T / x.shape[1]
    here, there = (bias + weight * v.square().mean(1) for v in (x, other))
    for _ in range(depth):
        norm = (here[:, None] * there).sqrt()
        angle = (cross / norm).clamp(-1, 1).arccos()
        cross = bias + weight / (2 * math.pi) * norm * (angle.sin() + (math.pi - angle) * angle.cos())
        here, there = bias + weight * here / 2, bias + weight * there / 2
    return cross


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

DATA = {"curve": "a curve", "origin": "two dimensions, across the origin", "axis": "two dimensions, along an axis"}
WORDS = {
    "limit": "infinitely wide network, exact",
    "hmc": "Hamiltonian Monte Carlo",
    "laplace": "Laplace, full",
    "laplace-diag": "Laplace, diagonal",
    "mean-field": "variational, mean-field",
}


def opening(data: str, method: str) -> Values:
    """Standard deviation of f between the clusters over that at the data, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        cell = f"{data}-{method}"
        found, base = number(cell, "between")(results), number(cell, "at_data")(results)
        return None if found is None or base is None else [a / b for a, b in zip(found, base)]

    return values


def claims(size: Size) -> list[Bound | Effect]:
    """HMC and Laplace open between the clusters, as the limit does; mean-field does not."""
    found: list[Bound | Effect] = []
    low, high = (None, None) if size == "tiny" else (3.0, 1.5)
    for data, words in DATA.items():
        found += [
            Bound(f"{words}: the exact limit", opening(data, "limit"), "opens", low=low, unit="×"),
            Bound(f"{words}: HMC", opening(data, "hmc"), "opens", low=low, unit="×"),
            Bound(
                f"{words}: HMC, worst R̂ of f along the line",
                number(f"{data}-hmc", "rhat"),
                high=None if size == "tiny" else 1.05,
                unit="",
            ),
            Bound(f"{words}: Laplace, full", opening(data, "laplace"), "opens", low=low, unit="×"),
            Bound(f"{words}: Laplace, diagonal", opening(data, "laplace-diag"), unit="×"),
            Bound(f"{words}: mean-field", opening(data, "mean-field"), "stays", high=high, unit="×"),
            Effect(
                f"{words}: Laplace above mean-field",
                paired(opening(data, "laplace"), opening(data, "mean-field")),
                1,
                "> 0",
                "×",
            ),
            Effect(f"{words}: HMC above mean-field", paired(opening(data, "hmc"), opening(data, "mean-field")), 1, "> 0", "×"),
        ]
    return found


def sheets(results: Results) -> list[Sheet]:
    """Standard deviations between the clusters and at the data."""
    rows = []
    for name, result in results.items():
        data, _, method = name.partition("-")
        columns = [mean(result[key]).text(3) for key in ("between", "at_data", "rmse", "distance")]
        rows.append((DATA[data], WORDS[method], *columns))
    head = ("data", "method", "between", "at the data", "residuals, root mean square", "distance from the mode")
    chains = [
        (DATA[name.partition("-")[0]], *(mean(result[key]).text(3) for key in ("rhat", "ess", "acceptance", "divergences")))
        for name, result in results.items()
        if "rhat" in result
    ]
    found = [Sheet("Standard deviation of f", head, tuple(rows))]
    if chains:
        heads = ("data", "worst R̂ of f along the line", "fewest effective draws", "acceptance", "divergences")
        found.append(Sheet("Chains", heads, tuple(chains)))
    return found


def draw_bands(results: Results) -> Figure:
    """Mean and two standard deviations of f along the line, data set by data set and method by method, of the first seed."""
    shown = [data for data in DATA if any(name.startswith(data) for name in results)]
    figure, axes = figures.new(
        len(shown), len(WORDS), (2.9 * len(WORDS), 2.5 * len(shown) + 0.5), squeeze=False, sharex=True, sharey="row"
    )
    for row, data in zip(axes, shown):
        for ax, (method, words) in zip(row, WORDS.items()):
            result = look(results, f"{data}-{method}")
            if result is None:
                ax.set_axis_off()
                continue
            line, f, std = result["line"], result["mean"][0], result["std"][0]
            ax.plot(
                *result["data"], "x", color="0.35", markersize=2.5, markeredgewidth=0.5, label="data, projected on the line"
            )
            for width, alpha in ((2, 0.2), (1, 0.35)):
                low, high = ([m + sign * width * s for m, s in zip(f, std)] for sign in (-1, 1))
                ax.fill_between(line, low, high, color="C0", alpha=alpha, linewidth=0, label=f"± {width} s.d. of f")
            ax.plot(line, f, color="C3", linewidth=1.1, label="mean")
            ax.set_xlim(-2, 2)
            if ax in axes[0]:
                ax.set_title(words, fontsize="small")
        row[0].set_ylabel(DATA[data], fontsize="small")
        truth = look(results, f"{data}-limit")
        if truth is not None:
            ends = [m + sign * 3 * s for m, s in zip(truth["mean"][0], truth["std"][0]) for sign in (-1, 1)]
            row[0].set_ylim(min(ends), max(ends))
    for ax in axes[-1]:
        ax.set_xlabel("λ", fontsize="small")
    drawn = next((ax for row in axes for ax in row if ax.get_legend_handles_labels()[0]), axes[0][0])
    handles, labels = drawn.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def draw_widths(results: Results) -> Figure:
    """The standard deviation of f along the line, the mean over seeds with a band from the lowest to the highest."""
    shown = [data for data in DATA if any(name.startswith(data) for name in results)]
    figure, axes = figures.new(1, len(shown), (3.6 * len(shown), 3.9), squeeze=False)
    for ax, data in zip(axes[0], shown):
        for k, (method, words) in enumerate(WORDS.items()):
            result = look(results, f"{data}-{method}")
            if result is None:
                continue
            each = list(zip(*result["std"]))
            style = {"color": "black", "linestyle": "--"} if method == "limit" else {"color": f"C{k - 1}"}
            ax.plot(result["line"], [mean(list(v)).value for v in each], label=words, **style)
            ax.fill_between(
                result["line"], [min(v) for v in each], [max(v) for v in each], color=style["color"], alpha=0.15, linewidth=0
            )
        for centre in (-1, 1):
            ax.axvline(centre, color="0.6", linewidth=0.8, linestyle=":")
        ax.set(yscale="log", title=DATA[data], xlabel="λ", xlim=(-2, 2))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("standard deviation of f")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells

MODE = MAP(epochs=5_000, batch_size=None, lr=Cosine(1e-2))
METHODS: dict[str, Method | None] = {
    "limit": None,
    "hmc": HMC(draws=400, chains=4, warmup=300, leapfrogs=800),
    "laplace": Laplace(structure="full", mode=MODE, polish=500, tune=None),
    "laplace-diag": Laplace(structure="diag", mode=MODE, polish=500, tune=None),
    "mean-field": MeanField(epochs=50_000, batch_size=None, lr=Cosine(1e-2)),
}
STEPS: dict[Size, tuple[int, int]] = {"full": (5_000, 50_000), "reduced": (2_000, 6_000), "tiny": (20, 20)}
"""Of the mode, and of the evidence bound."""
CHAINS: dict[Size, dict[str, Any]] = {
    "full": {"draws": 2000, "warmup": 1000},
    "reduced": {},
    "tiny": {"draws": 8, "chains": 2, "warmup": 4, "leapfrogs": 3},
}
"""Of Hamiltonian Monte Carlo, where other than above."""


def cell(data: str, method: str) -> Cell:
    """The cell by size."""
    found: dict[Size, Clusters] = {}
    for size, (mode, bound) in STEPS.items():
        own = METHODS[method]
        if isinstance(own, HMC):
            own = replace(own, **CHAINS[size])
        elif isinstance(own, Laplace):
            own = replace(own, mode=replace(MODE, epochs=mode), polish=20 if size == "tiny" else own.polish)
        elif own is not None:
            own = replace(own, epochs=bound)  # type: ignore[call-arg, type-var]
        smaller = {"units": 10, "draws": 10} if size == "tiny" else {}
        if size != "tiny" or data == "curve":
            found[size] = Clusters(data, own, **smaller)  # type: ignore[arg-type]
    return Cell(f"{data}-{method}", run, found)


ALL: dict[Size, Sequence[str]] = {
    size: tuple(f"{data}-{method}" for data in DATA for method in METHODS if size != "tiny" or data == "curve")
    for size in SIZES
}
CLAIMS = {size: [c for c in claims(size) if size != "tiny" or c.label.startswith(DATA["curve"])] for size in SIZES}
REPRODUCTIONS = {
    "in-between": Reproduction(
        "in-between",
        "Uncertainty between clusters of data",
        "'In-Between' Uncertainty in Bayesian Neural Networks. Andrew Y. K. Foong, Yingzhen Li, José Miguel Hernández-Lobato and "
        "Richard E. Turner. 2019; On the Expressiveness of Approximate Inference in Bayesian Neural Networks. Andrew Y. K. Foong, "
        "David R. Burt, Yingzhen Li and Richard E. Turner. NeurIPS, 2020.",
        tuple(cell(data, method) for data in DATA for method in METHODS),
        (
            Part("table", "1", "The standard deviation of f between the clusters over that at the data", ALL, CLAIMS, sheets),
            Part("figure", "bands", "f along the line through both clusters", ALL, draw=draw_bands),
            Part("figure", "widths", "The standard deviation of f along the line", ALL, draw=draw_widths),
        ),
        "in-between",
    )
}
