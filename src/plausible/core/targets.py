"""Targets in whatever unit: whether a network speaks in it already, and the likelihood that translates where it does not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.core.data import Batch, Data, num_rows
from plausible.core.likelihoods import Likelihood, Scaled
from plausible.core.model import Model
from plausible.core.networks import as_initialised
from plausible.core.special import widest

ENOUGH = 2048
"""Rows that are looked at; of arrays the moments are those of all."""
NEAR = 1e-3
"""Targets whose mean and deviation are as near as this to 0 and 1 are standardised already: weights that are put back into the
network then speak in the user's own unit."""
EXPLAINED = 0.5
"""A network whose squared error (of classes: negative log-likelihood) is below this part of what the mean of the targets (the
frequencies of the classes) leaves was trained before: one that was just made may be right by chance, but hardly so right."""
GIVEN = 0.9
"""The same where somebody says that the weights are to stay as they are."""


class Look(NamedTuple):
    """What the first rows say: mean and standard deviation of each target, and whether the network predicts them already."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    trained: bool


def look(model: Model, data: Data, given: bool = False) -> Look:
    """One look at the data, which may be a stream that should be read no oftener than needed."""
    batches: list[Batch] = []
    outputs: list[Tensor] = []
    rows = 0
    fresh = not given and as_initialised(model.network)  # then nothing was learned, whatever it may predict
    # a few rows of a data set at a time, which may be images; a loader has batches of its own
    for batch in data.chunks(256 if data.resident else 16):
        if rows < ENOUGH and not fresh:
            with torch.no_grad():
                outputs.append(model.outputs({**model.initial, **model.buffers}, batch.x))
        batches.append(batch._replace(x=None))
        rows += num_rows(batch.y)
        if rows >= ENOUGH and not data.resident:
            break
    if not batches:
        raise ValueError("data is empty: the loader gave no batch")
    seen = _together(batches)
    if model.likelihood.kind != "continuous":
        mean, std = seen.y.new_zeros(1), seen.y.new_ones(1)
    else:
        mean, std = moments(seen)
    left = _left(model, torch.cat(outputs), seen, mean) if outputs else math.inf
    return Look(tuple(mean.tolist()), tuple(std.tolist()), left < (GIVEN if given else EXPLAINED))


def _together(batches: list[Batch]) -> Batch:
    parts: list[Any] = []
    for each in zip(*((b.y, b.weight, b.mask) for b in batches)):
        parts.append(None if any(part is None for part in each) else torch.cat(each))
    return Batch(None, *parts)


def _left(model: Model, f: Tensor, seen: Batch, mean: Tensor) -> float:
    """The part of the squares about the mean (of the surprise of the frequencies) that the outputs leave; infinite if unknown."""
    y = seen.y[: len(f)]
    if model.likelihood.kind == "continuous":
        if f.shape != y.shape and f.ndim == y.ndim:
            f = f[..., : y.shape[-1]]  # further outputs are no locations
        if f.shape != y.shape:
            return math.inf
        y, f = y.to(widest(f.device)), f.to(widest(f.device))
        observed = torch.ones_like(y) if seen.mask is None else seen.mask[: len(f)].to(y)
        errors = (observed * (y - f).square()).sum()
        scatter = (observed * (y - (mean if y.ndim > 1 else mean[0]).to(y)).square()).sum()
    elif model.likelihood.kind == "classes" and f.ndim == 2 and seen.mask is None:
        shares = torch.bincount(y, minlength=f.shape[-1]).to(f) / len(y)
        errors = -f.log_softmax(-1).gather(-1, y[:, None]).mean()
        scatter = -shares[y].log().mean()
    else:
        return math.inf
    value = float(errors / scatter)
    return value if math.isfinite(value) else math.inf


def moments(batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the targets, weighted, observed ones only, by their last axis.

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


def in_their_units(likelihood: Likelihood, seen: Look) -> Likelihood:
    """The likelihood of targets that are standardised inside; as it is where they are already, or are not real numbers."""
    if likelihood.kind != "continuous" or isinstance(likelihood, Scaled):
        return likelihood
    if all(abs(mean) <= NEAR and abs(std - 1) <= NEAR for mean, std in zip(seen.mean, seen.std)):
        return likelihood
    return Scaled(likelihood, *(part[0] if len(part) == 1 else part for part in (seen.mean, seen.std)))
