"""Microcanonical Langevin: unit directions, the exact turn, a bias that falls with the step, and what the warm-up tunes."""

from __future__ import annotations

import math

import pytest
import torch

import plausible as pl
from plausible.blocks.chains.density import FunctionDensity, run
from plausible.core import random
from plausible.methods.chains.microcanonical import MCLMC, turned, unit
from tests.helpers.kernel_laws import gaussian, require_invariance, require_moments, skewed


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_turn_solves_its_equation() -> None:
    """du/dt = (I − uuᵀ)g/(P − 1) and dK/dt = u·g, by many small Runge–Kutta steps."""
    u, g, time = unit(normal(6, 5)), 3 * normal(6, 5, seed=1), torch.linspace(-0.9, 1.3, 6, dtype=torch.float64)
    rate = lambda v: (g - (v * g).sum(-1, keepdim=True) * v) / 4  # noqa: E731
    v, kinetic, steps = u, torch.zeros(6, dtype=torch.float64), 2000
    h = (time / steps)[:, None]
    for _ in range(steps):
        k1 = rate(v)
        k2 = rate(v + h / 2 * k1)
        k3 = rate(v + h / 2 * k2)
        k4 = rate(v + h * k3)
        kinetic = kinetic + h[:, 0] * ((v + h / 2 * k2) * g).sum(-1)
        v = v + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    found, gained = turned(u, g, time)
    torch.testing.assert_close(found, v, rtol=0, atol=1e-8)
    torch.testing.assert_close(gained, kinetic, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(6, dtype=torch.float64))


def test_turn_does_not_overflow_and_leads_back() -> None:
    u, g = unit(normal(4, 3)), normal(4, 3, seed=1)
    far, gained = turned(u, 1e8 * g, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(far, unit(g), rtol=0, atol=1e-6)
    assert gained.isfinite().all()
    there, plus = turned(u, g, torch.ones(4, dtype=torch.float64))
    back, minus = turned(there, g, -torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(back, u)
    torch.testing.assert_close(plus, -minus)


def test_directions_keep_their_length() -> None:
    law = gaussian()
    state = run(MCLMC(draws=300, chains=8, warmup=100, thin=1), law.target, law.draw(8, 0))["state"]
    torch.testing.assert_close(state.adaptation.direction.norm(dim=-1), torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-12)


def test_directions_are_forgotten_over_the_length() -> None:
    """Without a gradient noise alone turns u: E u·u' = e^(−ε/L) for each step."""
    target = FunctionDensity(lambda q: 0 * q.sum(-1), 400)
    method = MCLMC(draws=6, chains=200, warmup=0, thin=1, step_size=0.5, length=2.0)
    state = method.started(target, torch.zeros(200, 400, dtype=torch.float64), random.key(0))
    first = state.adaptation.direction
    for passed in range(1, 7):
        state, _ = method.advanced(target, state)
        cosine = (first * state.adaptation.direction).sum(-1).mean()
        assert abs(float(cosine) - math.exp(-0.25 * passed)) < 0.02


@pytest.mark.parametrize("integrator", ["leapfrog", "minimum-norm", "omelyan"])
def test_energy_errors_fall_with_the_order_of_the_scheme(integrator: str) -> None:
    """A path of one unit of time: the largest energy error over it shrinks like ε² or ε⁴."""
    law = skewed((0.7, 2.0, 1.0, 3.0))
    start, errors = law.draw(50, 0), []
    for count in (32, 64):
        method = MCLMC(draws=count, chains=50, warmup=0, thin=1, step_size=1 / count, length=1e9, integrator=integrator)
        errors.append(float(run(method, law.target, start)["energy"].abs().max()))
    order = math.log2(errors[0] / errors[1])
    expected = 4 if integrator == "omelyan" else 2
    assert abs(order - expected) < 0.5


def test_energy_is_that_of_the_path() -> None:
    """The accumulated error is what density and kinetic energy say: without noise, kicks alone change the latter."""
    law = gaussian()
    method = MCLMC(draws=20, chains=4, warmup=0, thin=1, step_size=0.02, length=1e9)
    result = run(method, law.target, law.draw(4, 0))
    assert float(result["energy"].abs().max()) < 1e-2
    assert float((result["log_joint"][-1] - result["log_joint"][0]).abs().max()) > 0.02


def test_small_steps_keep_the_law() -> None:
    require_invariance(
        MCLMC(draws=1, chains=4000, warmup=0, thin=60, step_size=0.05, length=1.5, metric="unit"), skewed((0.7, 2.0, 1.0))
    )


@pytest.mark.parametrize("law", [gaussian(), skewed((0.7, 2.0, 1.0))], ids=["gaussian", "skewed"])
def test_moments(law) -> None:
    method = MCLMC(draws=60, chains=128, warmup=250, thin=3, energy_variance=1e-5)
    require_moments(run(method, law.target, law.draw(128, 1))["position"], law, slack=0.02)


def test_bias_falls_with_the_step() -> None:
    """Of a standard normal in 20 dimensions; a quarter of the error, or less, for half the step."""
    target = FunctionDensity(lambda q: -0.5 * q.square().sum(-1), 20)
    errors, noise = [], 0.0
    for step in (8.0, 4.0, 2.0):
        method = MCLMC(draws=60, chains=400, warmup=0, thin=max(1, int(8 / step)), step_size=step, length=6.0)
        values = run(method, target, normal(400, 20))["position"][10:].square().mean(-1)
        errors.append(float(values.mean()) - 1)
        noise = max(noise, float(values.mean(0).std()) / 20)  # chains are independent
    assert abs(errors[0]) > 10 * noise
    assert abs(errors[1]) < 0.4 * abs(errors[0]) + 2 * noise
    assert abs(errors[2]) < 0.4 * abs(errors[1]) + 2 * noise


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [5e-4, 2e-2])
def test_energy_variance_reaches_its_target(wanted: float) -> None:
    """Of single steps, for each weight; and the steps that do so are found from far off."""
    sigma = torch.logspace(-0.5, 0.5, 30).double()
    target = FunctionDensity(lambda q: -0.5 * (q / sigma).square().sum(-1), 30)
    method = MCLMC(draws=150, chains=32, warmup=400, thin=1, energy_variance=wanted)
    result = run(method, target, sigma * normal(32, 30))
    found = result["energy"].diff(dim=0).square().mean() / 30
    assert wanted / 2 < float(found) < wanted * 2
    scale = result["state"].adaptation.scale
    assert float((scale / sigma).min()) > 0.5
    assert float((scale / sigma).max()) < 2


def test_energy_variance_is_lowered_along_the_warmup() -> None:
    law = gaussian()
    first = MCLMC(draws=1, chains=16, warmup=40, thin=1, energy_variance=1e-4, initial_energy_variance=1e-1)
    steps = []
    with torch.no_grad():
        state = first.started(law.target, law.draw(16, 0), random.key(0))
        for _ in range(40):
            state, info = first.advanced(law.target, state)
            steps.append(float(info["step_size"].mean()))
    assert steps[12] > 1.5 * steps[-1]


@pytest.mark.slow
def test_length_follows_the_autocorrelation() -> None:
    """L = 0.4 integrated autocorrelation times: longer where one coordinate is slow, as long as √P is long in a standard normal."""
    target = FunctionDensity(lambda q: -0.5 * q.square().sum(-1), 25)
    result = run(MCLMC(draws=1, chains=16, warmup=400, thin=1), target, normal(16, 25))
    length = result["state"].adaptation.length
    assert 1.5 < float(length.mean()) < 15  # √25 = 5
    given = run(MCLMC(draws=1, chains=4, warmup=100, thin=1, length=2.5, step_size=0.3), target, normal(4, 25))[
        "state"
    ].adaptation
    assert set(given.length.tolist()) == {2.5}
    assert set(given.step.tolist()) == {0.3}


def test_walls_are_turned_back_from() -> None:
    """Outside of a ball the density is not a number: such steps are marked, never stored, and the steps of the warm-up shrink."""
    target = FunctionDensity(lambda q: torch.where(q.square().sum(-1) < 4, -0.5 * q.square().sum(-1), math.nan), 3)
    result = run(MCLMC(draws=200, chains=16, warmup=60, thin=1), target, 0.3 * normal(16, 3))
    assert 0 < float(result["divergent"].mean()) < 0.5
    assert result["position"].isfinite().all()
    assert result["log_joint"].isfinite().all()
    assert result["energy"].isfinite().all()
    assert float(result["position"].square().sum(-1).max()) < 4


def test_settings() -> None:
    with pytest.raises(ValueError, match="MCLMC: needs at least two weights"):
        run(MCLMC(draws=1, warmup=0), FunctionDensity(lambda q: -q.square().sum(-1), 1), torch.zeros(4, 1).double())
    with pytest.raises(ValueError, match="energy_variance"):
        MCLMC(energy_variance=0.0)
    with pytest.raises(ValueError, match="integrator must be one of"):
        MCLMC(integrator="euler")
    with pytest.raises(ValueError, match="MCLMC: metric must be 'diag' or 'unit'"):
        MCLMC(metric="dense")  # type: ignore[arg-type]
    assert pl.MCLMC.traits.bias


def test_chains_go_on() -> None:
    """What `extend` adds is what a longer run would have had."""
    x = torch.linspace(-1, 1, 20)[:, None]
    y = x.sin() + 0.1 * normal(20, 1).float()
    net = torch.nn.Linear(1, 1)
    settings = {"progress": False, "compile": False, "likelihood": pl.likelihoods.Gaussian(scale=0.1)}
    long = pl.fit(net, (x, y), MCLMC(draws=12, chains=2, warmup=60, thin=2), **settings)
    short = pl.fit(net, (x, y), MCLMC(draws=5, chains=2, warmup=60, thin=2), **settings).extend(draws=7)
    assert torch.equal(long.functions(x), short.functions(x))
