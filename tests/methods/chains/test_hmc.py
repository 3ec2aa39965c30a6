"""HMC: its law on densities that are known, its acceptance, and chains that are extended, resumed and saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible import testing
from plausible.blocks.chains import convergence as diagnostics
from plausible.blocks.chains.density import FunctionDensity, run

GAMMA = 2.0  # x = log of a Gamma(2) variable: log density 2x − eˣ, skewed; E[eˣ] = 2, Var[eˣ] = 2, E[x] = digamma(2)


def skewed(q: Tensor) -> Tensor:
    return (GAMMA * q - q.exp()).sum(-1)


def within_error(draws: Tensor, expected: Tensor | float, z: float = 5.0) -> None:
    """Means over draws `[draws, chains, …]` agree with what is expected, by standard errors from effective sizes."""
    chains = draws.reshape(*draws.shape[:2], -1).transpose(0, 1)
    error = chains.reshape(-1, chains.shape[-1]).std(0) / diagnostics.ess_mean(chains).sqrt()
    gap = (chains.mean((0, 1)) - torch.as_tensor(expected, dtype=chains.dtype).reshape(-1)).abs()
    assert bool((gap < z * error).all()), (gap / error).tolist()


@pytest.mark.parametrize("metric", ["diag", "dense", "lowrank", "unit"])
def test_moments_of_a_correlated_gaussian(metric: Any) -> None:
    covariance = torch.tensor([[2.0, 0.9, 0.0], [0.9, 0.5, 0.0], [0.0, 0.0, 0.01]], dtype=torch.float64)
    precision = torch.linalg.inv(covariance)
    target = FunctionDensity(lambda q: -0.5 * ((q @ precision) * q).sum(-1), 3)
    method = pl.HMC(draws=150, chains=40, warmup=150, leapfrogs=8, metric=metric)
    found = run(method, target, torch.zeros(40, 3, dtype=torch.float64))
    q = found["position"]
    within_error(q, torch.zeros(3))
    within_error(q.square(), covariance.diagonal())
    within_error(q[..., 0] * q[..., 1], 0.9)


@pytest.mark.parametrize("integrator", ["leapfrog", "minimum-norm", "omelyan"])
def test_moments_of_a_skewed_density(integrator: str) -> None:
    method = pl.HMC(draws=150, chains=60, warmup=100, leapfrogs=5, integrator=integrator)
    found = run(method, FunctionDensity(skewed, 2), torch.zeros(60, 2, dtype=torch.float64))
    x = found["position"]
    within_error(x.exp(), torch.full((2,), GAMMA))
    within_error(x.exp().square(), torch.full((2,), GAMMA + GAMMA**2))
    within_error(x, torch.full((2,), 1 - 0.5772156649015329))


def test_one_transition_keeps_the_law() -> None:
    """Chains that start at exact draws are at exact draws after a transition with large errors (Gandy and Scott 2020)."""
    chains = 20_000
    stream = torch.Generator().manual_seed(2)
    start = -torch.log(torch.rand(chains, 2, generator=stream, dtype=torch.float64))
    start = start.sum(1, keepdim=True).log()  # log of a sum of two exponentials: Gamma(2)
    method = pl.HMC(draws=1, chains=chains, warmup=0, leapfrogs=3, step_size=0.9, adapt=False)
    found = run(method, FunctionDensity(skewed, 1), start)
    assert 0.3 < float(found["acceptance"].mean()) < 0.95  # errors are large enough to be seen
    u = 1 - (1 + found["position"][0].exp()) * (-found["position"][0].exp()).exp()  # the distribution function
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi = float(((counts - chains / 20) ** 2 / (chains / 20)).sum())
    assert chi < 19 + 5 * math.sqrt(2 * 19)


def test_detailed_balance_without_adaptation() -> None:
    """From the stationary law as many transitions go from bin i to bin j as back."""
    chains = 40_000
    start = torch.randn(chains, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    method = pl.HMC(draws=1, chains=chains, warmup=0, leapfrogs=2, step_size=1.3, jitter=0.0, adapt=False)
    target = FunctionDensity(lambda q: -0.5 * q.square().sum(-1), 1)
    after = run(method, target, start)["position"][0, :, 0]
    edges = torch.tensor([-0.8, 0.0, 0.8], dtype=torch.float64)
    flows = torch.zeros(4, 4)
    flows.index_put_((torch.bucketize(start[:, 0], edges), torch.bucketize(after, edges)), torch.ones(chains), accumulate=True)
    gap = (flows - flows.T).abs() / (flows + flows.T).clamp(min=1).sqrt()
    assert float(gap.max()) < 5


def test_divergences_are_counted_in_a_funnel() -> None:
    def funnel(q: Tensor) -> Tensor:
        v, x = q[:, 0], q[:, 1:]
        return -v.square() / 18 - 0.5 * x.square().sum(1) * (-v).exp() - 4.5 * v

    start = torch.cat([torch.full((40, 1), -4.0), torch.randn(40, 9, generator=torch.Generator().manual_seed(0))], 1).double()
    start[:, 1:] *= math.exp(-2)
    found = run(
        pl.HMC(draws=20, chains=40, warmup=0, leapfrogs=20, step_size=0.7, adapt=False), FunctionDensity(funnel, 10), start
    )
    assert int(found["divergent"].sum()) > 0
    assert bool(torch.isfinite(found["log_joint"]).all())


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20)[:, None]
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)), (x, x.sin())


def test_extending_is_one_longer_run(tmp_path: Path) -> None:
    net, data = small()
    settings: dict[str, Any] = {"seed": 3, "progress": False, "compile": False}
    method = pl.HMC(draws=6, chains=2, warmup=25, leapfrogs=4)
    short = pl.fit(net, data, method, **settings)
    whole = pl.fit(net, data, pl.HMC(draws=10, chains=2, warmup=25, leapfrogs=4), **settings)
    longer = short.extend(4, progress=False)
    assert torch.equal(longer.functions(data[0]), whole.functions(data[0]))
    assert longer.method == whole.method
    assert torch.equal(longer.statistics["energy"], whole.statistics["energy"])
    assert len(short) == 12
    short.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", net)
    with pytest.raises(ValueError, match="pass them again"):
        loaded.extend(4)
    with pytest.raises(ValueError, match="not those"):
        loaded.extend(4, data=(data[0] + 1, data[1]))
    assert torch.equal(loaded.extend(4, data=data, progress=False).functions(data[0]), whole.functions(data[0]))
    longer.save(tmp_path / "longer")
    assert len(pl.load(tmp_path / "longer", net)) == 20
    twice = longer.extend(2, progress=False, checkpoint=tmp_path / "more").extend(1, progress=False)
    assert len(twice) == 26
    assert torch.equal(twice.functions(data[0])[:20], whole.functions(data[0]))


def test_where_and_points() -> None:
    net, data = small()
    posterior = pl.fit(net, data, pl.HMC(draws=5, chains=2, warmup=5, leapfrogs=3), where="2.*", progress=False, compile=False)
    assert set(posterior.weights()) == {"2.weight", "2.bias"}
    assert "held at its value" in str(posterior.summary())
    drawn = posterior.store.get(range(len(posterior)), "cpu")
    assert torch.equal(drawn["0.weight"], net[0].weight.detach().expand(10, 5, 1))


def test_an_earlier_posterior_is_where_chains_start() -> None:
    net, data = small()
    start = pl.fit(net, data, pl.Ensemble(pl.MAP(epochs=50), members=2), progress=False)
    posterior = pl.fit(
        net, data, pl.HMC(draws=1, chains=2, warmup=0, leapfrogs=1, step_size=1e-6, adapt=False), init=start, progress=False
    )
    gap = (posterior.functions(data[0]) - start.functions(data[0])).abs()
    assert float(gap.max()) < 1e-3


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"draws": 0}, "draws"),
        ({"chains": 1.5}, "chains"),
        ({"jitter": 1.0}, "jitter"),
        ({"metric": "full"}, "metric"),
        ({"integrator": "euler"}, "integrator"),
        ({"adapt": False}, "step_size"),
        ({"target_acceptance": 1.2}, "target_acceptance"),
        ({"init": "zero"}, "init"),
        ({"step_size": -1.0}, "step_size"),
        ({"warmup": -1}, "warmup"),
    ],
)
def test_bad_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pl.HMC(**settings)


def test_a_wrong_acceptance_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from plausible.methods.chains import base

    right = base.taken
    monkeypatch.setattr(base, "taken", lambda state, end, accept: right(state, end, ~accept))
    with pytest.raises((testing.ConformanceError, pl.DivergenceError)):
        testing.check_exact_posterior(pl.HMC(draws=100, chains=16, warmup=0, leapfrogs=3, step_size=0.2, adapt=False))
