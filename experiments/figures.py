"""The figures, by matplotlib, from stored results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.frame import Results, look
from plausible.apps.plots.base import axes_of
from plausible.apps.plots.base import new_figure as new
from plausible.apps.plots.base import save_figure as save

__all__ = ["bands", "error_curves", "histogram", "new", "save", "snr", "weight_histograms"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def error_curves(ax: Axes, results: Results, lines: Mapping[str, str], *, top: float | None = None) -> None:
    """Test error by epoch, the mean over seeds with a band from the lowest to the highest; `lines` cell → label."""
    axes_of(ax)
    finals = []
    for number, (cell, label) in enumerate(lines.items()):
        curve = look(results, cell, "curve")
        if curve is None:
            continue
        keys = [key for key in curve if key.startswith("test, ") and key.endswith("draws")] or ["test, mean"]
        values = curve[keys[0]]
        means = [statistics.fmean(row) for row in values]
        ax.plot(curve["epoch"], means, color=f"C{number}", label=label)
        ax.fill_between(
            curve["epoch"],
            [min(row) for row in values],
            [max(row) for row in values],
            color=f"C{number}",
            alpha=0.2,
            linewidth=0,
        )
        finals.append((min(means), means[len(means) // 5]))
    if finals:
        low, high = min(low for low, _ in finals), max(high for _, high in finals)
        ax.set_ylim(max(0.0, low - 0.15 * (high - low) - 0.05), top or high + 0.35 * (high - low) + 0.1)
    ax.set(xlabel="epoch", ylabel="test error (%)")
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend()


def histogram(ax: Axes, edges: Sequence[float], shares: Sequence[float], label: str, colour: str) -> None:
    """A density from shares in bins, as an outline that is open at its ends: the bins may not hold everything."""
    densities = [share / (high - low) for share, low, high in zip(shares, edges, edges[1:])]
    ax.stairs(densities, edges, baseline=None, color=colour, label=label, linewidth=1.3)


def weight_histograms(results: Results, lines: Mapping[str, str]) -> Figure:
    """Densities of the weights of several cells, on a linear and on a logarithmic axis."""
    figure, axes = new(1, 2, (9.5, 4.1))
    for number, (cell, label) in enumerate(lines.items()):
        found = look(results, cell, "weights")
        if found is not None:
            for ax in axes:
                histogram(ax, found["edges"], found["shares"], f"{label} (s.d. {found['std']:.3f})", f"C{number}")
                ax.set_xlim(found["edges"][0], found["edges"][-1])
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    for ax in axes:
        ax.set(xlabel="weight", ylabel="density")
    _legend_below(figure, axes[0])
    return figure


def snr(results: Results, cells: Mapping[str, str]) -> Figure:
    """Density and distribution function of the signal-to-noise ratio in decibels, with the cuts marked."""
    figure, axes = new(1, 2, (9.5, 4.1), sharex=True)
    ends = []
    for number, (cell, label) in enumerate(cells.items()):
        found = look(results, cell, "snr")
        if found is None:
            continue
        edges, shares = found["edges"], found["shares"]
        histogram(axes[0], edges, shares, label, f"C{number}")
        total, below = 0.0, [0.0]
        for share in shares:
            total += share
            below.append(total)
        axes[1].plot(edges, below, color=f"C{number}")
        ends += [edge for edge, level in zip(edges, below) if 0.002 < level < 0.9995]
        if number == 0:
            for k, (fraction, cut) in enumerate(found["cuts"].items()):
                style = {"color": f"C{k + 2}", "linestyle": (0, (4, 3)), "linewidth": 1.2}
                axes[0].axvline(cut, label=f"{100 * float(fraction):g} % cut", **style)
                axes[1].axvline(cut, **style)
                axes[1].plot([cut], [float(fraction)], "o", color=f"C{k + 2}", markersize=4)
    if ends:
        axes[0].set_xlim(min(ends), max(ends))
    axes[0].set(xlabel="signal-to-noise ratio (dB)", ylabel="density")
    axes[0].set_ylim(bottom=0)
    axes[1].set(xlabel="signal-to-noise ratio (dB)", ylabel="share of weights below", ylim=(0, 1))
    _legend_below(figure, axes[0])
    return figure


def _legend_below(figure: Figure, ax: Axes) -> None:
    """One row under the figure: histograms first, then the cuts."""
    pairs = sorted(zip(*ax.get_legend_handles_labels()), key=lambda pair: pair[1].endswith(" cut"))
    handles, labels = [handle for handle, _ in pairs], [label for _, label in pairs]
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")


def bands(ax: Axes, result: Mapping[str, Any], name: str, title: str) -> None:
    """The median and the interquartile band of one network over the data."""
    x, (low, middle, high) = result["x"], result[name]["quartiles"]
    ax.plot(*result["data"], "x", color="0.35", markersize=3, markeredgewidth=0.6, label="data", zorder=1)
    ax.fill_between(x, low, high, color="C0", alpha=0.35, linewidth=0, label="interquartile range", zorder=2)
    ax.plot(x, middle, color="C3", linewidth=1.3, label="median", zorder=3)
    ax.set(title=title, xlabel="x", ylabel="y", xlim=(-0.2, 1.2), ylim=(-0.7, 2.3))
