import json
from dataclasses import dataclass
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import plausible as pl
from plausible.apps.cli import app, demo, demo_plots

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Counts tags, keeps images, addresses and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.addresses, self.words = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(found)
        self.addresses += [found[name] for name in ("src", "srcset", "href") if name in found]

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


def test_the_page_stands_alone(quick):
    assert quick.result.exit_code == 0
    assert quick.result.stdout.splitlines()[-1] == f"open {quick.out / 'index.html'} in a browser"
    assert quick.page.open == []
    assert quick.page.addresses
    assert all(address.startswith("data:image/png;base64,") for address in quick.page.addresses)
    source = (quick.out / "index.html").read_text(encoding="utf-8")
    assert "http://" not in source
    assert "https://" not in source
    assert "[[" not in source
    good = 4  # MAP, ensemble, SGLD and its chains: bands, digits and reliability for each, entropies once
    assert len(quick.page.images) >= 3 * good + 1
    assert all(len(image["alt"]) > 20 for image in quick.page.images)
    pictures = sorted(path.name for path in quick.out.glob("*.png"))
    assert len(pictures) == len(quick.page.images)
    assert json.loads((quick.out / demo.MARKER).read_text())["files"] == sorted(["index.html", *pictures])


def test_every_method_is_shown_and_a_failing_one_stops_nothing(quick):
    words, printed = " ".join(quick.page.words), quick.result.stdout
    for problem in (demo.regression(0, True), demo.digits(0, True)):
        labels = [entry.label for entry in demo.entries(problem.known)]
        assert len(labels) == len(problem.known)
        for label in labels:
            assert f"{problem.key}: {label}, " in printed
            assert label in words
    assert printed.count("broken failed: RuntimeError: no luck with a < b") == 2
    assert words.count("failed: RuntimeError: no luck with a < b") == 2


def test_a_point_has_no_epistemic_part_and_an_ensemble_has_more_in_the_gap(quick):
    (problem, outcomes), _ = quick.results
    found = {outcome.entry.key: outcome for outcome in outcomes}
    assert float(problem.train[0].abs().min()) >= demo.GAP
    assert found["map"].values["epistemic_gap"] == 0
    assert found["ensemble"].values["epistemic_gap"] > 1.5 * found["ensemble"].values["epistemic_data"] > 0
    low, inner_low, inner_high, high = found["sgld-chains"].arrays["quantiles"]
    assert (low < inner_low).all()
    assert (inner_high < high).all()


def test_scores_of_classes_agree_with_scikit_learn():
    from sklearn.metrics import log_loss, roc_auc_score

    generator = torch.Generator().manual_seed(0)
    draws = 1.5 * torch.randn(7, 200, 10, generator=generator, dtype=torch.float64)
    truth = draws.mean(0).argmax(-1)
    truth[::3] = torch.randint(10, (67,), generator=generator)
    predictive = pl.Predictive.from_functions(draws, pl.likelihoods.Categorical())
    posterior = SimpleNamespace(predict=lambda x: predictive)
    values, arrays = demo._judge_digits(SimpleNamespace(test=(None, truth)), posterior)
    assert values["log_likelihood"] == pytest.approx(-log_loss(truth, arrays["probs"], labels=range(10)))
    assert values["found"] == pytest.approx(roc_auc_score(arrays["wrong"], arrays["entropy"]))
    assert values["error"] == pytest.approx(arrays["wrong"].mean())


@pytest.mark.parametrize(("right", "count"), [(0, 1), (3, 8), (8, 8), (600, 613)])
def test_the_interval_of_a_share_is_wilsons(right, count):
    from scipy.stats import binomtest

    expected = binomtest(right, count).proportion_ci(0.9, method="wilson")
    assert demo_plots.wilson(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_zero_is_written_without_a_sign():
    problem = SimpleNamespace(columns=(demo.Column("", "a", "{:.2f}"), demo.Column("", "b", "{:.1%}")))
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


def test_an_earlier_page_is_replaced_and_files_of_others_stay(tmp_path):
    out, new = tmp_path / "page", tmp_path / "new"
    out.mkdir()
    for name in ("index.html", "old.png", "notes.txt"):
        (out / name).write_text("before")
    (out / demo.MARKER).write_text(json.dumps({"files": ["index.html", "old.png", "../escape"]}))
    earlier = demo._claim(out, force=False)
    assert earlier == ["index.html", "old.png"]
    new.mkdir()
    for name in ("index.html", "new.png", demo.MARKER):
        (new / name).write_text("after")
    demo._publish(new, out, ["index.html", "new.png"], earlier)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "index.html": "after",
        "new.png": "after",
        demo.MARKER: "after",
        "notes.txt": "before",
    }


def test_what_is_missing_is_said_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs scikit-learn: pip install 'plausible\[all\]'"):
        demo.run(tmp_path / "page")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="seed"):
        demo.run(tmp_path / "page", seed=-1)
    assert list(tmp_path.iterdir()) == []
