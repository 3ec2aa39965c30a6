"""The evidence of networks so small that it can be integrated: quadrature beside SMC, AIS, parallel tempering and Laplace.

Tanh units on a line, all weights N(0, s²). Given the hidden units' weights a regression is linear and Gaussian in the rest,
whose integral is algebra; what is left is a sum over a grid, two dimensions for each unit. For classes the grid has all four
weights. Estimates of log p(D) are compared with that number.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, Values, look
from plausible.analysis.evidence import log_symmetries
from plausible.apps.compare.tables import mean
from plausible.core import priors, random
from plausible.core.likelihoods import Bernoulli, Gaussian, Likelihood
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import MAP, SMC, AnnealedImportance, Laplace, Method, ParallelTempering

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Problem = Literal["one-unit", "two-units", "classes"]
SCALE, NOISE = 1.5, 0.2
"""Of the prior of every weight, and of regressions."""
REACH = 6.0
"""How far grids go, in prior standard deviations: the prior outside has a mass of 2·10⁻⁹ for each weight."""
STARTS = 4
"""From how many points Laplace looks for the best mode."""
EDGE = 0.35
"""Nats from quadrature that the figure shows."""


@dataclass(frozen=True)
class Evidence:
    """One problem by one method; None is quadrature, with `side` points in a prior standard deviation."""

    problem: Problem
    method: Method | None
    side: int = 10


def rows(problem: Problem) -> tuple[Tensor, Tensor]:
    """Inputs [N, 1] and targets: 12 noisy points of a step, or 16 labels with one interval of the second class."""
    stream = random.generator(0, 91)
    if problem == "classes":
        x = torch.linspace(-2, 2, 16, dtype=torch.float64)[:, None]
        chance = torch.sigmoid(3 * torch.tanh(2 * x + 0.5) + 0.5)
        return x, (torch.rand(16, 1, generator=stream, dtype=torch.float64) < chance).double()
    x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    noise = NOISE * torch.randn(12, 1, generator=stream, dtype=torch.float64)
    return x, torch.tanh(2 * x) - 0.6 * torch.tanh(1.5 * (x - 1)) + noise


def network(problem: Problem) -> nn.Sequential:
    """One hidden layer of one or two tanh units, in float64."""
    units = 2 if problem == "two-units" else 1
    return nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)).double()


def likelihood(problem: Problem) -> Likelihood:
    """Known noise, or labels."""
    return Bernoulli() if problem == "classes" else Gaussian(NOISE)


# ---------------------------------------------------------------------------------------------------------------------
# Quadrature


def half_grid(side: int) -> tuple[Tensor, Tensor]:
    """Points (u, b) [G, 2] of a regular grid with u ≥ 0, and the log of the prior mass of each, doubled for u < 0.

    A unit may change the signs of all its weights, so that half of the plane is all of it. The rule of equal steps converges
    faster than any power of them for smooth integrands that vanish at the ends.
    """
    step, count = SCALE / side, int(REACH * side)
    u = step * torch.arange(count + 1, dtype=torch.float64)
    b = step * torch.arange(-count, count + 1, dtype=torch.float64)
    log_mass = _log_normal(u)[:, None] + _log_normal(b) + 2 * math.log(step)
    log_mass[1:] += math.log(2)
    return torch.cartesian_prod(u, b), log_mass.reshape(-1)


def _log_normal(weight: Tensor) -> Tensor:
    return -0.5 * (weight / SCALE).square() - math.log(SCALE) - 0.5 * math.log(2 * math.pi)


def quadrature(problem: Problem, side: int) -> float:
    """Log p(D) on a grid with `side` points in a prior standard deviation of each weight that is not integrated exactly."""
    (x, y), (points, log_mass) = rows(problem), half_grid(side)
    units = torch.tanh(points[:, :1] * x.T + points[:, 1:])  # [G, N]
    if problem == "one-unit":
        return float((log_mass + linear_evidence(units.unsqueeze(1), y)).logsumexp(0))
    parts = []
    if problem == "two-units":
        for i in range(0, len(units), 4):  # both orders of two units are one pair
            pairs = torch.stack(torch.broadcast_tensors(units[i : i + 4, None], units[None]), dim=2)  # [4, G, 2, N]
            value = linear_evidence(pairs.flatten(0, 1), y).reshape(-1, len(units))
            parts.append((value + log_mass[i : i + 4, None] + log_mass).logsumexp((0, 1)))
        return float(torch.stack(parts).logsumexp(0))
    step, count = SCALE / side, int(REACH * side)
    line = step * torch.arange(-count, count + 1, dtype=torch.float64)
    sign = 2 * y.flatten() - 1
    for v, log_v in zip(line, _log_normal(line) + math.log(step)):
        outputs = (v * units)[:, None, :] + line[:, None]  # [G, C, N]
        value = nn.functional.logsigmoid(sign * outputs).sum(-1) + _log_normal(line) + math.log(step)
        parts.append((value + log_mass[:, None]).logsumexp((0, 1)) + log_v)
    return float(torch.stack(parts).logsumexp(0))


def linear_evidence(units: Tensor, y: Tensor) -> Tensor:
    """Log N(y; 0, σ²I + s²ΦΦᵀ) for hidden units [M, H, N] and a bias, Φ = (units, 1): [M]; by (H + 1)-dimensional algebra."""
    count = y.numel()
    features = torch.cat([units, torch.ones_like(units[:, :1])], dim=1)  # [M, H + 1, N]
    precision = features @ features.mT / NOISE**2
    precision.diagonal(dim1=1, dim2=2).add_(SCALE**-2)
    factor = torch.linalg.cholesky(precision)
    half = torch.linalg.solve_triangular(factor, features @ y / NOISE**2, upper=False).squeeze(-1)
    determinant = factor.diagonal(dim1=1, dim2=2).log().sum(-1) + features.shape[1] * math.log(SCALE)
    rest = y.square().sum() / NOISE**2
    return -0.5 * count * math.log(2 * math.pi * NOISE**2) - determinant - 0.5 * (rest - half.square().sum(-1))


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def run(settings: Evidence, request: Request) -> dict[str, Any]:
    """Log evidence by seed and the error it states: a standard error, or for quadrature the change from a grid half as fine."""
    problem = settings.problem
    if settings.method is None:
        values = [quadrature(problem, settings.side), quadrature(problem, max(1, settings.side // 2))]
        return {"log_evidence": values[:1], "error": [abs(values[0] - values[1])]}
    found: dict[str, Any] = {"log_evidence": [], "error": []}
    for seed in range(request.seed, request.seed + request.seeds):
        value, error = estimate(problem, settings.method, seed, request)
        found["log_evidence"].append(value)
        found["error"].append(error)
    if isinstance(settings.method, Laplace):
        found["log_symmetries"] = log_symmetries(network(problem))
    return found


def estimate(problem: Problem, method: Method, seed: int, request: Request) -> tuple[float, float]:
    """By a sampler, or by the Laplace approximation at the best of some modes (its error is 0: it does not know it)."""
    options: dict[str, Any] = {
        "likelihood": likelihood(problem),
        "prior": priors.Gaussian(SCALE),
        "device": "cpu",
        "compile": request.compile,
        "progress": False,
    }
    if not isinstance(method, Laplace):
        posterior: Any = fit(network(problem), rows(problem), method, seed=seed, **options)
        return posterior.log_evidence, posterior.run["log_evidence_error"]
    best = -math.inf
    for start in range(STARTS):
        with random.isolated(STARTS * seed + start), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the network is not at a mode")
            posterior = fit(network(problem), rows(problem), method, seed=seed, **options)
        best = max(best, posterior.log_evidence)
    return best, 0.0


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

PROBLEMS: dict[Problem, str] = {
    "one-unit": "regression, 1 unit",
    "two-units": "regression, 2 units",
    "classes": "classes, 1 unit",
}
WORDS = {
    "smc": "SMC",
    "ais": "annealed importance sampling",
    "tempering": "parallel tempering",
    "laplace": "Laplace",
    "laplace-modes": "Laplace, symmetric modes counted",
}


def difference(problem: str, method: str) -> Values:
    """Estimates of log p(D) minus quadrature, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        truth = look(results, f"{problem}-quadrature", "log_evidence")
        own = results.get(f"{problem}-{method.removesuffix('-modes')}")
        if truth is None or own is None:
            return None
        more = own["log_symmetries"] if method.endswith("-modes") else 0.0
        return [value + more - truth[0] for value in own["log_evidence"]]

    return values


def miscalibration(results: Results) -> Sequence[float] | None:
    """Root mean square of differences from quadrature over stated standard errors, over all samplers, problems and seeds."""
    found = []
    for problem in PROBLEMS:
        for method in ("smc", "ais", "tempering"):
            own, errors = difference(problem, method)(results), look(results, f"{problem}-{method}", "error")
            found += [] if own is None else [(a / b) ** 2 for a, b in zip(own, errors)]
    return [math.sqrt(sum(found) / len(found))] if found else None


def claims(size: Size) -> list[Bound]:
    """Samplers agree with quadrature; what Laplace says is shown beside them."""
    limit = None if size == "tiny" else 0.15
    found = [
        Bound(
            f"{words}: {WORDS[method]} − quadrature",
            difference(problem, method),
            None,
            low=None if limit is None or "laplace" in method else -limit,
            high=None if "laplace" in method else limit,
            unit="nats",
        )
        for problem, words in PROBLEMS.items()
        if size != "tiny" or problem == "one-unit"
        for method in WORDS
    ]
    high = None if size == "tiny" else 2.0
    return [
        *found,
        Bound("differences over their stated standard errors, root mean square", miscalibration, 1.0, high=high, unit=""),
    ]


def sheets(results: Results) -> list[Sheet]:
    """All numbers."""
    body = []
    for name, result in results.items():
        problem = next(key for key in PROBLEMS if name.startswith(key))
        method = name.removeprefix(f"{problem}-")
        error = "" if method == "laplace" else f"{mean(result['error']).value:.2g}"
        body.append((PROBLEMS[problem], WORDS.get(method, "quadrature"), mean(result["log_evidence"]).text(3), error))
    return [
        Sheet(
            "Log evidence, mean over seeds, and the error that was stated", ("data", "method", "log p(D)", "error"), tuple(body)
        )
    ]


def draw(results: Results) -> Figure:
    """Estimates minus quadrature, one point a seed with the standard error that it states; those far off as arrows at the edge."""
    shown = [problem for problem in PROBLEMS if look(results, f"{problem}-quadrature") is not None]
    figure, axes = figures.new(1, max(1, len(shown)), (1.6 + 3.6 * max(1, len(shown)), 3.4), squeeze=False, sharey=True)
    for ax, problem in zip(axes[0], shown):
        for k, method in enumerate(WORDS):
            own = difference(problem, method)(results)
            if own is None:
                continue
            errors = look(results, f"{problem}-{method.removesuffix('-modes')}", "error")
            height = [k + 0.12 * (i - (len(own) - 1) / 2) for i in range(len(own))]
            if abs(average := mean(own).value) > EDGE:
                side = math.copysign(1.0, average)
                ax.plot([0.95 * side * EDGE], [k], "<" if side < 0 else ">", color=f"C{k}", markersize=6)
                words, place = f"{average:.2f}".replace("-", "−"), 0.85 * side * EDGE
                ax.text(place, k, words, va="center", ha="left" if side < 0 else "right", fontsize="small")
            else:
                ax.errorbar(own, height, xerr=errors, fmt="o", color=f"C{k}", markersize=4, capsize=2, linewidth=1)
        ax.axvline(0, color="0.4", linewidth=0.8)
        truth = look(results, f"{problem}-quadrature", "log_evidence")[0]
        title = f"{PROBLEMS[problem]}: log p(D) = {truth:.3f}".replace("-", "−")
        ax.set(title=title, xlabel="estimate − quadrature (nats)", xlim=(-EDGE, EDGE))
        ax.title.set_fontsize("medium")
        ax.grid(alpha=0.3, axis="x")
    axes[0][0].set_yticks(range(len(WORDS)), list(WORDS.values()))
    axes[0][0].invert_yaxis()
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# The experiment

METHODS: dict[str, Method | None] = {
    "quadrature": None,
    "smc": SMC(particles=1000, pilots=200),
    "ais": AnnealedImportance(particles=500, pilots=100, temperatures=300),
    "tempering": ParallelTempering(draws=600, warmup=300, chains=8, temperatures=8, leapfrogs=12),
    "laplace": Laplace(structure="full", mode=MAP(epochs=400, batch_size=None, lr=Cosine(0.05)), polish=100, tune=None),
}
LARGER: dict[str, Any] = {
    "smc": {"particles": 4000, "pilots": 500},
    "ais": {"particles": 2000, "temperatures": 500},
    "tempering": {"draws": 3000},
}
SMALLER: dict[str, Any] = {
    "smc": {"particles": 16, "pilots": 8, "moves": 1, "leapfrogs": 2},
    "ais": {"particles": 16, "pilots": 8, "temperatures": 4, "leapfrogs": 2},
    "tempering": {"draws": 4, "warmup": 4, "chains": 2, "temperatures": 3, "leapfrogs": 2},
    "laplace": {"mode": MAP(epochs=5, batch_size=None, lr=0.05), "polish": 5},
}
SIDES: dict[str, tuple[int, int]] = {"one-unit": (40, 4), "two-units": (8, 2), "classes": (6, 2)}
"""Points of the grid in a standard deviation of the prior, and for `tiny`."""


def cell(problem: Problem, name: str) -> Cell:
    """The cell by size."""
    settings: dict[Size, Evidence] = {}
    for size in SIZES:
        changes = {"full": LARGER, "reduced": {}, "tiny": SMALLER}[size].get(name, {})
        method = METHODS[name]
        own = method if method is None else replace(method, **changes)  # type: ignore[type-var]
        if size != "tiny" or problem == "one-unit":
            settings[size] = Evidence(problem, own, SIDES[problem][size == "tiny"])
    return Cell(f"{problem}-{name}", run, settings)


ALL: dict[Size, Sequence[str]] = {
    size: tuple(f"{problem}-{name}" for problem in PROBLEMS for name in METHODS if size != "tiny" or problem == "one-unit")
    for size in SIZES
}
REPRODUCTIONS = {
    "small-net-evidence": Reproduction(
        "small-net-evidence",
        "The evidence of very small networks, integrated and estimated",
        "No publication: the check is against integrals. The estimators are those of Neal (2001), of Del Moral, Doucet and Jasra "
        "(2006), of Meng and Wong (1996) and of MacKay (1992).",
        tuple(cell(problem, name) for problem in PROBLEMS for name in METHODS),
        (
            Part("table", "1", "Estimates beside quadrature", ALL, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "differences", "Estimates of log p(D) minus quadrature, one point for each seed", ALL, draw=draw),
        ),
        "small-net-evidence",
        {"full": 10, "reduced": 6, "tiny": 2},
    )
}
