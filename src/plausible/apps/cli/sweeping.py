"""`plausible sweep`: every combination of a grid, trained as one stacked program, with a table of validation scores."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Quiet, option
from plausible.apps.report.words import plural


@guarded
def sweep(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A sweep in TOML.", show_default=False)] = None,
    epochs: Annotated[int | None, option("Passes over the data.", shown="the file's")] = None,
    device: Annotated[str, option("cpu, cuda or auto.", shown=True)] = "auto",
    precision: Annotated[str | None, option("float32, or tf32 for faster products on an NVIDIA GPU.", shown="float32")] = None,
    compiled: Annotated[bool | None, option("Compile the steps.", "--compile/--no-compile", shown="where it pays")] = None,
    at_once: Annotated[int | None, option("Settings in one program.", shown="the file's, or 128")] = None,
    seed: Annotated[int | None, option("Of everything random.", shown="the file's, or 0")] = None,
    out: Annotated[Path, option("Folder for the results.", "--out", "-o", shown=True)] = Path("sweep"),
    top: Annotated[int, option("Rows to print.", min=1, shown=True)] = 10,
    show: Annotated[bool, option("Print what the file asks for, or without one a file to start from.", "--show")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Train every combination of a grid of settings, stacked into few programs, and rank them by validation scores.

    Writes results.json, table.csv and, with matplotlib, sweep.png. A stopped sweep goes on where it was.

    Example: plausible sweep sweep.toml --out sweep
    """
    from plausible.apps.sweep import files
    from plausible.apps.sweep.grid import Grid

    if file is None:
        if not show:
            raise ValueError("nothing to train: give a sweep in TOML; plausible sweep --show prints one to start from")
        typer.echo(files.example(), nl=False)
        return
    asked = files.read(file)
    changes: dict[str, Any] = {key: value for key, value in {"at_once": at_once, "seed": seed}.items() if value is not None}
    if epochs is not None:
        changes["settings"] = {**asked.settings, "epochs": epochs}
    asked = replace(asked, **changes)
    title = f"{asked.title}: {len(Grid(asked.grid))} settings of {asked.method} on {asked.dataset}"
    if show:
        typer.echo(title)
        for name, values in asked.grid.items():
            typer.echo(f"  {name}: {', '.join(map(str, values))}")
        return
    if precision not in (None, "float32", "tf32"):
        raise ValueError(f"--precision must be float32 or tf32, got {precision!r}")
    if not quiet:
        note(title)
    compiling = "auto" if compiled is None else compiled
    progress = False if quiet else None
    result = asked.run(device=device, precision=precision, compile=compiling, out=out, progress=progress)
    write(result, asked, out)
    if not quiet:
        typer.echo(result.text(top, "table.csv"))
        seconds = sum(group["seconds"] for group in result.groups)
        diverged = sum(row["scores"][result.measure] is None for row in result.rows)
        lost = f"; {diverged} diverged" if diverged else ""
        typer.echo(f"{plural(len(result.groups), 'program')}, {seconds:,.1f} s of training and scoring{lost}")


def write(result: Any, asked: Any, out: Path) -> None:
    """results.json, table.csv, and the picture where matplotlib is there."""
    from plausible.core.storage import write_atomically

    names, scores = list(result.rows[0]["settings"]), list(result.rows[0]["scores"])
    keys = ("title", "dataset", "method", "settings", "prior", "hidden", "validation", "seed")
    content = {
        **{key: getattr(asked, key) for key in keys},
        "groups": result.groups,
        "training_seconds": sum(group["seconds"] for group in result.groups),
        "model_steps": sum(group["steps"] * group["members"] for group in result.groups),
        "rows": result.rows,
    }
    write_atomically(out / "results.json", (json.dumps(content, indent=1) + "\n").encode())
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names + scores)
    for row in result.sorted():
        table.writerow([row["settings"][n] for n in names] + [row["scores"][s] for s in scores])
    write_atomically(out / "table.csv", text.getvalue().encode())
    try:
        from plausible.apps.plots import sweep as picture

        figure: Any = picture(result).figure
        figure.savefig(out / "sweep.png", dpi=150, bbox_inches="tight")
    except ImportError:
        note("no picture: matplotlib is not installed (pip install 'plausible[plot]')")
