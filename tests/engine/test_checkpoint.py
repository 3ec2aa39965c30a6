"""Checkpoints: a run that is killed at any moment and resumed ends with the bits of one that was not."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import plausible as pl
from plausible.core import storage
from plausible.core.schedules import Cosine
from plausible.core.weights import clone
from plausible.engine.checkpoint import Checkpointer, refuse_other

QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_files_are_flushed_to_the_disk_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    renamed = os.replace
    monkeypatch.setattr(os, "fsync", lambda _: events.append("flush"))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), renamed(*paths)))
    storage.write_atomically(tmp_path / "file", b"content")
    assert events[:2] == ["flush", "rename"]
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_atomically(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write_atomically(tmp_path / "file", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


class Stop(Exception):
    """Imitates a kill inside this process."""


def _stop_at(step: int) -> Any:
    def callback(number: int, _: Any) -> None:
        if number >= step:
            raise Stop

    return callback


def _data() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(30, 2, generator=stream)
    return x, (x[:, :1] * x[:, 1:]).sin() + 0.2 * torch.randn(30, 1, generator=stream)


def _network(width: int = 8) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 1))


METHODS: dict[str, pl.Method] = {
    "map": pl.MAP(epochs=7, batch_size=8, lr=Cosine(0.02)),
    "stopping": pl.MAP(epochs=30, batch_size=8, lr=0.1, patience=3, holdout=0.3),
    "sgld": pl.SGLD(epochs=7, batch_size=8, lr=1e-3, burn_in=0.3, thin=2),
    "ensemble": pl.Ensemble(pl.MAP(epochs=7, batch_size=8, lr=Cosine(0.02)), members=3),
    "stopping members": pl.Ensemble(pl.MAP(epochs=30, batch_size=8, lr=0.1, patience=3, holdout=0.3), members=3),
    "chains": pl.Ensemble(pl.SGLD(epochs=7, batch_size=8, lr=1e-3, burn_in=0.3, thin=2), members=2),
}


def _fit(name: str = "map", data: Any = None, net: nn.Module | None = None, **settings: Any) -> pl.Posterior:
    method = METHODS[name] if isinstance(name, str) else name
    return pl.fit(net or _network(), data or _data(), method, **{**QUIET, "seed": 4, **settings})


def _same(one: pl.Posterior, two: pl.Posterior) -> bool:
    x, _ = _data()
    a, b = (p.store.get(range(len(p.store)), "cpu") for p in (one, two))
    equal = set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)
    return equal and one.history == two.history and torch.equal(one.functions(x), two.functions(x))


# ---------------------------------------------------------------------------------------------------------------------
# Resumed = uninterrupted


@pytest.mark.parametrize("name", METHODS)
def test_resumed_equals_uninterrupted_wherever_it_stopped(name: str, tmp_path: Path) -> None:
    whole = _fit(name)
    steps = whole.run["steps"]
    stops = {1, 5, steps // 2, steps - 1} if METHODS[name].members is None else {steps // 2, steps - 1}
    for number, at in enumerate(sorted(stops)):
        place = pl.Checkpoint(tmp_path / str(number), steps=3)
        with pytest.raises(Stop):
            _fit(name, checkpoint=place, callbacks=[_stop_at(at)])
        resumed = _fit(name, checkpoint=place)
        assert _same(whole, resumed)
        assert resumed.run["steps"] == steps


@pytest.mark.parametrize("name", ["map", "sgld", "stopping members"])
def test_a_run_stopped_again_and_again_ends_the_same(name: str, tmp_path: Path) -> None:
    whole = _fit(name)
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    for at in range(4, whole.run["steps"], 5):
        with pytest.raises(Stop):
            _fit(name, checkpoint=place, callbacks=[_stop_at(at)])
    assert _same(whole, _fit(name, checkpoint=place))


def test_how_often_it_is_written_does_not_matter(tmp_path: Path) -> None:
    whole = _fit("sgld")
    for number, place in enumerate(
        [
            pl.Checkpoint(tmp_path / "0", steps=1),
            pl.Checkpoint(tmp_path / "1", seconds=1e-6),
            tmp_path / "2",
            str(tmp_path / "3"),
        ]
    ):
        assert _same(whole, _fit("sgld", checkpoint=place)), number


def test_the_user_s_generator_and_the_module_are_left_alone(tmp_path: Path) -> None:
    net, state = _network(), torch.get_rng_state()
    before = {n: v.clone() for n, v in net.state_dict().items()}
    place = pl.Checkpoint(tmp_path / "run", steps=3)
    with pytest.raises(Stop):
        _fit("map", net=net, checkpoint=place, callbacks=[_stop_at(9)])
    _fit("map", net=net, checkpoint=place)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())


def test_the_start_of_the_module_does_not_matter_when_resuming(tmp_path: Path) -> None:
    # A program that does not seed its network starts elsewhere each time; the run goes on from its checkpoint all the same.
    whole = _fit("map")
    place = pl.Checkpoint(tmp_path / "run", steps=3)
    with pytest.raises(Stop):
        _fit("map", checkpoint=place, callbacks=[_stop_at(9)])
    other = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    assert _same(whole, _fit("map", net=other, checkpoint=place))


class Stream:
    """Loaders of each kind, made anew as a new process would."""

    @staticmethod
    def ordered() -> DataLoader:
        return DataLoader(TensorDataset(*_data()), batch_size=7)

    @staticmethod
    def shuffled() -> DataLoader:
        return DataLoader(TensorDataset(*_data()), batch_size=7, shuffle=True)

    @staticmethod
    def own() -> DataLoader:
        generator = torch.Generator().manual_seed(9)
        return DataLoader(TensorDataset(*_data()), batch_size=7, shuffle=True, drop_last=True, generator=generator)

    @staticmethod
    def replaced() -> DataLoader:
        sampler = torch.utils.data.RandomSampler(TensorDataset(*_data()), replacement=True, num_samples=21)
        return DataLoader(TensorDataset(*_data()), batch_size=7, sampler=sampler)


@pytest.mark.parametrize(
    ("name", "kind"), [("map", "ordered"), ("map", "shuffled"), ("map", "own"), ("map", "replaced"), ("chains", "shuffled")]
)
def test_streams_resume_with_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    loader = getattr(Stream, kind)
    whole = _fit(name, data=loader())
    per_epoch = len(loader())
    for at in (2, per_epoch, 3 * per_epoch - 1):
        place = pl.Checkpoint(tmp_path / str(at), steps=1)
        with pytest.raises(Stop):
            _fit(name, data=loader(), checkpoint=place, callbacks=[_stop_at(at)])
        assert _same(whole, _fit(name, data=loader(), checkpoint=place))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "own"])
def test_streams_with_workers_resume_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(9) if kind == "own" else None
        return DataLoader(TensorDataset(*_data()), batch_size=7, shuffle=True, num_workers=1, generator=generator)

    whole = _fit("map", data=loader())
    place = pl.Checkpoint(tmp_path / "run", steps=1)
    with pytest.raises(Stop):
        _fit("map", data=loader(), checkpoint=place, callbacks=[_stop_at(7)])
    assert _same(whole, _fit("map", data=loader(), checkpoint=place))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["tensors", "shuffled", "own"])
def test_compiled_runs_resume_with_the_same_bits(kind: str, tmp_path: Path, compiler: None) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1))
    loader = None if kind == "tensors" else {"shuffled": Stream.shuffled, "own": Stream.own}[kind]
    method = pl.SGLD(epochs=4, batch_size=5, lr=1e-3, burn_in=0.0, thin=1)

    def fitted(**settings: Any) -> pl.Posterior:
        return _fit(method, data=loader and loader(), net=net, compile=True, **settings)  # type: ignore[arg-type]

    whole = fitted()
    assert whole.run["mode"] == "compiled"
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(Stop):
        fitted(checkpoint=place, callbacks=[_stop_at(7)])
    resumed = fitted(checkpoint=place)
    assert resumed.run["mode"] == "compiled"
    assert _same(whole, resumed)
    assert _same(whole, _fit(method, data=loader and loader(), net=net, compile=False, checkpoint=place))  # type: ignore[arg-type]


def test_the_way_of_running_is_stored(tmp_path: Path) -> None:
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(Stop):
        _fit("map", checkpoint=place, callbacks=[_stop_at(9)])
    resumed = _fit("map", checkpoint=place, compile=True)  # the rest is not compiled either: the same bits
    assert resumed.run["mode"] == "eager"
    assert _same(resumed, _fit("map"))


# ---------------------------------------------------------------------------------------------------------------------
# Finished runs


@pytest.mark.parametrize("name", METHODS)
def test_a_finished_checkpoint_returns_at_once(name: str, tmp_path: Path) -> None:
    heard: list[int] = []
    first = _fit(name, checkpoint=tmp_path / "run")
    again = _fit(name, checkpoint=tmp_path / "run", callbacks=[lambda step, _: heard.append(step)])
    assert not heard
    assert _same(first, again)
    assert again.run["steps"] == first.run["steps"]
    assert not again.interrupted


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only, and this test runs in another")
    for name in ("map", "sgld"):
        interrupt = lambda step, _: step == 18 and os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
        with pytest.warns(UserWarning, match="call fit again with the same checkpoint to go on"):
            part = _fit(name, checkpoint=tmp_path / name, callbacks=[interrupt])
        assert part.interrupted
        assert part.run["steps"] < 28
        assert _same(_fit(name), _fit(name, checkpoint=tmp_path / name))


# ---------------------------------------------------------------------------------------------------------------------
# Another run's checkpoint is refused


@pytest.fixture
def started(tmp_path: Path) -> pl.Checkpoint:
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(Stop):
        _fit("map", checkpoint=place, callbacks=[_stop_at(9)])
    return place


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 5}, r"seed was 4 and is now 5"),
        ({"name": replace(METHODS["map"], epochs=13)}, r"method.epochs was 7 and is now 13"),
        ({"name": replace(METHODS["map"], lr=Cosine(0.03))}, r"method.lr.start was 0.02 and is now 0.03"),
        ({"name": replace(METHODS["map"], lr=0.02)}, r"method.lr was .*Cosine.* and is now 0.02"),
        ({"name": replace(METHODS["map"], patience=3)}, r"method.patience was .auto. and is now 3"),
        ({"name": "sgld"}, r"method.* was"),
        ({"data": (_data()[0] + 1e-3, _data()[1])}, r"data was"),
        ({"data": (_data()[0], _data()[1].roll(1, 0))}, r"data was"),
        ({"data": (*_data(), torch.ones(30))}, r"data was"),
        ({"data": (_data()[0][:29], _data()[1][:29])}, r"likelihood.* was .* and is now"),
        ({"likelihood": pl.likelihoods.StudentT()}, r"likelihood.* was"),
        ({"prior": pl.priors.Gaussian(2.0)}, r"prior.* was"),
        ({"where": "4.*"}, r"random was"),
        (
            {"net": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))},
            r"weights\.2\.weight was None and is now \[1, 8\]",
        ),
        ({"net": _network(9)}, r"weights\.0\.weight was \[8, 2\] and is now \[9, 2\]"),
    ],
)
def test_another_run_is_refused_naming_the_difference(change: dict[str, Any], difference: str, started: pl.Checkpoint) -> None:
    before = {p.name: p.read_bytes() for p in Path(started.path).iterdir() if p.is_file()}
    with pytest.raises(ValueError, match=difference) as caught:
        _fit(**change, checkpoint=started)
    assert "belongs to another run" in str(caught.value)
    assert "or another folder" in str(caught.value)
    assert before == {p.name: p.read_bytes() for p in Path(started.path).iterdir() if p.is_file()}  # nothing was touched
    assert _same(_fit("map"), _fit("map", checkpoint=started))


def test_differences_are_named_by_their_path() -> None:
    refuse_other({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, Path("x/checkpoint.json"))
    with pytest.raises(ValueError, match=r"a\.b was \[1, 2\] and is now \[1, 3\] \(and 1 more\)"):
        refuse_other({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}, "c": 1}, Path("x/checkpoint.json"))


# ---------------------------------------------------------------------------------------------------------------------
# Damage and leftovers


def _state_file(place: pl.Checkpoint) -> Path:
    (file,) = Path(place.path).glob("state-*.safetensors")
    return file


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_state_is_a_clear_error(keep: int, started: pl.Checkpoint) -> None:
    file = _state_file(started)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"state-.* is damaged or was changed: its checksum"):
        _fit("map", checkpoint=started)


def test_a_flipped_bit_is_a_clear_error(started: pl.Checkpoint) -> None:
    file = _state_file(started)
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or was changed"):
        _fit("map", checkpoint=started)


def test_a_missing_state_is_a_clear_error(started: pl.Checkpoint) -> None:
    _state_file(started).unlink()
    with pytest.raises(ValueError, match="is missing: the folder is incomplete"):
        _fit("map", checkpoint=started)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda _: "", "is damaged"),
        (lambda _: "[]\n", "expected a JSON object"),
        (lambda text: text.replace('"step": ', '"step": 1'), "its checksum does not fit"),
        (lambda _: "\x00" * 50, "is damaged"),
    ],
)
def test_a_damaged_record_is_a_clear_error(edit: Any, message: str, started: pl.Checkpoint) -> None:
    file = Path(started.path) / "checkpoint.json"
    file.write_text(edit(file.read_text()))
    with pytest.raises(ValueError, match=message):
        _fit("map", checkpoint=started)


def _rewrite(place: pl.Checkpoint, **changes: Any) -> None:
    """Change the record and seal it again, as a newer version or an attacker would."""
    file = Path(place.path) / "checkpoint.json"
    storage.write_json(file, {**storage.read_json(file), **changes})


def test_another_format_is_refused(started: pl.Checkpoint) -> None:
    _rewrite(started, format=99)
    with pytest.raises(ValueError, match="has format 99, this version reads 3"):
        _fit("map", checkpoint=started)


def test_a_record_cannot_lead_out_of_its_folder(started: pl.Checkpoint) -> None:
    _rewrite(started, file="../elsewhere.safetensors")
    with pytest.raises(ValueError, match="not a plain file name"):
        _fit("map", checkpoint=started)


def test_missing_shards_are_noticed_before_the_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.DrawWriter, "SHARD_BYTES", 400)
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(Stop):
        _fit("sgld", checkpoint=place, callbacks=[_stop_at(26)])
    (tmp_path / "run" / "draws" / "draws-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draws-00001.safetensors is missing"):
        _fit("sgld", checkpoint=place)


def test_what_a_kill_leaves_half_written_does_no_harm_and_is_removed(started: pl.Checkpoint) -> None:
    folder = Path(started.path)
    (folder / "draws").mkdir()
    left = [".state-000000012-abc.safetensors.77", ".checkpoint.json.1f", "state-000000099-abc.safetensors", ".writable"]
    for name in [*left, "draws/.draws-00000.safetensors.0a"]:
        (folder / name).write_bytes(b"half")
    assert _same(_fit("map"), _fit("map", checkpoint=started))
    names = sorted(p.name for p in folder.rglob("*"))
    assert [n for n in names if not n.startswith("state-")] == ["checkpoint.json", "draws"]
    assert len(names) == 3


def test_leftovers_without_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "draws").mkdir(parents=True)
    for name in (".state-1.x", "state-000000002-abc.safetensors", "draws/draws-00000.safetensors", ".checkpoint.json.1"):
        (folder / name).write_bytes(b"half")
    assert _same(_fit("sgld"), _fit("sgld", checkpoint=folder))


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"is not empty and holds no checkpoint \(but 'thesis.tex'\)"):
        _fit("map", checkpoint=tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_in_use_is_refused_by_name(tmp_path: Path) -> None:
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    seen: list[str] = []

    def second(number: int, _: Any) -> None:
        if number == 4:
            with pytest.raises(RuntimeError, match="is in use by another run") as refused:
                _fit("map", checkpoint=place)
            seen.append(str(refused.value))

    first = _fit("map", checkpoint=place, callbacks=[second])
    assert str(tmp_path / "run") in seen[0]
    assert _same(_fit("map", checkpoint=place), first)  # it is free again


@pytest.mark.parametrize("failed", [False, True])
def test_a_folder_is_free_after_a_run_that_raised_or_was_killed(failed: bool, tmp_path: Path) -> None:
    if failed:
        with pytest.raises(Stop):
            _fit("map", checkpoint=pl.Checkpoint(tmp_path, steps=1), callbacks=[_stop_at(3)])
    else:
        hold = (
            "import pathlib, sys; from plausible.core.storage import FolderLock; lock = FolderLock(pathlib.Path(sys.argv[1]))"
        )
        wait = "print(1, flush=True); sys.stdin.read()"
        child = subprocess.Popen(
            [sys.executable, "-c", f"{hold}; {wait}", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(RuntimeError, match="is in use by another run"):
            _fit("map", checkpoint=tmp_path)
        child.kill()
        child.communicate()
    assert _same(_fit("map"), _fit("map", checkpoint=tmp_path))


def test_a_link_where_the_folder_is_tried_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".writable").symlink_to(tmp_path / "thesis.tex")
    _fit("map", checkpoint=tmp_path / "run")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_write_that_fails_is_no_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls, write = _fit("sgld"), [], storage.write_atomically

    def full(path: Path, content: bytes) -> None:
        calls.append(path.name)
        if 2 < len(calls) < 6:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(storage, "write_atomically", full)
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.warns(UserWarning, match=r"could not be written to .*run.*No space left on device.*tries again") as said:
        fitted = _fit("sgld", checkpoint=place)
    assert len([one for one in said if "could not be written" in str(one.message)]) == 1
    assert _same(fitted, whole)
    assert json.loads((tmp_path / "run" / "checkpoint.json").read_text())["finished"]
    assert _same(_fit("sgld", checkpoint=place), whole)


@pytest.mark.parametrize("name", ["map", "sgld"])
def test_a_folder_that_is_deleted_is_no_end_of_the_run(name: str, tmp_path: Path) -> None:
    def delete(number: int, _: Any) -> None:
        if number == 9:
            shutil.rmtree(tmp_path / "run")

    place = pl.Checkpoint(tmp_path / "run", steps=3)
    with pytest.warns(UserWarning, match="was deleted while the run wrote its checkpoints"):
        fitted = _fit(name, checkpoint=place, callbacks=[delete])
    assert _same(fitted, _fit(name))
    assert _same(_fit(name, checkpoint=place), fitted)


def test_draws_wait_in_memory_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = storage.write_tensors, [True]

    def tried(path: Path, tensors: Any) -> str:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(storage, "write_tensors", tried)
    writer = storage.DrawWriter(tmp_path / "draws", shard_bytes=8, retries=True)
    writer.add({"w": torch.tensor([0.0])})
    with pytest.warns(UserWarning, match="stay in memory"):
        writer.add({"w": torch.tensor([1.0])})
    writer.add({"w": torch.tensor([2.0])})  # tried again later, without a word
    full[0] = False
    for k in range(3, 8):
        writer.add({"w": torch.tensor([float(k)])})
    store = writer.store()
    assert store is not None
    assert torch.equal(storage.gather(store)["w"][:, 0], torch.arange(8.0))
    assert writer.files
    (tmp_path / "draws" / writer.files[0]["file"]).unlink()
    writer.add({"w": torch.tensor([8.0])})
    with pytest.warns(UserWarning, match="4 draws are lost"):
        store = writer.store()
    assert store is not None
    assert torch.equal(storage.gather(store)["w"][:, 0], torch.arange(4.0, 9.0))


def test_folders_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file, expected a folder"):
        _fit("map", checkpoint=tmp_path / "file")
    with pytest.raises(PermissionError, match="cannot be written"):
        _fit("map", checkpoint=tmp_path / "file" / "below")
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match="cannot be written"):
            _fit("map", checkpoint=tmp_path / "locked" / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": 0.0}, "seconds must be positive"),
        ({"seconds": math.nan}, "seconds must be positive, got nan"),
        ({"seconds": "5m"}, "seconds must be a number, got '5m'"),
        ({"seconds": True}, "seconds must be a number, got True"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
    ],
)
def test_bad_checkpoint_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.Checkpoint("run", **settings)


def test_something_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="checkpoint must be a folder"):
        _fit("map", checkpoint=3)


def test_only_one_state_is_kept_and_nothing_is_pickled(tmp_path: Path) -> None:
    _fit("chains", checkpoint=pl.Checkpoint(tmp_path / "run", steps=1))
    names = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert names[0] == "checkpoint.json"
    assert len(names) == 2
    assert names[1].startswith("state-000000028-")
    assert names[1].endswith(".safetensors")
    content = json.loads((tmp_path / "run" / "checkpoint.json").read_text())
    assert content["finished"]
    assert content["step"] == 28


def test_a_second_checkpoint_of_the_same_step_never_touches_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Checkpointer(pl.Checkpoint(tmp_path / "run"), {"seed": 1})
    keeper.save(5, {"state": {"w": torch.ones(3)}}, storage.DrawWriter(), {}, {}, finished=False)

    def die(*_: Any) -> None:
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_json", die)
        with pytest.raises(Stop):
            keeper.save(5, {"state": {"w": torch.zeros(3)}}, storage.DrawWriter(), {}, {}, finished=True)
    resumed = Checkpointer(pl.Checkpoint(tmp_path / "run"), {"seed": 1}).load(storage.DrawWriter())
    assert resumed is not None
    assert (resumed.step, resumed.finished) == (5, False)
    assert torch.equal(resumed.tensors["state.0"], torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# Shards of draws


def test_draws_stream_to_shards_and_are_read_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _fit("sgld")
    size = sum(v[0].numel() * v.element_size() for v in memory.store.get([0], "cpu").values())
    monkeypatch.setattr(storage.DrawWriter, "SHARD_BYTES", 3 * size)
    most = 0
    add = storage.DrawWriter.add

    def watched(self: Any, draw: Any) -> None:
        nonlocal most
        add(self, draw)
        most = max(most, len(self.pending))

    monkeypatch.setattr(storage.DrawWriter, "add", watched)
    posterior = _fit("sgld", checkpoint=tmp_path / "run")
    assert most <= 3  # never more than one shard in memory
    store = posterior.store
    assert isinstance(store, storage.DiskDraws)
    assert [shard["draws"] for shard in store.files] == [3] * 3
    assert len(store) == len(memory.store) == 10
    assert len(list((tmp_path / "run" / "draws").iterdir())) == 3
    assert _same(memory, posterior)

    read: list[str] = []
    original = storage.read_tensors
    monkeypatch.setattr(storage, "read_tensors", lambda path, sha: (read.append(path.name), original(path, sha))[1])
    store._cache.clear()
    store.get([4, 9], "cpu")
    assert read == ["draws-00001.safetensors"]  # row 9 is in the tail, which is in memory
    assert len(store._cache) <= store.KEPT
    again = _fit("sgld", checkpoint=tmp_path / "run")
    assert isinstance(again.store, storage.DiskDraws)
    assert _same(memory, again)


def test_shards_resume_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _fit("chains")
    monkeypatch.setattr(storage.DrawWriter, "SHARD_BYTES", 700)
    for at in (12, 17, 27):
        place = pl.Checkpoint(tmp_path / str(at), steps=5)
        with pytest.raises(Stop):
            _fit("chains", checkpoint=place, callbacks=[_stop_at(at)])
        resumed = _fit("chains", checkpoint=place)
        assert isinstance(resumed.store, storage.DiskDraws)
        assert _same(whole, resumed)
        assert resumed.diagnostics() == whole.diagnostics()


def test_a_damaged_shard_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.DrawWriter, "SHARD_BYTES", 400)
    posterior = _fit("sgld", checkpoint=tmp_path / "run")
    posterior.store._cache.clear()
    file = tmp_path / "run" / "draws" / "draws-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"draws-00000.safetensors is damaged"):
        posterior.weights()


MEMORY = """
import resource, sys, torch, plausible as pl
from plausible.core.storage import DrawWriter
torch.set_num_threads(1)
DrawWriter.SHARD_BYTES = 4 * 2**20
net = torch.nn.Sequential(torch.nn.Linear(2, 100_000), torch.nn.Linear(100_000, 1))  # 1.6 MB a draw
x, y = torch.randn(4, 2), torch.randn(4, 1)
run = lambda epochs, path: pl.fit(net, (x, y), pl.SGLD(epochs=epochs, batch_size=None, lr=1e-9, burn_in=0.0, thin=1),
                                  compile=False, progress=False, checkpoint=path)
run(20, sys.argv[1] + "/small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
posterior = run(300, sys.argv[1] + "/large")
print(len(posterior.store), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is reported in other units elsewhere")
def test_memory_stays_bounded_while_draws_stream(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    draws, grown = done.stdout.split()
    assert int(draws) == 300  # 480 MB of them
    assert float(grown) < 100  # MiB


# ---------------------------------------------------------------------------------------------------------------------
# Processes that are killed. One process imports the library and forks a child for every attempt, which is as much a process
# of its own as any other, and starts in milliseconds.

HARNESS = '''
import hashlib, json, os, random, signal, sys, time
from pathlib import Path
import torch
import plausible as pl
from plausible.core import storage

torch.set_num_threads(1)
import plausible.core.draws, plausible.fitting, plausible.posteriors.saving  # before forking: what the children would each import
if sys.argv[2] == "ensemble":
    import torch._dynamo
os.fsync = lambda _: None
kind, folder, seed = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
storage.DrawWriter.SHARD_BYTES = 500


def fit(checkpoint, length, callbacks=()):
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    y = (x[:, :1] * x[:, 1:]).sin() + 0.2 * torch.randn(30, 1)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.3),
                              torch.nn.Linear(8, 1))
    data = (x, y)
    if kind == "sgld":
        method = pl.SGLD(epochs=length, batch_size=8, lr=1e-3, burn_in=0.3, thin=2)
    elif kind == "ensemble":
        method = pl.Ensemble(pl.MAP(epochs=length, batch_size=8, lr=pl.schedules.Cosine(0.02)), members=3)
    elif kind == "stopping":
        method = pl.MAP(epochs=20 * length, batch_size=8, lr=0.1, patience=2, holdout=0.3)
    elif kind == "stream":
        method = pl.MAP(epochs=length, lr=0.01)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
    elif kind == "laplace":
        method = pl.Laplace(tune="layer", mode=pl.MAP(epochs=length, batch_size=8, lr=0.02))
    elif kind == "refined":
        plausible.core.draws.NUMBERS = 4 * 33  # draws in groups of four
        method = pl.Refined(epochs=length, batch_size=None, refinements=2, draws_kept=20, further=5)
    elif kind == "mile":
        method = pl.MILE(mode=pl.MAP(epochs=length, batch_size=None), chains=2, warmup=40, draws=20)
    if kind in ("laplace", "refined", "mile"):
        net = torch.nn.Sequential(net[0], net[2], net[4])
    posterior = pl.fit(net, data, method, seed=3, progress=False, compile=False, checkpoint=checkpoint, callbacks=callbacks)
    (folder / "stages").write_text(json.dumps([steps for _, steps, _ in posterior.run["stages"]]))
    stored = posterior.store.get(range(len(posterior.store)), "cpu") if hasattr(posterior, "store") else {}
    history = json.dumps(posterior.history, sort_keys=True).encode()
    return hashlib.sha256(storage.pack(stored)[0] + history + storage.pack({"f": posterior.functions(x)})[0]).hexdigest()


def child(checkpoint, length, prepare=None, callbacks=()):
    """Start a process that runs to its end and writes its result, if it lives."""
    result = folder / "result"
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            if prepare is not None:
                prepare()
            result.write_text(fit(checkpoint, length, callbacks))
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    return pid, result


def ended(pid):
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(f"a child failed with {os.WEXITSTATUS(status)}")
    return os.WIFEXITED(status)


def killed_at_random_moments(length, steps):
    started = time.monotonic()
    pid, result = child(None, length)
    assert ended(pid)
    whole, duration = result.read_text(), time.monotonic() - started
    chance, kills = random.Random(seed), 0
    while True:
        pid, result = child(pl.Checkpoint(folder / "run", steps=steps), length)
        time.sleep(chance.uniform(0.05, 0.6) * duration * (1 + kills / 10))  # ever later, so that a busy machine gets on
        os.kill(pid, signal.SIGKILL)  # where it has ended already, it is a zombie and feels nothing
        if ended(pid):
            return {"equal": result.read_text() == whole, "kills": kills}
        kills += 1


def killed_at_every_event(length, steps):
    """Die at the k-th thing done to a file, for every k, and resume."""
    pid, result = child(None, length)
    assert ended(pid)
    whole, different, k = result.read_text(), [], 0
    while True:
        def prepare(k=k):
            count = 0
            def event(act=lambda: None):
                nonlocal count
                if count == k:
                    act()
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
            replace, unlink, opened = os.replace, Path.unlink, open
            def dying_replace(*paths):
                event()
                replace(*paths)
                event()
            def dying_unlink(self, missing_ok=False):
                event()
                unlink(self, missing_ok=missing_ok)
            class File:
                def __init__(self, *arguments):
                    self.file = opened(*arguments)
                def write(self, content):
                    def half():
                        self.file.write(content[: len(content) // 2])
                        self.file.flush()
                    event(half)
                    self.file.write(content)
                def __getattr__(self, name):
                    return getattr(self.file, name)
                def __enter__(self):
                    return self
                def __exit__(self, *_):
                    self.file.close()
            storage.open, os.replace, Path.unlink = File, dying_replace, dying_unlink
        place = pl.Checkpoint(folder / str(k), steps=steps)
        pid, result = child(place, length, prepare)
        if ended(pid):
            break
        pid, result = child(place, length)
        assert ended(pid)
        if result.read_text() != whole:
            different.append(k)
        hidden = [p.name for p in (folder / str(k)).rglob(".*")]
        if hidden:
            different.append([k, hidden])
        k += 1
    return {"equal": not different and result.read_text() == whole, "kills": k, "different": different}


def killed_in_every_later_stage(length, steps):
    """Die inside each stage behind the first, after two thirds of its steps, and resume."""
    pid, result = child(None, length)
    assert ended(pid)
    whole, lengths, different, kills = result.read_text(), json.loads((folder / "stages").read_text()), [], 0
    for number, count in enumerate(lengths):
        if number == 0 or count < 2:
            continue
        at = sum(lengths[:number]) + max(1, 2 * count // 3)
        place = pl.Checkpoint(folder / str(number), steps=max(1, count // steps))
        pid, result = child(place, length, callbacks=[lambda step, _: step == at and os.kill(os.getpid(), signal.SIGKILL)])
        assert not ended(pid), (number, lengths)
        kills += 1
        content = storage.read_json(folder / str(number) / "checkpoint.json")
        assert content["record"]["stage"] == number, (content["record"]["stage"], number, lengths)
        pid, result = child(place, length)
        assert ended(pid)
        if result.read_text() != whole:
            different.append(number)
    return {"equal": not different, "kills": kills, "different": different, "stages": lengths}


length, steps = int(sys.argv[5]), int(sys.argv[6])
print(json.dumps(globals()[sys.argv[1]](length, steps)))
'''


def _killed(how: str, kind: str, folder: Path, *, length: int, steps: int, seed: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-c", HARNESS, how, kind, str(folder), str(seed), str(length), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@forking
def test_a_process_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = _killed("killed_at_random_moments", "sgld", tmp_path, length=20, steps=5)
    assert found["equal"]
    assert found["kills"] >= 1


@forking
def test_a_process_killed_at_every_write_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = _killed("killed_at_every_event", "sgld", tmp_path, length=2, steps=3)
    assert found["equal"], found
    assert found["kills"] > 15


@forking
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["laplace", "refined", "mile"])
def test_a_process_killed_in_a_later_stage_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    found = _killed("killed_in_every_later_stage", kind, tmp_path, length=20, steps=5)
    assert found["equal"], found
    assert found["kills"] >= 1


@forking
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgld", "ensemble", "stopping", "stream"])
@pytest.mark.parametrize("seed", range(2))
def test_many_kills_at_random_moments(kind: str, seed: int, tmp_path: Path) -> None:
    found = _killed(
        "killed_at_random_moments", kind, tmp_path, length=100, steps=random.Random(seed).choice([1, 3, 10]), seed=seed
    )
    assert found["equal"]


@forking
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgld", "stopping", "ensemble", "stream"])
def test_kills_at_every_write_of_other_runs(kind: str, tmp_path: Path) -> None:
    found = _killed("killed_at_every_event", kind, tmp_path, length=5, steps=3)
    assert found["equal"], found


def test_another_activation_is_another_run(tmp_path: Path) -> None:
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    for activation in (torch.nn.Tanh(), torch.nn.ReLU()):
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), activation, torch.nn.Linear(3, 1))
        if isinstance(activation, torch.nn.Tanh):
            pl.fit(net, (x, y), pl.MAP(epochs=2), checkpoint=tmp_path / "run", progress=False)
        else:
            with pytest.raises(ValueError, match=r"network was .*Tanh"):
                pl.fit(net, (x, y), pl.MAP(epochs=2), checkpoint=tmp_path / "run", progress=False)


class Departure:
    """A flight that lands when it is asked to, and knows how many others are in the air."""

    aloft: ClassVar[list[Departure]] = []
    most: ClassVar[int] = 0

    def __init__(self, draws: dict[str, torch.Tensor]) -> None:
        self.copy = clone(draws)
        type(self).aloft.append(self)
        type(self).most = max(self.most, len(self.aloft))

    def landed(self) -> dict[str, torch.Tensor]:
        type(self).aloft.remove(self)
        return self.copy


@pytest.mark.parametrize("folder", [False, True])
def test_draws_leave_the_device_two_at_a_time_and_arrive_in_their_order(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    method = pl.SGLD(epochs=60, batch_size=None, lr=1e-3, burn_in=0.5, thin=3)
    settings: dict[str, Any] = {"compile": False, "progress": False}
    net = torch.nn.Linear(2, 1)
    stayed = pl.fit(net, (x, y), method, **settings).weights()
    monkeypatch.setattr(storage.DrawWriter, "_departs", lambda writer, draws: True)
    monkeypatch.setattr(storage.DrawWriter, "_flight", Departure)
    Departure.aloft.clear()
    Departure.most = 0
    if folder:
        settings["checkpoint"] = pl.Checkpoint(tmp_path / "run", steps=7)
    left = pl.fit(net, (x, y), method, **settings).weights()
    for name, value in stayed.items():
        torch.testing.assert_close(left[name], value, rtol=0, atol=0)
    assert not Departure.aloft
    assert 1 <= Departure.most <= 2


def test_a_writer_waits_for_the_oldest_and_counts_those_in_the_air(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.DrawWriter, "_departs", lambda writer, draws: True)
    monkeypatch.setattr(storage.DrawWriter, "_flight", Departure)
    Departure.aloft.clear()
    Departure.most = 0
    writer, state = storage.DrawWriter(), {"w": torch.zeros(1, 2)}
    for number in range(5):
        state["w"].fill_(number)
        writer.leave(state)
        assert len(Departure.aloft) == min(number + 1, 2)
    mark = writer.mark()
    assert not Departure.aloft
    writer.leave(state)
    writer.back_to(mark)  # what flew since then is forgotten
    assert len(writer) == 5
    store = writer.store()
    assert store is not None
    assert store.get(range(5), "cpu")["w"][:, 0].tolist() == [0, 1, 2, 3, 4]
