"""The posterior that chains leave: their draws, what is known of each transition, and how to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plausible.core import storage
from plausible.core import weights as tree
from plausible.core.data import Data
from plausible.core.model import Model
from plausible.core.storage import DrawStore, MemoryDraws
from plausible.core.weights import Weights
from plausible.engine.method import Fitted, Method, Plan, Run, Traits
from plausible.posteriors.base import DrawsPosterior, _check_draws, record_of

if TYPE_CHECKING:
    from plausible.engine.loop import Callback

PREFIX = "chain."  # what names of statistics begin with


class Named:
    """A store of draws seen through a choice of its names: those of the model, or all others, which are statistics."""

    def __init__(self, store: DrawStore, model: Model, statistics: bool):
        self.store, self.model, self.statistics = store, model, statistics

    def _chosen(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        known = {*self.model.initial, *self.model.buffers}
        return {name: value for name, value in draws.items() if (name not in known) == self.statistics}

    def __len__(self) -> int:
        return len(self.store)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        return self._chosen(self.store.shapes())

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis."""
        return self._chosen(self.store.get(rows, device))

    def shards(self) -> Iterable[Weights]:
        """All draws in pieces."""
        return map(self._chosen, self.store.shards())


class Joined:
    """Several stores one after the other."""

    def __init__(self, parts: Sequence[DrawStore]):
        self.parts = list(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of one draw."""
        return self.parts[0].shapes()

    def get(self, rows: Sequence[int], device: torch.device | str) -> Weights:
        """These draws, stacked on a leading axis."""
        rows, found, first = list(rows), [], 0
        order: list[int] = []
        for part in self.parts:
            places = [i for i, row in enumerate(rows) if first <= row < first + len(part)]
            if places:
                found.append(part.get([rows[i] - first for i in places], device))
                order += places
            first += len(part)
        joined = tree.concatenate(found)
        if order == list(range(len(rows))):
            return joined
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return tree.index(joined, back.to(device))

    def shards(self) -> Iterable[Weights]:
        """All draws in pieces."""
        for part in self.parts:
            yield from part.shards()


class ChainsPosterior(DrawsPosterior):
    """Draws of Markov chains with statistics of their transitions; `extend` goes on where they stopped.

    `statistics` maps names (acceptance, divergent, energy, …) to `[chains, draws]`. With `thin` above 1 divergences and leapfrogs
    are sums over the transitions of a draw and acceptance is their mean. The last state of the chains is kept, and saved, so
    that a loaded posterior can go on too.
    """

    kind = "chains"

    def __init__(
        self,
        method: Any,
        model: Model,
        run: Mapping[str, Any],
        store: DrawStore,
        chains: int,
        state: list[Tensor] | None = None,
    ):
        super().__init__(method, model, run, Named(store, model, statistics=False), chains)
        self.everything = store
        self.state = state or []
        self.data: Data | None = None
        self.seed = 0

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> ChainsPosterior:  # type: ignore[override]
        """From what a run left."""
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended during warm-up")
        state = [leaf.detach().clone() for leaf in tree.tensors(fitted.state)]
        record = {**record_of(fitted), "compile": fitted.mode != "eager"}
        posterior = cls(method, model, record, fitted.draws, chains, state)
        posterior.data, posterior.seed = run.data, run.seed
        return posterior

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Of each draw: name → `[chains, draws]`, in float64."""
        total = len(self.everything) // self.chains * self.chains
        parts = [tree.to(part, "cpu") for part in Named(self.everything, self.model, statistics=True).shards()]
        found = tree.index(tree.concatenate(parts), slice(total))
        return {
            name.removeprefix(PREFIX): value.double().reshape(-1, self.chains).T.contiguous() for name, value in found.items()
        }

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Of hierarchical priors, sampled along: name of the group → `[chains, draws]`."""
        prefix = "precision."
        return {name.removeprefix(prefix): v for name, v in self.statistics.items() if name.startswith(prefix)}

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """Draws of the random weights, named, stacked on a leading axis."""
        found = self.store.get(self.plan_draws(_check_draws(draws), seed), self.device)
        return {name: found[name].clone() for name in self.model.random}

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """How far to trust the chains: `draws`, `chains`, the worst `rhat`, `ess_bulk`, `ess_tail`, `mcse`.

        `mcse` is that of a mean, in units of its standard deviation. With `x` on the function values f(x), where
        permuting hidden units does not matter; otherwise on the weights. Then what the transitions say: `divergences`,
        `acceptance`, `step_size`, `leapfrogs` (gradients a transition), `ebfmi` (the smallest over chains), `saturated`
        (the share of NUTS trees at `max_depth`), each where the kernel has it; `seconds` and `ess_per_second`.
        """
        from plausible.posteriors.summaries import report

        return report(self, x)

    def extend(
        self,
        draws: int = 1000,
        *,
        data: Any = None,
        mask: Any = None,
        progress: bool | None = None,
        checkpoint: Any = None,
        callbacks: Sequence[Callback] = (),
    ) -> ChainsPosterior:
        """The same chains, `draws` longer each: the draws so far and the new ones, as one longer run would have given them.

        Nothing adapts any more. A loaded posterior needs the `data` (and `mask`) again: the file does not hold them. With a
        `checkpoint` folder the continuation can be killed and resumed.
        """
        from plausible.fitting import continue_chains

        if draws is None:
            raise ValueError("draws must be a whole number of at least 1, got None")
        method = _Continued(self.method, self._state(), _check_draws(draws) or 1)
        new = continue_chains(self, method, data, mask=mask, progress=progress, checkpoint=checkpoint, callbacks=callbacks)
        new.run["seconds"] = new.run.get("seconds", 0.0) + self.run.get("seconds", 0.0)
        new.run["steps"] = new.run.get("steps", 0) + self.run.get("steps", 0)
        new.history = {name: self.history.get(name, []) + values for name, values in new.history.items()}
        new.everything = Joined([self.everything, new.everything])
        new.store = Named(new.everything, self.model, statistics=False)
        new.method = _with_draws(self.method, len(new.store) // self.chains)
        return new

    def _state(self) -> list[Tensor]:
        if not self.state:
            raise ValueError("this posterior holds no state of its chains, so they cannot go on: fit again with more draws")
        return self.state

    def _masked(self, masks: Weights) -> ChainsPosterior:
        pruned = super()._masked(masks)
        pruned.everything, pruned.state = pruned.store, []
        return pruned

    def _status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super()._status(name)

    def _moved(self, model: Model, device: torch.device) -> ChainsPosterior:
        store = self.everything
        if isinstance(store, MemoryDraws):
            store = MemoryDraws(tree.to(store.stacked, device))
        moved = ChainsPosterior(
            self.method, model, {**self.run, "history": self.history}, store, self.chains, tree.to(self.state, device)
        )
        moved.seed = self.seed
        moved.data = self.data if device == self.device else None
        return moved

    def _write(self, folder: Path) -> dict[str, Any]:
        from plausible.posteriors.saving import write_shards

        named = {f"{i:04d}": leaf for i, leaf in enumerate(self.state)}
        sha256 = storage.write_tensors(folder / "chains.safetensors", named) if named else ""
        return {
            "shards": write_shards(folder, self.everything),
            "chains": self.chains,
            "state_sha256": sha256,
            "seed": self.seed,
            "data": None if self.data is None else self.data.fingerprint(),
        }

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> ChainsPosterior:
        from plausible.posteriors.saving import history_of, read_shards

        store = read_shards(folder, content["shards"], model)
        state: list[Tensor] = []
        if content.get("state_sha256"):
            found = storage.read_tensors(folder / "chains.safetensors", content["state_sha256"])
            device = next(iter(model.initial.values())).device
            state = [found[name].to(device) for name in sorted(found)]
        posterior = cls(method, model, history_of(content["run"]), store, int(content["chains"]), state)
        posterior.seed = int(content.get("seed", 0))
        posterior.run["data"] = content.get("data")
        return posterior


def _with_draws(method: Any, draws: int) -> Any:
    """The method with this many draws per chain, where it says them."""
    known = is_dataclass(method) and any(f.name == "draws" for f in fields(method))
    return replace(method, draws=draws) if known and not isinstance(method, type) else method


@dataclass(frozen=True)
class _Continued(Method):
    """A sampler that goes on from a state: the same transitions, without warm-up."""

    method: Any
    state: list[Tensor]
    more: int

    traits: ClassVar[Traits] = Traits(verb="sample", divisible=False)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:  # noqa: ARG002
        """`more` draws, the first after what is missing to it where the run was stopped between two."""
        plan = self.method.plan(num_data)
        since = (int(self.state[-1]) - plan.burn_in) % plan.thin  # a state ends with the number of its transitions
        return Plan(steps=self.more * plan.thin - since, per_epoch=1, batch_size=None, burn_in=-since, thin=plan.thin)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        return self.method.prepare(model, run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        """The state that was left."""
        fresh = self.method.start(model, run, key)
        leaves = tree.tensors(fresh)
        if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in self.state]:
            raise ValueError("the state of these chains does not fit this network and method: it belongs to another run")
        for leaf, value in zip(leaves, self.state):
            leaf.copy_(value)
        return fresh

    def step(self, model: Model, run: Run[Any], state: Any, batch: Any) -> Any:
        return self.method.step(model, run, state, batch)

    def kept(self, model: Model, run: Run[Any], state: Any) -> Weights:
        return self.method.kept(model, run, state)

    def caption(self, state: Any) -> str | None:
        return self.method.caption(state)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> ChainsPosterior:
        """Of the new draws alone."""
        return self.method.posterior(model, run, fitted)
