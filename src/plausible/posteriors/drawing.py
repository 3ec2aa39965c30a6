"""A predictive drawn by matplotlib: bands of numbers and shares of classes, over one input or over rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from plausible.posteriors.predictive import Predictive

NAMED = 10
"""Classes up to which the legend has them all, and as many colours as there are."""


def axes_of(ax: Any) -> Axes:
    """The axes that were given, or new ones of a figure of their own."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(f"plots need matplotlib ({error}): pip install 'plausible[plot]'") from error
        return pyplot.subplots(layout="constrained")[1]
    if not hasattr(ax, "plot") or not hasattr(ax, "set_xlabel"):
        raise TypeError(f"ax must be a matplotlib Axes, got {type(ax).__name__}")
    return ax


def column(name: str, value: Any, output: int) -> np.ndarray:
    """One output of an array [..., N] or [..., N, K] that has `N` where the first axis of its kind is; float64."""
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value, dtype=np.float64)
    if array.ndim == 1:
        return array
    if array.ndim != 2 or not -array.shape[1] <= output < array.shape[1]:
        raise ValueError(f"{name} has shape {list(array.shape)}: expected [N], or [N, outputs] with output={output} among them")
    return array[:, output]


def plot(predictive: Predictive, x: Any, y: Any, output: int, ax: Any) -> Axes:
    """See `Predictive.plot`."""
    if len(shape := np.shape(x)) > 1 and shape[1] != 1:
        raise ValueError(f"x has shape {list(shape)}: give the one column to draw along, x[:, 0], or none")
    classes = predictive.likelihood.kind in ("classes", "binary")
    shares = _shares(predictive, output) if classes else None
    mean = column("predictive", predictive.mean, output) if shares is None else shares.argmax(1) + shares.max(1)
    grid = np.arange(len(mean), dtype=np.float64) if x is None else column("x", x, 0)
    truth = None if y is None else column("y", y, output)
    for given, words in ((grid, "x has {} inputs"), (truth, "y has {} targets")):
        if given is not None and len(given) != len(mean):
            raise ValueError(f"{words.format(len(given))}, the predictive has {len(mean)}: pass those that were predicted")
    # without an input to lay them along, rows are sorted by what is predicted of them
    order = np.argsort(mean if x is None else grid, kind="stable")
    at = grid if x is None else grid[order]
    # a single row is a band as well
    grid, over = (at, order) if len(at) > 1 else (at[0] + np.array([-0.5, 0.5]), order[[0, 0]])
    ax = axes_of(ax)
    if shares is not None:
        draw_shares(ax, grid, shares[over])
    else:
        levels = [column("predictive", level, output)[over] for level in predictive.quantile([0.05, 0.25, 0.75, 0.95])]
        draw_band(ax, grid, levels, mean[over])
    if truth is not None and shares is not None:
        colours = [f"C{int(code) % NAMED}" for code in truth[order]]
        ax.scatter(at, np.full(len(at), 1.03), c=colours, marker="|", label="observed")
        ax.set(ylim=(0, 1.06))
    elif truth is not None:
        ax.plot(at, truth[order], "o", color="C1", markersize=3, label="observed")
    ax.set(xlabel="rows, by what is predicted" if x is None else "x", ylabel="y" if shares is None else "probability")
    if shares is None or shares.shape[1] <= NAMED:
        ax.legend()
    return ax


def _shares(predictive: Predictive, output: int) -> np.ndarray:
    """Probabilities [N, classes] of one target."""
    probs = predictive.probs.detach().cpu().double().numpy()
    if predictive.likelihood.kind == "binary":
        chosen = column("predictive", probs, output)
        return np.stack([1 - chosen, chosen], 1)
    if probs.ndim != 2:
        raise ValueError(
            f"plot shows one target of classes, and this predictive has probabilities of shape {list(probs.shape)}"
        )
    return probs


def draw_band(ax: Axes, grid: np.ndarray, levels: Sequence[np.ndarray] | np.ndarray, mean: np.ndarray) -> Axes:
    """`levels`: the quantiles 5, 25, 75 and 95 % over the grid."""
    ax.fill_between(grid, levels[0], levels[3], color="C0", alpha=0.2, linewidth=0, label="90 %")
    ax.fill_between(grid, levels[1], levels[2], color="C0", alpha=0.35, linewidth=0, label="50 %")
    ax.plot(grid, mean, color="C0", label="mean")
    ax.set(xlim=(grid[0], grid[-1]) if grid[0] < grid[-1] else None)
    return ax


def draw_shares(ax: Axes, grid: np.ndarray, shares: np.ndarray) -> Axes:
    """Probabilities of classes [N, C], stacked over the grid."""
    codes = range(shares.shape[1])
    colours, labels = [f"C{code % NAMED}" for code in codes], [f"class {code}" for code in codes]
    ax.stackplot(grid, shares.T, colors=colours, alpha=0.6, linewidth=0, labels=labels)
    ax.set(xlim=(grid[0], grid[-1]) if grid[0] < grid[-1] else None, ylim=(0, 1))
    return ax
