"""`plausible demo`: a method of each family on two small problems, a table for each and a page with plots.

1. Regression with a gap: y = 1.2 sin(1.5x) + 0.2ξ, observed for 1.5 < |x| < 3.5 and asked about between as well.
2. The 8 × 8 handwritten digits 0 to 7 that come with scikit-learn, those among 1,000 to train on and the other 797 to test on;
   and the digits 8 and 9, which nobody was shown.

`auto` chooses its method, likelihood and prior; the others share a likelihood and a standard normal prior. What fails is found by
the rules of `fault`, and shown last with the reason.

A method of your own takes part as soon as it is registered, with its default settings. Those of the library, with their
settings, are in `templates/demo.json`; they were chosen on other draws of the curve (with ε = 1e-4 a chain on one of them ran
away, so it is 6e-5) and by validation inside the 1,000 digits, with tables of seed 0 in sight. Cost: about 40 seconds on one core.
"""

from __future__ import annotations

import json
import logging
import platform
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import plausible
from plausible import methods
from plausible.analysis import metrics
from plausible.apps.cli import demo_page, view
from plausible.apps.cli.errors import one_line
from plausible.core import serialise
from plausible.core.likelihoods import Categorical, Gaussian
from plausible.core.storage import write_atomically
from plausible.core.tables import rich_table
from plausible.core.words import log
from plausible.engine.method import summary
from plausible.methods.automatic.auto import Auto
from plausible.posteriors.base import Posterior

GAP, REACH, NOISE = 1.5, 3.5, 0.2
SHOWN = 8
"""Digits below this one are shown to the networks."""
Judged = tuple[dict[str, float], dict[str, np.ndarray]]


class DemoMethod(NamedTuple):
    """One row of a table: a method with its settings, and the entry whose fit it starts from."""

    key: str
    label: str
    method: Any
    about: str
    start: str | None = None


@dataclass
class DemoOutcome:
    """What one entry gave: scores, seconds (with those of the fit it starts from) and arrays for the plots, or an error.

    `fault` says in words what the numbers hold against it, `choice` what it chose.
    """

    entry: DemoMethod
    values: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""
    fault: str = ""
    choice: str = ""


def run(out: Path, quick: bool = False, seed: int = 0, force: bool = False) -> None:
    """Fit all methods to both problems, print the tables and write the page into the folder `out`.

    A folder that holds anything but an earlier demo is refused unless `force`; files of others are never touched. `quick` makes
    a few steps only: everything can be looked at, nothing concluded. Raises `FileExistsError` or `ValueError`.
    """
    page = Path(out) / "index.html"
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib"), ("jinja2", "jinja2")):
        if find_spec(module) is None:
            raise ValueError(f"the demo needs {package}: pip install 'plausible[all]'")
    _claim(page, force)
    console = view.console()
    begin = time.perf_counter()
    threads, level = torch.get_num_threads(), log.level
    torch.set_num_threads(1)  # more help little here, and much is lost where other programs want the cores
    log.setLevel(logging.WARNING)  # what was chosen is said below
    try:
        results = []
        for problem in (Regression(seed, quick), Digits(seed, quick)):
            outcomes = fit_all(problem, seed, console)
            texts = [[] if each.error else cells(problem, each) for each in outcomes]
            results.append((problem, outcomes, texts))
            _show(problem, outcomes, texts, console)
        with console.status("drawing the page"):
            made = f"plausible {plausible.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
            made = f"{made}, seed {seed}, {time.perf_counter() - begin:.0f} s in all"
            text = demo_page.written(results[0], results[1], quick, made)
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, text.encode())
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)
    console.print(f"done in {time.perf_counter() - begin:.0f} s")
    console.print(f"open {page} in a browser", soft_wrap=True)


def _show(problem: Problem, outcomes: list[DemoOutcome], texts: list[list[str]], console: Console) -> None:
    """The table in the terminal, and below it what is held against those at its end."""
    rows = [(each.entry.label, *(text or ["failed"])) for each, text in zip(outcomes, texts)]
    table = rich_table(("method", *problem.columns), rows, words=("method",), title=problem.title, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap, column.vertical = True, "bottom"
    console.print(table)
    for each in outcomes:
        if each.fault:
            console.print(f"{each.entry.label} fails here: {each.fault}", soft_wrap=True)


def _claim(page: Path, force: bool) -> None:
    out = page.parent
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out={str(out)!r} is a file, expected a folder")
    earlier = page.is_file() and 'content="plausible"' in page.read_text(encoding="utf-8", errors="replace")[:1000]
    if out.is_dir() and any(out.iterdir()) and not earlier and not force:
        raise FileExistsError(
            f"out={str(out)!r} holds files that the demo did not write; choose another folder, or --overwrite to add the page"
        )


class Regression:
    """60 points on both sides of a gap, 200 fresh ones on both sides and 200 inside it as a test."""

    key, likelihood, gap = "regression", Gaussian(initial=0.5), GAP
    title = "regression with a gap: 60 points to learn from, 200 + 200 held out"
    columns: Mapping[str, tuple[str, str]] = {
        "log-lik.\nat data": ("log_likelihood_data", "{:.2f}"),
        "log-lik.\nin gap": ("log_likelihood_gap", "{:.2f}"),
        "RMSE\nat data": ("rmse_data", "{:.2f}"),
        "RMSE\nin gap": ("rmse_gap", "{:.2f}"),
        "in 90 %\nat data": ("coverage_data", "{:.0%}"),
        "in 90 %\nin gap": ("coverage_gap", "{:.0%}"),
        "time": ("seconds", "{:.1f} s"),
    }

    def __init__(self, seed: int, quick: bool) -> None:
        rng = np.random.default_rng([seed, 1])

        def draw(low: float, high: float, count: int) -> tuple[Tensor, Tensor]:
            x = rng.uniform(low, high, count) * np.where(np.arange(count) % 2, 1.0, -1.0)
            y = self.curve(x) + NOISE * rng.standard_normal(count)
            return torch.tensor(x, dtype=torch.float32)[:, None], torch.tensor(y, dtype=torch.float32)[:, None]

        self.entries = entries(self.key, quick)
        self.train, near, inside = draw(GAP, REACH, 60), draw(GAP, REACH, 200), draw(0.0, GAP, 200)
        self.test = torch.cat([near[0], inside[0]]), torch.cat([near[1], inside[1]])

    @staticmethod
    def fault(values: Mapping[str, float]) -> str:
        """Twice the noise at the data is no fit; intervals that miss a quarter in the gap, or do not open there, warn nobody."""
        if values["rmse_data"] > 2 * NOISE:
            return f"it did not learn the curve; its error at the data is {values['rmse_data']:.2f}, and the noise {NOISE}"
        if values["coverage_gap"] < 0.75:
            return f"in the gap its 90 % intervals hold {100 * values['coverage_gap']:.0f} % of the new points"
        if values["epistemic_gap"] <= 1.5 * values["epistemic_data"]:  # also where both are 0
            return "it is no less sure in the gap than at the data"
        return ""

    @staticmethod
    def curve(x: np.ndarray) -> np.ndarray:
        return 1.2 * np.sin(1.5 * x)

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))

    def judge(self, posterior: Posterior) -> Judged:
        """Scores near the data and in the gap, and the bands over a grid that reaches beyond both."""
        x, y = self.test
        predictive = posterior.predict(x)
        mean, (low, high) = predictive.mean, predictive.interval(0.9)
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
        arrays = {"grid": grid, "mean": shown.mean, "epistemic": shown.epistemic.sqrt(), "aleatoric": shown.aleatoric.sqrt()}
        arrays["quantiles"] = shown.quantile([0.05, 0.25, 0.75, 0.95])
        return values, {name: value[..., 0].cpu().numpy() for name, value in arrays.items()}


class Digits:
    """1,000 digits to learn from (300 where quick), the others to test on, in an order set by the seed: 0 to 7 of both.

    `strange` are the 8 and 9 among the others, which no network has seen.
    """

    key, likelihood = "digits", Categorical()
    columns: Mapping[str, tuple[str, str]] = {
        "log-\nlikelihood": ("log_likelihood", "{:.3f}"),
        "error\nrate": ("error", "{:.1%}"),
        "calibration\nerror": ("ece", "{:.3f}"),
        "errors\nfound": ("found", "{:.3f}"),
        "8 and 9\nfound": ("strange", "{:.3f}"),
        "time": ("seconds", "{:.1f} s"),
    }

    def __init__(self, seed: int, quick: bool) -> None:
        from sklearn.datasets import load_digits

        images, classes = load_digits(return_X_y=True)
        order = np.random.default_rng(seed).permutation(len(images))
        x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(classes[order], dtype=torch.long)
        count, stop = (300, 600) if quick else (1000, len(x))
        self.entries = entries(self.key, quick)
        known, held = y < SHOWN, torch.arange(len(y)) >= count
        held[stop:] = known[stop:] = False
        self.train, self.test = (x[known & ~held], y[known & ~held]), (x[known & held], y[known & held])
        self.strange = x[held & (y >= SHOWN)], y[held & (y >= SHOWN)]
        self.title = (
            f"handwritten digits 0 to 7: {len(self.train[1]):,} images to learn from, {len(self.test[1])} held out, "
            f"and {len(self.strange[1])} of an 8 or a 9"
        )

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, SHOWN))

    @staticmethod
    def fault(values: Mapping[str, float]) -> str:
        """Probabilities that are a tenth off on average are not what they say; a third of strangers let in is no warning."""
        if values["ece"] > 0.1:
            return f"its probabilities are off by {values['ece']:.2f} on average"
        if values["strange"] < 2 / 3:
            return f"an 8 or a 9 has more entropy than a digit it knows with a chance of {values['strange']:.2f} only"
        return ""

    def judge(self, posterior: Posterior) -> Judged:
        """Scores of the class probabilities.

        `found` is the chance that a wrong answer has more entropy than a right one, `strange` that an 8 or a 9 has more than a
        digit of the kinds that were shown.
        """
        x, y = self.test
        predictive, beyond = posterior.predict(x), posterior.predict(self.strange[0])
        probs = predictive.probs
        wrong = probs.argmax(-1) != y
        both = bool(wrong.any()) and not bool(wrong.all())
        values = {
            "log_likelihood": metrics.log_likelihood(predictive, y),
            "error": 1 - metrics.accuracy(probs, y),
            "ece": metrics.ece(probs, y),
            "found": metrics.ood_auroc(probs[~wrong], probs[wrong]) if both else float("nan"),
            "strange": metrics.ood_auroc(predictive, beyond),
        }
        arrays = {"wrong": wrong}
        for end, each in (("", predictive), (" strange", beyond)):
            arrays |= {f"probs{end}": each.probs, f"entropy{end}": each.entropy, f"information{end}": each.mutual_information}
        return values, {name: value.cpu().numpy() for name, value in arrays.items()}


Problem = Regression | Digits


def entries(problem: str, quick: bool) -> list[DemoMethod]:
    """The library's methods with their settings for a problem, then every one that is not the library's with its defaults."""
    text = (resources.files("plausible.apps") / "templates" / "demo.json").read_text(encoding="utf-8")
    key = f"{problem} quick" if quick else problem
    chosen = []
    for row in json.loads(text):
        if key in row:
            method = serialise.decode(row[key])
            about = row["about"].format(members=getattr(method, "members", 1))
            chosen.append(DemoMethod(row["key"], row["label"], method, about, row["start"]))
    for name, kind in methods.registry.items():
        if not kind.__module__.startswith("plausible."):
            try:
                method = methods.create(name)
            except Exception:
                method = name  # `fit` says what is wrong with it
            chosen.append(DemoMethod(name, name, method, summary(kind)))
    return chosen


def fit_all(problem: Problem, seed: int, console: Console) -> list[DemoOutcome]:
    """Every method in turn; one that fails is noted, and the others go on. What fails is last, errors behind faults."""
    posteriors: dict[str, tuple[Posterior, float]] = {}
    outcomes = []
    for entry in problem.entries:
        outcome = DemoOutcome(entry)
        try:
            with console.status(f"{problem.key}: fitting {entry.label}"):
                posteriors[entry.key] = posterior, seconds = _fit(problem, entry, posteriors, seed)
                outcome.values, outcome.arrays = problem.judge(posterior)
                outcome.values["seconds"] = seconds
                outcome.fault, outcome.choice = problem.fault(outcome.values), posterior.run.get("choice", "")
            chose = f", chose {outcome.choice}" if outcome.choice else ""
            console.print(f"{problem.key}: {entry.label}, {seconds:.1f} s{chose}", soft_wrap=True)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {one_line(error)}"
            console.print(f"{problem.key}: {entry.label} failed: {outcome.error}")
        outcomes.append(outcome)
    return sorted(outcomes, key=lambda each: (bool(each.error), bool(each.fault)))


def _fit(
    problem: Problem, entry: DemoMethod, earlier: Mapping[str, tuple[Posterior, float]], seed: int
) -> tuple[Posterior, float]:
    """The posterior, and the seconds it took together with the fit it starts from."""
    if entry.start is not None and entry.start not in earlier:
        raise ValueError(f"it starts from the fit of {entry.start!r}, which failed")
    init, before = earlier[entry.start] if entry.start is not None else (None, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = problem.network()
    begin = time.perf_counter()
    settings: dict[str, Any] = {"init": init, "seed": seed, "progress": False}
    if not isinstance(entry.method, Auto):  # which chooses these too
        settings |= {"likelihood": problem.likelihood, "prior": plausible.priors.Gaussian(scale=1.0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stopped by Ctrl-C")  # the whole demo stops
        posterior = plausible.fit(network, problem.train, entry.method, **settings)
    if posterior.interrupted:
        raise KeyboardInterrupt
    return posterior, before + time.perf_counter() - begin


def cells(problem: Problem, outcome: DemoOutcome) -> list[str]:
    texts = []
    for key, form in problem.columns.values():
        value = outcome.values[key]
        text = form.format(value)
        text = text.removeprefix("-") if not text.strip("-0.") else text  # no −0.00
        texts.append("–" if np.isnan(value) else text.replace("-", "−").replace("%", " %"))
    return texts
