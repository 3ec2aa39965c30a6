"""Laplace over low-rank adapters: a small transformer, pretrained on film reviews, adapted to SST-2, and its calibration.

A transformer is trained to tell positive from negative pieces of IMDB reviews; then low-rank adapters of its attention and
feed-forward projections, and its head, are trained on the sentences of SST-2, and a Laplace approximation over the adapters alone
is put around them, as Yang et al. (2024) do for language models. Its prior precisions come from the evidence: training data alone.
"""

from __future__ import annotations

import math
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
    number,
    paired,
)
from plausible.analysis import metrics
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.apps.datasets import Vocabulary
from plausible.core import random
from plausible.core.adapters import lora
from plausible.core.likelihoods import Categorical
from plausible.core.priors import Gaussian, Prior
from plausible.core.schedules import Cosine
from plausible.core.weights import index
from plausible.fitting import fit
from plausible.methods import MAP, Laplace
from plausible.posteriors.base import Posterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORTEST = 8
"""Pieces of a review with fewer words are left out."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): a transformer layer whose projections are linear layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.before_attention, self.before_widening = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, empty: Tensor) -> Tensor:
        """[N, L, width] and where there is no word [N, L] → [N, L, width]."""
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        z = self.before_attention(x)
        query, key, value = split(self.query(z)), split(self.key(z)), split(self.value(z))  # [N, heads, L, width/heads]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        mixed = scores.masked_fill(empty[:, None, None], -1e9).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.before_widening(x))))


class Transformer(nn.Module):
    """Numbers of words [N, L], 0 for none → logits [N, 2]: words and places, blocks, the mean over the words, a head."""

    def __init__(self, words: int, length: int, width: int, heads: int, blocks: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        nn.init.normal_(self.words.weight, std=0.1)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        """Logits."""
        empty = numbers == 0
        x = self.dropout(self.words(numbers) + self.places[: numbers.shape[1]])
        for block in self.blocks:
            x = block(x, empty)
        kept = (~empty).to(x)[..., None]
        return self.head((self.norm(x) * kept).sum(1) / kept.sum(1).clamp(min=1))


@dataclass(frozen=True)
class Adapted:
    """Sizes of the network, how it is pretrained, and how its adapters are trained.

    `reviews` of IMDB are cut into pieces of `length` words, as many as fit into `read` words; so many `sentences` of SST-2 are
    trained on. `laplace` comes afterwards: its weights are those that training found.
    """

    pretraining: MAP
    training: MAP
    rank: int = 4
    prior: Prior = Gaussian(1.0)  # noqa: RUF009
    width: int = 64
    heads: int = 4
    blocks: int = 2
    vocabulary: int = 10_000
    length: int = 32
    read: int = 128
    reviews: int = 25_000
    sentences: int = 6_920
    test: int = 1_821
    laplace: Laplace = Laplace(mode=None, tune="layer", rounds=1)  # noqa: RUF009


WHERE: dict[str, tuple[str, ...]] = {"adapters": ("*.down", "*.up"), "head": ("head.*",)}
"""Which weights have a posterior: the adapters alone, and for comparison the head alone."""


def run(settings: Adapted, request: Request) -> dict[str, Any]:
    """Pretrain once, adapt from each seed; the scores of each way to predict, by seed, on the test sentences."""
    vocabulary, pieces = reviews(settings)
    options: dict[str, Any] = {
        "likelihood": Categorical(),
        "device": request.device,
        "progress": request.progress,
        "precision": request.precision,
        "compile": False if request.compile == "auto" else request.compile,
    }
    with random.isolated(request.seed):
        network = Transformer(len(vocabulary), settings.length, settings.width, settings.heads, settings.blocks)
    before = _finished(fit(network, pieces, settings.pretraining, seed=request.seed, **options))
    pretrained = _with_weights(network, before)
    parts = sentences(settings, vocabulary)
    records: dict[str, list[dict[str, Any]]] = {"pretrained": request.seeds * [scored(before, *parts["test"])]}
    distances = []
    for seed in range(request.seed, request.seed + request.seeds):
        adapted = lora(pretrained, settings.rank, "blocks.*", train="head.*", seed=seed)
        options |= {"prior": settings.prior, "seed": seed}
        point = _finished(fit(adapted, parts["train"], settings.training, **options))
        records.setdefault("point", []).append(scored(point, *parts["test"]))
        adapted = _with_weights(adapted, point)
        for way, where in WHERE.items():
            with warnings.catch_warnings():  # training by batches ends near a mode: `distance` says how near
                warnings.filterwarnings("ignore", "the network is not at a mode")
                posterior = _finished(fit(adapted, parts["train"], replace(settings.laplace, where=where), **options))
            records.setdefault(way, []).append(scored(posterior, *parts["test"]))
            if way == "adapters":
                distances.append(posterior.diagnostics()["distance"])
    sizes = {name: weight.numel() for name, weight in adapted.named_parameters()}
    own = sum(size for name, size in sizes.items() if name.endswith((".down", ".up")))
    counts = {"all": sum(sizes.values()), "adapters": own}
    scores = {way: {key: [row[key] for row in rows] for key in rows[0]} for way, rows in records.items()}
    return {"scores": scores, "distance": distances, "weights": counts}


def reviews(settings: Adapted) -> tuple[Vocabulary, tuple[Tensor, Tensor]]:
    """The vocabulary of IMDB's reviews, and their pieces [N, length] with the label of the review."""
    documents, labels = datasets.imdb().train
    rows = torch.randperm(len(documents), generator=random.generator(0, 67))[: settings.reviews].tolist()
    chosen = [documents[row] for row in rows]
    vocabulary = Vocabulary.of(chosen, settings.vocabulary)
    each = vocabulary.encode(chosen, settings.read).unflatten(1, (-1, settings.length))
    kept = (each != 0).sum(-1) >= SHORTEST
    return vocabulary, (each[kept], labels[rows][:, None].expand(kept.shape)[kept])


def sentences(settings: Adapted, vocabulary: Vocabulary) -> dict[str, tuple[Tensor, Tensor]]:
    """SST-2 as numbers of words: parts `train` and `test`; those for validation are not needed."""
    found = datasets.sst2()
    order = torch.randperm(len(found.train[1]), generator=random.generator(0, 68))[: settings.sentences]
    (x, y), (x_test, y_test) = found.train, found.test
    return {
        "train": (vocabulary.encode(x, settings.length)[order], y[order]),
        "test": (vocabulary.encode(x_test[: settings.test], settings.length), y_test[: settings.test]),
    }


def scored(posterior: Posterior, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Accuracy and ECE in per cent, log loss in nats, and the bins of the reliability diagram."""
    prediction = posterior.predict(x)
    bins = metrics.reliability(prediction, y, BINS)
    return {
        "accuracy": 100 * metrics.accuracy(prediction, y),
        "log_loss": metrics.log_loss(prediction, y),
        "ece": 100 * metrics.ece(prediction, y),
        "bins": [_numbers(column) for column in bins],
    }


def _numbers(column: Tensor) -> list[float | None]:
    """As JSON: empty bins have no mean."""
    return [round(value, 6) if math.isfinite(value) else None for value in column.tolist()]


def _finished(posterior: Posterior) -> Posterior:
    if posterior.interrupted:
        raise KeyboardInterrupt("the adapters are trained anew by the next call")
    return posterior


def _with_weights(network: nn.Module, posterior: Posterior) -> nn.Module:
    """The network with the weights of a posterior of one draw."""
    network.load_state_dict(index(posterior.weights(), 0), strict=False)
    return network


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

BINS = 10
CELL = "sst2"
WORDS = {
    "pretrained": "pretrained on reviews",
    "point": "adapters, a point (MAP)",
    "head": "Laplace over the head",
    "adapters": "Laplace over the adapters",
}


def score(way: str, key: str) -> Values:
    """One score of one way to predict, by seed."""
    return number(CELL, "scores", way, key)


def change(way: str, key: str) -> Values:
    """How a score differs from that of the point, by seed."""
    return paired(score(way, key), score("point", key))


def claims(size: Size) -> list[Bound | Effect]:
    """Calibration gets better at the same accuracy; published are the numbers of Llama-2-7B on a small Winogrande."""
    least, most = (None, None) if size == "tiny" else (-1.0, 4.0)
    over = "Laplace over the adapters"
    return [
        Bound(f"accuracy, {over} less the point", change("adapters", "accuracy"), low=least, unit="points"),
        Bound("ECE of the point", score("point", "ece"), "31.2 (Winogrande)"),
        Bound(f"ECE, {over}", score("adapters", "ece"), "2.1 (Winogrande)", high=most),
        Effect(f"ECE, {over} less the point", change("adapters", "ece"), -1, "−29.1 (Winogrande)"),
        Effect(f"log loss, {over} less the point", change("adapters", "log_loss"), -1, "< 0", unit="nats"),
        Effect(
            f"ECE, {over} less over the head", paired(score("adapters", "ece"), score("head", "ece")), -1, "−20.7 (Winogrande)"
        ),
    ]


def table(results: Results) -> list[Sheet]:
    """All scores."""
    found = look(results, CELL, "scores")
    if found is None:
        return []
    head = ("", "accuracy (%)", "log loss (nats)", "ECE (%)")
    rows = tuple(
        (words, *(mean(found[way][key]).text() for key in ("accuracy", "log_loss", "ece"))) for way, words in WORDS.items()
    )
    return [Sheet("Test sentences of SST-2, mean ± standard error over seeds", head, rows)]


def draw(results: Results) -> Figure:
    """Reliability diagrams on the test sentences, all seeds together."""
    figure, axes = figures.new(1, 3, (11.0, 3.9), sharex=True, sharey=True)
    for ax, way in zip(axes, ("point", "head", "adapters")):
        scores = look(results, CELL, "scores", way)
        pooled: list[tuple[float, float, float]] = []
        for rows in zip(*(zip(*bins) for bins in scores["bins"])):  # one bin, by seed: confidence, accuracy, count
            there = [(c, a, n) for c, a, n in rows if c is not None and a is not None and n]
            if there:
                total = sum(n for _, _, n in there)
                pooled.append((sum(c * n for c, _, n in there) / total, sum(a * n for _, a, n in there) / total, total))
        ax.plot([0.5, 1], [0.5, 1], color="0.6", linewidth=1, linestyle=(0, (4, 3)))
        ax.plot([c for c, _, _ in pooled], [a for _, a, _ in pooled], "o-", color="C0", markersize=4)
        most = max(n for _, _, n in pooled)
        ax.bar([c for c, _, _ in pooled], [0.15 * n / most for _, _, n in pooled], width=0.03, bottom=0.4, color="0.8")
        ax.set(title=f"{WORDS[way]}: ECE {mean(scores['ece']).value:.1f} %", xlabel="confidence", ylim=(0.4, 1.0))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy")
    return figure


PRETRAINING = MAP(epochs=1, batch_size=128, lr=Cosine(2e-3))
TRAINING = MAP(epochs=10, batch_size=64, lr=Cosine(1e-2))
REDUCED = Adapted(PRETRAINING, TRAINING)
SETTINGS: dict[Size, Adapted] = {
    "full": replace(REDUCED, pretraining=replace(PRETRAINING, epochs=5), width=128, blocks=4, read=256),
    "reduced": REDUCED,
    "tiny": Adapted(
        replace(PRETRAINING, epochs=1, batch_size=50),
        replace(TRAINING, epochs=1, batch_size=30),
        rank=2,
        width=8,
        heads=2,
        blocks=1,
        vocabulary=200,
        length=8,
        read=16,
        reviews=100,
        sentences=60,
        test=40,
    ),
}
ALL: dict[Size, Sequence[str]] = dict.fromkeys(SIZES, (CELL,))
REPRODUCTIONS = {
    "laplace-lora": Reproduction(
        "laplace-lora",
        "Laplace over low-rank adapters, on SST-2",
        "Bayesian Low-rank Adaptation for Large Language Models. Adam X. Yang, Maxime Robeyns, Xi Wang and Laurence Aitchison. "
        "ICLR, 2024.",
        (Cell(CELL, run, SETTINGS),),
        (
            Part("table", "1", "Calibration before and after", ALL, {size: claims(size) for size in SIZES}, table),
            Part("figure", "reliability", "Reliability on the test sentences", ALL, draw=draw),
        ),
        "laplace-lora",
    )
}
