"""Priors over weights: a log density for every element, and draws from it.

A prior is a rule for all weights, or a mapping from name patterns to rules (`Patterns`), possibly scaled by fan-in (`FanIn`).
Elements are independent given their rule, under `Hierarchical` given the precisions of their groups. Log densities are sums in
nats, constants included, made of tensor operations that work under `vmap`, `grad` and `torch.compile`. All of these are frozen
dataclasses: hashable, comparable, stored as JSON. `Earlier` is a Gaussian posterior of earlier data: one density over all its
weights.
"""

from plausible.core.priors.composed import Default, FanIn, Patterns, as_prior
from plausible.core.priors.defaults import from_weight_decay, neal
from plausible.core.priors.earlier import Earlier
from plausible.core.priors.hierarchical import Hierarchical
from plausible.core.priors.rules import Flat, Gaussian, Horseshoe, Laplace, LogUniform, Prior, Rule, ScaleMixture, StudentT

__all__ = [
    "Default",
    "Earlier",
    "FanIn",
    "Flat",
    "Gaussian",
    "Hierarchical",
    "Horseshoe",
    "Laplace",
    "LogUniform",
    "Patterns",
    "Prior",
    "Rule",
    "ScaleMixture",
    "StudentT",
    "as_prior",
    "from_weight_decay",
    "neal",
]
