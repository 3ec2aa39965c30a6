"""What uncertainty is good for: leaving out uncertain cases, telling strange inputs apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.analysis.metrics.inputs import probability_kind
from plausible.apps.plots.base import axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def risk_coverage(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None, ax: Axes | None = None) -> Axes:
    """Risk among the most certain examples against their share, beside the risk of answering all (Geifman & El-Yaniv 2017).

    Arguments as in `metrics.risk_coverage`; the area under the curve is in the legend.
    """
    found = metrics.risk_coverage(predictive, y, score, mask=mask)
    ax = axes_of(ax)
    ax.axhline(float(found.risk[-1]), color="0.5", linestyle=(0, (4, 3)), linewidth=1, label="in random order")
    ax.plot(found.coverage, found.risk, color="C0", label=f"by uncertainty, AURC {float(found.risk.mean()):.3g}")
    what = "share wrong" if probability_kind(predictive) else "mean squared error"
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
