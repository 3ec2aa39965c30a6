"""Stochastic gradient Langevin dynamics: noisy gradient steps whose stationary law is the posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.compiling import hold
from plausible.core.model import Model
from plausible.core.schedules import Schedule, as_schedule, rate
from plausible.core.serialise import register
from plausible.core.weights import Weights, clone
from plausible.engine.method import BatchSize, Method, Plan, Traits, check_training, plan_epochs
from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.core.data import Batch
    from plausible.engine import Fitted
    from plausible.testing import LinearGaussian


class SGLDState(NamedTuple):
    """Weights, the network's buffers, the key of this chain's noise, and the step."""

    weights: Weights
    buffers: Weights
    key: Tensor
    step: Tensor


@register
@dataclass(frozen=True)
class SGLD(Method):
    """θ' = θ + (ε/2) ∇ log p(θ, D) + √(ε T) ξ,  ξ ~ N(0, I)   (Welling & Teh 2011)

    Langevin dynamics driven by minibatch gradients of the full log joint (likelihood scaled by N/B).

    `lr` is ε, in units of the *full-data* log joint, so good values fall like 1/N. `temperature` T = 1 targets the
    posterior, below 1 a cold one. The first `burn_in` fraction of the steps is dropped, then every `thin`-th state is kept
    (None: about 100 draws in all). With a constant ε the stationary law is biased: on a Gaussian target of precision Λ, in
    full batches, its variance is Λ⁻¹(1 − εΛ/4)⁻¹ instead of Λ⁻¹. Independent minibatches would add (ε/4)·Var[∇̂]Λ⁻¹ to first
    order; batches here are cut from reshuffled epochs, whose noise largely cancels within an epoch, and add less. Unstable
    above ε = 4/λ_max. Weights that `where` leaves out follow the same step without noise. Parallel chains:
    `Ensemble(SGLD(…), members=4)`. Cost: one forward and one backward pass and P normal numbers a step.
    """

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = 1e-4
    burn_in: float = 0.5
    thin: int | None = None
    temperature: float = 1.0

    name: ClassVar[str] = "sgld"
    traits: ClassVar[Traits] = Traits(chaotic=True, noisy=True, bias="of the order of the step size")

    def __post_init__(self) -> None:
        check_training(self)
        as_schedule(self.lr)
        if not 0 <= self.burn_in < 1:
            raise ValueError(f"SGLD: burn_in is a fraction of the steps, in [0, 1), got {self.burn_in}")
        if self.thin is not None and (isinstance(self.thin, bool) or not isinstance(self.thin, int) or self.thin < 1):
            raise ValueError(f"SGLD: thin must be a whole number of at least 1, or None, got {self.thin!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"SGLD: temperature must be at least 0 and finite, got {self.temperature}")

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """`epochs` passes; draws are kept after burn-in."""
        plan = plan_epochs(self, num_data, per_epoch)
        burn_in = int(self.burn_in * plan.steps)
        left = plan.steps - burn_in
        thin = max(1, left // 100) if self.thin is None else self.thin
        if thin > left:
            raise ValueError(
                f"SGLD: thin={thin} keeps no draw: only {left} of {plan.steps} steps are left after burn-in; "
                "run more epochs or thin less"
            )
        return Plan(plan.steps, plan.per_epoch, plan.batch_size, burn_in=burn_in, thin=thin)

    def start(self, model: Model, key: Tensor) -> SGLDState:
        """Start at the module's weights."""
        return SGLDState(clone(model.initial), clone(model.buffers), key, torch.zeros((), dtype=torch.int64, device=key.device))

    def step(self, model: Model, state: SGLDState, batch: Batch) -> tuple[SGLDState, dict[str, Tensor]]:
        """One Langevin step."""
        joint = model.gradient(state.weights, batch, buffers=state.buffers, train=True)
        lr = rate(self.lr, state.step, model.steps)
        noise = random.normal(state.key, state.step, {name: state.weights[name] for name in model.random})
        weights = dict(state.weights)
        drift, spread = 0.5 * lr, hold((lr * self.temperature).sqrt())
        for name, weight in weights.items():
            moved = weight + drift * joint.grads[name]
            weights[name] = moved + spread * noise[name] if name in noise else moved
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return SGLDState(weights, joint.buffers, state.key, state.step + 1), info

    @classmethod
    def conforming(cls) -> SGLD:
        """Full batches, for which the bias is known exactly."""
        return cls(epochs=5000, batch_size=None, lr=2.5e-3, burn_in=0.05, thin=2)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """T·Λ⁻¹(I − εΛ/4)⁻¹ around the exact mean: the stationary law of full-batch steps of a constant size."""
        mean, covariance = problem.posterior()
        precision = problem.precision()
        step = float(as_schedule(self.lr)(torch.zeros(()), 1))
        biased = torch.linalg.inv(torch.eye(len(mean), dtype=mean.dtype) - step / 4 * precision)
        return mean, self.temperature * covariance @ biased

    def posterior(self, model: Model, fitted: Fitted) -> Posterior:
        """The kept states, equally weighted."""
        return DrawsPosterior.of(self, model, fitted)
