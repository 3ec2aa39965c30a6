"""The statistics that batch norms see at given weights: running means and variances of training belong to other ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from plausible.core.model import Model
from plausible.core.weights import Weights


class BatchNorms:
    """The batch norms of a model: `shares` are their running means and variances among its buffers, each with its momentum."""

    def __init__(self, model: Model, shares: dict[str, float]):
        # dropout and the like stay off
        quiet = [n for n, m in model.network.named_modules() if n and not isinstance(m, nn.modules.batchnorm._NormBase)]
        self.model, self.shares = replace(model, evaluated=tuple({*model.evaluated, *quiet})), shares

    @classmethod
    def of(cls, model: Model) -> Self | None:
        """None where there are none whose statistics move."""
        shares: dict[str, float] = {}
        for place, module in model.network.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                share = (
                    1.0 if module.momentum is None else module.momentum
                )  # None: the mean of all batches, of which there is one
                names = [f"{place}.{name}" if place else name for name in ("running_mean", "running_var")]
                shares |= {name: share for name in names if name in model.buffers and share}
        return cls(model, shares) if shares else None

    def statistics(self, weights: Weights, x: Any) -> Weights:
        """Those of the rows x at these weights, by the names of the buffers; gradients do not pass through them."""
        held = {name: weight.detach() for name, weight in weights.items()}
        zero = 0 * sum(weight.sum() for weight in held.values())  # stacked under vmap, where buffers must be stacked as well
        buffers = {n: torch.zeros_like(b) + zero if n in self.shares else b.clone() for n, b in self.model.buffers.items()}
        network = self.model.network
        network.eval()  # so that it is put into training mode as this model says
        with torch.no_grad():
            self.model.outputs({**held, **buffers}, x, train=True)
        network.eval()
        return {name: buffers[name] / share for name, share in self.shares.items()}


class SeenNorm(nn.modules.batchnorm._BatchNorm):
    """y = γ(x − m)/√(v + ε) + β with the mean m and the variance v of the rows that it was shown last, while `looking`.

    Gradients pass through m and v, which they do not in `nn.BatchNorm`: a density over weights has these slopes too.
    """

    looking: bool
    seen: tuple[Tensor, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        if self.looking:
            axes = [0, *range(2, x.ndim)]
            variance, mean = torch.var_mean(x, axes, correction=0)
            rows = x.numel() // x.shape[1]
            self.seen = mean, variance * (rows / max(1, rows - 1))  # as running variances are
        else:
            mean, variance = self.seen
        shape = (1, -1, *[1] * (x.ndim - 2))
        y = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)


class Renormed:
    """A model whose batch norms have the statistics of certain rows at the very weights: one function of weights and inputs."""

    def __init__(self, model: Model, shares: Mapping[str, float], rows: Any):
        network = copy.deepcopy(model.network)
        self.norms = []
        for place, module in network.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and f"{place}.running_mean".lstrip(".") in shares:
                module.__class__ = SeenNorm  # in its place, under its names
                self.norms.append(module)
        self.model, self.rows = replace(model, network=network), rows

    def outputs(self, weights: Mapping[str, Tensor], x: Any) -> Tensor:
        """f(x; w) in evaluation mode but for batch norms, after a pass over the rows."""
        for looking, inputs in ((True, self.rows), (False, x)):
            for norm in self.norms:
                norm.looking = looking  # type: ignore[assignment]
            outputs = self.model.outputs(weights, inputs)
        for norm in self.norms:
            del norm.seen  # tensors of somebody's transform
        return outputs
