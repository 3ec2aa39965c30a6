"""The tests behind the verdicts, against scipy and by simulation."""

import itertools

import numpy as np
import pytest

from plausible import metrics
from plausible.apps.report import statistics

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("count", [0, 3, 41, 50])
def test_equal_probabilities_give_the_binomial_test(count):
    found = statistics.hits(np.full(50, 0.8), count)
    law = stats.binom(50, 0.8)
    assert found.p == pytest.approx(min(1, 2 * min(law.cdf(count), law.sf(count - 1))), rel=1e-9)
    assert found.direction == (1 if count > 40 else -1)


def test_unequal_probabilities_give_the_poisson_binomial_law():
    p = np.array([0.1, 0.5, 0.7, 0.95, 0.3])
    for count in range(6):
        below = above = 0.0
        for outcome in itertools.product((0, 1), repeat=5):
            chance = np.prod([q if hit else 1 - q for q, hit in zip(p, outcome)])
            below += chance * (sum(outcome) <= count)
            above += chance * (sum(outcome) >= count)
        assert statistics.hits(p, count).p == pytest.approx(min(1, 2 * min(below, above)), rel=1e-9)


def test_many_trials_use_a_normal_law_that_agrees():
    p = np.full(20_001, 0.9)
    law = stats.binom(len(p), 0.9)
    for count in (17_900, 17_990, 18_080):
        exact = min(1, 2 * min(law.cdf(count), law.sf(count - 1)))
        assert statistics.hits(p, count).p == pytest.approx(exact, rel=0.05)


def test_uniformity_is_kolmogorovs_test():
    rng = np.random.default_rng(0)
    for values in (rng.random(200), rng.random(60) ** 1.3, rng.beta(2, 2, 100)):
        assert statistics.uniform(values).p == pytest.approx(stats.kstest(values, "uniform").pvalue, abs=0.01)


@pytest.mark.parametrize("count", [5, 12, 40])
@pytest.mark.parametrize("chance", [0.001, 0.01, 0.1, 0.9, 0.99, 0.999])
def test_spread_has_the_law_of_a_sum_of_squares_of_uniform_variables(count, chance):
    """The exact law by convolution: (2u − 1)² on a lattice of 4,000 cells, which it enters with √ differences."""
    cells = 4000
    size = 2 ** int(np.ceil(np.log2(count * cells + 1)))
    one = np.fft.rfft(np.diff(np.sqrt(np.arange(cells + 1) / cells)), size)
    below = np.fft.irfft(one**count, size).cumsum()
    place = int(np.searchsorted(below, chance))
    distance = np.sqrt((place + count / 2 + 0.5) / cells / count)
    found = statistics.spread(np.full(count, (1 + distance) / 2))
    assert found.p == pytest.approx(2 * min(below[place], 1 - below[place]), rel=0.04)
    assert found.direction == (1 if chance > 0.5 else -1)


def test_spread_at_its_ends():
    for values, direction in ((np.full(40, 0.5), -1), (np.arange(40) % 2.0, 1)):
        assert statistics.spread(values).supported
        assert statistics.spread(values).direction == direction
    assert not statistics.spread(np.full(40, 0.5 + 0.5 / np.sqrt(3))).supported  # the mean of (2u − 1)² is 1/3
    assert not statistics.spread(np.array([0.5])).supported


def test_a_test_without_power_is_one_whose_every_count_is_chance():
    for count in (20, 51, 60):
        for direction, extreme in ((1, count), (-1, 0)):
            blind = statistics.powerless(np.full(count, 0.9), direction)
            assert blind is not statistics.hits(np.full(count, 0.9), extreme).supported
    assert statistics.powerless(np.full(50, 0.9), 1)
    assert not statistics.powerless(np.full(51, 0.9), 1)
    assert statistics.powerless(np.full(51, 0.9), 1, tests=3)


def test_association_is_spearmans_with_ties():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 5, 80).astype(float)
    second = first + rng.normal(size=80)
    rho, test = statistics.association(first, second)
    assert rho == pytest.approx(stats.spearmanr(first, second).statistic, rel=1e-12)
    assert test.supported
    assert test.direction == 1
    assert statistics.association(np.ones(80), second) is None


def test_the_range_of_a_count_holds_what_it_says():
    for trials, chance in ((10, 0.5), (200, 0.1), (5000, 0.05)):
        low, high = statistics.count_range(trials, chance, 0.99)
        law = stats.binom(trials, chance)
        assert law.cdf(high) - law.cdf(low - 1) >= 0.99
        assert law.cdf(high - 1) < 0.995
        assert law.cdf(low - 1) < 0.005 <= law.cdf(low)
    wide, exact = statistics.count_range(50_000, 0.3), stats.binom(50_000, 0.3).ppf([0.005, 0.995])
    assert np.abs(np.array(wide) - exact).max() <= 2


def test_chance_calibration_error_is_a_quantile_of_what_right_probabilities_show():
    rng = np.random.default_rng(2)
    confidence = rng.uniform(0.5, 1, 150)
    limit = statistics.chance_ece(confidence, level=0.9)
    over = 0
    for _ in range(400):
        right = rng.random(150) < confidence
        probs = np.stack([1 - confidence, confidence], -1)
        over += metrics.ece(probs, right.astype(int)) > limit
    assert abs(over - 40) < 4 * 6 + 8  # binomial(400, 0.1) and the noise of the limit itself


def test_ranks_of_chains_are_flat_where_they_agree_and_not_elsewhere():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(4, 500, 3))
    shares = statistics.rank_shares(values, 10)
    assert shares.shape == (4, 10)
    np.testing.assert_allclose(shares.mean(0), 1)  # every rank belongs to some chain
    assert np.abs(shares - 1).max() < 0.3
    values[0] += 3
    moved = statistics.rank_shares(values, 10)
    assert moved[0, -1] > 3
    assert moved[0, 0] == 0


def test_improvement_is_the_paired_test():
    rng = np.random.default_rng(4)
    baseline = rng.gamma(2, size=100)
    better = statistics.improvement(baseline - 0.3 + 0.1 * rng.normal(size=100), baseline)
    assert better.supported
    assert better.direction == 1
    assert not statistics.improvement(rng.permutation(baseline), baseline).supported
    assert statistics.improvement(baseline, baseline).p == 1
    for count in (3, 8, 40):
        found = statistics.improvement(0.7 * baseline[:count], baseline[:count])
        exact = stats.ttest_1samp(0.3 * baseline[:count], 0).pvalue
        assert found.p == pytest.approx(exact, rel=0.05)
    assert not statistics.improvement(np.zeros(2), np.ones(2)).supported  # no spread, but two rows


def test_signs_are_binomial():
    found = statistics.signs(np.array([1.0] * 9 + [3.0] * 2 + [2.0] * 5), np.full(16, 2.0))
    assert found.p == pytest.approx(stats.binomtest(9, 11).pvalue)
    assert found.direction == 1
