"""Tensors that modules hold as plain attributes, which are neither parameters nor buffers: tables, masks, caches."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from plausible.core.weights import Weights

_OWN = set(vars(nn.Module()))  # what PyTorch keeps in every module


def _result(tensor: Tensor) -> bool:
    """Whether it came out of a forward pass: with a graph, or inside a transform that is over."""
    return is_wrapped(tensor) or tensor.grad_fn is not None


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen:
        return
    if isinstance(value, Tensor | nn.Module | list | tuple | dict):
        seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):  # one that is hidden in a plain list
        held = (*value.named_parameters(), *value.named_buffers(), *_of(value, seen))
        yield from ((f"{path}.{name}", tensor) for name, tensor in held)
    elif isinstance(value, list | tuple | dict):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _walk(part, f"{path}.{key}", seen)


def _of(network: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    # an attribute may well be another name for what is registered
    seen |= {id(held) for held in (*network.modules(), *network.parameters(), *network.buffers())}
    for prefix, module in network.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                yield from _walk(value, f"{prefix}.{key}".lstrip("."), seen)


def attributes(network: nn.Module, names: Container[str] | None = None) -> Weights:
    """Those of a network (or those named) by the path to them, also in lists and dictionaries; results of graphs left out."""
    wanted = ((path, tensor) for path, tensor in _of(network, set()) if names is None or path in names)
    return {path: tensor.detach() for path, tensor in wanted if not _result(tensor) and not tensor.is_meta}


def put_back(network: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give a network the tensors that another of its kind held; refuse one that has no place for them."""
    places = dict(_of(network, set()))
    modules = dict(network.named_modules())
    for path, value in saved.items():
        owner, _, name = path.rpartition(".")
        if path in places:
            places[path].data = value.to(places[path].device)
        elif owner in modules and name in vars(modules[owner]):  # made when the network first runs
            setattr(modules[owner], name, value)
        else:
            raise ValueError(
                f"network does not fit the saved posterior: it holds no tensor {path!r}, which is neither a parameter nor a buffer "
                "and was one of the fitted network's; register it by register_buffer, or pass the network that was fitted"
            )


def duplicate(network: nn.Module, instead: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy, also of a network that keeps results of a graph; `instead` says what stands for objects, by their id."""
    results = (tensor for _, tensor in _of(network, set()) if _result(tensor))
    cached = {id(tensor): None if is_wrapped(tensor) else tensor.detach().clone() for tensor in results}
    return copy.deepcopy(network, {**cached, **(instead or {})})
