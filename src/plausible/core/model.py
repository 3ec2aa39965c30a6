"""The model: network + likelihood + prior + number of data = one log joint.

    log p(w, D) ≈ (N / B) Σ_{i in batch} weight_i · log p(y_i | f(x_i; w)) + log p(w)

A `Model` owns a private copy of the network, so the user's module is never touched. Its functions are pure in the weights
they are given and run under `torch.func` transforms, `torch.compile` and CUDA-graph capture alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plausible.core import weights as tree
from plausible.core.attributes import attributes, duplicate
from plausible.core.data import Batch, num_rows, read_inputs, typical
from plausible.core.likelihoods import Likelihood
from plausible.core.networks import (
    OutputError,
    Where,
    carry_over,
    check_parameters,
    choose,
    how_to_call,
    keep_gradients,
    layer_of,
    moving_buffers,
    plain_name,
    private_copy,
    probe,
    reset_of,
    slots,
    with_leaves,
    without_cudnn,
)
from plausible.core.priors import Prior
from plausible.core.random import generator as stream_of
from plausible.core.random import isolated
from plausible.core.recomputing import blocks, needs_copies, own_copy
from plausible.core.tasks import Tasks
from plausible.core.transforms import plain_attention, transformed, value_and_gradient
from plausible.core.weights import Weights
from plausible.core.words import log


class Joint(NamedTuple):
    """One evaluation of the log joint: value (tempered), its two terms, the scaled gradient, the network's buffers afterwards.

    The gradient is `grads + l2 · weights`, `l2` by name; it is empty unless it was asked for.
    """

    value: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    grads: Weights
    buffers: Weights
    l2: Mapping[str, float] = {}


@dataclass(frozen=True, eq=False)
class Model:
    """network + likelihood + prior + number of data: one log joint over named weights, and nothing else.

    `initial` are the weights at which it was built, by name: their shapes, types and device are those of every weight given
    later. `random` names the weights that are inferred, `points` those that are trained along as points (`where` left them
    out); parameters with `requires_grad=False` stay as they are, and so do the submodules named in `evaluated`, which run in
    evaluation mode even in training (a frozen batch norm, say). A network that `writes` to its inputs is given copies. Build it
    with `Model.build`, which runs the network once on a few examples to learn its shapes; change it by `dataclasses.replace` and
    the functions `Model → Model` below.
    """

    network: nn.Module
    likelihood: Likelihood
    prior: Prior
    num_data: int
    initial: Weights
    random: tuple[str, ...]
    buffers: Weights
    output: Callable[[Any], Tensor] | None = None
    output_shape: tuple[int, ...] = ()
    target_ndim: int = 1
    temperature: Any = 1.0  # a number, or a 0-d tensor where settings are stacked
    precision: torch.dtype | None = None
    evaluated: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()  # tensors that the network holds without registering them
    sample: Any = None  # an input like those of the data, by which networks are told apart: see `posteriors.probing`
    copied: bool = False  # each pass with gradients runs on a copy of the network: see `core.recomputing`
    writes: dict[bool, bool] = field(default_factory=dict, repr=False)  # to inputs, in training or not; where that is known
    closed: dict[str, float] | None = field(init=False, repr=False)  # precisions by name, where the prior is a centred Gaussian
    points: tuple[str, ...] = field(init=False, repr=False)
    likelihood_names: tuple[str, ...] = field(init=False, repr=False)
    _spread: Callable[[Any], Any] = field(init=False, repr=False)  # inputs → what `forward` is called with
    _slots: dict[str, Any] = field(init=False, repr=False)  # where in the network each weight lies
    _recurrent: list[nn.Module] = field(init=False, repr=False)  # layers that cuDNN refuses to differentiate in evaluation mode

    def __post_init__(self) -> None:
        known: dict[str, Any] = {
            # stacked temperatures are left to autograd
            "closed": None if isinstance(self.temperature, Tensor) else self._precisions(),
            "points": tuple(name for name in self.initial if name not in self.random),
            "likelihood_names": tuple(name for name in self.initial if name.startswith("likelihood.")),
            "_spread": how_to_call(self.network),
            "_slots": slots(self.network),
            "_recurrent": [
                layer
                for layer in self.network.modules()
                if isinstance(layer, nn.RNNBase) and any(parameter.is_cuda for parameter in layer.parameters())
            ],
        }
        for name, value in known.items():
            # frozen: what follows from the fields is computed once, here
            object.__setattr__(self, name, value)

    def may_give(self, shape: Sequence[int]) -> bool:
        """Whether an example may have outputs of this shape: that of the fit, or other positions (words) before the last axis."""
        own, given = self.output_shape, tuple(shape)
        return given == own or (len(given) == len(own) > 1 and given[-1] == own[-1])

    @property
    def device(self) -> torch.device:
        return _first(self.initial).device

    # -----------------------------------------------------------------------------------------------------------------
    # Building
    @classmethod
    def build(
        cls,
        network: nn.Module,
        likelihood: Likelihood,
        prior: Prior,
        example: Batch,
        *,
        num_data: int,
        where: Where = None,
        output: Callable[[Any], Tensor] | None = None,
        device: torch.device | str = "cpu",
        precision: torch.dtype | None = None,
        check_targets: bool = True,
    ) -> Model:
        """Copy the network, run it on `example`, check shapes, and decide which weights are random.

        `check_targets=False` leaves the targets to the caller, who has all of them or has none.
        """
        if output is not None and not callable(output):
            raise TypeError(f"output must be a function of what the network returns, got {output!r}")
        private = private_copy(network).to(device)
        parameters = {n: p.detach().clone() for n, p in private.named_parameters() if p.requires_grad}
        check_parameters(parameters)
        # Submodules that the user put into evaluation mode inside a module in training mode stay in it.
        modes = {plain_name(n): m.training for n, m in network.named_modules()}
        evaluated = tuple(n for n, training in modes.items() if modes[""] and not training)
        named = {"initial": parameters, "random": tuple(parameters), "buffers": {}, "evaluated": evaluated}
        named["attributes"] = tuple(attributes(private))  # before it runs: what it keeps then are caches
        model = cls(private, likelihood, prior, num_data, output=output, precision=precision, **named)  # type: ignore[arg-type]
        model = replace(model, copied=needs_copies(lambda own: with_leaves(replace(model, copied=own), example)))
        outputs, uses = probe(model, example)
        model = replace(model, output_shape=tuple(outputs.shape[1:]), target_ndim=example.y.ndim)
        # before anything is trained: shapes that broadcast would give a wrong answer, not an error
        if check_targets:
            likelihood.check(outputs.shape, example.y, mask=example.mask)
        noise = likelihood.initial_weights(model.output_shape, dtype=outputs.dtype, device=outputs.device)
        # the learned noise is a weight like any other, last in order
        initial = {**parameters, **noise}
        random = choose(initial, where, layer_of(model, max(uses, key=lambda name: uses[name])))
        if not any(name in uses for name in random):
            raise ValueError(
                f"where={where!r} chooses {', '.join(random)}, which do not influence the output: nothing can be inferred"
            )
        if unused := [name for name in parameters if name not in uses]:
            log.warning("these weights do not influence the output, so data say nothing of them: %s", ", ".join(unused))
        prior.log_prob(initial)  # every weight has a rule, and shapes fit
        buffers = moving_buffers(model, example)
        return replace(model, initial=initial, random=random, buffers=buffers, sample=typical(example.x))

    # -----------------------------------------------------------------------------------------------------------------
    # The network as a function of its weights
    def _call(self, variables: Mapping[str, Tensor], x: Any) -> Any:
        """The network's result. `x /= 255` inside it would change the caller's data, and the results of every pass but the first.

        So it gets a copy until a pass has shown that it does not write, in training and in evaluation mode each.
        """
        compiling, mode = torch.compiler.is_compiling(), self.network.training  # compilers leave needless copies out
        if not compiling and not self.writes.get(mode, True):
            return self._run(variables, x)
        x = tree.tree_map(Tensor.clone, x)
        result = self._run(variables, x)
        leaves = [] if compiling else tree.tensors(x)
        if leaves and mode not in self.writes and not any(map(_versionless, leaves)):
            self.writes[mode] = any(leaf._version for leaf in leaves)
        return result

    def _run(self, variables: Mapping[str, Tensor], x: Any) -> Any:
        arguments, keywords = self._spread(x)
        if transformed():
            of_network = {name: v for name, v in variables.items() if not name.startswith("likelihood.")}
            with contextlib.ExitStack() as inside:
                if not torch.compiler.is_compiling():
                    inside.enter_context(blocks(None))
                    inside.enter_context(plain_attention())
                result = functional_call(self.network, of_network, arguments, keywords)
            if self.network.training:
                for name, left in of_network.items():  # where functional_call leaves what the network assigned to its buffers
                    if name not in self.initial:
                        carry_over(variables[name], left)
            return result
        if self.copied and torch.is_grad_enabled():
            network = own_copy(self.network, variables)
            result = network(*arguments, **keywords)
            self._carry_over(variables, slots(network))
            return result

        def again() -> contextlib.AbstractContextManager[None]:
            # running statistics are updated once
            return self._holding({n: v if n in self.initial else v.clone() for n, v in variables.items()})

        # Eager: put the tensors straight into the private copy; functional_call costs as much as a small layer.
        # whoever watches the pass, or stands for weights in it, would see the blocks twice
        watched = torch._C._len_torch_function_stack() > 0 or any(
            map(torch.overrides.has_torch_function_unary, variables.values())
        )
        with self._holding(variables), blocks(None if watched else again):
            result = self.network(*arguments, **keywords)
            self._carry_over(variables, self._slots)
            return result

    @contextlib.contextmanager
    def _holding(self, variables: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the private copy holds these tensors."""
        kept = []
        for key, value in variables.items():
            for holder, name in self._slots.get(key, ()):
                kept.append((holder, name, holder[name]))
                holder[name] = value
        try:
            yield
        # also where the forward pass failed: the private copy must not keep somebody's tensors
        finally:
            for holder, name, value in kept:
                holder[name] = value

    def _carry_over(self, variables: Mapping[str, Tensor], places: Mapping[str, Any]) -> None:
        for key, value in variables.items() if self.network.training else ():
            if key not in self.initial and key in places:
                holder, name = places[key][0]
                carry_over(value, holder[name])

    def outputs(self, weights: Mapping[str, Tensor], x: Any, *, train: bool = False) -> Tensor:
        """f(x; w) for one set of weights (buffers may be among them): [N, *outputs].

        `train=True` runs the network in training mode (dropout on, batch statistics); it then updates the buffers given in
        `weights` in place.
        """
        if self.network.training != train:
            self.network.train(train)
            for name in self.evaluated if train else ():
                self.network.get_submodule(name).training = False
            # train() and eval() have just set all modules alike
            keep_gradients(self.network)
        if self._recurrent and not all(layer.training for layer in self._recurrent):
            with without_cudnn():
                result = self._called(weights, x)
        else:
            result = self._called(weights, x)
        if self.output is not None:
            try:
                result = self.output(result)
            except (AttributeError, KeyError, IndexError, TypeError) as error:
                problem = f"on the {type(result).__name__} that the network returned: {type(error).__name__}: {error}"
                raise OutputError(f"output= failed {problem}") from error
        if isinstance(result, Mapping) and isinstance(self.likelihood, Tasks):
            result = self.likelihood.packed_outputs(result)
        if not isinstance(result, Tensor):
            # Hugging Face's outputs are no tensors
            hint = "lambda o: o.logits" if hasattr(result, "logits") else "lambda o: o[0]"
            raise OutputError(
                f"network returned {type(result).__name__}, expected a tensor: say which part is f(x) with output=, "
                f"for example output={hint}"
            )
        return result.to(_first(weights).dtype) if self.precision is not None else result

    def _called(self, weights: Mapping[str, Tensor], x: Any) -> Any:
        if self.precision is None:
            return self._call(weights, x)
        with torch.autocast(device_type=_first(weights).device.type, dtype=self.precision):
            return self._call(weights, x)

    # -----------------------------------------------------------------------------------------------------------------
    # The log joint
    def noise(self, weights: Mapping[str, Tensor]) -> Weights:
        """The likelihood's own weights among these."""
        return {name: weights[name] for name in self.likelihood_names}

    def log_likelihood(self, weights: Mapping[str, Tensor], batch: Batch, *, train: bool = False) -> Tensor:
        """Log p(y_i | x_i, w) for each example of the batch: [B]; outputs summed, masked ones left out, not weighted."""
        return self.log_likelihood_of(self.outputs(weights, batch.x, train=train), weights, batch)

    def log_likelihood_of(self, outputs: Tensor, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The same of outputs f(x_i): [B]; of the weights only those of the likelihood matter."""
        each = self.likelihood.log_prob(outputs, batch.y, self.noise(weights))
        if batch.mask is not None:
            each = torch.where(batch.mask, each, torch.zeros_like(each))
        return each.flatten(1).sum(1) if each.ndim > 1 else each

    def log_prior(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Log p(w), summed over all trained weights."""
        return self.prior.log_prob({name: weights[name] for name in self.initial})

    def scaled_log_likelihood(self, weights: Mapping[str, Tensor], batch: Batch, *, train: bool = False) -> Tensor:
        """(N/B) Σ weight_i log p(y_i | x_i, w): 0-d."""
        scale = self.num_data / num_rows(batch.x)
        if batch.weight is None and batch.mask is None:
            outputs = self.outputs(weights, batch.x, train=train)
            # fused losses, where examples need not be told apart
            total = self.likelihood.total(outputs, batch.y, self.noise(weights))
        else:
            each = self.log_likelihood(weights, batch, train=train)
            total = (each if batch.weight is None else each * batch.weight).sum()
        return total if scale == 1.0 else total * scale

    def log_joint(self, weights: Mapping[str, Tensor], batch: Batch, *, train: bool = False) -> Tensor:
        """((N/B) Σ weight_i log p(y_i | x_i, w) + log p(w)) / temperature: an unbiased estimate from a batch."""
        return self._tempered(self.scaled_log_likelihood(weights, batch, train=train) + self.log_prior(weights))

    def _tempered(self, value: Tensor) -> Tensor:
        stacked = isinstance(self.temperature, Tensor)
        return value if not stacked and self.temperature == 1.0 else value / self.temperature

    def _precisions(self) -> dict[str, float] | None:
        try:
            return self.prior.precisions(self.initial)
        except ValueError:  # a weight without a rule: `build` says so when it knows all weights
            return None

    def gradient(
        self,
        weights: Mapping[str, Tensor],
        batch: Batch,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        train: bool = True,
        scale: float = 1.0,
        leave_l2: bool = False,
    ) -> Joint:
        """The log joint, its parts, and the gradient of scale · log joint with respect to `weights`.

        Differentiated by `value_and_gradient`, in the way that is fastest where it is called. A centred Gaussian prior never
        enters autograd: its gradient is added in closed form, or, with `leave_l2`, left to the optimiser as `Joint.l2` (so that
        grads + l2·w is the gradient).
        """
        factor = scale / self.temperature

        def objective(w: Weights, part: Batch, buffered: Weights) -> tuple[Tensor, tuple[Tensor, Tensor, Weights]]:
            # a training pass writes into its buffers, and gradients may be asked for again
            moving = {name: b.clone() for name, b in buffered.items()}
            total = self.scaled_log_likelihood({**w, **moving}, part, train=train)
            if self.closed is not None:
                return total * factor, (total.detach(), total.detach(), moving)
            prior = self.log_prior(w)
            return (total + prior) * factor, (total.detach(), prior.detach(), moving)

        _, (total, prior, moved), grads = value_and_gradient(objective, weights, batch, dict(buffers or {}))
        l2: dict[str, float] = {}
        if self.closed is not None:
            l2 = {name: -factor * self.closed[name] for name in grads}
            with torch.no_grad():
                prior = self.log_prior(weights)
                if not leave_l2:
                    # not torch.add(…, alpha=l2): the compiler folds that into the matrix product before it and loses alpha
                    grads = {n: g + l2[n] * weights[n] for n, g in grads.items()}
                    l2 = {}
        return Joint(self._tempered(total + prior), total, prior, grads, moved, l2)

    # -----------------------------------------------------------------------------------------------------------------
    # Model → Model
    def tempered(self, temperature: float) -> Model:
        """The model whose log joint is divided by `temperature`: below 1 a cold posterior, above 1 a flattened one."""
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        return replace(self, temperature=self.temperature * temperature)

    def with_settings(self, prior: Prior | None = None, temperature: Any = None) -> Model:
        """The model with another prior or another temperature, whose numbers may be 0-d tensors where settings are stacked."""
        given = {"prior": prior, "temperature": temperature}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def restricted(self, names: Iterable[str]) -> Model:
        """The model in which only these weights are random; the others are points."""
        return replace(self, random=tuple(names))

    def starting_at(self, weights: Mapping[str, Tensor]) -> Model:
        """The model whose optimisers and chains start at these weights (buffers may be among them)."""
        for name, value in self.initial.items():
            if name not in weights or weights[name].shape != value.shape:
                problem = f"has shape {tuple(weights[name].shape)}" if name in weights else "is missing"
                raise ValueError(f"{name!r} {problem} among the weights to start at, expected shape {tuple(value.shape)}")
        initial = {name: weights[name].detach().clone().to(value) for name, value in self.initial.items()}
        buffers = {name: weights.get(name, value).detach().clone().to(value) for name, value in self.buffers.items()}
        return replace(self, initial=initial, buffers=buffers)

    def to(self, device: torch.device | str) -> Model:
        """The same model with all tensors on another device."""
        return replace(
            self,
            network=duplicate(self.network).to(device),
            initial=tree.to(self.initial, device),
            buffers=tree.to(self.buffers, device),
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Starting points
    def reinitialised(self, generator: torch.Generator) -> Weights:
        """Fresh initial weights: each submodule's own `reset_parameters`, with this generator's seed.

        Frozen parameters stay; so do bare parameters whose module offers no reset.
        """
        # modules reset themselves by the global generator: seed it from ours, and put it back
        seed = int(torch.randint(2**62, (), generator=generator))
        network = duplicate(self.network)
        devices = {w.device for w in self.initial.values() if w.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(seed)
            for module in network.modules():
                if (reset := reset_of(module)) is not None:
                    reset()
        fresh = {n: p.detach().clone() for n, p in network.named_parameters() if n in self.initial}
        return {name: fresh.get(name, value).clone() for name, value in self.initial.items()}

    def not_reinitialisable(self) -> list[str]:
        """Names of trained parameters whose module has no `reset_parameters` that can be called without arguments."""
        stuck = ((prefix, module) for prefix, module in self.network.named_modules() if reset_of(module) is None)
        names = [f"{prefix}.{n}".lstrip(".") for prefix, m in stuck for n, _ in m.named_parameters(recurse=False)]
        return [name for name in names if name in self.initial]

    def prior_functions(self, x: Any, draws: int, seed: int = 0) -> Tensor:
        """f(x; w) for w ~ p(w): what the prior believes before any data. [draws, N, *outputs]."""
        first = _first(self.initial)
        inputs = read_inputs(x, dtype=first.dtype, device=first.device)
        stacked = self.prior.sample(self.initial, stream_of(seed, 11), draws)
        with torch.no_grad(), isolated(seed, first.device):
            outputs = [self.outputs({**tree.index(stacked, s), **self.buffers}, inputs) for s in range(draws)]
        return torch.stack(outputs)


def _first(weights: Mapping[str, Tensor]) -> Tensor:
    return next(iter(weights.values()))


def _versionless(tensor: Tensor) -> bool:
    """Whether PyTorch does not count the writes to it."""
    return tensor.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
