"""Four standard problems on which every method is held against long chains: linear, a gap, two moons, boston.

Noise and prior are known and the same for all, so that all methods have one posterior to find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from plausible.analysis.fidelity.regions import find
from plausible.apps import datasets
from plausible.apps.datasets import toys
from plausible.apps.tables import mlp
from plausible.core import random
from plausible.core.likelihoods import Categorical, Gaussian, Likelihood
from plausible.core.priors import Gaussian as GaussianPrior
from plausible.core.priors import Prior
from plausible.core.serialise import Opaque
from plausible.core.storage import MemoryDraws
from plausible.fitting import fit
from plausible.methods import MAP
from plausible.posteriors.draws import DrawsPosterior

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """Data and a model: `x` are the inputs at which functions and predictions are compared, `held` is for the log-likelihood.

    `line` are inputs along which bands are drawn, where there is one input.
    """

    title: str
    network: nn.Module
    likelihood: Likelihood
    prior: Prior
    data: Pair
    x: Tensor
    held: Pair
    regions: Mapping[str, Tensor]
    line: Tensor | None = None

    @property
    def weights(self) -> int:
        """How many."""
        return sum(weight.numel() for weight in self.network.parameters())


TITLES = MappingProxyType(
    {"linear": "Linear regression", "gap": "One input with a gap", "moons": "Two moons", "boston": "Boston, 1 × 50"}
)
NOISE, CORRELATION = 0.5, 0.9


@cache
def problem(name: str) -> Problem:
    """The problem of this name."""
    made = {"linear": _linear, "gap": _gap, "moons": _moons, "boston": _boston}
    if name not in made:
        raise ValueError(f"there is no standard problem {name!r}; there are: {', '.join(made)}")
    return made[name]()


def _network(*widths: int) -> nn.Module:
    with random.isolated(0):
        return mlp(widths[0], tuple(widths[1:-1]), widths[-1], "tanh")


def _linear() -> Problem:
    """Five inputs with pairwise correlations of 0.9: y = x·w + N(0, ½²), w ~ N(0, I)."""
    stream = random.generator(0, 91)
    own, shared = torch.randn(100, 5, generator=stream), torch.randn(100, 1, generator=stream)
    x = (1 - CORRELATION) ** 0.5 * own + CORRELATION**0.5 * shared
    y = x @ torch.randn(5, 1, generator=stream) + NOISE * torch.randn(100, 1, generator=stream)
    with random.isolated(0):
        network = nn.Linear(5, 1, bias=False)
    data, held = (x[:50], y[:50]), (x[50:], y[50:])
    return Problem(TITLES["linear"], network, Gaussian(NOISE), GaussianPrior(1.0), data, held[0], held, find(data[0]))


def exact(draws: int = 4000, seed: int = 0) -> DrawsPosterior:
    """Independent draws of the exact posterior of the linear problem, N(Λ⁻¹xᵀy/σ², Λ⁻¹) with Λ = xᵀx/σ² + I."""
    own = problem("linear")
    x, y = (part.double() for part in own.data)
    precision = x.T @ x / NOISE**2 + torch.eye(x.shape[1], dtype=torch.float64)
    factor = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve(x.T @ y / NOISE**2, factor)  # [5, 1]
    noise = torch.randn(x.shape[1], draws, generator=random.generator(seed, 92), dtype=torch.float64)
    weights = mean + torch.linalg.solve_triangular(factor.T, noise, upper=True)
    settings: dict[str, Any] = {"likelihood": own.likelihood, "prior": own.prior, "compile": False, "progress": False}
    model = fit(own.network, own.data, MAP(epochs=1), **settings).model
    return DrawsPosterior(Opaque("exact"), model, {}, MemoryDraws({"weight": weights.T[:, None].float()}))


def _gap() -> Problem:
    """Y = sin 2x + N(0, 0.2²) with nothing seen between −1 and 1; 20 tanh units."""
    data, stream = toys.gap(60), random.generator(0, 93)
    x = 8 * torch.rand(80, 1, generator=stream) - 4
    mean, noise = toys.truth("gap", x)
    held = x, mean + noise * torch.randn(80, 1, generator=stream)
    return Problem(
        TITLES["gap"],
        _network(1, 20, 1),
        Gaussian(0.2),
        GaussianPrior(1.0),
        data,
        x,
        held,
        find(data[0]),
        torch.linspace(-5, 5, 101)[:, None],
    )


def _moons() -> Problem:
    """Two classes in the plane; 20 tanh units. Predictions are compared on a grid around the data."""
    data, held = toys.two_moons(100, noise=0.2), toys.two_moons(100, noise=0.2, seed=1)
    grid = torch.cartesian_prod(torch.linspace(-2.5, 3.5, 11), torch.linspace(-2.0, 2.5, 10))
    return Problem(TITLES["moons"], _network(2, 20, 2), Categorical(), GaussianPrior(1.0), data, grid, held, find(data[0]))


def _boston() -> Problem:
    """The first published split, standardised; 50 tanh units, weights N(0, 0.3²), noise 0.3 of the targets' standard deviation."""
    split = datasets.uci("boston").split(0).standardised()
    return Problem(
        TITLES["boston"],
        _network(split.train[0].shape[1], 50, 1),
        Gaussian(0.3),
        GaussianPrior(0.3),
        split.train,
        split.test[0],
        split.test,
        find(split.train[0]),
    )
