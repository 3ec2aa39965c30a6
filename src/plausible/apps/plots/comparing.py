"""Models, settings and methods beside one another: evidence against prediction, the scores of a sweep, of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis.evidence import Comparison
from plausible.apps.plots.base import axes_of
from plausible.apps.report.statistics import ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def evidence(
    log_evidence: Comparison | Mapping[str, Any],
    log_likelihood: Mapping[str, Any],
    *,
    groups: Mapping[str, str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Evidence against the mean log-likelihood of held-out data, a labelled point for each model; the title has Spearman's ρ.

    log_evidence: a comparison, or log p(D | M) by name. log_likelihood: held-out, by the same names. Several numbers for a model,
        from different starts, are small dots around their mean.
    groups: name → what it belongs to (its depth, say), by colour.

    The model with the most evidence is ringed, the one that predicts best has a square around it. Models far below all others
    do not set the axes: they are named in the corner.
    """
    if isinstance(log_evidence, Comparison):
        log_evidence = {row.name: row.log_evidence for row in log_evidence.rows}
    names = list(log_evidence)
    if set(names) != set(log_likelihood):
        both = f"{', '.join(names)} and {', '.join(log_likelihood)}"
        raise ValueError(f"log_evidence and log_likelihood must name the same models, got {both}")
    if len(names) < 2:
        raise ValueError(f"a figure of evidence needs at least two models, got {len(names)}")
    several = {n: [np.atleast_1d(np.asarray(v[n], dtype=float)) for v in (log_evidence, log_likelihood)] for n in names}
    for name, pair in several.items():
        if not all(np.isfinite(value).all() and value.size for value in pair):
            raise ValueError(f"{name} has values that are not finite, or none")
    ax = axes_of(ax)
    colours: dict[str, str] = {}
    means: dict[str, tuple[float, float]] = {}
    for name, (first, second) in several.items():
        kind = (groups or {}).get(name, "")
        label = kind if kind and kind not in colours else None
        colour = colours.setdefault(kind, f"C{len(colours) % 10}")
        means[name] = first.mean(), second.mean()
        if len(first) == len(second) > 1:
            ax.plot(first, second, ".", color=colour, alpha=0.35, markersize=4)
        ax.plot(*means[name], "o", color=colour, markersize=6, label=label)
        ax.annotate(name, means[name], xytext=(5, 4), textcoords="offset points", fontsize=8, annotation_clip=True)
    for place, marker, words in ((0, "o", "most evidence"), (1, "s", "best prediction")):
        top = max(names, key=lambda n: means[n][place])
        ax.plot(*means[top], marker, markerfacecolor="none", color="0.1", markersize=10 + 2 * place, label=words)
    _limits(ax, means)
    ax.set(xlabel="log evidence (nats)", ylabel="held-out log-likelihood (nats per example)")
    rho = rank_correlation(*zip(*means.values()))
    ax.set_title(f"{len(names)} models, rank correlation {rho:.2f}".replace("-", "−"), fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return ax


def _limits(ax: Axes, means: Mapping[str, tuple[float, float]]) -> None:
    """Axes that hold all models but those more than three times the interquartile range below the lower quartile."""
    values = np.array(list(means.values()))
    low, high = np.quantile(values, 0.25, axis=0), np.quantile(values, 0.75, axis=0)
    inside = (values >= low - 3 * (high - low)).all(1)
    outside = [name for name, kept in zip(means, inside) if not kept]
    if not outside or inside.sum() < 2:
        return
    least, most = values[inside].min(0), values[inside].max(0)
    room = 0.08 * np.maximum(most - least, 1e-9)
    ax.set_xlim(least[0] - room[0], most[0] + 2 * room[0])
    ax.set_ylim(least[1] - room[1], most[1] + room[1])
    ax.text(0.02, 0.02, f"far below: {', '.join(outside)}", transform=ax.transAxes, fontsize=8, color="0.35")


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's ρ: the correlation of ranks, ties sharing theirs; NaN where one of them does not vary."""
    one, two = (ranks(np.asarray(values, dtype=float)) for values in (first, second))
    return float(np.corrcoef(one, two)[0, 1]) if np.ptp(one) and np.ptp(two) else float("nan")


def sweep(result: Any, by: str | None = None, *, ax: Axes | None = None) -> Axes:
    """The score of every setting of a `plausible.sweep`, one column of dots for each value of each setting, medians marked.

    A setting that matters has columns at different heights; the best combination is ringed in each group. Those that diverged are
    left out, and counted in the title.
    """
    by = by or result.measure
    values = np.array([np.nan if row["scores"].get(by) is None else row["scores"][by] for row in result.rows])
    if not np.isfinite(values).any():
        raise ValueError(f"no setting has a finite {by}: there is nothing to draw")
    best = result.best(by)
    ax = axes_of(ax)
    stream, place = np.random.default_rng(0), 0.0
    ticks, labels = [], []
    names = [name for name in best["settings"] if len({repr(row["settings"][name]) for row in result.rows}) > 1]
    for number, name in enumerate(names):
        first = place
        for value in dict.fromkeys(row["settings"][name] for row in result.rows):
            these = np.array([row["settings"][name] == value for row in result.rows]) & np.isfinite(values)
            x = place + 0.3 * (stream.random(int(these.sum())) - 0.5)
            ax.plot(x, values[these], ".", color=f"C{number % 10}", alpha=0.45, markersize=4)
            if these.any():
                ax.plot([place - 0.3, place + 0.3], [np.median(values[these])] * 2, color="0.15", linewidth=1.6)
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


def draw_scores(ax: Axes, rows: Sequence[tuple[str, float, float, bool]], xlabel: str) -> Axes:
    """Scores (name, value, standard error, whether it is published) as dots with bars of two standard errors."""
    for row, (_, value, error, published) in enumerate(rows):
        colour, face = ("0.5", "none") if published else ("C0", "C0")
        ax.errorbar(value, row, xerr=2 * error, fmt="o", color=colour, markerfacecolor=face, markersize=6)
    ax.set(xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
    ax.set_yticks(range(len(rows)), [name if len(name) < 34 else f"{name[:32]}…" for name, *_ in rows])
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", visible=True)
    return ax
