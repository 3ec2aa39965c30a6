"""Steps reach the acceptance asked for, windows are Stan's, moments are those of the draws."""

from __future__ import annotations

import itertools

import pytest
import torch

from plausible.blocks.chains import adaptation
from plausible.blocks.chains.adaptation import DualAveraging, Warmup, first_step, moments_for, windows
from plausible.blocks.chains.density import FunctionDensity, Point
from plausible.blocks.chains.integrators import Dense, Diagonal, LowRank, integrate, metric_for, shrunk


def test_windows_are_stans() -> None:
    """As CmdStan's default of 1000 and some others; every window but the last is twice as long as the one before."""
    assert windows(1000) == (75, (99, 149, 249, 449, 949))
    assert windows(500) == (75, (99, 149, 249, 449))
    assert windows(200) == (75, (99, 149))
    assert windows(150) == (75, (99,))
    assert windows(100) == (15, (89,))  # 15 : 75 : 10
    assert windows(20) == (3, (17,))
    assert windows(19) == (19, ())
    assert windows(0) == (0, ())
    for warmup in range(20, 3000, 7):
        first, ends = windows(warmup)
        lengths = [b - a for a, b in zip((first - 1, *ends), ends)]
        assert all(b == 2 * a for a, b in itertools.pairwise(lengths[:-1]))
        assert min(lengths) > 0
        assert ends[-1] < warmup


def test_dual_averaging_finds_the_root() -> None:
    """Chains with known acceptance curves a(ε) = exp(−ε/s): the final step is s·log(1/0.8), each chain its own."""
    scale = torch.tensor([0.01, 1.0, 30.0], dtype=torch.float64)
    averaging = DualAveraging.begin(torch.ones(3))
    noise = torch.rand(3000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for level in noise:
        averaging = averaging.update(((-averaging.step / scale).exp() > level).double(), 0.8)
    torch.testing.assert_close(averaging.final / scale, torch.full_like(scale, -(torch.tensor(0.8).log())), rtol=0.25, atol=0)


def test_dual_averaging_formula() -> None:
    """Two updates by hand, with γ = 0.05, t₀ = 10, κ = 0.75 and μ = log 10ε₀."""
    averaging = DualAveraging.begin(torch.tensor([0.5])).update(torch.tensor([0.3]), 0.8)
    centre = torch.tensor(5.0, dtype=torch.float64).log()
    error = 0.5 / 11
    first = centre - error / 0.05
    assert float(averaging.log_step) == pytest.approx(float(first))
    assert float(averaging.averaged) == pytest.approx(float(first))
    averaging = averaging.update(torch.tensor([1.0]), 0.8)
    error = (1 - 1 / 12) * error - 0.2 / 12
    second = centre - error * 2**0.5 / 0.05
    fade = 2**-0.75
    assert float(averaging.log_step) == pytest.approx(float(second))
    assert float(averaging.averaged) == pytest.approx(float(fade * second + (1 - fade) * first))


def test_dual_averaging_forgives_nan() -> None:
    averaging = DualAveraging.begin(torch.tensor([0.5, 0.5])).update(torch.tensor([float("nan"), 0.0]), 0.8)
    assert averaging.step[0] == averaging.step[1]
    assert averaging.step.isfinite().all()


def test_first_step_crosses() -> None:
    """One step of the size found is accepted with at least 0.8, one of twice the size is not; whatever the scale."""
    scale = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)
    target = FunctionDensity(lambda q: -0.5 * (q / scale[: len(q), None]).square().sum(-1), 50)
    stream = torch.Generator().manual_seed(0)
    position = scale[:, None] * torch.randn(3, 50, generator=stream, dtype=torch.float64)
    noise = torch.randn(3, 50, generator=stream, dtype=torch.float64)
    metric, found = metric_for("diag", position), target.evaluate(position)
    point = Point(position, noise, *found)

    def gain(step: torch.Tensor) -> torch.Tensor:
        end = integrate(target, metric, point, step, 1)
        return metric.kinetic(noise) - found.log_likelihood - metric.kinetic(end.momentum) + end.log_likelihood

    limit = torch.tensor(0.8, dtype=torch.float64).log()
    for start in (1e-6, 1.0, 1e5):
        step = first_step(target, metric, position, found, noise, torch.full((3,), start))
        assert (gain(step) > limit).all()
        assert (gain(2 * step) <= limit).all()
        assert (step / scale).max() < 4


def _draws(count: int = 40, chains: int = 3, size: int = 4) -> torch.Tensor:
    stream = torch.Generator().manual_seed(0)
    mixing = torch.randn(size, size, generator=stream, dtype=torch.float64)
    centres = 100 * torch.randn(chains, size, generator=stream, dtype=torch.float64)  # chains apart must not count
    return centres + torch.randn(count, chains, size, generator=stream, dtype=torch.float64) @ mixing


def test_moments() -> None:
    """Pooled within chains: the mean over chains of their own (co)variances, shrunk by all draws together."""
    draws = _draws()
    pooled = torch.stack([torch.cov(draws[:, c].mT) for c in range(3)]).mean(0)
    diagonal, dense, low = (moments_for(kind, draws[0]) for kind in ("diag", "dense", "lowrank"))
    for draw in draws:
        diagonal, dense, low = (m.add(draw, -draw) for m in (diagonal, dense, low))
    metric = diagonal.metric(torch.float64)
    assert isinstance(metric, Diagonal)
    torch.testing.assert_close(metric.inverse_mass, shrunk(pooled.diagonal(), 120.0))
    metric = dense.metric(torch.float64)
    assert isinstance(metric, Dense)
    torch.testing.assert_close(metric.covariance, shrunk(pooled, 120.0))
    torch.testing.assert_close(metric.factor @ metric.factor.mT, metric.covariance)
    metric = low.metric(torch.float64)
    assert isinstance(metric, LowRank)
    torch.testing.assert_close(metric.scale, torch.ones(4, dtype=torch.float64))  # draws and gradients alike


def test_recent_draws_only() -> None:
    """The low-rank window holds the latest; older ones make room."""
    draws = _draws(count=300, chains=16)
    moments = moments_for("lowrank", draws[0])
    for draw in draws:
        moments = moments.add(draw, -2 * draw)
    assert len(moments.positions) == 16
    torch.testing.assert_close(moments.positions.sum(0), draws[-16:].sum(0))


@pytest.mark.parametrize("slopes", ["each", "pooled"])
def test_masses_from_draws_and_gradients(slopes: str) -> None:
    """√(Var q / Var ∇), by chain or over all; on a Gaussian √(Σ_ii/Λ_ii)."""
    draws = _draws(count=4000)
    precision = torch.linalg.inv(torch.cov((draws - draws.mean(0)).flatten(0, 1).mT))
    gradients = -(draws - draws.mean(0)) @ precision
    moments = moments_for("diag", draws[0], slopes=slopes)
    for draw, gradient in zip(draws, gradients):
        moments = moments.add(draw, gradient)
    metric = moments.metric(torch.float64)
    assert isinstance(metric, Diagonal)
    if slopes == "each":
        torch.testing.assert_close(metric.inverse_mass, (draws.var(0) / gradients.var(0)).sqrt())
    else:
        exact = (torch.linalg.inv(precision).diagonal() / precision.diagonal()).sqrt()
        torch.testing.assert_close(metric.inverse_mass, exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("slopes", ["none", "each", "pooled"])
@pytest.mark.parametrize("kind", ["diag", "dense", "lowrank", "unit"])
def test_update(kind: str, slopes: str) -> None:
    """Metrics change at the ends of windows alone, the step after the last transition is the average, shapes stay."""
    warmup = Warmup(200, metric=kind, slopes=slopes)
    draws = _draws(count=200)
    state = adaptation.begin(warmup, draws[0], 0.1)
    shapes = [x.shape for x in torch.utils._pytree.tree_leaves(state)]
    asked = []
    for number, draw in enumerate(draws):
        before = state
        acceptance = torch.tensor([0.6, 0.8, 0.9])

        def find(_: object, step: torch.Tensor, number: int = number) -> torch.Tensor:
            asked.append(number)
            return step

        state = adaptation.update(state, warmup, number, draw, -(2 + number) * draw, acceptance, find)
        same = all(torch.equal(a, b) for a, b in zip(before.metric, state.metric))
        assert same == (number not in (99, 149) or kind == "unit")
        assert [x.shape for x in torch.utils._pytree.tree_leaves(state)] == shapes
    assert asked == ([] if kind == "unit" else [99, 149])
    torch.testing.assert_close(state.step, state.averaging.final)
    assert state.step[0] < state.step[1] < state.step[2]
    assert adaptation.update(state, warmup, 200, draws[0], draws[0], torch.ones(3)) is state


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="target_acceptance must lie in"):
        Warmup(10, target=1.2)
    with pytest.raises(ValueError, match="metric must be one of"):
        Warmup(10, metric="round")  # type: ignore[arg-type]
