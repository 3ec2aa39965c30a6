"""What notebooks show of posteriors and predictives, and predictives as data frames and figures."""

from __future__ import annotations

import sys
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

import plausible as pl
from plausible.core.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson, Scaled
from plausible.posteriors.predictive import Predictive
from tests.core.test_tables import Cells

mpl.use("Agg")
QUIET: dict[str, Any] = {"progress": False, "compile": False}


def predictive(likelihood: Likelihood, *shape: int, rows: int = 20) -> Predictive:
    outputs = torch.randn(5, rows, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Predictive.from_functions(outputs, likelihood)


@pytest.fixture(autouse=True)
def no_figures_left() -> Any:
    yield
    pyplot.close("all")


# ---------------------------------------------------------------------------------------------------------------------
# Data frames


def test_frame_of_numbers() -> None:
    found = predictive(Gaussian(0.5), 1)
    frame = found.to_pandas(level=0.8)
    assert list(frame.columns) == ["mean", "std", "epistemic", "aleatoric", "lower", "upper"]
    low, high = found.interval(0.8)
    for name, value in (("mean", found.mean), ("epistemic", found.epistemic), ("lower", low), ("upper", high)):
        assert np.array_equal(frame[name], value[:, 0])
    assert np.allclose(frame["std"] ** 2, frame["epistemic"] + frame["aleatoric"])
    single = predictive(Gaussian(0.5)).to_pandas()
    assert list(single.columns) == list(frame.columns)


def test_frame_of_several_targets() -> None:
    found = predictive(HeteroscedasticGaussian(), 4)
    frame = found.to_pandas()
    assert list(frame.columns)[::6] == ["y0_mean", "y1_mean"]
    assert np.array_equal(frame["y1_upper"], found.interval(0.9)[1][:, 1])
    assert list(found.to_pandas(names=["u", "v"]).columns)[5:7] == ["u_upper", "v_mean"]
    square = predictive(Gaussian(0.5), 2, 3)
    assert np.array_equal(square.to_pandas()["y1_2_std"], square.std[:, 1, 2])
    with pytest.raises(ValueError, match="names has 1 name for 2 targets"):
        found.to_pandas(names=["u"])


def test_frame_of_classes() -> None:
    found = predictive(Categorical(), 3)
    frame = found.to_pandas()
    assert list(frame.columns) == ["prediction", "p_0", "p_1", "p_2", "entropy", "mutual_information"]
    assert np.array_equal(frame["prediction"], found.probs.argmax(-1))
    assert np.array_equal(frame[["p_0", "p_1", "p_2"]], found.probs)
    named = found.to_pandas(classes=["fig", "pear", "plum"])
    assert named.equals(found.to_pandas(classes=[["fig", "pear", "plum"]]))
    assert set(named["prediction"]) <= {"fig", "pear", "plum"}
    assert np.array_equal(named["p_plum"], found.probs[:, 2])
    places = predictive(Categorical(), 2, 3)
    assert np.array_equal(places.to_pandas()["y1_p_2"], places.probs[:, 1, 2])
    assert np.array_equal(places.to_pandas()["y1_entropy"], places.entropy[:, 1])


def test_frame_of_yes_and_no() -> None:
    found = predictive(Bernoulli(), 2)
    frame = found.to_pandas(classes=[["no", "yes"]] * 2)
    assert np.array_equal(frame["y1_p_yes"], found.probs[:, 1])
    assert frame.equals(found.to_pandas(classes=["no", "yes"]))
    assert np.array_equal(frame["y0_prediction"] == "yes", found.probs[:, 0] > 0.5)
    assert np.array_equal(frame["y1_mutual_information"], found.mutual_information[:, 1])
    assert list(predictive(Bernoulli()).to_pandas().columns)[:3] == ["prediction", "p_0", "p_1"]


def test_pandas_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas"):
        predictive(Gaussian(0.5), 1).to_pandas()


# ---------------------------------------------------------------------------------------------------------------------
# In notebooks


@pytest.mark.parametrize(
    ("likelihood", "shape", "note"),
    [
        (Gaussian(0.5), (1,), "90 % interval"),
        (Gaussian(0.5), (3,), "6 more columns"),
        (Scaled(Gaussian(0.5), 3.0, 2.0), (1,), "90 % interval"),
        (Poisson(), (1,), "90 % interval"),
        (Categorical(), (3,), "in nats"),
        (Categorical(), (40,), "in nats"),
        (Bernoulli(), (), "in nats"),
    ],
)
def test_predictives_show_their_first_rows(likelihood: Likelihood, shape: tuple[int, ...], note: str) -> None:
    found = predictive(likelihood, *shape)
    page = Cells(found._repr_html_())
    heads, *rows = page.rows
    assert len(rows) == 8
    assert len(heads) <= 13
    assert page.texts["caption"].startswith("Predictive: 20 inputs, 5 draws, ")
    assert note in page.texts["p"]
    assert "and 12 more rows" in page.texts["p"]
    frame = found.to_pandas()
    assert set(heads[1:]) <= set(frame.columns)
    column = heads[1]
    assert float(rows[3][1].replace("−", "-")) == pytest.approx(float(frame[column][3]), rel=0.01)


def test_few_rows_are_all_there_is_to_show() -> None:
    page = Cells(predictive(Gaussian(0.5), 1, rows=2)._repr_html_())
    assert len(page.rows) == 3
    assert "more" not in page.texts["p"]


@pytest.mark.parametrize("way", ["draws", "moments"])
def test_a_notebook_evaluates_no_more_than_it_shows(way: str) -> None:
    x, y = torch.randn(200, 2), torch.randn(200, 1)
    method = pl.SGLD(epochs=5) if way == "draws" else pl.Laplace(mode=pl.MAP(epochs=20, patience=None))
    posterior = pl.fit(nn.Linear(2, 1), (x, y), method, likelihood=pl.likelihoods.Gaussian(), **QUIET)
    found, whole = posterior.predict(x), posterior.predict(x)
    first = found.first(8)
    assert torch.equal(first.mean, whole.mean[:8])
    torch.testing.assert_close(first.functions, whole.functions[:, :8])
    torch.testing.assert_close(whole.first(8).interval()[0], whole.interval()[0][:8])  # also where all was evaluated before
    torch.testing.assert_close(whole.first(8).functions, whole.functions[:, :8])
    assert len(whole) == 200
    seen: list[int] = []
    source = found._source
    found._source = lambda rows: seen.append(rows.stop - rows.start) or source(rows)  # type: ignore[func-returns-value]
    found._repr_html_()
    assert max(seen, default=0) <= 8


def test_posteriors_show_what_they_are() -> None:
    x, y = torch.randn(30, 2), torch.randn(30, 1)
    posterior = pl.fit(nn.Linear(2, 1), (x, y), pl.MeanField(epochs=3), prior=pl.priors.Laplace(0.5), **QUIET)
    page = Cells(posterior._repr_html_())
    shown = {row[0]: row[1] for row in page.rows}
    assert page.texts["caption"].startswith("LawPosterior by MeanField")
    assert shown["random weights"] == "4"
    assert shown["prior"] == "Laplace(scale=0.5)"
    assert shown["epochs"] == "3"  # a setting, folded away
    assert ["weight", "1×2", "inferred, noise by local"] in page.rows
    assert page.texts["summary"] == "settings of the methodweights"
    assert "draws" not in shown
    chains = pl.fit(nn.Linear(2, 1), (x, y), "auto", time="1s", **QUIET)
    shown = {row[0]: row[1] for row in reversed(Cells(chains._repr_html_()).rows)}  # facts come before settings
    assert shown["draws"] == f"{len(chains):,}"
    assert shown["chosen because"] == chains.run["choice"]


@pytest.mark.parametrize("method", [pl.Ensemble(pl.MeanField(epochs=2), members=2), pl.Laplace(mode=pl.MAP(epochs=2))])
@pytest.mark.filterwarnings("ignore:the network is not at a mode")
def test_every_kind_can_be_shown(method: pl.Method, tmp_path: Any) -> None:
    net = nn.Linear(2, 1)
    posterior = pl.fit(net, (torch.randn(30, 2), torch.randn(30, 1)), method, **QUIET)
    posterior.save(tmp_path / "saved")
    for one in (posterior, pl.load(tmp_path / "saved", net), posterior.prune(0.5)):
        assert Cells(one._repr_html_()).rows


def test_summary_is_a_table() -> None:
    posterior = pl.fit(nn.Linear(2, 1), (torch.randn(30, 2), torch.randn(30, 1)), "map", **QUIET)
    summary = posterior.summary()
    assert [row[:2] for row in summary.rows] == [("weight", (1, 2)), ("bias", (1,)), ("likelihood.log_scale", ())]
    assert Cells(summary._repr_html_()).rows[1] == ["weight", "1×2", "inferred"]
    assert list(summary.to_pandas().columns) == ["weight", "shape", "status"]


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_numbers_over_an_input_and_over_rows() -> None:
    found = predictive(Gaussian(0.5), 2)
    x, y = torch.randn(20), torch.randn(20, 2)
    ax = found.plot(x, y, output=1)
    order = x.argsort()
    assert np.allclose(ax.lines[0].get_data(), [x[order], found.mean[order, 1]])
    assert np.allclose(ax.lines[1].get_data(), [x[order], y[order, 1]])
    low, high = found.interval(0.9)
    heights = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((float(low[:, 1].min()), float(high[:, 1].max())))
    rows = found.plot(y=y)
    order = found.mean[:, 0].argsort()
    assert np.allclose(rows.lines[0].get_ydata(), found.mean[order, 0])
    assert np.allclose(rows.lines[1].get_ydata(), y[order, 0])
    given = pyplot.subplots()[1]
    assert found.plot(ax=given) is given


def test_classes_are_stacked() -> None:
    found, x = predictive(Categorical(), 3), torch.randn(20)
    ax = found.plot(x, torch.arange(20) % 3)
    top = ax.collections[0].get_paths()[0].vertices
    assert top[:, 1].max() == pytest.approx(float(found.probs[:, 0].max()))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["class 0", "class 1", "class 2", "observed"]
    assert len(ax.collections[3].get_offsets()) == 20
    assert predictive(Categorical(), 30).plot().get_legend() is None
    binary = predictive(Bernoulli(), 2)
    assert binary.plot(output=1).collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(
        float(1 - binary.probs[:, 1].min())
    )


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), Categorical()])
def test_a_single_row_is_seen(likelihood: Likelihood) -> None:
    ax = predictive(likelihood, 2, rows=1).plot(y=[0] if isinstance(likelihood, Categorical) else torch.zeros(1, 2))
    assert np.ptp(ax.collections[0].get_paths()[0].vertices[:, 0]) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predictive(Gaussian(0.5), 1).plot(torch.ones(3)), "x has 3 inputs, the predictive has 20"),
        (lambda: predictive(Gaussian(0.5), 1).plot(y=torch.ones(3)), "y has 3 targets, the predictive has 20"),
        (lambda: predictive(Gaussian(0.5), 2).plot(output=2), "output=2"),
        (lambda: predictive(Gaussian(0.5), 1).plot(torch.ones(20, 2)), r"x has shape .* give the one column"),
        (lambda: predictive(Categorical(), 3).to_pandas(classes=["a", "b"]), "classes must be 3 labels, in the order"),
        (lambda: predictive(Bernoulli(), 2).to_pandas(classes=[["a", "b"]]), "2 labels for each of 2 targets"),
        (lambda: predictive(Gaussian(0.5), 1).first(0), "count must be a whole number of at least 1"),
        (lambda: predictive(Categorical(), 2, 3).plot(), "plot shows one target of classes"),
        (lambda: predictive(Gaussian(0.5), 1).to_pandas(level=90), "level must lie strictly between"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
