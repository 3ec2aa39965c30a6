"""Gibbs steps of precisions: Gamma variates, conditionals in closed form, and the joint law that chains must keep."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import plausible as pl
from plausible.blocks.chains import gibbs
from plausible.blocks.chains.convergence import ess
from plausible.blocks.chains.density import FunctionDensity, gaussian
from plausible.blocks.chains.gibbs import Hierarchy, gamma
from plausible.core import random
from plausible.core.priors import FanIn, Flat, Gaussian, Hierarchical, Prior, as_prior
from plausible.methods.chains.elliptical_slice import EllipticalSlice
from plausible.methods.chains.hmc import HMC
from plausible.methods.chains.metropolis import Metropolis

NOISE = 0.5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Gamma variates


@pytest.mark.parametrize("attempts", [6, 1])  # with one attempt the fallback is taken in a share of the cases
@pytest.mark.parametrize("shape", [0.05, 0.6, 1.0, 2.5, 400.0])
def test_gamma_variates(shape: float, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gibbs, "ATTEMPTS", attempts)
    drawn = gamma(torch.full((50, 400), shape, dtype=torch.float64), random.key(3), 7)
    assert stats.kstest(drawn.flatten().numpy(), stats.gamma(shape).cdf).pvalue > 1e-4


def test_gamma_is_a_function_of_key_and_counter() -> None:
    shape = torch.tensor([[0.5, 3.0], [40.0, 1.0]], dtype=torch.float64)
    first = gamma(shape, random.key(0), 5)
    assert torch.equal(first, gamma(shape, random.key(0), 5))
    assert not torch.equal(first, gamma(shape, random.key(0), 6))
    assert not torch.equal(first, gamma(shape, random.key(1), 5))


# What is known of a prior


def network() -> dict[str, Tensor]:
    return {
        "0.weight": normal(4, 3),
        "0.bias": normal(4, seed=1),
        "2.weight": normal(2, 4, seed=2),
        "2.bias": normal(2, seed=3),
        "likelihood.log_scale": normal(seed=4),
    }


PRIOR = as_prior(
    {
        "0.weight": Hierarchical(0.6, 0.9, groups="input"),
        "2.weight": FanIn(Hierarchical(2.0, 3.0)),
        "likelihood.*": Gaussian(2.0),
        "*": Hierarchical(1.0, 0.5, groups="all"),
    }
)


def test_the_joint_density_is_prior_times_conditional() -> None:
    """log p(w | τ) + log p(τ) = log p(w) + log p(τ | w), for any τ: both halves of the Gibbs step in one line."""
    weights = network()
    found = Hierarchy.of(PRIOR, weights)
    assert found is not None
    assert found.names == ("0.weight[0]", "0.weight[1]", "0.weight[2]", "2.weight", "all")
    position = torch.cat([w.flatten() for w in weights.values()])[None]
    precisions = {name: torch.tensor([0.3 + i], dtype=torch.float64) for i, name in enumerate(found.names)}
    tau = np.array([float(value) for value in precisions.values()])
    given = gaussian(position, found.vector(precisions, torch.float64)).item()
    shape, rate = (value.numpy() for value in found.conditional(position))
    before = stats.gamma.logpdf(tau, found.shape.numpy(), scale=1 / found.rate.numpy()).sum()
    after = stats.gamma.logpdf(tau, shape, scale=1 / rate[0]).sum()
    assert given + before == pytest.approx(PRIOR.log_prob(weights).item() + after, rel=1e-10)


def test_weights_that_do_not_move_count_too() -> None:
    weights = network()
    prior = Hierarchical(0.6, 0.9, groups="layer")
    every, some = Hierarchy.of(prior, weights), Hierarchy.of(prior, weights, ("0.bias", "2.weight", "2.bias"))
    assert every is not None
    assert some is not None
    shapes, rates = every.conditional(torch.cat([w.flatten() for w in weights.values()])[None])
    moving = torch.cat([weights[n].flatten() for n in ("0.bias", "2.weight", "2.bias")])[None]
    own_shapes, own_rates = some.conditional(moving)
    torch.testing.assert_close(own_shapes[:2], shapes[:2])
    torch.testing.assert_close(own_rates[:, :2], rates[:, :2])
    assert some.label.shape == (14,)


def test_names_that_two_rules_share_are_told_apart() -> None:
    prior = as_prior({"*weight": Hierarchical(groups="all"), "*": Hierarchical(groups="all")})
    found = Hierarchy.of(prior, {n: w for n, w in network().items() if n != "likelihood.log_scale"})
    assert found is not None
    assert found.names == ("all", "* all")


@pytest.mark.parametrize(
    ("rest", "words"), [(Flat(), "Flat"), (Gaussian(1.0, loc=-2.0), "loc=-2"), (Hierarchical(sampled=False), "sampled=False")]
)
def test_other_priors_beside_it_mean_the_integrated_density(rest: Prior, words: str, caplog: pytest.LogCaptureFixture) -> None:
    prior = as_prior({"*bias": rest, "*": Hierarchical()})
    with caplog.at_level(logging.INFO, "plausible"):
        assert Hierarchy.of(prior, network()) is None
    assert "integrated out and not sampled: the prior of 0.bias" in caplog.text
    assert words in caplog.text
    assert Hierarchy.of(Gaussian(), network()) is None


# Chains


class Lines(FunctionDensity):
    """y [chains, N] = x·w + noise, every chain with data of its own; a hierarchical prior over the weights."""

    def __init__(self, prior: Prior, chains: int, like: dict[str, Tensor]):
        self.x, self.y = normal(6, 4, seed=9), torch.zeros(chains, 6, dtype=torch.float64)
        self.like = like
        super().__init__(lambda q: -0.5 * ((self.y - q @ self.x.T) / NOISE).square().sum(-1), 4)
        self.hierarchy = Hierarchy.of(prior, like)

    def draw_data(self, position: Tensor, seed: int) -> None:
        self.y = position @ self.x.T + NOISE * normal(*self.y.shape, seed=seed)


LIKE = {"a": torch.zeros(1, 3, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
LAWS: list[Prior] = [
    Hierarchical(2.0, 1.5, groups="all"),
    as_prior({"a": FanIn(Hierarchical(2.5, 2.0)), "b": Hierarchical(1.5, 1.0)}),
    as_prior({"a": Hierarchical(1.5, 1.0, groups="input"), "b": Gaussian(0.8)}),
]
KERNELS: list[Any] = [
    HMC(draws=1, chains=1, warmup=0, leapfrogs=4, adapt=False, step_size=0.25),
    Metropolis(draws=1, chains=1, warmup=0, step_size=0.3),
    EllipticalSlice(draws=1, chains=1, warmup=0),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("prior", LAWS, ids=["all", "fan-in", "inputs"])
def test_joint_law_of_weights_precisions_and_data_is_kept(prior: Prior, kernel: Any) -> None:
    """Geweke (2004): new data given the weights and a transition given the data leave the joint law as it is.

    With many chains the law after 30 rounds is compared with the prior by Kolmogorov and Smirnov: p-values are exact.
    """
    chains = 2000
    target = Lines(prior, chains, LIKE)
    drawn = prior.sample(LIKE, torch.Generator().manual_seed(1), chains)
    position = torch.cat([drawn["a"].flatten(1), drawn["b"].flatten(1)], 1)
    with torch.no_grad():
        state = kernel.started(target, position, random.key(2))
        for seed in range(30):
            target.draw_data(state.position, 100 + seed)
            bound = kernel._bound(target, state)
            state = state._replace(**bound.evaluate(state.position)._asdict())
            state, _ = kernel.advanced(target, state)
    assert 0.1 < float(state.statistics["acceptance"].mean()) < 0.9999
    assert (state.position != position).any(1).double().mean() > 0.95
    hierarchy = target.hierarchy
    assert hierarchy is not None
    for i, name in enumerate(hierarchy.names):
        law = stats.gamma(float(hierarchy.shape[i]), scale=1 / float(hierarchy.rate[i]))
        assert stats.kstest(state.precisions[name].numpy(), law.cdf).pvalue > 1e-4
    reference = prior.sample(LIKE, torch.Generator().manual_seed(77), 20_000)
    fresh = torch.cat([reference["a"].flatten(1), reference["b"].flatten(1)], 1)
    for i in range(4):
        assert stats.ks_2samp(state.position[:, i], fresh[:, i]).pvalue > 1e-4


def test_state_belongs_to_the_target_that_it_binds() -> None:
    target = Lines(LAWS[1], 5, LIKE)
    target.draw_data(normal(5, 4), 3)
    kernel = KERNELS[0]
    with torch.no_grad():
        state = kernel.started(target, normal(5, 4), random.key(2))
        for _ in range(4):
            state, info = kernel.advanced(target, state)
            found = kernel._bound(target, state).evaluate(state.position)
            torch.testing.assert_close(state.gradient, found.gradient)
            torch.testing.assert_close(state.log_prior, found.log_prior)
            torch.testing.assert_close(info["log_joint"], found.log_likelihood + found.log_prior)


# With a network


@pytest.fixture(scope="module")
def line() -> tuple[Tensor, Tensor]:
    x = normal(30, 4, seed=5)
    return x, 1.5 * x[:, :1] + 0.3 * normal(30, 1, seed=6)


def posterior_of(line: tuple[Tensor, Tensor], prior: Prior, **settings: Any) -> Any:
    net = torch.nn.Linear(4, 1, bias=False).double()
    method = HMC(draws=100, chains=64, warmup=60, leapfrogs=5)
    return pl.fit(net, line, method, likelihood=pl.likelihoods.Gaussian(0.3), prior=prior, progress=False, **settings)


def precision_law(line: tuple[Tensor, Tensor], shape: float, rate: float) -> tuple[float, float]:
    """Mean and standard deviation of log τ | D by quadrature: y ~ N(0, σ²I + XXᵀ/τ)."""
    x, y = line
    grid = np.linspace(-8, 8, 1201)
    eye, gram = np.eye(len(x)), (x @ x.T).numpy()
    density = np.array(
        [
            stats.multivariate_normal.logpdf(y[:, 0].numpy(), None, 0.09 * eye + gram / math.exp(s))
            + stats.gamma.logpdf(math.exp(s), shape, scale=1 / rate)
            + s
            for s in grid
        ]
    )
    share = np.exp(density - density.max())
    share /= share.sum()
    mean = (share * grid).sum()
    return float(mean), float(np.sqrt((share * (grid - mean) ** 2).sum()))


def test_precisions_follow_their_exact_posterior_and_weights_that_of_the_integrated_density(
    line: tuple[Tensor, Tensor],
) -> None:
    sampled = posterior_of(line, Hierarchical(1.2, 0.8))
    marginal = posterior_of(line, Hierarchical(1.2, 0.8, sampled=False), seed=1)
    assert marginal.precisions == {}
    assert list(sampled.precisions) == ["weight"]
    values = sampled.precisions["weight"].log()
    assert values.shape == (64, 100)
    mean, std = precision_law(line, 1.2, 0.8)
    count = float(ess(values[..., None])[0])
    assert abs(float(values.mean()) - mean) < 4 * std / math.sqrt(count)
    square = (values - mean).square()
    error = float(square.std()) / math.sqrt(float(ess(square[..., None])[0]))
    assert abs(float(square.mean()) - std**2) < 4 * error
    weights = [p.weights()["weight"].reshape(100, 64, 4).transpose(0, 1) for p in (sampled, marginal)]
    for power in (1, 2):
        values = [(w - weights[0].mean((0, 1))) ** power for w in weights]
        errors = [(v.flatten(0, 1).var(0) / ess(v)).sqrt() for v in values]
        difference = (values[0] - values[1]).mean((0, 1))
        assert (difference.abs() < 4 * (errors[0].square() + errors[1].square()).sqrt()).all()


def test_relevance_of_inputs_is_found(line: tuple[Tensor, Tensor]) -> None:
    posterior = posterior_of(line, Hierarchical(0.5, 0.01, groups="input"))
    tau = {name: float(value.log().mean()) for name, value in posterior.precisions.items()}
    assert list(tau) == [f"weight[{i}]" for i in range(4)]
    assert tau["weight[0]"] < min(tau[f"weight[{i}]"] for i in (1, 2, 3)) - 1.5


def test_precisions_are_saved_and_chains_go_on(line: tuple[Tensor, Tensor], tmp_path: Any) -> None:
    net = torch.nn.Linear(4, 1, bias=False).double()
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(0.3), "prior": Hierarchical(1.2, 0.8), "progress": False}
    whole = pl.fit(net, line, HMC(draws=12, chains=2, warmup=10, leapfrogs=3), **settings)
    half = pl.fit(net, line, HMC(draws=6, chains=2, warmup=10, leapfrogs=3), **settings)
    longer: Any = half.extend(draws=6)  # type: ignore[attr-defined]
    torch.testing.assert_close(longer.precisions["weight"], whole.precisions["weight"])  # type: ignore[attr-defined]
    longer.save(tmp_path / "run")
    back: Any = pl.load(tmp_path / "run", net)
    torch.testing.assert_close(back.precisions["weight"], longer.precisions["weight"])
