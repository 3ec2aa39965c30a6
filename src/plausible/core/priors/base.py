"""What a prior is: a log density for every element of every weight, and draws from it."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor


def total(terms: Iterable[Tensor]) -> Tensor:
    """The sum; 0 for no terms."""
    return functools.reduce(operator.add, terms) if (terms := list(terms)) else torch.zeros(())


class Prior(ABC):
    """log p(w) = Σ over names and elements; weights are dicts of tensors without a leading axis of draws.

    For stacked weights apply `torch.func.vmap` to `log_prob`.
    """

    @abstractmethod
    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        """The log density of each element of the weight called `name`; same shape as `weight`."""

    @abstractmethod
    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Independent draws for one weight, [*draws, *like.shape], on the generator's device in float32 or float64."""

    def rule(self, name: str) -> Prior:  # noqa: ARG002
        """The prior that applies to the weight called `name`, with patterns resolved."""
        return self

    @property
    def proper(self) -> bool:
        """Whether the density integrates to 1, so that there is something to sample."""
        return True

    @property
    def independent(self) -> bool:
        """Whether elements are independent of each other, so that each has a density of its own: `elementwise`."""
        return True

    @property
    def precision(self) -> float | None:
        """λ where log p(w) = −½λ‖w‖² + constant for all weights alike, else None.

        The gradient −λw then needs no autograd: optimisers take it as `l2`.
        """
        return None

    def expectation(self, name: str, mean: Tensor, scale: Tensor) -> Tensor | None:  # noqa: ARG002
        """E log p(w) for the weight called `name` under w ~ N(mean, scale²), summed: 0-d; None where there is no closed form."""
        return None

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum of the log densities of all elements of all weights: a 0-d tensor."""
        return total(self.elementwise(name, weight).sum() for name, weight in weights.items())

    def sample(self, like: Mapping[str, Tensor], generator: torch.Generator, draws: int | None = None) -> dict[str, Tensor]:
        """Weights drawn from the prior, with names, shapes, dtypes and devices of `like`.

        With `draws` every tensor gets a leading axis of that length. The generator may live on the CPU or on the
        weights' device; a CPU generator gives the same draws on every device. Improper priors raise ValueError.
        """
        if draws is not None and draws < 1:
            raise ValueError(f"draws must be at least 1, got {draws!r}")
        leading = () if draws is None else (draws,)
        drawn = {}
        for name, weight in like.items():
            value = self.draw(name, weight.detach(), generator, leading)
            drawn[name] = value.to(device=weight.device, dtype=weight.dtype)
        return drawn


class Rule(Prior):
    """One density on the real line for every element: subclasses give `log_density` and `variate`.

    For `log_prob`, weights with fewer elements than `join_below` are laid end to end first: one pass over many small
    tensors instead of many passes.
    """

    join_below: ClassVar[float] = 2**14

    @abstractmethod
    def log_density(self, weight: Tensor) -> Tensor:
        """The log density of each element; same shape."""

    @abstractmethod
    def variate(self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Independent draws on the generator's device."""

    def elementwise(self, name: str, weight: Tensor) -> Tensor:  # noqa: ARG002
        """The log density of each element, whatever the name."""
        return self.log_density(weight)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        small = [weight.reshape(-1) for weight in weights.values() if weight.numel() < self.join_below]
        parts = [weight for weight in weights.values() if weight.numel() >= self.join_below]
        return total(self.log_density(part).sum() for part in [*parts, *([torch.cat(small)] if small else [])])

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        """Independent draws, whatever the name."""
        if not self.proper:
            raise ValueError(
                f"cannot sample the weight {name!r} from {self!r}: this prior is improper, its density has no finite "
                "integral; choose a proper one, e.g. Gaussian(scale=1.0), or give LogUniform both bounds"
            )
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self.variate((*draws, *like.shape), generator, dtype)
