"""Mixtures of posteriors: an ensemble of a method whose result is not a set of draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.engine.method import Fitted
from plausible.posteriors.base import Posterior, check_draws, record_of
from plausible.posteriors.predictive import Draws
from plausible.posteriors.saving import Content


class MixturePosterior(Posterior):
    """An equal mixture of `parts`: each gives the same number of draws, the first ones one more where that is not even."""

    kind = "mixture"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], parts: Sequence[Posterior]):
        super().__init__(method, model, run)
        self.parts = list(parts)

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, parts: Sequence[Posterior]) -> Self:
        # what the parts infer: a method may train some weights as points by itself
        return cls(method, model.restricted(parts[0].model.random), record_of(fitted), parts)

    def content(self) -> Content:
        return Content(parts=self.parts)

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        return cls(method, model, run, content.parts)

    def _shares(self, draws: int | None, seed: int) -> Iterator[tuple[Posterior, int | None, int]]:
        """Each part with its share of the draws and its own seed."""
        for k, part in enumerate(self.parts):
            share = None if draws is None else draws // len(self.parts) + (k < draws % len(self.parts))
            if share != 0:
                yield part, share, seed + k

    def num_draws(self, draws: int | None) -> int:
        return sum(part.num_draws(share) for part, share, _ in self._shares(draws, 0))

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        values = [part._evaluated(inputs, share, its_seed, batch_size) for part, share, its_seed in self._shares(draws, seed)]
        return Draws(torch.cat([v.outputs for v in values]), tree.concatenate([dict(v.weights) for v in values]))

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        return tree.concatenate(
            [part.weights(share, its_seed) for part, share, its_seed in self._shares(check_draws(draws), seed)]
        )

    def starting_points(self, members: int) -> Weights:  # noqa: ARG002
        """One of each part."""
        return tree.concatenate([tree.index(part.starting_points(1), slice(-1, None)) for part in self.parts])

    @property
    def masks(self) -> Weights:
        """Those of the parts, stacked: name → [parts, *shape]."""
        return tree.stack([part.masks for part in self.parts])
