"""What a fit says of itself: the cases in which it has to be doubted, each made to happen, and silence where all is well."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.posteriors.doubts import RULES, Facts, constant, left_out


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def net(inputs: int = 1, outputs: int = 1, hidden: int = 50) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def wave(rows: int = 100) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, rows)[:, None]
    return x, (2 * x).sin() + 0.2 * torch.randn(rows, 1)


def said(network: nn.Module, data: Any, method: Any, **more: Any) -> list[str]:
    """The warnings of a fit; they are in its record too, and point at the line that called it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pl.FitWarning)
        posterior = pl.fit(network, data, method, progress=False, compile=False, **more)
    own = [one for one in caught if issubclass(one.category, pl.FitWarning)]
    assert all(one.filename == __file__ for one in own)
    texts = [str(one.message) for one in own]
    assert posterior.run.get("doubts", []) == texts
    return texts


@pytest.mark.parametrize(
    "method", [pl.MAP(), pl.Ensemble(pl.MAP(), 3), pl.Laplace(), pl.SGLD(), pl.HMC(draws=300, warmup=300, leapfrogs=20)]
)
def test_a_good_fit_says_nothing(method: pl.Method) -> None:
    assert said(net(), wave(), method) == []


def test_a_network_that_ends_in_a_softmax() -> None:
    x = torch.randn(60, 2)
    data = x, (x[:, 0] > 0).long()
    (first, *_) = said(nn.Sequential(net(2, 2), nn.Softmax(-1)), data, pl.MAP(epochs=50))
    assert first.startswith("The network ends in a softmax, and Categorical takes logits")
    assert said(nn.Sequential(net(2, 2), nn.LogSoftmax(-1)), data, pl.MAP(epochs=50)) == []
    assert said(nn.Sequential(net(2, 2), nn.Softmax(-1)), data, pl.MAP(epochs=50), output=torch.log) == []


def test_a_network_that_ends_in_a_sigmoid() -> None:
    x = torch.randn(60, 2)
    data = x, (x[:, :1] > 0).float()
    (first, *_) = said(nn.Sequential(net(2), nn.Sigmoid()), data, pl.MAP(epochs=50), likelihood=pl.likelihoods.Bernoulli())
    assert first.startswith("The network ends in a sigmoid, and Bernoulli takes logits")
    assert said(net(2), data, pl.MAP(epochs=50), likelihood=pl.likelihoods.Bernoulli()) == []


def test_targets_in_a_unit_that_the_given_likelihood_does_not_speak() -> None:
    x, y = wave()
    far = x, 1e6 + 1e4 * y
    (first, *_) = said(net(), far, pl.MAP(epochs=20), likelihood=pl.likelihoods.Gaussian())
    assert first.startswith("Targets of mean ")
    assert "far from what a new network says" in first
    assert "leave the likelihood out" in first
    assert said(net(), far, pl.MAP()) == []  # standardised inside
    inside = pl.likelihoods.Scaled(pl.likelihoods.Gaussian(), loc=float(far[1].mean()), scale=float(far[1].std()))
    assert said(net(), far, pl.MAP(), likelihood=inside) == []


def test_a_noise_that_shrinks_to_nothing_where_no_rows_are_set_aside() -> None:
    x = torch.randn(16, 3)
    data = x, torch.randn(16, 1)
    (text,) = said(net(3), data, pl.MAP(epochs=4000, lr=0.02, patience=None), prior=pl.priors.Gaussian(scale=5.0))
    assert text.startswith("The noise has shrunk to ")
    assert "252 weights for 16 rows" in text
    assert "patience" in text


def test_members_whose_noise_shrinks_are_no_better_for_being_several() -> None:
    data = torch.randn(16, 3), torch.randn(16, 1)
    method = pl.Ensemble(pl.MAP(epochs=4000, lr=0.02, patience=None), 2)
    (text,) = said(net(3), data, method, prior=pl.priors.Gaussian(scale=5.0))
    assert text.startswith("The noise has shrunk to ")


def test_targets_that_do_not_differ_or_whose_digits_were_lost() -> None:
    x, y = wave()
    for targets in (torch.ones(100, 1), y + 1e8):
        texts = said(net(), (x, targets), pl.MAP(epochs=5))
        assert texts[0].startswith("The targets hardly differ")
    assert said(net(), (x, y.double() + 1e8), pl.MAP()) == []


def test_a_fit_that_is_worse_than_the_mean_of_the_targets() -> None:
    (text,) = said(net(), wave(), pl.MAP(epochs=1, lr=1e-6, patience=None), likelihood=pl.likelihoods.Gaussian())
    assert text.startswith("MAP predicts its own rows ")
    assert "worse than the mean and scatter of the targets. Train longer" in text
    x = torch.randn(30, 10)
    (text,) = said(net(10, hidden=200), (x, x[:, :1] + torch.randn(30, 1)), pl.IVON())
    assert "2,402 weights for 30 rows a variational posterior stays near the prior. Try method='auto'" in text


def test_draws_that_know_no_more_than_the_constant() -> None:
    x, y = torch.randn(60, 20), torch.randn(60, 1)
    (text,) = said(net(20), (x, y), pl.SGLD())
    assert text.startswith("SGLD predicts a row that is left out ")
    assert "The inputs may say nothing about the targets" in text
    assert not any("left out" in text for text in said(net(20), (x, 3 * x[:, :1] + 0.1 * y), pl.SGLD()))


def test_rows_that_are_left_out_by_importance_weights() -> None:
    """The conjugate normal: draws of the mean given all rows predict each as the posterior without it does."""
    y = torch.tensor([0.3, -1.0, 0.7, 1.6, -0.2]).double()
    mean, precision = y.sum() / (len(y) + 1), len(y) + 1.0
    draws = mean + torch.randn(200_000).double() / precision**0.5
    found = left_out(torch.distributions.Normal(draws[:, None], 1.0).log_prob(y))
    others = (y.sum() - y) / (precision - 1)
    exact = torch.distributions.Normal(others, (1 + 1 / (precision - 1)) ** 0.5).log_prob(y)
    assert float((found - exact).abs().max()) < 0.01


def test_a_single_chain_that_is_still_on_its_way() -> None:
    x = torch.randn(200, 5)
    data = x, x @ torch.randn(5, 1) + 0.1 * torch.randn(200, 1)
    slow = pl.SGLD(epochs=100, lr=1e-5, burn_in=0.1)
    texts = said(net(5), data, slow)
    assert any(text.startswith("The second half of the draws explains the rows ") for text in texts)
    assert "The chain is still on its way" in "".join(texts)


def test_chains_that_disagree() -> None:
    texts = said(net(), wave(), pl.HMC(draws=20, warmup=2, leapfrogs=1, chains=3))
    assert any(text.startswith("The chains disagree about f(x): the worst R̂ is ") for text in texts)


KNOWN = Facts("MAP", rows=100, weights=50, seen=-1.0, constant=-1.4, unseen=-1.1, noise=0.4, errors=1.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"unseen": -1.5}, "rows that were set aside 0.1 nats worse"),
        ({"unseen": -1.5, "error": 0.1}, ""),  # few rows
        ({"unseen": -2.3, "constant": None}, "Rows that were set aside are predicted 1.3 nats worse than those of the fit"),
        ({"errors": 3.5}, "The noise has collapsed: errors on rows that were set aside are 3.5 times as large"),
        ({"errors": None, "trained": True, "noise": 0.01}, ""),
        (
            {"errors": None, "trained": True, "noise": 0.01, "weights": 200},
            "shrunk to 1.0\u00a0% of the targets' standard deviation",
        ),
        ({"rhat": 1.09}, ""),
        ({"gain": 0.3, "gain_error": 0.1}, ""),
        ({"gain": 0.1, "gain_error": 0.1}, "a row that is left out 0.1 ± 0.1 nats better than the mean and scatter"),
        ({"gain": -0.1, "gain_error": 0.01}, "a row that is left out 0.1 ± 0.01 nats worse than the mean and scatter"),
        ({"gain": -0.1, "gain_error": 0.01, "unseen": None, "seen": -1.5}, "its own rows 0.1 nats worse"),
        ({"unseen": None, "seen": -1.43}, ""),
        ({"unseen": None, "seen": -1.43, "bound": True}, "its own rows 0.03 nats worse"),
        ({"rise": 0.2}, "The second half of the draws explains the rows 0.2 nats better"),
        ({"infinite": 3}, "The predictive variance is infinite or NaN at 3 rows"),
        ({"rhat": 1.3}, "The chains disagree about f(x): the worst R̂ is 1.30"),
    ],
)
def test_rules(change: dict[str, Any], expected: str) -> None:
    texts = [verdict.headline for rule in RULES if (verdict := rule(replace(KNOWN, **change))) is not None]
    assert (texts == []) if not expected else (len(texts) == 1 and expected in texts[0])


def test_the_constant_prediction() -> None:
    y = torch.randn(500, 1).double() * 3 + 7
    exact = torch.distributions.Normal(y.mean(), y.std(correction=0)).log_prob(y).mean()
    assert math.isclose(constant(pl.likelihoods.Gaussian(), y), float(exact), rel_tol=1e-9)  # type: ignore[arg-type]
    labels = torch.tensor([0, 0, 0, 1])
    assert math.isclose(constant(pl.likelihoods.Categorical(), labels), 0.75 * math.log(0.75) + 0.25 * math.log(0.25))  # type: ignore[arg-type]
    assert constant(pl.likelihoods.Gaussian(), torch.ones(5, 1)) is None


def test_doubts_are_saved_and_estimators_warn_their_caller(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    x, y = wave()
    still, sharp = pl.MAP(epochs=1, lr=1e-6, patience=None), pl.likelihoods.Gaussian(scale=0.1)
    with pytest.warns(pl.FitWarning, match="worse than the mean and scatter") as caught:
        estimator = pl.BayesianRegressor(still, likelihood=sharp, random_state=0).fit(x.numpy(), y[:, 0].numpy())
    assert caught[0].filename == __file__
    estimator.posterior_.save(tmp_path / "run")
    again = pl.load(
        tmp_path / "run", estimator.network_ if hasattr(estimator, "network_") else estimator.posterior_.model.network
    )
    assert again.run["doubts"] == [str(caught[0].message)]


@pytest.mark.parametrize(
    "method", [pl.SGLD(epochs=20, batch_size=20, lr=1e-3), pl.Refined(epochs=5, batch_size=20)], ids=lambda m: type(m).__name__
)
def test_infinite_variances_are_not_returned_without_a_word(method: pl.Method) -> None:
    x = torch.randn(60, 2)
    warned = said(net(2, hidden=8), (x, 1e8 * x[:, :1]), method, likelihood=pl.likelihoods.Gaussian())
    assert any("The predictive variance is infinite" in one for one in warned)


def test_a_law_without_a_variance_is_no_reason_to_doubt() -> None:
    cauchy = pl.likelihoods.StudentT(df=1.0, scale=0.2)
    assert not any("variance" in one for one in said(net(), wave(), pl.MAP(epochs=20), likelihood=cauchy))
