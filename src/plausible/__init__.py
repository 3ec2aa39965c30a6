"""plausible: honest uncertainty for any PyTorch network.

Names are imported when they are first used, so that the command line answers `--help` without loading PyTorch.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from plausible._version import __version__ as __version__

# name here → where it lives; methods (`plausible.MAP`, …) are found in `plausible.methods`
_NAMES = {
    "Batch": "core.data",
    "BayesianClassifier": "apps.sklearn",
    "BayesianRegressor": "apps.sklearn",
    "Checkpoint": "engine",
    "DivergenceError": "engine",
    "FitWarning": "posteriors.doubts",
    "Method": "engine.method",
    "Model": "core.model",
    "Monitor": "engine.watching",
    "Posterior": "posteriors.base",
    "Predictive": "posteriors.predictive",
    "fidelity": "analysis.fidelity",
    "fit": "fitting",
    "load": "fitting",
    "prior_predictive": "analysis.prior_checks",
    "sweep": "apps.sweep",
}
_MODULES = {
    "adapters": "core.adapters",
    "compare": "apps.compare",
    "curvature": "blocks.curvature",
    "datasets": "apps.datasets",
    "decisions": "analysis.decisions",
    "diagnostics": "posteriors.diagnostics",
    "evidence": "analysis.evidence",
    "geometry": "analysis.geometry",
    "likelihoods": "core.likelihoods",
    "methods": "methods",
    "metrics": "analysis.metrics",
    "moments": "blocks.moments",
    "optim": "apps.optim",
    "optimisers": "core.optimisers",
    "plots": "apps.plots",
    "priors": "core.priors",
    "pruning": "analysis.pruning",
    "report": "apps.report",
    "schedules": "core.schedules",
    "sklearn": "apps.sklearn",
    "testing": "testing",
    "uncertainty": "analysis.uncertainty",
}
_EXTRAS = ("BayesianClassifier", "BayesianRegressor", "sklearn")  # need scikit-learn, so `import *` leaves them out


def _methods() -> list[str]:
    registry = import_module("plausible.methods").registry
    return [method.__name__ for method in registry.values() if method.__module__.startswith("plausible.")]


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({"__version__", *_NAMES, *_MODULES, *_methods()} - {*_EXTRAS})
    if name.startswith("_"):
        raise AttributeError(f"module 'plausible' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"plausible.{_MODULES[name]}")
    if name not in _NAMES and name not in _methods():
        raise AttributeError(f"module 'plausible' has no attribute {name!r}")
    value = getattr(import_module(f"plausible.{_NAMES.get(name, 'methods')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__getattr__("__all__"), *_EXTRAS})


class _Rooms(MetaPathFinder, Loader):
    """Lets `from plausible.metrics import …` work too, wherever in the layers that module lives."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        package, _, name = fullname.rpartition(".")
        elsewhere = package == "plausible" and _MODULES.get(name, name) != name
        return spec_from_loader(fullname, self) if elsewhere else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(f"plausible.{_MODULES[spec.name.rpartition('.')[2]]}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been run where it lives; there it keeps its spec, by which it finds its own files."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Rooms())
