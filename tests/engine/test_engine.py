"""The loop: history, callbacks, progress, Ctrl-C, divergence, streams, and sums over one pass."""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import plausible as pl
from plausible.core import memory, storage
from plausible.core.data import Batch, Order, accumulate, as_data
from plausible.core.weights import Weights, clone
from plausible.engine import loop, watching
from plausible.engine.method import Fitted, Method, Plan, Run, Traits
from plausible.posteriors.draws import DrawsPosterior

QUIET: dict[str, Any] = {"progress": False, "compile": False}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _data(count: int = 20) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, generator=stream)
    return x, x[:, :1] - x[:, 1:] + 0.3 * torch.randn(count, 1, generator=stream)


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))


# ---------------------------------------------------------------------------------------------------------------------
# A method whose terms and weights are known in advance


class CountState(NamedTuple):
    weights: Weights
    buffers: Weights
    step: Tensor


@dataclass(frozen=True)
class Count(Method):
    """Adds 1 to every weight at each step, and goes wrong where it is told to."""

    steps: int = 12
    per_epoch: int = 3
    thin: int = 0
    burn_in: int = 0
    bad_term: int | None = None
    bad_weight: int | None = None
    pause: float = 0.0
    members: ClassVar[int | None] = None

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return Plan(self.steps, self.per_epoch, None, burn_in=self.burn_in, thin=self.thin)

    def start(self, model: pl.Model, run: Run[Any], key: Tensor) -> CountState:
        weights = {name: torch.zeros_like(value) for name, value in model.initial.items()}
        return CountState(weights, clone(model.buffers), torch.zeros((), dtype=torch.int64))

    def step(self, model: pl.Model, run: Run[Any], state: CountState, batch: Batch) -> tuple[CountState, dict[str, Tensor]]:
        if self.pause:
            time.sleep(self.pause)
        number = int(state.step) + 1
        weights = {name: value + 1 for name, value in state.weights.items()}
        if number == self.bad_weight:
            weights["weight"] = torch.full_like(weights["weight"], torch.inf)
        term = torch.tensor(math.nan if number == self.bad_term else float(number))
        info = {"height": term, "depth": -torch.tensor(float(number)) / 2}
        return CountState(weights, state.buffers, state.step + 1), info

    def posterior(self, model: pl.Model, run: Run[Any], fitted: Fitted) -> pl.Posterior:
        return DrawsPosterior.of(self, model, fitted)


def _count(method: Count, **settings: Any) -> pl.Posterior:
    return pl.fit(nn.Linear(2, 1), _data(), method, **{**QUIET, **settings})


def _height(posterior: pl.Posterior) -> list[float]:
    return posterior.weights()["weight"][:, 0, 0].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# History and callbacks


def test_history_has_one_mean_per_epoch() -> None:
    posterior = _count(Count(steps=600, per_epoch=150))
    assert posterior.history == {"height": [75.5, 225.5, 375.5, 525.5], "depth": [-37.75, -112.75, -187.75, -262.75]}
    assert (posterior.run["steps"], posterior.run["mode"], posterior.interrupted) == (600, "eager", False)
    assert _height(posterior) == [600.0]


def test_history_of_an_epoch_of_one_step() -> None:
    assert _count(Count(steps=5, per_epoch=1)).history["height"] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_callbacks_hear_of_every_step_in_order() -> None:
    heard: list[tuple[int, dict[str, float]]] = []
    also: list[int] = []
    _count(Count(steps=300, per_epoch=100), callbacks=[lambda s, i: heard.append((s, i)), lambda s, _: also.append(s)])
    assert [step for step, _ in heard] == also == list(range(1, 301))
    assert all(info == {"height": float(step), "depth": -step / 2} for step, info in heard)


def test_a_callback_that_raises_ends_the_run_and_leaves_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)

    def stop(step: int, _: Any) -> None:
        if step == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        _count(Count(), callbacks=[stop])
    assert signal.getsignal(signal.SIGINT) is before


def test_members_history_is_their_mean() -> None:
    heard: list[dict[str, float]] = []
    method = pl.Ensemble(pl.MAP(epochs=2, batch_size=None, lr=1e-9), members=3, init="given")
    together = pl.fit(_network(), _data(), method, callbacks=[lambda _, info: heard.append(info)], **QUIET)
    assert heard[0]["log_prior"] == pytest.approx(together.history["log_prior"][0])


# ---------------------------------------------------------------------------------------------------------------------
# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_printed_when_it_is_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    pl.fit(_network(), _data(), pl.MAP(epochs=2))
    assert capfd.readouterr() == ("", "")


def test_progress_prints_a_bar_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    pl.fit(_network(), _data(), pl.MAP(epochs=3), progress=True)
    output = capsys.readouterr()
    assert output.out == ""
    for part in ("MAP", "3/3", "steps", "log joint"):
        assert part in output.err


def test_a_terminal_gets_a_bar_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for progress, expected in ((None, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        pl.fit(_network(), _data(), pl.SGLD(epochs=3, thin=1), progress=progress, compile=False)
        assert ("SGLD" in terminal.getvalue()) is expected


def test_no_standard_error_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert _count(Count(), progress=None).run["steps"] == 12


def test_the_bar_goes_away_when_training_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    bars = []
    original = Progress.start
    monkeypatch.setattr(Progress, "start", lambda self: (bars.append(self), original(self)))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(pl.DivergenceError):
        _count(Count(bad_term=5), progress=True)
    assert bars
    assert not bars[0].live.is_started


class Place:
    """What IPython's `display` gives to write over."""

    def __init__(self, shown: list[str]):
        self.shown = shown

    def update(self, value: Any) -> None:
        self.shown.append(value)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel, as far as a bar can see: everything that was displayed, in its order."""
    shown: list[str] = []
    show = types.ModuleType("IPython.display")
    show.HTML = lambda text: text  # type: ignore[attr-defined]
    show.display = lambda value, display_id: shown.append(value) or Place(shown)  # type: ignore[attr-defined, func-returns-value]
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", show)
    return shown


def test_a_notebook_gets_a_bar_of_its_own(notebook: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.fit(_network(), _data(), pl.MAP(epochs=3), compile=False)
    assert notebook[0].startswith('MAP <progress value="0" max="3"></progress> 0/3 steps')
    assert any("log joint" in text for text in notebook)
    assert notebook[-1] == ""  # gone at the end
    assert capfd.readouterr() == ("", "")


def test_a_bar_in_a_notebook_can_be_refused_and_goes_away(notebook: list[str]) -> None:
    pl.fit(_network(), _data(), pl.MAP(epochs=3), compile=False, progress=False)
    assert notebook == []
    with pytest.raises(pl.DivergenceError):
        _count(Count(bad_term=5), progress=True)
    assert notebook[-1] == ""


def test_a_notebook_is_not_flooded(notebook: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(0.0, 1e3, 0.01))
    monkeypatch.setattr(watching.time, "monotonic", lambda: float(next(clock)))
    with watching.Progress("<b>", 1000, "steps") as bar:
        for done in range(200):
            bar.update(done, "loss 1 < 2")
    assert len(notebook) < 40
    assert "/s, " in notebook[-2]
    assert "s left" in notebook[-2]
    assert "loss 1 &lt; 2" in notebook[-2]
    assert notebook[-2].startswith("&lt;b&gt; ")


# ---------------------------------------------------------------------------------------------------------------------
# Ctrl-C


def _interrupt_at(step: int) -> Any:
    def callback(number: int, _: Any) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    return callback


@pytest.fixture
def main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only, and this test runs in another")


def test_an_interrupt_ends_after_the_step_with_the_posterior_so_far(main_thread: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.warns(UserWarning, match="stopped by Ctrl-C after 3 steps: this is the posterior so far"):
        posterior = _count(Count(steps=1000, per_epoch=1), callbacks=[_interrupt_at(3)])
    assert posterior.interrupted
    assert posterior.run["steps"] == 3
    assert _height(posterior) == [3.0]
    assert posterior.history["height"] == [1.0, 2.0, 3.0]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_sampler_keeps_its_draws(main_thread: None) -> None:
    with pytest.warns(UserWarning, match="stopped by Ctrl-C"):
        posterior = _count(Count(steps=1000, per_epoch=1, thin=2, burn_in=3), callbacks=[_interrupt_at(8)])
    assert _height(posterior) == [5.0, 7.0]


def test_an_interrupt_before_the_first_draw_is_a_keyboard_interrupt(main_thread: None, tmp_path: Path) -> None:
    method = Count(steps=40, per_epoch=1, thin=2, burn_in=20)
    with pytest.raises(KeyboardInterrupt, match="before the first draw"):
        _count(method, callbacks=[_interrupt_at(3)], checkpoint=tmp_path / "run")
    resumed = _count(method, checkpoint=tmp_path / "run")  # and its checkpoint goes on
    assert _height(resumed) == [22.0, 24.0, 26.0, 28.0, 30.0, 32.0, 34.0, 36.0, 38.0, 40.0]
    assert resumed.history["height"] == [float(t) for t in range(1, 41)]


def test_an_interrupt_in_the_last_step_changes_nothing(main_thread: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", pl.FitWarning)
        posterior = _count(Count(steps=4, per_epoch=1), callbacks=[_interrupt_at(4)])
    assert not posterior.interrupted


def test_an_interrupt_inside_a_long_segment_stops_there(main_thread: None) -> None:
    timer = threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.warns(UserWarning, match="stopped by Ctrl-C"):
        posterior = _count(Count(steps=100_000, per_epoch=100_000, pause=1e-3))
    timer.join()
    assert 10 < posterior.run["steps"] < 1000
    assert _height(posterior) == [float(posterior.run["steps"])]


@dataclass(frozen=True)
class Stuck(Count):
    """A step in which the user loses patience."""

    def step(self, model: pl.Model, run: Run[Any], state: CountState, batch: Batch) -> tuple[CountState, dict[str, Tensor]]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("the second interrupt was ignored")


def test_a_second_interrupt_is_immediate(main_thread: None) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _count(Stuck())
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_is_ignored_stays_ignored(main_thread: None) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert _count(Count(steps=6, per_epoch=1), callbacks=[_interrupt_at(3)]).run["steps"] == 6
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_fits_in_other_threads_run_without_a_handler() -> None:
    found: list[Any] = []
    handlers: list[Any] = []
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        found.append(_count(Count(steps=9), callbacks=[lambda *_: handlers.append(signal.getsignal(signal.SIGINT))]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert _height(found[0]) == [9.0]
    assert set(handlers) == {before}


SCRIPT = """
import sys, warnings, torch, plausible as pl
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(32, 2); y = x[:, :1].clone()
net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
said = lambda step, info: step == 50 and print("running", flush=True)
posterior = pl.fit(net, (x, y), pl.MAP(epochs=10**7), compile=False, checkpoint=sys.argv[1], callbacks=[said])
print("steps", posterior.run["steps"], posterior.interrupted, flush=True)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(pl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_ctrl_c_in_a_program_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  shells ignore it for what runs in the background
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "running"
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    word, steps, interrupted = output.split()
    assert (word, interrupted) == ("steps", "True")
    assert "stopped by Ctrl-C" in errors
    assert storage.read_json(tmp_path / "run" / "checkpoint.json")["step"] == int(steps)


# ---------------------------------------------------------------------------------------------------------------------
# Divergence


@pytest.mark.parametrize("bad", [1, 2, 3, 100, 300])
def test_a_bad_term_names_step_and_term_and_leaves_the_last_good_state(bad: int) -> None:
    with pytest.raises(pl.DivergenceError, match=rf"height became nan at step {bad} of 400 \(epoch") as caught:
        _count(Count(steps=400, per_epoch=10, bad_term=bad))
    error = caught.value
    assert (error.step, error.term) == (bad, "height")
    assert error.posterior is not None
    (height,) = _height(error.posterior)
    # A term is that of the weights before its step, so the state from which it came is not good either.
    assert height <= max(bad - 2, 0)
    assert height == error.posterior.run["steps"]
    assert error.posterior.history.get("height", []) == [10 * i + 5.5 for i in range(int(height) // 10)]


def test_a_large_state_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Loop, "TWO_MARKS", 0)
    with pytest.raises(pl.DivergenceError) as caught:
        _count(Count(steps=400, per_epoch=10, bad_term=100))
    assert _height(caught.value.posterior)[0] < 100


@pytest.mark.parametrize("bad", [1, 2, 7, 400])
def test_weights_that_are_not_finite_are_noticed_even_after_the_last_step(bad: int) -> None:
    with pytest.raises(pl.DivergenceError, match="weight became NaN or infinite at step") as caught:
        _count(Count(steps=400, per_epoch=10, bad_weight=bad))
    assert caught.value.step >= bad
    assert caught.value.term == "weight"
    assert _height(caught.value.posterior)[0] < bad


def test_kept_draws_after_a_bad_step_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.DrawWriter, "SHARD_BYTES", 40)  # a shard for every few draws, also of bad ones
    for checkpoint in (None, tmp_path / "run"):
        with pytest.raises(pl.DivergenceError) as caught:
            _count(Count(steps=400, per_epoch=10, thin=1, bad_term=200), checkpoint=checkpoint)
        heights = _height(caught.value.posterior)
        assert heights == [float(t) for t in range(1, len(heights) + 1)]
        assert 100 <= len(heights) < 200
        assert caught.value.posterior.run["steps"] == len(heights)


def test_the_checkpoint_keeps_the_last_good_state(tmp_path: Path) -> None:
    place = pl.Checkpoint(tmp_path / "run", steps=7)
    with pytest.raises(pl.DivergenceError, match="the last good state, after step") as caught:
        _count(Count(steps=400, per_epoch=10, bad_term=200), checkpoint=place)
    content = storage.read_json(tmp_path / "run" / "checkpoint.json")
    assert content["step"] == caught.value.posterior.run["steps"] < 199
    assert not content["finished"]
    with pytest.raises(pl.DivergenceError) as again:  # the same run, resumed, meets the same end
        _count(Count(steps=400, per_epoch=10, bad_term=200), checkpoint=place)
    assert again.value.step == 200


def test_a_sampler_that_diverges_before_its_first_draw_has_no_posterior() -> None:
    with pytest.raises(pl.DivergenceError) as caught:
        _count(Count(steps=40, thin=1, burn_in=30, bad_term=5))
    assert caught.value.posterior is None


def test_a_diverging_optimiser_ends_with_finite_weights(tmp_path: Path) -> None:
    from plausible.core.optimisers import SGD

    method = pl.MAP(epochs=500, batch_size=5, lr=1e3, optimiser=SGD())
    with pytest.raises(pl.DivergenceError, match="a smaller lr usually helps") as caught:
        pl.fit(_network(), _data(), method, checkpoint=pl.Checkpoint(tmp_path / "run", steps=1), **QUIET)
    error = caught.value
    assert error.term in ("log_joint", "log_likelihood", "log_prior", "3.weight", "0.weight", "likelihood.log_scale")
    posterior = error.posterior
    assert all(bool(torch.isfinite(w).all()) for w in posterior.weights().values())
    x, y = _data()
    draw = {name: value[0] for name, value in posterior.store.get([0], "cpu").items()}
    assert math.isfinite(float(posterior.model.log_joint(draw, Batch(x, y))))
    content = storage.read_json(tmp_path / "run" / "checkpoint.json")
    stored = storage.read_tensors(tmp_path / "run" / content["file"], content["state_sha256"])
    assert all(bool(torch.isfinite(v).all()) for n, v in stored.items() if n.startswith("state.") and v.numel() > 1)


def test_the_member_that_diverged_is_named() -> None:
    @dataclass(frozen=True)
    class Fragile(pl.MAP):
        name: ClassVar[str] = ""

        def step(self, model: Any, run: Any, state: Any, batch: Any) -> Any:
            new, info = super().step(model, run, state, batch)
            bad = (new.step >= 4) & (state.weights["weight"].sum() == largest)
            return new, {**info, "log_joint": torch.where(bad, torch.nan, info["log_joint"])}

    still = pl.MAP(epochs=1, batch_size=None, lr=1e-12)
    sums = pl.fit(nn.Linear(2, 1), _data(), pl.Ensemble(still, members=3), **QUIET).weights()["weight"].sum((1, 2))
    largest, member = sums.max(), int(sums.argmax())
    with pytest.raises(pl.DivergenceError, match=rf"log_joint became nan in member {member} at step 4"):
        pl.fit(nn.Linear(2, 1), _data(), pl.Ensemble(Fragile(epochs=9, batch_size=None, lr=1e-12), members=3), **QUIET)


# ---------------------------------------------------------------------------------------------------------------------
# Verbs


def test_a_stage_that_samples_sees_all_data_and_one_that_iterates_sees_batches() -> None:
    from plausible.engine import Options
    from plausible.engine import run as run_method

    sizes: list[int] = []

    class Batched(Count):
        def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
            return replace(super().plan(num_data, per_epoch), batch_size=5)

        def step(self, model: pl.Model, run: Run[Any], state: CountState, batch: Batch) -> tuple[CountState, dict[str, Tensor]]:
            sizes.append(len(batch.y))
            return super().step(model, run, state, batch)

    class Chain(Batched):
        traits: ClassVar[Traits] = Traits(verb="sample")

    x, y = _data()
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(nn.Linear(2, 1), pl.likelihoods.Gaussian(), pl.priors.Gaussian(), data.all(), num_data=20)
    for method, expected in ((Batched(), 5), (Chain(), 20)):
        sizes.clear()
        *_, fitted = run_method(method, model, data, Options(compile=False, progress=False))
        assert fitted.steps == 12
        assert sizes == [expected] * 12


def test_compile_takes_three_values() -> None:
    with pytest.raises(ValueError, match="compile must be"):
        pl.fit(_network(), _data(), pl.MAP(epochs=1), compile="yes", progress=False)


# ---------------------------------------------------------------------------------------------------------------------
# Streams


class Rows(Dataset):
    """A map-style data set that counts what is asked of it."""

    def __init__(self, count: int = 20):
        self.x, self.y = _data(count)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.asked.append(i)
        return self.x[i], self.y[i]


METHOD = pl.MAP(epochs=3, batch_size=6, lr=0.01)


def test_a_data_set_gives_what_its_tensors_give() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    one = pl.fit(net, _data(), METHOD, **QUIET)
    rows = Rows()
    two = pl.fit(net, rows, METHOD, **QUIET)
    torch.testing.assert_close(one.functions(_data()[0]), two.functions(_data()[0]), rtol=1e-5, atol=1e-6)
    assert rows.asked[-72:] == Order(20, 6, 0)(0, 12).flatten().tolist()


def test_a_loader_is_followed_batch_by_batch() -> None:
    seen: list[Tensor] = []

    class Recording(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and not torch.jit.is_tracing():
                seen.append(x.detach().clone())
            return super().forward(x)

    x, y = _data()
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    posterior = pl.fit(Recording(2, 1), loader, pl.MAP(epochs=2, lr=1e-3), **QUIET)
    assert posterior.run["steps"] == 8
    assert posterior.model.num_data == 20
    assert [len(batch) for batch in seen] == [6, 6, 6, 2] * 2
    torch.testing.assert_close(torch.cat(seen), torch.cat([x, x]))


def test_a_shuffled_loader_is_seeded_and_leaves_the_global_generator_alone() -> None:
    x, y = _data()
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    net = _network()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = pl.fit(net, loader, METHOD, **QUIET)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(6)
    two = pl.fit(net, loader, METHOD, **QUIET)
    other = pl.fit(net, loader, METHOD, seed=1, **QUIET)
    assert torch.equal(one.functions(x), two.functions(x))
    assert not torch.equal(one.functions(x), other.functions(x))


def test_an_iterable_needs_its_length() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Any:
            yield from zip(*_data())

    with pytest.raises(ValueError, match="pass num_data="):
        pl.fit(_network(), DataLoader(Endless(), batch_size=5), METHOD, **QUIET)
    posterior = pl.fit(_network(), DataLoader(Endless(), batch_size=5), METHOD, num_data=20, **QUIET)
    assert posterior.run["steps"] == 12


def test_streams_cannot_be_taken_whole() -> None:
    loader = DataLoader(TensorDataset(*_data()), batch_size=5)
    with pytest.raises(ValueError, match="needs the whole data at once"):
        pl.fit(_network(), loader, replace(METHOD, batch_size=None), **QUIET)


def test_a_stream_that_can_be_passed_over_only_once_is_said_to_be_empty() -> None:
    class Once(IterableDataset):
        def __init__(self) -> None:
            self.items = zip(*_data())

        def __iter__(self) -> Any:
            return self.items

    with pytest.raises(ValueError, match="the loader gave no batch"):
        pl.fit(_network(), DataLoader(Once(), batch_size=20), METHOD, num_data=20, **QUIET)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("own", [False, True])
def test_a_compiled_stream_sees_the_batches_that_an_eager_one_sees(own: bool, compiler: None) -> None:
    def fitted(compile: bool) -> Tensor:
        generator = torch.Generator().manual_seed(3) if own else None
        loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True, generator=generator)
        return pl.fit(net, loader, pl.MAP(epochs=2, lr=0.05), compile=compile, progress=False).functions(x)

    x, y = _data()
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1))
    torch.testing.assert_close(fitted(True), fitted(False), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulate, memory


def test_accumulate_sums_a_tree_over_one_pass() -> None:
    x, y = _data(23)
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    stream = as_data(DataLoader(TensorDataset(x, y), batch_size=4), dtype=torch.float32, device=torch.device("cpu"))
    function = lambda batch: {"count": torch.tensor(len(batch.y)), "gram": (batch.x.T @ batch.x,)}  # noqa: E731
    for found in (accumulate(function, data), accumulate(function, data, chunk=5), accumulate(function, stream)):
        assert int(found["count"]) == 23
        torch.testing.assert_close(found["gram"][0], x.T @ x)


def test_memory_is_asked_for_before_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "available", lambda _: 2**30)
    memory.require_memory(2**29, cpu, "this")
    with pytest.raises(MemoryError, match=r"this: about 2.0 GiB are needed and 1.0 GiB are free on cpu"):
        memory.require_memory(2**31, cpu, "this")
    monkeypatch.setattr(memory, "available", lambda _: None)
    memory.require_memory(2**60, cpu, "this")  # where nothing is known nothing is refused
    assert memory._container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert memory._container_memory(tmp_path) == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("network", "shape", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), (40, 2), 1),
        (nn.Sequential(nn.Linear(2, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.Linear(2000, 1)), (40, 2), 2),
        (nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(3, 1)), (40, 2), 2),
        (nn.Sequential(nn.Linear(2, 1), nn.Flatten(), nn.Linear(5, 1)), (40, 5, 2), 2),  # five vectors an example
    ],
)
def test_small_perceptrons_run_on_one_thread(network: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(shape)
        watch = [lambda *_: seen.append(torch.get_num_threads())]
        pl.fit(network, (x, torch.randn(40, 1)), pl.MAP(epochs=2), compile=False, progress=False, callbacks=watch)
        assert set(seen) == {expected}
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError):
            pl.fit(
                network, (x, torch.randn(40, 1)), pl.MAP(epochs=2), compile=False, progress=False, callbacks=[lambda *_: 1 / 0]
            )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_weights_that_decay_are_flushed_before_they_slow_products_down() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    with torch.no_grad():  # dead units: their weights only ever decay
        net[0].bias.fill_(-100.0)
        net[0].weight.fill_(1e-31)
    method = pl.MAP(epochs=600, batch_size=None, lr=0.1, optimiser=pl.optimisers.SGD(momentum=0.0))
    prior = {"0.weight": pl.priors.Gaussian(0.5), "*": pl.priors.Flat()}
    posterior = pl.fit(net, (torch.randn(20, 2), torch.randn(20, 1)), method, prior=prior, progress=False, compile=False)
    assert torch.equal(posterior.weights()["0.weight"], torch.zeros(1, 4, 2))


@pytest.mark.parametrize(
    "method",
    [
        pl.MeanField(epochs=60, batch_size=10),
        pl.Laplace(mode=pl.MAP(epochs=60, batch_size=10)),
        pl.IVON(epochs=60, batch_size=10),
        pl.VOGN(epochs=60, batch_size=10),
        pl.Refined(epochs=60, batch_size=10, refinements=1, draws_kept=3),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_divergence_after_good_steps_has_the_last_good_posterior(method: pl.Method) -> None:
    class Poisoned(nn.Linear):
        """Gives NaN from its 80th training pass on."""

        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).passes += self.training
            return super().forward(x) * (float("nan") if self.training and self.passes > 80 else 1.0)

    Poisoned.passes = 0
    likelihood = pl.likelihoods.Gaussian(scale=0.5)
    x, y = _data()
    with pytest.raises(pl.DivergenceError) as caught:
        pl.fit(nn.Sequential(Poisoned(2, 1)), (x, y), method, likelihood=likelihood, **QUIET)
    posterior = caught.value.posterior
    assert posterior is not None
    assert posterior.run["steps"] > 10
    assert posterior.interrupted
    pred = posterior.predict(x)
    assert bool(torch.isfinite(pred.mean).all())
    assert bool((pred.epistemic > 0).all())
