"""`plausible demo`: a method of each family on two small problems, a table for each and a page with plots.

1. Regression with a gap: y = 1.2 sin(1.5x) + 0.2ξ, observed for 1.5 < |x| < 3.5 and asked about between as well.
2. The 8 × 8 handwritten digits that come with scikit-learn, 1,000 to train on and the other 797 to test on.

A method of your own takes part as soon as it is registered, with its default settings. Those of the library, with their
settings, are in `templates/demo.json`; they were chosen on other draws of the curve (with ε = 1e-4 a chain on one of them ran
away, so it is 6e-5) and by validation inside the 1,000 digits, with tables of seed 0 in sight. Cost: about a minute on two cores.
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
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
from plausible.apps import plots
from plausible.apps.cli.errors import one_line
from plausible.apps.pages import Shown, chart, png, render
from plausible.apps.plots.regression import draw_band, draw_uncertainties
from plausible.apps.plots.selection import draw_entropies
from plausible.apps.report.words import percent
from plausible.core import serialise
from plausible.core.likelihoods import Categorical, Gaussian, Likelihood
from plausible.core.storage import write_atomically
from plausible.engine.method import summary
from plausible.methods import Method
from plausible.posteriors.base import Posterior

GAP, REACH, NOISE = 1.5, 3.5, 0.2


class Entry(NamedTuple):
    """One row of a table: a method with its settings (or why it has none), and the entry whose fit it starts from."""

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


@dataclass(frozen=True)
class Problem:
    """Data, network, settings and scores of one of the two problems; `columns`: heading → (score, how it is written)."""

    key: str
    title: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    likelihood: Likelihood
    known: Sequence[Entry]
    columns: Mapping[str, tuple[str, str]]
    judge: Callable[[Problem, Posterior], tuple[dict[str, float], dict[str, np.ndarray]]]


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
    console = Console(markup=False, highlight=False, emoji=False)
    begin = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more help little here, and much is lost where other programs want the cores
    try:
        results = []
        for problem in (regression(seed, quick), digits(seed, quick)):
            outcomes = fit_all(problem, seed, console)
            console.print(table(problem, outcomes))
            results.append((problem, outcomes))
        with console.status("drawing the page"):
            made = f"plausible {plausible.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
            text = written(results, quick, f"{made}, seed {seed}, {time.perf_counter() - begin:.0f} s in all")
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, text.encode())
    finally:
        torch.set_num_threads(threads)
    console.print(f"done in {time.perf_counter() - begin:.0f} s")
    console.print(f"open {page} in a browser", soft_wrap=True)


def _claim(page: Path, force: bool) -> None:
    """Refuse a folder that is not ours."""
    out = page.parent
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out={str(out)!r} is a file, expected a folder")
    earlier = page.is_file() and 'content="plausible"' in page.read_text(encoding="utf-8", errors="replace")[:1000]
    if out.is_dir() and any(out.iterdir()) and not earlier and not force:
        raise FileExistsError(
            f"out={str(out)!r} holds files that the demo did not write; choose another folder, or --overwrite to add the page"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The two problems


def regression(seed: int, quick: bool) -> Problem:
    """60 points on both sides of a gap, 200 fresh ones on both sides and 200 inside it as a test."""
    rng = np.random.default_rng([seed, 1])

    def draw(low: float, high: float, count: int) -> tuple[Tensor, Tensor]:
        x = rng.uniform(low, high, count) * np.where(np.arange(count) % 2, 1.0, -1.0)
        y = curve(x) + NOISE * rng.standard_normal(count)
        return torch.tensor(x, dtype=torch.float32)[:, None], torch.tensor(y, dtype=torch.float32)[:, None]

    train, near, inside = draw(GAP, REACH, 60), draw(GAP, REACH, 200), draw(0.0, GAP, 200)
    return Problem(
        key="regression",
        title="regression with a gap: 60 points to learn from, 200 + 200 held out",
        train=train,
        test=(torch.cat([near[0], inside[0]]), torch.cat([near[1], inside[1]])),
        network=lambda: nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)),
        likelihood=Gaussian(initial=0.5),
        known=_entries("regression", quick),
        columns={
            "log-lik.\nat data": ("log_likelihood_data", "{:.2f}"),
            "log-lik.\nin gap": ("log_likelihood_gap", "{:.2f}"),
            "RMSE\nat data": ("rmse_data", "{:.2f}"),
            "RMSE\nin gap": ("rmse_gap", "{:.2f}"),
            "in 90 %\nat data": ("coverage_data", "{:.0%}"),
            "in 90 %\nin gap": ("coverage_gap", "{:.0%}"),
            "time": ("seconds", "{:.1f} s"),
        },
        judge=_judge_regression,
    )


def curve(x: np.ndarray) -> np.ndarray:
    return 1.2 * np.sin(1.5 * x)


def digits(seed: int, quick: bool) -> Problem:
    """1,000 digits to learn from (300 where quick), the others to test on, in an order set by the seed."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(classes[order], dtype=torch.long)
    count, stop = (300, 600) if quick else (1000, len(x))
    return Problem(
        key="digits",
        title=f"handwritten digits: {count:,} images to learn from, {stop - count} held out",
        train=(x[:count], y[:count]),
        test=(x[count:stop], y[count:stop]),
        network=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        likelihood=Categorical(),
        known=_entries("digits", quick),
        columns={
            "log-\nlikelihood": ("log_likelihood", "{:.3f}"),
            "error\nrate": ("error", "{:.1%}"),
            "calibration\nerror": ("ece", "{:.3f}"),
            "errors\nfound": ("found", "{:.3f}"),
            "time": ("seconds", "{:.1f} s"),
        },
        judge=_judge_digits,
    )


def _entries(problem: str, quick: bool) -> list[Entry]:
    """The library's methods with their settings for a problem, from `templates/demo.json`."""
    text = (resources.files("plausible.apps") / "templates" / "demo.json").read_text(encoding="utf-8")
    key = f"{problem} quick" if quick else problem
    known = []
    for row in json.loads(text):
        if key in row:
            method = serialise.decode(row[key])
            about = row["about"].format(members=getattr(method, "members", 1))
            known.append(Entry(row["key"], row["label"], method, about, row["start"]))
    return known


def entries(known: Sequence[Entry]) -> list[Entry]:
    """The known methods that are registered, then every one that is not the library's with its default settings."""
    chosen = [entry for entry in known if entry.key.removesuffix("-chains") in methods.registry]
    for name, kind in methods.registry.items():
        if name in {entry.key for entry in known} or kind.__module__.startswith("plausible."):
            continue
        try:
            chosen.append(Entry(name, name, methods.create(name), summary(kind), None))
        except Exception as error:
            chosen.append(Entry(name, name, None, summary(kind), None, one_line(error)))
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
            outcome.error = entry.refused or f"{type(error).__name__}: {one_line(error)}"
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
    prior = plausible.priors.Gaussian(scale=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stopped by Ctrl-C")  # the whole demo stops
        posterior = plausible.fit(
            network,
            problem.train,
            entry.method,
            likelihood=problem.likelihood,
            prior=prior,
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
    arrays = {
        "grid": grid[:, 0],
        "mean": shown.mean[:, 0],
        "quantiles": shown.quantile([0.05, 0.25, 0.75, 0.95])[..., 0],
        "epistemic": shown.epistemic[:, 0].sqrt(),
        "aleatoric": shown.aleatoric[:, 0].sqrt(),
    }
    return values, {name: value.cpu().numpy() for name, value in arrays.items()}


def _judge_digits(problem: Problem, posterior: Posterior) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scores of the class probabilities; `found` is the chance that a wrong answer has more entropy than a right one."""
    x, y = problem.test
    predictive = posterior.predict(x)
    probs = predictive.probs
    wrong = probs.argmax(-1) != y
    both = bool(wrong.any()) and not bool(wrong.all())
    values = {
        "log_likelihood": metrics.log_likelihood(predictive, y),
        "error": 1 - metrics.accuracy(probs, y),
        "ece": metrics.ece(probs, y),
        "found": metrics.ood_auroc(probs[~wrong], probs[wrong]) if both else float("nan"),
    }
    arrays = {"probs": probs, "entropy": predictive.entropy, "information": predictive.mutual_information, "wrong": wrong}
    return values, {name: value.cpu().numpy() for name, value in arrays.items()}


def cells(problem: Problem, outcome: Outcome) -> list[str]:
    """The scores of one row as text."""
    texts = []
    for key, form in problem.columns.values():
        value = outcome.values[key]
        text = form.format(value)
        text = text.removeprefix("-") if not text.strip("-0.") else text  # no −0.00
        texts.append("–" if np.isnan(value) else text.replace("-", "−").replace("%", " %"))
    return texts


def table(problem: Problem, outcomes: Sequence[Outcome]) -> Table:
    """The scores of all methods for the terminal."""
    shown = Table(title=problem.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("method", vertical="bottom", no_wrap=True)
    for heading in problem.columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        shown.add_row(outcome.entry.label, *(["failed"] if outcome.error else cells(problem, outcome)))
    return shown


# ---------------------------------------------------------------------------------------------------------------------
# The page


def written(results: Sequence[tuple[Problem, list[Outcome]]], quick: bool, made: str) -> str:
    """The page of both problems, with everything embedded; every number comes from the run."""
    (line, line_outcomes), (images, image_outcomes) = results
    good, fine = ([outcome for outcome in found if not outcome.error] for found in (line_outcomes, image_outcomes))
    tables = [
        {
            "title": problem.title,
            "heads": list(problem.columns),
            "rows": [(each.entry.label, each.error, [] if each.error else cells(problem, each)) for each in outcomes],
        }
        for problem, outcomes in results
    ]
    return render(
        "demo.html.j2",
        title="What a network knows, and what it does not",
        quick=quick,
        tables=tables,
        bands=_bands(line, good),
        faces=[(outcome.entry.label, *_faces(images, outcome)) for outcome in fine],
        entropies=_entropies(fine) if fine else None,
        reliabilities=[_reliability(images, outcome) for outcome in fine],
        train_digits=f"{len(images.train[1]):,}",
        test_digits=f"{len(images.test[1]):,}",
        methods=[
            (each.entry.label, each.entry.about, problem.key, str(each.entry.method))
            for problem, outcomes in results
            for each in outcomes
        ],
        made=made,
    )


def _bands(problem: Problem, outcomes: Sequence[Outcome]) -> list[Shown]:
    """Mean and bands over the data; below, the standard deviations of noise and of disagreement; all on the same axes."""
    if not outcomes:
        return []
    heights = np.concatenate([*(each.arrays["quantiles"].ravel() for each in outcomes), problem.train[1].numpy().ravel()])
    low, high = max(float(heights.min()), -5.0), min(float(heights.max()), 5.0)
    top = max(float(max(each.arrays["epistemic"].max(), each.arrays["aleatoric"].max())) for each in outcomes)
    shown = []
    for outcome in outcomes:
        arrays, label = outcome.arrays, outcome.entry.label

        def draw(panels: Any, arrays: Mapping[str, np.ndarray] = arrays) -> None:
            above, below = panels
            grid = arrays["grid"]
            for ax in panels:
                ax.axvspan(-GAP, GAP, color="0.5", alpha=0.14, linewidth=0)
            draw_band(above, grid, arrays["quantiles"], arrays["mean"])
            above.plot(grid, curve(grid), color="0.5", linestyle=(0, (4, 2)), label="truth")
            above.plot(*(part[:, 0].numpy() for part in problem.train), "o", markersize=3, color="0", label="data")
            above.set(ylim=(low - 0.12 * (high - low), high + 0.05 * (high - low)))
            above.text(0, low - 0.09 * (high - low), "gap: no data", ha="center", fontsize=10)
            draw_uncertainties(below, grid, arrays["epistemic"], arrays["aleatoric"])
            below.set(ylim=(0, 1.1 * min(top, 2.0)), xlabel="x", ylabel="std")
            above.legend()
            below.legend()

        near, gap = outcome.values["epistemic_data"], outcome.values["epistemic_gap"]
        caption = f"epistemic std {near:.2f} at the data, {gap:.2f} in the gap"
        alt = f"Predictions of {label} with 50 % and 90 % bands over 60 data points; {caption}."
        picture = chart(draw, alt, f"band {label}", size=(5.0, 4.6), rows=2)
        shown.append(Shown(picture, label, caption))
    return shown


def _faces(problem: Problem, outcome: Outcome, count: int = 5) -> tuple[str, list[tuple[str, list[dict[str, Any]]]]]:
    """How many are wrong, and the digits with the highest and the lowest entropy."""
    arrays, truth = outcome.arrays, problem.test[1].numpy()
    images = problem.test[0].numpy().reshape(-1, 8, 8)
    order = np.argsort(arrays["entropy"], kind="stable")
    ends = []
    for heading, chosen in (("Least confident", order[::-1][:count]), ("Most confident", order[:count])):
        examples = []
        for index in chosen.tolist():
            probs = arrays["probs"][index]
            examples.append(
                {
                    "picture": png(images[index]),
                    "predicted": f"{probs.argmax()} ({percent(float(probs.max()))})",
                    "uncertain": f"MI {arrays['information'][index]:.2f}",
                    "truth": str(truth[index]),
                    "missed": bool(arrays["wrong"][index]),
                }
            )
        ends.append((heading, examples))
    return f"{int(arrays['wrong'].sum())} of {len(arrays['wrong'])} wrong", ends


def _entropies(outcomes: Sequence[Outcome]) -> Shown:
    rows = {each.entry.label: (each.arrays["entropy"], each.arrays["wrong"]) for each in outcomes}
    medians = []
    for name, (values, wrong) in rows.items():
        right, missed = (f"{np.median(values[part]):.2f}" if part.any() else "none" for part in (~wrong, wrong))
        medians.append(f"{name} {right} and {missed}")
    caption = f"Median entropy of right and of wrong answers: {'; '.join(medians)}."
    picture = chart(lambda ax: draw_entropies(ax, rows), caption, "entropies", size=(6.5, 1.2 + 0.45 * len(rows)))
    return Shown(picture, "", caption)


def _reliability(problem: Problem, outcome: Outcome) -> Shown:
    probs, y, label = outcome.arrays["probs"].astype(float), problem.test[1], outcome.entry.label
    probs = probs / probs.sum(-1, keepdims=True)
    points = [point for point in zip(*metrics.reliability(probs, y, 10)) if point[2]]
    words = ", ".join(f"said {float(said):.0%}, right {float(share):.0%} ({int(count)})" for said, share, count in points)
    picture = chart(
        lambda ax: plots.reliability(probs, y, ax=ax),
        f"Reliability of {label}: {words}.",
        f"reliability {label}",
        size=(3.6, 3.6),
    )
    return Shown(picture, label, f"calibration error {outcome.values['ece']:.3f}")
