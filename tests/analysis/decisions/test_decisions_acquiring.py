"""Active learning: information and covariances against closed forms, batches against brute force."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from plausible.analysis.decisions import bald, epistemic_variance, expected_variance_reduction, select_batch
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, Scaled
from plausible.posteriors.predictive import Predictive


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = 2 * random(6, 12, 3)
CLASSES = Predictive.from_functions(LOGITS, Categorical())
PROBS = LOGITS.softmax(-1)
NOISE = 0.3
FUNCTIONS = random(50, 9) @ random(9, 9, seed=1)  # correlated
NUMBERS = Predictive.from_functions(FUNCTIONS, Gaussian(math.sqrt(NOISE)))
COVARIANCE = torch.cov(FUNCTIONS.T, correction=0)


def test_bald_is_the_mutual_information():
    torch.testing.assert_close(bald(CLASSES), CLASSES.mutual_information)
    torch.testing.assert_close(bald(PROBS), CLASSES.mutual_information)
    torch.testing.assert_close(bald(PROBS.numpy()), CLASSES.mutual_information)
    binary = Predictive.from_functions(LOGITS[..., 0], Bernoulli())
    torch.testing.assert_close(bald(binary), binary.mutual_information)


def test_bald_tells_ignorance_from_noise():
    coin = torch.full((4, 1, 2), 0.5, dtype=torch.float64)
    torn = torch.eye(2, dtype=torch.float64).repeat(2, 1).reshape(4, 1, 2)
    assert float(bald(coin)) == pytest.approx(0, abs=1e-12)
    assert float(bald(torn)) == pytest.approx(math.log(2))


def test_bald_of_numbers():
    exact = 0.5 * torch.log1p(COVARIANCE.diagonal() / NOISE)
    torch.testing.assert_close(bald(NUMBERS), exact)
    torch.testing.assert_close(bald(NUMBERS.rescaled(5.0, -3.0)), exact)  # information has no units
    loud = HeteroscedasticGaussian()
    outputs = torch.stack([FUNCTIONS, 3 * random(50, 9, seed=2)], -1)
    predictive = Predictive.from_functions(outputs, loud)
    y = predictive.sample(4000, seed=0)
    entropy = -torch.stack([predictive.log_prob(row) for row in y]).mean(0)
    scale = loud(outputs).scale[..., 0]
    known = (scale.log() + 0.5 * math.log(2 * math.pi * math.e)).mean(0)
    assert (bald(predictive)[:, 0] > entropy - known - 0.1).all()  # an upper bound of the mixture's, up to Monte Carlo


def test_epistemic_variance():
    torch.testing.assert_close(epistemic_variance(NUMBERS), NUMBERS.epistemic)
    torch.testing.assert_close(epistemic_variance(CLASSES), CLASSES.epistemic.sum(-1))
    torch.testing.assert_close(epistemic_variance(PROBS), CLASSES.epistemic.sum(-1))
    counts = Predictive.from_functions(FUNCTIONS / 5, Poisson())
    torch.testing.assert_close(epistemic_variance(counts), counts.epistemic)


def after(observed: list[int], covariance: torch.Tensor = COVARIANCE) -> torch.Tensor:
    """The covariance of a Gaussian vector once some of it was observed with noise."""
    cross = covariance[:, observed]
    seen = covariance[observed][:, observed] + NOISE * torch.eye(len(observed), dtype=torch.float64)
    return covariance - cross @ torch.linalg.solve(seen, cross.T)


def test_expected_variance_reduction_is_that_of_a_gaussian():
    reduction = expected_variance_reduction(NUMBERS)
    for n in range(9):
        exact = (COVARIANCE - after([n])).diagonal().mean()
        assert float(reduction[n]) == pytest.approx(float(exact))
    torch.testing.assert_close(expected_variance_reduction(FUNCTIONS.numpy(), noise=NOISE), reduction)
    torch.testing.assert_close(expected_variance_reduction(FUNCTIONS, noise=np.full(9, NOISE)), reduction)
    elsewhere = expected_variance_reduction(NUMBERS, Predictive.from_functions(FUNCTIONS[:, :2], Gaussian(1.0)))
    exact = torch.stack([(COVARIANCE - after([n])).diagonal()[:2].mean() for n in range(9)])
    torch.testing.assert_close(elsewhere, exact)
    torch.testing.assert_close(expected_variance_reduction(FUNCTIONS, FUNCTIONS[:, :2], noise=NOISE), exact)
    units = expected_variance_reduction(Predictive.from_functions(FUNCTIONS, Scaled(Gaussian(math.sqrt(NOISE)), 1.0, 2.0)))
    torch.testing.assert_close(units, 4 * reduction)
    assert expected_variance_reduction(torch.ones(4, 3), noise=0.0).tolist() == [0, 0, 0]


def test_reduction_prefers_what_says_something_about_others():
    """Ten copies of one value and a lonely one of larger variance: the variance asks for the lonely, the reduction for a copy."""
    shared, lonely = random(500, 1), 1.2 * random(500, 1, seed=1)
    functions = torch.cat([shared.expand(-1, 10), lonely], 1)
    assert int(functions.var(0).argmax()) == 10
    assert int(expected_variance_reduction(functions, noise=0.1).argmax()) < 10


def information(chosen: tuple[int, ...]) -> float:
    block = COVARIANCE[list(chosen)][:, list(chosen)]
    return 0.5 * float(torch.logdet(torch.eye(len(chosen), dtype=torch.float64) + block / NOISE))


def test_batches_of_numbers_are_greedy_by_the_determinant():
    selection = select_batch(NUMBERS, 5)
    chosen: tuple[int, ...] = ()
    for step in range(5):
        best = max((n for n in range(9) if n not in chosen), key=lambda n: information((*chosen, n)))
        chosen = (*chosen, best)
        assert float(selection.information[step]) == pytest.approx(information(chosen))
    assert tuple(selection.indices.tolist()) == chosen
    best = max(information(some) for some in itertools.combinations(range(9), 5))
    assert float(selection.information[-1]) >= (1 - 1 / math.e) * best
    again = select_batch(FUNCTIONS.numpy(), 5, noise=NOISE)
    assert torch.equal(again.indices, selection.indices)
    assert float(select_batch(NUMBERS, 1).information) == pytest.approx(float(bald(NUMBERS).max()))
    assert sorted(select_batch(NUMBERS, 9).indices.tolist()) == list(range(9))


def test_batches_do_not_ask_twice():
    """Copies of the best input come first by their own score; a batch takes one, then something else."""
    functions = torch.cat([3 * random(300, 1).expand(-1, 4), random(300, 1, seed=1)], 1)
    assert 4 in select_batch(functions, 2, noise=0.1).indices.tolist()
    copies = torch.cat([PROBS[:, :1].expand(-1, 4, -1), PROBS[:, 3:4]], 1)
    assert 4 in select_batch(copies, 2).indices.tolist()


def joint_information(chosen: tuple[int, ...]) -> float:
    """I[y_B; s] over all labellings, by enumeration."""
    total, conditional = 0.0, sum(float(torch.special.entr(PROBS[:, n]).sum(-1).mean()) for n in chosen)
    for labels in itertools.product(range(3), repeat=len(chosen)):
        each = torch.ones(len(PROBS), dtype=torch.float64)
        for n, label in zip(chosen, labels):
            each = each * PROBS[:, n, label]
        total += float(torch.special.entr(each.mean()))
    return total - conditional


def test_batches_of_classes_are_batchbald():
    selection = select_batch(CLASSES, 4)
    chosen: tuple[int, ...] = ()
    for step in range(4):
        best = max((n for n in range(12) if n not in chosen), key=lambda n: joint_information((*chosen, n)))
        chosen = (*chosen, best)
        assert float(selection.information[step]) == pytest.approx(joint_information(chosen))
    assert tuple(selection.indices.tolist()) == chosen
    assert torch.equal(select_batch(PROBS.numpy(), 4).indices, selection.indices)
    assert float(selection.information[0]) == pytest.approx(float(bald(CLASSES).max()))
    assert float(selection.information[-1]) <= math.log(6)
    binary = Predictive.from_functions(LOGITS[..., :1], Bernoulli())
    assert len(set(select_batch(binary, 5).indices.tolist())) == 5


def test_random_labellings_estimate_the_same():
    """All five inputs are chosen in the end, in whatever order: the estimate of their information must be unbiased."""
    exact = joint_information((0, 1, 2, 3, 4))
    some = PROBS[:, :5]
    assert float(select_batch(some, 5).information[-1]) == pytest.approx(exact)
    rough = torch.stack([select_batch(some, 5, configurations=20, seed=seed).information[-1] for seed in range(300)])
    assert float(rough.std()) > 0.01
    assert float(rough.mean()) == pytest.approx(exact, abs=5 * float(rough.std()) / math.sqrt(300))
    again = select_batch(some, 5, configurations=20, seed=7)
    assert torch.equal(again.information[-1], rough[7])


@pytest.mark.slow
def test_batches_beat_random_choice():
    """Over ten seeds, paired: 40 seeds gave +0.038 ± 0.003, so that ten are expected six standard errors above 0."""
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples/active_learning.py"))
    runs = [example["curves"](seed, rounds=3, steps=15) for seed in range(10)]
    gain = torch.tensor([run["batches"][-1] - run["random"][-1] for run in runs])
    assert float(gain.mean()) > 2 * float(gain.std()) / math.sqrt(len(gain))


def test_bad_input():
    with pytest.raises(ValueError, match="noise must be given with plain draws"):
        expected_variance_reduction(FUNCTIONS)
    with pytest.raises(ValueError, match="reference has 3 draws and predictive 50"):
        expected_variance_reduction(NUMBERS, Predictive.from_functions(FUNCTIONS[:3], Gaussian(1.0)))
    for bad in (-1.0, math.inf):
        with pytest.raises(ValueError, match="noise must be"):
            expected_variance_reduction(NUMBERS, noise=bad)
    with pytest.raises(ValueError, match="noise must be positive"):
        select_batch(FUNCTIONS, 2, noise=0.0)
    with pytest.raises(ValueError, match="noise is for numbers"):
        select_batch(CLASSES, 2, noise=0.1)
    with pytest.raises(ValueError, match="size is 13, but predictive has only 12 inputs"):
        select_batch(CLASSES, 13)
    with pytest.raises(ValueError, match="size must be an integer of at least 1"):
        select_batch(CLASSES, 0)
    with pytest.raises(ValueError, match="configurations must be"):
        select_batch(CLASSES, 1, configurations=0)
    with pytest.raises(ValueError, match="one number per input"):
        select_batch(Predictive.from_functions(random(4, 5, 2), Gaussian(1.0)), 1)
    with pytest.raises(ValueError, match="score them by bald"):
        select_batch(Predictive.from_functions(random(4, 5, 2), Bernoulli()), 1)
    with pytest.raises(TypeError, match="use bald"):
        expected_variance_reduction(CLASSES)
    with pytest.raises(TypeError, match="use epistemic_variance"):
        bald(Predictive.from_functions(FUNCTIONS / 5, Poisson()))
    with pytest.raises(ValueError, match="disagreement of draws"):
        bald(PROBS.mean(0))
    with pytest.raises(ValueError, match="must sum to one"):
        bald(PROBS * 1.5)
    scores = [bald, epistemic_variance, expected_variance_reduction, lambda p: select_batch(p, 1)]
    for score in scores:
        for empty in (Predictive.from_functions(torch.zeros(2, 0), Gaussian(1.0)), np.zeros((2, 0, 2))):
            with pytest.raises(ValueError, match="predictive is empty"):
                score(empty)
        with pytest.raises(ValueError, match=r"NaN|finite"):
            score(Predictive.from_functions(torch.full((2, 3), math.nan), Gaussian(1.0)))
    with pytest.raises(ValueError, match="finite"):
        select_batch(np.full((2, 3, 2), np.nan), 1)
