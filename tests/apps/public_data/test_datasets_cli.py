import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plausible.apps.cli import app
from plausible.apps.cli.datasets import size_text
from plausible.apps.datasets.catalogue import CATALOGUE

SMALL = "small/mcycle.csv"


def plausible(*arguments):
    return CliRunner().invoke(app, ["data", *arguments], catch_exceptions=False)


def error_of(result, code=1):
    assert result.exit_code == code, result.output
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("plausible: error: ")
    assert "Traceback" not in result.output
    return line


@pytest.fixture
def mirrored(data_folder, server, cache, monkeypatch):
    """The small files of the data folder at an address of this machine."""
    monkeypatch.setenv("PLAUSIBLE_MIRROR", server.url + "/")
    for name in ("mcycle", "robot_arm", "ozone"):
        for file in CATALOGUE[name].files:
            server.files[file.path] = (data_folder / file.path).read_bytes()
    return server


def rows(result):
    return {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}


def test_list_has_every_set_and_where_it_is(data_folder, cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    listed = rows(plausible("list"))
    assert [name for name in CATALOGUE if name not in listed] == []
    assert "not here" in listed["mnist"]
    assert "(11.6 MB)" in listed["mnist"]
    assert "not here *" in listed["ozone"]
    assert "toy" in listed["two_moons"]
    (cache / "small").mkdir(parents=True)
    (cache / SMALL).write_bytes(b"x" * 12)
    monkeypatch.setenv("PLAUSIBLE_DATA", str(data_folder))
    listed = rows(plausible("list"))
    assert "data folder" in listed["mnist"]
    assert "11.6 MB" in listed["mnist"]
    assert "data folder" in listed["mcycle"]
    assert "cannot be downloaded" not in plausible("list").stdout
    monkeypatch.delenv("PLAUSIBLE_DATA")
    assert "cache" in rows(plausible("list"))["mcycle"]
    assert "12 B" in rows(plausible("list"))["mcycle"]


def test_list_names_sets_that_are_here_in_part(cache, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (cache / "small/robot_arm").mkdir(parents=True)
    (cache / "small/robot_arm/Mackay-inputs.data").write_bytes(b"")
    assert "cache, 1 of 2" in rows(plausible("list"))["robot_arm"]


def test_get_downloads_what_is_missing_and_says_what_was_done(mirrored, cache):
    result = plausible("get", "mcycle", "robot_arm", "blundell", "mcycle")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"plausible: mcycle: 1 file downloaded into {cache}",
        f"plausible: robot_arm: 2 files downloaded into {cache}",
        "plausible: blundell needs no files: it is made from a seed",
    ]
    again = plausible("get", "mcycle")
    assert again.stderr == "plausible: mcycle is here already (cache)\n"
    assert mirrored.asked[SMALL] == 1
    assert plausible("get", "--quiet", "ozone").output == ""  # by a mirror, though it has no public origin
    assert (cache / "small/ozone.csv").exists()


def test_get_of_several_goes_on_after_a_failure(mirrored, cache, monkeypatch):
    mirrored.files[SMALL] = mirrored.files[SMALL][:-3]
    monkeypatch.setitem(CATALOGUE, "mcycle", without_origin("mcycle"))
    result = plausible("get", "mcycle", "robot_arm")
    assert error_of(result) == "plausible: error: 1 of 2 data sets could not be had"
    assert "plausible: data set 'mcycle' is not here" in result.stderr
    assert (cache / "small/robot_arm/Mackay-outputs.data").exists()
    assert not (cache / SMALL).exists()


def without_origin(name):
    from dataclasses import replace

    entry = CATALOGUE[name]
    return replace(entry, files=tuple(replace(file, source=None) for file in entry.files))


def test_errors_are_one_line(cache, monkeypatch):
    monkeypatch.setenv("PLAUSIBLE_OFFLINE", "1")
    result = plausible("get", "mnist")
    assert len(result.stderr.strip().splitlines()) == 1
    line = error_of(result)
    for words in ("mnist/train-images-idx3-ubyte.gz", "PLAUSIBLE_OFFLINE is set", "Set PLAUSIBLE_DATA to a folder"):
        assert words in line
    assert "did you mean mnist" in error_of(plausible("get", "mnst"))
    assert "did you mean mnist" in error_of(plausible("where", "mnst"))
    assert plausible("get").exit_code == 2
    assert plausible("fetch", "mnist").exit_code == 2


def test_where_prints_paths_and_checks(mirrored, cache, data_folder, monkeypatch):
    assert "not here: small/mcycle.csv; try: plausible data get mcycle" in error_of(plausible("where", "mcycle"))
    plausible("get", "mcycle", "robot_arm")
    assert plausible("where", "mcycle").stdout == f"{cache / SMALL}\n"
    assert plausible("where", "mcycle", "--check").stdout == f"{cache / SMALL}: ok\n"
    assert "toys.gap" in plausible("where", "gap").stdout
    folders = plausible("where").stdout
    assert folders.splitlines() == ["data folder: PLAUSIBLE_DATA is not set", f"cache: {cache}"]
    assert "3 files checked" in plausible("where", "--check").stdout
    raw = (cache / SMALL).read_bytes()
    (cache / SMALL).write_bytes(raw.replace(b"2.4", b"2.5"))
    harmed = plausible("where", "mcycle", "--check")
    assert f"{cache / SMALL}: damaged: its content has sha256" in harmed.stdout
    assert "1 of 1 file not as published" in error_of(harmed)
    assert "1 of 3 files not as published" in error_of(plausible("where", "--check"))
    assert plausible("where", "mcycle").exit_code == 0  # not looked at without --check
    monkeypatch.setenv("PLAUSIBLE_DATA", str(data_folder / "nowhere"))
    assert "nowhere (does not exist)" in plausible("where").stdout


def test_the_data_folder_is_as_published(data_folder):
    result = plausible("where", "--check")
    assert result.exit_code == 0, result.output
    files = [file for entry in CATALOGUE.values() for file in entry.files if (data_folder / file.path).exists()]
    assert f"{len(files)} files checked" in result.stdout
    assert len(files) >= 44


def test_listing_does_not_load_torch():
    run = "from plausible.apps.cli import app; app(['data', 'list'], standalone_mode=False)"
    code = f"import sys; {run}; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_sizes_in_words():
    assert [size_text(size) for size in (0, 999, 1000, 41_507, 898_199, 11_594_722, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "41.5 kB",
        "898 kB",
        "11.6 MB",
        "2.5 GB",
    ]
