"""What a sweep found: the scores of all settings, by the values of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.apps.plots.base import axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sweep(found: Any, by: str | None = None, *, ax: Axes | None = None) -> Axes:
    """The score of every setting of a `plausible.sweep`, one column of dots for each value of each setting, medians marked.

    A setting that matters has columns at different heights; the best combination is ringed in each group. Those that diverged are
    left out, and counted in the title.
    """
    by = by or found.measure
    values = np.array([np.nan if row["scores"].get(by) is None else row["scores"][by] for row in found.rows])
    if not np.isfinite(values).any():
        raise ValueError(f"no setting has a finite {by}: there is nothing to draw")
    best = found.best(by)
    ax = axes_of(ax)
    stream, place = np.random.default_rng(0), 0.0
    ticks, labels = [], []
    names = [name for name in best["settings"] if len({repr(row["settings"][name]) for row in found.rows}) > 1]
    for number, name in enumerate(names):
        first = place
        for value in dict.fromkeys(row["settings"][name] for row in found.rows):
            own = np.array([row["settings"][name] == value for row in found.rows]) & np.isfinite(values)
            x = place + 0.3 * (stream.random(int(own.sum())) - 0.5)
            ax.plot(x, values[own], ".", color=f"C{number % 10}", alpha=0.45, markersize=4)
            if own.any():
                ax.plot([place - 0.3, place + 0.3], [np.median(values[own])] * 2, color="0.15", linewidth=1.6)
            if best["settings"][name] == value:
                ax.plot(place, best["scores"][by], "o", markerfacecolor="none", color="0.1", markersize=9)
            ticks.append(place)
            labels.append(f"{value:.3g}" if isinstance(value, float) else str(value))
            place += 1.0
        ax.text((first + place - 1) / 2, 1.01, name, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
        place += 0.8
    ax.set_xticks(ticks, labels, rotation=60, ha="right", fontsize=8)
    if values[np.isfinite(values)].min() > 0 and np.nanmax(values) > 20 * np.nanmin(values):
        ax.set_yscale("log")
    lost = int((~np.isfinite(values)).sum())
    ax.set(ylabel=by.replace("_", " ") + " on the validation rows")
    title = f"{len(values)} settings" + (f", {lost} diverged" if lost else "") + "; bars: medians, rings: the best"
    ax.set_title(title, pad=22, fontsize=10)
    return ax
