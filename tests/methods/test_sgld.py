"""SGLD: the stationary law itself, bias included, on many one-dimensional Gaussian posteriors at once.

Column d of the network is a problem of its own, y_id ~ N(θ_d, σ²) with θ_d ~ N(0, s²): posterior precision Λ = N/σ² + 1/s²
and, unlike for a regression, gradient noise that does not depend on θ. Columns are independent, so their spread gives the
Monte Carlo standard error of every average over columns.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
import plausible.testing
from plausible.core.schedules import Cyclical, Polynomial

N, COLUMNS, NOISE, SCALE = 60, 400, 1.5, 2.0
PRECISION = N / NOISE**2 + 1 / SCALE**2
Z = 5.0
QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Columns(nn.Module):
    """f(x) = θ for every example: [B, COLUMNS]."""

    def __init__(self, columns: int = COLUMNS):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(columns))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), -1)


def _data() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    y = torch.randn(COLUMNS, generator=stream) + NOISE * torch.randn(N, COLUMNS, generator=stream)
    return torch.zeros(N, 1), y


def _mean(y: Tensor) -> Tensor:
    """The exact posterior mean of every column."""
    return y.double().sum(0) / NOISE**2 / PRECISION


def _settings(**more: Any) -> dict[str, Any]:
    return {"likelihood": pl.likelihoods.Gaussian(scale=NOISE), "prior": pl.priors.Gaussian(SCALE), **QUIET, **more}


def _run(method: pl.Method, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Standardised draws √Λ(θ − mean) [S, COLUMNS] and the targets."""
    x, y = _data()
    posterior = pl.fit(Columns(), (x, y), method, **_settings(seed=seed))
    return (posterior.weights()["theta"].double() - _mean(y)) * math.sqrt(PRECISION), y


def _assert_mean(draws: Tensor) -> None:
    """Mean 0, also when columns are turned so that wrong shrinkage would show, to Monte Carlo accuracy over the columns."""
    for sign in (torch.ones(COLUMNS), _mean(_data()[1]).sign()):
        means = sign * draws.mean(0)
        assert abs(float(means.mean())) < Z * float(means.std()) / math.sqrt(COLUMNS)


def _assert_law(draws: Tensor, variance: float) -> None:
    """Mean 0 and this variance (in units of Λ⁻¹), to Monte Carlo accuracy over the columns."""
    _assert_mean(draws)
    ratio = draws.square().mean(0) / variance
    error = float(ratio.std()) / math.sqrt(COLUMNS)
    assert error < 0.02, "too noisy to tell"
    assert abs(float(ratio.mean()) - 1) < Z * error


# ---------------------------------------------------------------------------------------------------------------------
# Full batches


@pytest.mark.parametrize("rate", [0.4, 1.6])
def test_the_stationary_variance_has_exactly_the_stated_bias(rate: float) -> None:
    draws, _ = _run(pl.SGLD(epochs=600, batch_size=None, lr=rate / PRECISION, burn_in=0.1, thin=1))
    assert draws.shape == (540, COLUMNS)
    _assert_law(draws, 1 / (1 - rate / 4))  # 1.11 and 1.67: the bias itself is seen
    with pytest.raises(AssertionError):
        _assert_law(draws, 1.0)


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_temperature_scales_the_variance(temperature: float) -> None:
    method = pl.SGLD(epochs=500, batch_size=None, lr=0.8 / PRECISION, burn_in=0.1, thin=1, temperature=temperature)
    _assert_law(_run(method)[0], temperature / (1 - 0.8 / 4))


@pytest.mark.parametrize("temperature", [0.25, 1.0])
def test_the_step_that_it_finds_is_that_of_the_trace_and_its_law_has_the_bias_of_that_step(temperature: float) -> None:
    x, y = _data()
    method = pl.SGLD(epochs=1200, batch_size=None, thin=1, temperature=temperature)
    members = pl.fit(Columns(4), (x, y[:, :4]), pl.Ensemble(method, 40), **_settings())
    rates = members.history["lr"]
    assert rates[600:] == rates[600:601] * 600  # constant where draws are kept
    rate = rates[-1] * PRECISION
    # 4/tr with the variance that the step itself has: ε = 4(1 − εΛ/4)/(4Λ)
    assert abs(rate - 0.8) < 0.04
    deviations = members.weights()["theta"].double() - _mean(y)[:4]
    ratio = PRECISION * deviations.square().view(40, -1).mean(1) * (1 - rate / 4) / temperature
    assert abs(float(ratio.mean()) - 1) < Z * float(ratio.std()) / math.sqrt(40)


def test_a_start_far_away_and_any_scale_of_the_data_are_no_reason_to_diverge() -> None:
    x, y = _data()
    far = pl.SGLD(epochs=1500, batch_size=20)
    posterior = pl.fit(Columns(4), (x, 100 + y[:, :4]), far, **_settings(prior=pl.priors.Gaussian(1e4)))
    found = posterior.weights()["theta"].double()
    exact = 100 + y[:, :4].double().mean(0)
    assert float((found.mean(0) - exact).abs().max()) < 3 / math.sqrt(PRECISION)


def test_at_temperature_zero_it_is_gradient_descent() -> None:
    draws, _ = _run(pl.SGLD(epochs=60, batch_size=None, lr=1.0 / PRECISION, burn_in=0.9, thin=1, temperature=0.0))
    assert float(draws.abs().max()) < 1e-3


def test_the_tempered_model_is_the_other_way_to_the_same_law() -> None:
    x, y = _data()
    quick = pl.SGLD(epochs=1, batch_size=None, lr=1e-9, burn_in=0.0, thin=1)
    model = pl.fit(Columns(), (x, y), quick, **_settings()).model.tempered(0.25)
    method = pl.SGLD(epochs=500, batch_size=None, lr=0.2 / PRECISION, burn_in=0.1, thin=1)
    draws = pl.fit(model, (x, y), method, **QUIET).weights()["theta"].double()
    _assert_law((draws - _mean(y)) * math.sqrt(PRECISION), 0.25 / (1 - 0.8 / 4))  # the precision is four times as large


def test_correlated_weights_follow_the_matrix_form() -> None:
    problem = pl.testing.LinearGaussian()
    method = pl.Ensemble(pl.SGLD(epochs=300, batch_size=None, lr=4e-3, burn_in=0.2, thin=2), members=40)
    draws = problem.fit(method).weights()["weight"].double().squeeze(1)  # [120·40, 3]
    mean, covariance = method.conjugate(problem)
    _, exact = problem.posterior()
    root = torch.linalg.inv(torch.linalg.cholesky(covariance))
    white = ((draws - mean) @ root.T).reshape(-1, 40, 3)
    outer = torch.einsum("tci,tcj->cij", white, white) / len(white)  # one estimate per chain
    error = outer.std(0) / math.sqrt(40)
    assert bool(((outer.mean(0) - torch.eye(3)).abs() < Z * error).all())
    assert float((covariance / exact - 1).abs().max()) > 0.1  # the bias is not small here


# ---------------------------------------------------------------------------------------------------------------------
# Minibatches


def _gradient_variance(y: Tensor, batch: int) -> Tensor:
    """Var[∇̂] of one batch drawn without replacement, for each column."""
    return N**2 / batch * y.double().var(0) / NOISE**4 * (1 - batch / N)


def _extra_variance(y: Tensor, batch: int, lr: float) -> Tensor:
    """What minibatch noise adds, exactly: batches of one epoch sum to the full data, so their errors sum to zero.

    θ' − μ = a(θ − μ) + (ε/2)g + √ε ξ with a = 1 − εΛ/2, and Cov[g_s, g_t] = −Var[g]/(K − 1) inside an epoch of K batches;
    averaged over the places t = 1 … K in an epoch.
    """
    count = N // batch
    a = 1 - lr * PRECISION / 2
    shape = torch.full((count, count), -1.0 / (count - 1), dtype=torch.float64)
    shape.fill_diagonal_(1.0)
    weights = a ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    earlier = weights @ shape @ weights / (1 - a ** (2 * count))
    places = []
    for t in range(1, count + 1):
        w = weights[-t:]
        places.append(a ** (2 * t) * earlier + w @ shape[:t, :t] @ w)
    return lr**2 / 4 * _gradient_variance(y, batch) * torch.stack(places).mean()


@pytest.mark.parametrize(("batch", "epochs"), [(1, 12), (5, 50), (20, 180), (30, 260)])
def test_the_likelihood_is_scaled_by_n_over_b_for_every_batch_size(batch: int, epochs: int) -> None:
    lr = 0.5 / PRECISION
    draws, y = _run(pl.SGLD(epochs=epochs, batch_size=batch, lr=lr, burn_in=0.1, thin=1))
    expected = 1 / (1 - 0.5 / 4) + _extra_variance(y, batch, lr) * PRECISION
    _assert_law(draws / expected.sqrt(), 1.0)


def test_the_stated_first_order_term_holds_where_an_epoch_outlasts_the_memory_of_the_chain() -> None:
    lr = 0.5 / PRECISION  # memory of 4 steps, epochs of 60
    _, y = _data()
    stated = lr / 4 * _gradient_variance(y, 1)  # times Λ⁻¹, in units of Λ⁻¹
    exact = _extra_variance(y, 1, lr) * PRECISION
    assert float((exact / stated).mean()) == pytest.approx(1.0, abs=0.15)
    draws, _ = _run(pl.SGLD(epochs=12, batch_size=1, lr=lr, burn_in=0.1, thin=1))
    found = draws.square().mean(0) - 1 / (1 - 0.5 / 4)
    assert float((found / stated).mean()) == pytest.approx(1.0, abs=0.25)
    assert float(stated.mean()) > 5  # and it is most of the variance


def test_batches_that_do_not_divide_the_data_keep_the_mean() -> None:
    _assert_mean(_run(pl.SGLD(epochs=60, batch_size=7, lr=0.3 / PRECISION, burn_in=0.2, thin=1))[0])


# ---------------------------------------------------------------------------------------------------------------------
# Schedules, burn-in, thinning, chains


def test_welling_and_tehs_polynomial_step_sizes_remove_the_bias() -> None:
    schedule = Polynomial.between(1.5 / PRECISION, 0.1 / PRECISION, 800)
    draws, _ = _run(pl.SGLD(epochs=800, batch_size=None, lr=schedule, burn_in=0.5, thin=1))
    variance = draws.square().mean(0)
    error = float(variance.std()) / math.sqrt(COLUMNS)
    rates = schedule(torch.arange(400, 800), 800).double() * PRECISION
    bias = float((1 / (1 - rates / 4)).mean())  # a slowly moving step size: the local bias, averaged
    assert bias < 1.07
    assert abs(float(variance.mean()) - bias) < Z * error + 0.01
    _assert_mean(draws)


def test_cyclical_step_sizes_run() -> None:
    draws, _ = _run(pl.SGLD(epochs=200, batch_size=None, lr=Cyclical(1.0 / PRECISION, cycles=4), burn_in=0.2, thin=1))
    assert 0.8 < float(draws.square().mean()) < 1.5


@pytest.mark.parametrize(
    ("epochs", "batch", "burn_in", "thin", "expected"),
    [
        (10, None, 0.0, 1, 10),
        (10, None, 0.5, 1, 5),
        (10, None, 0.5, 2, 2),
        (10, None, 0.5, 5, 1),
        (11, None, 0.5, 1, 6),  # int(5.5) = 5 steps are dropped
        (4, 7, 0.25, 3, 9),  # 9 batches an epoch, 36 steps, 9 dropped
        (300, None, 0.5, None, 150),  # every step: 150 // 100 = 1
        (500, None, 0.2, None, 100),
    ],
)
def test_burn_in_and_thinning_counts(epochs: int, batch: int | None, burn_in: float, thin: int | None, expected: int) -> None:
    x, y = _data()
    method = pl.SGLD(epochs=epochs, batch_size=batch, lr=1e-6, burn_in=burn_in, thin=thin)
    posterior = pl.fit(Columns(2), (x, y[:, :2]), method, **_settings())
    assert len(posterior.weights()["theta"]) == expected
    assert posterior.diagnostics()["draws"] == expected
    plan = method.plan(N)
    kept = [t for t in range(1, plan.steps + 1) if plan.keeps(t)]
    assert len(kept) == expected
    assert min(kept) > int(burn_in * plan.steps)
    assert all(plan.next_draw(t) == min(k for k in kept if k > t) for t in range(kept[-1]))


def test_kept_draws_are_the_states_after_those_steps() -> None:
    x, y = _data()
    settings = _settings(seed=3)
    every = pl.fit(Columns(3), (x, y[:, :3]), pl.SGLD(epochs=20, batch_size=None, lr=0.01, burn_in=0.0, thin=1), **settings)
    some = pl.fit(Columns(3), (x, y[:, :3]), pl.SGLD(epochs=20, batch_size=None, lr=0.01, burn_in=0.3, thin=4), **settings)
    assert torch.equal(some.weights()["theta"], every.weights()["theta"][[9, 13, 17]])


def test_the_steps_are_those_of_the_formula() -> None:
    from plausible.core import random

    x, y = _data()
    lr = 0.02
    draws = pl.fit(
        Columns(3), (x, y[:, :3]), pl.SGLD(epochs=5, batch_size=None, lr=lr, burn_in=0.0, thin=1), **_settings(seed=9)
    ).weights()["theta"]
    theta = torch.zeros(3)
    for t in range(5):
        gradient = (y[:, :3] - theta).sum(0) / NOISE**2 - theta / SCALE**2
        noise = random.normal(random.key(9), t, {"theta": theta})["theta"]
        theta = theta + lr / 2 * gradient + math.sqrt(lr) * noise
        torch.testing.assert_close(draws[t], theta, rtol=1e-5, atol=1e-6)


def test_parallel_chains_mix_and_are_told_apart() -> None:
    x, y = _data()
    method = pl.Ensemble(pl.SGLD(epochs=400, batch_size=None, lr=1.0 / PRECISION, burn_in=0.2, thin=1), members=4, init="prior")
    posterior = pl.fit(Columns(20), (x, y[:, :20]), method, **_settings())
    report = posterior.diagnostics()
    assert (report["draws"], report["chains"]) == (4 * 320, 4)
    assert report["rhat"] < 1.03
    # ε Λ = 1: an autoregression with ρ = ½, a third of the draws
    assert 0.15 < report["ess_bulk"] / 1280 < 0.6
    by_function = posterior.diagnostics(x[:1])
    assert by_function["rhat"] == pytest.approx(report["rhat"], rel=1e-3)
    chains = posterior.weights()["theta"].reshape(320, 4, 20)
    assert not torch.equal(chains[:, 0], chains[:, 1])


def test_chains_that_have_not_met_are_reported() -> None:
    x, y = _data()
    method = pl.Ensemble(
        pl.SGLD(epochs=200, batch_size=None, lr=1e-3 / PRECISION, burn_in=0.2, thin=1), members=4, init="prior"
    )
    posterior = pl.fit(Columns(5), (x, y[:, :5]), method, **_settings())
    assert posterior.diagnostics()["rhat"] > 1.5
    assert posterior.diagnostics()["ess_bulk"] < 50


def test_points_move_without_noise() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Columns(2), Columns(2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.first(x), self.second(x)], 1)

    x, y = _data()
    method = pl.SGLD(epochs=80, batch_size=None, lr=0.8 / PRECISION, burn_in=0.8, thin=1)
    posterior = pl.fit(Two(), (x, y[:, :4]), method, where="first.*", **_settings())
    assert set(posterior.weights()) == {"first.theta"}
    f = posterior.functions(x[:1]).double().squeeze(1)
    assert float(f[:, :2].std(0).min()) > 0.01
    torch.testing.assert_close(f[:, 2:], _mean(y)[2:4].expand(16, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"burn_in": 1.0}, "burn_in is a fraction"),
        ({"burn_in": -0.1}, "burn_in is a fraction"),
        ({"burn_in": 100}, "burn_in is a fraction"),
        ({"thin": 0}, "thin must be"),
        ({"thin": 1.5}, "thin must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": math.inf}, "temperature must be"),
        ({"lr": -1e-4}, "lr must be positive"),
        ({"lr": "best"}, "a schedule or 'auto', got 'best'"),
        ({"temperature": 0.0}, "lr='auto' finds a step size while burning in"),
        ({"burn_in": 0.0}, "lr='auto' finds a step size while burning in"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.SGLD(**settings)


def test_thinning_that_keeps_nothing_is_refused() -> None:
    x, y = _data()
    with pytest.raises(ValueError, match="thin=6 keeps no draw: only 5 of 10 steps are left"):
        pl.fit(Columns(), (x, y), pl.SGLD(epochs=10, batch_size=None, burn_in=0.5, thin=6), **_settings())


def test_an_unstable_step_size_diverges_and_says_so() -> None:
    x, y = _data()
    with pytest.raises(pl.DivergenceError, match="a smaller lr usually helps"):
        pl.fit(Columns(2), (x, y[:, :2]), pl.SGLD(epochs=3000, batch_size=None, lr=8 / PRECISION), **_settings())
