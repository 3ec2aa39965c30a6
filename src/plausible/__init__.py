"""plausible: honest uncertainty for any PyTorch network.

Names are imported when they are first used, so that the command line answers `--help` without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plausible._version import __version__

if TYPE_CHECKING:
    from plausible import (
        adapters,
        curvature,
        datasets,
        decisions,
        evidence,
        likelihoods,
        methods,
        metrics,
        optim,
        optimisers,
        plots,
        priors,
        pruning,
        report,
        schedules,
        testing,
        uncertainty,
    )
    from plausible.data import Batch
    from plausible.engine import Checkpoint, DivergenceError
    from plausible.fidelity import fidelity
    from plausible.fitting import fit
    from plausible.methods import (
        DVI,
        HMC,
        IVON,
        MALA,
        MAP,
        MCLMC,
        MDL,
        MILE,
        NUTS,
        SGLD,
        SMC,
        VOGN,
        AnnealedImportance,
        ChEES,
        EllipticalSlice,
        Ensemble,
        Flow,
        FullRank,
        Laplace,
        LowRank,
        MatrixNormal,
        MeanField,
        Method,
        Metropolis,
        MultiplicativeFlow,
        ParallelTempering,
        Radial,
        Rank1,
        Refined,
    )
    from plausible.model import Model
    from plausible.monitoring import Monitor
    from plausible.posterior import Posterior
    from plausible.predictive import Predictive
    from plausible.prior_checks import prior_predictive
    from plausible.saving import load
    from plausible.sklearn import BayesianClassifier as BayesianClassifier
    from plausible.sklearn import BayesianRegressor as BayesianRegressor
    from plausible.sweeping import sweep

__all__ = [
    "DVI",
    "HMC",
    "IVON",
    "MALA",
    "MAP",
    "MCLMC",
    "MDL",
    "MILE",
    "NUTS",
    "SGLD",
    "SMC",
    "VOGN",
    "AnnealedImportance",
    "Batch",
    "ChEES",
    "Checkpoint",
    "DivergenceError",
    "EllipticalSlice",
    "Ensemble",
    "Flow",
    "FullRank",
    "Graves",
    "Laplace",
    "LowRank",
    "MatrixNormal",
    "MeanField",
    "Method",
    "Metropolis",
    "Model",
    "Monitor",
    "MultiplicativeFlow",
    "ParallelTempering",
    "Posterior",
    "Predictive",
    "Radial",
    "Rank1",
    "Refined",
    "__version__",
    "adapters",
    "curvature",
    "datasets",
    "decisions",
    "evidence",
    "fidelity",
    "fit",
    "likelihoods",
    "load",
    "methods",
    "metrics",
    "optim",
    "optimisers",
    "plots",
    "prior_predictive",
    "priors",
    "pruning",
    "report",
    "schedules",
    "sweep",
    "testing",
    "uncertainty",
]

_HOMES = {
    "Batch": "data",
    "BayesianClassifier": "sklearn",
    "BayesianRegressor": "sklearn",
    "Checkpoint": "engine",
    "DivergenceError": "engine",
    "Model": "model",
    "Monitor": "monitoring",
    "Posterior": "posterior",
    "Predictive": "predictive",
    "fit": "fitting",
    "load": "saving",
    "prior_predictive": "prior_checks",
    "sweep": "sweeping",
}
_ROOMS = (
    "adapters", "compare", "curvature", "datasets", "decisions", "evidence", "fidelity", "likelihoods", "methods", "metrics",
    "moments", "optim", "optimisers", "plots", "priors", "pruning", "report", "schedules", "testing", "uncertainty",
)  # fmt: skip
_EXTRAS = ("BayesianClassifier", "BayesianRegressor")  # need scikit-learn, so `import *` leaves them out


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"plausible.{name}")
    if name not in (*__all__, *_EXTRAS) or name.startswith("_"):  # submodules are imported by name, not found here
        raise AttributeError(f"module 'plausible' has no attribute {name!r}")
    value = getattr(import_module(f"plausible.{_HOMES.get(name, 'methods')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_EXTRAS})
