"""Uncertainty taken apart: parts sum to the whole, none is negative, and each is what it says."""

import math

import numpy as np
import pytest
import torch

from plausible.analysis.uncertainty import Uncertainty, decompose
from plausible.core.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    NegativeBinomial,
    Poisson,
    Scaled,
    StudentT,
)
from plausible.posteriors.predictive import Predictive

CASES = [
    (Categorical(), (4,), (6,)),
    (Categorical(), (3, 2), (6, 3)),
    (Bernoulli(), (), (6,)),
    (Bernoulli(), (2,), (6, 2)),
    (Gaussian((0.5, 2.0)), (2,), (6, 2)),
    (HeteroscedasticGaussian(), (4,), (6, 2)),
    (HeteroscedasticStudentT(df=5.0), (4,), (6, 2)),
    (StudentT(df=5.0, scale=0.3), (), (6,)),
    (Scaled(Gaussian(0.5), 1.0, -3.0), (2,), (6, 2)),
    (Poisson(), (2,), (6, 2)),
    (NegativeBinomial(2.0), (2,), (6, 2)),
]


@pytest.mark.parametrize(("likelihood", "output", "shape"), CASES, ids=lambda v: str(v))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1e-4, 1.0, 30.0])
def test_parts_sum_to_the_whole_and_none_is_negative(likelihood, output, shape, dtype, spread):
    generator = torch.Generator().manual_seed(0)
    common, noise = torch.randn(1, 6, *output, generator=generator), torch.randn(8, 6, *output, generator=generator)
    if likelihood.kind == "counts":
        noise = noise.clamp(-0.5, 0.5)  # rates, not logarithms of the whole range
    outputs = (common + spread * noise).to(dtype)
    found = decompose(Predictive.from_functions(outputs, likelihood))
    assert [tuple(part.shape) for part in found] == [shape] * 3
    for part in found:
        assert torch.isfinite(part).all()
        assert (part >= 0).all()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.total, rtol=4 * eps, atol=0)
    if spread == 0:
        limit = 30 * eps * (found.total.amax() if likelihood.kind != "classes" else 1)
        assert (found.epistemic <= limit).all()
    elif spread == 1:
        assert (found.epistemic > 0.001).all()


def test_numbers_follow_the_law_of_total_variance():
    outputs = torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]], dtype=torch.float64)
    found = decompose(Predictive.from_functions(outputs, Gaussian((0.5, 2.0))))
    assert isinstance(found, Uncertainty)
    assert found.aleatoric.tolist() == [[0.25, 4.0]]
    assert found.epistemic.tolist() == [[1.0, 0.0]]
    assert found.total.tolist() == [[1.25, 4.0]]


def test_total_variance_is_that_of_samples():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    predictive = Predictive.from_functions(outputs, Poisson())
    samples = predictive.sample(100_000, seed=1).double()
    centred = (samples - samples.mean(0)).square()
    error = 5 * centred.std(0) / math.sqrt(len(samples))
    assert ((centred.mean(0) - decompose(predictive).total).abs() < error).all()


def test_classes_by_hand():
    draws = np.array([[[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]], [[0.0, 1.0], [0.5, 0.5], [0.9, 0.1]]])
    found = decompose(draws)  # draws that disagree, a coin, and draws that agree
    h = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert found.total.tolist() == pytest.approx([math.log(2), math.log(2), h])
    assert found.aleatoric.tolist() == pytest.approx([0, math.log(2), h], abs=1e-15)
    assert found.epistemic.tolist() == pytest.approx([math.log(2), 0, 0], abs=1e-15)


def test_mutual_information_is_the_mean_divergence_from_the_mixture():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(7, 50, 4, generator=generator, dtype=torch.float64)
    each = logits.softmax(-1)
    divergence = (each * (each / each.mean(0)).log()).sum(-1).mean(0)
    for given in (Predictive.from_functions(logits, Categorical()), each, each.numpy(), each.tolist()):
        torch.testing.assert_close(decompose(given).epistemic, divergence, rtol=1e-9, atol=1e-12)
    p = logits[..., 0].sigmoid()
    binary = decompose(Predictive.from_functions(logits[..., 0], Bernoulli()))
    for part, expected in zip(binary, decompose(torch.stack([1 - p, p], -1))):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-12)


def test_one_draw_knows_no_disagreement():
    probs = torch.rand(1, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = decompose(probs / probs.sum(-1, keepdim=True))
    assert found.epistemic.abs().max() < 1e-15
    assert torch.equal(found.total, found.aleatoric + found.epistemic)


def test_rounding_leaves_no_negative_part():
    logits = 3 * torch.randn(1, 2000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = logits.softmax(-1).expand(3, 2000, 7)  # draws that agree: the information is 0 up to rounding
    raw = torch.special.entr(each.mean(0)).sum(-1) - torch.special.entr(each).sum(-1).mean(0)
    assert (raw < 0).any()
    for part in decompose(each):
        assert (part >= 0).all()


def test_refusals():
    with pytest.raises(ValueError, match=r"several draws, \[S, N, classes\], got \[3, 2\]"):
        decompose(np.full((3, 2), 0.5))
    with pytest.raises(ValueError, match=r"sum to one"):
        decompose(np.full((4, 3, 2), 0.6))
    with pytest.raises(ValueError, match=r"is empty"):
        decompose(np.full((4, 0, 2), 0.5))
    with pytest.raises(ValueError, match=r"finite"):
        decompose(np.full((4, 1, 2), np.nan))
    with pytest.raises(TypeError, match=r"floating point"):
        decompose(np.ones((4, 1, 2), dtype=int))
