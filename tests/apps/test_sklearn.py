"""The scikit-learn estimators: equal to `plausible.fit` by hand, in the units of y, and good citizens of scikit-learn."""

from __future__ import annotations

import copy
import inspect
import io
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import plausible as pl

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import sklearn
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, PoissonRegressor
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from plausible.apps.sklearn import BayesianClassifier, BayesianRegressor, log_likelihood
from plausible.apps.tables import mlp
from plausible.testing import Z

QUICK = pl.MAP(epochs=20)
LONGER = pl.MAP(epochs=80, lr=pl.schedules.Cosine(0.05))
ROOT = Path(__file__).parents[2]
REPETITION = {
    "check_sample_weight_equivalence_on_dense_data": "k rows and one row of weight k fill minibatches differently, and "
    "even on full batches the optimiser's own epsilon tells them apart"
}


def regression(count: int = 80, targets: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows far from zero, of very different spread, and targets likewise."""
    random = np.random.default_rng(seed)
    z = random.normal(size=(count, 3))
    y = z @ random.normal(size=(3, targets)) + 0.3 * random.normal(size=(count, targets))
    X = z * [1.0, 50.0, 0.02] + [10.0, -300.0, 5.0]
    return X, 40 * y[:, 0] + 700 if targets == 1 else y * (1 + np.arange(targets)) * 10 + 100


def labels(kind: str = "text", count: int = 90, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    codes = np.arange(count) % classes
    X = random.normal(size=(count, 2)) + 3 * np.stack([np.cos(codes * 2.1), np.sin(codes * 2.1)], 1)
    names: dict[str, Any] = {
        "text": np.array(["pear", "apple", "fig"])[:classes],
        "object": np.array(["pear", "apple", "fig"], dtype=object)[:classes],
        "numbers": np.array([30, -10, 7])[:classes],
        "booleans": np.array([True, False])[:classes],
    }
    return X, names[kind][codes]


# ---------------------------------------------------------------------------------------------------------------------
# scikit-learn's own checks


@parametrize_with_checks(
    [BayesianRegressor(QUICK, hidden=(16,)), BayesianClassifier(QUICK, hidden=(16,))],
    expected_failed_checks=lambda _: REPETITION,
)
def test_conventions(estimator: Any, check: Any) -> None:
    check(estimator)


# Those that look at what was learned, or whether it can be learned at all; the others do not ask how long it was trained.
LEARNING = re.compile("train|classes|one_label|_int|idempotent|invariance|1sample|1feature|multioutput|default_constructible")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}-{number}")
        for default in (BayesianRegressor(time="2s"), BayesianClassifier(time="2s"))
        for number, (estimator, check) in enumerate(estimator_checks_generator(default))
        if LEARNING.search(check.func.__name__)
    ],
)
def test_conventions_with_the_defaults(estimator: Any, check: Any) -> None:
    check(estimator)


# ---------------------------------------------------------------------------------------------------------------------
# The defaults


def test_bayesian_by_default() -> None:
    """The method that `auto` chooses, with its own likelihood and prior, as `fit` would with them."""
    X, y = regression(40)
    model = BayesianRegressor(time="2s", hidden=(4,), random_state=0).fit(X, y)
    assert model.method == "auto"
    assert isinstance(model.posterior_.method, pl.HMC)
    assert model.posterior_.run["choice"].startswith("hmc: 40 rows")
    assert isinstance(model.posterior_.likelihood, pl.likelihoods.StudentT)
    assert (model.predictive(X).epistemic > 0).all()
    far = model.predictive(X + 20 * X.std(0))
    assert (far.epistemic.mean() > 10 * model.predictive(X).epistemic.mean()).all()
    given = BayesianRegressor(time="2s", hidden=(4,), likelihood="gaussian", random_state=0).fit(X, y)
    assert isinstance(given.posterior_.likelihood, pl.likelihoods.Gaussian)
    classifier = BayesianClassifier(time="2s", hidden=(4,), random_state=0).fit(*labels())
    assert isinstance(classifier.posterior_.method, pl.HMC)
    assert (classifier.predictive(labels()[0]).mutual_information > 0).all()


def test_time_is_for_auto() -> None:
    X, y = regression(300)
    quick = BayesianRegressor(pl.methods.create("auto"), time=0.5, hidden=(20,), random_state=0).fit(X, y)
    assert quick.posterior_.method.leapfrogs < 50  # those of a minute
    with pytest.raises(ValueError, match="time must be a positive number"):
        BayesianRegressor(time="soon").fit(X, y)
    with pytest.raises(ValueError, match="time= is for method='auto'"):
        BayesianRegressor("map", time="2s").fit(X, y)


# ---------------------------------------------------------------------------------------------------------------------
# Settings of the method


def test_settings_of_the_method_are_settings_of_the_estimator() -> None:
    model = BayesianRegressor(pl.Ensemble(pl.MAP(epochs=5), members=3), likelihood=pl.likelihoods.Gaussian(0.5))
    deep = model.get_params()
    assert (deep["method__members"], deep["method__method__epochs"], deep["likelihood__scale"]) == (3, 5, 0.5)
    assert set(model.get_params(deep=False)) == {name for name in deep if "__" not in name}
    assert model.set_params(method__members=2, method__method__lr=0.1, likelihood__scale=0.25) is model
    assert model.method == pl.Ensemble(pl.MAP(epochs=5, lr=0.1), members=2)
    assert model.likelihood == pl.likelihoods.Gaussian(0.25)
    model.set_params(method__method__lr__end=0.5, method__method__lr=pl.schedules.Cosine(1.0))  # the inner one comes after
    assert model.method.method.lr == pl.schedules.Cosine(1.0, end=0.5)
    assert clone(model).get_params() == model.get_params()
    assert clone(model).method == model.method


def test_a_method_by_name_has_settings_too() -> None:
    model = BayesianClassifier("map")
    assert model.get_params()["method__epochs"] is None
    assert model.method == "map"  # looking changes nothing
    assert model.set_params(method__epochs=3).method == pl.MAP(epochs=3)
    assert model.set_params(method="ensemble", method__members=2).method == pl.Ensemble(members=2)
    assert BayesianRegressor("nonsense").get_params()["method"] == "nonsense"  # refused by fit, as any bad setting


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method__epoch": 3}, "MAP has no setting 'epoch'.*did you mean 'epochs'"),
        (
            {"method__batch_size__x": 3},
            "method__batch_size__x cannot be set: method__batch_size is 'auto', which has no settings",
        ),
        ({"prior__scale": 3.0}, "prior__scale cannot be set: prior is None"),
        ({"method__epochs": 0}, "MAP: epochs must be at least 1"),
        ({"widths": 3}, "Invalid parameter 'widths'"),
    ],
)
def test_settings_that_are_not_there(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BayesianRegressor("map").set_params(**settings)


def test_grid_search_over_a_setting_of_the_method() -> None:
    X, y = regression()
    grid = {"method__lr": [1e-5, 0.05], "method__epochs": [60]}
    search = GridSearchCV(BayesianRegressor("map", random_state=0), grid, cv=2, scoring=log_likelihood, error_score="raise")
    assert search.fit(X, y).best_params_ == {"method__lr": 0.05, "method__epochs": 60}
    assert search.best_estimator_.posterior_.method == pl.MAP(epochs=60, lr=0.05)
    pipeline = make_pipeline(StandardScaler(), BayesianRegressor(QUICK))
    assert pipeline.set_params(bayesianregressor__method__epochs=2)[-1].method == pl.MAP(epochs=2)


# ---------------------------------------------------------------------------------------------------------------------
# The scorer


def test_log_likelihood_of_numbers() -> None:
    X, y = regression(targets=2)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    each = model.predictive(X).log_prob(y).numpy()
    assert np.array_equal(model.log_prob(X, y), each)
    assert log_likelihood(model, X, y) == pytest.approx(each.mean())
    weight = np.arange(80.0)
    assert log_likelihood(model, X, y, sample_weight=weight) == pytest.approx(np.average(each, weights=weight))
    single = BayesianRegressor(QUICK, random_state=0).fit(X, y[:, 0])
    assert np.allclose(single.log_prob(X, y[:, 0]), single.predictive(X).log_prob(y[:, :1]))
    thousandfold = BayesianRegressor(QUICK, random_state=0).fit(X, y[:, 0] * 1024)
    assert log_likelihood(thousandfold, X, y[:, 0] * 1024) == pytest.approx(log_likelihood(single, X, y[:, 0]) - math.log(1024))


@pytest.mark.parametrize("kind", ["text", "object", "numbers"])
def test_log_likelihood_of_classes(kind: str) -> None:
    X, y = labels(kind)
    model = BayesianClassifier(QUICK, random_state=0).fit(X, y)
    chosen = np.log(model.predict_proba(X)[np.arange(90), np.searchsorted(model.classes_, y)])
    assert np.allclose(model.log_prob(X, y), chosen)
    assert log_likelihood(model, X, y) == pytest.approx(-sklearn.metrics.log_loss(y, model.predict_proba(X)))
    with pytest.raises(ValueError, match="y has labels that were not in the training data"):
        model.log_prob(X[:1], np.array(["plum"], dtype=object) if kind != "numbers" else [99])


def test_the_scorer_looks_through_pipelines_and_searches() -> None:
    X, y = regression()
    pipeline = make_pipeline(StandardScaler(), BayesianRegressor(QUICK, standardise=False, random_state=0)).fit(X, y / 40)
    scaled = StandardScaler().fit_transform(X)
    assert log_likelihood(pipeline, X, y / 40) == pytest.approx(log_likelihood(pipeline[-1], scaled, y / 40))
    assert log_likelihood(make_pipeline(pipeline[-1]), scaled, y / 40) == pytest.approx(log_likelihood(pipeline, X, y / 40))
    grid = {"bayesianregressor__hidden": [(3,)]}
    search = GridSearchCV(pipeline, grid, scoring=log_likelihood, cv=2).fit(X, y / 40)
    assert search.score(X, y / 40) == log_likelihood(search.best_estimator_, X, y / 40)
    assert cross_val_score(pipeline, X, y / 40, scoring=log_likelihood, cv=2).shape == (2,)
    with pytest.raises(TypeError, match=r"log_likelihood scores a BayesianRegressor .* got LinearRegression"):
        log_likelihood(LinearRegression(), X, y)


# ---------------------------------------------------------------------------------------------------------------------
# The law


@pytest.mark.parametrize("method", [pl.MAP(epochs=30), pl.Ensemble(pl.MAP(epochs=10), members=3), pl.SGLD(epochs=20)])
def test_equals_fit_by_hand(method: pl.Method) -> None:
    X, y = regression()
    model = BayesianRegressor(method, hidden=(8, 8), activation="tanh", random_state=3).fit(X, y)
    loc, scale = y.mean(), y.std()
    torch.manual_seed(3)
    network = mlp(3, (8, 8), 1, "tanh").double()
    data = StandardScaler().fit_transform(X), ((y - loc) / scale)[:, None]
    by_hand = pl.fit(network, data, method, seed=3).predict(data[0]).rescaled(loc, scale)
    mean, std = model.predict(X, return_std=True)
    assert np.array_equal(mean, by_hand.mean[:, 0].numpy())
    assert np.array_equal(std, by_hand.std[:, 0].numpy())
    low, high = model.predict_interval(X, 0.8)
    assert np.array_equal(np.stack([low, high]), torch.stack(by_hand.interval(0.8))[..., 0].numpy())
    assert np.array_equal(model.sample_y(X, 5, random_state=4), by_hand.sample(5, seed=4)[..., 0].T.numpy())
    assert torch.equal(model.predictive(X).log_prob(y[:, None]), by_hand.log_prob(y[:, None]))


def test_classifier_equals_fit_by_hand() -> None:
    X, y = labels()
    model = BayesianClassifier(QUICK, hidden=8, random_state=3).fit(X, y)
    torch.manual_seed(3)
    network = mlp(2, (8,), 3).double()
    codes = np.searchsorted(["apple", "fig", "pear"], y)
    standard = StandardScaler().fit_transform(X)
    probs = pl.fit(network, (standard, codes), QUICK, seed=3).predict(standard).probs
    assert np.array_equal(model.predict_proba(X), probs.numpy())


def test_linear_gaussian_posterior_in_original_units() -> None:
    """A linear model with known noise: the closed forms of the standardised problem, taken back to the units of y.

    MAP finds the posterior mean. Full-batch SGLD has the covariance Λ⁻¹(1 − εΛ/4)⁻¹; its draws are correlated, so tolerances
    are Z standard errors at the effective sample size that its diagnostics report.
    """
    X, y = regression(count=40)
    noise, lr = 15.0, 2e-3
    z, scale = (X - X.mean(0)) / X.std(0), y.std()
    design = np.column_stack([z, np.ones(len(z))])
    precision = design.T @ design / (noise / scale) ** 2 + np.eye(4)
    weights = np.linalg.solve(precision, design.T @ ((y - y.mean()) / scale)) / (noise / scale) ** 2
    mean = y.mean() + scale * design @ weights
    covariance = np.linalg.inv(precision) @ np.linalg.inv(np.eye(4) - lr / 4 * precision)
    epistemic = scale**2 * np.einsum("ni,ij,nj->n", design, covariance, design)

    def fitted(method: pl.Method) -> BayesianRegressor:
        likelihood = pl.likelihoods.Gaussian(noise)
        prior = pl.priors.Gaussian()
        return BayesianRegressor(method, hidden=(), likelihood=likelihood, prior=prior, random_state=0).fit(X, y)

    point, std = fitted(pl.MAP(epochs=400, lr=pl.schedules.Cosine(0.1))).predict(X, return_std=True)
    assert np.allclose(point, mean, atol=0.01)
    assert np.allclose(std, noise)
    model = fitted(pl.SGLD(epochs=1500, batch_size=None, lr=lr, burn_in=0.1, thin=1))
    found = model.predictive(X)
    size = float(np.min(model.posterior_.diagnostics(z)["ess_bulk"]))
    assert size > 100
    assert (np.abs(found.mean[:, 0].numpy() - mean) < Z * np.sqrt(epistemic / size)).all()
    assert (np.abs(found.epistemic[:, 0].numpy() / epistemic - 1) < Z * math.sqrt(2 / size)).all()
    assert np.allclose(found.aleatoric, noise**2)
    assert np.allclose(model.predict(X, return_std=True)[1] ** 2, found.variance[:, 0])


def test_units_of_the_target() -> None:
    X, y = regression()
    mean, std = BayesianRegressor(QUICK, random_state=0).fit(X, y).predict(X, return_std=True)
    powers, powers_std = BayesianRegressor(QUICK, random_state=0).fit(X, y * 1024).predict(X, return_std=True)
    assert np.array_equal(powers, mean * 1024)  # a power of two: the standardised problem has the same bits
    assert np.array_equal(powers_std, std * 1024)
    other, other_std = BayesianRegressor(QUICK, random_state=0).fit(X, y * 1000 - 3e5).predict(X, return_std=True)
    assert np.allclose(other, mean * 1000 - 3e5, rtol=1e-6)
    assert np.allclose(other_std, std * 1000, rtol=1e-6)


def test_units_of_the_inputs_do_not_matter() -> None:
    X, y = regression()
    model = BayesianRegressor(QUICK, random_state=0)
    assert np.allclose(model.fit(X, y).predict(X), model.fit(X * [1e-3, 7, 1e6] - 5, y).predict(X * [1e-3, 7, 1e6] - 5))


def test_a_large_offset_keeps_its_digits() -> None:
    X, y = regression()
    near = BayesianRegressor(QUICK, random_state=0).fit(X, y).predict(X)
    far = BayesianRegressor(QUICK, random_state=0).fit(X, y + 1e9).predict(X)
    assert np.allclose(far - 1e9, near, atol=1e-3)


def test_intervals_cover() -> None:
    """Fresh rows from the law of the data: coverage within Z binomial standard errors, and a little for the fitted noise."""
    X, y = regression(600)
    model = BayesianRegressor(LONGER, hidden=(), random_state=0).fit(X[:300], y[:300])
    for level in (0.5, 0.9):
        low, high = model.predict_interval(X[300:], level)
        covered = np.mean((low < y[300:]) & (y[300:] < high))
        assert abs(covered - level) < Z * math.sqrt(level * (1 - level) / 300) + 0.02
    narrow, wide = (np.subtract(*model.predict_interval(X, level)[::-1]) for level in (0.5, 0.9))
    assert (wide > narrow).all()


def test_samples_follow_the_predictive() -> None:
    X, y = regression(20, targets=2)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    drawn = model.sample_y(X, 4000, random_state=1)
    mean, std = model.predict(X, return_std=True)
    assert drawn.shape == (20, 2, 4000)
    assert (np.abs(drawn.mean(-1) - mean) < Z * std / math.sqrt(4000)).all()
    assert (np.abs(drawn.std(-1) / std - 1) < Z / math.sqrt(2 * 4000)).all()
    assert np.array_equal(drawn, model.sample_y(X, 4000, random_state=1))


def test_several_targets_are_scaled_one_by_one() -> None:
    X, y = regression(targets=3)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    assert (model.n_outputs_, model.predict(X).shape) == (3, (80, 3))
    factor = np.array([1.0, 4.0, 1024.0])
    scaled = BayesianRegressor(QUICK, random_state=0).fit(X, y * factor)
    for one, other in zip(model.predict(X, return_std=True), scaled.predict(X, return_std=True)):
        assert np.array_equal(other, one * factor)
    column = BayesianRegressor(QUICK, random_state=0).fit(X, y[:, :1])
    assert column.predict(X).shape == column.predict_interval(X)[0].shape == (80, 1)
    assert np.array_equal(column.predict(X)[:, 0], BayesianRegressor(QUICK, random_state=0).fit(X, y[:, 0]).predict(X))


# ---------------------------------------------------------------------------------------------------------------------
# Likelihoods, networks, precision


def test_named_likelihoods() -> None:
    X, y = regression(300)
    noisy = y + np.random.default_rng(0).normal(size=300) * np.where(X[:, 0] > 10, 80.0, 1.0)
    std = BayesianRegressor(LONGER, likelihood="heteroscedastic", random_state=0).fit(X, noisy).predict(X, True)[1]
    assert std[X[:, 0] > 10.5].mean() > 2 * std[X[:, 0] < 9.5].mean()
    student = BayesianRegressor(QUICK, likelihood="student-t", random_state=0).fit(X, y)
    assert isinstance(student.posterior_.likelihood, pl.likelihoods.StudentT)
    counts = np.random.default_rng(0).poisson(np.exp((X[:, 0] - 9) / 2))
    model = BayesianRegressor(LONGER, hidden=(), likelihood="poisson", random_state=0).fit(X, counts)
    mean, spread = model.predict(X, return_std=True)
    assert model.target_loc_ is None
    assert np.allclose(spread**2, mean)  # Poisson, one draw
    z = StandardScaler().fit_transform(X)  # the same posterior mode, but for the penalty on the intercept
    assert np.allclose(mean, PoissonRegressor(alpha=1 / 300, tol=1e-8).fit(z, counts).predict(z), rtol=0.02)
    low, high = model.predict_interval(X)
    assert np.array_equal(low, np.round(low))
    assert np.array_equal(high, np.round(high))


@pytest.mark.parametrize("scale", [7.5, (7.5, 3.0)])
def test_fixed_noise_is_in_the_units_of_y(scale: Any) -> None:
    X, y = regression(targets=np.size(scale))
    for likelihood, variance in ((pl.likelihoods.Gaussian(scale), 1.0), (pl.likelihoods.StudentT(6.0, scale), 1.5)):
        model = BayesianRegressor(QUICK, likelihood=likelihood).fit(X, y)
        expected = np.broadcast_to(np.square(scale) * variance, model.predictive(X).aleatoric.shape)
        assert np.allclose(model.predictive(X).aleatoric, expected)
        assert model.get_params()["likelihood"] is likelihood


def squashed(features: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 5), nn.Softplus(), nn.Linear(5, outputs))


def test_networks_of_ones_own() -> None:
    X, y = regression(targets=2)
    model = BayesianRegressor(QUICK, network=squashed, likelihood="heteroscedastic", random_state=0).fit(X, y)
    assert model.posterior_.model.network[2].out_features == 4
    torch.manual_seed(0)
    module = squashed(3, 4)
    before = copy.deepcopy(module.state_dict())
    given = BayesianRegressor(QUICK, network=module, likelihood="heteroscedastic", random_state=0).fit(X, y)
    assert np.array_equal(given.predict(X), model.predict(X))  # the factory is called under the seed
    assert next(iter(given.posterior_.weights().values())).dtype == torch.float32  # the module's precision
    assert given.predict(X).dtype == np.float64  # in the units of y, whose offset may be large
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    X, y = labels()
    classifier = BayesianClassifier(QUICK, network=squashed, random_state=0).fit(X, y)
    assert classifier.posterior_.model.network[2].out_features == 3


def test_precision_is_that_of_the_inputs() -> None:
    X, y = regression()
    model = BayesianRegressor(QUICK, random_state=0)
    single, double = model.fit(X.astype(np.float32), y), clone(model).fit(X, y)
    types = [next(iter(fitted.posterior_.weights().values())).dtype for fitted in (single, double)]
    assert types == [torch.float32, torch.float64]
    single, double = single.predict(X), double.predict(X)
    assert np.allclose(single, double, rtol=1e-3)


def test_without_standardising() -> None:
    X, y = regression()
    z = (X - X.mean(0)) / X.std(0)
    model = BayesianRegressor(QUICK, standardise=False, random_state=0).fit(z, (y - y.mean()) / y.std())
    assert (model.scaler_, model.target_loc_) == (None, None)
    inside = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    assert np.allclose(model.predict(z) * y.std() + y.mean(), inside.predict(X))


def test_draws() -> None:
    X, y = regression()
    model = BayesianRegressor(pl.SGLD(epochs=30), draws=3, random_state=0).fit(X, y)
    assert model.predictive(X).num_draws == 3
    assert model.set_params(draws=None).predictive(X).num_draws == len(model.posterior_)


# ---------------------------------------------------------------------------------------------------------------------
# Columns and targets that do not vary


@pytest.mark.parametrize("method", [LONGER, pl.Ensemble(QUICK, members=2), pl.SGLD(epochs=50)], ids=lambda m: m.name)
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e9])
def test_constant_targets(method: Any, constant: float) -> None:
    X, _ = regression(30)
    model = BayesianRegressor(method, hidden=(4,), random_state=0).fit(X, np.full(30, constant))
    mean, std = model.predict(X, return_std=True)
    assert np.isfinite(mean).all()
    assert np.isfinite(std).all()
    assert (np.abs(mean - constant) < 5 * std).all()
    assert (std > 0).all()


def test_constant_columns() -> None:
    X, y = regression()
    wide = np.column_stack([X, np.full(80, 0.1), np.zeros(80), np.full(80, 1e12)])
    model = BayesianRegressor(QUICK, random_state=0).fit(wide, y)
    assert np.allclose(model.scaler_.transform(wide)[:, 3:], 0)
    assert np.isfinite(model.predict(wide)).all()
    assert (model.scaler_.scale_[3:] == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("estimator", [BayesianRegressor, BayesianClassifier])
def test_a_weight_of_zero_is_a_row_left_out(estimator: type) -> None:
    X, y = regression() if estimator is BayesianRegressor else labels()
    weight = np.random.default_rng(0).integers(0, 2, len(y))
    answer = "predict" if estimator is BayesianRegressor else "predict_proba"
    model = estimator(QUICK, random_state=0)
    without = getattr(model.fit(X[weight > 0], y[weight > 0]), answer)(X)
    assert np.array_equal(getattr(model.fit(X, y, sample_weight=weight), answer)(X), without)
    ones = getattr(model.fit(X, y, sample_weight=np.ones(len(y))), answer)(X)
    assert np.array_equal(ones, getattr(model.fit(X, y), answer)(X))
    assert not np.array_equal(ones, without)


def test_a_whole_weight_is_a_repeated_row() -> None:
    """On full batches the objectives are the same up to a factor, which the optimiser hardly sees."""
    X, y = regression(30)
    weight = np.random.default_rng(0).integers(0, 4, 30)
    model = BayesianRegressor(pl.MAP(epochs=200, batch_size=None), hidden=(4,), random_state=0)
    weighted = model.fit(X, y, sample_weight=weight)
    mean, std = weighted.predict(X, return_std=True)
    repeated, repeated_std = model.fit(X.repeat(weight, 0), y.repeat(weight)).predict(X, return_std=True)
    unweighted = model.fit(X, y).predict(X)
    assert np.allclose(mean, repeated, rtol=1e-5)
    assert np.allclose(std, repeated_std, rtol=1e-5)
    assert not np.allclose(unweighted, repeated, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Classes


@pytest.mark.parametrize("kind", ["text", "object", "numbers", "booleans"])
@pytest.mark.parametrize("classes", [2, 3])
def test_labels_are_kept(kind: str, classes: int) -> None:
    if kind == "booleans" and classes == 3:
        pytest.skip("there are two booleans")
    X, y = labels(kind, classes=classes)
    model = BayesianClassifier(LONGER, hidden=(8,), random_state=0).fit(X, y)
    probs = model.predict_proba(X)
    assert np.array_equal(model.classes_, np.unique(y))
    assert probs.shape == (len(y), classes)
    assert np.allclose(probs.sum(1), 1, atol=1e-12)
    assert np.array_equal(model.predict(X), model.classes_[probs.argmax(1)])
    assert model.score(X, y) > 0.9
    for column, label in enumerate(model.classes_):  # the columns are those of classes_
        assert probs[y == label, column].mean() > 0.8
    drawn = model.sample_y(X, 200)
    assert drawn.shape == (len(y), 200)
    error = np.sqrt(probs[:, 0] * (1 - probs[:, 0]) / 200)
    assert (np.abs((drawn == model.classes_[0]).mean(1) - probs[:, 0]) < Z * error + 0.01).all()


def test_one_class_only() -> None:
    X, _ = labels()
    with pytest.raises(ValueError, match=r"one class only \('a'\).*two classes"):
        BayesianClassifier().fit(X, ["a"] * 90)


def test_uncertainty_of_classes_comes_apart() -> None:
    X, y = labels()
    model = BayesianClassifier(pl.Ensemble(QUICK, members=3), random_state=0).fit(X, y)
    found = model.predictive(X)
    assert torch.allclose(found.entropy, found.expected_entropy + found.mutual_information)
    assert (found.mutual_information > 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# In scikit-learn's hands


def test_pipeline_and_frames() -> None:
    pandas = pytest.importorskip("pandas")
    iris = load_iris(as_frame=True)
    names = iris.target_names[iris.target]
    pipeline = make_pipeline(StandardScaler(), BayesianClassifier(LONGER, hidden=(8,), random_state=0))
    pipeline.set_output(transform="pandas").fit(iris.data, pandas.Series(names, dtype="category"))
    assert list(pipeline[-1].feature_names_in_) == list(iris.data.columns)
    assert set(pipeline.predict(iris.data)) == {"setosa", "versicolor", "virginica"}
    assert pipeline.score(iris.data, names) > 0.9
    frame = pandas.DataFrame(regression()[0], columns=["a", "b", "c"])
    targets = pandas.DataFrame(regression(targets=2)[1], columns=["u", "v"])
    model = BayesianRegressor(QUICK, random_state=0).fit(frame, targets)
    assert model.predict(frame).shape == (80, 2)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"a": "z"}))


def test_polars_frames() -> None:
    polars = pytest.importorskip("polars")
    X, y = regression()
    model = BayesianRegressor(QUICK, random_state=0).fit(polars.DataFrame(X, schema=["a", "b", "c"]), polars.Series(y))
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    assert np.array_equal(
        model.predict(polars.DataFrame(X, schema=["a", "b", "c"])),
        BayesianRegressor(QUICK, random_state=0).fit(X, y).predict(X),
    )


def test_grid_search_over_method_and_hidden() -> None:
    X, y = regression()
    grid = {"method": [pl.MAP(epochs=5), LONGER, pl.SGLD(epochs=5)], "hidden": [(), (8,)]}
    search = GridSearchCV(BayesianRegressor(random_state=0), grid, cv=2, error_score="raise").fit(X, y)
    assert search.best_params_["method"] == LONGER
    assert search.best_score_ > 0.8
    assert len(search.cv_results_["params"]) == 6
    text = BayesianClassifier(LONGER, hidden=4, random_state=0)
    assert (cross_val_score(text, *labels(), cv=3) > 0.8).all()
    assert cross_val_predict(text, *labels(), cv=3, method="predict_proba").shape == (90, 3)


@pytest.mark.slow
def test_parallel_workers_give_the_same_bits() -> None:
    X, y = regression(40)
    one, two = (
        BaggingRegressor(BayesianRegressor(QUICK, hidden=(4,)), 2, n_jobs=jobs, random_state=0).fit(X, y).predict(X)
        for jobs in (None, 2)
    )
    assert np.allclose(one, two, rtol=1e-12)


def test_metadata_routing() -> None:
    X, y = regression(40)
    weight = np.repeat([0.0, 1.0], 20)
    with sklearn.config_context(enable_metadata_routing=True):
        model = BayesianRegressor(QUICK, random_state=0).set_fit_request(sample_weight=True)
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        routed = make_pipeline(scaler, model).fit(X, y, sample_weight=weight)
    scaled = StandardScaler().fit_transform(X)
    direct = BayesianRegressor(QUICK, random_state=0).fit(scaled, y, sample_weight=weight)
    assert np.array_equal(routed.predict(X), direct.predict(scaled))


@pytest.mark.parametrize(
    "method", [pl.MAP(epochs=5), pl.Ensemble(pl.MAP(epochs=5), members=2), pl.SGLD(epochs=5)], ids=lambda m: m.name
)
def test_pickled_copied_and_dumped(method: pl.Method) -> None:
    import joblib

    X, y = regression(targets=2)
    model = BayesianRegressor(method, prior=pl.priors.Laplace(0.5), random_state=0).fit(X, y)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), joblib.load(file)):
        for one, other in zip(again.predict(X, return_std=True), model.predict(X, return_std=True)):
            assert np.array_equal(one, other)
        assert again.posterior_.history == model.posterior_.history
        assert torch.equal(again.predictive(X).log_prob(y), model.predictive(X).log_prob(y))
    X, y = labels()
    classifier = BayesianClassifier(method, network=squashed, random_state=0).fit(X, y)
    again = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(again.predict_proba(X), classifier.predict_proba(X))
    assert np.array_equal(again.predict(X), classifier.predict(X))


def test_pickle_opens_in_a_fresh_process(tmp_path: Path) -> None:
    X, y = regression(20)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", model.predict(X))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    code = (
        "import pickle, numpy as np\n"
        "model = pickle.load(open('model.pickle', 'rb'))\n"
        "assert np.array_equal(model.predict(np.load('X.npy')), np.load('y.npy'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)


def test_pickle_of_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    X, y = regression(20)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    again = BayesianRegressor()
    again.__setstate__({**model.__getstate__(), "_device": "cuda:0"})
    assert np.array_equal(again.predict(X), model.predict(X))
    assert again.__getstate__().keys() == model.__getstate__().keys()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu() -> None:
    X, y = regression(targets=2)
    model = BayesianRegressor(QUICK, device="cuda", random_state=0).fit(X, y)
    assert model.posterior_.device.type == "cuda"
    assert model.__getstate__()["posterior_"].device.type == "cpu"
    again = pickle.loads(pickle.dumps(model))
    assert again.posterior_.device.type == "cuda"
    assert np.array_equal(again.predict(X), model.predict(X))


def test_a_fit_that_fails_leaves_nothing_fitted() -> None:
    X, y = regression(20)
    model = BayesianRegressor(QUICK, random_state=0).fit(X, y)
    with pytest.raises(ValueError, match="unknown method"):
        model.set_params(method="nonsense").fit(X * 2, y)
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_clone_forgets_the_fit_and_keeps_the_settings() -> None:
    X, y = regression(20)
    model = BayesianRegressor(pl.MAP(epochs=3), hidden=(4,), network=squashed, prior={"*": pl.priors.Flat()}).fit(X, y)
    fresh = clone(model)
    assert not hasattr(fresh, "posterior_")
    with pytest.raises(NotFittedError):
        fresh.predict(X)
    assert (fresh.method, fresh.hidden, fresh.network) == (model.method, (4,), squashed)


def test_random_state() -> None:
    X, y = regression()
    fit = lambda state: BayesianRegressor(QUICK, random_state=state).fit(X, y).predict(X)  # noqa: E731
    assert np.array_equal(fit(1), fit(1))
    assert not np.array_equal(fit(1), fit(2))
    assert np.array_equal(fit(np.random.RandomState(5)), fit(np.random.RandomState(5)))
    assert not np.array_equal(fit(None), fit(None))
    before = torch.get_rng_state()
    fit(3)
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "mapp"}, ValueError, "unknown method 'mapp'; did you mean 'map'"),
        ({"method": pl.MAP}, TypeError, "method must be an instance"),
        ({"hidden": (5, 0)}, ValueError, "widths must be integers of at least 1"),
        ({"hidden": "wide"}, TypeError, "hidden must be a width or a sequence"),
        ({"hidden": (2.5,)}, TypeError, "hidden must be a whole number, got 2.5"),
        ({"activation": "sine"}, ValueError, "activation must be one of relu"),
        ({"network": 5}, TypeError, "network must be a module or a function"),
        ({"network": lambda features, outputs: (features, outputs)}, TypeError, r"network\(3, 1\) must return .* tuple"),
        ({"network": nn.Linear(3, 2)}, ValueError, r"map \[N, 3\] to \[N, 1\], it gives \[2, 2\]"),
        ({"network": nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))}, ValueError, r"it gives \[2\] for 2 rows"),
        ({"network": nn.Linear(4, 1)}, ValueError, "network could not be run on the inputs"),
        ({"likelihood": "normal"}, ValueError, "likelihood must be one of gaussian, .* got 'normal'"),
        ({"likelihood": pl.likelihoods.Categorical()}, TypeError, "for numbers such as .* got Categorical"),
        ({"likelihood": pl.likelihoods.Gaussian}, TypeError, "likelihood must be None"),
        ({"likelihood": pl.likelihoods.Gaussian((1.0, 2.0))}, ValueError, "has 2 scales and y has 1 targets"),
        ({"likelihood": "poisson"}, ValueError, "counts must be integers"),
        ({"standardise": "yes"}, TypeError, "standardise must be True or False"),
        ({"random_state": -1}, ValueError, "random_state must be at least 0"),
        ({"device": "tpu"}, ValueError, "device='tpu'"),
    ],
)
def test_bad_settings_are_refused_by_fit(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    model = BayesianRegressor(**{"method": QUICK, **settings})  # the constructor only stores
    with pytest.raises(error, match=message):
        model.fit(*regression())


def test_bad_data_is_refused() -> None:
    X, y = regression()
    model = BayesianRegressor(QUICK)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.where(X > 10, np.nan, X), y)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(X, np.where(y > 700, np.nan, y))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(X, y[:-1])
    with pytest.raises(ValueError, match="0 sample"):
        model.fit(X[:0], y[:0])
    with pytest.raises(ValueError, match="sample_weight must not be negative"):
        model.fit(X, y, sample_weight=-np.ones(80))
    with pytest.raises(ValueError, match="too large"):
        BayesianRegressor(QUICK, standardise=False).fit(X * 1e300, y)
    with pytest.raises(ValueError, match="y has values too large"):
        model.fit(X, y * 1e300)
    model.fit(X, y)
    with pytest.raises(ValueError, match=r"column 1 .*too far"):
        model.predict(X * [1, 1e300, 1])
    with pytest.raises(ValueError, match="expecting 3 features"):
        model.predict(X[:, :2])
    with pytest.raises(ValueError, match="level must lie strictly between"):
        model.predict_interval(X, 90)
    with pytest.raises(TypeError, match="n_samples must be a whole number"):
        model.sample_y(X, 2.5)
    with pytest.raises(TypeError, match="likelihood must be None or a likelihood of classes"):
        BayesianClassifier(likelihood=pl.likelihoods.Gaussian()).fit(*labels())
    with pytest.raises(ValueError, match="Unknown label type"):
        BayesianClassifier().fit(X, y)


# ---------------------------------------------------------------------------------------------------------------------
# An extra


def test_the_page_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs/sklearn.md").read_text().partition("## Settings")[2].partition("\n## ")[0]
    stated = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    for estimator in (BayesianRegressor, BayesianClassifier):
        known = inspect.signature(estimator).parameters.values()
        assert stated == {p.name: repr(p.default).replace("'", '"') for p in known}


def test_scikit_learn_is_an_extra(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import plausible, plausible.fitting\n"
        "assert 'sklearn' not in sys.modules\n"
        "sys.modules['sklearn'] = None\n"
        "from plausible import *\n"
        "for use in (lambda: plausible.BayesianRegressor, lambda: __import__('plausible.apps.sklearn')):\n"
        "    try:\n"
        "        use()\n"
        "    except ImportError as error:\n"
        "        assert 'pip install' in str(error) and 'plausible[sklearn]' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('imported')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert pl.BayesianRegressor is BayesianRegressor
    assert {"BayesianRegressor", "BayesianClassifier"} <= set(dir(pl))
