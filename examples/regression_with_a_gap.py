"""Three methods on a curve with a gap: where there are no data, the epistemic part of the uncertainty should grow.

Run: python examples/regression_with_a_gap.py [--quick]. Writes regression_with_a_gap.png where matplotlib is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import plausible as pl


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-3, -1, 20), torch.linspace(1, 3, 20)])[:, None]
    return x, torch.sin(2 * x) + 0.2 * torch.randn(x.shape, generator=generator)


def fit_all(x: Tensor, y: Tensor, scale: float) -> dict[str, pl.Posterior]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    likelihood = pl.likelihoods.Gaussian(scale=0.2)  # the noise is taken as known
    point = pl.MAP(epochs=int(500 * scale), lr=pl.schedules.Cosine(0.05))
    chain = pl.SGLD(epochs=int(4000 * scale), batch_size=None, lr=6e-5, burn_in=0.25)

    at_mode = pl.fit(net, (x, y), point, likelihood=likelihood)
    return {
        "MAP": at_mode,
        "Ensemble": pl.fit(net, (x, y), pl.Ensemble(point, members=8, init="prior"), likelihood=likelihood),
        "SGLD": pl.fit(net, (x, y), chain, likelihood=likelihood, init=at_mode),
    }


def plot(posteriors: dict[str, pl.Posterior], x: Tensor, y: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grid = torch.linspace(-5, 5, 200)[:, None]
    figure, axes = plt.subplots(1, len(posteriors), figsize=(12, 3.5), sharey=True, layout="constrained")
    for axis, (name, posterior) in zip(axes, posteriors.items()):
        pred = posterior.predict(grid)
        low, high = pred.interval(0.9)
        axis.fill_between(grid[:, 0], low[:, 0], high[:, 0], alpha=0.2, label="90 % of the targets")
        axis.plot(grid, posterior.functions(grid, 8)[:, :, 0].T, "C1", linewidth=0.5)
        axis.plot(grid, pred.mean, "C0", label="mean")
        axis.plot([], [], "C1", linewidth=0.5, label="draws of f")
        axis.plot(x, y, "k.", markersize=3)
        axis.set(title=name, xlabel="x", ylim=(-4, 4))
    axes[0].legend(loc="lower left")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(quick: bool = False) -> None:
    x, y = data()
    posteriors = fit_all(x, y, scale=0.1 if quick else 1.0)
    places = {"among the data (x = -2)": -2.0, "in the gap (x = 0)": 0.0, "outside (x = 5)": 5.0}
    inputs = torch.tensor(list(places.values()))[:, None]
    print(f"{'epistemic std':26}" + "".join(f"{name:>10}" for name in posteriors))
    values = {name: posterior.predict(inputs).epistemic.sqrt() for name, posterior in posteriors.items()}
    for row, place in enumerate(places):
        print(f"{place:26}" + "".join(f"{float(value[row, 0]):10.3f}" for value in values.values()))
    print("SGLD chain at these inputs:", posteriors["SGLD"].diagnostics(inputs))
    if importlib.util.find_spec("matplotlib"):
        plot(posteriors, x, y, Path("regression_with_a_gap.png"))


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
