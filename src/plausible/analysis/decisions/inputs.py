"""What decisions are given, checked once: a `Predictive`, or plain arrays.

    class probabilities   [N, C], [S, N, C] of S draws, [N] of P(y = 1) for yes/no targets
    samples of y          [S, N] or [S, N, outputs]
    draws of a function   [S, N] or [S, N, 1]: row s is one function over all N inputs

Everything leaves as float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.metrics.inputs import CLASSES, NUMBERS, class_probabilities, sampled, whole
from plausible.analysis.metrics.inputs import _refuse as refuse
from plausible.core.conversion import as_tensor
from plausible.core.random import isolated
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive


def need(predictive: Predictive, kinds: tuple[str, ...], what: str, instead: str, name: str = "predictive") -> None:
    """Refuse predictives without inputs, and those of another kind."""
    if predictive.likelihood.kind not in kinds:
        raise TypeError(f"{name} has {predictive.likelihood.kind} targets ({predictive.likelihood}), {what}: use {instead}")
    if not predictive.num_inputs:
        raise ValueError(f"{name} is empty: there is nothing to decide without inputs")


def filled(values: Any, name: str) -> Tensor:
    given = as_tensor(values, name)
    if given.numel() == 0:
        raise ValueError(f"{name} is empty (shape {list(given.shape)}): there is nothing to decide without inputs")
    return given


def gathered(
    predictive: Predictive, function: Callable[[slice, Any], Tensor], axis: int = 0, draws: int = 0, what: str = ""
) -> Tensor:
    """function(rows, law of each target of these rows), block by block, joined along the inputs' axis.

    With `draws` it is given the distributions of the S draws, [S, n, *O], which belong together over outputs and inputs.
    """
    with torch.no_grad():
        parts = [function(*block) for block in (blocks(predictive, draws) if draws else predictive._laws())]
    values = double(torch.cat(parts, axis))[0].cpu()
    if bool(values.isnan().any()):
        raise ValueError(f"predictive gives {what or 'a value'} of NaN: its outputs are not finite, or it has no mean")
    return values


def blocks(predictive: Predictive, draws: int) -> Iterator[tuple[slice, distributions.Distribution]]:
    """Rows and their distributions, [S, n, *O], in float64; so small that `draws` of them fit into memory."""
    for rows, outputs, weights in predictive._blocks(draws):
        yield rows, predictive.likelihood(outputs, weights)


def mean_probabilities(predictive: Any) -> Tensor:
    """P(y = c), [N, ..., C], draws averaged."""
    if isinstance(predictive, Predictive):
        return class_probabilities(predictive)
    probs = _plain_probabilities(predictive)
    return probs.mean(0) if probs.ndim == 3 else probs


def draw_probabilities(predictive: Any, purpose: str) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and P(y = c | f_s) for them, [S, n, ..., C]."""
    if not isinstance(predictive, Predictive):
        probs = _plain_probabilities(predictive)
        if probs.ndim < 3:
            raise ValueError(
                f"predictive has shape {list(probs.shape)}, but {purpose} needs the probabilities of several draws: pass "
                "a Predictive, or an array [draws, N, classes]"
            )
        yield slice(0, probs.shape[1]), probs
        return
    need(predictive, CLASSES, f"but {purpose} is about classes here", "a likelihood of classes")
    with torch.no_grad():
        for rows, given in blocks(predictive, predictive.num_draws):
            logits: Tensor = given.logits  # type: ignore[attr-defined]
            probs = logits.exp()
            if predictive.likelihood.kind == "binary":
                probs = torch.stack([torch.sigmoid(-logits), torch.sigmoid(logits)], -1)
            refuse(~torch.isfinite(probs), "the probabilities of predictive must be finite")
            yield rows, double(probs)[0].cpu()


def _plain_probabilities(values: Any) -> Tensor:
    probs = class_probabilities(filled(values, "predictive"))
    if probs.ndim > 3:
        raise ValueError(
            f"predictive has shape {list(probs.shape)}, expected probabilities [N], [N, classes] or [draws, N, classes]: "
            "pass a Predictive for anything larger"
        )
    return probs


def outcomes(predictive: Any, samples: int, seed: int) -> Tensor:
    """Samples of y, [m, S, N, *O]: m from each of the S draws, m·S ≥ `samples`; a plain array counts as one draw."""
    if not isinstance(predictive, Predictive):
        values = sampled(filled(predictive, "predictive"))
        if len(values) < 2:
            raise ValueError("predictive has 1 sample of y; an expectation needs at least 2")
        return values.unsqueeze(1)
    need(predictive, NUMBERS, "but this is about numbers", "a utility matrix, or a callable without outcomes='numbers'")
    each = max(2, math.ceil(whole("samples", samples, 2) / predictive.num_draws))
    # The draws of a GPU are sampled on it, so its generator is the one to be put back.
    device = predictive._draws(slice(0, 1)).outputs.device
    held = each * predictive.num_draws
    with isolated(seed, device):
        values = gathered(predictive, lambda _, given: given.sample((each,)), axis=2, draws=held, what="samples")
    refuse(~torch.isfinite(values), "samples of predictive must be finite")
    return values


def function_draws(values: Any, name: str = "predictive") -> Tensor:
    """E[y | f_s] for one output, [S, N]: of a `Predictive`, or a plain array of draws."""
    if isinstance(values, Predictive):
        need(values, NUMBERS, "but this needs a function with real values", "bald, or decide", name)
        drawn = gathered(values, lambda _, given: given.mean, axis=1, draws=values.num_draws, what="a mean")
    else:
        drawn = sampled(filled(values, name), name)
    drawn = drawn.squeeze(-1) if drawn.ndim == 3 and drawn.shape[-1] == 1 else drawn
    if drawn.ndim != 2:
        raise ValueError(
            f"{name} has draws of shape {list(drawn.shape)}, expected one number per input, [draws, N] or [draws, N, 1]: "
            "pass the draws of one output, such as posterior.functions(x)[..., 0]"
        )
    refuse(~torch.isfinite(drawn), f"the draws of {name} must be finite")
    return drawn


def aligned(value: Any, shape: torch.Size | tuple[int, ...], name: str) -> Tensor:
    """A number, one per input [N], or one per target, shaped to broadcast with targets of this shape [N, ...]."""
    given = as_tensor(value, name).double().cpu()
    refuse(~torch.isfinite(given), f"{name} must be finite")
    if given.ndim == 0 or given.shape == tuple(shape):
        return given
    if given.shape == tuple(shape[:1]):
        return given.reshape(-1, *(1,) * (len(shape) - 1))
    raise ValueError(
        f"{name} has shape {list(given.shape)}, expected a number, one for each of {shape[0]} inputs, or one for each "
        f"target, {list(shape)}"
    )


def target_shape(predictive: Predictive) -> tuple[int, ...]:
    return predictive.likelihood.target_shape((predictive.num_inputs, *predictive.output_shape))


def rows_of(value: Tensor, rows: slice, like: Tensor) -> Tensor:
    """The part of an `aligned` value that belongs to these rows, on the device of the block."""
    return (value[rows] if value.ndim else value).to(like)
