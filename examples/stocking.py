"""A stocking problem: how many loaves to bake tomorrow, from a network that predicts demand as counts.

A loaf costs 1 to bake and sells at 4; what is left in the evening is worth nothing. Demand depends on weekday and temperature
and scatters more than Poisson. A hundred days are known; the next thousand tell what each rule would have earned.

Run: python examples/stocking.py [--quick].
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from torch import Tensor, nn

import plausible as pl
from plausible import decisions

PRICE, COST = 4.0, 1.0


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weekday (one-hot) and temperature [n, 8], and the loaves asked for [n]."""
    generator = np.random.default_rng(seed)
    weekday, warmth = np.arange(n) % 7, generator.normal(size=n)
    rate = np.exp(3.0 + 0.5 * (weekday >= 5) - 0.3 * warmth - 0.2 * warmth**2)
    demand = generator.negative_binomial(5, 5 / (5 + rate))  # variance: rate + rate²/5
    x = np.concatenate([np.eye(7)[weekday], warmth[:, None]], 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(demand, dtype=torch.float32)


def main(quick: bool = False) -> None:
    x, y = data(100, seed=0)
    x_new, y_new = data(1000, seed=1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1), nn.Flatten(0))
    method = pl.Ensemble(pl.MAP(epochs=20 if quick else 200, batch_size=None, lr=0.03), members=5)
    likelihood = pl.likelihoods.NegativeBinomial()
    pred = pl.fit(net, (x, y), method, likelihood=likelihood, compile=False, progress=False).predict(x_new)

    best = decisions.newsvendor(pred, PRICE, COST)
    rules = {
        "mean of the past": torch.full((len(y_new),), float(y.mean())).round(),
        "predicted mean": pred.mean.round(),
        "newsvendor": best.action,
    }
    earned = {name: decisions.newsvendor_profit(y_new[None], q, PRICE, COST) for name, q in rules.items()}
    expected = {name: decisions.newsvendor_profit(pred, q, PRICE, COST).mean() for name, q in rules.items()}
    print(f"profit per day over {len(y_new)} days; differences are paired by day")
    print(f"{'rule':20}{'loaves':>8}{'expected':>10}{'earned':>9}{'difference':>12}{'± s.e.':>8}{'sold out':>10}")
    for name, quantity in rules.items():
        gap = earned[name] - earned["predicted mean"]
        error = float(gap.std()) / math.sqrt(len(gap))
        print(
            f"{name:20}{float(quantity.mean()):8.1f}{float(expected[name]):10.2f}{float(earned[name].mean()):9.2f}"
            f"{float(gap.mean()):+12.2f}{error:8.2f}{float((y_new > quantity).double().mean()):10.1%}"
        )
    print(f"the newsvendor bakes the {(PRICE - COST) / PRICE:.0%} quantile of demand: it should sell out on one day in four")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
