"""Damped Gauss-Newton steps: one for a quadratic, uphill always, and no step into what is not a number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from plausible.blocks.ascent import begin_climb, climb
from plausible.blocks.curvature.dense import Dense
from plausible.blocks.curvature.layers import Layer
from plausible.blocks.curvature.structures import Curvature
from plausible.core.weights import Weights

LAYER = Layer(("w",), "vector", ((2,),), biased=False, weighted=True, transposed=False, groups=1)
ONE = torch.ones((), dtype=torch.float64)


def _problem(residuals, precision: float = 0.1):
    """Σ ½r(w)² + ½τ|w|² to be lowered, with the Gauss-Newton curvature; and the values that were seen."""
    seen: list[float] = []
    tau = {"w": torch.tensor(precision, dtype=torch.float64)}

    def objective(w: Tensor) -> Tensor:
        return -0.5 * residuals(w).square().sum() - 0.5 * precision * w.square().sum()

    def joint(weights: Weights) -> tuple[Tensor, Weights]:
        w = weights["w"].clone().requires_grad_()
        value = objective(w)
        seen.append(float(value.detach()))
        return value.detach(), {"w": torch.autograd.grad(value, w)[0]}

    def at(weights: Weights) -> tuple[Curvature, Weights, Tensor]:
        j = torch.func.jacrev(residuals)(weights["w"])
        return Curvature([Dense([LAYER], j.T @ j)], "full"), tau, ONE

    return at, joint, seen


def climbed(weights: Weights, at: Any, joint: Any, iterations: int) -> Weights:
    """Where so many steps lead, or fewer that arrive."""
    now = begin_climb(weights, joint)
    for _ in range(iterations):
        if not bool(now.over):
            now = climb(now, at, joint)
    return now.weights


def test_a_quadratic_takes_few_steps() -> None:
    a = torch.tensor([[1.0, 30.0], [0.5, 31.0], [2.0, -7.0]], dtype=torch.float64)
    b = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    at, joint, _ = _problem(lambda w: a @ w - b)
    found = climbed({"w": torch.zeros(2, dtype=torch.float64)}, at, joint, 10)["w"]
    exact = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(2, dtype=torch.float64), a.T @ b)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("iterations", [3, 200])
def test_a_curved_valley_is_climbed_and_never_left(iterations: int) -> None:
    """Rosenbrock's valley, whose floor bends: every step taken is uphill, and the end is the optimum."""
    at, joint, seen = _problem(lambda w: torch.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]), precision=1e-9)
    start = {"w": torch.tensor([-1.2, 1.0], dtype=torch.float64)}
    found = climbed(start, at, joint, iterations)
    assert float(joint(found)[0]) == max(seen)
    if iterations == 200:
        torch.testing.assert_close(found["w"], torch.ones(2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_steps_into_what_is_not_a_number_are_not_taken() -> None:
    at, joint, seen = _problem(lambda w: torch.stack([3 * torch.log(w[0]) - 3, w[1]]), precision=1e-6)
    found = climbed({"w": torch.tensor([9.0, 1.0], dtype=torch.float64)}, at, joint, 100)["w"]
    assert any(math.isnan(value) for value in seen)  # the first step goes beyond 0
    assert float(found[0]) == pytest.approx(math.e, abs=1e-2)
