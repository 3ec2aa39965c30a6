"""What a pass over the data says besides the curvature: the log likelihood and its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plausible.blocks.curvature.layers import Layer, Part
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights


class Tally:
    """Σ_n weight_n log p(y_n | f_n), in float64 (None before the first batch), and its gradient, by weight.

    Cost: one more column beside those of the curvature, and a product of the size of the weights.
    """

    def __init__(self) -> None:
        self.log_likelihood: Tensor | None = None
        self.columns: float | None = None
        """Columns of the outputs' Fisher that were looked at, on average over the examples."""
        self._sums: dict[Layer, Tensor] = {}

    @property
    def gradient(self) -> Weights:
        """∂/∂w of the sum, by weight."""
        return {n: v for layer, total in self._sums.items() for n, v in layer.named(total).items()}

    def slope(self, model: Model, weights: Mapping[str, Tensor], batch: Batch, outputs: Tensor) -> Tensor:
        """∂/∂f of a batch's part of the sum, [B, *O]; adds its value."""
        noise = model.noise(weights)

        def total(at: Weights) -> tuple[Tensor, tuple[()]]:
            each = model.likelihood.log_prob(at["outputs"], batch.y, noise)
            if batch.mask is not None:
                each = torch.where(batch.mask, each, torch.zeros_like(each))
            each = each.flatten(1).sum(1) if each.ndim > 1 else each
            return (each if batch.weight is None else each * batch.weight).sum(), ()

        value, _, found = value_and_gradient(total, {"outputs": outputs})
        value = value.detach().double()
        self.log_likelihood = value if self.log_likelihood is None else self.log_likelihood + value
        return found["outputs"]

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """Add the gradient, which is in the first column of the parts; the parts without that column."""
        for part in parts:
            own = Part(part.layer, part.columns, part.rows[:1])
            self._sums[part.layer] = own.summed(self._sums.get(part.layer))
        return [Part(part.layer, part.columns, part.rows[1:]) for part in parts]
