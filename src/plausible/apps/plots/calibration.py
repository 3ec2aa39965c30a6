"""Whether stated probabilities are kept: reliability, probability integral transform, quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.analysis.metrics.calibration import LEVELS, quantile_levels
from plausible.apps.plots.base import DASHED, axes_of
from plausible.apps.report.statistics import count_range, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(
    predictive: Any, y: Any, bins: int = 10, binning: str = "width", *, mask: Any = None, ax: Axes | None = None
) -> Axes:
    """Share of right answers against mean confidence in each bin, with 90 % Wilson intervals: the reliability diagram.

    Arguments as in `metrics.reliability`; points below the diagonal are overconfident. The calibration error is in the legend.
    """
    points = metrics.reliability(predictive, y, bins, binning, mask=mask)
    filled = (points.counts > 0).numpy()
    said, share, counts = (part.numpy()[filled] for part in points)
    low, high = np.array([wilson(float(s), int(n)) for s, n in zip(share, counts)]).T
    error = metrics.ece(predictive, y, bins, binning, mask=mask)
    ax = axes_of(ax)
    ax.plot([0, 1], [0, 1], label="as stated", **DASHED)
    ax.vlines(said, low, high, color="C0", alpha=0.4, linewidth=2, label="90 % interval")
    ax.plot(said, share, "o", color="C0", label=f"ECE {error:.3f}")
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="stated probability of the answer", ylabel="share right")
    ax.legend()
    return ax


def pit_histogram(predictive: Any, y: Any, bins: int = 10, *, seed: int = 0, mask: Any = None, ax: Axes | None = None) -> Axes:
    """Density of u = F(y) in equal bins, with the range of 99 % of right predictions: flat if calibrated.

    A ∪ shape is overconfident, a ∩ shape underconfident, a slope biased (Gneiting et al. 2007). Arguments as in `metrics.pit`.
    """
    return draw_pit(axes_of(ax), _observed_pit(predictive, y, seed, mask), metrics.inputs.whole("bins", bins, 2))


def draw_pit(ax: Axes, values: np.ndarray, bins: int) -> Axes:
    low, high = (bound / len(values) * bins for bound in count_range(len(values), 1 / bins))
    ax.axhspan(low, high, color="0.5", alpha=0.25, linewidth=0, label="99 % range of chance")
    ax.hist(values, bins=bins, range=(0, 1), density=True, color="C0", alpha=0.6, edgecolor="C0", label="held out")
    ax.axhline(1, label="calibrated", **DASHED)
    ax.set(xlim=(0, 1), xlabel="F(y)", ylabel="density")
    ax.legend()
    return ax


def quantile_calibration(
    predictive: Any, y: Any, levels: int | Sequence[float] = LEVELS, *, seed: int = 0, mask: Any = None, ax: Axes | None = None
) -> Axes:
    """Share of targets below each predicted quantile against its level, with the pointwise 99 % range of chance.

    Arguments as in `metrics.quantile_calibration`, which is in the legend (Kuleshov et al. 2018).
    """
    q = quantile_levels(levels).numpy()
    error = metrics.quantile_calibration(predictive, y, levels, seed=seed, mask=mask)
    return draw_quantiles(axes_of(ax), _observed_pit(predictive, y, seed, mask), q, f"error {error:.3f}")


def draw_quantiles(ax: Axes, values: np.ndarray, levels: np.ndarray, label: str) -> Axes:
    # of no or all targets chance says nothing, so the ends of [0, 1] have ranges without width
    ranges = [(level * len(values),) * 2 if level in (0, 1) else count_range(len(values), float(level)) for level in levels]
    low, high = np.array(ranges).T / len(values)
    ax.fill_between(levels, low, high, color="0.5", alpha=0.25, linewidth=0, label="99 % range of chance")
    ax.plot([0, 1], [0, 1], label="calibrated", **DASHED)
    shares = np.searchsorted(np.sort(values), levels, side="right") / len(values)
    ax.plot(levels, shares, "o-", color="C0", markersize=3, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted quantile", ylabel="share of targets below")
    ax.legend()
    return ax


def _observed_pit(predictive: Any, y: Any, seed: int, mask: Any) -> np.ndarray:
    """F(y) of the targets that were observed, [M]."""
    values = metrics.pit(predictive, y, seed=seed, mask=mask)
    return values[~values.isnan()].numpy()
