"""Continual learning on permuted MNIST: the posterior of one task is the prior of the next.

Each task is MNIST with its pixels in another order, the same for all its images; tasks come one after the other, and nothing of a
task is seen again. One network with one output for each digit serves all of them. Fine-tuning trains on from task to task and
forgets; the online Laplace approximation (Ritter, Botev and Barber 2018) holds each weight where the earlier tasks need it, by the
curvature that they left.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments import figures, mnist
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
from plausible.apps.compare.tables import mean
from plausible.core import random
from plausible.core.likelihoods import Categorical
from plausible.core.networks import choose_device
from plausible.core.priors import Earlier, Gaussian, Prior
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import MAP, Laplace, Method
from plausible.posteriors.base import Posterior
from plausible.testing import quick

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sequential:
    """One way to go from task to task: `method` on each, and with `carry` its posterior as the next one's prior.

    Without it the prior stays, and a task starts at the weights of the one before. With `together` all tasks are there at once,
    which shows what can be reached.
    """

    method: Method
    carry: bool = False
    together: bool = False
    prior: Prior = Gaussian(1.0)  # noqa: RUF009
    tasks: int = 5
    units: int = 100
    train: int = 50_000
    test: int = 10_000


def run(settings: Sequential, request: Request) -> dict[str, Any]:
    """Accuracies in per cent, by seed, after each task, on each task so far; seconds are those of training."""
    module = network(settings)
    device = choose_device(module, request.device)
    parts = {name: (x.to(device), y.to(device)) for name, (x, y) in images(settings).items()}
    seeds = range(request.seed, request.seed + request.seeds)
    learned = [_learned(settings, parts, seed, request) for seed in seeds]
    return {"accuracy": [accuracies for accuracies, _ in learned], "training_seconds": sum(s for _, s in learned)}


def network(settings: Sequential) -> nn.Sequential:
    """784 – units – units – 10 with ReLU."""
    return mnist.network(mnist.Classifier(MAP(), settings.units))


def images(settings: Sequential) -> dict[str, tuple[Tensor, Tensor]]:
    """MNIST with pixels in [0, 1], in their usual order."""
    sizes = {"train": settings.train, "validation": 0, "test": settings.test}
    return mnist.images(mnist.Classifier(MAP(), settings.units, normalisation="unit", **sizes))  # type: ignore[arg-type]


def orders(tasks: int, seed: int) -> list[Tensor]:
    """The order of the pixels in each task: [784] each."""
    stream = random.generator(seed, 61)
    return [torch.randperm(784, generator=stream) for _ in range(tasks)]


def _learned(
    settings: Sequential, parts: dict[str, tuple[Tensor, Tensor]], seed: int, request: Request
) -> tuple[list[list[float]], float]:
    """All tasks in turn from one seed: after task k the accuracies on tasks 1 … k."""
    (x, y), (x_test, y_test) = parts["train"], parts["test"]
    places = [order.to(x.device) for order in orders(settings.tasks, seed)]
    with random.isolated(seed):
        module = network(settings)
    found, seconds = [], 0.0
    posterior: Posterior | None = None
    for task, place in enumerate(places):
        data = (x[:, place], y)
        if settings.together:
            seen = places[: task + 1]
            data = (torch.cat([x[:, other] for other in seen]), y.repeat(len(seen)))
        prior = Earlier(posterior) if settings.carry and posterior is not None else settings.prior
        with warnings.catch_warnings():  # training by batches ends near a mode, and that is enough here
            warnings.filterwarnings("ignore", "the network is not at a mode")
            posterior = fit(
                module,
                data,
                settings.method,
                likelihood=Categorical(),
                prior=prior,
                init=posterior,
                seed=seed + task,
                device=request.device,
                precision=request.precision,
                progress=request.progress,
                compile=False if request.compile == "auto" else request.compile,
            )
        if posterior.interrupted:
            raise KeyboardInterrupt("the tasks are trained anew by the next call")
        seconds += posterior.run["seconds"]
        found.append([_accuracy(posterior, x_test[:, other], y_test) for other in places[: task + 1]])
    return found, seconds


def _accuracy(posterior: Posterior, x: Tensor, y: Tensor) -> float:
    """Of the network at the mode, in per cent."""
    model = posterior.model
    weights = {name: value[-1] for name, value in posterior.starting_points(1).items()}
    with torch.no_grad():
        classes = torch.cat([model.outputs(weights, part).argmax(-1) for part in x.split(5000)])
    return round(100 * float((classes == y).double().mean()), 4)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

WORDS = {
    "fine-tuning": "fine-tuning",
    "diagonal": "online Laplace, diagonal",
    "kronecker": "online Laplace, Kronecker factors",
    "together": "all tasks at once",
}


def average(cell: str) -> Values:
    """Mean accuracy over all tasks after the last one, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, cell, "accuracy")
        return None if found is None else [sum(seed[-1]) / len(seed[-1]) for seed in found]

    return values


def lost(cell: str) -> Values:
    """Points lost on the first task since it was learned, by seed."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, cell, "accuracy")
        return None if found is None else [seed[0][0] - seed[-1][0] for seed in found]

    return values


def claims(size: Size) -> list[Bound | Effect]:
    """What is expected: hardly anything is forgotten with Kronecker factors, less than without with a diagonal."""
    low = {"full": 90.0, "reduced": 80.0, "tiny": None}[size]
    high = None if size == "tiny" else 8.0
    return [
        Bound("average accuracy, Kronecker factors", average("kronecker"), "> 90 (after 50 tasks)", low=low),
        Bound("average accuracy, diagonal", average("diagonal")),
        Bound("average accuracy, fine-tuning", average("fine-tuning")),
        Bound("lost of the first task, Kronecker factors", lost("kronecker"), high=high, unit="points"),
        Effect("Kronecker factors above fine-tuning", paired(average("kronecker"), average("fine-tuning")), 1, "> 0"),
        Effect("Kronecker factors above the diagonal", paired(average("kronecker"), average("diagonal")), 1, "> 0"),
        Effect("the diagonal above fine-tuning", paired(average("diagonal"), average("fine-tuning")), 1, "> 0"),
    ]


def table(results: Results) -> list[Sheet]:
    """Averages after each task, and every task at the end."""
    rows: list[list[tuple[str, ...]]] = [[], []]
    for name, words in WORDS.items():
        found = look(results, name, "accuracy")
        if found is not None:
            after = [mean([sum(seed[k]) / len(seed[k]) for seed in found]).text() for k in range(len(found[0]))]
            rows[0].append((words, *after))
            rows[1].append((words, *(mean([seed[-1][k] for seed in found]).text() for k in range(len(found[0])))))
    head = ("", *(str(k + 1) for k in range(len(rows[0][0]) - 1))) if rows[0] else ("",)
    return [
        Sheet("Accuracy in per cent, averaged over the tasks so far, after so many tasks", head, tuple(rows[0])),
        Sheet("Accuracy in per cent on each task, after the last one", head, tuple(rows[1])),
    ]


def draw(results: Results) -> Figure:
    """The average over the tasks so far, and the first task, as tasks are added."""
    figure, axes = figures.new(1, 2, (9.5, 4.1), sharey=True)
    for number, (name, words) in enumerate(WORDS.items()):
        found = look(results, name, "accuracy")
        if found is None:
            continue
        count = range(1, len(found[0]) + 1)
        averages = [[sum(seed[k]) / len(seed[k]) for seed in found] for k in range(len(found[0]))]
        first = [[seed[k][0] for seed in found] for k in range(len(found[0]))]
        for ax, values in zip(axes, (averages, first)):
            style = {"color": f"C{number}"}
            ax.plot(count, [mean(row).value for row in values], "o-", markersize=4, label=words, **style)
            ax.fill_between(count, [min(r) for r in values], [max(r) for r in values], alpha=0.2, linewidth=0, **style)
            ax.set(xlabel="tasks learned", xticks=list(count))
            ax.grid(alpha=0.3)
    axes[0].set(ylabel="accuracy (%)", title="average over the tasks so far")
    axes[1].set(title="the first task")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    return figure


TRAINED = MAP(epochs=10, batch_size=128, lr=Cosine(1e-3))
METHODS: dict[str, tuple[Method, dict[str, bool]]] = {
    "fine-tuning": (TRAINED, {}),
    "diagonal": (Laplace(structure="diag", mode=TRAINED, tune=None), {"carry": True}),
    "kronecker": (Laplace(structure="kron", mode=TRAINED, tune=None), {"carry": True}),
    "together": (TRAINED, {"together": True}),
}
SMALLER: dict[Size, dict[str, int]] = {
    "full": {},
    "reduced": {"train": 5_000, "test": 2_000},
    "tiny": {"train": 200, "test": 100, "units": 8, "tasks": 2},
}


def cell(name: str) -> Cell:
    """The cell by size."""
    method, ways = METHODS[name]
    found: dict[Size, Sequential] = {}
    for size, changes in SMALLER.items():
        own = method if size != "tiny" else quick(method)
        found[size] = replace(Sequential(own, **ways), **changes)  # type: ignore[arg-type]
    return Cell(name, run, found)


ALL: dict[Size, Sequence[str]] = dict.fromkeys(SIZES, tuple(METHODS))
REPRODUCTIONS = {
    "permuted-mnist": Reproduction(
        "permuted-mnist",
        "Continual learning on permuted MNIST",
        "Online Structured Laplace Approximations for Overcoming Catastrophic Forgetting. Hippolyt Ritter, Aleksandar Botev and "
        "David Barber. NeurIPS, 2018.",
        tuple(cell(name) for name in METHODS),
        (
            Part("table", "1", "Accuracy after all tasks", ALL, {size: claims(size) for size in SIZES}, table),
            Part("figure", "accuracy", "Accuracy as tasks are added", ALL, draw=draw),
        ),
        "permuted-mnist",
    )
}
