"""Every method against long chains on four standard problems: what `docs/fidelity.md` says comes from here.

A cell is a problem and a method. The reference of a problem, long chains, is sampled once and kept beside the results, in
`references/`; it has a cell of its own, with its convergence in function space and the noise floor of every measure. Fits are
timed in processor seconds, since other programs may share the machine.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from experiments import fidelity_tables as shown
from experiments.fidelity_settings import PROBLEMS, methods, reference
from experiments.frame import SIZES, Cell, Part, Reproduction, Request, Size
from experiments.standard_problems import TITLES, exact, problem
from plausible.analysis.fidelity import Fidelity, fidelity
from plausible.engine import DivergenceError
from plausible.engine.method import Method
from plausible.fitting import fit
from plausible.methods import MAP
from plausible.posteriors.base import Posterior
from plausible.posteriors.saving import load

log = logging.getLogger("plausible")
SEED = 1000
"""Of the chains of the reference; methods count from 0."""


@dataclass(frozen=True)
class Against:
    """One method (None: the reference itself; "exact": independent draws of a posterior that is known) on one problem.

    `draws` are those that are compared, as `plausible.fidelity` takes them.
    """

    problem: str
    method: Method | str | None
    reference: Method
    draws: int | None = None


def run(settings: Against, request: Request) -> dict[str, Any]:
    """Fidelity for each seed, seconds of the fit, mean and standard deviation of f along a line; or why it does not apply."""
    truth = kept_reference(settings, request)
    if settings.method is None:
        return _reference(settings, truth)
    _warm_up()
    found: dict[str, Any] = {"fidelity": [], "fit": [], "line": []}
    for seed in range(request.seed, request.seed + request.seeds):
        began = time.process_time()
        try:
            posterior = (
                exact(seed=seed + 1) if isinstance(settings.method, str) else fitted(settings, settings.method, seed, request)
            )
        except (ValueError, TypeError, NotImplementedError, DivergenceError) as error:
            log.info("%s does not apply: %s", settings.method, error)
            return {"reason": f"{type(error).__name__}: {' '.join(str(error).split())}", "seconds": 0.0}
        found["fit"].append(time.process_time() - began)
        found["fidelity"].append(compared(settings, posterior, truth, floor=False).to_dict())
        found["line"].append(along(settings.problem, posterior))
    return found


@cache
def _warm_up() -> None:
    """What a process imports and allocates once belongs to no method."""
    own = problem("linear")
    fit(own.network, own.data, MAP(epochs=20), likelihood=own.likelihood, prior=own.prior, progress=False, compile=False)


def fitted(settings: Against, method: Method, seed: int, request: Request) -> Posterior:
    """The method's posterior of the problem."""
    own = problem(settings.problem)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network is not at a mode", UserWarning)
        posterior = fit(
            own.network,
            own.data,
            method,
            likelihood=own.likelihood,
            prior=own.prior,
            seed=seed,
            device=request.device,
            compile=request.compile,
            progress=request.progress,
        )
    if posterior.interrupted:
        raise KeyboardInterrupt("it is fitted anew by the next call")
    return posterior


def kept_reference(settings: Against, request: Request) -> Posterior:
    """The chains of this problem: those of the folder, or sampled and put there."""
    own = problem(settings.problem)
    folder = request.checkpoint.parent.parent / "references" / settings.problem if request.checkpoint else None
    if folder is not None and folder.is_dir():
        stored = load(folder, own.network)
        if stored.method == settings.reference:
            return stored
    began = time.process_time()
    posterior = fitted(settings, settings.reference, SEED, request)
    posterior.run["processor_seconds"] = time.process_time() - began
    if folder is not None:
        posterior.save(folder, overwrite=True)
    return posterior


def compared(settings: Against, posterior: Posterior, truth: Posterior, *, floor: bool) -> Fidelity:
    """All measures; the log-likelihood on the held-out rows."""
    own = problem(settings.problem)
    how: dict[str, Any] = {"draws": settings.draws, "floor": floor}
    y = own.held[1] if own.held[0] is own.x else None
    found = fidelity(posterior, truth, own.x, y, data=own.data, regions=dict(own.regions), **how)
    if y is not None:
        return found
    return replace(found, log_likelihood=fidelity(posterior, truth, *own.held, **how).log_likelihood)


def along(name: str, posterior: Posterior) -> dict[str, list[float]] | None:
    """Mean and standard deviation of E[y | f] along the line of the problem, where it has one."""
    line = problem(name).line
    if line is None:
        return None
    predictive = posterior.predict(line)
    return {"mean": _list(predictive.mean), "std": _list(predictive.epistemic.sqrt())}


def _reference(settings: Against, truth: Posterior) -> dict[str, Any]:
    own = problem(settings.problem)
    probes = torch.cat([own.x, *own.regions.values()])
    report = truth.diagnostics(probes)
    line = None if own.line is None else {"x": _list(own.line), "data": [_list(part) for part in own.data]}
    return {
        "fidelity": [compared(settings, truth, truth, floor=True).to_dict()],
        "fit": [float(truth.run.get("processor_seconds", truth.run.get("seconds", 0.0)))],
        "line": [along(settings.problem, truth)],
        "axis": line,
        "weights": own.weights,
        "rows": len(own.data[1]),
        "diagnostics": {key: float(report[key]) for key in ("rhat", "ess_bulk", "ess_tail", "divergences") if key in report},
    }


def _list(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.flatten().tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# Cells


def _cells() -> tuple[Cell, ...]:
    found: dict[str, dict[Size, Against]] = {}
    for size in SIZES:
        truth, draws = reference(size), 40 if size == "tiny" else None
        for name in PROBLEMS if size != "tiny" else ("gap",):
            found.setdefault(f"{name}-reference", {})[size] = Against(name, None, truth, draws)
            if name == "linear":
                found.setdefault("linear-exact", {})[size] = Against(name, "exact", truth, draws)
            for method, settings in methods(name, size).items():
                found.setdefault(f"{name}-{method}", {})[size] = Against(name, settings, truth, draws)
    return tuple(Cell(name, run, settings) for name, settings in found.items())


CELLS = _cells()


def _of(*problems: str) -> dict[Size, Sequence[str]]:
    return {size: tuple(c.name for c in CELLS if size in c.settings and c.settings[size].problem in problems) for size in SIZES}


REPRODUCTIONS = {
    "fidelity": Reproduction(
        "fidelity",
        "Every method against long chains",
        "",
        CELLS,
        (
            *(Part("table", name, title, _of(name), sheets=shown.sheets) for name, title in TITLES.items()),
            Part("figure", "distances", "How far f(x) is from the reference's", _of(*PROBLEMS), draw=shown.draw_distances),
            Part("figure", "epistemic", "Epistemic variance over the reference's", _of(*PROBLEMS), draw=shown.draw_epistemic),
            Part("figure", "bands", "f(x) with a gap in the data", _of("gap"), draw=shown.draw_bands),
            Part("table", "settings", "Settings", _of(*PROBLEMS), sheets=shown.settings),
        ),
        "../fidelity",
        {"full": 3, "reduced": 1, "tiny": 1},
    )
}
