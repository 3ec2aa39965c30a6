"""Chains in other people's loops: the method's steps, its law, and states that go on with the same bits."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.optim import PSGLD, SGHMC, SGLD, SGNHT
from plausible.testing import LinearGaussian

PROBLEM = LinearGaussian()


def _loss(net: nn.Module) -> torch.Tensor:
    """−log p(w, D)/N of the conjugate problem, up to a constant."""
    x, y, _ = PROBLEM.data()
    prior = sum(p.square().sum() for p in net.parameters()) / (2 * PROBLEM.scale**2)
    return (net(x.float()) - y.float()).square().mean() / (2 * PROBLEM.noise**2) + prior / PROBLEM.num_data


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(net).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in net.parameters()]).clone())
    return torch.stack(seen)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_it_takes_the_steps_of_the_method(temperature: float) -> None:
    method = pl.SGLD(epochs=20, batch_size=None, lr=3e-3, burn_in=0.0, thin=1, temperature=temperature)
    draws = PROBLEM.fit(method, seed=5).weights()["weight"].squeeze(1)
    net = PROBLEM.network()
    found = _train(net, SGLD(net.parameters(), 3e-3, num_data=PROBLEM.num_data, temperature=temperature, seed=5), 20)
    torch.testing.assert_close(found, draws, rtol=1e-4, atol=1e-5)


def test_it_has_the_law_of_the_method() -> None:
    torch.set_num_threads(1)
    method = pl.SGLD(lr=3.2e-3, batch_size=None)
    net = PROBLEM.network()
    draws = _train(net, SGLD(net.parameters(), 3.2e-3, num_data=PROBLEM.num_data), 6000)[300:].double()
    mean, covariance = method.conjugate(PROBLEM)
    root = torch.linalg.inv(torch.linalg.cholesky(covariance))
    white = (draws - mean) @ root.T
    # the slowest direction forgets by 1 − ελ/2 a step: its squares are worth one in 1/(ελ_min) steps or so
    effective = len(white) * 3.2e-3 * float(torch.linalg.eigvalsh(PROBLEM.precision())[0]) / 2
    assert float(((white.T @ white) / len(white) - torch.eye(3)).abs().max()) < 5 * math.sqrt(2 / effective)


def test_a_state_goes_on_with_the_same_bits() -> None:
    net = PROBLEM.network()
    optimizer = SGLD(net.parameters(), 1e-3, num_data=PROBLEM.num_data, seed=3)
    _train(net, optimizer, 4)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    whole = _train(net, optimizer, 5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = PROBLEM.network()
    again.load_state_dict(saved["net"])
    other = SGLD(again.parameters(), 1.0, num_data=1)
    other.load_state_dict(saved["optimizer"])
    assert torch.equal(_train(again, other, 5), whole)
    copied = copy.deepcopy(other)
    assert copied.state_dict()["noise"] == {"seed": 3, "steps": 9}
    with pytest.raises(ValueError, match=r"not a state of plausible\.optim\.SGLD"):
        other.load_state_dict(torch.optim.SGD(again.parameters(), 0.1).state_dict())


def test_the_global_generator_and_parameters_without_gradient_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 1))
    optimizer = SGLD(net.parameters(), 1e-3, num_data=40)
    before, state = copy.deepcopy(net[1]), torch.get_rng_state()
    net[0](torch.ones(2, 3)).mean().backward()
    optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(net[1].parameters(), before.parameters()))


def test_groups_schedulers_and_closures_work_as_in_any_optimiser() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": net[0].parameters(), "temperature": 0.0}, {"params": net[1].parameters()}]
    optimizer = SGLD(groups, 1e-3, num_data=40)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = copy.deepcopy(net)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).mean()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == pytest.approx(float(before(torch.ones(2, 3)).mean()))
    expected = before[0].weight - 0.5e-3 * 40 * net[0].weight.grad
    torch.testing.assert_close(net[0].weight, expected)  # without noise
    assert not torch.allclose(net[1].weight, before[1].weight - 0.5e-3 * 40 * net[1].weight.grad)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "SGLD: lr must be at least 0"),
        ({"num_data": 0}, "SGLD: num_data must be positive and finite"),
        ({"num_data": "40"}, "SGLD: num_data must be a number"),
        ({"temperature": math.inf}, "SGLD: temperature must be at least 0 and finite"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SGLD(PROBLEM.network().parameters(), **{"lr": 1e-3, "num_data": 40, **settings})


CHAINS: dict[str, tuple[Any, dict[str, Any]]] = {
    "psgld": (PSGLD, {"decay": 0.9, "damping": 1e-3}),
    "sghmc": (SGHMC, {"friction": 0.3, "noise": 0.05}),
    "sgnht": (SGNHT, {"diffusion": 0.2, "gain": 1e-3}),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_other_chains_take_the_steps_of_their_methods(name: str) -> None:
    kind, settings = CHAINS[name]
    method = pl.methods.create(name, epochs=30, batch_size=None, lr=2e-3, burn_in=0.0, thin=1, temperature=0.5, **settings)
    draws = PROBLEM.fit(method, seed=5).weights()["weight"].squeeze(1)
    net = PROBLEM.network()
    found = _train(net, kind(net.parameters(), 2e-3, num_data=PROBLEM.num_data, temperature=0.5, seed=5, **settings), 30)
    torch.testing.assert_close(found, draws, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHAINS)
def test_the_states_of_the_other_chains_go_on_with_the_same_bits(name: str, dtype: torch.dtype) -> None:
    kind, settings = CHAINS[name]

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 12).view(4, 3).to(dtype)
        for _ in range(steps):
            optimizer.zero_grad()
            net(x).float().square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 2e-3}]
    optimizer = kind(groups, 1e-3, num_data=40, seed=3, **settings)
    train(net, optimizer, 4)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    whole = train(net, optimizer, 5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(dtype)
    again.load_state_dict(saved["net"])
    other = kind([{"params": again[0].parameters()}, {"params": again[1].parameters()}], 1.0, num_data=1)
    other.load_state_dict(saved["optimizer"])
    assert torch.equal(train(again, other, 5), whole)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PSGLD, {"decay": 1.0}, "PSGLD: decay must be in"),
        (PSGLD, {"damping": 0.0}, "PSGLD: damping must be positive"),
        (SGHMC, {"friction": 0.0}, "SGHMC: friction must be above 0"),
        (SGHMC, {"noise": 0.2}, "SGHMC: noise=0.2 is more than friction=0.1"),
        (SGNHT, {"temperature": 0.0}, "SGNHT: temperature must be positive"),
        (SGNHT, {"gain": 1.0}, "SGNHT: gain must be in"),
    ],
)
def test_bad_settings_of_the_other_chains_are_refused_by_name(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(PROBLEM.network().parameters(), 1e-3, **{"num_data": 40, **settings})
