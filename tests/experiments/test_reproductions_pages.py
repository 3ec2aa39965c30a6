"""Tables, figures and pages come from the stored results alone, and the pages in docs say what their results say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import NAMES, load, pages
from experiments.command import app
from experiments.frame import SIZES, Bound
from experiments.running import Folder, changed, run, wanted

Tiny = Callable[[str], Path]
DOCS = Path(__file__).parents[2] / "docs/reproductions"
LONG = (
    "concrete-dropout",
    "defaults",
    "dropouts",
    "fidelity",
    "laplace-lora",
    "neal",
    "neal-hmc",
    "permuted-mnist",
    "sparse",
    "two-moons-modes",
    "uci-hmc",
    "zoo",
)  # takes seconds even so
each_reproduction = pytest.mark.parametrize(
    "name",
    [  # each in a group of its own: one process trains what all tests of a name look at
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([pytest.mark.slow] if name in LONG else [])])
        for name in NAMES
    ],
)


@each_reproduction
def test_figures_are_drawn_from_stored_results(name: str, tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.figures import save

    found = load(name)
    results = Folder(tiny(name), name, "tiny").results(found)
    for part in found.parts:
        if part.draw is not None:
            (file,) = save(part.draw(results), tmp_path / part.key, ["svg"])
            assert len(file.read_bytes()) > 10_000


def test_figures_are_the_same_bytes_each_time(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from experiments.figures import save

    found = load("blundell-2015")
    results, draw = Folder(tiny(found.name), found.name, "tiny").results(found), found.part("figure", "regression").draw
    first = [path.read_bytes() for path in save(draw(results), tmp_path / "figure")]
    assert [path.read_bytes() for path in save(draw(results), tmp_path / "figure")] == first


@each_reproduction
def test_tables_have_a_row_for_each_claim(name: str, tiny: Tiny) -> None:
    found = load(name)
    results = Folder(tiny(name), name, "tiny").results(found)
    for part in found.parts:
        rows = [row for sheet in pages.sheets(part, "tiny", results)[:1] for row in sheet.rows]
        if part.claims.get("tiny"):
            assert len(rows) == len(part.claims["tiny"])
            missing = [cell for cell in part.cells["tiny"] if cell not in results]
            assert missing or all(row[-1] != "not run" for row in rows)


def as_reduced(tiny: Tiny, out: Path, name: str) -> None:
    shutil.copytree(tiny(name) / name / "tiny", out / name / "reduced")


def test_a_page_is_written_between_its_marks(tiny: Tiny, tmp_path: Path) -> None:
    as_reduced(tiny, tmp_path, "singh")
    as_reduced(tiny, tmp_path, "singh-faithful")
    page = tmp_path / "singh.md"
    page.write_text(f"# Study\n\nBefore.\n\n{pages.BEGIN}\nstale line\n{pages.END}\n\nAfter.\n")
    pages.write("singh", tmp_path)
    text = page.read_text()
    assert text.startswith("# Study\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    assert "stale line" not in text
    assert "## singh, reduced" in text
    assert "## singh-faithful, reduced" in text
    pages.write("singh", tmp_path)
    assert page.read_text() == text
    page.write_text("# No marks\n")
    with pytest.raises(ValueError, match="has no lines"):
        pages.write("singh", tmp_path)


@pytest.mark.parametrize("page", sorted({load(name).page for name in NAMES}))
def test_pages_in_docs_agree_with_their_results(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    inside = text.partition(pages.BEGIN)[2].partition(pages.END)[0]
    assert inside.strip() == pages.generated(page, DOCS), f"python -m experiments {page} --show --page --out docs/reproductions"


@pytest.mark.parametrize("name", NAMES)
def test_results_in_docs_have_the_settings_of_the_file(name: str) -> None:
    found = load(name)
    for size in SIZES:
        for cell, result in Folder(DOCS, name, size).results(found).items():
            assert changed(result["settings"], found.cell(cell).settings[size]) is None, f"{name}, {cell}, {size}"


# The command


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, " ".join(result.output.split())


def test_the_command_lists_what_there_is() -> None:
    code, text = command()
    assert code == 0
    assert all(name in text for name in NAMES)


def test_the_command_shows_what_is_stored(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    as_reduced(tiny, tmp_path, "blundell-2015")
    words = ("blundell-2015", "--show", "--out", str(tmp_path))
    code, text = command(*words, "--figure", "regression", "--page")
    assert code == 0, text
    for word in ("opens", "published", "verdict", "figure-regression.png", "blundell-2015.md"):
        assert word in text
    page = (tmp_path / "blundell-2015.md").read_text()
    assert "![The regression curve" in page
    assert "| BBB, scale mixture |" in page
    code, text = command(*words, "--table", "2")
    assert code == 0
    assert "rise at 50 %" in text
    assert "figure-" not in text


def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    for words, message in {
        ("nobody",): "there is no reproduction 'nobody'",
        ("blundell-2015", "--table", "9"): "its tables are: 1, 2",
        ("blundell-2015", "--figure", "9"): "its figures are: curves",
        ("blundell-2015", "--faithful"): "has one version only",
        ("blundell-2015", "--show"): "nothing is stored in",
        ("blundell-2015", "--cells", "mixture-401"): "has no cell 'mixture-401'",
        ("blundell-2015", "--cells", "mixture-1200"): "has no reduced version",
        ("singh", "--seeds", "0"): "--seeds must be at least 1",
        ("singh", "--jobs", "0"): "jobs must be at least 1",
        ("singh", "--device", "toaster"): "is not a device",
    }.items():
        code, text = command(*words, *out)
        assert code == 1, text
        assert message in text, text


# Of some only a few cells are run here, and of "last-layer", "laplace-lora" and "dropouts" none: they take many minutes each.
SOME_CELLS = {
    "fidelity": ("linear-reference", "linear-exact"),
    "immer-2021": ("iris",),
    "in-between": ("curve-limit", "curve-laplace"),
    "mackay": ("robot-5x1", "robot-8x1"),
    "neal": ("regression-3x1",),
    "neal-hmc": ("regression",),
    "robot-arm-hmc": ("robot",),
    "permuted-mnist": ("fine-tuning", "kronecker"),
    "singh": ("gaussian", "mixture"),  # the others have no bound to be held against
    "singh-faithful": ("gaussian", "mixture"),
    "small-net-evidence": ("one-unit-quadrature", "one-unit-smc"),
    "two-moons-modes": ("two-tempering",),
    "uci-hmc": ("boston-00",),
}
NEVER = (
    *("last-layer", "laplace-lora", "dropouts"),
    # these have tests of their own
    *("zoo", "toy-chains", "control-variates", "averaging", "sparse", "concrete-dropout", "uci-dropout"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEVER])
def test_reduced_runs_meet_their_own_expectation(name: str, data_folder: Path, tmp_path: Path) -> None:
    from experiments.frame import SEEDS, Request

    found, folder = load(name), Folder(tmp_path, name, "reduced")
    few = name in SOME_CELLS
    request = Request(seeds=1 if few and name != "mackay" else SEEDS["reduced"], device="cpu", compile=False, progress=False)
    cells = SOME_CELLS.get(name) or wanted(found, "reduced", ())
    results = run(found, "reduced", cells, folder, request)
    for part in found.parts:
        for claim in part.claims.get("reduced", ()):
            if isinstance(claim, Bound) and (claim.low, claim.high) != (None, None):
                judged = claim.judge(results)
                assert judged.verdict in (("met", "not run") if few else ("met",)), f"{part.key}: {judged}"


@each_reproduction
def test_figures_can_be_drawn_from_any_one_cell(name: str, tiny: Tiny) -> None:
    """As `--cells` leaves them."""
    pyplot = pytest.importorskip("matplotlib.pyplot")

    found = load(name)
    results = Folder(tiny(name), name, "tiny").results(found)
    for part in found.parts:
        for cell in [cell for cell in results if part.draw is not None and cell in part.cells.get("tiny", ())]:
            part.draw({cell: results[cell]})
            pyplot.close("all")
