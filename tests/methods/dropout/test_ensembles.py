"""Ensembles of dropout methods: mixtures whose members have random weights and priors of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plausible as pl
from plausible.posteriors import saving

METHODS = {
    "masks": pl.MCDropout,
    "gaussian": pl.GaussianDropout,
    "concrete": pl.ConcreteDropout,
    "variational": pl.VariationalDropout,
    "sparse": pl.SparseVD,
    "groups": lambda **settings: pl.SparseVD(groups=True, **settings),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))


def members(name: str) -> tuple[pl.Posterior, torch.Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    return pl.fit(network(), (x, y), pl.Ensemble(METHODS[name](epochs=3), members=2), progress=False, compile=False), x


@pytest.mark.parametrize("name", METHODS)
def test_saved_ensembles_predict_the_same(name, tmp_path):
    posterior, x = members(name)
    posterior.save(tmp_path / "run")
    loaded = pl.load(tmp_path / "run", network())
    assert torch.equal(loaded.functions(x, 6), posterior.functions(x, 6))
    for own, kept in zip(loaded.parts, posterior.parts):
        assert own.model.random == kept.model.random
        assert own.model.prior == kept.model.prior
    moved = saving.placed(posterior, posterior.model, torch.device("cpu"))
    assert torch.equal(moved.functions(x, 6), posterior.functions(x, 6))


def test_members_are_compressed_one_by_one():
    posterior, x = members("sparse")
    with pytest.raises(ValueError, match=r"has 2 members: compress each of posterior\.parts"):
        posterior.compress()
    assert posterior.parts[1].compress()(x).shape == (40, 1)


def test_groups_have_the_prior_that_was_given():
    """A narrow prior before the scales of units holds the spread of the weights down; one without a closed form is refused."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    method = pl.SparseVD(epochs=400, batch_size=None, lr=0.05, groups=True, threshold=7.9)
    spread = {}
    for scale in (0.05, 1.0):
        posterior = pl.fit(network(), (x, y), method, prior=pl.priors.Gaussian(scale), progress=False, compile=False)
        spread[scale] = float(posterior.law.spreads["3.weight"].abs().mean())
    assert spread[0.05] < 0.3 * spread[1.0]
    with pytest.raises(ValueError, match="no closed expectation"):
        pl.fit(network(), (x, y), method, prior=pl.priors.StudentT(), progress=False, compile=False)
