"""Linearised against sampled predictions of one Laplace posterior, on small classification sets (Immer, Korzepa and Bauer 2021).

The Gauss-Newton curvature is that of the linearised network f(x; w*) + J(x)(w − w*), a generalised linear model. Its posterior put
into the network itself (the "BNN predictive") spreads further than the data allow and underfits; put into the linearised network
(the "GLM predictive") it does not. The paper's numbers are in figures and tables that are not at hand: its claim is what is judged.

Every seed is a split into parts for training, validation and testing. A network is trained to its mode for each precision of the
prior; every way of predicting then takes the precision with its own largest log-likelihood on the validation part.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
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
from plausible.apps.datasets.results import moments
from plausible.core import random
from plausible.core.likelihoods import Categorical
from plausible.core.priors import Gaussian
from plausible.core.schedules import Cosine
from plausible.fitting import fit
from plausible.methods import MAP, Laplace
from plausible.posteriors.linearised import LaplacePosterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS: dict[str, Callable[[Any, Any], float]] = {
    "log_likelihood": metrics.log_likelihood,
    "accuracy": metrics.accuracy,
    "ece": metrics.ece,
}
STRUCTURES = ("diag", "kron", "full")
WAYS = {"sampled": "BNN", "linearised": "GLM"}


@dataclass(frozen=True)
class Compared:
    """One data set: a tanh network with two hidden layers, `precisions` of its prior, `structures` of the curvature.

    `shares` are those of the training and of the validation part, of so many `rows` (None: all). The BNN predictive averages over
    `draws` networks; the GLM predictive is an integral.
    """

    data: str
    structures: tuple[str, ...] = STRUCTURES
    mode: MAP = MAP(epochs=1000, batch_size=None, lr=Cosine(1e-2))  # noqa: RUF009
    polish: int = 500
    units: int = 50
    precisions: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    shares: tuple[float, float] = (0.7, 0.15)
    rows: int | None = None
    draws: int = 1000


def run(settings: Compared, request: Request) -> dict[str, Any]:
    """`scores[way][part][metric]` and `log_evidence[structure]`: [seeds][precisions]; ways are "map", "kron, linearised", …."""
    seeds = range(request.seed, request.seed + request.seeds)
    found = [[_at(settings, tau, seed, request) for tau in settings.precisions] for seed in seeds]
    first, first_evidence = found[0][0]
    return {
        "scores": {
            way: {
                part: {m: [[scores[way][part][m] for scores, _ in row] for row in found] for m in METRICS}
                for part in ("validation", "test")
            }
            for way in first
        },
        "log_evidence": {name: [[evidence[name] for _, evidence in row] for row in found] for name in first_evidence},
        "precisions": list(settings.precisions),
        "rows": {part: len(y) for part, (_, y) in parts(settings, request.seed).items()},
    }


def _at(
    settings: Compared, precision: float, seed: int, request: Request
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, float]]:
    """Scores and evidences of one split at one precision of the prior: one mode, all structures around it."""
    data = parts(settings, seed)
    with random.isolated(seed):
        module = network(settings, data["train"][0].shape[1], classes(settings.data))
    scores, evidence = {}, {}
    posterior: LaplacePosterior | None = None
    for structure in settings.structures:
        method = Laplace(
            structure=structure, mode=settings.mode if posterior is None else None, polish=settings.polish, tune=None
        )  # type: ignore[arg-type]
        posterior = fit(  # type: ignore[assignment]
            module,
            data["train"],
            method,
            likelihood=Categorical(),
            prior=Gaussian(precision**-0.5),
            init=posterior,
            seed=seed,
            device=request.device,
            compile=False if request.compile == "auto" else request.compile,
            progress=request.progress,
        )
        assert isinstance(posterior, LaplacePosterior)
        if posterior.interrupted:
            raise KeyboardInterrupt("the splits are trained anew by the next call")
        evidence[structure] = float(posterior.log_evidence or float("nan"))
        if "map" not in scores:
            scores["map"] = _scores(data, lambda x, p=posterior: at_mode(p, x))  # type: ignore[misc]
        for way in WAYS:
            seen, draws = posterior.with_predictive(way), settings.draws if way == "sampled" else None
            scores[f"{structure}, {way}"] = _scores(data, lambda x, s=seen, d=draws: s.predict(x, d, seed=seed))  # type: ignore[misc]
    return scores, evidence


def _scores(data: dict[str, tuple[Tensor, Tensor]], predict: Callable[[Tensor], Any]) -> dict[str, dict[str, float]]:
    """By part and metric."""
    found = {}
    for part in ("validation", "test"):
        x, y = data[part]
        predictive = predict(x)
        probs = predictive if isinstance(predictive, Tensor) else predictive.probs
        seen = {"log_likelihood": predictive}  # in logarithms: probabilities of rare classes may be below the smallest number
        found[part] = {name: round(float(metric(seen.get(name, probs), y)), 6) for name, metric in METRICS.items()}
    return found


def at_mode(posterior: LaplacePosterior, x: Tensor) -> Tensor:
    """Class probabilities of the network at the mode: float64 [N, C]."""
    weights = {**posterior.means, **posterior.points}
    with torch.no_grad():
        return torch.cat([posterior.model.outputs(weights, part).double().softmax(-1) for part in x.split(2000)])


def network(settings: Compared, inputs: int, outputs: int) -> nn.Sequential:
    """Inputs – units – units – outputs with tanh."""
    units = settings.units
    return nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh(), nn.Linear(units, outputs))


# ---------------------------------------------------------------------------------------------------------------------
# Data

SKLEARN = ("breast_cancer", "digits", "iris", "wine")


def table(name: str) -> tuple[Tensor, Tensor]:
    """Inputs float32 [N, D] and labels int64 [N] of a set of `plausible.datasets` or of scikit-learn."""
    if name in SKLEARN:
        try:
            from sklearn import datasets as shipped
        except ImportError as error:
            raise ImportError(
                f"the set {name!r} comes with scikit-learn ({error}): pip install 'plausible[sklearn]'"
            ) from error
        x, y = getattr(shipped, f"load_{name}")(return_X_y=True)
        return torch.as_tensor(x).float(), torch.as_tensor(y).long()
    if name == "red_wine":  # marks of tasters, 3 to 8, as classes
        found = datasets.uci("wine")
        marks = found.y.flatten().round().long()
        return found.x.float(), marks - int(marks.min())
    found = datasets.load(name)
    return found.x.float(), found.y.long()


def classes(name: str) -> int:
    """How many there are in the whole set."""
    return int(table(name)[1].max()) + 1


def parts(settings: Compared, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Parts `train`, `validation` and `test` by the seed; inputs standardised by the training rows."""
    x, y = table(settings.data)
    order = torch.randperm(len(y), generator=random.generator(seed, 71))[: settings.rows]
    first, second = (round(len(order) * share) for share in settings.shares)
    rows = dict(zip(("train", "validation", "test"), order.tensor_split([first, first + second])))
    loc, scale = moments(x[rows["train"]])
    return {part: (((x[own].double() - loc) / scale).float(), y[own]) for part, own in rows.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers from stored results


def chosen(cell: str, way: str, metric: str = "log_likelihood", by: str | None = None) -> Values:
    """The test score, by seed, at the precision with the largest validation log-likelihood of this way (or of the way `by`)."""

    def values(results: Results) -> Sequence[float] | None:
        own, test = look(results, cell, "scores", by or way), look(results, cell, "scores", way, "test", metric)
        if own is None or test is None:
            return None
        return [row[best(marks)] for row, marks in zip(test, own["validation"]["log_likelihood"])]

    return values


def by_evidence(cell: str, structure: str, way: str) -> Values:
    """The test log-likelihood, by seed, at the precision with the largest evidence: no validation part is needed."""

    def values(results: Results) -> Sequence[float] | None:
        test = look(results, cell, "scores", f"{structure}, {way}", "test", "log_likelihood")
        marks = look(results, cell, "log_evidence", structure)
        return None if test is None or marks is None else [row[best(own)] for row, own in zip(test, marks)]

    return values


def best(marks: Sequence[float]) -> int:
    """The place of the largest."""
    return max(range(len(marks)), key=lambda k: marks[k])


def gain(cell: str, structure: str) -> Values:
    """GLM less BNN, each at its own precision, by seed."""
    return paired(*(chosen(cell, f"{structure}, {way}") for way in ("linearised", "sampled")))


def same(cell: str, structure: str) -> Values:
    """GLM less BNN of the same posterior, at the precision that suits the BNN predictive, by seed."""
    sampled = f"{structure}, sampled"
    return paired(chosen(cell, f"{structure}, linearised", by=sampled), chosen(cell, sampled))


def wins(cells: Sequence[str], structure: str, difference: Callable[[str, str], Values]) -> Values:
    """How many of these sets have a mean difference of at least 0."""

    def values(results: Results) -> Sequence[float] | None:
        found = [difference(cell, structure)(results) for cell in cells]
        return None if None in found else [float(sum(statistics.fmean(each or [0.0]) >= 0 for each in found))]

    return values


def claims(size: Size) -> list[Bound | Effect]:
    """GLM at least as good as BNN on every set, with every structure."""
    own = {name: cell.settings[size].structures for name in CELLS if size in (cell := made(name)).settings}
    found: list[Bound | Effect] = []
    for structure in STRUCTURES:
        cells = [name for name, structures in own.items() if structure in structures]
        low = None if size == "tiny" else float(len(cells))
        for words, difference in (("GLM ≥ BNN", gain), ("the same at the precision that suits the BNN", same)):
            label = f"{words}, {structure}: on how many of {len(cells)} sets"
            found.append(Bound(label, wins(cells, structure, difference), "all", low=low, unit=""))
    for name, structures in own.items():
        for s in structures:
            found.append(Effect(f"{name}, {s}: GLM above BNN", gain(name, s), 1, "> 0", unit="nats"))
    return found


def sheets(results: Results) -> list[Sheet]:
    """Every set: log-likelihoods, accuracies and calibration errors at the chosen precisions; log-likelihoods by the evidence."""
    structures = [s for s in STRUCTURES if any(s in r["log_evidence"] for r in results.values())]
    ways = {"map": "MAP"} | {f"{s}, {way}": f"{words}, {s}" for s in structures for way, words in WAYS.items()}
    made = []
    for metric, words in (
        ("log_likelihood", "Test log-likelihood in nats"),
        ("accuracy", "Accuracy"),
        ("ece", "Expected calibration error"),
    ):
        rows = [(name, *(mean(list(chosen(name, way, metric)(results) or [])).text(3) for way in ways)) for name in results]
        made.append(Sheet(f"{words}, the precision chosen by validation", ("set", *ways.values()), tuple(rows)))
    rows = [
        (name, *(mean(list(by_evidence(name, s, way)(results) or [])).text(3) for s in structures for way in WAYS))
        for name in results
    ]
    head = ("set", *(f"{words}, {s}" for s in structures for words in WAYS.values()))
    return [*made, Sheet("Test log-likelihood in nats, the precision chosen by the evidence", head, tuple(rows))]


def draw(results: Results) -> Figure:
    """Test log-likelihood by the precision of the prior: the mode, and both predictives with Kronecker factors."""
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = figures.new(rows, columns, (3.1 * columns, 2.7 * rows + 0.4), squeeze=False)
    lines = {"map": "MAP", "kron, sampled": "BNN, Kronecker factors", "kron, linearised": "GLM, Kronecker factors"}
    for ax, (name, result) in zip(axes.flat, results.items()):
        for number, (way, words) in enumerate(lines.items()):
            test = result["scores"][way]["test"]["log_likelihood"]
            each = list(zip(*test))
            style = {"color": f"C{number}"}
            ax.plot(result["precisions"], [statistics.fmean(v) for v in each], "o-", markersize=3, label=words, **style)
            ax.fill_between(
                result["precisions"], [min(v) for v in each], [max(v) for v in each], alpha=0.15, linewidth=0, **style
            )
        ax.set(xscale="log", title=name, xlabel="precision of the prior")
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(results) :]:
        ax.set_axis_off()
    figure.supylabel("test log-likelihood (nats)", fontsize="medium")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Cells

CELLS: dict[str, dict[str, Any]] = {
    "neal_binary": {"shares": (0.2, 0.1)},
    "neal_classes": {"shares": (0.25, 0.1)},
    "iris": {},
    "wine": {},
    "breast_cancer": {},
    "red_wine": {},
    "digits": {"structures": ("diag", "kron")},
}
SMALLER: dict[Size, dict[str, Any]] = {
    "full": {},
    "reduced": {
        "mode": MAP(epochs=400, batch_size=None, lr=Cosine(1e-2)),
        "polish": 300,
        "draws": 200,
        "precisions": (0.3, 3.0, 30.0, 100.0),
    },
    "tiny": {
        "mode": MAP(epochs=20, batch_size=None, lr=Cosine(1e-2)),
        "polish": 50,
        "precisions": (1.0, 10.0),
        "draws": 5,
        "units": 4,
        "rows": 200,
        "shares": (0.5, 0.25),
    },
}
FEW = ("breast_cancer", "red_wine")
"""Sets whose full curvature is left out of the reduced size."""


def made(name: str) -> Cell:
    """The cell by size."""
    found: dict[Size, Compared] = {}
    for size, changes in SMALLER.items():
        if size == "tiny" and name != "neal_classes":
            continue
        found[size] = replace(Compared(name, **CELLS[name]), **changes)
        if size == "reduced" and name in FEW:
            found[size] = replace(found[size], structures=("diag", "kron"))
    return Cell(name, run, found)


ALL: dict[Size, Sequence[str]] = {size: tuple(n for n in CELLS if size in made(n).settings) for size in SIZES}
REPRODUCTIONS = {
    "immer-2021": Reproduction(
        "immer-2021",
        "Linearised against sampled predictions of a Laplace posterior",
        "Improving predictions of Bayesian neural nets via local linearization. Alexander Immer, Maciej Korzepa and Matthias "
        "Bauer. AISTATS, 2021.",
        tuple(made(name) for name in CELLS),
        (
            Part("table", "1", "GLM against BNN predictive", ALL, {size: claims(size) for size in SIZES}, sheets),
            Part("figure", "precision", "Test log-likelihood by the precision of the prior", ALL, draw=draw),
        ),
        "immer-2021",
    )
}
