"""scikit-learn estimators: `BayesianRegressor` and `BayesianClassifier` are `plausible.fit` behind `fit` and `predict`.

    z = (y − loc)/scale,   p(y | x, D) = (1/S) Σ_s p(z | f_s((x − mean)/std)) / scale

Inputs and continuous targets are standardised inside; every prediction is in the units of y.
"""

from __future__ import annotations

import copyreg
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from plausible import fitting
from plausible.apps.assembling import refuse_unknown
from plausible.apps.responses import CONTINUOUS, COUNTS, Response
from plausible.apps.tables import mlp
from plausible.core import likelihoods
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.networks import private_copy
from plausible.methods import create
from plausible.methods.automatic.auto import Auto
from plausible.posteriors.base import Posterior
from plausible.posteriors.predictive import Predictive

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import LabelEncoder, StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_array, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f"plausible.sklearn needs scikit-learn 1.6 or newer ({error}): pip install 'plausible[sklearn]'"
    ) from error

__all__ = ["BayesianClassifier", "BayesianRegressor", "log_likelihood"]

FLOATS = [np.float64, np.float32]
LARGEST = float(np.finfo(np.float32).max)
NESTED = ("method", "likelihood", "prior")  # settings that have settings


class _BayesianNetwork(BaseEstimator):
    """What both estimators share: settings, standardised inputs, the network, the fit, the predictive, pickling."""

    posterior_: Posterior

    def __init__(
        self,
        method: Any = "auto",
        *,
        time: float | str | None = None,
        hidden: Any = (50,),
        activation: str = "relu",
        network: Any = None,
        likelihood: Any = None,
        prior: Any = None,
        draws: int | None = None,
        standardise: bool = True,
        device: Any = None,
        random_state: Any = None,
        compile: Literal["auto"] | bool = "auto",
        progress: bool | None = False,
    ):
        self.method = method
        self.time = time
        self.hidden = hidden
        self.activation = activation
        self.network = network
        self.likelihood = likelihood
        self.prior = prior
        self.draws = draws
        self.standardise = standardise
        self.device = device
        self.random_state = random_state
        self.compile = compile
        self.progress = progress

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings; `deep` adds those of the method, likelihood and prior, as `method__epochs` or `method__method__lr`."""
        params = dict(super().get_params(deep))
        for name in NESTED if deep else ():
            params |= {f"{name}__{inner}": value for inner, value in _settings_of(_described(name, params[name])).items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Change settings; `method__epochs=50` is one of the method, also where that was given by name."""
        own, nested = {}, defaultdict[str, dict[str, Any]](dict)
        for key, value in params.items():
            name, _, inner = key.partition("__")
            if inner and name in NESTED:
                nested[name][inner] = value
            else:
                own[key] = value
        super().set_params(**own)
        for name, settings in nested.items():
            setattr(self, name, _changed(name, _described(name, getattr(self, name)), settings))
        return self

    def _infer(
        self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None, likelihood: Likelihood | None, outputs: int
    ) -> None:
        """`plausible.fit` on standardised inputs [N, D] and targets as the network sees them: [N, T], or classes [N]."""
        # Weighted rows count in the moments too, so that a row of weight 2 is the same as two rows.
        self.scaler_ = _scaler(X, weight) if _flag(self.standardise) else None
        inputs, seed = self._inputs(X), _as_seed(self.random_state)
        network = self._make_network(X, outputs, seed)
        if self.network is not None:
            _check_network(network, inputs, outputs)
        self.posterior_ = fitting.fit(
            network,
            (inputs, y) if weight is None else (inputs, y, weight),
            self.method,
            likelihood=likelihood,
            prior=self.prior,
            seed=seed,
            device=self.device,
            compile=self.compile,
            progress=self.progress,
            time=self.time,
        )

    def _make_network(self, X: np.ndarray, outputs: int, seed: int) -> nn.Module:
        """The module that was given, or a new one, initialised under the seed; the default has the precision of X."""
        given = self.network
        if isinstance(given, nn.Module):
            return given
        if given is not None and not callable(given):
            what = type(given).__name__
            raise TypeError(f"network must be a module or a function (n_features, n_outputs) -> module, got {what}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if given is None:
                module: nn.Module = mlp(X.shape[1], _widths(self.hidden), outputs, self.activation)
                wide = X.dtype == np.float64 and fitting.choose_device(module, self.device).type != "mps"
                return module.to(torch.float64 if wide else torch.float32)
            module = given(X.shape[1], outputs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"network({X.shape[1]}, {outputs}) must return a torch.nn.Module, got {type(module).__name__}")
        return module

    def _inputs(self, X: np.ndarray) -> np.ndarray:
        """(x − mean)/std, [N, D]; constant columns have std 1. Refuses what single precision cannot hold."""
        with np.errstate(over="ignore", invalid="ignore"):
            inputs = X if self.scaler_ is None else self.scaler_.transform(X)
            wild = ~(np.abs(inputs) < LARGEST).all(axis=0)
        if wild.any():
            names = getattr(self, "feature_names_in_", np.arange(X.shape[1])).tolist()
            raise ValueError(
                f"X has values in column {names[wild.argmax()]!r} that are too large, or too far from those seen in "
                "training, to compute with; rescale that column"
            )
        return inputs

    def predictive(self, X: Any) -> Predictive:
        """p(y | x, D) at each row of X: everything that `plausible.Predictive` answers; classes by number in `classes_`."""
        check_is_fitted(self, "posterior_")
        X = validate_data(self, X, dtype=FLOATS, order="C", reset=False)
        return self.posterior_.predict(self._inputs(X), draws=self.draws)

    def _decode(self, values: Tensor) -> np.ndarray:
        """Targets as tensors [..., N, T] or [..., N] → as the user gave them."""
        raise NotImplementedError

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """The log density (of labels the log probability) of each row of targets, [N], in nats and in the units of y."""
        return self.predictive(X).log_prob(self._encode(y)).cpu().numpy()

    def _encode(self, y: Any) -> np.ndarray:
        """Targets as the user has them → as `predictive` speaks of them."""
        raise NotImplementedError

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y, [N, n_samples] or [N, T, n_samples]: each picks one f_s for all rows, then y ~ p(y | f_s)."""
        drawn = self.predictive(X).sample(_whole("n_samples", n_samples), seed=_as_seed(random_state))
        return np.moveaxis(self._decode(drawn), 0, -1)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        posterior = state.get("posterior_")
        # Pickled on the CPU, so that it opens anywhere.
        if posterior is not None and posterior.device.type != "cpu":
            state |= {"posterior_": posterior.to("cpu"), "_device": str(posterior.device)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        device = state.pop("_device", None)
        super().__setstate__(state)
        if device is not None:
            with suppress(ValueError):  # that device is not here: the posterior stays on the CPU
                self.posterior_ = self.posterior_.to(device)


class BayesianRegressor(RegressorMixin, _BayesianNetwork):
    """Regression with honest error bars: p(y | x, D) of a network, behind `fit` and `predict`.

    Args:
        method: a method or its name: "ensemble", `pl.SGLD(epochs=500)`, … "auto" chooses one by rows, weights and `time`:
            chains for small tables, then ensembles. `set_params(method__epochs=50)` changes a setting of it.
        time: of "auto": about how long a fit may take, in seconds or as "5m"; about a minute if None.
        hidden: widths of the hidden layers, (50,) or 50; () is a linear model.
        activation: "relu", "tanh", "silu" or "gelu".
        network: instead of `hidden` and `activation`: a function (n_features, n_outputs) → `nn.Module`, or a module, whose
            weights are the starting point. It maps [N, n_features] to [N, n_outputs].
        likelihood: "gaussian" (noise learned, one for each target), "heteroscedastic" (noise that depends on x), "student-t",
            "poisson", "negative-binomial", or one of `pl.likelihoods`; None is "gaussian", and of "auto" its own choice. A
            fixed `scale` of `Gaussian` and `StudentT` is in the units of y.
        prior: over the weights, and what None means, as for `pl.fit`.
        draws: how many draws predictions average over; None takes all that were stored.
        standardise: subtract the mean and divide by the standard deviation, for X and for continuous y. Constant columns
            are only centred. Counts stay as they are.
        device: "cpu", "cuda", "mps", "auto", or None for where the network is.
        random_state: a whole number is the seed of `pl.fit`; None or a `RandomState` draws one.
        compile, progress: as for `pl.fit`; no bar unless asked for.

    After `fit`: `posterior_` (a `Posterior` of the standardised problem), `scaler_` (of X, or None), `target_loc_` and
    `target_scale_` (one per target, or None), `n_outputs_` (the number of targets), `n_features_in_`, `feature_names_in_`.

    The default network computes in the precision of X, float64 unless X is float32. Cost: that of `pl.fit`.

    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """Infer the posterior from X [N, D] and y [N] or [N, T]; a row of weight k counts as k equal rows, 0 as none."""
        self.__dict__.pop("posterior_", None)  # a fit that fails leaves nothing half fitted
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C", multi_output=True, y_numeric=True)
        self._flat = y.ndim == 1
        X, y, weight = _weighted(X, y.astype(np.float64).reshape(len(y), -1), sample_weight)
        self.n_outputs_ = y.shape[1]
        automatic = self.likelihood is None and isinstance(create(self.method), Auto)
        likelihood = None if automatic else _regression_likelihood(self.likelihood, self.n_outputs_)
        self.target_loc_: np.ndarray | None = None
        self.target_scale_: np.ndarray | None = None
        if _flag(self.standardise) and (likelihood is None or likelihood.kind == "continuous"):
            scaler = _scaler(y, weight)
            self.target_loc_, self.target_scale_ = scaler.mean_, scaler.scale_
            if not np.isfinite(scaler.scale_).all():
                raise ValueError("y has values too large for arithmetic; rescale it")
            y, likelihood = scaler.transform(y), likelihood and _standardised_noise(likelihood, scaler.scale_)
        self._infer(
            X, y, weight, likelihood, self.n_outputs_ if likelihood is None else _num_outputs(likelihood, self.n_outputs_)
        )
        return self

    def predictive(self, X: Any) -> Predictive:
        """p(y | x, D) at each row of X, in the units of y, for targets [N, T] (T = 1 where y was [N])."""
        standardised = super().predictive(X)
        if self.target_loc_ is None or self.target_scale_ is None:
            return standardised
        return standardised.rescaled(torch.from_numpy(self.target_loc_), torch.from_numpy(self.target_scale_))

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[y | x, D], shaped like y; with `return_std` also √Var[y | x, D], noise included."""
        predictive = self.predictive(X)
        mean = self._decode(predictive.mean)
        return (mean, self._decode(predictive.std)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), each shaped like y: the equal-tailed interval that holds each y with probability `level`."""
        low, high = self.predictive(X).interval(level)
        return self._decode(low), self._decode(high)

    def _encode(self, y: Any) -> np.ndarray:
        return check_array(y, ensure_2d=False, dtype=np.float64, input_name="y").reshape(len(y), -1)

    def _decode(self, values: Tensor) -> np.ndarray:
        array = values.cpu().numpy()
        return array[..., 0] if self._flat else array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BayesianClassifier(ClassifierMixin, _BayesianNetwork):
    """Classification with honest probabilities: P(y = c | x, D) = (1/S) Σ_s softmax(f_s(x))_c.

    Labels may be numbers, texts or booleans, two classes or more. The arguments are those of `BayesianRegressor`;
    `likelihood` is None for `Categorical()`, or another likelihood of classes, with one output per class.

    After `fit`: `classes_` (sorted; the order of all columns), `posterior_`, `scaler_`, `n_features_in_`,
    `feature_names_in_`.
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianClassifier:
        """Infer the posterior from X [N, D] and labels y [N]; a row of weight k counts as k equal rows, 0 as none."""
        self.__dict__.pop("posterior_", None)
        X, y = validate_data(self, X, y, dtype=FLOATS, order="C")
        check_classification_targets(y)
        encoder = LabelEncoder().fit(y)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only ({self.classes_.tolist()[0]!r}); a classifier needs at least two classes")
        likelihood = likelihoods.Categorical() if self.likelihood is None else self.likelihood
        if not isinstance(likelihood, Likelihood) or likelihood.kind != "classes":
            known = "None or a likelihood of classes such as likelihoods.Categorical()"
            raise TypeError(f"likelihood must be {known}, got {likelihood!r}")
        self._infer(*_weighted(X, encoder.transform(y), sample_weight), likelihood, len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """P(y = c | x, D): [N, classes], columns in the order of `classes_`."""
        return self.predictive(X).probs.cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row, [N]."""
        best = self.predict_proba(X).argmax(axis=1)  # first, as it refuses an estimator that is not fitted
        return self.classes_[best]

    def _encode(self, y: Any) -> np.ndarray:
        labels = np.asarray(y)
        strange = np.setdiff1d(labels, self.classes_)
        if len(strange):
            raise ValueError(f"y has labels that were not in the training data: {strange[:5].tolist()}; stratify the split")
        return np.searchsorted(self.classes_, labels)

    def _decode(self, values: Tensor) -> np.ndarray:
        return self.classes_[values.cpu().numpy()]


def log_likelihood(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """The mean log density of held-out targets, in nats a row: a scorer, for `scoring=` of searches and of cross-validation.

    Higher is better, and honest error bars score highest. Takes one of the estimators here, alone, at the end of a pipeline, or
    as a search has fitted it.
    """
    while not isinstance(estimator, _BayesianNetwork):
        if isinstance(estimator, Pipeline):
            X, estimator = estimator[:-1].transform(X) if len(estimator) > 1 else X, estimator[-1]
        elif hasattr(estimator, "best_estimator_"):
            estimator = estimator.best_estimator_
        else:
            known = "BayesianRegressor or BayesianClassifier, or a pipeline or search of one"
            raise TypeError(f"log_likelihood scores a {known}, got {type(estimator).__name__}")
    return float(np.average(estimator.log_prob(X, y), weights=sample_weight))


# ---------------------------------------------------------------------------------------------------------------------
# Settings inside settings: method__epochs


def _described(name: str, value: Any) -> Any:
    """The value of a setting; a method that was given by its name, as the instance that the name stands for."""
    if name == "method" and isinstance(value, str):
        with suppress(ValueError):  # an unknown name is for `fit` to refuse
            return create(value)
    return value


def _settings_of(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass, and with `__` between those of the dataclasses in them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(thing) if _has_settings(thing) else ():
        value = getattr(thing, field.name)
        found |= {field.name: value} | {f"{field.name}__{inner}": v for inner, v in _settings_of(value).items()}
    return found


def _changed(label: str, thing: Any, settings: Mapping[str, Any]) -> Any:
    """The dataclass with these fields, checked by its constructor."""
    if not _has_settings(thing):
        raise ValueError(f"{label}__{next(iter(settings))} cannot be set: {label} is {thing!r}, which has no settings")
    known = [field.name for field in dataclasses.fields(thing)]
    refuse_unknown({key.partition("__")[0]: None for key in settings}, known, type(thing).__name__)
    changes = {key: value for key, value in settings.items() if "__" not in key}
    for name in dict.fromkeys(key.partition("__")[0] for key in settings if "__" in key):
        inner = {key.removeprefix(f"{name}__"): value for key, value in settings.items() if key.startswith(f"{name}__")}
        changes[name] = _changed(f"{label}__{name}", changes.get(name, getattr(thing, name)), inner)
    return replace(thing, **changes)


def _has_settings(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments, checked


def _flag(standardise: Any) -> bool:
    if not isinstance(standardise, bool | np.bool_):
        raise TypeError(f"standardise must be True or False, got {standardise!r}")
    return bool(standardise)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _as_seed(random_state: Any) -> int:
    """A whole number is the seed itself; anything else that scikit-learn takes draws one."""
    if isinstance(random_state, Integral) and not isinstance(random_state, bool):
        if random_state < 0:
            raise ValueError(f"random_state must be at least 0, a RandomState or None, got {random_state!r}")
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _widths(hidden: Any) -> tuple[int, ...]:
    if isinstance(hidden, Integral):
        hidden = (hidden,)
    if isinstance(hidden, str | Mapping) or not np.iterable(hidden):
        raise TypeError(f"hidden must be a width or a sequence of widths, such as (50, 50), got {hidden!r}")
    return tuple(_whole("hidden", width) for width in hidden)


def _weighted(X: np.ndarray, y: np.ndarray, weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Rows of weight zero are left out, weights that are all one are none: both are then equal bit for bit."""
    if weight is None:
        return X, y, None
    weight = _check_sample_weight(weight, X, dtype=np.float64)
    if (weight < 0).any():
        raise ValueError(f"sample_weight must not be negative, got {weight.min()}")
    kept = weight > 0
    if not kept.any():
        raise ValueError("sample_weight is zero for every row: nothing is left to learn from")
    return X[kept], y[kept], None if (weight[kept] == 1).all() else weight[kept]


def _scaler(values: np.ndarray, weight: np.ndarray | None) -> StandardScaler:
    """Weighted mean and standard deviation of each column, 1 for a constant one; overflow is left to those who use it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return StandardScaler().fit(values, sample_weight=weight)


def _regression_likelihood(likelihood: Any, targets: int) -> Likelihood:
    """A name or None → the likelihood of that name, with a learned noise for each target; instances are checked."""
    names = (*CONTINUOUS, *COUNTS)
    if likelihood is None or isinstance(likelihood, str):
        name = "gaussian" if likelihood is None else likelihood
        if name not in names:
            raise ValueError(f"likelihood must be one of {', '.join(names)}, or an instance, got {likelihood!r}")
        return Response(("y",) * targets, name).make_likelihood()
    if not isinstance(likelihood, Likelihood) or likelihood.kind not in ("continuous", "counts"):
        raise TypeError(
            f"likelihood must be None, one of {', '.join(names)}, or an instance for numbers such as "
            f"likelihoods.StudentT(df=4), got {likelihood!r}"
        )
    return likelihood


def _standardised_noise(likelihood: Likelihood, scale: np.ndarray) -> Likelihood:
    """A fixed noise in the units of y → in those of z = (y − loc)/scale."""
    if not isinstance(likelihood, likelihoods.Gaussian | likelihoods.StudentT) or isinstance(likelihood.scale, str):
        return likelihood
    if np.ndim(likelihood.scale) and len(likelihood.scale) != len(scale):
        raise ValueError(f"likelihood {likelihood} has {len(likelihood.scale)} scales and y has {len(scale)} targets")
    noise = np.asarray(likelihood.scale) / scale
    return replace(likelihood, scale=noise if len(noise) > 1 else float(noise[0]))


def _num_outputs(likelihood: Likelihood, targets: int) -> int:
    """How many network outputs give this many targets: the least number that the likelihood accepts."""
    # A likelihood says what outputs become, not what it needs: the least number that fits is found by asking.
    for count in range(1, 16 * targets + 1):
        with suppress(ValueError):
            if tuple(likelihood.target_shape((1, count))) == (1, targets):
                return count
    raise ValueError(f"likelihood {likelihood} does not give targets of shape [N, {targets}], which y has")


def _check_network(network: nn.Module, inputs: np.ndarray, outputs: int) -> None:
    """Run a network of the user's on two rows and look at the shape; whatever else is wrong is for `fit` to name."""
    result: Any = None
    with torch.no_grad(), suppress(Exception):
        private = private_copy(network)
        result = private(torch.as_tensor(inputs[[0, -1]]).to(next(private.parameters())))
    if isinstance(result, Tensor) and tuple(result.shape) != (2, outputs):
        raise ValueError(f"network must map [N, {inputs.shape[1]}] to [N, {outputs}], it gives {list(result.shape)} for 2 rows")


# A model holds a function that says how its network is called, which no pickle can: it is built again from its parts.
def _parts(model: Model) -> tuple[Any, ...]:
    return partial(Model, **{name: getattr(model, name) for name in inspect.signature(Model).parameters}), ()


copyreg.pickle(Model, _parts)
