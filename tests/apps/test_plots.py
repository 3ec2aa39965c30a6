"""Each plot draws the numbers of its metric, on the axes it was given."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import plausible as pl
from plausible import metrics, plots
from plausible.analysis.geometry import Curve, Surface
from plausible.apps.report.statistics import count_range, rank_shares
from plausible.apps.sweep import Sweep
from plausible.blocks.chains import convergence as diagnostics

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def gaussian(count=60, draws=5, outputs=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(draws, count, outputs, generator=generator)
    y = f.mean(0) + torch.randn(count, outputs, generator=generator)
    return pl.Predictive.from_functions(f, pl.likelihoods.Gaussian(1.0)), y


def categorical(count=80, draws=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(draws, count, 3, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    return pl.Predictive.from_functions(f, pl.likelihoods.Categorical()), y


@pytest.fixture(scope="module")
def chains():
    torch.manual_seed(0)
    x, y = torch.randn(40, 1), torch.randn(40, 1)
    method = pl.Ensemble(pl.SGLD(epochs=40, lr=1e-3), members=2)
    return pl.fit(torch.nn.Linear(1, 1), (x, y), method, progress=False), x


def calls(chains):
    posterior, x = chains
    numbers, y = gaussian()
    classes, labels = categorical()
    other, _ = categorical(seed=1)
    return {
        "reliability": lambda **k: plots.reliability(classes, labels, **k),
        "pit_histogram": lambda **k: plots.pit_histogram(numbers, y, **k),
        "quantile_calibration": lambda **k: plots.quantile_calibration(numbers, y, **k),
        "predictive_band": lambda **k: plots.predictive_band(
            torch.linspace(0, 1, 60), numbers, (torch.rand(9), torch.rand(9)), **k
        ),
        "predictions": lambda **k: plots.predictions(numbers, y, **k),
        "risk_coverage": lambda **k: plots.risk_coverage(classes, labels, **k),
        "ood_histogram": lambda **k: plots.ood_histogram(classes, other, **k),
        "training_trace": lambda **k: plots.training_trace(posterior, **k),
        "chain_trace": lambda **k: plots.chain_trace(posterior, x[:2], **k),
        "rank_histogram": lambda **k: plots.rank_histogram(posterior, x[:2], **k),
        "ess_growth": lambda **k: plots.ess_growth(posterior, x[:2], **k),
        "trace": lambda **k: plots.trace(posterior, x[:2], **k),
        "rank": lambda **k: plots.rank(posterior, x[:2], **k),
        "autocorrelation": lambda **k: plots.autocorrelation(posterior, x[:2], **k),
        "energy": lambda **k: plots.energy(torch.randn(2, 50), **k),
        "example_images": lambda **k: plots.example_images(torch.rand(80, 4, 4), classes, labels, **k),
        "pruned_weights": lambda **k: plots.pruned_weights(posterior, posterior.prune(0.5), **k),
        "snr": lambda **k: plots.snr(posterior, **k),
        "surface": lambda **k: plots.surface(
            Surface(torch.arange(4.0), torch.arange(3.0), torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 2)), **k
        ),
        "curve": lambda **k: plots.curve(
            Curve(torch.linspace(0, 1, 5), *torch.randn(4, 5), {"w": torch.zeros(2)}, "bezier"), **k
        ),
        "sweep": lambda **k: plots.sweep(
            Sweep([{"settings": {"lr": v, "samples": s}, "scores": {"nll": v * s}} for v in (0.1, 0.2) for s in (1, 2)]), **k
        ),
        "snr_cdf": lambda **k: plots.snr_cdf(posterior, **k),
        "weight_histogram": lambda **k: plots.weight_histogram(posterior, **k),
        "evidence": lambda **k: plots.evidence({"a": -3.0, "b": -1.0, "c": -2.0}, {"a": -0.4, "b": -0.1, "c": -0.2}, **k),
        "example_rows": lambda **k: plots.example_rows({"a": list(range(60))}, numbers, y, **k),
    }


@pytest.mark.parametrize("name", plots.__all__)
def test_every_plot_draws_on_the_axes_given_or_makes_some(name, chains):
    call = calls(chains)[name]
    figure, ax = pyplot.subplots()
    assert call(ax=ax) is ax
    figure.canvas.draw()
    before = len(pyplot.get_fignums())
    assert isinstance(call(), Axes)
    assert len(pyplot.get_fignums()) == before + 1
    with pytest.raises(TypeError, match="ax must be a matplotlib Axes"):
        call(ax="here")


def test_reliability_shows_the_bins_of_the_metric():
    predictive, y = categorical()
    ax = plots.reliability(predictive, y, 5)
    found = metrics.reliability(predictive, y, 5)
    x, share = ax.lines[1].get_data()
    keep = found.counts > 0
    np.testing.assert_allclose(x, found.confidence[keep])
    np.testing.assert_allclose(share, found.accuracy[keep])
    assert f"{metrics.ece(predictive, y, 5):.3f}" in ax.get_legend().get_texts()[-1].get_text()


def test_pit_histogram_is_a_density_of_the_metric():
    predictive, y = gaussian(200)
    ax = plots.pit_histogram(predictive, y, 8)
    heights = [patch.get_height() for patch in ax.patches[-8:]]
    expected = np.histogram(metrics.pit(predictive, y), 8, (0, 1), density=True)[0]
    np.testing.assert_allclose(heights, expected)
    low, high = count_range(200, 1 / 8)
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    np.testing.assert_allclose([band.y0, band.y1], [low * 8 / 200, high * 8 / 200])


def test_quantile_curve_averages_to_the_metric():
    predictive, y = gaussian(150)
    ax = plots.quantile_calibration(predictive, y)
    levels, below = ax.lines[1].get_data()
    assert np.abs(below - levels).mean() == pytest.approx(metrics.quantile_calibration(predictive, y))


def test_band_is_sorted_and_holds_the_quantiles():
    predictive, _ = gaussian(30, outputs=2)
    x = torch.randn(30)
    ax = plots.predictive_band(x, predictive, output=1)
    grid, mean = ax.lines[0].get_data()
    order = x.argsort()
    np.testing.assert_allclose(grid, x[order], rtol=1e-6)
    np.testing.assert_allclose(mean, predictive.mean[order, 1], rtol=1e-6)
    ends = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert ends.max() == pytest.approx(float(predictive.quantile(0.95)[:, 1].max()), rel=1e-5)


def test_predictions_outside_their_interval_are_told_apart():
    predictive, y = gaussian()
    ax = plots.predictions(predictive, y, 0.5)
    share = metrics.coverage(predictive, y, 0.5)
    inside, outside = ax.lines[1], ax.lines[2]
    assert len(inside.get_xdata()) == round(share * len(y))
    assert len(outside.get_xdata()) == len(y) - round(share * len(y))


def test_risk_curve_and_detection_are_those_of_the_metrics():
    predictive, y = categorical()
    ax = plots.risk_coverage(predictive, y)
    found = metrics.risk_coverage(predictive, y)
    np.testing.assert_allclose(ax.lines[1].get_data(), [found.coverage, found.risk])
    other, _ = categorical(50, seed=3)
    ax = plots.ood_histogram(predictive, other, "mutual_information")
    assert f"{metrics.ood_auroc(predictive, other, 'mutual_information'):.3f}" in ax.get_title()
    plain = predictive.probs.numpy()
    assert plots.ood_histogram(plain, other.probs.numpy()).get_title()


def test_chains_of_a_posterior_are_those_of_its_functions(chains):
    posterior, x = chains
    ax = plots.chain_trace(posterior, x[:3], 2)
    functions = posterior.functions(x[:3])
    for chain, line in enumerate(ax.lines):
        np.testing.assert_allclose(line.get_ydata(), functions[chain::2, 2, 0], rtol=1e-6)
    values = np.random.default_rng(0).normal(size=(3, 50))
    heights = [patch.get_data().values for patch in plots.rank_histogram(values, bins=5).patches]
    np.testing.assert_allclose(heights, rank_shares(values[..., None], 5))


def test_effective_draws_grow_to_those_of_the_diagnostics():
    values = np.random.default_rng(1).normal(size=(2, 200, 3))
    ax = plots.ess_growth(values)
    expected = diagnostics.summarise(torch.from_numpy(values))
    assert [line.get_ydata()[-1] for line in ax.lines[:2]] == pytest.approx([expected["ess_bulk"], expected["ess_tail"]])
    assert ax.lines[0].get_xdata()[-1] == 400


def test_examples_are_the_least_and_the_most_certain():
    predictive, y = categorical()
    entropy = predictive.entropy.numpy()
    ax = plots.example_rows({"n": list(range(80))}, predictive, y, 3)
    table = ax.tables[0]
    rows = [table[row, -1].get_text().get_text() for row in (1, 2, 3)]
    assert rows == list(map(str, np.argsort(entropy)[::-1][:3]))
    ax = plots.example_images(torch.rand(80, 3, 4, 4), predictive, y, 4, certain="most", classes="abc")
    assert len(ax.images) == 4
    best = int(np.argsort(entropy)[0])
    answer = "abc"[int(predictive.probs[best].argmax())]
    assert ax.texts[0].get_text().startswith(answer)
    assert ("is " in ax.texts[0].get_text()) == (answer != "abc"[int(y[best])])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plots.training_trace({}), ValueError, "history is empty"),
        (lambda: plots.training_trace({"a": [1.0]}, "b"), ValueError, "term='b'"),
        (lambda: plots.training_trace(3), TypeError, "history must be"),
        (lambda: plots.chain_trace(np.ones(3)), ValueError, "draws must be"),
        (lambda: plots.chain_trace(np.ones((2, 5)), quantity=4), ValueError, "quantity=4"),
        (lambda: plots.ess_growth(np.ones((2, 5))), ValueError, "at least 8"),
        (lambda: plots.ess_growth(np.ones((2, 50))), ValueError, "does not vary"),
        (lambda: plots.predictive_band(torch.ones(3), gaussian()[0]), ValueError, "x has 3 inputs"),
        (lambda: plots.predictive_band(torch.ones(60), gaussian(outputs=2)[0], output=2), ValueError, "output=2"),
        (lambda: plots.predictions(gaussian()[0], torch.ones(3)), ValueError, "y has 3 targets"),
        (lambda: plots.example_images(torch.ones(3, 4, 4), categorical()[0]), ValueError, "images must be"),
        (lambda: plots.example_rows({}, categorical()[0], certain="very"), ValueError, "certain must be"),
        (lambda: plots.reliability(*gaussian()), TypeError, "class probabilities"),
        (lambda: plots.pit_histogram(*categorical()), TypeError, "cumulative"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_without_matplotlib_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from plausible import plots\n"
        "try: plots.training_trace({'a': [1.0, 2.0]})\n"
        "except ImportError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'plausible[plot]'" in found.stdout


def test_rows_of_yes_and_no_with_an_axis_of_one_label() -> None:
    law = pl.Predictive.from_functions(torch.randn(10, 30, 1), pl.likelihoods.Bernoulli())
    plots.example_rows({"a": list(range(30))}, law, (torch.rand(30, 1) > 0.5).float())
    several = pl.Predictive.from_functions(torch.randn(10, 30, 2), pl.likelihoods.Bernoulli())
    with pytest.raises(ValueError, match="2 targets"):
        plots.example_rows({"a": list(range(30))}, several)


# ---------------------------------------------------------------------------------------------------------------------
# Convergence


def independent(chains=4, draws=200, quantities=6, seed=0):
    return torch.randn(chains, draws, quantities, generator=torch.Generator().manual_seed(seed))


def test_trace_shows_what_has_converged_least(chains):
    values = independent()
    values[0, :, 4] += 2
    values[1, :, 1] += 1
    ax = plots.trace(values, rows=2)
    rhat = diagnostics.rhat(values)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["quantity 4", "quantity 1"]
    assert [text.get_text() for text in ax.texts] == [f"R̂ {float(rhat[4]):.2f}", f"R̂ {float(rhat[1]):.2f}"]
    lane = ax.lines[0].get_ydata()  # the lowest lane comes first
    own = values[0, :, 4]
    low, high = values[..., 4].min(), values[..., 4].max()
    np.testing.assert_allclose(lane, 0.05 + 0.9 * (own - low) / (high - low), rtol=1e-5)
    assert len(plots.trace(chains[0]).get_yticklabels()) == 3  # weight, bias and the noise
    assert [label.get_text() for label in plots.trace(chains[0], names="bias").get_yticklabels()] == ["bias[0]"]


def test_rank_curves_stay_in_their_band_as_often_as_it_says():
    outside, (_, ax) = 0, pyplot.subplots()
    for seed in range(25):
        ax.clear()
        plots.rank(independent(3, 60, 1, seed=seed), seed=seed, ax=ax)
        band = {round(float(z), 9): float(y) for z, y in ax.collections[0].get_paths()[0].vertices if y > 0}
        curves = [zip(*line.get_data()) for line in ax.lines if line.get_label().startswith("chain")]
        points = [(round(float(z), 9), abs(float(y))) for curve in curves for z, y in curve]
        assert sum(z in band for z, _ in points) > 0.9 * len(points)
        outside += any(y > band.get(z, 1.0) + 1e-9 for z, y in points)
    assert outside <= 6  # Binomial(25, 0.05) exceeds it once in 7,000
    shifted = independent(3, 60, 1)
    shifted[1] += 1.5
    ax = plots.rank(shifted)
    width = ax.collections[0].get_paths()[0].vertices[:, 1].max()
    assert max(np.abs(line.get_ydata()).max() for line in ax.lines) > width
    lowest = next(line for line in ax.lines if line.get_label() == "chain 2")
    assert lowest.get_ydata().mean() < 0  # high values have few of the low ranks
    with pytest.raises(ValueError, match="at least two"):
        plots.rank(shifted[:1])


def test_energy_has_the_ebfmi_of_each_chain():
    walk = independent(2, 400, 1)[..., 0].cumsum(1)
    ax = plots.energy(walk)
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    for number, value in enumerate(diagnostics.ebfmi(walk).tolist(), start=1):
        assert f"E-BFMI of chain {number}: {value:.2f} (low)" in told
    assert not any("low" in text.get_text() for text in plots.energy(independent(2, 400, 1)).get_legend().get_texts())


def test_energy_needs_transitions(chains):
    with pytest.raises(TypeError, match="has no energies"):
        plots.energy(chains[0])


def test_autocorrelation_of_an_autoregression():
    noise = independent(2, 4000, 1)[..., 0]
    values = noise.clone()
    for t in range(1, 4000):
        values[:, t] = 0.8 * values[:, t - 1] + 0.6 * noise[:, t]
    ax = plots.autocorrelation(values, lags=10)
    drawn = [line.get_ydata() for line in ax.lines if line.get_label().startswith("chain")]
    assert len(drawn) == 2
    np.testing.assert_allclose(np.mean(drawn, 0), 0.8 ** np.arange(11), atol=0.1)
    with pytest.raises(ValueError, match="quantity=3 is not one of the 1"):
        plots.autocorrelation(values, quantity=3)
