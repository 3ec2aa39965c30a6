"""Densities integrate to one, draws follow them, gradients stay finite, and every way of summing gives the same sum."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor

from plausible.core.priors import (
    Default,
    FanIn,
    Flat,
    Gaussian,
    Hierarchical,
    Horseshoe,
    Laplace,
    LogUniform,
    Patterns,
    Prior,
    Rule,
    ScaleMixture,
    StudentT,
    as_prior,
)
from plausible.core.serialise import decode, encode

NARROW = math.exp(-8)
PROPER: list[Rule] = [
    Gaussian(0.7, loc=-0.3),
    Laplace(0.4),
    StudentT(3.0, 0.6),
    StudentT(1.0, 2.0),
    ScaleMixture(0.25, 1.5, 0.1),
    ScaleMixture(0.7, NARROW, 2.0),
    Horseshoe(0.8),
    LogUniform(1e-3, 20.0),
]
RULES: list[Rule] = [*PROPER, Gaussian(0.5), LogUniform(), Flat()]
COMPOSED: list[Prior] = [
    FanIn(StudentT(3.0, 0.6)),
    Patterns({"*.bias": Laplace(0.4), "likelihood.*": Gaussian(2.0, loc=1.0), "*": FanIn(Gaussian(0.9))}),  # type: ignore[arg-type]
    FanIn(Patterns((("body.*", Patterns((("*.bias", Horseshoe()), ("*", Gaussian(0.3))))), ("*", Laplace())))),
]


def name_of(prior: Prior) -> str:
    return type(prior).__name__


def weights_like(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "conv": (2, 3, 2, 2), "likelihood.log_scale": (), "none": (0, 5)}
    return {name: 0.7 * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def density(prior: Prior, value: float) -> float:
    return prior.elementwise("w", torch.tensor(value, dtype=torch.float64)).exp().item()


# Densities


@pytest.mark.parametrize("prior", PROPER, ids=name_of)
def test_integrates_to_one(prior: Rule) -> None:
    # Over s = log|w|: every scale, the pole of the horseshoe and the heavy tails are smooth there.
    total = 0.0
    for sign in (-1.0, 1.0):

        def term(s: float, sign: float = sign) -> float:
            return density(prior, sign * math.exp(s)) * math.exp(s)

        edges = [math.log(1e-3), math.log(20.0)] if isinstance(prior, LogUniform) else [-40, -12, -8, -3, 0, 2, 10, 60]
        total += sum(integrate.quad(term, a, b, epsabs=1e-11, limit=200)[0] for a, b in itertools.pairwise(edges))
    assert total == pytest.approx(1.0, abs=2e-8)


@pytest.mark.parametrize(
    ("prior", "oracle"),
    [
        (Gaussian(0.7, loc=-0.3), stats.norm(-0.3, 0.7).logpdf),
        (Laplace(0.4), stats.laplace(0, 0.4).logpdf),
        (StudentT(3.0, 0.6), stats.t(3.0, 0, 0.6).logpdf),
        (StudentT(1.0, 2.0), stats.cauchy(0, 2.0).logpdf),
        (LogUniform(1e-3, 20.0), lambda w: stats.loguniform(1e-3, 20.0).logpdf(abs(w)) - math.log(2)),
        (
            ScaleMixture(0.25, 1.5, 0.1),
            lambda w: special.logsumexp(
                [np.log(0.25) + stats.norm(0, 1.5).logpdf(w), np.log(0.75) + stats.norm(0, 0.1).logpdf(w)], axis=0
            ),
        ),
    ],
)
def test_equals_scipy(prior: Rule, oracle: Callable[[Any], Any]) -> None:
    values = np.concatenate([np.linspace(-9, 9, 181) + 0.0123, [0.3, -1e-4, 40.0, 120.0]])
    ours = prior.elementwise("w", torch.from_numpy(values))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(ours.numpy(), oracle(values), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [ScaleMixture(0.5, 1.0, NARROW), ScaleMixture(0.5, NARROW, 1.0)])
def test_scale_mixture_far_from_its_narrow_component(prior: ScaleMixture, dtype: torch.dtype) -> None:
    weight = torch.tensor([50.0, -50.0, 1e4], dtype=dtype, requires_grad=True)
    log_prob = prior.elementwise("w", weight)
    expected = stats.norm(0, 1).logpdf(weight.detach().double().numpy()) + math.log(0.5)
    np.testing.assert_allclose(log_prob.detach().numpy(), expected, rtol=1e-6)
    (grad,) = torch.autograd.grad(log_prob.sum(), weight)
    torch.testing.assert_close(grad, -weight.detach())


def test_scale_mixture_between_its_components() -> None:
    prior = ScaleMixture(0.3, 1.0, NARROW)
    values = np.linspace(0, 12 * NARROW, 50)
    components = [np.log(0.3) + stats.norm(0, 1).logpdf(values), np.log(0.7) + stats.norm(0, NARROW).logpdf(values)]
    share = special.expit(components[1] - components[0])
    weight = torch.from_numpy(values).requires_grad_()
    log_prob = prior.elementwise("w", weight)
    np.testing.assert_allclose(log_prob.detach().numpy(), special.logsumexp(components, axis=0), rtol=1e-12)
    (grad,) = torch.autograd.grad(log_prob.sum(), weight)
    np.testing.assert_allclose(grad.numpy(), -values * (share / NARROW**2 + 1 - share), rtol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_horseshoe_from_tiny_to_huge(dtype: torch.dtype, tolerance: float) -> None:
    u = np.concatenate([np.logspace(-10, 6, 300), np.linspace(1.9, 2.1, 41)])
    weight = torch.from_numpy(np.sqrt(2 * u)).to(dtype).requires_grad_()
    exact = weight.detach().double().numpy()
    u = (exact**2 + 1e-16) / 2  # the pole is softened at 1e-8
    scaled = np.where(u < 600, np.exp(np.minimum(u, 600)) * special.exp1(np.minimum(u, 600)), special.hyperu(1, 1, u))
    log_prob = Horseshoe().elementwise("w", weight)
    error = np.abs(log_prob.detach().double().numpy() - np.log(scaled) + 0.5 * math.log(2 * math.pi**3))
    assert (error / np.maximum(1, np.abs(np.log(scaled)))).max() < tolerance
    (grad,) = torch.autograd.grad(log_prob.sum(), weight)
    checked = u < 1e3  # beyond, the oracle 1 − 1/(u e^u E₁(u)) loses its own digits
    slope = ((1 - 1 / (u * scaled)) * exact)[checked]
    np.testing.assert_allclose(grad.numpy()[checked], slope, rtol=max(20 * tolerance, 1e-9))
    np.testing.assert_allclose(grad.numpy()[u > 1e4], -2 / exact[u > 1e4], rtol=1e-3)


@pytest.mark.parametrize("weight", [1e-3, 0.1, 0.9, 3.0, 40.0])
def test_horseshoe_is_a_mixture_over_half_cauchy_scales(weight: float) -> None:
    def joint(s: float) -> float:  # the local scale is e^s
        scale = math.exp(s)
        return stats.norm(0, 0.8 * scale).pdf(weight) * stats.halfcauchy.pdf(scale) * scale

    middle = math.log(weight / 0.8)
    mixture = sum(integrate.quad(joint, middle + a, middle + b, epsabs=0)[0] for a, b in ((-6, 0), (0, 6), (6, 40)))
    assert density(Horseshoe(0.8), weight) == pytest.approx(mixture, rel=1e-7)


def test_horseshoe_has_second_derivatives() -> None:
    weight = torch.tensor([-3.0, -0.4, 0.05, 1.2, 1.9, 2.2, 30.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda w: Horseshoe(0.8).elementwise("w", w), weight)


@pytest.mark.parametrize("prior", RULES, ids=name_of)
def test_value_and_gradient_are_finite_everywhere(prior: Rule) -> None:
    sizes = torch.tensor([0.0, 1e-38, 1e-30, 1e-12, 1e-8, 1e-4, 0.1, 1.0, 50.0, 1e4, 1e8])
    weight = torch.cat([sizes, -sizes]).requires_grad_()
    log_prob = prior.elementwise("w", weight)
    inside = ~torch.isinf(log_prob) if isinstance(prior, LogUniform) and prior.proper else torch.ones_like(weight) > 0
    assert torch.isfinite(log_prob[inside]).all()
    grads = torch.func.grad(lambda w: prior.elementwise("w", w).sum())(weight.detach())
    assert torch.isfinite(grads).all()


def test_log_uniform_outside_its_bounds() -> None:
    prior = LogUniform(0.1, 2.0)
    assert prior.proper
    assert not LogUniform().proper
    assert prior.elementwise("w", torch.tensor([0.09, 2.01, -3.0, 0.0])).tolist() == [-math.inf] * 4
    assert torch.isfinite(prior.elementwise("w", torch.tensor([0.1, -0.1, 2.0, -2.0]))).all()
    difference = LogUniform().elementwise("w", torch.tensor([0.5, -2.0]))
    torch.testing.assert_close(difference, -torch.tensor([0.5, 2.0]).log())


# Draws


def distribution(prior: Rule) -> Callable[[Any], Any]:
    """The distribution function, from scipy or by integrating our density over log|w|."""
    if isinstance(prior, Gaussian):
        return stats.norm(prior.loc, prior.scale).cdf
    if isinstance(prior, Laplace):
        return stats.laplace(0, prior.scale).cdf
    if isinstance(prior, StudentT):
        return stats.t(prior.df, 0, prior.scale).cdf
    if isinstance(prior, ScaleMixture):
        pi, one, two = prior.pi, stats.norm(0, prior.sigma1), stats.norm(0, prior.sigma2)
        return lambda w: pi * one.cdf(w) + (1 - pi) * two.cdf(w)
    low, high = (1e-3, 20.0) if isinstance(prior, LogUniform) else (1e-15, 1e15)
    grid = np.exp(np.linspace(math.log(low), math.log(high), 40_001))
    values = prior.elementwise("w", torch.from_numpy(grid).clamp(low, high)).exp().numpy() * grid
    mass = integrate.cumulative_simpson(values, x=np.log(grid), initial=0)
    return lambda w: 0.5 + np.sign(w) * np.interp(np.log(np.abs(w)), np.log(grid), mass)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", PROPER, ids=name_of)
def test_draws_follow_the_density(prior: Rule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    drawn = prior.sample({"w": torch.zeros(50, dtype=dtype)}, generator, draws=400)["w"]
    assert drawn.shape == (400, 50)
    assert drawn.dtype == dtype
    assert torch.isfinite(prior.elementwise("w", drawn)).all()
    assert stats.kstest(drawn.double().flatten().numpy(), distribution(prior)).pvalue > 1e-4


@pytest.mark.parametrize("prior", [*PROPER, *COMPOSED], ids=name_of)
def test_draws_take_shape_dtype_and_seed(prior: Prior) -> None:
    like = weights_like(torch.float32)
    like["half"] = torch.zeros(3, dtype=torch.bfloat16)
    one = prior.sample(like, torch.Generator().manual_seed(0))
    many = prior.sample(like, torch.Generator().manual_seed(0), draws=3)
    again = prior.sample(like, torch.Generator().manual_seed(0), draws=3)
    other = prior.sample(like, torch.Generator().manual_seed(1), draws=3)
    for name, weight in like.items():
        assert one[name].shape == weight.shape
        assert many[name].shape == (3, *weight.shape)
        assert one[name].dtype == many[name].dtype == weight.dtype
        assert torch.equal(many[name], again[name])
        assert weight.numel() == 0 or not torch.equal(many[name], other[name])


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    for prior in PROPER:
        prior.sample(weights_like(), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("prior", [Flat(), LogUniform(), FanIn(Flat()), Patterns((("*", LogUniform()),))])
def test_improper_priors_say_so(prior: Prior) -> None:
    assert not prior.proper
    with pytest.raises(ValueError, match=r"cannot sample the weight 'body\.weight' .* improper"):
        prior.sample(weights_like(), torch.Generator())


def test_number_of_draws() -> None:
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        Gaussian().sample(weights_like(), torch.Generator(), draws=0)


# Sums


@pytest.mark.parametrize("prior", [*RULES, *COMPOSED], ids=name_of)
@pytest.mark.parametrize("large", [False, True])
def test_log_prob_is_the_sum_in_every_mode(prior: Prior, large: bool) -> None:
    weights = weights_like()
    if isinstance(prior, LogUniform):
        weights = {name: value.sign() * value.abs().clamp(0.01, 10.0) for name, value in weights.items()}
    if large:  # beyond the size below which weights are laid end to end
        weights["large.weight"] = 0.1 + torch.rand(130, 130, generator=torch.Generator().manual_seed(0)).double()
    expected = sum(prior.elementwise(name, weight).sum() for name, weight in weights.items())
    torch.testing.assert_close(prior.log_prob(weights), expected)

    def total(weights: dict[str, Tensor]) -> Tensor:
        return sum(prior.elementwise(name, weight).sum() for name, weight in weights.items())  # type: ignore[return-value]

    slope = torch.func.grad(total)(weights)
    torch.testing.assert_close(torch.func.grad(prior.log_prob)(weights), slope)
    if not isinstance(prior, Flat):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        grads = torch.autograd.grad(prior.log_prob(leaves), list(leaves.values()))
        torch.testing.assert_close(dict(zip(leaves, grads)), slope)
    stacked = {name: torch.stack([weight, weight]) for name, weight in weights.items()}
    torch.testing.assert_close(torch.func.vmap(prior.log_prob)(stacked), expected.expand(2))  # type: ignore[union-attr]


def test_no_weights_no_density() -> None:
    for prior in [*RULES, *COMPOSED]:
        assert prior.log_prob({}).item() == 0


def test_gaussian_sum_twice_differentiable() -> None:
    weights = [torch.linspace(-1, 2, 3, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)]
    weights = [weight.requires_grad_() for weight in weights]
    assert torch.autograd.gradgradcheck(lambda a, b: Gaussian(0.5).log_prob({"a": a, "b": b}), weights)
    log_prob = Gaussian(0.5).log_prob({"a": weights[0], "b": weights[1]})
    slope, _ = torch.autograd.grad(log_prob, weights, create_graph=True)
    torch.testing.assert_close(slope, -4 * weights[0])
    hessian = torch.func.hessian(lambda w: Gaussian(0.5).log_prob({"w": w}))(torch.ones(3))
    torch.testing.assert_close(hessian, -4 * torch.eye(3))


@pytest.mark.parametrize("prior", [*RULES, *COMPOSED], ids=name_of)
def test_traced_without_a_break(prior: Prior) -> None:
    weights = {name: weight for name, weight in weights_like(torch.float32).items() if weight.numel()}
    torch._dynamo.reset()
    step = torch.compile(torch.func.grad_and_value(prior.log_prob), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(weights), torch.func.grad_and_value(prior.log_prob)(weights))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("prior", [*RULES, *COMPOSED], ids=name_of)
def test_compiled_equals_eager(prior: Prior) -> None:
    # each weight has a kernel of its own, which takes the compiler a second
    weights = {name: weights_like(torch.float32)[name] for name in ("body.weight", "body.bias", "likelihood.log_scale")}
    stacked = {name: torch.stack([weight, -2 * weight]) for name, weight in weights.items()}
    step = torch.func.vmap(torch.func.grad_and_value(prior.log_prob))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(stacked), step(stacked), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prior", [Gaussian(0.5), Gaussian(2.0), Flat()])
def test_precision_is_the_slope(prior: Rule) -> None:
    weight = torch.linspace(-2, 2, 9)
    slope = torch.func.grad(lambda w: prior.log_prob({"w": w}))(weight)
    assert prior.precision is not None
    torch.testing.assert_close(slope, -prior.precision * weight)


def test_precision_of_others_is_unknown() -> None:
    assert all(prior.precision is None for prior in [*PROPER, *COMPOSED])


@pytest.mark.parametrize(
    "prior",
    [
        Gaussian(0.5),
        FanIn(Gaussian(0.5)),
        Patterns({"*.bias": Flat(), "*": FanIn(Gaussian(2.0))}),
        Patterns({"likelihood.*": Gaussian(2.0), "*": Gaussian(0.3)}),
    ],
    ids=str,
)
def test_precisions_by_name_give_slope_and_constant(prior: Prior) -> None:
    weights = weights_like(torch.float64) | {"likelihood.log_scale": torch.tensor(0.7, dtype=torch.float64)}
    weights = {name: weight for name, weight in weights.items() if weight.numel()}
    known = prior.precisions(weights)
    assert known is not None
    for name, slope in torch.func.grad(prior.log_prob)(weights).items():
        torch.testing.assert_close(slope, -known[name] * weights[name])
    elements = sum(prior.elementwise(name, weight).sum() for name, weight in weights.items())
    torch.testing.assert_close(prior.log_prob(weights), elements)


def test_one_prior_that_is_no_centred_gaussian_leaves_all_to_autograd() -> None:
    weights = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    for other in (Gaussian(1.0, loc=0.1), Laplace(), Hierarchical()):
        assert Patterns({"a": Gaussian(1.0), "*": other}).precisions(weights) is None


# Composition


def test_fan_in_is_a_gaussian_of_smaller_scale() -> None:
    weights = weights_like()
    prior = FanIn(Gaussian(1.2, loc=0.4))
    for name, fan_in in {"body.weight": 3, "body.bias": 1, "conv": 12, "likelihood.log_scale": 1}.items():
        expected = Gaussian(1.2 / math.sqrt(fan_in), 0.4 / math.sqrt(fan_in)).elementwise(name, weights[name])
        torch.testing.assert_close(prior.elementwise(name, weights[name]), expected)
    per_output = torch.randn(2, 7, dtype=torch.float64)
    expected = Gaussian(1.2, 0.4).elementwise("likelihood.table", per_output)
    torch.testing.assert_close(prior.elementwise("likelihood.table", per_output), expected)


def test_fan_in_draws_follow_its_density() -> None:
    prior = FanIn(Laplace(0.9))
    like = {"conv": torch.zeros(4, 5, 3, 3), "bias": torch.zeros(200)}
    drawn = prior.sample(like, torch.Generator().manual_seed(5), draws=50)
    assert stats.kstest(drawn["conv"].flatten().numpy(), stats.laplace(0, 0.9 / math.sqrt(45)).cdf).pvalue > 1e-4
    assert stats.kstest(drawn["bias"].flatten().numpy(), stats.laplace(0, 0.9).cdf).pvalue > 1e-4


def test_first_pattern_wins() -> None:
    prior = as_prior({"head.*": Laplace(2.0), "*.bias": Flat(), "*": Gaussian(0.5)})
    assert prior.rule("head.bias") == Laplace(2.0)
    assert prior.rule("body.0.bias") == Flat()
    assert prior.rule("body.0.weight") == Gaussian(0.5)
    assert prior.rule("likelihood.log_scale") == Gaussian(0.5)
    assert not prior.proper
    assert FanIn(prior).rule("head.bias") == FanIn(Laplace(2.0))
    weight = torch.ones(2)
    torch.testing.assert_close(prior.elementwise("head.bias", weight), Laplace(2.0).elementwise("", weight))


def test_a_weight_without_a_pattern() -> None:
    prior = as_prior({"*.weight": Gaussian(), "*.bias": Gaussian()})
    with pytest.raises(ValueError, match=r"weight 'likelihood.log_scale': none of the patterns '\*.weight', '\*.bias'"):
        prior.log_prob({"likelihood.log_scale": torch.zeros(())})
    with pytest.raises(ValueError, match=r"no prior for the weight 'Head\.scale'"):
        prior.rule("Head.scale")


def test_conversion() -> None:
    assert as_prior(None) == Default()
    assert repr(as_prior(None)) == "Default()"
    assert as_prior(Laplace(0.1)) == Laplace(0.1)
    with pytest.raises(TypeError, match=r"did you mean Gaussian\(scale=0.5\)"):
        as_prior(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prior must be one of"):
        as_prior("gaussian")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rule for '\*' must be a prior, got 2; did you mean Gaussian\(scale=2\)"):
        as_prior({"*": 2})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="a pattern must be a string"):
        as_prior({3: Gaussian()})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="rules must map"):
        Patterns(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        as_prior({})
    with pytest.raises(TypeError, match="FanIn: prior must be a prior"):
        FanIn(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("prior", [*RULES, *COMPOSED], ids=name_of)
def test_stored_as_json(prior: Prior) -> None:
    back = decode(json.loads(json.dumps(encode(prior))))
    assert back == prior
    assert hash(back) == hash(prior)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "build",
    [
        lambda s: Gaussian(scale=s),
        lambda s: Laplace(s),
        lambda s: StudentT(3.0, scale=s),
        lambda s: StudentT(df=s),
        lambda s: ScaleMixture(0.5, s, 1.0),
        lambda s: ScaleMixture(0.5, 1.0, s),
        lambda s: Horseshoe(s),
        lambda s: LogUniform(s, 1.0),
        lambda s: LogUniform(1.0, s),
    ],
)
def test_scales_are_positive_and_finite(build: Callable[[float], Prior], bad: float) -> None:
    with pytest.raises(ValueError, match=r"must be finite and above .*, got"):
        build(bad)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ScaleMixture(0.0, 1.0, 0.1), "pi must be finite and above 0 and below 1"),
        (lambda: ScaleMixture(1.0, 1.0, 0.1), "pi"),
        (lambda: LogUniform(2.0, 1.0), "high must be finite and above 2"),
        (lambda: LogUniform(low=1.0), "both bounds or neither"),
        (lambda: Gaussian(1.0, loc=math.nan), "loc must be finite"),
    ],
)
def test_bad_settings(build: Callable[[], Prior], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_scales_are_numbers() -> None:
    with pytest.raises(TypeError, match="Gaussian: scale must be a number, got 'wide'"):
        Gaussian("wide")  # type: ignore[arg-type]
