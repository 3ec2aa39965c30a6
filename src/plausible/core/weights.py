"""Trees of named tensors: stack, select, flatten, measure.

`Weights` is a plain `dict[str, Tensor]` with the names of `module.named_parameters()`; a leading axis stacks draws or
replicas. States of methods are trees (named tuples, dicts, tuples) whose leaves are tensors; the functions here work on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Weights = dict[str, Tensor]


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to each tensor of a tree (and to the matching tensors of others); leave other leaves alone."""
    return pytree.tree_map(lambda leaf, *rest: function(leaf, *rest) if isinstance(leaf, Tensor) else leaf, tree, *others)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def stack(trees: Sequence[Any]) -> Any:
    """Trees of the same structure → one tree with a leading axis of length `len(trees)`."""
    if not trees:
        raise ValueError("stack() needs at least one tree, got none")
    return pytree.tree_map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *trees)


def index(tree: Any, where: Any) -> Any:
    return tree_map(lambda leaf: leaf[where], tree)


def unstack(tree: Any, count: int) -> list[Any]:
    """The inverse of `stack`: a list of `count` trees (views)."""
    return [index(tree, i) for i in range(count)]


def concatenate(trees: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *trees)


def clone(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone(), tree)


def copy_into(target: Any, source: Any) -> None:
    """Write the tensors of `source` into the buffers of `target` (same structure)."""
    pairs = [(old, new) for old, new in zip(tensors(target), tensors(source)) if old is not new]
    # few kernels in place of one for each; a compiler fuses them by itself
    if pairs and not torch.compiler.is_compiling() and all(old.is_cuda and new.is_cuda for old, new in pairs):
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        return
    for old, new in pairs:
        old.copy_(new)


def to(tree: Any, device: torch.device | str) -> Any:
    return tree_map(lambda leaf: leaf.to(device), tree)


def num_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors(tree))


def num_elements(weights: Mapping[str, Tensor]) -> int:
    return sum(weight.numel() for weight in weights.values())


def flatten(weights: Mapping[str, Tensor], batch_dims: int = 0) -> Tensor:
    """Named tensors → one vector [..., P], `batch_dims` leading axes kept, in the order of the mapping."""
    return torch.cat([w.reshape(*w.shape[:batch_dims], -1) for w in weights.values()], dim=-1)


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Weights:
    """The inverse of `flatten`: vector [..., P] → named tensors with the shapes of `like` (leading axes kept)."""
    sizes = [math.prod(w.shape) for w in like.values()]
    parts = vector.split(sizes, dim=-1)
    return {name: part.reshape((*vector.shape[:-1], *w.shape)) for (name, w), part in zip(like.items(), parts)}


def select(weights: Mapping[str, Tensor], names: Iterable[str]) -> Weights:
    return {name: weights[name] for name in names}
