"""The page: complete, escaped, whole by itself, and usable without eyes or mouse."""

import itertools
import re
import stat
from importlib import resources
from io import BytesIO
from urllib.request import urlopen

import numpy as np
import pytest
import torch

import plausible as pl
from plausible.apps import pages as writing
from plausible.apps.report.figures import limits
from plausible.apps.report.words import cell, number, percent

KINDS = ["curve", "several", "counts", "classes", "binary", "chains", "nothing"]


@pytest.mark.parametrize("name", KINDS)
def test_structure_for_keyboards_and_screen_readers(pages, name):
    page = pages[name]
    assert [a["lang"] for _, a, _ in page.all("html")] == ["en"]
    for landmark in ("header", "nav", "main", "footer", "h1", "title"):
        assert len(page.all(landmark)) == 1, landmark
    levels = [int(tag[1]) for tag, *_ in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [a["id"] for _, a, _ in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for _, a, _ in page.all("a")]
    assert targets[0] == "#main"  # the skip link is the first thing a keyboard meets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert all(a["aria-labelledby"] in ids for _, a, _ in page.all("section"))
    assert all(text for *_, text in page.all("figure"))
    assert len(page.all("figure")) == len(page.all("figcaption"))
    charts = [a for _, a, _ in page.all("svg") if "chart" in a.get("class", "")]
    assert len(charts) == len(page.all("figure"))
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in charts)
    assert "nan" not in " ".join(a["aria-label"] for a in charts)
    assert len(page.all("table")) == len(page.all("caption"))
    assert all(a.get("scope") in ("row", "col") for _, a, _ in page.all("th"))
    for _, attributes, _ in page.tags:
        if attributes.get("role") == "region":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]


@pytest.mark.parametrize("name", KINDS)
def test_the_page_asks_for_nothing(pages, name):
    page = pages[name]
    assert not page.all("script", "link", "iframe", "object", "embed", "base", "form")
    assert not any(attribute.startswith("on") for _, attributes, _ in page.tags for attribute in attributes)
    assert not any(
        key in a for _, a, _ in page.tags for key in ("src", "srcset", "action") if not a.get(key, "").startswith("data:")
    )
    assert not re.findall(r"url\((?!#)", page.source)
    assert all(a["href"].startswith("#") for _, a, _ in page.tags if "href" in a)
    assert "http:" not in page.source
    assert "https:" not in page.source
    policy = next(a["content"] for _, a, _ in page.all("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_names_from_the_table_are_only_text(pages):
    for name in ("classes", "several"):
        assert not pages[name].all("script")
    assert '<script>alert("x")</script>' in pages["classes"].text
    assert "v <w>" in pages["several"].text
    assert not any(tag == "w" for tag, *_ in pages["several"].tags)


def figures(page):
    return {text.split(".")[0] for _, _, text in page.all("figcaption")}


def test_each_task_has_its_figures(pages):
    numbers = {"Probability integral transform", "Calibration of quantiles", "Predictions and truth", "Risk and coverage"}
    assert numbers | {"Predictive bands", "Where the uncertainty comes from"} <= figures(pages["curve"])
    assert numbers <= figures(pages["counts"])
    assert len(pages["several"].all("figure")) == 2 * 4 + 3 + 3  # of each target, of training, and of columns
    for name in ("classes", "binary"):
        assert {"Reliability", "Risk and coverage", "log joint"} <= figures(pages[name])
        assert not figures(pages[name]) & {"Predictive bands", "Predictions and truth"}
    assert {"Trace 1", "Ranks", "Convergence"} <= figures(pages["chains"])
    assert figures(pages["nothing"]) == {"log joint", "log likelihood", "log prior", "Importance of columns", "x"}


def test_the_numbers_of_the_reliability_diagram_have_their_interval(pages):
    heads = [text for tag, _, text in pages["classes"].all("th")]
    assert "90 % interval" in heads
    cells = [text for tag, _, text in pages["classes"].all("td")]
    assert any(re.fullmatch(r"[<>]?\d+\u00a0% to [<>]?\d+\u00a0%", text) for text in cells)


def test_what_was_fitted_is_said(pages):
    text = pages["chains"].text
    for words in (
        "SGLD(epochs=40",
        "members=2",
        "1-4-1 perceptron, relu",
        "Default()",
        "seed",
        "PyTorch",
        "steps in",
        "curve.csv",
    ):
        assert words in text, words
    assert "No rows were held out" in pages["nothing"].text
    assert "has no epistemic uncertainty" in pages["binary"].text
    assert "disagree" in pages["chains"].text or "settled" in pages["chains"].text
    assert "counts from 0 to" in pages["counts"].text
    for name in ("curve", "classes"):
        assert "Least certain" in pages[name].text
        assert "Most certain" in pages[name].text


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(
        w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), parts)
    )


@pytest.mark.parametrize("theme", [writing.LIGHT, writing.DARK], ids=["light", "dark"])
def test_colours_have_contrast(theme):
    """WCAG 2: 4.5 for text, 3 for lines that carry meaning."""

    def contrast(one, two):
        high, low = sorted((luminance(theme[one]), luminance(theme[two])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "card"):
        for text in ("ink", "soft", "main", "alarm", "good", "doubt"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for mark in ("edge", "second", "third", "fourth"):
        assert contrast(mark, "card") >= 3, mark


def test_every_colour_used_is_defined(pages):
    sheet = (resources.files("plausible.apps") / "templates" / "style.css").read_text(encoding="utf-8")
    used = set(re.findall(r"var\(--(\w+)\)", sheet + "".join(page.source for page in pages.values())))
    assert used <= set(writing.LIGHT)
    assert set(writing.LIGHT) == set(writing.DARK)


def test_charts_have_no_colours_of_their_own(pages):
    """They follow light and dark by the variables of the page."""
    for page in pages.values():
        charts = re.findall(r'<svg class="chart".*?</svg>', page.source, re.DOTALL)
        assert charts
        assert not {colour for chart in charts for colour in re.findall(r"(?:fill|stroke): (#\w+)", chart)}


# Parts


def test_limits_are_never_empty():
    assert limits([3.0, 3.0])[0] < 3 < limits([3.0, 3.0])[1]
    assert limits([np.nan]) == (0, 1)


def test_numbers_as_text():
    assert [number(v) for v in (0, 1234.5, -0.01234, 3e-8, float("inf"), 33.0)] == [
        "0",
        "1\u202f234",
        "−0.0123",
        "3.00e−8",
        "∞",
        "33",
    ]
    assert [percent(v) for v in (0.834, 0.9999, 1, 0, 0.0001)] == [
        "83\u00a0%",
        ">99\u00a0%",
        "100\u00a0%",
        "0\u00a0%",
        "<1\u00a0%",
    ]


def test_cells_keep_six_digits_of_a_fraction_and_all_of_a_name():
    shown = {
        "0.40931199443649": "0.409312",
        "-12.3456789": "-12.3457",
        "1.5": "1.5",
        "0.000123456": "0.000123456",
        "1234567.89": "1.23457e+06",
        "1.23456789e-9": "1.23457e-09",
        "20240131": "20240131",
        "007123456": "007123456",
        "mid & more": "mid & more",
        "1.2.3456789": "1.2.3456789",
        "": "",
        "12345678901234567890": "12345678901234567890",
    }
    assert {text: cell(text) for text in shown} == shown


def test_examples_show_no_more_digits_than_that(pages):
    cells = [text for _, _, text in pages["curve"].all("td")]
    assert any(re.fullmatch(r"-?\d\.\d{5,6}", text) for text in cells)
    assert not any(re.search(r"[1-9]\.?\d*\.?\d{7}", text) for text in cells)


def test_shares_of_counts_have_two_names(pages):
    assert "inside the 90 % interval, both ends included" in pages["counts"].text
    assert "with randomised ends" in pages["counts"].text
    assert "ends" not in pages["curve"].text.partition("Held-out scores")[2].partition("Can it be")[0]


def test_a_picture_is_a_png():
    from matplotlib.image import imread

    for pixels in (np.random.default_rng(0).random((5, 7, 3)), np.random.default_rng(1).random((4, 6))):
        address = writing.png(pixels)
        assert address.startswith("data:image/png;base64,")
        shown = imread(BytesIO(urlopen(address).read()))
        expected = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
        np.testing.assert_allclose(shown[..., :3], expected, atol=1 / 128)


# From Python


@pytest.fixture(scope="module")
def digits():
    torch.manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.randn(90, 1, 4, 4) * 0.5 + y[:, None, None, None]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    return pl.fit(network, (x, y), pl.Ensemble(pl.MAP(epochs=3), members=2), progress=False), x, y


def test_a_report_of_images(digits, parse, tmp_path, draw_nothing):
    posterior, x, y = digits
    text = pl.report.html(
        posterior, x, y, classes=["a", "b", "<c>"], images=True, title="A & B", out=tmp_path / "new" / "r.html"
    )
    assert (tmp_path / "new" / "r.html").read_text(encoding="utf-8") == text
    page = parse(text)
    assert len(page.all("img")) == 12
    assert all(a["alt"] for _, a, _ in page.all("img"))
    assert page.all("h1")[0][2] == "A & B"
    assert "<c>" in page.text
    draw_nothing()
    for shape in ((90, 3, 4, 4), (90, 4, 4, 3), (90, 4, 4)):
        assert len(parse(pl.report.html(posterior, x, y, images=torch.rand(shape))).all("img")) == 12


def test_a_report_of_one_input_has_bands_and_masks_are_obeyed(parse, draw_nothing):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 80)[:, None]
    y = torch.cat([x, -x], 1) + 0.1 * torch.randn(80, 2)
    posterior = pl.fit(torch.nn.Linear(1, 2), (x, y), pl.MAP(epochs=5), progress=False)
    mask = torch.ones(80, 2, dtype=torch.bool)
    mask[:50, 0] = False
    broken = torch.where(mask, y, torch.nan)
    page = parse(pl.report.html(posterior, x, broken, names=["up", "down"], mask=mask))
    assert "30 rows" in page.text
    assert "80 rows" in page.text
    draw_nothing()
    page = parse(pl.report.html(posterior, x, y, names=["up", "down"]))
    assert "Predictive bands" in figures(page)
    assert "30 rows" not in page.text


def test_dense_classes_and_many_outputs_are_judged_together(parse):
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    wide = pl.fit(torch.nn.Linear(3, 20), (x, torch.randn(20, 20)), pl.MAP(epochs=2), progress=False)
    assert "400 examples" in parse(pl.report.html(wide, x, torch.randn(20, 20))).text
    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Unflatten(1, (4, 2)))
    dense = pl.fit(network, (x, torch.randint(2, (20, 4))), pl.MAP(epochs=2), progress=False)
    assert "80 examples" in parse(pl.report.html(dense, x, torch.randint(2, (20, 4)))).text


def test_several_yes_and_no_targets_with_long_names(parse):
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), (torch.rand(60, 2) > 0.5).float()
    posterior = pl.fit(torch.nn.Linear(2, 2), (x, y), pl.MAP(epochs=2), likelihood=pl.likelihoods.Bernoulli(), progress=False)
    page = parse(pl.report.html(posterior, x, y, names=["a" * 200, "b"], classes=[["out", "in"], ["left", "right"]]))
    assert [text for _, _, text in page.all("h3")].count("a" * 200) == 3  # verdicts, figures, examples
    shown = {word for _, _, text in page.all("td") for word in re.findall("out|in|left|right", text)}
    assert shown == {"out", "in", "left", "right"}
    right = ((posterior.predict(x).probs > 0.5) == (y > 0.5)).float().mean(0)
    for share in right.tolist():
        assert percent(share, 1).replace("\u00a0", " ") in page.text


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_held_out_rows_accuse_nobody(rows, parse):
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), torch.randn(60, 1)
    posterior = pl.fit(torch.nn.Linear(2, 1), (x, y), pl.MAP(epochs=2), progress=False)
    page = parse(pl.report.html(posterior, x[:rows], y[:rows]))
    assert "too few" in page.text
    prose = " ".join(text for _, _, text in page.all("p", "caption", "figcaption"))
    assert not re.search(r"\b1 (held-out )?(rows|examples)", prose)
    assert ("The only held-out example" in page.text) == (rows == 1)
    assert "confident" not in page.text.partition("What was fitted")[2].partition("Can it be")[0]


def test_constant_targets(parse):
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), torch.randn(60, 1)
    posterior = pl.fit(torch.nn.Linear(2, 1), (x, y), pl.MAP(epochs=2), progress=False)
    constant = parse(pl.report.html(posterior, x, torch.ones(60, 1)))
    assert "all held-out targets are the same" in constant.text


def test_bad_arguments_of_html(digits):
    posterior, x, y = digits
    with pytest.raises(TypeError, match="posterior must be a Posterior"):
        pl.report.html(torch.nn.Linear(1, 1), x, y)
    with pytest.raises(ValueError, match="classes must name 3"):
        pl.report.html(posterior, x, y, classes=["a", "b"])
    with pytest.raises(ValueError, match=r"images must be .* N = 90"):
        pl.report.html(posterior, x, y, images=torch.rand(9, 4, 4))
    with pytest.raises(ValueError, match="names must hold 1 name"):
        pl.report.html(posterior, x, y, names=["a", "b"])
    with pytest.raises(TypeError, match="names must be a list"):
        pl.report.html(posterior, x, y, names="kind")
    with pytest.raises(ValueError, match=r"(?i)targets|y "):
        pl.report.html(posterior, x, y[:5])


# The command


def test_the_command_writes_where_it_is_told_and_replaces(runs, run_command, tmp_path):
    out = tmp_path / "deep" / "page.html"
    for _ in range(2):
        result = run_command("report", runs["nothing"], "--out", out)
        assert result.exit_code == 0
        assert str(out) in result.stderr
    assert out.read_text(encoding="utf-8") == (runs["nothing"] / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_what_the_command_refuses(runs, run_command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for arguments, message in {
        ("report", tmp_path / "empty"): "not a run of plausible",
        ("report", tmp_path / "absent"): "is not a folder",
        ("report", runs["binary"], "-o", tmp_path): "is a folder",
        ("report", runs["binary"], "-o", tmp_path / "file" / "page.html"): "cannot be written",
    }.items():
        result = run_command(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_folder_that_cannot_be_written(runs, tmp_path, monkeypatch):
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        (folder / "probe").touch()
        (folder / "probe").unlink()
        pytest.skip("permissions do not bind this user")
    except PermissionError:
        with pytest.raises(ValueError, match="cannot be written"):
            pl.report.write(runs["binary"], folder / "page.html")
    finally:
        folder.chmod(0o700)
