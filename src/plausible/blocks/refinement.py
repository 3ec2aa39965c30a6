"""Draws pushed towards the posterior by a few steps of a sampler, whose densities stay tractable.

    r ← r + ½ε σ∘∇U,   w ← w + ε σ∘r,   r ← r + ½ε σ∘∇U        U(w) = log p(w, D),  r ~ N(0, I) anew for each refinement

One such step is a Langevin step, w + ½ε²σ²∘∇U + εσ∘r, and several are a trajectory of Hamiltonian Monte Carlo without its
acceptance. Each assignment is a shear, so the map (w, r) ↦ (w', r') keeps volumes, whatever the gradient is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import ArrayData, Batch, Data, StreamData
from plausible.core.draws import ROWS, at_once
from plausible.core.model import Model
from plausible.core.transforms import transformed, value_and_gradient
from plausible.core.weights import Weights, index, num_elements, stack

# weights → log p(w, D), its gradient, and the network's buffers afterwards. The value is 0-d, or [S] for S stacked draws
Slope = Callable[[Weights], tuple[Tensor, Weights, Weights]]


class Trajectory(NamedTuple):
    """Where draws and momenta r'_t arrived, log p(w, D) there, Σ_t log N(r'_t) − log N(r_t), and the network's buffers."""

    weights: Weights
    momenta: list[Weights]
    value: Tensor
    ratio: Tensor
    buffers: Weights


def refine(
    slope: Slope, weights: Weights, scales: Weights, momenta: Sequence[Weights], step_size: Tensor, leapfrog: int
) -> Trajectory:
    """T = len(momenta) refinements of `leapfrog` steps each, from w_0 to w_T; gradients flow through all of it.

    With w_0 ~ q₀ and r_t ~ N(0, I), and r'_t where r_t arrives,

        W = p(w_T, D) Π_t N(r'_t) / (q₀(w_0) Π_t N(r_t)),   E W = p(D),   E log W ≤ log p(D),

    since (w_0, r_1 … r_T) ↦ (w_T, r'_1 … r'_T) keeps volumes (Salimans, Kingma & Welling 2015). With one leapfrog step N(r'_t)
    is the density of the reverse Langevin kernel. Stacked draws have a leading axis in `weights` and `momenta`. Cost: 1 +
    T·`leapfrog` gradients.
    """
    value, grads, buffers = slope(weights)
    ratio = torch.zeros_like(value)
    # in units of the guess: one step size serves weights of all scales
    moves = {name: step_size * scale for name, scale in scales.items()}
    ends = []
    for start in momenta:
        r = start
        for _ in range(leapfrog):
            r = {name: p + 0.5 * moves[name] * grads[name] for name, p in r.items()}
            weights = {name: w + moves[name] * r[name] for name, w in weights.items()}
            value, grads, buffers = slope(weights)
            r = {name: p + 0.5 * moves[name] * grads[name] for name, p in r.items()}
        ends.append(r)
        ratio = ratio + 0.5 * (_squares(start, value) - _squares(r, value))
    return Trajectory(weights, ends, value, ratio, buffers)


def log_initial(standard: Mapping[str, Tensor], scales: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Log q₀(w_0) = Σ log N(w_0; μ, σ²) at w_0 = μ + σ∘z, from z and σ: of the shape of `like`."""
    volume = torch.stack([scale.log().sum() for scale in scales.values()]).sum()
    return -0.5 * _squares(standard, like) - volume - 0.5 * math.log(2 * math.pi) * num_elements(scales)


def _squares(weights: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """|w|², of the shape of `like`: summed over all axes but those that count draws."""
    return torch.stack([w.square().reshape(*like.shape, -1).sum(-1) for w in weights.values()]).sum(0).to(like.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Slopes
def slope_in_training(model: Model, points: Weights, buffers: Weights, batch: Batch) -> Slope:
    """The slope of one draw inside an objective: its gradient can be differentiated once more.

    By autograd that keeps its graph, or by nested `torch.func.grad` where the step is compiled or stacked. The network runs in
    training mode, each time from the same buffers.
    """

    def joint(weights: Weights) -> tuple[Tensor, Weights]:
        moving = {name: value.clone() for name, value in buffers.items()}
        return model.log_joint({**weights, **points, **moving}, batch, train=True), moving

    def slope(weights: Weights) -> tuple[Tensor, Weights, Weights]:
        if transformed():
            grads, (value, moving) = torch.func.grad_and_value(joint, has_aux=True)(weights)
            return value, grads, moving
        value, moving = joint(weights)
        grads = torch.autograd.grad(value, list(weights.values()), create_graph=True, materialize_grads=True)
        return value, dict(zip(weights, grads)), moving

    return slope


def slope_of_draws(model: Model, fixed: Weights, batches: Callable[[], Iterable[Batch]], *, each: bool = False) -> Slope:
    """The slope of stacked draws, the network in evaluation mode: values [S] in float64.

    `batches()` are the parts of the data, whose log-likelihoods are added up; with `each`, one batch with a leading axis that
    has for each draw rows of its own, scaled by N/B. Draws run one by one where vmap has no rule for the network.
    """

    def likelihood(weights: Weights, batch: Batch) -> tuple[Tensor, tuple[()]]:
        everything = {**weights, **fixed}
        if each:
            return model.scaled_log_likelihood(everything, batch), ()
        logs = model.log_likelihood(everything, batch)
        return (logs if batch.weight is None else logs * batch.weight).sum(), ()

    def prior(weights: Weights) -> tuple[Tensor, tuple[()]]:
        return model.log_prior({**weights, **fixed}), ()

    def over_draws(function: Any, weights: Weights, *batch: Batch) -> tuple[Tensor, Weights]:
        axes = [Batch(*(None if part is None else 0 for part in b)) if each else None for b in batch]  # type: ignore[arg-type]
        one = lambda w, *b: value_and_gradient(function, w, *b)  # noqa: E731
        try:
            value, _, grads = torch.func.vmap(one, in_dims=(0, *axes), randomness="different")(weights, *batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError):
            rows = lambda s: (index(b, s) if each else b for b in batch)  # noqa: E731
            count = len(next(iter(weights.values())))
            value, _, grads = stack([one(index(weights, s), *rows(s)) for s in range(count)])
        return value.double(), grads

    def slope(weights: Weights) -> tuple[Tensor, Weights, Weights]:
        value, grads = over_draws(prior, weights)
        for batch in batches():
            more, slopes = over_draws(likelihood, weights, batch)
            value, grads = value + more, {name: g + grads[name] for name, g in slopes.items()}
        return value / model.temperature, {name: g / model.temperature for name, g in grads.items()}, {}

    return slope


# ---------------------------------------------------------------------------------------------------------------------
# Draws
COPIES = 4  # how many times more memory an example takes with its gradients and momenta than in a forward pass


class Guess(NamedTuple):
    """q₀ = Π N(means, scales²) by name, and the sampler: step size ε in units of the scales, refinements, leapfrog steps."""

    means: Weights
    scales: Weights
    step_size: float
    refinements: int
    leapfrog: int


class GroupSlopes:
    """Slopes for the draws of one group: on all data, or for each draw on a batch of its own.

    A loader's batches follow each other; `taken` says how many were, so that a later group can be asked for anew.
    """

    def __init__(self, model: Model, fixed: Weights, data: Data, *, whole: bool, size: int | None = None):
        self.model, self.fixed, self.data, self.whole, self.size = model, fixed, data, whole, size
        self._stream: Iterator[Batch] = iter(())
        self.taken = 0

    def group(self, draws: int, elements: int) -> int:
        if not self.whole and isinstance(self.data, StreamData):
            return 1
        # on all data, chunks bound the memory of rows, so that only the weights count here
        rows = 1 if self.whole or self.size is None else self.size
        return min(draws, at_once(elements, rows, copies=COPIES))

    def __call__(self, count: int, stream: torch.Generator) -> Slope:
        if self.whole:
            size = max(64, ROWS // (COPIES * count))
            return slope_of_draws(self.model, self.fixed, lambda: self.data.chunks(size))
        if isinstance(self.data, ArrayData):
            rows = torch.randint(self.data.num_data, (count, self.size or 1), generator=stream)
            batch = self.data.rows(rows.to(self.data.batch.y.device))
        else:
            batch = tree.tree_map(lambda part: part.unsqueeze(0), self._next())
        return slope_of_draws(self.model, self.fixed, lambda: [batch], each=True)

    def _next(self) -> Batch:
        assert isinstance(self.data, StreamData)
        batch = next(self._stream, None)
        if batch is None:
            # the loader is through: begin another pass
            self._stream = self.data.passes()
            batch = next(self._stream)
        self.taken += 1
        return batch

    def wind(self, taken: int) -> None:
        """To where so many batches of a loader were taken."""
        if self.whole or isinstance(self.data, ArrayData) or self.taken == taken:
            return
        self._stream, self.taken = iter(()), 0
        while self.taken < taken:
            self._next()


@torch.no_grad()
def refined_group(
    guess: Guess, slopes: GroupSlopes, count: int, seed: int, number: int = 0, further: int = 0
) -> tuple[Weights, Tensor]:
    """`count` refined draws, stacked, and the log W of each, in float64: a function of the seed and the number of the group.

    `further` refinements follow those of the bound: Metropolis-adjusted on all data, as they are on batches.
    """
    first = next(iter(guess.means.values()))
    step_size = torch.full((), guess.step_size, dtype=first.dtype, device=first.device)
    stream = random.generator(seed, 13, number)

    def normals() -> Weights:
        noise = lambda mean: torch.randn((count, *mean.shape), generator=stream, dtype=mean.dtype).to(mean.device)  # noqa: E731
        return {name: noise(mean) for name, mean in guess.means.items()}

    with random.isolated(seed + number, first.device):  # for networks that draw numbers themselves, and for loaders
        slopes.wind(number * (1 + further))
        standard = normals()
        current = {name: mean + guess.scales[name] * standard[name] for name, mean in guess.means.items()}
        momenta = [normals() for _ in range(guess.refinements)]
        end = refine(slopes(count, stream), current, guess.scales, momenta, step_size, guess.leapfrog)
        log_weights = (end.value + end.ratio - log_initial(standard, guess.scales, end.value)).cpu()
        current, value = end.weights, end.value
        for _ in range(further):
            end = refine(slopes(count, stream), current, guess.scales, [normals()], step_size, guess.leapfrog)
            level = torch.rand(count, generator=stream, dtype=torch.float64).log().to(value.device)
            accept = level < end.value + end.ratio - value  # min{1, exp(H − H')}: a draw that is not finite stays
            # densities on batches are noisy: a test with them would not be Metropolis's
            accept = accept if slopes.whole else torch.ones_like(accept)
            value = torch.where(accept, end.value, value)
            for name, old in current.items():
                current[name] = torch.where(accept.reshape(-1, *[1] * (old.ndim - 1)), end.weights[name], old)
    return current, log_weights.double()
