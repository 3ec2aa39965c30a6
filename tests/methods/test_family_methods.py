"""Methods with a variational family: their bound, its gradients, their optima, and the posterior they leave."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible import priors
from plausible.blocks.families import Drawn, Family
from plausible.blocks.families.base import raw_lower, standard_log_density
from plausible.blocks.families.gaussian import LowRankFamily
from plausible.blocks.variational import maximise
from plausible.core import memory, random
from plausible.core.data import Batch, as_data
from plausible.core.schedules import Cosine, Linear
from plausible.core.weights import Weights
from plausible.engine.method import Run
from plausible.methods.variational.reparameterised import THETA, Reparameterised, parameters_of
from plausible.posteriors.laws import FamilyLaw, LawPosterior
from plausible.posteriors.mixture import MixturePosterior
from plausible.testing import LinearGaussian

QUIET: dict[str, Any] = {"progress": False, "compile": False}
N = 24
METHODS: dict[str, Reparameterised] = {
    "full-rank": pl.FullRank(),
    "low-rank": pl.LowRank(rank=2),
    "matrix-normal": pl.MatrixNormal(),
    "radial": pl.Radial(),
    "rank1": pl.Rank1(components=2),
}
DENSE = [name for name in METHODS if name != "rank1"]


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=stream, dtype=dtype)
    noise = torch.randn(N, 1, generator=stream, dtype=dtype)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype) + 0.3 * noise


def _built(method: Reparameterised, prior: priors.Prior | None = None, temperature: float = 1.0) -> Any:
    torch.manual_seed(0)
    data = as_data(_data(torch.float64), dtype=torch.float64, device="cpu")
    model = pl.Model.build(
        nn.Linear(3, 1).double(), pl.likelihoods.Gaussian(scale=0.5), prior or priors.Gaussian(), data.all(), num_data=N
    )
    run = dataclasses.replace(Run.alone(method, model, data), steps=100)
    model = model.tempered(temperature)
    return model, run, method.start(model, run, random.key(0)), data.all()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


# ---------------------------------------------------------------------------------------------------------------------
# The bound


@pytest.mark.parametrize("name", METHODS)
def test_batches_average_to_the_bound_of_all_data(name: str) -> None:
    method = dataclasses.replace(METHODS[name], initial_scale=0.3)
    model, run, state, batch = _built(method)
    infos = []
    for start in range(0, N, 8):
        part = Batch(batch.x[start : start + 8], batch.y[start : start + 8])
        infos.append(method.step(model, run, method.start(model, run, random.key(0)), part)[1])
    whole = method.step(model, run, state, batch)[1]
    for term in ("elbo", "log_likelihood", "kl"):
        torch.testing.assert_close(torch.stack([info[term] for info in infos]).mean(), whole[term])


@pytest.mark.parametrize("name", DENSE)
def test_the_bound_of_a_linear_model_is_its_closed_form(name: str) -> None:
    """At the start all families have uncorrelated weights of one scale, up to the directions of the low-rank one."""
    method = dataclasses.replace(METHODS[name], samples=400, antithetic=True, initial_scale=0.3)
    model, run, state, batch = _built(method, priors.Gaussian(0.8))
    family, theta = method.family(model.initial), parameters_of(state.weights)
    scales = {n: s.square() for n, s in (family.scales(theta) or {}).items()}
    mean = batch.x @ model.initial["weight"].T + model.initial["bias"]
    variance = batch.x.square() @ scales["weight"].T + scales["bias"]
    exact = -0.5 * ((batch.y - mean).square() + variance) / 0.25 - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    kl = float(family.closed(priors.Gaussian(0.8), theta).value)
    _, info = method.step(model, run, state, batch)
    allowed = 0.15 * float((exact.sum() - exact.max()).abs()) if name == "low-rank" else 5 * float(variance.sum()) / 0.25
    allowed = min(allowed, 5 * float(variance.sum()) / 0.25 * math.sqrt(8 / 400) * 3)
    assert float(info["log_likelihood"]) == pytest.approx(float(exact.sum()), abs=allowed)
    assert float(info["kl"]) == pytest.approx(kl, rel=1e-9)
    torch.testing.assert_close(info["elbo"], info["log_likelihood"] - info["kl"])


def _gradient(
    method: Reparameterised, model: Any, run: Run[Any], batch: Batch, weights: Weights, step: int, key: int = 0
) -> Weights:
    """What one step of plain descent with rate 1 subtracts."""
    plain = dataclasses.replace(method, optimiser=pl.optimisers.SGD(momentum=0.0), lr=1.0)
    state = plain.start(model, run, random.key(key))._replace(
        weights={n: w.clone() for n, w in weights.items()}, step=torch.tensor(step)
    )
    after = plain.step(model, run, state, batch)[0].weights
    return {n: weights[n] - after[n] for n in weights}


@pytest.mark.parametrize("name", DENSE)
def test_the_landing_gradient_has_the_same_mean(name: str) -> None:
    """Both estimators are unbiased: their difference averages to nothing."""
    method = dataclasses.replace(METHODS[name], initial_scale=0.3, samples=20)
    model, run, state, batch = _built(method, priors.Gaussian(0.8))
    gaps = []
    for step in range(30):
        pair = [
            _gradient(dataclasses.replace(method, landing=landing), model, run, batch, state.weights, step)
            for landing in (False, True)
        ]
        gaps.append(torch.cat([(pair[0][n] - pair[1][n]).flatten() for n in state.weights]))
    gap = torch.stack(gaps)
    moving = gap.std(0) > 1e-12
    assert float((gap.mean(0)[moving].abs() / (gap.std(0)[moving] / math.sqrt(30))).max()) < 5
    assert float(gap.mean(0)[~moving].abs().max() if bool((~moving).any()) else 0.0) < 1e-9


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_landing_gradient_vanishes_at_the_posterior(temperature: float) -> None:
    """With q the (tempered) posterior, log p(w, D)/T − log q(w) is constant: no noise for any draw."""
    method = pl.FullRank(landing=True)
    model, run, _, batch = _built(method, priors.Gaussian(0.8), temperature)
    design = torch.cat([batch.x, torch.ones(N, 1).double()], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(4).double() / 0.64)
    mean = covariance @ design.T @ batch.y[:, 0] / 0.25
    factor = torch.linalg.cholesky(covariance * temperature)
    raw = raw_lower(factor)
    exact = {THETA + "mean": mean, THETA + "factor": raw}
    for step in range(3):
        found = _gradient(method, model, run, batch, exact, step)
        assert max(float(g.abs().max()) for g in found.values()) < 1e-10
        noisy = _gradient(dataclasses.replace(method, landing=False), model, run, batch, exact, step)
        assert max(float(g.abs().max()) for g in noisy.values()) > 1e-3
    wrong = _gradient(method, model, run, batch, {**exact, THETA + "factor": 1.1 * raw}, 0)
    assert max(float(g.abs().max()) for g in wrong.values()) > 1e-3


@pytest.mark.parametrize(("kl_weights", "alike"), [(Linear(0.0, 1.0), True), ("uniform", False)])
def test_a_warm_up_starts_without_the_kl(kl_weights: Any, alike: bool) -> None:
    method = pl.FullRank(kl_weights=kl_weights, lr=0.01)
    moved = []
    for scale in (1e-2, 10.0):
        model, run, state, batch = _built(method, priors.Gaussian(scale))
        moved.append(method.step(model, run, state, batch)[0].weights[THETA + "factor"])
    assert torch.equal(*moved) == alike


# ---------------------------------------------------------------------------------------------------------------------
# Optima


@pytest.mark.parametrize("landing", [True, False])
def test_full_rank_reaches_the_exact_posterior_and_evidence(landing: bool) -> None:
    problem = LinearGaussian()
    method = pl.FullRank(
        epochs=500, batch_size=None, lr=Cosine(0.08), initial_scale=0.1, landing=landing, samples=1 if landing else 8
    )
    posterior = problem.fit(method)
    mean, covariance = problem.posterior()
    white = torch.linalg.inv(torch.linalg.cholesky(covariance))
    found = posterior.family.covariance(posterior.parameters).double()
    off = float((white @ found @ white.T - torch.eye(3).double()).abs().max())
    shift = float((white @ (posterior.parameters["mean"].double() - mean)).abs().max())
    assert max(off, shift) < (0.03 if landing else 0.3)
    if landing:
        assert posterior.log_evidence == pytest.approx(problem.log_evidence(), abs=0.02)


@pytest.mark.parametrize("rank", [1, 5])
def test_low_rank_reaches_the_best_of_its_covariances(rank: int) -> None:
    """Six weights: at rank 5 any covariance, so the exact one; at rank 1 an optimum, by another optimiser in closed form."""
    problem = LinearGaussian(inputs=6)
    method = pl.LowRank(rank, epochs=500, batch_size=None, lr=Cosine(0.1), samples=2, initial_scale=0.1, landing=True)
    posterior = problem.fit(method)
    mean, exact = problem.posterior()
    precision = torch.linalg.inv(exact)

    def loss(covariance: Tensor) -> Tensor:
        return 0.5 * ((precision * covariance).sum() - 6 - torch.logdet(precision @ covariance))

    family, theta = posterior.family, posterior.parameters
    assert isinstance(family, LowRankFamily)
    found = float(loss(family.covariance(theta).double()))
    near = float(loss(family.covariance(maximise(lambda t: -loss(family.covariance(t)), theta))))
    independent = float(loss(torch.diag(1 / precision.diagonal())))
    assert near <= found < near + 0.05
    assert float(loss(method.conjugate(problem)[1])) <= near + 1e-6 < independent - 0.1
    assert (near < 1e-6) == (rank == 5)
    torch.testing.assert_close(posterior.parameters["mean"].double(), mean, rtol=0, atol=0.02)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_matrix_normal_is_exact_for_several_outputs(covariance: Any) -> None:
    """y = W x + noise has the posterior covariance I ⊗ Λ⁻¹: a matrix normal; with diagonal factors 1/Λ_jj."""
    problem = LinearGaussian()
    x, _, _ = problem.data()
    y = torch.cat([x @ torch.tensor([1.0, -1.0, 0.5]).double()[:, None], x.sum(1, keepdim=True)], 1)
    method = pl.MatrixNormal(
        covariance=covariance,
        epochs=800 if covariance == "full" else 400,
        batch_size=None,
        lr=Cosine(0.1),
        initial_scale=0.1,
        samples=2,
        landing=covariance == "full",
        antithetic=covariance == "diagonal",
    )
    torch.manual_seed(0)
    posterior = pl.fit(
        nn.Linear(3, 2, bias=False),
        (x.float(), y.float()),
        method,
        likelihood=pl.likelihoods.Gaussian(scale=0.5),
        prior=priors.Gaussian(problem.scale),
        **QUIET,
    )
    exact = torch.linalg.inv(problem.precision()).contiguous()
    mean = (exact @ x.T @ y / 0.25).T
    rows, columns = (
        f @ f.T if covariance == "full" else torch.diag(f.square())
        for f in posterior.family.factors(posterior.parameters, "weight")
    )
    found = torch.kron(rows, columns).double()
    expected = torch.kron(
        torch.eye(2).double(), exact if covariance == "full" else torch.diag(1 / problem.precision().diagonal())
    )
    deviation = expected.diagonal().sqrt()
    off = (found - expected).abs() / torch.outer(deviation, deviation)
    shift = (posterior.means["weight"] - mean).abs() / exact.diagonal().sqrt()
    assert max(float(off.max()), float(shift.max())) < (0.02 if covariance == "full" else 0.2)


def test_radial_and_mean_field_have_the_same_optimal_scales() -> None:
    problem = LinearGaussian()
    method = pl.Radial(epochs=400, batch_size=None, lr=Cosine(0.08), samples=8, antithetic=True, initial_scale=0.1)
    posterior = problem.fit(method)
    exact = problem.precision().diagonal().rsqrt()
    torch.testing.assert_close(posterior.scales["weight"][0].double(), exact, rtol=0.15, atol=0)
    mean, _ = problem.posterior()
    assert float(((posterior.means["weight"][0] - mean).abs() / exact).max()) < 0.15


# ---------------------------------------------------------------------------------------------------------------------
# The posterior


@pytest.mark.parametrize("name", METHODS)
def test_what_the_posterior_says_of_itself(name: str, tmp_path: Any) -> None:
    net, (x, _) = _network(), _data()
    posterior = pl.fit(net, _data(), dataclasses.replace(METHODS[name], epochs=15), **QUIET)
    assert isinstance(posterior, LawPosterior)
    assert isinstance(posterior.law, FamilyLaw)
    assert set(posterior.means) == set(posterior.scales) == set(posterior.model.random)
    assert set(posterior.points) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    drawn = posterior.weights(2000, seed=3)
    for weight in posterior.model.random:
        torch.testing.assert_close(drawn[weight].std(0), posterior.scales[weight], rtol=0.25, atol=1e-6)
    assert torch.equal(posterior.functions(x, 5), posterior.functions(x, 8)[:5])  # more draws begin with the same ones
    assert posterior.log_evidence == posterior.history["elbo"][-1]
    assert set(posterior.history) == {"elbo", "log_likelihood", "kl"}
    assert posterior.kl() == pytest.approx(posterior.history["kl"][-1], rel=0.2)
    assert posterior.diagnostics()["kl"] == posterior.kl()
    assert all(bool((ratio >= 0).all()) for ratio in posterior.snr().values())
    assert all(math.isfinite(quartile) for quartile in posterior.diagnostics()["snr_quartiles"])
    posterior.save(tmp_path / "q")
    again = pl.load(tmp_path / "q", net)
    assert torch.equal(again.functions(x, 5), posterior.functions(x, 5))
    assert (again.summary(), again.kl(), again.log_evidence) == (posterior.summary(), posterior.kl(), posterior.log_evidence)
    moved = posterior.to("cpu")
    assert torch.equal(moved.functions(x, 5), posterior.functions(x, 5))
    assert moved.log_evidence == posterior.log_evidence


def test_summaries_say_how_each_weight_was_inferred() -> None:
    texts = {
        n: str(pl.fit(_network(), _data(), dataclasses.replace(m, epochs=1), **QUIET).summary()) for n, m in METHODS.items()
    }
    assert "0.weight              4×3     inferred, jointly with all others" in texts["full-rank"]
    assert "0.weight              4×3     inferred, rows × columns" in texts["matrix-normal"]
    assert "0.bias                4       inferred, independent" in texts["matrix-normal"]
    assert "0.weight              4×3     inferred, radially" in texts["radial"]
    assert "0.weight              4×3     a point times inferred rank-one factors, 2 components" in texts["rank1"]
    assert "0.bias                4       trained as a point in each component" in texts["rank1"]
    assert "likelihood.log_scale  scalar  trained as a point" in texts["rank1"]


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_left_out_are_trained_as_points(name: str) -> None:
    net = _network()
    before = net[0].weight.detach().clone()
    posterior = pl.fit(net, _data(), dataclasses.replace(METHODS[name], epochs=10), where="last", **QUIET)
    assert set(posterior.means) == {"3.weight", "3.bias", "likelihood.log_scale"}
    assert "0.weight              4×3     trained as a point" in str(posterior.summary())
    assert not torch.equal(posterior.points["0.weight"], before)


@pytest.mark.parametrize("name", METHODS)
def test_members_of_an_ensemble_are_a_mixture(name: str, tmp_path: Any) -> None:
    net, (x, _) = _network(), _data()
    method = pl.Ensemble(dataclasses.replace(METHODS[name], epochs=5), members=3)
    posterior = pl.fit(net, _data(), method, **QUIET)
    assert isinstance(posterior, MixturePosterior)
    assert posterior.functions(x, 9).shape == (9, N, 1)
    means = [part.means["0.weight"] for part in posterior.parts]
    assert not torch.equal(means[0], means[1])
    posterior.save(tmp_path / "q")
    assert torch.equal(pl.load(tmp_path / "q", net).functions(x, 9), posterior.functions(x, 9))


def test_draws_of_rank_one_take_turns() -> None:
    posterior = pl.fit(_network(), _data(), pl.Rank1(components=3, epochs=10, spread=0.5), **QUIET)
    biases = posterior.weights(9)["0.bias"]
    assert torch.equal(biases, posterior.parameters["point of 0.bias"].repeat(3, 1))
    assert not torch.equal(biases[0], biases[1])
    ratios = posterior.weights(1)["0.weight"][0] / posterior.parameters["point of 0.weight"]
    assert int(torch.linalg.matrix_rank(ratios.double(), rtol=1e-5)) == 1


@pytest.mark.parametrize("name", METHODS)
def test_weights_of_several_types(name: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(3, 4).double(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(torch.tanh(self.wide(x.double())).float())

    torch.manual_seed(0)
    posterior = pl.fit(Two(), _data(), dataclasses.replace(METHODS[name], epochs=5), **QUIET)
    assert {n: w.dtype for n, w in posterior.weights(2).items() if "weight" in n} == {
        "wide.weight": torch.float64,
        "narrow.weight": torch.float32,
    }
    assert bool(torch.isfinite(posterior.predict(_data()[0]).mean).all())


# ---------------------------------------------------------------------------------------------------------------------
# A family of a user's own, known by its draws alone


class Shifted(Family):
    """w = μ + σ ε with log q of the draw, and nothing in closed form."""

    def start(self, weights: Weights, scale: float, key: Tensor) -> Weights:
        return {**weights, **{f"log scale of {n}": torch.full_like(w, math.log(scale)) for n, w in weights.items()}}

    def noise(self, parameters: Weights) -> Weights:
        return {name: parameters[name] for name in self.like}

    def draw(self, parameters: Weights, noise: Weights, component: int = 0) -> Drawn:
        logs = {name: parameters[f"log scale of {name}"] for name in self.like}
        weights = {name: parameters[name] + logs[name].exp() * e for name, e in noise.items()}
        return Drawn(weights, torch.stack([standard_log_density(e) - logs[n].sum() for n, e in noise.items()]).sum())


@dataclass(frozen=True)
class Own(Reparameterised):
    """Independent Gaussians, all by draws."""

    name: ClassVar[str] = ""

    def family(self, weights: Weights) -> Family:
        return Shifted(weights)


def test_a_family_known_by_its_draws_alone(tmp_path: Any) -> None:
    problem = LinearGaussian()
    posterior = problem.fit(Own(epochs=300, batch_size=None, lr=Cosine(0.1), samples=8, antithetic=True, initial_scale=0.1))
    exact = problem.precision().diagonal().rsqrt()
    torch.testing.assert_close(posterior.scales["weight"][0].double(), exact, rtol=0.2, atol=0)  # over draws
    torch.testing.assert_close(posterior.scales["weight"], posterior.parameters["log scale of weight"].exp(), rtol=0.12, atol=0)
    law = torch.distributions.Normal(posterior.parameters["weight"], posterior.parameters["log scale of weight"].exp())
    kl = float(torch.distributions.kl_divergence(law, torch.distributions.Normal(0.0, problem.scale)).sum())
    assert posterior.kl(samples=1000) == pytest.approx(kl, abs=5 * math.sqrt(3 / 1000))  # Var log q/p < 3, mostly ½ a weight
    posterior.save(tmp_path / "q")
    with pytest.raises(ValueError, match="your own code: its family cannot be made again"):
        pl.load(tmp_path / "q", problem.network())
    with pytest.raises(ValueError, match="landing=True needs log q"):
        problem.fit(Own(epochs=1, landing=True))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("method", [pl.FullRank(), pl.LowRank(rank=1000), pl.MatrixNormal()], ids=["full", "low", "matrix"])
def test_covariances_that_do_not_fit_are_refused(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 1))
    monkeypatch.setattr(memory, "available", lambda _: 10**6)
    with pytest.raises(MemoryError, match=rf"{type(method).__name__}: .* GiB are needed"):
        pl.fit(net, _data(), method, **QUIET)
    pl.fit(net, _data(), pl.MatrixNormal(epochs=1, covariance="diagonal"), **QUIET)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (pl.FullRank, {"kl_weights": "warm"}, "FullRank: kl_weights must be"),
        (pl.FullRank, {"kl_weights": -1.0}, "kl_weights"),
        (pl.FullRank, {"samples": 0}, "samples"),
        (pl.FullRank, {"samples": 3, "antithetic": True}, "even number of samples"),
        (pl.FullRank, {"initial_scale": 0.0}, "initial_scale"),
        (pl.FullRank, {"landing": "yes"}, "landing must be True or False"),
        (pl.FullRank, {"optimiser": "adam"}, "optimiser"),
        (pl.FullRank, {"lr": -1.0}, "lr"),
        (pl.LowRank, {"rank": 0}, "rank must be at least 1"),
        (pl.LowRank, {"rank": 2.5}, "rank must be a whole number"),
        (pl.MatrixNormal, {"covariance": "low"}, "covariance must be 'full' or 'diagonal'"),
        (pl.Rank1, {"components": 0}, "components"),
        (pl.Rank1, {"prior_scale": 0.0}, "prior_scale"),
        (pl.Rank1, {"spread": -0.1}, "spread"),
        (pl.Rank1, {"biases": 1}, "biases must be True or False"),
        (pl.Rank1, {"landing": True}, "landing"),
        (pl.Rank1, {"patience": 0}, "patience must be a whole number of epochs"),
        (pl.Rank1, {"holdout": 1.0}, "holdout must lie between 0 and 1"),
    ],
)
def test_bad_settings(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cls(**settings)


def test_points_of_rank1_do_not_follow_noise() -> None:
    """Without rows that are set aside it predicts such targets 260 nats worse than the constant."""
    torch.manual_seed(0)
    x, y, new_x, new_y = torch.randn(60, 20), torch.randn(60, 1), torch.randn(1000, 20), torch.randn(1000, 1)
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
    posterior = pl.fit(net, (x, y), pl.Rank1(), **QUIET)
    constant = torch.distributions.Normal(y.mean(), y.std()).log_prob(new_y).mean()
    assert float(posterior.predict(new_x).log_prob(new_y).mean()) > float(constant) - 0.1
    # what is judged are the mean weights of the mixture, and those that were best are kept
    held = as_data((x, y), dtype=y.dtype, device="cpu").split(1 / 4, 0)[1].all()
    best = float(posterior.model.log_likelihood(posterior.means, held).mean())
    assert math.isclose(best, max(posterior.history["held_out_log_likelihood"]), rel_tol=1e-4)


def test_the_leading_setting_may_stand_alone() -> None:
    assert pl.LowRank(5).rank == 5
    assert pl.Rank1(2).components == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("members", [None, 2])
@pytest.mark.parametrize("name", METHODS)
def test_captured_on_a_gpu(name: str, members: int | None) -> None:
    """The law of the conformance suite, by steps in one CUDA graph; factorisations must not wait for the device."""
    problem, method = LinearGaussian(), type(METHODS[name]).conforming()
    repeated = method if members is None else pl.Ensemble(method, members=members, init="given")
    posterior = problem.fit(repeated, device="cuda", compile="auto")
    assert "captured" in posterior.run["mode"]
    mean, covariance = method.conjugate(problem)
    for part in [posterior] if members is None else posterior.parts:
        deviation = covariance.diagonal().sqrt()
        shift = (part.means["weight"][0].cpu() - mean).abs() / deviation
        ratio = part.scales["weight"][0].cpu() / deviation
        assert float(shift.max()) < 0.25
        assert float((ratio - 1).abs().max()) < 0.25
        assert torch.equal(part.to("cpu").parameters[next(iter(part.parameters))], next(iter(part.parameters.values())).cpu())
