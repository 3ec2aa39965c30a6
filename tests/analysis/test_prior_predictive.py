"""What the prior believes: closed forms for a linear model, and the errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plausible as pl


def test_a_linear_model_has_the_known_prior_variance() -> None:
    net = nn.Linear(3, 1, bias=False)
    before = net.weight.detach().clone()
    x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 2.0]])
    predictive = pl.prior_predictive(
        net, x, pl.likelihoods.Gaussian(0.5), prior=pl.priors.Gaussian(scale=2.0), draws=20_000, seed=1
    )
    assert predictive.functions.shape == (20_000, 2, 1)
    expected = 4 * x.square().sum(1, keepdim=True)  # s²‖x‖²
    error = (2 / 20_000) ** 0.5
    assert bool(((predictive.epistemic / expected - 1).abs() < 5 * error).all())
    assert torch.allclose(predictive.aleatoric, torch.tensor(0.25))
    assert torch.equal(net.weight, before)


def test_seeds_learned_noise_and_patterns() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 2)
    prior = {"0.*": pl.priors.Gaussian(3.0), "*": pl.priors.Laplace(0.5)}
    one = pl.prior_predictive(net, x, pl.likelihoods.Gaussian("per-output"), prior=prior, draws=6)
    two = pl.prior_predictive(net, x, pl.likelihoods.Gaussian("per-output"), prior=prior, draws=6)
    other = pl.prior_predictive(net, x, pl.likelihoods.Gaussian("per-output"), prior=prior, draws=6, seed=1)
    assert torch.equal(one.functions, two.functions)
    assert not torch.equal(one.functions, other.functions)
    classes = pl.prior_predictive(net, x, pl.likelihoods.Categorical(), draws=6)
    assert torch.allclose(classes.probs.sum(-1), torch.ones(5))


def test_what_cannot_be_drawn_is_refused() -> None:
    net, x = nn.Linear(2, 1), torch.randn(3, 2)
    with pytest.raises(ValueError, match="improper"):
        pl.prior_predictive(net, x, pl.likelihoods.Gaussian(1.0), prior=pl.priors.Flat())
    with pytest.raises(ValueError, match="draws"):
        pl.prior_predictive(net, x, pl.likelihoods.Gaussian(1.0), draws=0)
    with pytest.raises(TypeError, match="likelihood"):
        pl.prior_predictive(net, x, "gaussian")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        pl.prior_predictive(net, x[:0], pl.likelihoods.Gaussian(1.0))
