"""Why averages over networks help, by experiment: one network, SWAG, ensembles and MultiSWAG on Fashion-MNIST under corruption.

All share their modes: the first member is the one network, k members are an ensemble of k, SWAG goes on from the first of them and
MultiSWAG from each (Wilson & Izmailov 2020). Beside it a sweep over temperatures (Wenzel et al. 2020), and SWAG and FGE against SGD
on a network of the VGG type with batch norm (Maddox et al. 2019; Garipov et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Effect, Part, Reproduction, Request, Results, Sheet, Size, look
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.core import random
from plausible.core.optimisers import SGD
from plausible.core.priors import Gaussian
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import FGE, MAP, SGHMC, SWAG, Ensemble

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Images:
    """Fashion-MNIST, the first so many images, and the network: widths of its convolutions, and of the layer behind them."""

    train: int = 50_000
    test: int = 10_000
    channels: tuple[int, int] = (16, 32)
    units: int = 64
    members: int = 5
    epochs: int = 15
    averaging: int = 8
    draws: int = 10
    temperatures: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)

    def data(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training images in [0, 1] less their mean over their deviation; test images in [0, 1], to be corrupted."""
        found = datasets.fashion_mnist()
        (x, y), (x_test, y_test) = found.train, found.test
        x, y = x[: self.train], y[: self.train]
        return (standard(x), y), (x_test[: self.test], y_test[: self.test])


MEAN, SPREAD = 0.286, 0.353
"""Of the pixels of Fashion-MNIST."""


def standard(x: Tensor) -> Tensor:
    """Pixels in [0, 1] → standardised."""
    return (x - MEAN) / SPREAD


def small(settings: Images) -> nn.Sequential:
    """Two convolutions, pooled, and two linear layers."""
    first, second = settings.channels
    return nn.Sequential(
        nn.Conv2d(1, first, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(49 * second, settings.units),
        nn.ReLU(),
        nn.Linear(settings.units, 10),
    )


def vgg(settings: Images) -> nn.Sequential:
    """Pairs of 3 × 3 convolutions with batch norm, pooled in between (Simonyan & Zisserman 2015, with two stages)."""
    layers: list[nn.Module] = []
    before = 1
    for width in settings.channels:
        for _ in range(2):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(49 * before, settings.units), nn.ReLU(), nn.Linear(settings.units, 10)]
    return nn.Sequential(*layers, *head)


# ---------------------------------------------------------------------------------------------------------------------
# Corruptions


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Turned by so many degrees, black beyond the border."""
    angle = torch.deg2rad(torch.tensor(degrees))
    turn = torch.tensor([[torch.cos(angle), -torch.sin(angle), 0.0], [torch.sin(angle), torch.cos(angle), 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def blurred(x: Tensor, width: float) -> Tensor:
    """Convolved with a Gaussian of so many pixels."""
    if not width:
        return x
    reach = torch.arange(-7, 8, dtype=x.dtype)
    line = torch.softmax(-reach.square() / (2 * width**2), 0)
    across = F.conv2d(x, line.view(1, 1, 1, -1), padding=(0, 7))
    return F.conv2d(across, line.view(1, 1, -1, 1), padding=(7, 0))


def noisy(x: Tensor, scale: float) -> Tensor:
    """With Gaussian noise, cut to [0, 1]."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return (x + scale * noise).clamp(0, 1)


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "rotation": (rotated, (0.0, 15.0, 30.0, 45.0, 60.0)),
    "blur": (blurred, (0.0, 0.5, 1.0, 1.5, 2.0)),
    "noise": (noisy, (0.0, 0.1, 0.2, 0.3, 0.4)),
}


def log_score(probabilities: Tensor, y: Tensor) -> float:
    """The mean log of the averaged probabilities [draws, N, 10] of the labels."""
    return float(probabilities.double().mean(0).gather(1, y[:, None]).clamp(min=1e-12).log().mean())


def probabilities(posterior: Any, x: Tensor) -> Tensor:
    """Of every draw, [draws, N, 10], on the CPU."""
    return posterior.functions(standard(x), None).softmax(-1).cpu()


# ---------------------------------------------------------------------------------------------------------------------
# What is run


def options(request: Request, seed: int) -> dict[str, Any]:
    """What all fits share."""
    return {
        "prior": Gaussian(1.0),
        "seed": seed,
        "device": request.device,
        "compile": request.compile,
        "precision": request.precision,
        "progress": request.progress,
    }


def mode(settings: Images) -> MAP:
    """SGD with momentum, to the end."""
    return MAP(settings.epochs, lr=Cosine(0.05, end=0.005), optimiser=SGD(momentum=0.9), patience=None)


def swag(settings: Images) -> SWAG:
    """From a mode on, at a constant rate."""
    return SWAG(None, settings.averaging, lr=0.02, optimiser=SGD(momentum=0.9), draws=settings.draws, every=every(settings))


def every(settings: Images) -> int:
    """Four snapshots an epoch."""
    return max(1, settings.train // 128 // 4)


def models(settings: Images, request: Request) -> dict[str, Any]:
    """For each seed `scores[way][corruption][strength]`, where a way is "ensemble-k" or "multiswag-k" with k members."""
    train, (x, y) = settings.data()
    ways = [f"{kind}-{k + 1}" for kind in ("ensemble", "multiswag") for k in range(settings.members)]
    scores: dict[str, dict[str, list[list[float]]]] = {
        way: {name: [[] for _ in strengths] for name, (_, strengths) in CORRUPTIONS.items()} for way in ways
    }
    several = settings.members * request.seeds
    with random.isolated(request.seed):
        net = small(settings)
    modes = fit(net, train, Ensemble(mode(settings), several), **options(request, request.seed))
    wide: Any = fit(net, train, Ensemble(swag(settings), several, init="given"), init=modes, **options(request, request.seed))
    for name, (corrupt, strengths) in CORRUPTIONS.items():
        for place, strength in enumerate(strengths):
            shown = corrupt(x, strength)
            single = probabilities(modes, shown)  # [members of all seeds, N, 10]
            spread = [probabilities(part, shown) for part in wide.parts]
            for seed in range(request.seeds):
                own = slice(seed * settings.members, (seed + 1) * settings.members)
                for k in range(settings.members):
                    few = slice(own.start, own.start + k + 1)
                    scores[f"ensemble-{k + 1}"][name][place].append(log_score(single[few], y))
                    scores[f"multiswag-{k + 1}"][name][place].append(log_score(torch.cat(spread[few]), y))
    return {"scores": scores, "members": settings.members}


def temperatures(settings: Images, request: Request) -> dict[str, Any]:
    """`scores[temperature]` by seed: SGHMC from the modes, averaged over its draws, and the modes themselves."""
    train, (x, y) = settings.data()
    with random.isolated(request.seed):
        net = small(settings)
    modes = fit(net, train, Ensemble(mode(settings), request.seeds), **options(request, request.seed))
    single = probabilities(modes, x)
    scores = {"0": [log_score(single[k : k + 1], y) for k in range(request.seeds)]}
    chain = SGHMC(settings.averaging, lr=0.01 / settings.train, burn_in=0.5)
    steps = settings.averaging * -(-settings.train // 128)
    for temperature in settings.temperatures:
        own = replace(chain, temperature=temperature, thin=max(1, steps // 2 // settings.draws))
        found = fit(net, train, Ensemble(own, request.seeds, init="given"), init=modes, **options(request, request.seed))
        drawn = probabilities(found, x)
        scores[f"{temperature:g}"] = [log_score(drawn[k :: request.seeds], y) for k in range(request.seeds)]
    return {"scores": scores}


def paths(settings: Images, request: Request) -> dict[str, Any]:
    """`scores[method]` by seed, of the network of the VGG type: SGD for as long as the averages have in all, SWAG and FGE."""
    train, (x, y) = settings.data()
    with random.isolated(request.seed):
        net = vgg(settings)

    def fitted(method: Any, init: Any = None, more: int = 0) -> Any:
        own = replace(method, epochs=method.epochs + more)
        given = "fresh" if init is None else "given"
        return fit(net, train, Ensemble(own, request.seeds, init=given), init=init, **options(request, request.seed))

    modes = fitted(mode(settings))
    fge = FGE(None, settings.averaging, lr=0.02, optimiser=SGD(momentum=0.9), cycles=4)
    members: Any = fitted(fge, modes)
    averages: Any = fitted(swag(settings), modes)
    longer = probabilities(fitted(mode(settings), more=settings.averaging), x)
    scores = {"sgd": [log_score(longer[k : k + 1], y) for k in range(request.seeds)]}
    for name, found in (("swag", averages), ("fge", members)):
        scores[name] = [log_score(probabilities(part, x), y) for part in found.parts]
    return {"scores": scores}


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def level(results: Results, way: str) -> list[float] | None:
    """The log-likelihood of a way, the mean over all corruptions and strengths, by seed."""
    scores = look(results, "models", "scores", way)
    if scores is None:
        return None
    rows = [row for by_strength in scores.values() for row in by_strength]
    return [sum(column) / len(column) for column in zip(*rows)]


def gain(better: str, worse: str) -> Any:
    """The difference of two ways; "last" stands for all members."""

    def values(results: Results) -> Sequence[float] | None:
        members = look(results, "models", "members")
        found = [level(results, way.replace("last", str(members))) for way in (better, worse)]
        return None if found[0] is None or found[1] is None else [a - b for a, b in zip(*found)]

    return values


def path_gain(name: str) -> Any:
    """The log-likelihood of a method along a path less that of SGD."""

    def values(results: Results) -> Sequence[float] | None:
        scores = look(results, "paths", "scores")
        return None if scores is None else [a - b for a, b in zip(scores[name], scores["sgd"])]

    return values


def warmest(results: Results) -> Sequence[float] | None:
    """What the best temperature gains over 1."""
    scores = look(results, "temperatures", "scores")
    return None if scores is None else [max(column) - column[-1] for column in zip(*list(scores.values())[1:])]


CLAIMS: tuple[Bound | Effect, ...] = (
    Effect(
        "corrupted images: all members of MultiSWAG over the ensemble", gain("multiswag-last", "ensemble-last"), 1, "≥", "nats"
    ),
    Effect("corrupted images: the ensemble over SWAG of one mode", gain("ensemble-last", "multiswag-1"), 1, "≥", "nats"),
    Effect("corrupted images: SWAG of one mode over that mode", gain("multiswag-1", "ensemble-1"), 1, "≥", "nats"),
)
WARM = Bound("what the best temperature gains over T = 1", warmest, "colder is better", unit="nats")
PATHS = tuple(
    Effect(f"VGG type: {words} over SGD of as many epochs", path_gain(name), 1, "above 0", "nats")
    for name, words in (("swag", "SWAG"), ("fge", "FGE"))
)


def corrupted(results: Results) -> list[Sheet]:
    """By number of members: clean, and the mean of the strengths of each corruption."""
    scores = look(results, "models", "scores")
    if scores is None:
        return []
    body = []
    for way, found in scores.items():
        kind, _, count = way.partition("-")
        clean = mean(found["noise"][0]).text(3)
        columns = [mean([sum(c) / len(c) for c in zip(*found[name][1:])]).text(3) for name in CORRUPTIONS]
        body.append((kind, count, clean, *columns))
    return [Sheet("Test log-likelihood, nats an image", ("average", "modes", "clean", *CORRUPTIONS), tuple(body))]


def listed(cell: str, head: str) -> Any:
    """The scores of the other two cells."""

    def sheets(results: Results) -> list[Sheet]:
        scores = look(results, cell, "scores")
        body = tuple((name, mean(found).text(4)) for name, found in (scores or {}).items())
        return [Sheet("Test log-likelihood, nats an image", (head, "log-likelihood"), body)] if body else []

    return sheets


def draw(results: Results) -> Figure:
    """Log-likelihood by strength of each corruption, and by the number of modes."""
    figure, axes = figures.new(1, 4, (13.0, 3.4))
    scores, members = look(results, "models", "scores"), look(results, "models", "members")
    if scores is None:
        return figure
    shown = {"ensemble-1": "one network", "multiswag-1": "SWAG"}
    shown |= {f"ensemble-{members}": f"ensemble of {members}", f"multiswag-{members}": f"MultiSWAG of {members}"}
    for ax, (name, (_, strengths)) in zip(axes, CORRUPTIONS.items()):
        for number, (way, words) in enumerate(shown.items()):
            ax.plot(strengths, [mean(row).value for row in scores[way][name]], "o-", color=f"C{number}", label=words)
        ax.set(xlabel=name)
    counts = range(1, members + 1)
    for kind, colour in (("ensemble", "C2"), ("multiswag", "C3")):
        values = [mean(level(results, f"{kind}-{k}") or []).value for k in counts]
        axes[3].plot(counts, values, "o-", color=colour, label=kind)
    axes[3].set(xlabel="modes, all corruptions", xticks=list(counts))
    axes[0].set(ylabel="test log-likelihood, nats")
    for ax in axes:
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    axes[3].legend(fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells

REDUCED = Images(2000, 1000, (8, 16), 32, members=3, epochs=12, averaging=6, temperatures=(1e-3, 0.1, 1.0))
SETTINGS: dict[Size, Images] = {
    "full": Images(),
    "reduced": REDUCED,
    "tiny": Images(256, 50, (2, 3), 4, members=2, epochs=2, averaging=4, draws=2, temperatures=(0.1, 1.0)),
}
RUNS = {"models": models, "temperatures": temperatures, "paths": paths}


def everywhere(*names: str) -> dict[Size, Sequence[str]]:
    """The cells at every size."""
    return dict.fromkeys(SIZES, names)


REPRODUCTIONS = {
    "averaging": Reproduction(
        "averaging",
        "Averages over networks, modes and temperatures on corrupted images",
        "Bayesian Deep Learning and a Probabilistic Perspective of Generalization. Andrew Gordon Wilson and Pavel Izmailov. "
        "NeurIPS, 2020; How Good is the Bayes Posterior in Deep Neural Networks Really? Florian Wenzel et al. ICML, 2020.",
        tuple(Cell(name, run, SETTINGS) for name, run in RUNS.items()),
        (
            Part(
                "table",
                "models",
                "Number of modes, under corruption",
                everywhere("models"),
                dict.fromkeys(SIZES, CLAIMS),
                corrupted,
            ),
            Part(
                "table",
                "temperatures",
                "Temperatures",
                everywhere("temperatures"),
                dict.fromkeys(SIZES, (WARM,)),
                listed("temperatures", "T"),
            ),
            Part(
                "table",
                "paths",
                "Averages along a path, against SGD",
                everywhere("paths"),
                dict.fromkeys(SIZES, PATHS),
                listed("paths", "method"),
            ),
            Part("figure", "models", "Log-likelihood by corruption and by modes", everywhere("models"), draw=draw),
        ),
        "averaging",
        {"full": 3, "reduced": 3, "tiny": 2},
    )
}
