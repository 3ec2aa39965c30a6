"""Which method for which problem: what each would take, in the order in which they are tried. Measured costs, and never a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plausible.core.words import plural
from plausible.engine.method import Method
from plausible.methods.chains.base import Adapting
from plausible.methods.chains.hmc import HMC
from plausible.methods.chains.nuts import NUTS
from plausible.methods.ensembles.ensemble import Ensemble
from plausible.methods.laplace.laplace import Laplace
from plausible.methods.natural.ivon import IVON
from plausible.methods.points.map import MAP

SECONDS = 60.0
"""The time budget where none is given: about what people wait for without leaving their desk."""
SHARE = 0.6
"""The part of the budget that estimates may fill, since they are rough."""

# Measured on two CPU cores by `python -m benchmarks.mcmc` and `python -m experiments defaults`
NATIVE = 1.5e-10  # seconds for a gradient of one chain, for each row and each multiplication of its forward pass, on one thread
TENSORS = 4e-10  # the same where a network runs as PyTorch tensors, on all threads
GPU = 4e-14
CALL, GPU_CALL = 1.5e-3, 0.5e-3  # what a gradient of all chains costs beside its arithmetic, where it is no machine code
STEP, GPU_STEP = 8e-4, 1.5e-4  # what a training step costs beside its arithmetic
STACKED = 3e-3  # the same of several members together: stacking them has a cost of its own

CHAINS = 4
LARGEST = 20_000  # weights that chains are asked to explore
FEWEST, MOST = 400, 1500  # transitions of each chain, of which the first half adapts
TREE = 256  # gradients of a transition whose length is found: between 100 and 500 on small tables
SHORTEST, LONGEST = 12, 50  # leapfrogs of a transition
PER_CHAIN = 250  # draws that are kept of each chain
EPOCHS, STEPS, LEAST_EPOCHS = 200, 2000, 5
MEMBERS = 5


@dataclass(frozen=True)
class Problem:
    """What the rule looks at.

    `products` are the multiplications of a forward pass for one example, `perceptron` says that chains run as machine code,
    `resident` that the data are arrays, `moving` that the network has buffers that training updates (batch norm).
    """

    rows: int
    weights: int
    products: int
    outputs: int = 1
    perceptron: bool = True
    resident: bool = True
    moving: bool = False
    gpu: bool = False
    threads: int = 2
    fresh: bool = True

    @property
    def arithmetic(self) -> float:
        """Seconds of a forward and backward pass over one example."""
        return 3 * self.products * (GPU if self.gpu else TENSORS / max(1, self.threads) / 3 * 2)


class Candidate(NamedTuple):
    """A method, what it is estimated to take in seconds and bytes, why it would be chosen, and what is against it ("": nothing)."""

    method: Method
    seconds: float
    memory: float
    reason: str
    against: str = ""


def candidates(problem: Problem, seconds: float = SECONDS, memory: float = math.inf) -> list[Candidate]:
    """All that the rule knows, the first without anything against it being its choice; those that do not fit come after."""
    rules: Sequence[Callable[[Problem, float], Candidate]] = (chains, ensemble, last_layer, variational, quick)
    found = [_within(rule(problem, SHARE * seconds), seconds, memory) for rule in rules]
    return sorted(found, key=lambda one: bool(one.against))  # stable: by the order of the rules within each


def choose(problem: Problem, seconds: float = SECONDS, memory: float = math.inf) -> Candidate:
    """The first that fits; where none does, the one that takes least."""
    every = candidates(problem, seconds, memory)
    return every[0] if not every[0].against else min(every, key=lambda one: one.seconds)


def _within(one: Candidate, seconds: float, memory: float) -> Candidate:
    if not one.against and one.seconds > seconds:
        return one._replace(against=f"about {duration(one.seconds)} is more than {duration(seconds)}")
    if not one.against and one.memory > memory:
        return one._replace(against=f"about {one.memory / 2**30:,.1f} GiB is more than {memory / 2**30:,.1f} GiB")
    return one


def chains(problem: Problem, budget: float) -> Candidate:
    """Markov chains over all data: NUTS where its long trajectories fit, else as many shorter ones as do, and none if too few."""
    if problem.perceptron and not problem.gpu:
        # one thread for each chain
        each = (NATIVE * problem.rows * problem.products + 4e-6) * CHAINS / min(CHAINS, max(1, problem.threads))
    else:
        each = (GPU_CALL if problem.gpu else CALL) + CHAINS * problem.rows * problem.arithmetic
    gradients = budget / each
    if gradients >= MOST * TREE:
        # a depth that cannot take much longer than was said
        depth = 10 if gradients >= MOST * 1024 else 9
        half = MOST // 2
        free: Adapting = NUTS(draws=PER_CHAIN, warmup=half, chains=CHAINS, thin=half // PER_CHAIN, max_depth=depth)
        return _over_all_data(problem, free, MOST * TREE * each)
    # long trajectories are what a transition is worth; only where time is short are both cut
    leapfrogs = int(min(LONGEST, max(SHORTEST, gradients / FEWEST)))
    transitions = int(min(MOST, gradients / leapfrogs))
    draws = max(1, transitions // 2)
    thin = max(1, draws // PER_CHAIN)
    method = HMC(draws=max(1, draws // thin), warmup=max(1, transitions - draws), chains=CHAINS, leapfrogs=leapfrogs, thin=thin)
    needed = max(transitions, FEWEST) * leapfrogs * each
    few = f"chains of {FEWEST} short transitions would take about {duration(needed)}" if transitions < FEWEST else ""
    return _over_all_data(problem, method, needed, few)


def _over_all_data(problem: Problem, method: Adapting, seconds: float, against: str = "") -> Candidate:
    """Chains as a candidate, with what else may be against them."""
    reason = f"{plural(problem.rows, 'row')} and {plural(problem.weights, 'weight')} are few enough for chains over all data"
    if problem.moving:
        against = "batch norm has no meaning for chains, which never see a batch"
    elif not problem.resident:
        against = "chains need all data at once, and these come from a loader"
    elif problem.weights > LARGEST:
        against = f"chains would not get around among {problem.weights:,} weights"
    return Candidate(method, seconds, 12.0 * CHAINS * (problem.weights * PER_CHAIN + problem.rows * 64), reason, against)


def _training(problem: Problem, members: int, budget: float) -> tuple[int, float]:
    """Epochs of a training that fit, at most the default, and the seconds they take; early stopping ends most of them sooner."""
    per_epoch = -(-problem.rows // 128)
    step = (GPU_STEP if problem.gpu else STACKED if members > 1 else STEP) + members * min(
        128, problem.rows
    ) * problem.arithmetic
    wished = max(EPOCHS, -(-STEPS // per_epoch))
    epochs = max(LEAST_EPOCHS, min(wished, int(budget / (per_epoch * step))))
    return epochs, epochs * per_epoch * step


def _trained(epochs: int, problem: Problem) -> MAP:
    """A training that early stopping ends, in as many epochs at most."""
    wished = max(EPOCHS, -(-STEPS // -(-problem.rows // 128)))
    if epochs >= wished:
        return MAP()
    # a loader has no rows that could be set aside
    return MAP(epochs=epochs, patience=max(3, min(20, epochs // 3)) if problem.resident else None)


def ensemble(problem: Problem, budget: float) -> Candidate:
    """Independent trainings, each ended by held-out rows."""
    epochs, needed = _training(problem, MEMBERS, budget)
    reason = f"an ensemble of {MEMBERS} trainings, ended by held-out rows, fits the time"
    against = "" if problem.fresh else "the network was trained before, and members would start anew"
    memory = 20.0 * MEMBERS * (problem.weights + 128 * problem.products**0.5)
    return Candidate(Ensemble(_trained(epochs, problem), MEMBERS), needed, memory, reason, against)


def last_layer(problem: Problem, budget: float) -> Candidate:
    """One training, or none where there was one before, and a Gaussian over the last layer by its curvature."""
    if problem.fresh:
        epochs, needed = _training(problem, 1, budget)
        mode, reason = _trained(epochs, problem), "one training fits the time, and the last layer gets a posterior"
    else:
        mode, needed, reason = None, 0.0, "the network was trained before: its last layer gets a posterior where it is"
    needed += problem.rows * problem.arithmetic * 2
    return Candidate(Laplace(where="last", mode=mode), needed, 20.0 * problem.weights, reason)


def variational(problem: Problem, budget: float) -> Candidate:
    """One training whose weights are Gaussians: for networks that no other way fits."""
    epochs, needed = _training(problem, 1, budget / 1.3)
    reason = "Gaussians over all weights at the price of one training"
    return Candidate(IVON(epochs=epochs), 1.3 * needed, 28.0 * problem.weights, reason)


def quick(problem: Problem, budget: float) -> Candidate:  # noqa: ARG001
    """The least there is: a few epochs, and the last layer."""
    epochs, needed = _training(problem, 1, 0.0)
    mode = MAP(epochs=epochs, patience=3 if problem.resident else None) if problem.fresh else None
    return Candidate(
        Laplace(where="last", mode=mode), needed if problem.fresh else 0.0, 20.0 * problem.weights, "the least that there is"
    )


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2 h`: an estimate is not worth more digits."""
    if seconds < 1:
        return "a second"
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def parse_seconds(value: float | str) -> float:
    """`60`, `"60s"`, `"2m"`, `"1.5h"` in seconds."""
    units = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
    return _parsed("time", value, units, "60s, 5m or 1h")


def parse_bytes(value: float | str) -> float:
    """`4e9`, `"4G"`, `"500M"` in bytes."""
    units = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
    units |= {f"{unit}{end}": size for unit, size in list(units.items()) if unit for end in ("b", "ib")}
    return _parsed("memory", value, units, "4G or 500M")


def _parsed(name: str, value: float | str, units: dict[str, float], example: str) -> float:
    text = str(value).strip().lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        size = float(number) * (1.0 if not unit else units[unit])
    except (ValueError, KeyError):
        size = math.nan
    if isinstance(value, bool) or not 0 < size < math.inf:
        raise ValueError(f"{name} must be a positive number, or one with a unit such as {example}, got {value!r}")
    return size
