"""ChEES: one length for all chains, where the criterion is largest; and the law of HMC whatever it is."""

from __future__ import annotations

import math

import pytest
import torch

from plausible.blocks.chains.density import FunctionDensity, Point, run
from plausible.blocks.chains.integrators import Diagonal
from plausible.methods.chains.chees import ChEES, criterion_slope, van_der_corput
from tests.helpers.kernel_laws import gaussian, require_balance, require_invariance, require_moments, skewed


@pytest.mark.parametrize("law", [gaussian(), skewed()], ids=["gaussian", "skewed"])
def test_moments(law) -> None:
    method = ChEES(draws=100, chains=64, warmup=120)
    require_moments(run(method, law.target, law.draw(64, 1))["position"], law)


def test_law_is_kept() -> None:
    method = ChEES(draws=1, chains=4000, warmup=0, thin=3, step_size=0.7, length=2.5, adapt=False)
    require_invariance(method, skewed())


def test_detailed_balance() -> None:
    require_balance(ChEES(draws=1, chains=20_000, warmup=0, step_size=0.9, length=2.0, adapt=False), skewed())


def test_slope_of_the_criterion() -> None:
    """On N(0, σ²) paths are x cos t/σ + σp sin t/σ, the criterion is Σσ⁴ sin² t/σ, its slope Σσ³ sin 2t/σ."""
    stream = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    x, p = (torch.randn(400_000, 3, generator=stream, dtype=torch.float64) for _ in range(2))
    x = x * scale
    blank = torch.zeros(400_000, dtype=torch.float64)
    for time in (0.4, 1.1, 2.0, 3.0):
        turn = time / scale
        end = Point(x * turn.cos() + scale * p * turn.sin(), p * turn.cos() - x / scale * turn.sin(), blank, blank, x)
        found = criterion_slope(Diagonal(torch.ones(3).double()), Point(x, p, blank, blank, x), end, torch.ones_like(blank))
        expected = (scale**3 * (2 * turn).sin()).sum()
        assert abs(float(found - expected)) < 0.15, time
    masses = Diagonal(scale**2)  # whitened: three unit coordinates
    turn = torch.tensor(0.6).double()
    momentum = p / scale
    end = Point(x * turn.cos() + scale * p * turn.sin(), momentum * turn.cos() - x / scale**2 * turn.sin(), blank, blank, x)
    found = criterion_slope(masses, Point(x, momentum, blank, blank, x), end, torch.ones_like(blank))
    assert abs(float(found) - 3 * math.sin(1.2)) < 0.05


def test_chains_that_failed_do_not_count() -> None:
    stream = torch.Generator().manual_seed(1)
    x, p, q = (torch.randn(50, 3, generator=stream, dtype=torch.float64) for _ in range(3))
    blank = torch.zeros(50, dtype=torch.float64)
    acceptance = torch.ones_like(blank)
    masses = Diagonal(torch.ones(3).double())
    acceptance[7] = 0.0
    good = criterion_slope(masses, Point(x, p, blank, blank, x), Point(q, p, blank, blank, x), acceptance)
    q[7] = math.nan
    assert criterion_slope(masses, Point(x, p, blank, blank, x), Point(q, p, blank, blank, x), acceptance) == good


def best_length(scale: torch.Tensor) -> float:
    """Where Σσ⁴ E_h sin²(hT/σ) is largest, h ~ U(0, 1): on one scale T = 2.247σ."""
    lengths = torch.linspace(0.01, 8 * float(scale.max()), 20_000, dtype=torch.float64)[:, None]
    value = (scale**4 * (0.5 - (2 * lengths / scale).sin() / (4 * lengths / scale))).sum(1)
    return float(lengths[value.argmax()])


@pytest.mark.parametrize("scale", [[1.0, 0.1], [3.0, 3.0, 3.0, 0.4, 0.4]], ids=["1 : 0.1", "3 : 0.4"])
def test_finds_the_best_length(scale) -> None:
    """Within a fifth of the closed form; the criterion is flat around it."""
    sigma = torch.tensor(scale, dtype=torch.float64)
    target = FunctionDensity(lambda q: -0.5 * (q / sigma).square().sum(-1), len(scale))
    start = sigma * torch.randn(64, len(scale), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = run(ChEES(draws=20, chains=64, warmup=300, metric="unit"), target, start)
    found = float(result["state"].adaptation.length.averaged.exp())
    assert abs(found / best_length(sigma) - 1) < 0.2
    assert abs(float(result["leapfrogs"].mean() * result["step_size"].mean()) / (found / 2) - 1) < 0.3


def test_learns_masses_and_steps() -> None:
    sigma = torch.logspace(-2, 1, 12).double()
    target = FunctionDensity(lambda q: -0.5 * (q / sigma).square().sum(-1), 12)
    start = sigma * torch.randn(32, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = run(ChEES(draws=30, chains=32, warmup=300), target, start)
    tuned = result["state"].adaptation
    torch.testing.assert_close(tuned.shared.metric.inverse_mass.sqrt(), sigma, rtol=0.35, atol=0)
    assert 1.2 < float(tuned.length.averaged.exp()) < 3.5  # 2.247 less half a step
    harmonic = 1 / (1 / result["acceptance"].clamp(min=1e-6)).mean(1)
    assert 0.5 < float(harmonic.median()) < 0.95
    assert result["leapfrogs"].max() < 8


class Counting(FunctionDensity):
    """How often a path is asked for."""

    calls = 0

    def leapfrogs(self, *arguments, **settings) -> Point:
        self.calls += 1
        return super().leapfrogs(*arguments, **settings)


def test_all_chains_take_the_same_path_length_in_one_call() -> None:
    target = Counting(lambda q: -0.5 * q.square().sum(-1), 3)
    start = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = run(ChEES(draws=40, chains=8, warmup=0, step_size=0.1, length=2.0, adapt=False), target, start)
    assert target.calls == 40
    assert (result["leapfrogs"] == result["leapfrogs"][:, :1]).all()
    assert len(result["leapfrogs"][:, 0].unique()) > 10
    assert float(result["leapfrogs"].max()) == 20


def test_low_discrepancy() -> None:
    assert [van_der_corput(n) for n in range(1, 8)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]
    values = torch.tensor([van_der_corput(n) for n in range(1, 1024)]).sort().values
    torch.testing.assert_close(values, torch.arange(1, 1024) / 1024)


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"ChEES: chains must be at least 2, got 1.*NUTS"):
        ChEES(chains=1)
    with pytest.raises(ValueError, match="metric must be 'diag' or 'unit', got 'dense'"):
        ChEES(metric="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a length"):
        ChEES(adapt=False, step_size=0.1)
    target = FunctionDensity(lambda q: -0.5 * q.square().sum(-1), 3)
    kept = run(ChEES(draws=2, chains=4, warmup=30, length=1.7), target, torch.zeros(4, 3).double())
    assert float(kept["state"].adaptation.length.averaged.exp()) == pytest.approx(1.7)
    capped = run(
        ChEES(draws=8, chains=4, warmup=0, step_size=0.01, length=9.0, max_leapfrogs=5, adapt=False),
        target,
        torch.zeros(4, 3).double(),
    )
    assert float(capped["leapfrogs"].max()) == 5
