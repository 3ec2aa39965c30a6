"""A Laplace approximation over the last layer of a trained convolutional network: calibration before and after.

The network is trained on Fashion-MNIST until it is too sure of itself. Kronecker factors of its last layer are then added up in one
pass over the training images, and the precision of that layer's prior is chosen afterwards, by the evidence (as Daxberger et al.
2021 do) or by the log-likelihood of held-out images; test images choose nothing. Temperature scaling on the same held-out images
stands beside it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import (
    SIZES,
    Bound,
    Cell,
    Effect,
    Part,
    Reproduction,
    Request,
    Results,
    Sheet,
    Size,
    Values,
    look,
    paired,
)
from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.core import random
from plausible.core.likelihoods import Categorical
from plausible.core.networks import choose_device
from plausible.core.priors import Gaussian, Patterns
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import MAP, Laplace
from plausible.posteriors.linearised import LaplacePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plausible.posteriors.base import Posterior

CELL = "fashion-mnist"
LAST = "9"
BINS = 15
BY_SEED = ("precision", "by_precision", "temperature", "training_seconds")


@dataclass(frozen=True)
class Convolutional:
    """The network, how it is trained, and the precisions of the last layer's prior among which validation images choose.

    `channels` of the two convolutions (5 × 5, ReLU, pooled), then a layer of `units`, then the classes. The prior while training is
    N(0, 1) on every weight. `draws` are those of the sampled predictive.
    """

    mode: MAP = MAP(epochs=30, batch_size=128, lr=Cosine(2e-3))  # noqa: RUF009
    channels: tuple[int, int] = (16, 32)
    units: int = 128
    train: int = 50_000
    validation: int = 5_000
    test: int = 10_000
    precisions: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    draws: int = 100


def run(settings: Convolutional, request: Request) -> dict[str, Any]:
    """`scores[way][metric]` by seed; the precisions chosen; reliability of the first seed."""
    with random.isolated(0):
        device = choose_device(network(settings), request.device)
    data = {part: (x.to(device), y.to(device)) for part, (x, y) in images(settings).items()}
    found = [_one(settings, data, seed, request) for seed in range(request.seed, request.seed + request.seeds)]
    first = found[0]
    return {
        "scores": {way: {m: [one["scores"][way][m] for one in found] for m in first["scores"][way]} for way in first["scores"]},
        **{key: [one[key] for one in found] for key in BY_SEED},
        "precisions": list(settings.precisions),
        "reliability": first["reliability"],
    }


def _one(settings: Convolutional, data: dict[str, tuple[Tensor, Tensor]], seed: int, request: Request) -> dict[str, Any]:
    """Train one network; look at it before and after."""
    with random.isolated(seed):
        module = network(settings)
    options: dict[str, Any] = {
        "likelihood": Categorical(),
        "seed": seed,
        "device": request.device,
        "progress": request.progress,
        "precision": request.precision,
        "compile": False if request.compile == "auto" else request.compile,
    }
    trained = fit(module, data["train"], settings.mode, prior=Gaussian(1.0), **options)
    if trained.interrupted:
        raise KeyboardInterrupt("the network is trained anew by the next call")
    after = [_around(module, data, trained, options, precision) for precision in settings.precisions]
    tuned = _around(module, data, trained, options, None)
    (x, y), (x_test, y_test) = data["validation"], data["test"]
    held_out = [metrics.log_likelihood(posterior.with_predictive("probit").predict(x), y) for posterior in after]
    best = max(range(len(after)), key=lambda k: held_out[k])
    temperature = metrics.temperature(at_mode(tuned, x), y)
    seen: dict[str, Any] = {
        "map": at_mode(tuned, x_test),
        "temperature": at_mode(tuned, x_test, temperature),
        "validation": after[best].with_predictive("probit").predict(x_test).probs,
        **{way: tuned.with_predictive(way).predict(x_test).probs for way in ("linearised", "probit", "bridge")},
        "sampled": tuned.with_predictive("sampled").predict(x_test, settings.draws, seed=seed).probs,
    }
    test = [scores(posterior.with_predictive("probit").predict(x_test).probs, y_test) for posterior in after]
    return {
        "scores": {way: scores(probs, y_test) for way, probs in seen.items()},
        "precision": {"evidence": _precision(tuned), "validation": settings.precisions[best]},
        "by_precision": {m: [row[m] for row in test] for m in test[0]} | {"evidence": [p.log_evidence for p in after]},
        "temperature": temperature,
        "reliability": {way: _reliability(seen[way], y_test) for way in ("map", "probit", "validation")},
        "training_seconds": trained.run["seconds"],
    }


def _around(
    module: nn.Module,
    data: dict[str, tuple[Tensor, Tensor]],
    trained: Posterior,
    options: dict[str, Any],
    precision: float | None,
) -> LaplacePosterior:
    """The Gaussian over the last layer, its prior of this precision, or of the one with the largest evidence.

    Another prior than that of the training has its mode elsewhere; the network stays where it is, and the warning is kept quiet.
    """
    prior = Patterns(((f"{LAST}.*", Gaussian(1.0 if precision is None else precision**-0.5)), ("*", Gaussian(1.0))))
    method = Laplace(structure="kron", where="last", mode=None, tune="global" if precision is None else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the network is not at a mode", UserWarning)
        posterior = fit(module, data["train"], method, prior=prior, init=trained, **options)
    assert isinstance(posterior, LaplacePosterior)
    return posterior


def _precision(posterior: LaplacePosterior) -> float:
    return float(next(iter(posterior.precision.values())))


def at_mode(posterior: LaplacePosterior, x: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(f(x; w*)/T): float64 [N, 10]."""
    weights = {**posterior.means, **posterior.points}
    with torch.no_grad():
        parts = [posterior.model.outputs(weights, part).double() for part in x.split(1000)]
    return (torch.cat(parts) / temperature).softmax(-1)


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and calibration error in per cent, log loss in nats, Brier score."""
    found = {
        "accuracy": 100 * metrics.accuracy(probs, y),
        "ece": 100 * metrics.ece(probs, y, BINS),
        "log_loss": metrics.log_loss(probs, y),
        "brier": metrics.brier(probs, y),
    }
    return {name: round(float(value), 6) for name, value in found.items()}


def _reliability(probs: Tensor, y: Tensor) -> dict[str, list[float]]:
    """Mean confidence, accuracy and share of the images in each bin that has any."""
    found = metrics.reliability(probs, y, BINS)
    full = found.counts > 0
    columns = {"confidence": found.confidence, "accuracy": found.accuracy, "share": found.counts / found.counts.sum()}
    return {name: [round(value, 6) for value in column[full].tolist()] for name, column in columns.items()}


def network(settings: Convolutional) -> nn.Sequential:
    """Two convolutions, pooled, and two linear layers; the last one is module `LAST`."""
    first, second = settings.channels
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(25 * second, settings.units),
        nn.ReLU(),
        nn.Linear(settings.units, 10),
    )


def images(settings: Convolutional) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts `train`, `validation` (the last of the 60,000) and `test`: x float32 [N, 1, 28, 28], standardised; y int64 [N]."""
    if settings.train + settings.validation > 60_000:
        raise ValueError(
            f"train and validation: got {settings.train:,} + {settings.validation:,} images, but 60,000 are not for testing"
        )
    found = datasets.fashion_mnist()
    (x, y), (x_test, y_test) = found.train, found.test
    last = len(y) - settings.validation
    own = {
        "train": (x[: settings.train], y[: settings.train]),
        "validation": (x[last:], y[last:]),
        "test": (x_test[: settings.test], y_test[: settings.test]),
    }
    loc, scale = x[: settings.train].mean(), x[: settings.train].std()
    return {part: ((pixels - loc) / scale, labels) for part, (pixels, labels) in own.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

WORDS = {
    "map": "the network as trained",
    "probit": "Laplace, evidence, probit",
    "linearised": "Laplace, evidence, linearised (integral)",
    "bridge": "Laplace, evidence, Dirichlet bridge",
    "sampled": "Laplace, evidence, sampled weights",
    "validation": "Laplace, validation, probit",
    "temperature": "temperature scaling",
}


def score(way: str, metric: str) -> Values:
    """By seed."""

    def values(results: Results) -> Sequence[float] | None:
        return look(results, CELL, "scores", way, metric)

    return values


def ratio(way: str) -> Values:
    """Calibration error after over before, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        after, before = score(way, "ece")(results), score("map", "ece")(results)
        return None if after is None or before is None else [a / b for a, b in zip(after, before)]

    return values


def beyond_half(way: str) -> Values:
    """Calibration error after less half of that before, in points, by seed: negative where it is more than halved."""

    def values(results: Results) -> Sequence[float] | None:
        after, before = score(way, "ece")(results), score("map", "ece")(results)
        return None if after is None or before is None else [a - b / 2 for a, b in zip(after, before)]

    return values


def claims(size: Size) -> list[Bound | Effect]:
    """The calibration error halves, at the same accuracy, and the log loss falls: the same is asked of both precisions."""
    found: list[Bound | Effect] = []
    same = None if size == "tiny" else 0.2
    for way, words in (("probit", "precision by the evidence"), ("validation", "precision by validation")):
        found += [
            Bound(f"ECE after over before, {words}", ratio(way), "0.4 (2.0 % → 0.8 %, CIFAR-10)", unit="×"),
            Effect(f"ECE at most half, {words}", beyond_half(way), -1, "< 0"),
            Bound(
                f"accuracy after less before, {words}",
                paired(score(way, "accuracy"), score("map", "accuracy")),
                0.0,
                low=same and -same,
                high=same,
                unit="points",
            ),
            Effect(
                f"the log loss falls, {words}",
                paired(score(way, "log_loss"), score("map", "log_loss")),
                -1,
                "−0.015 (0.172 → 0.157, CIFAR-10)",
                unit="nats",
            ),
        ]
    return found


def sheets(results: Results) -> list[Sheet]:
    """Every way of predicting; what was chosen."""
    result = results.get(CELL)
    if result is None:
        return []
    metric = ("accuracy", "ece", "log_loss", "brier")
    rows = [(WORDS[way], *(mean(result["scores"][way][m]).text(3) for m in metric)) for way in WORDS]
    chosen = [("precision of the prior by the evidence", [p["evidence"] for p in result["precision"]])]
    chosen += [("by the log-likelihood of validation images", [p["validation"] for p in result["precision"]])]
    chosen += [("temperature", result["temperature"]), ("seconds to train one network", result["training_seconds"])]
    head = ("", "accuracy (%)", "ECE (%)", "log loss (nats)", "Brier")
    lines = tuple((name, ", ".join(f"{value:.4g}" for value in values)) for name, values in chosen)
    return [
        Sheet("Test images, mean ± standard error over seeds", head, tuple(rows)),
        Sheet("What was chosen", ("", "by seed"), lines),
    ]


def draw(results: Results) -> Figure:
    """Accuracy by confidence before and after, of the first seed; calibration error and log loss by the precision of the prior."""
    figure, axes = figures.new(1, 3, (12.5, 4.0))
    result = results[CELL]
    axes[0].plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle=":")
    for k, (way, found) in enumerate(result["reliability"].items()):
        points = [(c, a, 120 * s**0.5) for c, a, s in zip(found["confidence"], found["accuracy"], found["share"]) if s > 0.002]
        x, y, size = zip(*points)
        axes[0].plot(x, y, color=f"C{k}", label=WORDS[way])
        axes[0].scatter(x, y, size, color=f"C{k}", alpha=0.6, linewidths=0)
    axes[0].set(xlabel="confidence", ylabel="accuracy", title="reliability, area by share of images")
    for ax, name, words in ((axes[1], "ece", "ECE (%)"), (axes[2], "log_loss", "log loss (nats)")):
        values = list(zip(*(seed[name] for seed in result["by_precision"])))
        ax.plot(
            result["precisions"], [statistics.fmean(v) for v in values], "o-", color="C1", markersize=3, label="Laplace, probit"
        )
        ax.fill_between(
            result["precisions"], [min(v) for v in values], [max(v) for v in values], color="C1", alpha=0.2, linewidth=0
        )
        ax.axhline(statistics.fmean(result["scores"]["map"][name]), color="C0", label="as trained")
        ax.axhline(
            statistics.fmean(result["scores"]["temperature"][name]), color="C3", linestyle="--", label="temperature scaling"
        )
        for chosen, style in (("evidence", "-."), ("validation", ":")):
            places = [seed[chosen] for seed in result["precision"]]
            ax.axvline(
                statistics.geometric_mean(places), color="0.4", linewidth=1, linestyle=style, label=f"chosen by {chosen}"
            )
        ax.set(xscale="log", yscale="log", xlabel="precision of the last layer's prior", ylabel=words)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend(fontsize="x-small")
    return figure


SMALLER: dict[Size, dict[str, Any]] = {
    "full": {},
    "reduced": {
        "mode": MAP(epochs=20, batch_size=128, lr=Cosine(2e-3)),
        "channels": (8, 16),
        "train": 10_000,
        "validation": 2_000,
    },
    "tiny": {
        "mode": MAP(epochs=1, batch_size=32, lr=Cosine(2e-3)),
        "channels": (2, 3),
        "units": 5,
        "train": 100,
        "validation": 50,
        "test": 60,
        "precisions": (1.0, 10.0),
        "draws": 3,
    },
}
ALL: dict[Size, Sequence[str]] = dict.fromkeys(SIZES, (CELL,))
REPRODUCTIONS = {
    "last-layer": Reproduction(
        "last-layer",
        "A last-layer Laplace approximation of a convolutional network",
        "Laplace Redux – Effortless Bayesian Deep Learning. Erik Daxberger, Agustinus Kristiadi, Alexander Immer, Runa "
        "Eschenhagen, Matthias Bauer and Philipp Hennig. NeurIPS, 2021.",
        (Cell(CELL, run, {size: replace(Convolutional(), **changes) for size, changes in SMALLER.items()}),),
        (
            Part("table", "1", "Calibration before and after", ALL, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "calibration", "Reliability, and what the precision of the prior does", ALL, draw=draw),
        ),
        "last-layer",
    )
}
