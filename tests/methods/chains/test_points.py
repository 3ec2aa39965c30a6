"""Hierarchical priors over weights of which only a part is random: the others are members of their groups at fixed values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.chains.convergence import ess
from plausible.blocks.chains.gibbs import sample_given
from plausible.core.priors import Earlier, FanIn, Gaussian, Hierarchical, Prior, as_prior

SHAPE, RATE, BIAS, NOISE = 0.8, 0.5, 20.0, 3.0
X = torch.tensor([[0.3], [-0.4], [0.8], [0.1]], dtype=torch.float64)
Y = torch.tensor([[23.1], [16.2], [26.9], [23.5]], dtype=torch.float64)
LIKELIHOOD = pl.likelihoods.Gaussian(NOISE)


def line() -> nn.Module:
    """Slope and intercept in one group; the intercept, which is no part of the posterior, says that weights are large."""
    net = nn.Linear(1, 1).double()
    with torch.no_grad():
        net.bias.fill_(BIAS)
    return net


def truth() -> tuple[float, float, float]:
    """Log p(D | b) with the mean and variance of the slope, by quadrature over p(w | b) and the data."""
    degrees, scale = 2 * SHAPE + 1, math.sqrt((RATE + BIAS**2 / 2) / (SHAPE + 0.5))
    given = stats.t(degrees, scale=scale)

    def joint(w: float, moment: int = 0) -> float:
        fit = stats.norm.logpdf(Y.numpy(), w * X.numpy() + BIAS, NOISE).sum()
        return math.exp(fit) * given.pdf(w) * w**moment

    evidence, first, second = (integrate.quad(joint, -90, 90, (k,), points=(0, 8), limit=200)[0] for k in range(3))
    return math.log(evidence), first / evidence, second / evidence - (first / evidence) ** 2


METHODS: list[Any] = [
    pl.SMC(particles=3000, pilots=400, moves=2),
    pl.AnnealedImportance(particles=3000, pilots=400, temperatures=6),
    pl.ParallelTempering(draws=60, chains=50, warmup=60, temperatures=4),
    pl.HMC(draws=60, chains=50, warmup=60, leapfrogs=4),
]


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "integrated"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_points_are_fixed_members_of_their_group(method: Any, sampled: bool) -> None:
    prior = Hierarchical(SHAPE, RATE, groups="all", sampled=sampled)
    posterior = pl.fit(
        line(), (X, Y), method, where="weight", prior=prior, likelihood=LIKELIHOOD, progress=False, compile=False
    )
    evidence, mean, variance = truth()
    slope = posterior.weights()["weight"].flatten()
    for values, exact in ((slope, mean), ((slope - mean).square(), variance)):
        by_chain = values.unflatten(0, (-1, posterior.chains)).T.unsqueeze(-1)
        effective = float(ess(by_chain)) if posterior.chains > 1 else posterior.diagnostics()["effective"]
        assert abs(float(values.mean()) - exact) < 4.5 * float(values.std()) / math.sqrt(effective)
    if posterior.log_evidence is not None:
        assert abs(posterior.log_evidence - evidence) < 4.5 * posterior.diagnostics()["log_evidence_error"]


def network() -> dict[str, Tensor]:
    stream = torch.Generator().manual_seed(2)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    return {name: 3 * torch.randn(shape, generator=stream, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("prior", "moving", "tied"),
    [
        (Hierarchical(0.7, 1.3, groups="all"), ("0.bias", "2.weight"), ("0.weight", "2.bias")),
        (Hierarchical(0.7, 1.3, groups="layer"), ("0.weight", "2.weight"), ("2.bias",)),
        (Hierarchical(0.7, 1.3, groups="input"), ("2.weight",), ()),  # its inputs share one: it is not the first weight
        (FanIn(Hierarchical(0.7, 1.3, groups="layer")), ("2.weight", "0.bias"), ("2.bias",)),
        (as_prior({"0.*": Gaussian(2.0), "*": Hierarchical(0.7, 1.3, groups="all")}), ("2.weight", "0.bias"), ("2.bias",)),
    ],
    ids=["all", "layer", "input", "fan-in", "patterns"],
)
def test_draws_given_points_follow_the_conditional(prior: Prior, moving: tuple[str, ...], tied: tuple[str, ...]) -> None:
    """(b' + S/2) of the group of `2.weight` is b'/B, B ~ Beta(a', n/2), with a' and b' what the points leave of shape and rate."""
    weights = network()
    drawn = sample_given(prior, weights, moving, torch.Generator().manual_seed(5), 4000)
    assert tuple(drawn) == moving
    scaled = 2.0 if isinstance(prior, FanIn) else 1.0
    group = ["2.weight", "0.bias"] if getattr(prior, "groups", "") == "all" else ["2.weight"]
    squares = sum((scaled ** (name == "2.weight") * drawn[name]).flatten(1).square().sum(1) for name in group)
    count = sum(weights[name].numel() for name in group)
    seen, fixed = sum(weights[name].numel() for name in tied), sum(float(weights[name].square().sum()) for name in tied)
    shape, rate = 0.7 + seen / 2, 1.3 + fixed / 2
    level = rate / (rate + 0.5 * squares)  # type: ignore[operator]
    assert stats.kstest(level.numpy(), stats.beta(shape, count / 2).cdf).pvalue > 1e-4


def test_gaussians_that_tie_weights_to_points_are_refused() -> None:
    x, y = X.float(), Y.float()
    laplace = pl.Laplace(structure="full", mode=pl.MAP(epochs=20))
    first = pl.fit(line().float(), (x, y), laplace, likelihood=LIKELIHOOD, progress=False)
    settings: dict[str, Any] = {"likelihood": LIKELIHOOD, "prior": Earlier(first), "progress": False, "compile": False}
    with pytest.raises(ValueError, match=r"SMC: the prior ties weight to bias, which where= holds at its value"):
        pl.fit(line().float(), (x, y), pl.SMC(particles=8, pilots=4), where="weight", **settings)
    assert len(pl.fit(line().float(), (x, y), pl.SMC(particles=8, pilots=4), **settings)) == 8
