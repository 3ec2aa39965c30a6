"""Threads that predict and fit at the same time: each gets what it would have got alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core import turns

METHODS: dict[str, pl.Method] = {
    "ensemble": pl.Ensemble(pl.MAP(epochs=2, batch_size=10), members=3),
    "law": pl.MeanField(epochs=2, batch_size=10),
    "linearised": pl.Laplace(mode=pl.MAP(epochs=2, batch_size=None)),
    "chains": pl.SGLD(epochs=4, batch_size=10, lr=1e-4),
}


def _data(rows: int = 20) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 2 * rows).reshape(rows, 2)
    return x, x.sum(1, keepdim=True).sin()


def _network(dropout: float) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


NETWORKS = {dropout: _network(dropout) for dropout in (0.0, 0.3)}


def _fit(method: pl.Method, dropout: float = 0.0, **settings: Any) -> pl.Posterior:
    fixed = pl.likelihoods.Gaussian(scale=0.3)
    return pl.fit(NETWORKS[dropout], _data(), method, likelihood=fixed, compile=False, progress=False, **settings)


def _in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each returned; an error of one is raised here."""
    results: list[Any] = [None] * len(works)

    def run(k: int) -> None:
        try:
            results[k] = works[k]()
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("name", METHODS)
def test_predictions_of_several_threads_are_those_of_one(name: str) -> None:
    posterior = _fit(METHODS[name])
    inputs = [torch.randn(5, 2, generator=torch.Generator().manual_seed(k)) for k in range(4)]

    def answers(k: int) -> list[Tensor]:
        pred = posterior.predict(inputs[k], draws=10 if name == "law" else None, seed=k)
        return [pred.mean, pred.variance, posterior.functions(inputs[k], draws=3, seed=k)]

    alone = [answers(k) for k in range(4)]
    before = torch.get_rng_state()
    for each, truth in zip(_in_threads(*(lambda k=k: [answers(k) for _ in range(15)] for k in range(4))), alone):
        assert all(torch.equal(a, b) for values in each for a, b in zip(values, truth))
    assert torch.equal(torch.get_rng_state(), before)


def test_fits_of_two_threads_are_those_of_one() -> None:
    x, _ = _data()
    method = pl.MAP(epochs=30, batch_size=5)
    alone = [_fit(method, 0.3, seed=k).functions(x) for k in range(2)]
    before = torch.get_rng_state()
    together = _in_threads(*(lambda k=k: _fit(method, 0.3, seed=k).functions(x) for k in range(2)))
    assert all(torch.equal(a, b) for a, b in zip(together, alone))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fit_lets_predictions_pass_and_is_not_changed_by_them() -> None:
    x, _ = _data()
    posterior, method = _fit(METHODS["ensemble"]), pl.MAP(epochs=100, batch_size=5)
    alone, truth = _fit(method, 0.3).functions(x), posterior.predict(x).mean
    running, over, passed = threading.Event(), threading.Event(), []

    def fit() -> Tensor:
        fitted = _fit(method, 0.3, callbacks=[lambda *_: running.set()])
        over.set()
        return fitted.functions(x)

    def predict() -> None:
        running.wait(60)
        while not over.is_set():
            assert torch.equal(posterior.predict(x).mean, truth)
            passed.append(over.is_set())

    assert torch.equal(_in_threads(fit, predict)[0], alone)
    assert passed.count(False) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_process_that_is_forked_while_another_thread_has_its_turn_gets_one() -> None:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.alone():
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(60)
    child = os.fork()
    if not child:
        with turns.alone():
            os._exit(7)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
