"""Temperature scaling: the optimum, its statistics, and that no example chooses its own temperature."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Categorical
from plausible.posteriors.predictive import Predictive


def tempered(probs: torch.Tensor, temperature: float) -> torch.Tensor:
    return (probs.log() / temperature).softmax(-1)


def test_temperature_is_the_optimum_that_scipy_finds(classified):
    _, predictive, probs, y = classified
    found = minimize_scalar(
        lambda t: metrics.log_loss(tempered(probs, math.exp(t)), y), bounds=(-3, 3), method="bounded", options={"xatol": 1e-10}
    )
    for given in (predictive, probs):
        assert metrics.temperature(given, y) == pytest.approx(math.exp(found.x), rel=1e-6)


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_temperature_of_labels_that_follow_a_tempered_softmax(true):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 5, generator=generator, dtype=torch.float64)
    p = (logits / true).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    information = ((p * logits**2).sum(-1) - (p * logits).sum(-1) ** 2).sum()  # Fisher's, of β = 1/T
    assert abs(1 / metrics.temperature(logits.softmax(-1), y) - 1 / true) < 5 / math.sqrt(information)


def test_calibrated_log_loss_ignores_sharpness(classified):
    _, _, probs, y = classified
    plain = metrics.calibrated_log_loss(probs, y)
    for temperature in (0.3, 4.0):
        assert metrics.calibrated_log_loss(tempered(probs, temperature), y) == pytest.approx(plain, rel=1e-8)
    best = metrics.log_loss(tempered(probs, metrics.temperature(probs, y)), y)
    assert best < plain < metrics.log_loss(tempered(probs, 0.3), y)
    assert plain != metrics.calibrated_log_loss(probs, y, seed=1)
    assert plain == metrics.calibrated_log_loss(probs, y, seed=0)


def test_held_out_data_decide_the_temperature(classified):
    _, predictive, probs, y = classified
    other = metrics.temperature(probs[:100], y[:100])
    expected = metrics.log_loss(tempered(probs[100:], other), y[100:])
    found = metrics.calibrated_log_loss(probs[100:], y[100:], held_out=(probs[:100], y[:100]))
    assert found == pytest.approx(expected, rel=1e-9)
    itself = metrics.calibrated_log_loss(predictive, y, held_out=(predictive, y))
    assert itself == pytest.approx(metrics.log_loss(tempered(probs, metrics.temperature(probs, y)), y), rel=1e-9)


def test_each_half_is_scored_at_the_temperature_of_the_other():
    # two of three right at odds of 4 to 1: log-odds log 4 / T = log 2 for both halves of such rows
    probs, y = np.array([[0.8, 0.2]] * 600), np.array([0, 0, 1] * 200)
    exact = -(2 * math.log(2 / 3) + math.log(1 / 3)) / 3
    assert metrics.calibrated_log_loss(probs, y) == pytest.approx(exact, abs=0.01)
    # one right and one wrong: neither half has an optimum, so both are scored as they are
    assert metrics.calibrated_log_loss(probs[:2], [0, 1]) == pytest.approx(-(math.log(0.8) + math.log(0.2)) / 2)


@pytest.mark.parametrize(("rows", "p"), [(100, 0.9), (1000, 0.99), (10_000, 0.999)])
def test_one_error_among_many_does_not_explode(rows, p):
    probs, y = np.array([[p, 1 - p]] * rows), np.array([1] + [0] * (rows - 1))
    plain = metrics.log_loss(probs, y)
    assert metrics.calibrated_log_loss(probs, y) <= 1.5 * plain


def test_probabilities_that_underflow_stay_finite():
    # one example in k + 1 is wrong: the optimum gives the wrong class odds of 1 to k, gap/T = log k
    predictive = Predictive.from_functions(torch.tensor([[[0.0, -110.0]] * 5]), Categorical())  # 0 in float32
    assert metrics.temperature(predictive, [0, 0, 0, 0, 1]) == pytest.approx(110 / math.log(4), rel=1e-6)
    binary = Predictive.from_functions(torch.tensor([[40.0, 40.0, 40.0]]), Bernoulli())  # p rounds to 1
    assert metrics.temperature(binary, [1, 1, 0]) == pytest.approx(40 / math.log(2), rel=1e-6)
    plain = metrics.temperature(np.array([1.0, 1.0, 1.0], dtype=np.float32), [1, 1, 0])
    assert plain == pytest.approx(25, rel=1e-6)  # 1 − p was at most 2⁻²⁵


def test_classes_ruled_out_do_not_matter(classified):
    logits, predictive, _, y = classified
    wide = Predictive.from_functions(torch.cat([logits, torch.full((5, 300, 1), -torch.inf)], -1), Categorical())
    assert metrics.temperature(wide, y) == pytest.approx(metrics.temperature(predictive, y), rel=1e-9)
    assert metrics.calibrated_log_loss(wide, y) == pytest.approx(metrics.calibrated_log_loss(predictive, y), rel=1e-9)


def test_labels_of_one_input_stay_together():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(40, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(40, 3, generator=generator) < p).long()
    wide = torch.stack([1 - p, p], -1)
    other = metrics.temperature(p[:20], y[:20])
    expected = 3 * metrics.log_loss(tempered(wide[20:].reshape(-1, 2), other), y[20:].flatten())
    assert metrics.calibrated_log_loss(p[20:], y[20:], held_out=(p[:20], y[:20])) == pytest.approx(expected, rel=1e-9)


def test_refusals(classified):
    _, _, probs, y = classified
    with pytest.raises(ValueError, match="at least 2 inputs to halve"):
        metrics.calibrated_log_loss(probs[:1], y[:1])
    with pytest.raises(ValueError, match="splits must be an integer of at least 1"):
        metrics.calibrated_log_loss(probs, y, splits=0)
    with pytest.raises(TypeError, match="held_out must be a pair"):
        metrics.calibrated_log_loss(probs, y, held_out=probs)
    with pytest.raises(ValueError, match="held_out has 2 classes, predictive has 4"):
        metrics.calibrated_log_loss(probs, y, held_out=(probs[:, :2] / probs[:, :2].sum(-1, keepdim=True), y % 2))
