"""`sweep`: every combination of a grid, trained in stacked groups, scored on validation data, resumable."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plausible.analysis import metrics
from plausible.apps.sweep.grid import Grid, Recipe, Settings, applied
from plausible.apps.sweep.stacked import Alone, Stacked, stacks
from plausible.core import serialise
from plausible.core.data import as_data, select_rows
from plausible.core.likelihoods import Likelihood
from plausible.core.priors import Prior, as_prior
from plausible.core.storage import read_json, write_json
from plausible.core.tables import Table, Tabular, data_frame
from plausible.core.words import log
from plausible.engine import Checkpoint
from plausible.engine.method import Method
from plausible.engine.watching import Monitor
from plausible.fitting import fit
from plausible.methods import create
from plausible.methods.points.map import MAP
from plausible.posteriors.base import Posterior

CHECKPOINT_SECONDS = 240.0  # stacked states are large
HIGHER_IS_BETTER = ("accuracy", "log_likelihood", "auroc")
Score = Callable[[Posterior], Mapping[str, float]]


@dataclass
class Sweep(Tabular):
    """What a sweep found: `rows`, one for each combination in the order of the grid, with `settings`, `scores` and `curve`.

    `best()` is the row with the best score: the lowest, or for log-likelihoods and accuracies the highest; those that diverged
    come last.
    `method(row)`, `prior(row)` and `temperature(row)` build what to fit again.
    """

    rows: list[dict[str, Any]]
    base: Recipe | None = None
    seconds: float = 0.0
    groups: list[dict[str, Any]] = field(default_factory=list)

    def sorted(self, by: str | None = None) -> list[dict[str, Any]]:
        by = by or self.measure
        known = list(self.rows[0]["scores"])
        if by not in known:
            raise ValueError(f"by={by!r} is not one of the scores; there are {', '.join(known)}")
        sign = -1 if by in HIGHER_IS_BETTER else 1
        values = [row["scores"].get(by) for row in self.rows]
        keys = [math.inf if value is None else sign * value for value in values]
        return [self.rows[place] for place in sorted(range(len(keys)), key=keys.__getitem__)]

    def best(self, by: str | None = None) -> dict[str, Any]:
        """The row with the best score; refused where every setting diverged."""
        row = self.sorted(by)[0]
        if row["scores"][by or self.measure] is None:
            raise ValueError("every setting diverged, so none is best; try smaller learning rates")
        return row

    @property
    def measure(self) -> str:
        """The score that decides where none is named: the first."""
        return next(iter(self.rows[0]["scores"]))

    @classmethod
    def read(cls, path: str | Path) -> Sweep:
        """A sweep from the results.json that `plausible sweep` wrote: rows and groups, without what to fit again."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not content.get("rows"):
            raise ValueError(f"{path} is not the results.json of a sweep")
        return cls(content["rows"], groups=content.get("groups", []))

    def recipe(self, row: Mapping[str, Any]) -> Recipe:
        if self.base is None:
            raise ValueError("this sweep was read from a file, which does not hold the method: take row['settings']")
        return applied(self.base, row["settings"])

    def method(self, row: Mapping[str, Any]) -> Method:
        return self.recipe(row).method

    def prior(self, row: Mapping[str, Any]) -> Prior:
        return self.recipe(row).prior

    def temperature(self, row: Mapping[str, Any]) -> float:
        """The temperature of a row, for `Model.tempered`."""
        return float(self.recipe(row).temperature)

    def as_table(self, top: int = 10, rest: str = "") -> Table:
        """The best settings; `rest` says where the others are."""
        lines = [[_short(cell) for cell in (*row["settings"].values(), *row["scores"].values())] for row in self.sorted()]
        more = f"… and {len(lines) - top} more{rest and ' in '}{rest}" if len(lines) > top else ""
        heads = [*self.rows[0]["settings"], *self.rows[0]["scores"]]
        return Table(heads, lines[:top], f"{len(lines)} settings, best first by {self.measure}", note=more)

    def text(self, top: int = 10, rest: str = "") -> str:
        return self.as_table(top, rest).text()

    def to_pandas(self) -> Any:
        """A data frame with a row for each setting, best first; needs pandas."""
        return data_frame([{**row["settings"], **row["scores"]} for row in self.sorted()])


def sweep(
    network: nn.Module,
    data: Any,
    method: Method | str,
    grid: Grid | Mapping[str, Sequence[Any]],
    validation: tuple[Any, Any],
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
    score: Score | None = None,
    draws: int = 10,
    every: int | None = None,
    at_once: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    compile: Any = "auto",
    precision: Any = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Sweep:
    """score(q_k | validation) for every combination k of the grid, the q_k trained as one program.

    Combinations that share the shapes of the program (all but whole numbers, words and objects in the grid) are stacked on a
    leading axis, at most `at_once` of them, and trained together from the same weights on the same batches; methods of several
    stages or members, and those that sample, run once for each combination. Each is then scored
    on `validation` (x, y) by `draws` draws of its posterior: error and negative log-likelihood for classes, root mean squared
    error and negative log-likelihood for numbers, or whatever `score(posterior)` says, a mapping of names to numbers of which
    lower is better (but for "accuracy", "log_likelihood" and "auroc"). With `every` the scores are also taken
    every so many epochs.

    With `out`, a folder, finished groups and a checkpoint of the one at work are kept there, and the same call after a kill goes on
    where it stood. The rest is as in `fit`. Cost: that of all runs, less what stacking saves; memory: `at_once` states, twice.
    """
    method, whole = create(method), as_prior(prior)
    grid = grid if isinstance(grid, Grid) else Grid(grid)
    for name, value in (("at_once", at_once), ("draws", draws), ("every", 1 if every is None else every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if score is not None and not callable(score):
        raise TypeError(f"score must be a function of a posterior that returns a mapping of numbers, got {score!r}")
    for name in ("callbacks", "checkpoint", "init"):
        if name in settings:
            why = "they have their own checkpoints (out=) and start at the network's weights"
            raise TypeError(f"{name}= is not for sweeps: {why}")
    base = Recipe(method, whole)
    if any(stage.plan(1000).patience is not None for stage in method.stages()):
        instead = "leave patience unset, and look at the scores every so many epochs (every=)"
        raise ValueError(f"a sweep does not stop early: {instead}")
    together = stacks(method)
    groups = [part for group in grid.groups(base) for part in _parts(group, at_once if together else 1)]
    folder = None if out is None else Path(out)
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out={str(folder)!r} is a file, expected a folder")
        folder.mkdir(parents=True, exist_ok=True)
    judge = score or _Judge(validation, draws)
    if isinstance(judge, _Judge):
        judge.try_on(network, data, likelihood, settings)
    told = _told(network, data, validation, likelihood, score, settings)
    plain = [serialise.encode(method, strict=False), serialise.encode(whole, strict=False)]
    began = time.perf_counter()
    done: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        parts = [*plain, group, seed, draws, every, repr(network), str(precision), told]
        identity = hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:16]
        place = None if folder is None else folder / f"group-{number:03d}"
        result = _stored(place, identity)
        if result is None:
            log.info("group %d of %d: %d settings stacked", number + 1, len(groups), len(group))
            started = time.perf_counter()
            keep = None if place is None else Checkpoint(place, seconds=CHECKPOINT_SECONDS)
            monitor = Monitor(lambda _, posterior: {"scores": _scores(posterior, judge)}, every or 10**9)
            posterior = fit(
                network,
                data,
                Stacked(method, tuple(group)) if together else Alone(method, group[0]),
                likelihood=likelihood,
                prior=whole,
                seed=seed,
                device=device,
                compile=compile,
                precision=precision,
                progress=progress,
                checkpoint=keep,
                callbacks=[monitor],
                **settings,
            )
            if posterior.interrupted:
                where = "" if place is None else f"; the same call goes on from {str(place)!r}"
                raise KeyboardInterrupt(f"the sweep was stopped in group {number + 1} of {len(groups)}{where}")
            result = {
                "identity": identity,
                "seconds": time.perf_counter() - started,
                "steps": posterior.run["steps"],
                "mode": posterior.run["mode"],
                "records": monitor.records,
                "settings": [_plain(s) for s in group],
            }
            del posterior
            if place is not None:
                write_json(place.with_suffix(".json"), result)
                shutil.rmtree(place, ignore_errors=True)
        done.append(result)
    return _collected(grid, groups, done, base, time.perf_counter() - began)


def _collected(grid: Grid, groups: list[list[Settings]], done: list[dict[str, Any]], base: Recipe, seconds: float) -> Sweep:
    by_settings: dict[str, dict[str, Any]] = {}
    for group, result in zip(groups, done):
        for k, settings in enumerate(group):
            curve = [{"epoch": record["epoch"], **record["scores"][k]} for record in result["records"]]
            scores = {name: value for name, value in curve[-1].items() if name != "epoch"}
            by_settings[repr(settings)] = {"settings": settings, "scores": scores, "curve": curve}
    rows = [by_settings[repr(settings)] for settings in grid]
    info = [{k: f[k] for k in ("seconds", "steps", "mode")} | {"members": len(f["settings"])} for f in done]
    return Sweep(rows, base, seconds, info)


def _parts(group: list[Settings], size: int) -> list[list[Settings]]:
    """Nearly equal parts of at most `size`."""
    count = -(-len(group) // size)
    return [group[i * len(group) // count : (i + 1) * len(group) // count] for i in range(count)]


def _told(network: nn.Module, data: Any, validation: Any, likelihood: Any, score: Any, settings: Mapping[str, Any]) -> Any:
    """What else a stored group depends on: starting weights, training and validation data, likelihood, score, settings of `fit`."""
    digest = hashlib.sha256()
    # All settings start at these weights: another start is another sweep.
    for name, value in network.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    parts: list[str | None] = []
    for pair, mask in ((data, settings.get("mask")), (validation, None)):
        if isinstance(pair, (tuple, list)):
            parts.append(as_data(pair, dtype=torch.float64, device=torch.device("cpu"), mask=mask).fingerprint())
        else:
            parts.append(None)
    return [digest.hexdigest(), parts, repr(likelihood), getattr(score, "__qualname__", repr(score)), repr(sorted(settings))]


class _Judge:
    """Error and negative log-likelihood on held-out data."""

    def __init__(self, validation: Any, draws: int):
        if not isinstance(validation, (tuple, list)) or len(validation) != 2:
            raise TypeError(f"validation must be a pair (x, y), got {type(validation).__name__}")
        self.x, self.y = validation
        self.draws = draws
        self._moved: Any = None

    def try_on(self, network: nn.Module, data: Any, likelihood: Likelihood | None, settings: Mapping[str, Any]) -> None:
        """Score a network that has seen a few rows, so that validation data that do not fit are refused before the work."""
        if not isinstance(data, (tuple, list)):
            return
        dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        whole = as_data(data, dtype=dtype, device=torch.device("cpu"), mask=settings.get("mask")).all()
        few = select_rows(whole, slice(8))
        more: dict[str, Any] = {name: value for name, value in settings.items() if name in ("where", "output")}
        more |= {"mask": few.mask, "device": "cpu", "progress": False, "compile": False}
        quick = MAP(epochs=1, batch_size=None, lr=1e-12)
        probe = fit(network, (few.x, few.y), quick, likelihood=likelihood, **more)
        try:
            self(probe)
        except (ValueError, TypeError) as error:
            raise type(error)(f"validation could not be scored: {error}") from error
        finally:
            self._moved = None

    def __call__(self, posterior: Posterior) -> dict[str, float]:
        if self._moved is None:
            self._moved = torch.as_tensor(self.x).to(posterior.device), torch.as_tensor(self.y).to(posterior.device)
        x, y = self._moved
        predictive = posterior.predict(x, draws=None if not hasattr(posterior, "means") else self.draws)
        nll = -float(metrics.log_likelihood(predictive, y))
        if posterior.likelihood.kind in ("classes", "binary"):
            return {"error": 1.0 - float(metrics.accuracy(predictive, y)), "nll": nll}
        return {"rmse": float(metrics.rmse(predictive, y)), "nll": nll}


def _scores(posterior: Any, judge: Score) -> list[dict[str, float | None]]:
    """Of each member; None where it diverged."""
    each: list[dict[str, float]] = []
    for part in posterior.parts:
        if not _finite(part):
            each.append({})
            continue
        scores = judge(part)
        if not isinstance(scores, Mapping) or not scores:
            raise TypeError(f"score must return a mapping of names to numbers, got {scores!r}")
        each.append({str(name): float(value) for name, value in scores.items() if math.isfinite(float(value))})
    most = max(each, key=lambda scores: len(scores))
    names = list(most) or ["score"]
    return [{name: scores.get(name) for name in names} for scores in each]


def _finite(posterior: Posterior) -> bool:
    """Whether the weights of a posterior are numbers: of those that are a law, means and scales."""
    held = [*getattr(posterior, "means", {}).values(), *getattr(posterior, "scales", {}).values()]
    held = held or list(posterior.weights(1).values())
    return all(bool(torch.isfinite(value).all()) for value in held)


def _stored(place: Path | None, identity: str) -> dict[str, Any] | None:
    if place is None or not place.with_suffix(".json").exists():
        return None
    path = place.with_suffix(".json")
    result = read_json(path)
    if result.get("identity") != identity:
        raise ValueError(f"{path} holds a group of another sweep; give another folder, or remove this one")
    return result


def _plain(settings: Settings) -> dict[str, Any]:
    return {name: value if isinstance(value, (int, float, str)) else repr(value) for name, value in settings.items()}


def _short(value: Any) -> str:
    return "diverged" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
