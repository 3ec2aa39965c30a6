"""The dropout that a network has of its own, seen from outside: where it is, and one mask for a whole batch in its place.

PyTorch draws a mask for each example, so that f(x) and f(x') of one pass belong to different functions. Here a draw is a set of
masks, one for each call of dropout in the order of calls, which all examples share: one function.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plausible.blocks.interception import Watch, arguments
from plausible.core import random
from plausible.core.data import take
from plausible.core.model import Model
from plausible.core.weights import Weights

MASK = "dropout mask "
"""What the names of masks begin with, among the weights of a draw."""
_CHANNELS = {F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2, F.feature_alpha_dropout: 2}
_ALPHA = {F.alpha_dropout, F.feature_alpha_dropout}
_SELU = -1.7580993408473766  # what SELU gives at −∞, −λα
_BATCH_STATISTICS = nn.modules.batchnorm._BatchNorm


class Call(NamedTuple):
    """One call of dropout: its rate, and the shape of the mask for one, two, … examples, whose `axis` grows by `each`."""

    rate: float
    shape: tuple[int, ...]
    axis: int
    each: int


class _Dropouts(Watch):
    """Gets every call of dropout, those inside of attention among them."""

    def name(self, value: Any) -> str | None:  # noqa: ARG002
        return None

    def uses(self, values: Any) -> bool:  # noqa: ARG002
        return False

    def masked(self, function: Any, x: Tensor, rate: float) -> Tensor:
        raise NotImplementedError

    def dropout(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        given = arguments(function, args, kwargs)
        rate, training = float(given.get("p", 0.5)), bool(given.get("training", function is F.dropout or function in _CHANNELS))
        return self.masked(function, given["input"], rate) if training and rate > 0 else given["input"]

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is F.multi_head_attention_forward:
            # PyTorch's own code, with dropout and the fused product looked up here
            return _attention(self)(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return self.product(*args, **kwargs)
        if function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) and _dropped(args):
            raise ValueError(
                "dropout between the layers of a recurrent module is drawn inside of PyTorch, where one function cannot be kept "
                "for a whole batch: use modules of one layer with nn.Dropout between them"
            )
        return super().plain(function, args, kwargs)

    def product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **rest: Any,
    ) -> Tensor:
        """softmax(QKᵀ/√d + mask), dropped, times V; without dropout the fused product."""
        if not dropout_p:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, **rest)
        if rest.get("enable_gqa"):
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        weights = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            ahead = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).triu(1)
            weights = weights.masked_fill(ahead, -math.inf)
        if attn_mask is not None:
            allowed = attn_mask.dtype == torch.bool
            weights = weights.masked_fill(~attn_mask, -math.inf) if allowed else weights + attn_mask
        return self.masked(F.dropout, weights.softmax(-1), dropout_p) @ value


def _dropped(args: tuple[Any, ...]) -> bool:
    """Whether this call of a recurrent function drops; the rate is the only number with a point among its arguments."""
    numbers = [value for value in args if isinstance(value, float)]
    return bool(numbers) and numbers[0] > 0


def _attention(watch: _Dropouts) -> Any:
    def dropped(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
        return watch.masked(F.dropout, x, p) if training and p > 0 else x

    code = F.multi_head_attention_forward
    own = {"has_torch_function": lambda _: False, "dropout": dropped, "scaled_dot_product_attention": watch.product}
    made = types.FunctionType(code.__code__, {**code.__globals__, **own}, code.__name__, code.__defaults__)
    made.__kwdefaults__ = code.__kwdefaults__
    return made


class _Record(_Dropouts):
    """Notes rate and shape of each call, and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, tuple[int, ...]]] = []

    def masked(self, function: Any, x: Tensor, rate: float) -> Tensor:
        channels = _CHANNELS.get(function)
        self.calls.append((rate, tuple(x.shape if channels is None else (*x.shape[:channels], *[1] * (x.ndim - channels)))))
        return x


class _Replay(_Dropouts):
    """Puts a mask in the place of each call, repeated over the examples."""

    def __init__(self, calls: Sequence[Call], masks: Sequence[Tensor]):
        super().__init__()
        self.left = list(zip(calls, masks))

    def masked(self, function: Any, x: Tensor, rate: float) -> Tensor:
        if not self.left:
            raise ValueError("x: the network calls dropout more often for these inputs than it did for the first of them")
        call, mask = self.left.pop(0)
        keep = mask
        if call.each > 1:
            times = [1] * mask.ndim
            times[call.axis] = x.shape[call.axis] // call.each
            keep = mask.repeat(times)
        if function not in _ALPHA:
            return x * (keep / (1 - rate))
        # dropped units take SELU's limit, and an affine map puts mean and variance back
        stretch = 1 / math.sqrt((1 - rate) * (1 + rate * _SELU**2))
        return stretch * (x * keep + _SELU * (1 - keep)) - stretch * _SELU * rate


@dataclass(frozen=True, eq=False)
class Masked(Model):
    """The model of one function at a time: `outputs` puts the masks among the weights in the place of dropout."""

    calls: tuple[Call, ...] = ()

    def outputs(self, weights: Any, x: Any, *, train: bool = False) -> Tensor:  # noqa: ARG002
        masks = [weights[f"{MASK}{k}"] for k in range(len(self.calls))]
        rest = {name: value for name, value in weights.items() if not name.startswith(MASK)}
        with _Replay(self.calls, masks):
            return super().outputs(rest, x, train=True)

    def draw(self, number: int, seed: int) -> Weights:
        """The masks of draw `number`, which are 1 where a value is kept."""
        like = {f"{MASK}{k}": torch.empty(call.shape) for k, call in enumerate(self.calls)}
        # of the CPU's generator on every device, which is a function of the number alone
        drawn = random.uniform(random.key(seed, 14), number, like)
        first = next(iter(self.initial.values()))
        return {name: (drawn[name] > call.rate).to(first) for name, call in zip(like, self.calls)}


def masked(model: Model, inputs: Any) -> Masked:
    """The model with its calls of dropout for inputs like these; its batch norms use their running statistics.

    A call's axis of examples is the one that is longer for three examples than for two.
    """
    settled = [n for n, m in model.network.named_modules() if isinstance(m, _BATCH_STATISTICS) and m.track_running_stats]
    quiet = replace(model, evaluated=(*model.evaluated, *settled))
    weights = {**model.initial, **model.buffers}
    two, three = (_recorded(quiet, weights, take(inputs, torch.tensor([0] * count))) for count in (2, 3))
    calls = []
    for (rate, short), (_, long) in zip(two, three):
        if rate >= 1:
            raise ValueError("a dropout layer of this network has p=1: it drops everything")
        axis = next((k for k, (a, b) in enumerate(zip(short, long)) if a != b), None)
        if axis is None:  # not by example: one mask as it is
            calls.append(Call(rate, short, 0, 0))
            continue
        each = long[axis] - short[axis]
        calls.append(Call(rate, (*short[:axis], each, *short[axis + 1 :]), axis, each))
    fields = {name: getattr(quiet, name) for name, field in Model.__dataclass_fields__.items() if field.init}
    return Masked(**fields, calls=tuple(calls))


def _recorded(model: Model, weights: Weights, x: Any) -> list[tuple[float, tuple[int, ...]]]:
    with torch.no_grad(), _Record() as record:
        model.outputs(weights, x, train=True)
    return record.calls
