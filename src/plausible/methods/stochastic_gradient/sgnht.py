"""The stochastic-gradient Nosé-Hoover thermostat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core.model import Joint, Model
from plausible.core.serialise import check_number, register
from plausible.core.transforms import hold
from plausible.core.weights import Weights, num_elements, tree_map
from plausible.methods.stochastic_gradient.base import StochasticGradientChain, StochasticState, rolled

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


class Thermostat(NamedTuple):
    velocity: Weights
    friction: Tensor


@register
@dataclass(frozen=True)
class SGNHT(StochasticGradientChain):
    """v' = (1 − α)v + η ∇ log p(θ, D) + √(2aηT) ξ,  θ' = θ + v',  α' = α + κ(‖v'‖²/(PηT) − 1)   (Ding et al. 2014)

    Langevin dynamics whose friction α follows the noise of the batches, so that the velocities keep their temperature.

    `lr` is η, in units of the *full-data* log joint; "auto" finds 2aT/Var[∇̂] during the burn-in. `diffusion` is a, the noise that
    is added; α starts there and rises by what the batches add, which needs not be known. `gain` is κ, the pace of the thermostat:
    Ding et al. take ηT. `temperature` T = 1 targets the posterior. On a Gaussian of precision Λ whose directions are all alike the
    variance is TΛ⁻¹(1 − α/2), whatever the noise; noise that differs between weights is right on average over them only. Weights
    that `where` leaves out follow without noise. Cost: one forward and one backward pass and P normal numbers a step, and P numbers
    of memory.
    """

    diffusion: float = 0.05
    gain: float = 0.01

    name: ClassVar[str] = "sgnht"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "diffusion", above=0, below=1)
        check_number(self, "gain", above=0, below=1)
        if not self.temperature:
            raise ValueError("SGNHT: a thermostat needs a temperature above 0; at 0 use MAP")

    def carry(self, model: Model) -> Thermostat:
        velocity = tree_map(torch.zeros_like, model.initial)
        some = next(iter(velocity.values()))
        return Thermostat(velocity, torch.full((), self.diffusion, dtype=torch.float32, device=some.device))

    def stable(self) -> float:
        return 2 * self.diffusion

    def move(
        self, state: StochasticState, joint: Joint, noise: Weights, lr: Tensor, spread: Tensor
    ) -> tuple[Weights, Thermostat]:
        velocity, friction = state.momenta
        scale = (2 * self.diffusion) ** 0.5 * spread
        weights, moved = rolled(state, joint, noise, lr, scale, velocity, friction)
        energy = sum((moved[name].square().sum(dtype=torch.float32) for name in noise), torch.zeros_like(friction))
        wanted = num_elements(noise) * spread.square()
        excess = torch.where(wanted > 0, energy / wanted, 1.0) - 1  # without noise there is no temperature to hold
        return weights, Thermostat(moved, hold(friction + self.gain * excess))

    @classmethod
    def conforming(cls) -> SGNHT:
        # a slow thermostat, so that its friction stays near where the law of a constant friction says
        return cls(epochs=6000, batch_size=None, lr=2e-3, burn_in=0.05, thin=2, diffusion=0.2, gain=2e-4)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The stationary law of full-batch steps of a constant size, at the friction α that holds the temperature on average.

        T·(2a(2 − α)/α)·Λ⁻¹(2(2 − α) − ηΛ)⁻¹, and 4a/α · mean_i (2(2 − α) − ηλ_i)⁻¹ = 1 over the eigenvalues.
        """
        mean, covariance = problem.posterior()
        curvature = self.constant_rate() * problem.precision()
        eigenvalues = torch.linalg.eigvalsh(curvature)
        alpha = self.diffusion
        for _ in range(200):
            alpha = 4 * self.diffusion * float((1 / (2 * (2 - alpha) - eigenvalues)).mean())
        width = torch.linalg.inv(2 * (2 - alpha) * torch.eye(len(mean), dtype=mean.dtype) - curvature)
        return mean, self.temperature * 2 * self.diffusion * (2 - alpha) / alpha * covariance @ width
