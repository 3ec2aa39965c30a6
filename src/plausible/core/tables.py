"""Results as tables: printed as text, on a terminal by `rich`, in notebooks as HTML, in Markdown, and as data frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from plausible.core.words import number, printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

# Inherits colours, so that it suits light and dark notebooks; names begin with those of the library, for pages share one style.
STYLE = """<style>
.plausible table {border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .3em 0}
.plausible caption {caption-side: top; text-align: left; font-weight: 600; padding: .2em .6em; color: inherit; white-space: nowrap}
.plausible th, .plausible td {padding: .15em .6em; text-align: right; vertical-align: top; white-space: nowrap; border: 0}
.plausible thead th {border-bottom: 1px solid; font-weight: 600}
.plausible .words {text-align: left}
.plausible .long {white-space: normal; min-width: 20em}
.plausible p, .plausible summary {margin: .2em .6em; opacity: .75}
</style>"""

LONG = 60
"""Letters of a cell from which it may be broken into lines."""


class Tabular(ABC):
    """Something that is shown as a table: `print` it, let a notebook show it, or take it as a data frame."""

    @abstractmethod
    def as_table(self) -> Table:
        """What is shown."""

    def __str__(self) -> str:
        return self.as_table().text()

    def __rich__(self) -> RichTable:
        from rich.text import Text  # cells are no markup: names have brackets

        table = self.as_table()
        title, note = (Text(words) if words else None for words in (table.title, table.note))
        cells = ([Text(cell) for cell in row] for row in table.cells)
        return rich_table(table.heads, cells, words=table.words, title=title, caption=note)

    def _repr_html_(self) -> str:
        return html(self.as_table().html())

    def to_markdown(self) -> str:
        table = self.as_table()
        rules = ["---" if head in table.words else "---:" for head in table.heads]
        lines = [table.heads, rules, *table.cells]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

    def to_pandas(self) -> Any:
        """A data frame with a row for each of the table; needs pandas."""
        table = self.as_table()
        return data_frame({head: [row[place] for row in table.rows] for place, head in enumerate(table.heads)})


@dataclass(frozen=True)
class Table(Tabular):
    """Rows of values under heads: numbers flush right, the columns named in `words` flush left; a `title` above, a `note` below.

    `print` shows it, `to_pandas` and `to_markdown` take it elsewhere. Tuples are shapes of tensors.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    words: Collection[str] = ()
    note: str = ""

    def as_table(self) -> Table:
        return self

    def __repr__(self) -> str:
        return self.text()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cells(self) -> list[list[str]]:
        return [[_cell(value) for value in row] for row in self.rows]

    def text(self) -> str:
        lines = [[printable(head) for head in self.heads], *self.cells]
        widths = [max(map(len, column)) for column in zip(*lines)]
        left = [head in self.words for head in self.heads]
        shown = ["  ".join(c.ljust(w) if at else c.rjust(w) for c, w, at in zip(line, widths, left)).rstrip() for line in lines]
        return "\n".join([*filter(None, [printable(self.title)]), *shown, *filter(None, [self.note])])

    def html(self) -> str:
        """The table alone, which `html` makes fit for a notebook."""

        def line(mark: str, cells: Sequence[str]) -> str:
            kinds = ["words" * (head in self.words) + " long" * (len(cell) > LONG) for head, cell in zip(self.heads, cells)]
            marked = [f'<{mark} class="{kind}">' if kind else f"<{mark}>" for kind in kinds]
            return "<tr>" + "".join(f"{start}{escape(cell)}</{mark}>" for start, cell in zip(marked, cells)) + "</tr>"

        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        head = f"<thead>{line('th', self.heads)}</thead>" if any(self.heads) else ""
        body = "\n".join(line("td", cells) for cells in self.cells)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table>{caption}{head}<tbody>\n{body}\n</tbody></table>{note}"


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return "×".join(map(str, value)) or "scalar"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else printable(str(value))
    return f"{value:,}" if isinstance(value, int) else number(value)


def html(*parts: str) -> str:
    """Pieces of HTML for a notebook, with the style that tables have there."""
    return f'<div class="plausible">{STYLE}\n' + "\n".join(parts) + "\n</div>"


def data_frame(columns: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Any:
    """A pandas data frame of named columns, or of records."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"to_pandas needs pandas ({error}): pip install 'plausible[tables]'") from error
    return pandas.DataFrame(columns)


def rich_table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, words: Collection[str] = (), **settings: Any
) -> RichTable:
    """A table with the columns named in `words` flush left, all others flush right; `settings` are those of `rich`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", **settings)
    for head in heads:
        table.add_column(printable(head), justify="left" if head in words else "right")
    for row in rows:
        table.add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in row))
    return table
