"""The regression curve of section 5.2: bands that open where there are no data, beside a plain network's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.frame import Request
from plausible.apps.datasets import toys
from plausible.core import random
from plausible.core.likelihoods import Gaussian as Noise
from plausible.core.priors import Flat, Prior
from plausible.fitting import fit
from plausible.methods import MAP, MeanField

INSIDE, OUTSIDE = (0.0, 0.5), ((-0.2, -0.1), (0.7, 1.2))


@dataclass(frozen=True)
class Curve:
    """One setting of the two networks, `units` wide, on `rows` points with noise of standard deviation `noise`."""

    bayes: MeanField
    plain: MAP
    prior: Prior
    units: int = 100
    rows: int = 1000
    noise: float = 0.02
    draws: int = 500


def run(settings: Curve, request: Request) -> dict[str, Any]:
    """Quartiles of y over [−0.2, 1.2] by both networks for the first seed, and for each seed how wide the bands are.

    `opening` is the mean width of the interquartile band where there are no data, divided by that over the data.
    """
    x, y = toys.blundell(settings.rows, settings.noise, seed=request.seed)
    grid = torch.linspace(-0.2, 1.2, 141)[:, None]
    found: dict[str, Any] = {"x": _list(grid), "data": [_list(x), _list(y)], "training_seconds": 0.0}
    for name, method, prior in (("bayes", settings.bayes, settings.prior), ("plain", settings.plain, Flat())):
        bands = []
        for seed in range(request.seed, request.seed + request.seeds):
            with random.isolated(seed):
                module = network(settings.units)
            posterior = fit(
                module,
                (x, y),
                method,
                likelihood=Noise(settings.noise),
                prior=prior,
                seed=seed,
                device=request.device,
                compile=request.compile,
                progress=request.progress,
            )
            if posterior.interrupted:
                raise KeyboardInterrupt("the curve is trained anew by the next call")
            draws = settings.draws if isinstance(method, MeanField) else None
            levels = posterior.predict(grid, draws, seed=seed).quantile([0.25, 0.5, 0.75])
            bands.append(levels.squeeze(-1).cpu().double())
            found["training_seconds"] += posterior.run["seconds"]
        found[name] = {
            "quartiles": [_list(level) for level in bands[0]],
            "opening": [opening(grid.flatten(), band) for band in bands],
            "rmse": [rmse(grid.flatten(), band[1], settings.noise) for band in bands],
        }
    return found


def network(units: int) -> nn.Sequential:
    """1 – units – units – 1 with ReLU."""
    return nn.Sequential(nn.Linear(1, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 1))


def _list(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.flatten().tolist()]


def opening(x: Tensor, quartiles: Tensor) -> float:
    """Mean width of the band outside the data over that inside."""
    width = quartiles[2] - quartiles[0]
    outside = torch.stack([(x >= low) & (x <= high) for low, high in OUTSIDE]).any(0)
    return round(float(width[outside].mean() / width[(x >= INSIDE[0]) & (x <= INSIDE[1])].mean()), 4)


def rmse(x: Tensor, median: Tensor, noise: float) -> float:
    """Of the median against the true mean, over the data."""
    truth, _ = toys.truth("blundell", x, noise)
    inside = (x >= INSIDE[0]) & (x <= INSIDE[1])
    return float((median - truth)[inside].square().mean().sqrt())
