"""The variance of gradient estimators while a network is trained: additive and multiplicative noise, local, Flipout, antithetic.

Kingma, Salimans & Welling (2015) reparameterise outputs, Wen et al. (2018) flip signs, Molchanov, Ashukha & Vetrov (2017) write
w = θ + σ ε in the place of w = θ (1 + √α ε), whose gradient with respect to θ has the factor 1 + √α ε. All is measured on the same
networks and batches: noise is the only thing that varies. Variances are averages over the weights, of the gradient of the mean
negative log-likelihood of a batch, over the weights with log α ≤ 8 (beyond that sparse variational dropout does not let α grow, and
the multiplicative variance of few weights would hide all else); an antithetic pair counts twice, so that costs are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import figures, mnist
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, Values, look
from plausible.apps.compare.tables import mean
from plausible.blocks.stochastic import Noise, gaussians, survey
from plausible.core import random
from plausible.core.likelihoods import Categorical
from plausible.core.networks import choose_device
from plausible.core.priors import Gaussian
from plausible.core.weights import Weights
from plausible.engine.watching import Monitor
from plausible.fitting import fit
from plausible.methods import Ensemble, MeanField

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("additive", "multiplicative", "antithetic", "local", "flipout")
WORDS = {
    "additive": "weights, w = θ + σ ε",
    "multiplicative": "weights, w = θ (1 + √α ε)",
    "antithetic": "antithetic pair, × 2",
    "local": "local",
    "flipout": "Flipout",
}
EDGES = tuple(range(-8, 13, 2))
"""Of log α = log σ²/θ²."""
LARGEST = 8.0


@dataclass(frozen=True)
class Measured:
    """What is trained, and how its gradients are measured: every `every` epochs by `repeats` draws of each estimator."""

    method: MeanField = MeanField(epochs=10, batch_size=100, lr=3e-3, estimator="local", initial_scale=0.05)  # noqa: RUF009
    units: int = 50
    train: int = 5_000
    every: int = 2
    batch: int = 100
    batches: tuple[int, ...] = (10, 100, 1000)
    repeats: int = 60


def run(settings: Measured, request: Request) -> dict[str, Any]:
    """Variances by epoch, by batch size and by α, one number for each seed, and the check against closed forms."""
    shape = mnist.Classifier(settings.method, settings.units, train=settings.train, validation=0, test=0)
    module = mnist.network(shape)
    device = choose_device(module, request.device)
    x, y = (part.to(device) for part in mnist.images(shape)["train"])
    by_alpha: list[dict[str, list[float | None]]] = []

    def look_at(_: int, posterior: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for k, part in enumerate(posterior.parts):
            for way, variance in variances(part, x[: settings.batch], y[: settings.batch], settings.repeats, k).items():
                found[way].append(average(part, variance))
        return found

    monitor = Monitor(look_at, settings.every)
    posterior = fit(
        module,
        (x, y),
        Ensemble(settings.method, members=request.seeds),
        likelihood=Categorical(),
        prior=Gaussian(1.0),
        seed=request.seed,
        device=request.device,
        compile=request.compile,
        progress=request.progress,
        callbacks=[monitor],
    )
    if posterior.interrupted:
        raise KeyboardInterrupt("the networks are trained anew by the next call")
    by_batch: dict[str, list[list[float]]] = {way: [[] for _ in settings.batches] for way in WAYS}
    for k, part in enumerate(posterior.parts):  # type: ignore[attr-defined]
        for place, size in enumerate(settings.batches):
            measured = variances(part, x[:size], y[:size], settings.repeats, 1000 + k)
            for way, variance in measured.items():
                by_batch[way][place].append(average(part, variance))
            if size == settings.batch:
                by_alpha.append(binned(part, {way: measured[way] for way in WAYS[:2]}))
    return {
        "epochs": [record["epoch"] for record in monitor.records],
        "variance": {way: [record[way] for record in monitor.records] for way in WAYS},
        "batches": list(settings.batches),
        "by_batch": by_batch,
        "by_alpha": by_alpha,
        "edges": list(EDGES),
        "closed_form": closed_form(repeats=10 * settings.repeats, seed=request.seed),
        "training_seconds": posterior.run["seconds"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Estimators


def gradient(
    loss: Callable[[Weights], Tensor], means: Weights, scales: Weights, way: str, ways: dict[str, str], key: Tensor, draw: int
) -> Weights:
    """∂ loss(w)/∂θ, w ~ N(θ, σ²), by one draw of this estimator; `ways` as `survey` gives them for "local" and "flipout"."""
    leaves = {name: value.detach().requires_grad_() for name, value in means.items()}
    noises = Noise.several(key, draw, 2, antithetic=True) if way == "antithetic" else [Noise(key, draw)]
    with torch.enable_grad():
        values = []
        for noise in noises:
            if way == "multiplicative":
                numbers = noise.normals(leaves)
                roots = {name: scales[name] / value.abs().clamp_min(1e-12) for name, value in means.items()}  # √α
                weights = {name: leaf * (1 + roots[name] * numbers[name]) for name, leaf in leaves.items()}
            else:
                weights = gaussians(leaves, scales, noise, ways if way in ("local", "flipout") else "weights")
            values.append(loss(weights))
        found = torch.autograd.grad(torch.stack(values).mean(), list(leaves.values()))
    return dict(zip(leaves, found))


def variances_of(
    loss: Callable[[Weights], Tensor], means: Weights, scales: Weights, way: str, repeats: int, seed: int
) -> tuple[Weights, Weights]:
    """Sample variances of the gradient over `repeats` draws, and their standard errors √((m₄ − s⁴)/R), in float64."""
    with torch.no_grad():
        ways = survey(loss, means, way) if way in ("local", "flipout") else {}
    device = next(iter(means.values())).device
    key = random.key(seed, device=device)
    draws = [gradient(loss, means, scales, way, ways, key, draw) for draw in range(repeats)]
    factor = 2.0 if way == "antithetic" else 1.0
    variances, errors = {}, {}
    for name in means:
        stacked = torch.stack([draw[name] for draw in draws]).double()
        centred = stacked - stacked.mean(0)
        square = centred.square().sum(0) / (repeats - 1)
        fourth = centred.pow(4).mean(0)
        variances[name] = factor * square
        errors[name] = factor * ((fourth - square.square()).clamp_min(0) / repeats).sqrt()
    return variances, errors


def variances(part: Any, x: Tensor, y: Tensor, repeats: int, seed: int) -> dict[str, Weights]:
    """For each estimator the variance of ∂/∂θ of the mean negative log-likelihood of a batch, weight by weight."""

    def loss(weights: Weights) -> Tensor:
        return F.cross_entropy(part.model.outputs({**part.points, **weights}, x), y)

    return {way: variances_of(loss, part.means, part.scales, way, repeats, seed)[0] for way in WAYS}


def binned(part: Any, measured: dict[str, Weights]) -> dict[str, list[float | None]]:
    """Mean variance of the weights whose log α lies between two `EDGES`; None where there are fewer than 10."""
    alpha = log_alpha(part)
    found: dict[str, list[float | None]] = {}
    for way, named in measured.items():
        flat = _flat(named)
        inside = [(alpha >= low) & (alpha < high) for low, high in pairwise(EDGES)]
        found[way] = [float(flat[rows].mean()) if int(rows.sum()) >= 10 else None for rows in inside]
    return found


def average(part: Any, named: Weights) -> float:
    """Over the weights with log α ≤ `LARGEST`."""
    return float(_flat(named)[log_alpha(part) <= LARGEST].mean())


def log_alpha(part: Any) -> Tensor:
    """Log σ²/θ² of all weights, flat."""
    return _flat(
        {name: 2 * (part.scales[name].log() - value.abs().clamp_min(1e-12).log()) for name, value in part.means.items()}
    )


def _flat(named: Weights) -> Tensor:
    return torch.cat([value.flatten() for value in named.values()])


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms: one linear layer, ½ Σ_b (x_b·w − y_b)²


def exact(x: Tensor, y: Tensor, theta: Tensor, sigma: Tensor) -> dict[str, Tensor]:
    """Variances of the gradient with respect to θ, each [K], of x [B, K], y [B].

    With A = xᵀx and g = Aθ − xᵀy: additive Σ_k A_jk² σ_k²; local and Flipout Σ_b x_bj² Σ_k x_bk² σ_k²; an antithetic pair 0.
    Multiplicative, (1 + r_j ε_j)(g_j + Σ_k c_jk ε_k) with r = σ/|θ| and c_jk = A_jk θ_k r_k: each ε_k, k ≠ j, has variance
    (1 + r_j²) c_jk², and ε_j gives (c_jj + r_j g_j)² + 2 r_j² c_jj².
    """
    gram = x.T @ x
    slope = gram @ theta - x.T @ y
    plain = gram.square() @ sigma.square()
    local = (x.square() * (x.square() @ sigma.square())[:, None]).sum(0)
    root = sigma / theta.abs()
    factor = gram * (theta * root)
    own = factor.diagonal()
    others = (1 + root.square()) * (factor.square().sum(1) - own.square())
    multiplicative = others + (own + root * slope).square() + 2 * root.square() * own.square()
    zero = torch.zeros_like(plain)
    return {"additive": plain, "multiplicative": multiplicative, "antithetic": zero, "local": local, "flipout": local}


def closed_form(repeats: int, seed: int, rows: int = 6, inputs: int = 3) -> dict[str, float]:
    """The largest |measured − exact| in standard errors over the weights of one linear layer, for each estimator."""
    stream = random.generator(seed, 41)
    x, y = torch.randn(rows, inputs, generator=stream), torch.randn(rows, generator=stream)
    theta, sigma = torch.randn(inputs, generator=stream), 0.2 + torch.rand(inputs, generator=stream)
    layer = nn.Linear(inputs, 1, bias=False)

    def loss(weights: Weights) -> Tensor:
        return 0.5 * (torch.func.functional_call(layer, weights, (x,))[:, 0] - y).square().sum()

    truth = exact(x.double(), y.double(), theta.double(), sigma.double())
    found = {}
    for way in WAYS:
        measured, error = variances_of(loss, {"weight": theta[None]}, {"weight": sigma[None]}, way, repeats, seed)
        gap = (measured["weight"][0] - truth[way]).abs()
        found[way] = float((gap / (error["weight"][0] + 1e-6 * truth["additive"])).max())
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

CELL = "network"


def ratio(way: str) -> Values:
    """The variance of an estimator over that of weight sampling, at the end, seed by seed."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, CELL, "variance")
        return None if found is None else [a / b for a, b in zip(found[way][-1], found["additive"][-1])]

    return values


def gain(way: str) -> Values:
    """How many times lower the variance is with the largest batch than with the smallest."""

    def values(results: Results) -> Sequence[float] | None:
        found = look(results, CELL, "by_batch", way)
        return None if found is None else [a / b for a, b in zip(found[0], found[-1])]

    return values


def noisy_alpha(results: Results) -> Sequence[float] | None:
    """Multiplicative over additive variance among the weights of largest α."""
    found = look(results, CELL, "by_alpha")
    if found is None:
        return None
    last = [[(a, m) for a, m in zip(seed["additive"], seed["multiplicative"]) if a is not None][-1] for seed in found]
    return [m / a for a, m in last]


def worst(results: Results) -> Sequence[float] | None:
    """The largest deviation from a closed form, in standard errors."""
    found = look(results, CELL, "closed_form")
    return None if found is None else [max(found.values())]


CLAIMS = [
    Bound("multiplicative over additive noise", ratio("multiplicative"), "> 1", low=1.5, unit="×"),
    Bound("the same among the weights of largest α", noisy_alpha, "huge", low=10.0, unit="×"),
    Bound("local over sampled weights", ratio("local"), "< 1", high=0.8, unit="×"),
    Bound("Flipout over sampled weights", ratio("flipout"), "< 1", high=0.8, unit="×"),
    Bound("antithetic pair (× 2) over sampled weights", ratio("antithetic"), high=1.1, unit="×"),
    Bound(
        "local: variance at the smallest over that at the largest batch",
        gain("local"),
        "the ratio of sizes",
        low=10.0,
        unit="×",
    ),
    Bound("sampled weights: the same", gain("additive"), "bounded", high=20.0, unit="×"),
    Bound("one layer: largest deviation from the closed forms", worst, high=4.5, unit="s.e."),
]


def table(results: Results) -> list[Sheet]:
    """Variances by epoch and by batch size."""
    result = results.get(CELL)
    if result is None:
        return []
    epochs, batches = result["epochs"], result["batches"]
    text = lambda values: f"{mean(values).value:.2e}"  # noqa: E731
    by_epoch = tuple((WORDS[way], *(text(row) for row in result["variance"][way])) for way in WAYS)
    by_batch = tuple((WORDS[way], *(text(row) for row in result["by_batch"][way])) for way in WAYS)
    return [
        Sheet("Variance of the gradient, by epoch", ("estimator", *map(str, epochs)), by_epoch),
        Sheet("At the end, by batch size", ("estimator", *map(str, batches)), by_batch),
    ]


def draw(results: Results) -> Figure:
    """Variance by epoch, by batch size, and by α."""
    figure, axes = figures.new(1, 3, (13.0, 4.0))
    result = results[CELL]
    for number, way in enumerate(WAYS):
        style = {"color": f"C{number}", "marker": "o", "markersize": 3.5}
        axes[0].plot(result["epochs"], [mean(row).value for row in result["variance"][way]], label=WORDS[way], **style)
        axes[1].plot(result["batches"], [mean(row).value for row in result["by_batch"][way]], **style)
    middles = [(low + high) / 2 for low, high in zip(result["edges"], result["edges"][1:])]
    for number, way in enumerate(WAYS[:2]):
        columns = zip(*(seed[way] for seed in result["by_alpha"]))
        averages = [mean([v for v in column if v is not None]).value for column in columns]
        points = [(m, v) for m, v in zip(middles, averages) if math.isfinite(v)]
        axes[2].plot(*zip(*points), color=f"C{number}", marker="o", markersize=3.5)
    axes[1].set_xscale("log")
    for ax, label in zip(axes, ("epoch", "batch size", "log α = log σ²/θ²")):
        ax.set(yscale="log", xlabel=label)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("variance of the gradient, mean over weights")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    return figure


FULL = Measured()
TINY = Measured(
    MeanField(epochs=2, batch_size=50, lr=3e-3, estimator="local", initial_scale=0.05),
    units=5,
    train=200,
    every=1,
    batch=20,
    batches=(5, 20),
    repeats=5,
)
ALL: dict[Size, Sequence[str]] = dict.fromkeys(SIZES, (CELL,))
REPRODUCTIONS = {
    "gradient-variance": Reproduction(
        "gradient-variance",
        "The variance of gradient estimators",
        "Variational Dropout and the Local Reparameterization Trick. Diederik P. Kingma et al. NeurIPS, 2015; "
        "Variational Dropout Sparsifies Deep Neural Networks. Dmitry Molchanov et al. ICML, 2017.",
        (Cell(CELL, run, {"full": FULL, "reduced": FULL, "tiny": TINY}),),
        (
            Part("table", "1", "Variance by estimator", ALL, {"full": CLAIMS, "reduced": CLAIMS, "tiny": []}, table),
            Part("figure", "variance", "Variance over training, batch size and α", ALL, draw=draw),
        ),
        "gradient-variance",
    )
}
