"""Predictions beside the truth: bands over an input, calibration, what uncertainty is good for, and single examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.analysis import metrics
from plausible.analysis.metrics.calibration import LEVELS, quantile_levels
from plausible.analysis.metrics.inputs import chosen, probability_kind, whole
from plausible.apps.plots.base import DASHED, axes_of, column
from plausible.apps.report.collecting import as_pictures
from plausible.apps.report.statistics import count_range, wilson
from plausible.posteriors.drawing import plot
from plausible.posteriors.predictive import Predictive

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def predictive_band(
    x: Any, predictive: Predictive, data: tuple[Any, Any] | None = None, *, output: int = 0, ax: Axes | None = None
) -> Axes:
    """Mean, 50 % and 90 % bands of p(y | x) over one input [N] or [N, 1], in its order; `data` (x, y) as points.

    `predictive` is that of the same inputs, `posterior.predict(x)`; `output` picks one of several targets.
    """
    ax = plot(predictive, x, None, output, ax)
    if data is not None:
        ax.plot(column("data x", data[0], 0), column("data y", data[1], output), "o", color="C1", markersize=3, label="data")
        ax.legend()
    return ax


def draw_uncertainties(ax: Axes, grid: np.ndarray, epistemic: np.ndarray, aleatoric: np.ndarray) -> Axes:
    """Standard deviations of disagreement and of noise over one input."""
    ax.plot(grid, epistemic, color="C1", label="epistemic")
    ax.plot(grid, aleatoric, color="C0", label="noise (aleatoric)")
    ax.set(ylim=(0, 1.08 * float(max(epistemic.max(), aleatoric.max())) or 1.0))
    return ax


def predictions(predictive: Predictive, y: Any, level: float = 0.9, *, output: int = 0, ax: Axes | None = None) -> Axes:
    """Predicted mean with its equal-tailed interval against the truth; targets outside their interval in another colour."""
    truth = column("y", y, output)
    low, high = (column("predictive", bound, output) for bound in predictive.interval(level))
    mean = column("predictive", predictive.mean, output)
    if len(truth) != len(mean):
        raise ValueError(f"y has {len(truth)} targets, predictive has {len(mean)}")
    return draw_predictions(axes_of(ax), truth, mean, low, high, level)


def draw_predictions(ax: Axes, truth: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray, level: float) -> Axes:
    outside = (truth < low) | (truth > high)
    ends = [min(truth.min(), mean.min()), max(truth.max(), mean.max())]
    ax.plot(ends, ends, **DASHED)
    for rows, colour, words in ((~outside, "C0", "inside"), (outside, "C3", "outside")):
        ax.vlines(truth[rows], low[rows], high[rows], color=colour, alpha=0.3, linewidth=1)
        ax.plot(truth[rows], mean[rows], "o", color=colour, markersize=3, label=f"{words} ({rows.mean():.0%})")
    ax.set(xlabel="observed", ylabel=f"predicted mean, {level:.0%} interval")
    ax.legend()
    return ax


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
