"""What the defaults are measured beside: a constant, linear models, Gaussian processes, trees and networks of scikit-learn.

Regressions give means and standard deviations of Gaussians for standardised targets; the noise of those that have none of their
own is the root mean square of cross-validated errors. Classifiers give probabilities. All run at scikit-learn's defaults, except
where it is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

LARGEST_PROCESS = 1000
"""Rows of a Gaussian process, drawn at random where there are more: its cost grows with their cube."""

Regression = Callable[[np.ndarray, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
Classifier = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def gaussian_scores(mean: np.ndarray, std: np.ndarray, y: np.ndarray, level: float) -> dict[str, float]:
    """NLL, CRPS, root mean square error and coverage of Gaussian predictions."""
    z = (y - mean) / std
    crps = std * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - np.pi**-0.5)
    inside = np.abs(z) <= stats.norm.ppf(0.5 + level / 2)
    return {
        "nll": float(-stats.norm.logpdf(y, mean, std).mean()),
        "score": float(crps.mean()),
        "error": float(np.sqrt(((y - mean) ** 2).mean())),
        "coverage": float(inside.mean()),
    }


def constant(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG001
    return np.full(len(test), y.mean()), np.full(len(test), max(float(y.std()), 1e-12))


def bayesian_ridge(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:  # noqa: ARG001
    from sklearn.linear_model import BayesianRidge

    return BayesianRidge().fit(x, y).predict(test, return_std=True)


def gaussian_process(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A length scale for each input and white noise, all by the marginal likelihood."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    if len(x) > LARGEST_PROCESS:
        chosen = np.random.default_rng(seed).permutation(len(x))[:LARGEST_PROCESS]
        x, y = x[chosen], y[chosen]
    kernel = ConstantKernel(1.0) * RBF(np.full(x.shape[1], 2.0), (1e-2, 1e4)) + WhiteKernel(0.1, (1e-8, 10.0))
    return GaussianProcessRegressor(kernel, random_state=seed).fit(x, y).predict(test, return_std=True)


def _with_noise(make: Callable[[int], Any]) -> Regression:
    """A regression whose noise is the root mean square of its errors in a fivefold cross-validation."""

    def fitted(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.model_selection import KFold, cross_val_predict

        folds = KFold(5, shuffle=True, random_state=seed)
        errors = y - cross_val_predict(make(seed), x, y, cv=folds)
        mean = make(seed).fit(x, y).predict(test)
        return mean, np.full(len(test), max(float(np.sqrt((errors**2).mean())), 1e-12))

    return fitted


def _forest(seed: int) -> Any:
    from sklearn.ensemble import RandomForestRegressor

    return RandomForestRegressor(random_state=seed)


def _boosted(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(random_state=seed)


def _network(seed: int) -> Any:
    from sklearn.neural_network import MLPRegressor

    return MLPRegressor(random_state=seed)


def _classifier(make: Callable[[int], Any], most: int | None = None) -> Classifier:
    def fitted(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
        if most is not None and len(x) > most:
            chosen = np.random.default_rng(seed).permutation(len(x))[:most]
            x, y = x[chosen], y[chosen]
        model = make(seed).fit(x, y)
        probs = np.zeros((len(test), int(y.max()) + 1))
        probs[:, model.classes_] = model.predict_proba(test)
        return probs

    return fitted


def _frequencies(x: np.ndarray, y: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:  # noqa: ARG001
    counts = np.bincount(y) + 1.0
    return np.tile(counts / counts.sum(), (len(test), 1))


def _logistic(seed: int) -> Any:  # noqa: ARG001
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=2000)


def _process_classifier(seed: int) -> Any:
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    return GaussianProcessClassifier(ConstantKernel(1.0) * RBF(3.0), random_state=seed)


def _forest_classifier(seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(random_state=seed)


def _boosted_classifier(seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(random_state=seed)


def _network_classifier(seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(random_state=seed)


REGRESSION: dict[str, Regression] = {
    "constant": constant,
    "linear": bayesian_ridge,
    "Gaussian process": gaussian_process,
    "random forest": _with_noise(_forest),
    "gradient boosting": _with_noise(_boosted),
    "scikit-learn's network": _with_noise(_network),
}
CLASSES: dict[str, Classifier] = {
    "constant": _frequencies,
    "linear": _classifier(_logistic),
    "Gaussian process": _classifier(_process_classifier, 500),
    "random forest": _classifier(_forest_classifier),
    "gradient boosting": _classifier(_boosted_classifier),
    "scikit-learn's network": _classifier(_network_classifier),
}
ALL = tuple(REGRESSION)
