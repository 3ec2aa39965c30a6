"""Stochastic-gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from plausible.core.model import Joint, Model
from plausible.core.serialise import check_number, register
from plausible.core.weights import Weights, tree_map
from plausible.engine.method import check_choice
from plausible.methods.stochastic_gradient.base import StochasticGradientChain, StochasticState, rolled

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class SGHMC(StochasticGradientChain):
    """v' = (1 − α)v + η ∇ log p(θ, D) + √(2(α − β̂)ηT) ξ,  θ' = θ + v',  ξ ~ N(0, I)   (Chen, Fox & Guestrin 2014)

    Langevin dynamics with momentum and friction, driven by minibatch gradients of the full log joint.

    `lr` is η, in units of the *full-data* log joint; "auto" finds 2αT/Var[∇̂] during the burn-in. `friction` is α: 1 is `SGLD` with
    ε = 2η, less carries the velocity over about 1/α steps. `noise` is β̂, the friction whose noise batches already bring:
    η·Var[∇̂]/2 by weight, 0 where that is not known. `temperature` T = 1 targets the posterior. On a Gaussian of precision Λ, in
    full batches, the variance is Λ⁻¹(1 − ηΛ/(2(2 − α)))⁻¹; batches add at most η·Var[∇̂]Λ⁻¹/(2α) to first order. Unstable above
    η = 2(2 − α)/λ_max. With `splitting="baoab"` the friction acts in the middle of the move (Leimkuhler & Matthews 2013),
    u = v + η∇̂, v' = (1 − α)u + √(α(2 − α)ηT) ξ, θ' = θ + (u + v')/2: then full batches have no bias on a Gaussian at all, and
    steps are stable below η = 4/λ_max. Weights that `where` leaves out follow without noise. Cost: one forward and one backward
    pass and P normal numbers a step, and P numbers of memory.
    """

    friction: float = 0.1
    noise: float = 0.0
    splitting: Literal["euler", "baoab"] = "euler"

    name: ClassVar[str] = "sghmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "friction", above=0, at_most=1)
        check_number(self, "noise", at_least=0)
        check_choice(self, "splitting", ("euler", "baoab"))
        if self.noise > self.friction:
            raise ValueError(
                f"SGHMC: noise={self.noise:g} is more than friction={self.friction:g} can take away: raise friction, or lower "
                "noise (the noise of batches, η·Var[∇̂]/2, falls with lr)"
            )

    def carry(self, model: Model) -> Weights:
        return tree_map(torch.zeros_like, model.initial)

    def stable(self) -> float:
        return 2 * self.friction

    def move(self, state: StochasticState, joint: Joint, noise: Weights, lr: Tensor, spread: Tensor) -> tuple[Weights, Weights]:
        if self.splitting == "euler":
            heat = (2 * (self.friction - self.noise)) ** 0.5 * spread
            return rolled(state, joint, noise, lr, heat, state.momenta, self.friction)
        weights, moved, heat = {}, {}, self._bath() ** 0.5 * spread
        for name, weight in state.weights.items():
            kicked = state.momenta[name] + lr * joint.grads[name]
            v = (1 - self.friction) * kicked
            moved[name] = v + heat * noise[name] if name in noise else v
            weights[name] = weight + 0.5 * (kicked + moved[name])
        return weights, moved

    def _bath(self) -> float:
        """The variance that the bath of BAOAB adds, over ηT: less what batches bring, whose kicks the friction damps."""
        return self.friction * (2 - self.friction) - 2 * (1 - self.friction) ** 2 * self.noise

    @classmethod
    def conforming(cls) -> SGHMC:
        return cls(epochs=4500, batch_size=None, lr=3e-3, burn_in=0.05, thin=2, friction=0.3)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """T(1 − β̂/α)·Λ⁻¹(I − ηΛ/(2(2 − α)))⁻¹ around the exact mean: the stationary law of full-batch steps of a constant size."""
        mean, covariance = problem.posterior()
        if self.splitting == "baoab":  # exact, at the temperature of the bath
            return mean, self.temperature * self._bath() / (self.friction * (2 - self.friction)) * covariance
        share = self.constant_rate() / (2 * (2 - self.friction))
        biased = torch.linalg.inv(torch.eye(len(mean), dtype=mean.dtype) - share * problem.precision())
        return mean, self.temperature * (1 - self.noise / self.friction) * covariance @ biased
