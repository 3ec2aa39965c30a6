"""Convergence of chains: rank-normalised split R̂, effective sample sizes, Monte Carlo standard errors, E-BFMI.

All functions take draws [chains, draws, quantities] and return one number per quantity, those that Stan and arviz give; they
run on any device, over parts of the quantities, so that memory stays bounded. A quantity that never moves has no R̂ and no
effective sample size, and one that is not finite somewhere has none either: both are NaN. `summarise` gives the worst over all
quantities, which is what a reader needs first; `posteriors.diagnostics.summary_table` has a row for each.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), Rank-normalization, folding, and localization: an improved R̂ for
assessing convergence of MCMC, Bayesian Analysis 16; Betancourt (2016), Diagnosing suboptimal cotangent disintegrations in HMC.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor

from plausible.core.special import double

PART = 2**20  # numbers that one part of the quantities has at most
LIMIT = 2000  # quantities over which `summarise` takes the worst at most


def _parts(chains: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the quantities, checked, in float64 [quantities, chains, draws], and which of them move and are finite."""
    if not isinstance(chains, Tensor) or chains.ndim != 3 or 0 in chains.shape:
        what = f"shape {list(chains.shape)}" if isinstance(chains, Tensor) else type(chains).__name__
        raise ValueError(f"chains must be a tensor [chains, draws, quantities] that is not empty, got {what}")
    size = max(1, PART // (chains.shape[0] * chains.shape[1]))
    for part in chains.detach().split(size, dim=-1):
        values = double(part.permute(2, 0, 1).contiguous())[0]
        yield values, torch.isfinite(values).all(2).all(1) & _varies(values)


def _by_parts(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of [quantities, chains, draws] as one of [chains, draws, quantities], NaN where a quantity is not usable."""

    @functools.wraps(function)
    def whole(chains: Tensor, *settings: float) -> Tensor:
        return torch.cat([torch.where(good, function(v, *settings), torch.nan) for v, good in _parts(chains)])

    return whole


# ---------------------------------------------------------------------------------------------------------------------
# Over values [quantities, chains, draws]
def _varies(values: Tensor) -> Tensor:
    return values.amax((1, 2)) > values.amin((1, 2))


def _halves(values: Tensor) -> Tensor:
    half = values.shape[2] // 2
    return torch.cat([values[..., :half], values[..., values.shape[2] - half :]], 1)


def _ordered(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted, and the order; by NumPy on the CPU, which is ten times faster there."""
    if flat.device.type != "cpu":
        rising = flat.sort(dim=1)
        return rising.values, rising.indices
    order = torch.from_numpy(flat.numpy().argsort(axis=1))
    return flat.gather(1, order), order


def _rank_normalise(values: Tensor) -> Tensor:
    """Normal scores of the ranks over all chains together; ties get their average rank."""
    flat = values.flatten(1)
    count = flat.shape[1]
    ordered, order = _ordered(flat)
    halves = torch.arange(2 * count - 1, dtype=flat.dtype, device=flat.device) / 2  # an average of ranks is a multiple of ½
    table = torch.special.ndtri((halves + 0.625) / (count + 0.25))
    scores = table[::2].expand_as(flat).contiguous()
    equal = ordered[:, 1:] == ordered[:, :-1]
    tied = equal.any(1).nonzero()[:, 0]
    if len(tied):  # the middle between the first and the last place of each run of equal values
        place = torch.arange(count, device=flat.device).expand(len(tied), -1)
        edge = torch.ones_like(tied, dtype=torch.bool)[:, None]
        first = torch.where(torch.cat([edge, ~equal[tied]], 1), place, 0).cummax(1).values
        last = torch.where(torch.cat([~equal[tied], edge], 1), place, count).flip(1).cummin(1).values.flip(1)
        scores[tied] = table[first + last]
    return torch.empty_like(flat).scatter_(1, order, scores).reshape(values.shape)


def _quantiles(values: Tensor, *levels: float) -> list[Tensor]:
    """Quantiles over all chains together, by linear interpolation: [quantities, 1, 1] each."""
    flat = values.flatten(1)  # NumPy sorts ten times faster on the CPU
    ordered = torch.from_numpy(np.sort(flat.numpy(), axis=1)) if flat.device.type == "cpu" else flat.sort(dim=1).values
    quantiles = []
    for level in levels:
        low, part = divmod(level * (ordered.shape[1] - 1), 1)
        below, above = ordered[:, int(low)], ordered[:, min(int(low) + 1, ordered.shape[1] - 1)]
        quantiles.append(((1 - part) * below + part * above)[:, None, None])
    return quantiles


def _rhat(values: Tensor) -> Tensor:
    """√(((n−1)/n · W + B/n) / W) of already split chains; ∞ where chains stand still at different values."""
    draws = values.shape[2]
    moving = values.amax(2) > values.amin(2)  # a variance of equal numbers is not always 0
    within = torch.where(moving, values.var(dim=2, unbiased=True), 0.0).mean(1)
    between = draws * values.mean(2).var(dim=1, unbiased=True)
    return (((draws - 1) / draws * within + between / draws) / within).sqrt()


def _worse_rhat(split: Tensor, scores: Tensor) -> Tensor:
    """Of split chains and their normal scores: for location and, folded around the median, for scale."""
    # chains of equal location and different spread have an R̂ of 1 without this
    folded = (split - _quantiles(split, 0.5)[0]).abs()
    return torch.fmax(_rhat(scores), _rhat(_rank_normalise(folded)))


def _size(values: Tensor) -> Tensor:
    """Effective sample size of the mean: N/τ, τ = −1 + 2 Σ_k P_k, P_k = ρ_2k + ρ_2k+1 by Geyer's initial monotone sequence.

    Pairs count up to the first that is not positive; its even part, where positive, counts once. [quantities].
    """
    _, count, draws = values.shape
    if draws < 2:
        return values.new_full(values.shape[:1], torch.nan)
    # autocovariances by FFT, padded to twice the length or they would wrap around; powers of two are fastest
    length = 1 << (2 * draws - 1).bit_length()
    spectrum = torch.fft.rfft(values - values.mean(2, keepdim=True), n=length, dim=2)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(1)
    covariance = torch.fft.irfft(power, n=length, dim=1)[:, :draws] / draws
    within = covariance[:, :1] * draws / (draws - 1)
    total = covariance[:, :1]
    if count > 1:
        total = total + values.mean(2).var(dim=1, unbiased=True)[:, None]
    correlation = 1 - (within - covariance) / total
    correlation[:, 0] = 1.0
    last = max(0, (draws - 3) // 2)
    even = correlation[:, : 2 * last + 1 : 2]
    pairs = even + correlation[:, 1 : 2 * last + 2 : 2]
    # 1 until the first pair that is not positive
    going = (pairs > 0).to(pairs.dtype).cumprod(1)
    going[:, last] = 0.0
    end = going.sum(1, keepdim=True).long()
    stray = even.gather(1, end)[:, 0]
    stray = torch.where((stray > 0) | (pairs.gather(1, end)[:, 0] >= 0), stray, 0.0)
    # monotone: a noisy tail cannot rise again
    time = 2 * (pairs.cummin(1).values * going).sum(1) + stray - 1
    # antithetic chains may beat independent draws, but no estimate is trusted beyond N log₁₀ N
    return count * draws / time.clamp(min=1 / math.log10(max(10, count * draws)))


def _quantile_sizes(values: Tensor, *levels: float) -> list[Tensor]:
    """Those of the indicators of being below quantiles; all draws where one does not vary."""
    sizes = []
    for quantile in _quantiles(values, *levels):
        below = _halves((values <= quantile).to(values.dtype))
        sizes.append(torch.where(_varies(below), _size(below), float(below.shape[1] * below.shape[2])))
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# Over chains [chains, draws, quantities]
@_by_parts
def rhat(values: Tensor) -> Tensor:
    """The larger of rank-normalised split R̂ and its folded version (for scale); above 1.01 look twice. [quantities].

    One chain is compared with itself: its first and its second half. NaN for fewer than 4 draws.
    """
    if values.shape[2] < 4:
        return values.new_full(values.shape[:1], torch.nan)
    split = _halves(values)
    return _worse_rhat(split, _rank_normalise(split))


@_by_parts
def ess(values: Tensor) -> Tensor:
    """Effective sample size of the mean by Geyer's initial monotone sequence, chains as they are given. [quantities]."""
    return _size(values)


@_by_parts
def ess_mean(values: Tensor) -> Tensor:
    """Effective sample size of the mean over split chains: that behind `mcse`."""
    return _size(_halves(values))


@_by_parts
def ess_bulk(values: Tensor) -> Tensor:
    """Effective sample size of the rank-normalised draws: for means and medians."""
    return _size(_rank_normalise(_halves(values)))


@_by_parts
def ess_tail(values: Tensor) -> Tensor:
    """The smaller effective sample size of the 5 % and the 95 % quantile: for intervals."""
    return torch.minimum(*_quantile_sizes(values, 0.05, 0.95))


@_by_parts
def mcse(values: Tensor) -> Tensor:
    """sd/√ESS, the Monte Carlo standard error of the posterior mean. [quantities]."""
    return values.flatten(1).std(dim=1, unbiased=True) / _size(_halves(values)).sqrt()


@_by_parts
def mcse_sd(values: Tensor) -> Tensor:
    """√(Var v / (4 v̄ ESS_v)) with v = (w − w̄)², the standard error of the posterior standard deviation (delta method)."""
    squares = (values - values.mean((1, 2), keepdim=True)).square()
    mean = squares.mean((1, 2))
    return ((squares.square().mean((1, 2)) - mean.square()) / (4 * mean * _size(_halves(squares)))).sqrt()


@_by_parts
def mcse_quantile(values: Tensor, level: float) -> Tensor:
    """Half the distance of the order statistics one standard error below and above a quantile. [quantities].

    The share of draws below the quantile is Beta(ESS·level + 1, ESS·(1 − level) + 1); its 16 % and 84 % quantiles, times the
    number of draws, are the places of the two.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level!r}")
    size = _quantile_sizes(values, level)[0]
    ordered, _ = _ordered(values.flatten(1))
    count = ordered.shape[1]
    a, b = ((size * share + 1).cpu().double().numpy() for share in (level, 1 - level))
    shares = (torch.as_tensor(scipy.special.betaincinv(a, b, p)).to(size) for p in (0.1586553, 0.8413447))
    below, above = (share * count - 1 for share in shares)
    low, high = below.floor().clamp(min=0).long(), above.ceil().clamp(max=count - 1).long()
    return (ordered.gather(1, high[:, None]) - ordered.gather(1, low[:, None]))[:, 0] / 2


def ebfmi(energy: Tensor, change: Tensor | None = None) -> Tensor:
    """E-BFMI = mean (E_t − E_t−1)² / Var E of each chain: energies [chains, draws] → [chains] (Betancourt 2016).

    How far one draw of the momentum moves along the energies that the posterior has. Below 0.3 chains are slow to reach the tails:
    the posterior has parts of very different width. NaN where the energy does not vary. Energies of thinned chains do not follow
    one another: give E_t − E_t−1 of single transitions as `change`, shaped like `energy` (`posterior.statistics["energy_change"]`).
    """
    if energy.ndim != 2 or energy.shape[1] < 2:
        raise ValueError(f"energy must be [chains, draws] with at least 2 draws, got {list(energy.shape)}")
    if change is not None and change.shape != energy.shape:
        raise ValueError(f"change must have the shape of energy, {list(energy.shape)}, got {list(change.shape)}")
    values = double(energy)[0]
    changes = values.diff(dim=1) if change is None else double(change)[0]
    ratio = changes.square().mean(1) / values.var(dim=1, unbiased=True)
    return torch.where(values.amax(1) > values.amin(1), ratio, torch.nan)


def summary(chains: Tensor) -> dict[str, Tensor]:
    """`mean`, `sd`, `mcse`, `ess_bulk`, `ess_tail`, `rhat` of each quantity: [quantities] each, on the CPU.

    The same as the functions of these names, with the sorting shared. A quantity that does not move has a mean and no spread.
    """
    columns: dict[str, list[Tensor]] = {}
    for values, good in _parts(chains):
        deviation = values.flatten(1).std(dim=1, unbiased=True)
        row = {"mean": values.mean((1, 2)), "sd": torch.where(good, deviation, 0.0)}
        if values.shape[2] >= 4:
            split = _halves(values)
            scores = _rank_normalise(split)
            row |= {
                "mcse": row["sd"] / _size(split).sqrt(),
                "ess_bulk": _size(scores),
                "ess_tail": torch.minimum(*_quantile_sizes(values, 0.05, 0.95)),
                "rhat": _worse_rhat(split, scores),
            }
        for name in ("mean", "sd", "mcse", "ess_bulk", "ess_tail", "rhat"):
            value = row.get(name, torch.full_like(row["mean"], torch.nan))
            columns.setdefault(name, []).append(value if name in ("mean", "sd") else torch.where(good, value, torch.nan))
    return {name: torch.cat(parts).cpu() for name, parts in columns.items()}


def spaced(count: int, limit: int) -> Tensor:
    """Indices of at most `limit` of `count` quantities, evenly spaced."""
    return torch.arange(count) if count <= limit else torch.linspace(0, count - 1, limit, dtype=torch.float64).long()


def summarise(chains: Tensor, limit: int = LIMIT) -> dict[str, Any]:
    """The worst R̂ and effective sample sizes over the quantities (evenly spaced ones where there are more than `limit`).

    `mcse` is the largest standard error of a mean, as a share of the posterior's standard deviation. Quantities that never move
    are left out; nothing is said where none moves.
    """
    chains = chains[..., spaced(chains.shape[-1], limit).to(chains.device)]
    flat = chains.reshape(-1, chains.shape[-1])
    if not bool(torch.isfinite(flat).all()):
        # numbers that a verdict refuses, not an exception: the fit is done and wants to be looked at
        return {"rhat": float("nan"), "ess_bulk": 0.0, "ess_tail": 0.0}
    moving = flat.max(0).values > flat.min(0).values
    if not bool(moving.any()):
        return {}
    each = summary(chains[..., moving])
    return {
        "rhat": float(each["rhat"].nan_to_num(torch.inf, posinf=torch.inf).max()),
        "ess_bulk": float(each["ess_bulk"].nan_to_num(torch.inf).min()),
        "ess_tail": float(each["ess_tail"].nan_to_num(torch.inf).min()),
        "mcse": float((each["mcse"] / each["sd"]).nan_to_num(0.0).max()),
    }
