"""Stein variational gradient descent: an ensemble whose members keep away from each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from plausible.core.data import Batch, num_rows
from plausible.core.model import Model
from plausible.core.schedules import Cosine, rate
from plausible.core.serialise import check_count, check_number, register
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights, clone, flatten, index, select, stack, unflatten
from plausible.engine.method import Fitted, Info, Method, Run, Stage, Traits, check_choice
from plausible.methods.ensembles.ensemble import Stacked
from plausible.methods.points.map import MAP, MAPState
from plausible.posteriors.base import record_of
from plausible.posteriors.chains import ParticlesPosterior


@register
@dataclass(frozen=True)
class SVGD(Method):
    """θ_i ← θ_i + ε (1/K) Σ_j [k(θ_j, θ_i) ∇ log p(θ_j, D) + ∇_{θ_j} k(θ_j, θ_i)],  k = e^{−‖·‖²/h}

    Particles that are driven by each other's gradients, and repelled by each other (Liu & Wang 2016).

    `mode` is how a particle would be trained alone: its steps, optimiser and held-out rows, by which each particle is taken where
    it was best. The kernel compares weights, or with kernel="functions" outputs at the inputs of the batch: the likelihood then
    moves functions, as in Wang et al. (2019), with the prior of the weights in the place of one over functions. `bandwidth` is h;
    None: the median of squared distances over log(K + 1), at every step. One particle is `mode` alone. All particles see the same
    batches. Cost: that of an ensemble, and K² inner products of weights (or outputs) a step.
    """

    mode: MAP = field(default_factory=MAP)
    particles: int = 10
    kernel: Literal["weights", "functions"] = "weights"
    bandwidth: float | None = None
    init: Literal["fresh", "given", "prior"] = "fresh"

    name: ClassVar[str] = "svgd"
    traits: ClassVar[Traits] = Traits(
        divisible=False, shares_batches=True, mixed_precision=False, tolerance=0.2, bias="too narrow where weights are many"
    )

    def __post_init__(self) -> None:
        if not isinstance(self.mode, MAP) or self.mode.adversarial:
            raise TypeError(
                f"SVGD: mode must be MAP(…) without adversarial, which says how particles are trained, got {self.mode!r}"
            )
        check_count(self, "particles")
        check_choice(self, "kernel", ("weights", "functions"))
        check_choice(self, "init", ("fresh", "given", "prior"))
        if self.bandwidth is not None:
            check_number(self, "bandwidth", above=0)

    @property
    def members(self) -> int:  # type: ignore[override]
        return self.particles

    def stages(self) -> tuple[Stage, ...]:
        return (Repelled(self.mode, self.particles, self.init, settings=self),)

    @classmethod
    def conforming(cls) -> SVGD:
        return cls(MAP(epochs=600, batch_size=None, lr=Cosine(0.1)), particles=100)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> ParticlesPosterior:
        if fitted.draws is None:
            raise ValueError("SVGD kept no particles: the run ended before the first step")
        return ParticlesPosterior(self, model, record_of(fitted), fitted.draws)


def kernel(places: Tensor, bandwidth: float | None) -> tuple[Tensor, Tensor]:
    """k(x_j, x_i) [K, K] of places [K, P], and Σ_j ∇_{x_j} k(x_j, x_i) [K, P]; by the median heuristic where there is no h."""
    count = len(places)
    centred = places - places.mean(0)  # distances by products lose digits far from 0
    squares = centred.square().sum(1)
    distances = (squares[:, None] + squares - 2 * centred @ centred.T).clamp(min=0)
    if bandwidth is None:
        off = ~torch.eye(count, dtype=torch.bool, device=places.device)
        typical = distances[off].median() if count > 1 else distances.new_ones(())
        h = (typical / math.log(count + 1)).clamp(min=torch.finfo(places.dtype).tiny * 1e4)
    else:
        h = distances.new_full((), bandwidth)
    near = (-distances / h).exp()
    return near, 2 / h * (near.sum(1, keepdim=True) * places - near @ places)


@dataclass(frozen=True)
class Repelled(Stacked):
    """Members that are trained together, on the same batches."""

    settings: SVGD = field(default_factory=SVGD)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(self.stage.traits, divisible=False, shares_batches=True, noisy=True)

    def step(self, model: Model, run: Run[Any], state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """All particles by one pass over the batch."""

        def one(weights: Weights, buffers: Weights) -> Any:
            return model.gradient(weights, batch, buffers=buffers, train=True)

        joint = torch.func.vmap(one, randomness="different")(state.weights, state.buffers)
        return self._moved(model, run, state, batch, joint, torch.func.vmap)

    def looped_step(self, model: Model, run: Run[Any], state: MAPState, batch: Batch) -> tuple[MAPState, Info]:
        """One particle after the other: for networks that vmap cannot stack."""

        def looped(function: Any, **_: Any) -> Any:
            return lambda *trees: stack([function(*(index(tree, k) for tree in trees)) for k in range(self.members)])

        joint = looped(lambda w, b: model.gradient(w, batch, buffers=b, train=True))(state.weights, state.buffers)
        return self._moved(model, run, state, batch, joint, looped)

    def _moved(
        self, model: Model, run: Run[Any], state: MAPState, batch: Batch, joint: Any, mapped: Any
    ) -> tuple[MAPState, Info]:
        random = select(state.weights, model.random)
        if self.settings.kernel == "weights":
            near, away = kernel(flatten(random, batch_dims=1), self.settings.bandwidth)
            driven = (near @ flatten(select(joint.grads, random), batch_dims=1) + away) / self.members
            grads = {**joint.grads, **unflatten(driven, index(random, 0))}
        else:
            grads = self._of_functions(model, state, batch, mapped)
        # weights that are no part of the posterior follow their own gradients
        down = {name: -grad / model.num_data for name, grad in grads.items()}
        mode: MAP = self.stage  # type: ignore[assignment]
        lr = rate(mode.lr, state.step[0], run.steps)
        weights, optimiser = torch.func.vmap(lambda w, g, s: mode.optimiser.update(w, g, s, lr, {}))(
            state.weights, down, state.optimiser
        )
        info = {"log_joint": joint.value, "log_likelihood": joint.log_likelihood, "log_prior": joint.log_prior}
        return MAPState(weights, joint.buffers, optimiser, state.step + 1), info

    def _of_functions(self, model: Model, state: MAPState, batch: Batch, mapped: Any) -> Weights:
        """(1/K) Σ_j {J_iᵀ [k(f_j, f_i) ∇_{f_j} log p(D | f_j) + ∇_{f_j} k(f_j, f_i)] + k(f_j, f_i) ∇ log p(θ_i)}

        The prior, and the likelihood's own weights, have the share of kernels that the likelihood has, near or apart.
        """
        scale = model.num_data / num_rows(batch.x)

        def likelihood(outputs: Tensor, weights: Weights) -> Tensor:
            each = model.log_likelihood_of(outputs, weights, batch)
            return scale * (each if batch.weight is None else each * batch.weight).sum()

        def outputs(weights: Weights, buffers: Weights) -> Tensor:
            return model.outputs({**weights, **buffers}, batch.x, train=True)

        buffers = clone(state.buffers)  # they have moved on with the gradients

        def pulled(leaves: Weights) -> tuple[Tensor, tuple[()]]:
            f = mapped(outputs, randomness="different")(leaves, clone(buffers))
            with torch.enable_grad():
                seen = f.detach().requires_grad_()
                (slopes,) = torch.autograd.grad(mapped(likelihood)(seen, clone(leaves)).sum(), [seen])
            near, away = kernel(seen.detach().flatten(1), self.settings.bandwidth)
            driven = (near @ slopes.flatten(1) + away).view_as(f)
            own = mapped(likelihood)(f.detach(), leaves) + mapped(model.log_prior)(leaves)
            return ((f * driven).sum() + (near.sum(1) * own).sum()) / (self.members * model.temperature), ()

        return value_and_gradient(pulled, state.weights)[2]
