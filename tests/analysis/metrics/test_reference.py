"""Agreement and total variation with a reference."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch

from plausible import metrics
from plausible.core.likelihoods import Bernoulli
from plausible.posteriors.predictive import Predictive


def test_by_hand():
    p = np.array([[0.7, 0.3], [0.4, 0.6], [0.1, 0.9]])
    q = np.array([[0.6, 0.4], [0.8, 0.2], [0.1, 0.9]])
    assert metrics.agreement(p, q) == pytest.approx(2 / 3)
    assert metrics.total_variation(p, q) == pytest.approx((0.1 + 0.4 + 0.0) / 3)
    assert metrics.total_variation(p[:, 1], torch.tensor(q)) == pytest.approx(0.5 / 3)  # P(y = 1) is two classes


def test_total_variation_is_the_largest_difference_about_any_event(classified):
    _, predictive, probs, _ = classified
    other = torch.roll(probs, 1, 0)
    events = chain.from_iterable(combinations(range(4), k) for k in range(5))
    gaps = torch.stack([(probs - other)[:, list(event)].sum(-1) for event in events])
    assert metrics.total_variation(predictive, other) == pytest.approx(float(gaps.amax(0).mean()), rel=1e-9)
    assert metrics.agreement(predictive, other) == float((probs.argmax(-1) == other.argmax(-1)).double().mean())


def test_laws(classified, hmc):
    _, predictive, probs, _ = classified
    a, b, c = probs, torch.roll(probs, 1, 0), torch.roll(probs, 1, 1)
    assert metrics.total_variation(predictive, a) == pytest.approx(0, abs=1e-12)
    assert metrics.agreement(predictive, predictive) == 1
    assert metrics.total_variation(a, b) == metrics.total_variation(b, a)
    assert metrics.total_variation(a, b) <= metrics.total_variation(a, c) + metrics.total_variation(c, b)
    assert metrics.total_variation(np.eye(4), np.eye(4)[::-1]) == 1
    reference, _ = hmc
    assert metrics.agreement(reference, reference) == 1
    assert metrics.total_variation(reference.astype(np.float16), reference) < 3e-4


def test_binary_labels():
    logits = torch.tensor([[[2.0, -1.0], [0.5, 3.0]]], dtype=torch.float64)
    one, other = (Predictive.from_functions(sign * logits, Bernoulli()) for sign in (1, -1))
    assert metrics.agreement(one, other) == 0
    assert metrics.total_variation(one, other) == pytest.approx(float((2 * logits.sigmoid() - 1).abs().mean()))


def test_refusals(classified, measured):
    with pytest.raises(ValueError, match=r"shape \[300, 4\], reference \[299, 4\]"):
        metrics.agreement(classified.predictive, classified.probs[1:])
    with pytest.raises(ValueError, match="the probabilities in reference must sum to one"):
        metrics.total_variation(classified.probs, 2 * classified.probs)
    with pytest.raises(TypeError, match="needs class probabilities"):
        metrics.agreement(measured.predictive, measured.predictive)
