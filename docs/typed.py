"""Whether a type checker is content with the code of all pages and examples, as people have it in their editors: `make lint`.

`python docs/typed.py` puts the Python of each page into one file, line by line where the page has it, and lets pyright look at it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def code(page: Path) -> str:
    """The Python of a page, each line where it stands there."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        first = text.count("\n", 0, match.start(2))
        for k, line in enumerate(match.group(2).splitlines()):
            lines[first + k] = line.removeprefix(match.group(1))
    return "\n".join(lines)


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples/*.py")),
    ]


def complaints(looked_at: Sequence[Path]) -> list[str]:
    """What pyright says about these pages and scripts, as `page:line: message`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        places = {}
        for number, page in enumerate(looked_at):
            text = code(page) if page.suffix == ".md" else page.read_text(encoding="utf-8")
            if text.strip():
                path = folder / f"{page.stem.replace('-', '_')}_{number}.py"
                path.write_text(text, encoding="utf-8")
                places[path] = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        settings = {
            "typeCheckingMode": "standard",
            "extraPaths": [str(ROOT / "src"), str(ROOT)],
            "reportMissingModuleSource": False,
            "reportMissingImports": False,  # of libraries that a how-to is about and that need not be here
        }
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        tool = [
            sys.executable,
            "-m",
            "basedpyright",
            "--pythonpath",
            sys.executable,
            "--level",
            "error",
            "--outputjson",
            "-p",
            str(folder),
        ]
        found = subprocess.run(tool, capture_output=True, text=True, check=False)
        try:
            report = json.loads(found.stdout)
        except json.JSONDecodeError:
            raise SystemExit(f"basedpyright did not run: {found.stderr or found.stdout}") from None
    if report["summary"]["filesAnalyzed"] < len(places):
        raise SystemExit(f"basedpyright looked at {report['summary']['filesAnalyzed']} of {len(places)} files")
    errors = [one for one in report["generalDiagnostics"] if one["severity"] == "error"]
    return [f"{places[Path(e['file'])]}:{e['range']['start']['line'] + 1}: {e['message']}" for e in errors]


if __name__ == "__main__":
    said = complaints(pages())
    print("\n".join(said) or "a type checker is content with every page and example")
    raise SystemExit(bool(said))
