"""Minimum description length: the expected error, the cost of weights and their sum, against Monte Carlo and closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import plausible as pl
from plausible import priors
from plausible.core import random
from plausible.core.data import as_data
from plausible.core.schedules import Cosine
from plausible.engine.method import Run
from plausible.methods.variational.dvi import DVI
from plausible.methods.variational.mdl import MDL, CodedPosterior, DescriptionLength, mixture_cost
from plausible.testing import LinearGaussian

QUIET: dict[str, Any] = {"progress": False, "compile": False}
N = 20


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def data(dtype: torch.dtype = torch.float32, outputs: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, dtype=dtype)
    return x, torch.sin(x @ torch.randn(3, outputs, dtype=dtype)) + 0.2 * torch.randn(N, outputs, dtype=dtype)


def built(net: nn.Module, method: Any, likelihood: Any = None) -> tuple[Any, Any, Any, Any]:
    given = as_data(data(torch.float64), dtype=torch.float64, device="cpu")
    model = pl.Model.build(net.double(), likelihood or pl.likelihoods.Gaussian(), priors.Gaussian(), given.all(), num_data=N)
    run = replace(Run.alone(method, model, given), steps=100)
    return model, run, method.start(model, run, random.key(0)), given.all()


# ---------------------------------------------------------------------------------------------------------------------
# Misfits


@pytest.mark.parametrize(
    "layers",
    [[nn.ReLU], [nn.Tanh], [nn.Sigmoid], [nn.LeakyReLU], [nn.Identity], [lambda: nn.BatchNorm1d(6), nn.Tanh]],
    ids=["relu", "tanh", "sigmoid", "leaky", "linear", "norm"],
)
@pytest.mark.parametrize("scale", ["learned", 0.5])
def test_the_expected_error_is_exact(layers: Any, scale: Any) -> None:
    """E log p(D | w) of 20,000 draws of all weights, with scales of 0.4 that bend every unit: within 4 standard errors."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 6), *(layer() for layer in layers), nn.Linear(6, 2))
    method = MDL(initial_scale=0.4)
    model, run, state, batch = built(net, method, pl.likelihoods.Gaussian(scale=scale))
    found = float(method.step(model, run, state, batch)[1]["log_likelihood"])
    count = 20_000
    stacked = {n: w + 0.4 * torch.randn(count, *w.shape, dtype=w.dtype) for n, w in model.initial.items()}
    stacked |= {name: value.expand(count, *value.shape) for name, value in model.buffers.items()}
    with torch.no_grad():
        values = torch.func.vmap(lambda w: model.log_likelihood(w, batch).sum())(stacked)
    assert found == pytest.approx(float(values.mean()), abs=4 * float(values.std()) / math.sqrt(count))


def test_a_network_without_a_hidden_layer() -> None:
    """With the model's own prior it is mean-field inference, with its optimum."""
    problem = LinearGaussian()
    posterior = problem.fit(MDL.conforming(), **QUIET)
    torch.testing.assert_close(posterior.means["weight"][0].double(), problem.posterior()[0], rtol=1e-3, atol=1e-3)
    exact = problem.precision().diagonal().rsqrt()
    torch.testing.assert_close(posterior.scales["weight"][0].double(), exact, rtol=1e-3, atol=0)
    length = posterior.description_length()
    gap = 0.5 * float(problem.precision().diagonal().log().sum() - torch.logdet(problem.precision()))
    assert length.total == pytest.approx(gap - problem.log_evidence(), abs=1e-2)  # −log p(D), and what independence costs


def test_one_hidden_layer_is_where_moments_and_description_length_agree() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    settings: dict[str, Any] = {"epochs": 20, "batch_size": None, "lr": Cosine(0.01), "warmup": 0.0}
    given = data()
    one = pl.fit(net, given, MDL(coding="prior", **settings), **QUIET)
    two = pl.fit(net, given, DVI(**settings), **QUIET)
    for name in one.means:
        torch.testing.assert_close(one.means[name], two.means[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.scales[name], two.scales[name], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def test_the_best_gaussian_for_each_tensor() -> None:
    """No other variance of a centred Gaussian sends the weights at less; the noise is coded by the prior."""
    method = MDL(initial_scale=0.2)
    model, run, state, batch = built(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), method)
    found = float(method.step(model, run, state, batch)[1]["kl"])

    def cost(weight: Tensor, scale: float) -> float:
        q, p = torch.distributions.Normal(weight, 0.2), torch.distributions.Normal(torch.zeros_like(weight), scale)
        return float(torch.distributions.kl_divergence(q, p).sum())

    exact = 0.0
    for name, weight in model.initial.items():
        best = math.sqrt(float(weight.square().mean() + 0.04))
        if name.startswith("likelihood."):
            exact += cost(weight, 1.0)
            continue
        exact += cost(weight, best)
        assert cost(weight, best) < min(cost(weight, 0.95 * best), cost(weight, 1.05 * best))
    assert found == pytest.approx(exact, rel=1e-9)


def test_the_cost_under_a_mixture() -> None:
    """That of a Gaussian where there is one; never below KL(q ‖ mixture), and equal to it where components lie apart."""
    mean, scale = (torch.tensor([0.3, -2.0, 2.1], dtype=torch.float64), torch.tensor([0.2, 0.1, 0.3], dtype=torch.float64))

    def mixture(means: list[float], log_scales: list[float], logits: list[float]) -> dict[str, Tensor]:
        parts = {"means": means, "log scales": log_scales, "logits": logits}
        return {name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}

    def exact(mix: dict[str, Tensor], i: int) -> float:
        laws = [stats.norm(float(m), math.exp(float(s))) for m, s in zip(mix["means"], mix["log scales"])]
        shares = mix["logits"].softmax(0).tolist()
        q = stats.norm(float(mean[i]), float(scale[i]))

        def integrand(w: float) -> float:
            return q.pdf(w) * (q.logpdf(w) - math.log(sum(p * law.pdf(w) for p, law in zip(shares, laws))))

        return integrate.quad(integrand, q.mean() - 8 * q.std(), q.mean() + 8 * q.std())[0]

    same = mixture([0.5, 0.5], [0.1, 0.1], [1.0, -3.0])
    apart, close = (mixture([-2.0, 0.0, 2.0], [-1.5] * 3, [0.0, 1.0, 0.5]), mixture([-0.5, 0.2, 1.0], [0.0] * 3, [0.0] * 3))
    for i in range(3):
        assert float(mixture_cost(mean, scale, same)[i]) == pytest.approx(exact(same, i), rel=1e-6)
        assert float(mixture_cost(mean, scale, apart)[i]) == pytest.approx(exact(apart, i), abs=2e-3)
        assert float(mixture_cost(mean, scale, close)[i]) > exact(close, i) - 1e-9


def test_a_mixture_adapts_and_is_no_worse_than_the_best_gaussian() -> None:
    """On weights of two sizes, each known to 0.01: one Gaussian for both wastes what two components save."""
    method = MDL(coding="mixture", components=3, batch_size=None, warmup=0.0)
    net = nn.Linear(20, 2, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.where(torch.rand(2, 20) < 0.5, 0.01, 3.0).double())
    x = torch.randn(400, 20, dtype=torch.float64)
    given = (x, x @ net.weight.detach().T + 0.2 * torch.randn(400, 2, dtype=torch.float64))
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(scale=0.2), **QUIET}
    lengths = {}
    for coding in ("gaussian", "mixture"):
        posterior = pl.fit(net, given, replace(method, coding=coding, epochs=400, lr=Cosine(0.03)), **settings)
        lengths[coding] = posterior.description_length(given)
    assert lengths["mixture"].total < lengths["gaussian"].total - 20
    assert set(posterior.coding) == {"logits", "means", "log scales"}


# ---------------------------------------------------------------------------------------------------------------------
# The description length


def test_the_description_length_and_its_units(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    given = data()
    posterior = pl.fit(net, given, MDL(epochs=60, lr=Cosine(0.02), coding="mixture"), **QUIET)
    assert isinstance(posterior, CodedPosterior)
    length = posterior.description_length(given)
    assert length.unit == "nats"
    assert length.total == length.data + length.weights
    assert length.bits.total == pytest.approx(length.total / math.log(2))
    assert length.bits.bits == length.bits
    assert posterior.description_length().total == pytest.approx(-posterior.log_evidence, rel=0.02)
    assert posterior.description_length().data == pytest.approx(length.data, rel=0.02)
    finer = posterior.description_length(given, precision=0.01)
    assert finer.data - length.data == pytest.approx(2 * N * math.log(100))
    assert posterior.description_length(precision=0.01).data > posterior.description_length().data
    drawn = torch.stack([posterior.predict(given[0], 1, seed=s).log_prob(given[1]).sum() for s in range(300)]).double()
    assert length.data == pytest.approx(-float(drawn.mean()), abs=4 * float(drawn.std()) / math.sqrt(300))
    assert posterior.diagnostics()["description_length"]["weights"] == pytest.approx(length.weights)
    posterior.save(tmp_path / "q")
    again = pl.load(tmp_path / "q", net)
    assert again.description_length(given) == length
    assert posterior.to("cpu").description_length(given) == length  # type: ignore[attr-defined]
    mixed = pl.fit(net, given, pl.Ensemble(MDL(epochs=2), members=2), **QUIET)
    assert isinstance(mixed.parts[1].description_length(given), DescriptionLength)
    with pytest.raises(ValueError, match="pass data"):
        mixed.parts[1].description_length()
    with pytest.raises(ValueError, match="precision must be positive"):
        posterior.description_length(precision=0.0)
    with pytest.raises(ValueError, match="shape"):
        posterior.description_length((given[0], given[1][:, :1]))
    with pytest.raises(ValueError, match="ask before pruning"):
        posterior.prune(0.5).description_length()


# ---------------------------------------------------------------------------------------------------------------------
# Refused


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
            "the network is Linear–ReLU–Linear–ReLU–Linear, expected Linear–activation–Linear",
        ),
        (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), "Linear–Tanh, expected"),
        (nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "BatchNorm1d–Linear"),
        (nn.Sequential(nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "Tanh–Linear"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "MDL: the layer '1' is LayerNorm"),
    ],
)
def test_other_networks(net: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pl.fit(net, data(), MDL(epochs=1), **QUIET)


def test_other_likelihoods_and_priors() -> None:
    net, (x, y) = nn.Linear(3, 2), data()
    with pytest.raises(ValueError, match="MDL: the likelihood is StudentT, expected Gaussian"):
        pl.fit(net, (x, y), MDL(epochs=1), likelihood=pl.likelihoods.StudentT(), **QUIET)
    with pytest.raises(ValueError, match="MDL: the likelihood is Categorical"):
        pl.fit(net, (x, y[:, 0].gt(0).long()), MDL(epochs=1), **QUIET)
    with pytest.raises(ValueError, match="use coding='prior'"):
        pl.fit(net, (x, y), MDL(epochs=1), prior=priors.Laplace(), **QUIET)
    pl.fit(net, (x, y), MDL(epochs=1, coding="prior"), prior=priors.Laplace(), **QUIET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coding": "huffman"}, "coding must be 'gaussian', 'mixture' or 'prior'"),
        ({"components": 1}, "components"),
        ({"warmup": -0.1}, "warmup"),
        ({"initial_scale": -1.0}, "initial_scale"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MDL(**settings)
