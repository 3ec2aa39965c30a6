"""Subspaces: the closed form of a linear model on a plane, what planes are made of, batch norms at the very weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks import curves
from plausible.blocks.batch_norm import BatchNorms, Renormed
from plausible.blocks.subspaces import COORDINATES, PlaneModel
from plausible.core.data import as_data
from plausible.core.weights import flatten
from plausible.engine.method import Run
from plausible.methods.subspaces.subspace import evenly
from plausible.posteriors.doubts import FitWarning
from plausible.testing import LinearGaussian
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET, Z

PROBLEM = LinearGaussian(inputs=6)
SHORT = pl.SWAG(pl.MAP(epochs=60, batch_size=None, lr=0.05), epochs=60, batch_size=10, lr=0.05, every=1)


def _laid(method: pl.Subspace, network: nn.Module, data: Any, left: dict[str, Tensor], **settings: Any) -> PlaneModel:
    settings = {"likelihood": pl.likelihoods.Gaussian(0.5), "prior": pl.priors.Gaussian(1.5), **settings}
    rows = as_data(data, dtype=torch.float32, device=torch.device("cpu"))
    model = pl.Model.build(network, settings["likelihood"], settings["prior"], rows.all(), num_data=rows.num_data)
    return method.laid(model, left, Run(rows))


@pytest.mark.parametrize("basis", ["random", "pca", "curve"])
def test_on_a_linear_model_it_is_the_exact_posterior_given_the_plane(basis: Any) -> None:
    sampler = pl.HMC(draws=12, chains=200, warmup=60)
    k = None if basis == "curve" else 3
    posterior = PROBLEM.fit(pl.Subspace(sampler, basis, k, path=SHORT, draws=2400))
    draws = posterior.weights()["weight"].squeeze(1).double()
    mean, covariance = PROBLEM.posterior()
    precision = torch.linalg.inv(covariance)
    # the plane, from its own draws: its directions, and the point of it where the posterior is highest
    centre = draws.mean(0)
    _, sizes, directions = torch.linalg.svd(draws - centre, full_matrices=False)
    size = k or 2
    assert float(sizes[size:].max()) < 1e-4 * float(sizes[0])
    span = directions[:size].T
    exact = torch.linalg.inv(span.T @ precision @ span)
    highest = centre + span @ (exact @ span.T @ precision @ (mean - centre))
    white = (draws - highest) @ span @ torch.linalg.inv(torch.linalg.cholesky(exact)).T
    effective = 1200  # thinned HMC of a Gaussian: at least half of the draws
    assert float(white.mean(0).abs().max()) < Z / effective**0.5
    assert float((white.T @ white / len(white) - torch.eye(size)).abs().max()) < Z * (2 / effective) ** 0.5


def test_the_prior_of_coordinates_is_that_of_the_weights() -> None:
    x, y, _ = PROBLEM.data()
    prior = pl.priors.Patterns({"*": pl.priors.Gaussian(0.7, loc=0.4)})
    there = _laid(pl.Subspace(basis="random", dimensions=3), PROBLEM.network(), (x.float(), y.float()), {}, prior=prior)
    z = torch.randn(8, 3)
    densities = torch.stack([prior.log_prob({n: w.double() for n, w in there.plane.weights(one).items()}) for one in z])
    inside = torch.stack([there.log_prior({COORDINATES: one.double()}) for one in z])
    torch.testing.assert_close(densities - densities[0], inside - inside[0], rtol=1e-4, atol=1e-4)
    start = flatten(there.plane.weights(there.plane.start))  # the plane goes through the weights it was laid through
    torch.testing.assert_close(start, flatten(there.full.initial), rtol=1e-4, atol=1e-5)
    # a prior of one's own is one around those weights, along orthonormal directions
    own = _laid(
        pl.Subspace(basis="random", dimensions=3, prior=pl.priors.Laplace(2.0)), PROBLEM.network(), (x.float(), y.float()), {}
    )
    columns = flatten(own.plane.directions, batch_dims=1)
    torch.testing.assert_close(columns @ columns.T, torch.eye(3), rtol=0, atol=1e-5)
    assert float(own.plane.start.abs().max()) == 0
    torch.testing.assert_close(own.log_prior({COORDINATES: z[0]}), pl.priors.Laplace(2.0).log_prob({"z": z[0]}))


def test_principal_components_are_those_of_the_deviations() -> None:
    x, y, _ = PROBLEM.data()
    stream = torch.Generator().manual_seed(0)
    deviations = torch.randn(20, 6, generator=stream) * torch.tensor([3.0, 1.0, 0.01, 0.02, 2.0, 0.01])
    left = {
        "weight": torch.ones(1, 1, 6),
        "deviations/weight": deviations.view(1, 20, 1, 6),
        "collected/snapshots": torch.tensor([50]),
    }
    there = _laid(pl.Subspace(dimensions=3, prior=pl.priors.Gaussian()), PROBLEM.network(), (x.float(), y.float()), left)
    found = flatten(there.plane.directions, batch_dims=1)
    exact = torch.linalg.svd(deviations).Vh[:3]
    torch.testing.assert_close(found.T @ found, exact.T @ exact, rtol=0, atol=1e-4)
    few = {**left, "collected/snapshots": torch.tensor([2])}
    with pytest.raises(ValueError, match="2 snapshots, too few for 3 dimensions"):
        _laid(pl.Subspace(dimensions=3), PROBLEM.network(), (x.float(), y.float()), few)


def test_batch_norms_have_the_statistics_of_the_weights_and_so_have_slopes() -> None:
    net, (x, y) = _normed()
    net = net.double()
    rows = as_data((x, y), dtype=torch.float64, device=torch.device("cpu"))
    model = pl.Model.build(net, pl.likelihoods.Gaussian(), pl.priors.Gaussian(), rows.all(), num_data=90)
    norms = BatchNorms.of(model)
    assert norms is not None
    renormed = Renormed(model, norms.shares, rows.all().x)
    weights = {n: w + 0.3 for n, w in model.initial.items()}
    inputs = x[:7].double()
    by_buffers = model.outputs({**weights, **norms.statistics(weights, rows.all().x)}, inputs)
    torch.testing.assert_close(renormed.outputs({**weights, **model.buffers}, inputs), by_buffers)

    def total(shift: Tensor) -> Tensor:
        moved = {**weights, **model.buffers, "0.weight": weights["0.weight"] * (1 + shift)}
        return renormed.outputs(moved, inputs).sum()

    slope = torch.func.grad(total)(torch.zeros((), dtype=torch.float64))
    step = torch.tensor(1e-6, dtype=torch.float64)
    torch.testing.assert_close(slope, (total(step) - total(-step)) / 2e-6, rtol=1e-5, atol=1e-7)
    stacked = {n: torch.stack([w, w + 0.1]) for n, w in weights.items()}
    both = torch.func.vmap(lambda w: renormed.outputs({**w, **model.buffers}, inputs))(stacked)
    torch.testing.assert_close(both[0], by_buffers)


def test_draws_predict_what_the_sampler_saw() -> None:
    net, data = _normed()
    path = pl.SWAG(pl.MAP(epochs=10, patience=None), epochs=20, batch_size=30, lr=0.02, every=1)
    method = pl.Subspace(pl.EllipticalSlice(draws=6, chains=2, warmup=3), "pca", 2, path)
    with pytest.warns(FitWarning, match="chains disagree"):  # so short a run
        posterior = pl.fit(net, data, method, **QUIET)
    held = posterior.store
    for k in range(len(posterior)):
        z = held.stacked[COORDINATES][k]
        whole = {n: v[0] for n, v in held.get([k], "cpu").items()}
        norms = BatchNorms.of(posterior.model)
        assert norms is not None
        by_hand = posterior.model.outputs(
            {**whole, **norms.statistics({n: whole[n] for n in posterior.model.initial}, data[0])}, data[0]
        )
        seen = posterior.functions(data[0])[k]
        torch.testing.assert_close(seen, posterior.likelihood.in_units(by_hand), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole["4.bias"], held.plane.weights(z)["4.bias"])
    assert posterior.diagnostics()["coordinates"]["draws"] == 12


def test_a_method_of_several_stages_and_weights_that_are_left_out() -> None:
    net, data = _normed()
    path = pl.SWAG(pl.MAP(epochs=10, patience=None), epochs=20, batch_size=30, lr=0.02, every=1)
    refined = pl.Refined(epochs=5, draws_kept=7)
    posterior = pl.fit(net, data, pl.Subspace(refined, "random", 2, path), where="4.*", **QUIET)
    assert [name for name, _, _ in posterior.run["stages"]] == ["MAP", "Refined", "refining"]
    draws = posterior.store.get(range(7), "cpu")
    assert float(draws["4.weight"].std(0).min()) > 0
    assert float(draws["0.weight"].std(0).max()) == 0
    with pytest.raises(ValueError, match="connects whole networks"):
        pl.fit(net, data, pl.Subspace(refined, "curve", path=path), where="4.*", **QUIET)


@pytest.mark.parametrize("kind", curves.KINDS)
def test_curves_go_from_end_to_end(kind: str) -> None:
    t = torch.linspace(0, 1, 11)
    parts = curves.shares(kind, t)
    torch.testing.assert_close(parts.sum(0), torch.ones(11))
    torch.testing.assert_close(parts[:, 0], torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(parts[:, -1], torch.tensor([0, 0, 1.0]))
    torch.testing.assert_close(parts.flip(1), parts.flip(0))


def test_the_trained_curve_has_lower_loss_than_the_straight_line() -> None:
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(100, 2, generator=stream)
    y = (2 * x[:, :1]).sin() * x[:, 1:] + 0.1 * torch.randn(100, 1, generator=stream)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    path = pl.SWAG(pl.MAP(epochs=300, lr=0.02), epochs=150, lr=0.02)
    method = pl.Subspace(pl.EllipticalSlice(draws=1, chains=1, warmup=0, init="given"), "curve", path=path)
    posterior = pl.fit(net, (x, y), method, **QUIET, likelihood=pl.likelihoods.Gaussian(0.1))
    straight, curved = posterior.history["connecting: log_joint"][0], posterior.history["connecting: log_joint"][-1]
    assert curved > straight + 100


def test_draws_are_thinned_alike_in_every_chain() -> None:
    assert evenly(12, 3, 6) == [3, 4, 5, 9, 10, 11]
    assert evenly(12, 3, 100) == list(range(12))
    assert evenly(12, 3, 1) == [9, 10, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": 3}, "method must be a method"),
        ({"method": "auto"}, "method must be a method"),
        ({"method": pl.Subspace()}, "must infer weights"),
        ({"basis": "plane"}, "basis must be"),
        ({"dimensions": 0}, "dimensions must be"),
        ({"dimensions": 30}, "dimensions=30 of the 20 deviations"),
        ({"basis": "curve", "dimensions": 3}, "has 2 dimensions"),
        ({"path": pl.MAP()}, "path must be SWAG"),
        ({"prior": 1.0}, "prior must be a prior"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        pl.Subspace(**settings)


def test_a_prior_that_is_not_gaussian_asks_for_one_of_the_coordinates() -> None:
    x, y, _ = PROBLEM.data()
    with pytest.raises(ValueError, match=r"Subspace: the prior of 'weight'.*Subspace\(prior="):
        _laid(pl.Subspace(basis="random"), PROBLEM.network(), (x.float(), y.float()), {}, prior=pl.priors.Laplace(1.0))
    with pytest.raises(ValueError, match="more than the 6 random weights"):
        _laid(pl.Subspace(basis="random", dimensions=7), PROBLEM.network(), (x.float(), y.float()), {})
