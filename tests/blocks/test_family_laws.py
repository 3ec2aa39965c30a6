"""Variational families: draws, densities, entropies and KLs against closed forms, quadrature and Monte Carlo."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from plausible import priors
from plausible.blocks.families import Family
from plausible.blocks.families.gaussian import FullRankFamily, LowRankFamily, MatrixNormalFamily
from plausible.blocks.families.radial import RadialFamily
from plausible.blocks.families.rank_one import RankOneFamily
from plausible.core import random
from plausible.core.weights import Weights, flatten, stack, unflatten

LIKE = {"a": torch.zeros(2, 3).double(), "b": torch.zeros(3).double(), "likelihood.log_scale": torch.zeros(()).double()}
SIZE = 10
GAUSSIAN = {
    "full rank": FullRankFamily(LIKE),
    "low rank": LowRankFamily(LIKE, 2),
    "matrix normal": MatrixNormalFamily(LIKE),
    "matrix normal, diagonal": MatrixNormalFamily(LIKE, "diagonal"),
}
ALL: dict[str, Family] = {**GAUSSIAN, "radial": RadialFamily(LIKE)}


def _somewhere(family: Family, seed: int = 0, scale: float = 0.5) -> Weights:
    """Parameters at no special place."""
    stream = torch.Generator().manual_seed(seed)
    start = family.start({name: w.clone() for name, w in family.like.items()}, scale, random.key(seed))
    return {name: p + 0.3 * torch.randn(p.shape, generator=stream, dtype=p.dtype) for name, p in start.items()}


def _noise(family: Family, theta: Weights, seed: int) -> Weights:
    stream = torch.Generator().manual_seed(seed)
    return {n: torch.randn(v.shape, generator=stream, dtype=v.dtype) for n, v in family.noise(theta).items()}


def _draws(family: Family, theta: Weights, count: int, component: int = 0) -> Weights:
    stream = torch.Generator().manual_seed(5)
    like = family.noise(theta)
    noise = {n: torch.randn(count, *v.shape, generator=stream, dtype=v.dtype) for n, v in like.items()}
    return torch.func.vmap(lambda e: family.draw(theta, e, component).weights)(noise)


def _law(family: Family, theta: Weights) -> MultivariateNormal:
    """The Gaussian over all weights flattened, from its definition."""
    means = family.means(theta)
    assert means is not None
    if isinstance(family, FullRankFamily | LowRankFamily):
        covariance = family.covariance(theta)
    else:
        assert isinstance(family, MatrixNormalFamily)
        blocks = []
        for name, shape in family.shapes.items():
            if shape is None:
                blocks.append(torch.diag(torch.nn.functional.softplus(theta[f"rho of {name}"]).reshape(-1).square()))
                continue
            rows, columns = (f if family.full else torch.diag(f) for f in family.factors(theta, name))
            blocks.append(torch.kron(rows @ rows.T, columns @ columns.T))
        covariance = torch.block_diag(*blocks)
    return MultivariateNormal(flatten(means), covariance)


# ---------------------------------------------------------------------------------------------------------------------
# Gaussian families


@pytest.mark.parametrize("name", GAUSSIAN)
def test_density_and_entropy_are_those_of_the_covariance(name: str) -> None:
    family = GAUSSIAN[name]
    for seed in range(3):
        theta = _somewhere(family, seed)
        law = _law(family, theta)
        weights = unflatten(torch.linspace(-1, 1, SIZE).double(), LIKE)
        torch.testing.assert_close(family.log_density(theta, weights), law.log_prob(flatten(weights)))
        torch.testing.assert_close(family.entropy(theta), law.entropy())
        torch.testing.assert_close(flatten(family.scales(theta) or {}), law.stddev)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_draws_have_the_mean_and_covariance(name: str) -> None:
    """The Kronecker product, for the matrix normal: rows of the flattened weight vary slowest."""
    family = GAUSSIAN[name]
    theta = _somewhere(family)
    law, count = _law(family, theta), 40_000
    drawn = flatten(_draws(family, theta, count), batch_dims=1)
    deviation = law.stddev
    assert float(((drawn.mean(0) - law.mean).abs() / deviation).max()) < 5 / math.sqrt(count)
    found = drawn.T.cov() / torch.outer(deviation, deviation)
    exact = law.covariance_matrix / torch.outer(deviation, deviation)
    assert float(((found - exact).abs() / (1 + exact.square()).sqrt()).max()) < 5 / math.sqrt(count)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_kernels_are_matrices_of_outputs_by_the_rest(covariance: str) -> None:
    family = MatrixNormalFamily({"k": torch.zeros(2, 3, 2, 2).double()}, covariance)  # type: ignore[arg-type]
    assert family.shapes == {"k": (2, 12)}
    theta = _somewhere(family)
    law = _law(family, theta)
    white = torch.linspace(-1, 1, 24).double().reshape(2, 3, 2, 2)
    torch.testing.assert_close(family.log_density(theta, {"k": white}), law.log_prob(white.flatten()))


def test_low_rank_at_start_is_nearly_the_diagonal_and_its_directions_have_a_gradient() -> None:
    family = LowRankFamily(LIKE, 3)
    theta = family.start(LIKE, 0.1, random.key(1))
    scales = flatten(family.scales(theta))
    assert bool(((scales > 0.1) & (scales < 0.11)).all())
    assert bool((theta["directions"] != 0).all())
    assert not torch.equal(theta["directions"], family.start(LIKE, 0.1, random.key(2))["directions"])


# ---------------------------------------------------------------------------------------------------------------------
# The radial law


def _radial(size: int) -> tuple[RadialFamily, Weights]:
    family = RadialFamily({"w": torch.zeros(size).double()})
    scale = torch.linspace(0.5, 1.5, size).double() if size > 1 else torch.tensor([0.7]).double()
    rho = scale + torch.log(-torch.expm1(-scale))
    return family, {"mean of w": torch.linspace(0.3, -0.4, size).double(), "rho of w": rho}


def test_radial_in_one_dimension_is_a_gaussian() -> None:
    family, theta = _radial(1)
    for w in (-1.0, 0.2, 0.3, 2.0):
        exact = Normal(0.3, 0.7).log_prob(torch.tensor(w).double())
        torch.testing.assert_close(family.log_density(theta, {"w": torch.tensor([w]).double()}), exact.double())
    torch.testing.assert_close(family.entropy(theta), Normal(torch.tensor(0.3).double(), 0.7).entropy())


def test_radial_density_integrates_to_one_in_two_dimensions() -> None:
    """Gauss–Legendre in each quadrant around the mean, in the roots of Cartesian coordinates, which tame the pole 1/|z|."""
    family, theta = _radial(2)
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(120))
    root, weight = 1.5 * (nodes + 1), 1.5 * weights * 3 * (nodes + 1)  # x = root², up to 9
    grid = torch.cartesian_prod(root.square(), root.square())
    mass = torch.outer(weight, weight).flatten()
    total = 0.0
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        points = theta["mean of w"] + grid * torch.tensor(signs)
        density = torch.func.vmap(lambda w: family.log_density(theta, {"w": w}))(points).exp()
        total += float((mass * density).sum())
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("size", [3, 6])
def test_radial_density_is_normalised_and_its_entropy_exact(size: int) -> None:
    """∫ q by importance sampling: directions from a Gaussian with the radius of a half-Cauchy law; H = −E log q over draws."""
    family, theta = _radial(size)
    scale, mean = torch.nn.functional.softplus(theta["rho of w"]), theta["mean of w"]
    stream, count = torch.Generator().manual_seed(3), 20_000
    direction = torch.randn(count, size, generator=stream, dtype=torch.float64)
    radius = torch.tan(0.5 * math.pi * torch.rand(count, 1, generator=stream, dtype=torch.float64))
    z = direction / direction.norm(dim=1, keepdim=True) * radius
    area = math.log(2) + 0.5 * size * math.log(math.pi) - math.lgamma(size / 2)
    proposal = math.log(2 / math.pi) - torch.log1p(radius[:, 0] ** 2) - area - (size - 1) * radius[:, 0].log()
    density = torch.func.vmap(lambda w: family.log_density(theta, {"w": w}))(mean + scale * z)
    ratios = (density - proposal + scale.log().sum()).exp()
    assert float(ratios.mean()) == pytest.approx(1.0, abs=5 * float(ratios.std()) / math.sqrt(count))
    drawn = _draws(family, theta, count)["w"]
    surprise = -torch.func.vmap(lambda w: family.log_density(theta, {"w": w}))(drawn)
    error = 5 * float(surprise.std()) / math.sqrt(count)
    assert float(family.entropy(theta)) == pytest.approx(float(surprise.mean()), abs=error)


def test_radial_draws_are_at_a_half_normal_distance_with_the_stated_scales() -> None:
    family, theta = _radial(6)
    count = 40_000
    drawn = _draws(family, theta, count)["w"]
    scale = torch.nn.functional.softplus(theta["rho of w"])
    z = (drawn - theta["mean of w"]) / scale
    radius = z.norm(dim=1)
    assert float(radius.mean()) == pytest.approx(math.sqrt(2 / math.pi), abs=5 * 0.61 / math.sqrt(count))
    assert float(radius.square().mean()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / count))
    torch.testing.assert_close(drawn.std(0), family.scales(theta)["w"], rtol=0.05, atol=0)
    cosine = z[:, 0] / radius  # of a uniform direction: mean 0, variance 1/d
    assert float(cosine.square().mean()) == pytest.approx(1 / 6, abs=5 * 0.2 / math.sqrt(count))


@pytest.mark.parametrize("name", ALL)
def test_antithetic_partners_lie_opposite(name: str) -> None:
    family = ALL[name]
    theta = _somewhere(family)
    noise = _noise(family, theta, 1)
    one, two = (flatten(family.draw(theta, e).weights) for e in (noise, family.mirrored(noise)))
    torch.testing.assert_close(one + two, 2 * flatten(family.means(theta) or {}))
    assert not torch.allclose(one, two)


# ---------------------------------------------------------------------------------------------------------------------
# KL against the prior

PRIORS = {
    "Gaussian": priors.Gaussian(0.8, loc=0.2),
    "Laplace": priors.Laplace(0.6),
    "fan-in": priors.FanIn(priors.Gaussian(1.5)),
    "mixture": priors.ScaleMixture(0.5, 1.0, 0.3),
    "patterns": priors.Patterns({"a": priors.StudentT(4.0), "*": priors.Flat()}),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize("name", ALL)
def test_closed_and_sampled_parts_add_up_to_the_kl(name: str, prior: priors.Prior) -> None:
    """−H − E log p/T the closed way (and the rest by draws) equals E log q − E log p/T by draws alone."""
    family, temperature, count = ALL[name], 1.7, 4000
    theta = _somewhere(family)
    drawn = _draws(family, theta, count)
    closed, opened = family.closed(prior, theta, temperature), family.open(theta)

    def both(weights: Weights) -> tuple[Tensor, Tensor]:
        from plausible.blocks.families import Drawn

        own = Drawn(weights)
        return (
            family.sampled(prior, theta, own, closed, temperature) if closed.density or closed.names else torch.zeros(1)[0],
            family.sampled(prior, theta, own, opened, temperature),
        )

    rest, whole = torch.func.vmap(both)(drawn)
    assert not closed.density
    assert opened.names == tuple(LIKE)
    gap = closed.value + rest - whole
    assert float(gap.mean()) == pytest.approx(0.0, abs=5 * float(gap.std()) / math.sqrt(count))
    expected = {"Gaussian": (), "fan-in": (), "mixture": tuple(LIKE), "patterns": ("a",)}
    label = next(key for key, value in PRIORS.items() if value is prior)
    expected["Laplace"] = () if family.gaussian else tuple(LIKE)  # needs more than two moments
    assert closed.names == expected[label]


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_kl_of_gaussians(name: str) -> None:
    family = GAUSSIAN[name]
    theta = _somewhere(family)
    exact = kl_divergence(
        _law(family, theta), MultivariateNormal(torch.full((SIZE,), 0.2).double(), 0.64 * torch.eye(SIZE).double())
    )
    torch.testing.assert_close(family.closed(priors.Gaussian(0.8, loc=0.2), theta).value, exact)


# ---------------------------------------------------------------------------------------------------------------------
# Rank-one factors

CONV = {
    "c.weight": torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0)).double(),
    "c.bias": torch.linspace(-1, 1, 4).double(),
    "norm.weight": torch.ones(4).double(),
}


def _rank_one(components: int = 3, biases: bool = True) -> tuple[RankOneFamily, Weights]:
    family = RankOneFamily(CONV, components, 0.5, 0.2, biases)
    stream = torch.Generator().manual_seed(0)
    theta = family.start({name: w.clone() for name, w in CONV.items()}, 0.3, random.key(0))
    for name in ("c.bias",) if biases else ():
        theta[f"point of {name}"] += torch.randn(components, 4, generator=stream, dtype=torch.float64)
    return family, theta


def test_a_draw_scales_outputs_and_inputs_of_one_component() -> None:
    family, theta = _rank_one()
    noise = _noise(family, theta, 0)
    for k in range(3):
        drawn = family.draw(theta, noise, k).weights
        s, r = (
            theta[f"mean of {side} of c.weight"][k]
            + torch.nn.functional.softplus(theta[f"rho of {side} of c.weight"][k]) * noise[f"{side} of c.weight"]
            for side in ("outputs", "inputs")
        )
        torch.testing.assert_close(drawn["c.weight"], torch.einsum("oikl,o,i->oikl", CONV["c.weight"], s, r))
        torch.testing.assert_close(drawn["c.bias"], theta["point of c.bias"][k])
        torch.testing.assert_close(drawn["norm.weight"], CONV["norm.weight"])


def test_the_kl_of_the_factors_is_averaged_over_components() -> None:
    family, theta = _rank_one()
    exact = 0.0
    for side in ("outputs", "inputs"):
        own = Normal(theta[f"mean of {side} of c.weight"], torch.nn.functional.softplus(theta[f"rho of {side} of c.weight"]))
        exact += float(kl_divergence(own, Normal(1.0, 0.5)).sum()) / 3
    closed = family.closed(priors.Gaussian(), theta)
    assert (float(closed.value), closed.density, closed.names) == (pytest.approx(exact), False, ())
    points = family.log_prior_of_points(priors.Gaussian(2.0), theta)
    law = Normal(0.0, 2.0)
    by_hand = law.log_prob(CONV["c.weight"]).sum() + law.log_prob(CONV["norm.weight"]).sum()
    torch.testing.assert_close(points, by_hand + law.log_prob(theta["point of c.bias"]).sum() / 3)


@pytest.mark.parametrize("biases", [True, False])
def test_moments_of_the_mixture_of_components(biases: bool) -> None:
    family, theta = _rank_one(biases=biases)
    drawn = stack([_draws(family, theta, 10_000, k) for k in range(3)])
    for name in CONV:
        values = drawn[name].flatten(0, 1)
        spread = values.std(0, unbiased=False)
        assert float((values.mean(0) - family.means(theta)[name]).abs().max()) <= 5 * float(spread.max()) / 170
        torch.testing.assert_close(family.scales(theta)[name], spread, rtol=0.05, atol=1e-7)


def test_what_rank_one_does_to_each_weight() -> None:
    family, theta = _rank_one()
    assert family.status("c.weight") == "a point times inferred rank-one factors, 3 components"
    assert family.status("c.bias") == "trained as a point in each component"
    assert family.status("norm.weight") == "trained as a point"
    assert not torch.equal(theta["mean of inputs of c.weight"][0], theta["mean of inputs of c.weight"][1])
    one = RankOneFamily(CONV, 1, 0.5, 0.2, True).start(CONV, 0.3, random.key(0))
    assert bool((one["mean of inputs of c.weight"] == 1).all())  # a single component starts at the network itself
    with pytest.raises(ValueError, match="none of the random weights \\(b\\) has two axes"):
        RankOneFamily({"b": torch.zeros(3)}, 2, 0.5, 0.2, True)


@pytest.mark.parametrize("kind", ["full-rank", "matrix-normal"])
def test_the_landing_keeps_its_value_where_the_factor_is_badly_conditioned(kind: str) -> None:
    """A random triangular matrix of 60 rows has a condition number beyond double precision; log q comes from the noise."""
    torch.manual_seed(0)
    like = {"w": torch.zeros(60, 1).double()}
    family: Any = FullRankFamily(like) if kind == "full-rank" else MatrixNormalFamily(like)
    theta = family.start(like, 0.1, random.key(0))
    name = "factor" if kind == "full-rank" else "rows of w"
    theta[name] = theta[name] + 150 * torch.randn(60, 60).double().tril(-1)
    noise = {n: torch.randn_like(v) for n, v in family.noise(theta).items()}
    theta = {n: v.requires_grad_() for n, v in theta.items()}
    value = family.landing(theta, family.draw(theta, noise), noise)
    own = torch.cat([v.flatten() for v in noise.values()])
    entropy = family.entropy(theta)
    expected = -0.5 * own.square().sum() + 0.5 * len(own) - entropy
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


def test_the_landing_has_the_slope_of_the_density() -> None:
    like = {"w": torch.randn(3, 2).double(), "b": torch.randn(3).double()}
    for family in (FullRankFamily(like), MatrixNormalFamily(like)):
        theta = family.start(like, 0.4, random.key(0))
        theta = {n: (v + 0.2 * torch.randn_like(v)).requires_grad_() for n, v in theta.items()}
        noise = {n: torch.randn_like(v) for n, v in family.noise(theta).items()}
        held = {n: v.detach() for n, v in theta.items()}
        one = family.landing(theta, family.draw(theta, noise), noise)
        other = family.log_density(held, family.draw(theta, noise).weights)
        torch.testing.assert_close(one, other)
        for a, b in zip(
            torch.autograd.grad(one, list(theta.values()), allow_unused=True),
            torch.autograd.grad(other, list(theta.values()), allow_unused=True),
        ):
            torch.testing.assert_close(a, b)


def test_noise_in_all_entries_of_a_factor_leaves_the_scales_near_where_they_were() -> None:
    """Steps of one size move every entry below the diagonal; a hundred such entries must not outweigh the scale of a weight."""
    torch.manual_seed(0)
    like = {"w": torch.zeros(100, 2)}
    for family in (FullRankFamily(like), MatrixNormalFamily(like)):
        theta = family.start(like, 0.02, random.key(0))
        moved = {
            n: v + 0.2 * torch.randn_like(v).tril(-1) if v.ndim == 2 and len(v) == v.shape[1] else v for n, v in theta.items()
        }
        ratio = family.scales(moved)["w"] / family.scales(theta)["w"]
        assert 0.95 < float(ratio.min()) <= float(ratio.max()) < 1.2
