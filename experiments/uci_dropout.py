"""MC dropout on the five small UCI sets, by the protocol of Mukhoti, Stenetorp and Gal (2018).

One hidden layer of 50 ReLU units, dropout on the inputs and on the units, 4,000 epochs of Adam with batches of 128, 20 splits.
Of each split's training rows the last fifth chooses the rate and the precision τ of the noise; the network is then trained on
all of them. The log-likelihood is that of 10,000 draws, log (1/T) Σ N(y; f_t, 1/τ), in the units of y.

All rates and all splits of a set are one network, a `Bank`: each has weights, rows and masks of its own, and its own term of
the loss. τ enters training through the penalty l²(1 − p)/(2Nτ) alone, about 10⁻⁶ with the length scale l = 0.01 of the
protocol: training takes the middle one, and the others cost nothing.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, Values, look
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.core import random
from plausible.core.likelihoods import Gaussian
from plausible.core.priors import Gaussian as GaussianPrior
from plausible.engine import Checkpoint
from plausible.fitting import fit
from plausible.methods import MCDropout

Table = Literal["boston", "concrete", "energy", "wine", "yacht"]
RATES = (0.005, 0.01, 0.05, 0.1)
PRECISIONS: Mapping[Table, tuple[float, ...]] = {
    "boston": (0.1, 0.15, 0.2),
    "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75),
    "wine": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}
PUBLISHED: Mapping[Table, tuple[float, float]] = {
    "boston": (-2.40, 0.04),
    "concrete": (-2.93, 0.02),
    "energy": (-1.21, 0.01),
    "wine": (-0.93, 0.01),
    "yacht": (-1.25, 0.01),
}
"""Mean test log-likelihood over 20 splits, and its standard error."""
LENGTH_SCALE = 0.01
AT_ONCE = 100
"""Draws that are in memory together."""


@dataclass(frozen=True)
class Grid:
    """All rates, precisions and splits of one set."""

    data: Table
    splits: int = 20
    epochs: int = 4000
    draws: int = 10_000
    units: int = 50
    batch_size: int = 128
    lr: float = 1e-3


class Bank(nn.Module):
    """Networks d – units – 1 for each rate and split, x [N, splits, d] → [N, rates · splits]; dropout before both layers."""

    def __init__(self, rates: Sequence[float], splits: int, inputs: int, units: int):
        super().__init__()
        self.rates = tuple(rates)
        self.first = _uniform((len(rates), splits, inputs, units), inputs)
        self.first_bias = nn.Parameter(torch.zeros(len(rates), splits, 1, units))
        self.second = _uniform((len(rates), splits, units, 1), units)
        self.second_bias = nn.Parameter(torch.zeros(len(rates), splits, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for k, rate in enumerate(self.rates):
            dropped = F.dropout(x, rate, self.training).transpose(0, 1)
            hidden = torch.baddbmm(self.first_bias[k], dropped, self.first[k]).relu()
            hidden = F.dropout(hidden, rate, self.training)
            outputs.append(torch.baddbmm(self.second_bias[k], hidden, self.second[k]).squeeze(-1).T)
        return torch.cat(outputs, 1)


def _uniform(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    return nn.Parameter((2 * torch.rand(shape) - 1) / math.sqrt(fan_in))


def run(settings: Grid, request: Request) -> dict[str, Any]:
    """Choose by validation, train on all rows, score on the test rows: lists over the splits."""
    table = datasets.uci(settings.data)
    pairs = [table.split(k) for k in range(settings.splits)]
    train = [(pair.train[0].double(), pair.train[1].double()) for pair in pairs]
    test = [(pair.test[0].double(), pair.test[1].double()) for pair in pairs]
    most = int(0.8 * len(train[0][0]))
    inner = [(x[:most], y[:most]) for x, y in train], [(x[most:], y[most:]) for x, y in train]
    first, seconds = scored(settings, *inner, request, 0)
    every = torch.tensor(first["ll"]).flatten(0, 1)  # [rates · precisions, splits]
    chosen = [divmod(int(k), len(PRECISIONS[settings.data])) for k in every.argmax(0)]
    last, more = scored(settings, train, test, request, 1)
    return {
        "log_likelihood": [last["ll"][r][t][k] for k, (r, t) in enumerate(chosen)],
        "rmse": [last["rmse"][r][k] for k, (r, _) in enumerate(chosen)],
        "rates": [RATES[r] for r, _ in chosen],
        "precisions": [PRECISIONS[settings.data][t] for _, t in chosen],
        "by_setting": last["ll"],
        "training_seconds": seconds + more,
    }


Rows = Sequence[tuple[Tensor, Tensor]]


def scored(settings: Grid, train: Rows, test: Rows, request: Request, phase: int) -> tuple[dict[str, Any], float]:
    """Log-likelihoods [rates][precisions][splits] and errors [rates][splits] of the test rows; seconds of training."""
    moments = [(_moments(x), _moments(y)) for x, y in train]
    inputs = [torch.stack([(x - m) / s for (x, _), ((m, s), _) in zip(part, moments)], 1) for part in (train, test)]
    (x, x_test), (loc, scale) = inputs, (torch.cat([pair[1][k] for pair in moments]) for k in (0, 1))
    y, y_test = (torch.cat([y for _, y in part], 1) for part in (train, test))
    precisions = PRECISIONS[settings.data]
    with random.isolated(request.seed + phase):
        bank = Bank(RATES, settings.splits, x.shape[-1], settings.units)
    with warnings.catch_warnings():  # τ, which is in the units of y, is no fit to standardised targets, and need not be one
        warnings.filterwarnings("ignore", ".*predicts its own rows")
        posterior = fit(
            bank,
            (x.float(), ((y - loc) / scale).repeat(1, len(RATES)).float()),
            MCDropout(epochs=settings.epochs, batch_size=min(settings.batch_size, len(x)), lr=settings.lr, patience=None),
            likelihood=Gaussian(precisions[1] ** -0.5),
            prior=GaussianPrior(math.sqrt(2) / LENGTH_SCALE),
            seed=request.seed + phase,
            device=request.device,
            compile=request.compile,
            progress=request.progress,
            checkpoint=None if request.checkpoint is None else Checkpoint(request.checkpoint / str(phase), seconds=120),
        )
    if posterior.interrupted:
        raise KeyboardInterrupt("the same command goes on from here")
    total, densities, drawn = torch.zeros(()), [], 0
    while drawn < settings.draws:
        count = min(AT_ONCE, settings.draws - drawn)
        f = posterior.functions(x_test.float(), count, seed=request.seed + 1000 * phase + drawn).cpu().double()
        f = loc + scale * f.unflatten(-1, (len(RATES), settings.splits))  # [draws, N, rates, splits]
        squares = (f - y_test[:, None]).square()
        densities.append(torch.stack([(-0.5 * tau * squares).logsumexp(0) for tau in precisions], 2))
        total, drawn = total + f.sum(0), drawn + count
    logs = torch.tensor(precisions).double().log()[:, None] - math.log(2 * math.pi)
    each = torch.stack(densities).logsumexp(0) - math.log(drawn) + 0.5 * logs  # [N, rates, precisions, splits]
    rmse = (total / drawn - y_test[:, None]).square().mean(0).sqrt()
    return {"ll": each.mean(0).tolist(), "rmse": rmse.tolist()}, posterior.run["seconds"]


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = values.std(0, correction=0)
    return values.mean(0), torch.where(scale == 0, 1.0, scale)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def distance(data: Table) -> Values:
    """The mean log-likelihood over splits less the published one, in standard errors of the difference."""

    def values(results: Results) -> Sequence[float] | None:
        found, (there, error) = look(results, data, "log_likelihood"), PUBLISHED[data]
        if found is None:
            return None
        own = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else math.inf
        return [(statistics.fmean(found) - there) / math.hypot(own, error)]

    return values


def table(results: Results) -> list[Sheet]:
    """Scores beside the published ones, and what was chosen."""
    rows = []
    for data, (value, error) in PUBLISHED.items():
        if data in results:
            found = results[data]
            often = [f"{rate:g}: {found['rates'].count(rate)}" for rate in RATES if rate in found["rates"]]
            scores = (
                mean(found["log_likelihood"]).text(),
                f"{value:.2f} ± {error:.2f}".replace("-", "−"),
                mean(found["rmse"]).text(),
            )
            rows.append((data, *scores, ", ".join(often), f"{found['training_seconds']:.0f}"))
    head = ("set", "log-likelihood", "published", "root mean squared error", "splits that chose each rate", "training seconds")
    return [Sheet("Test rows, mean ± standard error over splits", head, tuple(rows))]


CLAIMS = {
    "full": [
        Bound(f"{data}: log-likelihood less the published {value}", distance(data), low=-2, unit="s.e.")
        for data, (value, _) in PUBLISHED.items()
    ],
    "reduced": [
        Bound("boston: log-likelihood", lambda results: look(results, "boston", "log_likelihood"), -2.40, low=-2.8, unit="")
    ],
    "tiny": [],
}


SETTINGS: dict[Table, dict[Size, Grid]] = {
    data: {
        "full": Grid(data),
        **({"reduced": Grid(data, splits=2, epochs=200, draws=500)} if data == "boston" else {}),
        **({"tiny": Grid(data, splits=2, epochs=2, draws=20)} if data == "yacht" else {}),
    }
    for data in PUBLISHED
}
ALL: dict[Size, Sequence[str]] = {size: [data for data, sizes in SETTINGS.items() if size in sizes] for size in SIZES}
REPRODUCTIONS = {
    "uci-dropout": Reproduction(
        "uci-dropout",
        "MC dropout on five UCI sets",
        "On the Importance of Strong Baselines in Bayesian Deep Learning. Jishnu Mukhoti, Pontus Stenetorp and Yarin Gal. 2018.",
        tuple(Cell(data, run, sizes) for data, sizes in SETTINGS.items()),
        (Part("table", "1", "Test log-likelihood", ALL, CLAIMS, table),),
        "uci-dropout",
        seeds={"full": 1, "reduced": 1, "tiny": 1},
    )
}
