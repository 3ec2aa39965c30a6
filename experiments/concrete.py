"""Concrete dropout on a line with noise (Gal, Hron and Kendall 2017): what is learned of N = 10 … 10,000 rows.

y = 2x + 8 + ε, x and ε ~ N(0, 1). Three hidden layers of 1,024 ReLU units and two outputs, the mean and the noise, with dropout of
learned rates before every layer. Settings and numbers are those of the authors' notebook: Adam, batches of 20, length scale 10⁻⁴,
fewer epochs for more rows, 20 draws. As rows come in, the spread of the mean over draws (epistemic) falls and the noise (aleatoric)
is found; so do the rates fall, those of the inner layers being reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, distributions, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, look, number
from plausible.apps.compare.tables import mean
from plausible.blocks.stochastic import Noise
from plausible.blocks.unit_noise import with_noisy_inputs
from plausible.core import random
from plausible.core.likelihoods import MeanAndNoise, Scaled
from plausible.core.priors import Gaussian
from plausible.core.serialise import register
from plausible.fitting import fit
from plausible.methods import ConcreteDropout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCHS: Mapping[int, int] = {10: 2000, 25: 1000, 50: 500, 100: 200, 1000: 20, 10_000: 2}
PUBLISHED: Mapping[str, Sequence[float]] = {
    "rmse": (1.90, 1.35, 1.24, 1.26, 1.04, 1.00),
    "epistemic": (1.28, 1.08, 0.90, 0.72, 0.64, 0.53),
    "aleatoric": (1.26, 1.20, 1.08, 1.32, 1.22, 1.12),
    "rate": (0.40, 0.40, 0.32, 0.24, 0.23, 0.16),
}
WORDS = {
    "rmse": "root mean squared error",
    "epistemic": "epistemic standard deviation",
    "aleatoric": "aleatoric standard deviation",
    "rate": "rate of the inner layers",
}


@dataclass(frozen=True)
class Rows:
    """What is learned of so many rows."""

    rows: int
    epochs: int
    units: int = 1024
    length_scale: float = 1e-4
    lr: float = 1e-3
    draws: int = 20
    test: int = 1000


class Network(nn.Module):
    """1 – units – units – units, and from there two layers of one output each: the mean, and the logarithm of the variance."""

    def __init__(self, units: int):
        super().__init__()
        sizes = [1, units, units, units]
        self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(sizes)])
        self.mean, self.noise = nn.Linear(units, 1), nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).relu()
        return torch.cat([self.mean(x), self.noise(x)], -1)


@register(name="experiments.LogVariance")
@dataclass(frozen=True)
class LogVariance(MeanAndNoise):
    """N(y; m, e^v), m and v the two outputs."""

    second: ClassVar[str] = "logarithms of variances"

    def __call__(self, outputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> distributions.Normal:  # noqa: ARG002
        mean, variance = outputs.chunk(2, -1)
        return distributions.Normal(mean, (0.5 * variance).exp(), validate_args=False)


def line(rows: int, *key: int) -> tuple[Tensor, Tensor]:
    """Rows of x and y, [N, 1]."""
    stream = random.generator(*key)
    x, noise = (torch.randn(rows, 1, generator=stream) for _ in range(2))
    return x, 2 * x + 8 + noise


def run(settings: Rows, request: Request) -> dict[str, Any]:
    """Errors, spreads and rates, one number for each seed; every seed has rows of its own."""
    found: dict[str, list[Any]] = {"rmse": [], "epistemic": [], "coherent": [], "aleatoric": [], "rate": [], "rates": []}
    seconds = 0.0
    for seed in range(request.seed, request.seed + request.seeds):
        with random.isolated(seed):
            module = Network(settings.units)
        posterior = fit(
            module,
            line(settings.rows, seed, 81),
            ConcreteDropout(
                where="*weight", epochs=settings.epochs, batch_size=min(20, settings.rows), lr=settings.lr, patience=None
            ),
            # targets as they are: what is learned in so few steps depends on their scale
            likelihood=Scaled(LogVariance(), 0.0, 1.0),
            prior=Gaussian(1 / settings.length_scale),
            seed=seed,
            device=request.device,
            compile=request.compile,
            progress=request.progress,
        )
        if posterior.interrupted:
            raise KeyboardInterrupt("the networks are trained anew by the next call")
        x, y = line(settings.test, seed, 82)
        predictive = posterior.predict(x, settings.draws, seed=seed)
        rates = [float(rate[0]) for rate in posterior.law.rates.values()]
        found["rmse"].append(float((predictive.mean.cpu() - y).square().mean().sqrt()))
        found["coherent"].append(float(predictive.epistemic.mean().sqrt()))
        found["epistemic"].append(relaxed(posterior, x, settings.draws, seed))
        found["aleatoric"].append(float(predictive.aleatoric.mean().sqrt()))
        found["rate"].append(sum(rates[1:]) / len(rates[1:]))
        found["rates"].append(rates)
        seconds += posterior.run["seconds"]
    return {**found, "training_seconds": seconds}


@torch.no_grad()
def relaxed(posterior: Any, x: Tensor, draws: int, seed: int) -> float:
    """The epistemic standard deviation as the notebook measures it: by relaxed masks, which differ from input to input."""
    law, x = posterior.law, x.to(posterior.device)
    rates = {name: rate[0] for name, rate in law.rates.items()}
    key = random.key(seed, 83, device=posterior.device)
    means = []
    for draw in range(draws):
        noise = Noise(key, torch.tensor(draw, device=posterior.device))
        weights = with_noisy_inputs(law.means, law.sites, rates, noise, "concrete")
        means.append(posterior.model.outputs({**posterior.points, **weights}, x)[:, 0])
    return float(torch.stack(means).var(0, correction=0).mean().sqrt())


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def cell(rows: int) -> str:
    """The name of a cell."""
    return f"rows-{rows}"


def fall(key: str) -> Any:
    """The number at the fewest rows over that at the most, seed by seed."""

    def values(results: Results) -> Sequence[float] | None:
        first, last = (look(results, cell(rows), key) for rows in (min(EPOCHS), max(EPOCHS)))
        return None if first is None or last is None else [a / b for a, b in zip(first, last)]

    return values


def table(results: Results) -> list[Sheet]:
    """Every number beside the published one."""
    rows = []
    for place, count in enumerate(EPOCHS):
        if cell(count) not in results:
            continue
        result = results[cell(count)]
        both = [f"{mean(result[key]).text()} ({PUBLISHED[key][place]:.2f})" for key in WORDS]
        own = mean(result["coherent"]).text()
        rates = ", ".join(f"{mean(column).value:.2f}" for column in zip(*result["rates"]))
        rows.append((f"{count:,}", *both, own, rates))
    return [
        Sheet(
            "By the number of rows; in brackets what was published", ("rows", *WORDS.values(), "coherent", "rates"), tuple(rows)
        )
    ]


def draw(results: Results) -> Figure:
    """Both spreads, and the rates, by the number of rows."""
    figure, axes = figures.new(1, 3, (11.0, 3.6))
    there = [(place, count) for place, count in enumerate(EPOCHS) if cell(count) in results]
    for ax, key in zip(axes, ("epistemic", "aleatoric", "rate")):
        counts = [count for _, count in there]
        ours = [mean(results[cell(count)][key]) for count in counts]
        bars = [one.error if one.error == one.error else 0.0 for one in ours]
        ax.errorbar(counts, [one.value for one in ours], bars, fmt="o-", markersize=4, label="ours")
        ax.plot(counts, [PUBLISHED[key][place] for place, _ in there], "s--", color="C3", markersize=4, label="published")
        ax.set(xscale="log", xlabel="rows", title=WORDS[key])
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    axes[0].legend()
    return figure


def _near(key: str) -> list[Bound]:
    unit = {"unit": ""}
    return [
        Bound(f"{WORDS[key]}, {rows:,} rows", number(cell(rows), key), value, 0.8 * value, 1.2 * value, **unit)  # type: ignore[arg-type]
        for rows, value in zip(EPOCHS, PUBLISHED[key])
    ]


CLAIMS = {
    "full": [*_near("epistemic"), *_near("rate")],
    "reduced": [
        Bound("rate of the inner layers, 10 rows", number(cell(10), "rate"), 0.40, 0.3, 0.5, unit=""),
        Bound("rate: 10 over 10,000 rows", fall("rate"), 2.5, low=2.0, unit="×"),
        Bound("epistemic: 10 over 10,000 rows", fall("epistemic"), 2.4, low=1.2, unit="×"),
        Bound("aleatoric, 10,000 rows", number(cell(10_000), "aleatoric"), 1.12, 0.8, 1.4, unit=""),
    ],
    "tiny": [],
}
REDUCED = (10, 100, 10_000)
TINY = {10: Rows(10, 20, units=8), 10_000: Rows(200, 1, units=8)}
SETTINGS: dict[int, dict[Size, Rows]] = {
    rows: {
        "full": Rows(rows, epochs),
        **({"reduced": Rows(rows, epochs, units=256)} if rows in REDUCED else {}),
        **({"tiny": TINY[rows]} if rows in TINY else {}),
    }
    for rows, epochs in EPOCHS.items()
}
ALL: dict[Size, Sequence[str]] = {size: [cell(rows) for rows, sizes in SETTINGS.items() if size in sizes] for size in SIZES}
REPRODUCTIONS = {
    "concrete-dropout": Reproduction(
        "concrete-dropout",
        "Concrete dropout by the number of rows",
        "Concrete Dropout. Yarin Gal, Jiri Hron and Alex Kendall. NeurIPS, 2017; the notebook of its code.",
        tuple(Cell(cell(rows), run, sizes) for rows, sizes in SETTINGS.items()),
        (
            Part("table", "1", "Spread and rates by the number of rows", ALL, CLAIMS, table),
            Part("figure", "rows", "Spread and rates by the number of rows", ALL, draw=draw),
        ),
        "concrete-dropout",
        seeds={"full": 3, "reduced": 1, "tiny": 1},
    )
}
