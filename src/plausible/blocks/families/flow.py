"""Normalising flows over weights: noise pushed through invertible neural networks, built by zuko."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from plausible.blocks.families.base import Drawn, FlatFamily, standard_log_density
from plausible.blocks.variational import inverse_softplus
from plausible.core.weights import Weights

KINDS = ("iaf", "realnvp", "nsf")
BINS = 8
KEPT = 64
_MADE: dict[tuple[Any, ...], nn.Module] = {}


class FlowMap:
    """y = (f_K ∘ … ∘ f_1)(x; c) with log |∂y/∂x|, each f autoregressive: a masked network of x and c gives its coefficients.

    `kind` "iaf": y_i = x_i·exp a_i(x_{<i}) + b_i(x_{<i}); "realnvp": the same in two halves, one of which stays; "nsf":
    monotonic rational-quadratic splines of 8 bins between −5 and 5. The order of the features turns around from one map to the
    next. All start as the identity. `features` is the length of x, `context` that of c. One pass of the networks in this
    direction, whatever the kind. The object has structure and masks only: its parameters are in `start` and are given to
    every call.
    """

    def __init__(self, features: int, transforms: int, hidden: int, kind: str, like: Tensor, context: int = 0):
        self.settings = (features, transforms, hidden, kind, context)
        made = (*self.settings, str(like.dtype), str(like.device))
        if made not in _MADE:  # masks are made once: compiled and stacked steps cannot make any
            with torch.random.fork_rng(devices=[]):
                _MADE[made] = _module(*self.settings).to(like.device, like.dtype).requires_grad_(False)
            while len(_MADE) > KEPT:
                _MADE.pop(next(iter(_MADE)))
        self.module = _MADE[made]
        self.buffers = dict(self.module.named_buffers())

    def start(self, key: Tensor) -> Weights:
        """Parameters of the identity: the first layers of the networks at random by the key, the last ones zero."""
        high, low = key.tolist()
        first = next(self.module.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((high << 32) + low)
            module = _module(*self.settings)
        return {name: value.detach().to(first.device, first.dtype) for name, value in module.named_parameters()}

    def __call__(self, parameters: Mapping[str, Tensor], x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Y and log |∂y/∂x|, 0-d, of one vector x."""
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
    zuko = _zuko()
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
            nn.init.zeros_(parameter)
    return _Composed(steps)


def _zuko() -> Any:
    try:
        import zuko
    except ImportError as error:
        raise ImportError(f"flows need zuko ({error}): pip install 'plausible[flows]'") from error
    return zuko


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
        """The weights, `scale`, the identity."""
        mean = self.vector(weights)
        flow = {f"flow.{name}": value for name, value in self.flow.start(key).items()}
        return {"mean": mean, "scale": inverse_softplus(torch.full_like(mean, scale)), **flow}

    def noise(self, parameters: Weights) -> Weights:
        """ε [P]."""
        return {"noise": parameters["mean"]}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:  # noqa: ARG002
        """μ + σ ∘ f(ε), and its log density."""
        pushed, change = self.flow(part(parameters, "flow."), noise["noise"])
        scale = F.softplus(parameters["scale"])
        density = standard_log_density(noise["noise"]) - change - scale.log().sum()
        return Drawn(self.named(parameters["mean"] + scale * pushed), density)


def part(parameters: Mapping[str, Tensor], prefix: str) -> Weights:
    """The parameters whose names start like this, without it."""
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
