"""Targets: the model's log joint and its gradient for many positions at once, in chunks, tempered, by compiled programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.chains import compiled as blocks
from plausible.blocks.chains.compiled import CapturedDensity, CompiledDensity, faster
from plausible.blocks.chains.density import FunctionDensity, ModelDensity, Point
from plausible.core.data import Data, as_data
from plausible.core.weights import index

CPU = torch.device("cpu")


def problem(
    network: nn.Module | None = None, likelihood: Any = None, prior: Any = None, where: Any = None, weights: bool = False
) -> tuple[pl.Model, Data]:
    stream = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = network or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    network = network.double()
    x = torch.randn(20, 3, generator=stream, dtype=torch.float64)
    y = torch.randn(20, 2, generator=stream, dtype=torch.float64)
    if isinstance(likelihood, pl.likelihoods.Categorical):
        y = torch.randint(2, (20,), generator=stream)  # type: ignore[assignment]
    parts = (x, y, torch.rand(20, generator=stream, dtype=torch.float64)) if weights else (x, y)
    data = as_data(parts, dtype=torch.float64, device=CPU)
    likelihood, prior = likelihood or pl.likelihoods.Gaussian(), pl.priors.as_prior(prior or pl.priors.Gaussian(0.7))
    model = pl.Model.build(network, likelihood, prior, data.all(), num_data=20, where=where)
    return model, data


def positions(target: ModelDensity, chains: int) -> Tensor:
    return 0.5 * torch.randn(chains, target.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x[..., None])[0][:, -1])


CASES: dict[str, dict[str, Any]] = {
    "learned noise": {},
    "classes": {"likelihood": pl.likelihoods.Categorical()},
    "student prior": {"prior": pl.priors.StudentT(df=4.0)},
    "patterns": {"prior": {"0.*": pl.priors.Laplace(1.0), "*": pl.priors.Gaussian(2.0)}},
    "where": {"where": "2.*"},
    "weights": {"weights": True},
    "batch norm": {"network": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))},
    "recurrent": {"network": Recurrent()},
}


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_log_joint(case: str, chains: int) -> None:
    model, data = problem(**CASES[case])
    target = ModelDensity(model, data, chains)
    q = positions(target, chains)
    found = target.evaluate(q)
    for c in range(chains):
        leaf = q[c].clone().requires_grad_()
        named = {**target.rest, **index(target.named(leaf[None]), 0)}
        value = model.log_joint(named, data.all())
        (gradient,) = torch.autograd.grad(value, leaf)
        torch.testing.assert_close((found.log_likelihood + found.log_prior)[c], value.detach())
        torch.testing.assert_close(found.gradient[c], gradient)
    likelihood, prior = target.densities(q)
    torch.testing.assert_close(likelihood, found.log_likelihood)
    torch.testing.assert_close(prior, found.log_prior)


@pytest.mark.parametrize("case", ["learned noise", "weights"])
def test_chunks_add_up(case: str) -> None:
    model, data = problem(**CASES[case])
    whole, parts = ModelDensity(model, data, 3), ModelDensity(model, data, 3, chunk=7)
    q = positions(whole, 3)
    for a, b in zip(whole.evaluate(q), parts.evaluate(q)):
        torch.testing.assert_close(a, b)


def test_a_loader_is_read_in_chunks() -> None:
    model, data = problem()
    batch = data.all()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch.x, batch.y), batch_size=6)
    stream = as_data(loader, dtype=torch.float64, device=CPU)
    target = ModelDensity(model, stream, 2, chunk=6)
    q = positions(target, 2)
    for a, b in zip(ModelDensity(model, data, 2).evaluate(q), target.evaluate(q)):
        torch.testing.assert_close(a, b)


def test_powers_precisions_and_temperature() -> None:
    model, data = problem()
    target = ModelDensity(model, data, 2)
    q = positions(target, 2)
    plain, none = target.evaluate(q), target.bound(beta=torch.zeros(2, dtype=torch.float64)).evaluate(q)
    half = target.bound(beta=torch.tensor([0.5, 0.25], dtype=torch.float64)).evaluate(q)
    torch.testing.assert_close(none.gradient, -q / 0.7**2)
    torch.testing.assert_close(half.gradient[0], 0.5 * (plain.gradient + none.gradient)[0])
    torch.testing.assert_close(half.log_likelihood, plain.log_likelihood)
    precise = target.bound(precision=torch.full((2, target.size), 0.7**-2, dtype=torch.float64)).evaluate(q)
    torch.testing.assert_close(precise.log_prior, plain.log_prior)
    torch.testing.assert_close(precise.gradient, plain.gradient)
    warm = ModelDensity(model.tempered(2.0), data, 2).evaluate(q)
    torch.testing.assert_close(warm.gradient, plain.gradient / 2)
    torch.testing.assert_close(warm.log_prior, plain.log_prior / 2)


def test_leapfrogs_by_hand() -> None:
    target = FunctionDensity(lambda q: -0.25 * q.pow(4).sum(-1), 2)
    q, p = torch.tensor([[1.0, -0.5]], dtype=torch.float64), torch.tensor([[0.3, 0.8]], dtype=torch.float64)
    step, inverse = torch.tensor([0.1], dtype=torch.float64), torch.tensor([1.0, 4.0], dtype=torch.float64)
    path = target.leapfrogs(Point(q, p, *target.evaluate(q)), step, inverse, 3, keep=True)
    x, v = q.clone(), p.clone()
    for i in range(3):
        v = v - 0.05 * x**3
        x = x + 0.1 * inverse * v
        v = v - 0.05 * x**3
        torch.testing.assert_close(path.position[:, i], x)
        torch.testing.assert_close(path.momentum[:, i], v)
    end = target.leapfrogs(Point(q, p, *target.evaluate(q)), step, inverse, 3)
    torch.testing.assert_close(end.momentum, v)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("case", ["learned noise", "student prior"])
def test_compiled_blocks_follow_the_same_path(case: str, compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 2)  # the compiler's time grows with the length of a block, and with every weight
    network = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 2))
    model, data = problem(network, **CASES[case])
    target = ModelDensity(model, data, 3)
    compiled = CompiledDensity.of(target)
    q = positions(target, 3)
    point = Point(q, torch.ones_like(q), *target.evaluate(q))
    step, inverse = torch.tensor([0.01, 0.02, -0.01], dtype=torch.float64), torch.linspace(0.5, 2, target.size).double()
    with torch.no_grad():
        for a, b in zip(
            target.leapfrogs(point, step, inverse, 5, keep=True), compiled.leapfrogs(point, step, inverse, 5, keep=True)
        ):
            torch.testing.assert_close(a, b)
        some = Point(*(part[:2] for part in point))  # fewer rows than chains are padded
        a = target.leapfrogs(some, step[:2], inverse, 5)
        torch.testing.assert_close(a.position, compiled.leapfrogs(some, step[:2], inverse, 5).position)


class Replayed(CapturedDensity):
    """What would be captured, called again and again: the buffers and what is done with them, without a GPU."""

    def _capture(self, run: Any, buffers: Any) -> Any:
        return SimpleNamespace(replay=lambda: run(buffers))


@pytest.mark.parametrize("case", ["learned noise", "student prior", "where"])
@pytest.mark.parametrize("tempered", [False, True])
def test_replayed_leapfrogs_follow_the_same_path(case: str, tempered: bool) -> None:
    model, data = problem(**CASES[case])
    target: ModelDensity = ModelDensity(model, data, 3)
    replayed: ModelDensity = Replayed.of(target)
    q = positions(target, 3)
    if tempered:
        powers, tau = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64), torch.linspace(1, 2, target.size).double()
        target, replayed = (t.bound(beta=powers, precision=tau) for t in (target, replayed))
    point = Point(q, torch.ones_like(q), *target.evaluate(q))
    step, inverse = torch.tensor([0.01, 0.02, -0.01], dtype=torch.float64), torch.linspace(0.5, 2, target.size).double()
    with torch.no_grad():
        for keep in (True, False, True):
            for a, b in zip(
                target.leapfrogs(point, step, inverse, 5, keep=keep), replayed.leapfrogs(point, step, inverse, 5, keep=keep)
            ):
                torch.testing.assert_close(a, b)


def test_nothing_is_compiled_unasked() -> None:
    model, data = problem()
    target = ModelDensity(model, data, 3)
    assert faster(target, False, 10**6) == (target, "eager")
    assert faster(target, "auto", 10) == (target, "eager")
