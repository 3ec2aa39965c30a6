"""Where weights enter a network linearly: inputs and outputs of its layers, seen from outside, whatever the module's class.

A `Recorder` is a mode under which the network runs unchanged. Each call that is linear in a weight (`F.linear`, convolutions
and transposed ones, embeddings, the affine part of norms, the gates of recurrent nets, the projections of attention) leaves a
`Use`. Weights that are used in any other way are named in `others`; their Jacobian has to come from autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from plausible.blocks.interception import AXES, METADATA, Watch, arguments

Kind = Literal["matrix", "table", "vector"]


class Use(NamedTuple):
    """One call that is linear in `weight`, and adds `bias`: z = M c + b at every position of every example.

    `columns` are the c, in the layout of the call; `arrange` brings them to [examples, positions, groups, in], and `rows`
    brings gradients [*z.shape] at the output to [examples, positions, groups, out], so that the gradient of M for one example
    is Σ_positions row ⊗ column. `axis` is where the examples are in `columns` and in z.
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


# What picks so many rows that depend on the values of the inputs: examples can then not be followed.
_RAGGED = {
    torch.masked_select,
    Tensor.masked_select,
    torch.nonzero,
    Tensor.nonzero,
    torch._C._VariableFunctions._pack_padded_sequence,
}
_CELLS = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class Recorder(Watch):
    """Records the uses of `leaves` (name → tensor) while a network runs under it."""

    # the last three are what recurrent nets look at before they run
    metadata = METADATA | {"data_ptr", "_version", "_cudnn_rnn_flatten_weight"}

    def __init__(self, leaves: Mapping[str, Tensor]):
        super().__init__()
        self.names = {id(leaf): name for name, leaf in leaves.items()}
        self.recorded: list[Use] = []
        self.versions: list[int] = []
        self.others: set[str] = set()
        self.cloning = False
        self.ragged = False

    def name(self, value: Any) -> str | None:
        return self.names.get(id(value))

    def intercept(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: bool = False) -> Any:
        self.ragged = self.ragged or function in _RAGGED
        if function in _INDEXING:  # by a mask?
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.ragged |= any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
        return super().intercept(function, args, kwargs, known)

    def other(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.mark(args, kwargs)
        return function(*args, **kwargs)

    dropout = other

    def mark(self, *values: Any) -> None:
        """These are used in a way that is not known here."""
        # by identity: two weights may be equal, and a view of one is another tensor
        self.others |= {self.names[id(leaf)] for leaf in pytree.tree_leaves(values) if id(leaf) in self.names}

    def keep(self, use: Use) -> Tensor:
        """Remember a use; what the network gets of it (a copy where it is going to write into it)."""
        if not torch.is_grad_enabled():  # inside a torch.autograd.Function, which has a backward pass of its own
            self.others |= {name for name in (use.weight, use.bias) if name is not None}
            return use.outputs
        self.recorded.append(use)
        # autograd's counter of writes: a network that changes it in place spoils what was recorded
        self.versions.append(use.outputs._version)
        return use.outputs.clone() if self.cloning else use.outputs

    # Calls

    def linear(  # type: ignore[override]
        self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: slice | None = None
    ) -> Tensor:
        """W x + b; with `rows` by these rows of the weight and of the bias."""
        # an input that is itself a weight (a product of two weights) is quadratic, and none of ours
        self.mark(x)  # a weight as data
        names = (self.name(weight), self.name(bias))
        size = len(weight)
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        z = function(x, weight, bias)
        if names == (None, None):
            return z

        def padded(value: Tensor) -> Tensor:
            assert rows is not None
            return F.pad(_channels_last(value), (rows.start, size - rows.stop))

        return self.keep(Use("matrix", *names, x.detach(), z, _channels_last, _channels_last if rows is None else padded))

    def convolution(  # type: ignore[override]
        self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """A convolution is a matrix product with the patches of its input."""
        self.mark(x)
        given: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        given |= dict(zip(given, args)) | kwargs
        z = function(x, weight, bias, **given)
        if x.ndim != AXES[function] + 2:  # without an axis of examples
            self.mark(weight, bias)
            return z
        cut, rows = partial(patches, kernel=weight.shape[2:], **given), partial(_channels_first, groups=given["groups"])
        names = self.name(weight), self.name(bias)
        return self.keep(Use("matrix", *names, x.detach(), z, cut, rows, groups=given["groups"]))

    def transposed(  # type: ignore[override]
        self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The transposed of a convolution: columns are the inputs, rows the patches of the gradient."""
        self.mark(x)
        given: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        given |= dict(zip(given, args)) | kwargs
        # without the bias, which is added below as a use of its own
        z = function(x, weight, None, **given)
        axes = AXES[function]
        if x.ndim != axes + 2:
            self.mark(weight, bias)
            return z if bias is None else z + bias.reshape(-1, *[1] * axes)
        if self.name(weight) is not None:
            del given["output_padding"]  # it only says how many positions there are
            columns = partial(_channels_first, groups=given["groups"])
            rows = partial(patches, kernel=weight.shape[2:], limits=x.shape[2:], **given)
            layout = {"transposed": True, "groups": given["groups"]}
            z = self.keep(Use("matrix", self.name(weight), None, x.detach(), z, columns, rows, **layout))
        if bias is None:
            return z
        z = z + bias.reshape(-1, *[1] * axes)
        if self.name(bias) is None:
            return z
        # a use of its own: inputs cannot get a column of ones here, since the bias belongs to outputs
        none = lambda value: _channels_first(value)[..., :0]  # noqa: E731
        return self.keep(Use("matrix", None, self.name(bias), z.detach(), z, none, _channels_first))

    def embedding(self, function: Any, ids: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Rows of a table: columns are one-hot, and kept as numbers."""
        z = function(ids, weight, *args, **kwargs)
        given = arguments(function, (ids, weight, *args), kwargs)
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
            self.mark(weight)
            return z
        if (padding := given.get("padding_idx")) is not None:  # its row gets no gradient
            ids = torch.where(ids == padding % len(weight), -1, ids)
        return self.keep(Use("table", self.name(weight), None, ids, z, lambda v: v.reshape(len(v), -1), _channels_last))

    def norm(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A norm without its affine part, and then that: w ∘ x̂ + b."""
        self.mark(args[:1])
        given = arguments(function, args, kwargs)
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        # statistics do not depend on the affine part, so that the two can be taken apart
        normal = function(**given)
        channels = function not in (F.layer_norm, F.rms_norm)
        affine = next(v for v in (weight, bias) if v is not None)
        shape = (-1, *[1] * (normal.ndim - 2)) if channels else tuple(affine.shape)
        z = normal if weight is None else normal * weight.reshape(shape)
        z = z if bias is None else z + bias.reshape(shape)

        def arranged(value: Tensor) -> Tensor:
            if channels and value.ndim > 2:
                return _channels_first(value)
            return value[:, None, None] if channels else value.reshape(len(value), -1, 1, affine.numel())

        return self.keep(Use("vector", self.name(weight), self.name(bias), normal.detach(), z, arranged, arranged))

    def attention(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention with the projections taken out of it: what is left gets identities in their place."""
        given = arguments(function, args, kwargs)
        inputs = [given.pop(name) for name in ("query", "key", "value")]
        width, heads = given.pop("embed_dim_to_check"), given.pop("num_heads")
        packed, bias = given.pop("in_proj_weight"), given.pop("in_proj_bias")
        out_weight, out_bias = given.pop("out_proj_weight"), given.pop("out_proj_bias")
        self.mark(inputs, given.get("bias_k"), given.get("bias_v"))
        bands = [slice(part * width, (part + 1) * width) for part in range(3)]
        if given.get("use_separate_proj_weight"):
            matrices = [given[f"{n}_proj_weight"] for n in "qkv"]
            projected = [self.linear(F.linear, x, matrix) for x, matrix in zip(inputs, matrices)]
            if bias is not None:
                projected = [moved + bias[band] for moved, band in zip(projected, bands)]
                self.mark(bias)
        elif inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            projected = list(self.linear(F.linear, inputs[0], packed, bias).chunk(3, -1))
        else:
            projected = [self.linear(F.linear, x, packed, bias, band) for x, band in zip(inputs, bands)]
        # the fused function stays, so that masks, dropout and key padding are PyTorch's own business
        unit = torch.eye(width, dtype=inputs[0].dtype, device=inputs[0].device)
        given |= {"use_separate_proj_weight": True, "q_proj_weight": unit, "k_proj_weight": unit, "v_proj_weight": unit}
        mixed, weights = function(*projected, width, heads, None, None, out_proj_weight=unit, out_proj_bias=None, **given)
        return self.linear(F.linear, mixed, out_weight, out_bias), weights

    def recurrent(self, function: Any, x: Tensor, state: Any, flat: Any, has_biases: Any, *rest: Any) -> Any:  # type: ignore[override]
        """A recurrent net step by step, its products recorded; the gates of all steps together are one use."""
        if not isinstance(has_biases, bool):  # packed sequences have another signature
            return self.other(function, x, state, flat, has_biases, *rest)
        layers, dropout, training, bidirectional, batch_first = rest
        self.mark(x, state)
        if training and dropout:
            raise ValueError("a recurrent net with dropout cannot be looked at in training mode")
        kind, directions = _CELLS[function], 2 if bidirectional else 1
        each = len(flat) // (layers * directions)
        hidden, cell = (state[0], state[1]) if kind == "lstm" else (state, None)
        # PyTorch's cells walk over the first axis
        if batch_first:
            x = x.transpose(0, 1)
        finals: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(layers):
            ways = []
            for way in range(directions):
                at = layer * directions + way
                weights = flat[at * each : (at + 1) * each]
                c = None if cell is None else cell[at]
                steps, h, c = self._direction(kind, x, hidden[at], c, weights, has_biases, way == 1)
                ways.append(steps)
                finals.append(h)
                if c is not None:
                    cells.append(c)
            x = ways[0] if directions == 1 else torch.cat(ways, -1)
        outputs = x.transpose(0, 1) if batch_first else x
        last = torch.stack(finals)
        return (outputs, last, torch.stack(cells)) if kind == "lstm" else (outputs, last)

    def _direction(
        self, kind: str, x: Tensor, h: Tensor, c: Tensor | None, weights: Any, has_biases: bool, backwards: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One layer in one direction: its outputs [T, B, H], the last state and the last cell."""
        linear = partial(self.linear, F.linear)
        into, across = weights[0], weights[1]
        bias_into, bias_across = (weights[2], weights[3]) if has_biases else (None, None)
        projection = weights[-1] if len(weights) % 2 else None
        inputs = linear(x, into, bias_into)
        steps: list[Tensor | None] = [None] * len(x)
        # inputs of all steps are one product above; only the states have to wait for each other
        for t in reversed(range(len(x))) if backwards else range(len(x)):
            given, back = inputs[t], linear(h, across, bias_across)
            if kind == "lstm":
                assert c is not None
                # the order of gates in PyTorch's packed weights
                i, f, g, o = (given + back).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                if projection is not None:
                    h = linear(h, projection)
            elif kind == "gru":
                (r, z, n), (rb, zb, nb) = given.chunk(3, -1), back.chunk(3, -1)
                z = (z + zb).sigmoid()
                h = (1 - z) * (n + (r + rb).sigmoid() * nb).tanh() + z * h
            else:
                h = (given + back).tanh() if kind == "tanh" else (given + back).relu()
            steps[t] = h
        return torch.stack(steps), h, c  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Layouts
def _channels_last(value: Tensor) -> Tensor:
    """[B, …, C] → [B, positions, 1, C]."""
    return value.reshape(len(value), -1, 1, value.shape[-1])


def _channels_first(value: Tensor, groups: int = 1) -> Tensor:
    """[B, C, *space] → [B, positions, groups, C/groups]."""
    return value.flatten(2).transpose(1, 2).unflatten(-1, (groups, -1))


def patches(
    x: Tensor, *, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int, limits: Sequence[int] = ()
) -> Tensor:
    """The patches that a convolution multiplies: x [B, C, *space] → [B, positions, groups, C/groups · kernel].

    At most `limits` positions along each axis.
    """
    axes = len(kernel)
    stride, dilation = (_each(v, axes) for v in (stride, dilation))
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = [(w // 2, w - w // 2) for w in whole]
    else:
        sides = [(p, p) for p in _each(0 if padding == "valid" else padding, axes)]
    if any(side != (0, 0) for side in sides):
        # F.pad counts axes from the last one
        x = F.pad(x, [n for side in reversed(sides) for n in side])
    for axis in range(axes):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        # unfold is a view of any number of axes, where F.unfold copies and knows two
        x = x.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
        x = x.narrow(2 + axis, 0, min(x.shape[2 + axis], limits[axis])) if limits else x
    batch, channels = x.shape[:2]
    positions = x.shape[2 : 2 + axes].numel()
    x = x.reshape(batch, groups, channels // groups, positions, -1)
    return x.permute(0, 3, 1, 2, 4).reshape(batch, positions, groups, -1)


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)
