"""What a saved posterior answers at one input, so that a network of the same shapes which computes something else is known.

The input is nobody's data: of numbers the means over a few examples, of whole numbers their minima.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plausible.core import random
from plausible.core.weights import index

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior

MARK = "probe/"


@torch.no_grad()
def answer(posterior: Posterior, inputs: Any) -> Tensor | None:
    """Outputs of one network that the posterior stands for; None where there is none, or where it has no one answer."""
    model = posterior.model
    try:
        weights = {**model.initial, **model.buffers, **index(posterior.starting_points(1), -1)}
        placed = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(model.device), inputs)
        twice = []
        for seed in (0, 1):
            with random.isolated(seed, model.device):
                twice.append(model.outputs(weights, placed).cpu())
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return None
    return twice[0] if torch.isfinite(twice[0]).all() and torch.equal(*twice) else None


def probed(posterior: Posterior) -> tuple[Any, dict[str, Tensor]]:
    """The structure of the input as JSON (None: nothing can be compared), with its tensors and the answer."""
    inputs = posterior.model.sample
    outputs = None if inputs is None else answer(posterior, inputs)
    if outputs is None:
        return None, {}
    leaves: list[Tensor] = []
    structure = _flat(inputs, leaves)
    return structure, {**{f"{MARK}{i}": leaf for i, leaf in enumerate(leaves)}, f"{MARK}output": outputs}


def compare(posterior: Posterior, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """ValueError where the posterior, in the network that was given, answers otherwise than when it was saved."""
    if structure is None:
        return
    inputs, expected = _nested(structure, tensors), tensors[f"{MARK}output"]
    object.__setattr__(posterior.model, "sample", inputs)  # to be saved again
    found = answer(posterior, inputs)
    if found is None:
        return
    half = torch.float16 in (found.dtype, expected.dtype) or torch.bfloat16 in (found.dtype, expected.dtype)
    error = 0.1 if half or posterior.model.precision is not None else 0.01
    away = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
    if away > error * (1e-2 + float(expected.abs().max())):
        raise ValueError(
            "network does not fit the saved posterior: its weights have the same names and shapes, but it computes something else "
            f"(at a stored input its outputs are {away:.2g} away from what they were): another activation, another order, or "
            "another output="
        )


def _flat(inputs: Any, leaves: list[Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        leaves.append(inputs)
        return len(leaves) - 1
    if isinstance(inputs, Mapping):
        return {str(name): _flat(value, leaves) for name, value in inputs.items()}
    return None if inputs is None else [_flat(value, leaves) for value in inputs]


def _nested(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(structure, Mapping):
        return {name: _nested(value, tensors) for name, value in structure.items()}
    if isinstance(structure, list):
        return tuple(_nested(value, tensors) for value in structure)
    return None if structure is None else tensors[f"{MARK}{int(structure)}"]
