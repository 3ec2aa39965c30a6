"""A pipeline with error bars: a grid search over methods and widths, judged by log density, and the coverage of its intervals.

Disease progression of diabetes patients, the table that comes with scikit-learn.

Run: python examples/sklearn_pipeline.py [--quick]. Needs the extra `sklearn`.
"""

from __future__ import annotations

import sys

import numpy as np

import plausible as pl


def main(quick: bool = False) -> None:
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import GridSearchCV, train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PowerTransformer

    from plausible.sklearn import log_likelihood  # unlike R² it also judges the error bars

    X, y = load_diabetes(return_X_y=True, as_frame=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0)
    pipeline = make_pipeline(PowerTransformer(), pl.BayesianRegressor(random_state=0))
    point = pl.MAP(epochs=2 if quick else 40, lr=0.02)
    grid = {
        "bayesianregressor__method": [point, pl.Ensemble(point, members=5)],
        "bayesianregressor__hidden": [(), (50,)],
        "bayesianregressor__prior": [pl.priors.Gaussian(0.1), pl.priors.Gaussian(1.0)],
    }
    search = GridSearchCV(pipeline, grid, scoring=log_likelihood, cv=2 if quick else 3).fit(X, y)
    for rank in np.argsort(search.cv_results_["rank_test_score"]):
        method, hidden, prior = (search.cv_results_["params"][rank][name] for name in grid)
        score = search.cv_results_["mean_test_score"][rank]
        print(f"{score:8.3f}  {method.name:<8}  hidden={hidden!s:<5}  prior scale {prior.scale}")

    best = search.best_estimator_
    mean, std = best.predict(X_test, return_std=True)
    print(f"\nheld out: R² {best.score(X_test, y_test):.2f}, log density {log_likelihood(best, X_test, y_test):.3f}")
    for level in (0.5, 0.9):
        low, high = best[-1].predict_interval(best[:-1].transform(X_test), level)
        print(f"intervals of {level:.0%} hold {np.mean((low <= y_test) & (y_test <= high)):.0%} of the held-out targets")
    for row in np.argsort(std)[[0, -1]]:
        print(f"patient {row}: {mean[row]:.0f} ± {std[row]:.0f}, observed {np.asarray(y_test)[row]:.0f}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
