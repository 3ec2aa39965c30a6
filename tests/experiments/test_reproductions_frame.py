"""Claims are judged by the numbers, cells are stored once, other settings are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import plausible as pl
from experiments import NAMES, load, mnist, running
from experiments.frame import SIZES, Bound, Cell, Effect, Part, Reproduction, Request, number, paired, paired_p_value
from experiments.running import Folder, run, wanted
from plausible.core import storage


def of(*values: float):
    return lambda results: list(values)


def test_a_bound_is_met_by_the_mean() -> None:
    judged = Bound("error", of(1.0, 2.0, 3.0), 1.9, high=2.0).judge({})
    assert (judged.verdict, judged.ours.value, judged.published, judged.expected) == ("met", 2.0, "1.9 %", "≤ 2 %")
    assert judged.ours.error == pytest.approx(1 / math.sqrt(3))
    assert Bound("error", of(1.0, 2.0, 3.1), high=2.0).judge({}).verdict == "not met"
    assert Bound("error", of(1.0), low=1.5).judge({}).verdict == "not met"
    assert Bound("error", of(2.0), low=1.5, high=2.5).judge({}).verdict == "met"
    assert Bound("error", of(math.nan), high=2.0).judge({}).verdict == "not met"


def test_too_few_seeds_or_no_limits_are_not_comparable() -> None:
    few = Bound("error", of(1.0, 1.0), high=2.0, seeds=5).judge({})
    assert (few.verdict, few.note) == ("not comparable", "2 of 5 seeds")
    assert Bound("error", of(1.0), 2.0).judge({}).verdict == "not comparable"
    assert Bound("error", lambda results: None, high=2.0).judge({}).verdict == "not run"


def test_the_paired_test_is_student_s() -> None:
    stats = pytest.importorskip("scipy.stats")
    for values in ([0.1, -0.3, -0.2, -0.5, 0.05], [3.0, 3.1, 2.9], [0.2, -0.2], [-1.0, -1.01, -0.99, -1.2]):
        assert paired_p_value(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)
    assert paired_p_value([1.0, 1.0]) == 0.0
    assert paired_p_value([0.0, 0.0]) == 1.0


def test_an_effect_holds_is_refuted_or_undecided() -> None:
    low, high, mixed = (-1.0, -1.1, -0.9), (1.0, 1.1, 0.9), (1.0, -1.1, 0.2)
    verdicts = [Effect("lower", of(*values), -1).judge({}).verdict for values in (low, high, mixed, (-1.0,), ())]
    assert verdicts == ["holds", "refuted", "undecided", "not comparable", "not run"]
    assert Effect("higher", of(*high), 1).judge({}).verdict == "holds"


def test_differences_are_paired_by_seed() -> None:
    results = {"a": {"errors": [1.0, 5.0]}, "b": {"errors": [0.5, 5.5]}}
    assert paired(number("a", "errors"), number("b", "errors"))(results) == [0.5, -0.5]
    assert paired(number("a", "errors"), number("c", "errors"))(results) is None
    assert number("a", "errors", "deeper")(results) is None


# Running


@dataclass(frozen=True)
class Setting:
    factor: float


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[Reproduction, list[str]]:
    """A reproduction whose cells note that they were run."""
    ran: list[str] = []

    def cell(name: str, factor: float) -> Cell:
        def work(settings: Setting, request: Request) -> dict:
            ran.append(name)
            assert request.checkpoint is not None
            request.checkpoint.mkdir()
            if settings.factor < 0:
                raise KeyboardInterrupt
            return {"numbers": [settings.factor * k for k in range(request.seeds)]}

        return Cell(name, work, {"reduced": Setting(factor)})

    part = Part("table", "1", "Numbers", {"reduced": ("one", "two")}, {"reduced": [Bound("one", number("one", "numbers"))]})
    made = Reproduction("made", "Made", "", (cell("one", 1.5), cell("two", 2.0), cell("broken", -1.0)), (part,), "made")
    monkeypatch.setattr(running, "load", lambda name: made)
    return made, ran


def test_finished_cells_are_not_run_again(counted: tuple[Reproduction, list[str]], tmp_path: Path) -> None:
    made, ran = counted
    folder = Folder(tmp_path, "made", "reduced")
    cells = wanted(made, "reduced", made.parts)
    assert cells == ["one", "two"]
    first = run(made, "reduced", cells, folder, Request(seeds=2))
    again = run(made, "reduced", cells, folder, Request(seeds=2))
    assert ran == ["one", "two"]
    assert first == again
    assert first["one"]["numbers"] == [0.0, 1.5]
    assert first["one"]["settings"] == {"factor": 1.5}
    assert set(first["one"]["versions"]) == {"plausible", "torch", "python", "device"}
    assert not (folder.path / "checkpoints" / "one").exists()
    run(made, "reduced", ["one"], folder, Request(seeds=2), overwrite=True)
    assert ran == ["one", "two", "one"]


def test_results_with_other_settings_are_refused(counted: tuple[Reproduction, list[str]], tmp_path: Path) -> None:
    made, ran = counted
    folder = Folder(tmp_path, "made", "reduced")
    run(made, "reduced", ["one"], folder, Request(seeds=2))
    with pytest.raises(ValueError, match=r"computed with seeds = 2, which is now 3.*--overwrite"):
        run(made, "reduced", ["one"], folder, Request(seeds=3))
    content = storage.read_json(folder.file("one"))
    storage.write_json(folder.file("one"), {**content, "settings": {"factor": 9.0}})
    with pytest.raises(ValueError, match=r"settings\.factor = 9\.0, which is now 1\.5"):
        run(made, "reduced", ["one"], folder, Request(seeds=2))
    folder.file("one").write_text("{}")
    with pytest.raises(ValueError, match="damaged or was changed"):
        run(made, "reduced", ["one"], folder, Request(seeds=2))
    assert ran == ["one"]


def test_an_interrupted_cell_leaves_its_checkpoint_and_no_result(
    counted: tuple[Reproduction, list[str]], tmp_path: Path
) -> None:
    made, _ = counted
    folder = Folder(tmp_path, "made", "reduced")
    with pytest.raises(KeyboardInterrupt):
        run(made, "reduced", ["broken"], folder, Request(seeds=2))
    assert (folder.path / "checkpoints" / "broken").is_dir()
    assert folder.results(made) == {}


def test_unknown_names_are_refused_with_those_that_exist(counted: tuple[Reproduction, list[str]]) -> None:
    made, _ = counted
    with pytest.raises(ValueError, match=r"made has no cell 'three'; it has: one, two, broken"):
        wanted(made, "reduced", (), ["three"])
    with pytest.raises(ValueError, match=r"cell 'one' of made has no full version"):
        wanted(made, "full", (), ["one"])
    with pytest.raises(ValueError, match=r"made has no table '7'; its tables are: 1"):
        made.part("table", "7")
    with pytest.raises(ValueError, match=r"made has no figure 'x'; it has no figures"):
        made.part("figure", "x")
    with pytest.raises(ValueError, match=r"there is no reproduction 'nobody'; there are: blundell-2015"):
        load("nobody")


@pytest.mark.parametrize("name", NAMES)
def test_every_part_asks_for_cells_that_exist_in_its_size(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert len({cell.name for cell in found.cells}) == len(found.cells)
    for part in found.parts:
        for size in SIZES:
            assert [c for c in part.cells[size] if size not in found.cell(c).settings] == []
            assert all(judged.verdict == "not run" for judged in part.judged(size, {}))


def test_settings_can_be_stored() -> None:
    for name in NAMES:
        for cell in load(name).cells:
            for settings in cell.settings.values():
                plain = running.plain(settings)
                assert "opaque" not in str(plain), f"{name}, {cell.name}"


def test_settings_differ_by_what_is_stored_and_not_by_fields_that_came_later() -> None:
    method = pl.MeanField(epochs=3, samples=2)
    settings = mnist.Classifier(method, units=400, prior=pl.priors.ScaleMixture(0.5, 1.0, 0.1))
    stored = running.plain(settings)
    assert running.changed(stored, settings) is None
    earlier = {**stored, "method": {key: value for key, value in stored["method"].items() if key != "antithetic"}}
    assert running.changed(earlier, settings) is None
    other = replace(settings, method=replace(method, antithetic=True))
    assert "no settings.method.antithetic, which is now True" in running.changed(earlier, other)
    assert "settings.units = 400, which is now 800" in running.changed(stored, replace(settings, units=800))
    assert "settings.method" in running.changed({**stored, "method": {"type": "MAP"}}, settings)
    deeper = {**stored, "prior": {**stored["prior"], "pi": 0.25}}
    assert "settings.prior.pi = 0.25, which is now 0.5" in running.changed(deeper, settings)
