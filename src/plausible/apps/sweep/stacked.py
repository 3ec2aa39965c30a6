"""One step over all settings of a group: the method's own, vmapped over numbers that differ."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.apps.sweep.grid import Recipe, Settings, applied, filled, stackable
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.memory import require_memory
from plausible.core.model import Model
from plausible.core.storage import MemoryDraws
from plausible.core.transforms import closed_over
from plausible.core.weights import Weights, concatenate, index, num_bytes, stack
from plausible.engine.method import Fitted, Method, Plan, Run, Stage, Traits
from plausible.posteriors.base import Posterior
from plausible.posteriors.mixture import MixturePosterior


class StackedState(NamedTuple):
    """The members' states, and the settings in which they differ, both with a leading axis."""

    inner: Any
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Stacked(Method):
    """state_k' = step(state_k, batch; settings_k) for all k at once.

    One method under several settings. All members start at the same weights and see the same batches, so that settings are compared
    and not luck; their noise is their own. A member that diverges harms no other.
    """

    method: Method
    settings: tuple[Settings, ...]

    @property
    def members(self) -> int:  # type: ignore[override]
        return len(self.settings)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(self.method.traits, shares_batches=True)

    def one(self, model: Model, k: int) -> tuple[Method, Model]:
        recipe = applied(Recipe(self.method, model.prior, model.temperature), self.settings[k])
        return recipe.method, model.with_settings(recipe.prior, recipe.temperature)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        """That of any member: they differ in nothing that shapes it."""
        return self._shaped.plan(num_data, per_epoch)

    @functools.cached_property
    def _shaped(self) -> Method:
        """The method with the settings in which members do not differ (and some value of the others)."""
        return _with_settings(self.method, self.settings[0])

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        method, first = self.one(model, 0)
        return method.prepare(first, run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> StackedState:
        """The members' states, stacked; refused where memory cannot hold them."""
        states = []
        for k in range(self.members):
            method, member = self.one(model, k)
            states.append(method.start(member, run, random.fold(key, k)))
            # The first state says what all of them will need, before they are made.
            if k == 0:
                held = self.members * (2 * num_bytes(states[0]) + 3 * num_bytes(model.initial))
                require_memory(held, key.device, f"{self.members} settings of one network; use fewer at once (at_once=…)")
        base = Recipe(self.method, model.prior, model.temperature)
        values = {}
        for name, value in self.settings[0].items():
            if stackable(base, name, value):
                numbers = [float(settings[name]) for settings in self.settings]
                values[name] = torch.tensor(numbers, dtype=torch.float32, device=key.device)
        return StackedState(stack(states), values)

    def step(self, model: Model, run: Run[Any], state: StackedState, batch: Batch) -> tuple[StackedState, dict[str, Tensor]]:
        """All members at once; what is logged is the mean over those that are finite."""
        base = Recipe(self._shaped, model.prior, model.temperature)

        def member(inner: Any, values: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
            recipe = filled(base, values)
            return recipe.method.step(model.with_settings(recipe.prior, recipe.temperature), run, inner, batch)

        with contextlib.nullcontext() if torch.compiler.is_compiling() else closed_over():
            inner, info = torch.func.vmap(member, randomness="different")(state.inner, state.values)
        return StackedState(inner, state.values), _finite_means(info)

    def looped_step(
        self, model: Model, run: Run[Any], state: StackedState, batch: Batch
    ) -> tuple[StackedState, dict[str, Tensor]]:
        """One after the other, where vmap has no rule."""
        states, logs = [], []
        for k in range(self.members):
            method, member = self.one(model, k)
            new, info = method.step(member, run, index(state.inner, k), batch)
            states.append(new)
            logs.append(info)
        return StackedState(stack(states), state.values), _finite_means(stack(logs))

    def kept(self, model: Model, run: Run[Any], state: StackedState) -> Weights:
        return concatenate([self.method.kept(model, run, index(state.inner, k)) for k in range(self.members)])

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        parts = []
        for k in range(self.members):
            method, member = self.one(model, k)
            store = None
            if fitted.draws is not None:
                device = next(iter(model.initial.values())).device
                store = MemoryDraws(fitted.draws.get(range(k, len(fitted.draws), self.members), device))
            # The history is the mean over members, and none of theirs.
            alone = fitted._replace(state=index(fitted.state.inner, k), draws=store, history={})
            parts.append(method.posterior(member, run, alone))
        return MixturePosterior.of(self, model, fitted, parts)


def stacks(method: Method) -> bool:
    """Whether settings of a method can be stacked: where it is one step over batches, of one network."""
    first, *later = method.stages()
    return not later and first.members is None and first.traits.verb == "iterate"


@dataclass(frozen=True)
class Alone(Method):
    """A method under one setting, its own prior and temperature included: the run of a sweep that has nothing to stack."""

    method: Method
    settings: Settings

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.method.traits

    def recipe(self, model: Model) -> tuple[Method, Model]:
        """The method, and the model with the prior and temperature of the setting."""
        return Stacked(self.method, (self.settings,)).one(model, 0)

    def stages(self) -> tuple[Stage, ...]:
        return tuple(Under(stage, self) for stage in _with_settings(self.method, self.settings).stages())

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Posterior:
        method, member = self.recipe(model)
        return MixturePosterior.of(self, model, fitted, [method.posterior(member, run, fitted)])


@dataclass(frozen=True)
class Under(Stage):
    """A stage of a method under one setting: as it is, but for the prior and temperature of the model."""

    stage: Stage
    whole: Alone

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return self.stage.traits

    @property
    def members(self) -> int | None:  # type: ignore[override]
        return self.stage.members

    def _model(self, model: Model) -> Model:
        return self.whole.recipe(model)[1]

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.stage.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        return self.stage.prepare(self._model(model), run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        return self.stage.start(self._model(model), run, key)

    def step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        return self.stage.step(self._model(model), run, state, batch)

    def looped_step(self, model: Model, run: Run[Any], state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        return self.stage.looped_step(self._model(model), run, state, batch)  # type: ignore[attr-defined]

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        return self.stage.kept(self._model(model), run, state)

    def finished(self, state: Any) -> bool:
        return self.stage.finished(state)

    def caption(self, state: Any) -> str | None:
        return self.stage.caption(state)


def _with_settings(method: Method, settings: Settings) -> Method:
    """The method with those of the settings that are its own, and not the prior's or the temperature."""
    inner = {name: value for name, value in settings.items() if name != "temperature" and not name.startswith("prior.")}
    return applied(Recipe(method, None), inner).method  # type: ignore[arg-type]


def _finite_means(info: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of each term over the members for which it is finite, and how many members are not."""
    finite = torch.stack([torch.isfinite(value) for value in info.values()]).all(0)
    count = finite.sum().clamp_min(1)
    # A member that diverged must not hide what the others log.
    means = {name: torch.where(finite, value, torch.zeros_like(value)).sum() / count for name, value in info.items()}
    return means | {"diverged": (~finite).sum().to(count.dtype).float()}
