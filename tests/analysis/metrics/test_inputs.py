"""Bad input is refused with a message that names the argument, what came and what to do."""

import numpy as np
import pytest
import torch

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from plausible.posteriors.predictive import Predictive

GOOD = np.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
Y = np.array([1, 0, 0])
CLASSES = [
    metrics.accuracy,
    metrics.brier,
    metrics.log_loss,
    metrics.log_likelihood,
    metrics.ece,
    metrics.classwise_ece,
    metrics.calibrated_log_loss,
    metrics.temperature,
    metrics.aurc,
    metrics.risk_coverage,
    metrics.reliability,
    metrics.summary,
    metrics.summary_by_output,
]
NUMBERS = [
    metrics.rmse,
    metrics.mae,
    metrics.log_likelihood,
    metrics.crps,
    metrics.coverage,
    metrics.pit,
    metrics.quantile_calibration,
    metrics.aurc,
    metrics.summary,
    metrics.summary_by_output,
]


def changed(value: float) -> np.ndarray:
    probs = GOOD.copy()
    probs[1, 0] = value
    return probs


@pytest.mark.parametrize("metric", CLASSES, ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("predictive", "y", "error", "message"),
    [
        (changed(0.7), Y, ValueError, r"sum to one in each row, within 0.001; got 1.2 at index \[1\].*softmax"),
        (GOOD * 100, Y, ValueError, "sum to one"),
        (np.array([[-0.2, 1.2]] * 3), Y, ValueError, "must not be negative"),
        (changed(np.nan), Y, ValueError, "probabilities in predictive must be finite"),
        (np.array([0.2, np.nan, 0.4]), Y, ValueError, r"must lie in \[0, 1\]"),
        (np.array([0.2, 1.4, 0.4]), Y, ValueError, r"must lie in \[0, 1\]; got 1.4 at index \[1\].*sigmoid"),
        (GOOD, Y[:2], ValueError, r"predictive has shape \[3, 2\] and y \[2\]: expected probabilities"),
        (GOOD[:2], Y, ValueError, r"predictive has shape \[2, 2\] and y \[3\]"),
        (np.ones((3, 1)), Y, ValueError, "one class only"),
        (GOOD[:0], Y[:0], ValueError, r"y is empty \(shape \[0\]\)"),
        (GOOD, Y.astype(float), TypeError, r"float64.*targets.long\(\)"),
        (GOOD, Y == 1, TypeError, r"bool.*class numbers"),
        (GOOD, Y + 1, ValueError, "class labels must lie in 0..1"),
        (GOOD, Y - 1, ValueError, "class labels must lie in 0..1"),
        (GOOD[:, 1], Y + 1, ValueError, "targets must be 0 or 1"),
        (np.array([[0, 1], [1, 0], [1, 0]]), Y, TypeError, "in floating point, got torch.int64"),
        (GOOD, np.eye(2, dtype=int)[Y], ValueError, r"looks one-hot.*y.argmax\(-1\)"),
        (GOOD, np.array([1.0, np.nan, 0.0]), ValueError, "y contains 1 non-finite value"),
        (GOOD, np.array(["a", "b", "c"]), TypeError, "y must be numeric"),
    ],
)
def test_probabilities_and_classes(metric, predictive, y, error, message):
    for convert in (lambda v: v, lambda v: torch.as_tensor(v) if np.asarray(v).dtype.kind != "U" else v):
        with pytest.raises(error, match=message):
            metric(convert(predictive), convert(y))


def test_a_mask_that_fits():
    for mask, error, message in (
        ([False] * 3, ValueError, "mask hides every target"),
        ([True] * 2, ValueError, "mask must have the shape of y"),
        ([1, 1, 0], TypeError, "mask must be boolean"),
        ("none", ValueError, "mask must be a boolean array"),
    ):
        with pytest.raises(error, match=message):
            metrics.accuracy(GOOD, Y, mask=mask)
    assert metrics.accuracy(GOOD, np.array([1, -9, 1]), mask=[True, False, True]) == 0.5


def test_rounding_is_forgiven_and_divided_out():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(500, 100, generator=generator, dtype=torch.float64).softmax(-1)
    y = torch.randint(100, (500,), generator=generator)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        stored = probs.to(dtype)
        for given in (stored, stored.double()) if dtype != torch.bfloat16 else (stored,):
            exact = given.double() / given.double().sum(-1, keepdim=True)
            assert metrics.brier(given, y) == pytest.approx(metrics.brier(exact, y), rel=1e-12)
    with pytest.raises(ValueError, match="sum to one"):
        metrics.brier(probs * 1.002, y)
    assert metrics.accuracy(np.array([1 + 1e-8], dtype=np.float32), [1]) == 1


@pytest.mark.parametrize("metric", CLASSES, ids=lambda m: m.__name__)
def test_predictives_of_classes(metric):
    outputs = torch.zeros(2, 3, 2)
    predictive = Predictive.from_functions(outputs, Categorical())
    with pytest.raises(ValueError, match="there are 3 inputs and 2 targets"):
        metric(predictive, Y[:2])
    with pytest.raises(TypeError, match=r"targets.long\(\)"):
        metric(predictive, Y.astype(np.float32))
    with pytest.raises(ValueError, match=r"class labels must lie in 0\.\.1"):
        metric(predictive, Y + 5)
    with pytest.raises(ValueError, match="y is empty"):
        metric(Predictive.from_functions(outputs[:, :0], Categorical()), Y[:0])
    outputs[1, 1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"finite|NaN"):
        metric(Predictive.from_functions(outputs, Categorical()), Y)
    with pytest.raises(ValueError, match="targets must be 0 or 1"):
        metric(Predictive.from_functions(torch.zeros(2, 3), Bernoulli()), Y + 1)


@pytest.mark.parametrize("metric", NUMBERS, ids=lambda m: m.__name__)
def test_predictives_of_numbers(metric):
    outputs, y = torch.zeros(2, 3), torch.tensor([0.1, 0.2, 0.3])
    predictive = Predictive.from_functions(outputs, Gaussian(1.0))
    with pytest.raises(ValueError, match="there are 3 inputs and 2 targets"):
        metric(predictive, y[:2])
    with pytest.raises(ValueError, match="they would broadcast"):
        metric(predictive, y[:, None])
    with pytest.raises(TypeError, match=r"targets.float\(\)"):
        metric(predictive, Y)
    with pytest.raises(ValueError, match="y contains 1 non-finite value"):
        metric(predictive, torch.tensor([0.1, torch.nan, 0.3]))
    with pytest.raises(ValueError, match="y is empty"):
        metric(Predictive.from_functions(outputs[:, :0], Gaussian(1.0)), y[:0])
    with pytest.raises(ValueError, match=r"counts must be integers"):
        metric(Predictive.from_functions(outputs, Poisson()), y)
    outputs[1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"finite|NaN"):
        metric(Predictive.from_functions(outputs, Gaussian(1.0)), y)


def test_plain_numbers():
    y = np.array([0.1, 0.2, 0.3])
    with pytest.raises(TypeError, match=r"y holds torch.int64, but this metric compares real numbers"):
        metrics.rmse(y, Y)
    with pytest.raises(ValueError, match=r"predictive has shape \[2\], expected \[3\]"):
        metrics.rmse(y[:2], y)
    with pytest.raises(ValueError, match="predictive must be finite"):
        metrics.mae(np.array([0.1, np.inf, 0.2]), y)
    with pytest.raises(TypeError, match=r"got torch.int64"):
        metrics.mae(Y, y)
    with pytest.raises(ValueError, match=r"expected samples of y"):
        metrics.pit(y, y)
    with pytest.raises(ValueError, match=r"a single number"):
        metrics.mae(0.5, y)
    with pytest.raises(ValueError, match="low has shape"):
        metrics.coverage((y[:2], y), y)


def test_metrics_of_the_other_kind():
    classes, numbers = Predictive.from_functions(torch.zeros(1, 3, 2), Categorical()), torch.zeros(1, 3)
    for metric in (metrics.accuracy, metrics.brier, metrics.ece, metrics.temperature):
        with pytest.raises(TypeError, match=r"needs class probabilities.*use rmse"):
            metric(Predictive.from_functions(numbers, Gaussian(1.0)), [0.1, 0.2, 0.3])
    for metric in (metrics.rmse, metrics.mae, metrics.crps):
        with pytest.raises(TypeError, match=r"classes targets.*use accuracy"):
            metric(classes, Y)
