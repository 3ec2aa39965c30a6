"""Deterministic variational inference: its bound, its optimum and its predictions against closed forms and Monte Carlo."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible import priors
from plausible.blocks.moments import LogVarianceGaussian
from plausible.core import random
from plausible.core.data import Batch, as_data
from plausible.core.schedules import Cosine
from plausible.core.weights import clone
from plausible.engine.method import Run
from plausible.methods.variational.dvi import DVI
from plausible.posteriors.moments import MomentsPosterior
from plausible.testing import LinearGaussian

QUIET: dict[str, Any] = {"progress": False, "compile": False}
N = 24


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def data(dtype: torch.dtype = torch.float32, outputs: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, dtype=dtype)
    return x, torch.sin(x @ torch.randn(3, outputs, dtype=dtype)) + 0.2 * torch.randn(N, outputs, dtype=dtype)


def built(
    net: nn.Module, method: Any, likelihood: Any, y: Tensor | None = None, prior: Any = None
) -> tuple[Any, Any, Any, Any]:
    x, target = data(torch.float64)
    given = as_data((x, target if y is None else y), dtype=torch.float64, device="cpu")
    model = pl.Model.build(net.double(), likelihood, prior or priors.Gaussian(), given.all(), num_data=N)
    run = replace(Run.alone(method, model, given), steps=100)
    return model, run, method.start(model, run, random.key(0)), given.all()


# ---------------------------------------------------------------------------------------------------------------------
# The bound


@pytest.mark.parametrize(
    ("likelihood", "outputs", "kind"),
    [
        (pl.likelihoods.Gaussian(), 1, "real"),
        (pl.likelihoods.Gaussian(scale=0.5), 1, "real"),
        (LogVarianceGaussian(), 2, "real"),
        (pl.likelihoods.HeteroscedasticGaussian(), 2, "real"),
        (pl.likelihoods.Bernoulli(), 1, "binary"),
    ],
    ids=str,
)
def test_the_bound_is_that_of_sampled_weights(likelihood: Any, outputs: int, kind: str) -> None:
    """At the same q: E log p(D | w) within 4 standard errors of 4,000 draws (and 0.3 % for the second layer), the KL exact."""
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))
    method = DVI(initial_scale=0.1)
    y = data(torch.float64)[1].gt(0).double() if kind == "binary" else None
    model, run, state, batch = built(net, method, likelihood, y)
    _, info = method.step(model, run, state, batch)
    count = 4000
    stacked = {n: w + 0.1 * torch.randn(count, *w.shape, dtype=w.dtype) for n, w in model.initial.items()}
    with torch.no_grad():
        values = torch.func.vmap(lambda w: model.log_likelihood(w, batch).sum())(stacked)
    error = 4 * float(values.std()) / math.sqrt(count)
    assert float(info["log_likelihood"]) == pytest.approx(float(values.mean()), abs=error + 3e-3 * abs(float(values.mean())))
    exact = sum(
        float(
            torch.distributions.kl_divergence(
                torch.distributions.Normal(w, 0.1), torch.distributions.Normal(torch.zeros_like(w), 1.0)
            ).sum()
        )
        for w in model.initial.values()
    )
    assert float(info["kl"]) == pytest.approx(exact, rel=1e-9)
    torch.testing.assert_close(info["elbo"], info["log_likelihood"] - info["kl"])


def test_the_bound_is_mean_fields() -> None:
    """The same state, its bound by 2,000 samples of `MeanField`."""
    net = nn.Sequential(nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 1))
    method, sampled = DVI(initial_scale=0.1), pl.MeanField(initial_scale=0.1, estimator="weights")
    model, run, state, batch = built(net, method, pl.likelihoods.Gaussian(scale=0.5))
    exact = float(method.step(model, run, state, batch)[1]["elbo"])
    plain = Run.alone(sampled, model, run.data)
    values = torch.stack(
        [
            sampled.step(model, plain, sampled.start(model, plain, random.key(0))._replace(step=torch.tensor(i)), batch)[1][
                "elbo"
            ]
            for i in range(400)
        ]
    )
    assert exact == pytest.approx(float(values.mean()), abs=4 * float(values.std()) / math.sqrt(400))


def test_batches_masks_and_weights() -> None:
    """Batches average to all data; a weight counts an example so often; a masked target does not count."""
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    method = DVI()
    model, run, _, batch = built(net, method, pl.likelihoods.Gaussian(scale=0.5))

    def value(part: Batch) -> Tensor:
        return method.step(model, run, method.start(model, run, random.key(0)), part)[1]["log_likelihood"]

    parts = [value(Batch(batch.x[i : i + 8], batch.y[i : i + 8])) for i in range(0, N, 8)]
    torch.testing.assert_close(torch.stack(parts).mean(), value(batch))
    weight = torch.arange(N).double()
    torch.testing.assert_close(value(batch._replace(weight=torch.full_like(weight, 3.0))), 3 * value(batch))
    mask = (weight < 8).unsqueeze(-1)
    shorter = value(Batch(batch.x[:8], batch.y[:8])) * 8 / N
    torch.testing.assert_close(value(batch._replace(mask=mask)), shorter)
    torch.testing.assert_close(value(batch._replace(weight=(weight < 8).double())), shorter)


def test_members_of_an_ensemble_step_as_one() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    ensemble: Any = pl.Ensemble(DVI(), members=2).stages()[0]
    model, run, _, batch = built(net, DVI(), pl.likelihoods.Categorical(), torch.randint(3, (N,)))
    state = ensemble.start(model, run, random.key(0))
    one, two = ensemble.step(model, run, clone(state), batch), ensemble.looped_step(model, run, clone(state), batch)
    for a, b in zip(one[0].rhos.values(), two[0].rhos.values()):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(one[1]["elbo"], two[1]["elbo"])


# ---------------------------------------------------------------------------------------------------------------------
# The optimum


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_optimum_of_a_conjugate_model(covariance: Any) -> None:
    """μ is the exact mean, σ² is 1/Λ_ii, and the bound is log p(D) less ½ log(Π Λ_ii / det Λ): to four digits, without noise."""
    problem = LinearGaussian()
    posterior = problem.fit(replace(DVI.conforming(), covariance=covariance), **QUIET)
    mean, _ = problem.posterior()
    precision = problem.precision()
    torch.testing.assert_close(posterior.means["weight"][0].double(), mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(posterior.scales["weight"][0].double(), precision.diagonal().rsqrt(), rtol=1e-3, atol=0)
    gap = 0.5 * float(precision.diagonal().log().sum() - torch.logdet(precision))
    assert posterior.log_evidence == pytest.approx(problem.log_evidence() - gap, abs=1e-2)


def test_the_same_for_every_seed_with_all_data_at_once() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    given = data()
    one, two = (pl.fit(net, given, DVI(epochs=5, batch_size=None), seed=seed, **QUIET) for seed in (0, 1))
    assert all(torch.equal(one.means[n], two.means[n]) for n in one.means)
    assert all(torch.equal(one.scales[n], two.scales[n]) for n in one.scales)


def test_the_prior_of_empirical_bayes() -> None:
    """s* = (Σ(μ² + σ²) + 2β)/(Ω + 2α + 2) minimises KL(q ‖ N(0, s)) − log InverseGamma(s; α, β), for each tensor of the network."""
    method = DVI(empirical_bayes=True, initial_scale=0.2, shape=1.5, rate=0.7)
    model, run, state, batch = built(nn.Linear(3, 1), method, pl.likelihoods.Gaussian())
    found = float(method.step(model, run, state, batch)[1]["kl"])

    def cost(weight: Tensor, s: float) -> float:
        q, p = (torch.distributions.Normal(weight, 0.2), torch.distributions.Normal(torch.zeros_like(weight), math.sqrt(s)))
        hyper = torch.distributions.InverseGamma(torch.tensor(1.5).double(), torch.tensor(0.7).double())
        divergence = torch.distributions.kl_divergence(q, p).sum()
        return float(divergence - hyper.log_prob(torch.tensor(s).double()))

    exact = 0.0
    for name in ("weight", "bias"):
        weight = model.initial[name]
        s = float((weight.square() + 0.04).sum() + 1.4) / (weight.numel() + 5)
        exact += cost(weight, s)
        assert cost(weight, s) < min(cost(weight, 0.95 * s), cost(weight, 1.05 * s))
    noise = model.initial["likelihood.log_scale"]
    exact += float(
        torch.distributions.kl_divergence(torch.distributions.Normal(noise, 0.2), torch.distributions.Normal(0.0, 1.0))
    )
    assert found == pytest.approx(exact, rel=1e-7)
    with pytest.raises(ValueError, match="empirical_bayes replaces the scales of centred Gaussian priors"):
        pl.fit(nn.Linear(3, 1), data(), DVI(epochs=1, empirical_bayes=True), prior=priors.Laplace(), **QUIET)


def test_a_warm_up_starts_with_little_of_the_kl() -> None:
    """The first of 50 steps of warm-up knows a fiftieth of the KL, which alone pulls an output without data to the prior."""
    moves = []
    for warmup in (0.0, 0.5):
        method = DVI(warmup=warmup, optimiser=pl.optimisers.SGD(momentum=0.0), lr=1.0)
        model, run, state, batch = built(nn.Linear(3, 1), method, pl.likelihoods.Gaussian(scale=1e6))
        before = state.rhos["weight"].clone()
        moves.append(method.step(model, run, state, batch)[0].rhos["weight"] - before)
    torch.testing.assert_close(moves[1], moves[0] / 50, rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# The posterior


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (pl.likelihoods.Gaussian(), 2),
        (pl.likelihoods.Scaled(pl.likelihoods.Gaussian(), loc=2.0, scale=3.0), 2),
        (LogVarianceGaussian(), 4),
        (pl.likelihoods.HeteroscedasticGaussian(), 4),
    ],
    ids=str,
)
def test_predictions_in_closed_form_are_those_of_draws(likelihood: Any, outputs: int, tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, outputs))
    given = data(outputs=2)
    posterior = pl.fit(net, given, DVI(epochs=30, initial_scale=0.1), likelihood=likelihood, **QUIET)
    assert isinstance(posterior, MomentsPosterior)
    x, count = given[0], 4000
    closed, drawn = posterior.predictive_moments(x), posterior.predict(x, count)
    error = (closed.mean - drawn.mean).abs() / (closed.epistemic / count).sqrt()
    assert float(error.max()) < 5
    for name in ("epistemic", "aleatoric", "variance"):
        torch.testing.assert_close(getattr(closed, name), getattr(drawn, name).float(), rtol=0.2, atol=1e-4)
    f = posterior.predict(x, count).outputs
    moments = posterior.moments(x)
    assert moments.matrix.shape == (N, outputs, outputs)
    assert float(((f.mean(0) - moments.mean) / (moments.variance / count).sqrt()).abs().max()) < 5
    posterior.save(tmp_path / "q")
    again = pl.load(tmp_path / "q", net)
    assert torch.equal(again.moments(x).matrix, moments.matrix)
    moved = posterior.to("cpu")
    assert torch.equal(moved.predictive_moments(x).variance, closed.variance)


def test_classes_are_learned_without_sampling() -> None:
    x = torch.randn(150, 2)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    posterior = pl.fit(net, (x, y), DVI(epochs=150, batch_size=None, lr=Cosine(0.03)), **QUIET)
    assert float((posterior.predict(x).probs.argmax(-1) == y).float().mean()) > 0.9
    with pytest.raises(ValueError, match="Gaussian noise alone, not for Categorical"):
        posterior.predictive_moments(x)


def test_points_frozen_layers_and_norms() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    net[0].weight.requires_grad_(False)
    given = data()
    posterior = pl.fit(net, given, DVI(epochs=10), where=["3.*", "5.*"], likelihood=pl.likelihoods.Gaussian(scale=0.3), **QUIET)
    assert set(posterior.means) == {"3.weight", "3.bias", "5.weight", "5.bias"}
    assert not torch.equal(posterior.points["1.running_mean"], torch.zeros(6))
    f = posterior.functions(given[0], 3000)
    moments = posterior.moments(given[0])
    assert float(((f.mean(0) - moments.mean) / (moments.variance / 3000).sqrt()).abs().max()) < 6


def test_deeper_networks_with_covariances_beat_those_without() -> None:
    """Both are bounds up to the same approximation; what it costs to leave covariances out is seen in the variances."""
    net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
    given = data()
    for covariance, worst in (("full", 0.12), ("diagonal", math.inf)):
        method = DVI(epochs=60, covariance=covariance, initial_scale=0.1, lr=0.02)  # type: ignore[arg-type]
        posterior = pl.fit(net, given, method, likelihood=pl.likelihoods.Gaussian(scale=0.3), **QUIET)
        f = posterior.functions(given[0], 3000)
        ratio = posterior.moments(given[0]).variance / f.var(0)
        assert float((ratio - 1).abs().max()) < worst


# ---------------------------------------------------------------------------------------------------------------------
# Refused


def refused(net: nn.Module, message: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=message):
        pl.fit(net, data(), DVI(epochs=1), **{**QUIET, **settings})


def test_networks_and_priors_without_closed_forms() -> None:
    refused(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), "DVI: the layer '1' is LayerNorm")
    refused(nn.Linear(3, 1), "the prior of weight, bias.* has no closed form", prior=priors.StudentT())
    refused(nn.Linear(3, 1), "output= is a function", output=lambda f: 2 * f)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    refused(Own(), "DVI: the network is Own")
    hooked = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    hooked[1].register_forward_hook(lambda _, __, out: 2 * out)
    refused(hooked, "something else than its layers in turn")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"covariance": "low rank"}, "covariance must be 'full' or 'diagonal'"),
        ({"terms": 0}, "terms"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"warmup": 1.0}, "warmup"),
        ({"shape": 0.0}, "shape"),
        ({"rate": -1.0}, "rate"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DVI(**settings)
    with pytest.raises(TypeError, match="DVI: optimiser"):
        DVI(optimiser="adam")  # type: ignore[arg-type]
