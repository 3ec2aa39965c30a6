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
    x = torch.cat([torch.linspace(-3, -1, 40), torch.linspace(1, 3, 40)])[:, None]
    return x, torch.sin(2 * x) + 0.2 * torch.randn(x.shape, generator=generator)


def fit_all(x: Tensor, y: Tensor, scale: float) -> dict[str, pl.Posterior]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    likelihood = pl.likelihoods.Gaussian(scale=0.2)
    prior = {"*.bias": pl.priors.Gaussian(2.0), "*": pl.priors.FanIn(pl.priors.Gaussian(3.0))}
    point = pl.MAP(epochs=int(600 * scale), lr=pl.schedules.Cosine(0.03))
    chain = pl.SGLD(epochs=int(3000 * scale), batch_size=None, lr=3e-5, burn_in=0.3)

    def fit(method: pl.Method, start: pl.Posterior | None = None) -> pl.Posterior:
        return pl.fit(net, (x, y), method, likelihood=likelihood, prior=prior, init=start)

    at_mode = fit(point)
    return {"MAP": at_mode, "Ensemble": fit(pl.Ensemble(point, members=5)), "SGLD": fit(chain, start=at_mode)}


def plot(posteriors: dict[str, pl.Posterior], x: Tensor, y: Tensor, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grid = torch.linspace(-5, 5, 200)[:, None]
    figure, axes = plt.subplots(1, len(posteriors), figsize=(12, 3.5), sharey=True, layout="constrained")
    for axis, (name, posterior) in zip(axes, posteriors.items()):
        pred = posterior.predict(grid)
        low, high = pred.interval(0.9)
        spread = 1.645 * pred.epistemic.sqrt()
        axis.fill_between(grid[:, 0], low[:, 0], high[:, 0], alpha=0.2, label="90 % interval")
        axis.fill_between(
            grid[:, 0], (pred.mean - spread)[:, 0], (pred.mean + spread)[:, 0], alpha=0.4, label="epistemic part"
        )
        axis.plot(grid, pred.mean)
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
    print("SGLD chain:", posteriors["SGLD"].diagnostics(inputs))
    if importlib.util.find_spec("matplotlib"):
        plot(posteriors, x, y, Path("regression_with_a_gap.png"))


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
