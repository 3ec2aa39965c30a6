"""Inference methods, one file each. `registry` maps names to classes; `create` builds one from its name.

Files are imported when one of their names is first used, all of them when the registry is asked.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plausible.methods.base import Method, Plan, Traits, create, registry

if TYPE_CHECKING:
    from plausible.methods.ais import AnnealedImportance
    from plausible.methods.chees import ChEES
    from plausible.methods.dvi import DVI
    from plausible.methods.elliptical_slice import EllipticalSlice
    from plausible.methods.ensemble import Ensemble
    from plausible.methods.flow import Flow
    from plausible.methods.full_rank import FullRank
    from plausible.methods.graves import Graves
    from plausible.methods.hmc import HMC
    from plausible.methods.ivon import IVON
    from plausible.methods.laplace import Laplace
    from plausible.methods.low_rank import LowRank
    from plausible.methods.mala import MALA
    from plausible.methods.map import MAP
    from plausible.methods.matrix_normal import MatrixNormal
    from plausible.methods.mclmc import MCLMC
    from plausible.methods.mdl import MDL
    from plausible.methods.mean_field import MeanField
    from plausible.methods.metropolis import Metropolis
    from plausible.methods.mile import MILE
    from plausible.methods.multiplicative_flow import MultiplicativeFlow
    from plausible.methods.nuts import NUTS
    from plausible.methods.parallel_tempering import ParallelTempering
    from plausible.methods.radial import Radial
    from plausible.methods.rank_one import Rank1
    from plausible.methods.refined import Refined
    from plausible.methods.sgld import SGLD
    from plausible.methods.smc import SMC
    from plausible.methods.vogn import VOGN

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
    "ChEES",
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
    "MultiplicativeFlow",
    "ParallelTempering",
    "Plan",
    "Radial",
    "Rank1",
    "Refined",
    "Traits",
    "create",
    "registry",
]

_HOMES = {
    "AnnealedImportance": "ais",
    "ChEES": "chees",
    "DVI": "dvi",
    "EllipticalSlice": "elliptical_slice",
    "Ensemble": "ensemble",
    "Flow": "flow",
    "FullRank": "full_rank",
    "Graves": "graves",
    "HMC": "hmc",
    "IVON": "ivon",
    "Laplace": "laplace",
    "LowRank": "low_rank",
    "MALA": "mala",
    "MAP": "map",
    "MatrixNormal": "matrix_normal",
    "MCLMC": "mclmc",
    "MDL": "mdl",
    "MeanField": "mean_field",
    "Metropolis": "metropolis",
    "MILE": "mile",
    "MultiplicativeFlow": "multiplicative_flow",
    "NUTS": "nuts",
    "ParallelTempering": "parallel_tempering",
    "Radial": "radial",
    "Rank1": "rank_one",
    "Refined": "refined",
    "SGLD": "sgld",
    "SMC": "smc",
    "VOGN": "vogn",
}


def load() -> None:
    """Import all methods of the library, so that they are registered."""
    for home in _HOMES.values():
        import_module(f"plausible.methods.{home}")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plausible.methods' has no attribute {name!r}")
    value = getattr(import_module(f"plausible.methods.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "load"})
