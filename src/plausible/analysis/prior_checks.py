"""What a prior believes before any data: the predictive under weights drawn from the prior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plausible.core import random
from plausible.core.data import Batch, num_rows, read_inputs, take
from plausible.core.draws import outputs_of_draws
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.priors import Prior, as_prior
from plausible.core.weights import index
from plausible.posteriors.predictive import Predictive


def prior_predictive(
    network: nn.Module,
    x: Any,
    likelihood: Likelihood,
    *,
    prior: Prior | Mapping[str, Prior] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    draws: int = 100,
    seed: int = 0,
) -> Predictive:
    """p(y | x) = ∫ p(y | f(x; w)) p(w) dw by `draws` draws of w ~ p(w): draw it before you fit.

    The functions themselves are `.functions`, [draws, N, *outputs]. Needs no targets; the module is not changed. An improper
    prior cannot be drawn from and raises ValueError.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}")
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"likelihood must be one of plausible.likelihoods, such as Gaussian(), got {likelihood!r}")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise ValueError(f"draws must be a whole number of at least 1, got {draws!r}")
    first = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
    inputs = read_inputs(x, dtype=first.dtype, device=first.device)
    if num_rows(inputs) == 0:
        raise ValueError("x is empty: there is nothing to predict")
    # A model is built from an example of its data; of the inputs a few are enough, and targets are not looked at.
    example = Batch(take(inputs, slice(8)), torch.zeros(0))  # no targets are needed
    model = Model.build(
        network, likelihood, as_prior(prior), example, num_data=1, output=output, device=first.device, check_targets=False
    )
    weights = model.prior.sample(model.initial, random.generator(seed, 11), draws)
    drawn = lambda first, count: index(weights, slice(first, first + count))  # noqa: E731
    with torch.no_grad():
        functions, noise = outputs_of_draws(model, drawn, draws, inputs, fixed=model.buffers)
    return Predictive.from_functions(functions, likelihood, noise)
