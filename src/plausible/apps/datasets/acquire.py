"""A data set that is not here → its files in the cache, from a mirror or the public origin, checked before they appear.

Downloads are made by pooch, into a temporary folder: a kill at any moment leaves nothing in the cache.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from plausible.apps.datasets import places
from plausible.apps.datasets.catalogue import Archive, Direct, Entry, File, Pieces
from plausible.apps.datasets.digests import DAMAGED, problem, shortened

TIMEOUT = 30.0  # seconds without a byte after which a connection is given up
RETRIES = 2
CHUNK = 1 << 18
LARGEST = 1 << 30  # bytes of an archive whose size the catalogue does not say; more than any has


class Unavailable(ConnectionError):
    """An address did not give what it should; the message says why."""


class Bar:
    """A rich bar of bytes received, as pooch wants one, or nothing: `show` None means only on a terminal."""

    def __init__(self, show: bool | None = None):
        self.show = (sys.stderr is not None and sys.stderr.isatty()) if show is None else show
        self.label, self.total, self.done = "", 0, 0
        self.most, self.seen = LARGEST, 0  # bytes after which what comes cannot be what was asked for
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self.show:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True, force_jupyter=False), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, count: int) -> None:
        # pooch counts whole chunks, of which the last may be shorter
        self.seen += count
        if self.seen > self.most:
            raise Unavailable(f"{self.label}: more than {self.most:,} bytes came, so it is not the expected file")
        self.done = min(self.done + count, self.total) if self.total else self.done + count
        if self._bar is not None:
            self._bar.update(self._task, description=self.label, completed=self.done, total=self.total or None)

    def reset(self) -> None:
        self.done = 0

    def expect(self, label: str, most: int = 0) -> None:
        """The next file, and how many bytes it can have."""
        self.label, self.most, self.seen = label, most or LARGEST, 0

    def close(self) -> None:
        """One bar serves all files of a set: it ends with the `with` block."""


def ensure(entry: Entry, files: Iterable[File] | None = None, progress: bool | None = None, hint: str = "") -> list[Path]:
    """The paths of a set's files (all, or those given), after downloading those that are in neither place.

    progress: None shows a bar where standard error is a terminal. hint: added to the error where files stay absent.
    """
    wanted = tuple(entry.files if files is None else files)
    absent = [file for file in wanted if places.find(file) is None]
    if absent:
        with Bar(progress) as bar:
            reasons = _obtain(absent, bar)
        still = [file for file in wanted if places.find(file) is None]
        if still:
            raise FileNotFoundError(_advice(entry, still, reasons, hint))
    return [place.path for place in map(places.find, wanted) if place is not None]


def _advice(entry: Entry, absent: list[File], reasons: list[str], hint: str) -> str:
    names, folder = ", ".join(file.path for file in absent), places.data_folder()
    first = "the data folder (PLAUSIBLE_DATA is not set)"
    if folder is not None:
        first = f"PLAUSIBLE_DATA ({folder}{'' if folder.is_dir() else ', which is not a folder'})"
    are, them, name = ("are", "them", "these names") if len(absent) > 1 else ("is", "it", "this name")
    elsewhere = f", or run `plausible data get {entry.name}` on a machine with network and copy its cache folder here"
    if any(file.source is None for file in absent):
        elsewhere = ""
    return (
        f"data set {entry.name!r} is not here: {names} {are} in neither {first} nor the cache ({places.cache_folder()}), and "
        f"cannot be downloaded ({'; '.join(reasons)}). Set PLAUSIBLE_DATA to a folder that holds {them} under {name}"
        f"{elsewhere}{hint and f'; {hint}'}"
    )


def _obtain(files: list[File], bar: Bar) -> list[str]:
    """Download what can be downloaded; returns the reasons for the rest."""
    if os.environ.get("PLAUSIBLE_OFFLINE", "") not in ("", "0"):
        return ["PLAUSIBLE_OFFLINE is set"]
    reasons: list[str] = []
    # A mirror has the layout of the data folder, and is asked before the public origins.
    if mirror := os.environ.get("PLAUSIBLE_MIRROR", "").rstrip("/"):
        for file in files:
            _direct(file, (f"{mirror}/{file.path}",), bar, reasons)
    left = [file for file in files if places.find(file) is None]
    for file in left:
        if isinstance(file.source, Direct):
            _direct(file, file.source.urls, bar, reasons)
        elif isinstance(file.source, Pieces):
            _assemble(file, file.source, bar, reasons)
        elif file.source is None:
            reasons.append(f"no public origin gives {file.name} as it is used here")
    for archive in dict.fromkeys(file.source for file in left):
        if isinstance(archive, Archive):
            _unpack(archive, [file for file in left if file.source is archive], bar, reasons)
    return list(dict.fromkeys(reasons))


def _install(name: str, raw: bytes) -> None:
    """Put checked bytes into the cache under their name, whole or not at all."""
    from plausible.core.storage import write_atomically

    path = places.cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, raw)


@contextlib.contextmanager
def _received(url: str, bar: Bar, label: str, most: int = 0) -> Iterator[Path]:
    """What is at an address, in a file that goes when the block ends; `Unavailable` where it cannot be had whole.

    Timeouts, broken connections, short answers and the server's own errors are tried again after a pause; a missing file, a
    refused connection and an unknown host are not.
    """
    if not url.startswith(("http://", "https://")):
        raise Unavailable(f"{url}: not an http or https address")
    try:
        import pooch
        from requests import ConnectionError as Disconnected
        from requests import HTTPError, RequestException
        from urllib3.exceptions import MaxRetryError
    except ImportError:
        raise Unavailable("downloads need pooch: pip install 'plausible[data]'") from None

    def download(address: str, target: str, store: Any) -> None:
        try:
            pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)(address, target, store)
        except HTTPError as error:
            answer: Any = error.response
            if answer.status_code != 429 and answer.status_code < 500:
                raise Unavailable(f"{url}: {answer.status_code} {answer.reason}") from None
            raise
        except Disconnected as error:
            # never connected at all: pooch would try again, but a refusal or an unknown host stays one
            if error.args and isinstance(error.args[0], MaxRetryError):
                raise Unavailable(f"{url}: {_cause(error)}") from None
            raise

    bar.expect(label, most)
    pooch.get_logger().setLevel("WARNING")
    with tempfile.TemporaryDirectory(prefix="plausible-") as folder:
        store = pooch.create(folder, base_url="", registry={"file": None}, urls={"file": url}, retry_if_failed=RETRIES)
        try:
            path = store.fetch("file", downloader=download)
        except RequestException as error:
            answer: Any = error.response
            reason = f"{answer.status_code} {answer.reason}" if isinstance(error, HTTPError) else _cause(error)
            raise Unavailable(f"{url}: {reason}") from None
        yield Path(path)


def _cause(error: BaseException) -> str:
    """The first link of a chain of errors: what requests wraps, in the system's words."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _direct(file: File, urls: tuple[str, ...], bar: Bar, reasons: list[str]) -> None:
    for url in urls:
        try:
            with _received(url, bar, file.name, 10 * file.size + CHUNK) as path:
                raw = path.read_bytes()
        except Unavailable as error:
            reasons.append(str(error))
            continue
        if (wrong := problem(file, file.path, raw)) is None:
            return _install(file.path, raw)
        reasons.append(f"{url}: not the expected file, {wrong}")


def _assemble(file: File, source: Pieces, bar: Bar, reasons: list[str]) -> None:
    """Single files → one archive, as it is in the data folder."""
    packed = io.BytesIO()
    # Without name and time of packing, the same members make the same bytes.
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for number, (name, url) in enumerate(source.members, 1):
            try:
                with _received(url, bar, f"{file.name} ({number} of {len(source.members)})", 100 * file.size + CHUNK) as path:
                    raw = path.read_bytes()
            except Unavailable as error:
                reasons.append(str(error))
                return
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    if (wrong := problem(file, file.path, packed.getvalue())) is not None:
        reasons.append(f"{file.name} was put together from {source.members[0][1].rpartition('/')[0]}, but {wrong}")
        return
    _install(file.path, packed.getvalue())


def _unpack(archive: Archive, files: list[File], bar: Bar, reasons: list[str]) -> None:
    """One published archive → the files that are wanted of it."""
    for url in archive.urls:
        try:
            with _received(url, bar, url.rpartition("/")[2]) as path:
                import pooch

                algorithm = archive.digest.partition(":")[0]
                given = f"{algorithm}:{pooch.file_hash(str(path), algorithm)}"
                if given != archive.digest:
                    reasons.append(f"{url}: it has {shortened(given)}, expected {shortened(archive.digest)}")
                    continue
                for file, raw in _CONTENTS[archive.unpack](path, files):
                    wrong = problem(file, file.unpacked, raw)
                    if wrong is None:
                        _install(file.unpacked, raw)
                    else:
                        reasons.append(f"{url}: {file.unpacked} is not the expected file, {wrong}")
            return
        except Unavailable as error:
            reasons.append(str(error))
        except DAMAGED as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise  # the disk, not the archive
            reasons.append(f"{url}: it cannot be unpacked: {error or type(error).__name__}")


def _cifar10_files(path: Path, files: list[File]) -> Iterator[tuple[File, bytes]]:
    """`cifar-10-batches-bin/NAME.bin` as they are."""
    wanted = {file.unpacked.rpartition("/")[2]: file for file in files}
    with tarfile.open(path, mode="r:gz") as archive:
        for member in archive:
            file = wanted.get(member.name.rpartition("/")[2])
            handle = archive.extractfile(member) if file is not None else None
            if file is not None and handle is not None:
                yield file, handle.read()


REVIEW = re.compile(r"aclImdb/(train|test)/(neg|pos)/(\d+)_(\d+)\.txt")


def _imdb_files(path: Path, files: list[File]) -> Iterator[tuple[File, bytes]]:
    """`aclImdb/PART/LABEL/ID_RATING.txt` → one line of JSON a review, by label and id."""
    reviews: dict[str, list[tuple[int, int, int, str]]] = {"train": [], "test": []}
    with tarfile.open(path, mode="r:gz") as archive:
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


_CONTENTS = {"cifar10": _cifar10_files, "imdb": _imdb_files}
