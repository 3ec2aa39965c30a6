"""plausible: honest uncertainty for any PyTorch network.

Names are imported when they are first used, so that the command line answers `--help` without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plausible._version import __version__

if TYPE_CHECKING:
    from plausible import likelihoods, methods, optimisers, priors, schedules, testing
    from plausible.data import Batch
    from plausible.engine import Checkpoint, DivergenceError
    from plausible.fitting import fit
    from plausible.methods import MAP, SGLD, Ensemble, Method
    from plausible.model import Model
    from plausible.posterior import Posterior
    from plausible.predictive import Predictive
    from plausible.prior_checks import prior_predictive
    from plausible.saving import load

__all__ = [
    "MAP",
    "SGLD",
    "Batch",
    "Checkpoint",
    "DivergenceError",
    "Ensemble",
    "Method",
    "Model",
    "Posterior",
    "Predictive",
    "__version__",
    "fit",
    "likelihoods",
    "load",
    "methods",
    "optimisers",
    "prior_predictive",
    "priors",
    "schedules",
    "testing",
]

_HOMES = {
    "Batch": "data",
    "Checkpoint": "engine",
    "DivergenceError": "engine",
    "Model": "model",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "fit": "fitting",
    "load": "saving",
    "prior_predictive": "prior_checks",
}
_ROOMS = ("likelihoods", "methods", "optimisers", "priors", "schedules", "testing")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"plausible.{name}")
    if name not in __all__ or name.startswith("_"):  # submodules are imported by name, not found here
        raise AttributeError(f"module 'plausible' has no attribute {name!r}")
    value = getattr(import_module(f"plausible.{_HOMES.get(name, 'methods')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
