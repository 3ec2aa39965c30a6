"""What uncertainty is good for: leaving out uncertain cases, telling strange inputs apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.analysis.metrics.inputs import probability_kind
from plausible.apps.plots.base import DASHED, axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def risk_coverage(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None, ax: Axes | None = None) -> Axes:
    """Risk among the most certain examples against their share, beside the risk of answering all (Geifman & El-Yaniv 2017).

    Arguments as in `metrics.risk_coverage`; the area under the curve is in the legend.
    """
    curve = metrics.risk_coverage(predictive, y, score, mask=mask)
    what = "share wrong" if probability_kind(predictive) else "mean squared error"
    label = f"by uncertainty, AURC {float(curve.risk.mean()):.3g}"
    return draw_risk(axes_of(ax), curve.coverage.numpy(), curve.risk.numpy(), what, label)


def draw_risk(ax: Axes, coverage: np.ndarray, risk: np.ndarray, what: str, label: str = "by uncertainty") -> Axes:
    ax.axhline(float(risk[-1]), label="in random order", **DASHED)
    ax.plot(coverage, risk, color="C0", label=label)
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="share of examples answered", ylabel=what)
    ax.legend()
    return ax


def ood_histogram(inside: Any, outside: Any, score: str = "entropy", bins: int = 30, *, ax: Axes | None = None) -> Axes:
    """Densities of an uncertainty score for inputs of both kinds, with the AUROC of telling them apart by it.

    Arguments as in `metrics.ood_auroc`, scores as in `metrics.uncertainty_score`.
    """
    auroc = metrics.ood_auroc(inside, outside, score)
    values = [metrics.uncertainty_score(part, score).reshape(len(part), -1).mean(-1).numpy() for part in (inside, outside)]
    edges = np.histogram_bin_edges(np.concatenate(values), metrics.inputs.whole("bins", bins, 1))
    ax = axes_of(ax)
    for part, colour, words in zip(values, ("C0", "C1"), ("inside", "outside")):
        ax.hist(part, bins=edges.tolist(), density=True, color=colour, alpha=0.5, label=words)
    ax.set(xlabel=score.replace("_", " "), ylabel="density", title=f"AUROC {auroc:.3f}")
    ax.legend()
    return ax


def draw_entropies(ax: Axes, rows: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Axes:
    """For each name the entropies of right answers (bar: middle half, line: middle 90 %) and every wrong answer as a dot.

    rows: name → (entropies, which answers are wrong).
    """
    for row, (values, wrong) in enumerate(rows.values()):
        if (~wrong).any():
            low, first, middle, third, high = np.quantile(values[~wrong], [0.05, 0.25, 0.5, 0.75, 0.95])
            ax.plot([low, high], [row - 0.17] * 2, color="C0", linewidth=1.5)
            ax.plot([first, third], [row - 0.17] * 2, color="C0", linewidth=8, label=None if row else "right answers")
            ax.plot(middle, row - 0.17, marker="|", markersize=12, color="0")
        # three heights in turn, so that dots at one place can be told apart
        height = row + 0.17 + 0.09 * np.resize([0, 1, -1], wrong.sum())
        ax.plot(values[wrong], height, "o", markersize=4, color="C3", alpha=0.7, label=None if row else "wrong answers")
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel="entropy of the prediction (nats)")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.grid(axis="y", visible=False)
    ax.legend()
    return ax
