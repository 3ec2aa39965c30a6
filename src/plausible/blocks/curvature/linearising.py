"""Jacobians of the outputs with respect to the weights, layer by layer, without writing them down where that can be avoided.

For columns S_k of an output-space matrix, J_nᵀS_k of a linear layer is Σ_t row ⊗ column over the positions t at which its
weight was used: rows are gradients at the layer's output, columns its inputs. `Linearisation` gives both, for every layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plausible.blocks.curvature.columns import Columns
from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.products import kernels
from plausible.blocks.curvature.recording import Recorder, Use
from plausible.core.data import num_rows, take
from plausible.core.model import Model
from plausible.core.special import flushed
from plausible.core.weights import Weights, num_elements, stack, tree_map


class Linearisation:
    """f(x; w) around one set of weights: outputs, and JᵀS by layers for the random weights.

    The network runs in evaluation mode. `weights` are all weights, points and buffers.
    """

    def __init__(self, model: Model, weights: Mapping[str, Tensor], x: Any):
        self.model = model
        self.names = tuple(n for n in model.random if not n.startswith("likelihood."))
        # weights of units that are never used decay to denormal numbers, which are slow
        self.weights = {name: flushed(value.detach()) for name, value in weights.items()}
        self.cloning = False
        self.batched: bool | None = None  # whether all columns go through one backward pass; found out by trying
        with torch.inference_mode(False):
            self.weights = {name: v.clone() if v.is_inference() else v for name, v in self.weights.items()}
            self._probe(_usable(x))

    # -----------------------------------------------------------------------------------------------------------------
    def _record(self, x: Any, grad: bool) -> tuple[Tensor, list[Use], Weights]:
        """Run the network: its outputs, every linear use of a random weight in order, and the leaves that stood for the weights."""
        leaves = {name: self.weights[name].detach().requires_grad_(grad) for name in self.names}
        with torch.enable_grad(), Recorder(leaves) as recorder:  # without a graph where no leaf asks for one
            recorder.cloning = self.cloning
            outputs = self.model.outputs({**self.weights, **leaves}, x)
        self._others = set(self.names) if recorder.ragged else recorder.others
        self.final = bool(recorder.recorded) and outputs is recorder.recorded[-1].outputs and not self.cloning
        if any(use.outputs._version != version for use, version in zip(recorder.recorded, recorder.versions)):
            self.cloning = True  # the network writes into what its layers gave: give it copies
            return self._record(x, grad)
        return outputs, recorder.recorded, leaves

    def _probe(self, x: Any) -> None:
        """Find out where the examples are in the inputs and outputs of every use, and which weights are not seen in any."""
        rows = num_rows(x)
        stream = torch.Generator().manual_seed(0)

        def moved(leaf: Tensor) -> Tensor:  # so that no two positions are alike
            return leaf + 1e-2 * torch.randn(leaf.shape, generator=stream).to(leaf) if leaf.is_floating_point() else leaf

        # the axis that grows from two examples to three is that of the examples
        three = tree_map(moved, take(x, [0, 1 % rows, 2 % rows]))
        two = take(three, [0, 1])
        uses, more = (self._record(part, grad=False)[1] for part in (two, three))
        self.axes: dict[tuple[str | None, str | None], list[tuple[int, str]]] = {}
        others = set(self._others) if len(uses) == len(more) else set(self.names)
        for a, b in zip(uses, more):
            place = _place(a.columns, b.columns, a.outputs, b.outputs)
            if place is None:
                others |= {n for n in (a.weight, a.bias) if n is not None}
                continue
            self.axes.setdefault((a.weight, a.bias), []).append(place)
        self._settle_flat(two, uses, others)
        self._group(uses, others)
        seen = [use for use in uses if (use.weight, use.bias) in self.layers]
        # numbers that an example needs: without columns, and for each column of S
        held = sum(2 * use.arrange(use.columns[:1]).numel() + 3 * use.outputs.numel() // 2 for use in seen) + 1
        each = sum(use.outputs.numel() for use in seen) // 2 + 1
        self.per_example = held, each + num_elements({n: self.weights[n] for n in self.others})

    def _settle_flat(self, two: Any, uses: list[Use], others: set[str]) -> None:
        """Where examples and positions share an axis: which of them runs faster along it."""
        if not any(order == "?" for places in self.axes.values() for _, order in places):
            return
        swapped = self._record(take(two, [1, 0]), grad=False)[1]
        seen: dict[tuple[str | None, str | None], int] = {}
        for a, b in zip(uses, swapped):
            key = (a.weight, a.bias)
            at = seen.get(key, 0)
            seen[key] = at + 1
            if at >= len(self.axes.get(key, [])) or self.axes[key][at][1] != "?":
                continue
            axis = self.axes[key][at][0]
            first, second = (u.outputs.movedim(axis, 0) for u in (a, b))
            half = len(first) // 2
            # two examples swapped: blocks change places, or neighbours do
            major = torch.allclose(first[:half], second[half:]) and torch.allclose(first[half:], second[:half])
            minor = torch.allclose(first[0::2], second[1::2]) and torch.allclose(first[1::2], second[0::2])
            if major == minor:
                others |= {n for n in key if n is not None}
            self.axes[key][at] = (axis, "major" if major else "minor")

    def _group(self, uses: list[Use], others: set[str]) -> None:
        """The layers: weights with their biases; what is used in several ways goes to the others."""
        pairs: dict[str, set[Any]] = {}
        for use in uses:
            how = (use.weight, use.bias, use.kind, use.transposed, use.groups)
            for name in (use.weight, use.bias):
                if name is not None:
                    pairs.setdefault(name, set()).add(how)
        # a tied weight has a Jacobian that no single layer knows
        others |= {name for name, ways in pairs.items() if len(ways) > 1}
        # a layer of which one weight is not seen whole is not seen at all
        for use in uses:
            if {use.weight, use.bias} & others:
                others |= {n for n in (use.weight, use.bias) if n is not None}
        others |= set(self.names) - set(pairs)
        self.layers: dict[tuple[str | None, str | None], Layer] = {}
        for use in uses:
            key = (use.weight, use.bias)
            if key in self.layers or set(key) & others:
                continue
            names = tuple(n for n in key if n is not None)
            shapes = tuple(tuple(self.weights[n].shape) for n in names)
            weighted = use.weight is not None
            groups = use.groups if weighted else 1
            self.layers[key] = Layer(names, use.kind, shapes, use.bias is not None, weighted, use.transposed, groups)
        self.others = tuple(n for n in self.names if n in others)
        self.rest = [Layer((n,), "vector", (tuple(self.weights[n].shape),)) for n in self.others]

    @property
    def all_layers(self) -> list[Layer]:
        layers = [*self.layers.values(), *self.rest]
        return sorted(layers, key=lambda layer: self.names.index(layer.names[0]))

    def bytes_per_example(self, columns: int) -> int:
        """Roughly what `__call__` needs for one example."""
        item = self.weights[self.names[0]].element_size()
        return item * (self.per_example[0] + columns * self.per_example[1])

    # -----------------------------------------------------------------------------------------------------------------
    def outputs(self, x: Any) -> Tensor:
        with torch.no_grad():
            return self.model.outputs(self.weights, x)

    def __call__(self, x: Any, roots: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Part]]:
        """f(x) [B, *O], and for S = roots(f(x)) [K, B, *O] the parts of JᵀS."""
        (whole,) = self.slices(x, roots)
        return whole

    def slices(
        self, x: Any, roots: Callable[[Tensor], Tensor | Columns], count: int | None = None
    ) -> Iterator[tuple[Tensor, list[Part]]]:
        """As `__call__`, with at most `count` of the K columns at a time: one forward pass, and a backward pass for each slice."""
        with torch.inference_mode(False), torch.enable_grad():
            x = _usable(x)
            outputs, uses, _ = self._record(x, grad=True) if self.layers else (self.outputs(x), [], {})
            uses = [use for use in uses if (use.weight, use.bias) in self.layers]
            self._check_rows(uses, num_rows(x), x)
            if uses and not outputs.requires_grad:  # nothing that is random reaches the outputs
                # a graph to walk back through, with gradients of zero
                outputs = outputs + 0 * torch.stack([use.outputs.sum() for use in uses]).sum()
            with torch.no_grad():
                columns = roots(outputs.detach())
                inputs = self._inputs(uses, num_rows(x))
        count = count or max(1, len(columns))
        for start in range(0, max(1, len(columns)), count):
            with torch.inference_mode(False), torch.enable_grad():
                last = start + count >= len(columns)
                parts = self._parts(x, outputs, uses, inputs, columns[start : start + count], last)
            yield outputs.detach(), parts

    def _spots(self, uses: list[Use]) -> Iterator[tuple[Layer, list[tuple[int, tuple[int, str]]]]]:
        """For each layer, which of the uses are its own, and where the examples lie in each."""
        for key, layer in self.layers.items():
            numbers = [i for i, use in enumerate(uses) if (use.weight, use.bias) == key]
            places = self.axes[key]
            yield layer, [(i, places[min(j, len(places) - 1)]) for j, i in enumerate(numbers)]

    def _inputs(self, uses: list[Use], batch: int) -> dict[Layer, Tensor]:
        columns = {}
        for layer, spots in self._spots(uses):
            cs = [_stacked(uses[i].columns[None], uses[i].arrange, spot, batch)[0] for i, spot in spots]
            ones = layer.kind == "matrix" and layer.biased and layer.weighted
            c = cs[0] if len(cs) == 1 else torch.cat(cs, 1)
            columns[layer] = torch.cat([c, c.new_ones(*c.shape[:-1], 1)], -1) if ones else c
        return columns

    def _parts(
        self, x: Any, outputs: Tensor, uses: list[Use], inputs: Mapping[Layer, Tensor], columns: Tensor, last: bool
    ) -> list[Part]:
        """The parts for some columns; the graph is used up by the `last` ones."""
        if not self.layers:
            return self._rest(x, columns)
        batch, inner = num_rows(x), [use.outputs for use in uses]
        if self.batched is None and len(columns) > 1:
            # what works for one chunk works for all: the network is the same
            self.batched = can_batch(outputs, inner, columns)
        collected = gradients(outputs, inner, columns, bool(self.batched), keep=not last)
        parts = []
        with torch.no_grad():
            for layer, spots in self._spots(uses):
                rs = [_stacked(collected[i], uses[i].rows, spot, batch) for i, spot in spots]
                parts.append(_part(layer, inputs[layer], rs[0] if len(rs) == 1 else torch.cat(rs, 2)))
        order = {layer: i for i, layer in enumerate(self.all_layers)}
        return sorted([*parts, *self._rest(x, columns)], key=lambda part: order[part.layer])

    def _check_rows(self, uses: list[Use], batch: int, x: Any) -> None:
        """Refuse to guess where a layer sees other rows than those of the examples; look again where positions came or went."""
        for again in (False, True):
            wrong = [
                use
                for use in uses
                for axis, order in [self.axes[use.weight, use.bias][-1]]
                if (use.outputs.shape[axis] % batch if order else use.outputs.shape[axis] != batch)
            ]
            if not wrong:
                return
            if not again:
                # the number of positions may depend on the batch (a padded sequence): probe again, once
                before = list(self.layers)
                self._probe(x)
                if list(self.layers) != before:
                    break
        names = " and ".join(name for name in (wrong[0].weight, wrong[0].bias) if name is not None)
        raise ValueError(
            f"the layer of {names} sees {wrong[0].outputs.shape[0]} rows for {batch} examples, and which belong to which cannot be "
            "told: leave it out of the posterior by where="
        )

    def _rest(self, x: Any, columns: Tensor) -> list[Part]:
        """The weights that no layer explains: their Jacobians by autograd, one example at a time in parallel."""
        if not self.others:
            return []
        fixed = {name: value for name, value in self.weights.items() if name not in self.others}
        moving = {name: self.weights[name] for name in self.others}

        def contracted(w: Weights, row: Any, column: Tensor) -> Tensor:
            one = tree_map(lambda leaf: leaf[None], row)
            return (self.model.outputs({**fixed, **w}, one)[0] * column).sum()

        def alone(k: int, b: int) -> Weights:
            leaves = {n: v.detach().requires_grad_() for n, v in moving.items()}
            with torch.enable_grad():
                value = contracted(leaves, take(x, b), columns[k, b])
            if not value.requires_grad:
                return {n: torch.zeros_like(v) for n, v in moving.items()}
            return dict(zip(moving, torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)))

        inner = torch.func.vmap(torch.func.grad(contracted), in_dims=(None, 0, 0))
        try:
            with kernels(False):  # attention by its formula, which vmap has a rule for
                jacobians = torch.func.vmap(inner, in_dims=(None, None, 0))(moving, x, columns)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError):
            jacobians = stack([stack([alone(k, b) for b in range(num_rows(x))]) for k in range(len(columns))])
        empty = columns.new_zeros(0)
        # a weight that is one number has no axes of its own
        flat = {n: j.detach() if j.ndim > 2 else j.detach()[:, :, None] for n, j in jacobians.items()}
        return [Part(layer, empty, flat[layer.names[0]].flatten(2)) for layer in self.rest]


def _usable(x: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, x)


def _place(a: Tensor, b: Tensor, z: Tensor, y: Tensor) -> tuple[int, str] | None:
    """The axis along which columns and outputs grow with the number of examples (2 in a and z, 3 in b and y)."""
    if a.ndim != b.ndim or z.ndim != y.ndim:
        return None
    grown = [[i for i, (s, t) in enumerate(zip(u.shape, v.shape)) if s != t] for u, v in ((a, b), (z, y))]
    if grown[0] != grown[1] or len(grown[0]) != 1:
        return None
    axis = grown[0][0]
    if 3 * z.shape[axis] != 2 * y.shape[axis] or z.shape[axis] != a.shape[axis]:
        return None
    return axis, "" if z.shape[axis] == 2 else "?"


def _stacked(value: Tensor, arrange: Callable[[Tensor], Tensor], place: tuple[int, str], batch: int) -> Tensor:
    """[K, B, positions, …] from what a call had or from gradients at what it gave, [K, …]."""
    axis, order = place
    rows = arrange(value.movedim(axis + 1, 1).flatten(0, 1)).unflatten(0, (len(value), -1))
    if not order:
        return rows
    if order == "major":
        return rows.unflatten(1, (batch, -1)).flatten(2, 3)
    return rows.unflatten(1, (-1, batch)).transpose(1, 2).flatten(2, 3)


def _part(layer: Layer, c: Tensor, r: Tensor) -> Part:
    if layer.kind == "vector":  # w ∘ c + b
        jacobian = [(r * c).sum((2, 3))] if layer.weighted else []
        jacobian += [r.sum((2, 3))] if layer.biased else []
        return Part(layer, c[:0], torch.cat(jacobian, -1))
    if layer.kind == "matrix" and not layer.weighted:
        r = r.flatten(3).unsqueeze(3)
        return Part(layer, r.new_ones(*r.shape[1:4], 1), r)
    return Part(layer, c, r)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of many columns at once: ∂⟨S_k, f⟩/∂z for K columns S of the outputs, at tensors z inside a network
def gradients(outputs: Tensor, inner: Sequence[Tensor], columns: Tensor, together: bool, keep: bool = False) -> list[Tensor]:
    """[K, *z.shape] for each z in `inner`, for columns [K, *outputs.shape]; 0 where f does not depend on z.

    `together` is one batched backward pass, with matrix products of K times as many rows; else there are K passes. The graph is
    used up, unless it is to be kept.
    """
    if together:
        grads = torch.autograd.grad(outputs, inner, columns, is_grads_batched=True, allow_unused=True, retain_graph=keep)
        return [z.new_zeros(len(columns), *z.shape) if g is None else g for z, g in zip(inner, grads)]
    whole = [z.new_zeros(len(columns), *z.shape) for z in inner]
    for k, column in enumerate(columns):
        grads = torch.autograd.grad(outputs, inner, column, retain_graph=keep or k + 1 < len(columns), allow_unused=True)
        for kept, grad in zip(whole, grads):
            if grad is not None:
                kept[k] = grad
    return whole


def can_batch(outputs: Tensor, inner: Sequence[Tensor], columns: Tensor) -> bool:
    """Whether a batched backward pass works, without a loop inside, and agrees with a single one; tried on the first column."""
    if len(columns) < 2:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns of operations that have no rule, over which it loops
            whole = torch.autograd.grad(
                outputs, inner, columns[:1], retain_graph=True, is_grads_batched=True, allow_unused=True
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, Warning):
        return False
    single = torch.autograd.grad(outputs, inner, columns[0], retain_graph=True, allow_unused=True)
    return all(
        torch.allclose(a[0], b, rtol=1e-3, atol=1e-5 * float(b.abs().max())) if a is not None and b is not None else a is b
        for a, b in zip(whole, single)
    )
