"""Which weights matter: signal-to-noise ratios with the cuts of pruning, and the weights before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plausible.analysis import metrics, pruning
from plausible.apps.plots.base import axes_of
from plausible.core.networks import Where
from plausible.core.weights import Weights
from plausible.posteriors.base import Posterior
from plausible.posteriors.pruning import check_fraction, choose_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CUTS = (0.25, 0.5, 0.75, 0.95)


def snr(
    posterior: Posterior, cuts: Sequence[float] = CUTS, bins: int | None = None, *, where: Where = None, ax: Axes | None = None
) -> Axes:
    """Density of 20·log₁₀(|μ|/σ) over the weights, with the cuts below which a share of them lies.

    Two hills, the lower one of weights that say nothing, are what makes pruning cheap (Blundell et al. 2015, Fig. 4). `where` as
    in `posterior.prune`. Ratios near 0 have a long tail in decibels; how many weights lie left of the axis is written below it.
    """
    values = _decibels(posterior, where)
    low, high = _ends(values)
    heights, edges = np.histogram(values, _bins(bins, values), (low, high))
    ax = axes_of(ax)
    ax.stairs(heights / (len(values) * np.diff(edges)), edges, fill=True, color="C0", alpha=0.6)
    ax.set(xlim=(low, high), xlabel=_decibel_label(values, low), ylabel="density")
    ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # room for what the cuts are called
    for step, (cut, place) in enumerate(_cuts(values, cuts, low, high).items()):
        ax.axvline(place, color="0.35", linestyle=(0, (4, 3)), linewidth=1)
        _name(ax, cut, place, 0.97 - 0.06 * step, "top")
    return ax


def snr_cdf(posterior: Posterior, cuts: Sequence[float] = CUTS, *, where: Where = None, ax: Axes | None = None) -> Axes:
    """Share of weights below each signal-to-noise ratio in decibels, with the cuts marked; arguments as in `plots.snr`."""
    values = np.sort(_decibels(posterior, where))
    low, high = _ends(values)
    levels = np.linspace(low, high, 400)
    ax = axes_of(ax)
    ax.plot(levels, np.searchsorted(values, levels, side="right") / len(values), color="C0")
    ax.set(xlim=(low, high), ylim=(0, 1.1), xlabel=_decibel_label(values, low), ylabel="share of weights below")
    for cut, place in _cuts(values, cuts, low, high).items():
        ax.plot([place, place, low], [0, cut, cut], color="0.35", linestyle=(0, (4, 3)), linewidth=1)
        _name(ax, cut, place, cut / 1.1, "bottom")
    return ax


def weight_histogram(
    posteriors: Posterior | Mapping[str, Posterior],
    bins: int | None = None,
    *,
    where: Where = None,
    draws: int = 1,
    seed: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Densities of the weights in `draws` draws, of one posterior or of several by name (Blundell et al. 2015, Fig. 3).

    The axis goes from the 0.1 % to the 99.9 % quantile of the widest. `where` as in `posterior.prune`.
    """
    named = {"": posteriors} if isinstance(posteriors, Posterior) else dict(posteriors)
    if not named:
        raise ValueError("posteriors is empty: there is nothing to draw")
    values = {label: _flat(posterior.weights(draws, seed), posterior, where) for label, posterior in named.items()}
    edges = _edges(list(values.values()), bins)
    ax = axes_of(ax)
    for number, (label, weights) in enumerate(values.items()):
        heights = np.histogram(weights, edges)[0] / (len(weights) * np.diff(edges))
        ax.stairs(heights, edges, color=f"C{number}", linewidth=1.4, label=label or None)
        ax.stairs(heights, edges, color=f"C{number}", fill=True, alpha=0.12)
    ax.set(xlim=(edges[0], edges[-1]), ylim=(0, None), xlabel="weight", ylabel="density")
    if any(values):
        ax.legend()
    return ax


def pruned_weights(
    before: Posterior, after: Posterior, bins: int | None = None, *, where: Where = None, ax: Axes | None = None
) -> Axes:
    """How many weights have which mean, before pruning and of those that are left; a pruned `after` of the same network.

    By magnitude the middle is cut out; by signal-to-noise ratio small weights that are certain stay. Counts are on a log scale, as
    few may be left. `where` as in `prune`.
    """
    masks, means = after.masks, pruning.means(before)
    if not masks or any(name not in means or means[name].shape != mask.shape for name, mask in masks.items()):
        raise ValueError("after must be before.prune(…): its masks do not fit the weights of before")
    whole = _flat(means, before, where)
    kept = _flat({n: masks.get(n, torch.ones_like(m)) for n, m in means.items()}, before, where).astype(bool)
    edges = _edges([whole], bins)
    ax = axes_of(ax)
    ax.hist(whole, bins=edges.tolist(), color="0.6", alpha=0.6, label=f"all {len(whole):,} weights")
    ax.hist(whole[kept], bins=edges.tolist(), color="C0", alpha=0.8, label=f"{int(kept.sum()):,} left")
    ax.set(xlim=(edges[0], edges[-1]), xlabel="mean of the weight", ylabel="weights", yscale="log")
    ax.set_ylim(bottom=0.7)  # a bin with one weight is seen
    ax.legend()
    return ax


def _bins(bins: int | None, values: np.ndarray) -> int:
    """As many as asked for, or about twice the root of the number of values, from 10 to 100."""
    return int(np.clip(2 * np.sqrt(len(values)), 10, 100)) if bins is None else metrics.inputs.whole("bins", bins, 1)


def _edges(values: Sequence[np.ndarray], bins: int | None) -> np.ndarray:
    """Equal bins over the 0.1 % to 99.9 % quantiles of the widest; over all of less than a thousand."""
    low = min(np.quantile(each, 0.001, method="lower") for each in values)
    high = max(np.quantile(each, 0.999, method="higher") for each in values)
    return np.histogram_bin_edges(values[0], _bins(bins, values[0]), (low, high))


def _decibels(posterior: Posterior, where: Where) -> np.ndarray:
    """20·log₁₀(|μ|/σ) of all weights, [P]; −∞ for those without signal."""
    ratios = pruning.scores(posterior, "snr", where)
    values = torch.cat([ratio.flatten() for ratio in ratios.values()]).cpu().numpy()
    with np.errstate(divide="ignore"):
        decibels = 20 * np.log10(values)
    if not np.isfinite(decibels).any():
        raise ValueError("posterior has no weight with a finite signal-to-noise ratio: all are pruned, or none is random")
    return decibels


def _ends(values: np.ndarray) -> tuple[float, float]:
    """The axis: to the largest, from 1.5 times the distance of the quartiles below the lower one, as box plots have it."""
    shown = values[np.isfinite(values)]
    first, third = np.quantile(shown, (0.25, 0.75))
    low, high = float(max(shown.min(), first - 1.5 * (third - first))), float(shown.max())
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _decibel_label(values: np.ndarray, low: float) -> str:
    left = float((values < low).mean())
    return "signal-to-noise ratio (dB)" + (f"; {100 * left:.1f} % lie further left" if left >= 0.001 else "")


def _cuts(values: np.ndarray, cuts: Sequence[float], low: float, high: float) -> dict[float, float]:
    """The ratio below which a share of the weights lies, for each share whose ratio is on the axis."""
    for cut in cuts:
        check_fraction("cuts", cut)
    places = {cut: float(np.quantile(values, cut, method="inverted_cdf")) for cut in cuts}
    return {cut: place for cut, place in places.items() if low <= place <= high}


def _name(ax: Axes, cut: float, place: float, height: float, side: str) -> None:
    """`75 %` beside the line of a cut."""
    where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (-3, 1), "textcoords": "offset points"}
    box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}
    ax.annotate(f"{100 * cut:.4g} %", (place, height), fontsize=8, color="0.25", ha="right", va=side, bbox=box, **where)


def _flat(weights: Weights, posterior: Posterior, where: Where) -> np.ndarray:
    """All numbers of the weights that `where` selects, [P]."""
    names = choose_weights(posterior, where)
    return torch.cat([weights[name].detach().cpu().double().flatten() for name in names]).numpy()
