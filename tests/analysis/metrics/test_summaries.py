"""A summary is the single metrics, by name and in order; one for each output where there are several."""

import pytest
import torch

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Categorical, Poisson
from plausible.posteriors.predictive import Predictive

OF_CLASSES = ["log_likelihood", "accuracy", "brier", "ece", "classwise_ece", "calibrated_log_loss", "aurc"]
OF_NUMBERS = ["log_likelihood", "rmse", "mae", "crps", "coverage_90", "width_90", "quantile_calibration", "aurc"]


def test_classes(classified):
    _, predictive, probs, y = classified
    found = metrics.summary(predictive, y)
    assert list(found) == OF_CLASSES
    for name, value in found.items():
        assert value == getattr(metrics, name)(predictive, y), name
    assert metrics.summary(probs, y) == pytest.approx(found, rel=1e-9)
    (only,) = metrics.summary_by_output(predictive, y)
    assert {"log_likelihood": found["log_likelihood"], **only} == found
    assert list(metrics.summary(probs[:1], y[:1])) == [name for name in OF_CLASSES if name != "calibrated_log_loss"]


def test_numbers(measured):
    _, predictive, y = measured
    found = metrics.summary(predictive, y)
    assert list(found) == OF_NUMBERS
    singles = {
        "coverage_90": metrics.coverage(predictive, y),
        "width_90": metrics.interval_width(predictive),
        **{name: getattr(metrics, name)(predictive, y) for name in OF_NUMBERS if not name.endswith("_90")},
    }
    assert found == pytest.approx(singles, rel=1e-12)
    assert {"coverage_99.5", "width_99.5"} < set(metrics.summary(predictive, y, level=0.995))


def test_each_output_on_its_own(measured):
    _, predictive, y = measured
    mask = torch.ones(200, 2, dtype=torch.bool)
    mask[:50, 0] = False
    found = metrics.summary_by_output(predictive, y, mask=mask)
    for output in range(2):
        alone = mask & (torch.arange(2) == output)
        expected = metrics.summary(predictive, y, mask=alone)
        assert list(found[output]) == OF_NUMBERS[1:]
        assert found[output] == pytest.approx({name: expected[name] for name in found[output]}, rel=1e-12)
    mask[:, 0] = False
    with pytest.raises(ValueError, match="every target of output 0"):
        metrics.summary_by_output(predictive, y, mask=mask)


def test_each_label_on_its_own():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, 2, generator=generator, dtype=torch.float64)
    y = (torch.rand(40, 2, generator=generator) < 0.5).float()
    predictive = Predictive.from_functions(logits, Bernoulli())
    for given in (predictive, predictive.probs):
        for output, found in enumerate(metrics.summary_by_output(given, y)):
            single = Predictive.from_functions(logits[..., output], Bernoulli())
            expected = metrics.summary(single, y[:, output])
            assert found == pytest.approx({name: expected[name] for name in OF_CLASSES[1:]}, rel=1e-9)


def test_dense_classes_and_counts():
    predictive = Predictive.from_functions(torch.zeros(2, 3, 4, 2), Categorical())
    (found,) = metrics.summary_by_output(predictive, torch.zeros(3, 4, dtype=torch.long))
    assert found["accuracy"] == 1
    (plain,) = metrics.summary_by_output(predictive.probs, torch.zeros(3, 4, dtype=torch.long))
    assert plain["brier"] == pytest.approx(0.5)
    counts = metrics.summary(Predictive.from_functions(torch.zeros(2, 3), Poisson()), torch.tensor([0, 1, 2]))
    assert list(counts) == OF_NUMBERS
    assert counts["rmse"] == pytest.approx((2 / 3) ** 0.5)
