"""Low-rank adapters: W + (α/r)·B·A beside frozen weights, so that a large network has few weights to be inferred."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch.nn.functional as F
from torch import Tensor, nn

from plausible.core import random
from plausible.core.attributes import duplicate
from plausible.core.networks import check_network

__all__ = ["LoRA", "lora", "merged"]

Layers = str | Sequence[str] | Callable[[str], bool] | None


class LoRA(nn.Module):
    """y = W x + b + (α/r)·B (A x): a linear layer with frozen W and b, and A `[r, in]`, B `[out, r]` to be learned.

    Hu et al. (2022), LoRA: Low-Rank Adaptation of Large Language Models. B starts at 0, so that the network starts as it was; A
    starts as a linear layer does. In code W and b are `base`, A is `down`, B is `up`. Cost beyond the layer: r·(in + out)
    products an input. `weight` and `bias` are those of the plain layer that computes the same, for modules that read them from
    outside, such as `nn.MultiheadAttention`.
    """

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float | None = None):
        super().__init__()
        outputs, inputs = base.weight.shape
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
        if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be a positive number, or None for alpha = rank, got {alpha!r}")
        self.base = base.requires_grad_(False)
        self.in_features, self.out_features, self.rank = inputs, outputs, rank
        self.scale = 1.0 if alpha is None else alpha / rank
        self.down = nn.Parameter(base.weight.new_empty(rank, inputs))
        self.up = nn.Parameter(base.weight.new_empty(outputs, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform in ±1/√in, B = 0."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.down, -bound, bound)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)

    @property
    def weight(self) -> Tensor:
        """W + (α/r)·B A, `[out, in]`."""
        return self.base.weight + self.scale * self.up @ self.down

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


def lora(
    network: nn.Module, rank: int = 4, where: Layers = None, *, alpha: float | None = None, train: Layers = (), seed: int = 0
) -> nn.Module:
    """A copy of the network whose linear layers are `LoRA` layers; nothing but the adapters is left to be learned.

        adapted = pl.adapters.lora(pretrained, rank=4, where="*attention*", train="head.*")
        posterior = pl.fit(adapted, data, pl.Laplace(structure="kron"))

    `where` chooses `nn.Linear` layers by the names of `network.named_modules()`: a shell-style pattern or several, a predicate of
    the name, or None for all of them. BA is scaled by alpha/rank (None: by 1). `train` names parameters that are learned beside the
    adapters, often a new head; all others get `requires_grad=False`. `seed` is that of the first values of A. The projections of
    queries, keys and values in `nn.MultiheadAttention` are one bare parameter and no linear layer: they stay frozen.
    """
    check_network(network)
    copied = duplicate(network).requires_grad_(False)
    # adapted layers stay as they are: no adapter of an adapter
    inside = {id(module.base) for module in copied.modules() if isinstance(module, LoRA)}
    layers = {
        name: module for name, module in copied.named_modules() if isinstance(module, nn.Linear) and id(module) not in inside
    }
    chosen = _chosen(tuple(layers), where, "where", "linear layer")
    parameters = tuple(name for name, _ in copied.named_parameters())
    learned = _chosen(parameters, () if train is None else train, "train", "parameter")
    # nn.init draws from PyTorch's global generator
    with random.isolated(seed):
        made = {id(layers[name]): LoRA(layers[name], rank, alpha) for name in chosen}
    for name in learned:
        copied.get_parameter(name).requires_grad_()
    return _exchanged(copied, made)


def merged(network: nn.Module) -> nn.Module:
    """A copy of the network with plain linear layers of weight W + (α/r)·B A in the place of its `LoRA` layers."""
    check_network(network)
    copied = duplicate(network)
    made: dict[int, nn.Module] = {}
    for module in copied.modules():
        if isinstance(module, LoRA):
            # a subclass of nn.Linear keeps its class and its hooks
            plain = copy.copy(module.base)
            plain._parameters = {**module.base._parameters, "weight": nn.Parameter(module.weight.detach(), False)}
            made[id(module)] = plain
    if not made:
        raise ValueError("network has no LoRA layers to be merged; plausible.adapters.lora puts them in")
    return _exchanged(copied, made)


def _chosen(names: Sequence[str], patterns: Layers, argument: str, what: str) -> list[str]:
    if patterns is None:
        patterns = "*"
    if callable(patterns):
        chosen = [name for name in names if patterns(name)]
        if not chosen:
            raise ValueError(f"{argument} chooses no {what}; there are: {', '.join(names) or 'none'}")
        return chosen
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must be name patterns or a predicate of the name, got {pattern!r}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{argument}={pattern!r} matches no {what}; there are: {', '.join(names) or 'none'}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)]


def _exchanged(network: nn.Module, made: Mapping[int, nn.Module]) -> nn.Module:
    """The network with other modules in the places of these, wherever they stand."""
    if id(network) in made:
        return made[id(network)]
    for parent in list(network.modules()):
        if id(parent) in made:
            continue
        for name, child in parent._modules.items():  # named_children() would show a module at its first place alone
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return network
