"""The settings with which each method is held against long chains, by problem.

They were set beforehand: steps and rates by how the log joint of the training data rose; step sizes of SGLD as a fraction of the
largest curvature at a mode; chains by the usual numbers. Those of `ivon`, `low-rank`, `flow` and `multiplicative-flow` were changed
once after a first look at the results, because they had plainly not converged. A method that is registered and not listed runs
with its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from experiments.frame import Size
from plausible.core.schedules import Cosine
from plausible.engine.method import Method
from plausible.methods import registry
from plausible.methods.chains.base import Chains
from plausible.methods.chains.nuts import NUTS
from plausible.testing import quick

PROBLEMS = ("linear", "gap", "moons", "boston")
STEPS = {"linear": 500, "gap": 1500, "moons": 1000, "boston": 800}
"""Full-batch steps of methods that are trained."""
RATES = {"linear": 0.05, "gap": 0.02, "moons": 0.02, "boston": 0.01}
LANGEVIN = {"linear": 5e-4, "gap": 1.5e-5, "moons": 3e-3, "boston": 6e-6}
"""ε of SGLD, about ½/λ_max."""
SAMPLERS = {"draws": 250, "chains": 4, "warmup": 250}

Maker = Callable[[str], Method]


def _made(name: str, **settings: Any) -> Method:
    return registry[name](**settings)


def _trained(name: str, factor: float = 1.0, rate: float = 1.0, networks: float | None = None, **settings: Any) -> Maker:
    """Full batches, the rate falling to nothing; `factor` times the steps, on networks `networks` times where that is given."""

    def make(problem: str) -> Method:
        own = factor if problem == "linear" or networks is None else networks
        steps = round(own * STEPS[problem])
        return _made(name, epochs=steps, batch_size=None, lr=Cosine(rate * RATES[problem]), **settings)

    return make


def _chains(name: str, **settings: Any) -> Maker:
    return lambda _: _made(name, **{**SAMPLERS, **settings})


MAPPED = _trained("map", 2)
MAKERS: dict[str, Maker] = {
    "map": MAPPED,
    "ensemble": lambda problem: _made("ensemble", method=MAPPED(problem), members=5),
    "laplace": lambda problem: _made("laplace", structure="kron", mode=MAPPED(problem), tune=None),
    "laplace-full": lambda problem: _made("laplace", structure="full", mode=MAPPED(problem), tune=None),
    "ensemble-laplace": lambda problem: _made(
        "ensemble", method=_made("laplace", structure="full", mode=MAPPED(problem), tune=None), members=5
    ),
    "mean-field": _trained("mean-field", 2),
    "graves": _trained("graves", 2),
    "mdl": _trained("mdl", coding="prior"),
    "dvi": _trained("dvi"),
    "full-rank": _trained("full-rank", 2, networks=1, landing=True),
    "low-rank": lambda problem: _trained("low-rank", 2, landing=problem == "linear", rank=3 if problem == "linear" else 10)(
        problem
    ),
    "matrix-normal": _trained("matrix-normal", 2, networks=1, landing=True),
    "radial": _trained("radial", 2, networks=1),
    "rank1": _trained("rank1", 2, networks=1),
    "flow": _trained("flow", 1, 0.6),
    "multiplicative-flow": _trained("multiplicative-flow", 1, samples=2, transforms=1, hidden=16),
    "refined": _trained("refined", 0.5, draws_kept=1000, further=10),
    "ivon": lambda problem: _trained(
        "ivon", 2, 5, beta2=0.99, clip_radius=math.inf if problem == "linear" else 0.1, samples=2, antithetic=True
    )(problem),
    "vogn": _trained("vogn", 1, 10, beta2=0.99, samples=2, antithetic=True),
    "sgld": lambda problem: _made(
        "sgld", epochs=10_000, batch_size=None, lr=LANGEVIN[problem], burn_in=0.25, thin=5 if problem == "linear" else 10
    ),
    "hmc": _chains("hmc", leapfrogs=200),
    "nuts": _chains("nuts"),
    "chees": _chains("chees", chains=8, draws=125),
    "mclmc": _chains("mclmc", warmup=2000),
    "mile": lambda problem: _made("mile", draws=100, warmup=2000, mode=MAPPED(problem)),
    "mala": _chains("mala", warmup=2000, thin=20),
    "metropolis": _chains("metropolis", warmup=5000, thin=40),
    "elliptical-slice": _chains("elliptical-slice", thin=10),
    "parallel-tempering": _chains("parallel-tempering", draws=125, warmup=125),
    "smc": lambda _: _made("smc", particles=200, pilots=50, moves=3, leapfrogs=10),
    "ais": lambda _: _made("ais", particles=200, pilots=50, temperatures=200, leapfrogs=10),
}


def methods(problem: str, size: Size) -> dict[str, Method]:
    """All registered methods, and some put together, with their settings for this problem."""
    if size == "tiny":
        return {name: quick(MAKERS[name](problem)) for name in ("map", "laplace", "mean-field")}
    names = [name for name in MAKERS if name in registry or name in ("laplace-full", "ensemble-laplace")]
    found = {name: MAKERS[name](problem) for name in names}
    found |= {name: _defaults(name) for name in sorted(registry) if name not in found}
    return {name: _longer(method) for name, method in found.items()} if size == "full" else found


def reference(size: Size) -> Method:
    """Long chains."""
    if size == "tiny":
        return _made("hmc", draws=20, chains=2, warmup=20, leapfrogs=4)
    many = {"full": 4, "reduced": 1}[size]
    return NUTS(draws=500 * many, chains=4, warmup=500)


def _defaults(name: str) -> Method:
    method = registry[name]()
    if not isinstance(method, Chains):
        return method
    return replace(method, draws=SAMPLERS["draws"], chains=SAMPLERS["chains"], warmup=SAMPLERS["warmup"])


def _longer(method: Method) -> Method:
    """Four times the draws of chains, twice the steps of the others."""
    if isinstance(method, Chains):
        return replace(method, draws=4 * method.draws)
    inner = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
    changes = {key: _longer(value) for key, value in inner.items() if isinstance(value, Method)}
    if isinstance(inner.get("epochs"), int):
        changes["epochs"] = 2 * inner["epochs"]
    return replace(method, **changes) if changes else method  # type: ignore[type-var]
