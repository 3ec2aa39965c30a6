"""Out-of-distribution detection against scikit-learn and torchmetrics, with and without ties."""

import numpy as np
import pytest
import sklearn.metrics
import torch

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian
from plausible.posteriors.predictive import Predictive

oracle = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
SCORES = ["entropy", "mutual_information", "epistemic", "variance", "max_probability"]


def predictives(likelihood, output: tuple[int, ...], seed: int = 0) -> tuple[Predictive, Predictive]:
    """Inside: large common outputs; outside: small ones on which draws disagree."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, *output, generator=generator, dtype=torch.float64)

    inside, outside = 2 * noise(70) + 0.7 * noise(6, 70), noise(50) + 1.2 * noise(6, 50)
    return Predictive.from_functions(inside, likelihood), Predictive.from_functions(outside, likelihood)


def compare(inside, outside, score: str, a: np.ndarray, b: np.ndarray) -> None:
    truth, values = np.r_[np.zeros(len(a)), np.ones(len(b))], np.r_[a, b]
    assert metrics.ood_auroc(inside, outside, score) == pytest.approx(sklearn.metrics.roc_auc_score(truth, values))
    precision = sklearn.metrics.average_precision_score(truth, values)
    assert metrics.ood_aupr(inside, outside, score) == pytest.approx(precision)
    inverse = sklearn.metrics.average_precision_score(1 - truth, -values)
    assert metrics.ood_aupr(inside, outside, score, positive="inside") == pytest.approx(inverse)
    passing = [t for t in np.sort(a) if (a <= t).mean() >= 0.95]
    assert metrics.ood_fpr95(inside, outside, score) == (b <= passing[0]).mean()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_classes_agree_with_scikit_learn(likelihood, score):
    pair = predictives(likelihood, (3,) if likelihood == Categorical() else ())
    values = []
    for predictive in pair:
        if likelihood == Categorical():
            each = predictive.functions.softmax(-1)
        else:
            p = predictive.functions.sigmoid()
            each = torch.stack([1 - p, p], -1)
        mean = each.mean(0)
        entropy = torch.special.entr(mean).sum(-1)
        values.append(
            {
                "entropy": entropy,
                "mutual_information": entropy - torch.special.entr(each).sum(-1).mean(0),
                "epistemic": each.var(0, correction=0).sum(-1),
                "variance": (mean * (1 - mean)).sum(-1),
                "max_probability": 1 - mean.amax(-1),
            }[score].numpy()
        )
    for predictive, expected in zip(pair, values):
        assert metrics.uncertainty_score(predictive, score).numpy() == pytest.approx(expected, abs=1e-12)
    compare(*pair, score, *values)
    if likelihood == Categorical():
        compare(*(predictive.functions.softmax(-1) for predictive in pair), score, *values)


def test_plain_probabilities_with_ties():
    rng = np.random.default_rng(0)
    a, b = rng.integers(1, 10, 60) / 20, rng.integers(5, 10, 45) / 20  # P(y = 1) up to ½: the nearer, the less certain
    compare(a, b, "max_probability", a, b)
    compare(torch.tensor(np.stack([a, 1 - a], -1)), np.stack([b, 1 - b], -1), "entropy", a, b)
    found = oracle.binary_auroc(torch.tensor(np.r_[a, b]), torch.tensor([0] * 60 + [1] * 45))
    assert metrics.ood_auroc(a, b) == pytest.approx(float(found))


@pytest.mark.parametrize("score", ["epistemic", "variance"])
def test_numbers_have_one_score_for_each_input(score):
    inside, outside = predictives(Gaussian((0.1, 3.0)), (2,))
    a, b = (getattr(predictive, score).mean(-1).numpy() for predictive in (inside, outside))
    compare(inside, outside, score, a, b)
    assert metrics.ood_auroc(inside, outside, score) > 0.7


def test_extremes():
    sure, unsure = np.full(40, 0.99), np.full(20, 0.5)
    assert metrics.ood_auroc(sure, unsure) == 1
    assert metrics.ood_auroc(unsure, sure) == 0
    assert metrics.ood_auroc(sure, sure) == 0.5
    assert metrics.ood_fpr95(sure, unsure) == 0
    assert metrics.ood_fpr95(sure, sure) == 1
    assert metrics.ood_aupr(sure, sure[:20]) == pytest.approx(1 / 3)  # guessing: the share of positives
    mixed = np.r_[np.full(19, 0.99), 0.5]  # exactly 95 % pass below the outlier
    assert metrics.ood_fpr95(mixed, unsure) == 0


def test_refusals():
    inside, outside = predictives(Categorical(), (3,))
    with pytest.raises(ValueError, match="outside is empty"):
        metrics.ood_auroc(inside.probs, outside.probs[:0])
    with pytest.raises(ValueError, match="inside is empty"):
        metrics.ood_auroc(Predictive.from_functions(inside.functions[:, :0], Categorical()), outside)
    with pytest.raises(ValueError, match="score must be one of"):
        metrics.ood_auroc(inside, outside, score="energy")
    with pytest.raises(ValueError, match="inside has shape"):
        metrics.ood_fpr95(inside.probs, outside.probs, score="mutual_information")
    with pytest.raises(ValueError, match="positive must be one of"):
        metrics.ood_aupr(inside, outside, positive="out")
    with pytest.raises(ValueError, match="one class only"):
        metrics.ood_auroc(np.ones((3, 1)), np.ones((3, 1)))
    with pytest.raises(TypeError, match="does not exist for the continuous targets"):
        metrics.ood_auroc(*predictives(Gaussian(1.0), ()))
    with pytest.raises(ValueError, match="expected probabilities"):
        metrics.ood_auroc(np.full((2, 2, 2, 2), 0.5), inside)
    with pytest.raises(ValueError, match="NaN"):
        metrics.ood_auroc(Predictive.from_functions(inside.functions * torch.nan, Categorical()), outside)
