"""Inference methods, one file each. `registry` maps names to classes; `create` builds one from its name."""

from plausible.methods.base import Method, Plan, Traits, create, registry
from plausible.methods.ensemble import Ensemble
from plausible.methods.map import MAP
from plausible.methods.mean_field import MeanField
from plausible.methods.sgld import SGLD

__all__ = ["MAP", "SGLD", "Ensemble", "MeanField", "Method", "Plan", "Traits", "create", "registry"]
