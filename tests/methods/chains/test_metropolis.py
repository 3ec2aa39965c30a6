"""Random-walk Metropolis: its law on skewed and correlated densities, detailed balance, and what the warm-up finds."""

from __future__ import annotations

import math

import pytest
import torch

from plausible.blocks.chains.density import FunctionDensity, run
from plausible.blocks.chains.integrators import Dense
from plausible.methods.chains.metropolis import Metropolis
from tests.helpers.kernel_laws import gaussian, require_balance, require_invariance, require_moments, skewed


@pytest.mark.parametrize(("law", "metric"), [(gaussian(), "dense"), (skewed(), "diag")], ids=["gaussian", "skewed"])
def test_moments(law, metric) -> None:
    method = Metropolis(draws=250, chains=64, warmup=250, metric=metric)
    require_moments(run(method, law.target, law.draw(64, 1))["position"], law)


def test_law_is_kept() -> None:
    require_invariance(Metropolis(draws=1, chains=4000, warmup=0, thin=4, step_size=1.0, adapt=False), skewed())


def test_detailed_balance() -> None:
    require_balance(Metropolis(draws=1, chains=20_000, warmup=0, step_size=1.5, adapt=False), skewed())


def test_transition_density_on_a_grid() -> None:
    """From one point, proposals are taken with min(1, π'/π): where they end has that density, and the rest stays."""
    method = Metropolis(draws=1, chains=200_000, warmup=0, step_size=1.0, adapt=False)
    target = FunctionDensity(lambda q: (0.7 * q - q.exp()).sum(-1), 1)
    start = torch.full((200_000, 1), 0.3, dtype=torch.float64)
    end = run(method, target, start)["position"][-1][:, 0]
    grid = torch.linspace(-5, 5, 4001, dtype=torch.float64)
    ratio = (0.7 * (grid - 0.3) - grid.exp() + math.exp(0.3)).exp().clamp(max=1)
    density = ratio * torch.exp(-0.5 * (grid - 0.3).square()) / math.sqrt(2 * math.pi)
    stayed = 1 - torch.trapezoid(density, grid)
    for low, high in ((-3.0, -1.0), (-1.0, 0.0), (0.0, 0.29), (0.31, 1.0), (1.0, 2.0)):
        inside = (grid >= low) & (grid <= high)
        expected = float(torch.trapezoid(density[inside], grid[inside]))
        error = math.sqrt(expected * (1 - expected) / 200_000)
        assert abs(float(((end > low) & (end <= high)).double().mean()) - expected) < 4.5 * error + 1e-4
    error = math.sqrt(float(stayed) * (1 - float(stayed)) / 200_000)
    assert abs(float((end == 0.3).double().mean()) - float(stayed)) < 4.5 * error


@pytest.mark.slow
def test_warmup_finds_scale_and_shape() -> None:
    law = gaussian()
    result = run(Metropolis(draws=200, chains=64, warmup=600, metric="dense"), law.target, law.draw(64, 2))
    assert abs(float(result["acceptance"].mean()) - 0.234) < 0.08
    metric = result["state"].adaptation.metric
    assert isinstance(metric, Dense)
    torch.testing.assert_close(metric.covariance.diagonal().sqrt(), law.variance.sqrt(), rtol=0.25, atol=0)
    scale = metric.covariance.diagonal().sqrt()
    torch.testing.assert_close(metric.covariance / scale / scale[:, None], 0.2 * torch.eye(3).double() + 0.8, rtol=0, atol=0.1)


def test_statistics_and_settings() -> None:
    law = gaussian()
    result = run(Metropolis(draws=5, chains=3, warmup=0, step_size=0.3, adapt=False), law.target, law.draw(3, 0))
    assert set(result["leapfrogs"].unique().tolist()) == {1.0}
    assert not result["divergent"].any()
    torch.testing.assert_close(result["step_size"], torch.full((5, 3), 0.3, dtype=torch.float64))
    joint = torch.cat([law.target.densities(law.draw(3, 0))[0][None], result["log_joint"][:-1]])
    torch.testing.assert_close(result["energy"], -joint)
    with pytest.raises(ValueError, match="Metropolis: metric must be one of 'diag', 'dense', 'unit', got 'lowrank'"):
        Metropolis(metric="lowrank")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target_acceptance"):
        Metropolis(target_acceptance=1.0)
