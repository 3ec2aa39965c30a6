"""Stochastic-gradient chains where the law is known: a mixture's posterior, a double well, 25 Gaussians.

The posterior of Welling and Teh (2011) is fitted as a model; their data are draws of the mixture, each from one of its components
(the average of one draw of each is a common mistake). The densities of Chen, Fox and Guestrin (2014) and of Zhang et al. (2020)
have no data, and are sampled by the optimisers of `plausible.optim`, all chains at once, with noise added to their gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, look, number
from plausible.apps.chain_optimisers import SGHMC as DrivenSGHMC
from plausible.apps.chain_optimisers import SGLD as DrivenSGLD
from plausible.apps.chain_optimisers import ChainOptimizer
from plausible.apps.compare.tables import mean
from plausible.core import priors, schedules
from plausible.core.likelihoods import Likelihood
from plausible.fitting import fit
from plausible.methods import HMC, SGLD, Ensemble, Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---------------------------------------------------------------------------------------------------------------------
# The posterior of a mixture (Welling & Teh 2011)

SPREAD = math.sqrt(2.0)
"""Standard deviation of each component."""
EXTENT = ((-2.0, 3.0), (-3.0, 3.0))
"""Of the grid, for θ₁ and θ₂: the posterior has less than 10⁻⁴ of its mass outside."""
CELLS, INSIDE = 20, 16
"""Cells of the grid along each side, and points along each side of a cell at which the density is evaluated."""


@dataclass(frozen=True)
class Mixture(Likelihood):
    """y ~ ½ N(f₁, 2) + ½ N(f₂, 2)."""

    kind = "continuous"

    def target_shape(self, outputs_shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(outputs_shape[:-1])

    def __call__(self, outputs: Tensor, weights: Any = None) -> torch.distributions.Distribution:  # noqa: ARG002
        halves = torch.distributions.Categorical(logits=torch.zeros_like(outputs), validate_args=False)
        each = torch.distributions.Normal(outputs, SPREAD, validate_args=False)
        return torch.distributions.MixtureSameFamily(halves, each, validate_args=False)


class Means(nn.Module):
    """f = (θ₁, θ₁ + θ₂), whatever the input. Chains start at the prior's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one, self.one + self.two]).expand(len(x), 2)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def sample_mixture(count: int = 100) -> Tensor:
    """Draws of ½ N(0, 2) + ½ N(1, 2): θ = (0, 1). With half of all seeds the posterior is one ridge; here it has two modes."""
    stream = torch.Generator().manual_seed(16)
    component = (torch.rand(count, generator=stream) < 0.5).float()
    return component + SPREAD * torch.randn(count, generator=stream)


def exact_cells() -> Tensor:
    """The posterior's mass in each cell of the grid, [CELLS, CELLS] in float64."""
    side = CELLS * INSIDE
    one, two = (low + (high - low) * (torch.arange(side, dtype=torch.float64) + 0.5) / side for low, high in EXTENT)
    one, two = one[:, None], two[None]
    log_density = -(one**2) / 20 - two**2 / 2
    for y in sample_mixture().double():
        log_density = log_density + torch.logaddexp(-((y - one) ** 2) / 4, -((y - one - two) ** 2) / 4)
    fine = torch.softmax(log_density.flatten(), 0).view(CELLS, INSIDE, CELLS, INSIDE)
    return fine.sum((1, 3))


def cells_of(draws: Tensor) -> Tensor:
    """The share of draws [S, 2] in each cell; those outside are in none."""
    edges = [torch.linspace(low, high, CELLS + 1, dtype=torch.float64) for low, high in EXTENT]
    return torch.histogramdd(draws.double(), edges).hist / len(draws)


def total_variation(draws: Tensor) -> float:
    """½ Σ |share − mass| over the cells, and over what lies outside."""
    shares, exact = cells_of(draws), exact_cells()
    return 0.5 * (float((shares - exact).abs().sum()) + 1 - float(shares.sum()))


@dataclass(frozen=True)
class OnMixture:
    """One method on the posterior, `chains` of it pooled for each seed."""

    method: Method
    chains: int


def run_mixture(settings: OnMixture, request: Request) -> dict[str, Any]:
    """For each seed: the distance to the exact posterior on the grid, and the mass with θ₂ > 0, where the truth lies."""
    y = sample_mixture()
    several = settings.chains * request.seeds
    chained = isinstance(settings.method, HMC)
    posterior: Any = fit(
        Means(),
        (torch.zeros(len(y), 1), y),
        replace(settings.method, chains=several) if isinstance(settings.method, HMC) else Ensemble(settings.method, several),
        likelihood=Mixture(),
        prior=cast(Any, {"one": priors.Gaussian(math.sqrt(10)), "two": priors.Gaussian(1.0)}),
        seed=request.seed,
        device="cpu",
        compile="auto" if chained else request.compile,
        progress=request.progress,
        checkpoint=None,
    )
    drawn = posterior.weights()
    theta = torch.stack([drawn["one"], drawn["two"]], -1).view(-1, several, 2)
    groups = theta.unflatten(1, (request.seeds, settings.chains)).transpose(0, 1).flatten(1, 2)  # [seeds, draws, 2]
    return {
        "total_variation": [total_variation(group) for group in groups],
        "upper": [float((group[:, 1] > 0).double().mean()) for group in groups],
        "cells": cells_of(groups[0]).tolist(),
    }


def published(sweeps: int, kept: int) -> SGLD:
    """ε_t = a(b + t)^(−0.55) from 0.01 down to 0.0001, batches of one example."""
    steps = 100 * sweeps
    offset = steps / (100 ** (1 / 0.55) - 1)
    lr = schedules.Polynomial(0.01 * offset**0.55, offset, 0.55)
    return SGLD(epochs=sweeps, batch_size=1, lr=lr, burn_in=0.0, thin=steps // kept)


# ---------------------------------------------------------------------------------------------------------------------
# Densities without data


def driven(
    theta: Tensor,
    chain: ChainOptimizer,
    log_density: Callable[[Tensor], Tensor],
    steps: int,
    noise: float,
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> None:
    """Steps of all chains [chains, D]; each gradient has noise N(0, noise²) of its own."""
    stream = torch.Generator().manual_seed(chain._seed + 1)
    for step in range(steps):
        before(step)
        chain.zero_grad()
        (-log_density(theta).sum()).backward()
        assert theta.grad is not None
        theta.grad.add_(torch.randn(theta.shape, generator=stream), alpha=noise)
        chain.step()
        after(step)


def well(theta: Tensor) -> Tensor:
    """−U, U = −2θ² + θ⁴."""
    return (2 * theta.square() - theta**4).sum(-1)


WELL = (-2.4, 2.4, 48)
"""From, to, and the number of bins."""


def exact_well() -> Tensor:
    """The mass in each bin, by a sum over 50 points in each."""
    low, high, bins = WELL
    points = low + (high - low) * (torch.arange(50 * bins, dtype=torch.float64) + 0.5) / (50 * bins)
    return torch.softmax(well(points[:, None]), 0).view(bins, 50).sum(1)


@dataclass(frozen=True)
class OnWell:
    """Chen, Fox and Guestrin: dt = 0.1, C = 3, gradients with noise N(0, 4), a draw every 50 steps with fresh velocities."""

    friction: float
    draws: int
    chains: int = 400
    interval: float = 0.1
    gradient_noise: float = 2.0
    path: int = 50


def run_well(settings: OnWell, request: Request) -> dict[str, Any]:
    """For each seed the distance to exp(−U) in bins, and E θ².

    v = dt·r turns the paper's step into that of `SGHMC`: η = dt², α = C·dt, and β̂ = B·dt = η·4/2. Without friction nothing is added
    and nothing is taken away.
    """
    low, high, bins = WELL
    found: dict[str, list[Any]] = {"total_variation": [], "square": [], "shares": []}
    for seed in range(request.seed, request.seed + request.seeds):
        theta = torch.zeros(settings.chains, 1, requires_grad=True)
        lr = settings.interval**2
        alpha = max(settings.friction * settings.interval, 1e-9)
        brought = lr * settings.gradient_noise**2 / 2
        chain = DrivenSGHMC([theta], lr, num_data=1, friction=alpha, noise=min(brought, alpha), seed=seed)
        stream, kept = torch.Generator().manual_seed(seed), []

        def fresh(step: int) -> None:
            if step % settings.path == 0:
                velocity = settings.interval * torch.randn(theta.shape, generator=stream)  # noqa: B023
                chain._carried(theta, "velocity").copy_(velocity)  # noqa: B023

        def keep(step: int) -> None:
            if (step + 1) % settings.path == 0 and step >= 4 * settings.path:
                kept.append(theta.detach().clone())  # noqa: B023

        steps = (4 + settings.draws // settings.chains) * settings.path
        driven(theta, chain, well, steps, settings.gradient_noise, fresh, keep)
        draws = torch.cat(kept).double().flatten()
        shares = torch.histc(draws, bins, low, high) / len(draws)
        outside = 1 - float(shares.sum())
        found["total_variation"].append(0.5 * (float((shares - exact_well()).abs().sum()) + outside))
        found["square"].append(float(draws.square().mean()))
        found["shares"].append(shares.tolist())
    return {**found, "shares": found["shares"][0]}


CENTRES = torch.tensor([(2.0 * i, 2.0 * j) for i, j in itertools.product(range(-2, 3), repeat=2)])
VARIANCE = 0.03


def grid_of_gaussians(theta: Tensor) -> Tensor:
    """Log Σ exp(−‖θ − c‖²/(2·0.03)) over 25 centres."""
    return torch.logsumexp(-(theta[:, None] - CENTRES).square().sum(-1) / (2 * VARIANCE), 1)


@dataclass(frozen=True)
class OnGrid:
    """Zhang et al.: gradients with noise N(0, I), and a start from N(0, I).

    `rate` is their η, with θ' = θ + η∇ + √(2η)ξ, and so half of the ε of `SGLD`. "cyclical": `cycles` waves, of each all but the
    first 50 steps are draws. "plain": η(t − 500)^(−0.55) after 500 steps of η, all are draws.
    """

    kind: Literal["cyclical", "plain"]
    rate: float
    steps: int = 50_000
    cycles: int = 30
    together: int = 4


def run_grid(settings: OnGrid, request: Request) -> dict[str, Any]:
    """Modes that hold at least 1 % of the draws within three standard deviations: in one chain (the mean), and in four together."""
    chains = settings.together * request.seeds
    theta = torch.randn(chains, 2, generator=torch.Generator().manual_seed(request.seed)).requires_grad_()
    chain = DrivenSGLD([theta], 2 * settings.rate, num_data=1, seed=request.seed)
    length = math.ceil(settings.steps / settings.cycles)
    counts, kept = torch.zeros(chains, len(CENTRES)), 0
    path: list[list[float]] = []

    def pace(step: int) -> None:
        if settings.kind == "cyclical":
            share = (math.cos(math.pi * (step % length) / length) + 1) / 2
        else:
            share = max(1, step - 500) ** -0.55
        chain.param_groups[0]["lr"] = 2 * settings.rate * share

    def keep(step: int) -> None:
        nonlocal kept
        if settings.kind == "plain" or step % length >= min(50, length // 2):
            counts.add_((theta.detach()[:, None] - CENTRES).square().sum(-1) < 9 * VARIANCE)
            kept += 1
            if step % max(1, settings.steps // 2000) == 0:
                path.append([round(place, 2) for place in theta.detach()[0].tolist()])

    driven(theta, chain, grid_of_gaussians, settings.steps, 1.0, pace, keep)
    shares = (counts / kept).view(request.seeds, settings.together, -1)
    return {
        "one": (shares >= 0.01).sum(-1).double().mean(1).tolist(),
        "best": (shares >= 0.01).sum(-1).amax(1).tolist(),
        "four": (shares.mean(1) >= 0.01).sum(-1).tolist(),
        "path": path,
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def claims(size: Size) -> list[Bound]:
    """The limits of the two sizes that are judged; the tiny one only shows that it runs."""

    def at(value: float) -> float | None:
        return None if size == "tiny" else value

    def bound(
        label: str, cell: str, key: str, said: str | None = None, low: float | None = None, high: float | None = None
    ) -> Bound:
        return Bound(label, number(cell, key), said, low, high, unit="")

    return [
        bound("mixture: total variation on the grid, SGLD", "mixture-sgld", "total_variation", "figure", high=at(0.15)),
        bound("mixture: total variation on the grid, HMC", "mixture-hmc", "total_variation", high=at(0.03)),
        bound("mixture: SGLD's mass at θ₂ > 0 (exact: 0.52)", "mixture-sgld", "upper", "both modes", at(0.25), at(0.75)),
        bound("double well: total variation, with friction", "well-friction", "total_variation", "agrees", high=at(0.05)),
        bound("double well: total variation, without friction", "well-none", "total_variation", "does not", low=at(0.1)),
        bound("25 Gaussians: modes in one chain, cyclical", "grid-cyclical", "one", "20 (one run)", low=at(15)),
        bound("25 Gaussians: modes in one chain, 60 cycles", "grid-60", "one", low=at(20)),
        bound("25 Gaussians: modes in four chains, cyclical", "grid-cyclical", "four", "25 (one run)", low=at(22)),
        bound("25 Gaussians: modes in four chains, 60 cycles", "grid-60", "four", low=at(25)),
        bound("25 Gaussians: modes in one chain, SGLD", "grid-plain", "one", "1", high=at(8)),
        bound("25 Gaussians: modes in four chains, SGLD", "grid-plain", "four", "4", high=at(8)),
    ]


def sheets(results: Results) -> list[Sheet]:
    """Chains of the grid and of the well, further numbers."""
    rows = []
    for cell, words in (("grid-cyclical", "cyclical, 30 cycles"), ("grid-60", "cyclical, 60 cycles"), ("grid-plain", "SGLD")):
        if (row := results.get(cell)) is not None:
            rows.append((words, *(mean(row[key]).text(2) for key in ("one", "best", "four"))))
    wells = []
    for cell, words in (("well-friction", "with friction"), ("well-none", "without")):
        if (row := results.get(cell)) is not None:
            wells.append((words, mean(row["total_variation"]).text(3), mean(row["square"]).text(3)))
    found = []
    if rows:
        found.append(
            Sheet("25 Gaussians, modes that hold 1 %", ("chain", "one chain", "best of four", "four together"), tuple(rows))
        )
    if wells:
        exact = float((exact_well() * torch.linspace(-2.35, 2.35, 48).double().square()).sum())
        found.append(Sheet(f"Double well (exact E θ²: {exact:.2f})", ("SGHMC", "total variation", "E θ²"), tuple(wells)))
    return found


def draw(results: Results) -> Figure:
    """The mixture's posterior exactly and by SGLD; the well's density; the path of one chain of either kind over the grid."""
    figure, axes = figures.new(2, 3, (11.0, 7.0))
    (low1, high1), (low2, high2) = EXTENT
    for ax, (title, cells) in zip(
        axes[0], (("exact posterior", exact_cells().tolist()), ("SGLD", look(results, "mixture-sgld", "cells")))
    ):
        ax.set_visible(cells is not None)
        if cells is not None:
            ax.imshow(torch.tensor(cells).T, origin="lower", extent=(low1, high1, low2, high2), aspect="auto", cmap="viridis")
            ax.set(title=title, xlabel="θ₁", ylabel="θ₂")
    low, high, bins = WELL
    edges = torch.linspace(low, high, bins + 1).tolist()
    width = (high - low) / bins
    axes[0, 2].stairs((exact_well() / width).tolist(), edges, color="black", label="exact")
    for cell, words, colour in (("well-friction", "with friction", "C0"), ("well-none", "without", "C3")):
        if (shares := look(results, cell, "shares")) is not None:
            axes[0, 2].stairs([share / width for share in shares], edges, color=colour, label=words)
    axes[0, 2].set(title="SGHMC in a double well", xlabel="θ")
    axes[0, 2].legend(fontsize="small")
    for ax, (cell, words) in zip(
        axes[1],
        (("grid-plain", "SGLD, one chain"), ("grid-cyclical", "30 cycles, one chain"), ("grid-60", "60 cycles, one chain")),
    ):
        path = look(results, cell, "path")
        ax.set_visible(path is not None)
        if path is not None:
            ax.plot(*zip(*path), ".", markersize=1.2, color="C0")
            ax.plot(*CENTRES.T.tolist(), "+", color="0.5", markersize=5)
            ax.set(title=words, xlim=(-6, 6), ylim=(-6, 6))
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells

LONG = HMC(draws=5000, chains=4, warmup=1000, leapfrogs=8)
CELLS_OF: dict[str, tuple[Callable[[Any, Request], dict[str, Any]], dict[Size, Any]]] = {
    "mixture-sgld": (
        run_mixture,
        {
            "full": OnMixture(published(10_000, 50_000), 1),
            "reduced": OnMixture(published(1000, 10_000), 10),
            "tiny": OnMixture(published(3, 30), 2),
        },
    ),
    "mixture-hmc": (
        run_mixture,
        {"full": OnMixture(LONG, 10), "reduced": OnMixture(LONG, 4), "tiny": OnMixture(replace(LONG, draws=30, warmup=20), 2)},
    ),
    "well-friction": (run_well, {"full": OnWell(3.0, 80_000), "reduced": OnWell(3.0, 80_000), "tiny": OnWell(3.0, 400)}),
    "well-none": (run_well, {"full": OnWell(0.0, 80_000), "reduced": OnWell(0.0, 80_000), "tiny": OnWell(0.0, 400)}),
    "grid-cyclical": (
        run_grid,
        {"full": OnGrid("cyclical", 0.07), "reduced": OnGrid("cyclical", 0.07), "tiny": OnGrid("cyclical", 0.07, 100, 5)},
    ),
    "grid-60": (
        run_grid,
        {
            "full": OnGrid("cyclical", 0.07, cycles=60),
            "reduced": OnGrid("cyclical", 0.07, cycles=60),
            "tiny": OnGrid("cyclical", 0.07, 120, 6),
        },
    ),
    "grid-plain": (
        run_grid,
        {"full": OnGrid("plain", 0.043), "reduced": OnGrid("plain", 0.043), "tiny": OnGrid("plain", 0.043, 100)},
    ),
}
EVERY: dict[Size, Sequence[str]] = {size: [name for name, (_, sizes) in CELLS_OF.items() if size in sizes] for size in SIZES}
REPRODUCTIONS = {
    "toy-chains": Reproduction(
        "toy-chains",
        "Stochastic-gradient chains where the law is known",
        "Bayesian Learning via Stochastic Gradient Langevin Dynamics. Max Welling and Yee Whye Teh. ICML, 2011; Stochastic "
        "Gradient Hamiltonian Monte Carlo. Tianqi Chen, Emily B. Fox and Carlos Guestrin. ICML, 2014; Cyclical Stochastic "
        "Gradient MCMC for Bayesian Deep Learning. Ruqi Zhang, Chunyuan Li, Jianyi Zhang, Changyou Chen and Andrew Gordon "
        "Wilson. ICLR, 2020.",
        tuple(Cell(name, run, sizes) for name, (run, sizes) in CELLS_OF.items()),
        (
            Part("table", "1", "Distances to the exact laws, and modes", EVERY, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "laws", "Laws and paths", EVERY, draw=draw),
        ),
        "toy-chains",
    )
}
