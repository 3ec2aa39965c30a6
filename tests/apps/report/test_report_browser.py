"""The report in a browser: no message on its console, no request, no sideways scrolling on a phone, light and dark."""

import re
import shutil
import subprocess
import threading
from functools import partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium to look at the page with"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


def browse(tmp_path, address, *flags):
    profile = tmp_path / "profile"
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, address]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    shutil.rmtree(profile, ignore_errors=True)
    return found


@pytest.fixture
def server(runs):
    """The address of the folder of all runs, and the list of what it was asked for."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=runs["curve"].parent)) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}", asked
        found.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["curve", "chains", "classes"])
def test_it_renders_in_silence_and_asks_for_nothing_more(server, name, tmp_path):
    address, asked = server
    found = browse(tmp_path, f"{address}/{name}/report.html", f"--screenshot={tmp_path / 'page.png'}")
    assert "CONSOLE" not in found.stderr, found.stderr  # a request elsewhere, refused by the page's policy, would be there
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert set(asked) == {f"/{name}/report.html"}


def test_a_request_or_a_script_would_be_heard(server, runs, tmp_path):
    address, _ = server
    text = (runs["curve"] / "report.html").read_text(encoding="utf-8")
    for nasty in ('<img src="http://example.invalid/x.png" alt="">', "<script>1</script>"):
        (runs["curve"].parent / "nasty.html").write_text(text.replace("</body>", f"{nasty}</body>"), encoding="utf-8")
        assert "CONSOLE" in browse(tmp_path, f"{address}/nasty.html", "--dump-dom").stderr


@pytest.mark.parametrize("name", ["several", "classes", "chains"])
def test_a_phone_does_not_scroll_sideways(runs, name, tmp_path):
    text = (runs[name] / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "phone.html"  # a window is at least 500 wide, a frame may be as narrow as a phone
    asks = "const d = frames[0].document.documentElement; document.title = `${frames[0].innerWidth} ${d.scrollWidth}`"
    page.write_text(
        f'<!DOCTYPE html><title>?</title><iframe style="width:375px;height:800px;border:0" srcdoc="{escape(text)}"></iframe>'
        f"<script>onload = () => {{ {asks} }}</script>",
        encoding="utf-8",
    )
    found = browse(tmp_path, page.as_uri(), "--dump-dom")
    inner, scrolled = map(int, re.search(r"<title>(\d+) (\d+)</title>", found.stdout).groups())
    assert inner == 375
    assert scrolled <= 375


def test_light_and_dark(runs, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    shades = {}
    for scheme, number in {"light": 1, "dark": 0}.items():
        picture = tmp_path / f"{scheme}.png"
        browse(
            tmp_path,
            (runs["curve"] / "report.html").as_uri(),
            "--window-size=800,600",
            f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={number}",
        )
        shades[scheme] = float(np.median(image.imread(picture)[..., :3]))
    assert shades["light"] > 0.9
    assert shades["dark"] < 0.15
