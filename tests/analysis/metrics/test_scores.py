"""Scores against closed forms, scikit-learn, torchmetrics, and the published numbers of a reference posterior."""

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy import stats

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from plausible.posteriors.predictive import Predictive

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")


def test_reference_posterior_has_its_published_scores(hmc):
    probs, y = hmc
    assert round(metrics.accuracy(probs, y), 4) == 0.9144
    assert round(metrics.log_loss(probs, y), 4) == 0.2773
    assert round(metrics.brier(probs, y), 4) == 0.1339
    assert round(metrics.ece(probs, y), 4) == 0.0522
    half = probs.astype(np.float16)  # sums are off by up to 5e-4; what is scored is divided by them
    assert round(metrics.log_loss(half, y), 4) == 0.2773
    assert round(metrics.ece(half, y), 4) == 0.0522


def test_classes_by_hand():
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]])
    y = torch.tensor([0, 2, 1, 0])
    assert metrics.accuracy(probs, y) == 0.75
    squares = (0.01 + 0.01) + (0.04 + 0.25 + 0.49) + (0.01 + 0.04 + 0.01) + (0.16 + 0.04 + 0.04)
    assert metrics.brier(probs, y) == pytest.approx(squares / 4)
    assert metrics.log_loss(probs, y) == pytest.approx(-math.log(0.9 * 0.3 * 0.8 * 0.6) / 4)


def test_classes_agree_with_scikit_learn_and_torchmetrics(classified):
    _, predictive, probs, y = classified
    for given in (predictive, probs, probs.numpy(), probs.tolist()):
        assert metrics.log_loss(given, y) == pytest.approx(sklearn.metrics.log_loss(y, probs), rel=1e-12)
        assert metrics.accuracy(given, y) == sklearn.metrics.accuracy_score(y, probs.argmax(-1))
        assert metrics.brier(given, y) == pytest.approx(
            sklearn.metrics.brier_score_loss(y, probs.numpy(), scale_by_half=False), rel=1e-12
        )
    found = torchmetrics.functional.classification.multiclass_accuracy(probs, y, 4, average="micro")
    assert metrics.accuracy(predictive, y) == pytest.approx(float(found))


def test_probabilities_of_draws_are_averaged(classified):
    logits, _, probs, y = classified
    each = logits.softmax(-1)
    assert metrics.log_loss(each, y) == pytest.approx(metrics.log_loss(probs, y), rel=1e-12)
    assert metrics.brier(each.numpy(), y.numpy()) == pytest.approx(metrics.brier(probs, y), rel=1e-12)


def test_binary_targets_have_two_classes():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 100, generator=generator, dtype=torch.float64)
    y = torch.rand(100, generator=generator) < 0.6
    predictive = Predictive.from_functions(logits, Bernoulli())
    p = logits.sigmoid().mean(0)
    for given, truth in ((predictive, y), (p, y.long()), (p.numpy(), y.double()), (torch.stack([1 - p, p], -1), y.long())):
        assert metrics.log_loss(given, truth) == pytest.approx(sklearn.metrics.log_loss(y, p), rel=1e-10)
        assert metrics.brier(given, truth) == pytest.approx(2 * sklearn.metrics.brier_score_loss(y, p), rel=1e-10)
        assert metrics.accuracy(given, truth) == pytest.approx(float(((p > 0.5) == y).double().mean()))


def test_labels_of_one_input_are_explained_by_one_draw():
    logits = torch.tensor([[[2.0, 2.0]], [[-2.0, -2.0]]], dtype=torch.float64)  # two draws, one input, two labels
    predictive = Predictive.from_functions(logits, Bernoulli())
    p, q = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    assert metrics.log_likelihood(predictive, torch.ones(1, 2)) == pytest.approx(math.log(0.5 * p * p + 0.5 * q * q))
    assert metrics.log_likelihood(predictive.probs, torch.ones(1, 2)) == pytest.approx(2 * math.log(0.5))
    assert metrics.log_likelihood(predictive, torch.ones(1, 2), mask=[[True, False]]) == pytest.approx(math.log(0.5))


def test_tiny_probabilities_do_not_underflow_and_zero_costs_infinity():
    predictive = Predictive.from_functions(torch.tensor([[[0.0, -200.0]]]), Categorical())
    assert metrics.log_loss(predictive, [1]) == pytest.approx(200.0)
    assert metrics.log_loss(np.array([[1.0, 0.0]]), [1]) == math.inf


def test_log_likelihood_of_a_gaussian_mixture(measured):
    means, predictive, y = measured
    each = stats.norm.pdf(y, means, (0.5, 2.0)).prod(-1)  # [S, N]: outputs inside a draw
    assert metrics.log_likelihood(predictive, y) == pytest.approx(np.log(each.mean(0)).mean(), rel=1e-12)
    assert metrics.log_loss(predictive, y) == -metrics.log_likelihood(predictive, y)


def test_masked_outputs_are_left_out(measured):
    means, predictive, y = measured
    first = Predictive.from_functions(means[:, :150, 0], Gaussian(0.5))
    mask = torch.zeros(200, 2, dtype=torch.bool)
    mask[:150, 0] = True
    hidden = torch.where(mask, y, torch.nan)
    for metric in (metrics.log_likelihood, metrics.rmse, metrics.mae, metrics.crps, metrics.coverage, metrics.aurc):
        assert metric(predictive, hidden, mask=mask) == pytest.approx(metric(first, y[:150, 0]), rel=1e-9)
        assert metric(predictive, hidden, mask="nan") == metric(predictive, y, mask=mask)


def test_errors_of_the_mean(measured):
    means, predictive, y = measured
    for given, truth in ((predictive, y), (means.mean(0), y), (means.mean(0).numpy(), y.numpy())):
        error = torchmetrics.functional.mean_squared_error(means.mean(0).flatten(), y.flatten())
        assert metrics.rmse(given, truth) == pytest.approx(math.sqrt(error), rel=1e-12)
        assert metrics.mae(given, truth) == pytest.approx(sklearn.metrics.mean_absolute_error(y, means.mean(0)), rel=1e-12)
    counts = Predictive.from_functions(torch.tensor([[0.0, 1.0]]), Poisson())
    assert metrics.rmse(counts, torch.tensor([1, 5])) == pytest.approx((5 - math.e) / math.sqrt(2), rel=1e-6)


def test_dense_targets_are_examples_each_and_one_input_together():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 2, 3, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (5, 2, 3), generator=generator)
    predictive = Predictive.from_functions(logits, Categorical())
    flat = predictive.probs.reshape(-1, 4)
    for metric in (metrics.accuracy, metrics.brier, metrics.ece, metrics.classwise_ece, metrics.aurc):
        assert metric(predictive, y) == pytest.approx(metric(flat, y.flatten()), rel=1e-12)
        assert metric(predictive.probs, y) == pytest.approx(metric(flat, y.flatten()), rel=1e-12)
    assert metrics.log_loss(predictive.probs, y) == pytest.approx(6 * metrics.log_loss(flat, y.flatten()))
    assert metrics.log_likelihood(predictive, y) == pytest.approx(float(predictive.log_prob(y).mean()))


def test_scores_are_plain_floats(classified, measured):
    for metric in (metrics.log_likelihood, metrics.log_loss, metrics.accuracy, metrics.brier, metrics.ece, metrics.aurc):
        assert type(metric(classified.predictive, classified.y)) is float
    for metric in (metrics.rmse, metrics.mae, metrics.crps, metrics.coverage, metrics.quantile_calibration):
        assert type(metric(measured.predictive, measured.y)) is float
