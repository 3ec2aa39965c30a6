"""Save and load: the same bits back, nothing executed, and a clear refusal of everything that does not fit."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core import storage
from plausible.core.serialise import Opaque
from plausible.core.storage import DiskDraws, DrawWriter, MemoryDraws
from plausible.core.weights import Weights, clone, index, stack
from plausible.engine.method import Method, Traits
from plausible.posteriors import saving
from plausible.posteriors.base import Posterior, record_of
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.mixture import MixturePosterior
from plausible.posteriors.predictive import Draws
from plausible.posteriors.saving import Content, kinds

QUIET: dict[str, Any] = {"progress": False, "compile": False}
STEPS = pl.SGLD(epochs=6, batch_size=10, lr=1e-3, burn_in=0.0, thin=1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(20, 2, generator=stream).to(dtype)
    return x, x[:, :1] - x[:, 1:]


def _network(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))


def _fit(method: Method = STEPS, net: nn.Module | None = None, data: Any = None, **settings: Any) -> Posterior:
    return pl.fit(_network() if net is None else net, data or _data(), method, **{**QUIET, **settings})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return _fit().save(tmp_path / "run")


def _reseal(folder: Path, **changes: Any) -> None:
    """Change the JSON and give it a new checksum, as an attacker or another version would."""
    file = folder / "posterior.json"
    storage.write_json(file, {**storage.read_json(file), **changes})


def _equal(one: Posterior, two: Posterior, x: Tensor | None = None) -> bool:
    x = _data()[0] if x is None else x
    a, b = one.weights(), two.weights()
    same = list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)
    for draws, seed in ((None, 0), (3, 1), (40, 2)):
        same &= torch.equal(one.functions(x, draws, seed), two.functions(x, draws, seed))
    p, q = one.predict(x), two.predict(x)
    return same and torch.equal(p.std, q.std) and torch.equal(p.sample(5), q.sample(5))


# ---------------------------------------------------------------------------------------------------------------------
# The same bits


@pytest.mark.parametrize(
    "method",
    [pl.MAP(epochs=2), STEPS, pl.Ensemble(pl.MAP(epochs=2), members=3), pl.Ensemble(replace(STEPS, epochs=2), members=2)],
    ids=["map", "sgld", "ensemble", "chains"],
)
def test_loaded_equals_saved(method: Method, tmp_path: Path) -> None:
    posterior = _fit(method, prior=pl.priors.StudentT(3.0, 0.5))
    assert posterior.save(tmp_path / "run") == tmp_path / "run"
    loaded = pl.load(tmp_path / "run", _network())
    assert type(loaded) is type(posterior)
    assert _equal(posterior, loaded)
    assert loaded.method == method
    assert loaded.history == posterior.history
    assert loaded.run == posterior.run
    assert loaded.likelihood == posterior.likelihood
    assert loaded.model.prior == posterior.model.prior
    assert loaded.model.num_data == 20
    assert loaded.diagnostics() == posterior.diagnostics()
    assert loaded.summary() == posterior.summary()
    assert repr(loaded) == repr(posterior)
    again = loaded.save(tmp_path / "again")  # and a loaded one can be saved
    for file in sorted(p.name for p in again.iterdir()):
        assert (again / file).read_bytes() == (tmp_path / "run" / file).read_bytes()


def test_the_folder_holds_safetensors_and_json_alone(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["draws-00000.safetensors", "fixed.safetensors", "posterior.json"]
    assert not any(p.name.startswith(".") for p in saved.parent.iterdir())
    for file in saved.glob("*.safetensors"):
        with pytest.raises(Exception, match=r"."):
            pickle.loads(file.read_bytes())
    content = json.loads((saved / "posterior.json").read_text())
    assert content["format"] == 3
    assert content["library"] == pl.__version__
    assert content["method"]["type"] == "SGLD"
    assert content["method"]["epochs"] == 6
    assert content["likelihood"]["type"] == "likelihoods.Scaled"
    assert content["likelihood"]["likelihood"]["type"] == "likelihoods.Gaussian"
    assert content["prior"]["type"] == "priors.Default"
    assert content["weights"]["0.weight"] == [5, 2]


def test_double_precision_stays(tmp_path: Path) -> None:
    x, y = _data(torch.float64)
    posterior = _fit(net=_network().double(), data=(x, y))
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", _network())  # the module given is float32: the file decides
    assert loaded.functions(x).dtype == torch.float64
    assert _equal(posterior, loaded, x)


def test_mixed_precision_stays(tmp_path: Path) -> None:
    posterior = _fit(pl.MAP(epochs=2), precision="bfloat16")
    posterior.save(tmp_path / "run")
    assert _equal(posterior, pl.load(tmp_path / "run", _network()))


def test_batch_norm_statistics_are_those_of_each_draw(saved: Path) -> None:
    loaded = pl.load(saved, _network())
    stored = loaded.store.get(range(len(loaded.store)), "cpu")
    assert stored["1.running_mean"].shape == (12, 5)
    assert float(stored["1.running_mean"].std(0).min()) > 0
    assert stored["1.num_batches_tracked"].tolist() == list(range(1, 13))


class Scaled(nn.Module):
    """Frozen parameters, and buffers that training does not change, one of them not in the state dict."""

    def __init__(self, factor: float):
        super().__init__()
        self.frozen, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.frozen.requires_grad_(False)
        self.register_buffer("factor", torch.tensor(factor))
        self.register_buffer("hidden", torch.tensor(factor), persistent=False)
        self.register_buffer("places", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden * self.factor * self.head(self.frozen(x).tanh()[:, self.places])


def test_frozen_parameters_and_buffers_come_from_the_file(tmp_path: Path) -> None:
    posterior = _fit(net=Scaled(2.0))
    posterior.save(tmp_path / "run")
    other = Scaled(5.0)
    before = {n: v.clone() for n, v in other.state_dict().items()}
    loaded = pl.load(tmp_path / "run", other)
    assert _equal(posterior, loaded)
    assert float(loaded.model.network.factor) == 2.0
    assert loaded.model.network.places.dtype == torch.int64
    assert all(torch.equal(v, before[n]) for n, v in other.state_dict().items())  # the module given is left alone


def test_points_of_where_are_saved_too(tmp_path: Path) -> None:
    posterior = _fit(where="3.*")
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", _network())
    assert set(loaded.weights()) == {"3.weight", "3.bias"}
    assert _equal(posterior, loaded)


def test_tied_weights_and_temperature(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).tanh())[:, :1]

    quick = _fit(replace(STEPS, epochs=1), net=Tied())
    posterior = pl.fit(quick.model.tempered(0.5), _data(), STEPS, **QUIET)
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", Tied())
    assert loaded.model.temperature == 0.5
    assert _equal(posterior, loaded)


def test_histories_with_infinities_survive(tmp_path: Path) -> None:
    posterior = _fit(pl.MAP(epochs=2))
    posterior.history["strange"] = [1.5, float("inf"), float("-inf")]
    posterior.save(tmp_path / "run")
    assert pl.load(tmp_path / "run", _network()).history == posterior.history


def test_evidence_is_kept(tmp_path: Path) -> None:
    posterior = _fit(pl.MAP(epochs=1))
    posterior.log_evidence = -12.25
    posterior.save(tmp_path / "run")
    assert pl.load(tmp_path / "run", _network()).log_evidence == -12.25
    assert pl.load(tmp_path / "run", _network()).to("cpu").log_evidence == -12.25


def test_loading_needs_no_data_and_continues(saved: Path) -> None:
    loaded = pl.load(saved, _network())
    continued = _fit(replace(STEPS, epochs=1, lr=1e-12), init=loaded)
    torch.testing.assert_close(continued.weights()["3.weight"][0], loaded.weights()["3.weight"][-1], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Code is asked for again


class Answer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x)}


def pick(answer: dict[str, Tensor]) -> Tensor:
    return answer["logits"]


def test_output_must_be_given_again(tmp_path: Path) -> None:
    posterior = _fit(net=Answer(), output=pick)
    posterior.save(tmp_path / "run")
    with pytest.raises(ValueError, match="fitted with output=pick, which is code and not in the file: pass output= again"):
        pl.load(tmp_path / "run", Answer())
    assert _equal(posterior, pl.load(tmp_path / "run", Answer(), output=pick))


@dataclass(frozen=True)
class OwnPrior(pl.priors.Prior):
    """Registered nowhere."""

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        return -weight.abs()

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        return torch.zeros(*draws, *like.shape)


class OwnLikelihood(pl.likelihoods.Gaussian):
    """Registered nowhere, with a learned weight of its own."""


@pytest.mark.parametrize("prior", [OwnPrior(), {"*weight": OwnPrior(), "*": pl.priors.Gaussian()}])
def test_own_priors_and_likelihoods_must_be_given_again(prior: Any, tmp_path: Path) -> None:
    posterior = _fit(prior=prior, likelihood=OwnLikelihood())
    posterior.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"the likelihood OwnLikelihood is your own code .* pass likelihood= again"):
        pl.load(tmp_path / "run", _network())
    with pytest.raises(ValueError, match=r"the prior .*your own.* pass prior= again"):
        pl.load(tmp_path / "run", _network(), likelihood=OwnLikelihood())
    assert _equal(posterior, pl.load(tmp_path / "run", _network(), likelihood=OwnLikelihood(), prior=prior))


def test_what_is_given_must_fit(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"likelihood=.* does not fit the saved posterior: its weights are \[\]"):
        pl.load(saved, _network(), likelihood=pl.likelihoods.Gaussian(scale=0.1))
    with pytest.raises((TypeError, ValueError), match="likelihood must be"):
        pl.load(saved, _network(), likelihood="gaussian")  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match="prior"):
        pl.load(saved, _network(), prior="gaussian")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        pl.load(saved, "network")  # type: ignore[arg-type]


@dataclass(frozen=True)
class OwnMethod(pl.MAP):
    """A user's method that is registered nowhere."""

    name: ClassVar[str] = ""


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_own_method_comes_back_as_its_name(wrapped: bool, tmp_path: Path) -> None:
    method: Method = OwnMethod(epochs=2)
    posterior = _fit(pl.Ensemble(method, members=2) if wrapped else method)
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", _network())
    assert _equal(posterior, loaded)
    assert loaded.method == Opaque("Ensemble" if wrapped else "OwnMethod")
    assert ("Ensemble" if wrapped else "OwnMethod") in repr(loaded)
    assert ("Ensemble" if wrapped else "OwnMethod") in str(loaded.summary())


# ---------------------------------------------------------------------------------------------------------------------
# Networks that do not fit


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: _network(6), r"'0.weight' has shape \(6, 2\), saved was \(5, 2\)"),
        (lambda: _network()[:3], r"it has no '3.weight' \(saved with shape \(1, 5\)\)"),
        (lambda: nn.Sequential(*_network(), nn.Linear(1, 1)), r"its '4.weight' was not in the network that was fitted"),
        (lambda: nn.Sequential(nn.Linear(2, 5), nn.Identity(), nn.Tanh(), nn.Linear(5, 1)), r"it has no '1.weight'"),
        (lambda: nn.Sequential(nn.Linear(2, 5, bias=False), *_network()[1:]), r"it has no '0.bias'"),
        (lambda: nn.Linear(2, 1), r"it has no '0.weight'"),
    ],
)
def test_a_wrong_network_is_refused_naming_the_first_mismatch(network: Any, message: str, saved: Path) -> None:
    with pytest.raises(ValueError, match=f"network does not fit the saved posterior: {message}"):
        pl.load(saved, network())


def test_another_buffer_is_refused(tmp_path: Path) -> None:
    _fit(net=Scaled(2.0)).save(tmp_path / "run")
    other = Scaled(2.0)
    other.register_buffer("more", torch.zeros(2))
    with pytest.raises(ValueError, match="its 'more' was not in the network"):
        pl.load(tmp_path / "run", other)
    other = Scaled(2.0)
    other.register_buffer("factor", torch.zeros(2))
    with pytest.raises(ValueError, match=r"'factor' has shape \(2,\), saved was \(\)"):
        pl.load(tmp_path / "run", other)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


FILES = ["posterior.json", "fixed.safetensors", "draws-00000.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_truncated_files_are_a_clear_error(name: str, keep: int, saved: Path) -> None:
    file = saved / name
    content = file.read_bytes().rstrip() if name.endswith("json") else file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        pl.load(saved, _network())


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_a_clear_error(name: str, saved: Path) -> None:
    file = saved / name
    content = bytearray(file.read_bytes())
    for place in (3, len(content) // 2, len(content) - 4):
        file.write_bytes(bytes(content[:place]) + bytes([content[place] ^ 2]) + bytes(content[place + 1 :]))
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            pl.load(saved, _network())


@pytest.mark.parametrize("name", FILES[1:])
def test_missing_files_are_a_clear_error(name: str, saved: Path) -> None:
    (saved / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing: the folder is incomplete"):
        pl.load(saved, _network())


def test_files_swapped_between_runs_are_noticed(saved: Path, tmp_path: Path) -> None:
    other = _fit(seed=1).save(tmp_path / "other")
    shutil.copy(other / FILES[2], saved / FILES[2])
    with pytest.raises(ValueError, match="is damaged or was changed"):
        pl.load(saved, _network())


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace('"epochs": 6', '"epochs": 7'),
        lambda text: text.replace('"num_data": 20', '"num_data": 2000'),
        lambda text: text.replace('"format": 3', '"format": 3, "more": 2'),
    ],
)
def test_edited_json_is_noticed(edit: Any, saved: Path) -> None:
    file = saved / "posterior.json"
    text = file.read_text()
    assert edit(text) != text
    file.write_text(edit(text))
    with pytest.raises(ValueError, match="its checksum does not fit its content"):
        pl.load(saved, _network())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        pl.load(tmp_path / "nowhere", _network())
    with pytest.raises(FileNotFoundError, match=r"posterior.json does not exist: is .* a folder written by plausible"):
        pl.load(tmp_path, _network())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "has format 1, written by plausible .* which reads format 3"),
        ({"format": None}, "has format None"),
        ({"kind": "oracle"}, "holds a posterior of unknown kind 'oracle'; it needs a newer plausible"),
        ({"kind": None}, "unknown kind None"),
        ({"method": {"type": "os.system", "command": "true"}}, "unknown type 'os.system'"),
        ({"method": {"type": "SGLD", "epochs": -1}}, "epochs must be at least 1"),
        ({"method": {"type": "SGLD", "shell": "true"}}, "unknown field 'shell'"),
        ({"likelihood": {"type": "builtins.eval"}}, "unknown type 'builtins.eval'"),
        ({"likelihood": {"type": "priors.Gaussian"}}, "where Likelihood is expected"),
        ({"likelihood": None}, "where Likelihood is expected"),
        ({"prior": {"type": "MAP"}}, "where Prior is expected"),
        ({"prior": [1, 2]}, "where Prior is expected"),
        ({"dtypes": {}}, "is damaged: KeyError"),
        ({"dtypes": {"0.weight": "load"}}, "is damaged: KeyError: 'load'"),
        ({"weights": 3}, "is damaged"),
        ({"weights": {"0.weight": [7, 2]}}, "does not fit"),
        ({"draws": []}, "is damaged: it holds no draws"),
        ({"draws": [{"file": "../posterior.json", "draws": 1, "sha256": ""}]}, "not a plain file name"),
        ({"draws": [{"file": "/etc/passwd", "draws": 1, "sha256": ""}]}, "not a plain file name"),
        ({"draws": [{"draws": 1}]}, "is damaged: KeyError"),
        ({"fixed_sha256": "0"}, "is damaged or was changed"),
        ({"output_shape": "wide"}, "is damaged|does not fit"),
        ({"settings": {"chains": None}}, "is damaged: TypeError"),
        ({"run": None}, "is damaged"),
    ],
    ids=str,
)
def test_a_forged_record_is_refused_and_executes_nothing(changes: dict[str, Any], message: str, saved: Path) -> None:
    _reseal(saved, **changes)
    with pytest.raises(ValueError, match=message):
        pl.load(saved, _network())


def test_missing_entries_are_damage(saved: Path) -> None:
    file = saved / "posterior.json"
    content = storage.read_json(file)
    for key in content:
        storage.write_json(file, {k: v for k, v in content.items() if k != key})
        if key in ("library",):
            continue
        with pytest.raises(ValueError, match=r"damaged|format None|unknown kind None"):
            pl.load(saved, _network())


def test_forged_shards_are_refused(saved: Path) -> None:
    content = storage.read_json(saved / "posterior.json")
    (shard,) = content["draws"]
    draws = storage.read_tensors(saved / shard["file"], shard["sha256"])

    def forge(tensors: Weights, count: int = 12) -> None:
        sha256 = storage.write_tensors(saved / shard["file"], tensors)
        _reseal(saved, draws=[{"file": shard["file"], "draws": count, "sha256": sha256}])

    forge({n: v for n, v in draws.items() if n != "3.bias"})
    with pytest.raises(ValueError, match=r"it has nothing for '3.bias', expected shape"):
        pl.load(saved, _network())
    forge({**draws, "3.bias": torch.zeros(12, 2)})
    with pytest.raises(ValueError, match=r"it has shape \(2,\) for '3.bias', expected shape \(1,\)"):
        pl.load(saved, _network())
    forge({**draws, "3.bias": draws["3.bias"][:5]})
    with pytest.raises(ValueError, match="expected 12 draws of each tensor"):
        pl.load(saved, _network())
    forge(draws, 11)
    with pytest.raises(ValueError, match="expected 11 draws of each tensor"):
        pl.load(saved, _network())
    forge(draws)
    assert len(pl.load(saved, _network()).store) == 12


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def test_an_existing_folder_is_refused_unless_overwritten(saved: Path) -> None:
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    other = _fit(seed=1)
    with pytest.raises(FileExistsError, match="exists and is not empty; choose another, or pass overwrite=True"):
        other.save(saved)
    assert before == {p.name: p.read_bytes() for p in saved.iterdir()}
    other.save(saved, overwrite=True)
    assert _equal(other, pl.load(saved, _network()))
    assert [p.name for p in saved.parent.iterdir()] == ["run"]


def test_overwrite_replaces_posteriors_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds no posterior; overwrite=True replaces only a saved posterior"):
        _fit(pl.MAP(epochs=1)).save(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    posterior = _fit(pl.MAP(epochs=1))
    posterior.save(str(tmp_path / "run"))
    posterior.save(tmp_path / "a" / "b" / "c")
    assert _equal(posterior, pl.load(tmp_path / "a" / "b" / "c", _network()))


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["write_json", "write_tensors"])
def test_a_save_that_fails_leaves_what_was_there(where: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = pl.load(saved, _network()), _fit(seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(storage, where, _full)
        with pytest.raises(OSError, match="No space left"):
            other.save(saved, overwrite=True)
        with pytest.raises(OSError, match="No space left"):
            other.save(saved.parent / "new")
    assert [p.name for p in saved.parent.iterdir()] == ["run"]
    assert _equal(first, pl.load(saved, _network()))


def test_a_rename_that_fails_puts_the_old_one_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = pl.load(saved, _network()), _fit(seed=1)
    renamed, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append((source, target))
        _full() if len(calls) == 2 else renamed(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "exchange", lambda one, other: False)  # a system that cannot swap two names
        patched.setattr(os, "rename", second_fails)
        with pytest.raises(OSError, match="No space left"):
            other.save(saved, overwrite=True)
    assert [target == saved for _, target in calls] == [False, True, True]  # away, the new one fails, back
    assert [p.name for p in saved.parent.iterdir()] == ["run"]
    assert _equal(first, pl.load(saved, _network()))


def test_a_loaded_posterior_can_replace_its_own_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "IN_MEMORY", 0)
    loaded = pl.load(saved, _network())
    assert isinstance(loaded.store, DiskDraws)
    loaded.save(saved, overwrite=True)
    assert _equal(loaded, pl.load(saved, _network()))


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    posterior = _fit(pl.MAP(epochs=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file, expected a folder"):
        posterior.save(tmp_path / "file")
    with pytest.raises(PermissionError, match="cannot be written: Not a directory"):
        posterior.save(tmp_path / "file" / "below")
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match="cannot be written"):
            posterior.save(tmp_path / "locked" / "run")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "locked") == ["file"]


def test_files_honour_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = _fit(pl.MAP(epochs=1)).save(tmp_path / "run")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    posterior = _fit(pl.MAP(epochs=1))
    posterior.save(tmp_path / "link")
    posterior.save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert _equal(posterior, pl.load(tmp_path / "real", _network()))


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def test_a_store_larger_than_memory_allows_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = _fit()
    size = sum(v.numel() * v.element_size() for v in posterior.store.get([0], "cpu").values())
    monkeypatch.setattr(DrawWriter, "SHARD_BYTES", 5 * size)
    posterior.save(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").glob("draws-*")) == [f"draws-{k:05d}.safetensors" for k in range(3)]
    content = storage.read_json(tmp_path / "run" / "posterior.json")
    assert [shard["draws"] for shard in content["draws"]] == [5, 5, 2]
    small = pl.load(tmp_path / "run", _network())
    assert isinstance(small.store, MemoryDraws)
    monkeypatch.setattr(saving, "IN_MEMORY", 11 * size)
    large = pl.load(tmp_path / "run", _network())
    assert isinstance(large.store, DiskDraws)
    assert len(large.store._cache) <= DiskDraws.KEPT
    assert _equal(posterior, small)
    assert _equal(posterior, large)
    assert _equal(posterior, large.to("cpu"))
    large.save(tmp_path / "again")
    assert _equal(posterior, pl.load(tmp_path / "again", _network()))
    (tmp_path / "run" / "draws-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draws-00001.safetensors is missing"):
        pl.load(tmp_path / "run", _network())


def _stores(folder: Path, draws: int = 11, size: int = 4) -> tuple[MemoryDraws, DiskDraws, DiskDraws]:
    stream = torch.Generator().manual_seed(0)
    each = [
        {"a": torch.randn(2, 3, generator=stream), "b": torch.randn(3, generator=stream).double(), "n": torch.tensor(k)}
        for k in range(draws)
    ]
    writer = DrawWriter(folder, shard_bytes=size * (24 + 24 + 8))
    for draw in each:
        writer.add(draw)
    with_tail = writer.store()
    assert isinstance(with_tail, DiskDraws)
    assert with_tail.tail is not None
    writer.flush()
    flushed = writer.store()
    assert isinstance(flushed, DiskDraws)
    assert flushed.tail is None
    return MemoryDraws(stack(each)), with_tail, flushed


def test_draws_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    memory, *others = _stores(tmp_path)
    for disk in others:
        assert len(disk) == len(memory) == 11
        assert disk.shapes() == memory.shapes() == {"a": (2, 3), "b": (3,), "n": ()}
        for rows in (range(11), [10, 0, 5, 5, 3], [4], [7, 8, 9, 10], [2, 2, 2]):
            one, two = memory.get(rows, "cpu"), disk.get(rows, "cpu")
            assert list(one) == list(two)
            assert all(torch.equal(one[n], two[n]) and one[n].dtype == two[n].dtype for n in one)
            two["a"].zero_()  # what is handed out is a copy: the store is not changed
        assert torch.equal(storage.gather(disk)["a"], memory.stacked["a"])
        assert len(disk._cache) <= disk.KEPT
        for rows in ([11], [-1], [0, 40]):
            with pytest.raises(IndexError):
                disk.get(rows, "cpu")


def test_a_writer_goes_back_to_a_mark(tmp_path: Path) -> None:
    writer = DrawWriter(tmp_path, shard_bytes=3 * 4)
    for k in range(4):
        writer.add({"w": torch.tensor([float(k)])})
    mark = writer.mark()
    for k in range(10, 17):
        writer.add({"w": torch.tensor([float(k)])})
    writer.back_to(mark)
    for k in range(4, 9):
        writer.add({"w": torch.tensor([float(k)])})
    store = writer.store()
    assert store is not None
    assert store.get(range(len(store)), "cpu")["w"].flatten().tolist() == list(range(9))


def test_an_empty_writer_has_no_store(tmp_path: Path) -> None:
    assert DrawWriter().store() is None
    assert DrawWriter(tmp_path / "draws").store() is None
    assert not (tmp_path / "draws").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures: an ensemble of a method whose result is not a set of draws


class CloudPosterior(Posterior):
    """Weights N(centre, width²): as many draws as are asked for."""

    kind = "test cloud"

    def __init__(self, method: Any, model: pl.Model, run: Any, centre: Weights, width: float):
        super().__init__(method, model, run)
        self.centre, self.width = centre, width

    def num_draws(self, draws: int | None) -> int:
        return 8 if draws is None else draws

    def _all(self, draws: int | None, seed: int) -> Weights:
        stream, count = torch.Generator().manual_seed(seed), self.num_draws(draws)
        moving = {n: v for n, v in self.centre.items() if v.is_floating_point()}
        drawn = {n: v + self.width * torch.randn(count, *v.shape, generator=stream) for n, v in moving.items()}
        return drawn | {n: v.expand(count, *v.shape) for n, v in self.centre.items() if n not in drawn}

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        drawn = self._all(draws, seed)
        outputs = torch.stack([self.model.outputs(index(drawn, s), inputs) for s in range(self.num_draws(draws))])
        return Draws(outputs, self.model.noise(drawn))

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        drawn = self._all(draws, seed)
        return {name: drawn[name] for name in self.model.random}

    def content(self) -> Content:
        return Content({"centre": self.centre}, {"width": self.width})

    @classmethod
    def rebuilt(cls, method: Any, model: pl.Model, run: Any, content: Content) -> CloudPosterior:
        return cls(method, model, run, dict(content.tensors["centre"]), float(content.settings["width"]))


@dataclass(frozen=True)
class Cloud(pl.MAP):
    """A point with a little noise around it, whose state and not its draws is the result."""

    width: float = field(default=0.1)
    name: ClassVar[str] = ""
    traits: ClassVar[Traits] = replace(pl.MAP.traits, keeps_draws=False)

    def posterior(self, model: pl.Model, run: Any, fitted: Any) -> Posterior:
        return CloudPosterior(
            self, model, record_of(fitted), clone({**fitted.state.weights, **fitted.state.buffers}), self.width
        )


@pytest.fixture(autouse=True, scope="module")
def _unregister() -> Any:
    yield
    kinds.pop("test cloud")


def test_an_ensemble_of_another_kind_of_posterior_is_a_mixture(tmp_path: Path) -> None:
    mixture = _fit(pl.Ensemble(Cloud(epochs=3), members=3))
    assert isinstance(mixture, MixturePosterior)
    x, _ = _data()
    assert mixture.functions(x).shape == (24, 20, 1)
    assert mixture.functions(x, 7, seed=2).shape == (7, 20, 1)  # 3 + 2 + 2
    first = mixture.parts[0].functions(x, 3, seed=2)
    assert torch.equal(mixture.functions(x, 7, seed=2)[:3], first)
    assert mixture.functions(x, 2).shape == (2, 20, 1)
    weights = mixture.weights(7, seed=2)
    assert weights["3.bias"].shape == (7, 1)
    assert torch.equal(mixture.predict(x, 7, seed=2).functions, mixture.functions(x, 7, seed=2))
    assert float(mixture.predict(x).epistemic.min()) > 0
    centres = torch.stack([part.centre["3.weight"] for part in mixture.parts])  # type: ignore[attr-defined]
    assert float(centres.std(0).min()) > 0

    mixture.save(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "fixed.safetensors",
        "part-000",
        "part-001",
        "part-002",
        "posterior.json",
    ]
    loaded = pl.load(tmp_path / "run", _network())
    assert isinstance(loaded, MixturePosterior)
    assert _equal(mixture, loaded)
    assert _equal(mixture, loaded.to("cpu"))
    assert loaded.history == mixture.history
    file = tmp_path / "run" / "part-001" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"part-001.*is damaged"):
        pl.load(tmp_path / "run", _network())


def test_a_mixture_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    _fit(pl.Ensemble(Cloud(epochs=1), members=2)).save(tmp_path / "run")
    content = storage.read_json(tmp_path / "run" / "posterior.json")
    _reseal(tmp_path / "run", parts=[{**content["parts"][0], "kind": "oracle"}])
    with pytest.raises(ValueError, match="oracle"):
        pl.load(tmp_path / "run", _network())


def test_a_resumed_mixture_has_the_same_bits(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int, _: Any) -> None:
        if step == 5:
            raise Stop

    method = pl.Ensemble(Cloud(epochs=8), members=2)
    place = pl.Checkpoint(tmp_path / "run", steps=2)
    with pytest.raises(Stop):
        _fit(method, checkpoint=place, callbacks=[stop], net=nn.Linear(2, 1))
    net = nn.Linear(2, 1)
    resumed = _fit(method, checkpoint=place, net=net)
    assert _equal(resumed, _fit(method, net=net))
    assert _equal(resumed, _fit(method, net=net, checkpoint=place))


def test_kinds_are_registered() -> None:
    assert kinds["draws"] is DrawsPosterior
    assert kinds["mixture"] is MixturePosterior


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_does_nothing_else_can_load(tmp_path: Path) -> None:
    """Names are imported lazily: loading must bring the methods it decodes."""
    net = nn.Linear(2, 1)
    x, y = torch.randn(12, 2), torch.randn(12, 1)
    methods = {
        "map": pl.MAP(epochs=2),
        "many": pl.Ensemble(pl.SGLD(epochs=4), members=2),
        "family": pl.FullRank(epochs=2),
        "mixture": pl.Ensemble(pl.LowRank(epochs=2, rank=1), members=2),
    }
    for name, method in methods.items():
        pl.fit(net, (x, y), method, progress=False).save(tmp_path / name)
    code = """
import os, sys, torch
for path in sys.argv[1:]:  # each in a process of its own, which brings nothing of ours
    if not os.fork():
        import plausible as pl
        print(pl.load(path, torch.nn.Linear(2, 1)).predict(torch.zeros(1, 2)).mean.shape, flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in methods)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1, 1])") == len(methods), done.stderr


def test_the_format_before_can_be_read(saved: Path) -> None:
    content = storage.read_json(saved / "posterior.json")
    x = torch.randn(5, 2)
    expected = pl.load(saved, _network()).predict(x).mean
    storage.write_json(
        saved / "posterior.json", {n: v for n, v in content.items() if n not in ("attributes", "copied")} | {"format": 2}
    )
    assert torch.equal(pl.load(saved, _network()).predict(x).mean, expected)


def test_a_folder_is_never_missing_while_it_is_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system swaps both names at once; a kill leaves the old posterior or the new one under its name."""
    if not storage.exchange(saved, _fit(seed=1).save(saved.parent / "other")):
        pytest.skip("this system cannot swap two names")
    shutil.rmtree(saved.parent / "other")
    other = _fit(seed=2)
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("renamed in two steps"))
    removed: list[bool] = []
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: removed.append(_equal(other, pl.load(saved, _network()))))
    other.save(saved, overwrite=True)
    assert removed == [True]


def test_overwriting_deletes_nothing_that_is_not_ours(saved: Path) -> None:
    for name in ("notes.txt", "part-000/mine", "draws-00000.safetensors.bak"):
        (saved / name).parent.mkdir(exist_ok=True)
        (saved / name).write_text("mine")
        with pytest.raises(FileExistsError, match="overwrite=True would delete it; move it away"):
            _fit().save(saved, overwrite=True)
        assert (saved / name).read_text() == "mine"
        (saved / name).unlink()
    _fit().save(saved, overwrite=True)


def test_what_is_no_file_is_refused_before_it_is_read(saved: Path, tmp_path: Path) -> None:
    """A pipe would wait for ever, a device never ends."""
    for name in ("posterior.json", "fixed.safetensors", "draws-00000.safetensors"):
        whole = (saved / name).read_bytes()
        (saved / name).unlink()
        os.mkfifo(saved / name)
        with pytest.raises(ValueError, match="is not a file"):
            pl.load(saved, _network())
        (saved / name).unlink()
        (saved / name).symlink_to("/dev/zero")
        with pytest.raises(ValueError, match="is not a file"):
            pl.load(saved, _network())
        (saved / name).unlink()
        (saved / name).write_bytes(whole)
    pl.load(saved, _network())


def test_forged_sizes_allocate_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = storage.read_json(saved / "posterior.json")
    forged = {**content["weights"], "likelihood.log_scale": [10**11]}
    inner = {**content["likelihood"]["likelihood"], "scale": "per-output"}
    likelihood = {**content["likelihood"], "likelihood": inner}
    zeros = torch.zeros

    def watched(*size: Any, **settings: Any) -> Tensor:
        made = zeros(*size, **{**settings, "device": "meta"})
        assert made.numel() < 10**6 or str(settings.get("device")) == "meta", "allocated"
        return made if str(settings.get("device")) == "meta" else zeros(*size, **settings)

    monkeypatch.setattr(torch, "zeros", watched)
    _reseal(saved, weights=forged, likelihood=likelihood, output_shape=[10**11])
    with pytest.raises(ValueError, match="do not hold weights of those shapes"):
        pl.load(saved, _network())


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, [[1]], {"type": "MAP"}])
@pytest.mark.parametrize("key", ["parts", "kind", "probe", "weights", "draws", "settings", "attributes"])
def test_forged_entries_are_one_kind_of_error(saved: Path, key: str, value: Any) -> None:
    if storage.read_json(saved / "posterior.json")[key] == value:
        return
    _reseal(saved, **{key: value})
    with contextlib.suppress(ValueError):  # the one kind; or the entry says nothing of these draws
        pl.load(saved, _network())


def test_the_same_shapes_with_another_activation_are_refused(saved: Path) -> None:
    other = _network()
    other[2] = nn.ReLU()
    with pytest.raises(ValueError, match="same names and shapes, but it computes something else"):
        pl.load(saved, other)
    again = pl.load(saved, _network())
    again.save(saved.parent / "again")  # a loaded one knows the input too
    with pytest.raises(ValueError, match="computes something else"):
        pl.load(saved.parent / "again", other)


def test_another_output_is_refused(tmp_path: Path) -> None:
    path = _fit(output=lambda out: out).save(tmp_path / "run")
    with pytest.raises(ValueError, match="computes something else"):
        pl.load(path, _network(), output=lambda out: -out)


def test_the_input_that_is_stored_is_nobodys(saved: Path) -> None:
    """Means over a few examples, and no row of the data."""
    stored = storage.read_tensors(saved / "fixed.safetensors", storage.read_json(saved / "posterior.json")["fixed_sha256"])
    x = _data()[0]
    assert torch.allclose(stored["probe/0"], x[:8].mean(0, keepdim=True))
    assert not (x == stored["probe/0"]).all(1).any()


class Oddly(nn.Module):
    """A parameter by a name that safetensors keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("__metadata__", "__metadata__'"):
            self.register_parameter(name, nn.Parameter(torch.ones(2, 1)))

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.named_parameters())
        return x @ (weights["__metadata__"] + 2 * weights["__metadata__'"])


def test_parameters_may_have_any_name(tmp_path: Path) -> None:
    posterior = _fit(net=Oddly())
    assert _equal(posterior, pl.load(posterior.save(tmp_path / "run"), Oddly()))


def test_arguments_of_save_and_load_are_named(saved: Path) -> None:
    posterior: Any = pl.load(saved, _network())
    with pytest.raises(TypeError, match="overwrite must be True or False, got 'no'"):
        posterior.save(saved, overwrite="no")
    with pytest.raises(TypeError, match="path must be the name of a folder, got 5"):
        posterior.save(5)
    with pytest.raises(TypeError, match="path must be the name of a folder, got 5"):
        pl.load(5, _network())  # type: ignore[arg-type]
