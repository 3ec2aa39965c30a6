"""What a network does with its weights, seen from outside, whatever the classes of its modules.

An `Interceptor` is called in place of PyTorch's functions. It says which tensors are weights (`name`); calls that use one are
handed to the method for their operation, each of which runs the call as any `other` unless a descendant says better: laws of
noise, records of Jacobians and masks of dropout are descendants. Calls come in through two doors:

    Watched   a tensor in the place of a weight, which reports what is done with it; all other calls run as fast as ever
    Watch     a mode under which every call is seen, also those without a weight (`dropout`, `plain`)

Both work in eager mode, under `torch.func` and in `torch.compile(fullgraph=True)`. What calls no function of PyTorch that can
be overridden (a custom `torch.autograd.Function`, a scripted function) is not seen.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# operations (input, weight, bias, …) that are linear in weight and bias → number of axes behind the channels
AXES = {
    F.linear: 0,
    torch.conv1d: 1,
    torch.conv2d: 2,
    torch.conv3d: 3,
    torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 2,
    torch.conv_transpose3d: 3,
}

_METHODS: dict[str, tuple[Any, ...]] = {
    "linear": (F.linear,),
    "convolution": (torch.conv1d, torch.conv2d, torch.conv3d),
    "transposed": (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    "embedding": (F.embedding,),
    "norm": (F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm),
    "attention": (F.multi_head_attention_forward,),
    "recurrent": (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    "dropout": (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
}
# functions → the method of an `Interceptor` that gets their calls
OPERATIONS = {function: method for method, functions in _METHODS.items() for function in functions}

_QUESTIONS = """
shape dtype device layout ndim names itemsize nbytes requires_grad is_leaf grad grad_fn
size dim ndimension numel nelement stride storage_offset element_size get_device __len__
is_cuda is_cpu is_mps is_meta is_xpu is_sparse is_sparse_csr is_quantized is_mkldnn is_nested
is_complex is_floating_point is_signed is_conj is_neg is_inference is_contiguous
"""
METADATA = set(_QUESTIONS.split())  # what may be asked of a weight without using its value


class Interceptor:
    """Gets calls of functions in place of PyTorch; descendants say what a weight is, and what to do where one is used."""

    metadata: ClassVar[set[str]] = METADATA

    def name(self, value: Any) -> str | None:
        """The name of a weight, None for anything else."""
        raise NotImplementedError

    def value(self, value: Any) -> Any:
        """What a weight stands for in an operation that is not known; anything else as it is."""
        return value

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool = False) -> Any:
        """The result of a call; `known` says that it uses a weight."""
        method = OPERATIONS.get(function)
        # dropout has no weight, and is still wanted
        if method != "dropout" and not (known or self.uses(args) or self.uses(tuple(kwargs.values()))):
            return self.plain(function, args, kwargs)
        if method is not None:
            return getattr(self, method)(function, *args, **kwargs)
        asked = getattr(function, "__name__", "")
        asked = function.__self__.__name__ if asked == "__get__" else asked  # the getter of an attribute
        if asked in self.metadata:
            return self.ask(asked, function, args, kwargs)
        return self.other(function, *args, **kwargs)

    def uses(self, values: Any) -> bool:
        """Whether a weight is among these arguments, or in lists and tuples of them."""
        for value in values:
            if isinstance(value, Tensor):
                if self.name(value) is not None:
                    return True
            elif isinstance(value, (tuple, list)) and self.uses(value):
                return True
        return False

    # What happens to a call

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """No weight is used."""
        return function(*args, **kwargs)

    def ask(self, asked: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        """A weight is asked for something but its value."""
        return function(*args, **kwargs)

    def other(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A weight is used in a way that is not known: by its value."""
        args, kwargs = pytree.tree_map_only(Tensor, self.value, (args, kwargs))
        return function(*args, **kwargs)

    linear = convolution = transposed = embedding = norm = attention = recurrent = dropout = other


_signature = functools.cache(inspect.signature)


def arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, for functions that are written in Python."""
    return dict(_signature(function).bind(*args, **kwargs).arguments)


class Watched(Tensor):
    """The door for weights: a tensor whose class says who gets the calls that use it."""

    _is_param = True  # isinstance(weight, nn.Parameter) holds
    interceptor: ClassVar[Interceptor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return cls.interceptor.intercept(func, args, kwargs or {}, known=True)


class Watch(Interceptor, TorchFunctionMode):
    """The door for everything: while it is entered, every call comes here."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.intercept(func, args, kwargs or {})
