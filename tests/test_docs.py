"""The documentation is true: its code runs, its links lead somewhere, its tables say what the classes say."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from typer.testing import CliRunner

import plausible as pl
from experiments.command import app as experiments
from plausible import methods, optimisers, schedules
from plausible.apps.cli import app
from plausible.apps.sweep import files as sweep_files
from plausible.core import serialise

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
FENCE = re.compile(
    r"^( *)```(?:\{[\w-]+\} *)?(\w*)\n(?::[^\n]*\n)*(.*?)^\1```$", re.MULTILINE | re.DOTALL
)  # cells of notebooks are code too


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    language: str
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start(3))
        found.append(Block(match.group(2), line, textwrap.dedent(match.group(3))))
    return found


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table behind a heading, its head left out."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    first = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in first[2:] if set(row[0]) != {"-"}]


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary working folder with the tables that the pages speak of; what a page registers or sets is forgotten."""
    generator = torch.Generator().manual_seed(0)
    for file, count in (("houses.csv", 60), ("new_houses.csv", 5)):
        rows = ["rooms,area,district,price"]
        for _ in range(count):
            rooms, area, noise = torch.rand(3, generator=generator).tolist()
            district = "north" if noise > 0.5 else "south"
            rows.append(f"{1 + int(5 * rooms)},{30 + 100 * area:.1f},{district},{100 + 300 * area + 20 * noise:.2f}")
        (tmp_path / file).write_text("\n".join(rows) + "\n")
    (tmp_path / "sweep.toml").write_text(sweep_files.example().replace("epochs = 50", "epochs = 3"))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    registers: tuple[dict[Any, Any], ...] = (methods.registry, serialise._classes, serialise._names)
    before = [dict(register) for register in registers]
    logger = logging.getLogger("plausible")
    level = logger.level
    yield tmp_path
    logger.setLevel(level)
    for register, content in zip(registers, before):
        register.clear()
        register.update(content)


def pretend_to_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons as the pages write them, without the hours of fitting: every cell has the same scores."""
    from plausible.apps.compare import example, runner

    if not (Path(os.environ.get("PLAUSIBLE_DATA") or "nowhere") / "uci").is_dir():
        pytest.skip("PLAUSIBLE_DATA has no folder uci")
    (folder / "study.toml").write_text(example())
    scores = dict.fromkeys(("log_likelihood", "rmse", "crps", "coverage_90", "quantile_calibration"), 0.5)
    cell = {"metrics": scores, "train_rows": 9, "test_rows": 1, "seconds": {"fit": 1.0}, "peak_bytes": 1}
    monkeypatch.setattr(runner, "_compute", lambda study, cells, jobs: ((c, dict(cell)) for c in cells))


# pages whose code takes long, as that of methods and tutorials
LONG = ("README.md", "command-line.md", "gallery.md", "mcmc.md", "pruning.md", "sweep.md", "tables.md")


def _marked(page: Path) -> Any:
    return (
        pytest.param(page, marks=pytest.mark.slow)
        if page.name in LONG or page.parent.name in ("methods", "tutorials")
        else page
    )


NEEDS = {"hugging-face.md": "transformers", "lightning.md": "lightning"}  # libraries that are not ours, beside which pages work


@pytest.mark.parametrize("page", [_marked(page) for page in PAGES if blocks(page)], ids=name)
def test_code_runs(page: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{NEEDS[page.name]} is not installed")
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(page):
        if block.language == "python":
            exec(compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True), module.__dict__)
        for command in block.code.splitlines() if block.language == "bash" else ():
            words = shlex.split(command, comments=True)
            if words[:2] == ["plausible", "compare"]:
                pretend_to_compare(own_folder, monkeypatch)
            if words[:1] == ["plausible"] and words[1] != "demo":
                result = CliRunner().invoke(app, words[1:])
                assert result.exit_code == 0, f"{name(page)}: {command}\n{result.output}"


FIRST = """
import importlib, os, sys
# once: the children share them
import torch, torch.distributions, torch.func, torch.utils.data, rich.table, safetensors.torch, scipy.stats, scipy.optimize, typer
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        import plausible
        try:
            importlib.import_module(module) if module.startswith("plausible.") else getattr(plausible, module)
        except BaseException as error:
            print(f"{module}: {error!r}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_any_name_can_be_the_first_that_a_program_uses() -> None:
    modules = [f"plausible.apps.cli.{module}" for module in ("training", "prediction", "view")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    names = [*pl._NAMES, *pl._MODULES, "MAP", "Laplace"]  # all methods are found in the same way
    command = [sys.executable, "-c", FIRST, *names, *modules]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


@pytest.mark.parametrize("script", EXAMPLES, ids=name)
def test_example_runs(script: Path, own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "sklearn" in script.read_text():
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    runpy.run_path(str(script), run_name="example")["main"](quick=True)
    assert capsys.readouterr().out


def test_every_example_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert [script.name for script in EXAMPLES if f"(../examples/{script.name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target.partition("#")[0]).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text())}
    assert [name(page) for page in PAGES if page not in linked and page != index] == []


def trees(page: Path) -> list[Path]:
    """The pages that a page has below it on the site."""
    entries = [
        line for body in re.findall(r"^:::\{toctree\}\n(.*?)^:::$", page.read_text(), re.M | re.S) for line in body.splitlines()
    ]
    files = [re.sub(r".*<(.*)>", r"\1", entry) for entry in entries if entry and not entry.startswith(":")]
    return [(page.parent / file).resolve().with_suffix(".md") for file in files]


def test_the_site_has_every_page_once() -> None:
    below = [child for page in PAGES for child in trees(page)]
    assert sorted(map(name, below)) == sorted(name(page) for page in PAGES if page != ROOT / "docs/index.md")


def test_docstrings_become_markup_for_the_site() -> None:
    conf = runpy.run_path(str(ROOT / "docs/conf.py"))
    assert (
        conf["as_restructured"]("`nn.Linear`s of p(w | D), w*: `a`, b_i")
        == "``nn.Linear``\\ s of p(w \\| D), w\\*: ``a``, b\\_i"
    )
    lines = ["One `x`.", "", "    y = a*b", "", "a: first,", "   and on", "b: second", "", "Args:", "    c: a *star*"]
    conf["docstring"](None, "", "", None, None, lines)
    expected = [
        "One ``x``.",
        "",
        "::",
        "",
        "        y = a*b",
        "",
        "a: first, and on",
        "",
        "b: second",
        "",
        "",
        "Args:",
        "    c: a \\*star\\*",
        "",
    ]
    assert lines == expected


def test_fidelity_opens_with_the_numbers_of_its_results() -> None:
    opening, *rest = (ROOT / "docs/fidelity.md").read_text().split("\n#### ")
    results = {part.partition("\n")[0]: part for part in rest}
    columns = (
        ("One input with a gap", 1),
        ("Two moons", 1),
        ("Boston, 1 × 50", 1),
        ("One input with a gap", 4),
        ("Boston, 1 × 50", -1),
    )
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|[^|]*\|$", opening.partition("\n## ")[0], re.M)
    assert len(rows) > 5
    for method, cells in rows:
        for (part, column), stated in zip(columns, cells.split("|"), strict=True):
            found = re.search(rf"^\| `{method}` \|(.*)\|$", results[part], re.M)[1].split("|")  # type: ignore[index]
            index = column if column < 0 else column - 1
            assert found[index].replace("*", "").split("±")[0].strip() == stated.strip(), (method, part)


def test_the_rooms_of_the_design_exist() -> None:
    page = ROOT / "docs/design.md"
    rows = {row[0]: row[1] for row in table(page, "The rooms")}
    listed = set()
    for cell, content in rows.items():
        for place in re.findall(r"`([^`]+)`", cell):
            assert (ROOT / place).exists(), f"{place} does not exist"
            listed.add(ROOT / place)
            inside = re.findall(r"`(\w+\.py)`", content) if place.endswith("/") else []
            assert [file for file in inside if not (ROOT / place / file).exists()] == []
    source = ROOT / "src/plausible"
    files = [path for path in source.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert [name(p) for p in files if p not in listed and p.name not in ("_version.py", "__main__.py")] == []


# What the tables say


def defaults(cls: type) -> dict[str, Any]:
    made = cls()
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(cls)}


def value(cell: str) -> Any:
    """A default as it is written in a table: `Cosine(5e-3)`."""
    known = {cls.__name__: cls for cls in methods.registry.values()}
    return eval(cell.strip("`"), {**known, **vars(schedules), **vars(optimisers), "math": math})


def test_what_is_generated_is_not_stale() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    assert generate.stale() == [], "run `make docs`"


def test_a_type_checker_knows_what_a_method_gives(tmp_path: Path) -> None:
    """What `make lint` asks of all pages: the right line is named where a kind of posterior lacks what others have."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import typed
    finally:
        sys.path.pop(0)
    start = (
        "import torch\nimport plausible as pl\nfrom plausible.metrics import rmse\ndata = torch.ones(9, 1), torch.ones(9, 1)\n"
    )
    page = tmp_path / "page.md"
    fits = {"NUTS()": "extend(3)", "Laplace()": "log_marginal()", '"map"': "predict(data[0])", "MAP()": "extend(3)"}
    fitted = [f"pl.fit(torch.nn.Linear(1, 1), data, pl.{m}).{call}\n".replace('pl."', '"') for m, call in fits.items()]
    page.write_text(f"# Page\n\n```python\n{start}{''.join(fitted)}```\n")
    (complaint,) = typed.complaints([page])
    assert complaint.startswith(f'{page}:11: Cannot access attribute "extend" for class "DrawsPosterior"')


def test_readme_lists_the_methods_that_are_registered() -> None:
    rows = table(ROOT / "README.md", "Methods")
    listed = {row[0].strip("`"): row[1] for row in rows}
    assert set(listed) == set(methods.registry)
    for key, cell in listed.items():
        cls, page = re.fullmatch(r"\[`(\w+)`\]\((.+)\)", cell).groups()  # type: ignore[union-attr]
        assert methods.registry[key].__name__ == cls
        assert getattr(pl, cls) is methods.registry[key]
        assert page == f"docs/methods/{key}.md"


@pytest.mark.parametrize("method", sorted(methods.registry))
def test_page_of_a_method_is_complete(method: str) -> None:
    page = ROOT / f"docs/methods/{method}.md"
    text = page.read_text()
    for heading in ("Target", "Update", "Cost", "When it fails", "Settings", "Snippet", "Citation"):
        assert f"\n## {heading}\n" in text, f"no heading {heading!r}"
    stated = {row[0].strip("`"): value(row[1]) for row in table(page, "Settings")}
    assert stated == defaults(methods.registry[method])


@pytest.mark.parametrize("room", ["likelihoods", "priors"])
def test_likelihoods_and_priors_are_listed_with_their_settings(room: str) -> None:
    home = importlib.import_module(f"plausible.{room}")
    base = {"likelihoods": "Likelihood", "priors": "Prior"}[room]
    classes = {
        key: cls
        for key, cls in vars(home).items()
        if isinstance(cls, type) and issubclass(cls, getattr(home, base)) and dataclasses.is_dataclass(cls)
    }
    classes = {key: cls for key, cls in classes.items() if not key.startswith("_")}
    readme = (ROOT / "README.md").read_text()
    rows = table(ROOT / "docs/likelihoods-and-priors.md", room.capitalize())
    stated = {cell.partition("(")[0]: cell for cell in (row[0].strip("`") for row in rows)}
    assert set(stated) == set(classes)
    for key, cls in classes.items():
        assert f"`{key}`" in readme
        fields = dataclasses.fields(cls)
        given = re.findall(r"(\w+)(?==)|\b(\w+)(?=[,)])", stated[key].partition("(")[2]) if fields else []
        if all(field.default is not dataclasses.MISSING for field in fields):
            assert eval(stated[key], {**vars(home), "math": math}) == cls()
            assert [first for first, _ in given if first] == [field.name for field in fields]
        else:
            assert [second for _, second in given] == [field.name for field in fields]


def test_arguments_of_fit_are_listed_with_their_defaults() -> None:
    stated = {row[0].strip("`"): row[1].strip("`") for row in table(ROOT / "docs/fitting.md", "Arguments")}
    known = inspect.signature(pl.fit).parameters
    assert list(stated) == list(known)
    for key, parameter in known.items():
        assert stated[key] == ("" if parameter.default is parameter.empty else repr(parameter.default).replace("'", '"'))


def test_readme_tables_of_posterior_and_predictive_name_what_there_is() -> None:
    posterior = pl.fit(torch.nn.Linear(1, 1), (torch.zeros(4, 1), torch.zeros(4, 1)), pl.MAP(epochs=1), compile=False)
    for row in table(ROOT / "README.md", "What a posterior gives"):
        for member, arguments in re.findall(r"`(\w+)(?:\(([\w, ]*)\))?`", row[0]):
            owners = [owner for owner in (posterior, pl.Predictive) if hasattr(owner, member)]
            assert owners or member == "Predictive", f"neither Posterior nor Predictive has {member!r}"
            expected = {word for word in arguments.split(", ") if word}
            assert not expected or expected <= set(inspect.signature(getattr(owners[0], member)).parameters)


def test_names_that_the_docs_speak_of_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in set(re.findall(r"\bpl\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", text)):
            if path.split(".")[0] == "Walk":
                continue  # the method that CONTRIBUTING.md writes
            found: Any = pl
            for part in path.split("."):
                assert hasattr(found, part), f"{name(page)} speaks of pl.{path}"
                found = getattr(found, part)


def test_command_line_page_has_every_option() -> None:
    text = (ROOT / "docs/command-line.md").read_text()
    group: Any = typer.main.get_command(app)
    known = {"--help", "--version", "--install-completion", "--show-completion"}
    known |= {
        option
        for parameter in typer.main.get_command(experiments).params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for command in group.commands.values():
        assert f"`plausible {command.name}" in text
        for parameter in command.params:
            if parameter.param_type_name == "option":
                options = {o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--")}
                known |= options
                missing = [option for option in options - {"--help"} if f"`{option}" not in text]
                assert missing == [], f"plausible {command.name} {missing}"
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert spoken - known == set()
