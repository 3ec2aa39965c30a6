"""`plausible report`: the folder of a run → one page that can be read anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plausible.apps.cli.errors import guarded, note

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", show_default=False)]


@guarded
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write; replaced if it is there.", show_default="RUN/report.html"),
    ] = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Write a page about a run: what was fitted, how good its predictions and its uncertainty are, what to do about it.

    One file with everything in it, for light and dark screens, phones and screen readers. It needs no data: the fit has
    stored its held-out predictions.

    Example: plausible report run
    """
    from plausible.apps.report import write

    note(f"report written to {write(run, out)}")
