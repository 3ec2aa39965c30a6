"""Gradients of batches with less noise: at an anchor they are known from all data, and a batch gives only the difference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plausible.core.data import ArrayData, Batch, num_rows
from plausible.core.model import Joint, Model
from plausible.core.weights import Weights, clone, tree_map
from plausible.engine.method import Run

CHUNK = 1024


class Control(NamedTuple):
    """An anchor and ∇ log p(anchor, D); with "svrg" also the next anchor, and the part of its gradient that has been added up."""

    anchor: Weights
    full: Weights
    coming: Weights
    part: Weights


def check(who: str, model: Model, run: Run[Any], renewed: bool) -> None:
    """Refuse networks whose gradient at an anchor is not one thing, and data whose rows cannot be asked for."""
    noisy = [name for name, layer in model.network.named_modules() if isinstance(layer, nn.modules.dropout._DropoutNd)]
    if model.buffers or noisy:
        what = noisy[0] if noisy else next(iter(model.buffers))
        raise ValueError(
            f"{who}: control needs gradients that are functions of weights and rows alone, and {what!r} (dropout, batch norm) "
            "changes them: leave control out, or put the layer into evaluation mode"
        )
    if renewed and not isinstance(run.data, ArrayData):
        raise ValueError(f"{who}: control='svrg' asks for rows by number: give arrays, or take control='start'")


def started(model: Model, run: Run[Any], renewed: bool) -> Control:
    """The anchor at the weights that the chain starts at. One pass over the data."""
    rows, total = run.data.num_data, tree_map(torch.zeros_like, model.initial)
    parts = -(-rows // CHUNK)
    for batch in run.data.chunks(CHUNK):
        total = _added(model, total, model.initial, batch, parts, rows)
    anchor = clone(model.initial)
    return Control(anchor, total, clone(anchor), clone(total)) if renewed else Control(anchor, total, {}, {})


def reduced(model: Model, control: Control, joint: Joint, batch: Batch) -> Joint:
    """The joint with ∇̂(θ) − ∇̂(anchor) + ∇(anchor) in the place of ∇̂(θ)."""
    there = model.gradient(control.anchor, batch).grads
    return joint._replace(grads={name: g - there[name] + control.full[name] for name, g in joint.grads.items()})


def renewed(model: Model, run: Run[Any], control: Control, weights: Weights, step: Tensor, size: int) -> Control:
    """At the start of an epoch the coming anchor takes over, and the weights of now are the next; a window of rows is added.

    The windows of an epoch are all rows once, whatever the batches are, so that the gradient is that of all data exactly.
    """
    rows = run.data.num_data
    parts = -(-rows // size)
    place = torch.remainder(step, parts)

    def chosen(new: Weights, old: Weights) -> Weights:
        return {name: torch.where(place == 0, new[name], value) for name, value in old.items()}

    anchor, full, coming = (
        chosen(control.coming, control.anchor),
        chosen(control.part, control.full),
        chosen(weights, control.coming),
    )
    part = chosen(tree_map(torch.zeros_like, control.part), control.part)
    window = place * size + torch.arange(size, device=step.device)
    batch = run.data.rows(window.clamp(max=rows - 1))  # type: ignore[union-attr]
    return Control(anchor, full, coming, _added(model, part, coming, batch, parts, rows, window < rows))


def _added(
    model: Model, total: Weights, weights: Weights, batch: Batch, parts: int, rows: int, inside: Tensor | None = None
) -> Weights:
    """The gradients of a part of the rows added to a total that, after all parts, is the gradient by all rows."""
    scale = torch.full((num_rows(batch.x),), parts * num_rows(batch.x) / rows, device=batch.y.device)
    for factor in (batch.weight, inside):
        scale = scale if factor is None else scale * factor
    grads = model.gradient(weights, batch._replace(weight=scale)).grads
    return {name: value + grads[name] / parts for name, value in total.items()}
