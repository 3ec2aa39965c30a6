"""The posterior that chains leave: their draws, what is known of each transition, and how to go on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from plausible import engine
from plausible.core import random, serialise
from plausible.core import weights as tree
from plausible.core.data import Data
from plausible.core.model import Model
from plausible.core.storage import DrawStore, JoinedDraws
from plausible.core.weights import Weights
from plausible.engine.method import Fitted, Method, Plan, Run, Traits
from plausible.posteriors import diagnostics
from plausible.posteriors.base import check_draws, data_for, record_of
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.saving import Content

if TYPE_CHECKING:
    from plausible.engine.loop import Callback

PREFIX = "chain."  # what names of statistics begin with


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
        super().__init__(method, model, run, store, chains)
        self.state = state or []
        self.data: Data | None = None
        self.seed = 0

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> Self:  # type: ignore[override]
        """From what a run left."""
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended during warm-up")
        state = [leaf.detach().clone() for leaf in tree.tensors(fitted.state)]
        record = {**record_of(fitted), "compile": fitted.mode != "eager"}
        posterior = cls(method, model, record, fitted.draws, chains, state)
        posterior.data, posterior.seed = run.data, run.seed
        return posterior

    def content(self) -> Content:
        state = {f"{i:04d}": leaf for i, leaf in enumerate(self.state)}
        fingerprint = self.run.get("data") if self.data is None else self.data.fingerprint()
        settings = {"chains": self.chains, "seed": self.seed, "data": fingerprint}
        return Content({"state": state}, settings, self.store)

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        state, settings = content.tensors.get("state", {}), content.settings
        leaves = [state[name] for name in sorted(state)]
        posterior = cls(method, model, run, content.stored, int(settings["chains"]), leaves)
        posterior.seed, posterior.run["data"] = int(settings["seed"]), settings["data"]
        return posterior

    def to(self, device: torch.device | str) -> Self:
        moved = super().to(device)
        moved.data = self.data if moved.device == self.device else None
        return moved

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Of each draw: name → `[chains, draws]`, in float64."""
        total = len(self) // self.chains * self.chains
        known = {name for name in self.store.shapes() if name not in self.model.initial and name not in self.model.buffers}
        parts = [{name: value.cpu() for name, value in part.items() if name in known} for part in self.store.shards()]
        values = {name: value[:total] for name, value in tree.concatenate(parts).items()}
        return {
            name.removeprefix(PREFIX): value.double().reshape(-1, self.chains).T.contiguous() for name, value in values.items()
        }

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Of hierarchical priors, sampled along: name of the group → `[chains, draws]`."""
        prefix = "precision."
        return {name.removeprefix(prefix): v for name, v in self.statistics.items() if name.startswith(prefix)}

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """How far to trust the chains: `draws`, `chains`, the worst `rhat`, `ess_bulk`, `ess_tail`, `mcse`.

        `mcse` is that of a mean, in units of its standard deviation. With `x` on the function values f(x), where
        permuting hidden units does not matter; otherwise on the weights. Then what the transitions say: `divergences`,
        `acceptance`, `step_size`, `leapfrogs` (gradients a transition), `ebfmi` (the smallest over chains), `saturated`
        (the share of NUTS trees at `max_depth`), each where the kernel has it; `seconds` and `ess_per_second`.
        """
        return diagnostics.report(self, x)

    def extend(
        self,
        draws: int = 1000,
        *,
        data: Any = None,
        mask: Any = None,
        progress: bool | None = None,
        checkpoint: Any = None,
        callbacks: Sequence[Callback] = (),
    ) -> Self:
        """The same chains, `draws` longer each: the draws so far and the new ones, as one longer run would have given them.

        Nothing adapts any more. A loaded posterior needs the `data` (and `mask`) again: the file does not hold them. With a
        `checkpoint` folder the continuation can be killed and resumed.
        """
        if draws is None:
            raise ValueError("draws must be a whole number of at least 1, got None")
        if not self.state:
            raise ValueError("this posterior holds no state of its chains, so they cannot go on: fit again with more draws")
        method = _Continued(self.method, self.state, check_draws(draws) or 1)
        seed = random.key(self.seed, 13, int(self.run.get("steps", 0)))[1].item()
        with torch.inference_mode(False), random.isolated(int(seed), self.device):
            rows = self._data(data, mask)
            options = engine.Options(
                seed=self.seed,
                compile=self.run.get("compile", "auto"),
                progress=progress,
                callbacks=tuple(callbacks),
                checkpoint=engine.Checkpoint(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint,
                identity=self._identity(method, rows),
            )
            model, run, fitted = engine.run(method, self.model, rows, options)
        if fitted.draws is None:
            raise KeyboardInterrupt("stopped before the first new draw was kept")
        if fitted.interrupted:
            warnings.warn(f"stopped by Ctrl-C after {fitted.steps:,} of the new transitions", UserWarning, stacklevel=2)
        new = method.posterior(model, run, fitted)
        new.run["seconds"] = new.run.get("seconds", 0.0) + self.run.get("seconds", 0.0)
        new.run["steps"] = new.run.get("steps", 0) + self.run.get("steps", 0)
        new.history = {name: self.history.get(name, []) + values for name, values in new.history.items()}
        new.store = JoinedDraws([self.store, new.store])
        new.method = _with_draws(self.method, len(new) // self.chains)
        return new

    def _data(self, data: Any, mask: Any) -> Data:
        """The data to go on with: those of the run, or the same ones given again."""
        if data is None:
            if self.data is None:
                raise ValueError(
                    "this posterior was loaded or moved and does not hold the data: pass them again, extend(draws, data=(x, y))"
                )
            return self.data
        given = data_for(self.model, data, mask)
        before = self.run.get("data") or (self.data and self.data.fingerprint())
        if given.num_data != self.model.num_data or before not in (None, given.fingerprint()):
            raise ValueError("data are not those that these chains were fitted to: they cannot go on; fit anew")
        return given

    def _identity(self, method: _Continued, data: Data) -> dict[str, Any]:
        """What must agree for a checkpoint to be that of this continuation; the state says all about the network."""
        digest = hashlib.blake2b(digest_size=8)
        for leaf in method.state:
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {
            "method": serialise.encode(self.method, strict=False),
            "likelihood": serialise.encode(self.model.likelihood, strict=False),
            "prior": serialise.encode(self.model.prior, strict=False),
            "temperature": self.model.temperature,
            "state": digest.hexdigest(),
            "more": method.more,
            "seed": self.seed,
            "data": data.fingerprint(),
            "device": self.device.type,
        }

    def masked(self, masks: Weights) -> Self:
        pruned = super().masked(masks)
        pruned.state = []  # chains of the weights that are left would be others
        return pruned

    def status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super().status(name)


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
        return Plan(
            steps=self.more * plan.thin - since, per_epoch=1, batch_size=None, burn_in=-since, thin=plan.thin, unit=plan.unit
        )

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

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> Any:
        """Of the new draws alone."""
        return self.method.posterior(model, run, fitted)
