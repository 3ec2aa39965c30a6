"""Anchored ensembles: the closed-form law of a linear model, with moved targets and without; noise that belongs to rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plausible as pl
from plausible.core import random
from plausible.methods.ensembles.anchored import row_noise
from plausible.testing import LinearGaussian
from tests.methods.test_averages import _normed
from tests.methods.test_sgld import QUIET, Z

PROBLEM = LinearGaussian()
MEMBERS = 500


@pytest.mark.parametrize(("noise", "batch_size"), [(True, None), pytest.param(True, 10, marks=pytest.mark.slow), (False, None)])
def test_the_law_of_members_of_a_linear_model(noise: bool, batch_size: int | None) -> None:
    mode = pl.MAP(epochs=300, batch_size=batch_size, lr=pl.schedules.Cosine(0.1))
    found = PROBLEM.fit(pl.Anchored(mode, MEMBERS, noise)).weights()["weight"].squeeze(1).double()
    mean, covariance = PROBLEM.posterior()
    exact = covariance if noise else covariance @ covariance / PROBLEM.scale**2
    white = (found - mean) @ torch.linalg.inv(torch.linalg.cholesky(exact)).T
    assert float(white.mean(0).abs().max()) < Z / MEMBERS**0.5 + 0.02
    assert float((white.T @ white / MEMBERS - torch.eye(3)).abs().max()) < Z * (2 / MEMBERS) ** 0.5 + 0.02


def test_noise_belongs_to_the_row_and_to_the_member() -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randn(20_000, 3, generator=stream), torch.randn(20_000, 2, generator=stream)
    whole = row_noise(pl.Batch(x, y), random.key(0))
    rows = torch.tensor([5, 17, 3])
    assert torch.equal(row_noise(pl.Batch(x[rows], y[rows]), random.key(0)), whole[rows])
    other = row_noise(pl.Batch(x, y), random.fold(random.key(0), 1))
    columns = torch.cat([whole, other], dim=1)
    error = Z / len(x) ** 0.5
    assert float(columns.mean(0).abs().max()) < error
    assert float((columns.T @ columns / len(x) - torch.eye(4)).abs().max()) < error * 2**0.5
    assert abs(float((columns**4).mean()) - 3) < Z * (96 / columns.numel()) ** 0.5
    neighbours = row_noise(pl.Batch(torch.arange(20_000.0)[:, None], torch.zeros(20_000, 1)), random.key(0)).squeeze()
    assert abs(float((neighbours[1:] * neighbours[:-1]).mean())) < error  # inputs that differ by little


def test_where_there_are_no_data_members_disagree_as_the_prior_does() -> None:
    x = torch.zeros(40, 2)
    x[:, 0] = torch.linspace(-1, 1, 40)
    y = x[:, :1].clone()
    settings: dict[str, Any] = {"likelihood": pl.likelihoods.Gaussian(0.1), "prior": pl.priors.Gaussian(0.7), **QUIET}
    mode = pl.MAP(epochs=300, batch_size=None, lr=pl.schedules.Cosine(0.1))
    found = pl.fit(torch.nn.Linear(2, 1), (x, y), pl.Anchored(mode, MEMBERS), **settings).weights()["weight"][:, 0]
    assert abs(float(found[:, 1].var()) / 0.49 - 1) < Z * (2 / MEMBERS) ** 0.5
    assert float(found[:, 0].std()) < 0.02


def test_the_prior_must_be_a_centred_gaussian_and_settings_are_checked() -> None:
    net, data = _normed()
    with pytest.raises(ValueError, match="prior must be a centred Gaussian"):
        pl.fit(net, data, pl.Anchored(), prior=pl.priors.Laplace(1.0), **QUIET)
    for settings, message in (
        ({"mode": pl.SGLD()}, "mode must be MAP"),
        ({"members": 0}, "members must be"),
        ({"noise": 2}, "noise must be"),
        ({"init": "anywhere"}, "init must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            pl.Anchored(**settings)  # type: ignore[arg-type]


def test_classes_and_batch_norm_have_anchors_alone() -> None:
    net, (x, _) = _normed()
    labels = (x[:, 0] > 0).long()
    net = net[:4].append(torch.nn.Linear(8, 2))
    posterior = pl.fit(net, (x, labels), pl.Anchored(pl.MAP(epochs=20), members=3, noise=True), **QUIET)
    assert posterior.predict(x).probs.shape == (90, 2)
    assert len(posterior) == 3
