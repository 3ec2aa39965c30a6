"""`python -m experiments`: published experiments beside what comes out here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plausible.apps.cli.errors import guarded, note

if TYPE_CHECKING:
    from experiments.frame import Part, Reproduction, Result, Results, Size
    from experiments.running import Folder

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", show_default=False)]

app = typer.Typer(add_completion=False)


@app.command()
@guarded
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which one; without it they are listed.", show_default=False)] = None,
    table: Annotated[str | None, typer.Option(metavar="NAME", help="One table, such as 1.", show_default="all of it")] = None,
    figure: Annotated[
        str | None, typer.Option(metavar="NAME", help="One figure, such as curves.", show_default="all of it")
    ] = None,
    full: Annotated[bool, typer.Option("--full/--reduced", help="As published, for a GPU; or minutes on two cores.")] = False,
    faithful: Annotated[
        bool, typer.Option("--faithful", help="With the errors of the original code.", show_default=False)
    ] = False,
    cells: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these cells.", show_default="those that are needed")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each cell, stacked.", show_default="5, reduced 3")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("reproductions"),
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, mps, or auto: the fastest there is.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="tf32: faster products on an NVIDIA GPU.", show_default="float32")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes, each with one cell.")] = 1,
    show: Annotated[
        bool, typer.Option("--show", help="Train nothing: tables and figures of what is stored.", show_default=False)
    ] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write the results into the page OUT/NAME.md.", show_default=False)
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder in which the trained posteriors are kept.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Compute stored cells again.", show_default=False)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", show_default=False)] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Reproduce a published experiment: our numbers beside the published ones, with verdicts and figures.

    Each cell is stored when it is done, and an interrupted one resumes: the same command goes on. Without a table or a
    figure everything is made.

    Example: python -m experiments blundell-2015 --table 1
    """
    if name is None:
        _list()
        return
    from experiments import NAMES, load
    from experiments.frame import Request
    from experiments.running import Folder, run, wanted

    if faithful:
        name = name if name.endswith("-faithful") else f"{name}-faithful"
        if name not in NAMES:
            raise ValueError(f"--faithful: {name.removesuffix('-faithful')} has one version only; leave it out")
    found = load(name)
    size: Size = "full" if full else "reduced"
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}")
    parts = [found.part(kind, wish) for kind, wish in (("table", table), ("figure", figure)) if wish is not None]
    folder = Folder(out, name, size)
    if not show:
        chosen = wanted(found, size, parts, [word.strip() for word in (cells or "").split(",") if word.strip()])
        request = Request(
            seeds or found.seeds[size],
            device=device,
            precision=precision,
            keep=keep,
            progress=False if quiet else None,  # type: ignore[arg-type]
        )
        if not quiet:
            note(f"{name}, {size}: {len(chosen)} cells, results in {folder.path}")
        run(found, size, chosen, folder, request, jobs=jobs, overwrite=overwrite, told=None if quiet else _told)
    results = folder.results(found)
    if not results:
        raise ValueError(f"nothing is stored in {folder.path}; run it without --show")
    _report(found, size, parts, results, folder, quiet)
    if page:
        from experiments.pages import write

        note(f"written: {write(found.page, out)}")


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from experiments import NAMES, load

    shown = Table("name", "what", "tables", "figures", box=None, header_style="bold")
    for name in NAMES:
        found = load(name)
        kinds = [", ".join(p.name for p in found.parts if p.kind == kind) or "–" for kind in ("table", "figure")]
        shown.add_row(name, found.title, *kinds)
    Console().print(shown)
    note("next: python -m experiments NAME [--table 1] [--figure curves] [--full]")


def _told(cell: str, result: Result, new: bool) -> None:
    device = result["versions"]["device"]
    note(f"{cell}: {'done' if new else 'stored'}, {result['seeds']} seeds, {result['seconds']:.0f} s on {device}")


def _report(found: Reproduction, size: Size, parts: list[Part], results: Results, folder: Folder, quiet: bool) -> None:
    """Print the tables and draw the figures of what there is; without matplotlib the figures are left out, and said so."""
    from rich.console import Console

    from experiments.running import changed

    console = Console(quiet=quiet)
    for name, result in results.items():
        settings = found.cell(name).settings.get(size)
        if settings is not None and (change := changed(result["settings"], settings)):
            note(f"warning: the stored {name} was computed with {change}")
    for part in parts or found.parts:
        own = {name: results[name] for name in part.cells.get(size, ()) if name in results}
        if not own:
            continue
        console.print(f"\n[bold]{found.name}, {part.kind} {part.name}[/bold]: {part.title} ({size})")
        for sheet in _sheets(part, size, own):
            console.print(_table(sheet))
        if part.draw is not None:
            try:
                from experiments.figures import save

                paths = save(part.draw(own), folder.path / part.key)
                console.print(f"figure: {paths[0]}, {paths[1].name}", soft_wrap=True)
            except ImportError as error:
                note(f"no figure: {error}")


def _sheets(part: Part, size: Size, results: Results) -> list[Any]:
    from experiments.pages import sheets

    return sheets(part, size, results)


def _table(sheet: Any) -> Any:
    from rich import box
    from rich.table import Table

    shown = Table(title=sheet.title, title_justify="left", title_style="", box=box.SIMPLE_HEAD)
    for number, head in enumerate(sheet.head):
        shown.add_column(head, justify="left" if number in (0, len(sheet.head) - 1) else "right")
    for row in sheet.rows:
        shown.add_row(*row)
    return shown
