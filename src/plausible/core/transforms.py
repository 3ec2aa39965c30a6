"""PyTorch's transforms, and how to live with them: gradients by the fastest way, code that knows it is inside `vmap`, compiling."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from plausible.core.weights import Weights

Function = Callable[..., tuple[Tensor, Any]]
StackedRule = Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
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

    def all_members(info: Any, axes: Any, given: Any) -> tuple[Tensor, Any, Weights]:
        stacked = {name: leading(weight, axes[0][name], info.batch_size) for name, weight in given[0].items()}
        each = {"in_dims": (0, *axes[1]), "randomness": info.randomness}
        if transformed():  # stacked twice, or differentiated from outside
            return torch.func.vmap(lambda w, *a: _by_transform(function, w, *a), **each)(stacked, *given[1])
        return _by_autograd(lambda w: torch.func.vmap(function, **each)(w, *given[1]), stacked)

    if vmapped():
        return stacked_call(all_members, dict(weights), arguments)
    if transformed():
        return _by_transform(function, dict(weights), *arguments)
    return _by_autograd(lambda w: function(w, *arguments), weights)


def _by_autograd(function: Function, weights: Mapping[str, Tensor]) -> tuple[Tensor, Any, Weights]:
    """Autograd on leaf tensors; the values of stacked members are summed."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        value, auxiliary = function(leaves)
        # members do not touch each other's weights: the gradient of the sum has each one's own
        whole = value.sum() if value.ndim else value
        grads = torch.autograd.grad(whole, list(leaves.values()), materialize_grads=True)
    return value.detach(), auxiliary, dict(zip(leaves, grads))


def _by_transform(function: Function, weights: Weights, *arguments: Any) -> tuple[Tensor, Any, Weights]:
    grads, (value, auxiliary) = torch.func.grad_and_value(function, has_aux=True)(weights, *arguments)
    return value, auxiliary, grads


# ---------------------------------------------------------------------------------------------------------------------
# Inside vmap
def transformed() -> bool:
    """Whether the current code is traced by `torch.compile` or runs inside `vmap`, `grad` or another transform."""
    # no public question tells this
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, PyTorch's transformers run layer by layer: their fused evaluation mode has no gradient, and no rule for `vmap`.

    They look at whether their inputs require gradients, which inside a transform is not to be seen. On a GPU products of attention
    are written out, since the fused ones want an alignment that stacked members do not have.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    written_out = sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_available() else contextlib.nullcontext()
    try:
        with written_out:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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


def stacked_call(rule: StackedRule, *arguments: Any) -> Any:
    """Inside `vmap`: the result of `rule(info, axes, arguments)`, which sees the tensors of all members as they lie in memory.

    `arguments` are trees; in `axes`, trees of the same structure, stands for each tensor the axis along which it is stacked, or
    None where all members share it. `info` has `batch_size` and `randomness`. The rule returns a tree of tensors, each with a
    leading axis of members. Nothing of the result is connected to a graph.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: Any = None

    def fill(whole: list[Any], values: Iterable[Any]) -> tuple[Any, ...]:
        for i, value in zip(where, values):
            whole[i] = value
        return pytree.tree_unflatten(whole, structure)

    def mapped(info: Any, axes: Iterable[Any], tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        nonlocal returned
        flat, returned = pytree.tree_flatten(rule(info, fill([None] * len(leaves), axes), fill(list(leaves), tensors)))
        return tuple(flat)

    # autograd.Function alone lets one write a rule for vmap; only tensors may be its arguments
    flat = _Stacked.apply(mapped, *(leaves[i] for i in where))
    return pytree.tree_unflatten(list(flat), returned)


class _Stacked(torch.autograd.Function):
    """One call with a rule of its own for `vmap`."""

    @staticmethod
    def forward(mapped: Any, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        raise RuntimeError("stacked_call needs tensors that are stacked by vmap, and found none")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], mapped: Any, *tensors: Tensor) -> tuple[Any, Any]:
        flat = mapped(info, in_dims[1:], tensors)
        return flat, (0,) * len(flat)


def leading(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The tensor with its members' axis in front, or repeated (without copies) where all share it."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling
_serial = itertools.count()


def compiled(function: Callable[..., Any], *, resident: bool) -> Callable[..., Any]:
    """`torch.compile` of a whole step; `resident` says that every call has the same shapes and objects, and leaves out the guards.

    Checking guards costs time at every call. Without them nothing would tell two steps apart that share their code, so each
    gets a code object of its own, and with it a cache of its own.
    """
    # dynamo keeps what it compiled by code object
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_serial)}")
    fresh = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    skip = getattr(torch.compiler, "skip_all_guards_unsafe", None) if resident else None
    options: dict[str, Any] = {} if skip is None else {"guard_filter_fn": skip}
    return torch.compile(fresh, fullgraph=True, dynamic=False, options=options)


_library = torch.library.Library("plausible", "FRAGMENT")
_library.define("hold(Tensor value) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("hold", lambda value: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("plausible::hold", lambda value: torch.empty_like(value), lib=_library)
torch.library.register_vmap(
    "plausible::hold", lambda _info, axes, value: (torch.ops.plausible.hold(value), axes[0]), lib=_library
)


def hold(value: Tensor) -> Tensor:
    """The value itself, computed once where a compiled CPU step would compute it again for every weight it multiplies.

    The compiler inlines scalar expressions (a learning rate with its sine, Adam's corrections with their exponentials) into
    the loops over the weights. This is a call that it cannot look into. Elsewhere it does nothing.
    """
    if torch.compiler.is_compiling() and value.device.type == "cpu":
        return torch.ops.plausible.hold(value)
    return value
