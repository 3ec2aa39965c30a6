"""The examples about which predictions are least or most certain, as pictures or as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.analysis.metrics.inputs import chosen, probability_kind, whole
from plausible.apps.plots.base import axes_of
from plausible.apps.report.direct import as_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ranked(predictive: Any, count: int, certain: str) -> np.ndarray:
    """The indices of the `count` "least" or "most" certain examples, by entropy, or by variance for numbers."""
    chosen("certain", certain, ("least", "most"))
    score = metrics.uncertainty_score(predictive, "entropy" if probability_kind(predictive) else "variance")
    order = np.argsort(score.reshape(len(score), -1).mean(-1).numpy(), kind="stable")
    order = order[::-1] if certain == "least" else order
    return order[: whole("count", count, 1)]


def example_images(
    images: Any,
    predictive: Any,
    y: Any = None,
    count: int = 6,
    *,
    certain: str = "least",
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The least (or most) certain pictures side by side, each with its answer; wrong ones are said where `y` is given.

    images: [N, H, W], [N, 3, H, W] or [N, H, W, 3], the inputs of `predictive`, which has class probabilities.
    """
    probs = metrics.inputs.class_probabilities(predictive).numpy()
    pictures = as_pictures(images, len(probs))
    ax = axes_of(ax)
    ax.set_axis_off()
    for place, index in enumerate(ranked(predictive, count, certain).tolist()):
        best = int(probs[index].argmax())
        words, colour = f"{best if classes is None else classes[best]}\n{probs[index, best]:.0%}", "C0"
        if y is not None and int(y[index]) != best:
            truth = int(y[index])
            words, colour = f"{words}\nis {truth if classes is None else classes[truth]}", "C3"
        left = 1.15 * place
        ax.imshow(pictures[index], cmap="gray", vmin=0, vmax=1, extent=(left, left + 1, 0, 1), interpolation="nearest")
        ax.text(left + 0.5, -0.06, words, ha="center", va="top", color=colour)
    ax.set(xlim=(-0.05, 1.15 * min(count, len(probs)) - 0.1), ylim=(-0.75, 1.05), title=f"{certain} certain", aspect="equal")
    return ax


def example_rows(
    columns: Mapping[str, Sequence[Any]],
    predictive: Any,
    y: Any = None,
    count: int = 6,
    *,
    certain: str = "least",
    classes: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The least (or most) certain rows of a table [N] with their predictions, drawn as a table; one target.

    columns: name → N cells, to be shown beside the answer. Numbers get mean ± standard deviation, classes the answer and
    its probability.
    """
    picked = ranked(predictive, count, certain).tolist()
    if probability_kind(predictive):
        probs = metrics.inputs.class_probabilities(predictive).numpy()  # [N, C], or with an axis of one label between
        if probs.size != len(predictive) * probs.shape[-1]:
            raise ValueError(f"predictive has {probs.shape[1]} targets; a table of examples shows one")
        probs = probs.reshape(len(predictive), -1)
        best = probs.argmax(-1)
        said = [f"{best[i] if classes is None else classes[int(best[i])]} ({probs[i, best[i]]:.0%})" for i in picked]
        truth = [] if y is None else [str(int(y[i]) if classes is None else classes[int(y[i])]) for i in picked]
    else:
        mean, std = (part.reshape(len(predictive), -1).cpu().numpy() for part in (predictive.mean, predictive.std))
        if mean.shape[1] != 1:
            raise ValueError(f"predictive has {mean.shape[1]} targets; a table of examples shows one")
        said = [f"{mean[i, 0]:.4g} ± {std[i, 0]:.2g}" for i in picked]
        truth = [] if y is None else [f"{float(np.asarray(y[i]).reshape(-1)[0]):.4g}" for i in picked]
    shown = [("predicted", said), *([("truth", truth)] if truth else [])]
    shown += [(str(name), [str(cells[index]) for index in picked]) for name, cells in columns.items()]
    heads, body = [head for head, _ in shown], list(zip(*(cells for _, cells in shown)))
    ax = axes_of(ax)
    ax.set_axis_off()
    ax.table(body, colLabels=heads, rowLabels=list(map(str, picked)), loc="center")
    ax.set_title(f"{certain} certain")
    return ax
