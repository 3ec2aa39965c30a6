"""Elliptical slice sampling: leaves a Gaussian prior as it is, finds conjugate posteriors, and says which priors it cannot take."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

import plausible as pl
from plausible import priors
from plausible.blocks.chains.density import FunctionDensity, ModelDensity, run
from plausible.methods.chains.elliptical_slice import EllipticalSlice, gaussian_prior, prior_of
from tests.helpers.conjugate import moments
from tests.helpers.kernel_laws import Law, bimodal, require_balance, require_invariance, require_moments, skewed, truncated

PRECISION = torch.tensor([0.25, 4.0], dtype=torch.float64)
FLAT = Law(
    FunctionDensity(lambda q: 0 * q.sum(-1), 2).bound(precision=PRECISION),
    lambda count, seed: PRECISION.rsqrt() * torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).double(),
    torch.zeros(2, dtype=torch.float64),
    1 / PRECISION,
    tuple(stats.norm(0, float(p) ** -0.5).cdf for p in PRECISION),
)


def weighted(law: Law) -> Law:
    """The same law as a likelihood times N(0, 1/τ)."""
    inner = law.target
    likelihood = lambda q: inner.function(q) + 0.5 * (PRECISION * q.square()).sum(-1)  # type: ignore[attr-defined]  # noqa: E731
    return Law(FunctionDensity(likelihood, 2).bound(precision=PRECISION), law.draw, law.mean, law.variance, law.cdfs)


def test_flat_likelihood_leaves_the_prior_as_it_is() -> None:
    """The first angle is always taken, uniform on the circle, and the law does not change at all."""
    method = EllipticalSlice(draws=1, chains=4000, warmup=0)
    require_invariance(method, FLAT)
    result = run(method, FLAT.target, FLAT.draw(4000, 0))
    assert set(result["leapfrogs"].unique().tolist()) == {1.0}
    assert set(result["acceptance"].unique().tolist()) == {1.0}
    assert stats.kstest(result["step_size"][0].numpy(), stats.uniform(0, 2 * math.pi).cdf).pvalue > 1e-4


def test_flat_likelihood_moves_by_the_angle() -> None:
    """E w·w' = E cos θ · Var(w) = 0: after one transition nothing is left of the start."""
    start = FLAT.draw(20_000, 3)
    end = run(EllipticalSlice(draws=1, chains=20_000, warmup=0), FLAT.target, start)["position"][0]
    covariance = (start * end * PRECISION).mean(0)
    assert float(covariance.abs().max()) < 4.5 / math.sqrt(20_000)


def test_law_is_kept() -> None:
    require_invariance(EllipticalSlice(draws=1, chains=4000, warmup=0, thin=2), weighted(skewed()))


def test_law_is_kept_where_slices_have_sharp_ends() -> None:
    """A bracket that is cut on the wrong side of 0, or on both, shows here."""
    require_invariance(EllipticalSlice(draws=1, chains=20_000, warmup=0, thin=3), truncated(), count=20_000)


@pytest.mark.parametrize("law", [skewed(), bimodal()], ids=["skewed", "bimodal"])
def test_detailed_balance(law: Law) -> None:
    """Also where slices are in pieces and a rejected angle may lie between both ends of a move."""
    require_balance(EllipticalSlice(draws=1, chains=40_000, warmup=0), weighted(law), count=40_000)


def test_moments_of_a_skewed_target() -> None:
    law = weighted(skewed())
    require_moments(run(EllipticalSlice(draws=40, chains=400, warmup=10), law.target, law.draw(400, 1))["position"], law)


@pytest.mark.parametrize("beta", [1.0, 0.1, 0.0])
def test_conjugate_gaussian_at_any_power(beta: float) -> None:
    """A Gaussian likelihood seen by powers β: moments in closed form."""
    from tests.helpers.conjugate import log_likelihood

    target = FunctionDensity(log_likelihood, 2).bound(precision=torch.ones(2).double(), beta=torch.full((400,), beta).double())
    start = torch.randn(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance = moments(beta)
    law = Law(target, lambda count, seed: start, mean, variance, ())
    require_moments(run(EllipticalSlice(draws=40, chains=400, warmup=40), target, start)["position"], law)


def test_a_level_that_is_never_reached_stays() -> None:
    """Where the likelihood is nowhere above its level (it is NaN elsewhere) the chain stays, and nothing breaks."""
    target = FunctionDensity(lambda q: torch.where((q == 0).all(-1), 0.0, math.nan) + 0 * q.sum(-1), 2).bound(
        precision=PRECISION
    )
    result = run(EllipticalSlice(draws=2, chains=3, warmup=0), target, torch.zeros(3, 2, dtype=torch.float64))
    assert not result["position"].any()
    assert result["log_joint"].isfinite().all()
    assert set(result["leapfrogs"].unique().tolist()) == {100.0}


# Priors of networks


def _model(prior, likelihood=None) -> pl.Model:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = pl.Batch(torch.randn(8, 3), torch.randn(8, 1))
    return pl.Model.build(net, likelihood or pl.likelihoods.Gaussian(), priors.as_prior(prior), batch, num_data=8)


def test_means_and_scales_of_composed_priors() -> None:
    prior = {"0.weight": priors.FanIn(priors.Gaussian(2.0, loc=0.5)), "*.bias": priors.Gaussian(0.3), "*": priors.Gaussian(1.5)}
    centre, scale = gaussian_prior(_model(prior))
    torch.testing.assert_close(centre["0.weight"], torch.full((4, 3), 0.5 / 3**0.5, dtype=torch.float64))
    torch.testing.assert_close(scale["0.weight"], torch.full((4, 3), 2 / 3**0.5, dtype=torch.float64))
    torch.testing.assert_close(scale["2.bias"], torch.full((1,), 0.3, dtype=torch.float64))
    torch.testing.assert_close(scale["2.weight"], torch.full((1, 4), 1.5, dtype=torch.float64))
    assert "likelihood.log_scale" in scale  # a learned noise is one of the weights


def test_a_temperature_widens_the_ellipse() -> None:
    from plausible.core.data import ArrayData

    model = _model(priors.Gaussian(1.5)).tempered(0.25)
    data = ArrayData(pl.Batch(torch.randn(8, 3), torch.randn(8, 1)), 8)
    found = prior_of(ModelDensity(model, data, 2))
    torch.testing.assert_close(found.scale, torch.full_like(found.scale, 0.75))


@pytest.mark.parametrize(
    "prior", [priors.Laplace(1.0), priors.StudentT(df=1e4), priors.Flat()], ids=["laplace", "student", "flat"]
)
def test_other_priors_are_refused_by_name(prior) -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    mixed = {"weight": prior, "*": priors.Gaussian()}
    with pytest.raises(ValueError, match=rf"EllipticalSlice: the prior of 'weight' is {type(prior).__name__}.*Gaussian"):
        pl.fit(nn.Linear(3, 1), (x, y), EllipticalSlice(draws=2, warmup=0), prior=mixed, progress=False)


def test_a_density_must_say_its_prior() -> None:
    with pytest.raises(ValueError, match="bound"):
        run(EllipticalSlice(draws=1, warmup=0), FunctionDensity(lambda q: -q.square().sum(-1), 2), torch.zeros(4, 2).double())


def test_sampled_precisions_and_shifted_priors() -> None:
    """Linear regression with a prior that is not centred against its closed form; and one whose precision is sampled along runs."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, generator=stream)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(20, 1, generator=stream)
    net = nn.Linear(2, 1, bias=False)
    settings = {"likelihood": pl.likelihoods.Gaussian(scale=0.5), "progress": False, "compile": False}
    posterior = pl.fit(
        net, (x, y), EllipticalSlice(draws=30, chains=300, warmup=40), prior=priors.Gaussian(1.5, loc=1.0), **settings
    )
    precision = x.T.double() @ x.double() / 0.25 + torch.eye(2) / 2.25
    mean = torch.linalg.solve(precision, x.T.double() @ y.double() / 0.25 + 1 / 2.25)[:, 0]
    found = posterior.weights()["weight"][:, 0].reshape(-1, 300, 2)
    variance = torch.linalg.inv(precision).diagonal()
    require_moments(found.double(), Law(None, None, mean, variance, ()))  # type: ignore[arg-type]
    short = EllipticalSlice(draws=5, chains=2, warmup=2)
    sampled = pl.fit(net, (x, y), short, prior=priors.Hierarchical(), **settings)
    assert all(bool((values > 0).all()) for values in sampled.precisions.values())
    assert sampled.precisions
