"""Posteriors of chains whose draws and statistics are given, without a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core.storage import MemoryDraws
from plausible.methods.chains.nuts import NUTS
from plausible.posteriors.chains import ChainsPosterior

CHAINS, DRAWS, HIDDEN = 4, 300, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior_of(network: nn.Module, weights: dict[str, Tensor], **statistics: Any) -> ChainsPosterior:
    """Of weights [chains, draws, *shape] by name, with statistics [chains, draws] or numbers beside plain ones."""
    chains, draws = next(iter(weights.values())).shape[:2]
    x = torch.randn(8, 1, generator=generator())
    point = pl.fit(network, (x, x.clone()), pl.MAP(epochs=1), likelihood=pl.likelihoods.Gaussian(1.0), progress=False)
    noise = torch.randn(3, chains, draws, generator=generator(9), dtype=torch.float64)
    size = sum(value[0, 0].numel() for value in weights.values())
    known: dict[str, Any] = {
        "log_likelihood": -20 + noise[0],
        "log_prior": -5 + noise[1],
        "acceptance": 0.8,
        "divergent": 0.0,
        "step_size": 0.1,
        "leapfrogs": 7.0,
        "energy": 25 + size / 2 + size**0.5 * noise[2],
        "depth": 3.0,
    }
    plain = {
        name: torch.as_tensor(value, dtype=torch.float64).expand(chains, draws) for name, value in (known | statistics).items()
    }
    everything = weights | {f"chain.{name}": value for name, value in plain.items()}
    stacked = {name: value.transpose(0, 1).flatten(0, 1).contiguous() for name, value in everything.items()}
    run = {"steps": 2 * draws, "seconds": 4.0}
    return ChainsPosterior(NUTS(draws=draws, chains=chains), point.model, run, MemoryDraws(stacked), chains)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def draws_of_weights(permuted: bool = False, seed: int = 0, chains: int = CHAINS, draws: int = DRAWS) -> dict[str, Tensor]:
    """Independent draws around one network; `permuted`: each chain has its hidden units in an order of its own."""
    noise = generator(seed)
    spread = {"0.weight": (HIDDEN, 1), "0.bias": (HIDDEN,), "2.weight": (1, HIDDEN), "2.bias": (1,)}
    centre = {
        "0.weight": torch.tensor([[-2.0], [0.5], [3.0]]),
        "0.bias": torch.tensor([1.0, -1.0, 0.0]),
        "2.weight": torch.tensor([[1.0, -2.0, 0.5]]),
        "2.bias": torch.zeros(1),
    }
    found = {name: centre[name] + 0.1 * torch.randn(chains, draws, *shape, generator=noise) for name, shape in spread.items()}
    if permuted:
        for chain in range(chains):
            order = torch.arange(HIDDEN).roll(chain)
            for name in ("0.weight", "0.bias"):
                found[name][chain] = found[name][chain][:, order]
            found["2.weight"][chain] = found["2.weight"][chain][..., order]
    return found
