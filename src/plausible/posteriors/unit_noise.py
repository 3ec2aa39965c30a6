"""Dropout as a law over the weights: W = θ diag(z), one z for each input of a layer and draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from plausible.blocks.unit_noise import Site, alpha_of, from_normal
from plausible.core.model import Model
from plausible.core.priors import Prior
from plausible.core.weights import Weights
from plausible.posteriors.laws import Law
from plausible.posteriors.saving import Content


class UnitNoise(Law):
    """q(W) of W = (θ + σ ∘ ε) diag(z): `means` θ, `spreads` σ where the weights have noise too, `rates` p [units] of z.

    `noise_kind` is the law of z, "dropout" or "gaussian".
    """

    kind = "unit noise"
    has_density: ClassVar[bool] = False

    def __init__(
        self, means: Weights, rates: Weights, sites: Mapping[str, Site], noise_kind: str, spreads: Weights | None = None
    ):
        self.means, self.rates, self.sites, self.spreads = means, rates, dict(sites), spreads or {}
        self.settings = {"noise": noise_kind, "sites": {name: asdict(site) for name, site in sites.items()}}

    @property
    def tensors(self) -> dict[str, Weights]:
        return {"mean": self.means, "rate": self.rates, "spread": self.spreads}

    @classmethod
    def rebuilt(cls, method: Any, model: Model, content: Content) -> Self:  # noqa: ARG003
        sites = {str(name): Site(**site) for name, site in content.settings["sites"].items()}
        like = {name: model.initial[name] for name in sites}
        rates = content.group("rate", {name: torch.empty(site.units) for name, site in sites.items()})
        spreads = content.group("spread", like) if content.tensors.get("spread") else {}
        return cls(content.group("mean", like), rates, sites, str(content.settings["noise"]), spreads)

    @cached_property
    def scales(self) -> Weights:  # type: ignore[override]
        """√(αθ² + (1 + α)σ²)."""
        variances: Weights = {}
        for name, site in self.sites.items():
            alpha = alpha_of(self.rates[name])
            variances[name] = site.scaled(self.means[name].square(), alpha)
            if name in self.spreads:
                variances[name] += site.scaled(self.spreads[name].square(), 1 + alpha)
        return {name: variance.sqrt() for name, variance in variances.items()}

    @cached_property
    def noise(self) -> Tensor:
        widest = max(self.means.values(), key=lambda mean: torch.finfo(mean.dtype).bits)
        return widest.new_empty(1).expand(sum(self._sizes))

    @property
    def _sizes(self) -> list[int]:
        """How much noise each site takes, and each spread."""
        return [*(site.units for site in self.sites.values()), *(spread.numel() for spread in self.spreads.values())]

    def sample(self, noise: Tensor, first: int) -> Weights:  # noqa: ARG002
        parts = iter(noise.split_with_sizes(self._sizes, dim=1))
        kind = self.settings["noise"]
        units = {name: from_normal(kind, self.rates[name], next(parts).to(mean)) for name, mean in self.means.items()}
        drawn = {name: mean.expand(len(noise), *mean.shape) for name, mean in self.means.items()}
        for name, spread in self.spreads.items():
            drawn[name] = drawn[name] + spread * next(parts).view(len(noise), *spread.shape).to(spread)
        return {name: torch.func.vmap(self.sites[name].scaled)(drawn[name], z) for name, z in units.items()}

    def log_density(self, weights: Weights) -> Tensor:  # noqa: ARG002
        raise TypeError("weights under dropout have no density: they lie on lines through 0 and the weights that were trained")

    def kl(self, prior: Prior, masks: Weights, samples: int = 1000, seed: int = 0) -> float:  # noqa: ARG002
        raise TypeError("the divergence of dropout from a prior with a density is infinite")

    def status(self, name: str) -> str:
        rate = self.rates[name]
        least, most = (f"{float(value):.2g}" for value in (rate.min(), rate.max()))
        return f"inferred, dropout {least if least == most else f'{least} to {most}'} on its inputs"
