"""Optimisers as pure steps over named tensors: (weights, gradients, state, rate) → (weights, state).

Inside `torch.compile`, `vmap` and other function transforms the formulas are plain out-of-place tensor operations. In eager mode
the buffers that were handed in are *donated*: PyTorch's fused kernels (CPU, CUDA) or its list operations (elsewhere) write the new
values into them, and the same objects are returned. Keep no other reference to weights or state that should survive an update.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plausible.core.serialise import check_number, register
from plausible.core.transforms import hold, stacked_call, transformed, vmapped
from plausible.core.weights import Weights, tensors

__all__ = ["SGD", "AdamState", "AdamW", "Optimiser", "SGDState", "as_optimiser"]

Named = Mapping[str, Tensor]
Rate = Tensor | float
Decay = Mapping[str, float]
FUSED_DEVICES = frozenset({"cpu", "cuda"})
DEEP = 8
"""Weight matrices (and kernels) from which a network is deep, and gradients are clipped unless somebody says otherwise."""
CLIP = 1.0


class AdamState(NamedTuple):
    """Updates so far (0-d, float32), running means of the gradients and of their squares."""

    step: Tensor
    mean: dict[str, Tensor]
    square: dict[str, Tensor]


class SGDState(NamedTuple):
    """Updates so far (0-d, float32) and the velocities (empty without momentum)."""

    step: Tensor
    velocity: dict[str, Tensor]


class Optimiser(ABC):
    """Minimises: `init` makes the state, `update` moves the weights against the gradients.

    Gradients whose norm, over all weights together, is above `clip` are scaled down to it; "auto" is 1 for networks with eight
    matrices and more, where a single batch may undo what was learned, and None, as they are, for others.
    """

    clip: float | Literal["auto"] | None

    @abstractmethod
    def init(self, weights: Named) -> Any:
        """The state before the first update: a named tuple of tensors on the weights' device."""

    def update(
        self,
        weights: Weights,
        grads: Named,
        state: Any,
        lr: Rate,
        l2: Mapping[str, float] | float = 0.0,
        network: Named | None = None,
    ) -> tuple[Weights, Any]:
        """One update with rate `lr` (0-d tensor on the weights' device, or a float).

        `network` are the weights by which a network is deep, where `weights` are the parameters of something else.

        `l2`, one number or one by name, adds the gradient of ½·l2·‖w‖² to `grads`, inside the fused kernel where there is one:
        the gradient of a centred Gaussian prior for free, where autograd would spend several passes over the weights.
        """
        if not isinstance(l2, Mapping):
            l2 = dict.fromkeys(weights, l2)
        elif not l2:
            l2 = dict.fromkeys(weights, 0.0)
        if (limit := self._limit(network or weights)) is not None:
            grads = _clipped(grads, limit)
        # on a GPU the question whether members agree would wait for the device
        if vmapped() and state.step.device.type == "cpu":
            return stacked_call(lambda *call: self._members(l2, *call), weights, dict(grads), state, lr)
        if transformed():
            return self._pure(weights, grads, state, lr, l2)
        with torch.no_grad():
            self._donated(weights, grads, state, lr, l2)
        return weights, state

    def _limit(self, weights: Named) -> float | None:
        if self.clip == "auto":
            return CLIP if sum(weight.ndim > 1 for weight in weights.values()) >= DEEP else None
        return self.clip

    def _check_clip(self) -> None:
        if self.clip not in (None, "auto"):
            check_number(self, "clip", above=0)

    def _members(self, l2: Decay, _: Any, axes: Any, arguments: Any) -> tuple[Weights, Any]:
        """Stacked members that stand at the same step with the same rate are one larger network."""
        weights, grads, state, lr = arguments
        rates = lr if isinstance(lr, Tensor) else torch.tensor(lr)
        # members may have been stopped or resumed apart from each other
        same = not transformed() and bool((state.step == state.step.flatten()[0]).all() & (rates == rates.flatten()[0]).all())
        written = tensors((weights, state))
        # in-place kernels walk memory as it lies: members in front, nothing strided
        if not same or any(axis != 0 for axis in tree_leaves(axes[:3])) or not all(t.is_contiguous() for t in written):
            return torch.func.vmap(lambda w, g, s, r: self._pure(w, g, s, r, l2), in_dims=axes)(*arguments)
        with torch.no_grad():
            self._donated(weights, grads, state._replace(step=state.step[0].clone()), lr if axes[3] is None else lr[0], l2)
        return weights, state._replace(step=state.step + 1)

    @abstractmethod
    def _pure(self, weights: Weights, grads: Named, state: Any, lr: Rate, l2: Decay) -> tuple[Weights, Any]:
        """The update as plain tensor operations, inputs left alone."""

    @abstractmethod
    def _donated(self, weights: Weights, grads: Named, state: Any, lr: Rate, l2: Decay) -> None:
        """The update written into the weights and the state."""


@register
@dataclass(frozen=True)
class AdamW(Optimiser):
    """w ← w − lr·weight_decay·w − lr·m̂/(√v̂ + eps), with m̂ and v̂ the bias-corrected means of g and g².

    Loshchilov & Hutter (2019), Decoupled weight decay regularization; with `weight_decay=0`, the default, this is Adam
    (Kingma & Ba 2015). The decay is a heuristic of the optimiser, not a prior. Memory: two copies of the weights.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        self._check_clip()
        check_number(self, "beta1", "beta2", at_least=0, below=1)
        check_number(self, "eps", above=0)
        check_number(self, "weight_decay", at_least=0)

    def init(self, weights: Named) -> AdamState:
        return AdamState(_zero_step(weights), _zeros(weights), _zeros(weights))

    def _pure(self, weights: Weights, grads: Named, state: AdamState, lr: Rate, l2: Decay) -> tuple[Weights, AdamState]:
        step = state.step + 1
        # computed once: the compiler would repeat them for every weight
        correction1, correction2 = _one_minus_power(self.beta1, step), _one_minus_power(self.beta2, step)
        rate, shrink, keep = hold(lr / correction1), hold(correction2.rsqrt()), 1 - lr * self.weight_decay
        new: Weights = {}
        mean: Weights = {}
        square: Weights = {}
        for name, weight in weights.items():
            grad = grads[name] + l2[name] * weight if l2[name] else grads[name]
            mean[name] = torch.lerp(state.mean[name], grad, 1 - self.beta1)
            square[name] = self.beta2 * state.square[name] + (1 - self.beta2) * grad * grad
            move = rate * mean[name] / (square[name].sqrt() * shrink + self.eps)
            # a rate in float32 would turn half-precision weights into float32
            new[name] = ((weight * keep if self.weight_decay else weight) - move).to(weight.dtype)
        return new, AdamState(step, mean, square)

    def _donated(self, weights: Weights, grads: Named, state: AdamState, lr: Rate, l2: Decay) -> None:
        step = state.step.add_(1)
        # the kernels know one decay for all weights that they are given
        for decay, names in _alike(weights, l2):
            w, g = [weights[name] for name in names], [grads[name] for name in names]
            self._moved(w, g, [state.mean[name] for name in names], [state.square[name] for name in names], step, lr, decay)

    def _moved(
        self, w: list[Tensor], g: list[Tensor], mean: list[Tensor], square: list[Tensor], step: Tensor, lr: Rate, l2: float
    ) -> None:
        if l2 and self.weight_decay:  # the kernels have one kind of decay each: decoupled, or in the gradient
            g, l2 = list(torch._foreach_add(g, w, alpha=l2)), 0.0
        if _fusible(w, mean, square):
            kernel = torch._fused_adamw_ if self.weight_decay else torch._fused_adam_
            kernel(
                *(w, [grad.contiguous() for grad in g], mean, square, [], [step] * len(w)),
                lr=lr.float() if isinstance(lr, Tensor) else lr,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=l2 or self.weight_decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            return
        if l2:
            g = list(torch._foreach_add(g, w, alpha=l2))
        torch._foreach_lerp_(mean, g, 1 - self.beta1)
        torch._foreach_mul_(square, self.beta2)
        torch._foreach_addcmul_(square, g, g, 1 - self.beta2)
        denominator = torch._foreach_sqrt(square)
        torch._foreach_div_(denominator, _one_minus_power(self.beta2, step).sqrt())
        torch._foreach_add_(denominator, self.eps)
        # sign and rate go into the denominator, so that the update is one addcdiv
        torch._foreach_mul_(denominator, -_one_minus_power(self.beta1, step) / lr)
        if self.weight_decay:
            torch._foreach_mul_(w, 1 - lr * self.weight_decay)
        torch._foreach_addcdiv_(w, mean, denominator)


@register
@dataclass(frozen=True)
class SGD(Optimiser):
    """v ← momentum·v + g + weight_decay·w,  w ← w − lr·v   (nesterov: w ← w − lr·(g + momentum·v)).

    Sutskever et al. (2013), On the importance of initialization and momentum in deep learning, in PyTorch's form: the rate
    multiplies the velocity. `weight_decay` enters the gradient. Memory: one copy of the weights, none without momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        self._check_clip()
        check_number(self, "momentum", at_least=0, below=1)
        check_number(self, "weight_decay", at_least=0)
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov=True needs a momentum above 0, got momentum=0; try momentum=0.9")

    def init(self, weights: Named) -> SGDState:
        return SGDState(_zero_step(weights), _zeros(weights) if self.momentum else {})

    def _pure(self, weights: Weights, grads: Named, state: SGDState, lr: Rate, l2: Decay) -> tuple[Weights, SGDState]:
        new: Weights = {}
        velocity: Weights = {}
        for name, weight in weights.items():
            decay = self.weight_decay + l2[name]
            direction = grads[name] + decay * weight if decay else grads[name]
            if self.momentum:
                velocity[name] = self.momentum * state.velocity[name] + direction
                direction = direction + self.momentum * velocity[name] if self.nesterov else velocity[name]
            new[name] = (weight - lr * direction).to(weight.dtype)
        return new, SGDState(state.step + 1, velocity)

    def _donated(self, weights: Weights, grads: Named, state: SGDState, lr: Rate, l2: Decay) -> None:
        state.step.add_(1)
        for decay, names in _alike(weights, l2):
            w, g = [weights[name] for name in names], [grads[name] for name in names]
            velocity = [state.velocity[name] for name in names] if self.momentum else []
            self._moved(w, g, velocity, lr, self.weight_decay + decay)

    def _moved(self, w: list[Tensor], g: list[Tensor], velocity: list[Tensor], lr: Rate, decay: float) -> None:
        if _fusible(w, velocity):
            torch._fused_sgd_(
                w,
                [grad.contiguous() for grad in g],
                velocity,
                weight_decay=decay,
                momentum=self.momentum,
                lr=lr.float() if isinstance(lr, Tensor) else lr,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=False,  # velocities start at zero, so the first step needs no rule of its own
            )
            return
        if decay:
            g = list(torch._foreach_add(g, w, alpha=decay))
        if self.momentum:
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, g)
            g = list(torch._foreach_add(g, velocity, alpha=self.momentum)) if self.nesterov else velocity
        torch._foreach_add_(w, torch._foreach_mul(g, -lr))


def as_optimiser(value: Optimiser | str) -> Optimiser:
    """An optimiser as it is, or by name: "adam", "adamw" (the same without decay) or "sgd", with default settings."""
    if isinstance(value, Optimiser):
        return value
    known = {"adam": AdamW, "adamw": AdamW, "sgd": SGD}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]()
    if isinstance(value, str):
        raise ValueError(f"unknown optimiser {value!r}; known are {', '.join(map(repr, known))}")
    raise TypeError(
        f"optimiser must be AdamW(...), SGD(...) or a name, got {value!r} of type {type(value).__qualname__}; "
        "torch.optim optimisers are not used here"
    )


def _clipped(grads: Named, limit: float) -> Weights:
    """Gradients whose common norm is at most `limit`."""
    values = list(grads.values())
    if not transformed() and values[0].dtype is torch.float32 and all(v.dtype is values[0].dtype for v in values):
        # a handful of kernels for all of them, where a deep network would take hundreds
        factor = (limit / torch.stack(torch._foreach_norm(values)).norm()).clamp(max=1.0)
        return dict(zip(grads, torch._foreach_mul(values, factor)))
    total = torch.stack([grad.square().sum(dtype=torch.float32) for grad in values]).sum()
    factor = hold((limit * total.rsqrt()).clamp(max=1.0))
    return {name: (grad * factor).to(grad.dtype) for name, grad in grads.items()}


def _one_minus_power(beta: float, step: Tensor) -> Tensor:
    """1 − βᵗ by expm1: in float32 the plain form loses four digits at β = 0.999, t = 1."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _zeros(weights: Named) -> Weights:
    return {name: torch.zeros_like(weight, requires_grad=False) for name, weight in weights.items()}


def _zero_step(weights: Named) -> Tensor:
    if not weights:
        raise ValueError("an optimiser needs at least one weight, got an empty mapping")
    # float32 whatever the weights are: bfloat16 cannot count beyond 256
    return torch.zeros((), dtype=torch.float32, device=next(iter(weights.values())).device)


def _alike(weights: Named, l2: Decay) -> list[tuple[float, list[str]]]:
    """Names of weights by the decay that they share."""
    groups: dict[float, list[str]] = {}
    for name in weights:
        groups.setdefault(l2[name], []).append(name)
    return list(groups.items())


def _fusible(weights: list[Tensor], *buffers: Iterable[Tensor]) -> bool:
    """Whether the fused kernels apply: they walk raw memory, so layouts other than contiguous would be misread."""
    device, dtype = weights[0].device, weights[0].dtype
    if device.type not in FUSED_DEVICES:
        return False
    for weight in weights:
        if weight.device != device:
            return False
    for group in (weights, *buffers):
        for tensor in group:
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                return False
    return True
