"""How a posterior came about: terms over epochs, traces, ranks, autocorrelations, energies and effective sizes of chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from plausible.apps.plots.base import DASHED, axes_of, chains_of, chosen_quantity, named_chains
from plausible.apps.report.statistics import rank_shares, ranks
from plausible.blocks.chains import convergence
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
    parts = [convergence.summarise(values[:, :size]) for size in sizes.tolist()]
    ax = axes_of(ax)
    for name, words in (("ess_bulk", "bulk"), ("ess_tail", "tails")):
        ax.plot(chains * sizes, [part.get(name, np.nan) for part in parts], "o-", markersize=3, label=words)
    ax.axhline(100 * chains, label="100 for each chain", **DASHED)
    ax.set(xlim=(0, None), ylim=(0, None), xlabel="draws", ylabel="effective draws")
    ax.legend()
    return ax


LANES, CHAINS, DRAWS = 5, 10, 20_000
"""Quantities and chains that are drawn at most, and draws whose ranks are taken."""
REPEATS, LEVEL = 500, 0.95
"""Random orders of the draws from which bands are taken, and how often a band holds all curves of chains that agree."""


def trace(
    draws: Any, x: Any = None, names: Any = None, rows: int = LANES, *, divergences: bool = True, ax: Axes | None = None
) -> Axes:
    """Quantities over the draws, a lane for each of those that have converged least, a colour for each chain, R̂ at the end.

    draws: a posterior of stored draws, whose quantities are the function values at inputs `x` or, without them, its weights (those
        that match `names`, such as "0.*"); or an array [chains, draws] or [chains, draws, quantities].
    rows: how many lanes.
    divergences: mark draws whose transition diverged, where that is known.

    Chains should look alike and wander around one level. Lanes are scaled to the quantity's own range.
    """
    values, words = named_chains(draws, x, names)
    order, rhat = _worst_first(values)
    chosen = sorted(order[: max(1, rows)])
    ax = axes_of(ax)
    count = values.shape[1]
    for lane, place in enumerate(reversed(chosen)):
        drawn = values[:, :, place]
        low, high = float(drawn.min()), float(drawn.max())
        for number, chain in enumerate(drawn[:CHAINS]):
            scaled = (chain - low) / (high - low) if high > low else np.full(count, 0.5)
            label = f"chain {number + 1}" if lane == 0 and len(drawn) > 1 else None
            ax.plot(np.arange(1, count + 1), lane + 0.05 + 0.9 * scaled, color=f"C{number}", linewidth=0.6, label=label)
        said = f"R̂ {rhat[place]:.2f}" if np.isfinite(rhat[place]) else "R̂ –"
        ax.text(1.01, lane + 0.5, said, transform=ax.get_yaxis_transform(), va="center", fontsize=8)
    if divergences and "divergent" in (known := _statistics(draws)):
        at = np.flatnonzero(known["divergent"].amax(0).numpy() > 0) + 1
        if len(at):
            label = f"divergent ({int(known['divergent'].sum())})"
            ax.plot(at, np.full(len(at), -0.08), "|", color="0.2", markersize=6, label=label, clip_on=False)
    ax.set(xlabel="kept draw", xlim=(1, max(2, count)), ylim=(-0.15, len(chosen)))
    ax.set_yticks([lane + 0.5 for lane in range(len(chosen))], [words[place] for place in reversed(chosen)])
    ax.tick_params(axis="y", length=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, frameon=False, fontsize=8)
    return ax


def rank(
    draws: Any, x: Any = None, names: Any = None, quantity: int | None = None, *, seed: int = 0, ax: Axes | None = None
) -> Axes:
    """F_c(z) − z, the share of a chain's draws among the lowest z of all, less z: near 0 if chains agree, with a 95 % band.

    `draws`, `x`, `names` as in `trace`; `quantity` is one of them, that with the largest R̂ by default. The band holds all curves
    at once in 95 of 100 random orders of the draws (after Säilynoja, Bürkner and Vehtari 2022); draws that follow one another are
    not independent, so chains are thinned to their effective size first. A curve above 0 is a chain that keeps to low values.
    """
    values, words = named_chains(draws, x, names)
    if values.shape[0] < 2:
        raise ValueError("draws has one chain: ranks compare chains, so at least two are needed")
    order, rhat = _worst_first(values)
    place = order[0] if quantity is None else quantity
    drawn = chosen_quantity(values, place)
    size = float(convergence.ess_bulk(torch.from_numpy(np.ascontiguousarray(drawn))[..., None])[0])
    # The band is that of independent draws, so neighbours in a chain are thinned out first.
    step = max(1, round(drawn.size / size)) if np.isfinite(size) else 1
    drawn = drawn[:, :: max(min(step, max(1, drawn.shape[1] // 10)), -(-drawn.size // DRAWS))]
    chains, count = drawn.shape
    z = np.linspace(0, 1, min(200, chains * count) + 1)[1:-1]
    share = (ranks(drawn.ravel()).reshape(chains, count) - 0.5) / drawn.size
    curves = np.array([(chain[:, None] <= z).mean(0) for chain in share]) - z
    width = _band(chains, count, z, seed)
    ax = axes_of(ax)
    ax.fill_between(z, -width, width, color="0.85", linewidth=0, label=f"{100 * LEVEL:.0f} % band of chains that agree")
    for number, curve in enumerate(curves[:CHAINS], start=1):
        ax.step(z, curve, where="mid", linewidth=1, label=f"chain {number}")
    ax.axhline(0, **DASHED)
    said = f"R̂ {rhat[place]:.3f}" if np.isfinite(rhat[place]) else "R̂ not finite"
    ax.set_title(f"{words[place]}, {said}", fontsize=10)
    ax.set(xlim=(0, 1), xlabel="rank among all draws (share)", ylabel="share of the chain below, less expected")
    ax.legend(fontsize=8)
    return ax


def energy(draws: Any, *, bins: int = 40, ax: Axes | None = None) -> Axes:
    """Energies E around their mean, and their changes in a transition: the second should be about as wide as the first.

    draws: a posterior of a sampler with momenta, or energies [chains, draws]. Where changes are much narrower, momenta cannot carry
    a chain along the posterior's energies, and its tails are reached slowly; the legend has the E-BFMI of each chain, too small
    below 0.3 (Betancourt 2016).
    """
    if isinstance(draws, Posterior):
        known = _statistics(draws)
        if "energy" not in known:
            raise TypeError(f"a {type(draws).__name__} by {draws.method_name} has no energies of transitions")
        values, change = known["energy"].double().numpy(), known.get("energy_change")
    else:
        values, change = named_chains(draws)[0][:, :, 0], None
    if values.shape[1] < 4:
        raise ValueError(f"draws has {values.shape[1]} energies in each chain; at least 4 are needed")
    ax = draw_energies(axes_of(ax), values, None if change is None else change.double().numpy(), bins)
    for number, value in enumerate(convergence.ebfmi(torch.from_numpy(values), change).tolist()[:CHAINS], start=1):
        ax.plot([], [], " ", label=f"E-BFMI of chain {number}: {value:.2f}{' (low)' if value < 0.3 else ''}")
    ax.legend(fontsize=8)
    return ax


def draw_energies(ax: Axes, values: np.ndarray, change: np.ndarray | None, bins: int = 40) -> Axes:
    around = (values - values.mean(1, keepdims=True)).ravel()
    changes = (np.diff(values, axis=1) if change is None else change).ravel()
    ends = float(np.quantile(np.abs(np.concatenate([around, changes])), 0.998)) or 1.0
    for part, name in ((around, "E − its mean"), (changes, "change in a transition")):
        ax.hist(part, bins, range=(-ends, ends), density=True, histtype="stepfilled", alpha=0.5, label=name)
    ax.set(xlabel="energy (nats)", ylabel="density", xlim=(-ends, ends))
    return ax


def draw_convergence(ax: Axes, rhat: np.ndarray, ess: np.ndarray) -> Axes:
    """R̂ against the effective draws of each quantity."""
    top = max(1.06, float(rhat.max()))
    ax.axhline(1.01, label="1.01", **DASHED)
    ax.plot(ess, rhat, "o", markersize=4, label="function values")
    ax.set(xlim=(0, 1.05 * float(ess.max())), ylim=(0.99, top + 0.04 * (top - 0.99)), xlabel="effective draws", ylabel="R̂")
    ax.legend()
    return ax


def autocorrelation(
    draws: Any, x: Any = None, names: Any = None, quantity: int | None = None, lags: int = 100, *, ax: Axes | None = None
) -> Axes:
    """Correlation of draws with those t later in each chain; where it reaches 0, draws are as good as independent.

    `draws`, `x`, `names` as in `trace`; `quantity` is one of them, that with the fewest effective draws by default. The
    grey band is ±2/√n, what independent draws show.
    """
    values, words = named_chains(draws, x, names)
    if values.shape[1] < 4:
        raise ValueError(f"draws has {values.shape[1]} draws in each chain; autocorrelations need at least 4")
    sizes = convergence.ess_bulk(torch.from_numpy(values)).numpy()
    place = int(np.nanargmin(sizes)) if quantity is None and np.isfinite(sizes).any() else quantity or 0
    drawn = chosen_quantity(values, place)
    count = drawn.shape[1]
    centred = drawn - drawn.mean(1, keepdims=True)
    # Padded to twice its length, so that the ends of a chain do not meet in the circle of the transform.
    spectrum = np.fft.rfft(centred, 2 * count, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, : min(lags, count - 1) + 1]
    ax = axes_of(ax)
    band = 2 / np.sqrt(count)
    ax.axhspan(-band, band, color="0.9")
    for number, chain in enumerate(covariance[:CHAINS], start=1):
        if chain[0] > 0:
            ax.plot(np.arange(len(chain)), chain / chain[0], linewidth=1, label=f"chain {number}")
    ax.axhline(0, **DASHED)
    said = f"{sizes[place]:,.0f} of {drawn.size:,} draws effective" if np.isfinite(sizes[place]) else "it never moves"
    ax.set_title(f"{words[place]}: {said}", fontsize=10)
    ax.set(xlabel="lag (kept draws)", ylabel="autocorrelation", xlim=(0, None))
    if len(drawn) <= CHAINS and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8)
    return ax


def _statistics(draws: Any) -> dict[str, torch.Tensor]:
    return getattr(draws, "statistics", {}) if isinstance(draws, Posterior) else {}


def _worst_first(values: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Places of the quantities by falling R̂ (those without one last), and R̂ of each."""
    rhat = convergence.rhat(torch.from_numpy(np.ascontiguousarray(values))).numpy()
    order = np.argsort(-np.where(np.isnan(rhat), -np.inf, rhat), kind="stable")
    return order.tolist(), rhat


def _band(chains: int, count: int, z: np.ndarray, seed: int) -> np.ndarray:
    """Half widths, at each z, of a band that holds all chains' curves at once in `LEVEL` of random orders of the ranks.

    A chain has `count` of all ranks, drawn without replacement: Var F_c(z) = z(1 − z)/n · (N − n)/(N − 1).
    """
    total = chains * count
    spread = np.sqrt(z * (1 - z) / count * (total - count) / max(1, total - 1))
    generator = np.random.default_rng(seed)
    below = np.floor(z * total + 0.5).astype(int)
    furthest = np.empty(REPEATS)
    for repeat in range(REPEATS):
        owner = generator.permutation(total) // count
        shown = range(min(chains, CHAINS))
        shares = [np.concatenate([[0], np.cumsum(owner == chain)])[below] / count for chain in shown]
        furthest[repeat] = max(np.abs((share - z) / spread).max() for share in shares)
    return np.quantile(furthest, LEVEL) * spread
