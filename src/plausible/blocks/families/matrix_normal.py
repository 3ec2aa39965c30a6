"""Matrix-variate Gaussians: a covariance between the rows and one between the columns of each weight matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, Family, positive_lower, raw_lower, sloping, standard_log_density
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core.weights import Weights


class MatrixNormalFamily(Family):
    """W = M + A E Bᵀ, E ~ N(0, I): Cov(W_ij, W_kl) = (A Aᵀ)_ik (B Bᵀ)_jl for each weight of two axes or more, seen as [n, p].

    A [n, n] and B [p, p] are lower triangular with positive diagonals, or with `covariance="diagonal"` positive diagonals alone.
    H = p Σ log A_ii + n Σ log B_jj + np/2 · log 2πe. Weights with fewer axes are independent Gaussians. Memory n² + p² (n + p)
    beside the mean; a draw costs np(n + p).
    """

    gaussian: ClassVar[bool] = True

    def __init__(self, like: Mapping[str, Tensor], covariance: Literal["full", "diagonal"] = "full"):
        super().__init__(like)
        self.full = covariance == "full"
        self.shapes = {name: (w.shape[0], math.prod(w.shape[1:])) if w.ndim > 1 else None for name, w in self.like.items()}

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:  # noqa: ARG002
        """The weights; both factors √scale times the identity."""
        found = {}
        for name, weight in weights.items():
            shape = self.shapes[name]
            found[f"mean of {name}"] = weight
            if shape is None:
                found[f"rho of {name}"] = inverse_softplus(torch.full_like(weight, scale))
                continue
            for side, count in zip(("rows", "columns"), shape):
                diagonal = weight.new_full((count,), math.sqrt(scale))
                found[f"{side} of {name}"] = raw_lower(torch.diag(diagonal)) if self.full else inverse_softplus(diagonal)
        return found

    def factors(self, parameters: Weights, name: str) -> tuple[Tensor, Tensor]:
        """A and B: [n, n] and [p, p], or their diagonals [n] and [p]."""
        positive = positive_lower if self.full else F.softplus
        return positive(parameters[f"rows of {name}"]), positive(parameters[f"columns of {name}"])

    def noise(self, parameters: Weights) -> Weights:
        """E of the shape of each weight."""
        return {name: parameters[f"mean of {name}"] for name in self.like}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """M + A E Bᵀ; μ + σ ε for weights with fewer than two axes."""
        drawn = {}
        for name, shape in self.shapes.items():
            mean, own = parameters[f"mean of {name}"], noise[name]
            if shape is None:
                drawn[name] = mean + F.softplus(parameters[f"rho of {name}"]) * own
                continue
            rows, columns = self.factors(parameters, name)
            flat = own.reshape(shape)
            moved = rows @ flat @ columns.T if self.full else rows[:, None] * flat * columns
            drawn[name] = mean + moved.reshape(mean.shape)
        return Drawn(drawn)

    def _log_volume(self, parameters: Weights, name: str) -> Tensor:
        """Log |det| of the map from noise to weight: p Σ log A_ii + n Σ log B_jj."""
        shape = self.shapes[name]
        if shape is None:
            return F.softplus(parameters[f"rho of {name}"]).log().sum()
        rows, columns = (f.diagonal() if self.full else f for f in self.factors(parameters, name))
        return shape[1] * rows.log().sum() + shape[0] * columns.log().sum()

    def entropy(self, parameters: Weights) -> Tensor:
        """Σ over weights of log |det| + size/2 · log 2πe."""
        size = sum(weight.numel() for weight in self.like.values())
        return torch.stack([self._log_volume(parameters, name) for name in self.like]).sum() + HALF_LOG_2PIE * size

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        """Log q(w): the noise A⁻¹(W − M)B⁻ᵀ under N(0, I), less log |det|."""
        terms = []
        for name, shape in self.shapes.items():
            white = weights[name] - parameters[f"mean of {name}"]
            if shape is None:
                white = white / F.softplus(parameters[f"rho of {name}"])
            else:
                rows, columns = self.factors(parameters, name)
                white = white.reshape(shape)
                if self.full:
                    white = torch.linalg.solve_triangular(rows, white, upper=False)
                    white = torch.linalg.solve_triangular(columns.T, white, upper=True, left=False)
                else:
                    white = white / rows[:, None] / columns
            terms.append(standard_log_density(white) - self._log_volume(parameters, name))
        return torch.stack(terms).sum()

    def landing(self, parameters: Weights, drawn: Drawn, noise: Weights) -> Tensor:
        """Log N(E; 0, I) − log |det| from the noise itself, with the slope −A⁻ᵀ E B⁻¹."""
        held = {name: value.detach() for name, value in parameters.items()}
        values, slopes = [], {}
        for name, shape in self.shapes.items():
            own = noise[name]
            values.append(standard_log_density(own) - self._log_volume(held, name))
            if shape is None:
                slopes[name] = -own / F.softplus(held[f"rho of {name}"])
                continue
            rows, columns = self.factors(held, name)
            slope = own.reshape(shape)
            if self.full:
                slope = torch.linalg.solve_triangular(rows.T, slope, upper=True)
                slope = torch.linalg.solve_triangular(columns, slope, upper=False, left=False)
            else:
                slope = slope / rows[:, None] / columns
            slopes[name] = -slope.reshape(own.shape)
        return sloping(torch.stack(values).sum(), slopes, drawn.weights)

    def means(self, parameters: Weights) -> Weights:
        return {name: parameters[f"mean of {name}"] for name in self.like}

    def scales(self, parameters: Weights) -> Weights:
        """√((A Aᵀ)_ii (B Bᵀ)_jj) by name."""
        found = {}
        for name, weight in self.like.items():
            if self.shapes[name] is None:
                found[name] = F.softplus(parameters[f"rho of {name}"])
                continue
            rows, columns = (f.square().sum(1).sqrt() if self.full else f for f in self.factors(parameters, name))
            found[name] = (rows[:, None] * columns).reshape(weight.shape)
        return found

    def status(self, name: str) -> str:
        return "inferred, rows × columns" if self.shapes[name] else "inferred, independent"
