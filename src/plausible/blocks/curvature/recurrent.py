"""Recurrent nets written out step by step, so that the products in them can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class _Linear(Protocol):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


def unrolled(
    recorder: _Linear,
    kind: str,
    x: Tensor,
    state: Any,
    flat: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """What `torch.lstm`, `torch.gru` or `torch.rnn_*` gives for these arguments, by calls of `recorder.linear`."""
    directions = 2 if bidirectional else 1
    each = len(flat) // (layers * directions)
    hidden, cell = (state[0], state[1]) if kind == "lstm" else (state, None)
    if batch_first:
        x = x.transpose(0, 1)
    finals: list[Tensor] = []
    cells: list[Tensor] = []
    for layer in range(layers):
        ways = []
        for way in range(directions):
            at = layer * directions + way
            own = flat[at * each : (at + 1) * each]
            order = range(len(x)) if way == 0 else range(len(x) - 1, -1, -1)
            c = None if cell is None else cell[at]
            steps, h, c = _direction(recorder, kind, x, hidden[at], c, own, has_biases, order)
            ways.append(steps)
            finals.append(h)
            if c is not None:
                cells.append(c)
        x = ways[0] if directions == 1 else torch.cat(ways, -1)
    outputs = x.transpose(0, 1) if batch_first else x
    last = torch.stack(finals)
    return (outputs, last, torch.stack(cells)) if kind == "lstm" else (outputs, last)


def _direction(
    recorder: _Linear, kind: str, x: Tensor, h: Tensor, c: Tensor | None, own: Sequence[Tensor], has_biases: bool, order: range
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer in one direction: its outputs [T, B, H], the last state and the last cell."""
    into, across = own[0], own[1]
    bias_into, bias_across = (own[2], own[3]) if has_biases else (None, None)
    projection = own[-1] if len(own) % 2 else None
    inputs = recorder.linear(x, into, bias_into)
    steps: list[Tensor | None] = [None] * len(x)
    for t in order:
        given, back = inputs[t], recorder.linear(h, across, bias_across)
        if kind == "lstm":
            assert c is not None
            i, f, g, o = (given + back).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            if projection is not None:
                h = recorder.linear(h, projection)
        elif kind == "gru":
            (r, z, n), (rb, zb, nb) = given.chunk(3, -1), back.chunk(3, -1)
            z = (z + zb).sigmoid()
            h = (1 - z) * (n + (r + rb).sigmoid() * nb).tanh() + z * h
        else:
            h = (given + back).tanh() if kind == "tanh" else (given + back).relu()
        steps[t] = h
    return torch.stack(steps), h, c  # type: ignore[arg-type]
