"""Networks seen from outside: what can be fitted, how a module is called, what it returns, and which weights move its outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plausible.core import weights as tree
from plausible.core.attributes import duplicate
from plausible.core.data import Batch, num_rows, take
from plausible.core.weights import Weights

Where = str | Sequence[str] | Callable[..., bool] | None


def describe(x: Any) -> str:
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
        hint = "; pass its module()" if isinstance(network, torch.export.ExportedProgram) else ""
        raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}{hint}")
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError("network is a TorchScript module, whose weights cannot be exchanged; pass the module it was made from")
    held = [*network.named_parameters(), *network.named_buffers()]
    if lazy := [n for n, v in held if nn.parameter.is_lazy(v)]:
        raise ValueError(f"network has lazy parameters ({lazy[0]}, …): run it once on an example before fitting")
    if empty := [n for n, v in held if v.is_meta]:
        raise ValueError(
            f"network has tensors without values, on the meta device ({empty[0]}, …): materialise it with "
            "network.to_empty(device='cpu') and initialise or load its weights before fitting"
        )
    norms = (n for n, m in network.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None)
    if (norm := next(norms, None)) is not None:
        raise ValueError(
            f"network has batch norm without running statistics ({norm or 'itself'}): what it predicts for one example depends on "
            "the others; use track_running_stats=True, or nn.GroupNorm"
        )
    tables = (
        n for n, m in network.named_modules() if getattr(m, "max_norm", None) is not None and hasattr(m, "num_embeddings")
    )
    if (table := next(tables, None)) is not None:
        raise ValueError(
            f"network has an embedding with max_norm ({table or 'itself'}), which shrinks its weights whenever it is called: "
            "use max_norm=None, and a prior that keeps them small"
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
    asked = f"device={str(device)!r} was asked for, but"
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{asked} PyTorch finds no CUDA GPU here; use device='cpu' or 'auto'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{asked} there are only {torch.cuda.device_count()} GPUs")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"{asked} PyTorch finds no Metal GPU here; use device='cpu' or 'auto'")
    if chosen.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device={str(device)!r} is not supported; use 'cpu', 'cuda' or 'mps'")
    return chosen


def as_initialised(network: nn.Module) -> bool:
    """Whether all dense and convolutional layers hold what PyTorch could have initialised them with: nothing was learned yet.

    That is U(−1/√n, 1/√n) for weights and biases, n the fan-in. Training moves some of them out of it. False says nothing.
    """
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    for layer in layers:
        bound = (1 + 1e-6) * float(layer.weight[0].numel()) ** -0.5
        if any(float(value.detach().abs().max()) > bound for value in (layer.weight, layer.bias) if value is not None):
            return False
    return bool(layers)


def private_copy(network: nn.Module) -> nn.Module:
    """A copy in evaluation mode, so that the user's module is never changed."""
    check_network(network)
    try:
        return keep_gradients(_plain(duplicate(network)).eval())
    except Exception as error:  # whatever a module's __deepcopy__ or __reduce__ may raise
        raise ValueError(
            f"network cannot be copied ({error}); modules must support copy.deepcopy so that yours is never changed"
        ) from error


def _plain(network: nn.Module) -> nn.Module:
    """The network without what stands between its modules and others: compiled code, and gradients as sparse tensors."""
    for module in list(network.modules()):
        for name, child in list(module._modules.items()):
            module._modules[name] = getattr(child, "_orig_mod", child)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return getattr(network, "_orig_mod", network)


def plain_name(name: str) -> str:
    """The name of a module or parameter in the network without compiled code around its modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def keep_gradients(network: nn.Module) -> nn.Module:
    """The network with its recurrent layers in training mode: in evaluation mode cuDNN gives no gradients of them.

    Only PyTorch's own ones that are the same function in both modes: those with dropout between their layers, subclasses, and
    one that is the whole network stay as they are (and run `without_cudnn`).
    """
    for layer in network.modules():
        if type(layer) in (nn.RNN, nn.LSTM, nn.GRU) and not layer.dropout and layer is not network:
            layer.training = True
    return network


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Kernels of PyTorch's own, whose recurrent layers have gradients in evaluation mode too."""
    # not torch.backends.cudnn.flags, which would reset the other settings too
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
    last: dict[str, int] = {}
    # a walk over the graph of autograd: leaves are nodes that hold a `variable`
    todo, seen = [outputs.grad_fn], {outputs.grad_fn}
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions if node is not None else ():
            name = names.get(id(getattr(source, "variable", None)))
            if name is not None:
                # autograd numbers its nodes in the order in which they were made
                last[name] = max(last.get(name, -1), node._sequence_nr())  # type: ignore[union-attr]
            elif source is not None and source not in seen:
                seen.add(source)
                todo.append(source)
    return last


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
                    # by identity: tied weights are one tensor in several modules
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
        # keywords where `forward` has them, else the dict itself is the input
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


if TYPE_CHECKING:
    from plausible.core.model import Model


def check_inputs(model: Model, x: Any, *, train: bool = False, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Outputs at the initial weights (or those given) for a few inputs, or an error that says why there are none."""
    variables = weights if weights is not None else {**model.initial, **model.buffers}
    try:
        outputs = model.outputs(variables, x, train=train)
    except OutputError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        whole = any(not (leaf.is_floating_point() or leaf.is_complex()) for leaf in tree.tensors(x))
        hint = "; integers and booleans reach it as they are: convert features and images, say x.float()" if whole else ""
        if isinstance(model.network, torch.fx.GraphModule):
            hint += "; export it with dynamic_shapes, so that it takes any number of examples"
        mode = " in training mode" if train else ""
        problem = f"network could not be run on the inputs x ({describe(x)}){mode}"
        raise ValueError(f"{problem}: {type(error).__name__}: {error}{hint}") from error
    rows = num_rows(x)
    if outputs.ndim == 0 or outputs.shape[0] != rows:
        raise ValueError(
            f"network must return one output row per example: {rows} examples gave outputs of shape "
            f"{tuple(outputs.shape)}; if another part of its result is meant, pass output="
        )
    if not outputs.is_floating_point():
        raise TypeError(f"network outputs must be floating point, got {outputs.dtype}")
    if model.output_shape and not model.may_give(outputs.shape[1:]):
        raise ValueError(
            f"x gives outputs of shape {tuple(outputs.shape[1:])} per example, the model was built for {model.output_shape}"
        )
    return outputs


def with_leaves(model: Model, example: Batch) -> tuple[Tensor, Weights]:
    """Outputs for a few examples, and leaves of autograd that stood for the weights."""
    leaves = {n: w.detach().requires_grad_() for n, w in model.initial.items()}
    with torch.enable_grad():
        return check_inputs(model, example.x, weights=leaves), leaves


def probe(model: Model, example: Batch) -> tuple[Tensor, dict[str, int]]:
    """Run the network on a few examples: its outputs, and for each weight that influences them when it was used last."""
    outputs, leaves = with_leaves(model, example)
    try:
        with torch.no_grad():
            one = model.outputs({**model.initial, **model.buffers}, take(example.x, [0]))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        one = outputs[:1]  # what one row alone does to a network is judged where it happens
    if one.shape != (1, *outputs.shape[1:]):
        raise ValueError(
            f"network gives outputs of shape {tuple(one.shape)} for one example and {tuple(outputs.shape)} for "
            f"{len(outputs)}: it loses the axis of examples; where it ends in squeeze(), write squeeze(-1)"
        )
    uses = last_uses(outputs, leaves)
    moving = _moving_the_output(model, leaves, list(uses), outputs, example)
    uses = {name: when for name, when in uses.items() if name in moving}
    if not uses:
        raise ValueError(
            "the network's weights do not influence its output (is the forward pass under torch.no_grad, are results "
            "detached, multiplied by zero, or always clamped?): nothing can be inferred"
        )
    return outputs.detach(), uses


def _moving_the_output(model: Model, leaves: Weights, names: list[str], outputs: Tensor, example: Batch) -> set[str]:
    """Those of the named weights whose gradient is not exactly zero, here or at other weights and inputs around.

    Dead units have none at the given weights, saturated ones none at the given inputs, and inputs of zero give none to the
    weights that multiply them. Inputs that are no real numbers cannot be moved, and networks that fail at other weights cannot
    be asked: weights then count as moving it.
    """
    real = all(leaf.is_floating_point() for leaf in tree.tensors(example.x))
    stream = torch.Generator().manual_seed(0)
    moving: set[str] = set()
    # a little farther each time; in the end also with inputs of their own, should those given be zero
    for scale, keep in ((0.0, True), (0.3, True), (1.0, True), (0.03, False), (1.0, False)):
        near = leaves
        if scale and not real:
            return set(names)
        if scale:

            def moved(t: Tensor, keep: bool = True, scale: float = scale) -> Tensor:
                return t.detach() * keep + scale * torch.randn(t.shape, generator=stream).to(t)

            near = {name: moved(weight).requires_grad_() for name, weight in leaves.items()}
            inputs = tree.tree_map(functools.partial(moved, keep=keep), example.x)
            try:
                with torch.enable_grad():
                    outputs = check_inputs(model, inputs, weights=near)
            except (ValueError, TypeError):
                return set(names)
        missing = [name for name in names if name not in moving]
        direction = torch.randn(outputs.shape, generator=stream).to(outputs)
        if not outputs.requires_grad:
            continue
        with torch.enable_grad():
            along = (outputs * direction).sum()  # grad_outputs= would import a library of symbols, half a second of it
        grads = torch.autograd.grad(along, [near[n] for n in missing], allow_unused=True)
        moving |= {n for n, g in zip(missing, grads) if g is not None and bool((g != 0).any())}
        if len(moving) == len(names):
            break
    return moving


def moving_buffers(model: Model, example: Batch) -> Weights:
    """The buffers that a training pass changes, such as running statistics."""
    before = {n: b.detach().clone() for n, b in model.network.named_buffers()}
    if not before:
        return {}
    # batch norm refuses to train on one row
    x = example.x if num_rows(example.x) > 1 else take(example.x, [0, 0])
    after = {n: b.clone() for n, b in before.items()}
    devices = {b.device for b in before.values() if b.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        check_inputs(model, x, train=True, weights={**model.initial, **after})
    keep_gradients(model.network.eval())
    return {n: before[n] for n in before if not torch.equal(before[n], after[n])}


def last_layer(model: Model, example: Batch) -> tuple[str, ...]:
    uses = probe(model, example)[1]
    return layer_of(model, max(uses, key=lambda name: uses[name]))


def layer_of(model: Model, weight: str) -> tuple[str, ...]:
    """The names of all trained weights in the layers that hold this one (tied weights are held by several)."""
    # the dicts of parameters of the modules that hold it
    holders = {id(holder) for holder, _ in model._slots[weight]}
    return tuple(
        name
        for name in model.initial
        if layer(name) == layer(weight) or any(id(holder) in holders for holder, _ in model._slots.get(name, ()))
    )
