"""Planes and surfaces against densities by hand, flatness against its closed form on a linear model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.blocks.batch_norm import BatchNorms
from plausible.core.weights import flatten, unflatten
from plausible.testing import LinearGaussian
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET

PROBLEM = LinearGaussian()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y, _ = PROBLEM.data()
    return x.float(), y.float()


def test_a_plane_has_the_densities_of_its_weights() -> None:
    posterior = PROBLEM.fit(pl.Ensemble(pl.MAP(epochs=3, patience=None), members=3))
    x, y = _data()
    found = pl.geometry.plane(posterior, (x, y), size=5)
    w = posterior.weights()["weight"].squeeze(1).double()
    along = w[1] - w[0]
    across = (w[2] - w[0]) - ((w[2] - w[0]) @ along) / (along @ along) * along
    axes = torch.stack([along / along.norm(), across / across.norm()])
    torch.testing.assert_close(found.points @ axes + w[0], w, rtol=1e-5, atol=1e-6)
    assert float(found.x[0]) < 0 < float(found.x[-1])
    for j, i in ((0, 0), (3, 1), (4, 4)):
        here = w[0] + found.x[i] * axes[0] + found.y[j] * axes[1]
        likelihood = torch.distributions.Normal(x.double() @ here[:, None], PROBLEM.noise).log_prob(y.double()).sum() / 40
        prior = torch.distributions.Normal(0.0, PROBLEM.scale).log_prob(here).sum() / 40
        assert float(found.log_likelihood[j, i]) == pytest.approx(float(likelihood), rel=1e-4)
        assert float(found.log_joint[j, i]) == pytest.approx(float(likelihood + prior), rel=1e-4)


def test_flatness_of_a_linear_model_is_half_the_trace() -> None:
    # one filter of length |w|: E[d dᵀ] = |w|²/P I, and the drop is ½ r² |w|²/P tr(xᵀx)/(N σ²), whatever the slope
    posterior = PROBLEM.fit(pl.MAP(epochs=50, batch_size=None, lr=0.05))
    x, y = _data()
    w = posterior.weights()["weight"].double().flatten()
    exact = 0.5 * 0.3**2 * float(w @ w) / 3 * float(x.double().square().sum()) / (40 * PROBLEM.noise**2)
    found = pl.geometry.flatness(posterior, (x, y), radius=0.3, samples=400)
    assert abs(found.drop - exact) < 5 * found.error
    assert found.error < 0.1 * exact


def test_surfaces_do_not_change_when_filters_are_rescaled() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.randn(30, 1)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    posterior = pl.fit(net, (x, y), pl.MAP(epochs=20), likelihood=pl.likelihoods.Gaussian(1.0), **QUIET)
    one = pl.geometry.surface(posterior, (x, y), size=5)
    held = {name: value.clone() for name, value in posterior.store.stacked.items()}  # type: ignore[attr-defined]
    held["0.weight"], held["0.bias"], held["2.weight"] = 10 * held["0.weight"], 10 * held["0.bias"], held["2.weight"] / 10
    posterior.store.stacked = held  # type: ignore[attr-defined]
    two = pl.geometry.surface(posterior, (x, y), size=5)
    torch.testing.assert_close(two.log_likelihood, one.log_likelihood, rtol=1e-3, atol=1e-3)
    middle = posterior.predict(x).log_prob(y).mean()
    assert float(two.log_likelihood[2, 2]) == pytest.approx(float(middle), rel=1e-4)


def test_batch_norms_have_the_statistics_of_every_point() -> None:
    net, (x, y) = _normed()
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(0.5), **QUIET}
    posterior = pl.fit(net, (x, y), pl.Ensemble(pl.MAP(epochs=5, patience=None), members=3), **settings)
    found = pl.geometry.plane(posterior, (x, y), size=3)
    stored = posterior.store.get([0, 1, 2], "cpu")
    w = [flatten({n: stored[n][k] for n in posterior.model.initial}).double() for k in range(3)]
    along = w[1] - w[0]
    across = (w[2] - w[0]) - ((w[2] - w[0]) @ along) / (along @ along) * along
    here = w[0] + found.x[0] * along / along.norm() + found.y[2] * across / across.norm()
    weights = unflatten(here.float(), posterior.model.initial)
    norms = BatchNorms.of(posterior.model)
    assert norms is not None
    outputs = posterior.model.outputs({**weights, **norms.statistics(weights, x)}, x)
    exact = torch.distributions.Normal(outputs, 0.5).log_prob(y).mean()
    assert float(found.log_likelihood[2, 0]) == pytest.approx(float(exact), rel=1e-4)


def test_what_cannot_be_drawn_is_refused() -> None:
    posterior = PROBLEM.fit(pl.Ensemble(pl.MAP(epochs=3, patience=None), members=3))
    data = _data()
    with pytest.raises(ValueError, match="three different draws"):
        pl.geometry.plane(posterior, data, (0, 1, 1))
    with pytest.raises(ValueError, match="draw 5 is not one of the 3 draws"):
        pl.geometry.plane(posterior, data, (0, 1, 5))
    with pytest.raises(ValueError, match="size must be"):
        pl.geometry.surface(posterior, data, size=1)
    with pytest.raises(ValueError, match="samples must be"):
        pl.geometry.flatness(posterior, data, samples=1)
    with pytest.raises(TypeError, match="no stored draws"):
        pl.geometry.surface(PROBLEM.fit(pl.MeanField(epochs=3)), data)
    line = {name: torch.stack([value[0], value[0] + 1, value[0] + 2]) for name, value in posterior.store.stacked.items()}  # type: ignore[attr-defined]
    posterior.store.stacked = line  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lie on one line"):
        pl.geometry.plane(posterior, data)


def test_the_picture_has_the_draws_on_it() -> None:
    pytest.importorskip("matplotlib")
    posterior = PROBLEM.fit(pl.Ensemble(pl.MAP(epochs=3, patience=None), members=3))
    found = pl.geometry.plane(posterior, _data(), size=4)
    axes = pl.plots.surface(found, show="posterior")
    drawn = [tuple(float(v[0]) for v in line.get_data()) for line in axes.lines]  # type: ignore[arg-type]
    assert drawn == [pytest.approx(tuple(point)) for point in found.points.tolist()]
    with pytest.raises(ValueError, match="show must be"):
        pl.plots.surface(replace(found), show="other")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Curves


def _apart() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(100, 2, generator=stream)
    y = (2 * x[:, :1]).sin() * x[:, 1:] + 0.1 * torch.randn(100, 1, generator=stream)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    return net, (x, y), {**QUIET, "likelihood": pl.likelihoods.Gaussian(0.1)}


@pytest.mark.parametrize("kind", ["bezier", "chain"])
def test_a_curve_connects_two_posteriors_below_the_wall_between_them(kind: Any) -> None:
    net, data, settings = _apart()
    mode = pl.MAP(epochs=300, lr=0.02, patience=None)
    one, two = (pl.fit(net, data, pl.Ensemble(mode, 1), **settings, seed=seed) for seed in (0, 1))
    found = pl.geometry.connect(one, two, data, kind=kind, path=pl.SWA(mode=None, epochs=150, lr=0.02), size=5)
    assert found.straight_wall > 3 * max(found.wall, 0.5)
    ends = [{name: value[0] for name, value in posterior.weights().items()} for posterior in (one, two)]
    bend = found.bend
    half = {  # at t = 1/2, and at t = 1/4
        "bezier": ((0.25, 0.5, 0.25), (0.5625, 0.375, 0.0625)),
        "chain": ((0.0, 1.0, 0.0), (0.5, 0.5, 0.0)),
    }[kind]
    for place, (a, b, c) in zip((2, 1), half):
        here = {name: a * ends[0][name] + b * bend[name] + c * ends[1][name] for name in bend}
        f = torch.func.functional_call(net, here, (data[0],))
        exact = torch.distributions.Normal(f.double(), 0.1).log_prob(data[1].double()).mean()
        assert float(found.log_likelihood[place]) == pytest.approx(float(exact), rel=1e-4)
    for posterior, place in ((one, 0), (two, -1)):
        exact = posterior.predict(data[0]).log_prob(data[1]).mean()
        assert float(found.log_likelihood[place]) == pytest.approx(float(exact), rel=1e-4)
        assert float(found.straight_log_likelihood[place]) == pytest.approx(float(exact), rel=1e-4)
    middle = {name: (ends[0][name] + ends[1][name]) / 2 for name in bend}
    f = torch.func.functional_call(net, middle, (data[0],))
    exact = torch.distributions.Normal(f.double(), 0.1).log_prob(data[1].double()).mean()
    assert float(found.straight_log_likelihood[2]) == pytest.approx(float(exact), rel=1e-4)


def test_batch_norms_have_the_statistics_of_every_place_on_a_curve() -> None:
    net, data = _normed()
    members = pl.fit(
        net, data, pl.Ensemble(pl.MAP(epochs=20, patience=None), 2), likelihood=pl.likelihoods.Gaussian(0.3), **QUIET
    )
    path = pl.SWA(mode=None, epochs=10, lr=0.01)
    found = pl.geometry.connect(members, members, data, draws=(0, 1), path=path, size=3)
    again = pl.geometry.connect(members, members, data, draws=(0, 1), path=path, size=3)
    torch.testing.assert_close(found.log_joint, again.log_joint)
    ends = [{name: value[k] for name, value in members.weights().items()} for k in (0, 1)]
    here = {name: 0.25 * ends[0][name] + 0.5 * found.bend[name] + 0.25 * ends[1][name] for name in found.bend}
    norms = BatchNorms.of(members.model)
    assert norms is not None
    f = members.model.outputs({**here, **members.model.buffers, **norms.statistics(here, data[0])}, data[0])
    exact = torch.distributions.Normal(f.double(), 0.3).log_prob(data[1].double()).mean()
    assert float(found.log_likelihood[1]) == pytest.approx(float(exact), rel=1e-4)


def test_curves_that_cannot_be_are_refused() -> None:
    net, data, settings = _apart()
    posterior = pl.fit(net, data, pl.Ensemble(pl.MAP(epochs=2), 2), **settings)
    other = pl.fit(nn.Linear(2, 1), data, pl.MAP(epochs=2), **settings)
    with pytest.raises(ValueError, match="kind must be"):
        pl.geometry.connect(posterior, posterior, data, draws=(0, 1), kind="spline")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both ends are the same weights"):
        pl.geometry.connect(posterior, posterior, data)
    with pytest.raises(ValueError, match="posteriors of one network"):
        pl.geometry.connect(posterior, other, data)
    with pytest.raises(TypeError, match="path must be"):
        pl.geometry.connect(posterior, posterior, data, draws=(0, 1), path=pl.MAP())  # type: ignore[arg-type]


def test_the_picture_of_a_curve_shows_both_losses() -> None:
    net, data, settings = _apart()
    members = pl.fit(net, data, pl.Ensemble(pl.MAP(epochs=5), 2), **settings)
    found = pl.geometry.connect(members, members, data, draws=(0, 1), path=pl.SWA(mode=None, epochs=2), size=4)
    for show, curved, straight in (
        ("loss", found.log_likelihood, found.straight_log_likelihood),
        ("posterior", found.log_joint, found.straight_log_joint),
    ):
        ax = pl.plots.curve(found, show=show)  # type: ignore[arg-type]
        drawn = {line.get_label(): torch.as_tensor(line.get_ydata()) for line in ax.lines}
        torch.testing.assert_close(drawn["Bézier curve"], -curved)
        torch.testing.assert_close(drawn["straight line"], -straight)
