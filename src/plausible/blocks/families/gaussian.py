"""Gaussians over all random weights: of full rank, of a diagonal and a few directions, of rows and columns of each matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, Family, FlatFamily, positive_lower, raw_lower, sloping, standard_log_density
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core import random
from plausible.core.weights import Weights


class FullRankFamily(FlatFamily):
    """w = μ + L ε, ε ~ N(0, I): N(μ, L Lᵀ) with L lower triangular, its diagonal softplus of that of the parameter `factor` [P, P].

    H(q) = Σ log L_ii + P/2 · log 2πe. Memory P² for the factor; a draw P² multiplications.
    """

    gaussian: ClassVar[bool] = True

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:  # noqa: ARG002
        mean = self.vector(weights)
        return {"mean": mean, "factor": raw_lower(torch.diag(torch.full_like(mean, scale)))}

    def noise(self, parameters: Weights) -> Weights:
        return {"noise": parameters["mean"]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        return Drawn(self.named(parameters["mean"] + positive_lower(parameters["factor"]) @ noise["noise"]))

    def entropy(self, parameters: Weights) -> Tensor:
        return F.softplus(parameters["factor"].diagonal()).log().sum() + HALF_LOG_2PIE * self.size

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        residual = (self.vector(weights) - parameters["mean"])[:, None]
        factor = positive_lower(parameters["factor"])
        # a triangular solve: no inverse, and the determinant is on the diagonal
        white = torch.linalg.solve_triangular(factor, residual, upper=False)
        return standard_log_density(white) - factor.diagonal().log().sum()

    def landing(self, parameters: Weights, drawn: Drawn, noise: Weights) -> Tensor:
        """Log N(ε; 0, I) − Σ log L_ii, with the slope −L⁻ᵀε.

        From the noise itself: the way back from the weights, L⁻¹(w − μ), loses all digits where L is badly conditioned, as
        triangular matrices with random entries are.
        """
        white, factor = noise["noise"], positive_lower(parameters["factor"]).detach()
        slope = -torch.linalg.solve_triangular(factor.T, white[:, None], upper=True).squeeze(1)
        value = standard_log_density(white) - factor.diagonal().log().sum()
        return sloping(value, self.named(slope), drawn.weights)

    def means(self, parameters: Weights) -> Weights:
        return self.named(parameters["mean"])

    def scales(self, parameters: Weights) -> Weights:
        return self.named(positive_lower(parameters["factor"]).square().sum(1).sqrt())

    def covariance(self, parameters: Weights) -> Tensor:
        factor = positive_lower(parameters["factor"])
        return factor @ factor.T


SHARE = 0.1  # scale of the directions at the start, as a part of that of the diagonal: at 0 they would have no gradient


class LowRankFamily(FlatFamily):
    """w = μ + d∘ε + U z, ε ~ N(0, I_P), z ~ N(0, I_R): N(μ, D² + U Uᵀ) with d = softplus(rho) > 0 and U [P, R].

    With V = D⁻¹U and C = I + VᵀV = K Kᵀ:  log det(D² + U Uᵀ) = 2 Σ log d + 2 Σ log K_ii  (determinant lemma), and
    rᵀ(D² + U Uᵀ)⁻¹r = |e|² − |K⁻¹Vᵀe|², e = D⁻¹r  (Woodbury). Memory P (R + 2), time of a draw P·R, of the entropy P·R².
    """

    gaussian: ClassVar[bool] = True

    def __init__(self, like: Mapping[str, Tensor], rank: int):
        super().__init__(like)
        self.rank = rank

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        mean = self.vector(weights)
        directions = random.normal(random.fold(key, 17), 0, mean.new_empty(self.size, self.rank))
        return {
            "mean": mean,
            "rho": inverse_softplus(torch.full_like(mean, scale)),
            # together they add SHARE² of the variance, whatever the rank
            "directions": directions * (SHARE * scale / math.sqrt(self.rank)),
        }

    def noise(self, parameters: Weights) -> Weights:
        return {"own": parameters["mean"], "shared": parameters["directions"][0]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        diagonal, shared = F.softplus(parameters["rho"]), parameters["directions"] @ noise["shared"]
        return Drawn(self.named(parameters["mean"] + diagonal * noise["own"] + shared))

    def _small(self, parameters: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """The diagonal d [P], V [P, R] and K [R, R]."""
        # half precision has no Cholesky factors
        wide = torch.promote_types(parameters["rho"].dtype, torch.float32)
        diagonal = F.softplus(parameters["rho"].to(wide))
        ratio = parameters["directions"].to(wide) / diagonal[:, None]
        inner = torch.eye(self.rank, dtype=ratio.dtype, device=ratio.device) + ratio.T @ ratio
        return diagonal, ratio, torch.linalg.cholesky_ex(inner, check_errors=False).L  # without waiting for the device

    def entropy(self, parameters: Weights) -> Tensor:
        diagonal, _, inner = self._small(parameters)
        return diagonal.log().sum() + inner.diagonal().log().sum() + HALF_LOG_2PIE * self.size

    def log_density(self, parameters: Weights, weights: Weights) -> Tensor:
        diagonal, ratio, inner = self._small(parameters)
        white = (self.vector(weights) - parameters["mean"]) / diagonal
        # Woodbury: an R × R problem in the place of P × P
        along = torch.linalg.solve_triangular(inner, (ratio.T @ white)[:, None], upper=False)
        quadratic = white.square().sum() - along.square().sum()
        logs = diagonal.log().sum() + inner.diagonal().log().sum()
        return -0.5 * quadratic - logs - 0.5 * math.log(2 * math.pi) * self.size

    def means(self, parameters: Weights) -> Weights:
        return self.named(parameters["mean"])

    def scales(self, parameters: Weights) -> Weights:
        return self.named((F.softplus(parameters["rho"]).square() + parameters["directions"].square().sum(1)).sqrt())

    def covariance(self, parameters: Weights) -> Tensor:
        directions = parameters["directions"]
        return torch.diag(F.softplus(parameters["rho"]).square()) + directions @ directions.T


class MatrixNormalFamily(Family):
    """W = M + A E Bᵀ, E ~ N(0, I): Cov(W_ij, W_kl) = (A Aᵀ)_ik (B Bᵀ)_jl for each weight of two axes or more, seen as [n, p].

    A [n, n] and B [p, p] are lower triangular with positive diagonals, or with `covariance="diagonal"` positive diagonals
    alone. H = p Σ log A_ii + n Σ log B_jj + np/2 · log 2πe. Weights with fewer axes are independent Gaussians. Memory n² + p²
    (n + p) beside the mean; a draw costs np(n + p).
    """

    gaussian: ClassVar[bool] = True

    def __init__(self, like: Mapping[str, Tensor], covariance: Literal["full", "diagonal"] = "full"):
        super().__init__(like)
        self.full = covariance == "full"
        self.shapes = {name: (w.shape[0], math.prod(w.shape[1:])) if w.ndim > 1 else None for name, w in self.like.items()}

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:  # noqa: ARG002
        theta = {}
        for name, weight in weights.items():
            shape = self.shapes[name]
            theta[f"mean of {name}"] = weight
            if shape is None:
                theta[f"rho of {name}"] = inverse_softplus(torch.full_like(weight, scale))
                continue
            for side, count in zip(("rows", "columns"), shape):
                # both sides multiply: a root of the scale for each
                diagonal = weight.new_full((count,), math.sqrt(scale))
                theta[f"{side} of {name}"] = raw_lower(torch.diag(diagonal)) if self.full else inverse_softplus(diagonal)
        return theta

    def factors(self, parameters: Weights, name: str) -> tuple[Tensor, Tensor]:
        """A and B: [n, n] and [p, p], or their diagonals [n] and [p]."""
        positive = positive_lower if self.full else F.softplus
        return positive(parameters[f"rows of {name}"]), positive(parameters[f"columns of {name}"])

    def noise(self, parameters: Weights) -> Weights:
        return {name: parameters[f"mean of {name}"] for name in self.like}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        drawn = {}
        for name, shape in self.shapes.items():
            mean, white = parameters[f"mean of {name}"], noise[name]
            if shape is None:
                drawn[name] = mean + F.softplus(parameters[f"rho of {name}"]) * white
                continue
            rows, columns = self.factors(parameters, name)
            flat = white.reshape(shape)
            moved = rows @ flat @ columns.T if self.full else rows[:, None] * flat * columns
            drawn[name] = mean + moved.reshape(mean.shape)
        return Drawn(drawn)

    def _log_volume(self, parameters: Weights, name: str) -> Tensor:
        """Log |det| of the map from noise to weight: p Σ log A_ii + n Σ log B_jj."""
        shape = self.shapes[name]
        if shape is None:
            return F.softplus(parameters[f"rho of {name}"]).log().sum()
        rows, columns = (f.diagonal() if self.full else f for f in self.factors(parameters, name))
        # det(A ⊗ B) = det(A)^p det(B)^n
        return shape[1] * rows.log().sum() + shape[0] * columns.log().sum()

    def entropy(self, parameters: Weights) -> Tensor:
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
            white = noise[name]
            # from the noise: solving back would lose digits where a factor is badly conditioned
            values.append(standard_log_density(white) - self._log_volume(held, name))
            if shape is None:
                slopes[name] = -white / F.softplus(held[f"rho of {name}"])
                continue
            # θ is held: the gradient flows through the draw alone
            rows, columns = self.factors(held, name)
            slope = white.reshape(shape)
            if self.full:
                slope = torch.linalg.solve_triangular(rows.T, slope, upper=True)
                slope = torch.linalg.solve_triangular(columns, slope, upper=False, left=False)
            else:
                slope = slope / rows[:, None] / columns
            slopes[name] = -slope.reshape(white.shape)
        return sloping(torch.stack(values).sum(), slopes, drawn.weights)

    def means(self, parameters: Weights) -> Weights:
        return {name: parameters[f"mean of {name}"] for name in self.like}

    def scales(self, parameters: Weights) -> Weights:
        scales = {}
        for name, weight in self.like.items():
            if self.shapes[name] is None:
                scales[name] = F.softplus(parameters[f"rho of {name}"])
                continue
            rows, columns = (f.square().sum(1).sqrt() if self.full else f for f in self.factors(parameters, name))
            scales[name] = (rows[:, None] * columns).reshape(weight.shape)
        return scales

    def status(self, name: str) -> str:
        return "inferred, rows × columns" if self.shapes[name] else "inferred, independent"
