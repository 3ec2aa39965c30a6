"""The optimiser for other people's loops: the method's numbers, exact states, and what loops do to it."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plausible as pl
from plausible import likelihoods, priors
from plausible.apps.optim import IVON
from plausible.core import random
from plausible.core.data import ArrayData, Batch
from plausible.engine.method import Run
from plausible.methods.natural.base import NaturalState
from plausible.testing import LinearGaussian

N = 30


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def _data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, (x[:, 0] > 0).long()


def _train(net: nn.Module, optimizer: IVON, steps: int, draws: int = 1) -> None:
    x, y = _data(next(net.parameters()).dtype)
    for _ in range(steps):
        for _ in range(draws):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
        optimizer.step()


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_it_takes_the_steps_of_the_method() -> None:
    """Same key, same noise, same gradients: weights, momentum and curvature agree to rounding over several steps."""
    x, y = _data(torch.float64)
    scale, temperature = 0.7, 0.5
    model = pl.Model.build(_net(torch.float64), likelihoods.Categorical(), priors.Gaussian(scale), Batch(x, y), num_data=N)
    model = model.tempered(temperature)
    method = pl.IVON(lr=0.3, samples=1, beta1=0.8, beta2=0.9, initial_hessian=0.5, damping=0.01, clip_radius=0.7)
    run = Run.alone(method, model, ArrayData(Batch(x, y), N))
    state = method.start(model, run, random.key(7, 0))
    net = _net(torch.float64)
    optimizer = IVON(
        net.parameters(),
        0.3,
        N / temperature,
        beta1=0.8,
        beta2=0.9,
        initial_hessian=0.5,
        weight_decay=1 / (N * scale**2),
        damping=0.01,
        clip_radius=0.7,
        rescale_lr=False,
        seed=7,
    )
    for _ in range(5):
        state, _ = method.step(model, run, state, Batch(x, y))
        with optimizer.sampled_params(train=True):
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(state, NaturalState)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.detach(), state.weights[name], rtol=1e-5, atol=1e-7)
        for part in ("momentum", "curvature"):
            torch.testing.assert_close(optimizer.state[parameter][part], getattr(state, part)[name], rtol=1e-5, atol=1e-7)


def test_it_finds_the_exact_diagonal_of_a_quadratic_loss() -> None:
    """In batches, with two draws each; the scales' deviation over seeds is about 0.05."""
    problem = LinearGaussian()
    x, y, _ = problem.data()
    net = problem.network().double()
    decay = 1 / (len(x) * problem.scale**2)
    optimizer = IVON(net.parameters(), 0.05, len(x), beta2=0.995, weight_decay=decay, rescale_lr=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for epoch in range(200):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(8):
            for _ in range(2):
                with optimizer.sampled_params(train=True):
                    (0.5 * (net(x[rows]) - y[rows]).square() / problem.noise**2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    exact = problem.precision().diagonal().rsqrt()
    assert float(((net.weight[0].detach() - problem.posterior()[0]) / exact).abs().max()) < 0.35
    torch.testing.assert_close(optimizer.scale(net.weight)[0], exact, rtol=0.2, atol=0)


def test_draws_follow_q_and_leave_the_means() -> None:
    net = _net()
    optimizer = IVON(net.parameters(), 0.1, 50, initial_hessian=0.5, seed=3)
    _train(net, optimizer, 20)
    means, state = [p.detach().clone() for p in net.parameters()], torch.get_rng_state()
    draws = []
    for _ in range(600):
        with optimizer.sampled_params():
            draws.append(net[0].weight.detach().clone())
    assert all(torch.equal(p, mean) for p, mean in zip(net.parameters(), means))
    assert torch.equal(state, torch.get_rng_state())
    z = (torch.stack(draws) - means[0]) / optimizer.scale(net[0].weight)
    assert float(z.mean(0).abs().max()) < 4.5 / math.sqrt(600)
    torch.testing.assert_close(z.var(0), torch.ones(4, 3), rtol=0, atol=4.5 * math.sqrt(2 / 600))


def test_test_draws_do_not_change_training() -> None:
    one, other = _net(), _net()
    first, second = (IVON(net.parameters(), 0.1, N) for net in (one, other))
    _train(one, first, 3)
    for _ in range(3):
        _train(other, second, 1)
        with second.sampled_params(), torch.no_grad():
            other(_data()[0])
    assert _same(one, other)


# ---------------------------------------------------------------------------------------------------------------------
# States


@pytest.mark.parametrize("pickled", [False, True])
def test_a_resumed_run_has_the_same_bits(pickled: bool) -> None:
    whole = _net()
    optimizer = IVON(whole.parameters(), 0.2, N, beta2=0.9, seed=2)
    _train(whole, optimizer, 6, draws=2)
    net = _net()
    first = IVON(net.parameters(), 0.2, N, beta2=0.9, seed=2)
    _train(net, first, 3, draws=2)
    saved: Any = {"net": copy.deepcopy(net.state_dict()), "optimizer": copy.deepcopy(first.state_dict())}
    if pickled:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    _train(net, first, 2)  # what is loaded does not depend on it
    fresh = _net()
    again = IVON(fresh.parameters(), 0.7, 11, seed=9)
    fresh.load_state_dict(saved["net"])
    again.load_state_dict(saved["optimizer"])
    _train(fresh, again, 3, draws=2)
    assert _same(whole, fresh)
    assert again.state_dict()["noise"] == optimizer.state_dict()["noise"]


def test_a_state_between_two_draws_is_whole() -> None:
    x, y = _data()

    def draw(net: nn.Module, optimizer: IVON) -> None:
        with optimizer.sampled_params(train=True):
            F.cross_entropy(net(x), y).backward()

    one, other = _net(), _net()
    first, second = (IVON(net.parameters(), 0.2, N) for net in (one, other))
    draw(one, first)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(first.state_dict())
    for net, optimizer in ((one, first), (other, second)):
        draw(net, optimizer)
        optimizer.step()
    assert _same(one, other)
    with pytest.raises(ValueError, match="no entry 'noise'"):
        first.load_state_dict(torch.optim.Adam(one.parameters()).state_dict())


def test_a_copy_goes_on_as_the_original() -> None:
    net = _net()
    optimizer = IVON(net.parameters(), 0.2, N, seed=4)
    _train(net, optimizer, 2)
    other, twin = copy.deepcopy((net, optimizer))
    _train(net, optimizer, 2)
    _train(other, twin, 2)
    assert _same(net, other)


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def test_parts_of_a_batch_with_draws_of_their_own_are_averaged() -> None:
    """ĝ is the mean of the draws' gradients, ĥ that of ε ĝ/σ: written out by hand."""
    x, y = _data(torch.float64)
    net = _net(torch.float64)
    settings: dict[str, Any] = {"beta1": 0.0, "beta2": 0.9, "initial_hessian": 0.5, "weight_decay": 0.1}
    optimizer = IVON(net.parameters(), 0.1, N, rescale_lr=False, **settings)
    weight = net[0].weight
    mean, gradients, estimates = weight.detach().clone(), [], []
    for rows in (slice(0, 15), slice(15, 30)):
        with optimizer.sampled_params(train=True):
            noise = (weight.detach() - mean) * math.sqrt(N * 0.6)
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            gradients.append(weight.grad.clone())  # type: ignore[union-attr]
            estimates.append(noise * gradients[-1] * math.sqrt(N * 0.6))
    torch.testing.assert_close(weight.grad, (gradients[0] + gradients[1]) / 2)
    optimizer.step()
    h, f = 0.5, (estimates[0] + estimates[1]) / 2
    h = 0.9 * h + 0.1 * f + 0.5 * 0.01 * (h - f) ** 2 / 0.6
    torch.testing.assert_close(optimizer.state[weight]["curvature"], h + 0.1)
    torch.testing.assert_close(weight.detach(), mean - 0.1 * ((gradients[0] + gradients[1]) / 2 + 0.1 * mean) / (h + 0.1))


def test_the_rate_is_that_of_gradient_descent_at_the_start() -> None:
    x, y = _data(torch.float64)
    net = _net(torch.float64)
    optimizer = IVON(net.parameters(), 0.3, 1e10, initial_hessian=2.0, weight_decay=0.5, beta2=1 - 1e-12)
    plain = _net(torch.float64)
    F.cross_entropy(plain(x), y).backward()
    with optimizer.sampled_params(train=True):
        F.cross_entropy(net(x), y).backward()
    optimizer.step()
    for own, other in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(own.detach(), (other - 0.3 * (other.grad + 0.5 * other)).detach(), rtol=0, atol=1e-4)


def test_closures() -> None:
    x, y = _data()
    one, other = _net(), _net()
    first, second = (IVON(net.parameters(), 0.2, N) for net in (one, other))
    _train(one, first, 3, draws=2)

    def closure() -> Tensor:
        second.zero_grad()
        loss = F.cross_entropy(other(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        loss = second.step(closure, samples=2)
        second.zero_grad()
    assert float(loss) > 0
    assert _same(one, other)


def test_groups_types_and_parameters_without_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
            self.c = nn.Linear(4, 2, dtype=torch.float64)
            self.unused, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x).tanh().bfloat16()).double()) * self.frozen

    x, y = _data()
    net = Net()
    optimizer = IVON(
        [
            {"params": [*net.a.parameters(), net.unused, net.frozen]},
            {"params": net.b.parameters(), "lr": 0.0},
            {"params": net.c.parameters(), "ess": 7.0},
        ],
        0.5,
        N,
        beta2=0.9,
    )
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            assert torch.equal(net.frozen, before["frozen"])
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"a.weight", "a.bias", "c.weight", "c.bias"}
    kept = {name: optimizer.state[p]["curvature"].dtype for name, p in net.named_parameters() if name.endswith("weight")}
    assert kept == {"a.weight": torch.float32, "b.weight": torch.float32, "c.weight": torch.float64}
    assert optimizer.state[net.unused]["step"] == 0
    assert bool((optimizer.scale(net.c.bias) > 0.3).all())  # σ = 1/√(7·h)
    twin = Net()
    again = IVON(
        [
            {"params": [*twin.a.parameters(), twin.unused, twin.frozen]},
            {"params": twin.b.parameters()},
            {"params": twin.c.parameters()},
        ],
        0.5,
        N,
    )
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[twin.b.weight]["curvature"], optimizer.state[net.b.weight]["curvature"])
    assert again.param_groups[2]["ess"] == 7.0


def test_autocast_and_grad_scaler() -> None:
    """A scale of 2¹⁰ changes nothing; a step with infinite gradients is left out and halves the scale."""
    x, y = _data()
    plain, scaled = _net(), _net()
    first, second = (IVON(net.parameters(), 0.2, N, beta2=0.9) for net in (plain, scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        broken = step == 2
        with first.sampled_params(train=True), torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(plain(x), y).backward()
        if not broken:
            first.step()
        with second.sampled_params(train=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(scaled(x), y) * (torch.inf if broken else 1.0)
            scaler.scale(loss).backward()
        scaler.step(second)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
    assert scaler.get_scale() == 512.0
    for one, other in zip(plain.parameters(), scaled.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(first.state[one]["curvature"], second.state[other]["curvature"], rtol=1e-4, atol=1e-6)
    with second.sampled_params(train=True):
        scaler.scale(F.cross_entropy(scaled(x), y)).backward()
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(second)


def test_gradients_that_belong_to_no_draw() -> None:
    x, y = _data()
    net = _net()
    optimizer = IVON(net.parameters(), 0.2, N)
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(RuntimeError, match="belongs to no draw"):
        optimizer.step()
    stale = net[0].weight.grad.clone()  # type: ignore[union-attr]
    with optimizer.sampled_params(train=True):  # drops them
        F.cross_entropy(net(x), y).backward()
    assert not torch.allclose(net[0].weight.grad, 2 * stale)  # type: ignore[arg-type]
    optimizer.zero_grad()  # forgets the draw
    optimizer.step()  # nothing to do
    assert optimizer.state[net[0].weight]["step"] == 0
    before = [p.detach().clone() for p in net.parameters()]

    def broken() -> None:
        F.cross_entropy(net(x), y).backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(net.parameters(), before))
    with optimizer.sampled_params():
        with pytest.raises(RuntimeError, match="hold a draw already"), optimizer.sampled_params():
            pass
        with pytest.raises(RuntimeError, match="leave the block"):
            optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Afterwards


def test_the_posterior_of_a_loop(tmp_path: Any) -> None:
    net = _net()
    optimizer = IVON(net.parameters(), 0.2, N, weight_decay=0.25 / N, initial_hessian=0.3)
    _train(net, optimizer, 30)
    posterior = optimizer.posterior(net, _data())
    assert posterior.model.prior.rule("0.weight").scale == pytest.approx(2.0)  # type: ignore[attr-defined]
    torch.testing.assert_close(posterior.scales["0.weight"], optimizer.scale(net[0].weight))
    x, y = _data()
    assert float(posterior.predict(x).log_prob(y).mean()) > -0.69
    posterior.save(tmp_path / "q")
    assert torch.equal(pl.load(tmp_path / "q", net).functions(x, 3), posterior.functions(x, 3))
    part = IVON(net[2].parameters(), 0.2, N).posterior(net, _data())
    assert set(part.means) == {"2.weight", "2.bias"}
    assert torch.equal(part.points["0.weight"], net[0].weight)
    with pytest.raises(ValueError, match="weights of its own"):
        optimizer.posterior(net, (x, torch.randn(N, 2)))
    with pytest.raises(ValueError, match="none of the network's parameters"):
        optimizer.posterior(_net(), _data())
    with pytest.raises(ValueError, match="no such parameter"):
        optimizer.scale(_net()[0].weight)


def test_names_with_brackets_have_the_prior_of_their_group() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"a[0]": nn.Linear(3, 2)})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["a[0]"](x)

    net = Keyed()
    posterior = IVON(net.parameters(), 0.2, N, weight_decay=0.25 / N).posterior(net, _data())
    assert posterior.model.prior.rule("layers.a[0].weight").scale == pytest.approx(2.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": "fast"},
        {"ess": 0.0},
        {"ess": math.inf},
        {"ess": math.nan},
        {"beta1": 1.0},
        {"beta2": 1.0},
        {"initial_hessian": 0.0},
        {"weight_decay": -1.0},
        {"damping": -1.0},
        {"clip_radius": 0.0},
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(settings))):
        IVON(_net().parameters(), **{"lr": 0.1, "ess": 10.0, **settings})
    with pytest.raises(TypeError, match="complex64"):
        IVON([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], 0.1, 10)


def test_a_parameter_that_one_part_leaves_out_has_a_gradient_of_zero_there() -> None:
    for used in ((True, False), (False, True)):
        a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        optimizer = IVON([a, b], lr=0.1, ess=10)
        for both in used:
            with optimizer.sampled_params(train=True):
                (2 * a + (3 * b if both else 0)).sum().backward()
        assert float(a.grad) == pytest.approx(2.0)
        assert float(b.grad) == pytest.approx(1.5)
