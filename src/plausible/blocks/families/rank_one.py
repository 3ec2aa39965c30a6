"""Rank-one factors: shared weights as points, scaled by Gaussian vectors over outputs and inputs, in several components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Closed, Drawn, Family
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core import random
from plausible.core.priors import Gaussian, Prior
from plausible.core.weights import Weights

SIDES = ("outputs", "inputs")


class RankOneFamily(Family):
    """W_k = W ∘ (s_k r_kᵀ) for component k of K; W a point, s_k and r_k independent Gaussians with the prior N(1, prior_scale²).

    s multiplies the first axis of a weight with two axes or more (outputs of linear and convolutional layers), r the second
    (inputs). All other weights are points; with `biases` those with one axis called bias have one for each component. The KL is
    that of the factors, averaged over components: KL(q ‖ p) of their mixture is at most that.
    """

    def __init__(self, like: Mapping[str, Tensor], components: int, prior_scale: float, spread: float, biases: bool):
        super().__init__(like)
        self.components, self.spread = components, spread
        self.prior = Gaussian(prior_scale, loc=1.0)
        self.factored = tuple(n for n, w in self.like.items() if w.ndim > 1 and not n.startswith("likelihood."))
        self.repeated = tuple(n for n, w in self.like.items() if biases and w.ndim == 1 and n.endswith("bias"))
        if not self.factored:
            raise ValueError(
                f"Rank1: none of the random weights ({', '.join(self.like)}) has two axes, so there is nothing to factor; "
                "choose others with where=, or use MeanField"
            )

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        """The weights; factors around 1, those of several components apart from each other by `spread`."""
        theta = {f"point of {name}": weight for name, weight in weights.items()}
        for name in self.repeated:
            weight = weights[name]
            theta[f"point of {name}"] = weight.expand(self.components, *weight.shape).clone()
        wanted = {}
        for name in self.factored:
            for side, count in zip(SIDES, weights[name].shape):
                wanted[f"{side} of {name}"] = weights[name].new_empty(self.components, count)
        apart = random.normal(random.fold(key, 17), 0, wanted)
        for which, noise in apart.items():
            # components that start alike would stay alike
            theta[f"mean of {which}"] = 1 + (self.spread if self.components > 1 else 0.0) * noise
            theta[f"rho of {which}"] = inverse_softplus(torch.full_like(noise, scale))
        return theta

    def noise(self, parameters: Weights) -> Weights:
        names = [f"{side} of {name}" for name in self.factored for side in SIDES]
        return {which: parameters[f"mean of {which}"][0] for which in names}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:
        drawn = {}
        for name in self.like:
            weight = parameters[f"point of {name}"]
            if name in self.repeated:
                weight = weight[component]
            if name in self.factored:
                for axis, side in enumerate(SIDES):
                    which = f"{side} of {name}"
                    mean, scale = (part[component] for part in self._factor(parameters, which))
                    weight = weight * _along(mean + scale * noise[which], axis, weight.ndim)
            drawn[name] = weight
        return Drawn(drawn)

    def _factor(self, parameters: Weights, which: str) -> tuple[Tensor, Tensor]:
        return parameters[f"mean of {which}"], F.softplus(parameters[f"rho of {which}"])

    def closed(self, prior: Prior, parameters: Weights, temperature: float = 1.0) -> Closed:  # noqa: ARG002
        """The mean over components of −H − E log p/T of the factors."""
        terms = []
        for name in self.factored:
            for side in SIDES:
                mean, scale = self._factor(parameters, f"{side} of {name}")
                entropy = scale.log().sum() + HALF_LOG_2PIE * scale.numel()
                terms.append(-entropy - self.prior.expectation("", mean, scale) / temperature)
        # KL of a mixture is at most the mean KL of its parts: the bound stays one
        return Closed(torch.stack(terms).sum() / self.components, False, ())

    def log_prior_of_points(self, prior: Prior, parameters: Weights) -> Tensor:
        """Log p of W and of the other points, averaged over components where each has its points."""
        shared = {name: parameters[f"point of {name}"] for name in self.like if name not in self.repeated}
        value = prior.log_prob(shared)
        for k in range(self.components) if self.repeated else ():
            points = {name: parameters[f"point of {name}"][k] for name in self.repeated}
            # each component is one of K equally likely draws
            value = value + prior.log_prob(points) / self.components
        return value

    def means(self, parameters: Weights) -> Weights:
        return {name: self._moments(parameters, name)[0] for name in self.like}

    def scales(self, parameters: Weights) -> Weights:
        """Standard deviations of that mixture; 0 for points that all components share."""
        return {name: self._moments(parameters, name)[1].sqrt() for name in self.like}

    def _moments(self, parameters: Weights, name: str) -> tuple[Tensor, Tensor]:
        """Mean and variance of a weight: the variance within the components and that between their means."""
        point = parameters[f"point of {name}"]
        if name in self.repeated:
            return point.mean(0), point.var(0, unbiased=False)
        if name not in self.factored:
            return point, torch.zeros_like(point)
        (s, s_scale), (r, r_scale) = (self._factor(parameters, f"{side} of {name}") for side in SIDES)
        means = [torch.outer(s[k], r[k]) for k in range(self.components)]
        mean = torch.stack(means).mean(0)
        variance = torch.zeros_like(mean)
        for k, centre in enumerate(means):
            s_second, s_variance, r_variance = (s[k].square() + s_scale[k].square(), s_scale[k].square(), r_scale[k].square())
            # Var(sr) = E s² Var r + Var s (E r)² for independent factors
            within = torch.outer(s_second, r_variance) + torch.outer(s_variance, r[k].square())
            variance = variance + (within + (centre - mean).square()) / self.components
        shape = (*point.shape[:2], *[1] * (point.ndim - 2))
        return point * mean.reshape(shape), point.square() * variance.reshape(shape)

    def status(self, name: str) -> str:
        if name in self.factored:
            return f"a point times inferred rank-one factors, {self.components} components"
        return "trained as a point in each component" if name in self.repeated else "trained as a point"


def _along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    shape: list[Any] = [1] * ndim
    shape[axis] = -1
    return vector.reshape(shape)
