"""Normalising flows, built by zuko: over all weights, or over factors that multiply the units of Gaussian weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from plausible.blocks.families.base import Drawn, Family, FlatFamily, standard_log_density
from plausible.blocks.variational import HALF_LOG_2PIE, inverse_softplus
from plausible.core.weights import Weights

KINDS = ("iaf", "realnvp", "nsf")
BINS = 8
KEPT = 64
_MADE: dict[tuple[Any, ...], nn.Module] = {}


class FlowMap:
    """y = (f_K ∘ … ∘ f_1)(x; c) with log |∂y/∂x|, each f autoregressive: a masked network of x and c gives its coefficients.

    `kind` "iaf": y_i = x_i·exp a_i(x_{<i}) + b_i(x_{<i}); "realnvp": the same in two halves, one of which stays; "nsf": monotonic
    rational-quadratic splines of 8 bins between −5 and 5. The order of the features turns around from one map to the next. All
    start as the identity. `features` is the length of x, `context` that of c. One pass of the networks in this direction, whatever
    the kind. The object has structure and masks only: its parameters are in `start` and are given to every call.
    """

    def __init__(self, features: int, transforms: int, hidden: int, kind: str, like: Tensor, context: int = 0):
        self.settings = (features, transforms, hidden, kind, context)
        made = (*self.settings, str(like.dtype), str(like.device))
        if made not in _MADE:  # masks are made once: compiled and stacked steps cannot make any
            with torch.random.fork_rng(devices=[]):
                _MADE[made] = _module(*self.settings).to(like.device, like.dtype).requires_grad_(False)
            # sweeps build many sizes, and masks are quadratic in them
            while len(_MADE) > KEPT:
                _MADE.pop(next(iter(_MADE)))
        self.module = _MADE[made]
        self.buffers = dict(self.module.named_buffers())

    def start(self, key: Tensor) -> Weights:
        """Parameters of the identity: the first layers of the networks at random by the key, the last ones zero."""
        # the two words of a key are a seed of 64 bits
        high, low = key.tolist()
        first = next(self.module.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((high << 32) + low)
            module = _module(*self.settings)
        return {name: value.detach().to(first.device, first.dtype) for name, value in module.named_parameters()}

    def __call__(self, parameters: Mapping[str, Tensor], x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The image y of one vector x, and log |∂y/∂x| (0-d)."""
        return functional_call(self.module, {**parameters, **self.buffers}, (x, context))


class _Composed(nn.Module):
    def __init__(self, steps: list[nn.Module]):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(())
        for step in self.steps:
            x, change = step(context).call_and_ladj(x)
            total = total + change.sum()
        return x, total


def _module(features: int, transforms: int, hidden: int, kind: str, context: int) -> _Composed:
    try:
        import zuko
    except ImportError as error:
        raise ImportError(f"flows need zuko ({error}): pip install 'plausible[flows]'") from error
    settings: dict[str, Any] = {"hidden_features": (hidden, hidden), "context": context}
    if kind == "realnvp":
        settings["passes"] = 2
    if kind == "nsf":
        settings |= {"univariate": zuko.transforms.MonotonicRQSTransform, "shapes": [(BINS,), (BINS,), (BINS - 1,)]}
    order = torch.arange(features)
    steps = [
        zuko.flows.MaskedAutoregressiveTransform(features, order=order if k % 2 == 0 else order.flip(0), **settings)
        for k in range(transforms)
    ]
    for step in steps:
        network = getattr(step, "hyper", None)
        last = step if network is None else network[-1]  # one feature without context has coefficients of its own
        for parameter in last.parameters():
            # coefficients of zero are the identity in every kind of map
            nn.init.zeros_(parameter)
    return _Composed(steps)


def flow_bytes(features: int, transforms: int, hidden: int, kind: str, held: int, context: int = 0) -> int:
    """Bytes for parameters and masks, `held` for each parameter; while masks are made up to 32 for each pair of features."""
    each = 3 * BINS - 1 if kind == "nsf" else 2
    numbers = transforms * hidden * (features * (1 + each) + context + hidden)
    return (held + 1) * numbers + 32 * features * (features + context)


class FlowFamily(FlatFamily):
    """w = μ + σ ∘ f(ε), ε ~ N(0, I), f a flow over all random weights: log q(w) = log N(ε) − log |∂f/∂ε| − Σ log σ.

    The flow starts as the identity, so q starts as independent Gaussians at the weights. A draw costs one pass of the flow's
    networks.
    """

    def __init__(self, like: Mapping[str, Tensor], transforms: int, hidden: int, kind: str):
        super().__init__(like)
        self.flow = FlowMap(self.size, transforms, hidden, kind, self.vector(self.like))

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        mean = self.vector(weights)
        flow = {f"flow.{name}": value for name, value in self.flow.start(key).items()}
        return {"mean": mean, "scale": inverse_softplus(torch.full_like(mean, scale)), **flow}

    def noise(self, parameters: Weights) -> Weights:
        return {"noise": parameters["mean"]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        pushed, change = self.flow(part(parameters, "flow."), noise["noise"])
        scale = F.softplus(parameters["scale"])
        density = standard_log_density(noise["noise"]) - change - scale.log().sum()
        return Drawn(self.named(parameters["mean"] + scale * pushed), density)


def part(parameters: Mapping[str, Tensor], prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


SEP = ": "


class MultiplicativeFamily(Family):
    """w_ij = z_i μ_ij + σ_ij ε_ij,  z = f(m + s ∘ ζ),  ε, ζ ~ N(0, I): for each matrix and each kernel a flow f of its own.

    z has one factor for each input unit of a matrix [outputs, inputs], and one for each filter, the first axis, of a convolution
    kernel (Louizos & Welling 2017). Weights of other shapes are independent Gaussians. q(w) has no closed form; in its place stands

        log q(w, z) − log r(z | w),   r(z | w) = N(g(z; ẑ); k, v) |∂g/∂z|,

    whose mean is at least that of log q(w) for any r, so that the bound holds. What w says of z_i is in the sufficient
    statistic ẑ_i = Σ_j w_ij μ_ij/σ_ij² / π_i with its precision π_i = Σ_j μ_ij²/σ_ij². g is a flow given ẑ; k and v are mean
    and variance of z_i given ẑ_i under a Gaussian N(m̃_i, s̃_i²) of r's own. At the start f and g are the identity and r(z | w)
    is q(z | w): nothing is lost.
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
        spread = {f"factors of {name}": parameters[f"centre{SEP}{name}"] for name in self.axes}
        return {**{name: parameters[f"mean{SEP}{name}"] for name in self.like}, **spread}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """The weights, and Σ −H(q(w | z)) + log q(z) − log r(z | w) over the tensors."""
        drawn, terms = {}, []
        owned: dict[str, Weights] = {name: {} for name in self.like}
        for key, value in parameters.items():
            what, _, name = key.partition(SEP)
            owned[name][what] = value
        for name, theta in owned.items():
            mean, scale = theta["mean"], F.softplus(theta["scale"])
            # w given z is Gaussian: its entropy is exact, and less noisy than a log density
            terms.append(-scale.log().sum() - HALF_LOG_2PIE * scale.numel())
            if name in self.axes:
                spread = F.softplus(theta["spread"])
                zeta = noise[f"factors of {name}"]
                factors, change = self.flows[name](part(theta, "flow."), theta["centre"] + spread * zeta)
                mean, plain = self._times(name, mean, factors), mean
                terms.append(standard_log_density(zeta) - spread.log().sum() - change)
            # the reparameterisation in one operation
            drawn[name] = torch.addcmul(mean, scale, noise[name])
            if name in self.axes:
                terms.append(-self._log_inverse(name, theta, plain / scale, drawn[name] / scale, factors))
        return Drawn(drawn, torch.stack(terms).sum())

    def _log_inverse(self, name: str, theta: Weights, white_mean: Tensor, white: Tensor, factors: Tensor) -> Tensor:
        """Log r(z | w), of μ/σ and w/σ."""
        rest = [axis for axis in range(white.ndim) if axis != self.axes[name]]
        # what all weights of a unit say together of its factor
        precision = white_mean.square().sum(rest)
        product = (white_mean * white).sum(rest)
        before = F.softplus(theta["inverse spread"]).reciprocal().square()
        # where the means are all 0 the weights say nothing of their factor, and ẑ is 0
        estimate = product / (precision + 1e-12)
        pulled, change = self.inverses[name](part(theta, "inverse."), factors, estimate)
        variance = (before + precision).reciprocal()
        expected = variance * (before * theta["inverse centre"] + product)
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
