"""Calibration: bins against torchmetrics and by hand, PIT values that are uniform, intervals that cover."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from plausible import metrics
from plausible.core.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson, Scaled, StudentT
from plausible.posteriors.predictive import Predictive

oracle = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_agrees_with_torchmetrics(classified, bins):
    _, predictive, probs, y = classified
    expected = float(oracle.multiclass_calibration_error(probs, y, 4, n_bins=bins))
    assert metrics.ece(probs, y, bins) == pytest.approx(expected, rel=1e-5)
    assert metrics.ece(predictive, y, bins=bins) == pytest.approx(expected, rel=1e-5)


def test_ece_by_hand():
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.6, 0.2, 0.2]])
    y = torch.tensor([0, 2, 1, 0])
    # every confidence has a bin of its own: 0.9, 0.5, 0.8, 0.6
    assert metrics.ece(probs, y) == pytest.approx((0.1 + 0.5 + 0.2 + 0.4) / 4)
    assert metrics.ece(probs, y, bins=1) == pytest.approx(0.75 - 0.7)  # mean accuracy against mean confidence
    assert metrics.ece(probs, y, bins=2, binning="mass") == pytest.approx((abs(0.5 + 0.6 - 1) + abs(0.8 + 0.9 - 2)) / 4)


def test_bins_are_closed_above():
    # confidences 0.6 and 0.8 share the bin (0.5, 1] of two; 1.0 belongs to the last bin
    probs = torch.tensor([[0.6, 0.4], [0.2, 0.8], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0])
    assert metrics.ece(probs, y, bins=2) == pytest.approx((abs(0.4 - 0.8 + 0.0) + 0.5) / 4)
    found = metrics.reliability(probs, y, bins=4)
    assert found.counts.tolist() == [0, 1, 1, 2]
    assert found.confidence[1:].tolist() == pytest.approx([0.5, 0.6, 0.9])
    assert found.accuracy[1:].tolist() == pytest.approx([1, 1, 0.5])


def test_equal_mass_bins_hold_equal_numbers_and_keep_ties_together(classified):
    _, _, probs, y = classified
    confidence, hit = probs.amax(-1), (probs.argmax(-1) == y).double()
    order = confidence.argsort()
    gaps = [abs(float((hit[part] - confidence[part]).sum())) for part in order.chunk(15)]  # 20 each
    assert metrics.reliability(probs, y, binning="mass").counts.tolist() == [20] * 15
    assert metrics.ece(probs, y, binning="mass") == pytest.approx(sum(gaps) / 300, rel=1e-12)
    coarse = (probs * 8).round().clamp(min=1e-3)
    coarse = coarse / coarse.sum(-1, keepdim=True)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert metrics.ece(coarse[shuffled], y[shuffled], binning="mass") == pytest.approx(
        metrics.ece(coarse, y, binning="mass"), rel=1e-12
    )
    assert metrics.ece(probs[:3], y[:3], bins=15, binning="mass") <= 1  # fewer examples than bins


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_classwise_ece_is_the_mean_over_classes(classified, binning):
    _, predictive, probs, y = classified
    total = 0.0
    for c in range(4):
        p, hit = probs[:, c].numpy(), (y == c).numpy()
        edges = np.linspace(0, 1, 16)[1:-1] if binning == "width" else np.sort(p)[np.arange(1, 15) * 20 - 1]
        place = np.searchsorted(edges, p)
        total += sum(abs((hit - p)[place == b].sum()) for b in range(15)) / 300
    assert metrics.classwise_ece(predictive, y, binning=binning) == pytest.approx(total / 4, rel=1e-10)


def test_a_constant_forecast_is_off_by_its_distance_from_the_base_rate():
    y = np.array([1] * 30 + [0] * 70)
    assert metrics.ece(np.full(100, 0.2), y) == pytest.approx(0.1)  # confident 0.8 in "no", right 0.7
    assert metrics.classwise_ece(np.full(100, 0.2), y) == pytest.approx(0.1)
    predictive = Predictive.from_functions(torch.full((1, 100), math.log(0.2 / 0.8)), Bernoulli())
    assert metrics.ece(predictive, y) == pytest.approx(0.1, abs=1e-6)


def test_ece_of_true_probabilities_is_sampling_noise():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(50_000, 5, generator=generator, dtype=torch.float64).softmax(-1)
    y = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    bound = math.sqrt(15) * 0.5 / math.sqrt(50_000)  # Σ_b √(n_b·¼)/N ≤ √(bins/4N): the mean of the noise lies below
    for binning in ("width", "mass"):
        assert metrics.ece(probs, y, binning=binning) < 1.5 * bound
        assert metrics.ece((3 * probs.log()).softmax(-1), y, binning=binning) > 10 * bound


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def mixtures() -> list[tuple[str, Predictive]]:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(5, 800, 1, generator=generator, dtype=torch.float64)
    log_dispersion = {"likelihood.log_dispersion": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    return [
        ("gaussian", Predictive.from_functions(outputs, Gaussian(0.7))),
        ("student", Predictive.from_functions(outputs, StudentT(df=3.0, scale=0.5))),
        ("reflected", Predictive.from_functions(outputs, Scaled(Gaussian(0.7), 3.0, -2.0))),
        ("poisson", Predictive.from_functions(outputs, Poisson())),
        ("negative binomial", Predictive.from_functions(outputs, NegativeBinomial(), log_dispersion)),
    ]


@pytest.mark.parametrize(("name", "predictive"), mixtures(), ids=lambda v: v if isinstance(v, str) else "")
def test_pit_is_uniform_and_intervals_cover_where_targets_follow_the_predictive(name, predictive):
    y = torch.cat([predictive.sample(1, seed=s)[0, s::4] for s in range(4)])  # many draws of f, not one
    order = torch.cat([torch.arange(s, 800, 4) for s in range(4)])
    y = y[order.argsort()]
    values = metrics.pit(predictive, y)
    assert values.shape == y.shape
    assert values.dtype == torch.float64
    assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-4
    assert metrics.quantile_calibration(predictive, y) < 4 * 0.31 / math.sqrt(800)
    assert stats.kstest(metrics.pit(predictive, y + 1).flatten().numpy(), "uniform").pvalue < 1e-6
    assert metrics.quantile_calibration(predictive, y + 1) > 0.06
    error = 4.5 * math.sqrt(0.8 * 0.2 / 800)
    found = metrics.coverage(predictive, y, level=0.8)
    assert found > 0.8 - error
    if predictive.likelihood.kind == "continuous":  # intervals of counts end at integers and cover more
        assert found < 0.8 + error
        assert metrics.coverage(predictive, y, level=0.999) > 0.98
    again = metrics.pit(predictive, y, seed=1)
    assert torch.equal(again, values) == (predictive.likelihood.kind == "continuous")
    assert torch.equal(metrics.pit(predictive, y), values)


def test_pit_is_the_cdf_of_the_mixture(measured):
    means, predictive, y = measured
    expected = stats.norm.cdf(y, means, (0.5, 2.0)).mean(0)
    assert metrics.pit(predictive, y).numpy() == pytest.approx(expected, abs=1e-12)
    mask = torch.ones(200, 2, dtype=torch.bool)
    mask[3, 1] = False
    found = metrics.pit(predictive, y, mask=mask)
    assert found.isnan().nonzero().tolist() == [[3, 1]]


def test_pit_of_a_count_lies_between_its_neighbours():
    predictive = Predictive.from_functions(torch.log(torch.tensor([[2.0, 2.0, 2.0]], dtype=torch.float64)), Poisson())
    y = torch.tensor([0, 1, 4])
    low, high = stats.poisson.cdf(y - 1, 2), stats.poisson.cdf(y, 2)
    values = torch.stack([metrics.pit(predictive, y, seed=seed) for seed in range(200)]).numpy()
    assert (values > low).all()
    assert (values < high).all()
    assert values.mean(0) == pytest.approx((low + high) / 2, abs=0.05)


def test_pit_among_samples_is_uniform_for_any_number_of_samples():
    rng = np.random.default_rng(0)
    for values in (rng.normal(size=(4, 3000)), rng.poisson(1.0, size=(4, 3000)).astype(float)):  # exchangeable with y
        found = metrics.pit(values[:3], values[3])
        assert stats.kstest(found, "uniform").pvalue > 1e-4
    assert metrics.coverage(np.arange(101.0)[:, None], np.array([5.0]), level=0.9) == 1  # from 5 to 95
    assert metrics.coverage(np.arange(101.0)[:, None], np.array([4.9]), level=0.9) == 0
    assert metrics.interval_width(np.arange(101.0)[:, None], level=0.9) == pytest.approx(90)


def test_quantile_calibration_in_closed_form():
    predictive = Predictive.from_functions(torch.zeros(1, 10, dtype=torch.float64), Gaussian(1.0))
    y = torch.full((10,), -1e-9, dtype=torch.float64)  # every PIT value is just below ½
    # levels below ½ see none of the targets (off by q), those from ½ on all of them (off by 1 − q)
    assert metrics.quantile_calibration(predictive, y, levels=[0.25, 0.5, 0.9]) == pytest.approx((0.25 + 0.5 + 0.1) / 3)
    assert metrics.quantile_calibration(predictive, y, levels=3) == pytest.approx((0.25 + 0.5 + 0.25) / 3)


def test_intervals_of_a_gaussian():
    predictive = Predictive.from_functions(torch.zeros(1, 4, dtype=torch.float64), Gaussian(2.0))
    z = stats.norm.ppf(0.95)
    y = torch.tensor([0.0, 2 * z - 1e-6, 2 * z + 1e-6, -9.0], dtype=torch.float64)
    assert metrics.coverage(predictive, y) == 0.5
    assert metrics.coverage(predictive, y, mask=[True, True, False, False]) == 1
    assert metrics.interval_width(predictive) == pytest.approx(4 * z)
    low, high = predictive.interval(0.9)
    assert metrics.coverage((low, high.numpy()), y) == 0.5
    assert metrics.interval_width((low, high)) == pytest.approx(4 * z)


def test_refusals(classified, measured):
    with pytest.raises(ValueError, match="binning must be one of 'width', 'mass', got 'equal'"):
        metrics.ece(classified.probs, classified.y, binning="equal")
    with pytest.raises(ValueError, match="bins must be an integer of at least 1"):
        metrics.ece(classified.probs, classified.y, bins=0)
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
        metrics.coverage(measured.predictive, measured.y, level=90)
    with pytest.raises(ValueError, match="levels must be"):
        metrics.quantile_calibration(measured.predictive, measured.y, levels=[0.5, 1.0])
    with pytest.raises(ValueError, match=r"pair \(low, high\)"):
        metrics.coverage((measured.y,), measured.y)
    with pytest.raises(ValueError, match="low ≤ high"):
        metrics.interval_width((measured.y + 1, measured.y))
    for metric in (metrics.pit, metrics.coverage, metrics.quantile_calibration, metrics.crps):
        with pytest.raises(TypeError, match="use accuracy, brier, ece"):
            metric(classified.predictive, classified.y)
