"""Densities whose laws are known, and what every exact kernel must do on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from plausible.blocks.chains import convergence as diagnostics
from plausible.blocks.chains.density import Density, FunctionDensity, run
from plausible.methods.chains.base import Chains

Z = 4.5
LEVEL = 1e-4  # of a whole test, divided among its comparisons


@dataclass(frozen=True)
class Law:
    """A density with independent draws `[n, P]`, its means and variances, and the distribution functions of its coordinates."""

    target: Density
    draw: Callable[[int, int], Tensor]
    mean: Tensor
    variance: Tensor
    cdfs: tuple[Callable[[Any], Any], ...]


def _stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(scales: tuple[float, ...] = (0.2, 1.0, 3.0), correlation: float = 0.8) -> Law:
    """Correlated coordinates on different scales, not centred."""
    size = len(scales)
    scale = torch.tensor(scales, dtype=torch.float64)
    matrix = (1 - correlation) * torch.eye(size, dtype=torch.float64) + correlation
    covariance = scale[:, None] * matrix * scale
    mean = torch.arange(1.0, size + 1, dtype=torch.float64)
    precision, factor = torch.linalg.inv(covariance), torch.linalg.cholesky(covariance)
    return Law(
        FunctionDensity(lambda q: -0.5 * (((q - mean) @ precision) * (q - mean)).sum(-1), size),
        lambda count, seed: mean + torch.randn(count, size, generator=_stream(seed), dtype=torch.float64) @ factor.T,
        mean,
        scale**2,
        tuple(stats.norm(float(m), float(s)).cdf for m, s in zip(mean, scale)),
    )


def skewed(shapes: tuple[float, ...] = (0.7, 2.0)) -> Law:
    """Logarithms of Gamma variates: e^(aq − e^q), steep on the right and flat on the left."""
    shape = torch.tensor(shapes, dtype=torch.float64)

    def draw(count: int, seed: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return torch.distributions.Gamma(shape, torch.ones_like(shape)).sample((count,)).log()

    return Law(
        FunctionDensity(lambda q: (shape * q - q.exp()).sum(-1), len(shapes)),
        draw,
        torch.digamma(shape),
        torch.polygamma(1, shape),
        tuple(stats.loggamma(a).cdf for a in shapes),
    )


def bimodal() -> Law:
    """Two coordinates, each a mixture of N(−2, 0.5²) and N(1.5, 0.7²) with weights 0.3 and 0.7: slices in several pieces."""
    weight, mean, scale = (torch.tensor(x, dtype=torch.float64) for x in ((0.3, 0.7), (-2.0, 1.5), (0.5, 0.7)))

    def log_density(q: Tensor) -> Tensor:
        each = weight.log() - scale.log() - 0.5 * ((q.unsqueeze(-1) - mean) / scale).square()
        return each.logsumexp(-1).sum(-1)

    def draw(count: int, seed: int) -> Tensor:
        stream = _stream(seed)
        chosen = (torch.rand(count, 2, generator=stream, dtype=torch.float64) > 0.3).long()
        return mean[chosen] + scale[chosen] * torch.randn(count, 2, generator=stream, dtype=torch.float64)

    def cdf(q: Any) -> Any:
        return 0.3 * stats.norm(-2, 0.5).cdf(q) + 0.7 * stats.norm(1.5, 0.7).cdf(q)

    centre = (weight * mean).sum()
    variance = (weight * (scale**2 + mean**2)).sum() - centre**2
    return Law(FunctionDensity(log_density, 2), draw, centre.expand(2), variance.expand(2), (cdf, cdf))


def truncated() -> Law:
    """N(0, I) of two coordinates, the first of them above 1: a likelihood of 0 or 1, whose slices have sharp ends."""
    likelihood = FunctionDensity(lambda q: torch.where(q[:, 0] > 1, 0.0, -torch.inf).double() + 0 * q.sum(-1), 2)

    def draw(count: int, seed: int) -> Tensor:
        stream = _stream(seed)
        level = torch.rand(count, generator=stream, dtype=torch.float64) * stats.norm.sf(1)
        return torch.stack([-torch.special.ndtri(level), torch.randn(count, generator=stream, dtype=torch.float64)], 1)

    tail = stats.truncnorm(1, torch.inf)
    mean, variance = torch.tensor([tail.mean(), 0.0]).double(), torch.tensor([tail.var(), 1.0]).double()
    target = likelihood.bound(precision=torch.ones(2, dtype=torch.float64))
    return Law(target, draw, mean, variance, (tail.cdf, stats.norm.cdf))


def require_moments(position: Tensor, law: Law, slack: float = 0.0) -> None:
    """Means and variances of draws `[draws, chains, P]` within `Z` Monte Carlo standard errors, by effective sample sizes."""
    chains = position.transpose(0, 1)
    for values, expected in ((chains, law.mean), ((chains - law.mean).square(), law.variance)):
        effective = diagnostics.ess_mean(values)
        assert float(effective.min()) > 100, f"too few effective draws to say anything: {effective.tolist()}"
        error = values.flatten(0, 1).std(0) / effective.sqrt()
        z = (values.mean((0, 1)) - expected).abs() / (error + slack * expected.abs() / Z)
        assert float(z.max()) < Z, f"{z.tolist()} standard errors off"


def moved(method: Chains, law: Law, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Independent draws of the law, and where one kept transition (`thin` of them) leads from each."""
    start = law.draw(count, seed + 1000)
    return start, run(method, law.target, start, seed)["position"][-1]


def require_invariance(method: Chains, law: Law, count: int = 4000, seed: int = 0) -> None:
    """Chains that start at independent draws are independent draws after any number of transitions (Gandy & Scott 2020)."""
    start, end = moved(method, law, count, seed)
    assert float(((end - start).square().mean(0) / law.variance).min()) > 1e-2, "nothing moves"
    fresh = law.draw(count, seed + 2000)
    values = [stats.kstest(end[:, i].numpy(), cdf).pvalue for i, cdf in enumerate(law.cdfs)]
    joint = [
        lambda q: (q - law.mean).prod(-1),
        lambda q: ((q - law.mean).square() / law.variance).sum(-1),
        law.target.densities,
    ]
    for function in joint:
        a, b = (function(q) for q in (end, fresh))
        a, b = (x[0] if isinstance(x, tuple) else x for x in (a, b))
        values.append(stats.ks_2samp(a.numpy(), b.numpy()).pvalue)
    assert min(values) > LEVEL / len(values), f"the law has changed: p = {values}"


def require_balance(method: Chains, law: Law, count: int = 20_000, bins: int = 6, seed: int = 0) -> None:
    """π_i T_ij = π_j T_ji between bins of a coordinate: of a pair's moves, as many go one way as the other."""
    start, end = moved(method, law, count, seed)
    for coordinate, cdf in enumerate(law.cdfs):
        places = [(torch.as_tensor(cdf(q[:, coordinate].numpy())) * bins).long().clamp(0, bins - 1) for q in (start, end)]
        table = torch.zeros(bins, bins, dtype=torch.float64)
        table.index_put_(tuple(places), torch.ones(count, dtype=torch.float64), accumulate=True)
        upper = torch.triu_indices(bins, bins, 1)
        there, back = table[upper[0], upper[1]], table.T[upper[0], upper[1]]
        crossing = there + back > 0
        assert int(crossing.sum()) >= bins - 1, "nothing crosses"
        statistic = float(((there - back).square() / (there + back))[crossing].sum())
        p = stats.chi2(int(crossing.sum())).sf(statistic)
        assert p > LEVEL / len(law.cdfs), f"more moves one way than back: p = {p}"


__all__ = [
    "LEVEL",
    "Law",
    "Z",
    "bimodal",
    "gaussian",
    "moved",
    "require_balance",
    "require_invariance",
    "require_moments",
    "skewed",
    "truncated",
]
