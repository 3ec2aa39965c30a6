"""One address → the bytes behind it: streamed, retried, with a bar on a terminal.

What is being received lies in a temporary file without a name, so that a kill at any moment leaves nothing behind.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
import urllib.error
import urllib.request
from typing import IO, Any

TIMEOUT = 30.0
"""Seconds without a byte after which a connection is given up."""
PAUSES = (1.0, 4.0)
"""Seconds before the second and the third attempt."""
CHUNK = 1 << 18
HOPELESS = (socket.gaierror, ConnectionRefusedError, FileNotFoundError)
"""Failures that another attempt at the same address will not mend."""


class Unavailable(ConnectionError):
    """An address did not give what it should; the message says why."""


class Bar:
    """A rich bar of bytes received while it is entered, or nothing: `show` None means only on a terminal."""

    def __init__(self, show: bool | None = None):
        self.show = (sys.stderr is not None and sys.stderr.isatty()) if show is None else show
        self._bar: Any = None

    def __enter__(self) -> Bar:
        if self.show:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def update(self, label: str, done: int, total: int | None) -> None:
        """Set what is being received, and how much of it is here."""
        if self._bar is not None:
            self._bar.update(self._task, description=label, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def fetch(url: str, into: IO[bytes], bar: Bar, label: str) -> None:
    """Write what is at `url` to `into`, from its beginning; `Unavailable` where it cannot be had whole.

    Timeouts, broken connections, short answers and the server's own errors are tried again after a pause; a missing file, a
    refused connection and an unknown host are not.
    """
    if not url.startswith(("http://", "https://")):
        raise Unavailable(f"{url}: not an http or https address")
    for pause in (*PAUSES, None):
        try:
            return attempt(url, into, bar, label)
        except urllib.error.HTTPError as error:
            reason, again = f"{error.code} {error.reason}", error.code == 429 or error.code >= 500
            error.close()
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            again = not isinstance(cause, HOPELESS)
            reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if not again or pause is None:
            break
        time.sleep(pause)
    raise Unavailable(f"{url}: {reason}")


def attempt(url: str, into: IO[bytes], bar: Bar, label: str) -> None:
    """One try of `fetch`."""
    into.seek(0)
    into.truncate()
    request = urllib.request.Request(url, headers={"User-Agent": "plausible (data sets)"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        done = 0
        while chunk := answer.read(CHUNK):
            into.write(chunk)
            done += len(chunk)
            bar.update(label, done, total)
    if total is not None and done != total:
        raise http.client.HTTPException(f"the connection ended after {done:,} of {total:,} bytes")
    into.seek(0)
