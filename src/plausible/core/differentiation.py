"""Value and gradient of a function of named weights, by whatever is fastest where it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plausible.core.stacking import leading, stacked_call, transformed, vmapped
from plausible.core.weights import Weights

Function = Callable[..., tuple[Tensor, Any]]


def value_and_gradient(function: Function, weights: Mapping[str, Tensor], *arguments: Any) -> tuple[Tensor, Any, Weights]:
    """(v, auxiliary, ∇_w v) of `v, auxiliary = function(w, *arguments)`, v a scalar, in three ways that agree up to rounding.

    - Compiled, or inside `torch.func.grad` and its kin: `torch.func`.
    - Eager: autograd on leaf tensors, which costs less than half of that.
    - Eager inside `vmap` (stacked members): the forward pass alone is vmapped, and one backward pass runs over the stacked weights
      as they lie in memory, since Σ_k v_k has the gradient of each v_k with respect to its own weights. Unlike `vmap(grad(…))` this
      imports nothing of the compiler, which takes seconds.

    All tensors that differ between members must come in through `weights` and `arguments` (trees), not through the closure.
    Nothing of the result is connected to a graph.
    """
    if vmapped():
        return stacked_call(lambda *call: _all_members(function, *call), dict(weights), arguments)
    if transformed():
        return _by_transform(function, dict(weights), *arguments)
    return _by_autograd(lambda w: function(w, *arguments), weights)


def _by_autograd(function: Function, weights: Mapping[str, Tensor]) -> tuple[Tensor, Any, Weights]:
    """Autograd on leaf tensors; the values of stacked members are summed."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        value, auxiliary = function(leaves)
        whole = value.sum() if value.ndim else value
        found = torch.autograd.grad(whole, list(leaves.values()), materialize_grads=True)
    return value.detach(), auxiliary, dict(zip(leaves, found))


def _by_transform(function: Function, weights: Weights, *arguments: Any) -> tuple[Tensor, Any, Weights]:
    grads, (value, auxiliary) = torch.func.grad_and_value(function, has_aux=True)(weights, *arguments)
    return value, auxiliary, grads


def _all_members(function: Function, info: Any, axes: Any, arguments: Any) -> tuple[Tensor, Any, Weights]:
    weights, rest = arguments
    stacked = {name: leading(weight, axes[0][name], info.batch_size) for name, weight in weights.items()}
    each = {"in_dims": (0, *axes[1]), "randomness": info.randomness}
    if transformed():  # stacked twice, or differentiated from outside
        return torch.func.vmap(lambda w, *a: _by_transform(function, w, *a), **each)(stacked, *rest)
    return _by_autograd(lambda w: torch.func.vmap(function, **each)(w, *rest), stacked)
