"""Which dropout when: the five dropout methods at their defaults, beside one trained network, on a table and on images.

The table is UCI's concrete, one published split a seed, with two hidden layers of 50 ReLU units. The images are those of
Fashion-MNIST with a perceptron of 300 and 100 units; strangers are the test images of MNIST, to be told by the entropy of the
prediction. Sizes are those of `posterior.compress()`, packed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from experiments import figures, sparse
from experiments.frame import SIZES, Cell, Part, Reproduction, Request, Results, Sheet, Size
from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.apps.tables import mlp
from plausible.blocks.unit_noise import TEMPERATURE
from plausible.core import random
from plausible.core.networks import choose_device
from plausible.engine.method import create
from plausible.fitting import fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("map", "mc-dropout", "gaussian-dropout", "variational-dropout", "sparse-vd", "concrete-dropout")
LEVEL = 0.9


@dataclass(frozen=True)
class Compared:
    """One method at its defaults, or with so many `epochs`; `train` and `test` are numbers of images."""

    method: str
    data: Literal["table", "images"]
    epochs: int | None = None
    train: int = 60_000
    test: int = 10_000
    draws: int = 100


def run(settings: Compared, request: Request) -> dict[str, Any]:
    """Scores, seconds and bytes, one number for each seed."""
    found: dict[str, list[float]] = {}
    for seed in range(request.seed, request.seed + request.seeds):
        scores = (_of_table if settings.data == "table" else _of_images)(settings, seed, request)
        for name, value in scores.items():
            found.setdefault(name, []).append(float(value))
    return found


def _fitted(network: Any, data: tuple[Tensor, Tensor], settings: Compared, seed: int, request: Request) -> Any:
    given = {} if settings.epochs is None else {"epochs": settings.epochs}
    posterior = fit(
        network,
        data,
        create(settings.method, **given),
        seed=seed,
        device=request.device,
        compile=request.compile,
        precision=request.precision,
        progress=request.progress,
    )
    if posterior.interrupted:
        raise KeyboardInterrupt("the networks are trained anew by the next call")
    return posterior


def _of_table(settings: Compared, seed: int, request: Request) -> dict[str, float]:
    raw = datasets.uci("concrete").split(seed)
    split = raw.standardised()
    with random.isolated(seed):
        network = mlp(raw.train[0].shape[1], (50, 50), 1)
    posterior = _fitted(network, (split.train[0], raw.train[1]), settings, seed, request)
    predictive, seconds = _predicted(posterior, split.test[0], settings, seed)
    scores = metrics.summary(predictive, raw.test[1], level=LEVEL)
    kept = {"nll": -scores["log_likelihood"], "error": scores["rmse"], "calibration": 100 * scores["coverage_90"]}
    return {**kept, "bytes": posterior.size_on_disk(), "training": posterior.run["seconds"], "prediction": seconds}


def _of_images(settings: Compared, seed: int, request: Request) -> dict[str, float]:
    own, strangers = _images()
    with random.isolated(seed):
        network = sparse.network("lenet-300-100")
    device = choose_device(network, request.device)
    x, y = (part[: settings.train].to(device) for part in own.train)
    x_test, y_test = (part[: settings.test].to(device) for part in own.test)
    posterior = _fitted(network, (x, y), settings, seed, request)
    predictive, seconds = _predicted(posterior, x_test, settings, seed)
    outside, _ = _predicted(posterior, strangers.test[0][: settings.test].to(device), settings, seed)
    scores = metrics.summary(predictive, y_test)
    return {
        "nll": -scores["log_likelihood"],
        "error": 100 * (1 - scores["accuracy"]),
        "calibration": 100 * metrics.ece(predictive, y_test),
        "auroc": metrics.ood_auroc(predictive, outside),
        "bytes": posterior.size_on_disk(),
        "training": posterior.run["seconds"],
        "prediction": seconds,
    }


def _predicted(posterior: Any, x: Tensor, settings: Compared, seed: int) -> tuple[Any, float]:
    """The prediction, and the seconds until its mean is there."""
    began = time.perf_counter()
    predictive = posterior.predict(x, None if settings.method == "map" else settings.draws, seed=seed)
    predictive.mean.sum().item()
    return predictive, time.perf_counter() - began


@lru_cache(maxsize=1)
def _images() -> Any:
    return datasets.fashion_mnist(), datasets.mnist()


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def cell(data: str, method: str) -> str:
    """The name of a cell."""
    return f"{data}-{method}"


def table(data: str) -> Any:
    """The scores of all methods on one set."""
    columns = {"nll": "NLL", "error": "RMSE", "calibration": "rows within the 90 % interval, %"}
    if data == "images":
        columns = {"nll": "NLL", "error": "error %", "calibration": "calibration error %", "auroc": "AUROC of strangers"}

    def sheets(results: Results) -> list[Sheet]:
        rows = []
        for method in METHODS:
            if (found := results.get(cell(data, method))) is None:
                continue
            scores = [mean(found[key]).text() for key in columns]
            costs = [
                f"{mean(found['bytes']).value / 1000:.1f}",
                *(f"{mean(found[key]).value:.2g}" for key in ("training", "prediction")),
            ]
            rows.append((f"`{method}`", *scores, *costs))
        head = ("method", *columns.values(), "kB", "seconds of fit", "of prediction")
        return [Sheet("Test rows, mean ± standard error over seeds", head, tuple(rows))]

    return sheets


def draw(results: Results) -> Figure:  # noqa: ARG001
    """The relaxed mask as a function of u, by temperature, and as one of u and the rate."""
    figure, axes = figures.new(1, 2, (9.5, 3.6))
    u = torch.linspace(0.001, 0.999, 999)
    for number, temperature in enumerate((1.0, 0.5, TEMPERATURE, 0.02)):
        axes[0].plot(u, mask(u, 0.3, temperature), color=f"C{number}", label=f"t = {temperature:g}")
    for number, rate in enumerate((0.1, 0.3, 0.5, 0.8)):
        axes[1].plot(u, mask(u, rate, TEMPERATURE), color=f"C{number}", label=f"p = {rate:g}")
    axes[0].set(title="p = 0.3", xlabel="u ~ U(0, 1)", ylabel="mask m")
    axes[1].set(title=f"t = {TEMPERATURE:g}", xlabel="u ~ U(0, 1)")
    for ax in axes:
        ax.legend()
        ax.grid(alpha=0.3)
    return figure


def mask(u: Tensor, rate: float, temperature: float) -> Tensor:
    """M = 1 − σ((logit p + logit u)/t)."""
    return torch.sigmoid(-(torch.logit(torch.tensor(rate)) + torch.logit(u)) / temperature)


SHORT = {"table": {"full": None, "reduced": None, "tiny": 2}, "images": {"full": None, "reduced": 30, "tiny": 1}}
COUNTS: dict[Size, tuple[int, int]] = {"full": (60_000, 10_000), "reduced": (3_000, 2_000), "tiny": (200, 100)}
CELLS = tuple(
    Cell(cell(data, method), run, {size: Compared(method, data, SHORT[data][size], *COUNTS[size]) for size in SIZES})
    for data in ("table", "images")
    for method in METHODS
)


def _all(data: str) -> dict[Size, Sequence[str]]:
    return dict.fromkeys(SIZES, tuple(cell(data, method) for method in METHODS))


REPRODUCTIONS = {
    "dropouts": Reproduction(
        "dropouts",
        "Which dropout when",
        "Five methods of this library at their defaults.",
        CELLS,
        (
            Part("table", "regression", "UCI's concrete", _all("table"), sheets=table("table")),
            Part("table", "classes", "Fashion-MNIST, with MNIST as strangers", _all("images"), sheets=table("images")),
            Part("figure", "mask", "The relaxed mask of concrete dropout", _all("table"), draw=draw),
        ),
        "../dropout",
        seeds={"full": 5, "reduced": 2, "tiny": 1},
    )
}
