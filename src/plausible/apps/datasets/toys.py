"""Toy problems: functions of a seed, with what is known about them.

Regression and classification toys return `(x, y)`, ready for `plausible.fit`; `truth` gives mean and standard deviation of y
at any x. Densities return an object with `log_prob`. Everything is drawn by a generator of its own; the global one is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def checked(n: int, noise: float = 0.0) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a positive whole number, got {n!r}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be a standard deviation, finite and not negative, got {noise}")


def _blundell_curve(x: Tensor, error: Tensor) -> Tensor:
    shifted = 2 * math.pi * (x + error)
    return x + 0.3 * shifted.sin() + 0.3 * (2 * shifted).sin() + error


def blundell(n: int = 1000, noise: float = 0.02, low: float = 0.0, high: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A curve, y = x + 0.3 sin 2π(x+ε) + 0.3 sin 4π(x+ε) + ε, ε ~ N(0, noise²), x ~ U(low, high)

    x and y float32 `[n, 1]`. The custom is to look at [−0.2, 1.2], most of which has no data. The paper writes N(0, 0.02),
    read here as the standard deviation.

    Blundell, Cornebise, Kavukcuoglu, Wierstra 2015, Weight uncertainty in neural networks, section 5.2.
    """
    checked(n, noise)
    if not low < high:
        raise ValueError(f"low must be below high, got {low} and {high}")
    random = generator(seed)
    x = low + (high - low) * torch.rand(n, 1, generator=random)
    return x, _blundell_curve(x, noise * torch.randn(n, 1, generator=random))


def two_moons(n: int = 200, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(cos t, sin t) for class 0 and (1 − cos t, ½ − sin t) for class 1, t ~ U(0, π), plus N(0, noise²) on both axes

    x float32 `[n, 2]`, y int64 `[n]`; ⌈n/2⌉ of class 0, in random order.
    """
    checked(n, noise)
    random = generator(seed)
    y = (torch.arange(n) >= (n + 1) // 2).long()[torch.randperm(n, generator=random)]
    t = math.pi * torch.rand(n, generator=random)
    upper, lower = torch.stack([t.cos(), t.sin()], 1), torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)
    return torch.where(y[:, None] == 0, upper, lower) + noise * torch.randn(n, 2, generator=random), y


def gap(n: int = 100, noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A curve with a gap in x, y = sin 2x + N(0, noise²), x ~ U([−3, −1] ∪ [1, 3])

    x and y float32 `[n, 1]`. Between −1 and 1 nothing was seen: epistemic uncertainty should be larger there.
    """
    checked(n, noise)
    random = generator(seed)
    u = 4 * torch.rand(n, 1, generator=random)
    x = torch.where(u < 2, u - 3, u - 1)
    return x, (2 * x).sin() + noise * torch.randn(n, 1, generator=random)


def heteroscedastic(n: int = 750, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A curve of changing noise, y = 7 sin x + 3 |cos(x/2)| ε, ε ~ N(0, 1), x ~ ⅓ N(−4, 0.4²) + ⅓ N(0, 0.9²) + ⅓ N(4, 0.4²)

    x and y float32 `[n, 1]`. Noise is largest where data are densest, so that the two kinds of uncertainty differ in place.

    Depeweg, Hernández-Lobato, Doshi-Velez, Udluft 2018, Decomposition of uncertainty in Bayesian deep learning.
    """
    checked(n)
    random = generator(seed)
    which = torch.randint(3, (n, 1), generator=random)
    x = torch.tensor([-4.0, 0.0, 4.0])[which] + torch.tensor([0.4, 0.9, 0.4])[which] * torch.randn(n, 1, generator=random)
    return x, 7 * x.sin() + 3 * (x / 2).cos().abs() * torch.randn(n, 1, generator=random)


def truth(name: str, x: Tensor, noise: float | None = None) -> tuple[Tensor, Tensor]:
    """(E[y|x], sd[y|x]) of the regression toys `blundell`, `gap` and `heteroscedastic`, in the shape of x

    noise: as given to the toy; None is its default. Of `blundell` by Gauss-Hermite quadrature over ε, the others in closed form.
    """
    if name == "heteroscedastic":
        if noise is not None:
            raise ValueError("noise is a function of x in 'heteroscedastic' and cannot be given")
        return 7 * x.sin(), 3 * (x / 2).cos().abs()
    if name == "gap":
        checked(1, noise or 0.0)
        return (2 * x).sin(), torch.full_like(x, 0.2 if noise is None else noise)
    if name == "blundell":
        checked(1, noise or 0.0)
        nodes, weights = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(80))
        weights = weights / weights.sum()
        y = _blundell_curve(x.double()[..., None], (0.02 if noise is None else noise) * nodes)
        mean = (weights * y).sum(-1)
        variance = (weights * (y - mean[..., None]) ** 2).sum(-1)
        return mean.to(x.dtype), variance.sqrt().to(x.dtype)
    raise ValueError(f"name must be 'blundell', 'gap' or 'heteroscedastic', got {name!r}")


def points(value: Tensor, name: str) -> Tensor:
    """Points in the plane, `[..., 2]`, or a refusal."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape[-1:] != (2,):
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a float tensor of shape [..., 2], got {given}")
    return value


@dataclass(frozen=True, eq=False)
class TiedMeans:
    """θ₁ ~ N(0, 10), θ₂ ~ N(0, 1), xᵢ ~ ½ N(θ₁, 2) + ½ N(θ₁+θ₂, 2); second arguments are variances

    The data x `[n]` and the posterior over θ = (θ₁, θ₂). With data from θ = (0, 1) it has a second mode near (1, −1).

    Welling and Teh 2011, Bayesian learning via stochastic gradient Langevin dynamics, section 5.1.
    """

    x: Tensor

    def log_prior(self, theta: Tensor) -> Tensor:
        """Log p(θ), `[..., 2]` → `[...]`."""
        first, second = points(theta, "theta").unbind(-1)
        return -(first**2) / 20 - second**2 / 2 - math.log(2 * math.pi) - 0.5 * math.log(10)

    def log_likelihood(self, theta: Tensor, rows: Tensor | None = None) -> Tensor:
        """Σ log p(xᵢ|θ) over all data, or over the given rows (not rescaled), `[..., 2]` → `[...]`."""
        first, second = points(theta, "theta")[..., None, :].unbind(-1)
        x = (self.x if rows is None else self.x[rows]).to(theta)
        pair = torch.stack([-((x - first) ** 2) / 4, -((x - first - second) ** 2) / 4])
        return (pair.logsumexp(0) - math.log(2) - 0.5 * math.log(4 * math.pi)).sum(-1)

    def log_prob(self, theta: Tensor) -> Tensor:
        """Log p(θ, x), the posterior up to `log_evidence`, `[..., 2]` → `[...]`; O(n) for each point."""
        return self.log_prior(theta) + self.log_likelihood(theta)

    def exact(self, reach: float = 6.0, side: int = 300) -> tuple[float, Tensor, Tensor]:
        """(log evidence, posterior mean `[2]`, covariance `[2, 2]`) by the midpoint rule on [−reach, reach]², float64."""
        step = 2 * reach / side
        axis = torch.linspace(-reach + step / 2, reach - step / 2, side, dtype=torch.float64)
        theta = torch.cartesian_prod(axis, axis)
        logs = torch.cat([self.log_prob(part) for part in theta.split(20_000)])
        weights = logs.softmax(0)[:, None]
        mean = (weights * theta).sum(0)
        covariance = (weights * (theta - mean)).T @ (theta - mean)
        return float(logs.logsumexp(0) + 2 * math.log(step)), mean, covariance


def tied_means(n: int = 100, theta: tuple[float, float] = (0.0, 1.0), seed: int = 0) -> TiedMeans:
    """N data of `TiedMeans` drawn at `theta`, the mixture posterior of Welling and Teh 2011."""
    checked(n)
    first, second = theta
    random = generator(seed)
    centre = first + second * (torch.rand(n, generator=random) < 0.5)
    return TiedMeans(centre + math.sqrt(2) * torch.randn(n, generator=random))


@dataclass(frozen=True)
class GaussianGrid:
    """p(z) = side⁻² Σ N(z; spacing·(i, j), scale² I) on a centred square grid: modes that a local sampler does not leave."""

    side: int = 5
    spacing: float = 2.0
    scale: float = math.sqrt(0.03)

    def __post_init__(self) -> None:
        if self.side < 1 or self.spacing <= 0 or self.scale <= 0:
            raise ValueError(f"side must be at least 1, spacing and scale positive, got {self}")

    @property
    def means(self) -> Tensor:
        """The centres, `[side², 2]`."""
        axis = self.spacing * (torch.arange(self.side) - (self.side - 1) / 2)
        return torch.cartesian_prod(axis, axis)

    @property
    def variance(self) -> float:
        """Of either coordinate: spacing² (side² − 1)/12 + scale²; the coordinates are uncorrelated, their means 0."""
        return self.spacing**2 * (self.side**2 - 1) / 12 + self.scale**2

    def log_prob(self, z: Tensor) -> Tensor:
        """The normalised log density, `[..., 2]` → `[...]`."""
        distance = ((points(z, "z")[..., None, :] - self.means.to(z)) ** 2).sum(-1)
        logs = -distance / (2 * self.scale**2)
        return logs.logsumexp(-1) - math.log(2 * math.pi * self.scale**2 * self.side**2)

    def sample(self, n: int, seed: int = 0) -> Tensor:
        """Independent exact draws, float32 `[n, 2]`."""
        checked(n)
        random = generator(seed)
        which = torch.randint(self.side**2, (n,), generator=random)
        return self.means[which] + self.scale * torch.randn(n, 2, generator=random)


def gaussians25(scale: float = math.sqrt(0.03)) -> GaussianGrid:
    """25 Gaussians with means {−4, −2, 0, 2, 4}² and variance 0.03: the density of Zhang et al. 2020, section 5.

    Zhang, Li, Zhang, Chen, Wilson 2020, Cyclical stochastic gradient MCMC for Bayesian deep learning.
    """
    return GaussianGrid(scale=scale)
