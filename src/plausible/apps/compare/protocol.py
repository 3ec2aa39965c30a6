"""One cell: the UCI protocol of Hernández-Lobato and Adams (2015), or a fold of a table of one's own.

Inputs and targets are standardised by the training rows; on the UCI sets one hidden layer of 50 units (100 for protein) unless the
study says otherwise; scores are those of the predictive distribution in the units of the target.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.compare import own
from plausible.apps.compare.study import Candidate, Cell, Study
from plausible.apps.tables import mlp
from plausible.core import likelihoods, priors
from plausible.core.words import log
from plausible.engine import DivergenceError
from plausible.fitting import fit
from plausible.methods.automatic.auto import Auto
from plausible.methods.ensembles.ensemble import Ensemble
from plausible.methods.points.map import MAP
from plausible.posteriors.base import Posterior

_LIKELIHOODS = {
    "gaussian": (likelihoods.Gaussian, 1),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian, 2),
    "student-t": (likelihoods.StudentT, 1),
}


def run(study: Study, cell: Cell) -> dict[str, Any]:
    """Fit and score one cell: metrics, seconds, peak memory, and the settings that validation chose."""
    seed = study.seed + 1000 * cell.split
    parts = _published(study, cell) if study.own is None else own.parts(study.own, cell.split, study.seed)
    # Peaks are those of this cell: what the process held before belongs to earlier ones.
    memory = Memory()
    began = time.perf_counter()
    candidate, tried = _chosen(study.candidate(cell.label), parts, seed)
    tuned = time.perf_counter()
    posterior = train(candidate, parts.train, parts, seed)
    fitted = time.perf_counter()
    predictive = own.constant(parts) if posterior is None else parts.restore(posterior.predict(parts.test, seed=seed))
    scores = metrics.summary(predictive, parts.observed)
    return {
        "metrics": scores,
        "train_rows": len(parts.train[1]),
        "test_rows": len(parts.observed),
        "seconds": {"tuning": tuned - began if tried else 0.0, "fit": fitted - tuned, "predict": time.perf_counter() - fitted},
        "peak_bytes": memory.peak(),
        "chosen": tried[0][0] if tried else {} if posterior is None else _choice(posterior),
        "validation": [{"settings": s, "log_likelihood": v} for s, v in tried],
    }


def _choice(posterior: Posterior) -> dict[str, str]:
    """What `auto` chose."""
    return {"method": posterior.method.name, "reason": posterior.run["choice"]} if "choice" in posterior.run else {}


def _published(study: Study, cell: Cell) -> own.Parts:
    table = datasets.uci(cell.dataset)
    raw = table.split(cell.split) if study.kind == "random" else table.gap(cell.split)
    split = raw.standardised()
    return own.Parts(split.train, split.test[0], raw.test[1], split.restore, (table.hidden or 50,))


def warm_up() -> None:
    """A small fit that is thrown away: what a process allocates and imports once belongs to no method."""
    x = torch.linspace(-1, 1, 20)[:, None]
    likelihood = likelihoods.HeteroscedasticGaussian()
    posterior = fit(mlp(1, (5,), 2), (x, x), Ensemble(MAP(epochs=2), 2), likelihood=likelihood, progress=False)
    metrics.summary(posterior.predict(x).rescaled(1.0, 2.0), x)


def train(candidate: Candidate, data: tuple[Any, Any], parts: own.Parts, seed: int) -> Posterior | None:
    """The candidate's posterior given these training rows; None for the baseline that has none."""
    method = candidate.build()
    if method is None:
        return None
    x, y = data
    law, outputs = _law(candidate, parts, y, isinstance(method, Auto))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(x.shape[1], parts.hidden if candidate.hidden is None else candidate.hidden, outputs, candidate.activation)
    prior = None if candidate.prior_scale is None else priors.Gaussian(scale=float(candidate.prior_scale))
    return fit(network, (x, y), method, likelihood=law, prior=prior, seed=seed, progress=False)


def _law(candidate: Candidate, parts: own.Parts, y: Any, chooses: bool) -> tuple[likelihoods.Likelihood | None, int]:
    """The likelihood (None: the library's choice) and how many outputs it needs."""
    if candidate.likelihood != "auto":
        make, per_target = _LIKELIHOODS[candidate.likelihood]
        return make(), per_target * y.shape[1]
    if parts.response is None:
        return None, y.shape[1]
    law = None if chooses and not parts.response.classes else parts.response.make_likelihood()
    return law, parts.response.outputs


def _chosen(candidate: Candidate, parts: own.Parts, seed: int) -> tuple[Candidate, list[tuple[dict[str, Any], float]]]:
    """The variant with the best log-likelihood on held-out training rows, and all that were tried, best first."""
    if not candidate.grid:
        return candidate, []
    x, y = parts.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held = max(1, round(candidate.validation * len(x)))
    inner, outer = order[held:], order[:held]
    tried = []
    for changes in candidate.variants():
        try:
            posterior = train(candidate.with_(changes), (x[inner], y[inner]), parts, seed)
        except DivergenceError as error:
            log.info("%s with %s diverged: %s", candidate.label, changes, error)
            tried.append((changes, -math.inf))
            continue
        assert posterior is not None  # a baseline has no grid
        value = metrics.log_likelihood(posterior.predict(x[outer], seed=seed), y[outer])
        tried.append((changes, float(value)))
    tried.sort(key=lambda pair: -pair[1])
    if tried[0][1] == -math.inf:
        raise ValueError(f"every combination of the grid ({', '.join(candidate.grid)}) diverged")
    return candidate.with_(tried[0][0]), tried


class Memory:
    """The most memory that this process (and its GPU) held since now, over what it held at the start."""

    def __init__(self) -> None:
        self.before: int | None = None
        try:  # Linux: forget the peak so far
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")
        except OSError:
            pass
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.before is None:
            return None
        extra = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return max(0, _status("VmHWM") - self.before) + extra


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
