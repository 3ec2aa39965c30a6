"""The picture of the README, drawn by the code beside it: `python docs/figures.py` writes docs/figures/gap.png."""

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


def first_example() -> str:
    """The code beside the picture."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def main() -> None:
    matplotlib.use("Agg")
    out = ROOT / "docs/figures/gap.png"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), matplotlib.rc_context(STYLE):
        exec(compile(first_example(), "README.md", "exec"), {})
        out.write_bytes(Path("gap.png").read_bytes())
    print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
