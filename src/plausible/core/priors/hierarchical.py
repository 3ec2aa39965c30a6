"""Gaussian priors whose precisions are unknown: one Gamma variate for each group of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from plausible.core.priors.rules import LOG_2PI, Prior, _lgamma, _log, _normal, total
from plausible.core.serialise import check_number, register

GROUPS = ("tensor", "layer", "input", "ends", "all")
NOISE = "likelihood."


class Group(NamedTuple):
    """Weights that share precisions: their names, and the axis along which each place has one of its own, if there is one."""

    names: tuple[str, ...]
    axis: int | None


@register
@dataclass(frozen=True)
class Hierarchical(Prior):
    """w | τ ~ N(0, 1/τ_g),  τ_g ~ Gamma(shape, rate):  log p(w) = Σ_g log ∫ N(w_g; 0, 1/τ) Gamma(τ) dτ.

    With the precision integrated out the n weights of a group follow one multivariate Student's t of 2·shape degrees of freedom,

        log p(w_g) = log Γ(a + n/2) − log Γ(a) + a log b − (n/2) log 2π − (a + n/2) log(b + ½‖w_g‖²),   a = shape, b = rate,

    and this is what `log_prob` gives, so that every method can use it. Markov chains draw the precisions too, by Gibbs steps
    (Neal 1996, Bayesian learning for neural networks), and keep them: `posterior.precisions`; with `sampled=False` they move
    under the integrated density, whose gradient is −E(τ | w)·w. Groups share a precision: "tensor", every weight matrix and
    every bias has its own; "layer", weight and bias of a layer share one; "input", as "tensor", but the first weight of two or
    more axes has one for each of its inputs: automatic relevance determination (MacKay 1994, Neal 1996); "ends", as
    "input", and weight and bias of the last layer have one for each output, since outputs may mean unlike things (a mean and a
    scale); "all". The likelihood's own weights are never grouped with those of the network. `with_width(width, alpha)` is
    Neal's parametrisation, and `FanIn` around it his scaling by the number of units. Elements of a group have no density alone
    (`elementwise`); weights that `where=` leaves out are fixed members of it: p(w_random | w_points).
    """

    shape: float = 1.0
    rate: float = 1.0
    groups: Literal["tensor", "layer", "input", "ends", "all"] = "tensor"
    sampled: bool = True

    def __post_init__(self) -> None:
        check_number(self, "shape", "rate", above=0)
        if self.groups not in GROUPS:
            raise ValueError(f"Hierarchical: groups must be one of {', '.join(map(repr, GROUPS))}, got {self.groups!r}")
        if not isinstance(self.sampled, bool):
            raise TypeError(f"Hierarchical: sampled must be True or False, got {self.sampled!r}")

    @classmethod
    def with_width(cls, width: float = 1.0, alpha: float = 2.0, **settings: Any) -> Self:
        """Precisions of mean 1/width², p(τ) ∝ τ^(α/2 − 1) e^(−τα·width²/2): "width:alpha" in Neal's software, shape = α/2."""
        for setting, value in (("width", width), ("alpha", alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"Hierarchical.with_width: {setting} must be finite and above 0, got {value!r}")
        return cls(shape=alpha / 2, rate=alpha * width**2 / 2, **settings)

    @property
    def independent(self) -> bool:
        return False

    # -----------------------------------------------------------------------------------------------------------------
    # Which weights belong together
    def blocks(self, weights: Mapping[str, Tensor]) -> dict[str, Group]:
        """Names of groups (of several, where each input has its group), and the weights in them."""
        # the layer that sees the inputs and the one that gives the outputs, as far as names tell
        matrices = [n for n, w in weights.items() if w.ndim > 1 and not n.startswith(NOISE)]
        axes: dict[str, int] = {}
        if matrices and self.groups == "ends":
            last = matrices[-1].rpartition(".")[0]
            axes = {n: 0 for n, w in weights.items() if n.rpartition(".")[0] == last and w.ndim and not n.startswith(NOISE)}
        if matrices and self.groups in ("input", "ends"):
            axes[matrices[0]] = 1
        groups: dict[str, tuple[str, ...]] = {}
        for name in weights:
            group = name
            if self.groups == "all":
                group = NOISE[:-1] if name.startswith(NOISE) else "all"
            elif self.groups == "layer":
                group = name.rpartition(".")[0] or name
            groups[group] = (*groups.get(group, ()), name)
        return {group: Group(names, axes.get(names[0])) for group, names in groups.items()}

    def labels(self, weights: Mapping[str, Tensor]) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Names of the groups, and for each weight the group of each of its elements: int64, shaped like the weight."""
        every: list[str] = []
        labels = {}
        for group, block in self.blocks(weights).items():
            for name in block.names:
                weight = weights[name]
                label = torch.tensor(len(every))
                if block.axis is not None:
                    label = label + _along(torch.arange(weight.shape[block.axis]), weight, block.axis)
                labels[name] = label.expand(weight.shape).to(weight.device)
            places = () if block.axis is None else range(weights[block.names[0]].shape[block.axis])
            every += [f"{group}[{i}]" for i in places] if block.axis is not None else [group]
        return tuple(every), labels

    # -----------------------------------------------------------------------------------------------------------------
    # The density
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        return total(self._integrated(*self._squares(weights, block)) for block in self.blocks(weights).values())

    def _squares(self, weights: Mapping[str, Tensor], block: Group) -> tuple[int, Tensor]:
        """How many weights a group has, and ‖w_g‖²: 0-d, or `[places]` along its axis."""
        members = [weights[name] for name in block.names]
        if block.axis is not None:
            by_place = members[0].movedim(block.axis, 0)
            by_place = by_place.reshape(len(by_place), -1)
            return by_place.shape[1], by_place.square().sum(1)
        return sum(weight.numel() for weight in members), total(weight.square().sum() for weight in members)

    def _integrated(self, count: int, square: Tensor) -> Tensor:
        half = 0.5 * count
        constant = _lgamma(self.shape + half) - _lgamma(self.shape) + self.shape * _log(self.rate) - half * LOG_2PI
        # constants included: evidences of models are compared
        return (constant - (self.shape + half) * torch.log(self.rate + 0.5 * square)).sum()

    def expected_precision(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """E(τ | w) = (shape + n/2)/(rate + ½‖w_g‖²) by weight, to broadcast with it; the gradient of log p is −E(τ | w)·w."""
        expected = {}
        for block in self.blocks(weights).values():
            count, square = self._squares(weights, block)
            value = (self.shape + 0.5 * count) / (self.rate + 0.5 * square)
            for name in block.names:
                expected[name] = value if block.axis is None else _along(value, weights[name], block.axis)
        return expected

    def elementwise(self, name: str, weight: Tensor) -> Tensor:  # noqa: ARG002
        raise ValueError(
            f"Hierarchical is one density over all weights of a group: elements of {name!r} alone have none; use log_prob, or a "
            "prior of independent weights, e.g. StudentT"
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Draws
    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        count = math.prod(draws)
        drawn = self.sample({name: like.double() if like.dtype == torch.float64 else like.float()}, generator, count)
        return drawn[name].reshape(*draws, *like.shape).to(generator.device)

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        if draws is not None and draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws!r}")
        names, labels = self.labels(like)
        leading = () if draws is None else (draws,)
        shape = torch.full((*leading, len(names)), float(self.shape), dtype=torch.float64, device=generator.device)
        # small shapes give variates that round to 0, and a scale of ∞
        gamma = torch._standard_gamma(shape, generator=generator).clamp(min=torch.finfo(torch.float64).tiny)
        scale = (gamma / self.rate).rsqrt()
        drawn = {}
        for name, weight in like.items():
            dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            scales = scale[..., labels[name].to(generator.device)].to(dtype)
            noise = _normal((*leading, *weight.shape), generator, dtype)
            drawn[name] = (scales * noise).to(device=weight.device, dtype=weight.dtype)
        return drawn


def _along(values: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Numbers of the places along one axis of a weight, to broadcast with it."""
    return values.view(-1, *[1] * (weight.ndim - 1 - axis))
