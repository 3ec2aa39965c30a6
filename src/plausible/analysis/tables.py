"""Results as tables: for `rich`, as plain text, in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def rich_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]] = (), *, words: Collection[str] = (), **settings: Any
) -> Table:
    """A table with the columns named in `words` flush left, all others flush right; `settings` are those of `rich`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title_justify="left", **settings)
    for head in heads:
        table.add_column(head, justify="left" if head in words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def plain_text(table: Table, width: int = 200) -> str:
    """The table without colours, as `print` should show it."""
    from rich.console import Console

    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")
