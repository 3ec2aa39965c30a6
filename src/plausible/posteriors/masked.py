"""The posterior of a network with dropout of its own: trained weights, and masks that are drawn anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from plausible.blocks.masks import masked
from plausible.core import weights as tree
from plausible.core.draws import outputs_of_draws
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.engine.method import Fitted
from plausible.posteriors.base import Posterior, check_draws, record_of
from plausible.posteriors.draws import try_network
from plausible.posteriors.laws import DRAWS
from plausible.posteriors.predictive import Draws
from plausible.posteriors.saving import Content


class MaskedPosterior(Posterior):
    """Draws of masks, each shared by all inputs: coherent functions f(x; w, m), w the trained `point`."""

    kind = "masked"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], point: Weights):
        super().__init__(method, model, run)
        self.point = point

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted) -> Self:
        return cls(method, model, record_of(fitted), tree.clone({**fitted.state.weights, **fitted.state.buffers}))

    def content(self) -> Content:
        return Content({"point": self.point})

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        return cls(method, model, run, content.group("point", {**model.initial, **model.buffers}))

    def num_draws(self, draws: int | None) -> int:
        return DRAWS if draws is None else draws

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        model = masked(self.model, inputs)

        def source(first: int, count: int) -> Weights:
            return tree.stack([model.draw(number, seed) for number in range(first, first + count)])

        total = self.num_draws(draws)
        values, noise = outputs_of_draws(model, source, total, inputs, fixed=self.kept(self.point), batch_size=batch_size)
        return Draws(values, noise)

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:  # noqa: ARG002
        """The weights that were trained, which all draws share: what differs between draws are the masks."""
        count = self.num_draws(check_draws(draws))
        point = self.kept(tree.select(self.point, self.model.random))
        return {name: value.expand(count, *value.shape).clone() for name, value in point.items()}

    def starting_points(self, members: int) -> Weights:  # noqa: ARG002
        return {name: value.unsqueeze(0) for name, value in self.kept(self.point).items()}

    def networks(self) -> list[tuple[Weights, Weights | None]]:
        return [(self.kept(tree.select(self.point, self.model.random)), None)]

    def try_inputs(self, inputs: Any) -> tuple[int, ...]:
        return try_network(self, inputs)

    def status(self, name: str) -> str:
        return "trained under dropout" if name in self.model.random else super().status(name)


def has_dropout(model: Model, example: Any) -> bool:
    """Whether the network drops anything in training; what is drawn inside of PyTorch's recurrent modules is refused."""
    with torch.random.fork_rng(devices=[]):
        return bool(masked(model, example).calls)
