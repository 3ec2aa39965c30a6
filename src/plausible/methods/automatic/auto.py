"""Auto: look at the problem, choose a method, and with it the likelihood and the prior that nobody gave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from plausible.blocks.chains.density import ModelDensity
from plausible.blocks.kernels.native import Unsuitable, perceptron
from plausible.blocks.kernels.native_source import buildable
from plausible.core.data import ArrayData, Data, num_rows
from plausible.core.likelihoods import Gaussian, Likelihood, StudentT
from plausible.core.memory import available
from plausible.core.model import Model
from plausible.core.priors import Default, Prior, neal
from plausible.core.serialise import register
from plausible.core.weights import num_elements, select
from plausible.engine.method import Method, Stage, Traits
from plausible.methods.automatic import rule
from plausible.methods.automatic.rule import Candidate, Problem
from plausible.methods.chains.base import Adapting
from plausible.methods.laplace.laplace import Laplace

MARGIN = 0.8
"""The part of the free memory that a method may be estimated to need."""


class Choice(NamedTuple):
    """What `fit` goes on with, and why, in a line."""

    method: Method
    likelihood: Likelihood | None
    prior: Prior | None
    reason: str


@register
@dataclass(frozen=True)
class Auto(Method):
    """p(w | D) by the first of: chains, ensemble, last layer, variational, whose estimated time and memory fit

    The default of `fit`: chains with unknown precisions and noise (Neal 1996) where all data fit into them, then ensembles ended by
    held-out rows, a last layer tuned by the evidence, variational Gaussians.

    `time` is the budget in seconds, or a text such as "5m" (None: a minute); `memory` in bytes, or "4G" (None: what is free). The
    rule looks at rows, weights, arithmetic and device and never at a clock, so that the same call gives the same bits. A
    likelihood or prior that is given is taken as it is; else numbers get Student's t with learned scale and tails, standardised
    inside, and chains the priors of `priors.neal`. The result's `method` is what was chosen, `run["choice"]` says why.
    """

    time: float | str | None = None
    memory: float | str | None = None

    name: ClassVar[str] = "auto"
    traits: ClassVar[Traits] = Traits(verb="choose", noisy=True, mixed_precision=False, bias="that of the method it chooses")

    def __post_init__(self) -> None:
        if self.time is not None:
            rule.parse_seconds(self.time)
        if self.memory is not None:
            rule.parse_bytes(self.memory)

    def candidates(self, problem: Problem, free: float | None = None) -> list[Candidate]:
        """All methods that the rule knows, those that fit first, each with its estimates and with what is against it."""
        seconds = rule.SECONDS if self.time is None else rule.parse_seconds(self.time)
        room = (math.inf if free is None else MARGIN * free) if self.memory is None else rule.parse_bytes(self.memory)
        return rule.candidates(problem, seconds, room)

    def choose(
        self, model: Model, data: Data, *, fresh: bool, likelihood: Likelihood | None, prior: Prior | None, native: bool = True
    ) -> Choice:
        """What to do with this problem; `likelihood` and `prior` are those that the user gave, `fresh` that nothing was trained.

        Chains may run as machine code where `native`.
        """
        problem = problem_of(model, data, fresh=fresh, native=native)
        every = self.candidates(problem, available(model.device))
        best = every[0] if not every[0].against else min(every, key=lambda one: one.seconds)
        reason = f"{best.method.name}: {best.reason}; about {rule.duration(best.seconds)}"
        if best.against:
            reason = f"{best.method.name}: nothing fits ({best.against}), and this takes least"
        chosen = likelihood
        if likelihood is None and model.likelihood.kind == "continuous":
            chosen = default_likelihood(best.method, model)
        if prior is None:
            prior = neal() if isinstance(best.method, Adapting) else Default()
        return Choice(best.method, chosen, prior, reason)

    def stages(self) -> Sequence[Stage]:
        raise TypeError("Auto is no method by itself: fit(network, data, 'auto') chooses one; give another method its settings")

    def plan(self, num_data: int, per_epoch: int | None = None) -> Any:
        return self.stages()

    @classmethod
    def conforming(cls) -> Auto:
        return cls(time=14.0)  # for chains as tensors, which is how the suite runs them


def default_likelihood(method: Method, model: Model) -> Likelihood:
    """Student's t with learned scale and tails, which outliers do not bend; Gaussian where the evidence is to find the noise."""
    several = len(model.output_shape) == 1 and model.output_shape[0] > 1
    scale = "per-output" if several else "learned"
    if isinstance(method, Laplace):
        return Gaussian("learned", initial=0.5)
    return StudentT("learned", scale=scale, initial=0.5)


def problem_of(model: Model, data: Data, *, fresh: bool = True, native: bool = True) -> Problem:
    """What the rule looks at, read off a model and its data."""
    example = next(iter(data.chunks(8)))
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), torch.no_grad():
        counter = FlopCounterMode(display=False)
        with counter:
            model.outputs({**model.initial, **model.buffers}, example.x)
    inferred = select(model.initial, model.random)
    weights = num_elements(inferred)
    products = max(counter.get_total_flops() // 2 // max(1, num_rows(example.x)), weights)
    return Problem(
        rows=data.num_data,
        weights=weights,
        products=products,
        outputs=math.prod(model.output_shape),
        perceptron=native and _is_perceptron(model, data),
        resident=isinstance(data, ArrayData),
        moving=bool(model.buffers),
        gpu=model.device.type == "cuda",
        threads=torch.get_num_threads(),
        fresh=fresh,
    )


def _is_perceptron(model: Model, data: Data) -> bool:
    """Whether chains would run as machine code here."""
    if not isinstance(data, ArrayData) or model.device.type != "cpu":
        return False
    try:
        perceptron(ModelDensity(replace(model, prior=Default()), data, 1))
    except (Unsuitable, ValueError):
        return False
    return buildable()
