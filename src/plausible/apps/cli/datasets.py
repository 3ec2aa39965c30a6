"""`plausible data`: which data sets there are, where their files lie, and getting those that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Quiet, option
from plausible.apps.report.words import plural

if TYPE_CHECKING:
    from plausible.apps.datasets.catalogue import Entry

app = typer.Typer(help="Data sets: list them, get them, see where they lie.", no_args_is_help=True)


def size_text(size: float) -> str:
    """Bytes in words: `11.6 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def whereabouts(entry: Entry) -> tuple[str, str]:
    """(where found, size on disk) of a set: `data folder`, `cache`, both, `data folder, 2 of 6`, `not here`."""
    from plausible.apps.datasets import places

    if entry.toy:
        return "toy", ""
    here = [place for place in map(places.find, entry.files) if place is not None]
    if not here:
        return "not here" if entry.downloadable else "not here *", f"({size_text(entry.size)})"
    named = " and ".join(dict.fromkeys(place.place for place in here))
    counted = "" if len(here) == len(entry.files) else f", {len(here)} of {len(entry.files)}"
    return named + counted, size_text(sum(place.path.stat().st_size for place in here))


@app.command("list")
@guarded
def list_(debug: Debug = False) -> None:  # noqa: ARG001
    """List all data sets: task, size on disk, licence, and where they were found."""
    from plausible.apps.cli import view
    from plausible.apps.datasets.catalogue import CATALOGUE
    from plausible.core.tables import rich_table

    rows = []
    for entry in CATALOGUE.values():
        where, size = whereabouts(entry)
        rows.append((entry.name, entry.task, f"{entry.count:,}" if entry.count else "", size, entry.licence, where))
    heads = ("name", "task", "examples", "size", "licence", "where")
    table = rich_table(heads, rows, words=("name", "task", "licence", "where"), pad_edge=False)
    table.columns[0].no_wrap = True
    console = view.console()
    console.print(table)
    if any(row[-1].endswith("*") for row in rows):
        console.print("* cannot be downloaded: set PLAUSIBLE_DATA to a folder that has it")
    console.print("sizes in brackets: not here; get one with: plausible data get NAME")


@app.command(no_args_is_help=True)
@guarded
def get(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Data sets.", show_default=False)] = None,
    everything: Annotated[bool, option("Every set that can be downloaded.", "--all")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Download data sets into the cache, unless they are here; every file is checked before it appears.

    Example: plausible data get mnist boston
    """
    from plausible.apps.datasets import places
    from plausible.apps.datasets.acquire import ensure
    from plausible.apps.datasets.catalogue import CATALOGUE
    from plausible.apps.datasets.catalogue import entry as named

    chosen = [named(name) for name in dict.fromkeys(names or ())]
    if everything:
        chosen = [entry for entry in CATALOGUE.values() if entry.downloadable and not entry.toy]
    failed: list[OSError] = []
    for entry in chosen:
        absent = places.missing(entry)
        try:
            ensure(entry, progress=False if quiet else None)
        except FileNotFoundError as error:
            failed.append(error)
            if len(chosen) > 1:
                note(str(error))
            continue
        if quiet:
            continue
        if entry.toy:
            note(f"{entry.name} needs no files: it is made from a seed")
        elif absent:
            note(f"{entry.name}: {plural(len(absent), 'file')} downloaded into {places.cache_folder()}")
        else:
            note(f"{entry.name} is here already ({whereabouts(entry)[0]})")
    if failed:
        raise failed[0] if len(chosen) == 1 else OSError(f"{len(failed)} of {len(chosen)} data sets could not be had")


@app.command()
@guarded
def where(
    name: Annotated[str | None, typer.Argument(help="A data set; without one, the two folders.", show_default=False)] = None,
    check: Annotated[bool, option("Compare every file with its checksum.", "--check")] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Print the paths of a set's files, or the folders that are searched; with --check, verify the files.

    Example: plausible data where mnist --check
    """
    from plausible.apps.datasets import places
    from plausible.apps.datasets.catalogue import CATALOGUE
    from plausible.apps.datasets.catalogue import entry as named
    from plausible.apps.datasets.digests import problem

    def described(folder: Path) -> str:
        return f"{folder}{'' if folder.is_dir() else ' (does not exist)'}"

    if name is None:
        folder = places.data_folder()
        typer.echo(f"data folder: {'PLAUSIBLE_DATA is not set' if folder is None else described(folder)}")
        typer.echo(f"cache: {described(places.cache_folder())}")
        entries = list(CATALOGUE.values()) if check else []
    else:
        entries = [named(name)]
        if entries[0].toy:
            typer.echo(f"{entries[0].name} has no files: it is made by plausible.datasets.toys.{entries[0].name}")
    checked, damaged, absent = 0, 0, []
    for entry in entries:
        for file in entry.files:
            place = places.find(file)
            if place is None:
                absent.append(file)
                continue
            path = place.path
            packed = file.path if path.name == file.name else file.unpacked
            wrong = problem(file, packed, path.read_bytes()) if check else None
            checked, damaged = checked + 1, damaged + (wrong is not None)
            if wrong is not None:
                typer.echo(f"{path}: damaged: {wrong}")
            elif name is not None:
                typer.echo(f"{path}{': ok' if check else ''}")
    if check and name is None:
        typer.echo(f"{plural(checked, 'file')} checked")
    if damaged:
        counted = f"{damaged} of {plural(checked, 'file')}"
        raise ValueError(f"{counted} not as published: replace, or delete and `plausible data get`")
    if absent and name is not None:
        raise FileNotFoundError(f"not here: {', '.join(file.path for file in absent)}; try: plausible data get {name}")
