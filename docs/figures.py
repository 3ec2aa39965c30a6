"""Pictures drawn by the code beside them: `python docs/figures.py` writes those of the README and of the page on geometry."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import matplotlib

ROOT = Path(__file__).parents[1]
STYLE = {
    "figure.figsize": (9, 3.8),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=["#1f5f99", "#24292f"]),
    "legend.frameon": False,
    "legend.loc": (0.22, 0.68),
    "legend.fontsize": 11,
    "legend.labelspacing": 0.25,
}


PICTURES = (("README.md", "gap.png", 1), ("docs/geometry.md", "planes.png", 1), ("docs/geometry.md", "curve.png", 2))
"""Page, picture, and how many examples, from the first on, are run to draw it."""


def examples(page: str, count: int) -> str:
    """The code beside the picture, with what stands before it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)[:count])


def main() -> None:
    matplotlib.use("Agg")
    for page, name, count in PICTURES:
        out = ROOT / "docs/figures" / name
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), matplotlib.rc_context(STYLE):
            exec(compile(examples(page, count), page, "exec"), {})
            out.write_bytes(Path(name).read_bytes())
        print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
