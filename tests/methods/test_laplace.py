"""The Laplace approximation: exact where the posterior is Gaussian, and what it says of functions, evidence and bad input."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible import likelihoods, priors
from plausible.blocks.curvature import tuning
from plausible.core.data import as_data
from plausible.core.schedules import Cosine
from plausible.engine.method import Run
from plausible.methods.laplace import stages
from plausible.posteriors.linearised import LaplacePosterior
from plausible.testing import LinearGaussian
from tests.blocks.curvature.test_linearising import exact
from tests.helpers.networks import build

QUIET: dict[str, Any] = {"progress": False, "compile": False}
LONG = pl.MAP(epochs=200, batch_size=20, lr=Cosine(0.05))
TO_MODE = pl.MAP(epochs=10, batch_size=20, lr=Cosine(0.02))  # toy networks start near it, and polishing does the rest
STRUCTURES = ["diag", "block", "kron", "ekfac", "lowrank", "full"]


def untrained(classes: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    y = (x[:, 0] * x[:, 1] > 0).long() + (classes > 2) * (x[:, 0] > 1).long()
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, classes)), x, y


@functools.cache
def near_the_mode(classes: int) -> dict[str, Tensor]:
    net, x, y = untrained(classes)
    found = pl.fit(net, (x, y), LONG, **QUIET).weights()
    return {name: weight[0] for name, weight in found.items()}


def toy(classes: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    """A network that was trained once for all tests, and its data."""
    state = near_the_mode(classes)
    net, x, y = untrained(classes)
    net.load_state_dict(state)
    return net, x, y


def fitted(method: pl.Laplace, start: Any = toy, **settings: Any) -> LaplacePosterior:
    net, x, y = start()
    posterior = pl.fit(net, (x, y), method, **{**QUIET, **settings})
    assert isinstance(posterior, LaplacePosterior)
    return posterior


# ---------------------------------------------------------------------------------------------------------------------
# Exact answers


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_linear_model_is_exact(structure: Any) -> None:
    """Mean, covariance and evidence of a conjugate model; a diagonal has 1/Λ_ii."""
    problem = LinearGaussian()
    posterior = problem.fit(pl.Laplace(structure=structure, mode=TO_MODE, rank=3))
    mean, covariance = problem.posterior()
    torch.testing.assert_close(posterior.means["weight"][0].double(), mean, atol=2e-3, rtol=0)
    variances = posterior.scales["weight"][0].double().square()
    expected = 1 / problem.precision().diagonal() if structure == "diag" else covariance.diagonal()
    torch.testing.assert_close(variances, expected, rtol=1e-4, atol=0)
    if structure != "diag":
        assert posterior.log_evidence == pytest.approx(problem.log_evidence(), abs=1e-3)
    x = torch.randn(5, 3)
    own = torch.diag(expected) if structure == "diag" else covariance
    found = posterior.predict(x).epistemic[:, 0].double()
    torch.testing.assert_close(found, ((x.double() @ own) * x.double()).sum(1), rtol=1e-4, atol=0)


def test_kl_and_entropy_of_a_linear_model() -> None:
    problem = LinearGaussian()
    posterior = problem.fit(pl.Laplace(structure="full", mode=TO_MODE))
    mean, covariance = problem.posterior()
    q = torch.distributions.MultivariateNormal(mean, covariance)
    p = torch.distributions.MultivariateNormal(torch.zeros(3).double(), problem.scale**2 * torch.eye(3).double())
    assert posterior.kl() == pytest.approx(float(torch.distributions.kl_divergence(q, p)), rel=1e-3)


def test_a_temperature_divides_the_precision() -> None:
    problem = LinearGaussian()
    x, y, _ = problem.data()
    from plausible.core.data import Batch

    model = pl.Model.build(
        problem.network(),
        likelihoods.Gaussian(scale=problem.noise),
        priors.Gaussian(problem.scale),
        Batch(x.float(), y.float()),
        num_data=40,
    ).tempered(2.5)
    posterior = pl.fit(model, (x.float(), y.float()), pl.Laplace(structure="full", mode=TO_MODE), **QUIET)
    _, covariance = problem.posterior()
    torch.testing.assert_close(posterior.scales["weight"][0].double().square(), 2.5 * covariance.diagonal(), rtol=1e-4, atol=0)
    assert posterior.log_evidence is None


def test_evidence_is_taken_apart() -> None:
    posterior = fitted(pl.Laplace(structure="full", mode=TO_MODE))
    net, x, y = toy()
    evidence = posterior.evidence
    assert evidence is not None
    assert posterior.log_evidence is not None
    weights = {**posterior.means, **posterior.points}
    batch = pl.Batch(x, y)
    assert float(evidence.log_likelihood) == pytest.approx(
        float(posterior.model.log_likelihood(weights, batch).sum()), rel=1e-4
    )
    assert float(evidence.log_prior) == pytest.approx(float(posterior.model.log_prior(weights)), rel=1e-4)
    assert float(evidence.total) == pytest.approx(posterior.log_evidence)
    assert float(evidence.log_occam) < 0
    torch.testing.assert_close(posterior.log_marginal(), evidence.total, rtol=1e-5, atol=1e-3)
    del net


# ---------------------------------------------------------------------------------------------------------------------
# Functions


@pytest.mark.parametrize("structure", STRUCTURES)
def test_functions_are_those_of_the_linearised_network(structure: Any) -> None:
    """Closed moments against J Λ⁻¹ Jᵀ from autograd and weight draws; draws of functions follow them, and are coherent."""
    posterior = fitted(pl.Laplace(structure=structure, mode=TO_MODE, rank=8))
    x = torch.randn(4, 2)
    mean, covariance = posterior.moments(x)
    torch.testing.assert_close(mean, posterior.model.outputs({**posterior.means, **posterior.points}, x))
    model = posterior.model.starting_at({**posterior.means, **posterior.points})
    j = torch.cat([v.flatten(2) for v in exact(model, x, tuple(posterior.means)).values()], -1)
    drawn = posterior.weights(20_000)
    delta = torch.cat([(drawn[n] - posterior.means[n]).flatten(1) for n in posterior.means], 1)
    f = torch.einsum("bop,sp->sbo", j, delta)
    expected = torch.einsum("sbo,sbr->bor", f, f) / len(f)
    spread = covariance.diagonal(dim1=1, dim2=2).sqrt()
    error = (covariance - expected).abs() / (spread[:, :, None] * spread[:, None])
    assert float(error.max()) < 5 * math.sqrt(2 / 20_000)
    functions = posterior.functions(x, 50, seed=3)
    same = posterior.weights(50, seed=3)
    delta = torch.cat([(same[n] - posterior.means[n]).flatten(1) for n in posterior.means], 1)
    torch.testing.assert_close(functions, mean + torch.einsum("bop,sp->sbo", j, delta), rtol=1e-3, atol=1e-4)


def test_sampled_functions_are_those_of_the_network() -> None:
    posterior = fitted(pl.Laplace(predictive="sampled", mode=TO_MODE))
    x = torch.randn(3, 2)
    weights = posterior.weights(4)
    one = {n: v[2] for n, v in weights.items()} | posterior.points
    torch.testing.assert_close(posterior.functions(x, 4)[2], posterior.model.outputs(one, x))


@pytest.mark.parametrize("predictive", ["linearised", "probit", "bridge", "sampled"])
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_by_every_way(predictive: Any, classes: int) -> None:
    net, x, y = toy(classes)
    posterior = pl.fit(net, (x, y), pl.Laplace(predictive=predictive, mode=TO_MODE), **QUIET)
    probs = posterior.predict(torch.randn(7, 2)).probs
    assert probs.shape == (7, classes)
    torch.testing.assert_close(probs.sum(1), torch.ones(7))


def test_far_away_the_network_is_less_sure() -> None:
    posterior = fitted(pl.Laplace(structure="full", mode=TO_MODE))
    far, near = torch.tensor([[20.0, 20.0]]), torch.tensor([[1.0, 1.0]])
    point = posterior.model.outputs({**posterior.means, **posterior.points}, far).softmax(-1).max()
    assert float(posterior.predict(far).probs.max()) < float(point) - 0.02
    assert float(posterior.moments(far)[1].diagonal(dim1=1, dim2=2).sum()) > float(
        posterior.moments(near)[1].diagonal(dim1=1, dim2=2).sum()
    )


@pytest.mark.parametrize("name", ["lstm", "attention", "transformer", "conv2d", "batch norm", "weight norm"])
def test_any_module(name: str) -> None:
    net, x = build(name, rows=12)
    y = torch.arange(12) % 2
    warnings.simplefilter("ignore")  # it is no mode
    posterior = pl.fit(net, (x, y), pl.Laplace(mode=pl.MAP(epochs=5, batch_size=None), structure="full", polish=5), **QUIET)
    mean, covariance = posterior.moments(x[:3])
    f = posterior.functions(x[:3], 4000)
    spread = covariance.diagonal(dim1=1, dim2=2)
    assert float(((f.var(0) / spread) - 1).abs().max()) < 5 * math.sqrt(2 / 4000)
    torch.testing.assert_close(posterior.functions(x[:3], 1), posterior.functions(x, 1)[:, :3])
    assert float((f.mean(0) - mean).abs().max()) < 5 * float((spread / 4000).sqrt().max())


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        (likelihoods.HeteroscedasticGaussian(), 2, torch.randn(40, 1)),
        (likelihoods.Poisson(), 1, torch.arange(40.0)[:, None] % 4),
        (likelihoods.Bernoulli(), 1, (torch.arange(40)[:, None] % 2).float()),
        (likelihoods.StudentT(), 1, torch.randn(40, 1)),
        (likelihoods.NegativeBinomial(), 1, torch.arange(40.0)[:, None] % 4),
        (likelihoods.Gaussian(scale="per-output"), 2, torch.randn(40, 2)),
    ],
)
def test_every_likelihood(likelihood: Any, outputs: int, target: Tensor) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
    x = torch.randn(40, 2)
    posterior = pl.fit(net, (x, target), pl.Laplace(mode=TO_MODE), likelihood=likelihood, **QUIET)
    predictive = posterior.predict(x[:4])
    assert bool(torch.isfinite(predictive.log_prob(target[:4])).all())
    assert bool((predictive.epistemic > 0).all())
    assert not any(name.startswith("likelihood.") for name in posterior.means)


# ---------------------------------------------------------------------------------------------------------------------
# Which weights


def test_the_last_layer_alone() -> None:
    posterior = fitted(pl.Laplace(where="last", mode=TO_MODE))
    assert set(posterior.means) == {"2.weight", "2.bias"}
    assert set(posterior.weights(3)) == {"2.weight", "2.bias"}
    assert "0.weight  8×2     trained as a point" in str(posterior.summary()) or "trained as a point" in str(
        posterior.summary()
    )
    x = torch.randn(3, 2)
    hidden = torch.tanh(x @ posterior.points["0.weight"].T + posterior.points["0.bias"])
    features = torch.cat([hidden, torch.ones(3, 1)], 1)
    draws = posterior.weights(20_000)
    delta = torch.cat(
        [draws["2.weight"] - posterior.means["2.weight"], (draws["2.bias"] - posterior.means["2.bias"])[..., None]], -1
    )
    f = torch.einsum("bi,soi->sbo", features, delta)
    expected = torch.einsum("sbo,sbr->bor", f, f) / len(f)
    torch.testing.assert_close(posterior.moments(x)[1], expected, rtol=0.1, atol=0.02 * float(expected.abs().max()))


def test_a_pattern() -> None:
    assert set(fitted(pl.Laplace(where="0.*", mode=TO_MODE)).means) == {"0.weight", "0.bias"}
    with pytest.raises(ValueError, match="matches no weight"):
        fitted(pl.Laplace(where="body.*", mode=TO_MODE))


def test_a_subnetwork_of_all_weights_is_the_full_covariance() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same weights, which are no mode
        full = fitted(pl.Laplace(structure="full", mode=None))
        every = fitted(pl.Laplace(where=42, mode=None))
    x = torch.randn(4, 2)
    torch.testing.assert_close(every.moments(x)[1], full.moments(x)[1], rtol=1e-3, atol=1e-5)
    assert every.log_evidence == pytest.approx(full.log_evidence, abs=1e-2)


def test_a_subnetwork_has_the_widest_weights() -> None:
    diagonal = fitted(pl.Laplace(structure="diag", mode=TO_MODE), prior=priors.Gaussian())
    some = fitted(pl.Laplace(where=10, mode=TO_MODE), prior=priors.Gaussian())
    flat = torch.cat([diagonal.scales[n].flatten() for n in diagonal.scales])
    kept = torch.cat([some.scales[n].flatten() > 0 for n in diagonal.scales])
    assert int(kept.sum()) == 10
    assert float(flat[kept].min()) >= float(flat[~kept].max())
    drawn = some.weights(5)
    fixed = torch.cat([(drawn[n] == some.means[n]).flatten(1) for n in diagonal.scales], 1)
    assert bool(fixed[:, ~kept].all())
    with pytest.raises(ValueError, match="more weights than there are"):
        fitted(pl.Laplace(where=1000, mode=TO_MODE))


def test_frozen_weights_stay() -> None:
    net, x, y = toy()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    posterior = pl.fit(net, (x, y), pl.Laplace(mode=TO_MODE), **QUIET)
    assert "0.weight" not in posterior.means
    assert torch.equal(net[0].weight, before)


def test_many_classes_need_no_covariances(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last layer with more outputs than fit squared: variances alone, the same as the diagonal of the covariances."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 30))
    x, y = torch.randn(50, 3), torch.randint(0, 30, (50,))
    posterior = pl.fit(net, (x, y), pl.Laplace(where="last", mode=pl.MAP(epochs=5)), **QUIET)
    whole = posterior.moments(x[:4])[1].diagonal(dim1=1, dim2=2)
    monkeypatch.setattr("plausible.posteriors.linearised.MANY_OUTPUTS", 10)
    variances = posterior.moments(x[:4])[1]
    assert variances.shape == (4, 30)
    torch.testing.assert_close(variances, whole)
    assert posterior.predict(x[:4]).probs.shape == (4, 30)


# ---------------------------------------------------------------------------------------------------------------------
# Tuning by the evidence


@pytest.mark.parametrize(("tune", "structure"), [("global", "kron"), ("layer", "kron"), ("layer", "full"), ("weight", "diag")])
def test_tuned_precisions_are_where_the_evidence_is_level(tune: Any, structure: Any) -> None:
    """∂ log p(D)/∂ log τ = 0 at the same mode, for each group of weights that shares a precision."""
    # from afar: weights that training has brought next to 0 have precisions that the fixed point takes long to find
    posterior = fitted(pl.Laplace(structure=structure, tune=tune, mode=LONG), untrained, prior=priors.Gaussian())
    one = torch.ones(())
    tuned = tuning.tune(posterior.curvature, posterior.means, posterior.precision, one, tune, iterations=2000, tolerance=1e-7)
    logs = {n: v.double().log().requires_grad_() for n, v in tuned.precision.items()}
    value = posterior.log_marginal({n: v.exp() for n, v in logs.items()})
    grads = dict(zip(logs, torch.autograd.grad(value, list(logs.values()))))
    if tune == "weight":
        slope = torch.cat([g.flatten() for g in grads.values()])
        assert float(slope.abs().max()) < 2e-3
        return
    groups = [list(grads)] if tune == "global" else [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    for names in groups:
        assert abs(float(sum(grads[n] for n in names))) < 1e-3
    values = {n: float(v) for n, v in posterior.precision.items()}
    assert values["0.weight"] == values["0.bias"]
    assert (values["0.weight"] == values["2.weight"]) == (tune == "global")


def test_tuning_raises_the_evidence() -> None:
    plain = fitted(pl.Laplace(structure="full", mode=TO_MODE), prior=priors.Gaussian(0.2))
    tuned = fitted(pl.Laplace(structure="full", mode=TO_MODE, tune="layer"), prior=priors.Gaussian(0.2))
    assert plain.log_evidence is not None
    assert tuned.log_evidence is not None
    assert tuned.log_evidence > plain.log_evidence + 0.2


def test_noise_and_precision_of_a_linear_model_are_the_best_there_are() -> None:
    """The maximum over both of log N(y; 0, σ²I + s²xxᵀ), found on a grid."""
    problem = LinearGaussian(num_data=60, noise=0.4, scale=2.0)
    x, y, _ = problem.data()
    method = pl.Laplace(structure="full", tune="global", rounds=10, mode=TO_MODE)
    law: dict[str, Any] = {"likelihood": likelihoods.Gaussian(), "prior": priors.Gaussian()}
    posterior = pl.fit(problem.network(), (x.float(), y.float()), method, **law, **QUIET)
    sigma = float(posterior.points["likelihood.log_scale"].exp())
    scale = float(posterior.precision["weight"]) ** -0.5

    values, vectors = torch.linalg.eigh(x @ x.T)
    squares = (vectors.T @ y)[:, 0].square()

    def evidence(s: Tensor, w: Tensor) -> Tensor:
        """In the basis where σ²I + s²xxᵀ is diagonal, for many at once."""
        variances = s[..., None] ** 2 + w[..., None] ** 2 * values
        return -0.5 * (variances.log() + squares / variances + math.log(2 * math.pi)).sum(-1)

    covariance = sigma**2 * torch.eye(60).double() + scale**2 * x @ x.T
    by_hand = torch.distributions.MultivariateNormal(torch.zeros(60).double(), covariance).log_prob(y[:, 0])
    found = evidence(torch.tensor(sigma), torch.tensor(scale))
    torch.testing.assert_close(found, by_hand)
    grid = torch.cartesian_prod(torch.linspace(0.25, 0.6, 71).double(), torch.logspace(-1, 1, 81).double())
    assert float(found) > float(evidence(grid[:, 0], grid[:, 1]).max()) - 2e-3


def test_training_on_between_the_rounds() -> None:
    posterior = fitted(pl.Laplace(tune="layer", online=20, rounds=2, polish=0, mode=TO_MODE))
    assert posterior.log_evidence is not None


def test_only_gaussian_priors_are_tuned() -> None:
    with pytest.raises(ValueError, match="Gaussian priors"):
        fitted(pl.Laplace(tune="global", mode=TO_MODE), prior=priors.StudentT())


def test_a_prior_that_is_not_gaussian() -> None:
    posterior = fitted(pl.Laplace(structure="full", mode=TO_MODE), prior=priors.StudentT(df=5.0))
    w = posterior.means["0.weight"].double().requires_grad_()
    slope = torch.autograd.grad(priors.StudentT(df=5.0).log_density(w).sum(), w, create_graph=True)[0]
    second = -torch.autograd.grad(slope.sum(), w)[0].clamp(max=0)
    torch.testing.assert_close(posterior.precision["0.weight"].double(), second, rtol=1e-4, atol=1e-6)


def test_weights_and_biases_with_their_own_scales() -> None:
    prior = {"*bias": priors.Gaussian(3.0), "*": priors.FanIn(priors.Gaussian(2.0))}
    posterior = fitted(pl.Laplace(mode=TO_MODE), prior=prior)
    assert float(posterior.precision["0.weight"]) == pytest.approx(2 / 4)
    assert float(posterior.precision["2.weight"]) == pytest.approx(8 / 4)
    assert float(posterior.precision["0.bias"]) == pytest.approx(1 / 9)


# ---------------------------------------------------------------------------------------------------------------------
# Around it


@pytest.mark.parametrize("structure", [*STRUCTURES, "subset"])
def test_saved_and_loaded(structure: Any, tmp_path: Path) -> None:
    method = pl.Laplace(where=7, mode=TO_MODE) if structure == "subset" else pl.Laplace(structure=structure, mode=TO_MODE)
    posterior = fitted(method)
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", toy()[0])
    x = torch.randn(5, 2)
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    assert torch.equal(loaded.functions(x, 3), posterior.functions(x, 3))
    assert loaded.log_evidence == posterior.log_evidence
    assert loaded.diagnostics() == posterior.diagnostics()


def test_weights_as_they_are() -> None:
    net, x, y = toy()
    trained = pl.fit(net, (x, y), TO_MODE, **QUIET)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(trained.weights()[name][0])
    posterior = pl.fit(net, (x, y), pl.Laplace(mode=None), **QUIET)
    assert all(torch.equal(posterior.means[n], p) for n, p in net.named_parameters())


def test_weights_that_are_no_mode_are_reported() -> None:
    net, x, y = toy()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(5)
    with pytest.warns(UserWarning, match="not at a mode of this posterior: the gradient .* posterior standard deviations"):
        posterior = pl.fit(net, (x, y), pl.Laplace(mode=None), **QUIET)
    assert posterior.diagnostics()["distance"] > 0.3


def test_an_ensemble_of_them() -> None:
    net, x, y = toy()
    posterior = pl.fit(net, (x, y), pl.Ensemble(pl.Laplace(mode=TO_MODE), members=3), **QUIET)
    parts = posterior.parts
    assert len(parts) == 3
    assert all(isinstance(part, LaplacePosterior) for part in parts)
    assert posterior.functions(x[:2], 9).shape == (9, 2, 2)


def test_early_stopping_keeps_its_weights() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which are no mode
        fitted(pl.Laplace(mode=replace(TO_MODE, patience=3)))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(x, 0.5, training=True))


def test_random_networks_are_refused() -> None:
    _, x, y = toy()
    with pytest.raises(ValueError, match="different outputs for the same inputs"):
        pl.fit(Noisy(), (x, y), pl.Laplace(mode=pl.MAP(epochs=1)), **QUIET)


def test_a_flat_prior_that_leaves_directions_open_is_refused() -> None:
    net, x, y = toy()
    warnings.simplefilter("ignore")
    with pytest.raises(ValueError, match=r"proper prior|positive definite"):
        pl.fit(net, (x[:3], y[:3]), pl.Laplace(structure="full", mode=pl.MAP(epochs=2)), prior=priors.Flat(), **QUIET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"structure": "banded"}, "structure must be one of"),
        ({"curvature": "jacobian"}, "curvature must be one of"),
        ({"predictive": "laplace"}, "predictive must be one of"),
        ({"tune": "all"}, "tune must be one of"),
        ({"where": 0}, "where must be"),
        ({"rounds": 0}, "rounds"),
        ({"tune": "weight"}, "one precision for each layer"),
        ({"curvature": "hessian"}, "no Kronecker factors"),
        ({"rank": 0}, "rank"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pl.Laplace(**settings)


def test_a_mode_is_found_by_map() -> None:
    with pytest.raises(TypeError, match="mode must be MAP"):
        pl.Laplace(mode=pl.SGLD())


def test_precisions_of_other_weights_are_refused() -> None:
    posterior = fitted(pl.Laplace(mode=TO_MODE))
    with pytest.raises(ValueError, match="precision must be given for the weights"):
        posterior.log_marginal({"0.weight": torch.ones(())})


# ---------------------------------------------------------------------------------------------------------------------
# What was wrong once


def plain(net: nn.Module, data: Any, likelihood: Any = None, **settings: Any) -> LaplacePosterior:
    """At the weights as they are."""
    warnings.simplefilter("ignore")
    method = pl.Laplace(**{"mode": None, **settings})
    likelihood = likelihood or likelihoods.Gaussian(0.5)
    posterior = pl.fit(net, data, method, likelihood=likelihood, prior=priors.Gaussian(), **QUIET)
    assert isinstance(posterior, LaplacePosterior)
    return posterior


@pytest.mark.parametrize("structure", ["full", "block", "kron"])
def test_single_precision_loses_no_small_eigenvalues(structure: Any) -> None:
    x = torch.linspace(-2, 2, 1000)[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    noise = likelihoods.Gaussian(0.01)
    single = plain(net, (x, torch.sin(3 * x)), noise, structure=structure)
    double = plain(net.double(), (x.double(), torch.sin(3 * x.double())), noise, structure=structure)
    torch.testing.assert_close(single.moments(x)[1].double(), double.moments(x.double())[1], rtol=0.02, atol=0)
    assert single.evidence is not None
    assert double.evidence is not None
    assert float(single.evidence.log_occam) == pytest.approx(float(double.evidence.log_occam), abs=0.2)


class Ragged(nn.Module):
    """Only the tokens that are there go through the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        x, there = data["x"], data["there"]
        out = x.new_zeros(*x.shape[:2], 3)
        out[there] = self.inner(x[there]).tanh()
        return self.head(out.sum(1))


def test_tokens_that_are_picked_by_a_mask_belong_to_their_examples() -> None:
    torch.manual_seed(0)
    net = Ragged().double()
    x = {"x": torch.randn(6, 4, 2).double(), "there": torch.arange(4) < torch.tensor([4, 4, 4, 2, 2, 2])[:, None]}
    posterior = plain(net, (x, torch.randn(6, 1).double()), structure="full")
    j = exact(posterior.model, x, tuple(posterior.means))  # type: ignore[arg-type]
    rows = torch.cat([v.flatten(2) for v in j.values()], -1)[:, 0]
    order = [n for block in posterior.curvature.blocks for n in block.names]
    assert order == list(j)
    precision = rows.T @ rows / 0.25 + torch.eye(rows.shape[1]).double()
    expected = torch.einsum("bp,pq,bq->b", rows, torch.linalg.inv(precision), rows)
    torch.testing.assert_close(posterior.moments(x)[1].flatten(), expected)


def test_masked_examples_do_not_count() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(30, 2).double(), torch.randn(30, 1).double()
    x[20:] *= 100
    y[20:] = torch.nan
    for structure in ("kron", "ekfac", "full"):
        warnings.simplefilter("ignore")
        method = pl.Laplace(structure=structure, mode=None)  # type: ignore[arg-type]
        masked = pl.fit(net, (x, y), method, likelihood=likelihoods.Gaussian(0.5), prior=priors.Gaussian(), mask="nan", **QUIET)
        assert masked.log_evidence == pytest.approx(plain(net, (x[:20], y[:20]), structure=structure).log_evidence)


def test_rows_of_padding_have_their_prior_in_all_structures() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randint(0, 5, (20, 4))
    y = torch.randn(20, 1).double()
    full, low = (plain(net, (x, y), structure=s, rank=28) for s in ("full", "lowrank"))
    torch.testing.assert_close(low.moments(x)[1], full.moments(x)[1], rtol=1e-6, atol=1e-9)
    assert full.log_evidence == pytest.approx(low.log_evidence)


def test_a_network_that_clips_its_outputs_has_no_plain_last_layer() -> None:
    torch.manual_seed(0)

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).clamp(-1, 1)

    net, x = Clipped().double(), torch.cat([0.1 * torch.randn(3, 3), 9 * torch.randn(20, 3)]).double()
    y = torch.zeros(23, 2).double()
    one, other = (plain(net, (x[order], y), where="last") for order in (torch.arange(23), torch.arange(22, -1, -1)))
    torch.testing.assert_close(one.moments(x)[1], other.moments(x)[1])


def test_a_weight_that_is_data_elsewhere_is_seen_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.words(x)).tanh() @ self.inner(self.words.weight).T

    torch.manual_seed(0)
    net, x = Tied().double(), torch.randint(0, 5, (8,))
    full, low = (plain(net, (x, x), likelihoods.Categorical(), structure=s, rank=40) for s in ("full", "lowrank"))
    torch.testing.assert_close(low.moments(x)[1], full.moments(x)[1], rtol=1e-6, atol=1e-9)


def test_the_first_prediction_may_be_in_inference_mode() -> None:
    posterior = fitted(pl.Laplace(mode=TO_MODE))
    x = torch.randn(4, 2)
    with torch.inference_mode():
        inside = posterior.predict(x).probs
    torch.testing.assert_close(inside, posterior.predict(x).probs)


def test_positions_may_come_and_go_between_predictions() -> None:
    torch.manual_seed(0)
    from tests.helpers.networks import Flattened

    net, x = Flattened(True).double(), torch.randn(10, 4, 3).double()
    x[:3] = 0.0  # all positions alike
    posterior = plain(net, (x, torch.randn(10, 2).double()), structure="full")
    whole = posterior.moments(x)[1]
    again = pl.fit(
        net,
        (x, torch.zeros(10, 2).double()),
        pl.Laplace(mode=None, structure="full"),
        likelihood=likelihoods.Gaussian(0.5),
        prior=priors.Gaussian(),
        **QUIET,
    )
    again.moments(x[:, :1])
    torch.testing.assert_close(again.moments(x)[1], whole)


def test_what_cannot_fit_is_refused_before_the_training() -> None:
    net = nn.Sequential(nn.Linear(100, 1200), nn.Tanh(), nn.Linear(1200, 1))
    steps: list[int] = []
    with pytest.raises(MemoryError, match="structure='full' needs about"):
        pl.fit(
            net,
            (torch.randn(20, 100), torch.randn(20, 1)),
            pl.Laplace("full", mode=pl.MAP(epochs=3)),
            callbacks=[lambda step, _: steps.append(step)],
            **QUIET,
        )
    assert steps == []


def test_tuning_a_subnetwork_counts_its_own_weights() -> None:
    warnings.simplefilter("ignore")
    posterior = fitted(pl.Laplace(where=36, mode=TO_MODE))
    effective = posterior.curvature.effective(posterior.precision, torch.ones(()))
    assert posterior.effective is not None
    assert posterior.effective > 0.1
    assert sum(float(v.sum()) for v in effective.values()) == pytest.approx(posterior.effective, rel=1e-4)


@pytest.mark.parametrize(
    "settings", [({"where": 3, "structure": "lowrank"}), ({"where": 3, "curvature": "hessian", "structure": "full"})]
)
def test_numbers_of_weights_have_their_full_covariance(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="full covariance"):
        pl.Laplace(**settings)


def test_closed_forms_of_classes_are_refused_for_numbers() -> None:
    with pytest.raises(ValueError, match="is for classes"):
        plain(nn.Linear(2, 1), (torch.randn(9, 2), torch.randn(9, 1)), predictive="probit")


@pytest.mark.parametrize("loader", [False, True], ids=["tensors", "loader"])
@pytest.mark.parametrize("settings", [{"structure": s} for s in STRUCTURES] + [{"tune": "layer"}, {"where": 6}], ids=str)
def test_a_finished_checkpoint_gives_the_posterior_again(settings: dict[str, Any], loader: bool, tmp_path: Any) -> None:
    """The last stage is a pass over the data: what came out of it is there again without the stages before."""
    warnings.simplefilter("ignore")
    net, x, y = toy()
    data: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20) if loader else (x, y)
    method = pl.Laplace(mode=pl.MAP(epochs=20), **settings)
    first, again = (pl.fit(net, data, method, checkpoint=tmp_path / "run", **QUIET) for _ in range(2))
    assert torch.equal(first.functions(x, 5), again.functions(x, 5))
    assert again.log_evidence == first.log_evidence
    assert again.run["stages"] == first.run["stages"]


def test_an_interrupt_before_the_step_that_tunes_leaves_the_prior_as_it_was() -> None:
    before = {"weight": torch.ones(1, 2)}
    run: Run[None] = Run(
        as_data((torch.ones(3, 2), torch.ones(3, 1)), dtype=torch.float32, device=torch.device("cpu")), before=before
    )
    unstarted = stages.TuningState({"weight": torch.zeros(())}, {"weight": torch.ones(2)}, torch.tensor(False))
    left = stages.Tuning(pl.Laplace(tune="layer")).kept(None, run, unstarted)  # type: ignore[arg-type]
    assert set(left) == {"weight", stages.ENDED}


@pytest.mark.parametrize("loaded", [False, True])
def test_rows_that_were_set_aside_end_the_training_and_a_loader_has_none(loaded: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(80, 2)
    y = (2 * x[:, :1]).sin() + 0.1 * torch.randn(80, 1)
    pairs = torch.utils.data.TensorDataset(x, y)
    data: Any = torch.utils.data.DataLoader(pairs, batch_size=20) if loaded else (x, y)
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    posterior = pl.fit(net, data, pl.Laplace(), **QUIET)
    made = {
        name: sum(steps for other, steps, _ in posterior.run["stages"] if other == name) for name in ("polishing", "tuning")
    }
    # without held-out rows the mode is gone to, and is another one after each tuning; with them weights stay where they are
    assert (made["polishing"] > 0, made["tuning"] > 1) == (loaded, loaded)
    assert "doubts" not in posterior.run


class _Tagger(nn.Module):
    """Words, each with a class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_random_columns_come_near_all_of_them(structure: Any) -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 9, (40, 6), generator=stream), torch.randint(0, 5, (40, 6), generator=stream)
    y[:, 4:] = -100
    given = {"likelihood": pl.likelihoods.Categorical(ignore_index=-100), "prior": pl.priors.Gaussian(1.0), **QUIET}
    fits = {n: pl.fit(_Tagger(), (x, y), pl.Laplace(structure, mode=None, columns=n), **given) for n in (None, 6, 23, 24)}
    exact, few, rough, same = (fits[n].predict(x[:5]).epistemic for n in (None, 6, 23, 24))
    assert torch.equal(exact, same)  # 6 positions with 4 columns each are all there are
    assert not torch.equal(exact, rough)
    for found in (few, rough):  # Σ over 40 examples of columns with a relative scatter of about √(2/6)
        assert torch.allclose(found, exact, rtol=0.4)
        assert abs(float(found.mean() / exact.mean()) - 1) < 0.1


def test_random_columns_are_of_the_outputs_fisher() -> None:
    for settings in ({"structure": "lowrank"}, {"curvature": "empirical"}, {"negligible": 1e-5}):
        with pytest.raises(ValueError, match="columns= samples the outputs' Fisher"):
            pl.Laplace(**{"structure": "diag", **settings}, columns=3)  # type: ignore[arg-type]


def test_many_outputs_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randint(0, 9, (3, 2)), torch.randint(0, 600, (3, 2))
    network = nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 600))
    pl.fit(network, (x, y), pl.Laplace("diag", mode=None, columns=2), **QUIET)
    assert "1,200 backward passes and a covariance of" in caplog.text
    caplog.clear()
    pl.fit(network, (x[:1], y[:1]), pl.Laplace("diag", mode=None, predictive="sampled", chunk=1), **QUIET)
    assert "takes 1,200 backward passes for each of 1 examples" in caplog.text
    assert "columns=10" in caplog.text
