"""Trajectories that stop when they turn round: the doubling trees of NUTS, for all chains at once and without recursion.

    straight(i … k):   p♯_i · ρ > 0  and  p♯_k · ρ > 0,     ρ = p_i + … + p_k,   p♯ = M⁻¹p

A trajectory doubles, forwards or backwards in time, until it or a half of a half of … of it is not straight (Hoffman and
Gelman 2014; Betancourt 2017). Doubling j takes 2^j leapfrogs of every chain that is still going, in blocks of up to `LENGTH`
that a compiled kernel can run. All products p♯_i · ρ that a block's own subtrees ask for are differences of prefix sums of one
Gram matrix G_ik = p♯_i · p_k; blocks are then joined pairwise, like the digits of a binary counter, so that memory is one block
and five numbers a weight for each level. Where the density has machine code for all of it (trees.cpp), that is used.

Related vectors are kept in one tensor, `[chains, parts, P]`, so that few operations are needed beside the leapfrogs: a span
(momentum and velocity at its first state, at its last, sum of momenta), an end of a tree (position, momentum, gradient, velocity).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Point
from plausible.blocks.chains.integrators import DIVERGENT, Diagonal, Metric, integrate

LENGTH = 64  # leapfrogs of a block, at most
BUDGET = {"cpu": 2**28, "cuda": 2**31}  # bytes of a block, for all chains
DROPPING = 16  # leapfrogs saved from which it pays to leave rows out


class Explored(NamedTuple):
    """The state chosen, and `[chains]` in float64 each: mean acceptance, divergence (0/1), leapfrogs, doublings."""

    position: Tensor
    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    energy: Tensor
    acceptance: Tensor
    divergent: Tensor
    leapfrogs: Tensor
    depth: Tensor


def block_length(position: Tensor) -> int:
    """The largest power of 2 up to `LENGTH` whose path (four numbers a weight) and Gram matrices fit into the budget."""
    # longer blocks mean fewer calls, and more leapfrogs past the point where a tree turns
    budget = BUDGET.get(position.device.type, BUDGET["cpu"])
    length = LENGTH
    while length > 1 and length * (4 * position.numel() * position.element_size() + 20 * len(position) * length) > budget:
        length //= 2
    return length


def width(max_depth: int, length: int) -> int:
    """How many uniform numbers `explore` needs for each chain."""
    return sum(2 + 2 * max(1, 2**depth // length) for depth in range(max_depth))


def explore(
    density: Density, metric: Metric, start: Point, step: Tensor, max_depth: int, uniform: Tensor, length: int | None = None
) -> Explored:
    """One trajectory of each chain from `start` with step sizes `[chains]`, and a state of it drawn by e^(−H).

    Inside a new half states are drawn by their weights; between the old tree and a new half the new one is preferred, with
    min(1, Σ_new/Σ_old) (Betancourt 2017). `uniform` `[chains, width(max_depth, length)]` decides: for each doubling, in this
    order, its direction (below ½: backwards), that choice, and two numbers for each block of `length` leapfrogs (a power of 2;
    None: `block_length`). Cost: the leapfrogs, and P · `length` multiplications for each.
    """
    length = length or block_length(start.position)
    if isinstance(metric, Diagonal) and hasattr(density, "trees"):  # the same by machine code
        grown = density.trees(start, step, metric.inverse_mass, max_depth, uniform, length)
        if grown is not None:
            return Explored(*grown)
    forest = _Forest(density, metric, start, step)
    column = 0
    for depth in range(max_depth):
        size = min(2**depth, length)
        last = column + 2 + 2 * (2**depth // size)
        forest.grow(uniform[:, column:last], size, 2**depth // size)
        column = last
        if not forest.alive:
            break
    return forest.explored()


class _Forest:
    """The trees of all chains while they grow.

    Rows are the chains that are still going, and others where dropping them does not pay. `tally` has a row for every chain:
    Σ min(1, e^(H₀ − H)), the states that it counts, divergences, leapfrogs, doublings.
    """

    def __init__(self, density: Density, metric: Metric, start: Point, step: Tensor):
        self.whole, self.density, self.metric = (density, metric), density, metric
        velocity = metric.velocity(start.momentum)
        self.energy = metric.kinetic(start.momentum) - density.value(start.log_likelihood, start.log_prior)
        self.chain = torch.arange(len(self.energy), device=self.energy.device)
        end = torch.stack([start.position, start.momentum, start.gradient, velocity], 1)
        self.ends = torch.stack([end, end], 1)  # [rows, 2, 4, P]: the backward end, the forward end
        self.total = start.momentum
        self.vectors = end[:, ::2].contiguous()  # position and gradient of the state chosen so far
        self.numbers = torch.stack([start.log_likelihood, start.log_prior, self.energy], 1)  # its densities and energy
        self.log_weight = torch.zeros_like(self.energy)  # log Σ e^(H₀ − H)
        self.step = step
        self.going = torch.ones_like(self.chain, dtype=torch.bool)
        self.alive = True
        self.chosen = self.vectors.clone(), self.numbers.clone()  # of all chains, written when rows are dropped
        self.tally = self.energy.new_zeros(len(self.energy), 5)

    ROWS = ("chain", "ends", "total", "vectors", "numbers", "log_weight", "energy", "step", "going")

    def explored(self) -> Explored:
        self._write()
        vectors, numbers = self.chosen
        accepted, states, divergent, leapfrogs, depth = self.tally.unbind(1)
        (position, gradient), (likelihood, prior, energy) = vectors.unbind(1), numbers.unbind(1)
        acceptance = accepted / states.clamp(min=1)
        return Explored(position, gradient, likelihood, prior, energy, acceptance, divergent, leapfrogs, depth)

    def _write(self) -> None:
        for whole, part in zip(self.chosen, (self.vectors, self.numbers)):
            whole[self.chain] = part

    def _drop(self, ahead: int) -> Tensor | None:
        """Leave out the rows of chains that have stopped, where that saves work: on the CPU, with `ahead` leapfrogs to come."""
        lost = len(self.going) - int(self.going.sum())
        # the one question to the device for each block
        self.alive = lost < len(self.going)
        if not self.alive or self.going.device.type != "cpu" or lost * ahead < DROPPING:
            return None
        self._write()
        rows = self.going.nonzero().squeeze(-1)
        for name in self.ROWS:
            setattr(self, name, getattr(self, name)[rows])
        density, metric = self.whole
        beta = None if density.beta is None else density.beta[self.chain]
        precision = density.precision
        precision = precision[self.chain] if precision is not None and precision.ndim == 2 else None
        self.density, self.metric = density.bound(beta=beta, precision=precision), metric.rows(self.chain)
        return rows

    def grow(self, noise: Tensor, size: int, blocks: int) -> None:
        """One doubling of all trees that are still going: a new half of `blocks` blocks of `size` leapfrogs, at one of their ends.

        Then a state of the old tree or of the new half is chosen, and the whole is checked for turning back. `noise` are this
        doubling's columns of `uniform`.
        """
        noise = noise[self.chain]
        ahead = (noise[:, 0] >= 0.5).long()
        row = torch.arange(len(ahead), device=ahead.device)
        # the end at which the tree grows, different from chain to chain
        near = self.ends[row, ahead]
        # backwards in time is a step of negative size: all chains run in one batch
        signed = (2 * ahead - 1) * self.step
        pieces: list[Tensor] = []  # spans, [rows, 5, P]
        half_vectors, half_numbers = self.vectors, self.numbers
        log_weight = torch.full_like(self.log_weight, -torch.inf)
        last = near
        for block in range(blocks):
            point = Point(last[:, 0], last[:, 1], half_numbers[:, 0], half_numbers[:, 1], last[:, 2])
            path = integrate(self.density, self.metric, point, signed, size, keep=True)
            velocity = self.metric.velocity(path.momentum)
            kinetic = 0.5 * (path.momentum * velocity).sum(-1, dtype=torch.float64)
            energy = kinetic - self.density.value(path.log_likelihood.mT, path.log_prior.mT).mT
            gain = (self.energy.unsqueeze(-1) - energy).nan_to_num(nan=-torch.inf)  # H₀ − H: [rows, size]
            ran, stop = first_stop(path.momentum, velocity, gain)
            self._count(gain, ran, stop)
            self.going = self.going & (stop == size)

            weight = gain.logsumexp(-1)
            log_weight = torch.logaddexp(log_weight, weight)
            place = _draw(gain - weight.unsqueeze(-1), noise[:, 2 + 2 * block])
            vectors = torch.stack([path.position[row, place], path.gradient[row, place]], 1)
            numbers = torch.stack([path.log_likelihood, path.log_prior, energy], -1)[row, place]
            if block:
                # multinomial by reservoir: one block after the other, none is kept
                taken = noise[:, 3 + 2 * block].log() < weight - log_weight
                vectors, numbers = _where(taken, vectors, half_vectors), _where(taken, numbers, half_numbers)
            half_vectors, half_numbers = vectors, numbers

            last = torch.stack([path.position[:, -1], path.momentum[:, -1], path.gradient[:, -1], velocity[:, -1]], 1)
            span = torch.stack([path.momentum[:, 0], velocity[:, 0], last[:, 1], last[:, 3], path.momentum.sum(1)], 1)
            number = block + 1
            while number % 2 == 0:  # as many pieces are joined as a binary counter carries
                span, straight = joined(pieces.pop(), span)
                self.going, number = self.going & straight, number // 2
            pieces.append(span)
            rows = self._drop((blocks - block - 1) * size)
            if not self.alive:
                return
            if rows is not None:
                noise, ahead, near, signed, half_vectors, half_numbers, log_weight, last, *pieces = (
                    part[rows] for part in (noise, ahead, near, signed, half_vectors, half_numbers, log_weight, last, *pieces)
                )
                row = row[: len(rows)]

        self.tally[self.chain, 4] += self.going
        # a half that turned inside is thrown away whole, or the law would not be invariant
        taken = self.going & (noise[:, 1].log() < log_weight - self.log_weight)
        self.vectors, self.numbers = (_where(taken, half_vectors, self.vectors), _where(taken, half_numbers, self.numbers))
        self.log_weight = torch.logaddexp(self.log_weight, log_weight)
        far = self.ends[row, 1 - ahead]
        whole, straight = joined(torch.stack([far[:, 1], far[:, 3], near[:, 1], near[:, 3], self.total], 1), pieces[-1])
        self.total = whole[:, 4]
        self.ends[row, ahead] = last
        self.going = self.going & straight
        self._drop(2 * blocks * size)

    def _count(self, gain: Tensor, ran: Tensor, stop: Tensor) -> None:
        """Acceptance counts up to the stop, as recursion would have it; leapfrogs as they were taken."""
        size = gain.shape[1]
        seen = torch.arange(size, device=gain.device) <= stop.unsqueeze(-1)
        going = self.going.double()
        accepted = torch.where(seen, gain.clamp(max=0).exp(), 0.0).sum(1)
        counted = torch.stack([accepted, (stop + 1).clamp(max=size).double(), ran.double(), torch.full_like(going, size)], 1)
        self.tally[self.chain, :4] += going.unsqueeze(-1) * counted


# ---------------------------------------------------------------------------------------------------------------------
# Turning round
def joined(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two spans `[chains, 5, P]`, one walked after the other, and whether the whole is straight: `[chains]`.

    Beside the whole, each span is looked at with the nearest state of the other, which stops trajectories that are whole
    periods long, as Stan does since 2.21.
    """
    sums = torch.stack([one[:, 4] + other[:, 4], one[:, 4] + other[:, 0], other[:, 4] + one[:, 2]], 1)
    products = torch.cat([one[:, 1:4:2], other[:, 1:4:2]], 1) @ sums.mT  # velocities at the four ends, with three sums
    straight = (products.flatten(1)[:, _asked(one.device)] > 0).all(1)
    return torch.cat([one[:, :2], other[:, 2:4], sums[:, :1]], 1), straight


@functools.lru_cache
def _asked(device: torch.device) -> Tensor:
    """Which of the twelve products (four ends × three sums) `joined` looks at, as indices into the flattened matrix.

    The first and the last end with the sum of all momenta; the first and the third with that of the first span and the state after
    it; the second and the last with that of the other span and the state before it.
    """
    return torch.tensor([end * 3 + total for end, total in ((0, 0), (3, 0), (0, 1), (2, 1), (1, 2), (3, 2))], device=device)


@functools.lru_cache
def _questions(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """All products p♯_i · (p_low + … + p_{high−1}) by which the subtrees of a block of `size` states are checked for turning.

    For each product the places of its two prefix sums in the flattened matrix of `first_stop`, and the last state of its subtree.
    """
    questions, span = [], 2
    while span <= size:
        for low in range(0, size, span):
            middle, high = low + span // 2, low + span
            asked = [(low, low, high), (high - 1, low, high)]
            if span > 2:
                asked += [(low, low, middle + 1), (middle, low, middle + 1)]
                asked += [(middle - 1, middle - 1, high), (high - 1, middle - 1, high)]
            questions += [(i * (size + 1) + b, i * (size + 1) + a, high - 1) for i, a, b in asked]
        span *= 2
    return tuple(torch.tensor(questions, device=device).unbind(1))  # type: ignore[return-value]


def first_stop(momentum: Tensor, velocity: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Where in a block, `[chains, size, P]`, recursion would have stopped: at a divergence, or at the end of a subtree that turns.

    Returns whether the stop is a divergence, and the index of the state, `size` where there is none: `[chains]` each.
    """
    size = gain.shape[1]
    ran = torch.where(gain < -DIVERGENT, torch.arange(size, device=gain.device), size).amin(1)
    if size == 1:
        return ran < size, ran
    # one product answers all questions of all subtrees in the block
    gram = velocity @ momentum.mT
    # differences of prefix sums cancel: float64
    sums = torch.nn.functional.pad(gram.double().cumsum(-1), (1, 0)).flatten(1)
    high, low, last = _questions(size, gain.device)
    turned = torch.where(sums[:, high] - sums[:, low] > 0, size, last).amin(1)
    return (ran < size) & (ran <= turned), torch.minimum(ran, turned)


# ---------------------------------------------------------------------------------------------------------------------
# Rows
def _draw(log_probability: Tensor, level: Tensor) -> Tensor:
    """An index by its probability: `[rows]` from `[rows, size]` and uniform numbers `[rows]`."""
    sums = log_probability.exp().cumsum(-1)
    return (sums <= (level * sums[:, -1]).unsqueeze(-1)).sum(1).clamp(max=log_probability.shape[1] - 1)


def _where(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (one.ndim - 1)), one, other)
