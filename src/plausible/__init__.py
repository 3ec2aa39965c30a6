"""plausible: honest uncertainty for any PyTorch network."""

from plausible import likelihoods, methods, optimisers, priors, schedules
from plausible._version import __version__
from plausible.data import Batch
from plausible.engine import Checkpoint, DivergenceError
from plausible.fitting import fit
from plausible.methods import MAP, SGLD, Ensemble, Method
from plausible.model import Model
from plausible.posterior import Posterior
from plausible.predictive import Predictive
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
    "priors",
    "schedules",
]
