"""The posteriors that chains and particles leave: draws, what is known of transitions and of the evidence, and how to go on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from plausible import engine
from plausible.blocks.chains.tempering import log_ratio
from plausible.core import random, serialise, turns
from plausible.core import weights as tree
from plausible.core.data import Data
from plausible.core.model import Model
from plausible.core.storage import JoinedDraws
from plausible.core.weights import Weights
from plausible.engine.checkpoint import Checkpoint, digest
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

    data: Data | None = None
    seed = 0
    state: Sequence[Tensor] = ()  # the leaves of the chains' last one

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> Self:  # type: ignore[override]
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended during warm-up")
        posterior = cls(method, model, {**record_of(fitted), "compile": fitted.mode != "eager"}, fitted.draws, chains)
        posterior.state = [leaf.detach().clone() for leaf in tree.tensors(fitted.state)]
        posterior.data, posterior.seed = run.data, run.seed
        return posterior

    def content(self) -> Content:
        state = {f"{i:04d}": leaf for i, leaf in enumerate(self.state)}
        fingerprint = self.run.get("data") if self.data is None else self.data.fingerprint()
        settings = {"chains": self.chains, "seed": self.seed, "data": fingerprint}
        return Content({"state": state}, settings, self.store)

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        posterior, state = super().rebuilt(method, model, run, content), content.tensors.get("state", {})
        posterior.state = [state[name] for name in sorted(state)]
        posterior.seed, posterior.run["data"] = int(content.settings["seed"]), content.settings["data"]
        return posterior

    def to(self, device: torch.device | str) -> Self:
        moved = super().to(device)
        moved.data = self.data if moved.device == self.device else None
        return moved

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Of each draw: name → `[chains, draws]`, in float64."""
        total = len(self) // self.chains * self.chains
        # what is stored beside weights and buffers are statistics
        known = {name for name in self.store.shapes() if name not in self.model.initial and name not in self.model.buffers}
        parts = [{name: value.cpu() for name, value in part.items() if name in known} for part in self.store.shards()]
        values = {name: value[:total] for name, value in tree.concatenate(parts).items()}
        by_chain = {name: value.double().reshape(-1, self.chains).T.contiguous() for name, value in values.items()}
        return {name.removeprefix(PREFIX): value for name, value in by_chain.items()}

    @property
    def precisions(self) -> dict[str, Tensor]:
        """Of hierarchical priors, sampled along: name of the group → `[chains, draws]`."""
        prefix = "precision."
        return {name.removeprefix(prefix): v for name, v in self.statistics.items() if name.startswith(prefix)}

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """How far to trust the chains, by functions f(x) or weights, and what their transitions say; see `diagnostics.transitions`.

        Also `mcse`, that of a mean in units of its standard deviation, `seconds` and `ess_per_second`.
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
        if not len(self.state):
            raise ValueError("this posterior holds no state of its chains, so they cannot go on: fit again with more draws")
        method = _Continued(self.method, list(self.state), check_draws(draws) or 1)
        # noise inside the network goes on, and does not repeat that of the first run
        seed = random.key(self.seed, 13, int(self.run.get("steps", 0)))[1].item()
        with turns.one_fit(), torch.inference_mode(False), random.isolated(int(seed), self.device):
            rows = self._data(data, mask)
            options = engine.Options(
                seed=self.seed,
                compile=self.run.get("compile", "auto"),
                progress=progress,
                callbacks=tuple(callbacks),
                checkpoint=Checkpoint.of(checkpoint),
                identity=self._identity(method, rows),
            )
            model, run, fitted = engine.run(method, self.model, rows, options)
        if fitted.draws is None:
            raise KeyboardInterrupt("stopped before the first new draw was kept")
        if fitted.interrupted:
            warnings.warn(f"stopped by Ctrl-C after {fitted.steps:,} of the new transitions", UserWarning, stacklevel=2)
        new = method.posterior(model, run, fitted)
        for counted in ("seconds", "steps"):
            new.run[counted] = new.run.get(counted, 0) + self.run.get(counted, 0)
        new.history = {name: self.history.get(name, []) + values for name, values in new.history.items()}
        new.store = JoinedDraws([self.store, new.store])
        if hasattr(self.method, "draws"):
            new.method = replace(self.method, draws=len(new) // self.chains)
        return new

    def _data(self, data: Any, mask: Any) -> Data:
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
        return {
            "method": serialise.encode(self.method, strict=False),
            "likelihood": serialise.encode(self.model.likelihood, strict=False),
            "prior": serialise.encode(self.model.prior, strict=False),
            "temperature": self.model.temperature,
            "state": digest(("", leaf) for leaf in method.state),
            "more": method.more,
            "seed": self.seed,
            "data": data.fingerprint(),
            "device": self.device.type,
        }

    def masked(self, masks: Weights) -> Self:
        pruned = super().masked(masks)
        pruned.state = ()  # chains of the weights that are left would be others
        return pruned

    def status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super().status(name)


class ParticlesPosterior(DrawsPosterior):
    """Equally weighted particles at the end of an annealing run; `log_evidence` is its estimate of log p(D).

    `run["annealing"]` has lists with one number for each temperature: `temperature` (β), `ess` (effective particles before they are
    resampled), `acceptance`, `step_size`, `leapfrogs`, `error` (the standard error of the log evidence so far).
    """

    kind = "particles"

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, chains: int = 1) -> Self:  # noqa: ARG003
        """From what a run left: steps after the last temperature, where nothing happened, are not counted."""
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended before it began")
        count = int(fitted.state.passed)
        value, error = method.evidence(fitted.state)
        run: dict[str, Any] = {
            **record_of(fitted),
            "steps": count,
            "history": {n: values[:count] for n, values in fitted.history.items()},
            "annealing": dict(zip(method.traced, fitted.state.trace[:count].T.tolist())),
        }
        posterior = cls(method, model, run, fitted.draws)
        if math.isfinite(value):
            posterior.log_evidence = value
            posterior.run["log_evidence_error"] = error
        return posterior

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """How the annealing went: particles are no chains, so there is no R̂.

        `temperatures` (β) and `ess`, the effective particles at each; `acceptance`, the mean over all moves; `log_evidence` with
        its standard error `log_evidence_error`: 0.1 says that it is good to about 0.1, above 1 it is not known; and `effective`,
        how many independent particles the draws are worth at least: 1/Σ_a W_a² over first ancestors a.
        """
        seen = self.run.get("annealing", {})
        known = {"log_evidence": self.log_evidence, "log_evidence_error": self.run.get("log_evidence_error")}
        report: dict[str, Any] = {"draws": len(self), "chains": 1, "divergences": 0, **known}
        report |= {"temperatures": seen.get("temperature", []), "ess": seen.get("ess", [])}
        if rates := seen.get("acceptance"):
            report["acceptance"] = sum(rates) / len(rates)
        if errors := seen.get("error"):
            report["effective"] = len(self) / (1 + (len(self) - 1) * errors[-1] ** 2)
        return report

    def status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super().status(name)


class ReplicasPosterior(ChainsPosterior):
    """Draws of chains at β = 1 whose replicas stood at other powers; `log_evidence` comes from all of them.

    `run["tempering"]` has the powers, the rates of exchange between neighbours, and the round trips to the hottest power and back.
    """

    kind = "replicas"

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> Self:  # type: ignore[override]
        posterior = super().of(method, model, run, fitted, chains)
        exchange = fitted.state.adaptation
        value, error = log_ratio(exchange.bridges)
        rates = (exchange.accepted / exchange.seen.clamp(min=1)).tolist()
        posterior.run["tempering"] = {
            "temperatures": exchange.betas.tolist(),
            "swap_rates": rates,
            "barrier": sum(1 - rate for rate in rates),
            "round_trips": exchange.round_trips.tolist(),
        }
        # Only a ladder that reaches down to the prior bridges the whole way, and p(D) is that of the untempered model.
        if float(exchange.betas[-1]) == 0 and math.isfinite(value) and model.temperature == 1.0:
            posterior.log_evidence = value
            posterior.run["log_evidence_error"] = error
        return posterior

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Those of chains; the powers, how replicas travelled between them, and the evidence.

        `temperatures` (β), `swap_rates` between neighbours, `barrier` (the sum of their rejection rates), `round_trips` of each
        chain's replicas to the hottest power and back, `log_evidence` and its standard error. Rates far below 0.3 ask for more
        temperatures, about twice the barrier; without round trips nothing has travelled.
        """
        known = {"log_evidence": self.log_evidence, "log_evidence_error": self.run.get("log_evidence_error")}
        return super().diagnostics(x) | self.run.get("tempering", {}) | known


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
        # a run that was stopped between two draws owes the rest of its thinning
        since = (int(self.state[-1]) - plan.burn_in) % plan.thin  # a state ends with the number of its transitions
        return replace(plan, steps=self.more * plan.thin - since, per_epoch=1, burn_in=-since)

    def prepare(self, model: Model, run: Run[Any]) -> Any:
        return self.method.prepare(model, run)

    def start(self, model: Model, run: Run[Any], key: Tensor) -> Any:
        fresh = self.method.start(model, run, key)
        leaves = tree.tensors(fresh)
        # leaves are matched by their place: another method or network has others
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
        return self.method.posterior(model, run, fitted)
