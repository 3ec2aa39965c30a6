"""Which labels to buy: BALD, one by one and in batches, against random choice, on a pool where most labels teach nothing.

Three quarters of the pool are two dense clusters that two labels settle; the rest are two moons, where there is something to
learn. The problem was chosen for that: where every label teaches as much as any other, random choice is hard to beat. Test
data are drawn like the pool. All strategies start with the same ten labels and buy six a round; differences are paired by seed.

Run: python examples/active_learning.py [--quick] [--seeds 4]. Writes active_learning.png where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import plausible as pl
from plausible import decisions, metrics

START, BUY = 10, 6
FIRST = 10  # settings were tried out with other seeds than those that are reported
STRATEGIES = ("random", "BALD", "batches")


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, 2] and classes [n]."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.arange(n - n // 4) % 2
    centres = torch.stack([8.0 * side - 3.5, torch.full((len(side),), -3.0)], 1)
    clusters = centres + 0.5 * torch.randn(len(side), 2, generator=generator)
    moons, labels = pl.datasets.toys.two_moons(n // 4, noise=0.1, seed=seed)
    order = torch.randperm(n, generator=generator)
    return torch.cat([clusters, moons])[order], torch.cat([side, labels])[order]


def fit(x: Tensor, y: Tensor, seed: int, steps: int) -> pl.Posterior:
    """An ensemble that starts all over the prior, so that its members disagree where there are no labels."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
    method = pl.Ensemble(pl.MAP(epochs=steps, batch_size=None, lr=0.1), members=20, init="prior")
    return pl.fit(net, (x, y), method, prior=pl.priors.Gaussian(3.0), seed=seed, compile=False, progress=False)


def choose(strategy: str, pred: pl.Predictive, generator: torch.Generator) -> Tensor:
    """Which of the pool to buy next."""
    if strategy == "random":
        return torch.randperm(len(pred), generator=generator)[:BUY]
    if strategy == "BALD":
        return decisions.bald(pred).topk(BUY).indices
    return decisions.select_batch(pred, BUY).indices


def curves(seed: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Test accuracy after each round, for each strategy."""
    (x, y), (x_test, y_test) = data(600, seed), data(1000, 1000 + seed)
    judge: Callable[[pl.Posterior], float] = lambda posterior: metrics.accuracy(posterior.predict(x_test), y_test)  # noqa: E731
    first = fit(x[:START], y[:START], seed, steps)
    found = {}
    for strategy in STRATEGIES:
        bought, posterior, generator = torch.arange(len(x)) < START, first, torch.Generator().manual_seed(seed)
        found[strategy] = [judge(first)]
        for _ in range(rounds):
            pool = (~bought).nonzero().squeeze(-1)
            bought[pool[choose(strategy, posterior.predict(x[pool]), generator)]] = True
            posterior = fit(x[bought], y[bought], seed, steps)
            found[strategy].append(judge(posterior))
    return found


def plot(labels: list[int], results: dict[str, Tensor], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    seeds = min(map(len, results.values()))
    for strategy, values in results.items():
        error = values.std(0) / math.sqrt(len(values))
        axis.errorbar(labels, values.mean(0), error, marker="o", capsize=3, label=strategy)
    axis.set(xlabel="labels", ylabel="test accuracy", title=f"mean of {seeds} seeds ± standard error")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(quick: bool = False, seeds: int = 4) -> None:
    logging.getLogger("plausible").setLevel(logging.ERROR)
    seeds, rounds, steps = (2, 1, 5) if quick else (seeds, 3, 15)
    runs = [curves(seed, rounds, steps) for seed in range(FIRST, FIRST + seeds)]
    results = {name: torch.tensor([run[name] for run in runs], dtype=torch.float64) for name in STRATEGIES}
    labels = [START + BUY * turn for turn in range(rounds + 1)]

    print(f"test accuracy, mean of {seeds} seeds")
    print(f"{'labels':>16}" + "".join(f"{n:>9}" for n in labels))
    for name, values in results.items():
        print(f"{name:>16}" + "".join(f"{v:9.3f}" for v in values.mean(0).tolist()))
    print("difference to random, paired by seed, ± standard error")
    for name in STRATEGIES[1:]:
        gain = results[name] - results["random"]
        error = gain.std(0) / math.sqrt(seeds)
        print(f"{name:>16}" + "".join(f"{m:+9.3f}" for m in gain.mean(0).tolist()))
        print(f"{'±':>16}" + "".join(f"{e:9.3f}" for e in error.tolist()))
    if importlib.util.find_spec("matplotlib"):
        plot(labels, results, Path("active_learning.png"))


if __name__ == "__main__":
    main("--quick" in sys.argv, int(sys.argv[sys.argv.index("--seeds") + 1]) if "--seeds" in sys.argv else 4)
