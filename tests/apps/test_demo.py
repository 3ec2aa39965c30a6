from dataclasses import dataclass
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible.apps.cli import app, demo
from plausible.apps.report.statistics import wilson

pytestmark = pytest.mark.xdist_group("demo")

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Counts tags, keeps images, addresses and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.charts, self.addresses, self.words = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(found)
        if tag == "svg":
            self.charts.append(found)
        self.addresses += [found[name] for name in ("src", "srcset", "href") if name in found]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run, with a registered method that fails."""

    @dataclass(frozen=True)
    class Broken(pl.Method):
        """Fails as soon as it is asked."""

        name: ClassVar[str] = "broken"

        def plan(self, num_data, per_epoch=None):
            raise RuntimeError("no luck with a < b")

    out = tmp_path_factory.mktemp("demo") / "page"
    threads, noise = torch.get_num_threads(), torch.get_rng_state()
    results = []

    def remember(problem, *rest):
        results.append((problem, fit_all(problem, *rest)))
        return results[-1][1]

    fit_all, demo.fit_all = demo.fit_all, remember
    try:
        result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(out)], catch_exceptions=False)
    finally:
        demo.fit_all = fit_all
        del pl.methods.registry["broken"]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), noise)
    return SimpleNamespace(out=out, result=result, results=results, page=Page((out / "index.html").read_text(encoding="utf-8")))


@pytest.mark.slow
def test_the_page_stands_alone(quick):
    assert quick.result.exit_code == 0
    assert quick.result.stdout.splitlines()[-1] == f"open {quick.out / 'index.html'} in a browser"
    assert quick.page.open == []
    assert quick.page.addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in quick.page.addresses)
    source = (quick.out / "index.html").read_text(encoding="utf-8")
    assert "http://" not in source
    assert "https://" not in source
    assert "{{" not in source
    good = 4  # MAP, ensemble, SGLD and its chains: bands, digits and reliability for each, entropies once
    assert len(quick.page.charts) >= 2 * good + 1
    assert len(quick.page.images) >= 10 * good
    assert all(len(chart["aria-label"]) > 20 for chart in quick.page.charts)
    assert all(len(image["alt"]) > 20 for image in quick.page.images)
    assert [path.name for path in quick.out.iterdir()] == ["index.html"]


@pytest.mark.slow
def test_every_method_is_shown_and_a_failing_one_stops_nothing(quick):
    words, printed = " ".join(quick.page.words), quick.result.stdout
    for problem in (demo.Regression(0, True), demo.Digits(0, True)):
        assert len(problem.entries) >= 7
        for label in (entry.label for entry in problem.entries):
            assert f"{problem.key}: {label}, " in printed
            assert label in words
    assert printed.count("broken failed: RuntimeError: no luck with a < b") == 2
    assert words.count("failed: RuntimeError: no luck with a < b") == 2


@pytest.mark.slow
def test_a_point_has_no_epistemic_part_and_an_ensemble_has_more_in_the_gap(quick):
    (problem, outcomes), _ = quick.results
    found = {outcome.entry.key: outcome for outcome in outcomes}
    assert float(problem.train[0].abs().min()) >= demo.GAP
    assert found["map"].values["epistemic_gap"] == 0
    assert found["ensemble"].values["epistemic_gap"] > 1.5 * found["ensemble"].values["epistemic_data"] > 0
    low, inner_low, inner_high, high = found["sgld-chains"].arrays["quantiles"]
    assert (low < inner_low).all()
    assert (inner_high < high).all()


@pytest.mark.slow
def test_what_fails_is_shown_last_and_what_was_chosen_is_said(quick):
    for problem, outcomes in quick.results:
        assert outcomes[-1].entry.key == "broken"
        marks = [2 if each.error else int(bool(each.fault)) for each in outcomes]
        assert marks == sorted(marks)
        failing = [each for each in outcomes if each.fault]
        for each in failing:
            assert problem.fault(each.values) == each.fault
            assert f"{each.entry.label} fails here: {each.fault}" in " ".join(quick.result.stdout.split("\n"))
            assert f" fails here: {each.fault}." in " ".join(quick.page.words)
        chosen = next(each for each in outcomes if each.entry.key == "auto")
        assert chosen.choice in quick.result.stdout
    assert any(each.entry.key == "map" and each.fault for each in quick.results[0][1])  # one network, no epistemic part


@pytest.mark.slow
def test_the_page_opens_with_the_name_and_the_figure_of_what_was_chosen(quick):
    source = (quick.out / "index.html").read_text(encoding="utf-8")
    assert source.index("<h1>plausible</h1>") < source.index('<figure class="opening">') < source.index('<main id="main">')
    outcome = next(each for each in quick.results[0][1] if each.entry.key == "auto")
    assert outcome.choice
    assert outcome.choice in source.partition('<main id="main">')[0]


def test_faults_are_what_the_rules_say():
    good = {"rmse_data": 0.22, "coverage_gap": 0.9, "epistemic_data": 0.1, "epistemic_gap": 0.9}
    assert demo.Regression.fault(good) == ""
    assert "did not learn" in demo.Regression.fault(good | {"rmse_data": 0.41})
    assert "hold 64 % of the new points" in demo.Regression.fault(good | {"coverage_gap": 0.64})
    assert "no less sure in the gap" in demo.Regression.fault(good | {"epistemic_gap": 0.14})
    assert "no less sure in the gap" in demo.Regression.fault(good | {"epistemic_data": 0.0, "epistemic_gap": 0.0})
    fine = {"ece": 0.03, "strange": 0.97}
    assert demo.Digits.fault(fine) == ""
    assert "off by 0.11" in demo.Digits.fault(fine | {"ece": 0.11})
    assert "chance of 0.60" in demo.Digits.fault(fine | {"strange": 0.6})


def test_digits_that_are_never_shown_are_in_no_training_and_no_test():
    problem = demo.Digits(0, False)
    assert int(problem.train[1].max()) == int(problem.test[1].max()) == 7
    assert set(problem.strange[1].tolist()) == {8, 9}
    assert (
        len(problem.train[1]) + len(problem.test[1]) + len(problem.strange[1]) < 1797
    )  # 8 and 9 among the first 1,000 are dropped
    kept = torch.cat([problem.train[0], problem.test[0], problem.strange[0]])
    assert len(kept.unique(dim=0)) == len(kept)


def test_scores_of_classes_agree_with_scikit_learn():
    from sklearn.metrics import log_loss, roc_auc_score

    generator = torch.Generator().manual_seed(0)
    draws = 1.5 * torch.randn(7, 200, 10, generator=generator, dtype=torch.float64)
    truth = draws.mean(0).argmax(-1)
    truth[::3] = torch.randint(10, (67,), generator=generator)
    likelihood = pl.likelihoods.Categorical()
    predictive, flat = (pl.Predictive.from_functions(f, likelihood) for f in (draws, 0.8 * draws[:, :50]))
    posterior = SimpleNamespace(predict=lambda x: predictive if x == "test" else flat)
    values, arrays = demo.Digits.judge(SimpleNamespace(test=("test", truth), strange=("strange", None)), posterior)
    entropies = np.concatenate([arrays["entropy"], arrays["entropy strange"]])
    assert values["strange"] == pytest.approx(roc_auc_score([0] * 200 + [1] * 50, entropies))
    assert 0.5 < values["strange"] < 1
    assert values["log_likelihood"] == pytest.approx(-log_loss(truth, arrays["probs"], labels=range(10)))
    assert values["found"] == pytest.approx(roc_auc_score(arrays["wrong"], arrays["entropy"]))
    assert values["error"] == pytest.approx(arrays["wrong"].mean())


@pytest.mark.parametrize(("right", "count"), [(0, 1), (3, 8), (8, 8), (600, 613)])
def test_the_interval_of_a_share_is_wilsons(right, count):
    from scipy.stats import binomtest

    expected = binomtest(right, count).proportion_ci(0.9, method="wilson")
    assert wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_zero_is_written_without_a_sign():
    problem = SimpleNamespace(columns={"A": ("a", "{:.2f}"), "B": ("b", "{:.1%}")})
    assert demo.cells(problem, SimpleNamespace(values={"a": -0.001, "b": 0.5})) == ["0.00", "50.0 %"]
    assert demo.cells(problem, SimpleNamespace(values={"a": -0.2, "b": np.nan})) == ["−0.20", "–"]


def test_a_folder_of_others_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    with pytest.raises(FileExistsError, match=r"holds files that the demo did not write.*--overwrite"):
        demo.run(tmp_path, quick=True)
    with pytest.raises(FileExistsError, match="is a file"):
        demo.run(tmp_path / "thesis.txt", quick=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


@pytest.mark.slow
def test_an_earlier_page_is_replaced_and_files_of_others_stay(quick):
    (quick.out / "notes.txt").write_text("mine")
    demo._claim(quick.out / "index.html", force=False)  # ours
    (quick.out / "index.html").rename(quick.out / "page.html")
    with pytest.raises(FileExistsError, match="did not write"):
        demo._claim(quick.out / "index.html", force=False)
    demo._claim(quick.out / "index.html", force=True)
    (quick.out / "page.html").rename(quick.out / "index.html")
    assert (quick.out / "notes.txt").read_text() == "mine"


def test_what_is_missing_is_said_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs scikit-learn: pip install 'plausible\[all\]'"):
        demo.run(tmp_path / "page")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="seed"):
        demo.run(tmp_path / "page", seed=-1)
    assert list(tmp_path.iterdir()) == []
