"""Microcanonical Langevin ensembles: chains that start where the members of a deep ensemble ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch import Tensor

from plausible.core.model import Model
from plausible.core.serialise import register
from plausible.core.weights import Weights
from plausible.methods.chains.base import ChainState
from plausible.methods.chains.mclmc import MCLMC
from plausible.methods.ensembles.ensemble import Ensemble
from plausible.methods.points.map import MAP

if TYPE_CHECKING:
    from plausible.core.data import Batch, Data

log = logging.getLogger("plausible")


@register
@dataclass(frozen=True)
class MILE(MCLMC):
    """w_k(0) = argmax_w log p(w, D) by training, w_k(t) by microcanonical Langevin steps from there, k = 1 … chains

    A deep ensemble whose members each start a chain (Sommer et al. 2025, microcanonical Langevin ensembles).

    First an ensemble of `chains` members is trained by `mode`, each from a starting point of its own (`init`), with early
    stopping by default. Then every member is the start of an `MCLMC` chain with a step size and a length of its own: the
    modes are there already, and warm-up only has to leave them for their surroundings. The published settings are the
    defaults: the energy variance falls from 0.5 to 0.1 along the warm-up, all coordinates have one scale. These are long
    steps with a visible bias (`MCLMC`); lower `energy_variance` for less. An earlier posterior given as `init=` of `fit`
    takes the place of the training. Weights that `where` leaves out stay at their values throughout. Cost: that of the
    ensemble, and two gradients a transition.
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
        """Short training, and steps so small that the bias drowns in the noise."""
        return cls(
            draws=50,
            chains=128,
            warmup=200,
            thin=3,
            energy_variance=1e-5,
            initial_energy_variance=0.1,
            metric="diag",
            mode=MAP(epochs=40, batch_size=None, lr=0.05),
        )

    def quick(self) -> Self:
        """Short training too."""
        return replace(super().quick(), mode=replace(self.mode, epochs=min(self.mode.epochs or 10, 10), batch_size=None))

    def prepare(self, model: Model, data: Data) -> Model:
        """Refuse what cannot be trained before the work begins."""
        self.mode.plan(data.num_data)
        return super().prepare(model, data)

    def compiled(self, model: Model, wish: Any) -> tuple[Model, Any]:
        """As other chains; the training follows the same wish."""
        found, mode = super().compiled(model, wish)
        self.target(found).notes["training"] = wish
        return found, mode

    def step(self, model: Model, state: ChainState, batch: Batch) -> tuple[ChainState, dict[str, Tensor]]:
        """Before the first transition the members are trained: a run that is resumed later does not repeat it."""
        if int(state.step) == 0 and model.initial_draws is None:
            target = self.target(model)
            state = self.started(target, target.flatten(self._trained(model)), state.key)
        return super().step(model, state, batch)

    def _trained(self, model: Model) -> Weights:
        """Weights of the members, stacked."""
        from plausible import engine

        target = self.target(model)
        options = engine.Options(seed=model.seed, compile=target.notes.get("training", False), progress=False)
        log.info("training %d members by %s", self.chains, self.mode)
        members = _Members(self.mode, self.chains, self.init)
        fitted = engine.run(members, model.with_prepared(None), target.data, options)
        if fitted.interrupted:
            raise KeyboardInterrupt("stopped while the members were trained, before the first draw")
        return members.kept(model, fitted.state)


@dataclass(frozen=True)
class _Members(Ensemble):
    """An ensemble in which weights that are no part of the posterior keep their values, as they do along chains."""

    def step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """All members at once."""
        return self._held(model, *super().step(model, state, batch))

    def looped_step(self, model: Model, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """One after the other."""
        return self._held(model, *super().looped_step(model, state, batch))

    def _held(self, model: Model, new: Any, info: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        held = {name: model.initial[name].expand_as(new.weights[name]).clone() for name in model.points}
        return new._replace(weights={**new.weights, **held}), info
