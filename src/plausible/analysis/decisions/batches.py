"""Several inputs to label at once: greedy by joint information, so that a batch does not ask the same thing twice.

The information of a set grows by less and less as it is filled (it is submodular), so that picking the best next input each time
reaches at least 1 − 1/e of the best set's (Nemhauser, Wolsey & Fisher 1978).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.analysis.decisions.acquiring import observation_noise
from plausible.analysis.decisions.inputs import draw_probabilities, filled, function_draws, refuse
from plausible.analysis.metrics.inputs import CLASSES, whole
from plausible.core import random
from plausible.posteriors.predictive import Predictive

_BLOCK = 2**24  # joint probabilities that are held at once


class Selection(NamedTuple):
    """`indices` int64 [size] in the order of choice, and `information` [size]: nats that the first k tell together."""

    indices: Tensor
    information: Tensor


def select_batch(predictive: Any, size: int, *, noise: Any = None, configurations: int = 4096, seed: int = 0) -> Selection:
    """Greedy argmax_B I[y_B; f]: `size` different inputs that together say most about the model.

    Numbers: ½ log det(1 + K_B/σ²) with the covariance K of the draws of E[y | f_s], exact where f is jointly Gaussian; each step
    conditions on those chosen, by one column of a Cholesky factor. `predictive` is a `Predictive` of one output, or draws [S, N]
    with `noise`, the variance of an observation, a number or one per input. Cost: size·N·(S + size).

    Classes: BatchBALD (Kirsch, van Amersfoort & Gal 2019), H[y_B] − Σ_{n∈B} E_s H[y_n | f_s]. `predictive` is a `Predictive` or
    probabilities [S, N, C]. The joint entropy sums over all C^|B| labellings while these are at most `configurations`, and over
    that many random ones by `seed` beyond. Cost: size·S·N·C·`configurations` at most. The information of S draws is at most
    log S: a large batch needs many draws.
    """
    count = whole("size", size, 1)
    limit = whole("configurations", configurations, 1)
    if isinstance(predictive, Predictive):
        classes = predictive.likelihood.kind in CLASSES
    else:
        predictive = filled(predictive, "predictive")
        classes = predictive.ndim == 3 and predictive.shape[-1] > 1
    if not classes:
        functions = function_draws(predictive)
        variance = observation_noise(predictive, functions, noise)
        refuse(variance <= 0, "noise must be positive: without it one observation has infinite information")
        return _gaussian(functions, variance, _fitting(count, functions.shape[1]))
    if noise is not None:
        raise ValueError("noise is for numbers: the labels of classes bring their own")
    probs = torch.cat([part for _, part in draw_probabilities(predictive, "a batch")], 1)
    probs = probs.squeeze(2) if probs.ndim == 4 and probs.shape[2] == 1 else probs
    if probs.ndim != 3:
        raise ValueError(
            f"predictive has {list(probs.shape[2:-1])} targets for each input, but select_batch takes one: score them by bald"
        )
    return _labellings(probs, _fitting(count, probs.shape[1]), limit, seed)


def _fitting(size: int, inputs: int) -> int:
    if size > inputs:
        raise ValueError(f"size is {size}, but predictive has only {inputs} inputs to choose from")
    return size


def _gaussian(functions: Tensor, noise: Tensor, size: int) -> Selection:
    """Greedy ½ log det(1 + K_B/σ²): `variance` is what is left of each f_n once the chosen are observed."""
    centred = (functions - functions.mean(0)) / len(functions) ** 0.5  # [S, N]: K = centredᵀ·centred
    variance = centred.square().sum(0)
    factor = torch.zeros(size, functions.shape[1], dtype=functions.dtype)
    free = torch.ones_like(variance, dtype=torch.bool)
    indices, information, total = [], [], 0.0
    for step in range(size):
        gain = 0.5 * torch.log1p(variance.clamp(min=0) / noise)
        best = int(torch.where(free, gain, -1.0).argmax())
        total += float(gain[best])
        indices.append(best)
        information.append(total)
        free[best] = False
        # One more column of the Cholesky factor of K_B + σ²: its squares are what the new observation takes from each variance.
        column = centred.T @ centred[:, best] - factor[:step].T @ factor[:step, best]
        factor[step] = column / (variance[best].clamp(min=0) + noise[best]).sqrt()
        variance = variance - factor[step].square()
    return Selection(torch.tensor(indices), torch.tensor(information, dtype=torch.float64))


def _labellings(probs: Tensor, size: int, limit: int, seed: int) -> Selection:
    """Greedy BatchBALD: `table` [S, K] holds P(labelling k of the chosen | f_s), `weight` [K] how many labellings k stands for."""
    draws, inputs, classes = probs.shape
    conditional = torch.special.entr(probs).sum(-1).mean(0)  # [N]
    table, weight = probs.new_ones(draws, 1), probs.new_ones(1)
    free = torch.ones(inputs, dtype=torch.bool)
    stream = random.generator(seed, 19)
    indices: list[int] = []
    information: list[float] = []
    noise = 0.0  # Σ of the chosen's conditional entropies
    for _ in range(size):
        score = _joint_entropy(table, weight, probs) - conditional - noise
        best = int(torch.where(free, score, -torch.inf).argmax())
        indices.append(best)
        information.append(float(score[best]))
        free[best] = False
        noise += float(conditional[best])
        table = (table.unsqueeze(-1) * probs[:, best].unsqueeze(1)).flatten(1)
        weight = weight.repeat_interleave(classes)
        # C^k labellings grow beyond memory: from here on they are drawn by their share of the sum, and weighted by its inverse.
        if len(weight) > limit:
            share = table.mean(0) * weight
            picks = torch.multinomial(share, limit, replacement=True, generator=stream)
            weight = share.sum() / (limit * table.mean(0)[picks])
            table = table[:, picks]
    return Selection(torch.tensor(indices), torch.tensor(information, dtype=torch.float64))


def _joint_entropy(table: Tensor, weight: Tensor, probs: Tensor) -> Tensor:
    """H[y_B, y_n] for each candidate n, [N]."""
    parts = []
    for block in probs.split(max(1, _BLOCK // (len(weight) * probs.shape[-1])), dim=1):
        joint = torch.einsum("sk,snc->nkc", table, block) / len(table)
        parts.append(torch.special.entr(joint).sum(-1) @ weight)
    return torch.cat(parts)
