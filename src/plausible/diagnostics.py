"""Convergence of chains: rank-normalised split R̂, bulk and tail effective sample sizes (Vehtari et al. 2021).

All functions take draws [chains, draws, quantities] and return one number per quantity; they run on any device. `summarise`
gives the worst over all quantities, which is what a reader needs first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _split(chains: Tensor) -> Tensor:
    """Each chain in two halves: [2·chains, draws // 2, quantities]."""
    half = chains.shape[1] // 2
    return torch.cat([chains[:, :half], chains[:, -half:]])


def _rank_normalise(chains: Tensor) -> Tensor:
    """Normal scores of the ranks over all chains together; ties get their average rank."""
    flat = chains.reshape(-1, chains.shape[-1]).double()
    count = flat.shape[0]
    ordered, order = flat.sort(dim=0)
    ranks = torch.empty_like(flat)
    position = torch.arange(1, count + 1, dtype=flat.dtype, device=flat.device)
    for q in range(flat.shape[1]):
        _, inverse, counts = torch.unique_consecutive(ordered[:, q], return_inverse=True, return_counts=True)
        ends = counts.cumsum(0)
        average = (ends - (counts - 1) / 2).to(flat.dtype)
        ranks[order[:, q], q] = average[inverse] if len(counts) < count else position
    return torch.special.ndtri((ranks - 0.375) / (count + 0.25)).reshape(chains.shape)


def _quantile(chains: Tensor, level: float) -> Tensor:
    """A quantile over all chains together, by linear interpolation: [quantities] (`torch.quantile` refuses large inputs)."""
    ordered = chains.reshape(-1, chains.shape[-1]).sort(dim=0).values
    low, part = divmod(level * (len(ordered) - 1), 1)
    return torch.lerp(ordered[int(low)], ordered[min(int(low) + 1, len(ordered) - 1)], part)


def _rhat(chains: Tensor) -> Tensor:
    """√(((n−1)/n · W + B/n) / W) of already split chains."""
    draws = chains.shape[1]
    within = chains.var(dim=1, unbiased=True).mean(0)
    between = draws * chains.mean(1).var(dim=0, unbiased=True)
    return (((draws - 1) / draws * within + between / draws) / within).sqrt()


def rhat(chains: Tensor) -> Tensor:
    """The larger of rank-normalised split R̂ and its folded version (for scale); above 1.01 look twice. [quantities]."""
    split = _split(chains.double())
    folded = (split - _quantile(split, 0.5)).abs()
    return torch.fmax(_rhat(_rank_normalise(split)), _rhat(_rank_normalise(folded)))


def _autocovariance(chains: Tensor) -> Tensor:
    """Autocovariances along the draws by FFT, divided by the number of draws: same shape."""
    draws = chains.shape[1]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * draws, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), n=2 * draws, dim=1)[:, :draws] / draws


def ess(chains: Tensor) -> Tensor:
    """Effective sample size of the mean by Geyer's initial monotone sequence over split chains. [quantities]."""
    count, draws, quantities = chains.shape
    covariance = _autocovariance(chains.double())
    within = covariance[:, 0].mean(0) * draws / (draws - 1)
    total = within * (draws - 1) / draws
    if count > 1:
        total = total + chains.double().mean(1).var(dim=0, unbiased=True)
    correlation = 1 - (within - covariance.mean(0) * draws / (draws - 1)) / total  # [draws, quantities]
    correlation[0] = 1.0
    pairs = correlation[: draws // 2 * 2].reshape(draws // 2, 2, quantities).sum(1)
    positive = (pairs > 0).to(pairs.dtype).cumprod(0)  # up to the first pair that is not positive
    monotone = torch.cummin(pairs.clamp(min=0), dim=0).values * positive
    time = -1 + 2 * monotone.sum(0)
    size = count * draws
    found = size / time.clamp(min=1 / torch.log10(torch.tensor(float(size)).clamp(min=10)))
    return torch.where(total > 0, found, torch.full_like(found, torch.nan))


def ess_bulk(chains: Tensor) -> Tensor:
    """Effective sample size of the rank-normalised draws: for means and medians."""
    return ess(_rank_normalise(_split(chains)))


def ess_tail(chains: Tensor) -> Tensor:
    """The smaller effective sample size of the 5 % and the 95 % quantile: for intervals."""
    split = _split(chains.double())
    low, high = _quantile(split, 0.05), _quantile(split, 0.95)
    return torch.fmin(ess((split <= low).double()), ess((split <= high).double()))


def summarise(chains: Tensor, limit: int = 2000) -> dict[str, Any]:
    """The worst R̂ and effective sample sizes over the quantities (evenly spaced ones where there are more than `limit`)."""
    if chains.shape[-1] > limit:
        chains = chains[..., torch.linspace(0, chains.shape[-1] - 1, limit, device=chains.device).long()]
    flat = chains.reshape(-1, chains.shape[-1])
    if not bool(torch.isfinite(flat).all()):
        return {"rhat": float("nan"), "ess_bulk": 0.0, "ess_tail": 0.0}
    moving = flat.max(0).values > flat.min(0).values
    if not bool(moving.any()):
        return {}
    chains = chains[..., moving]
    return {
        "rhat": float(rhat(chains).nan_to_num(torch.inf, posinf=torch.inf).max()),
        "ess_bulk": float(ess_bulk(chains).nan_to_num(torch.inf).min()),
        "ess_tail": float(ess_tail(chains).nan_to_num(torch.inf).min()),
    }
