"""Pieces of variational objectives: entropies, expectations under the prior, weights of the KL term, exact optima."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plausible.core.priors import Prior
from plausible.core.schedules import Schedule, rate
from plausible.core.transforms import transformed
from plausible.core.weights import Weights, clone, flatten, select

HALF_LOG_2PIE = 0.5 * math.log(2 * math.pi * math.e)
MANY = 8
"""Weights above which they are joined on a GPU."""


def entropy(scales: Mapping[str, Tensor]) -> Tensor:
    """H(q) = Σ log σ + ½ log 2πe of independent Gaussians, in nats: 0-d."""
    count = sum(scale.numel() for scale in scales.values())
    if joins(scales):
        return flatten(scales).log().sum() + HALF_LOG_2PIE * count
    return torch.stack([scale.log().sum() for scale in scales.values()]).sum() + HALF_LOG_2PIE * count


def joins(weights: Mapping[str, Tensor]) -> bool:
    """Whether many weights are better treated as one vector: on a GPU, where each of them would take kernels of its own.

    Not where some lie in memory in another order (channels last), which would be lost on the way.
    """
    first = next(iter(weights.values()))
    alike = all(w.is_cuda and w.dtype is first.dtype and w.is_contiguous() for w in weights.values())
    return len(weights) > MANY and alike and not transformed()


def expected_log_prior(
    prior: Prior, means: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> tuple[Tensor, tuple[str, ...]]:
    """E_q log p(w) over the weights with a closed form, in nats, and the names of those that have none."""
    first = next(iter(means.values()))
    if joins(means) and (known := prior.precisions(means)) and all(known.values()):
        return _expected_by_precisions(known, means, scales), ()
    total, rest = torch.zeros((), dtype=first.dtype, device=first.device), []
    for name, mean in means.items():
        term = prior.expectation(name, mean, scales[name])
        if term is None:
            rest.append(name)
        else:
            total = total + term
    return total, tuple(rest)


def _expected_by_precisions(known: Mapping[str, float], means: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> Tensor:
    """Σ −½λ(μ² + σ²) + ½ log λ/2π under centred Gaussian priors, a few kernels for each λ."""
    terms = []
    for precision in set(known.values()):
        names = [name for name in means if known[name] == precision]
        mean, scale = flatten(select(means, names)), flatten(select(scales, names))
        terms.append(-0.5 * precision * (mean @ mean + scale @ scale) + 0.5 * len(mean) * math.log(precision / (2 * math.pi)))
    return torch.stack(terms).sum()


def blundell(step: Tensor, batches: int) -> Tensor:
    """M·π_i with π_i = 2^{M−i}/(2^M − 1) = 2^{−i}/(1 − 2^{−M}), i = 1 … M the batch within its epoch: 0-d, mean 1 over an epoch.

    Blundell et al. (2015), eq. 9: the first batches feel the prior, the later ones the data. Finite for any M.
    """
    i = (step % batches + 1).to(torch.float32)
    # both powers of 2 over 2^M: neither overflows
    return torch.exp2(-i) * (batches / (1.0 - 2.0**-batches))


def kl_weight(kind: str | float | Schedule, step: Tensor, steps: int, batches: int) -> Tensor | float:
    """The factor of the KL term at this step; 1 is the bound itself."""
    if kind == "uniform":
        return 1.0
    if kind == "blundell":
        return blundell(step, batches)
    return rate(kind, step, steps)  # type: ignore[arg-type]


def inverse_softplus(value: Tensor) -> Tensor:
    """ρ with log(1 + e^ρ) = value, also for small and large values."""
    # log(e^v − 1), which overflows for large v, written without e^v
    return value + torch.log(-torch.expm1(-value))


def maximise(objective: Callable[[Weights], Tensor], start: Weights, steps: int = 500) -> Weights:
    """The θ near `start` at which objective(θ), smooth and deterministic, is highest: L-BFGS in float64."""
    theta = {name: value.double().requires_grad_() for name, value in clone(start).items()}
    search = torch.optim.LBFGS(
        list(theta.values()), max_iter=steps, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        search.zero_grad()
        value = -objective(theta)
        value.backward()
        return value

    with torch.enable_grad():
        search.step(evaluate)  # type: ignore[arg-type]
    return clone(theta)
