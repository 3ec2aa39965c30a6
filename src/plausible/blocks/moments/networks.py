"""Moments through a network: the layers it is made of, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plausible.blocks.moments.gaussians import RULES, Moments, Weight, activated, activated_after_scale, linear, scaled
from plausible.core.weights import Weights

SKIPPED = (nn.Identity, nn.Dropout, nn.AlphaDropout)


class Link(NamedTuple):
    """A module of the chain and its name in the network; `prefix` stands before the names of its weights."""

    name: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""


def chain(network: nn.Module, who: str) -> tuple[Link, ...]:
    """The layers of a module or of nested `nn.Sequential`s in the order in which they run; others are refused by name.

    Layers that do nothing here (identities, dropout) are left out. `who` is the method that asks.
    """
    layers = tuple(_layers("", network, who))
    seen: dict[int, str] = {}
    for layer in layers:
        for name, weight in layer.module.named_parameters(recurse=False):
            # a tied weight makes layers dependent, which moments layer by layer do not follow
            if id(weight) in seen:
                raise ValueError(
                    f"{who}: {layer.prefix}{name} and {seen[id(weight)]} are one weight used twice, so that layers depend on each "
                    "other, which moments layer by layer do not follow; untie them, or use MeanField(estimator='weights')"
                )
            seen[id(weight)] = f"{layer.prefix}{name}"
    return layers


def _layers(name: str, module: nn.Module, who: str) -> list[Link]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        # not named_children, which leaves out a module that stands there a second time
        parts = [_layers(f"{name}.{key}" if name else key, child, who) for key, child in module._modules.items()]
        return [layer for part in parts for layer in part]
    kind = type(module)
    if kind in SKIPPED:
        return []
    flat = kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    if flat or (kind is nn.BatchNorm1d and module.track_running_stats) or kind is nn.Linear or kind in RULES:
        return [Link(name, module)]
    activations = ", ".join(sorted(rule.__name__ for rule in RULES))
    where = f"the layer {name!r} is" if name else "the network is"
    raise ValueError(
        f"{who}: {where} {kind.__name__}, through which no moments are known; supported are nn.Sequential (also nested) of "
        f"Linear, BatchNorm1d with running statistics, Flatten(), Identity, Dropout (switched off) and the activations "
        f"{activations}; other elementwise modules can be declared by plausible.moments.elementwise; MeanField takes any network"
    )


class Network(NamedTuple):
    """Weights of a network as Gaussians: means of all (points too), variances of the random ones, by name."""

    layers: tuple[Link, ...]
    means: Mapping[str, Tensor]
    variances: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    evaluated: Collection[str] = ()  # names of submodules that stay in evaluation mode

    def weight(self, layer: Link, name: str) -> Weight | None:
        """A weight of a layer; a frozen parameter is a point at its value; None where the layer has none."""
        full = layer.prefix + name
        if full in self.means:
            return Weight(self.means[full], self.variances.get(full))
        held = getattr(layer.module, name)
        return None if held is None else Weight(held.detach())

    def buffer(self, layer: Link, name: str) -> Tensor:
        held = self.buffers.get(layer.prefix + name)
        return getattr(layer.module, name) if held is None else held


def propagate(network: Network, x: Any, *, full: bool, terms: int, train: bool = False) -> tuple[Moments, dict[str, Tensor]]:
    """Mean and covariance of f(x) under independent Gaussian weights, and the buffers that a training pass changed.

    Linear layers are exact. Their outputs are taken as Gaussian where an activation follows, which they are in the first layer.
    Elements are independent up to the second linear layer; from there on covariances are kept with `full`, and left out
    otherwise. With `train`, batch norm normalises by the moments of the batch, Σ m/N and Σ (m² + v)/N − (Σ m/N)², taken as
    certain; otherwise by its running statistics. x: [N, …].
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"moments go through networks of one input tensor, got inputs of type {type(x).__name__}")
    moments = Moments(x)
    moved: dict[str, Tensor] = {}
    done = -1
    for i, layer in enumerate(network.layers):
        if i == done:  # together with the layer before it
            continue
        module = layer.module
        if isinstance(module, nn.Flatten):
            moments = Moments(moments.mean.flatten(1)) if moments.covariance is None else moments
        elif isinstance(module, nn.Linear):
            _require_rows(moments.mean, layer)
            weight, bias = network.weight(layer, "weight"), network.weight(layer, "bias")
            assert weight is not None
            moments = linear(moments, weight, bias, full=full)
        # a random scale in front of an activation makes it non-Gaussian: both are done together below
        elif isinstance(module, nn.BatchNorm1d):
            _require_rows(moments.mean, layer)
            moments, changed = _normalised(network, layer, module, moments, train and layer.name not in network.evaluated)
            moved |= changed
            scale, shift = network.weight(layer, "weight"), network.weight(layer, "bias")
            after = network.layers[i + 1].module if i + 1 < len(network.layers) else None
            independent = moments.covariance is not None and moments.covariance.ndim == moments.mean.ndim
            if independent and type(after) in RULES and scale is not None and scale.variance is not None:
                assert after is not None
                moments, done = activated_after_scale(after, moments, scale, shift), i + 1
            else:
                moments = scaled(moments, scale, shift)
        else:
            moments = activated(module, moments, terms)
    return moments, moved


def _require_rows(mean: Tensor, layer: Link) -> None:
    if mean.ndim != 2:
        raise ValueError(
            f"moments go through layers of vectors, [N, D]; the layer {layer.name!r} gets inputs of shape "
            f"{tuple(mean.shape)}: put nn.Flatten() before it"
        )


def _normalised(
    network: Network, layer: Link, module: nn.BatchNorm1d, x: Moments, train: bool
) -> tuple[Moments, dict[str, Tensor]]:
    """(x − centre)/√(spread + ε) by the statistics of the batch or the running ones, and the running ones afterwards."""
    centre, spread = (network.buffer(layer, name) for name in ("running_mean", "running_var"))
    changed: dict[str, Tensor] = {}
    if train:
        count = x.mean.shape[0]
        running = centre, spread
        # taken as certain: statistics of a batch hardly depend on one weight
        centre = x.mean.mean(0)
        spread = x.variance.mean(0) + (x.mean - centre).square().mean(0)
        if count < 2:
            raise ValueError(f"batch norm {layer.name!r} needs batches of at least 2 examples, got {count}")
        seen = network.buffer(layer, "num_batches_tracked") + 1
        rate = module.momentum if module.momentum is not None else 1 / seen.to(centre.dtype)
        # PyTorch keeps the unbiased variance and normalises by the biased one
        unbiased = spread * (count / (count - 1))
        for name, old, new in zip(("running_mean", "running_var"), running, (centre, unbiased)):
            changed[layer.prefix + name] = old + rate * (new.detach() - old)
        changed[layer.prefix + "num_batches_tracked"] = seen
    inverse = torch.rsqrt(spread + module.eps)
    return scaled(x, Weight(inverse), Weight(-centre * inverse)), changed


def model_network(
    model: Any, who: str, means: Weights, variances: Weights, buffers: Weights, layers: tuple[Link, ...] | None = None
) -> Network:
    return Network(layers or chain(model.network, who), means, variances, buffers, model.evaluated)


def check(model: Any, x: Any, who: str) -> tuple[Link, ...]:
    """The layers of a model's network, after making sure that running them in turn is what the network does at its weights.

    Refused: outputs picked by `output=`, several inputs, hooks that change values, forward passes in mixed precision.
    """
    if model.output is not None:
        raise ValueError(f"{who}: output= is a function of what the network returns, through which no moments are known")
    layers = chain(model.network, who)
    network = Network(layers, model.initial, {}, model.buffers, model.evaluated)
    with torch.no_grad():
        # without variances moments are the plain forward pass, which must agree with the network's own
        means = propagate(network, x, full=False, terms=0)[0].mean
        wanted = model.outputs({**model.initial, **model.buffers}, x)
    if means.shape != wanted.shape or not torch.allclose(means, wanted, rtol=1e-3, atol=1e-4):
        raise ValueError(f"{who}: the network does something else than its layers in turn; are there hooks that change values?")
    return layers
