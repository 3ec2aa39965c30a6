import gzip
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pooch
import pytest

from plausible.apps.datasets import acquire, catalogue, places
from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import Archive, Direct, Entry, File, Pieces
from plausible.apps.datasets.digests import canonical, digest, problem

BODY = bytes(range(256)) * 4000  # a megabyte, so that it comes in several chunks
SRC = str(Path(__file__).parents[3] / "src")


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def single(*urls, body=BODY, path="set/file.npz", content=None):
    return Entry("some", "", "1", "", "", "", files=(File(path, len(body), sha256(body), content, Direct(urls)),))


def below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_good_file_is_installed_once(server, cache):
    server.files["file.npz"] = BODY
    entry = single(f"{server.url}/file.npz")
    assert [path.read_bytes() for path in ensure(entry)] == [BODY]
    assert ensure(entry) == [cache / "set" / "file.npz"]
    assert server.asked["file.npz"] == 1
    assert below(cache) == ["set/file.npz"]


def test_the_data_folder_comes_before_the_cache_and_the_cache_before_the_origin(server, cache, tmp_path, monkeypatch):
    entry = single(f"{server.url}/file.npz")
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "file.npz").write_bytes(b"in the cache")
    assert ensure(entry)[0].read_bytes() == b"in the cache"
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "data" / "set" / "file.npz").write_bytes(b"in the folder")
    monkeypatch.setenv("PLAUSIBLE_DATA", str(tmp_path / "data"))
    assert ensure(entry)[0].read_bytes() == b"in the folder"
    assert not server.asked


@pytest.mark.parametrize("fault", ["short", 503, 429])
def test_passing_failures_are_tried_again(server, cache, fault):
    server.files["file.npz"] = BODY
    server.faults["file.npz"] = [fault, fault]
    assert ensure(single(f"{server.url}/file.npz"))[0].read_bytes() == BODY
    assert server.asked["file.npz"] == 3


@pytest.mark.parametrize(
    ("faults", "asked", "words"),
    [
        (["short"] * 3, 3, "512000 bytes read, 512000 more expected"),
        ([404], 1, "404 Not Found"),
        ([500] * 3, 3, "500 Internal Server Error"),
    ],
)
def test_lasting_failures_leave_nothing_and_say_what_to_do(server, cache, faults, asked, words):
    server.files["file.npz"] = BODY
    server.faults["file.npz"] = list(faults)
    with pytest.raises(FileNotFoundError) as caught:
        ensure(single(f"{server.url}/file.npz"))
    message = str(caught.value)
    assert words in message
    assert f"{server.url}/file.npz" in message
    assert "Set PLAUSIBLE_DATA to a folder that holds it" in message
    assert "set/file.npz" in message
    assert str(cache) in message
    assert "plausible data get some" in message
    assert server.asked["file.npz"] == asked
    assert below(cache) == []


def test_a_wrong_checksum_is_refused_and_the_next_mirror_is_asked(server, cache):
    server.files |= {"bad.npz": BODY[:-1] + b"x", "good.npz": BODY}
    with pytest.raises(FileNotFoundError, match=r"not the expected file, sha256 .*expected"):
        ensure(single(f"{server.url}/bad.npz"))
    assert below(cache) == []
    ensure(single(f"{server.url}/absent.npz", f"{server.url}/bad.npz", f"{server.url}/good.npz"))
    assert below(cache) == ["set/file.npz"]


def test_a_refused_connection_is_not_tried_again(cache, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    calls = []
    attempt = pooch.HTTPDownloader.__call__
    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", lambda *arguments: (calls.append(1), attempt(*arguments)))
    with pytest.raises(FileNotFoundError, match="Connection refused"):
        ensure(single(f"http://127.0.0.1:{port}/file.npz"))
    assert len(calls) == 1


def test_a_server_that_falls_silent_is_given_up(server, cache, monkeypatch):
    monkeypatch.setattr(acquire, "TIMEOUT", 0.2)
    monkeypatch.setattr(acquire, "RETRIES", 0)
    server.files["file.npz"], server.faults["file.npz"] = BODY, ["stall"]
    with pytest.raises(FileNotFoundError, match="timed out"):
        ensure(single(f"{server.url}/file.npz"))
    assert below(cache) == []


def test_offline_asks_nobody(server, cache, monkeypatch):
    monkeypatch.setenv("PLAUSIBLE_OFFLINE", "1")
    server.files["file.npz"] = BODY
    with pytest.raises(FileNotFoundError, match="PLAUSIBLE_OFFLINE is set"):
        ensure(single(f"{server.url}/file.npz"))
    assert not server.asked


def test_only_web_addresses_are_opened(cache, tmp_path):
    (tmp_path / "file").write_bytes(BODY)
    with pytest.raises(FileNotFoundError, match="not an http or https address"):
        ensure(single((tmp_path / "file").as_uri()))


def test_a_data_folder_that_is_none_is_named(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PLAUSIBLE_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PLAUSIBLE_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"nowhere, which is not a folder\)"):
        ensure(catalogue.entry("mnist"))


def test_sets_without_an_origin_say_so(cache):
    with pytest.raises(FileNotFoundError, match=r"no public origin gives ozone.csv") as caught:
        ensure(catalogue.entry("ozone"))
    assert "plausible data get" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path, cache, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PLAUSIBLE_CACHE", str(tmp_path / "file"))
    server.files["file.npz"] = BODY
    with pytest.raises(OSError, match=r"file/data"):
        ensure(single(f"{server.url}/file.npz"))


def test_the_bar_is_told_what_is_received_and_shows_only_on_a_terminal(server, cache, capsys, monkeypatch):
    seen = []
    update = acquire.Bar.update
    monkeypatch.setattr(
        acquire.Bar, "update", lambda self, count: (update(self, count), seen.append((self.label, self.done, self.total)))
    )
    server.files["file.npz"] = BODY
    ensure(single(f"{server.url}/file.npz"))
    received = [done for label, done, total in seen if (label, total) == ("file.npz", len(BODY))]
    assert len(received) == len(seen) > 1
    assert received == sorted(received)
    assert received[-1] == len(BODY)
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    with acquire.Bar(show=True) as bar:  # rich itself is not tested, only that it is called as it wants to be
        bar.label, bar.total = "file.npz", 2
        bar.update(1)
        bar.update(9)
        assert (bar._bar.tasks[0].completed, bar._bar.tasks[0].description) == (2, "file.npz")


def test_without_pooch_the_error_says_what_to_install(server, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FileNotFoundError, match=r"downloads need pooch: pip install 'plausible\[data\]'"):
        ensure(single(f"{server.url}/file.npz"))


def test_concurrent_gets_agree(server, cache):
    server.files["file.npz"] = BODY
    entry, results = single(f"{server.url}/file.npz"), []
    threads = [threading.Thread(target=lambda: results.append(ensure(entry)[0].read_bytes())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [BODY] * 6
    assert below(cache) == ["set/file.npz"]


KILLED = """
import sys
from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import Direct, Entry, File
ensure(Entry("some", "", "1", "", "", "", files=(File("set/file.npz", 1, "0", None, Direct((sys.argv[1],))),)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_while_downloading_leaves_nothing(server, cache, how):
    server.files["file.npz"], server.faults["file.npz"] = BODY, ["stall"]
    environment = {**os.environ, "PYTHONPATH": SRC}
    process = subprocess.Popen([sys.executable, "-c", KILLED, f"{server.url}/file.npz"], env=environment)
    assert server.stalled.wait(30)
    time.sleep(0.2)
    process.send_signal(how)
    assert process.wait(10) != 0
    assert below(cache) == []
    server.faults.clear()
    assert ensure(single(f"{server.url}/file.npz"))[0].read_bytes() == BODY
    assert below(cache) == ["set/file.npz"]


# Other packings


def test_content_counts_and_not_the_packing():
    raw = b'"","a","b"\n"1",2,"x, y"\n'
    same = b'rownames,a,b\r\n1,2,"x, y"\r\n'
    assert canonical("t.csv", raw) == canonical("t.csv", same)
    assert canonical("t.csv", raw) != canonical("t.csv", same.replace(b"2", b"3"))
    assert canonical("t.txt", b" 1  2\r\n3\n\n") == canonical("t.txt", b"1 2\n3") == b"1 2\n3\n"
    assert canonical("t.txt", b"1 2\n3") != canonical("t.txt", b"1 2 3")
    file = File("t.csv", len(raw), sha256(raw), digest(canonical("t.csv", raw)))
    assert problem(file, "t.csv", same) is None
    assert "content" in problem(file, "t.csv", same + b"2,3,z\n")
    assert "cannot be read" in problem(replace(file, path="t.tar.gz"), "t.tar.gz", b"nothing packed")


def packed(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return buffer.getvalue()


def test_pieces_become_one_archive(server, cache):
    original = {"set/b.txt": b"3 4\n", "set/a.txt": b"1\n2\n", "set/n_epochs.txt": b"40\n"}
    server.files |= {"a": b"1\r\n2\r\n", "b": b"3  4"}
    pieces = Pieces((("set/a.txt", f"{server.url}/a"), ("set/b.txt", f"{server.url}/b")))
    raw = packed(original)
    content = digest(canonical("set.tar.gz", raw))
    file = File("set.tar.gz", len(raw), sha256(raw), content, pieces)
    (path,) = ensure(Entry("some", "", "1", "", "", "", files=(file,)))
    assert problem(file, "set.tar.gz", path.read_bytes()) is None
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["set/a.txt", "set/b.txt"]
    path.unlink()
    server.files["b"] = b"3 5"
    with pytest.raises(FileNotFoundError, match="was put together from"):
        ensure(Entry("some", "", "1", "", "", "", files=(file,)))
    server.files.pop("b")
    with pytest.raises(FileNotFoundError, match="404"):
        ensure(Entry("some", "", "1", "", "", "", files=(file,)))
    assert below(cache) == []


def test_cifar10_is_cut_out_of_the_published_archive(server, cache, monkeypatch):
    batches = {f"data_batch_{part}": os.urandom(1000) for part in range(1, 6)} | {"test_batch": os.urandom(1000)}
    raw = packed({f"cifar-10-batches-bin/{name}.bin": batch for name, batch in batches.items()} | {"readme.html": b""})
    server.files["cifar.tar.gz"] = raw
    origin = Archive((f"{server.url}/cifar.tar.gz",), digest(raw, "md5"), "cifar10")
    known = catalogue.entry("cifar10")
    assert [file.name.partition(".")[0] for file in known.files] == list(batches)
    files = tuple(
        replace(file, content=digest(batches[file.name.partition(".")[0]], "md5"), source=origin) for file in known.files
    )
    (cache / "cifar10").mkdir(parents=True)
    (cache / "cifar10" / "data_batch_1.bin.xz").write_bytes(b"this one is here")
    ensure(replace(known, files=files))
    assert server.asked == {"cifar.tar.gz": 1}
    assert below(cache) == sorted(f"cifar10/{name}.bin{'.xz' * (name == 'data_batch_1')}" for name in batches)
    assert (cache / "cifar10" / "test_batch.bin").read_bytes() == batches["test_batch"]
    (cache / "cifar10" / "test_batch.bin").unlink()
    wrong = tuple(replace(file, content="md5:" + 32 * "0") for file in files)
    with pytest.raises(FileNotFoundError, match=r"test_batch.bin is not the expected file"):
        ensure(replace(known, files=wrong))
    server.files["cifar.tar.gz"] = raw[:-10]
    with pytest.raises(FileNotFoundError, match=r"it has md5 .*expected md5"):
        ensure(replace(known, files=files))
    broken = tuple(replace(file, source=replace(origin, digest=digest(raw[:-400], "md5"))) for file in files)
    server.files["cifar.tar.gz"] = raw[:-400]
    with pytest.raises(FileNotFoundError, match="cannot be unpacked"):
        ensure(replace(known, files=broken))


def reviews(folder):
    """The published archive, rebuilt from the repacked lines."""
    known, buffer = catalogue.entry("imdb"), io.BytesIO()
    with gzip.GzipFile("", "wb", 1, buffer) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for file in known.files:
            part = "train" if "train" in file.name else "test"
            lines = canonical(file.path, (folder / file.path).read_bytes()).decode().split("\n")
            for row in map(json.loads, reversed([line for line in lines if line])):
                raw = row["text"].encode()
                label = ("neg", "pos")[row["label"]]
                info = tarfile.TarInfo(f"aclImdb/{part}/{label}/{row['id']}_{row['rating']}.txt")
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
                if row["id"] == 0:
                    archive.addfile(tarfile.TarInfo(f"aclImdb/{part}/unsup/0_0.txt"))
    return buffer.getvalue()


@pytest.mark.slow
def test_imdb_is_repacked_from_the_published_archive_to_the_same_lines(data_folder, server, cache):
    raw = reviews(data_folder)
    server.files["imdb.tar.gz"] = raw
    origin = Archive((f"{server.url}/imdb.tar.gz",), digest(raw, "md5"), "imdb")
    known = catalogue.entry("imdb")
    paths = ensure(replace(known, files=tuple(replace(file, source=origin) for file in known.files)))
    assert [path.name for path in paths] == ["imdb_train.jsonl", "imdb_test.jsonl"]


@pytest.mark.parametrize("name", ["yacht", "trec"])
def test_real_pieces_give_the_content_of_the_catalogue(data_folder, server, cache, name):
    known = catalogue.entry(name)
    (file,) = known.files
    with tarfile.open(data_folder / file.path) as archive:
        for member, _ in file.source.members:
            server.files[member] = archive.extractfile(member).read()
    pieces = Pieces(tuple((member, f"{server.url}/{member}") for member, _ in file.source.members))
    (path,) = ensure(replace(known, files=(replace(file, source=pieces),)))
    assert problem(file, file.path, path.read_bytes()) is None
    assert places.find(file).place == "cache"


# The catalogue


def test_every_name_is_one_set_and_every_file_has_its_sums():
    files = [file for entry in catalogue.CATALOGUE.values() for file in entry.files]
    assert len({file.path for file in files}) == len(files)
    for entry in catalogue.CATALOGUE.values():
        assert entry.task
        assert entry.description
        assert entry.toy or (entry.licence and entry.citation and entry.origin.startswith("http"))
        assert entry.toy or entry.count > 0
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert not isinstance(file.source, Pieces | Archive) or file.content is not None
    urls = [url for file in files if isinstance(file.source, Direct | Archive) for url in file.source.urls]
    urls += [url for file in files if isinstance(file.source, Pieces) for _, url in file.source.members]
    assert all(url.startswith(("https://", "http://")) and " " not in url for url in urls)


def test_the_members_asked_for_are_those_that_the_archives_have(data_folder):
    for entry in catalogue.CATALOGUE.values():
        for file in entry.files:
            if isinstance(file.source, Pieces):
                with tarfile.open(data_folder / file.path) as archive:
                    skipped = ("n_epochs.txt", "n_hidden.txt", "n_splits.txt", "dropout_rates.txt", "tau_values.txt")
                    inside = [name for name in archive.getnames() if not name.endswith(skipped)]
                assert sorted(inside) == sorted(name for name, _ in file.source.members)


def test_sums_are_those_of_the_data_folder(data_folder):
    sums = dict(line.split()[::-1] for line in (data_folder / "SHA256SUMS").read_text().splitlines())
    for entry in catalogue.CATALOGUE.values():
        for file in entry.files:
            if (data_folder / file.path).exists():
                assert sums[file.path] == file.sha256
                assert (data_folder / file.path).stat().st_size == file.size


def test_unknown_names_are_refused_with_the_nearest():
    assert catalogue.entry("bostonHousing") is catalogue.entry("Boston")
    assert catalogue.entry("Fashion-MNIST").name == "fashion_mnist"
    with pytest.raises(ValueError, match="no data set is called 'cifr10': did you mean cifar10"):
        catalogue.entry("cifr10")
    with pytest.raises(ValueError, match="there are mnist, "):
        catalogue.entry("zzzzzz")
    with pytest.raises(TypeError, match="name must be"):
        catalogue.entry(3)


def test_the_cache_follows_the_environment_and_the_platform(monkeypatch):
    monkeypatch.setenv("PLAUSIBLE_CACHE", "/a")
    assert places.cache_folder() == Path("/a/data")
    monkeypatch.delenv("PLAUSIBLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setattr(sys, "platform", "linux")
    assert places.cache_folder() == Path("/b/plausible/data")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert places.cache_folder() == Path.home() / ".cache" / "plausible" / "data"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert places.cache_folder() == Path.home() / "Library" / "Caches" / "plausible" / "data"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/c")
    assert places.cache_folder() == Path("/c/plausible/data")


def test_a_mirror_that_gives_too_much_is_left(server, cache):
    """However long an answer is, ten times what the file has is the most that is taken."""
    server.files |= {"endless.npz": bytes(20 * len(BODY)), "good.npz": BODY}
    with pytest.raises(FileNotFoundError, match=r"more than .* bytes came, so it is not the expected file"):
        ensure(single(f"{server.url}/endless.npz"))
    ensure(single(f"{server.url}/endless.npz", f"{server.url}/good.npz"))
    assert below(cache) == ["set/file.npz"]


def test_what_unpacks_to_too_much_is_not_unpacked():
    raw = gzip.compress(bytes(10**7))
    file = File("set/a.gz", size=len(raw), sha256="0" * 64, content="sha256:0")
    assert problem(file, file.path, raw) == f"it cannot be read: it unpacks to more than {200 * len(raw):,} bytes"
