"""Verdicts say what is so, and accuse nobody without support."""

import numpy as np
import pytest

from plausible.apps.report.findings import QUANTILES, Findings, Output
from plausible.apps.report.verdicts import coverage, diagnosis, family, shape, skill, verdicts

stats = pytest.importorskip("scipy.stats")


def numbers(rng, count=400, stated=1.0, shift=0.0, epistemic=0.1, varying=True, slope=2.0):
    """Targets N(slope·x, s²), predicted as N(slope·x + shift, (stated·s)²)."""
    x = rng.normal(size=count)
    spread = np.exp(0.7 * rng.normal(size=count)) if varying else np.ones(count)
    mean = slope * x + shift
    y = slope * x + spread * rng.normal(size=count)
    said = stated * spread
    arrays = {
        "y": y,
        "mean": mean,
        "epistemic": epistemic * said**2,
        "aleatoric": (1 - epistemic) * said**2,
        "pit": stats.norm.cdf((y - mean) / said),
        "rows": np.arange(count),
        "quantiles": mean + said * stats.norm.ppf(QUANTILES)[:, None],
    }
    return Output("price", "continuous", arrays=arrays, metrics={"rmse": 1.0})


def classes(rng, count=400, power=1.0, width=3, information=0.1):
    """Classes drawn from p, predicted as p^power / Σ p^power."""
    true = rng.dirichlet(np.ones(width) * 0.5, count)
    y = (rng.random((count, 1)) > true.cumsum(-1)).sum(-1).clip(0, width - 1)
    said = true.clip(1e-9) ** power
    said /= said.sum(-1, keepdims=True)
    entropy = stats.entropy(said, axis=-1)
    arrays = {"y": y, "probs": said, "entropy": entropy, "information": information * entropy, "rows": np.arange(count)}
    return Output("kind", "classes", tuple("abcdefgh"[:width]), arrays=arrays)


def tones(found):
    return [verdict.tone for verdict in found]


def test_right_predictions_are_not_accused():
    """At most 1 % each of 150 verdicts on coverage and on shape, for few rows and for many: 3 alarms, and 4 errors."""
    for count in (40, 200):
        alarms = 0
        for seed in range(150):
            output = numbers(np.random.default_rng(seed), count)
            alarms += tones([coverage(output), shape(output)]).count("bad")
        assert alarms <= 3 + 4 * np.sqrt(3)
    alarms = 0
    for seed in range(50):
        alarms += tones(verdicts(classes(np.random.default_rng(seed), 150))[:2]).count("bad")
    assert alarms <= 1 + 4


@pytest.mark.parametrize(("stated", "word"), [(0.6, "overconfident"), (1.6, "underconfident")])
def test_wrong_widths_are_called_by_their_name(stated, word):
    found = verdicts(numbers(np.random.default_rng(0), stated=stated))[0]
    assert found.tone == "bad"
    assert word in found.headline
    assert "where 90\u00a0% was promised" in found.headline
    assert found.advice


@pytest.mark.parametrize("factor", [2, 5, 10])
def test_fifty_rows_show_widths_that_are_wrong_by_a_factor(factor):
    """All inside could be chance for 50 rows, but how near the middle they lie could not."""
    for stated, word, width in ((factor, "underconfident", "too wide"), (1 / factor, "overconfident", "too narrow")):
        named = 0
        for seed in range(20):
            output = numbers(np.random.default_rng(seed), 50, stated=stated)
            found = coverage(output), shape(output)
            assert found[0].tone != "good"
            named += all(verdict.tone == "bad" and word in verdict.headline for verdict in found)
            named -= "wrong shape" in found[1].headline
            if found[1].tone == "bad" and not found[1].headline.startswith("Predictions"):  # a bias, by chance
                assert width in found[1].headline
                assert ("train longer" in found[1].advice) == (stated > 1)
        assert named >= 18
    crowded = coverage(numbers(np.random.default_rng(0), 50, stated=factor))
    assert "crowd in the middle" in crowded.headline
    assert "wider than needed" in crowded.advice


def test_no_coverage_is_called_fine_where_none_could_be_called_wrong():
    """40 of 40 inside, though spread over the whole of the interval: chance alone has 1.5 % of that."""
    output = numbers(np.random.default_rng(0), 40)
    level = Output("p", "continuous", arrays={**output.arrays, "pit": np.linspace(0.06, 0.94, 40)})
    found = coverage(level)
    assert found.tone == "unclear"
    assert "even all of them could be chance" in found.headline
    fine = coverage(Output("p", "continuous", arrays={**output.arrays, "pit": (np.arange(40) + 0.5) / 40}))
    assert fine.tone == "good"
    assert "as promised" in fine.headline


def test_only_a_shape_that_is_neither_too_wide_nor_too_narrow_is_called_wrong():
    output = numbers(np.random.default_rng(0), 600)
    v = np.abs(2 * (np.arange(600) + 0.5) / 600 - 1)
    for pit in (
        np.where(np.arange(600) % 2, 0.5 + 0.5 / np.sqrt(3), 0.5 - 0.5 / np.sqrt(3)),  # two spikes with the right spread
        0.5 + 0.5 * np.sign(np.arange(600) % 2 - 0.5) * np.where(v > 0.8, 0.99, 0.6 * v),  # crowded and outliers
    ):
        found = shape(Output("p", "continuous", arrays={**output.arrays, "pit": pit}))
        assert found.headline == "The predicted distributions have the wrong shape."


def test_near_perfect_predictions_are_not_doubted():
    """Targets with heavy tails: the mean of squares is one or two rows, the signs are nearly all of them."""
    doubted = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        output = numbers(rng, 50)
        y = rng.standard_t(2, 50) ** 3
        doubted += skill(Output("p", "continuous", arrays={**output.arrays, "y": y, "mean": 0.98 * y})).tone != "good"
    assert doubted == 0


def test_the_median_of_skewed_targets_is_not_called_better_than_their_mean():
    """It has the smaller error on most rows, and the larger one in the mean: a constant cannot beat a constant."""
    rng = np.random.default_rng(0)
    output, y = numbers(rng, 300), np.exp(rng.normal(size=300))
    found = skill(Output("p", "continuous", arrays={**output.arrays, "y": y, "mean": np.full(300, np.median(y))}))
    assert "no better than a constant" in found.headline
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        y, guess = np.exp(rng.normal(size=60)), 1 + 0.2 * rng.normal(size=60)
        alarms += skill(Output("p", "continuous", arrays={**numbers(rng, 60).arrays, "y": y, "mean": guess})).tone == "good"
    assert alarms <= 4


@pytest.mark.parametrize("make", [numbers, classes])
def test_one_held_out_row(make):
    found = verdicts(make(np.random.default_rng(0), 1))
    words = " ".join(f"{v.headline} {v.detail} {v.advice}" for v in found)
    assert "1 rows" not in words
    assert "1 row is too few" in words
    assert "only held-out row" in words
    assert "equally uncertain" not in words
    assert "same" not in words
    assert {v.tone for v in found} <= {"unclear", "plain", "good"}


def test_why_all_rows_are_equally_uncertain():
    rng = np.random.default_rng(0)
    assert "do not disagree" in verdicts(numbers(rng, 40, varying=False, epistemic=0.0))[-1].detail
    some = verdicts(numbers(rng, 40, varying=False, epistemic=0.01))[-1]
    assert "disagree equally" in some.detail
    arrays = numbers(rng, 40).arrays
    alike = Output("p", "continuous", arrays={**arrays, "mean": arrays["y"]})
    assert "errs alike" in verdicts(alike)[-1].headline


def test_the_share_in_a_verdict_is_the_share_of_targets_inside():
    output = numbers(np.random.default_rng(1), stated=0.6)
    low, high = output.arrays["quantiles"][[0, -1]]
    share = np.mean((low <= output.arrays["y"]) & (output.arrays["y"] <= high))
    assert f"cover {100 * share:.0f}\u00a0%" in verdicts(output)[0].headline


def test_a_small_sample_gives_no_verdict_where_a_large_one_does():
    small, large = (verdicts(numbers(np.random.default_rng(2), count, stated=0.85))[0] for count in (20, 3000))
    assert small.tone == "unclear"
    assert "too few" in small.headline
    assert large.tone == "bad"


@pytest.mark.parametrize(("shift", "word"), [(-0.8, "too low"), (0.8, "too high")])
def test_bias_is_said_with_its_direction(shift, word):
    found = verdicts(numbers(np.random.default_rng(3), shift=shift))[1]
    assert found.tone == "bad"
    assert word in found.headline


def test_predictions_no_better_than_a_constant():
    rng = np.random.default_rng(4)
    useless = numbers(rng, slope=0.0, shift=0.3)
    assert "no better than a constant" in verdicts(useless)[2].headline
    assert verdicts(useless)[2].tone == "bad"


def test_uncertainty_that_finds_errors_and_that_cannot():
    rng = np.random.default_rng(5)
    assert verdicts(numbers(rng))[-1].tone == "good"
    flat = verdicts(numbers(rng, varying=False, epistemic=0.0))[-1]
    assert flat.tone == "plain"
    assert "equally uncertain" in flat.headline
    output = numbers(rng, varying=True)
    spread = output.arrays["aleatoric"]
    backwards = Output("p", "continuous", arrays={**output.arrays, "aleatoric": 1 / spread, "epistemic": 0 * spread})
    assert "wrong way" in verdicts(backwards)[-1].headline


@pytest.mark.parametrize(("power", "word"), [(2.5, "overconfident"), (0.4, "underconfident")])
def test_probabilities_that_are_too_sharp_or_too_flat(power, word):
    first, second, *_ = verdicts(classes(np.random.default_rng(6), power=power))
    assert first.tone == second.tone == "bad"
    assert word in first.headline


def test_one_class_held_out_and_no_errors():
    probs = np.tile([0.9, 0.1], (40, 1))
    arrays = {
        "y": np.zeros(40, int),
        "probs": probs,
        "entropy": np.full(40, 0.325),
        "information": np.zeros(40),
        "rows": np.arange(40),
    }
    found = verdicts(Output("kind", "binary", ("no", "yes"), arrays=arrays))
    assert "one class" in found[2].headline
    assert "no wrong answer" in found[3].headline
    assert found[0].tone == "unclear"  # 40 of 40 where 0.9 was said happens 1.5 % of the time: no count is called


def test_counts_are_judged_by_randomised_intervals():
    rng = np.random.default_rng(7)
    rate = np.exp(rng.normal(size=500) * 0.3)
    y = rng.poisson(rate).astype(float)
    low, high = stats.poisson.cdf(y - 1, rate), stats.poisson.cdf(y, rate)
    arrays = {
        "y": y,
        "mean": rate,
        "epistemic": 0.1 * rate,
        "aleatoric": rate,
        "pit": low + rng.random(500) * (high - low),
        "quantiles": stats.poisson.ppf(np.array(QUANTILES)[:, None], rate),
        "rows": np.arange(500),
    }
    inside = np.mean((arrays["quantiles"][0] <= y) & (y <= arrays["quantiles"][-1]))
    assert inside > 0.95  # whole numbers: more than 90 %, though nothing is wrong
    found = verdicts(Output("visits", "counts", arrays=arrays))[0]
    assert found.tone == "good"
    assert "intervals with randomised ends" in found.headline
    assert f"as in the scores, {100 * inside:.1f}\u00a0% of the targets lie inside" in found.detail


# About the fit


def about(**changes):
    rng = np.random.default_rng(0)
    return Findings("t", {}, outputs=(numbers(rng),), **{"draws": 5, **changes})


def heads(evidence):
    return " | ".join(verdict.headline for verdict in diagnosis(evidence))


def test_chains_that_disagree():
    words = heads(about(diagnostics={"rhat": 1.4, "chains": 4, "ess_bulk": 2000.0, "ess_tail": 2000.0, "draws": 4000}))
    assert "The chains disagree: the worst R̂ is 1.40" in words
    assert "a little" in heads(about(diagnostics={"rhat": 1.02, "chains": 4}))
    assert "The chains agree" in heads(about(diagnostics={"rhat": 1.004, "chains": 4}))
    assert "has not settled" in heads(about(diagnostics={"rhat": float("nan"), "chains": 1}))
    assert "few independent draws: 37" in heads(about(diagnostics={"rhat": 1.0, "ess_bulk": 37.0, "draws": 400, "chains": 1}))
    assert "3 transitions diverged" in heads(about(diagnostics={"divergences": 3}))
    assert "chain" not in heads(about(diagnostics={"draws": 5, "chains": 5}))


def test_kl_that_drowns_the_data():
    history = {"elbo": [-9000.0], "kl": [9900.0], "log_likelihood": [-100.0]}
    assert "KL is 99\u00a0% of the objective" in heads(about(history=history))
    assert "KL" not in heads(about(history={**history, "kl": [50.0]}))
    assert "KL" not in heads(about(history={"log_prior": [-9000.0], "log_likelihood": [-1.0]}))


def test_a_collapsed_posterior_and_one_that_never_had_any():
    rng = np.random.default_rng(1)
    flat = numbers(rng, epistemic=0.0)
    assert "The posterior has collapsed: 5 draws" in heads(Findings("t", {}, outputs=(flat,), draws=5))
    single = diagnosis(Findings("t", {}, outputs=(flat,), draws=1))
    assert [verdict.tone for verdict in single] == ["plain"]
    assert "has no epistemic uncertainty" in single[0].headline
    assert "collapsed" not in heads(Findings("t", {}, outputs=(numbers(rng),), draws=5))
    assert "collapsed" in heads(Findings("t", {}, outputs=(classes(rng, information=0.0),), draws=5))


def test_advice_is_about_the_kind_of_method_that_was_used():
    flat = numbers(np.random.default_rng(1), epistemic=0.0)

    def advice(**known):
        return diagnosis(Findings("t", {}, outputs=(flat,), draws=5, **known))[0].advice

    assert advice(history={"elbo": [-2.0], "kl": [0.0]}).startswith("Train longer")
    assert "init=fresh" in advice()
    rising = {"log_joint": list(np.linspace(-100.0, 0.0, 50))}
    assert "Training may not have finished" in heads(about(history=rising))
    assert "Training" not in heads(about(history=rising, diagnostics={"acceptance": 0.8, "chains": 4}))


def test_training_that_was_still_rising():
    epochs = np.arange(100)
    assert "still rising" in heads(about(history={"log_joint": (10.0 * epochs).tolist()}))
    assert "still rising" not in heads(about(history={"log_joint": (-np.exp(-epochs / 5.0)).tolist()}))
    noisy = np.random.default_rng(2).normal(size=100)
    assert "still rising" not in heads(about(history={"log_joint": noisy.tolist()}))


@pytest.mark.parametrize(
    ("kind", "draws", "diagnostics", "history", "advised", "not_advised"),
    [
        ("point", 1, {}, {}, "an ensemble or a sampler instead of a single fit", "more members"),
        ("chains", 100, {"acceptance": 0.8}, {}, "see that they agree", "single fit"),
        ("variational", 100, {}, {"elbo": [1.0]}, "a family with correlations", "single fit"),
        ("draws", 5, {}, {}, "more members or draws", "single fit"),
    ],
)
def test_advice_is_for_the_method_that_was_used(kind, draws, diagnostics, history, advised, not_advised):
    findings = Findings("t", {}, draws=draws, diagnostics=diagnostics, history=history)
    assert family(findings) == kind
    overconfident = verdicts(numbers(np.random.default_rng(0), stated=0.5), family(findings))[0]
    assert advised in overconfident.advice
    assert not_advised not in overconfident.advice
