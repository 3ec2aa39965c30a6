"""Risk-coverage curves: by brute force, with ties, and the two extremes."""

import numpy as np
import pytest
import torch

from plausible import metrics
from plausible.core.likelihoods import Bernoulli
from plausible.posteriors.predictive import Predictive


def brute_force(losses: np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
    ordered = losses[np.argsort(uncertainty, kind="stable")]
    return np.array([ordered[:k].mean() for k in range(1, len(ordered) + 1)])


@pytest.mark.parametrize("score", [None, "max_probability", "entropy", "mutual_information", "epistemic", "variance"])
def test_classes(classified, score):
    logits, predictive, probs, y = classified
    wrong = (probs.argmax(-1) != y).double().numpy()
    each = logits.softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    uncertainty = {
        None: -probs.amax(-1),
        "max_probability": -probs.amax(-1),
        "entropy": entropy,
        "mutual_information": entropy - torch.special.entr(each).sum(-1).mean(0),
        "epistemic": each.var(0, correction=0).sum(-1),
        "variance": 1 - probs.square().sum(-1),
    }[score]
    expected = brute_force(wrong, uncertainty.numpy())
    for given in (predictive, each, *([probs] if score not in ("mutual_information", "epistemic") else [])):
        curve = metrics.risk_coverage(given, y, score)
        assert curve.risk.numpy() == pytest.approx(expected, rel=1e-9)
        assert curve.coverage.numpy() == pytest.approx(np.arange(1, 301) / 300)
        assert metrics.aurc(given, y, score) == pytest.approx(expected.mean(), rel=1e-9)
    assert curve.risk[-1] == pytest.approx(1 - metrics.accuracy(probs, y))


@pytest.mark.parametrize("score", [None, "epistemic"])
def test_numbers(measured, score):
    means, predictive, y = measured
    variance = means.var(0, correction=0) + (torch.tensor([0.25, 4.0]) if score is None else 0.0)
    expected = brute_force((means.mean(0) - y).square().flatten().numpy(), variance.flatten().numpy())
    curve = metrics.risk_coverage(predictive, y, score)
    assert curve.risk.numpy() == pytest.approx(expected, rel=1e-9)
    assert float(curve.risk[-1]) == pytest.approx(metrics.rmse(predictive, y) ** 2)


def test_ties_are_averaged_over_all_orders(classified):
    _, _, probs, y = classified
    top = (probs[:60].amax(-1) * 8).round() / 8  # ties to the bit
    coarse = ((1 - top) / 3)[:, None].expand(60, 4).scatter(1, probs[:60].argmax(-1, keepdim=True), top[:, None])
    rng, y = np.random.default_rng(0), y[:60]
    wrong, uncertainty = (coarse.argmax(-1) != y).double().numpy(), -coarse.amax(-1).numpy()
    orders = [rng.permutation(60) for _ in range(2000)]
    curves = np.stack([brute_force(wrong[order], uncertainty[order]) for order in orders])
    error = curves.std(0) / np.sqrt(2000)
    assert (np.abs(metrics.risk_coverage(coarse, y).risk.numpy() - curves.mean(0)) < 5 * error + 1e-9).all()


def test_extremes():
    y = np.array([1] * 6 + [0] * 4)
    assert metrics.aurc(np.full(10, 0.7), y) == pytest.approx(0.4)  # useless uncertainty: the error rate
    ideal = np.array([0.9] * 6 + [0.6] * 4)  # errors are the least certain
    assert metrics.aurc(ideal, y) == pytest.approx(sum(k / (6 + k) for k in range(1, 5)) / 10)
    worst = np.array([0.6] * 6 + [0.9] * 4)
    assert metrics.aurc(worst, y) == pytest.approx((4 + sum(4 / (4 + k) for k in range(1, 7))) / 10)


def test_masked_labels_are_left_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 30, 2, generator=generator, dtype=torch.float64)
    y = (torch.rand(30, 2, generator=generator) < 0.5).long()
    both, first = (Predictive.from_functions(f, Bernoulli()) for f in (logits, logits[..., 0]))
    mask = torch.tensor([[True, False]]).expand(30, 2)
    for score in ("entropy", "mutual_information", "epistemic"):
        assert metrics.aurc(both, y, score, mask=mask) == pytest.approx(metrics.aurc(first, y[:, 0], score))


def test_refusals(classified, measured):
    with pytest.raises(ValueError, match="score must be one of 'entropy'"):
        metrics.aurc(classified.predictive, classified.y, score="msp")
    with pytest.raises(TypeError, match="use score='epistemic' or score='variance'"):
        metrics.aurc(measured.predictive, measured.y, score="entropy")
    with pytest.raises(ValueError, match="disagreement of draws"):
        metrics.aurc(classified.probs, classified.y, score="mutual_information")
