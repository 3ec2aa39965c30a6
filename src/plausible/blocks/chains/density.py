"""The density that chains move over: log p(D | w)^β p(w) for many positions at once, with its gradient.

    log π_c(q) = β_c · log p(D | q_c) + log p(q_c),        q [chains, P]

A `Density` knows nothing of chains' laws; kernels ask it for values, gradients and leapfrog paths. `ModelDensity` answers for a
model and its data, in chunks of examples where all of them at once would not fit. Sums over examples and over weights are
taken in float64, so that energies can be compared.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import ArrayData, Batch, Data
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.core.words import log

if TYPE_CHECKING:
    from plausible.blocks.chains.gibbs import Hierarchy
    from plausible.methods.chains.base import Chains


LogDensity = Callable[[Tensor], Tensor]


class Evaluation(NamedTuple):
    """log p(D | q) and log p(q), both `[chains]` in float64, and the gradient of β log p(D | q) + log p(q), `[chains, P]`."""

    log_likelihood: Tensor
    log_prior: Tensor
    gradient: Tensor


class Point(NamedTuple):
    """A point of phase space for each chain; a path has an axis of steps behind that of chains."""

    position: Tensor
    momentum: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    gradient: Tensor


class Density(ABC):
    """An unnormalised log density over `[chains, P]`.

    `beta` `[chains]` raises the likelihood to a power (None: 1); `precision` `[chains, P]` or `[P]` replaces the prior by
    centred Gaussians of these precisions (None: the model's own prior). `bound` gives the same density with others.
    """

    size: int
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    beta: Tensor | None = None
    precision: Tensor | None = None
    hierarchy: Hierarchy | None = None  # precisions that are sampled along, where there are any

    def bound(self, *, beta: Tensor | None = None, precision: Tensor | None = None) -> Self:
        """The same density with these powers and precisions, where they are given."""
        other = copy.copy(self)
        if beta is not None:
            other.beta = beta
        if precision is not None:
            other.precision = precision
        return other

    @abstractmethod
    def evaluate(self, position: Tensor) -> Evaluation:
        """Log-likelihood, log prior and gradient at `[chains, P]`."""

    def densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Log-likelihood and log prior alone, `[chains]` each."""
        return self.evaluate(position)[:2]

    def value(self, log_likelihood: Tensor, log_prior: Tensor) -> Tensor:
        """β · log-likelihood + log prior: `[chains]`, float64; never NaN (a density that cannot be computed is 0)."""
        # −∞ for NaN: such a state is never accepted, and a chain stays where it was
        weighted = log_likelihood if self.beta is None else self.beta * log_likelihood
        return (weighted + log_prior).nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)

    def leapfrogs(self, point: Point, step: Tensor, inverse_mass: Tensor, count: int, *, keep: bool = False) -> Point:
        """`count` leapfrogs of size `step` `[chains]` (negative: backwards), diagonal inverse masses `[P]` or `[chains, P]`.

            p ← p + (ε/2) ∇ log π(q),   q ← q + ε M⁻¹p,   p ← p + (ε/2) ∇ log π(q)

        Returns the end, or with `keep` the whole path behind the start: `[chains, count, …]`. Cost: one gradient a step.
        """
        size = step.unsqueeze(-1).to(self.dtype)
        position, moved = point.position, size * inverse_mass
        path = []
        ahead = point.momentum + 0.5 * size * point.gradient  # half a step, where two half kicks meet
        for i in range(count):
            position = position + moved * ahead
            at = self.evaluate(position)
            if keep or i == count - 1:
                path.append(Point(position, ahead + 0.5 * size * at.gradient, *at))
            ahead = ahead + size * at.gradient
        return Point(*(torch.stack(parts, dim=1) for parts in zip(*path))) if keep else path[-1]


class FunctionDensity(Density):
    """A density from a function of `[chains, P]`: log densities `[chains]`, taken for the likelihood of a flat prior.

    For targets that are no networks: tests of laws, and densities of your own. With `prior` `[chains, P]` → `[chains]` beside
    it, the first function is the likelihood.
    """

    def __init__(
        self, log_likelihood: LogDensity, size: int, *, prior: LogDensity | None = None, dtype: torch.dtype = torch.float64
    ):
        self.function, self.prior, self.size, self.dtype = log_likelihood, prior, size, dtype

    def evaluate(self, position: Tensor) -> Evaluation:
        with torch.enable_grad():
            leaf = position.detach().requires_grad_()
            likelihood = self.function(leaf)
            if self.precision is not None:
                prior = gaussian(leaf, self.precision)
            elif self.prior is not None:
                prior = self.prior(leaf)
            else:
                prior = torch.zeros_like(likelihood)
            total = (likelihood if self.beta is None else self.beta * likelihood) + prior
            (gradient,) = torch.autograd.grad(total.sum(), [leaf], materialize_grads=True)
        return Evaluation(likelihood.detach().double(), prior.detach().double(), gradient)


def gaussian(position: Tensor, precision: Tensor) -> Tensor:
    """Log densities of centred Gaussians: `[chains]`, in float64."""
    q, tau = position.double(), precision.double()
    return 0.5 * ((tau / (2 * math.pi)).log() - tau * q.square()).sum(-1)


class ModelDensity(Density):
    """The posterior of a model: likelihood of all data, prior of the random weights (points and buffers stay where they are).

    The network runs in evaluation mode, so that the density is one function. `chains` are evaluated together; where vmap cannot
    stack the network, one after the other. Memory: `chunk` examples × chains at a time.
    """

    mode = "eager"  # how its kernels run
    BUDGET = {"cpu": 2**28, "cuda": 2**32}  # noqa: RUF012  bytes of activations at a time

    def __init__(self, model: Model, data: Data, chains: int, chunk: int | None = None):
        self.model, self.data, self.chains = model, data, chains
        self.like = {name: model.initial[name] for name in model.random}
        self.rest = {**{name: model.initial[name] for name in model.points}, **model.buffers}
        self.size = tree.num_elements(self.like)
        first = next(iter(self.like.values()))
        self.dtype, self.device = first.dtype, first.device
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the network's weights are {self.dtype}: energies of chains need float32 or float64; pass network.float()"
            )
        self.notes = {"stackable": True}  # shared by all that `bound` gives
        self.closed: Tensor | None = None  # [P], float64: where the prior is a centred Gaussian
        self.prior_constant = 0.0
        known = None if model.points else model.prior.precisions(self.like)
        if known is not None:
            wide = {name: torch.full_like(weight, known[name], dtype=torch.float64) for name, weight in self.like.items()}
            self.closed = tree.flatten(wide)
            # at 0 the quadratic part is gone: what is left is the normaliser
            zeros = {name: torch.zeros_like(weight) for name, weight in wide.items()}
            self.prior_constant = float(model.prior.log_prob(zeros))
        self.chunk = chunk or self._choose_chunk()

    # -----------------------------------------------------------------------------------------------------------------
    # Names ↔ positions
    def flatten(self, weights: Weights) -> Tensor:
        return tree.flatten({name: weights[name] for name in self.like}, batch_dims=1)

    def named(self, position: Tensor) -> Weights:
        return tree.unflatten(position, self.like)

    # -----------------------------------------------------------------------------------------------------------------
    def evaluate(self, position: Tensor) -> Evaluation:
        """One pass over the data, a chunk at a time; the prior's gradient in closed form where it is Gaussian."""
        likelihood: Tensor | float = 0.0
        gradient: Tensor | float = 0.0
        for batch in self._batches():
            # the forward pass is vmapped, and one backward pass runs over all chains: Σ_c v_c has the gradient of each v_c
            with torch.enable_grad():
                leaf = position.detach().requires_grad_()
                value = self._each_chain(functools.partial(self.log_likelihood_of, batch=batch), self.named(leaf))
                (part,) = torch.autograd.grad(value.sum(), [leaf])
            likelihood, gradient = likelihood + value.detach(), gradient + part
        return self.combined(likelihood, gradient, *self._prior(position), self.beta)  # type: ignore[arg-type]

    def densities(self, position: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.named(position)
        likelihood: Tensor | float = 0.0
        with torch.no_grad():
            for batch in self._batches():
                likelihood = likelihood + self._each_chain(functools.partial(self.log_likelihood_of, batch=batch), weights)
            prior, _ = self._prior(position, gradient=False)
        scale = 1.0 / self.model.temperature
        return likelihood * scale, prior * scale  # type: ignore[return-value]

    def combined(self, likelihood: Tensor, gradient: Tensor, prior: Tensor, slope: Tensor, beta: Tensor | None) -> Evaluation:
        """The `Evaluation` of these sums and their gradients, at these powers and at the temperature of the model."""
        weighted = gradient if beta is None else beta.unsqueeze(-1).to(self.dtype) * gradient
        total, scale = weighted + slope, 1.0 / self.model.temperature
        if scale == 1.0:
            return Evaluation(likelihood, prior, total)
        return Evaluation(likelihood * scale, prior * scale, total * scale)

    def log_likelihood_of(self, weights: Weights, batch: Batch) -> Tensor:
        """The log-likelihood of a batch at one chain's weights, summed over examples in float64: 0-d."""
        each = self.model.log_likelihood({**self.rest, **weights}, batch)
        return (each if batch.weight is None else each * batch.weight).sum(dtype=torch.float64)

    def _each_chain(self, function: Callable[[Weights], Any], weights: Weights) -> Any:
        """The function of each chain's weights: by vmap, or one by one where vmap has no rule for the network."""
        count, failure = len(next(iter(weights.values()))), ""
        if self.notes["stackable"] and count > 1:
            try:
                return torch.func.vmap(function)(weights)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError, ValueError) as error:
                failure = str(error)[:160]
        results = tree.stack([function(tree.index(weights, c)) for c in range(count)])
        if failure:  # and one by one it works: vmap is at fault, not the network
            log.warning("chains run one after the other: vmap cannot stack this network (%s)", failure)
            self.notes["stackable"] = False
        return results

    def _prior(self, position: Tensor, gradient: bool = True) -> tuple[Tensor, Tensor]:
        """Log prior `[chains]` in float64 and its gradient `[chains, P]`."""
        if self.precision is not None:
            return gaussian(position, self.precision), -self.precision.to(self.dtype) * position
        if self.closed is not None:
            square = (self.closed * position.double().square()).sum(-1)
            return self.prior_constant - 0.5 * square, -self.closed.to(self.dtype) * position
        fixed = {name: self.model.initial[name] for name in self.model.points}

        def one(weights: Weights) -> Tensor:
            # log priors of many weights are sums whose differences decide: float64
            named = {name: value.double() for name, value in {**fixed, **weights}.items()}
            return self.model.prior.log_prob({name: named[name] for name in self.model.initial})

        with torch.set_grad_enabled(gradient):
            leaf = position.detach().requires_grad_(gradient)
            value = self._each_chain(one, self.named(leaf))
            # a flat prior has no graph
            slope = torch.autograd.grad(value.sum(), [leaf])[0] if gradient and value.requires_grad else position * 0
        return value.detach(), slope

    # -----------------------------------------------------------------------------------------------------------------
    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.data, ArrayData) and self.chunk >= self.data.num_data:
            yield self.data.batch
        else:
            yield from self.data.chunks(self.chunk)

    def _choose_chunk(self) -> int:
        example, held = next(iter(self.data.chunks(1))), 0

        def count(_: nn.Module, __: Any, output: Any) -> None:
            nonlocal held
            held += sum(leaf.numel() for leaf in tree.tensors(output))

        # outputs of the innermost modules are about what a backward pass keeps
        leaves = [m for m in self.model.network.modules() if not any(True for _ in m.children())]
        handles = [m.register_forward_hook(count) for m in leaves]
        try:
            with torch.no_grad():
                self.model.outputs({**self.model.initial, **self.model.buffers}, example.x)
        finally:
            for handle in handles:
                handle.remove()
        each = 2 * max(held, 1) * self.chains * torch.finfo(self.dtype).bits // 8
        return max(1, min(self.data.num_data, self.BUDGET.get(self.device.type, 2**28) // each))


def run(method: Chains, density: Density, position: Tensor, seed: int = 0) -> dict[str, Any]:
    """Warm up and sample from `position` `[rows, P]`.

    Returns `position` `[draws, rows, P]`, all statistics `[draws, chains]`, and the last `state`. Cost: that of `warmup +
    draws · thin` transitions; no checkpoints, no bar.
    """
    kept: list[dict[str, Tensor]] = []
    # noise on a GPU comes from PyTorch's global generator
    with torch.no_grad(), random.isolated(seed, position.device):
        state = method.started(density, position, random.key(seed, device=position.device))
        for number in range(method.warmup + method.draws * method.thin):
            state, _ = method.advanced(density, state)
            if number >= method.warmup and (number - method.warmup + 1) % method.thin == 0:
                about = method.about(state)
                joint = about["log_likelihood"] + about["log_prior"]
                kept.append({"position": state.position, "log_joint": joint, **about})
    return {name: torch.stack([draw[name] for draw in kept]) for name in kept[0]} | {"state": state}
