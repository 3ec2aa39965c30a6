"""How Sphinx makes the site of these pages: `make docs`. The source is the whole repository, so that links are the same on disk."""

from __future__ import annotations

import re
from typing import Any

import plausible

project = "plausible"
copyright = "the authors of plausible"
release = version = plausible.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = ["docs/reproductions/*/**", "docs/sweeps/**", "build", ".venv", "src", "tests"]
root_doc = "docs/index"
nitpicky = False

html_theme = "furo"
html_title = "plausible"
html_static_path = ["static"]
html_extra_path = ["static/top"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f99", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#8cc4f2", "color-brand-content": "#8cc4f2"},
}
html_show_sphinx = False

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = "build/notebooks"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
copybutton_exclude = ".linenos, .gp, .go"


UNSEEN = "\\ "


def as_restructured(text: str) -> str:
    """Words of a docstring, which are plain text with `code` in single quotes, in the markup that autodoc reads."""
    pieces = re.split(r"(`+[^`]+`+)", text)
    for k, piece in enumerate(pieces):
        if k % 2:
            # markup needs a border: a break that is not seen stands between a literal and the letters of its word
            before, after = pieces[k - 1][-1:].isalnum(), pieces[k + 1][:1].isalnum()
            pieces[k] = f"{UNSEEN * before}``{piece.strip('`')}``{UNSEEN * after}"
        else:
            pieces[k] = re.sub(r"([\\*|_])", r"\\\1", piece)
    return "".join(pieces)


def laid_out(paragraph: list[str]) -> list[str]:
    """A paragraph: formulas that are set off stay as they stand, and of terms with what they mean each gets a line of its own."""
    if all(line.startswith(" ") for line in paragraph):
        return ["::", "", *(f"    {line}" for line in paragraph)]
    if re.fullmatch(r"(Args|Raises|Returns):", paragraph[0]):
        return [re.match(" *", line)[0] + as_restructured(line.strip()) for line in paragraph]  # type: ignore[index]
    items = re.sub(r"\n +", " ", "\n".join(paragraph)).split("\n")
    apart = len(items) < len(paragraph)
    return [line for item in items for line in (as_restructured(item), *([""] if apart else []))]


def docstring(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    if lines and lines[0].startswith("Alias for field number"):  # said by Python of every named tuple, and of no use
        lines.clear()
    paragraphs = [part.split("\n") for part in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")) if part.strip()]
    lines[:] = [line for paragraph in paragraphs for line in (*laid_out(paragraph), "")]


def not_ours(_app: Any, _what: str, name: str, _object: Any, skip: bool, _options: Any) -> bool | None:
    """scikit-learn gives its estimators methods about metadata, whose docstrings are its own."""
    return True if re.fullmatch(r"set_\w+_request|get_metadata_routing", name) else skip or None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", not_ours)
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon looks for sections
