"""Radial laws: a uniform direction and a normal radius around the mean of each weight tensor."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, Family
from plausible.blocks.variational import inverse_softplus
from plausible.core.weights import Weights

EXPECTED_LOG_RADIUS = -0.5 * (0.5772156649015329 + math.log(2))  # E log|r| of r ~ N(0, 1)


class RadialFamily(Family):
    """w = μ + σ∘u·r for each weight tensor of d elements, u uniform on the sphere, r ~ N(0, 1), σ = softplus(rho).

    The radius |r| is half-normal in any dimension, where that of a Gaussian is near √d. In Cartesian coordinates z = (w − μ)/σ,

        q(w) = √(2/π) e^{−|z|²/2} / (S_d |z|^{d−1} Π σ),   S_d = 2π^{d/2}/Γ(d/2) the area of the unit sphere,
        H(q) = Σ log σ + log S_d + (d − 1) E log|r| + ½ log(π/2) + ½.

    Each z_i has mean 0 and variance 1/d, so the marginal scales are σ/√d; the z_i are uncorrelated and not independent.
    """

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:  # noqa: ARG002
        """The weights, and σ = scale·√d, which makes `scale` the marginal scale."""
        theta = {f"mean of {name}": weight for name, weight in weights.items()}
        for name, weight in weights.items():
            theta[f"rho of {name}"] = inverse_softplus(torch.full_like(weight, scale * math.sqrt(weight.numel())))
        return theta

    def noise(self, parameters: Weights) -> Weights:
        means = {name: parameters[f"mean of {name}"] for name in self.like}
        radii = {f"radius of {name}": mean.new_empty(()) for name, mean in means.items()}
        return {**{f"direction of {name}": mean for name, mean in means.items()}, **radii}

    def mirrored(self, noise: Weights) -> Weights:
        """The opposite radius in the same direction: both turned round would be the same draw."""
        return {name: -value if name.startswith("radius of ") else value for name, value in noise.items()}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        drawn = {}
        for name in self.like:
            direction = noise[f"direction of {name}"]
            # a normalised Gaussian vector is uniform on the sphere
            length = torch.rsqrt(direction.square().sum().clamp_min(1e-30))
            scale = F.softplus(parameters[f"rho of {name}"])
            drawn[name] = parameters[f"mean of {name}"] + scale * direction * (noise[f"radius of {name}"] * length)
        return Drawn(drawn)

    def entropy(self, parameters: Weights) -> Tensor:
        logs = [F.softplus(parameters[f"rho of {name}"]).log().sum() for name in self.like]
        constant = sum(
            log_sphere(w.numel()) + (w.numel() - 1) * EXPECTED_LOG_RADIUS + 0.5 * math.log(math.pi / 2) + 0.5
            for w in self.like.values()
        )
        return torch.stack(logs).sum() + constant

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        """The half-normal density of |z| over the area of its sphere and Π σ."""
        terms = []
        for name, weight in weights.items():
            scale, size = F.softplus(parameters[f"rho of {name}"]), weight.numel()
            square = ((weight - parameters[f"mean of {name}"]) / scale).square().sum()
            constant = 0.5 * math.log(2 / math.pi) - log_sphere(size)
            # log |z|^{d−1}: the density has a pole at the mean where d > 1
            radial = 0.5 * (size - 1) * square.clamp_min(1e-30).log() if size > 1 else 0.0
            terms.append(constant - 0.5 * square - radial - scale.log().sum())
        return torch.stack(terms).sum()

    def means(self, parameters: Weights) -> Weights:
        return {name: parameters[f"mean of {name}"] for name in self.like}

    def scales(self, parameters: Weights) -> Weights:
        return {name: F.softplus(parameters[f"rho of {name}"]) / math.sqrt(w.numel()) for name, w in self.like.items()}

    def status(self, name: str) -> str:  # noqa: ARG002
        return "inferred, radially"


def log_sphere(dimension: int) -> float:
    """Log of the area of the unit sphere in d dimensions, 2π^{d/2}/Γ(d/2)."""
    return math.log(2) + 0.5 * dimension * math.log(math.pi) - math.lgamma(0.5 * dimension)
