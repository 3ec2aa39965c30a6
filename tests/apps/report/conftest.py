"""Runs of every kind of target, fitted once, and pages parsed by the standard library."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from markupsafe import Markup
from typer.testing import CliRunner

from plausible.apps import pages as writing
from plausible.apps.cli import app

VOID = {"meta", "img", "br", "path", "rect", "link", "input"}
NASTY = '<script>alert("x")</script>'


class Page(HTMLParser):
    """A page as a list of (tag, attributes, text inside), with the path of open tags checked on the way."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.source, self.open, self.tags, self.words = text, [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {[tag for tag, *_ in self.open]}"

    def handle_starttag(self, tag, attributes):
        entry = [tag, dict(attributes), ""]
        self.tags.append(entry)
        if tag not in VOID:
            self.open.append(entry)

    def handle_startendtag(self, tag, attributes):
        self.tags.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for entry in self.open:
            entry[2] += data
        self.words.append(data)

    def all(self, *names):
        return [(tag, attributes, text) for tag, attributes, text in self.tags if tag in names]

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def tables(rows=240, seed=0):
    """Name → CSV text and the options that fit it."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=rows), rng.normal(size=rows)
    kinds = np.array(["low", "mid & more", NASTY])[np.digitize(x + 0.5 * rng.normal(size=rows), [-0.5, 0.5])]
    columns = {
        "curve": {"x": x, "y": np.sin(2 * x) + 0.2 * rng.normal(size=rows)},
        "several": {"x": x, "z": z, "u": x * z, "v <w>": 50 * x + rng.normal(size=rows)},
        "counts": {"x": x, "z": z, "visits": rng.poisson(np.exp(1 + 0.5 * x))},
        "classes": {"x": x, NASTY: z, "kind": kinds},
        "binary": {"x": x, "z": z, "ill": np.where(x + rng.normal(size=rows) > 0, "yes", "no")},
    }
    options = {
        "curve": ("-t", "y"),
        "several": ("-t", "u", "-t", "v <w>"),
        "counts": ("-t", "visits", "--likelihood", "poisson"),
        "classes": ("-t", "kind"),
        "binary": ("-t", "ill", "--likelihood", "bernoulli", "-m", "map"),
    }
    quote = '"{}"'.format
    texts = {}
    for name, content in columns.items():
        lines = [",".join(quote(str(c).replace('"', '""')) for c in content)]
        lines += [",".join(quote(str(v).replace('"', '""')) for v in row) for row in zip(*content.values())]
        texts[name] = "\n".join(lines) + "\n"
    return {name: (texts[name], options[name]) for name in texts}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Name → folder of a fitted run with its report."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, (text, options) in tables().items():
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
        found[name] = folder / name
        fitted = command(
            "fit",
            folder / f"{name}.csv",
            "-m",
            "ensemble",
            *options,
            "-o",
            found[name],
            "-q",
            "--epochs",
            15,
            "--hidden",
            8,
            "--test-fraction",
            0.4,
        )
        assert fitted.exit_code == 0, fitted.output
        assert command("report", found[name]).exit_code == 0
    csv = folder / "curve.csv"
    chains = ("-m", "ensemble", "--set", "method=sgld", "--set", "members=2", "--lr", 1e-4, "--epochs", 40)
    for name, options in {"chains": chains, "nothing": ("-m", "ensemble", "--test-fraction", 0, "--epochs", 2)}.items():
        found[name] = folder / name
        assert command("fit", csv, "-t", "y", "-o", found[name], "-q", "--hidden", 4, *options).exit_code == 0
        assert command("report", found[name]).exit_code == 0
    return found


@pytest.fixture(scope="session")
def pages(runs):
    """Name → parsed report."""
    return {name: Page((run / "report.html").read_text(encoding="utf-8")) for name, run in runs.items()}


@pytest.fixture
def draw_nothing(monkeypatch):
    """Called, it leaves figures empty from there on: drawing takes nine tenths of a report, and not every test looks at it."""
    return lambda: monkeypatch.setattr(writing, "chart", lambda draw, alt, key, **_: Markup("<svg></svg>"))


@pytest.fixture(scope="session")
def run_command():
    return command


@pytest.fixture(scope="session")
def parse():
    return Page
