"""Products of curvature matrices with vectors over the data, without the matrices and without the Jacobian.

    Gauss-Newton, Fisher   G v = Σ_n weight_n J_nᵀF_nJ_n v              F_n as in `losses`: the expected Fisher of the outputs
    empirical Fisher       E v = Σ_n weight_n g_n (g_nᵀv)               g_n = J_nᵀ ∂ log p(y_n | f_n)/∂f_n
    Hessian                H v = −∂²/∂w² Σ_n weight_n log p(y_n | f_n) · v

J_n = ∂f_n/∂w; sums over the data, the prior is not in them, nor is the temperature. Only the model's random weights vary, the
network is in evaluation mode, and a learned noise is held fixed (its part of every product is zero). Vectors are named like the
weights, with a leading axis V. J v comes from forward-mode differentiation and Jᵀu from a backward pass (Pearlmutter 1994;
Schraudolph 2002), over all V at once: a product costs about 2 forward and 2 backward passes per vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from plausible.blocks.curvature import losses
from plausible.core import weights as tree
from plausible.core.data import Batch, Data, accumulate, num_rows, select_rows
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights
from plausible.core.words import log

Kind = Literal["ggn", "fisher", "empirical", "hessian"]
Named = Mapping[str, Tensor]
Function = Callable[[Weights], Tensor]
Middle = Callable[[Tensor, Tensor], Tensor]
KINDS = ("ggn", "fisher", "empirical", "hessian")
AT_ONCE = 2**28  # bytes that one chunk of the data may take where there is more memory than that: larger ones are no faster
FEWER = "ask for a lower rank, for fewer random weights (where=), or use another device"


def ggn_product(model: Model, weights: Named, data: Data, vectors: Weights, *, chunk: int | None = None) -> Weights:
    """Σ_n weight_n J_nᵀF_nJ_n v: vectors {name: [V, *shape]} → the same."""
    return Product(model, weights, data, "ggn", chunk=chunk)(vectors)


def empirical_product(model: Model, weights: Named, data: Data, vectors: Weights, *, chunk: int | None = None) -> Weights:
    """Σ_n weight_n g_n(g_nᵀv), g_n the gradient of log p(y_n | x_n, w): vectors {name: [V, *shape]} → the same."""
    return Product(model, weights, data, "empirical", chunk=chunk)(vectors)


def hessian_product(model: Model, weights: Named, data: Data, vectors: Weights, *, chunk: int | None = None) -> Weights:
    """−∂²/∂w² Σ_n weight_n log p(y_n | x_n, w) · v: vectors {name: [V, *shape]} → the same."""
    return Product(model, weights, data, "hessian", chunk=chunk)(vectors)


class Product:
    """v ↦ C v for one curvature matrix C of the data at these weights; `chunk` examples at a time, or as memory allows.

    `weights` are all there are: random ones, points, the likelihood's own, buffers. What a network allows is found out with the
    first chunk and kept: all vectors at once, one by one, or without forward-mode differentiation. `start` with some vectors,
    `add` all batches, `chunk` examples at a time, and `finish`; a call does all of that.
    """

    def __init__(
        self, model: Model, weights: Mapping[str, Tensor], data: Data, kind: Kind = "ggn", *, chunk: int | None = None
    ):
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"chunk must be a whole number of examples, at least 1, or None, got {chunk!r}")
        self.model, self.data, self.kind, self._wished = model, data, kind, chunk
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        self.sums: Weights = {}
        self._ways = list(WAYS)

    def __call__(self, vectors: Weights) -> Weights:
        self.start(vectors)
        accumulate(self.add, self.data, chunk=self.chunk)
        return self.finish()

    def start(self, vectors: Weights) -> None:
        if set(vectors) != set(self.model.random):
            raise ValueError(f"vectors must be named like the random weights, {list(self.model.random)}, got {list(vectors)}")
        counts = {len(v) if v.ndim else 0 for v in vectors.values()}
        for name, v in vectors.items():
            if len(counts) != 1 or v.shape[1:] != self.weights[name].shape:
                raise ValueError(
                    f"vectors[{name!r}] must have shape [V, *weight.shape] with one V for all, here "
                    f"[V, {', '.join(map(str, self.weights[name].shape))}], got {list(v.shape)}"
                )
        moving = {name: v.to(self.weights[name]) for name, v in vectors.items() if name not in self.model.likelihood_names}
        for prefix, module in self.model.network.named_modules():
            name = f"{prefix}.weight".lstrip(".")
            if name in moving and isinstance(module, nn.Embedding) and module.padding_idx is not None:
                # backward passes give the row of the padding nothing, so it must not move in forward mode either
                row = torch.tensor([module.padding_idx], device=moving[name].device)
                moving[name] = moving[name].index_fill(1, row, 0.0)
        self.chunk = self._wished or choose_chunk(self.model, self.weights, self.data, counts.pop())
        self._vectors, self._moving, self.sums = vectors, moving, {}

    def add(self, batch: Batch) -> None:
        share = self._of_batch(batch, self._moving)
        self.sums = {name: self.sums[name] + v for name, v in share.items()} if self.sums else share

    def finish(self) -> Weights:
        total, self.sums = self.sums, {}
        return {name: total[name] if name in total else torch.zeros_like(v) for name, v in self._vectors.items()}

    def _of_batch(self, batch: Batch, vectors: Weights) -> Weights:
        point = {name: self.weights[name] for name in vectors}
        while True:
            way = self._ways[0]
            try:
                with torch.no_grad(), kernels(way.plain):
                    if self.kind == "hessian":
                        return way.second(lambda w: -_total(self.model, {**self.weights, **w}, batch), point, vectors)
                    outputs = lambda w: self.model.outputs({**self.weights, **w}, batch.x)  # noqa: E731
                    return way.through(outputs, point, vectors, lambda f, moved: self._middle(f, batch, moved))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # PyTorch says so where an operation has no rule for a transform
                if len(self._ways) == 1:
                    raise
                log.debug("curvature products: %s; next: %s", str(error).splitlines()[0], self._ways[1])
                self._ways.pop(0)

    def _middle(self, outputs: Tensor, batch: Batch, moved: Tensor) -> Tensor:
        """weight_n F_n t_n, F_n the Fisher or the score's outer product: `moved` [V, B, *O] → the same."""
        noise, likelihood = self.model.noise(self.weights), self.model.likelihood
        if self.kind == "empirical":
            score = losses.gradient(likelihood, outputs, batch.y, noise, batch.mask)
            along = (score * moved).flatten(2).sum(-1) if moved.ndim > 2 else score * moved  # [V, B]
            result = _each(along, outputs) * score
        else:
            result = losses.apply(likelihood, outputs, moved, noise, batch.mask, targets=batch.y)
        return result if batch.weight is None else result * _each(batch.weight.to(result), outputs)


def log_joint_gradient(
    model: Model, weights: Mapping[str, Tensor], data: Data, *, chunk: int | None = None
) -> tuple[Tensor, Weights]:
    """(Σ_n weight_n log p(y_n | x_n, w) + log p(w)) / temperature, the log joint of all data, and its gradient.

    With respect to every trained weight, random ones, points and the likelihood's own alike: {name: shape} for the names of
    `model.initial`. In evaluation mode; one forward and one backward pass over the data, `chunk` examples at a time.
    """
    varying = {name: weights[name].detach() for name in model.initial}
    fixed = {name: weight.detach() for name, weight in weights.items() if name not in varying}

    def of(batch: Batch) -> tuple[Tensor, Weights]:
        value, _, grads = value_and_gradient(lambda w: (_total(model, {**fixed, **w}, batch), ()), varying)
        return value, grads

    recurrent = any(isinstance(module, nn.RNNBase) for module in model.network.modules())
    with kernels(plain=True) if recurrent else contextlib.nullcontext():  # cuDNN has no gradient of them in evaluation mode
        likelihood, slope = accumulate(of, data, chunk=chunk or choose_chunk(model, {**fixed, **varying}, data, 0))
    prior, pull = log_prior_gradient(model, weights)
    value = (likelihood + prior) / model.temperature
    return value, {name: (slope[name] + pull[name]) / model.temperature for name in varying}


def log_prior_gradient(model: Model, weights: Mapping[str, Tensor]) -> tuple[Tensor, Weights]:

    def of(w: Weights) -> tuple[Tensor, tuple[()]]:
        # autograd refuses a constant
        return model.log_prior(w) + 0 * next(iter(w.values())).sum(), ()  # a flat prior has no gradient of its own

    value, _, pull = value_and_gradient(of, {name: weights[name].detach() for name in model.initial})
    return value, pull


def _total(model: Model, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
    each = model.log_likelihood(weights, batch)
    return (each if batch.weight is None else each * batch.weight).sum()


def _each(numbers: Tensor, outputs: Tensor) -> Tensor:
    """[..., B] → [..., B, 1 …], to be multiplied with outputs [..., B, *O]."""
    return numbers.reshape(*numbers.shape, *[1] * (outputs.ndim - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Ways to differentiate
@dataclass(frozen=True)
class Forward:
    """Jv and Hv in forward mode, Jᵀu by one backward pass; all vectors {name: [V, *shape]} at once or one by one.

    `plain` leaves out kernels of libraries, some of which know no forward mode and no second derivatives.
    """

    batched: bool
    plain: bool

    def through(self, function: Function, point: Weights, vectors: Weights, middle: Middle) -> Weights:
        """JᵀM(Jv), J the Jacobian of `function` at `point`, M = middle(function(point), [V, *outputs]) → the same."""
        # forward mode: no graph has to be kept between Jv and Jᵀu
        moved = self._push(function, point, vectors)
        outputs, back = torch.func.vjp(function, point)  # type: ignore[misc]
        return self._all(lambda u: back(u)[0], middle(outputs, moved))

    def second(self, function: Function, point: Weights, vectors: Weights) -> Weights:
        """H v, H the Hessian of the scalar `function` at `point`."""
        return self._push(torch.func.grad(function), point, vectors)

    def _push(self, function: Callable[[Weights], Any], point: Weights, vectors: Weights) -> Any:
        return self._all(lambda v: torch.func.jvp(function, (point,), (v,))[1], vectors)

    def _all(self, function: Callable[[Any], Any], stacked: Any) -> Any:
        if self.batched:
            return torch.func.vmap(function)(stacked)
        count = len(tree.tensors(stacked)[0])
        return tree.stack([function(one) for one in tree.unstack(stacked, count)])


@dataclass(frozen=True)
class Backward:
    """All by backward passes, one vector after the other: u ↦ Jᵀu is linear, and J is the transpose of its Jacobian."""

    plain: bool = True

    def through(self, function: Function, point: Weights, vectors: Weights, middle: Middle) -> Weights:
        leaves = [value.detach().requires_grad_() for value in point.values()]
        with torch.enable_grad():
            outputs = function(dict(zip(point, leaves)))
            # Jᵀu is linear in u: its derivative along v is Jv, wherever u stands (the double-backward trick)
            start = torch.zeros_like(outputs).requires_grad_()
            back = _gradients([outputs], leaves, [start], create_graph=True)
        moved = [_gradients(back, [start], list(v.values()))[0] for v in _each_of(vectors)]
        pulled = [_gradients([outputs], leaves, [u]) for u in middle(outputs.detach(), torch.stack(moved))]
        return tree.stack([dict(zip(point, one)) for one in pulled])

    def second(self, function: Function, point: Weights, vectors: Weights) -> Weights:
        leaves = [value.detach().requires_grad_() for value in point.values()]
        with torch.enable_grad():
            value = function(dict(zip(point, leaves)))
            slope = _gradients([value], leaves, [torch.ones_like(value)], create_graph=True)
        return tree.stack([dict(zip(point, _gradients(slope, leaves, list(v.values())))) for v in _each_of(vectors)])


# in the order in which they are tried: what PyTorch has no rule for in one is done by the next
WAYS: tuple[Forward | Backward, ...] = (
    Forward(batched=True, plain=False),
    Forward(batched=True, plain=True),
    Forward(batched=False, plain=True),
    Backward(),
)


def _each_of(vectors: Weights) -> list[Weights]:
    return tree.unstack(vectors, len(next(iter(vectors.values()))))


def _gradients(of: Sequence[Tensor], leaves: list[Tensor], along: list[Tensor], **settings: Any) -> tuple[Tensor, ...]:
    """Σ along·∂of/∂leaf for each leaf, zero where nothing depends on it; the graph is kept."""
    # autograd refuses outputs that depend on nothing
    joined = [(value, direction) for value, direction in zip(of, along) if value.requires_grad]
    if not joined:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    values, directions = zip(*joined)
    return torch.autograd.grad(values, leaves, directions, retain_graph=True, materialize_grads=True, **settings)


@contextlib.contextmanager
def kernels(plain: bool) -> Iterator[None]:
    """Attention by its formula; and no kernels of libraries where `plain`."""
    # the fast path of attention has no rules for transforms
    fast = torch.backends.mha.get_fastpath_enabled()
    libraries: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn) if plain else ()
    before = [library.enabled for library in libraries]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for library in libraries:
            library.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for library, enabled in zip(libraries, before):
            library.enabled = enabled


# ---------------------------------------------------------------------------------------------------------------------
# Memory
def activation_bytes(model: Model, weights: Mapping[str, Tensor], batch: Batch) -> int:
    """Bytes that a backward pass keeps for one example: outputs and what leads to them, without weights and inputs.

    Found by a forward pass over two examples.
    """
    rows = min(2, num_rows(batch.x))
    few = select_rows(batch, slice(0, rows))
    # by storage: views of one tensor are kept once
    known = {t.untyped_storage().data_ptr() for t in tree.tensors((dict(weights), few.x))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaves = {n: w.detach().requires_grad_(n in model.initial) for n, w in weights.items()}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model.outputs(leaves, few.x)
    held = sum(size for place, size in kept.items() if place not in known)
    return -(-(held + outputs.numel() * outputs.element_size()) // rows)


def forecast_bytes(model: Model, per_example: int, vectors: int, chunk: int) -> int:
    """Bytes at the peak of a product with V vectors: 3VP + chunk · (2 + 2V) · activations of one example.

    The vectors, the sum so far and the share of a chunk; the activations, and for each vector their tangents or cotangents.
    """
    random = tree.num_bytes(tree.select(model.initial, model.random))
    return 3 * vectors * random + chunk * (2 + 2 * vectors) * per_example


def choose_chunk(model: Model, weights: Mapping[str, Tensor], data: Data, vectors: int) -> int:
    """Examples at a time such that a product with V vectors fits into half of the free memory; MemoryError where none do."""
    device = next(iter(model.initial.values())).device
    per_example = activation_bytes(model, weights, next(iter(data.chunks(2))))
    # linear in the chunk: two points give the slope
    fixed, one = (forecast_bytes(model, per_example, vectors, chunk) for chunk in (0, 1))
    free = require_memory(one, device, f"curvature products with {vectors} vectors", FEWER)
    room = AT_ONCE if free is None else min(AT_ONCE, free // 2 - fixed)
    return max(1, min(data.num_data, room // (one - fixed)))
