"""Adversarial training: each batch is joined by its worst neighbours within a box around the inputs.

    x' = x + r · sign(∇_x −log p(y | x, w)),   r = ε · (max − min of each input over the data)

Goodfellow et al. (2015), Explaining and harnessing adversarial examples; used for deep ensembles, with ε = 0.01, by
Lakshminarayanan et al. (2017). The log-likelihood is then the mean of the two, a smoothing of the target in input space: no
posterior of the plain model has this density.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plausible.core.data import Batch, Data
from plausible.core.transforms import value_and_gradient

if TYPE_CHECKING:
    from plausible.core.model import Model


def input_range(data: Data) -> Tensor:
    low, high = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    for batch in data.chunks(1024):
        if not isinstance(batch.x, Tensor) or not batch.x.is_floating_point():
            got = str(batch.x.dtype) if isinstance(batch.x, Tensor) else type(batch.x).__name__
            raise ValueError(f"adversarial: inputs must be one floating-point tensor to be moved, got {got}; use adversarial=0")
        least, most = batch.x.amin(0), batch.x.amax(0)
        low, high = torch.minimum(low.to(least), least), torch.maximum(high.to(most), most)
    return high - low


def with_neighbours(
    model: Model, weights: Mapping[str, Tensor], batch: Batch, buffers: Mapping[str, Tensor], radius: Tensor, *, train: bool
) -> Batch:
    """The batch and, below it, its copy moved by `radius` to where the log-likelihood falls: twice the rows.

    Costs one forward and one backward pass beside those of the doubled batch.
    """

    def loss(inputs: dict[str, Tensor], *rest: Any) -> tuple[Tensor, tuple[()]]:
        w, part, buffered = rest
        # running statistics must not see this pass
        moving = {name: b.clone() for name, b in buffered.items()}
        return -model.log_likelihood({**w, **moving}, part._replace(x=inputs["x"]), train=train).sum(), ()

    _, _, slopes = value_and_gradient(loss, {"x": batch.x}, dict(weights), batch._replace(x=None), dict(buffers))
    moved = batch._replace(x=batch.x + radius * slopes["x"].sign())
    return pytree.tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, batch, moved)
