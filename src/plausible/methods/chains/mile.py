"""Microcanonical Langevin ensembles: chains that start where the members of a deep ensemble ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.engine.method import Info, Run, Stage
from plausible.methods.chains.microcanonical import Microcanonical
from plausible.methods.ensembles.ensemble import Stacked
from plausible.methods.points.map import MAP, MAPState


@register
@dataclass(frozen=True)
class MILE(Microcanonical):
    """w_k(0) = argmax_w log p(w, D) by training, w_k(t) by microcanonical Langevin steps from there, k = 1 … chains

    A deep ensemble whose members each start a chain (Sommer et al. 2025, microcanonical Langevin ensembles).

    An ensemble of `chains` members is trained by `mode`, each from a starting point of its own (`init`); every member then
    starts an `MCLMC` chain with a step size and a length of its own. The defaults are the published settings: long steps with
    a visible bias; lower `energy_variance` for less. An earlier posterior given as `init=` of `fit` takes the place of the
    training. Weights that `where` leaves out stay at their values. Cost: that of the ensemble, and two gradients a transition.
    """

    chains: int = 10
    warmup: int = 10_000
    energy_variance: float = 0.1
    initial_energy_variance: float | None = 0.5
    metric: Literal["diag", "unit"] = "unit"
    mode: MAP = field(default_factory=lambda: MAP(patience=20))

    name: ClassVar[str] = "mile"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mode, MAP):
            raise TypeError(f"MILE: mode must be MAP(…), which trains the members, got {self.mode!r}")

    @classmethod
    def conforming(cls) -> MILE:
        # Short training, and steps so small that the bias drowns in the noise
        small: dict[str, Any] = {"energy_variance": 1e-5, "initial_energy_variance": 0.1, "metric": "diag"}
        return cls(draws=10, chains=256, warmup=80, thin=3, mode=MAP(epochs=40, batch_size=None, lr=0.05), **small)

    def stages(self) -> tuple[Stage, ...]:
        return (Members(self.mode, self.chains, self.init), self)


class MembersState(NamedTuple):
    """The members' states, stacked; `over` where there is nothing to train."""

    weights: Weights
    buffers: Weights
    optimiser: Any
    step: Tensor
    over: Tensor

    @property
    def inner(self) -> MAPState:
        return MAPState(self.weights, self.buffers, self.optimiser, self.step)


@dataclass(frozen=True)
class Members(Stacked):
    """An ensemble in which weights that are no part of the posterior keep their values, as they do along chains.

    An earlier posterior (`fit(init=…)`) takes the place of the training: its draws are left as they are.
    """

    def start(self, model: Model, run: Run[Any], key: Tensor) -> MembersState:
        given = torch.full((self.members,), run.starts is not None, device=key.device)
        state: MAPState = super().start(model, run, key)
        return MembersState(state.weights, state.buffers, state.optimiser, state.step, given)

    def step(self, model: Model, run: Run[Any], state: MembersState, batch: Batch) -> tuple[MembersState, Info]:
        return self._held(model, state, *super().step(model, run, state.inner, batch))

    def looped_step(self, model: Model, run: Run[Any], state: MembersState, batch: Batch) -> tuple[MembersState, Info]:
        return self._held(model, state, *super().looped_step(model, run, state.inner, batch))

    def _held(self, model: Model, state: MembersState, new: MAPState, info: dict[str, Tensor]) -> tuple[MembersState, Info]:
        # weights that are no part of the posterior move neither while training nor along chains
        held = {name: model.initial[name].expand_as(new.weights[name]).clone() for name in model.points}
        return MembersState({**new.weights, **held}, new.buffers, new.optimiser, new.step, state.over), info

    def finished(self, state: MembersState) -> bool:
        return bool(state.over.all())

    def kept(self, model: Model, run: Run[Any], state: MembersState) -> Weights:
        return super().kept(model, run, state.inner)
