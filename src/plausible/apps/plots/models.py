"""Does the evidence prefer the models that generalise? One point for each model."""

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
        raise ValueError(
            f"log_evidence and log_likelihood must name the same models, got {', '.join(names)} and {', '.join(log_likelihood)}"
        )
    if len(names) < 2:
        raise ValueError(f"a figure of evidence needs at least two models, got {len(names)}")
    several = {
        name: [np.atleast_1d(np.asarray(v[name], dtype=float)) for v in (log_evidence, log_likelihood)] for name in names
    }
    for name, pair in several.items():
        if not all(np.isfinite(value).all() and value.size for value in pair):
            raise ValueError(f"{name} has values that are not finite, or none")
    ax = axes_of(ax)
    kinds = list(dict.fromkeys((groups or {}).get(name, "") for name in names))
    means = {name: (first.mean(), second.mean()) for name, (first, second) in several.items()}
    for name, (first, second) in several.items():
        kind = (groups or {}).get(name, "")
        colour = f"C{kinds.index(kind) % 10}"
        if len(first) == len(second) > 1:
            ax.plot(first, second, ".", color=colour, alpha=0.35, markersize=4)
        lead = name == next(n for n in names if (groups or {}).get(n, "") == kind)
        ax.plot(*means[name], "o", color=colour, markersize=6, label=kind if kind and lead else None)
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
    places = [ranks(np.asarray(values, dtype=float)) for values in (first, second)]
    if any(np.ptp(place) == 0 for place in places):
        return float("nan")
    return float(np.corrcoef(places[0], places[1])[0, 1])
