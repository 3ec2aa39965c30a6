"""Tables: the same rows as text, on a terminal, in a notebook, in Markdown and as a data frame."""

from __future__ import annotations

import io
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from plausible.core.tables import LONG, Table

TABLE = Table(
    ("name", "count", "shape", "value"),
    [("a|b", 12_345, (3, 2), 0.123456), ("<i>", None, (), -2.0), ("[b]c", 7, (4,), float("nan"))],
    "A title & more",
    words=("name",),
    note="a note",
)


class Cells(HTMLParser):
    """The cells of the rows of a page, its caption and paragraphs."""

    def __init__(self, page: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.classes: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.classes.append(dict(attributes).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def test_text_is_aligned() -> None:
    assert str(TABLE).splitlines() == [
        "A title & more",
        "name   count   shape         value",
        "a|b   12,345     3×2         0.123",
        "<i>           scalar            −2",
        "[b]c       7       4  not a number",
        "a note",
    ]
    assert repr(TABLE) == str(TABLE)  # what an interpreter shows
    assert len(TABLE) == 3


def test_html_has_the_same_cells_and_nothing_of_them_is_markup() -> None:
    page = Cells(TABLE._repr_html_())
    assert page.rows == [list(TABLE.heads), *TABLE.cells]
    assert (page.texts["caption"], page.texts["p"]) == (TABLE.title, TABLE.note)
    assert page.classes[::4] == ["words"] * 4
    long = Cells(Table(("a",), [("x " * LONG,)])._repr_html_())
    assert long.classes == ["", " long"]
    bare = Table(("", ""), [("a", 1)]).html()
    assert "thead" not in bare
    assert "caption" not in bare


def test_markdown_keeps_its_columns() -> None:
    lines = TABLE.to_markdown().splitlines()
    assert lines[:3] == ["| name | count | shape | value |", "| --- | ---: | ---: | ---: |", "| a\\|b | 12,345 | 3×2 | 0.123 |"]


def test_on_a_terminal() -> None:
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(TABLE)
    shown = capture.get()
    for words in ("A title & more", "[b]c", "12,345", "scalar", "a note"):
        assert words in shown


def test_data_frame_has_the_values_themselves() -> None:
    frame = TABLE.to_pandas()
    assert list(frame.columns) == list(TABLE.heads)
    assert frame["value"].iloc[0] == 0.123456
    assert frame["shape"].iloc[0] == (3, 2)


def test_pandas_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas needs pandas .*pip install 'plausible\[tables\]'"):
        TABLE.to_pandas()


def test_tables_obey_no_escape_codes() -> None:
    table = Table(("name\x1b]0;x\x07",), [("\x1b[31mred",)], words=("name",))
    rendered = Console(file=io.StringIO(), force_terminal=True)
    rendered.print(table)
    for text in (str(table), rendered.file.getvalue()):  # type: ignore[attr-defined]
        assert "\\x1b[31mred" in text
        assert "\x1b[31m" not in text
        assert "\x07" not in text
