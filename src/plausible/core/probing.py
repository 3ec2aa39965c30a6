"""What is found out about a network before it is fitted: does it run, what does it return, which weights move its outputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.core import weights as tree
from plausible.core.data import Batch, num_rows, take
from plausible.core.networks import OutputError, describe, keep_gradients, last_uses, layer
from plausible.core.weights import Weights

if TYPE_CHECKING:
    from plausible.core.model import Model


def check_inputs(model: Model, x: Any, *, train: bool = False, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Outputs at the initial weights (or those given) for a few inputs, or an error that says why there are none."""
    variables = weights if weights is not None else {**model.initial, **model.buffers}
    try:
        outputs = model.outputs(variables, x, train=train)
    except OutputError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        whole = any(not (leaf.is_floating_point() or leaf.is_complex()) for leaf in tree.tensors(x))
        advice = "; integers and booleans reach it as they are: convert features and images, say x.float()"
        hint = advice if whole else ""
        raise ValueError(
            f"network could not be run on the inputs x ({describe(x)})"
            + (" in training mode" if train else "")
            + f": {type(error).__name__}: {error}{hint}"
        ) from error
    rows = num_rows(x)
    if outputs.ndim == 0 or outputs.shape[0] != rows:
        raise ValueError(
            f"network must return one output row per example: {rows} examples gave outputs of shape "
            f"{tuple(outputs.shape)}; if another part of its result is meant, pass output="
        )
    if not outputs.is_floating_point():
        raise TypeError(f"network outputs must be floating point, got {outputs.dtype}")
    if model.output_shape and tuple(outputs.shape[1:]) != model.output_shape:
        raise ValueError(
            f"x gives outputs of shape {tuple(outputs.shape[1:])} per example, the model was built for {model.output_shape}"
        )
    return outputs


def probe(model: Model, example: Batch) -> tuple[Tensor, dict[str, int]]:
    """Run the network on a few examples: its outputs, and for each weight that influences them when it was used last."""
    leaves = {n: w.detach().requires_grad_() for n, w in model.initial.items()}
    with torch.enable_grad():
        outputs = check_inputs(model, example.x, weights=leaves)
    _check_one_row(model, example, outputs)
    uses = last_uses(outputs, leaves)
    dead = set(uses) - _moving_the_output(model, leaves, list(uses), outputs, example)
    uses = {name: when for name, when in uses.items() if name not in dead}
    if not uses:
        raise ValueError(
            "the network's weights do not influence its output (is the forward pass under torch.no_grad, are results "
            "detached, multiplied by zero, or always clamped?): nothing can be inferred"
        )
    return outputs.detach(), uses


def _check_one_row(model: Model, example: Batch, outputs: Tensor) -> None:
    """Refuse networks that lose the axis of examples where there is one example alone."""
    try:
        with torch.no_grad():
            one = model.outputs({**model.initial, **model.buffers}, take(example.x, [0]))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return  # what one row alone does to a network is judged where it happens
    if one.shape != (1, *outputs.shape[1:]):
        raise ValueError(
            f"network gives outputs of shape {tuple(one.shape)} for one example and {tuple(outputs.shape)} for "
            f"{len(outputs)}: it loses the axis of examples; where it ends in squeeze(), write squeeze(-1)"
        )


def _moving_the_output(model: Model, leaves: Weights, names: list[str], outputs: Tensor, example: Batch) -> set[str]:
    """Those of the named weights whose gradient is not exactly zero, here or at other weights and inputs around.

    Dead units have none at the given weights, saturated ones none at the given inputs, and inputs of zero give none to the
    weights that multiply them. Inputs that are no real numbers cannot be moved, and networks that fail at other weights cannot
    be asked: weights then count as moving it.
    """
    real = all(leaf.is_floating_point() for leaf in tree.tensors(example.x))
    stream = torch.Generator().manual_seed(0)
    moving: set[str] = set()
    for scale, keep in ((0.0, True), (0.3, True), (1.0, True), (0.03, False), (1.0, False)):
        near = leaves
        if scale and not real:
            return set(names)
        if scale:

            def moved(t: Tensor, keep: bool = True, scale: float = scale) -> Tensor:
                return t.detach() * keep + scale * torch.randn(t.shape, generator=stream).to(t)

            near = {name: moved(weight).requires_grad_() for name, weight in leaves.items()}
            inputs = tree.tree_map(functools.partial(moved, keep=keep), example.x)
            try:
                with torch.enable_grad():
                    outputs = check_inputs(model, inputs, weights=near)
            except (ValueError, TypeError):
                return set(names)
        missing = [name for name in names if name not in moving]
        direction = torch.randn(outputs.shape, generator=stream).to(outputs)
        if not outputs.requires_grad:
            continue
        with torch.enable_grad():
            along = (outputs * direction).sum()  # grad_outputs= would import a library of symbols, half a second of it
        grads = torch.autograd.grad(along, [near[n] for n in missing], allow_unused=True)
        moving |= {n for n, g in zip(missing, grads) if g is not None and bool((g != 0).any())}
        if len(moving) == len(names):
            break
    return moving


def moving_buffers(model: Model, example: Batch) -> Weights:
    """The buffers that a training pass changes, such as running statistics."""
    before = {n: b.detach().clone() for n, b in model.network.named_buffers()}
    if not before:
        return {}
    x = example.x if num_rows(example.x) > 1 else take(example.x, [0, 0])
    after = {n: b.clone() for n, b in before.items()}
    devices = {b.device for b in before.values() if b.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        check_inputs(model, x, train=True, weights={**model.initial, **after})
    keep_gradients(model.network.eval())
    return {n: before[n] for n in before if not torch.equal(before[n], after[n])}


def last_layer(model: Model, example: Batch) -> tuple[str, ...]:
    """The names of the weights of the layer that is used last, on these examples."""
    uses = probe(model, example)[1]
    return layer_of(model, max(uses, key=lambda name: uses[name]))


def layer_of(model: Model, weight: str) -> tuple[str, ...]:
    """The names of all trained weights in the layers that hold this one (tied weights are held by several)."""
    holders = {id(holder) for holder, _ in model._slots[weight]}
    return tuple(
        name
        for name in model.initial
        if layer(name) == layer(weight) or any(id(holder) in holders for holder, _ in model._slots.get(name, ()))
    )
