"""A pruned posterior as a plain module: dead units taken out, weights of 0 not stored.

A unit is dead where nothing is made of it (its column in the next layer is 0), or where it says the same for every input (its
row is 0): it then goes into the next layer's bias. Units are taken out of chains of layers, `nn.Sequential` in whatever nesting;
other networks keep their shape, with zeros.
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from plausible.core import weights as tree

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip
_SILENT = (nn.Identity, nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Those that do nothing in evaluation mode."""
_POOLS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.Conv1d: (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    nn.Conv2d: (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    nn.Conv3d: (nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}
"""By the convolution after which they treat each channel by itself."""
FORMAT = b"plausible sparse 1\n"
MOST = 255
"""The largest gap between two weights in a packed file; a longer one is several."""


def compress(posterior: Posterior) -> nn.Module:
    """A plain module, in evaluation mode, that computes f(x; E w): the mean weights, 0 where they were pruned, without dead units.

    It answers in the unit of the targets, has the network's inputs and outputs, and needs nothing of this library. Uncertainty is
    gone: keep the posterior for that.
    """
    network = _mean_network(posterior)
    chain = _chain(network)
    if chain is not None and posterior.masks:
        layers = [k for k, module in enumerate(chain) if isinstance(module, (nn.Linear, *_CONVOLUTIONS))]
        # from the back: a unit that goes takes the last use of units before it along
        for first, second in reversed(list(pairwise(layers))):
            _shrink(chain, first, second)
        for first, second in pairwise(layers):
            _shrink(chain, first, second)
    if chain is not None and len(chain) > 1:
        network = nn.Sequential(*chain)
    return _in_units(network, posterior).eval()


@torch.no_grad()
def _in_units(network: nn.Module, posterior: Posterior) -> nn.Module:
    """The network in the unit of the targets, where these were standardised: by its last layer, or by one more."""
    first = next(iter(posterior.model.initial.values()))
    zeros = torch.zeros(1, *posterior.model.output_shape, dtype=first.dtype, device=first.device)
    shift = posterior.likelihood.in_units(zeros)
    slope = posterior.likelihood.in_units(zeros + 1) - shift
    if bool((shift == 0).all()) and bool((slope == 1).all()):
        return network
    width = shift.shape[-1] if shift.ndim > 1 else 1
    shift, slope = (part.reshape(-1, width).to(first.dtype) for part in (shift, slope))
    if not posterior.model.output_shape or bool((shift != shift[:1]).any()) or bool((slope != slope[:1]).any()):
        raise ValueError(
            "compress cannot put these outputs back into the unit of the targets, which were standardised: standardise them "
            "yourself and name the likelihood, likelihood=plausible.likelihoods.Gaussian()"
        )
    modules = list(network) if type(network) is nn.Sequential else [network]
    last = modules[-1]
    if not isinstance(last, nn.Linear) or last.out_features != width:
        last = nn.Linear(width, width).to(first)
        last.weight.copy_(torch.eye(width))
        last.bias.zero_()
        modules.append(last)
    weight, bias = _tensors(last)
    modules[-1] = _like(last, weight * slope[0][:, None], (0 if bias is None else bias) * slope[0] + shift[0])
    return nn.Sequential(*modules) if len(modules) > 1 else modules[0]


def _mean_network(posterior: Posterior) -> nn.Module:
    if posterior.parts:
        raise ValueError(
            f"compress makes one module of one network, and this posterior has {len(posterior.parts)} members: compress each of "
            "posterior.parts"
        )
    networks = posterior.networks()
    if len(networks) != 1:
        raise ValueError(
            f"compress makes one module of one network, and this posterior has {len(networks)} (chains or members)"
        )
    means, points = networks[0][0], getattr(posterior, "points", None)
    if points is None:
        last = posterior.starting_points(1)
        if len(next(iter(last.values()))) != 1 or (posterior.num_draws(None) != 1 and posterior.networks()[0][1] is not None):
            raise ValueError(
                "compress makes a module of one set of weights: the mean of stored draws is none of their functions"
            )
        points = tree.index(last, 0)
    network = copy.deepcopy(posterior.model.network)
    held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with torch.no_grad():
        for name, value in {**points, **posterior.kept({n: mean.to(posterior.device) for n, mean in means.items()})}.items():
            if name in held:
                held[name].copy_(value)
    return network


def _chain(network: nn.Module) -> list[nn.Module] | None:
    """The modules that are called one after the other; None where that is not known."""
    if type(network) is not nn.Sequential:
        return [network] if isinstance(network, (nn.Linear, *_CONVOLUTIONS)) else None
    chain: list[nn.Module] = []
    for module in network:
        inner = _chain(module) if type(module) is nn.Sequential else [module]
        if inner is None:
            return None
        chain += inner
    return None if len({id(module) for module in chain}) < len(chain) else chain  # a module that is called twice


@torch.no_grad()
def _shrink(chain: list[nn.Module], first: int, second: int) -> None:
    """Take the dead units out between two layers, where what lies between treats each unit by itself."""
    layer, following, between = chain[first], chain[second], chain[first + 1 : second]
    if not _apart(layer, following, between) or any(getattr(module, "groups", 1) != 1 for module in (layer, following)):
        return
    (weight, bias), (after, theirs) = _tensors(layer), _tensors(following)
    units = len(weight)
    places = after.shape[1] // units  # of each unit, where maps were flattened
    if after.shape[1] != units * places or (places > 1 and isinstance(layer, nn.Linear)):
        return
    columns = after.reshape(len(after), units, -1)
    unused = (columns == 0).all(2).all(0)
    constant = (weight.reshape(units, -1) == 0).all(1) & ~unused
    values = torch.zeros(units, dtype=weight.dtype, device=weight.device) if bias is None else bias.clone()
    for module in between:
        if isinstance(module, _ELEMENTWISE):
            values = module.eval()(values)
    if (isinstance(following, _CONVOLUTIONS) and _padded(following)) or any(_reshades(m) for m in between):
        # at the border a constant map is none, and a sum is not the mean
        constant &= values == 0
    dead = unused | constant
    if bool(dead.all()):
        dead[0] = False  # a layer without units is none
    if not bool(dead.any()):
        return
    shift = (columns * values.view(1, -1, 1))[:, dead & constant].sum((1, 2))
    own = after.new_zeros(len(after)) if theirs is None else theirs
    alive = ~dead
    left = after.reshape(len(after), units, places, *after.shape[2:])[:, alive].reshape(len(after), -1, *after.shape[2:])
    chain[first] = _like(layer, weight[alive], None if bias is None else bias[alive])
    chain[second] = _like(following, left, own + shift if theirs is not None or bool(shift.any()) else None)


def _apart(layer: nn.Module, following: nn.Module, between: list[nn.Module]) -> bool:
    """Whether the units of a layer are treated each by itself on the way, and are what the next layer has its inputs by.

    Those of a linear layer lie on the last axis, where a pool would mix them; those of a convolution on axis 1, which a linear
    layer sees only when all that follows is flattened, channel by channel.
    """
    acts = [module for module in between if not isinstance(module, (*_ELEMENTWISE, *_SILENT))]
    flat = [isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1) for module in acts]
    if isinstance(layer, nn.Linear):
        return isinstance(following, nn.Linear) and all(flat)
    if isinstance(following, nn.Linear):
        if not flat or not flat[-1]:
            return False
        acts = acts[:-1]
    elif type(following) is not type(layer):
        return False
    return all(isinstance(module, _POOLS[type(layer)]) for module in acts)


def _reshades(module: nn.Module) -> bool:
    """Whether a pool makes something else than the same constant of a constant map."""
    return _padded(module) or getattr(module, "divisor_override", None) is not None


def _tensors(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    return layer._parameters["weight"], layer._parameters["bias"]  # type: ignore[return-value]


def _padded(module: nn.Module) -> bool:
    padding = getattr(module, "padding", 0)
    return isinstance(padding, str) or any(np.atleast_1d(padding))


def _like(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """The same layer with other weights."""
    made = copy.copy(layer)
    made._parameters = dict(layer._parameters)
    made._parameters["weight"] = nn.Parameter(weight.clone())
    made._parameters["bias"] = None if bias is None else nn.Parameter(bias.clone())
    sizes = ("in_features", "out_features") if isinstance(layer, nn.Linear) else ("in_channels", "out_channels")
    setattr(made, sizes[0], weight.shape[1])
    setattr(made, sizes[1], weight.shape[0])
    return made


# ---------------------------------------------------------------------------------------------------------------------
# In a file


def packed(module: nn.Module, half: bool = True) -> bytes:
    """The parameters and buffers of a module in few bytes: gaps between the numbers that are not 0, and these, deflated.

    `half`: numbers in half precision, 11 bits, which is far below the scale of what a posterior leaves open.
    """
    shapes, gaps, numbers = {}, [], []
    for name, tensor in module.state_dict().items():
        flat = tensor.detach().cpu().double().numpy().reshape(-1)
        jumps = _gaps(np.flatnonzero(flat))
        shapes[name] = [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), len(jumps)]
        gaps.append(jumps)
        numbers.append(flat[flat != 0])
    fits = all(float(np.abs(values).max(initial=0)) < np.finfo(np.float16).max for values in numbers)
    kind = "<f2" if half and fits else "<f4"
    head = json.dumps({"tensors": shapes, "numbers": kind}).encode()
    places = np.concatenate(gaps or [np.zeros(0, np.uint8)]).tobytes()
    values = np.concatenate(numbers or [np.zeros(0)]).astype(kind).tobytes()
    parts = [zlib.compress(part, 9) for part in (head, places, values)]
    return FORMAT + b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def unpacked(data: bytes) -> dict[str, Tensor]:
    """The state dictionary in such bytes; anything else is a ValueError."""
    try:
        if not data.startswith(FORMAT):
            raise ValueError("no such header")
        parts, at = [], len(FORMAT)
        for _ in range(3):
            size = int.from_bytes(data[at : at + 8], "little")
            parts.append(zlib.decompress(data[at + 8 : at + 8 + size]))
            at += 8 + size
        head = json.loads(parts[0])
        gaps, numbers = np.frombuffer(parts[1], np.uint8), np.frombuffer(parts[2], head["numbers"]).astype(np.float64)
        state = {}
        for name, (shape, dtype, count) in head["tensors"].items():
            flat = np.zeros(math.prod(shape))
            places = _places(gaps[:count])
            flat[places] = numbers[: len(places)]
            gaps, numbers = gaps[count:], numbers[len(places) :]
            state[name] = torch.from_numpy(flat).reshape(shape).to(getattr(torch, dtype))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, zlib.error) as error:
        raise ValueError(f"not the bytes of a packed module: {error}") from error
    return state


def _gaps(places: np.ndarray) -> np.ndarray:
    """Distances between places, less 1, in bytes; `MOST` says that so many zeros follow and no number yet."""
    steps = np.diff(places, prepend=-1) - 1
    long, rest = steps // MOST, steps % MOST
    jumps = np.full(int(long.sum()) + len(steps), MOST, np.uint8)
    jumps[np.cumsum(long + 1) - 1] = rest
    return jumps


def _places(jumps: np.ndarray) -> np.ndarray:
    ends = jumps != MOST
    # a number takes a place of its own
    return np.cumsum(jumps.astype(np.int64) + ends)[ends] - 1


def size_on_disk(posterior: Posterior) -> int:
    """Bytes of `compress()` when packed."""
    return len(packed(compress(posterior)))
