"""How few weights does a network need? Handwritten digits, pruned by signal-to-noise ratio and by magnitude.

Run: python examples/pruning.py [--quick]. Needs the extra `sklearn`. Writes pruning.png where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from torch import Tensor, nn

import plausible as pl


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1000], order[1000:]
    return x[train], y[train], x[test], y[test]


def plot(posterior: pl.Posterior, pruned: pl.Posterior, point: pl.Posterior) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    pl.plots.snr(posterior, ax=axes[0, 0])
    pl.plots.snr_cdf(posterior, ax=axes[0, 1])
    pl.plots.pruned_weights(posterior, pruned, ax=axes[1, 0])
    pl.plots.weight_histogram({"mean-field": posterior, "MAP": point}, ax=axes[1, 1])
    figure.savefig("pruning.png", dpi=120)
    plt.close(figure)
    print("wrote pruning.png")


def main(quick: bool = False) -> None:
    x, y, x_test, y_test = data()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    prior = pl.priors.Gaussian(0.3)
    posterior = pl.fit(net, (x, y), pl.MeanField(epochs=2 if quick else 150, lr=0.01), prior=prior)
    point = pl.fit(net, (x, y), pl.MAP(epochs=2 if quick else 50), prior=prior)

    table = pl.pruning.table(posterior, x=x_test, y=y_test, by=("snr", "magnitude"))
    print(f"{len(x_test)} test images")
    print(table)

    pruned = posterior.prune(0.95)
    print(pruned.summary())
    if importlib.util.find_spec("matplotlib"):
        plot(posterior, pruned, point)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
