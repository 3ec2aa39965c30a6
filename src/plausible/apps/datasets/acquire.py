"""A data set that is not here → its files in the cache, from a mirror or the public origin, checked before they appear."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from plausible.apps.datasets import places
from plausible.apps.datasets.digests import DAMAGED, problem, shortened
from plausible.apps.datasets.download import Bar, Unavailable, fetch
from plausible.apps.datasets.entries import Archive, Direct, Entry, File, Pieces, Unpack

IN_MEMORY = 1 << 25  # larger downloads wait on the disk


def ensure(entry: Entry, files: Iterable[File] | None = None, progress: bool | None = None, hint: str = "") -> list[Path]:
    """The paths of a set's files (all, or those given), after downloading those that are in neither place.

    progress: None shows a bar where standard error is a terminal. hint: added to the error where files stay absent.
    """
    wanted = tuple(entry.files if files is None else files)
    absent = [file for file in wanted if places.find(file) is None]
    if absent:
        with Bar(progress) as bar:
            reasons = obtain(absent, bar)
        still = [file for file in wanted if places.find(file) is None]
        if still:
            raise FileNotFoundError(advice(entry, still, reasons, hint))
    found = [places.find(file) for file in wanted]
    return [place.path for place in found if place is not None]


def advice(entry: Entry, absent: list[File], reasons: list[str], hint: str = "") -> str:
    """What is missing, why it could not be had, and what to do."""
    names = ", ".join(file.path for file in absent)
    several = len(absent) > 1
    sourced = all(file.source is not None for file in absent)
    elsewhere = f", or run `plausible data get {entry.name}` on a machine with network and copy its cache folder here"
    return (
        f"data set {entry.name!r} is not here: {names} {'are' if several else 'is'} in neither {places.looked_in()}, and "
        f"cannot be downloaded ({'; '.join(reasons)}). Set PLAUSIBLE_DATA to a folder that holds "
        f"{'them' if several else 'it'} under {'these names' if several else 'this name'}"
        f"{elsewhere if sourced else ''}{'; ' + hint if hint else ''}"
    )


def obtain(files: list[File], bar: Bar) -> list[str]:
    """Download what can be downloaded; returns the reasons for the rest."""
    if places.offline():
        return ["PLAUSIBLE_OFFLINE is set"]
    reasons: list[str] = []
    mirror = places.mirror()
    if mirror is not None:
        for file in files:
            direct(file, (f"{mirror}/{file.path}",), bar, reasons)
    left = [file for file in files if places.find(file) is None]
    for file in left:
        if isinstance(file.source, Direct):
            direct(file, file.source.urls, bar, reasons)
        elif isinstance(file.source, Pieces):
            assemble(file, file.source, bar, reasons)
        elif file.source is None:
            reasons.append(f"no public origin gives {file.name} as it is used here")
    for archive in dict.fromkeys(file.source for file in left):
        if isinstance(archive, Archive):
            unpack(archive, [file for file in left if file.source is archive], bar, reasons)
    return reasons


def install(name: str, raw: bytes) -> None:
    """Put checked bytes into the cache under their name, whole or not at all."""
    from plausible.core.storage import write_atomically

    path = places.cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, raw)


def received(url: str, bar: Bar, label: str) -> IO[bytes]:
    """What is at an address, in a file that nobody else sees."""
    folder = places.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    holder = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY, dir=str(folder))  # noqa: SIM115 (closed by the caller)
    try:
        fetch(url, holder, bar, label)
    except BaseException:
        holder.close()
        raise
    return holder


def direct(file: File, urls: tuple[str, ...], bar: Bar, reasons: list[str]) -> None:
    """The first address that gives the file itself."""
    for url in urls:
        try:
            with received(url, bar, file.name) as holder:
                raw = holder.read()
        except Unavailable as error:
            reasons.append(str(error))
            continue
        wrong = problem(file, file.path, raw)
        if wrong is None:
            return install(file.path, raw)
        reasons.append(f"{url}: not the expected file, {wrong}")


def assemble(file: File, source: Pieces, bar: Bar, reasons: list[str]) -> None:
    """Single files → one archive, as it is in the data folder."""
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for number, (name, url) in enumerate(source.members, 1):
            try:
                with received(url, bar, f"{file.name} ({number} of {len(source.members)})") as holder:
                    raw = holder.read()
            except Unavailable as error:
                reasons.append(str(error))
                return
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    wrong = problem(file, file.path, packed.getvalue())
    if wrong is not None:
        reasons.append(f"{file.name} was put together from {source.members[0][1].rpartition('/')[0]}, but {wrong}")
        return
    install(file.path, packed.getvalue())


def unpack(archive: Archive, files: list[File], bar: Bar, reasons: list[str]) -> None:
    """One published archive → the files that are wanted of it."""
    for url in archive.urls:
        try:
            with received(url, bar, url.rpartition("/")[2]) as holder:
                algorithm = archive.digest.partition(":")[0]
                found = f"{algorithm}:{hashlib.file_digest(holder, algorithm).hexdigest()}"  # type: ignore[arg-type]
                if found != archive.digest:
                    reasons.append(f"{url}: it has {shortened(found)}, expected {shortened(archive.digest)}")
                    continue
                holder.seek(0)
                for file, raw in contents(archive.unpack, holder, files):
                    wrong = problem(file, file.unpacked, raw)
                    if wrong is None:
                        install(file.unpacked, raw)
                    else:
                        reasons.append(f"{url}: {file.unpacked} is not the expected file, {wrong}")
            return
        except Unavailable as error:
            reasons.append(str(error))
        except DAMAGED as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise  # the disk, not the archive
            reasons.append(f"{url}: it cannot be unpacked: {error or type(error).__name__}")


def contents(kind: Unpack, holder: IO[bytes], files: list[File]) -> Iterator[tuple[File, bytes]]:
    """The wanted files as they are inside an archive."""
    return {"cifar10": cifar10_files, "imdb": imdb_files}[kind](holder, files)


def cifar10_files(holder: IO[bytes], files: list[File]) -> Iterator[tuple[File, bytes]]:
    """`cifar-10-batches-bin/NAME.bin` as they are."""
    wanted = {file.unpacked.rpartition("/")[2]: file for file in files}
    with tarfile.open(fileobj=holder, mode="r:gz") as archive:
        for member in archive:
            file = wanted.get(member.name.rpartition("/")[2])
            handle = archive.extractfile(member) if file is not None else None
            if file is not None and handle is not None:
                yield file, handle.read()


REVIEW = re.compile(r"aclImdb/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")


def imdb_files(holder: IO[bytes], files: list[File]) -> Iterator[tuple[File, bytes]]:
    """`aclImdb/PART/LABEL/ID_RATING.txt` → one line of JSON a review, by label and id."""
    reviews: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    with tarfile.open(fileobj=holder, mode="r:gz") as archive:
        for member in archive:
            match = REVIEW.fullmatch(member.name.removeprefix("./"))
            handle = archive.extractfile(member) if match else None
            if match and handle is not None:
                part, label, number, rating = match.groups()
                reviews[part].append((int(label == "pos"), int(number), int(rating), handle.read().decode("utf-8")))
    for file in files:
        part = "train" if "train" in file.name else "test"
        rows = [
            json.dumps({"label": label, "rating": rating, "id": number, "text": text})
            for label, number, rating, text in sorted(reviews[part])
        ]
        yield file, "".join(row + "\n" for row in rows).encode()
