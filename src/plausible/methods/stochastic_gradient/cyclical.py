"""Cyclical step sizes: a stochastic-gradient chain that leaves its mode and settles again, several times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plausible.core import schedules
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.schedules import as_schedule
from plausible.core.serialise import check_count, check_number, register
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Traits, create, plan_epochs
from plausible.methods.stochastic_gradient.base import Phase, StochasticGradientChain, StochasticState
from plausible.methods.stochastic_gradient.sgld import SGLD
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@dataclass(frozen=True)
class CyclicalPlan(Plan):
    """`burn_in` and `thin` count anew in every cycle of `length` steps."""

    length: int = 1

    def keeps(self, step: int) -> bool:
        return super().keeps((step - 1) % self.length + 1)

    def next_draw(self, step: int) -> int:
        inside = step % self.length
        following = super().next_draw(inside)
        return step - inside + (following if following <= self.length else self.length + super().next_draw(0))


@register
@dataclass(frozen=True)
class Cyclical(Method):
    """ε_t = ε/2·(cos(π·mod(t, ⌈T/M⌉)/⌈T/M⌉) + 1),  draws at the end of each of the M cycles   (Zhang et al. 2020)

    A stochastic-gradient chain whose step size falls to 0 and starts again, so that one chain finds several modes.

    `method` is the chain (`SGLD`, `SGHMC`, …), whose settings keep their meaning: its `lr` is ε, its `burn_in` the fraction of
    every cycle that is dropped, and of the rest every `thin`-th state is kept, the last of the cycle always. With lr="auto" ε is
    found in the first cycle, and every cycle begins with N/B times as much, as if the batch were all data. During the first
    `exploration` fraction of every cycle there is no noise: the paper's networks take 0.9, with an `lr` of their own. Cycles count
    alike, whatever the mass of the modes that they end in. Cost: that of the chain.
    """

    method: StochasticGradientChain = field(default_factory=lambda: SGLD(burn_in=0.75))
    cycles: int = 4
    exploration: float = 0.0

    name: ClassVar[str] = "cyclical"

    def __post_init__(self) -> None:
        if isinstance(self.method, str):
            object.__setattr__(self, "method", create(self.method))
        if not isinstance(self.method, StochasticGradientChain):
            raise TypeError(f"Cyclical: method must be a chain by stochastic gradients, such as SGLD(), got {self.method!r}")
        check_count(self, "cycles")
        check_number(self, "exploration", at_least=0, below=1)
        if self.exploration and self.method.lr == "auto":
            raise ValueError(
                "Cyclical: lr='auto' is found by the noise of the draws: for exploration without noise give the method an lr"
            )
        if self.exploration > self.method.burn_in:
            raise ValueError(
                f"Cyclical: exploration={self.exploration:g} is without noise and gives no draws, and "
                f"burn_in={self.method.burn_in:g} would keep some of it: give the method a burn_in of {self.exploration:g} or more"
            )

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.method.traits

    def plan(self, num_data: int, per_epoch: int | None = None) -> CyclicalPlan:
        plan = plan_epochs(self.method, num_data, per_epoch)
        if self.cycles > plan.steps:
            raise ValueError(f"Cyclical: {plan.steps} steps cannot have {self.cycles} cycles; run more epochs, or fewer cycles")
        length = math.ceil(plan.steps / self.cycles)
        left = length - int(self.method.burn_in * length)
        thin = self.method.thin or max(1, left * self.cycles // 100)
        if thin > left:
            raise ValueError(
                f"Cyclical: thin={thin} keeps no draw: only {left} of the {length} steps of a cycle are left after burn-in; "
                "run more epochs or thin less"
            )
        burn_in = length - left // thin * thin
        return CyclicalPlan(plan.steps, plan.per_epoch, plan.batch_size, burn_in, thin, length=length)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> StochasticState:
        return self.method.start(model, run, key)

    def step(self, model: Model, run: Run[Any], state: StochasticState, batch: Batch) -> tuple[StochasticState, Info]:
        length = math.ceil(run.steps / self.cycles)
        wave = schedules.Cyclical(1.0, self.cycles)(state.step, run.steps)
        place = torch.remainder(state.step, length)
        temperature = torch.where(place < self.exploration * length, 0.0, self.method.temperature)
        learning = state.step < max(1, int(self.method.burn_in * length))
        return self.method.advance(model, run, state, batch, Phase(wave, temperature, learning, wave))

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted)

    @classmethod
    def conforming(cls) -> Cyclical:
        return cls(SGLD(epochs=6000, batch_size=None, lr=3.6e-3, burn_in=0.3, thin=1), cycles=3)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The mean over the draws of the law of `SGLD` at each step: Σ' = AΣA + εT, A = I − εΛ/2."""
        assert isinstance(self.method, SGLD), "of SGLD alone"
        mean, covariance = problem.posterior()
        precision, one = problem.precision(), torch.eye(len(mean), dtype=mean.dtype)
        plan = self.plan(problem.num_data)
        steps = torch.arange(plan.steps)
        waves = schedules.Cyclical(1.0, self.cycles)(steps, plan.steps)
        rates = (waves * as_schedule(self.method.lr)(steps, plan.steps)).double()  # type: ignore[arg-type]
        law, laws = covariance, []
        for step, rate in enumerate(rates.tolist(), start=1):
            forward = one - rate / 2 * precision
            law = forward @ law @ forward + rate * self.method.temperature * one
            if plan.keeps(step):
                laws.append(law)
        return mean, torch.stack(laws).mean(0)
