"""What the pages and the type checker are told about names and methods, read off the classes and their pages.

A method's page (`docs/methods/NAME.md`) is written by hand; from it and from the class come: the line under its title, the
settings and defaults of its table, the rows of the README and of the index, and the names in `src/plausible/__init__.pyi`. The
pages of the reference (`docs/api`) have the names, and the site fills in the docstrings.
`python docs/generate.py` writes them, `python docs/generate.py --check` says which are stale.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import plausible
from plausible import methods, optimisers, schedules

ROOT = Path(__file__).parents[1]
SHORT = "| what it is | cost | when to use it |\n|---|---|---|\n"


def own() -> dict[str, type]:
    """The library's methods, by name."""
    return {name: cls for name, cls in methods.registry.items() if cls.__module__.startswith("plausible.")}


def page_of(name: str) -> Path:
    return ROOT / "docs/methods" / f"{name}.md"


def in_short(name: str) -> list[str]:
    """What it is, what it costs, when to use it: the first table of its page."""
    text = page_of(name).read_text(encoding="utf-8")
    row = text.partition(SHORT)[2].partition("\n")[0]
    if not row:
        raise SystemExit(f"{page_of(name)} has no table that begins\n{SHORT}with one row")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def written(value: Any) -> str:
    """A default as it is written in a table."""
    if isinstance(value, float) and value and (abs(value) < 1e-2 or abs(value) >= 1e5):
        return f"{value:.12g}".replace("e-0", "e-").replace("e+0", "e")
    if isinstance(value, str):
        return f'"{value}"'
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = []
        for field in dataclasses.fields(value):
            given = getattr(value, field.name)
            default = field.default if field.default is not dataclasses.MISSING else None
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required:
                changed.append(written(given))
            elif given != default:
                changed.append(f"{field.name}={written(given)}")
        return f"{type(value).__name__}({', '.join(changed)})"
    return repr(value)


def read(cell: str) -> Any:
    """The value that a table states."""
    names = {cls.__name__: cls for cls in own().values()}
    return eval(cell.strip("`"), {**names, **vars(schedules), **vars(optimisers), "math": math})


def page(name: str, cls: type) -> str:
    """The page with its line of facts and its table of settings as the class has them; words are left alone."""
    text = page_of(name).read_text(encoding="utf-8")
    file = Path(inspect.getfile(cls)).relative_to(ROOT).as_posix()
    facts = f'`pl.{cls.__name__}`, name `"{name}"`, file `{file}`'
    text, there = re.subn(r"`pl\.\w+`, name `[^`]+`,\s+file `[^`]+`", lambda _: facts, text, count=1)
    if not there:
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n{facts}.\n{rest}"
    head = "| setting | default | meaning |\n|---|---|---|\n"
    before, _, rest = text.partition(f"## Settings\n\n{head}")
    rows, _, after = rest.partition("\n\n")
    known = {}
    for row in rows.splitlines():
        setting, default, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        known[setting.strip("`")] = (default, meaning)
    made, lines = cls(), []
    for field in dataclasses.fields(cls):
        value = getattr(made, field.name)
        default, meaning = known.get(field.name, ("", "…"))
        if not default or read(default) != value:
            default = f"`{written(value)}`"
        lines.append(f"| `{field.name}` | {default} | {meaning} |")
    return f"{before}## Settings\n\n{head}" + "\n".join(lines) + "\n\n" + after


def ordered(text: str, pattern: str) -> list[str]:
    """Names of methods in the order in which a page has them; new ones behind."""
    names = own()
    there = [name for name in re.findall(pattern, text, flags=re.M) if name in names]
    return there + sorted(set(names) - set(there))


def replaced(text: str, head: str, rows: list[str]) -> str:
    """The text with the rows of the table that begins with `head`."""
    before, found, rest = text.partition(head)
    if not found:
        raise SystemExit(f"no table that begins with {head!r}")
    after = rest[re.match(r"(\|.*\n)*", rest).end() :]  # type: ignore[union-attr]
    return before + head + "".join(f"{row}\n" for row in rows) + after


def readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    head = "| name | class | what it is | cost | when to use it |\n|---|---|---|---|---|\n"
    rows = []
    for name in ordered(text.partition(head)[2], r"^\| `([\w-]+)` \| \[`"):
        cells = [f"`{name}`", f"[`{own()[name].__name__}`](docs/methods/{name}.md)", *in_short(name)]
        rows.append("| " + " | ".join(cells).replace("](../", "](docs/") + " |")
    return replaced(text, head, rows)


def index() -> str:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    head = "| page | what it is |\n|---|---|\n"
    rows = []
    for name in ordered(text.partition(head)[2], r"\(methods/([\w-]+)\.md\)"):
        title = page_of(name).read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2]
        rows.append(f"| [{own()[name].__name__}](methods/{name}.md) | {title} |")
    text = replaced(text, head, rows)
    links = ", ".join(f"[{key}](api/{key}.md)" for key in reference() if key != "index")
    text = re.sub(r"(\| \[Reference\]\(api/index.md\) \| [^:|]*: ).* \|\n", lambda match: f"{match[1]}{links} |\n", text)
    tree = "".join(f"methods/{name}\n" for name in ordered(text.partition(head)[2], r"\(methods/([\w-]+)\.md\)"))
    return re.sub(r"(:caption: Methods\n\n).*?(:::)", rf"\g<1>{tree}\g<2>", text, flags=re.S)


def reference() -> dict[str, str]:
    """The pages of the reference by their names: the top of the library, the methods, and a page for each public module."""
    modules = [name for name in sorted(plausible._MODULES) if name != "methods"]
    made = {name: module_page(name) for name in modules}
    made["methods"] = api_page(
        "Methods",
        "Settings of `fit`; their pages say what they do.",
        [f"autoclass:: plausible.{cls.__name__}" for cls in own().values()],
    )
    names = [
        f"auto{'class' if inspect.isclass(getattr(plausible, name)) else 'function'}:: plausible.{name}"
        for name in sorted(plausible._NAMES, key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else name))
    ]
    tree = "\n".join(["methods", *modules])
    top = api_page("Reference", "What `import plausible as pl` gives, and the modules below it.", names)
    return {"index": f"{top}\n:::{{toctree}}\n:hidden:\n\n{tree}\n:::\n", **made}


FIRST = ("fit", "load", "Posterior", "Predictive", "Model", "Method", "prior_predictive", "fidelity", "sweep")


def module_page(name: str) -> str:
    """The public names of a module, those that it takes from others behind it included."""
    module = getattr(plausible, name)
    names = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    kinds = {}
    for key in names:
        value = getattr(module, key)
        top = key in plausible._NAMES and getattr(plausible, key) is value  # which is on the first page
        if callable(value) and not top:
            kinds[key] = f"auto{'class' if inspect.isclass(value) else 'function'}:: plausible.{name}.{key}"
    about = inspect.getdoc(module) or ""
    return api_page(name, about.partition("\n\n")[0].replace("\n", " "), list(kinds.values()))


def api_page(title: str, about: str, directives: list[str]) -> str:
    def written(directive: str) -> str:
        options = "\n   :members:" if directive.startswith("autoclass") else ""
        return f".. {directive}{options}\n"

    body = "\n".join(map(written, directives))
    return f"# {title}\n\n{about}\n\n```{{eval-rst}}\n{body}```\n"


def stub() -> str:
    """The public names for type checkers and editors, which do not see names that are imported when they are used."""
    lines = [
        '"""Generated by `python docs/generate.py`: the names that `plausible/__init__.py` imports when they are first used."""',
        "",
    ]
    lines.append("from plausible._version import __version__ as __version__")
    for name, home in sorted(plausible._MODULES.items()):
        package, _, module = f"plausible.{home}".rpartition(".")
        lines.append(f"from {package} import {module} as {name}")
    homes = {name: f"plausible.{home}" for name, home in plausible._NAMES.items()}
    homes |= {cls.__name__: cls.__module__ for cls in own().values()}
    lines += [f"from {home} import {name} as {name}" for name, home in sorted(homes.items())]
    return "\n".join(lines) + "\n"


def moved() -> dict[Path, str]:
    """What type checkers and editors read for `from plausible.metrics import …`, which is found elsewhere when it is run."""
    homes = {name: home for name, home in plausible._MODULES.items() if home != name}
    text = '"""Generated by `make docs`: where this module is found."""\n\nfrom plausible.{home} import *\n'
    return {ROOT / f"src/plausible/{name}.pyi": text.format(home=home) for name, home in homes.items()}


def files() -> dict[Path, str]:
    """Every file that is generated, wholly or in part, with what it should say."""
    pages = {page_of(name): page(name, cls) for name, cls in own().items()} | moved()
    pages |= {ROOT / "docs/api" / f"{name}.md": text for name, text in reference().items()}
    return {**pages, ROOT / "README.md": readme(), ROOT / "docs/index.md": index(), ROOT / "src/plausible/__init__.pyi": stub()}


def stale() -> list[str]:
    """The files that do not say what they should."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    changed = stale()
    if "--check" in sys.argv:
        raise SystemExit(f"stale, run python docs/generate.py: {', '.join(changed)}" if changed else 0)
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print("\n".join(changed) or "nothing has changed")
