"""The best parameters of an objective in closed form, for the laws that methods state about themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plausible.core.weights import Weights, clone


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
