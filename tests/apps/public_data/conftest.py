"""A server on this machine that behaves well or badly, and a cache of its own for every test."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest


class Server:
    """Serves `files` by path. `faults` says how often and how a path fails first: a status, "short" or "stall"."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[int | str]] = {}
        self.asked: Counter[str] = Counter()
        self.released = threading.Event()
        self.stalled = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.lstrip("/")
                outer.asked[path] += 1
                fault = outer.faults[path].pop(0) if outer.faults.get(path) else None
                if isinstance(fault, int) or path not in outer.files:
                    self.send_error(fault if isinstance(fault, int) else 404)
                    return
                body = outer.files[path]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if fault is None:
                    self.wfile.write(body)
                    return
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                if fault == "stall":
                    outer.stalled.set()
                    outer.released.wait(30)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no data folder, no waiting between attempts."""
    monkeypatch.setenv("PLAUSIBLE_CACHE", str(tmp_path / "cache"))
    for name in ("PLAUSIBLE_DATA", "PLAUSIBLE_MIRROR", "PLAUSIBLE_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))
    return tmp_path / "cache" / "data"
