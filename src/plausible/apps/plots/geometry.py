"""Planes and curves through the space of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from plausible.analysis.geometry import Curve, Surface
from plausible.apps.plots.base import axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = 14


def surface(values: Surface, *, show: Literal["loss", "posterior"] = "loss", ax: Axes | None = None) -> Axes:
    """The negative log-likelihood of a row ("loss"), or the negative log joint over N, on a plane, with the draws on it.

    Levels lie closer together near the lowest value, and what is far above it has one colour.
    """
    if show not in ("loss", "posterior"):
        raise ValueError(f"show must be 'loss' or 'posterior', got {show!r}")
    ax = axes_of(ax)
    height = -(values.log_likelihood if show == "loss" else values.log_joint).numpy()
    low = float(np.min(height))
    reach = max(float(np.quantile(height, 0.8)) - low, 1e-9)
    levels = low + reach * np.linspace(0, 1, LEVELS) ** 2
    drawn = ax.contourf(values.x.numpy(), values.y.numpy(), height, levels=levels, cmap="viridis_r", extend="max")
    assert ax.figure is not None
    words = "negative log-likelihood of a row" if show == "loss" else "negative log joint over N"
    ax.figure.colorbar(drawn, ax=ax, label=f"{words}, nats", format="%.3g")
    for k, (right, up) in enumerate(values.points.tolist()):
        ax.plot(right, up, "o", color="white", markeredgecolor="0.1", markersize=7)
        if len(values.points) > 1:
            ax.annotate(str(k + 1), (right, up), xytext=(6, 5), textcoords="offset points", color="0.1", fontweight="bold")
    ax.set(xlabel="along the first direction", ylabel="along the second")
    return ax


def curve(values: Curve, *, show: Literal["loss", "posterior"] = "loss", ax: Axes | None = None) -> Axes:
    """The negative log-likelihood of a row ("loss"), or the negative log joint over N, on a curve and on the straight line."""
    if show not in ("loss", "posterior"):
        raise ValueError(f"show must be 'loss' or 'posterior', got {show!r}")
    ax = axes_of(ax)
    loss = show == "loss"
    curved, straight = (
        (values.log_likelihood, values.straight_log_likelihood) if loss else (values.log_joint, values.straight_log_joint)
    )
    ax.plot(values.t.numpy(), -straight.numpy(), "--", color="C3", label="straight line")
    ax.plot(
        values.t.numpy(), -curved.numpy(), color="C0", label="Bézier curve" if values.kind == "bezier" else "polygonal chain"
    )
    ax.plot([0, 1], [-float(curved[0]), -float(curved[-1])], "o", color="white", markeredgecolor="0.1", markersize=7)
    ax.set(xlabel="t", ylabel=f"{'negative log-likelihood of a row' if loss else 'negative log joint over N'}, nats")
    ax.grid(alpha=0.3)
    ax.legend(loc="best")
    return ax
