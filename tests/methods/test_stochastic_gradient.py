"""SGHMC, SGNHT and PSGLD: their stationary laws on many one-dimensional Gaussian posteriors, against the exact discretised ones.

The problem is that of `test_sgld`. Where batches matter they are drawn independently, with replacement, so that the noise of
gradients is white; its variance is then N²/B times that of one example's gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core import random
from plausible.core.data import Batch, as_data
from plausible.engine.method import Run
from plausible.methods.stochastic_gradient.base import StochasticGradientChain
from tests.methods.test_sgld import COLUMNS, NOISE, PRECISION, SCALE, Columns, N, Z, _assert_law, _data, _mean, _run, _settings

ALL: dict[str, StochasticGradientChain] = {"psgld": pl.PSGLD(), "sghmc": pl.SGHMC(), "sgnht": pl.SGNHT()}


def _white(method: StochasticGradientChain, batch: int, steps: int, drop: int) -> tuple[Tensor, Any]:
    """Standardised draws [S, COLUMNS] of a chain over independent batches, and the last state."""
    x, y = _data()
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(Columns(), pl.likelihoods.Gaussian(scale=NOISE), pl.priors.Gaussian(SCALE), data.all(), num_data=N)
    run = Run.alone(method, model, data)
    state = method.start(model, run, random.key(0))
    stream, kept = torch.Generator().manual_seed(1), []
    with torch.no_grad():
        for step in range(steps):
            rows = torch.randint(N, (batch,), generator=stream)
            state, _ = method.step(model, run, state, Batch(x[rows], y[rows]))
            if step >= drop:
                kept.append(state.weights["theta"].clone())
    return (torch.stack(kept).double() - _mean(y)) * math.sqrt(PRECISION), state


def _noise(batch: int) -> Tensor:
    """Var[∇̂] of a batch drawn with replacement, for each column, in units of Λ."""
    return N**2 / batch * _data()[1].double().var(0, correction=0) / NOISE**4 / PRECISION


# ---------------------------------------------------------------------------------------------------------------------
# SGHMC


@pytest.mark.parametrize(("rate", "friction"), [(0.3, 0.2), (1.5, 0.2), (1.0, 0.7)])
def test_sghmc_has_exactly_the_stated_bias(rate: float, friction: float) -> None:
    method = pl.SGHMC(epochs=1500, batch_size=None, lr=rate / PRECISION, friction=friction, burn_in=0.1, thin=2)
    draws, _ = _run(method)
    _assert_law(draws, 1 / (1 - rate / (2 * (2 - friction))))  # 1.09, 1.71 and 1.63
    with pytest.raises(AssertionError):
        _assert_law(draws, 1.0)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_sghmc_scales_the_variance_with_the_temperature(temperature: float) -> None:
    settings: dict[str, Any] = {"lr": 0.5 / PRECISION, "friction": 0.4, "temperature": temperature}
    draws, _ = _run(pl.SGHMC(epochs=900, batch_size=None, burn_in=0.1, thin=2, **settings))
    _assert_law(draws, temperature / (1 - 0.5 / 3.2))


@pytest.mark.parametrize(("batch", "noise"), [(5, 0.0), (20, 0.0), (20, 0.05)])
def test_sghmc_has_the_variance_that_batches_add(batch: int, noise: float) -> None:
    rate, friction = 0.1, 0.3
    method = pl.SGHMC(epochs=1, lr=rate / PRECISION, friction=friction, noise=noise, burn_in=0.0)
    draws, _ = _white(method, batch, steps=2500, drop=150)
    # θ'' = (1 + a − κ)θ' − aθ + noise of variance q, an autoregression of second order
    q = rate * (2 * (friction - noise) + rate * _noise(batch))
    exact = (2 - friction) * q / (friction * rate * (2 * (2 - friction) - rate))
    assert float((exact.mean() - 1).abs()) > 0.1
    _assert_law(draws / exact.sqrt(), 1.0)


def test_sghmc_that_knows_the_noise_of_batches_adds_less_of_its_own() -> None:
    rate, batch = 0.02, 10
    beta = rate * float(_noise(batch).mean()) / 2  # η·Var[∇̂]/2
    method = pl.SGHMC(epochs=1, lr=rate / PRECISION, friction=0.2, noise=beta, burn_in=0.0)
    draws, _ = _white(method, batch, steps=4000, drop=500)
    assert float(draws.square().mean()) == pytest.approx(1.0, abs=0.03)


def test_sghmc_of_friction_one_is_sgld_of_twice_the_step() -> None:
    settings: dict[str, Any] = {"epochs": 30, "batch_size": 20, "burn_in": 0.0, "thin": 1}
    heavy, _ = _run(pl.SGHMC(lr=0.2 / PRECISION, friction=1.0, **settings))
    light, _ = _run(pl.SGLD(lr=0.4 / PRECISION, **settings))
    torch.testing.assert_close(heavy, light, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rate", "friction"), [(0.5, 0.2), (3.0, 0.3)])
def test_baoab_has_no_bias_in_full_batches(rate: float, friction: float) -> None:
    settings: dict[str, Any] = {"friction": friction, "splitting": "baoab", "burn_in": 0.1, "thin": 2}
    draws, _ = _run(pl.SGHMC(epochs=1800, batch_size=None, lr=rate / PRECISION, **settings))
    _assert_law(draws, 1.0)  # by the Euler steps 1.16 and, at 3.0, nearly 9


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_baoab_has_the_variance_that_batches_add(noise: float) -> None:
    rate, friction, batch = 0.1, 0.3, 10
    method = pl.SGHMC(epochs=1, lr=rate / PRECISION, friction=friction, noise=noise, burn_in=0.0, splitting="baoab")
    draws, _ = _white(method, batch, steps=2500, drop=150)
    # the noise of gradients in (θ, v): both components of a kick e are moved, θ by e(2 − α)/2 and v by e(1 − α)
    a, lam = 1 - friction, rate
    forward = torch.tensor([[1 - lam * (1 + a) / 2, (1 + a) / 2], [-lam * a, a]], dtype=torch.float64)
    bath = friction * (2 - friction) - 2 * a**2 * noise
    kick, rest = torch.tensor([(1 + a) / 2, a]).double(), torch.tensor([0.5, 1.0]).double()
    exact = []
    for extra in _noise(batch).tolist():
        source = rate**2 * extra * torch.outer(kick, kick) + rate * bath * torch.outer(rest, rest)
        whole = torch.eye(4, dtype=torch.float64) - torch.kron(forward, forward)
        exact.append(float(torch.linalg.solve(whole, source.flatten())[0]))
    found = torch.tensor(exact)
    assert abs(float(found.mean()) - 1) > 0.03
    _assert_law(draws / found.sqrt(), 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Control variates


@pytest.mark.parametrize("control", ["start", "svrg"])
def test_with_control_batches_have_the_law_of_full_gradients(control: Any) -> None:
    # the curvature of all rows is the same here, so that what an anchor knows leaves no noise at all
    rate, batch = 0.4, 7
    settings: dict[str, Any] = {"epochs": 1, "lr": rate / PRECISION, "burn_in": 0.0}
    draws, state = _white(pl.SGLD(**settings, control=control), batch, steps=1500, drop=100)
    _assert_law(draws, 1 / (1 - rate / 4))
    plain, _ = _white(pl.SGLD(**settings), batch, steps=300, drop=100)
    assert float(plain.square().mean()) > 1.5 * float(draws.square().mean())
    assert bool((state.control.anchor["theta"] == 0).all()) == (control == "start")


def test_the_gradient_at_an_anchor_is_that_of_all_rows_whatever_their_number_and_weights() -> None:
    stream = torch.Generator().manual_seed(3)
    x, weight = torch.randn(23, 2, generator=stream).double(), torch.rand(23, generator=stream).double()
    y = torch.randn(23, 1, generator=stream).double()
    data = as_data((x, y, weight), dtype=torch.float64, device=torch.device("cpu"))
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), data.all(), num_data=23)
    method = pl.SGLD(epochs=9, batch_size=5, lr=1e-3, control="svrg")
    run = Run.alone(method, model, data)
    state = method.start(model, run, random.key(0))
    anchors = []
    for step in range(21):
        before = state.weights
        state, _ = method.step(model, run, state, data.rows(torch.arange(5) + step % 3))
        if step % 5 == 0:
            anchors.append(before)
        exact = model.gradient(state.control.anchor, data.all()).grads
        for name, gradient in state.control.full.items():
            torch.testing.assert_close(gradient, exact[name])
    for name, value in state.control.anchor.items():
        torch.testing.assert_close(value, anchors[-2][name])  # the weights of an epoch ago


def test_control_is_refused_where_gradients_are_not_functions_of_rows_and_weights() -> None:
    x, y = _data()
    for layer in (nn.Dropout(0.1), nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match="control needs gradients"):
            pl.fit(nn.Sequential(Columns(3), layer), (x, y[:, :3]), pl.SGLD(control="start"), **_settings())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y[:, :3]), batch_size=20)
    with pytest.raises(ValueError, match="control='start'"):
        pl.fit(Columns(3), loader, pl.SGLD(control="svrg"), **_settings())


# ---------------------------------------------------------------------------------------------------------------------
# SGNHT


def _friction(rate: float, diffusion: float, noise: Tensor) -> float:
    """The friction at which the velocities of all columns together have the temperature 1."""
    q = 2 * diffusion + rate * float(noise.mean())
    alpha = diffusion
    for _ in range(200):
        alpha = 2 * q / (2 * (2 - alpha) - rate)
    return alpha


@pytest.mark.parametrize(("rate", "batch"), [(0.2, None), (1.0, None), (0.02, 5), (0.1, 30)])
def test_sgnht_finds_the_friction_for_any_noise_of_batches(rate: float, batch: int | None) -> None:
    noise = torch.zeros(COLUMNS).double() if batch is None else _noise(batch)
    method = pl.SGNHT(epochs=2200, batch_size=None, lr=rate / PRECISION, diffusion=0.1, burn_in=0.1, thin=2)
    if batch is None:
        draws, friction = _run(method)[0], None
    else:
        draws, state = _white(method, batch, steps=3000, drop=400)
        friction = float(state.momenta.friction)
    alpha = _friction(rate, 0.1, noise)
    if friction is not None:
        assert friction == pytest.approx(alpha, rel=0.1)
        assert alpha > 1.4 * _friction(rate, 0.1, 0 * noise)  # which is not what it would be without the noise
    q = 2 * 0.1 + rate * noise
    exact = (2 - alpha) * q / (alpha * (2 * (2 - alpha) - rate))
    assert float(exact.mean()) == pytest.approx(1 - alpha / 2)  # the stated law
    _assert_law(draws / exact.sqrt(), 1.0)


def test_sgnht_keeps_any_temperature() -> None:
    method = pl.SGNHT(epochs=2000, batch_size=None, lr=0.2 / PRECISION, diffusion=0.1, burn_in=0.2, thin=2, temperature=3.0)
    _assert_law(_run(method)[0], 3 * (1 - _friction(0.2, 0.1, torch.zeros(1)) / 2))


# ---------------------------------------------------------------------------------------------------------------------
# PSGLD


@pytest.mark.parametrize(("size", "temperature"), [(0.4, 1.0), (1.6, 1.0), (0.8, 0.25)])
def test_psgld_at_rest_has_exactly_the_stated_bias(size: float, temperature: float) -> None:
    # G = N/√E∇², where E∇² = Λ²·variance: ε such that εGΛ is `size`
    variance = temperature / (1 - size / 4)
    lr = size / PRECISION * (PRECISION * variance) ** 0.5 / N
    method = pl.PSGLD(
        epochs=4000, batch_size=None, lr=lr, decay=0.999, damping=1e-9, burn_in=0.3, thin=4, temperature=temperature
    )
    draws, _ = _run(method)
    _assert_mean_square(draws, variance, slack=0.01)  # V has a little in common with θ


def _assert_mean_square(draws: Tensor, variance: float, slack: float) -> None:
    ratio = draws.square().mean(0) / variance
    assert abs(float(ratio.mean()) - 1) < Z * float(ratio.std()) / math.sqrt(COLUMNS) + slack


def test_psgld_has_the_variance_that_batches_add() -> None:
    lr, batch, noise = 2e-3, 10, _noise(10)
    draws, _ = _white(pl.PSGLD(epochs=1, lr=lr, decay=0.999, damping=1e-9, burn_in=0.0), batch, steps=5000, drop=1500)
    exact = torch.ones(COLUMNS).double()
    for _ in range(50):  # G by the noise of gradients, the law by G
        size = lr * N * (PRECISION / (exact + noise)).sqrt()  # εGΛ
        exact = (size + size**2 / 4 * noise) / (1 - (1 - size / 2) ** 2)
    assert float(exact.mean()) > 1.2
    _assert_mean_square(draws / exact.sqrt(), 1.0, slack=0.01)


def _by_grid(size: float, gamma: bool) -> float:
    """The variance of u' = u + (e/2)(−Gu + Γ) + √(eG)ξ with G = 1/(1 + |u|), on a grid."""
    u = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    metric = 1 / (1 + u.abs())
    centre = u + size / 2 * (-metric * u - gamma * metric.square() * u.sign())
    kernel = torch.softmax(-((u[None] - centre[:, None]) ** 2) / (2 * size * metric[:, None]), 1)
    law = torch.full_like(u, 1 / len(u))
    for _ in range(400):
        law = law @ kernel
    return float((law * u.square()).sum())


@pytest.mark.parametrize("gamma", [True, False])
def test_gamma_is_the_derivative_of_the_preconditioner(gamma: bool) -> None:
    # without memory G is a function of θ alone: 1/(λ + |∇|/N)
    size, damping = 0.3, PRECISION**0.5 / N
    lr = size * damping / PRECISION
    draws, _ = _run(pl.PSGLD(epochs=2500, batch_size=None, lr=lr, decay=0.0, damping=damping, gamma=gamma, burn_in=0.1, thin=4))
    exact = _by_grid(size, gamma)
    assert exact == pytest.approx(1.0, abs=0.1) if gamma else exact > 1.4
    _assert_law(draws, exact)


# ---------------------------------------------------------------------------------------------------------------------
# All


@pytest.mark.parametrize("name", ALL)
def test_the_step_that_is_found_is_stable_and_gives_its_law(name: str) -> None:
    x, y = _data()
    method = replace(ALL[name], epochs=2000, batch_size=None, thin=1)
    members = pl.fit(Columns(4), (x, y[:, :4]), pl.Ensemble(method, 40), **_settings())
    rates = members.history["lr"]
    assert rates[1000:] == rates[1000:1001] * 1000
    deviations = members.weights()["theta"].double() - _mean(y)[:4]
    found = PRECISION * deviations.square().view(40, -1).mean(1)
    assert 0.85 < float(found.mean()) < 1.5  # the share of a direction in four: 1/(1 − 1/4) for Langevin steps
    assert members.diagnostics()["rhat"] < 1.1


@pytest.mark.parametrize("name", ALL)
def test_points_move_without_noise(name: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Columns(2), Columns(2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.first(x), self.second(x)], 1)

    x, y = _data()
    lr = 5e-4 if name == "psgld" else 0.2 / PRECISION
    method = replace(ALL[name], epochs=500, batch_size=None, lr=lr, burn_in=0.8, thin=1)
    f = pl.fit(Two(), (x, y[:, :4]), method, where="first.*", **_settings()).functions(x[:1]).double().squeeze(1)
    assert float(f[:, :2].std(0).min()) > 0.05
    close = 2 * lr * N if name == "psgld" else 1e-4  # RMSProp turns round within its step
    torch.testing.assert_close(f[:, 2:], _mean(y)[2:4].expand(len(f), 2), rtol=0, atol=close)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (pl.SGHMC, {"friction": 0.0}, "friction must be"),
        (pl.SGHMC, {"friction": 1.5}, "friction must be"),
        (pl.SGHMC, {"noise": 0.2}, "noise=0.2 is more than friction=0.1 can take away"),
        (pl.SGHMC, {"noise": -0.1}, "noise must be"),
        (pl.SGHMC, {"splitting": "leapfrog"}, "splitting must be"),
        (pl.SGLD, {"control": "mode"}, "control must be"),
        (pl.PSGLD, {"gamma": True, "control": "svrg"}, "take one of the two"),
        (pl.SGNHT, {"diffusion": 0.0}, "diffusion must be"),
        (pl.SGNHT, {"gain": 0.0}, "gain must be"),
        (pl.SGNHT, {"lr": 1e-3, "temperature": 0.0}, "a thermostat needs a temperature"),
        (pl.PSGLD, {"decay": 1.0}, "decay must be"),
        (pl.PSGLD, {"damping": 0.0}, "damping must be"),
        (pl.PSGLD, {"gamma": 1}, "gamma must be True or False"),
    ],
)
def test_bad_settings_are_refused_by_name(method: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        method(**settings)
