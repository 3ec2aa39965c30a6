"""Does the evidence prefer the network that generalises? MacKay's robot arm and Neal's examples, over widths and depths.

MacKay (1992) trained networks of one hidden layer on 200 noisy places of a robot's hand, with the prior's precisions and the
noise set by the evidence, and found that the evidence falls where the test error rises, as long as the model is not plainly
wrong. Here every architecture is trained from several starts on the training rows alone; the evidence of an architecture is
that of its best start, since the sum over modes is ruled by the largest. The test rows are looked at once, to draw what the
evidence did not see.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Result, Results, Sheet, Size, Values
from plausible.analysis.evidence import log_symmetries
from plausible.core import priors, random
from plausible.core.likelihoods import Categorical, Gaussian
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import MAP, Laplace, Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from plausible.posteriors.linearised import LaplacePosterior

Table = Literal["robot_arm", "neal_regression", "neal_binary", "neal_classes"]
FAR = 0.3
"""Posterior standard deviations from the mode up to which a start counts: further out its evidence is not that of a mode."""
METHOD = Laplace(structure="full", tune="layer", rounds=15, polish=100, mode=MAP(epochs=500, batch_size=None, lr=Cosine(0.02)))


@dataclass(frozen=True)
class Perceptron:
    """A network with tanh units in layers of these widths, trained on a small set by the evidence."""

    data: Table
    widths: tuple[int, ...]
    method: Method = METHOD


def rows(name: Table) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test rows in float64; inputs are standardised by the training rows, targets are as they are."""
    from plausible.apps.datasets import small

    table = small(name, dtype=torch.float64)
    train, test = table.splits[0]
    mean, std = table.x[train].mean(0), table.x[train].std(0)
    x = (table.x - mean) / std
    return (x[train], table.y[train]), (x[test], table.y[test])


def network(widths: Sequence[int], inputs: int, outputs: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    sizes = (inputs, *widths)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], outputs)).double()


def run(settings: Perceptron, request: Request) -> dict[str, Any]:
    """For each start: evidence and its parts on the training rows; log-likelihood and error on the test rows."""
    (x, y), test = rows(settings.data)
    classes = int(y.max()) + 1 if y.dtype == torch.int64 else None
    found: dict[str, list[float]] = {}
    for seed in range(request.seed, request.seed + request.seeds):
        with random.isolated(seed):
            module = network(settings.widths, x.shape[1], classes or y.shape[1])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the network is not at a mode")  # the distance is kept, and judged
            posterior: Any = fit(
                module,
                (x, y),
                settings.method,
                likelihood=Gaussian("learned") if classes is None else Categorical(),
                prior=priors.Gaussian(1.0),
                seed=seed,
                device="cpu",
                compile=False,
                progress=request.progress,
            )
        for name, value in measured(posterior, *test).items():
            found.setdefault(name, []).append(value)
    size = sum(p.numel() for p in module.parameters())
    return {**found, "weights": size, "log_symmetries": log_symmetries(module)}


def measured(posterior: LaplacePosterior, x: Tensor, y: Tensor) -> dict[str, float]:
    """What one start gave. `error` is the squared distance to the target, or the share of wrong classes in per cent."""
    assert posterior.evidence is not None
    predictive = posterior.predict(x)
    wrong = (
        100 * (predictive.probs.argmax(-1) != y).double() if y.dtype == torch.int64 else (predictive.mean - y).square().sum(-1)
    )
    noise = posterior.points.get("likelihood.log_scale")
    return {
        "log_evidence": float(posterior.evidence.total),
        "log_fit": float(posterior.evidence.log_likelihood),
        "log_occam": float(posterior.evidence.log_occam),
        "effective": posterior.effective,
        "distance": float(posterior.report["distance"]),
        "noise": math.nan if noise is None else float(noise.exp().mean()),
        "log_likelihood": float(predictive.log_prob(y).mean()),
        "error": float(wrong.mean()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# What the results say


def best_start(result: Result) -> int:
    """The start with the most evidence, among those that are at a mode where there are any."""
    starts = range(len(result["log_evidence"]))
    settled = [k for k in starts if result["distance"][k] <= FAR]
    return max(settled or starts, key=lambda k: result["log_evidence"][k])


def chosen(results: Results, cells: Sequence[str], symmetries: bool = False) -> dict[str, dict[str, float]]:
    """The numbers of the best start of each architecture that was run."""
    found = {}
    for cell in cells:
        if (result := results.get(cell)) is None:
            continue
        k = best_start(result)
        own = {name: value[k] for name, value in result.items() if isinstance(value, list)}
        own["log_evidence"] += result["log_symmetries"] if symmetries else 0.0
        found[cell] = {**own, "weights": result["weights"], "log_symmetries": result["log_symmetries"]}
    return found


def correlation(cells: Sequence[str], symmetries: bool = False) -> Values:
    """Spearman's ρ of evidence and held-out log-likelihood over architectures."""

    def values(results: Results) -> Sequence[float] | None:
        from plausible.apps.plots.comparing import rank_correlation

        own = chosen(results, cells, symmetries)
        if len(own) < 3:
            return None
        return [rank_correlation(*zip(*((row["log_evidence"], row["log_likelihood"]) for row in own.values())))]

    return values


def regret(cells: Sequence[str], symmetries: bool = False) -> Values:
    """How many nats an example the architecture with the most evidence predicts worse than the best one of all."""

    def values(results: Results) -> Sequence[float] | None:
        own = chosen(results, cells, symmetries)
        if len(own) < 2:
            return None
        pick = max(own.values(), key=lambda row: row["log_evidence"])
        return [max(row["log_likelihood"] for row in own.values()) - pick["log_likelihood"]]

    return values


def picked(cells: Sequence[str], name: str, by: str = "log_evidence", sign: int = 1, factor: float = 1.0) -> Values:
    """One number, times a factor, of the architecture with the most evidence (or the largest, or smallest, of another number)."""

    def values(results: Results) -> Sequence[float] | None:
        own = chosen(results, cells)
        return [factor * max(own.values(), key=lambda row: sign * row[by])[name]] if own else None

    return values


def sheet(cells: Sequence[str], error: str) -> Any:
    """All architectures, those with the most evidence first."""

    def sheets(results: Results) -> list[Sheet]:
        own = chosen(results, cells)
        body = []
        for cell, row in sorted(own.items(), key=lambda item: -item[1]["log_evidence"]):
            starts = results[cell]["log_evidence"]
            words = (
                title(cell),
                f"{row['weights']}",
                f"{row['effective']:.0f}",
                f"{row['log_evidence']:.1f}",
                f"{row['log_fit']:.1f}",
                f"{row['log_occam']:.1f}",
                f"{row['log_likelihood']:.3f}",
                f"{row['error']:.3g}",
                f"{min(starts):.1f}",
            )
            body.append(tuple(text.replace("-", "−") for text in words))
        heads = ("units", "weights", "determined", "log evidence", "log fit", "log Occam", "test", error, "worst start")
        far = max((row["distance"] for row in own.values()), default=0.0)
        name = f"Best start of each architecture by evidence, at most {far:.2g} posterior standard deviations from its mode"
        return [Sheet(name, heads, tuple(body))]

    return sheets


def title(cell: str) -> str:
    """`robot-8x2` → `8×2`: two layers of eight units."""
    return cell.rpartition("-")[2].replace("x", "×")


def draw(families: Mapping[str, Sequence[str]]) -> Any:
    """Evidence against held-out log-likelihood, a panel for each data set; faint dots are the other starts."""

    def drawn(results: Results) -> Figure:
        from plausible.apps.plots import evidence

        there = {name: own for name, cells in families.items() if len(own := chosen(results, cells)) > 1}
        figure, axes = figures.new(1, max(1, len(there)), (1.5 + 4.8 * max(1, len(there)), 4.6), squeeze=False)
        for ax, (name, own) in zip(axes[0], there.items()):
            values = [{title(cell): row[key] for cell, row in own.items()} for key in ("log_evidence", "log_likelihood")]
            depths = {title(cell): f"{depth(cell)} hidden layer{'s' if depth(cell) > 1 else ''}" for cell in own}
            evidence(*values, groups=depths, ax=ax)
            limits = {"xlim": ax.get_xlim(), "ylim": ax.get_ylim()}
            for cell in own:
                starts = results[cell]
                ax.plot(starts["log_evidence"], starts["log_likelihood"], ".", color="0.6", alpha=0.5, markersize=4, zorder=1)
            ax.set(**limits)
            ax.set_title(f"{name}: {ax.get_title()}", fontsize=10)
        return figure

    return drawn


def depth(cell: str) -> int:
    """How many hidden layers."""
    return int(cell.rpartition("x")[2])


# ---------------------------------------------------------------------------------------------------------------------
# The experiments

Widths = Mapping[Size, Mapping[int, tuple[int, ...]]]
"""By size and by the number of hidden layers."""

SMALLER: Widths = {"reduced": {1: (3, 5, 8, 16), 2: (4,)}, "tiny": {1: (3, 6), 2: (3,)}}
ROBOT: Widths = {**SMALLER, "full": {1: (3, 4, 5, 6, 8, 10, 12, 16, 20, 30), 2: (3, 4, 6, 8)}}
NEAL: Widths = {**SMALLER, "full": {1: (2, 3, 4, 6, 8, 12), 2: (4, 6)}}
METHODS: Mapping[Size, Method] = {
    "full": METHOD,
    "reduced": replace(METHOD, rounds=8, polish=60),
    "tiny": replace(METHOD, rounds=1, polish=5, mode=MAP(epochs=30, batch_size=None, lr=0.02)),
}


def family(prefix: str, data: Table, every: Widths) -> tuple[list[Cell], dict[Size, list[str]]]:
    """A cell for each architecture, and their names by size."""
    settings: dict[str, dict[Size, Perceptron]] = {}
    for size in SIZES:
        for layers, widths in every[size].items():
            for width in widths:
                own = Perceptron(data, (width,) * layers, METHODS[size])
                settings.setdefault(f"{prefix}-{width}x{layers}", {})[size] = own
    order = sorted(settings, key=lambda name: (depth(name), int(title(name).partition("×")[0])))
    return [Cell(name, run, settings[name]) for name in order], {
        size: [name for name in order if size in settings[name]] for size in SIZES
    }


def claims(cells: Sequence[str], size: Size, together: bool = True) -> list[Bound]:
    """Does the evidence know? `together`: whether architectures differ so much that also few of them must be ranked alike."""
    few = size == "tiny"
    return [
        Bound(
            "rank correlation of evidence and test log-likelihood",
            correlation(cells),
            "they go together",
            low=0.5 if size == "full" or (together and not few) else None,
            unit="",
        ),
        Bound("the same with symmetric modes counted", correlation(cells, True), unit=""),
        Bound(
            "the model with the most evidence predicts worse than the best one by",
            regret(cells),
            high=None if few else 0.05,
            unit="nats",
        ),
        Bound("the same with symmetric modes counted", regret(cells, True), unit="nats"),
        Bound("weights determined by the data, of the model with the most evidence", picked(cells, "effective"), unit=""),
    ]


def robot_claims(cells: Sequence[str], size: Size) -> list[Bound]:
    """MacKay's errors are those that Neal (1996) quotes: squared distance to the hand, of which the noise alone makes 0.005."""
    few = size == "tiny"
    return [
        *claims(cells, size),
        Bound(
            "1000 × test error of the model with the most evidence",
            picked(cells, "error", factor=1e3),
            5.73,
            high=None if few else 6.2,
            unit="",
        ),
        Bound(
            "1000 × lowest test error of all models",
            picked(cells, "error", "error", -1, 1e3),
            5.57,
            high=None if few else 6.0,
            unit="",
        ),
        Bound(
            "1000 × noise of the model with the most evidence",
            picked(cells, "noise", factor=1e3),
            "50, the truth",
            low=None if few else 47.0,
            high=None if few else 53.0,
            unit="",
        ),
    ]


def build() -> dict[str, Reproduction]:
    """The robot arm, and Neal's three examples."""
    arm, arm_cells = family("robot", "robot_arm", ROBOT)
    mackay = Reproduction(
        "mackay",
        "The evidence for networks on MacKay's robot arm",
        "A practical Bayesian framework for backpropagation networks. David J. C. MacKay. Neural Computation, 1992.",
        tuple(arm),
        (
            Part(
                "table",
                "robot",
                "Robot arm",
                arm_cells,
                {s: robot_claims(arm_cells[s], s) for s in SIZES},
                sheet([c.name for c in arm], "squared error"),
            ),
            Part(
                "figure",
                "evidence",
                "Evidence and held-out log-likelihood",
                arm_cells,
                draw=draw({"robot arm": [c.name for c in arm]}),
            ),
        ),
        "mackay",
    )
    sets: dict[str, tuple[Table, str]] = {
        "regression": ("neal_regression", "squared error"),
        "binary": ("neal_binary", "errors (%)"),
        "classes": ("neal_classes", "errors (%)"),
    }
    made = {name: family(name, data, NEAL) for name, (data, _) in sets.items()}
    parts = [
        Part(
            "table",
            name,
            f"Neal's example: {name}",
            cells,
            {s: claims(cells[s], s, together=False) for s in SIZES},
            sheet([c.name for c in own], sets[name][1]),
        )
        for name, (own, cells) in made.items()
    ]
    everything: dict[Size, list[str]] = {size: [c for _, cells in made.values() for c in cells[size]] for size in SIZES}
    drawing = draw({f"Neal, {name}": [c.name for c in own] for name, (own, _) in made.items()})
    parts.append(Part("figure", "evidence", "Evidence and held-out log-likelihood", everything, draw=drawing))
    neal = Reproduction(
        "neal",
        "The evidence for networks on Neal's examples",
        "Software for flexible Bayesian modeling. Radford M. Neal, 1998.",
        tuple(cell for own, _ in made.values() for cell in own),
        tuple(parts),
        "mackay",
    )
    return {"mackay": mackay, "neal": neal}


REPRODUCTIONS = build()
