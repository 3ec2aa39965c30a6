"""BatchEnsemble: members that share their matrices, each with rank-one factors of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.schedules import rate
from plausible.core.serialise import check_count, check_number, register
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights, clone, index, stack
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Traits
from plausible.methods.points.map import MAP
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

OUT, IN, OWN = "outputs of ", "inputs of ", "own "
"""What the names of factors s_k and r_k, and of vectors of each member, begin with among the parameters."""


class TiedState(NamedTuple):
    """`weights` and `buffers` are those of all members [K, …], as the `parameters` make them."""

    weights: Weights
    buffers: Weights
    parameters: Weights
    optimiser: Any
    step: Tensor


@register
@dataclass(frozen=True)
class BatchEnsemble(Method):
    """W_k = W ∘ (s_k r_kᵀ),  max over W, s, r of  (1/K) Σ_k log p(W_k, D)   (Wen et al. 2020)

    An ensemble with the weights of little more than one network: members share matrices and scale their rows and columns.

    Kernels of convolutions are scaled by output and input channel. Vectors, such as biases, are each member's own. `mode` says how
    all of them are trained together, and which rows are held out: each member is taken where it was best. The factors start at
    N(1, `spread`²). All members see the same batches, and each is a network under the prior. Cost: K forward and backward passes a
    step, stacked.
    """

    mode: MAP = field(default_factory=MAP)
    members: int = 4  # type: ignore[misc]
    spread: float = 0.5

    name: ClassVar[str] = "batch-ensemble"
    traits: ClassVar[Traits] = Traits(
        divisible=False, shares_batches=True, noisy=True, shaping=("members", "spread"), bias="members of one mode"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.mode, MAP) or self.mode.adversarial:
            raise TypeError(f"BatchEnsemble: mode must be MAP(…) without adversarial, got {self.mode!r}")
        check_count(self, "members")
        check_number(self, "spread", at_least=0)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> None:
        if not any(_factored(model, name) for name in model.random):
            raise ValueError(
                f"BatchEnsemble: none of the random weights ({', '.join(model.random)}) has two axes: there is nothing to scale; "
                "choose others with where=, or use Ensemble"
            )

    def start(self, model: Model, run: Run[Any], key: Tensor) -> TiedState:
        factors = {}
        for name in model.random:
            if _factored(model, name):
                for side, count in zip((OUT, IN), model.initial[name].shape):
                    factors[side + name] = model.initial[name].new_empty(self.members, count)
        noise = random.normal(random.fold(key, 17), 0, factors)
        parameters = {name: 1 + self.spread * value for name, value in noise.items()}
        for name, weight in model.initial.items():
            own = name in model.random and weight.ndim < 2 and name not in model.likelihood_names
            parameters[OWN + name if own else name] = (
                weight.expand(self.members, *weight.shape).clone() if own else weight.clone()
            )
        buffers = {name: value.expand(self.members, *value.shape).clone() for name, value in model.buffers.items()}
        step = torch.zeros((), dtype=torch.int64, device=key.device)
        weights = clone(self.of_members(model, parameters))
        return TiedState(weights, buffers, parameters, self.mode.optimiser.init(parameters), step)

    def of_members(self, model: Model, parameters: Weights) -> Weights:
        """The weights of all members, [K, …]."""
        made = {}
        for name, weight in model.initial.items():
            if OWN + name in parameters:
                made[name] = parameters[OWN + name]
            elif OUT + name in parameters:
                rest = [1] * (weight.ndim - 2)
                out, inputs = parameters[OUT + name], parameters[IN + name]
                made[name] = parameters[name] * out.view(*out.shape, 1, *rest) * inputs.view(len(inputs), 1, -1, *rest)
            else:
                made[name] = parameters[name].expand(self.members, *weight.shape)
        return made

    def step(self, model: Model, run: Run[Any], state: TiedState, batch: Batch) -> tuple[TiedState, Info]:
        """All members by one pass over the batch."""
        return self._moved(model, run, state, batch, lambda one: torch.func.vmap(one, randomness="different"))

    def looped_step(self, model: Model, run: Run[Any], state: TiedState, batch: Batch) -> tuple[TiedState, Info]:
        """One member after the other: for networks that vmap cannot stack."""
        return self._moved(
            model, run, state, batch, lambda one: lambda *t: stack([one(*index(t, k)) for k in range(self.members)])
        )

    def _moved(
        self, model: Model, run: Run[Any], state: TiedState, batch: Batch, mapped: Callable[[Any], Any]
    ) -> tuple[TiedState, Info]:
        def of_one(weights: Weights, buffers: Weights) -> tuple[Tensor, Tensor]:
            likelihood = model.scaled_log_likelihood({**weights, **buffers}, batch, train=True)
            return likelihood, model.log_prior(weights)

        def mean(parameters: Weights, buffered: Weights) -> tuple[Tensor, Any]:
            buffers = {name: value.clone() for name, value in buffered.items()}  # a training pass writes into them
            likelihoods, priors = mapped(of_one)(self.of_members(model, parameters), buffers)
            joint = (likelihoods + priors) / model.temperature
            info = {"log_joint": joint.detach(), "log_likelihood": likelihoods.detach(), "log_prior": priors.detach()}
            return -joint.mean() / model.num_data, (info, buffers)

        _, (info, buffers), grads = value_and_gradient(mean, state.parameters, state.buffers)
        lr = rate(self.mode.lr, state.step, run.steps)
        parameters, optimiser = self.mode.optimiser.update(state.parameters, grads, state.optimiser, lr, {})
        weights = {name: value.clone() for name, value in self.of_members(model, parameters).items()}
        return TiedState(weights, buffers, parameters, optimiser, state.step + 1), info

    def kept(self, model: Model, run: Run[Any], state: TiedState) -> Weights:
        return {**state.weights, **state.buffers}

    @classmethod
    def conforming(cls) -> BatchEnsemble:
        return cls(replace(MAP.conforming(), epochs=300, batch_size=None), members=3)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """The mode: a matrix of one row is no restriction to any member."""
        mean, covariance = problem.posterior()
        return mean, torch.zeros_like(covariance)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> DrawsPosterior:
        return DrawsPosterior.of(self, model, fitted, chains=self.members)


def _factored(model: Model, name: str) -> bool:
    return model.initial[name].ndim > 1 and name not in model.likelihood_names
