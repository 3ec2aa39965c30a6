"""Gaussian weights whose units are multiplied by random factors, which a flow makes dependent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.blocks.families.base import Drawn, Family, standard_log_density
from plausible.blocks.families.flow import FlowMap, part
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core.weights import Weights

SEP = ": "


class MultiplicativeFamily(Family):
    """w_ij = z_i μ_ij + σ_ij ε_ij,  z = f(m + s ∘ ζ),  ε, ζ ~ N(0, I): for each matrix and each kernel a flow f of its own.

    z has one factor for each input unit of a matrix [outputs, inputs], and one for each filter, the first axis, of a convolution
    kernel (Louizos & Welling 2017). Weights of other shapes are independent Gaussians. q(w) has no closed form; in its place stands

        log q(w, z) − log r(z | w),   r(z | w) = N(g(z; ẑ); k, v) |∂g/∂z|,

    whose mean is at least that of log q(w) for any r, so that the bound holds. What w says of z_i is in the sufficient statistic
    ẑ_i = Σ_j w_ij μ_ij/σ_ij² / π_i with its precision π_i = Σ_j μ_ij²/σ_ij². g is a flow given ẑ; k and v are mean and variance
    of z_i given ẑ_i under a Gaussian N(m̃_i, s̃_i²) of r's own. At the start f and g are the identity and r(z | w) is q(z | w):
    nothing is lost.
    """

    def __init__(self, like: Mapping[str, Tensor], transforms: int, hidden: int, kind: str, factor_scale: float):
        super().__init__(like)
        self.factor_scale = factor_scale
        self.axes = {name: 1 if weight.ndim == 2 else 0 for name, weight in self.like.items() if weight.ndim >= 2}
        self.flows, self.inverses = {}, {}
        for name, axis in self.axes.items():
            weight = self.like[name]
            units = weight.shape[axis]
            self.flows[name] = FlowMap(units, transforms, hidden, kind, weight)
            self.inverses[name] = FlowMap(units, transforms, hidden, kind, weight, context=units)

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        """Factors of 1 ± `factor_scale`, weights ± `scale`, flows that are the identity."""
        parameters: Weights = {}
        for name, weight in weights.items():
            parameters |= {f"mean{SEP}{name}": weight, f"scale{SEP}{name}": inverse_softplus(torch.full_like(weight, scale))}
            if name not in self.axes:
                continue
            one = torch.ones(weight.shape[self.axes[name]], dtype=weight.dtype, device=weight.device)
            raw = inverse_softplus(self.factor_scale * one)
            named = {"centre": one, "spread": raw, "inverse centre": one.clone(), "inverse spread": raw.clone()}
            named |= {f"flow.{n}": value for n, value in self.flows[name].start(key).items()}
            named |= {f"inverse.{n}": value for n, value in self.inverses[name].start(key).items()}
            parameters |= {f"{n}{SEP}{name}": value for n, value in named.items()}
        return parameters

    def noise(self, parameters: Weights) -> Weights:
        """ε of each weight and ζ of each factor."""
        spread = {f"factors of {name}": parameters[f"centre{SEP}{name}"] for name in self.axes}
        return {**{name: parameters[f"mean{SEP}{name}"] for name in self.like}, **spread}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """The weights, and Σ −H(q(w | z)) + log q(z) − log r(z | w) over the tensors."""
        drawn, terms = {}, []
        owned: dict[str, Weights] = {name: {} for name in self.like}
        for key, value in parameters.items():
            what, _, name = key.partition(SEP)
            owned[name][what] = value
        for name, own in owned.items():
            mean, scale = own["mean"], F.softplus(own["scale"])
            terms.append(-scale.log().sum() - HALF_LOG_2PIE * scale.numel())
            if name in self.axes:
                spread = F.softplus(own["spread"])
                zeta = noise[f"factors of {name}"]
                factors, change = self.flows[name](part(own, "flow."), own["centre"] + spread * zeta)
                mean, plain = self._times(name, mean, factors), mean
                terms.append(standard_log_density(zeta) - spread.log().sum() - change)
            drawn[name] = torch.addcmul(mean, scale, noise[name])
            if name in self.axes:
                terms.append(-self._log_inverse(name, own, plain / scale, drawn[name] / scale, factors))
        return Drawn(drawn, torch.stack(terms).sum())

    def _log_inverse(self, name: str, own: Weights, white_mean: Tensor, white: Tensor, factors: Tensor) -> Tensor:
        """Log r(z | w), of μ/σ and w/σ."""
        rest = [axis for axis in range(white.ndim) if axis != self.axes[name]]
        precision = white_mean.square().sum(rest)
        product = (white_mean * white).sum(rest)
        before = F.softplus(own["inverse spread"]).reciprocal().square()
        # where the means are all 0 the weights say nothing of their factor, and ẑ is 0
        estimate = product / (precision + 1e-12)
        pulled, change = self.inverses[name](part(own, "inverse."), factors, estimate)
        variance = (before + precision).reciprocal()
        expected = variance * (before * own["inverse centre"] + product)
        white_factors = (pulled - expected) / variance.sqrt()
        return standard_log_density(white_factors) - 0.5 * variance.log().sum() + change

    def _times(self, name: str, mean: Tensor, factors: Tensor) -> Tensor:
        shape = [1] * mean.ndim
        shape[self.axes[name]] = -1
        return mean * factors.reshape(shape)

    def status(self, name: str) -> str:
        if name not in self.axes:
            return "inferred, independent Gaussians"
        return f"inferred, with a factor for each {'input' if self.axes[name] else 'filter'}"
