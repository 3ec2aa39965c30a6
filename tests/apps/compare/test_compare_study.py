"""Studies: what a file may say, and what is refused with a message that names the place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from plausible import compare
from plausible.core.schedules import Cosine
from plausible.methods import MAP, SGLD, Ensemble

pytestmark = pytest.mark.usefixtures("data_folder")

GOOD = """
title = "Two"
datasets = ["yacht", "boston"]
splits = [0, 3]
reference = "deep"
[methods.map]
epochs = 5
prior_scale = 2.0
[methods.deep]
method = "ensemble"
members = 2
likelihood = "heteroscedastic"
hidden = [20, 10]
lr = {type = "schedules.Cosine", start = 0.01}
grid = {epochs = [2, 4], prior_scale = [0.5, 1.0]}
"""


def test_a_study_from_toml() -> None:
    study = compare.parse(GOOD)
    plain, deep = study.candidates
    assert plain.build() == MAP(epochs=5)
    assert plain.prior_scale == 2.0
    assert deep.build() == Ensemble(MAP(lr=Cosine(0.01)), members=2)
    assert deep.hidden == (20, 10)
    assert deep.variants() == [
        {"epochs": 2, "prior_scale": 0.5},
        {"epochs": 2, "prior_scale": 1.0},
        {"epochs": 4, "prior_scale": 0.5},
        {"epochs": 4, "prior_scale": 1.0},
    ]
    chosen = deep.with_({"epochs": 4, "prior_scale": 0.5})
    assert (chosen.build().method.epochs, chosen.prior_scale, chosen.hidden) == (4, 0.5, (20, 10))
    cells = list(study.cells())
    assert len(cells) == 8
    assert cells[0] == ("yacht", 0, "map")
    assert {cell.split for cell in cells} == {0, 3}
    assert study.against == "deep"


def test_all_published_splits_unless_told_otherwise() -> None:
    text = 'datasets = ["yacht"]\n[methods.map]\n'
    assert len(list(compare.parse(text).cells())) == 20
    assert len(list(compare.parse('splits = "all"\n' + text).cells())) == 20
    assert len(list(compare.parse("splits = 3\n" + text).cells())) == 3
    assert len(list(compare.parse('kind = "gap"\n' + text).cells())) == 6  # one for each input


def test_a_fingerprint_changes_with_what_matters_alone() -> None:
    study = compare.parse(GOOD)
    cell = next(study.cells())
    same = compare.parse(GOOD.replace('title = "Two"', 'title = "Other"').replace("[0, 3]", "[0, 3, 4]"))
    assert study.fingerprint(cell) == same.fingerprint(cell)
    other = compare.parse(GOOD.replace("epochs = 5", "epochs = 6"))
    assert study.fingerprint(cell) != other.fingerprint(cell)
    deep = cell._replace(label="deep")
    assert study.fingerprint(deep) == other.fingerprint(deep)
    assert study.fingerprint(cell) != compare.parse("seed = 1\n" + GOOD).fingerprint(cell)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets = [", "not valid TOML"),
        ("", "datasets is missing"),
        ("datasets = ['yacht']", "methods is missing"),
        ("datasets = []\n[methods.map]", "at least one"),
        ("datasets = 'yacht'\n[methods.map]", "must be a list of names"),
        ("datasets = ['yatch']\n[methods.map]", "'yatch' is not a UCI set.*yacht"),
        ("datasets = ['yacht', 'yacht']\n[methods.map]", "named twice"),
        ("dataset = ['yacht']\n[methods.map]", "dataset is not known.*datasets"),
        ("datasets = ['yacht']\n[methods.mop]", "methods.mop: unknown method 'mop'"),
        ("datasets = ['yacht']\n[methods.map]\nepoch = 3", "methods.map: MAP has no setting 'epoch'"),
        ("datasets = ['yacht']\n[methods.map]\nepochs = 0", "methods.map: MAP: epochs must be at least 1"),
        ("datasets = ['yacht']\n[methods.map]\nlikelihood = 'cauchy'", "methods.map.likelihood: 'cauchy' is not known"),
        ("datasets = ['yacht']\n[methods.map]\nprior_scale = 0", "prior_scale must be a positive number"),
        ("datasets = ['yacht']\n[methods.map]\nhidden = [0]", "hidden must be layer widths"),
        ("datasets = ['yacht']\n[methods.map]\nactivation = 'swish'", "activation: 'swish' is not known"),
        ("datasets = ['yacht']\n[methods.map]\ngrid = 3", "grid must be a table of lists"),
        ("datasets = ['yacht']\n[methods.map]\ngrid = {lr = []}", "grid.lr must be a list of values"),
        ("datasets = ['yacht']\n[methods.map]\ngrid = {lr = [0.1, -1]}", "methods.map:.*lr"),
        ("datasets = ['yacht']\n[methods.map]\nvalidation = 1.5\ngrid = {lr = [0.1]}", "validation must lie between"),
        ("datasets = ['yacht']\nsplits = 0\n[methods.map]", "splits must be"),
        ("datasets = ['yacht']\nsplits = [-1]\n[methods.map]", "splits must be whole numbers"),
        ("datasets = ['yacht']\nkind = 'tail'\n[methods.map]", "kind must be"),
        ("datasets = ['yacht']\nreference = 'x'\n[methods.map]", "reference: no method is called 'x'"),
        ("datasets = ['yacht']\nmethods = 3", "methods is missing"),
        ("title = 3\ndatasets = ['yacht']\n[methods.map]", "title must be text"),
        ("datasets = ['yacht']\nsplits = []\n[methods.map]", "splits must be whole numbers"),
        ("datasets = ['yacht']\n[methods.map]\nvalidation = 'a'", "validation must lie between"),
        ("datasets = ['yacht']\n[methods.map]\nprior_scale = 1e-160", "prior_scale must be a positive number"),
        ("datasets = ['yacht']\n[methods.map]\n[published.yacht]\nPBP = 3", "published.yacht.PBP must be a table"),
        ("datasets = ['yacht']\n[methods.map]\n[published.yacht]\nPBP = {mse = [1]}", "published.yacht.PBP.mse is not known"),
        ("datasets = ['yacht']\n[methods.map]\n[published.yacht]\nPBP = {rmse = 1}", "must be .mean. or"),
        ("datasets = ['yacht']\n[methods]\nmap = 3", "methods.map must be a table"),
    ],
)
def test_what_a_file_may_not_say(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"study.toml.*{message}"):
        compare.read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        compare.read(tmp_path / "binary.toml")
    with pytest.raises(FileNotFoundError):
        compare.read(tmp_path / "none.toml")


STUDIES = sorted((Path(__file__).parents[3] / "experiments" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_are_sound(path: Path) -> None:
    study = compare.read(path)
    assert study.candidate(study.against)
    assert set(study.published) == set(study.datasets)
    for candidate in study.candidates:
        assert isinstance(candidate.build(), MAP | SGLD | Ensemble)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_published_results(path: Path) -> None:
    """The means as printed, the standard deviations of deep ensembles as standard errors."""
    published = compare.read(path).published
    ensembles = {name: sources["deep ensembles"]["log_likelihood"] for name, sources in published.items()}
    wanted = {"boston": -2.41, "concrete": -3.06, "energy": -1.38, "wine": -0.94, "yacht": -1.18}
    assert {name: ensembles[name].value for name in wanted} == wanted
    assert ensembles["boston"].error == pytest.approx(0.25 / math.sqrt(20))
    sources = {"VI", "PBP", "MC dropout 2016", "MC dropout 2018", "deep ensembles", "DVI", "HMC"}
    assert all(set(row) == sources for row in published.values())
    assert "rmse" not in published["boston"]["HMC"]
