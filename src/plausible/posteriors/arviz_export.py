"""Stored draws as arviz's `InferenceData`, for its plots and tables and for files that other tools read."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plausible._version import __version__
from plausible.core.data import ArrayData
from plausible.posteriors.diagnostics import by_chain, function_chains, stored

NAMES = {
    "acceptance": "acceptance_rate",
    "divergent": "diverging",
    "step_size": "step_size",
    "leapfrogs": "n_steps",
    "energy": "energy",
    "depth": "tree_depth",
    "log_likelihood": "log_likelihood_sum",
}
"""Our names of statistics and arviz's; others keep theirs. What arviz calls `log_likelihood` has a value for each example."""


def to_arviz(posterior: Any, x: Any = None) -> Any:
    """The draws of all chains as an `arviz.InferenceData`.

    posterior: random weights by name [chain, draw, *shape], sampled hyper-parameters, `f` [chain, draw, input, *outputs] at `x`.
    sample_stats: `acceptance_rate`, `diverging`, `step_size`, `n_steps`, `energy`, `lp` (the log joint), `tree_depth`, if known.
    observed_data, constant_data: targets `y` and inputs `x` of the training data, while the posterior still has them.
    """
    arviz, posterior = _arviz(), stored(posterior)
    weights = {name: _array(by_chain(posterior, value)) for name, value in posterior.weights().items()}
    dims = {name: [f"{name}_{k}" for k in range(value.ndim - 2)] for name, value in weights.items()}
    groups: dict[str, dict[str, np.ndarray]] = {"posterior": weights}
    known: dict[str, Tensor] = getattr(posterior, "statistics", {})
    if known:
        sampled = {name: value for name, value in known.items() if name.startswith("precision.")}
        weights |= {name: _array(value) for name, value in sampled.items()}
        groups["sample_stats"] = _statistics({name: value for name, value in known.items() if name not in sampled})
    if x is not None:
        weights["f"] = _array(function_chains(posterior, x))
        dims["f"] = ["input", *(f"output_{k}" for k in range(weights["f"].ndim - 3))]
    data = getattr(posterior, "data", None)
    if isinstance(data, ArrayData):
        groups["observed_data"] = {"y": _array(data.batch.y)}
        if isinstance(data.batch.x, Tensor):
            groups["constant_data"] = {"x": _array(data.batch.x)}
    about = {
        "inference_library": "plausible",
        "inference_library_version": __version__,
        "sampling_time": float(posterior.run.get("seconds") or 0.0),
        "method": posterior.method_name,
    }
    return arviz.from_dict(**groups, dims=dims, attrs=about, posterior_attrs=about)


def _statistics(known: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Those of transitions under arviz's names, whole numbers and truth values as such."""
    named = {NAMES.get(name, name): _array(value) for name, value in known.items()}
    if {"log_likelihood", "log_prior"} <= set(known):
        named["lp"] = _array(known["log_likelihood"] + known["log_prior"])
    for name, kind in (("diverging", np.bool_), ("n_steps", np.int64), ("tree_depth", np.int64)):
        if name in named:
            named[name] = named[name].astype(kind)
    return named


def _array(value: Tensor) -> np.ndarray:
    wide = value.float() if value.dtype == torch.bfloat16 else value
    return wide.detach().cpu().contiguous().numpy()


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its next major version, at import
            import arviz
    except ImportError as error:
        raise ImportError(f"to_arviz needs arviz ({error}): pip install 'plausible[mcmc]'") from error
    if not hasattr(arviz, "InferenceData"):
        version = getattr(arviz, "__version__", "1")
        raise ImportError(f"to_arviz needs arviz below 1.0, found {version}: pip install 'plausible[mcmc]'")
    return arviz
