"""Measured variances of gradients agree with closed forms on one layer, and the closed forms with each other."""

from __future__ import annotations

import pytest
import torch

from experiments.gradient_variance import WAYS, closed_form, exact


@pytest.mark.slow
def test_measured_variances_are_those_of_the_closed_forms() -> None:
    deviations = closed_form(repeats=400, seed=0)
    assert set(deviations) == set(WAYS)
    assert max(deviations.values()) < 4.5, deviations


def test_closed_forms_of_one_weight() -> None:
    """w scalar: additive S²σ²; multiplicative (b + ra)² + 2r²b² with a = Sθ − T, b = Sσ (θ > 0); local Σ x⁴σ²."""
    x, y = torch.tensor([[1.0], [2.0], [-0.5]]).double(), torch.tensor([0.3, -1.0, 2.0]).double()
    theta, sigma = torch.tensor([0.7]).double(), torch.tensor([1.3]).double()
    found = exact(x, y, theta, sigma)
    square, product = float((x * x).sum()), float((x[:, 0] * y).sum())
    a, b, r = square * 0.7 - product, square * 1.3, 1.3 / 0.7
    assert float(found["additive"]) == pytest.approx(square**2 * 1.3**2)
    assert float(found["multiplicative"]) == pytest.approx((b + r * a) ** 2 + 2 * r**2 * b**2)
    assert float(found["local"]) == pytest.approx(float((x**4).sum()) * 1.3**2)


def test_multiplicative_noise_is_worse_the_larger_alpha() -> None:
    x, y = torch.randn(20, 4).double(), torch.randn(20).double()
    theta = torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
    found = exact(x, y, theta, torch.full((4,), 0.5).double())
    ratio = found["multiplicative"] / found["additive"]
    assert (ratio.diff() > 0).all()
    assert ratio[-1] > 1000
