"""Targets in whatever unit: whether a network speaks in it already, and the likelihood that translates where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from plausible.core.data import ArrayData, Batch, Data
from plausible.core.likelihoods import Likelihood, Scaled
from plausible.core.model import Model
from plausible.core.special import widest

ENOUGH = 2048
"""Rows of a stream that its moments are taken from."""
CLOSE = 1e-3
"""Targets whose mean and standard deviation are this near to 0 and 1 are standardised already."""
EXPLAINED = 0.9
"""A network whose squared error is below this part of the variance speaks in the units of the targets: it was trained before."""


def some(data: Data, rows: int = ENOUGH) -> Batch:
    """All rows of arrays, the first ones of a stream."""
    if isinstance(data, ArrayData):
        return data.all()
    found: list[Batch] = []
    count = 0
    for batch in data.chunks(256):
        found.append(batch)
        count += len(batch.y)
        if count >= rows:
            break
    each = zip(*((b.y, b.weight, b.mask) for b in found))
    y, weight, mask = (None if any(part is None for part in parts) else torch.cat(list(parts)) for parts in each)
    return Batch(None, y, weight, mask)


def moments(batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the targets by their last axis (of one number an example: of all), weighted, observed ones only.

    0 and 1 where there is nothing to see; a target that never changes has deviation 1.
    """
    y = batch.y.to(widest(batch.y.device))
    flat = y.reshape(-1, y.shape[-1]) if y.ndim > 1 else y.reshape(-1, 1)
    share = torch.ones_like(y) if batch.weight is None else batch.weight.to(y).reshape(-1, *[1] * (y.ndim - 1)).expand_as(y)
    if batch.mask is not None:
        share = share * batch.mask
    share = share.reshape(flat.shape)
    total = share.sum(0).clamp(min=1e-300)
    mean = (share * flat).sum(0) / total
    std = ((share * (flat - mean).square()).sum(0) / total).sqrt()
    # a constant has the rounding error of its mean for a deviation
    constant = std <= 1e-12 * mean.abs().clamp(min=1e-300)
    return mean, torch.where(constant | (std == 0), torch.ones_like(std), std)


def in_their_units(likelihood: Likelihood, batch: Batch) -> Likelihood:
    """The likelihood of targets that are standardised inside; as it is where they are so already, or are not real numbers."""
    if likelihood.kind != "continuous" or isinstance(likelihood, Scaled):
        return likelihood
    mean, std = moments(batch)
    if bool(((mean.abs() < CLOSE) & ((std - 1).abs() < CLOSE)).all()):
        return likelihood
    loc, scale = _plain(mean), _plain(std)
    return Scaled(likelihood, loc, scale)


def _plain(values: Tensor) -> float | tuple[float, ...]:
    numbers = [float(value) for value in values]
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def speaks(model: Model, batches: Iterable[Batch]) -> bool:
    """Whether the network predicts these targets as it is, better than their mean does: it was trained before."""
    squares = spread = 0.0
    rows = 0
    mean: Tensor | None = None
    for batch in batches:
        with torch.no_grad():
            f = model.outputs({**model.initial, **model.buffers}, batch.x)
        if f.shape != batch.y.shape:  # outputs that are not all locations
            f = f[..., : batch.y.shape[-1]] if f.ndim == batch.y.ndim else f
        if f.shape != batch.y.shape:
            return False
        y = batch.y.to(widest(f.device))
        mean = moments(batch)[0] if mean is None else mean
        seen = torch.ones_like(y) if batch.mask is None else batch.mask.to(y)
        squares += float((seen * (y - f).square()).sum())
        spread += float((seen * (y - (mean if y.ndim > 1 else mean[0])).square()).sum())
        rows += len(y)
        if rows >= ENOUGH:
            break
    return math.isfinite(squares) and spread > 0 and squares < EXPLAINED * spread
