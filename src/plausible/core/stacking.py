"""Eager code inside `vmap`: functions that know how to run on all stacked members at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Stacked = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]


def transformed() -> bool:
    """Whether the current code is traced by `torch.compile` or runs inside `vmap`, `grad` or another transform."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


_closed_over = False


@contextlib.contextmanager
def closed_over() -> Iterator[None]:
    """For steps whose members differ in tensors of a closure: inside, nothing runs on all members at once past `vmap`."""
    global _closed_over
    before, _closed_over = _closed_over, True
    try:
        yield
    finally:
        _closed_over = before


def vmapped() -> bool:
    """Whether the current code runs eagerly inside `vmap`, and that is the innermost transform (and not `closed_over`)."""
    if torch.compiler.is_compiling() or _closed_over:
        return False
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() == torch._C._functorch.TransformType.Vmap


def stacked_call(rule: Stacked, *arguments: Any) -> Any:
    """Inside `vmap`: the result of `rule(info, axes, arguments)`, which sees the tensors of all members as they lie in memory.

    `arguments` are trees; in `axes`, trees of the same structure, stands for each tensor the axis along which it is stacked, or
    None where all members share it. `info` has `batch_size` and `randomness`. The rule returns a tree of tensors, each with a
    leading axis of members. Nothing of the result is connected to a graph.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    call = _Call(rule, leaves, structure, [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
    flat = _Stacked.apply(call, *(leaves[i] for i in call.where))
    return pytree.tree_unflatten(list(flat), call.result)


class _Call:
    """A rule, its arguments with the places of the tensors among them, and, once it ran, the structure of its result."""

    def __init__(self, rule: Stacked, leaves: list[Any], structure: Any, where: list[int]):
        self.rule, self.leaves, self.structure, self.where = rule, leaves, structure, where
        self.result: Any = None

    def fill(self, leaves: list[Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
        for i, value in zip(self.where, values):
            leaves[i] = value
        return pytree.tree_unflatten(leaves, self.structure)


class _Stacked(torch.autograd.Function):
    """One call with a rule of its own for `vmap`."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        raise RuntimeError("stacked_call needs tensors that are stacked by vmap, and found none")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: _Call, *tensors: Tensor) -> tuple[Any, Any]:
        axes = call.fill([None] * len(call.leaves), in_dims[1:])
        arguments = call.fill(list(call.leaves), tensors)
        flat, call.result = pytree.tree_flatten(call.rule(info, axes, arguments))
        return tuple(flat), (0,) * len(flat)


def leading(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The tensor with its members' axis in front, or repeated (without copies) where all share it."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
