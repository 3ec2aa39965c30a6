"""Whatever holds numbers → tensors, checked: arrays, frames, series, nested lists, and trees of them for inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset


def is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def as_tensor(value: Any, name: str) -> Tensor:
    """One leaf → tensor; text, dates, missing entries of masked arrays and anything else that is not a number are refused."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta:
            fix = "it has no values" if value.is_meta else f"pass {name}.to_dense()"
            if value.is_nested:
                fix = f"pass torch.nested.to_padded_tensor({name}, 0.0), and a mask for what is padded as another input"
            raise TypeError(f"{name} must be a dense tensor, got one of layout {value.layout} on {value.device}: {fix}")
        return value.clone() if value.is_inference() else value.detach()  # autograd takes no inference tensors
    if value is None:
        raise TypeError(f"{name} contains None; leave inputs out that are not there")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(f"{name} is a masked array; pass {name}.filled(numpy.nan) with mask='nan', or impute")
    try:
        array = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except ValueError as error:
        raise ValueError(f"{name} must be a rectangular array, its rows differ in length: {error}") from None
    if array.dtype.kind == "O":
        array = _from_objects(array, name, value)
    if array.dtype.kind not in "biufc":
        raise _not_numeric(name, str(array.dtype), value)
    # to the next type that torch has
    wide = {"u": np.int64, "f": np.float64, "c": np.complex128}.get(array.dtype.kind)
    if wide is not None and array.dtype not in (np.uint8, np.float16, np.float32, np.complex64):
        array = array.astype(wide, copy=False)  # torch knows no long double and little of unsigned integers
    # files of other machines: torch knows the native order of bytes alone
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch shares memory with writable arrays of positive strides only
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array)


def _from_objects(array: np.ndarray, name: str, given: Any) -> np.ndarray:
    """An array of Python objects → booleans or integers where all are, else floats, with NaN for what is missing."""
    values = [float("nan") if v is None or type(v).__name__ == "NAType" else v for v in array.flat]
    kinds = {type(v) for v in values}
    if kinds and kinds <= {bool, np.bool_}:
        return array.astype(bool)
    if kinds and all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        return array.astype(np.int64)
    if strange := [k for k in kinds if issubclass(k, (str, bytes)) or not hasattr(k, "__float__")]:
        raise _not_numeric(name, strange[0].__name__, given)
    return np.array([float(v) for v in values], dtype=np.float64).reshape(array.shape)


def _not_numeric(name: str, kind: str, given: Any) -> TypeError:
    """The error for text, dates and the like; of a frame it names the first column that is not numeric."""
    column = ""
    for label in given.columns if is_frame(given) and given.to_numpy().ndim == 2 else ():
        try:
            as_tensor(given[label].to_numpy(), name)
        except TypeError:
            column = f" in column {label!r}"
            break
    return TypeError(
        f"{name} must be numeric, got values of type {kind}{column}; encode text, categories and dates as numbers first"
    )


def _is_leaf(value: Any) -> bool:
    """Whether a part of x is one array: anything but a container, and nested lists of numbers."""
    if not isinstance(value, list):
        return not isinstance(value, (tuple, dict))
    first: Any = value
    # [[1, 2], [3, 4]] is one array, [tensor, tensor] are two inputs
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return not isinstance(first, (Tensor, np.ndarray, Mapping)) and not hasattr(first, "to_numpy")


def as_inputs(x: Any, *, dtype: torch.dtype, device: torch.device | str, name: str = "x") -> Any:
    """Inputs as a tree of tensors: floating leaves take the module's dtype, integers stay; NaN and infinity are refused."""
    if isinstance(x, DataLoader | Dataset):
        raise TypeError(f"{name} must be inputs, got a {type(x).__name__}; pass its tensor or array of inputs")

    def leaf(value: Any) -> Tensor:
        tensor = as_tensor(value, name)
        if tensor.is_floating_point():
            tensor = _narrowed(tensor, dtype, name)
        if tensor.is_floating_point() or tensor.is_complex():
            _check_finite(tensor, name)
        return tensor.to(device)

    if isinstance(x, Mapping) and not is_frame(x):
        x = {key: value for key, value in x.items() if value is not None}  # `forward` has defaults for what is not there
    leaves, spec = pytree.tree_flatten(x, is_leaf=_is_leaf)
    converted = [leaf(value) for value in leaves]
    if not converted or any(value.ndim == 0 for value in converted):
        raise ValueError(f"{name} must have a leading axis of examples, got a scalar or nothing")
    if len(lengths := {len(value) for value in converted}) > 1:
        hint = "; a list of tensors is several inputs: torch.stack makes it one" if isinstance(x, list) else ""
        raise ValueError(f"all inputs in {name} must have the same number of examples, got lengths {sorted(lengths)}{hint}")
    return pytree.tree_unflatten(converted, spec)


def _narrowed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in the module's type; finite numbers that this type cannot hold are refused."""
    narrow = tensor.to(dtype)
    smaller = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if smaller and bool((torch.isfinite(tensor) & ~torch.isfinite(narrow)).any()):
        largest = float(tensor[torch.isfinite(tensor)].abs().max())
        raise ValueError(f"{name} holds {largest:.3g}, which is too large for {dtype}: rescale it, or use a network in float64")
    return narrow


ROUGH = 1e-3  # the rounding error of targets, in their standard deviations, from which they keep their digits


def _narrowed_unless_rough(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Targets in the module's type, or as they are where that would round their spread away: 10⁸ ± 1, say."""
    narrow = _narrowed(target, dtype, "y")
    if narrow.dtype == target.dtype or target.device.type == "mps":
        return narrow
    there = target[torch.isfinite(target)]
    if len(there) < 2 or float((there.to(dtype).to(target.dtype) - there).abs().max()) <= ROUGH * float(there.std()):
        return narrow
    return target


def _check_finite(tensor: Tensor, name: str, mask: Tensor | None = None) -> None:
    if bool(torch.isfinite(tensor.sum())):  # a NaN or an infinity would be in the sum: nothing to look for
        return
    bad = ~torch.isfinite(tensor) if mask is None else ~torch.isfinite(tensor) & mask
    if count := int(bad.sum()):
        first = tuple(int(i) for i in bad.nonzero()[0])
        kind = "a NaN" if bool(torch.isnan(tensor[first])) else "an infinity"
        hint = ", or pass mask= (True where a target was observed, or mask='nan')" if name == "y" else ""
        what = f"{count} non-finite value{'s' * (count > 1)}, the first {kind} at {first}"
        raise ValueError(f"{name} contains {what}; remove or impute those rows{hint}")


def as_targets(y: Any, mask: Any, *, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Targets and mask as tensors on the CPU; masked positions get a harmless value."""
    target = as_tensor(y, "y")
    if target.ndim == 0:
        raise ValueError("y must have a leading axis of examples, got a scalar")
    if target.is_complex():
        raise TypeError(f"y must be real, got {target.dtype}; model its real and imaginary parts as two targets")
    if target.is_floating_point():
        target = _narrowed_unless_rough(target, dtype)
    elif target.dtype not in (torch.bool, torch.int64):
        target = target.long()
    observed: Tensor | None = None
    if isinstance(mask, str):
        if mask != "nan":
            raise ValueError(f"mask must be a boolean array shaped like y, or the string 'nan', got {mask!r}")
        observed = ~torch.isnan(target) if target.is_floating_point() else torch.ones_like(target, dtype=torch.bool)
    elif mask is not None:
        observed = as_tensor(mask, "mask")
        if observed.dtype != torch.bool:
            raise TypeError(f"mask must be boolean (True where the target was observed), got {observed.dtype}")
        if observed.shape != target.shape:
            raise ValueError(f"mask must have the shape of y, {tuple(target.shape)}, got {tuple(observed.shape)}")
        observed = observed.to(target.device)
    if target.is_floating_point():
        _check_finite(target, "y", observed)
    if observed is not None:
        # densities are computed everywhere and masked after: NaN · 0 would be NaN
        target = torch.where(observed, target, torch.zeros_like(target))
    return target, observed


def as_example_weights(weight: Any, count: int, dtype: torch.dtype) -> Tensor:
    tensor = as_tensor(weight, "weights")
    if tensor.is_complex():
        raise TypeError(f"example weights must be real, got {tensor.dtype}")
    tensor = tensor.to(dtype)
    if tensor.shape != (count,):
        raise ValueError(f"example weights must have shape ({count},), one per example, got {tuple(tensor.shape)}")
    _check_finite(tensor, "weights")
    if bool((tensor < 0).any()):
        raise ValueError("example weights must not be negative")
    return tensor


def refuse_nothing_left(weight: Tensor | None, mask: Tensor | None) -> None:
    """Weights that are all zero, or a mask that hides all: an error for the whole data, though not for one batch of a stream."""
    if mask is not None and not bool(mask.any()):
        raise ValueError("mask (or ignore_index) hides every target: nothing is left to learn from")
    if weight is not None and not bool((weight > 0).any()):
        raise ValueError("example weights are all zero: nothing is left to learn from")
