"""R̂ and effective sample sizes against closed forms and against a plain, loop-by-loop reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from plausible.blocks.chains import convergence as diagnostics

CHAINS, DRAWS, COLUMNS = 4, 1000, 60


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _autoregressive(rho: float, seed: int = 0) -> Tensor:
    """AR(1) chains of unit variance, started in their stationary law: [CHAINS, DRAWS, COLUMNS]."""
    noise = _noise(CHAINS, DRAWS, COLUMNS, seed=seed)
    chains = torch.empty_like(noise)
    chains[:, 0] = noise[:, 0]
    for t in range(1, DRAWS):
        chains[:, t] = rho * chains[:, t - 1] + math.sqrt(1 - rho**2) * noise[:, t]
    return chains


# ---------------------------------------------------------------------------------------------------------------------
# A reference: Vehtari et al. (2021) for one quantity, in numpy and loops


def _reference_split(chains: np.ndarray) -> np.ndarray:
    half = chains.shape[1] // 2
    return np.concatenate([chains[:, :half], chains[:, -half:]])


def _reference_scores(chains: np.ndarray) -> np.ndarray:
    ranks = stats.rankdata(chains, method="average").reshape(chains.shape)
    return stats.norm.ppf((ranks - 3 / 8) / (chains.size + 1 / 4))


def _reference_rhat(chains: np.ndarray) -> float:
    def plain(split: np.ndarray) -> float:
        n = split.shape[1]
        within = split.var(axis=1, ddof=1).mean()
        return math.sqrt((n - 1) / n + split.mean(axis=1).var(ddof=1) / within)

    split = _reference_split(chains)
    return max(plain(_reference_scores(split)), plain(_reference_scores(np.abs(split - np.median(split)))))


def _reference_ess(split: np.ndarray) -> float:
    m, n = split.shape
    centred = split - split.mean(axis=1, keepdims=True)
    covariance = np.array([[np.dot(c[: n - t], c[t:]) / n for t in range(n)] for c in centred])
    spread = covariance[:, 0].mean() * n / (n - 1)
    total = spread * (n - 1) / n + split.mean(axis=1).var(ddof=1)
    rho = 1 - (spread - covariance.mean(axis=0)) / total
    rho[0] = 1.0
    time, smallest, t = -1.0, math.inf, 0
    while rho[t] + rho[t + 1] > 0 and t + 1 < n - 3:
        smallest = min(smallest, rho[t] + rho[t + 1])
        time += 2 * smallest
        t += 2
    if rho[t] > 0 or rho[t] + rho[t + 1] >= 0:  # of the pair that ends the sum, the even half counts once
        time += rho[t]
    return m * n / max(time, 1 / math.log10(m * n))


@pytest.mark.parametrize("kind", ["independent", "correlated", "ties", "shifted"])
def test_equals_a_reference(kind: str) -> None:
    chains = _autoregressive(0.5 if kind == "correlated" else 0.0)[:, :201, :5]
    if kind == "ties":
        chains = (2 * chains).round()
    if kind == "shifted":
        chains[0] += 1.0
    found = diagnostics.rhat(chains), diagnostics.ess_bulk(chains), diagnostics.ess_tail(chains)
    for q in range(chains.shape[-1]):
        one = chains[..., q].numpy()
        split = _reference_split(one)
        assert float(found[0][q]) == pytest.approx(_reference_rhat(one), rel=1e-9)
        assert float(found[1][q]) == pytest.approx(_reference_ess(_reference_scores(split)), rel=1e-9)
        tails = [_reference_ess(_reference_split(one <= np.quantile(one, level)).astype(float)) for level in (0.05, 0.95)]
        assert float(found[2][q]) == pytest.approx(min(tails), rel=1e-9)


@pytest.mark.parametrize(
    ("chains", "draws", "rho", "change"),
    [
        (4, 200, 0.5, ""),
        (4, 201, 0.9, ""),
        (2, 57, 0.0, ""),
        (1, 100, 0.3, ""),
        (8, 400, -0.4, ""),
        (4, 300, 0.6, "ties"),
        (4, 300, 0.98, "shift"),
        (3, 4, 0.0, ""),
        (3, 5, 0.0, ""),
        (2, 7, 0.5, ""),
        (4, 100, 0.0, "cauchy"),
    ],
)
def test_equals_arviz(chains: int, draws: int, rho: float, change: str) -> None:
    arviz = pytest.importorskip("arviz")
    noise = _noise(chains, draws, 4, seed=draws)
    values = noise.clone()
    for t in range(1, draws):
        values[:, t] = rho * values[:, t - 1] + math.sqrt(1 - rho**2) * noise[:, t]
    values = {"ties": (2 * values).round(), "cauchy": 1 / values}.get(change, values)
    if change == "shift":
        values[0] += 1
    ours = {"bulk": diagnostics.ess_bulk(values), "tail": diagnostics.ess_tail(values), "mean": diagnostics.ess_mean(values)}
    errors = {
        "mean": diagnostics.mcse(values),
        "sd": diagnostics.mcse_sd(values),
        "quantile": diagnostics.mcse_quantile(values, 0.3),
    }
    for q in range(4):
        one = values[..., q].numpy()
        level = {"quantile": {"prob": 0.3}}
        for method, found in ours.items():
            assert float(found[q]) == pytest.approx(arviz.ess(one, method=method, **level.get(method, {})), rel=1e-9)
        for method, found in errors.items():
            assert float(found[q]) == pytest.approx(arviz.mcse(one, method=method, **level.get(method, {})), rel=1e-9)
        if chains > 1:  # arviz has none of one chain
            assert float(diagnostics.rhat(values)[q]) == pytest.approx(arviz.rhat(one), rel=1e-9)
    np.testing.assert_allclose(diagnostics.ebfmi(values[..., 0]), arviz.bfmi(values[..., 0].numpy()), rtol=1e-9)


def test_summary_is_the_functions_of_its_names() -> None:
    chains = _autoregressive(0.5)[:, :300].float()
    chains[..., 3] = 2.0
    found = diagnostics.summary(chains)
    for name in ("mcse", "ess_bulk", "ess_tail", "rhat"):
        torch.testing.assert_close(found[name], getattr(diagnostics, name)(chains), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found["mean"], chains.double().mean((0, 1)))
    torch.testing.assert_close(found["sd"], chains.double().flatten(0, 1).std(0))
    assert found["sd"][3] == 0
    assert math.isnan(found["rhat"][3])
    assert math.isnan(found["ess_bulk"][3])


def test_parts_of_the_quantities_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = _autoregressive(0.5)[:, :100]
    chains[..., 2] = chains[..., 2].round()
    whole = diagnostics.summary(chains)
    monkeypatch.setattr(diagnostics, "PART", 7 * CHAINS * 100)
    for name, value in diagnostics.summary(chains).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Closed forms


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_standard_errors_are_the_spread_of_estimates(rho: float) -> None:
    chains = _autoregressive(rho)  # columns are repetitions
    flat = chains.reshape(-1, COLUMNS)
    ratio = 1 / math.sqrt(2 * (COLUMNS - 1))  # relative error of a standard deviation of COLUMNS estimates
    for estimates, errors in (
        (flat.mean(0), diagnostics.mcse(chains)),
        (flat.std(0), diagnostics.mcse_sd(chains)),
        (flat.quantile(0.1, 0), diagnostics.mcse_quantile(chains, 0.1)),
    ):
        assert float(estimates.std() / errors.square().mean().sqrt()) == pytest.approx(1, abs=5 * ratio)


def test_energy_that_momenta_cannot_move_has_a_small_ebfmi() -> None:
    # AR(1) of correlation ρ: E (E_t − E_t−1)² / Var E = 2 (1 − ρ)
    for rho in (0.0, 0.5, 0.95):
        found = diagnostics.ebfmi(_autoregressive(rho).permute(0, 2, 1).reshape(-1, DRAWS))
        assert float(found.mean()) == pytest.approx(2 * (1 - rho), abs=0.05)
    assert math.isnan(diagnostics.ebfmi(torch.full((1, 9), 0.1))[0])
    with pytest.raises(ValueError, match=r"energy must be \[chains, draws\]"):
        diagnostics.ebfmi(torch.randn(5))
    with pytest.raises(ValueError, match="change must have the shape"):
        diagnostics.ebfmi(torch.randn(4, 100), torch.randn(100, 1))


@pytest.mark.parametrize("rho", [-0.4, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression(rho: float) -> None:
    chains = _autoregressive(rho)
    expected = CHAINS * DRAWS * (1 - rho) / (1 + rho)
    for function in (diagnostics.ess_mean, diagnostics.ess_bulk):
        ratio = function(chains) / expected
        error = float(ratio.std()) / math.sqrt(COLUMNS)
        assert abs(float(ratio.mean()) - 1) < 5 * error + 0.04  # Geyer's cut and the short halves leave a few per cent
        assert float(ratio.min()) > 0.5
        assert float(ratio.max()) < 2.0


def test_tail_size_of_independent_draws() -> None:
    ratio = diagnostics.ess_tail(_autoregressive(0.0)) / (CHAINS * DRAWS)
    assert 0.85 < float(ratio.mean()) < 1.05


def test_rhat_is_one_for_independent_draws_and_for_one_chain() -> None:
    chains = _autoregressive(0.0)
    assert float(diagnostics.rhat(chains).max()) < 1.01
    assert float(diagnostics.rhat(chains[:1]).max()) < 1.02
    assert float(diagnostics.rhat(chains).min()) > 0.99


def test_rhat_of_shifted_chains() -> None:
    # √(1 + variance of the means / variance within): for normal scores close to that of the values when the shift is small
    shift = 0.5
    chains = _autoregressive(0.0)
    chains[:2] += shift
    means = torch.tensor([shift] * 4 + [0.0] * 4, dtype=torch.float64)
    expected = math.sqrt(1 + float(means.var()))
    assert float(diagnostics.rhat(chains).mean()) == pytest.approx(expected, rel=0.01)
    assert float(diagnostics.ess_bulk(chains).max()) < 0.1 * CHAINS * DRAWS


def test_rhat_sees_chains_that_differ_in_scale_alone() -> None:
    chains = _autoregressive(0.0)
    chains[0] *= 3
    bulk = diagnostics._rhat(diagnostics._rank_normalise(diagnostics._halves(chains.permute(2, 0, 1))))
    assert float(bulk.max()) < 1.02
    assert float(diagnostics.rhat(chains).min()) > 1.1


def test_rhat_sees_a_trend_inside_a_chain() -> None:
    chains = _autoregressive(0.0) + torch.linspace(-1, 1, DRAWS, dtype=torch.float64)[:, None]
    assert float(diagnostics.rhat(chains).min()) > 1.1


# ---------------------------------------------------------------------------------------------------------------------
# Ties, constants, and worse


def test_constant_quantities_are_left_out() -> None:
    chains = _noise(2, 100, 3)
    chains[..., 1] = 0.1  # whose mean and deviation are not exactly 0.1 and 0 in floating point
    with_constant, without = diagnostics.summarise(chains), diagnostics.summarise(chains[..., [0, 2]])
    assert with_constant == without
    assert diagnostics.summarise(torch.full((2, 100, 3), 0.1)) == {}


def test_chains_stuck_at_different_values_have_infinite_rhat() -> None:
    chains = torch.ones(2, 50, 1)
    chains[1] = -1.0
    report = diagnostics.summarise(chains)
    assert report["rhat"] == math.inf
    assert report["ess_bulk"] < 5


def test_one_stuck_chain_is_seen() -> None:
    chains = _noise(4, 200, 2)
    chains[1] = 0.7
    assert diagnostics.summarise(chains)["rhat"] > 1.1


def test_coin_flips_are_fine() -> None:
    flips = (_noise(4, 500, 3) > 0).double()
    report = diagnostics.summarise(flips)
    assert 0.99 < report["rhat"] < 1.02
    assert report["ess_bulk"] > 1000


def test_draws_that_are_not_finite_are_never_good() -> None:
    chains = _noise(2, 50, 3)
    chains[1, 7, 2] = math.nan
    report = diagnostics.summarise(chains)
    assert not report["rhat"] < 1.01
    assert report["ess_bulk"] == 0


def test_summary_is_the_worst_quantity() -> None:
    chains = _autoregressive(0.0)
    chains[..., 7] = _autoregressive(0.95, seed=1)[..., 7]
    report = diagnostics.summarise(chains)
    assert report["ess_bulk"] == pytest.approx(float(diagnostics.ess_bulk(chains[..., 7:8])))
    assert report["rhat"] == pytest.approx(float(diagnostics.rhat(chains).max()))
    spaced = diagnostics.summarise(chains, limit=2)  # the first and the last quantity
    assert spaced["ess_bulk"] == pytest.approx(float(diagnostics.ess_bulk(chains[..., [0, -1]]).min()))


def test_float32_draws_with_a_large_offset() -> None:
    chains = (_noise(4, 500, 2) + 1e4).float()
    report = diagnostics.summarise(chains)
    assert 0.99 < report["rhat"] < 1.02
    assert report["ess_bulk"] > 1000


def test_quantities_that_cannot_be_judged_are_not_numbers() -> None:
    chains = _noise(3, 40, 3)
    chains[..., 0] = 0.1
    chains[0, 3, 1] = math.inf
    for function in (diagnostics.rhat, diagnostics.ess, diagnostics.ess_bulk, diagnostics.ess_tail, diagnostics.mcse):
        found = function(chains)
        assert found.isnan().tolist() == [True, True, False]
    assert diagnostics.rhat(chains[:, :3]).isnan().all()


def test_shapes_and_levels_are_checked() -> None:
    with pytest.raises(ValueError, match=r"chains must be a tensor \[chains, draws, quantities\]"):
        diagnostics.rhat(torch.randn(4, 100))
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        diagnostics.mcse_quantile(_noise(2, 20, 1), 1.0)
