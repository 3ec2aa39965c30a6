"""`plausible demo`: a method of each family on two small problems, a table for each and a page with plots.

1. Regression with a gap: y = 1.2 sin(1.5x) + 0.2ξ, observed for 1.5 < |x| < 3.5 and asked about between as well.
2. The 8 × 8 handwritten digits that come with scikit-learn, 1,000 to train on and the other 797 to test on.

A method of your own takes part as soon as it is registered, with its default settings. Those of the library, with their
settings, are in `_regression_methods` and `_digit_methods`; they were chosen on other draws of the curve and by validation
inside the 1,000 digits, with tables of seed 0 in sight. Cost: about a minute on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import plausible
from plausible import methods
from plausible.analysis import metrics
from plausible.apps.cli.errors import one_line
from plausible.core.likelihoods import Categorical, Gaussian, Likelihood
from plausible.core.schedules import Cosine
from plausible.methods import IVON, MAP, SGLD, Ensemble, FullRank, Laplace, MeanField, Method
from plausible.posteriors.base import Posterior

MARKER = ".plausible-demo"
GAP = 1.5
REACH = 3.5
NOISE = 0.2
LEVEL = 0.9


class Entry(NamedTuple):
    """One row of a table: a method with its settings, and the entry whose fit it starts from."""

    key: str
    label: str
    method: Method | None
    about: str
    start: str | None = None
    refused: str = ""


@dataclass
class Outcome:
    """What one entry gave: scores, seconds (with those of the fit it starts from) and arrays for the plots, or an error."""

    entry: Entry
    values: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""


class Column(NamedTuple):
    """A column of a table: heading (lines), score, and how the score is written."""

    heading: str
    key: str
    form: str


@dataclass(frozen=True)
class Problem:
    """Data, network, settings and scores of one of the two problems."""

    key: str
    title: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    likelihood: Likelihood
    prior: plausible.priors.Prior
    known: Sequence[Entry]
    columns: tuple[Column, ...]
    judge: Callable[[Problem, Posterior], tuple[dict[str, float], dict[str, np.ndarray]]]


def run(out: Path, quick: bool = False, seed: int = 0, force: bool = False) -> None:
    """Fit all methods to both problems, print the tables and write the page into the folder `out`.

    A folder that holds anything but an earlier demo is refused unless `force`; files of others are never removed. `quick` makes
    a few steps only: everything can be looked at, nothing concluded. Raises `FileExistsError` or `ValueError`.
    """
    out = Path(out)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            raise ValueError(f"the demo needs {package}: pip install 'plausible[all]'")
    earlier = _claim(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name or 'demo'}."))
    console = Console(markup=False, highlight=False, emoji=False)
    begin = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more help little here, and much is lost where other programs want the cores
    try:
        from plausible.apps.cli import demo_page

        results = []
        for problem in (regression(seed, quick), digits(seed, quick)):
            outcomes = fit_all(problem, seed, console)
            console.print(table(problem, outcomes))
            results.append((problem, outcomes))
        with console.status("drawing the page"):
            demo_page.write(folder, results, seed=seed, quick=quick, began=begin)
        names = sorted(path.name for path in folder.iterdir())
        (folder / MARKER).write_text(json.dumps({"files": names}) + "\n", encoding="utf-8")
        _publish(folder, out, names, earlier)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)
    console.print(f"done in {time.perf_counter() - begin:.0f} s")
    console.print(f"open {out / 'index.html'} in a browser", soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------------------
# The two problems


def curve(x: np.ndarray) -> np.ndarray:
    """The true mean: 1.2 sin(1.5x)."""
    return 1.2 * np.sin(1.5 * x)


def regression(seed: int, quick: bool) -> Problem:
    """60 points on both sides of a gap, 200 fresh ones on both sides and 200 inside it as a test."""
    rng = np.random.default_rng([seed, 1])

    def draw(low: float, high: float, count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.uniform(low, high, count) * np.where(np.arange(count) % 2, 1.0, -1.0)
        return x, curve(x) + NOISE * rng.standard_normal(count)

    parts = [draw(GAP, REACH, 60), draw(GAP, REACH, 200), draw(0.0, GAP, 200)]
    (x, y), *rest = [tuple(torch.tensor(v, dtype=torch.float32)[:, None] for v in part) for part in parts]
    return Problem(
        key="regression",
        title="regression with a gap: 60 points to learn from, 200 + 200 held out",
        train=(x, y),
        test=(torch.cat([part[0] for part in rest]), torch.cat([part[1] for part in rest])),
        network=lambda: nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)),
        likelihood=Gaussian(initial=0.5),
        prior=plausible.priors.Gaussian(scale=1.0),
        known=_regression_methods(quick),
        columns=(
            Column("log-lik.\nat data", "log_likelihood_data", "{:.2f}"),
            Column("log-lik.\nin gap", "log_likelihood_gap", "{:.2f}"),
            Column("RMSE\nat data", "rmse_data", "{:.2f}"),
            Column("RMSE\nin gap", "rmse_gap", "{:.2f}"),
            Column("in 90 %\nat data", "coverage_data", "{:.0%}"),
            Column("in 90 %\nin gap", "coverage_gap", "{:.0%}"),
            Column("time", "seconds", "{:.1f} s"),
        ),
        judge=_judge_regression,
    )


def digits(seed: int, quick: bool) -> Problem:
    """1,000 digits to learn from (300 where quick), the others to test on, in an order set by the seed."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(classes[order], dtype=torch.long)
    count = 300 if quick else 1000
    stop = 600 if quick else len(x)
    return Problem(
        key="digits",
        title=f"handwritten digits: {count:,} images to learn from, {stop - count} held out",
        train=(x[:count], y[:count]),
        test=(x[count:stop], y[count:stop]),
        network=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        likelihood=Categorical(),
        prior=plausible.priors.Gaussian(scale=1.0),
        known=_digit_methods(quick),
        columns=(
            Column("log-\nlikelihood", "log_likelihood", "{:.3f}"),
            Column("error\nrate", "error", "{:.1%}"),
            Column("calibration\nerror", "ece", "{:.3f}"),
            Column("errors\nfound", "found", "{:.3f}"),
            Column("time", "seconds", "{:.1f} s"),
        ),
        judge=_judge_digits,
    )


ABOUT = {
    "map": "One network at the highest posterior density: what ordinary training with weight decay gives.",
    "ensemble": "{members} networks, each trained from its own random start; their predictions are averaged.",
    "sgld": "A random walk through plausible networks, started at the MAP fit; the states on its way are averaged.",
    "sgld-chains": "{members} such walks side by side, each started at one network of the ensemble.",
    "mean-field": "Independent Gaussians over the weights, by a bound on the evidence. With many weights for few data the bound "
    "prefers a plain curve and much noise: a known failing of this family, and here it shows.",
    "ivon": "The same Gaussians by natural gradients, with the curvature read off the noise.",
    "laplace": "A Gaussian around the mode with the curvature there, for the linearised network: on the curve over all weights, "
    "with the prior and the noise that the evidence prefers; on the digits over the last layer.",
    "full-rank": "One Gaussian over all weights with all their correlations, by the same bound.",
}


def _entries(
    point: MAP, ensemble: Ensemble, walk: SGLD, chains: Ensemble, gaussians: MeanField, natural: IVON, mode: Laplace
) -> list[Entry]:
    return [
        Entry("map", "MAP", point, ABOUT["map"]),
        Entry("ensemble", "ensemble", ensemble, ABOUT["ensemble"].format(members=ensemble.members)),
        Entry("sgld", "SGLD", walk, ABOUT["sgld"], "map"),
        Entry("sgld-chains", "SGLD chains", chains, ABOUT["sgld-chains"].format(members=chains.members), "ensemble"),
        Entry("mean-field", "mean-field", gaussians, ABOUT["mean-field"]),
        Entry("ivon", "IVON", natural, ABOUT["ivon"]),
        Entry("laplace", "Laplace", mode, ABOUT["laplace"]),
    ]


def _regression_methods(quick: bool) -> list[Entry]:
    """Steps of all data at once; with ε = 1e-4 a chain on another draw of the curve ran away, so it is 6e-5."""
    point = MAP(epochs=200 if quick else 1500, batch_size=None, lr=Cosine(0.02))
    correlated = FullRank(epochs=100 if quick else 2000, batch_size=None, lr=Cosine(0.02))
    known = _entries(
        point,
        Ensemble(point, members=3 if quick else 10, init="prior"),
        SGLD(epochs=200 if quick else 8000, batch_size=None, lr=6e-5, burn_in=0.3),
        Ensemble(
            SGLD(epochs=100 if quick else 1500, batch_size=None, lr=6e-5, burn_in=0.3, thin=10 if quick else 50),
            members=3 if quick else 10,
        ),
        MeanField(epochs=100 if quick else 2000, batch_size=None, lr=Cosine(0.02)),
        IVON(epochs=100 if quick else 2000, batch_size=None),
        Laplace("full", mode=point, tune="layer", rounds=1 if quick else 5, polish=20 if quick else None),
    )
    return [*known, Entry("full-rank", "full-rank", correlated, ABOUT["full-rank"])]


def _digit_methods(quick: bool) -> list[Entry]:
    """Batches of 100; ε = 2e-3 lies between the best two by the log-likelihood of held-out training digits."""
    point = MAP(epochs=20 if quick else 100, batch_size=100, lr=Cosine(0.02))
    return _entries(
        point,
        Ensemble(point, members=3 if quick else 5),
        SGLD(epochs=40 if quick else 400, batch_size=100, lr=2e-3, burn_in=0.3),
        Ensemble(
            SGLD(epochs=20 if quick else 100, batch_size=100, lr=2e-3, burn_in=0.3, thin=10 if quick else 30),
            members=3 if quick else 5,
        ),
        MeanField(epochs=20 if quick else 100, batch_size=100, lr=Cosine(0.02)),
        IVON(epochs=20 if quick else 100, batch_size=100),
        Laplace("kron", where="last", mode=point, polish=5 if quick else 50),
    )


def entries(known: Sequence[Entry]) -> list[Entry]:
    """The known methods that are registered, then every one that is not the library's with its default settings."""
    chosen = [entry for entry in known if entry.key.removesuffix("-chains") in methods.registry]
    for name, kind in methods.registry.items():
        if name in {entry.key for entry in known} or kind.__module__.startswith("plausible."):
            continue
        start = None if kind.traits.trains else "map"  # what does not train needs a trained network
        try:
            chosen.append(Entry(name, name, methods.create(name), kind.summary(), start))
        except Exception as error:
            chosen.append(Entry(name, name, None, kind.summary(), start, one_line(error)))
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Fits and scores


def fit_all(problem: Problem, seed: int, console: Console) -> list[Outcome]:
    """Every method in turn; one that fails is noted, and the others go on."""
    posteriors: dict[str, tuple[Posterior, float]] = {}
    outcomes = []
    for entry in entries(problem.known):
        outcome = Outcome(entry)
        try:
            with console.status(f"{problem.key}: fitting {entry.label}"):
                posteriors[entry.key] = posterior, seconds = _fit(problem, entry, posteriors, seed)
                outcome.values, outcome.arrays = problem.judge(problem, posterior)
                outcome.values["seconds"] = seconds
            console.print(f"{problem.key}: {entry.label}, {seconds:.1f} s")
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {one_line(error)}" if not entry.refused else entry.refused
            console.print(f"{problem.key}: {entry.label} failed: {outcome.error}")
        outcomes.append(outcome)
    return outcomes


def _fit(problem: Problem, entry: Entry, earlier: Mapping[str, tuple[Posterior, float]], seed: int) -> tuple[Posterior, float]:
    """The posterior, and the seconds it took together with the fit it starts from."""
    if entry.method is None:
        raise ValueError(entry.refused)
    if entry.start is not None and entry.start not in earlier:
        raise ValueError(f"it starts from the fit of {entry.start!r}, which failed")
    init, before = earlier[entry.start] if entry.start is not None else (None, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = problem.network()
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stopped by Ctrl-C")  # the whole demo stops
        posterior = plausible.fit(
            network,
            problem.train,
            entry.method,
            likelihood=problem.likelihood,
            prior=problem.prior,
            init=init,
            seed=seed,
            progress=False,
        )
    if posterior.interrupted:
        raise KeyboardInterrupt
    return posterior, before + time.perf_counter() - begin


def _judge_regression(problem: Problem, posterior: Posterior) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scores near the data and in the gap, and the bands over a grid that reaches beyond both."""
    x, y = problem.test
    predictive = posterior.predict(x)
    mean, (low, high) = predictive.mean, predictive.interval(LEVEL)
    values: dict[str, float] = {}
    for place, rows in (("data", x[:, 0].abs() >= GAP), ("gap", x[:, 0].abs() < GAP)):
        values |= {
            f"log_likelihood_{place}": metrics.log_likelihood(predictive, y, mask=rows[:, None]),
            f"rmse_{place}": metrics.rmse(mean[rows], y[rows]),
            f"coverage_{place}": metrics.coverage((low[rows], high[rows]), y[rows]),
            f"epistemic_{place}": float(predictive.epistemic[rows].double().mean().sqrt()),
        }
    grid = torch.linspace(-REACH - 1.0, REACH + 1.0, 241)[:, None]
    shown = posterior.predict(grid)
    levels = shown.quantile([0.05, 0.25, 0.75, 0.95])[..., 0]
    arrays = {
        "grid": grid[:, 0],
        "mean": shown.mean[:, 0],
        "quantiles": levels,
        "epistemic": shown.epistemic[:, 0].sqrt(),
        "aleatoric": shown.aleatoric[:, 0].sqrt(),
    }
    return values, {name: value.cpu().numpy() for name, value in arrays.items()}


def _judge_digits(problem: Problem, posterior: Posterior) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scores of the class probabilities; `found` is the chance that a wrong answer has more entropy than a right one."""
    x, y = problem.test
    predictive = posterior.predict(x)
    probs, entropy = predictive.probs, predictive.entropy
    wrong = probs.argmax(-1) != y
    both = bool(wrong.any()) and not bool(wrong.all())
    values = {
        "log_likelihood": metrics.log_likelihood(predictive, y),
        "error": 1 - metrics.accuracy(probs, y),
        "ece": metrics.ece(probs, y),
        "found": metrics.ood_auroc(probs[~wrong], probs[wrong]) if both else float("nan"),
    }
    arrays = {"probs": probs, "entropy": entropy, "information": predictive.mutual_information, "wrong": wrong}
    return values, {name: value.cpu().numpy() for name, value in arrays.items()}


def cells(problem: Problem, outcome: Outcome) -> list[str]:
    """The scores of one row as text."""
    texts = []
    for column in problem.columns:
        value = outcome.values[column.key]
        text = column.form.format(value)
        text = text.removeprefix("-") if not text.strip("-0.") else text  # no −0.00
        texts.append("–" if np.isnan(value) else text.replace("-", "−").replace("%", " %"))
    return texts


def table(problem: Problem, outcomes: Sequence[Outcome]) -> Table:
    """The scores of all methods for the terminal."""
    shown = Table(title=problem.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("method", vertical="bottom", no_wrap=True)
    for column in problem.columns:
        shown.add_column(column.heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        filled: list[Any] = ["failed"] if outcome.error else cells(problem, outcome)
        shown.add_row(outcome.entry.label, *filled)
    return shown


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def _claim(out: Path, force: bool) -> list[str]:
    """Refuse a folder that is not ours; the files that an earlier demo wrote there."""
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out={str(out)!r} is a file, expected a folder")
    marker = out / MARKER
    if marker.is_file():
        try:
            names = json.loads(marker.read_text(encoding="utf-8"))["files"]
            return [name for name in names if isinstance(name, str) and Path(name).name == name]
        except (ValueError, KeyError, TypeError):
            return []
    if out.is_dir() and any(out.iterdir()) and not force:
        raise FileExistsError(
            f"out={str(out)!r} holds files that the demo did not write; choose another folder, or --overwrite to add the page"
        )
    return []


def _publish(folder: Path, out: Path, names: Sequence[str], earlier: Sequence[str]) -> None:
    """Put the finished files in place: a new folder in one move, an old one file by file with the page last."""
    os.chmod(folder, 0o755)
    if not out.exists():
        os.rename(folder, out)
        return
    for name in [*(name for name in names if name != "index.html"), MARKER, "index.html"]:
        os.replace(folder / name, out / name)
    for name in set(earlier) - set(names):
        (out / name).unlink(missing_ok=True)
