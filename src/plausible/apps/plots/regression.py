"""Numbers: predictive bands over one input, and predictions beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.apps.plots.base import DASHED, axes_of, column
from plausible.posteriors.predictive import Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predictive_band(
    x: Any, predictive: Predictive, data: tuple[Any, Any] | None = None, *, output: int = 0, ax: Axes | None = None
) -> Axes:
    """Mean, 50 % and 90 % bands of p(y | x) over one input [N] or [N, 1], in its order; `data` (x, y) as points.

    `predictive` is that of the same inputs, `posterior.predict(x)`; `output` picks one of several targets.
    """
    grid = column("x", x, 0)
    if len(grid) != len(predictive):
        raise ValueError(f"x has {len(grid)} inputs, predictive has {len(predictive)}: pass the x that was predicted")
    order = np.argsort(grid, kind="stable")
    levels = [column("predictive", level, output)[order] for level in predictive.quantile([0.05, 0.25, 0.75, 0.95])]
    grid, mean = grid[order], column("predictive", predictive.mean, output)[order]
    ax = draw_band(axes_of(ax), grid, levels, mean)
    if data is not None:
        ax.plot(column("data x", data[0], 0), column("data y", data[1], output), "o", color="C1", markersize=3, label="data")
    ax.set(xlabel="x", ylabel="y")
    ax.legend()
    return ax


def draw_band(ax: Axes, grid: np.ndarray, levels: Sequence[np.ndarray] | np.ndarray, mean: np.ndarray) -> Axes:
    """`levels`: the quantiles 5, 25, 75 and 95 % over the grid."""
    ax.fill_between(grid, levels[0], levels[3], color="C0", alpha=0.2, linewidth=0, label="90 %")
    ax.fill_between(grid, levels[1], levels[2], color="C0", alpha=0.35, linewidth=0, label="50 %")
    ax.plot(grid, mean, color="C0", label="mean")
    ax.set(xlim=(grid[0], grid[-1]) if grid[0] < grid[-1] else None)
    return ax


def draw_uncertainties(ax: Axes, grid: np.ndarray, epistemic: np.ndarray, aleatoric: np.ndarray) -> Axes:
    """Standard deviations of disagreement and of noise over one input."""
    ax.plot(grid, epistemic, color="C1", label="epistemic")
    ax.plot(grid, aleatoric, color="C0", label="noise (aleatoric)")
    ax.set(ylim=(0, 1.08 * float(max(epistemic.max(), aleatoric.max())) or 1.0))
    return ax


def predictions(predictive: Predictive, y: Any, level: float = 0.9, *, output: int = 0, ax: Axes | None = None) -> Axes:
    """Predicted mean with its equal-tailed interval against the truth; targets outside their interval in another colour."""
    truth = column("y", y, output)
    low, high = (column("predictive", bound, output) for bound in predictive.interval(level))
    mean = column("predictive", predictive.mean, output)
    if len(truth) != len(mean):
        raise ValueError(f"y has {len(truth)} targets, predictive has {len(mean)}")
    return draw_predictions(axes_of(ax), truth, mean, low, high, level)


def draw_predictions(ax: Axes, truth: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray, level: float) -> Axes:
    outside = (truth < low) | (truth > high)
    ends = [min(truth.min(), mean.min()), max(truth.max(), mean.max())]
    ax.plot(ends, ends, **DASHED)
    for rows, colour, words in ((~outside, "C0", "inside"), (outside, "C3", "outside")):
        ax.vlines(truth[rows], low[rows], high[rows], color=colour, alpha=0.3, linewidth=1)
        ax.plot(truth[rows], mean[rows], "o", color=colour, markersize=3, label=f"{words} ({rows.mean():.0%})")
    ax.set(xlabel="observed", ylabel=f"predicted mean, {level:.0%} interval")
    ax.legend()
    return ax
