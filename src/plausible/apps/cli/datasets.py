"""`plausible data`: which data sets there are, where their files lie, and getting those that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from plausible.apps.cli.errors import Debug, Quiet, guarded, note
from plausible.apps.report.words import plural

if TYPE_CHECKING:
    from plausible.apps.datasets.catalogue import Entry, File
    from plausible.apps.datasets.places import Found

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
    found = [place for place in map(places.find, entry.files) if place is not None]
    size = size_text(sum(place.path.stat().st_size for place in found)) if found else f"({size_text(entry.size)})"
    named = " and ".join(dict.fromkeys(place.place for place in found))
    if not found:
        return "not here" if entry.downloadable else "not here *", size
    return named if len(found) == len(entry.files) else f"{named}, {len(found)} of {len(entry.files)}", size


@app.command("list")
@guarded
def list_(debug: Debug = False) -> None:  # noqa: ARG001
    """List all data sets: task, size on disk, licence, and where they were found."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from plausible.apps.datasets.catalogue import CATALOGUE

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for heading in ("task", "examples", "size", "licence", "where"):
        table.add_column(heading, justify="right" if heading in ("examples", "size") else "left")
    for entry in CATALOGUE.values():
        where, size = whereabouts(entry)
        table.add_row(entry.name, entry.task, f"{entry.count:,}" if entry.count else "", size, entry.licence, where)
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(table)
    if any(whereabouts(entry)[0].endswith("*") for entry in CATALOGUE.values()):
        console.print("* cannot be downloaded: set PLAUSIBLE_DATA to a folder that has it")
    console.print("sizes in brackets: not here; get one with: plausible data get NAME")


@app.command(no_args_is_help=True)
@guarded
def get(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Data sets.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every set that can be downloaded.", show_default=False)] = False,
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
    check: Annotated[bool, typer.Option("--check", help="Compare every file with its checksum.", show_default=False)] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Print the paths of a set's files, or the folders that are searched; with --check, verify the files.

    Example: plausible data where mnist --check
    """
    from plausible.apps.datasets import places
    from plausible.apps.datasets.catalogue import CATALOGUE
    from plausible.apps.datasets.catalogue import entry as named

    if name is None:
        folder, cache = places.data_folder(), places.cache_folder()
        typer.echo(f"data folder: {'PLAUSIBLE_DATA is not set' if folder is None else described(folder)}")
        typer.echo(f"cache: {described(cache)}")
        entries = list(CATALOGUE.values()) if check else []
    else:
        entries = [named(name)]
        if entries[0].toy:
            typer.echo(f"{entries[0].name} has no files: it is made by plausible.datasets.toys.{entries[0].name}")
    checked, damaged, absent = 0, 0, []
    for entry in entries:
        for file in entry.files:
            found = places.find(file)
            if found is None:
                absent.append(file)
                continue
            wrong = verdict(file, found) if check else None
            checked, damaged = checked + 1, damaged + (wrong is not None)
            if wrong is not None:
                typer.echo(f"{found.path}: damaged: {wrong}")
            elif name is not None:
                typer.echo(f"{found.path}{': ok' if check else ''}")
    if check and name is None:
        typer.echo(f"{plural(checked, 'file')} checked")
    if damaged:
        raise ValueError(
            f"{damaged} of {plural(checked, 'file')} not as published: replace, or delete and `plausible data get`"
        )
    if absent and name is not None:
        raise FileNotFoundError(f"not here: {', '.join(file.path for file in absent)}; try: plausible data get {name}")


def described(folder: object) -> str:
    """A folder, and whether it is there."""
    from pathlib import Path

    return f"{folder}{'' if Path(str(folder)).is_dir() else ' (does not exist)'}"


def verdict(file: File, found: Found) -> str | None:
    """Why a file is not the one of the catalogue; None where it is."""
    from plausible.apps.datasets.digests import problem

    name = file.path if found.path.name == file.name else file.unpacked
    return problem(file, name, found.path.read_bytes())
