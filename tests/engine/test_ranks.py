"""Several ranks: two processes of one machine come to what one process comes to, stop together and fail together."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import plausible as pl
from plausible.core import random, storage
from plausible.core.data import Batch
from plausible.core.weights import Weights, clone
from plausible.engine import Checkpoint, data_parallel, ranks
from plausible.engine.method import Method, Plan, Traits
from plausible.engine.source import share
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.mixture import MixturePosterior

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
QUIET: dict[str, Any] = {"progress": False, "compile": False}
TIMEOUT = 60.0

# ---------------------------------------------------------------------------------------------------------------------
# Two processes that run the same function, again and again


class Failure(NamedTuple):
    """What a rank raised."""

    kind: str
    message: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serve(pipe: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    while (work := pipe.recv()) is not None:
        function, settings = work
        try:
            pipe.send(function(**settings))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(Failure(type(error).__name__, str(error)))


class Pair:
    """Two ranks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        self.pipes, self.processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=serve, args=(there, environment), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], **settings: Any) -> list[Any]:
        """Run on both ranks; what they return, or a `Failure`."""
        for pipe in self.pipes:
            pipe.send((function, settings))
        limit = time.monotonic() + TIMEOUT
        found = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(max(0.0, limit - time.monotonic())), f"rank {rank} hangs in {function.__name__}"
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


# ---------------------------------------------------------------------------------------------------------------------
# What they run


def problem(count: int = 41) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=stream)
    return x, x[:, :1] * x[:, 1:2] + 0.3 * torch.randn(count, 1, generator=stream)


def network(kind: str = "plain") -> nn.Sequential:
    """Every rank has other weights to begin with; those of the first count."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0)))
    extra = {"plain": [], "dropout": [nn.Dropout(0.3)], "norm": [nn.BatchNorm1d(6)]}[kind]
    return nn.Sequential(nn.Linear(3, 6), *extra, nn.Tanh(), nn.Linear(6, 1))


class Result(NamedTuple):
    weights: Weights
    history: dict[str, list[float]]
    run: dict[str, Any]
    draws: int
    chains: int
    functions: Tensor


def fit(method: Method, data: Any = None, *, kind: str = "plain", **settings: Any) -> Result:
    """A fit, and all that can be compared of it."""
    posterior = pl.fit(network(kind), problem() if data is None else data, method, **{**QUIET, **settings})
    assert isinstance(posterior, DrawsPosterior)
    everything = posterior.store.get(range(len(posterior)), "cpu")
    functions = posterior.functions(problem()[0][:5]).cpu()
    return Result(everything, posterior.history, posterior.run, len(posterior), posterior.chains, functions)


def same(one: Result, other: Result, **tolerance: float) -> None:
    assert (one.draws, one.chains, one.run["steps"]) == (other.draws, other.chains, other.run["steps"])
    torch.testing.assert_close(one.weights, other.weights, **(tolerance or {"rtol": 0, "atol": 0}))
    assert one.history.keys() == other.history.keys()
    for name, values in one.history.items():
        assert values == pytest.approx(other.history[name], rel=1e-4, abs=1e-4), name


MAP = pl.MAP(epochs=6, batch_size=9)
SGLD = pl.SGLD(epochs=12, batch_size=9, lr=1e-3, thin=3)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

# ---------------------------------------------------------------------------------------------------------------------
# Ensembles


PATIENT = replace(MAP, batch_size=None, patience=2, epochs=40)


@pytest.mark.parametrize(
    ("method", "members"),
    [
        pytest.param(method, members, id=f"{name}, {members}", marks=[] if (name, members) in DEFAULT else [pytest.mark.slow])
        for DEFAULT in [{("map", 4), ("sgld", 3), ("patience", 1)}]
        for name, method in {"map": MAP, "sgld": SGLD, "patience": PATIENT}.items()
        for members in (4, 3, 1)  # even, uneven, fewer than ranks
    ],
)
def test_a_split_ensemble_is_that_of_one_process(pair: Pair, method: Method, members: int) -> None:
    ensemble = pl.Ensemble(method, members=members)
    first, second = pair(fit, method=ensemble)
    same(first, second)
    same(first, fit(ensemble), **CLOSE)
    assert first.draws % members == 0


@pytest.mark.parametrize("init", ["given", "prior"])
def test_every_start_is_that_of_the_member_in_the_whole(pair: Pair, init: Any) -> None:
    ensemble = pl.Ensemble(MAP, members=3, init=init)
    first, second = pair(fit, method=ensemble)
    same(first, second)
    same(first, fit(ensemble), **CLOSE)


def test_members_on_different_ranks_drop_different_units(pair: Pair) -> None:
    ensemble = pl.Ensemble(replace(MAP, batch_size=None), members=2, init="given")
    first, second = pair(fit, method=ensemble, kind="dropout")
    same(first, second)
    weight = first.weights["0.weight"]
    assert not torch.allclose(weight[0], weight[1], atol=1e-3)  # alike in all but the noise of dropout


def resumed(method: Method, folder: Path, stop: dict[int, int], **settings: Any) -> list[Any]:
    """A run in which some rank fails after some step, and the run that goes on from its checkpoint."""
    rank = int(os.environ.get("RANK", 0))

    def fail(step: int, info: dict[str, float]) -> None:
        if step == stop.get(rank):
            raise OSError(f"no step after {step}")

    found: list[Any] = []
    checkpoint = Checkpoint(folder, steps=13)
    try:
        fit(method, checkpoint=checkpoint, callbacks=[fail], **settings)
    except Exception as error:
        found.append(Failure(type(error).__name__, str(error)))
    return [*found, fit(method, checkpoint=checkpoint, callbacks=[], **settings)]


@pytest.mark.parametrize("method", [pl.Ensemble(SGLD, members=3), SGLD, replace(MAP, patience=3)], ids=["split", "sgld", "map"])
def test_a_failing_rank_fails_all_and_the_run_can_be_resumed(pair: Pair, method: Method, tmp_path: Path) -> None:
    (first, resumed_first), (second, resumed_second) = pair(
        resumed, method=method, folder=tmp_path, stop={1: 17}, kind="dropout"
    )
    assert second == Failure("OSError", "no step after 17")
    assert first == Failure("RankError", "rank 1 failed, and with it this run: OSError: no step after 17")
    same(resumed_first, resumed_second)
    uninterrupted, _ = pair(fit, method=method, kind="dropout")
    same(resumed_first, uninterrupted)
    written = {p.name for p in tmp_path.iterdir()}
    assert written == ({"rank-0", "rank-1"} if method.members else {"rank-0"})


def test_ranks_at_different_steps_catch_up(pair: Pair, tmp_path: Path) -> None:
    method = pl.Ensemble(SGLD, members=3)
    for failure in pair(stopped, method=method, folder=tmp_path, step=40):
        assert failure.kind == "KeyError"
    shutil.rmtree(tmp_path / "rank-1")  # as if it had been killed before its first checkpoint
    first, second = pair(fit, method=method, checkpoint=tmp_path)
    same(first, second)
    same(first, pair(fit, method=method)[0])


def stopped(method: Method, folder: Path, step: int) -> None:
    def fail(number: int, info: dict[str, float]) -> None:
        if number == step:
            raise KeyError(step)

    fit(method, checkpoint=Checkpoint(folder, steps=15), callbacks=[fail])


def test_draws_on_disk_are_gathered_on_disk(pair: Pair, tmp_path: Path) -> None:
    for number, method in enumerate((pl.Ensemble(SGLD, members=3), SGLD)):
        first, second = pair(on_disk, method=method, folder=tmp_path / str(number))
        plain, _ = pair(fit, method=method)
        same(first, second)
        same(first, plain)
        again, _ = pair(on_disk, method=method, folder=tmp_path / str(number))  # finished: read, not run
        same(again, plain)


def on_disk(method: Method, folder: Path) -> Result:
    before = storage.DrawWriter.SHARD_BYTES
    storage.DrawWriter.SHARD_BYTES = 1000
    try:
        posterior = pl.fit(network(), problem(), method, **QUIET, checkpoint=folder)
        assert isinstance(posterior, DrawsPosterior)
        assert isinstance(posterior.store, storage.DiskDraws)
        return fit(method, checkpoint=folder)
    finally:
        storage.DrawWriter.SHARD_BYTES = before


# ---------------------------------------------------------------------------------------------------------------------
# One chain on several ranks


@pytest.mark.parametrize(
    "method",
    [
        MAP,
        replace(MAP, batch_size=None),
        replace(MAP, optimiser=pl.optimisers.SGD(momentum=0.9), lr=1e-3),
        SGLD,
        replace(MAP, patience=2),
    ],
    ids=["odd batches", "all data", "momentum", "sgld", "patience"],
)
def test_data_parallel_steps_are_those_of_one_process(pair: Pair, method: Method) -> None:
    first, second = pair(fit, method=method)
    same(first, second)
    same(first, fit(method), **CLOSE)


def test_example_weights_masks_tempering_and_other_priors_are_shared_too(pair: Pair) -> None:
    x, y = problem()
    data = (
        x,
        y.masked_fill(torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.2, torch.nan),
        torch.rand(len(x)),
    )
    settings: dict[str, Any] = {"data": data, "mask": "nan", "prior": pl.priors.Laplace(0.7)}
    first, second = pair(fit, method=MAP, **settings)
    same(first, second)
    same(first, fit(MAP, **settings), **CLOSE)


@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_networks_with_noise_or_statistics_stay_the_same_on_all_ranks(pair: Pair, kind: str) -> None:
    first, second = pair(fit, method=SGLD, kind=kind)
    same(first, second)
    if kind == "norm":
        single = fit(SGLD, kind=kind)
        assert first.weights["1.num_batches_tracked"][-1] == single.weights["1.num_batches_tracked"][-1]


class Noisy(nn.Linear):
    """Draws a number at each pass in training."""

    seen: ClassVar[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(float(torch.rand(())))
        return super().forward(x)


def noise() -> list[float]:
    Noisy.seen.clear()
    pl.fit(Noisy(3, 1), problem(), MAP, **QUIET)
    return list(Noisy.seen)


def test_networks_draw_other_noise_on_each_rank_and_in_each_step(pair: Pair) -> None:
    first, second = pair(noise)
    assert len(set(first) | set(second)) == len(first) + len(second) == 2 * 6 * 5
    assert pair(noise) == [first, second]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize(
    "method",
    [pl.Ensemble(replace(MAP, epochs=60), members=3), pl.Ensemble(SGLD, members=3), MAP, SGLD],
    ids=["split", "split sgld", "divided", "divided sgld"],
)
def test_ranks_on_a_gpu(pair: Pair, method: Method) -> None:
    first, second = pair(fit, method=method, device="cuda", compile="auto")
    same(first, second)
    assert first.run["mode"] == ("captured" if first.run["steps"] >= 200 else "eager")
    if method != pl.Ensemble(SGLD, members=3):  # whose noise has a seed for each rank
        same(first, fit(method, device="cuda", compile="auto"), rtol=1e-3, atol=1e-4)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 41

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x, y = problem()
        return x[row], y[row]


class Shard(IterableDataset[Any]):
    """Every rank's own rows."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = problem(40)
        rank = int(os.environ["RANK"])
        yield from zip(x[rank::2], y[rank::2])

    def __len__(self) -> int:
        return 20


def fit_stream(kind: str, method: Method = MAP, **settings: Any) -> Result:
    data: Any = TensorDataset(*problem(40))
    if kind == "rows":
        return fit(method, Rows(), **settings)
    if kind == "same":
        return fit(method, DataLoader(data, batch_size=10, shuffle=True), **settings)
    if kind == "sampler":
        return fit(method, DataLoader(data, batch_size=5, sampler=DistributedSampler(data)), **settings)
    if kind == "other sampler":
        return fit(method, DataLoader(data, batch_size=5, sampler=DistributedSampler(data, 3, 1)), **settings)
    if kind == "shards":
        return fit(method, DataLoader(Shard(), batch_size=5), num_data=40, **settings)
    if kind == "uncounted":
        return fit(method, DataLoader(Shard(), batch_size=5), **settings)
    if kind == "own order":
        stream = torch.Generator().manual_seed(int(os.environ["RANK"]))
        return fit(method, DataLoader(data, batch_size=10, shuffle=True, generator=stream), **settings)
    assert kind == "short"
    return fit(method, DataLoader(TensorDataset(*problem(41)), batch_size=10), **settings)


@pytest.mark.parametrize("kind", ["rows", "same"])
def test_streams_that_all_ranks_see_are_divided(pair: Pair, kind: str) -> None:
    first, second = pair(fit_stream, kind=kind)
    same(first, second)
    same(first, fit_stream(kind), **CLOSE)


def in_turn(sampler: str) -> list[tuple[Tensor, Tensor]]:
    """The global batches that two ranks read: those of one rank behind those of the other."""
    data = TensorDataset(*problem(40))
    if sampler == "shards":
        parts = [torch.arange(rank, 40, 2).expand(6, 20) for rank in range(2)]
    else:
        parts = []
        for rank in range(2):
            one = DistributedSampler(data, 2, rank)
            orders = []
            for epoch in range(6):
                one.set_epoch(epoch)
                orders.append(torch.tensor(list(one)))
            parts.append(torch.stack(orders))
    rows = torch.cat([part.reshape(6, 4, 5) for part in parts], dim=2).reshape(24, 10)
    x, y = problem(40)
    return [(x[index], y[index]) for index in rows]


class Batches(IterableDataset[Any]):
    """Given batches."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]):
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("kind", ["sampler", "shards"])
def test_streams_that_differ_between_ranks_make_one_batch_together(pair: Pair, kind: str) -> None:
    law: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian()}  # the first rank standardises by the rows that it sees
    first, second = pair(fit_stream, kind=kind, **law)
    same(first, second)
    batches = Batches(in_turn(kind))
    single = fit(replace(MAP, epochs=1), DataLoader(batches, batch_size=None), num_data=40, **law)
    torch.testing.assert_close(first.weights, single.weights, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "method", "message"),
    [
        ("own order", MAP, "by a DistributedSampler"),
        ("uncounted", MAP, "pass num_data="),
        ("other sampler", MAP, "for rank 1 of 3"),
        ("short", MAP, "a batch of 1 examples cannot be divided among 2 ranks"),
        ("sampler", pl.Ensemble(MAP, members=2), "without a DistributedSampler"),
    ],
)
def test_streams_that_cannot_be_right_are_refused(pair: Pair, kind: str, method: Method, message: str) -> None:
    for failure in pair(fit_stream, kind=kind, method=method):
        assert failure.kind == "ValueError"
        assert message in failure.message


def test_loaders_resume(pair: Pair, tmp_path: Path) -> None:
    for kind in ("same", "sampler"):
        for failure in pair(stopped_stream, kind=kind, folder=tmp_path / kind):
            assert failure.kind == "KeyError"
        first, second = pair(fit_stream, kind=kind, checkpoint=tmp_path / kind)
        same(first, second)
        same(first, pair(fit_stream, kind=kind)[0])
    for failure in pair(fit_stream, kind="shards", checkpoint=tmp_path / "shards"):
        assert "cannot be kept" in failure.message


def stopped_stream(kind: str, folder: Path) -> None:
    def fail(number: int, info: dict[str, float]) -> None:
        if number == 10:
            raise KeyError("ten")

    fit_stream(kind, checkpoint=Checkpoint(folder, steps=3), callbacks=[fail])


# ---------------------------------------------------------------------------------------------------------------------
# Methods of one's own


class FreeState(NamedTuple):
    weights: Weights
    buffers: Weights
    step: Tensor


@dataclass(frozen=True)
class Free(Method):
    """Gradient ascent, done right or wrong."""

    way: str = "gradient"
    fails: int = -1

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return Plan(20, 5, 10)

    def start(self, model: pl.Model, run: Any, key: Tensor) -> FreeState:
        return FreeState(clone(model.initial), clone(model.buffers), torch.zeros((), dtype=torch.int64))

    def step(self, model: pl.Model, run: Any, state: FreeState, batch: Batch) -> tuple[FreeState, dict[str, Tensor]]:
        rank = int(os.environ.get("RANK", 0))
        if rank == 1 and int(state.step) == self.fails and self.way == "before":
            raise OSError("before the gradient")
        if self.way == "by hand":
            leaves = {n: w.detach().requires_grad_() for n, w in state.weights.items()}
            with torch.enable_grad():
                value = model.log_likelihood(leaves, batch).sum()
                grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values()))))
        elif self.way == "transformed":
            grads = torch.func.grad(lambda w: model.log_joint(w, batch))(state.weights)
        elif self.way == "differentiated":
            with torch.enable_grad():
                model.log_joint({n: w.detach().requires_grad_() for n, w in state.weights.items()}, batch)
        else:
            tempered = model.tempered(1.0)
            grads = tempered.gradient(state.weights, batch, buffers=state.buffers).grads
        if rank == 1 and int(state.step) == self.fails and self.way == "after":
            raise OSError("after the gradient")
        if rank == 1 and self.way == "twice":
            model.gradient(state.weights, batch, buffers=state.buffers)
        weights = {n: w + 1e-4 * grads[n] for n, w in state.weights.items()}
        value = model.log_joint(weights, batch)
        return FreeState(weights, state.buffers, state.step + 1), {"log_joint": value}

    def posterior(self, model: pl.Model, run: Any, fitted: Any) -> pl.Posterior:
        return DrawsPosterior.of(self, model, fitted)


def test_a_method_of_ones_own_is_shared_by_gradient_and_log_joint(pair: Pair) -> None:
    first, second = pair(fit, method=Free())
    same(first, second)
    same(first, fit(Free()), **CLOSE)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("by hand", "came to different weights by step 1"),
        ("transformed", "cannot be inside torch.func"),
        ("differentiated", "use model.gradient"),
        ("twice", "unequally often"),
    ],
)
def test_a_method_that_goes_its_own_ways_is_refused(pair: Pair, way: str, message: str) -> None:
    for failure in pair(fit, method=Free(way)):
        assert message in failure.message, failure


@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 12])
def test_a_rank_that_fails_within_a_step_does_not_leave_the_others_waiting(pair: Pair, way: str, step: int) -> None:
    first, second = pair(fit, method=Free(way, step))
    assert second == Failure("OSError", f"{way} the gradient")
    assert first.kind == "RankError"
    assert f"rank 1 failed, and with it this run: OSError: {way}" in first.message


@dataclass(frozen=True)
class Kernel(Free):
    """Keeps no draws: its posterior is made of its state."""

    traits: ClassVar[Traits] = Traits(keeps_draws=False)

    def posterior(self, model: pl.Model, run: Any, fitted: Any) -> pl.Posterior:
        stacked = {name: value.unsqueeze(0) for name, value in fitted.state.weights.items()}
        return DrawsPosterior(self, model, {"history": {}}, storage.MemoryDraws(stacked))


def mixture(members: int) -> Tensor:
    posterior = pl.fit(network(), problem(), pl.Ensemble(Kernel(), members=members), **QUIET)
    assert isinstance(posterior, MixturePosterior)
    assert len(posterior.parts) == members
    return posterior.functions(problem()[0][:5])


@pytest.mark.parametrize("members", [3, 1])
def test_states_are_gathered_where_draws_are_not(pair: Pair, members: int) -> None:
    first, second = pair(mixture, members=members)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, mixture(members), **CLOSE)


# ---------------------------------------------------------------------------------------------------------------------
# Stopping, refusing, keeping quiet


def diverging(method: Method) -> tuple[str, int, str, int | None]:
    data = problem()
    try:
        fit(method, data, callbacks=[])
    except pl.DivergenceError as error:
        posterior = error.posterior
        return str(error), error.step, error.term, None if posterior is None else len(posterior)
    raise AssertionError("did not diverge")


@dataclass(frozen=True)
class Blows(pl.SGLD):
    """SGLD whose third member meets infinity."""

    def step(self, model: pl.Model, run: Any, state: Any, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        new, info = super().step(model, run, state, batch)
        third = (state.key == random.fold(random.key(0), 2)).all()
        info["log_joint"] = torch.where(third & (state.step == 20), torch.inf, info["log_joint"])
        return new, info


def test_divergence_on_one_rank_ends_all(pair: Pair) -> None:
    blows = Blows(**{name: getattr(SGLD, name) for name in ("epochs", "batch_size", "lr", "thin")}, burn_in=0.0)
    first, second = pair(diverging, method=pl.Ensemble(blows, members=3))
    assert "log_joint became inf in member 2 at step 21" in second[0]
    assert first[0].startswith("rank 1 failed, and with it this run: DivergenceError: log_joint became inf in member 2")
    assert first[1:3] == second[1:3] == (21, "log_joint")
    assert first[3] is None
    assert second[3] is not None
    assert second[3] >= 1


def test_divergence_of_a_shared_chain_is_everybodys(pair: Pair) -> None:
    first, second = pair(diverging, method=pl.SGLD(epochs=50, batch_size=9, lr=10.0, burn_in=0.0, thin=1))
    assert first[:3] == second[:3]


def interrupted(method: Method, sender: int, receiver: int, checkpoint: Path | None = None) -> tuple[Result, list[str]]:
    """A run in which the process of one rank sends Ctrl-C to a process after step 25."""

    def stop(step: int, info: dict[str, float]) -> None:
        if step == 25 and os.getpid() == sender:
            os.kill(receiver, signal.SIGINT)
        if step > 25 and sender != receiver:
            time.sleep(0.01)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(method, callbacks=[stop], checkpoint=checkpoint)
    return found, [str(warning.message) for warning in caught if "Ctrl-C" in str(warning.message)]


@pytest.mark.parametrize("method", [pl.Ensemble(replace(SGLD, burn_in=0.0), members=3), MAP], ids=["split", "divided"])
def test_an_interrupt_on_one_rank_stops_all_at_the_same_step(pair: Pair, method: Method, tmp_path: Path) -> None:
    process = pair.processes[1].pid
    (first, said), (second, unsaid) = pair(interrupted, method=method, sender=process, receiver=process, checkpoint=tmp_path)
    same(first, second)
    assert first.run["interrupted"]
    assert 25 <= first.run["steps"] < 30
    assert len(said) == 1
    assert not unsaid
    again, _ = pair(fit, method=method, checkpoint=tmp_path)
    same(again, pair(fit, method=method)[0])


def test_an_interrupt_on_a_rank_without_work_stops_those_at_work(pair: Pair) -> None:
    method = pl.Ensemble(replace(MAP, epochs=400), members=1)
    sender, receiver = (process.pid for process in pair.processes)
    (first, said), (second, _) = pair(interrupted, method=method, sender=sender, receiver=receiver)
    same(first, second)
    assert first.run["interrupted"]
    assert 25 <= first.run["steps"] < 1000
    assert len(said) == 1


def other_seed() -> None:
    fit(MAP, seed=int(os.environ["RANK"]))


def other_data() -> None:
    x, y = problem()
    fit(MAP, (x + int(os.environ["RANK"]), y))


def bad_data() -> None:
    x, y = problem()
    fit(MAP, (x, y[:-1] if os.environ["RANK"] == "1" else y))


def test_ranks_that_were_asked_for_different_things_are_refused(pair: Pair) -> None:
    for failure in pair(other_seed):
        assert failure.message.startswith("the ranks do not agree: seed is 0 on rank 0 and 1 on rank 1"), failure
    for failure in pair(other_data):
        assert "the ranks do not agree: data is" in failure.message
        assert "the whole data" in failure.message
    first, second = pair(bad_data)
    assert first.kind == "RankError"
    assert "rank 1 failed, and with it this run: ValueError: x has 41" in first.message
    assert second.kind == "ValueError"


def test_batches_smaller_than_the_ranks_are_refused(pair: Pair) -> None:
    for failure in pair(fit, method=replace(MAP, batch_size=1)):
        assert failure == Failure("ValueError", failure.message)
        assert "cannot be divided among 2 ranks" in failure.message


def test_checkpoints_belong_to_a_number_of_ranks(pair: Pair, tmp_path: Path) -> None:
    ensemble = pl.Ensemble(MAP, members=2)
    pair(fit, method=ensemble, checkpoint=tmp_path / "two")
    with pytest.raises(ValueError, match="holds a run on several ranks"):
        fit(ensemble, checkpoint=tmp_path / "two")
    fit(ensemble, checkpoint=tmp_path / "one")
    for failure in pair(fit, method=ensemble, checkpoint=tmp_path / "one"):
        assert "holds a run of one process and there are 2 ranks now" in failure.message
    content = storage.read_json(tmp_path / "two" / "rank-0" / "checkpoint.json")
    content["identity"]["ranks"] = 3
    storage.write_json(tmp_path / "two" / "rank-0" / "checkpoint.json", content)
    first, second = pair(fit, method=ensemble, checkpoint=tmp_path / "two")
    assert "ranks was 3 and is now 2" in first.message
    assert first.kind == "ValueError"
    assert "ranks was 3 and is now 2" in second.message
    assert second.kind == "RankError"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    for failure in pair(fit, method=ensemble, checkpoint=tmp_path / "foreign"):
        assert failure.kind == "FileExistsError"
        assert "thesis.tex" in failure.message


def talk() -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("plausible")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        fit(pl.Ensemble(MAP, members=1))
        fit(MAP, compile=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return said


def test_the_first_rank_speaks_for_all(pair: Pair) -> None:
    first, second = pair(talk)
    assert not second
    assert any("the other ranks wait" in line for line in first)
    assert sum("data-parallel run are not compiled" in line for line in first) == 1


def alone() -> Result:
    os.environ["PLAUSIBLE_RANKS"] = "alone"
    try:
        return fit(MAP, seed=int(os.environ["RANK"]))
    finally:
        del os.environ["PLAUSIBLE_RANKS"]


def test_ranks_may_fit_for_themselves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(alone)
    assert not torch.equal(first.weights["0.weight"], second.weights["0.weight"])
    monkeypatch.setenv("PLAUSIBLE_RANKS", "many")
    with pytest.raises(ValueError, match="PLAUSIBLE_RANKS='many'"):
        fit(MAP)


def test_nobody_else_is_looked_for_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert type(data_parallel.assemble(MAP)) is ranks.Team


def test_shares_cover_a_batch_once() -> None:
    for rows, size in ((9, 2), (7, 3), (4, 4), (128, 5)):
        parts = [range(rows)[share(rows, rank, size)] for rank in range(size)]
        assert [row for part in parts for row in part] == list(range(rows))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ValueError, match="3 examples cannot be divided among 4 ranks"):
        share(3, 0, 4)


def test_votes() -> None:
    vote = ranks.Vote
    assert ranks.count_votes([vote(10, 5), vote(8, 20)]) == (15, False, False)
    assert ranks.count_votes([vote(10, 0), vote(8, 20)]) == (28, False, False)
    assert ranks.count_votes([vote(10, 5, stale=True), vote(8, 20)]) == (15, False, False)
    assert ranks.count_votes([vote(10, 5, stale=True), vote(10, 20, stale=True)]).over
    assert ranks.count_votes([vote(10, 5, stop=True), vote(10, 20)]) == (15, True, True)
    assert ranks.count_votes([vote(10, 0, stop=True), vote(10, 0)]) == (0, True, False)


SCRIPT = """
import atexit, os, sys, torch, plausible as pl
from pathlib import Path

@atexit.register  # called last: no thread of the groups may outlive the interpreter
def threads_are_gone():
    if any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")):
        os._exit(7)

torch.manual_seed(0)
x = torch.randn(40, 2)
net = torch.nn.Linear(2, 1)
posterior = pl.fit(net, (x, x.sum(1, keepdim=True)), pl.Ensemble(pl.MAP(epochs=3), members=3), progress=False)
if sys.argv[1] == "die" and os.environ["RANK"] == "1":
    os._exit(3)
pl.fit(net, (x, x.sum(1, keepdim=True)), pl.MAP(epochs=3), progress=False)
if os.environ["RANK"] == "0":
    posterior.save(sys.argv[1])
"""


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchrun(dies: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        str(tmp_path / "script.py"),
        "die" if dies else str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(pl.__file__).parents[1])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert (result.returncode == 0) is not dies, result.stderr
    if not dies:
        assert len(pl.load(tmp_path / "out", nn.Linear(2, 1)).weights()["weight"]) == 3


def test_variables_that_torchrun_left_are_no_silent_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(data_parallel, "PATIENCE", 0.05)

    def never(*_: Any) -> None:
        time.sleep(0.3)
        raise RuntimeError("nobody came")

    monkeypatch.setattr(dist, "init_process_group", never)
    with caplog.at_level(logging.WARNING, "plausible"), pytest.raises(RuntimeError, match="nobody came"):
        pl.fit(nn.Linear(1, 1), (torch.randn(4, 1), torch.randn(4, 1)), pl.MAP(epochs=1), **QUIET)
    assert "waiting for 2 other processes at 127.0.0.1:1" in caplog.text
    assert "PLAUSIBLE_RANKS=alone" in caplog.text
