"""BatchEnsemble: what members share, a step against gradients by hand, convolutions and batch norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.core import random
from plausible.core.data import as_data
from plausible.engine.method import Run
from plausible.methods.ensembles.batch_ensemble import IN, OUT
from plausible.optimisers import SGD
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET

MODE = pl.MAP(epochs=20, batch_size=30, patience=None)


def _model(net: nn.Module, data: Any, **settings: Any) -> tuple[pl.Model, Any]:
    rows = as_data(data, dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(
        net, pl.likelihoods.Gaussian(0.5), pl.priors.Gaussian(), rows.all(), num_data=len(data[0]), **settings
    )
    return model, rows


def test_matrices_differ_by_rank_one_factors_and_the_noise_is_shared() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.BatchEnsemble(MODE, members=3), **QUIET)
    weights = posterior.weights()
    assert posterior.chains == 3
    for name in ("0.weight", "4.weight"):
        ratio = weights[name][1] / weights[name][0]
        _, sizes, _ = torch.linalg.svd(ratio)
        assert float(sizes[1:].sum()) < 1e-3 * float(sizes[0])
        assert float((ratio - 1).abs().max()) > 0.1
    assert float(weights["0.bias"].std(0).max()) > 0
    noise = weights["likelihood.log_scale"]
    assert torch.equal(noise[0], noise[1])
    stored = posterior.store.get(range(3), "cpu")
    assert float(stored["1.running_mean"].std(0).min()) > 0  # each member's own


def test_a_step_follows_the_mean_joint_of_the_members() -> None:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=stream)
    net, lr = nn.Linear(2, 2), 0.1
    y = torch.randn(12, 2, generator=stream)
    model, rows = _model(net, (x, y))
    method = pl.BatchEnsemble(pl.MAP(epochs=5, batch_size=None, lr=lr, optimiser=SGD(momentum=0.0)), members=2)
    run = Run.alone(method, model, rows)
    state = method.start(model, run, random.key(0))
    before = {name: value.clone().double().requires_grad_() for name, value in state.parameters.items()}

    def joint(k: int) -> Tensor:
        weight = before["weight"] * before[OUT + "weight"][k][:, None] * before[IN + "weight"][k][None, :]
        bias = before["own bias"][k]
        normal = torch.distributions.Normal(x.double() @ weight.T + bias, 0.5)
        prior = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
        return normal.log_prob(y.double()).sum() + prior.log_prob(weight).sum() + prior.log_prob(bias).sum()

    aim = (joint(0) + joint(1)) / 2 / 12
    slopes = dict(zip(before, torch.autograd.grad(aim, list(before.values()))))
    new, info = method.step(model, run, state, rows.all())
    torch.testing.assert_close(info["log_joint"].mean().double(), 12 * aim.detach(), rtol=1e-5, atol=1e-4)
    for name, value in before.items():
        torch.testing.assert_close(new.parameters[name], (value + lr * slopes[name]).detach().float(), rtol=1e-4, atol=1e-5)
    made = new.parameters["weight"] * new.parameters[OUT + "weight"][1][:, None] * new.parameters[IN + "weight"][1][None, :]
    torch.testing.assert_close(new.weights["weight"][1], made)


def test_convolutions_are_scaled_by_channel_and_members_in_a_loop_move_as_stacked_ones() -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 2, 6, 6, generator=stream), torch.randint(3, (10,), generator=stream)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    rows = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), rows.all(), num_data=10)
    method = pl.BatchEnsemble(members=3)
    run = Run.alone(method, model, rows)
    start = method.start(model, run, random.key(0))
    by_hand = torch.einsum(
        "oihw,o,i->oihw", model.initial["0.weight"], *(start.parameters[s + "0.weight"][2] for s in (OUT, IN))
    )
    torch.testing.assert_close(start.weights["0.weight"][2], by_hand)
    one, _ = method.step(model, run, start, rows.all())
    two, _ = method.looped_step(model, run, method.start(model, run, random.key(0)), rows.all())
    for name, value in {**one.weights, **one.buffers}.items():
        torch.testing.assert_close({**two.weights, **two.buffers}[name], value, rtol=1e-3, atol=1e-4)


def test_weights_that_are_left_out_are_the_same_in_all_members() -> None:
    net, data = _normed()
    posterior = pl.fit(net, data, pl.BatchEnsemble(MODE), where="4.*", **QUIET)
    stored = posterior.store.get(range(4), "cpu")
    assert torch.equal(stored["0.weight"][0], stored["0.weight"][1])
    assert float((stored["0.weight"][0] - net[0].weight).abs().max()) > 0  # trained along
    with pytest.raises(ValueError, match="nothing to scale"):
        pl.fit(net, data, pl.BatchEnsemble(MODE), where="*.bias", **QUIET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mode": pl.SGLD()}, "mode must be MAP"), ({"members": 0}, "members must be"), ({"spread": -1.0}, "spread must be")],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.BatchEnsemble(**settings)
