"""Preconditioned stochastic-gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Joint, Model
from plausible.core.serialise import check_number, register
from plausible.core.transforms import hold
from plausible.core.weights import Weights, select, tree_map
from plausible.methods.stochastic_gradient.base import StochasticGradientChain, StochasticState

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

NEARBY = 1e-3
"""How far off the second gradient of Γ is taken, by weight."""


class Preconditioner(NamedTuple):
    """`square` is V, the running mean of squared gradients, to be kept; `metric` G, and `drift` Γ where it is asked for."""

    square: Weights
    metric: Weights
    drift: Weights


@register
@dataclass(frozen=True)
class PSGLD(StochasticGradientChain):
    """θ' = θ + (ε/2)(G ∇ log p(θ, D) + T Γ) + √(ε T G) ξ,  G = 1/(λ + √V),  V' = αV + (1 − α)(∇̂ log p(θ, D)/N)²   (Li et al. 2016)

    Langevin dynamics with a step size for each weight, by RMSProp's running mean of squared gradients.

    `lr` is ε, in units of the full-data log joint times G, which is about N over the size of its gradient; "auto" finds
    4T/Var[√G ∇̂] during the burn-in. `decay` is α and `damping` λ; V is divided by 1 − α^t, so that it starts at its own size.
    `gamma` adds Γ_i = ∂G_i/∂θ_i, of the order 1 − α, at the price of a second gradient: with z = ±1, from z(∇̂(θ + δz) − ∇̂(θ))/δ.
    What earlier gradients in V have in common with θ is a bias that remains, small where α outlasts the memory of the chain. On a
    Gaussian of precision Λ with G at rest, in full batches, the variance is Λ⁻¹(1 − εGΛ/4)⁻¹. Weights that `where` leaves out
    follow without noise. Cost: one forward and one backward pass (two with `gamma`) and P normal numbers a step, and P numbers of
    memory.
    """

    decay: float = 0.99
    damping: float = 1e-5
    gamma: bool = False

    name: ClassVar[str] = "psgld"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "decay", at_least=0, below=1)
        check_number(self, "damping", above=0)
        if not isinstance(self.gamma, bool):
            raise TypeError(f"PSGLD: gamma must be True or False, got {self.gamma!r}")
        if self.gamma and self.control is not None:
            raise ValueError(
                "PSGLD: gamma is a difference of gradients of one batch, which control changes: take one of the two"
            )

    def carry(self, model: Model) -> Weights:
        return tree_map(torch.zeros_like, model.initial)

    def seen(self, model: Model, state: StochasticState, joint: Joint, batch: Batch) -> Preconditioner:
        square, metric, drift = {}, {}, {}
        so_far = hold(1 - torch.as_tensor(self.decay) ** (state.step + 1))
        slopes = self._slopes(model, state, joint, batch) if self.gamma else {}
        for name, old in state.momenta.items():
            mean = joint.grads[name] / model.num_data
            square[name] = self.decay * old + (1 - self.decay) * mean.square()
            root = (square[name] / so_far).sqrt()
            metric[name] = 1 / (self.damping + root)
            if name in slopes:
                change = (1 - self.decay) / so_far * mean * slopes[name] / model.num_data
                drift[name] = torch.where(root > 0, -metric[name].square() * change / root, 0.0)
        return Preconditioner(square, metric, drift)

    def _slopes(self, model: Model, state: StochasticState, joint: Joint, batch: Batch) -> Weights:
        """Estimates of ∂²log p(θ, D)/∂θ_i² (Hutchinson): z·Hz, without bias, by the difference of two gradients."""
        like = select(state.weights, model.random)
        level = random.uniform(random.fold(state.key, 1), state.step, like)
        signs = {name: torch.where(u < 0.5, -1.0, 1.0).to(u.dtype) for name, u in level.items()}
        beside = {**state.weights, **{name: state.weights[name] + NEARBY * z for name, z in signs.items()}}
        there = model.gradient(beside, batch, buffers=state.buffers, train=True).grads
        return {name: z * (there[name] - joint.grads[name]) / NEARBY for name, z in signs.items()}

    def natural(self, momenta: Preconditioner, grads: Weights) -> Weights:
        return {name: momenta.metric[name].sqrt() * gradient for name, gradient in grads.items()}

    def move(self, state: StochasticState, joint: Joint, noise: Weights, lr: Tensor, spread: Tensor) -> tuple[Weights, Weights]:
        square, metric, drift = state.momenta
        weights, half, heat = {}, 0.5 * lr, 0.5 * spread.square()
        for name, weight in state.weights.items():
            moved = weight + half * metric[name] * joint.grads[name]
            if name in drift:
                moved = moved + heat * drift[name]
            weights[name] = moved + spread * metric[name].sqrt() * noise[name] if name in noise else moved
        return weights, square

    @classmethod
    def conforming(cls) -> PSGLD:
        return cls(epochs=6000, batch_size=None, lr=1e-3, burn_in=0.1, thin=2, decay=0.999)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """T·Λ⁻¹(I − εGΛ/4)⁻¹ around the exact mean, with G at the squared gradients of that law: α near 1, full batches."""
        mean, covariance = problem.posterior()
        precision, one = problem.precision(), torch.eye(len(mean), dtype=mean.dtype)
        law = covariance
        for _ in range(100):
            size = (precision @ law @ precision).diagonal().sqrt() / problem.num_data
            metric = torch.diag(1 / (self.damping + size))
            law = self.temperature * covariance @ torch.linalg.inv(one - self.constant_rate() / 4 * metric @ precision)
            law = (law + law.T) / 2
        return mean, law
