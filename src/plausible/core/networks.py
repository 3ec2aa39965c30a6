"""Networks seen from outside: what can be fitted, how a module is called, which weights act on its outputs, and where they are."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from plausible.core.weights import Weights

Where = str | Sequence[str] | Callable[..., bool] | None


def describe(x: Any) -> str:
    """Shapes and types of a tree of inputs, for messages."""
    if isinstance(x, Tensor):
        return f"shape {tuple(x.shape)}, {x.dtype}"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(describe(v) for v in x) + ")"
    return type(x).__name__


class OutputError(TypeError):
    """What the network returned is not, or does not contain, the outputs."""


def check_network(network: nn.Module) -> None:
    """Refuse what cannot be fitted: not a module, lazy parameters, tensors without values or on several devices."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}")
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError("network is a TorchScript module, whose weights cannot be exchanged; pass the module it was made from")
    held = [*network.named_parameters(), *network.named_buffers()]
    lazy = [n for n, v in held if isinstance(v, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))]
    if lazy:
        raise ValueError(f"network has lazy parameters ({lazy[0]}, …): run it once on an example before fitting")
    empty = [n for n, v in held if v.is_meta]
    if empty:
        raise ValueError(
            f"network has tensors without values, on the meta device ({empty[0]}, …): materialise it with "
            "network.to_empty(device='cpu') and initialise or load its weights before fitting"
        )
    devices = {p.device for p in network.parameters()}
    if len(devices) > 1:
        raise ValueError(f"network has parameters on several devices ({', '.join(map(str, devices))}): move it to one")


def choose_device(network: nn.Module, device: torch.device | str | None) -> torch.device:
    """None: where the network is; "auto": the best there is; anything else is checked."""
    check_network(network)
    if device is None:
        first = next(iter(network.parameters()), None)
        return torch.device("cpu") if first is None else first.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is not a device; use 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r} was asked for, but PyTorch finds no CUDA GPU here; use device='cpu' or 'auto'"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r} was asked for, but there are only {torch.cuda.device_count()} GPUs")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device='mps' was asked for, but PyTorch finds no Metal GPU here; use device='cpu' or 'auto'")
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device={str(device)!r} is not supported; use 'cpu', 'cuda' or 'mps'")
    return chosen


def private_copy(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode, so that the user's module is never changed."""
    check_network(network)
    try:
        return keep_gradients(copy.deepcopy(network).eval())
    except Exception as error:  # whatever a module's __deepcopy__ or __reduce__ may raise
        raise ValueError(
            f"network cannot be copied ({error}); modules must support copy.deepcopy so that yours is never changed"
        ) from error


def keep_gradients(network: nn.Module) -> nn.Module:
    """The network with its recurrent layers in training mode: in evaluation mode cuDNN gives no gradients of them.

    Only PyTorch's own ones that are the same function in both modes: those with dropout between their layers, subclasses, and one
    that is the whole network stay as they are (and run `without_cudnn`).
    """
    for layer in network.modules():
        if type(layer) in (nn.RNN, nn.LSTM, nn.GRU) and not layer.dropout and layer is not network:
            layer.training = True
    return network


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Kernels of PyTorch's own, whose recurrent layers have gradients in evaluation mode too."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def check_parameters(parameters: Weights) -> None:
    """Refuse no parameters at all, reserved names, complex numbers, and values that are not finite."""
    if not parameters:
        raise ValueError(
            "network has no trainable parameters: nothing can be inferred (all have requires_grad=False, or there are none)"
        )
    for name, value in parameters.items():
        if name.startswith("likelihood."):
            raise ValueError(
                f"network parameter {name!r}: names that begin with 'likelihood.' belong to the likelihood's own weights; "
                "rename that submodule"
            )
        if value.is_complex():
            raise TypeError(f"network parameter {name!r} is complex, expected real: hold its two parts as real parameters")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"network parameter {name!r} contains NaN or infinity before any training")


def last_uses(outputs: Tensor, leaves: Weights) -> dict[str, int]:
    """For each leaf that influences the outputs, the number in the order of execution of the last operation that used it."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    found: dict[str, int] = {}
    todo, seen = [outputs.grad_fn], {outputs.grad_fn}
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions if node is not None else ():
            name = names.get(id(getattr(source, "variable", None)))
            if name is not None:
                found[name] = max(found.get(name, -1), node._sequence_nr())  # type: ignore[union-attr]
            elif source is not None and source not in seen:
                seen.add(source)
                todo.append(source)
    return found


def layer(name: str) -> str:
    """The layer that a parameter belongs to; what a parametrisation holds belongs to the layer that it parametrises."""
    head, parametrised, _ = name.partition("parametrizations.")
    return head.rstrip(".") if parametrised else name.rpartition(".")[0]


def carry_over(given: Tensor, left: Tensor) -> None:
    """Write a buffer that the network assigned anew, instead of updating it in place, into the tensor that was given."""
    if left is not given:
        given.copy_(left.detach())


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """The module's own way to initialise its parameters, where that needs no arguments."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            arguments = inspect.signature(reset).parameters.values()
            if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in arguments):
                return reset
    return None


def slots(network: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """For each parameter and buffer name all the places that hold it (tied weights have several)."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in network.modules():
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is not None:
                    places.setdefault(id(value), []).append((holder, name))
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: places[id(value)] for name, value in named}


def how_to_call(network: nn.Module) -> Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """How inputs reach `forward`: tensors as they are, tuples as arguments, dicts as keywords, where `forward` takes them."""
    parameters = inspect.signature(network.forward).parameters
    kinds = inspect.Parameter
    positional = sum(p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for p in parameters.values())
    many = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())
    any_keyword = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    names = {n for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}

    def spread(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(x, Mapping) and (any_keyword or set(x) <= names):
            return (), dict(x)
        if isinstance(x, (tuple, list)) and (many or len(x) <= positional):
            return tuple(x), {}
        return (x,), {}

    return spread


def choose(
    weights: Weights, where: Where, last: Sequence[str], none: str = "makes no weight of the network random"
) -> tuple[str, ...]:
    """The names that `where` makes random: None all, "last" those of the last layer that ran, patterns, or a predicate."""
    names = ", ".join(weights)
    if where is None or (isinstance(where, str) and where == "all"):
        return tuple(weights)
    if isinstance(where, str) and where == "last":
        chosen = [n for n in weights if n in last or n.startswith("likelihood.")]
    elif callable(where):
        both = _takes_weight(where)
        chosen = [n for n, w in weights.items() if (where(n, w) if both else where(n))]
    else:
        patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"where must be name patterns, 'last' or a predicate of the name, got {pattern!r}")
            if not any(fnmatchcase(n, pattern) for n in weights):
                raise ValueError(f"where={pattern!r} matches no weight; the names are {names}")
        chosen = [n for n in weights if any(fnmatchcase(n, pattern) for pattern in patterns)]
    if not any(not n.startswith("likelihood.") for n in chosen):
        raise ValueError(f"where={where!r} {none}; the names are {names}")
    return tuple(chosen)


def _takes_weight(predicate: Callable[..., bool]) -> bool:
    """Whether a predicate wants the weight beside the name: it has two arguments, or needs two."""
    try:
        arguments = list(inspect.signature(predicate).parameters.values())
    except (TypeError, ValueError):
        return False
    needed = [p for p in arguments if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(arguments) == 2 or len(needed) == 2
