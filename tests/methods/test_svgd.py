"""SVGD: the kernel and its slopes, one particle, the law of Gaussian targets, repulsion."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.core import random
from plausible.core.data import as_data
from plausible.core.weights import index
from plausible.engine.method import Run
from plausible.methods.ensembles.svgd import kernel
from plausible.testing import LinearGaussian
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET

PROBLEM = LinearGaussian()
FULL = pl.MAP(epochs=500, batch_size=None, lr=pl.schedules.Cosine(0.1))


@pytest.mark.parametrize("bandwidth", [None, 0.7])
def test_the_kernel_and_its_slopes(bandwidth: float | None) -> None:
    x = 100 + torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near, away = kernel(x, bandwidth)
    distances = torch.cdist(x, x).square()
    h = bandwidth or float(distances[~torch.eye(7, dtype=torch.bool)].median()) / math.log(8)
    torch.testing.assert_close(near, (-distances / h).exp())
    for i in range(7):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((-(leaf - x[i]).square().sum(1) / h).exp().sum(), [leaf])
        torch.testing.assert_close(away[i], slope.sum(0))


@pytest.mark.parametrize("which", ["weights", "functions"])
def test_one_particle_is_the_mode(which: Any) -> None:
    _, data = _normed()
    mode = pl.MAP(epochs=12, batch_size=90, patience=None)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    one = pl.fit(net, data, pl.SVGD(mode, particles=1, kernel=which, init="given"), **QUIET).weights()
    alone = pl.fit(net, data, mode, **QUIET).weights()
    for name, value in alone.items():
        torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("which", ["weights", "functions"])
def test_the_law_of_a_gaussian_target(which: Any) -> None:
    mean, covariance = PROBLEM.posterior()
    root = torch.linalg.inv(torch.linalg.cholesky(covariance))
    variances = []
    for particles in (10, 80):
        found = PROBLEM.fit(pl.SVGD(FULL, particles, which)).weights()["weight"].squeeze(1).double()
        white = (found - mean) @ root.T
        assert float(white.mean(0).abs().max()) < 0.1  # exact but for what the optimiser leaves
        variances.append(white.square().mean(0))
    # too narrow, and less so the more particles there are
    assert float(variances[0].max()) < float(variances[1].min()) < 1
    assert float(variances[1].min()) > 0.75


def test_functions_repel_where_weights_do_not() -> None:
    # two networks that differ by the order of hidden units are far apart in weights, and one function
    torch.manual_seed(0)
    x = torch.randn(20, 2)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    rows = as_data((x, 0.1 * x[:, :1]), dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(1e3), pl.priors.Gaussian(1e3), rows.all(), num_data=20)
    swap = torch.tensor([1, 0, 2, 3, 4, 5])
    other = {"0.weight": model.initial["0.weight"][swap] + 1e-3, "0.bias": model.initial["0.bias"][swap]}
    other |= {"2.weight": model.initial["2.weight"][:, swap], "2.bias": model.initial["2.bias"]}
    gaps = {}
    for which in ("weights", "functions"):
        method = pl.SVGD(replace(FULL, lr=1e-3), 2, which, bandwidth=0.05)  # type: ignore[arg-type]
        stage = method.stages()[0]
        run = Run.alone(stage, model, rows, starts={n: torch.stack([w, other[n]]) for n, w in model.initial.items()})
        state = stage.start(model, run, random.key(0))
        for _ in range(20):
            state, _ = stage.step(model, run, state, rows.all())
        one, two = (model.outputs(index(state.weights, k), x) for k in (0, 1))
        gaps[which] = float((one - two).square().mean().sqrt())
    assert gaps["functions"] > 10 * gaps["weights"]


@pytest.mark.parametrize("which", ["weights", "functions"])
def test_particles_in_a_loop_move_as_stacked_ones(which: Any) -> None:
    net, data = _normed()
    net = net[:3].append(net[4])  # without dropout, whose noise differs
    rows = as_data(data, dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), rows.all(), num_data=90)
    stage = pl.SVGD(particles=3, kernel=which).stages()[0]
    run = Run.alone(stage, model, rows)
    one, _ = stage.step(model, run, stage.start(model, run, random.key(0)), rows.all())
    two, _ = stage.looped_step(model, run, stage.start(model, run, random.key(0)), rows.all())  # type: ignore[attr-defined]
    for name, value in {**one.weights, **one.buffers}.items():
        torch.testing.assert_close({**two.weights, **two.buffers}[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": pl.SGLD()}, r"mode must be MAP"),
        ({"mode": pl.MAP(adversarial=0.1)}, "without adversarial"),
        ({"particles": 0}, "particles must be"),
        ({"kernel": "both"}, "kernel must be"),
        ({"bandwidth": 0.0}, "bandwidth must be"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.SVGD(**settings)


def test_particles_start_at_the_draws_of_an_earlier_posterior() -> None:
    earlier = PROBLEM.fit(pl.SVGD(FULL, particles=4))
    still = pl.SVGD(pl.MAP(epochs=1, batch_size=None, lr=1e-9), particles=4)
    found = PROBLEM.fit(still, init=earlier).weights()["weight"]
    torch.testing.assert_close(found, earlier.weights()["weight"], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="raise members instead"):
        pl.Ensemble(still)
