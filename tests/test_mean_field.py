"""Mean-field inference: the bound, its KL and its optimum against closed forms and quadrature."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import plausible as pl
from plausible import priors, random
from plausible.data import Batch, as_data
from plausible.methods.mean_field import inverse_softplus
from plausible.schedules import Cosine, Linear
from plausible.testing import LinearGaussian
from plausible.variational import blundell, entropy, expected_log_prior

QUIET: dict[str, Any] = {"progress": False, "compile": False}
N = 24


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=stream, dtype=dtype)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype) + 0.3 * torch.randn(
        N, 1, generator=stream, dtype=dtype
    )


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of the bound


@pytest.mark.parametrize(
    "prior",
    [priors.Gaussian(0.7), priors.Gaussian(0.7, loc=0.4), priors.Laplace(0.6), priors.FanIn(priors.Gaussian(1.5)),
     priors.FanIn(priors.Laplace(0.5)), priors.Patterns({"*": priors.Laplace(2.0)})],
    ids=str,
)  # fmt: skip
def test_expectations_under_the_prior_equal_quadrature(prior: priors.Prior) -> None:
    means = {"w": torch.tensor([[0.3, -1.2, 0.0]]).double()}
    scales = {"w": torch.tensor([[0.2, 1.5, 0.01]]).double()}
    found, rest = expected_log_prior(prior, means, scales)
    assert rest == ()
    exact = 0.0
    for i in range(3):
        mean, scale = float(means["w"][0, i]), float(scales["w"][0, i])

        def density(w: float, i: int = i, mean: float = mean, scale: float = scale) -> float:
            weight = torch.zeros(1, 3).double()
            weight[0, i] = w
            return float(prior.elementwise("w", weight)[0, i]) * stats.norm.pdf(w, mean, scale)

        exact += integrate.quad(density, mean - 12 * scale, mean + 12 * scale, points=[0.0, mean], limit=400)[0]
    assert float(found) == pytest.approx(exact, rel=1e-6)


def test_priors_without_a_closed_form_are_named() -> None:
    prior = priors.Patterns({"a": priors.ScaleMixture(0.5, 1.0, 0.01), "*": priors.Gaussian()})
    ones = {"a": torch.ones(2), "b": torch.ones(3)}
    assert expected_log_prior(prior, ones, ones)[1] == ("a",)
    assert float(expected_log_prior(priors.Flat(), ones, ones)[0]) == 0.0


def test_entropy() -> None:
    scales = {"a": torch.tensor([0.5, 2.0]), "b": torch.tensor([[3.0]])}
    assert float(entropy(scales)) == pytest.approx(sum(stats.norm(0, s).entropy() for s in (0.5, 2.0, 3.0)), rel=1e-6)


@pytest.mark.parametrize("batches", [1, 2, 10, 391, 2000])
def test_blundells_weights_sum_to_one_and_stay_finite(batches: int) -> None:
    found = torch.stack([blundell(torch.tensor(step), batches) for step in range(batches)]).double() / batches
    assert bool(torch.isfinite(found).all())
    assert float(found.sum()) == pytest.approx(1.0, rel=1e-5)
    if batches == 10:
        exact = torch.tensor([2 ** (batches - i) / (2**batches - 1) for i in range(1, 11)]).double()
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    assert float(blundell(torch.tensor(batches), batches)) == float(blundell(torch.tensor(0), batches))


def test_softplus_and_back() -> None:
    values = torch.tensor([1e-6, 0.02, 1.0, 30.0]).double()
    torch.testing.assert_close(nn.functional.softplus(inverse_softplus(values)), values)


# ---------------------------------------------------------------------------------------------------------------------
# The bound itself


def _built(prior: priors.Prior, method: pl.MeanField) -> tuple[pl.Model, Any, Batch]:
    data = as_data(_data(torch.float64), dtype=torch.float64, device="cpu")
    net = nn.Linear(3, 1).double()
    model = pl.Model.build(net, pl.likelihoods.Gaussian(scale=0.5), prior, data.all(), num_data=N)
    model = method.prepare(model.for_run(num_data=N, steps=100, seed=0), data)
    return model, method.start(model, random.key(0)), data.all()


def test_batches_average_to_the_bound_of_all_data() -> None:
    """At one state and one draw of the weights the scaled likelihoods of the batches average to that of the data."""
    method = pl.MeanField(estimator="weights", initial_scale=0.3)
    model, state, batch = _built(priors.Gaussian(), method)
    infos = []
    for start in range(0, N, 8):
        part = Batch(batch.x[start : start + 8], batch.y[start : start + 8])
        infos.append(method.step(model, method.start(model, random.key(0)), part)[1])
    whole = method.step(model, state, batch)[1]
    for name in ("elbo", "log_likelihood", "kl"):
        torch.testing.assert_close(torch.stack([info[name] for info in infos]).mean(), whole[name])


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_the_bound_of_a_linear_model_is_its_closed_form(estimator: Any) -> None:
    """E_q log p(y | Xw) = −½Σ((y − Xμ)² + x²·σ²)/s² − N(log s + ½log 2π), and the KL of Gaussians."""
    method = pl.MeanField(estimator=estimator, samples=400, initial_scale=0.3)
    model, state, batch = _built(priors.Gaussian(0.8), method)
    _, info = method.step(model, state, batch)
    w, b = model.initial["weight"], model.initial["bias"]
    mean = batch.x @ w.T + b
    variance = 0.09 * (batch.x.square().sum(1, keepdim=True) + 1)
    expected = (
        -0.5 * ((batch.y - mean).square() + variance) / 0.25 - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    ).sum()
    spread = float((variance * (batch.y - mean).square()).sum().sqrt() / 0.25 + variance.sum() / 0.25) * math.sqrt(N)
    assert float(info["log_likelihood"]) == pytest.approx(float(expected), abs=4 * spread / math.sqrt(400))
    means = torch.cat([w.flatten(), b])
    kl = (0.5 * (0.09 / 0.64 + means.square() / 0.64 - 1 - math.log(0.09 / 0.64))).sum()
    torch.testing.assert_close(info["kl"], kl, rtol=1e-9, atol=0)
    torch.testing.assert_close(info["elbo"], info["log_likelihood"] - info["kl"])


@pytest.mark.parametrize("estimator", ["weights", "local"])
def test_a_kl_without_closed_form_is_right_on_average(estimator: Any) -> None:
    prior = priors.ScaleMixture(0.5, 1.0, 0.1)
    method = pl.MeanField(estimator=estimator, initial_scale=0.3)
    model, _, batch = _built(prior, method)
    exact = -float(entropy({n: torch.full_like(w, 0.3) for n, w in model.initial.items()}))
    for weight in model.initial.values():
        for mean in weight.flatten().tolist():
            f = lambda w, mean=mean: float(prior.log_density(torch.tensor(w).double())) * stats.norm.pdf(w, mean, 0.3)  # noqa: E731
            exact -= integrate.quad(f, mean - 3, mean + 3, limit=200)[0]
    values = []
    for step in range(400):
        fresh = method.start(model, random.key(0))._replace(step=torch.tensor(step))
        values.append(float(method.step(model, fresh, batch)[1]["kl"]))
    found = torch.tensor(values)
    assert float(found.mean()) == pytest.approx(exact, abs=4 * float(found.std()) / math.sqrt(400))


# ---------------------------------------------------------------------------------------------------------------------
# The optimum


@pytest.mark.parametrize("estimator", ["weights", "local", "flipout"])
def test_the_optimum_of_a_conjugate_model(estimator: Any) -> None:
    """μ is the exact mean, σ² is 1/Λ_ii, and the bound is log p(D) less the known gap ½ log(Π Λ_ii / det Λ)."""
    problem = LinearGaussian()
    method = pl.MeanField(
        epochs=800, batch_size=None, lr=Cosine(0.05), samples=4, estimator=estimator, initial_scale=0.1
    )
    posterior = problem.fit(method, **QUIET)
    mean, covariance = problem.posterior()
    precision = torch.linalg.inv(covariance)
    found = torch.cat([posterior.means[n].flatten() for n in posterior.means]).double()
    scales = torch.cat([posterior.scales[n].flatten() for n in posterior.scales]).double()
    exact = precision.diagonal().rsqrt()
    torch.testing.assert_close(found, mean.double(), rtol=0, atol=0.15 * float(exact.max()))
    # over seeds the ratio has mean 1 and a standard deviation of 0.02 (local) to 0.04: the noise of the last steps
    torch.testing.assert_close(scales, exact.double(), rtol=0.08 if estimator == "local" else 0.16, atol=0)


def test_empirical_bayes_takes_the_best_scale_of_the_prior() -> None:
    """Its KL is the smallest over all scales of a centred Gaussian prior, tensor by tensor."""
    method = pl.MeanField(empirical_bayes=True, initial_scale=0.2)
    model, state, batch = _built(priors.Gaussian(), method)
    found = float(method.step(model, state, batch)[1]["kl"])
    best = 0.0
    for weight in model.initial.values():
        second = float((weight.square() + 0.04).mean())
        values = [
            float((0.5 * ((weight.square() + 0.04) / s2 - 1 - math.log(0.04 / s2))).sum())
            for s2 in torch.linspace(0.5, 2.0, 301).tolist()
            for s2 in [s2 * second]
        ]
        best += min(values)
    assert found == pytest.approx(best, rel=1e-4)
    with pytest.raises(ValueError, match="empirical_bayes replaces the scales of centred Gaussian priors"):
        pl.fit(nn.Linear(3, 1), _data(), pl.MeanField(epochs=1, empirical_bayes=True), prior=priors.Laplace(), **QUIET)


@pytest.mark.parametrize(("kl_weights", "alike"), [(Linear(0.0, 1.0), True), ("uniform", False)])
def test_a_warm_up_starts_without_the_kl(kl_weights: Any, alike: bool) -> None:
    """The first step of a warm-up does not know the prior; that of the bound does."""
    method = pl.MeanField(kl_weights=kl_weights, lr=0.01, estimator="weights")
    moved = []
    for scale in (1e-2, 10.0):
        model, state, batch = _built(priors.Gaussian(scale), method)
        model = model.starting_at({"weight": torch.ones(1, 3).double(), "bias": torch.ones(1).double()})
        moved.append(method.step(model, method.start(model, state.key), batch)[0].rhos["weight"])
    assert torch.equal(*moved) == alike


def test_scales_relative_to_the_weights() -> None:
    method = pl.MeanField(relative_scale=0.1)
    model, state, _ = _built(priors.Gaussian(), method)
    for name, rho in state.rhos.items():
        torch.testing.assert_close(nn.functional.softplus(rho), 0.1 * model.initial[name].abs())


# ---------------------------------------------------------------------------------------------------------------------
# The posterior


def test_what_the_posterior_says_of_itself(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    x, _ = _data()
    posterior = pl.fit(net, _data(), pl.MeanField(epochs=20), **QUIET)
    text = posterior.summary()
    assert "0.weight              4×3     inferred, noise by local" in text
    assert "1.weight              4       inferred, noise by weights (fallback)" in text
    assert "likelihood.log_scale  scalar  inferred, noise by weights (fallback)" in text
    assert posterior.log_evidence == posterior.history["elbo"][-1]
    report = posterior.diagnostics()
    assert report["kl"] == pytest.approx(posterior.kl())
    assert len(report["snr_quartiles"]) == 3
    torch.testing.assert_close(posterior.snr()["0.bias"], posterior.means["0.bias"].abs() / posterior.scales["0.bias"])
    drawn = posterior.weights(2000, seed=3)["0.weight"]
    torch.testing.assert_close(drawn.std(0), posterior.scales["0.weight"], rtol=0.1, atol=0)
    assert torch.equal(posterior.functions(x, 5), posterior.functions(x, 8)[:5])  # more draws begin with the same ones
    posterior.save(tmp_path / "q")
    again = pl.load(tmp_path / "q", net)
    assert torch.equal(again.functions(x, 5), posterior.functions(x, 5))
    assert again.summary() == text
    assert again.kl() == posterior.kl()
    assert again.log_evidence == posterior.log_evidence


@pytest.mark.parametrize("prior", [priors.Gaussian(0.8), priors.ScaleMixture(0.5, 0.8, 0.8)], ids=["closed", "sampled"])
def test_the_kl_of_the_posterior(prior: priors.Prior) -> None:
    """That of two Gaussians; a mixture of two equal scales is one, and has no closed form here."""
    posterior = pl.fit(nn.Linear(3, 1), _data(), pl.MeanField(epochs=10), prior=prior, **QUIET)
    exact = sum(
        float(torch.distributions.kl_divergence(
            torch.distributions.Normal(mean.double(), posterior.scales[name].double()), torch.distributions.Normal(0.0, 0.8)
        ).sum())
        for name, mean in posterior.means.items()
    )  # fmt: skip
    if isinstance(prior, priors.Gaussian):
        assert posterior.kl() == pytest.approx(exact, rel=1e-6)
        return
    values = torch.tensor([posterior.kl(samples=50, seed=seed) for seed in range(20)])
    assert float(values.mean()) == pytest.approx(exact, abs=4 * float(values.std()) / math.sqrt(20))
    assert posterior.kl(samples=50) == posterior.kl(samples=50)


def test_weights_that_are_left_out_are_trained_as_points() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    before = net[0].weight.detach().clone()
    posterior = pl.fit(
        net, _data(), pl.MeanField(epochs=30), where="last", likelihood=pl.likelihoods.Gaussian(), **QUIET
    )
    assert set(posterior.means) == {"2.weight", "2.bias", "likelihood.log_scale"}
    assert "0.weight              4×3     trained as a point" in posterior.summary()
    assert not torch.equal(posterior.points["0.weight"], before)


def test_members_of_an_ensemble_are_a_mixture() -> None:
    x, _ = _data()
    posterior = pl.fit(nn.Linear(3, 1), _data(), pl.Ensemble(pl.MeanField(epochs=5), members=3), **QUIET)
    assert posterior.functions(x, 9).shape == (9, N, 1)
    assert len(posterior.parts) == 3
    assert not torch.equal(posterior.parts[0].means["weight"], posterior.parts[1].means["weight"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "laplace"}, "estimator must be"),
        ({"kl_weights": "warm"}, "kl_weights must be"),
        ({"kl_weights": -1.0}, r"."),
        ({"samples": 0}, "samples"),
        ({"samples": 3, "antithetic": True}, "even number of samples"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"relative_scale": -0.1}, "relative_scale"),
        ({"epochs": 0}, "epochs"),
        ({"lr": -1.0}, "lr|rate|value"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.MeanField(**settings)
    with pytest.raises(TypeError, match="optimiser"):
        pl.MeanField(optimiser="adam")  # type: ignore[arg-type]
