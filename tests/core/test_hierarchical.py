"""Priors with unknown precisions: the integrated density against quadrature, draws against the density, and groups."""

from __future__ import annotations

import json
import math

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import plausible as pl
from plausible.core.priors import FanIn, Gaussian, Hierarchical, Patterns, Prior, StudentT, as_prior
from plausible.core.serialise import decode, encode

PRIORS: list[Prior] = [
    Hierarchical(0.7, 1.3),
    Hierarchical(1.5, 0.4, groups="layer"),
    Hierarchical(0.7, 1.3, groups="input"),
    Hierarchical(0.7, 1.3, groups="ends"),
    Hierarchical(2.0, 0.2, groups="all"),
    FanIn(Hierarchical(0.7, 1.3, groups="layer")),
    Patterns((("*bias", Hierarchical(groups="all")), ("likelihood.*", Gaussian(2.0)), ("*", FanIn(Hierarchical(2.0))))),
]
IDS = ["tensor", "layer", "input", "ends", "all", "fan-in", "patterns"]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,), "likelihood.log_scale": ()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize(("shape", "rate", "count", "square"), [(0.7, 1.3, 3, 2.0), (4.0, 0.2, 11, 0.05), (0.5, 0.5, 1, 30.0)])
def test_density_is_the_gaussian_averaged_over_precisions(shape: float, rate: float, count: int, square: float) -> None:
    w = torch.full((count,), math.sqrt(square / count), dtype=torch.float64)

    def joint(s: float) -> float:  # over s = log τ
        tau = math.exp(s)
        return (
            stats.gamma.pdf(tau, shape, scale=1 / rate)
            * (tau / (2 * math.pi)) ** (count / 2)
            * math.exp(-tau * square / 2)
            * tau
        )

    middle = math.log((shape + count / 2) / (rate + square / 2))
    exact = sum(integrate.quad(joint, middle + a, middle + b, epsabs=0)[0] for a, b in ((-40, -5), (-5, 0), (0, 5)))
    assert Hierarchical(shape, rate).log_prob({"w": w}).item() == pytest.approx(math.log(exact), rel=1e-8)


def test_one_weight_follows_students_t() -> None:
    prior, value = Hierarchical(1.5, 0.6), torch.tensor([0.8], dtype=torch.float64)
    same = StudentT(df=3.0, scale=math.sqrt(0.4))
    assert prior.log_prob({"w": value}).item() == pytest.approx(same.log_prob({"w": value}).item(), rel=1e-12)


def test_groups_are_independent_of_each_other_and_scaled_by_fan_in() -> None:
    w = weights()
    one = lambda *values: float(Hierarchical(0.7, 1.3).log_prob({"w": torch.cat([v.flatten() for v in values])}))  # noqa: E731
    first, bias, second, last, noise = w.values()
    expected = {
        "tensor": sum(map(one, w.values())),
        "layer": one(first, bias) + one(second, last) + one(noise),
        "input": sum(one(column) for column in first.T) + one(bias) + one(second) + one(last) + one(noise),
        "ends": sum(map(one, [*first.T, *second, *last])) + one(bias) + one(noise),
        "all": one(first, bias, second, last) + one(noise),
    }
    for groups, value in expected.items():
        assert float(Hierarchical(0.7, 1.3, groups=groups).log_prob(w)) == pytest.approx(value)  # type: ignore[arg-type]
    scaled = one(first * 3**0.5, bias) + one(second * 2, last) + one(noise)
    jacobian = 12 * math.log(3) / 2 + 8 * math.log(2)
    assert float(FanIn(Hierarchical(0.7, 1.3, groups="layer")).log_prob(w)) == pytest.approx(scaled + jacobian)


def test_convolutions_have_a_precision_for_each_input_channel() -> None:
    kernel = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    prior = Hierarchical(groups="input")
    names, labels = prior.labels({"conv.weight": kernel})
    assert names == ("conv.weight[0]", "conv.weight[1]")
    assert torch.equal(labels["conv.weight"], torch.tensor([0, 1]).view(1, 2, 1, 1).expand(5, 2, 3, 3))
    by_channel = sum(Hierarchical().log_prob({"w": kernel[:, i]}) for i in range(2))
    torch.testing.assert_close(prior.log_prob({"conv.weight": kernel}), by_channel)


@pytest.mark.parametrize("prior", PRIORS, ids=IDS)
def test_gradient_is_the_expected_precision_times_the_weight(prior: Prior) -> None:
    w = weights()
    slope = torch.func.grad(prior.log_prob)(w)
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    torch.testing.assert_close(dict(zip(leaves, torch.autograd.grad(prior.log_prob(leaves), [*leaves.values()]))), slope)
    if isinstance(prior, Hierarchical):
        torch.testing.assert_close({n: -tau * w[n] for n, tau in prior.expected_precision(w).items()}, slope)
    stacked = {name: torch.stack([value, 2 * value]) for name, value in w.items()}
    each = torch.func.vmap(prior.log_prob)(stacked)
    torch.testing.assert_close(each, torch.stack([prior.log_prob(w), prior.log_prob({n: 2 * v for n, v in w.items()})]))


@pytest.mark.parametrize("prior", PRIORS, ids=IDS)
def test_traced_without_a_break(prior: Prior) -> None:
    w = {name: value.float() for name, value in weights().items()}
    torch._dynamo.reset()
    step = torch.compile(torch.func.grad_and_value(prior.log_prob), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(w), torch.func.grad_and_value(prior.log_prob)(w))


@pytest.mark.parametrize("prior", PRIORS, ids=IDS)
def test_draws_are_of_the_density(prior: Prior) -> None:
    """(b + S/2) of a group is b/B with B ~ Beta(a, n/2): where draws shared too much or too little, S would not follow."""
    drawn = prior.sample(weights(), torch.Generator().manual_seed(5), draws=4000)
    scaled = isinstance(prior, FanIn | Patterns)
    weight, bias = drawn["2.weight"] * (2 if scaled else 1), drawn["2.bias"]
    if isinstance(prior, Patterns):
        parts = [(weight, 2.0, 1.0), (torch.cat([drawn["0.bias"], bias], 1), 1.0, 1.0)]
    else:
        base: Hierarchical = prior.prior if isinstance(prior, FanIn) else prior  # type: ignore[assignment]
        own = {
            "tensor": weight,
            "input": weight,
            "ends": weight[:, 1],
            "layer": torch.cat([weight.flatten(1), bias], 1),
            "all": torch.cat([drawn["0.weight"].flatten(1), drawn["0.bias"], weight.flatten(1), bias], 1),
        }
        parts = [(own[base.groups], base.shape, base.rate)]
        if base.groups in ("input", "ends"):
            parts += [(drawn["0.weight"][:, :, 1], base.shape, base.rate)]
    for values, shape, rate in parts:
        count = values[0].numel()
        level = rate / (rate + 0.5 * values.flatten(1).square().sum(1))
        assert stats.kstest(level.numpy(), stats.beta(shape, count / 2).cdf).pvalue > 1e-4


def test_draws_take_type_and_seed() -> None:
    like = {"0.weight": torch.zeros(2, 3), "half": torch.zeros(3, dtype=torch.bfloat16)}
    prior = Hierarchical(groups="all")
    one, same, other = (prior.sample(like, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    for name, value in like.items():
        assert (one[name].shape, one[name].dtype) == (value.shape, value.dtype)
        assert torch.equal(one[name], same[name])
        assert not torch.equal(one[name], other[name])
    assert prior.draw("0.weight", like["0.weight"], torch.Generator(), (2, 5)).shape == (2, 5, 2, 3)


def test_width_and_alpha_are_neals() -> None:
    prior = Hierarchical.with_width(0.05, 0.5, groups="layer")
    assert prior.shape / prior.rate == pytest.approx(1 / 0.05**2)
    assert 2 * prior.shape == 0.5
    assert prior.groups == "layer"


@pytest.mark.parametrize("prior", PRIORS, ids=IDS)
def test_stored_as_json(prior: Prior) -> None:
    back = decode(json.loads(json.dumps(encode(prior))))
    assert back == prior
    assert hash(back) == hash(prior)
    assert not prior.independent


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="Hierarchical: shape must be finite and above 0"):
        Hierarchical(shape=0.0)
    with pytest.raises(ValueError, match="groups must be one of 'tensor', 'layer', 'input', 'ends', 'all', got 'weight'"):
        Hierarchical(groups="weight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width must be finite and above 0, got -1"):
        Hierarchical.with_width(-1.0)
    with pytest.raises(TypeError, match="sampled must be True or False"):
        Hierarchical(sampled="gibbs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="elements of 'w' alone have none"):
        Hierarchical().elementwise("w", torch.zeros(2))


@pytest.mark.parametrize(
    "method",
    [pl.MAP(epochs=3), pl.MeanField(epochs=3), pl.SGLD(epochs=3), pl.VOGN(epochs=3), pl.Laplace(mode=pl.MAP(epochs=3))],
    ids=lambda m: m.name,
)
@pytest.mark.filterwarnings("ignore:the network is not at a mode")
def test_methods_take_it(method: pl.Method) -> None:
    x = torch.linspace(-1, 1, 20)[:, None]
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    prior = as_prior({"likelihood.*": Gaussian(2.0), "*": FanIn(Hierarchical(groups="layer"))})
    posterior = pl.fit(net, (x, x.sin()), method, likelihood=pl.likelihoods.Gaussian("learned"), prior=prior)
    assert torch.isfinite(posterior.predict(x).mean).all()
