"""How a posterior came about: terms over epochs, draws over a chain, ranks of chains, effective sample sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plausible.apps.plots.base import DASHED, axes_of, chains_of, chosen_quantity
from plausible.apps.report.statistics import rank_shares
from plausible.blocks.chains import convergence as diagnostics
from plausible.posteriors.base import Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def training_trace(
    history: Posterior | Mapping[str, Sequence[float]], term: str | None = None, *, ax: Axes | None = None
) -> Axes:
    """The mean of a logged term over each epoch; `history` is a posterior or its `history`, `term` the first by default."""
    known = history.history if isinstance(history, Posterior) else history
    if not isinstance(known, Mapping):
        raise TypeError(f"history must be a posterior or a mapping from terms to values, got {type(history).__name__}")
    if not known:
        raise ValueError("history is empty: the method logged nothing")
    term = next(iter(known)) if term is None else term
    if term not in known:
        raise ValueError(f"term={term!r} was not logged; there are {', '.join(map(repr, known))}")
    ax = axes_of(ax)
    ax.plot(np.arange(1, len(known[term]) + 1), known[term], color="C0")
    ax.set(xlabel="epoch", ylabel=term.replace("_", " "))
    return ax


def chain_trace(draws: Any, x: Any = None, quantity: int = 0, *, ax: Axes | None = None) -> Axes:
    """One quantity over the draws of each chain; they should look alike and wander around one level.

    draws: an array [chains, draws] or [chains, draws, quantities], or a posterior of stored draws with inputs `x`, whose
    quantities are the function values f(x), outputs last.
    """
    values = chosen_quantity(chains_of(draws, x), quantity)
    ax = axes_of(ax)
    for number, chain in enumerate(values, start=1):
        ax.plot(np.arange(1, len(chain) + 1), chain, linewidth=0.8, label=f"chain {number}")
    ax.set(xlabel="kept draw", ylabel="f(x)" if isinstance(draws, Posterior) else "value")
    if 1 < len(values) <= 10:
        ax.legend()
    return ax


def rank_histogram(draws: Any, x: Any = None, bins: int = 20, *, ax: Axes | None = None) -> Axes:
    """Ranks of each chain's draws among those of all chains, all quantities together: flat at 1 if chains agree.

    `draws` and `x` as in `chain_trace` (Vehtari et al. 2021).
    """
    shares = rank_shares(chains_of(draws, x), bins)
    ax = axes_of(ax)
    for number, chain in enumerate(shares, start=1):
        ax.stairs(chain, np.linspace(0, 1, len(chain) + 1), label=f"chain {number}")
    ax.axhline(1, **DASHED)
    ax.set(xlim=(0, 1), ylim=(0, None), xlabel="rank among all draws (share)", ylabel="density")
    if len(shares) <= 10:
        ax.legend()
    return ax


def ess_growth(draws: Any, x: Any = None, points: int = 10, *, ax: Axes | None = None) -> Axes:
    """The least bulk and tail effective sample size over quantities of the first 1/k, 2/k, … of the draws.

    It should grow in proportion to the draws; a curve that levels off has met something it did not know (Vehtari et al.
    2021). `draws` and `x` as in `chain_trace`; needs at least 8 draws in each chain.
    """
    values = torch.from_numpy(chains_of(draws, x))
    chains, count = values.shape[:2]
    if count < 8:
        raise ValueError(f"draws has {count} draws in each chain; effective sample sizes need at least 8")
    sizes = np.unique(np.linspace(max(8, count // points), count, points).astype(int))
    if not bool((values.amax((0, 1)) > values.amin((0, 1))).any()):
        raise ValueError("draws does not vary: there is no effective sample size")
    parts = [diagnostics.summarise(values[:, :size]) for size in sizes.tolist()]
    ax = axes_of(ax)
    for name, words in (("ess_bulk", "bulk"), ("ess_tail", "tails")):
        ax.plot(chains * sizes, [part.get(name, np.nan) for part in parts], "o-", markersize=3, label=words)
    ax.axhline(100 * chains, label="100 for each chain", **DASHED)
    ax.set(xlim=(0, None), ylim=(0, None), xlabel="draws", ylabel="effective draws")
    ax.legend()
    return ax
