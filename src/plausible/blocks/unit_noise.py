"""Dropout as a law over weights: noise z on the inputs of a layer is noise on the columns of its weights, W = θ diag(z).

    dropout    z = m/(1 − p),  m ~ Bernoulli(1 − p)                                   α = p/(1 − p)
    gaussian   z ~ N(1, α)
    concrete   z = m/(1 − p),  m = 1 − σ((log p/(1 − p) + log u/(1 − u))/t),  u ~ U(0, 1)

Each has mean 1 and variance α (concrete: as t → 0), one number for each input unit or channel. In training every example has
noise of its own; one draw of the weights has one for all. `survey` says where weights can take it: in linear and convolutional
layers, in the gates of recurrent nets (one z for all times: Gal & Ghahramani 2016) and in the projections of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plausible.blocks.interception import AXES, Interceptor, Watched
from plausible.blocks.stochastic import GaussianWeight, Noise
from plausible.core.weights import Weights

KINDS = ("dropout", "gaussian", "concrete")
TEMPERATURE = 0.1
"""Of the concrete relaxation (Gal, Hron & Kendall 2017)."""


@dataclass(frozen=True)
class Site:
    """Where the inputs of a weight are: its `axis` of them, `units` in number; `groups` as in convolutions."""

    axis: int
    units: int
    groups: int = 1

    def scaled(self, weight: Tensor, z: Tensor) -> Tensor:
        """θ diag(z) of one weight, z [units]."""
        if self.groups == 1:
            shape = [1] * weight.ndim
            shape[self.axis] = self.units
            return weight * z.view(shape)
        # weight [out, units/groups, …]: each group of outputs has inputs of its own
        parts = weight.view(self.groups, -1, *weight.shape[1:])
        each = z.view(self.groups, 1, self.units // self.groups, *[1] * (weight.ndim - 2))
        return (parts * each).view_as(weight)


def alpha_of(rate: Tensor) -> Tensor:
    """The variance of z: α = p/(1 − p)."""
    return rate / (1 - rate)


def from_normal(kind: str, rate: Tensor, normal: Tensor) -> Tensor:
    """Z of a draw, by standard normal numbers; `rate` broadcasts with them."""
    if kind == "gaussian":
        return 1 + alpha_of(rate).sqrt() * normal
    return (torch.special.ndtr(normal) > rate).to(normal.dtype) / (1 - rate)


def _in_training(kind: str, rate: Tensor, noise: Noise, purpose: str, like: Tensor) -> Tensor:
    """Z like this tensor, for a step."""
    if kind == "gaussian":
        return 1 + alpha_of(rate).sqrt() * noise.normal(purpose, like)
    uniform = noise.uniform(purpose, like)
    if kind == "dropout":
        return (uniform > rate).to(like.dtype) / (1 - rate)
    # gradients reach the rate through it
    return torch.sigmoid(-(torch.logit(rate) + torch.logit(uniform)) / TEMPERATURE) / (1 - rate)


class NoisyInputs(Watched):
    """A weight whose inputs get noise; made by `with_noisy_inputs`."""

    _value: Tensor
    _rate: Tensor
    _site: Site
    _noise: Noise
    _kind: str
    _name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NoisyInputs({self._name!r}, shape={tuple(self.shape)}, kind={self._kind!r})"


def with_noisy_inputs(
    weights: Mapping[str, Tensor], sites: Mapping[str, Site], rates: Mapping[str, Tensor], noise: Noise, kind: str
) -> Weights:
    """The weights of these sites, as tensors that a network takes for parameters, for one forward pass.

    They may be Gaussian (`stochastic.gaussian`): inputs get noise, and then the product.
    """
    made = {}
    for name, site in sites.items():
        value: Any = weights[name]
        carrier = value._mean if isinstance(value, GaussianWeight) else value
        weight: Any = carrier.detach().as_subclass(NoisyInputs)
        weight._value, weight._rate, weight._site = weights[name], rates[name], site
        weight._noise, weight._kind, weight._name = noise, kind, name
        made[name] = weight
    return made


def survey(function: Callable[[Weights], Any], weights: Mapping[str, Tensor]) -> dict[str, Site]:
    """Where noise can enter, by the name of the weight, in the order of use; `function(weights)` is run once."""
    found: dict[str, Site] = {}
    wrapped: Weights = {}
    for name, value in weights.items():
        watched: Any = value.detach().as_subclass(_Surveyed)
        watched._name, watched._found, watched._value = name, found, value.detach()
        wrapped[name] = watched
    with torch.no_grad():
        function(wrapped)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Interception


class _Inputs(Interceptor):
    """What becomes of `NoisyInputs`: noise for each example in linear operations, one draw of the weight anywhere else."""

    def name(self, value: Any) -> str | None:
        return value._name if isinstance(value, NoisyInputs) else None

    def value(self, value: Any) -> Any:
        if not isinstance(value, NoisyInputs):
            return value
        if value._name not in value._noise.drawn:
            like = value._value.new_empty(value._site.units)
            z = _in_training(value._kind, value._rate, value._noise, value._name, like)
            value._noise.drawn[value._name] = value._site.scaled(value._value, z)
        return value._noise.drawn[value._name]

    def ask(self, asked: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if asked == "requires_grad":
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def linear(self, function: Any, input: Any, weight: Any, bias: Any = None, *rest: Any, **options: Any) -> Tensor:  # type: ignore[override]
        if not isinstance(weight, NoisyInputs):
            return self.other(function, input, weight, bias, *rest, **options)
        x, channels = self.value(input), -1 - AXES[function]
        # one number for each example and channel, shared by places
        shape = [1] * x.ndim
        shape[channels] = x.shape[channels]
        if x.ndim > AXES[function] + 1:
            shape[0] = x.shape[0]
        # a rate for each unit lies along the channels
        rate = weight._rate.view(-1, *[1] * AXES[function]) if weight._rate.ndim else weight._rate
        z = _in_training(weight._kind, rate, weight._noise, f"{weight._name}: in", x.new_empty(shape))
        given = (x * z, weight._value, self.value(bias), *rest)
        if isinstance(weight._value, GaussianWeight):  # said outright: a compiler does not look for it inside of this call
            return GaussianWeight.interceptor.intercept(function, given, options, known=True)
        return function(*given, **options)

    convolution = transposed = linear  # type: ignore[assignment]


NoisyInputs.interceptor = _Inputs()


_CELLS = {torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell}
_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


class _Surveyed(Watched):
    _name: str
    _found: dict[str, Site]
    _value: Tensor


class _Survey(Interceptor):
    """Notes the first use of each weight; the network runs as ever."""

    def ask(self, asked: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def name(self, value: Any) -> str | None:
        return value._name if isinstance(value, _Surveyed) else None

    def value(self, value: Any) -> Any:
        return value._value if isinstance(value, _Surveyed) else value

    def _note(self, weight: Any, axis: int, units: int, groups: int = 1) -> None:
        if isinstance(weight, _Surveyed):
            weight._found.setdefault(weight._name, Site(axis, units, groups))

    def linear(self, function: Any, input: Any, weight: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        self._note(weight, 1, weight.shape[1])
        return super().other(function, input, weight, *rest, **options)

    def convolution(self, function: Any, input: Any, weight: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        channels = input.shape[-1 - AXES[function]]
        self._note(weight, 1, channels, channels // weight.shape[1])
        return super().other(function, input, weight, *rest, **options)

    def transposed(self, function: Any, input: Any, weight: Any, *rest: Any, **options: Any) -> Any:  # type: ignore[override]
        self._note(weight, 0, weight.shape[0])
        return super().other(function, input, weight, *rest, **options)

    def embedding(self, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # a table has no inputs, and a norm has one weight for each
        return super().other(function, *args, **kwargs)

    norm = embedding  # type: ignore[assignment]

    def other(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function in _CELLS:
            return self.recurrent(function, *args, **kwargs)
        if function in _PRODUCTS and len(args) == 2:
            for weight, axis in zip(args, (1, 0)):  # W x and x W
                if isinstance(weight, _Surveyed) and weight.ndim == 2:
                    self._note(weight, axis, weight.shape[axis])
        return super().other(function, *args, **kwargs)

    def attention(self, function: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # matrices [out, in], as of a linear layer
        for weight in _surveyed((args, tuple(kwargs.values()))):
            if weight.ndim == 2:
                self._note(weight, 1, weight.shape[1])
        return super().other(function, *args, **kwargs)

    recurrent = attention  # type: ignore[assignment]


_Surveyed.interceptor = _Survey()


def _surveyed(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _surveyed(value) if isinstance(value, tuple | list) else [value] if isinstance(value, _Surveyed) else []
    return flat


def entropy(rate: Tensor) -> Tensor:
    """H(p) = −p log p − (1 − p) log(1 − p), elementwise."""
    return -(rate * rate.log() + (1 - rate) * torch.log1p(-rate))
