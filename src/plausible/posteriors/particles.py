"""Posteriors with the evidence: of annealed particles, and of chains with replicas at powers of the likelihood."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from plausible.blocks.chains.tempering import log_ratio
from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.storage import MemoryDraws
from plausible.posteriors.base import DrawsPosterior, record_of
from plausible.posteriors.chains import ChainsPosterior

if TYPE_CHECKING:
    from plausible.engine.method import Fitted, Run
    from plausible.methods.chains.annealed import Annealed


class ParticlesPosterior(DrawsPosterior):
    """Equally weighted particles at the end of an annealing run; `log_evidence` is its estimate of log p(D).

    `run["annealing"]` has lists with one number for each temperature: `temperature` (β), `ess` (effective particles before they are
    resampled), `acceptance`, `step_size`, `leapfrogs`, `error` (the standard error of the log evidence so far).
    """

    kind = "particles"

    @classmethod
    def of(cls, method: Annealed, model: Model, fitted: Fitted, chains: int = 1) -> ParticlesPosterior:  # noqa: ARG003
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
        found = cls(method, model, run, fitted.draws)
        if math.isfinite(value):
            found.log_evidence = value
            found.run["log_evidence_error"] = error
        return found

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """How the annealing went: particles are no chains, so there is no R̂.

        `temperatures` (β) and `ess`, the effective particles at each; `acceptance`, the mean over all moves; `log_evidence` with
        its standard error `log_evidence_error`: 0.1 says that it is good to about 0.1, above 1 it is not known; and `effective`,
        how many independent particles the draws are worth at least: 1/Σ_a W_a² over first ancestors a.
        """
        seen = self.run.get("annealing", {})
        report: dict[str, Any] = {
            "draws": len(self),
            "chains": 1,
            "divergences": 0,
            "temperatures": seen.get("temperature", []),
            "ess": seen.get("ess", []),
            "log_evidence": self.log_evidence,
            "log_evidence_error": self.run.get("log_evidence_error"),
        }
        if rates := seen.get("acceptance"):
            report["acceptance"] = sum(rates) / len(rates)
        if errors := seen.get("error"):
            report["effective"] = len(self) / (1 + (len(self) - 1) * errors[-1] ** 2)
        return report

    def _status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super()._status(name)

    def _moved(self, model: Model, device: torch.device) -> ParticlesPosterior:
        store = MemoryDraws(tree.to(self.store.stacked, device)) if isinstance(self.store, MemoryDraws) else self.store
        return ParticlesPosterior(self.method, model, {**self.run, "history": self.history}, store, self.chains)


class ReplicasPosterior(ChainsPosterior):
    """Draws of chains at β = 1 whose replicas stood at other powers; `log_evidence` comes from all of them.

    `run["tempering"]` has the powers, the rates of exchange between neighbours, and the round trips to the hottest power and back.
    """

    kind = "replicas"

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> ReplicasPosterior:
        """From what a run left."""
        found = super().of(method, model, run, fitted, chains)
        assert isinstance(found, ReplicasPosterior)
        own = fitted.state.adaptation
        value, error = log_ratio(own.bridges)
        rates = (own.accepted / own.seen.clamp(min=1)).tolist()
        found.run["tempering"] = {
            "temperatures": own.betas.tolist(),
            "swap_rates": rates,
            "barrier": sum(1 - rate for rate in rates),
            "round_trips": own.round_trips.tolist(),
        }
        if float(own.betas[-1]) == 0 and math.isfinite(value) and model.temperature == 1.0:
            found.log_evidence = value
            found.run["log_evidence_error"] = error
        return found

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Those of chains; the powers, how replicas travelled between them, and the evidence.

        `temperatures` (β), `swap_rates` between neighbours, `barrier` (the sum of their rejection rates), `round_trips` of each
        chain's replicas to the hottest power and back, `log_evidence` and its standard error. Rates far below 0.3 ask for more
        temperatures, about twice the barrier; without round trips nothing has travelled.
        """
        own = {"log_evidence": self.log_evidence, "log_evidence_error": self.run.get("log_evidence_error")}
        return super().diagnostics(x) | self.run.get("tempering", {}) | own

    def _moved(self, model: Model, device: torch.device) -> ReplicasPosterior:
        plain = super()._moved(model, device)
        run = {**self.run, "history": self.history}
        moved = ReplicasPosterior(self.method, model, run, plain.everything, self.chains, plain.state)
        moved.seed, moved.data = plain.seed, plain.data
        return moved
