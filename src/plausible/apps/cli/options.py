"""What several commands share: their options, and lists of numbers in text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def option(help: str, *names: str, shown: bool | str = False, panel: str | None = None, **settings: Any) -> Any:
    """`typer.Option`; its default is only shown where that says something."""
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel=panel, **settings)


Debug = Annotated[bool, option("Show the traceback of an error.", "--debug")]
Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet", "-q")]
Overwrite = Annotated[bool, option("Replace what is there.", "--overwrite")]
Markdown = Annotated[bool, option("Print the table in Markdown.", "--markdown")]
Run = Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)]
Seed = Annotated[int, option("Of the draws.", shown=True)]
Draws = Annotated[int | None, option("Posterior draws to average.", shown="all there are")]
Encoding = Annotated[str | None, option("Of a text file, such as latin-1.", metavar="NAME", shown="utf-8")]
Target = Annotated[list[str], option("Column to predict; repeat for several.", "--target", "-t")]
Time = Annotated[str | None, option("Of auto: about how long it may take, such as 30s, 5m or 1h.", shown="a minute")]
Device = Literal["auto", "cpu", "cuda", "mps"]


def words(text: str | None) -> tuple[str, ...]:
    """`a, b` → `("a", "b")`."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def numbers(text: str, kind: Callable[[str], Any] = float) -> tuple[Any, ...]:
    """`1,2` → `(1.0, 2.0)`; empty where something in it is not a number, for the caller to say what was expected."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        return ()
