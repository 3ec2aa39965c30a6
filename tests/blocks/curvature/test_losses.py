"""F of the outputs: against expected outer products of scores, and its forms against each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, distributions

from plausible import likelihoods
from plausible.blocks.curvature import losses
from plausible.blocks.moments.expectations import LogVarianceGaussian
from plausible.core.distributions import Affine
from plausible.core.likelihoods import LOG_DF, LOG_DISPERSION, LOG_SCALE

torch.manual_seed(0)
F64 = torch.float64
EXACT = {"atol": 1e-9, "rtol": 1e-8}
SCALE = {LOG_SCALE: torch.tensor(-0.4, dtype=F64)}
SCALES = {LOG_SCALE: torch.tensor([-0.4, 0.3, 0.1], dtype=F64)}
DISPERSION = {LOG_DISPERSION: torch.tensor(0.7, dtype=F64)}

CASES = {  # likelihood, shape of the outputs, noise
    "gaussian": (likelihoods.Gaussian(), (4, 3), SCALE),
    "gaussian-one": (likelihoods.Gaussian(0.5), (4,), None),
    "gaussian-each": (likelihoods.Gaussian((0.5, 1.0, 2.0)), (4, 3), None),
    "gaussian-per-output": (likelihoods.Gaussian("per-output"), (4, 3), SCALES),
    "gaussian-images": (likelihoods.Gaussian(0.7), (3, 2, 2), None),
    "student": (likelihoods.StudentT(df=5.0), (4, 3), SCALE),
    "student-learned": (likelihoods.StudentT(df="learned"), (4, 3), {**SCALE, LOG_DF: torch.tensor(0.4, dtype=F64)}),
    "student-scaled": (likelihoods.Scaled(likelihoods.StudentT(df=5.0), 3.0, -2.0), (4, 3), SCALE),
    "scaled": (likelihoods.Scaled(likelihoods.Gaussian(), (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)), (4, 3), SCALE),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), (4, 4), None),
    "heteroscedastic-student": (likelihoods.HeteroscedasticStudentT(df=5.0), (4, 4), None),
    "log-variance": (LogVarianceGaussian(), (4, 4), None),
    "bernoulli": (likelihoods.Bernoulli(), (4, 3), None),
    "bernoulli-one": (likelihoods.Bernoulli(), (4, 1), None),
    "poisson": (likelihoods.Poisson(), (4, 2), None),
    "negative-binomial": (likelihoods.NegativeBinomial(), (4, 2), DISPERSION),
    "categorical": (likelihoods.Categorical(), (4, 5), None),
    "categorical-two": (likelihoods.Categorical(), (4, 2), None),
    "categorical-images": (likelihoods.Categorical(), (3, 2, 2, 3), None),
}


def outputs_of(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def quadrature(likelihood: likelihoods.Likelihood, outputs: Tensor, noise: losses.Noise) -> list[tuple[Tensor, Tensor]]:
    """Targets and probabilities over which elements' expectations are sums: [(y, P(y) elementwise)]."""
    law = likelihood(outputs, noise)
    shape = likelihood.target_shape(outputs.shape)
    if likelihood.kind == "classes":
        points = [torch.full(shape, c) for c in range(outputs.shape[-1])]
    elif likelihood.kind == "binary":
        points = [torch.full(shape, y, dtype=F64) for y in (0.0, 1.0)]
    elif likelihood.kind == "counts":
        points = [torch.full(shape, float(y), dtype=F64) for y in range(400)]
    else:  # y = c + s·tan(θ) on a grid of θ that decays fast at both ends
        base = law.base if isinstance(law, Affine) else law
        nodes, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(400))
        theta, width = nodes * (math.pi / 2), weights * (math.pi / 2)
        z = base.loc + base.scale * theta.tan().view(-1, *[1] * base.loc.ndim)
        slope = base.scale * (1 + theta.tan() ** 2).view(-1, *[1] * base.loc.ndim)
        y = z if base is law else law.loc + law.scale * z
        mass = base.log_prob(z).exp() * slope * width.view(-1, *[1] * base.loc.ndim)
        return list(zip(y, mass))
    return [(y, likelihood.log_prob(outputs, y, noise).exp()) for y in points]


def expected_fisher(likelihood: likelihoods.Likelihood, outputs: Tensor, noise: losses.Noise) -> Tensor:
    """Σ_y P(y) s(y)s(y)ᵀ, one target element at a time (elements are independent given f): [B, n, n]."""
    total = torch.zeros(len(outputs), outputs[0].numel(), outputs[0].numel(), dtype=F64)
    points = quadrature(likelihood, outputs, noise)
    y, mass = (torch.cat(parts) for parts in zip(*points))  # all y as examples of their own
    repeated = outputs.repeat(len(points), *[1] * (outputs.ndim - 1))
    for at in itertools.product(*map(range, likelihood.target_shape(outputs.shape)[1:])):
        only = torch.zeros(y.shape, dtype=torch.bool)
        only[(slice(None), *at)] = True
        score = losses.gradient(likelihood, repeated, y, noise, mask=only).reshape(len(y), -1)
        each = mass[(slice(None), *at)][:, None, None] * score[:, :, None] * score[:, None, :]
        total += each.unflatten(0, (len(points), -1)).sum(0)
    return total


@pytest.mark.parametrize("name", CASES)
def test_fisher_is_the_expected_outer_product_of_scores(name: str) -> None:
    likelihood, shape, noise = CASES[name]
    outputs = outputs_of(shape)
    torch.testing.assert_close(losses.blocks(likelihood, outputs, noise), expected_fisher(likelihood, outputs, noise), **EXACT)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_all_forms_agree(name: str, masked: bool) -> None:
    likelihood, shape, noise = CASES[name]
    outputs = outputs_of(shape)
    stream = torch.Generator().manual_seed(1)
    mask = torch.rand(likelihood.target_shape(shape), generator=stream) < 0.6 if masked else None
    fisher = losses.blocks(likelihood, outputs, noise, mask)
    root = losses.root(likelihood, outputs, noise, mask)
    flat = root.reshape(*root.shape[:2], -1)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", flat, flat), fisher, **EXACT)
    rank = math.prod(shape[1:-1]) * (shape[-1] - 1) if likelihood.kind == "classes" else math.prod(shape[1:])
    assert len(root) == losses.output_fisher(likelihood, outputs, noise).num_roots == rank
    torch.testing.assert_close(losses.root(likelihood, outputs, noise, mask, columns=slice(1, 3)), root[1:3], **EXACT)

    vectors = torch.randn(2, *shape, generator=stream, dtype=F64)
    applied = torch.einsum("bij,vbj->vbi", fisher, vectors.reshape(2, shape[0], -1)).reshape(vectors.shape)
    torch.testing.assert_close(losses.apply(likelihood, outputs, vectors, noise, mask), applied, **EXACT)

    weight = torch.rand(shape[0], generator=stream, dtype=F64)
    torch.testing.assert_close(losses.summed(likelihood, outputs, noise, mask=mask), fisher.sum(0), **EXACT)
    weighted = torch.einsum("b,bij->ij", weight, fisher)
    torch.testing.assert_close(losses.summed(likelihood, outputs, noise, weight, mask), weighted, **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_a_mask_leaves_out_what_was_not_observed(name: str) -> None:
    likelihood, shape, noise = CASES[name]
    outputs = outputs_of(shape)
    mask = torch.ones(likelihood.target_shape(shape), dtype=torch.bool)
    mask[0] = False
    full, part = (losses.blocks(likelihood, outputs, noise, m) for m in (None, mask))
    assert not part[0].any()
    torch.testing.assert_close(part[1:], full[1:])


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson", "categorical", "categorical-images", "scaled"])
def test_gauss_newton_is_the_fisher_for_natural_parameters(name: str) -> None:
    likelihood, shape, noise = CASES[name]
    outputs = outputs_of(shape)
    if likelihood.kind == "classes":
        targets = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(2))
    else:
        targets = (outputs_of(shape, 3) > 0).double()
    rows = torch.func.hessian(lambda f: -likelihood.log_prob(f, targets, noise).sum())(outputs)
    n = outputs[0].numel()
    whole = rows.reshape(shape[0], n, shape[0], n)
    own = torch.stack([whole[b, :, b] for b in range(shape[0])])
    torch.testing.assert_close(losses.blocks(likelihood, outputs, noise), own, **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_slope_of_the_log_density(name: str) -> None:
    likelihood, shape, noise = CASES[name]
    outputs, targets = outputs_of(shape), torch.zeros(likelihood.target_shape(shape), dtype=F64)
    direction, step = outputs_of(shape, 5), 1e-5
    slope = (losses.gradient(likelihood, outputs, targets, noise) * direction).sum()
    ahead, behind = (likelihood.log_prob(outputs + way * step * direction, targets, noise).sum() for way in (1.0, -1.0))
    torch.testing.assert_close(slope, (ahead - behind) / (2 * step), atol=1e-7, rtol=1e-7)


def test_thousands_of_classes_are_summed_without_a_matrix_for_each_example() -> None:
    outputs = torch.randn(64, 3100, generator=torch.Generator().manual_seed(0))
    total = losses.summed(likelihoods.Categorical(), outputs)
    p = outputs.softmax(-1)
    assert total.shape == (3100, 3100)
    torch.testing.assert_close(total[7, 9], -(p[:, 7] * p[:, 9]).sum())
    torch.testing.assert_close(total.sum(0), torch.zeros(3100), atol=1e-5, rtol=0)


def test_confident_and_extreme_outputs_stay_finite() -> None:
    outputs = torch.tensor([[80.0, -80.0, 0.0], [0.0, 200.0, 0.0]])
    for likelihood in (likelihoods.Categorical(), likelihoods.Bernoulli(), likelihoods.NegativeBinomial(2.0)):
        assert losses.root(likelihood, outputs).isfinite().all()
    torch.testing.assert_close(  # μr/(μ + r) → r
        losses.blocks(likelihoods.NegativeBinomial(2.0), outputs)[1, 1, 1], torch.tensor(2.0)
    )


@dataclass(frozen=True)
class Cauchy(likelihoods.Likelihood):
    kind: ClassVar[str] = "continuous"

    def __call__(self, outputs: Tensor, weights: losses.Noise = None) -> distributions.Distribution:
        return distributions.Cauchy(outputs, outputs.new_ones(()), validate_args=False)


@dataclass(frozen=True)
class CauchyThatKnows(Cauchy):
    def fisher(self, outputs: Tensor, noise: losses.Noise) -> Tensor:
        return torch.full_like(outputs, 0.5)


@dataclass(frozen=True)
class Correlated(likelihoods.Gaussian):
    def fisher(self, outputs: Tensor, noise: losses.Noise) -> Tensor:
        return (torch.eye(outputs.shape[-1]) + 0.5).to(outputs).expand(*outputs.shape, -1)


@dataclass(frozen=True)
class Laplacian(likelihoods.Gaussian):
    def __call__(self, outputs: Tensor, weights: losses.Noise = None) -> distributions.Distribution:  # type: ignore[override]
        return distributions.Laplace(outputs, self._scale(outputs, weights), validate_args=False)

    log_prob = likelihoods.Likelihood.log_prob


def test_a_likelihood_of_ones_own_says_its_fisher() -> None:
    outputs = outputs_of((4, 3))
    torch.testing.assert_close(losses.blocks(CauchyThatKnows(), outputs), 0.5 * torch.eye(3, dtype=F64).expand(4, 3, 3))
    assert torch.equal(losses.blocks(likelihoods.Scaled(CauchyThatKnows(), 0.0, 2.0), outputs)[0], torch.eye(3) * 0.5)
    matrix = torch.eye(3, dtype=F64) + 0.5
    root = losses.root(Correlated(), outputs)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", root, root), matrix.expand(4, 3, 3), **EXACT)
    torch.testing.assert_close(losses.apply(Correlated(), outputs, outputs[None])[0], outputs @ matrix, **EXACT)
    images = outputs_of((2, 4, 3))
    root = losses.root(Correlated(), images).reshape(12, 2, 12)
    torch.testing.assert_close(torch.einsum("kbi,kbj->bij", root, root)[1], torch.block_diag(*[matrix] * 4), **EXACT)
    torch.testing.assert_close(losses.summed(Correlated(), images), 2 * torch.block_diag(*[matrix] * 4), **EXACT)


def test_without_a_fisher_the_hessian_at_the_targets_stands_in_where_it_is_positive() -> None:
    outputs, noise = outputs_of((4, 3)), {}
    targets = outputs + 0.5
    z = 0.5
    expected = (2 * (1 - z**2) / (1 + z**2) ** 2) * torch.eye(3, dtype=F64)
    found = losses.blocks(Cauchy(), outputs, noise, targets=targets)
    torch.testing.assert_close(found, expected.expand(4, 3, 3), **EXACT)
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[1, 2] = False
    assert losses.blocks(Cauchy(), outputs, noise, mask, targets=targets)[1, 2, 2] == 0
    with pytest.raises(TypeError, match=r"not positive at 4 of 4 targets.*method fisher\(outputs, noise\)"):
        losses.blocks(Cauchy(), outputs, noise, targets=outputs + 2.0)
    with pytest.raises(TypeError, match="no targets to take a Hessian at"):
        losses.root(Cauchy(), outputs)
    one = outputs_of((4,))
    assert losses.root(Cauchy(), one, targets=one + 0.5).shape == (1, 4)


def test_a_descendant_with_another_density_is_not_taken_for_its_parent() -> None:
    outputs = outputs_of((4, 3))
    with pytest.raises(TypeError, match="Laplacian does not say its Fisher"):
        losses.blocks(Laplacian(1.0), outputs)
    assert not losses.blocks(Laplacian(1.0), outputs, targets=outputs + 1).any()  # straight lines have no curvature


def test_bad_input_is_named() -> None:
    outputs = outputs_of((4, 3))
    with pytest.raises(ValueError, match="at least 2 classes"):
        losses.root(likelihoods.Categorical(), outputs[:, :1])
    with pytest.raises(ValueError, match=r"mask must be shaped like the targets, \[4\]"):
        losses.root(likelihoods.Categorical(), outputs, mask=torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"vectors must have shape \[V, \*outputs.shape\], here \[V, 4, 3\]"):
        losses.apply(likelihoods.Categorical(), outputs, outputs)
    with pytest.raises(ValueError, match="weight must have one number per example"):
        losses.summed(likelihoods.Categorical(), outputs, weight=torch.ones(3))
    with pytest.raises(ValueError, match="does not say which outputs"):
        losses.root(Correlated(), outputs, mask=torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="learned noise needs its weight"):
        losses.root(likelihoods.Gaussian(), outputs)


@pytest.mark.parametrize("case", CASES)
def test_random_columns_are_right_in_expectation(case: str) -> None:
    likelihood, shape, noise = CASES[case]
    fisher, count = losses.output_fisher(likelihood, outputs_of(shape), noise), 3000
    found = losses.Sketch(fisher, count, seed=1).root().reshape(count, shape[0], -1)
    exact = fisher.blocks()
    size = exact.diagonal(dim1=-2, dim2=-1)
    deviation = ((size[:, :, None] * size[:, None, :] + exact.square()) / count).sqrt()
    assert (torch.einsum("kbi,kbj->bij", found, found) - exact).abs().le(5 * deviation + 1e-12).all()
    assert torch.equal(found[3:5], losses.Sketch(fisher, count, seed=1).root(slice(3, 5)).reshape(2, shape[0], -1))
    assert not torch.equal(found, losses.Sketch(fisher, count, seed=2).root().reshape(count, shape[0], -1))
