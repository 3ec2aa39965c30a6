"""The layers of the house: a module imports only from those nearer to `core`, lazily or not, and there is no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LAYERS = ("core", "blocks", "engine", "posteriors", "methods", "fitting", "testing", "analysis", "apps")
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.glob("plausible/**/*.py")
}


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Modules of the package that this one imports anywhere but for type checkers, with their lines."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    ignored = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "plausible":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else node.module), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "plausible")


@pytest.mark.parametrize("module", sorted(m for m in MODULES if layer(m) in LAYERS))
def test_a_layer_imports_only_from_those_nearer_to_the_core(module: str) -> None:
    own = LAYERS.index(layer(module))
    for target, line in imports(module):
        if layer(target) in LAYERS:
            assert LAYERS.index(layer(target)) <= own, f"{MODULES[module]}:{line} imports {target}, a layer above its own"
        elif target == "plausible" and module != "plausible.testing":
            assert layer(module) == "apps", f"{MODULES[module]}:{line} imports the public names: name the module instead"


def test_every_module_has_a_layer() -> None:
    assert {layer(m) for m in MODULES} <= {*LAYERS, "", "_version", "__main__"}


def test_there_is_no_circle_of_imports() -> None:
    graph = {m: {t for t, _ in imports(m) if t in MODULES and t != m} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' → '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_method_imports_another() -> None:
    """Bases are shared, methods are not; combinators (ensembles, Laplace, MILE, cycles, subspaces, …) take others, Auto chooses."""
    names = ("ensembles.ensemble", "laplace.laplace", "chains.mile", "automatic.auto", "stochastic_gradient.cyclical")
    names += ("subspaces.subspace", "ensembles.svgd", "ensembles.batch_ensemble", "ensembles.anchored")
    combining = {f"plausible.methods.{name}" for name in names}
    methods = {m for m in MODULES if layer(m) == "methods" and "@register" in MODULES[m].read_text(encoding="utf-8")}
    for module in sorted(methods - combining):
        others = {target for target, _ in imports(module)} & methods
        assert not others, f"{module} imports {', '.join(others)}"


def test_a_module_that_is_imported_by_its_other_name_still_finds_its_files() -> None:
    import plausible.datasets

    assert plausible.datasets.__spec__.name == "plausible.apps.datasets"
    assert len(plausible.datasets.CATALOGUE) > 5  # read from a file beside the module
