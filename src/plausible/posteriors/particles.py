"""Posteriors with the evidence: of annealed particles, and of chains with replicas at powers of the likelihood."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from plausible.blocks.chains.tempering import log_ratio
from plausible.core.model import Model
from plausible.posteriors.base import record_of
from plausible.posteriors.chains import ChainsPosterior
from plausible.posteriors.draws import DrawsPosterior

if TYPE_CHECKING:
    from plausible.engine.method import Fitted, Run


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

    def status(self, name: str) -> str:
        return "held at its value" if name in self.model.points else super().status(name)


class ReplicasPosterior(ChainsPosterior):
    """Draws of chains at β = 1 whose replicas stood at other powers; `log_evidence` comes from all of them.

    `run["tempering"]` has the powers, the rates of exchange between neighbours, and the round trips to the hottest power and back.
    """

    kind = "replicas"

    @classmethod
    def of(cls, method: Any, model: Model, run: Run[Any], fitted: Fitted, chains: int = 1) -> Self:  # type: ignore[override]
        """From what a run left."""
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
