"""Where weights enter a network linearly: inputs and outputs of its layers, seen from outside, whatever the module's class.

A `Recorder` is a mode under which the network runs unchanged. Each call that is linear in a weight (`F.linear`, convolutions and
transposed ones, embeddings, the affine part of norms, the gates of recurrent nets, the projections of attention) leaves a `Use`.
Weights that are used in any other way are named in `others`; their Jacobian has to come from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Kind = Literal["matrix", "table", "vector"]


class Use(NamedTuple):
    """One call that is linear in `weight`, and adds `bias`: z = M c + b at every position of every example.

    `columns` are the c, in the layout of the call; `arrange` brings them to [examples, positions, groups, in], and `rows` brings
    gradients [*z.shape] at the output to [examples, positions, groups, out], so that the gradient of M for one example is
    Σ_positions row ⊗ column. `axis` is where the examples are in `columns` and in z.
    """

    kind: Kind
    weight: str | None
    bias: str | None
    columns: Tensor
    outputs: Tensor
    arrange: Callable[[Tensor], Tensor]
    rows: Callable[[Tensor], Tensor]
    transposed: bool = False
    groups: int = 1


# What may be asked of a weight without using its value.
_HARMLESS = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,
    Tensor.ndim.__get__,
    Tensor.layout.__get__,
    Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse.__get__,
    Tensor.grad.__get__,
    Tensor.is_leaf.__get__,
    Tensor._version.__get__,  # type: ignore[attr-defined,union-attr]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.stride,
    Tensor.is_contiguous,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    Tensor.data_ptr,
    Tensor.get_device,
    torch._cudnn_rnn_flatten_weight,  # cuDNN's recurrent nets look before they run
}

_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_TRANSPOSED = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}
_NORMS = {F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm}
_RECURRENT = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}


# What picks so many rows that depend on the values of the inputs: examples can then not be followed.
_RAGGED = {
    torch.masked_select,
    Tensor.masked_select,
    torch.nonzero,
    Tensor.nonzero,
    torch._C._VariableFunctions._pack_padded_sequence,
}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_SEEN = {F.linear, F.embedding, F.multi_head_attention_forward, *_CONVOLUTIONS, *_TRANSPOSED, *_NORMS, *_RECURRENT}


def _selects(index: Any) -> bool:
    """Whether an index has a mask in it."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


class Recorder(TorchFunctionMode):
    """Records the uses of `leaves` (name → tensor) while a network runs under it."""

    def __init__(self, leaves: Mapping[str, Tensor]):
        super().__init__()
        self.names = {id(leaf): name for name, leaf in leaves.items()}
        self.uses: list[Use] = []
        self.versions: list[int] = []
        self.others: set[str] = set()
        self.cloning = False
        self.ragged = False

    def name(self, tensor: Any) -> str | None:
        """Its name, where it is one of the leaves."""
        return self.names.get(id(tensor)) if isinstance(tensor, Tensor) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.ragged = self.ragged or func in _RAGGED or (func in _INDEXING and _selects(args[1]))
        if func in _HARMLESS or not any(id(leaf) in self.names for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func in _SEEN:
            self.mark([arg for arg in args[:3] if func is F.multi_head_attention_forward] or args[:1])  # a weight as data
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if func in _CONVOLUTIONS:
            return self.convolution(func, *args, **kwargs)
        if func in _TRANSPOSED:
            return self.transposed(func, *args, **kwargs)
        if func is F.embedding:
            return self.embedding(*args, **kwargs)
        if func in _NORMS:
            return self.norm(func, args, kwargs)
        if func in _RECURRENT and isinstance(args[3], bool):  # packed sequences have another signature
            self.mark(args[1])
            return self.recurrent(_RECURRENT[func], *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.attention(func, *args, **kwargs)
        self.mark(args, kwargs)
        return func(*args, **kwargs)

    def mark(self, *values: Any) -> None:
        """These are used in a way that is not known here."""
        self.others |= {self.names[id(leaf)] for leaf in pytree.tree_leaves(values) if id(leaf) in self.names}

    def keep(self, use: Use) -> Tensor:
        """Remember a use; what the network gets of it (a copy where it is going to write into it)."""
        self.uses.append(use)
        self.versions.append(use.outputs._version)
        return use.outputs.clone() if self.cloning else use.outputs

    # Calls

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: slice | None = None) -> Tensor:
        """W x + b; with `rows` by these rows of the weight and of the bias."""
        own = (self.name(weight), self.name(bias))
        size = len(weight)
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        z = F.linear(x, weight, bias)
        if own != (None, None):

            def arranged(value: Tensor) -> Tensor:
                return value.reshape(len(value), -1, 1, value.shape[-1])

            def padded(value: Tensor) -> Tensor:
                assert rows is not None
                return F.pad(arranged(value), (rows.start, size - rows.stop))

            return self.keep(Use("matrix", *own, x.detach(), z, arranged, arranged if rows is None else padded))
        return z

    def convolution(
        self,
        func: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """A convolution is a matrix product with the patches of its input."""
        z = func(x, weight, bias, stride, padding, dilation, groups)
        axes = _CONVOLUTIONS[func]
        if x.ndim != axes + 2:
            self.mark(weight, bias)
            return z
        kernel = tuple(weight.shape[2:])

        def arranged(value: Tensor) -> Tensor:
            return patches(value, kernel, stride, padding, dilation, groups)

        def rows(value: Tensor) -> Tensor:
            return value.flatten(2).transpose(1, 2).unflatten(-1, (groups, -1))

        return self.keep(Use("matrix", self.name(weight), self.name(bias), x.detach(), z, arranged, rows, groups=groups))

    def transposed(
        self,
        func: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        """The transposed of a convolution: columns are the inputs, rows the patches of the gradient."""
        z = func(x, weight, None, stride, padding, output_padding, groups, dilation)
        axes = _TRANSPOSED[func]
        if x.ndim != axes + 2:
            self.mark(weight, bias)
            return z if bias is None else z + bias.reshape(-1, *[1] * axes)
        kernel, positions = tuple(weight.shape[2:]), tuple(x.shape[2:])

        def arranged(value: Tensor) -> Tensor:
            return value.flatten(2).transpose(1, 2).unflatten(-1, (groups, -1))

        def rows(value: Tensor) -> Tensor:
            return patches(value, kernel, stride, padding, dilation, groups, positions)

        if self.name(weight) is not None:
            z = self.keep(Use("matrix", self.name(weight), None, x.detach(), z, arranged, rows, transposed=True, groups=groups))
        if bias is None:
            return z
        if self.name(bias) is None:
            return z + bias.reshape(-1, *[1] * axes)
        moved = z + bias.reshape(-1, *[1] * axes)

        def apart(value: Tensor) -> Tensor:
            return value.flatten(2).transpose(1, 2)[:, :, None]

        return self.keep(Use("matrix", None, self.name(bias), moved.detach(), moved, lambda v: apart(v)[..., :0], apart))

    def embedding(self, ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Rows of a table: columns are one-hot, and kept as numbers."""
        z = F.embedding(ids, weight, *args, **kwargs)
        names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
            self.mark(weight)
            return z
        padding = given.get("padding_idx")

        if padding is not None:  # its row gets no gradient
            ids = torch.where(ids == padding % len(weight), -1, ids)

        def rows(value: Tensor) -> Tensor:
            return value.reshape(len(value), -1, 1, value.shape[-1])

        return self.keep(Use("table", self.name(weight), None, ids, z, lambda v: v.reshape(len(v), -1), rows))

    def norm(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A norm without its affine part, and then that: w ∘ x̂ + b."""
        import inspect

        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        weight, bias = bound.pop("weight", None), bound.pop("bias", None)
        normal = func(**bound)
        channels = func not in (F.layer_norm, F.rms_norm)
        affine = next(v for v in (weight, bias) if v is not None)
        shape = (-1, *[1] * (normal.ndim - 2)) if channels else tuple(affine.shape)
        z = normal if weight is None else normal * weight.reshape(shape)
        z = z if bias is None else z + bias.reshape(shape)

        def arranged(value: Tensor) -> Tensor:
            if channels:
                return value.flatten(2).transpose(1, 2)[:, :, None] if value.ndim > 2 else value[:, None, None]
            return value.reshape(len(value), -1, 1, affine.numel())

        own = (self.name(weight), self.name(bias))
        return self.keep(Use("vector", *own, normal.detach(), z, arranged, arranged))

    def attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        packed: Any,
        bias: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attention with the projections taken out of it: what is left gets identities in their place."""
        names = ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")
        given = {**dict(zip(names, args[:6])), **kwargs}
        rest = dict(
            zip(
                (
                    "training",
                    "key_padding_mask",
                    "need_weights",
                    "attn_mask",
                    "use_separate_proj_weight",
                    "q_proj_weight",
                    "k_proj_weight",
                    "v_proj_weight",
                    "static_k",
                    "static_v",
                    "average_attn_weights",
                    "is_causal",
                ),
                args[6:],
            )
        )
        given = {**given, **rest}
        out_weight, out_bias = given.pop("out_proj_weight"), given.pop("out_proj_bias")
        self.mark(given.get("bias_k"), given.get("bias_v"))
        inputs = (query, key, value)
        if given.get("use_separate_proj_weight"):
            matrices = [given[f"{n}_proj_weight"] for n in "qkv"]
            projected = []
            for x, matrix, part in zip(inputs, matrices, range(3)):
                moved = self.linear(x, matrix)
                if bias is not None:
                    moved = moved + bias[part * width : (part + 1) * width]
                    self.mark(bias)
                projected.append(moved)
        elif query is key and key is value:
            projected = list(self.linear(query, packed, bias).chunk(3, -1))
        else:
            projected = [self.linear(x, packed, bias, slice(part * width, (part + 1) * width)) for part, x in enumerate(inputs)]
        unit = torch.eye(width, dtype=query.dtype, device=query.device)
        given |= {"use_separate_proj_weight": True, "q_proj_weight": unit, "k_proj_weight": unit, "v_proj_weight": unit}
        found, weights = func(*projected, width, heads, None, None, out_proj_weight=unit, out_proj_bias=None, **given)
        return self.linear(found, out_weight, out_bias), weights

    def recurrent(
        self,
        kind: str,
        x: Tensor,
        state: Any,
        flat: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        """A recurrent net step by step, its products recorded; the gates of all steps together are one use."""
        from plausible.blocks.curvature.recurrent import unrolled

        if training and dropout:
            raise ValueError("a recurrent net with dropout cannot be looked at in training mode")
        return unrolled(self, kind, x, state, list(flat), has_biases, layers, bidirectional, batch_first)


def patches(
    x: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int, limits: Sequence[int] = ()
) -> Tensor:
    """The patches that a convolution multiplies: x [B, C, *space] → [B, positions, groups, C/groups · kernel].

    At most `limits` positions along each axis.
    """
    axes = len(kernel)
    stride, dilation = (_each(v, axes) for v in (stride, dilation))
    if padding == "valid":
        padding = 0
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = [(w // 2, w - w // 2) for w in whole]
    else:
        sides = [(p, p) for p in _each(padding, axes)]
    if any(side != (0, 0) for side in sides):
        x = F.pad(x, [n for side in reversed(sides) for n in side])
    for axis in range(axes):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
        x = x.narrow(2 + axis, 0, min(x.shape[2 + axis], limits[axis])) if limits else x
    batch, channels = x.shape[:2]
    positions = x.shape[2 : 2 + axes].numel()
    x = x.reshape(batch, groups, channels // groups, positions, -1)
    return x.permute(0, 3, 1, 2, 4).reshape(batch, positions, groups, -1)


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)
