"""Inference methods, one file each. `registry` maps names to classes; `create` builds one from its name.

Files are imported when one of their names is first used, all of them when the registry is asked.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plausible.methods.base import Method, Plan, Traits, create, registry

if TYPE_CHECKING:
    from plausible.methods.dvi import DVI
    from plausible.methods.ensemble import Ensemble
    from plausible.methods.flow import Flow
    from plausible.methods.full_rank import FullRank
    from plausible.methods.graves import Graves
    from plausible.methods.ivon import IVON
    from plausible.methods.laplace import Laplace
    from plausible.methods.low_rank import LowRank
    from plausible.methods.map import MAP
    from plausible.methods.matrix_normal import MatrixNormal
    from plausible.methods.mdl import MDL
    from plausible.methods.mean_field import MeanField
    from plausible.methods.multiplicative_flow import MultiplicativeFlow
    from plausible.methods.radial import Radial
    from plausible.methods.rank_one import Rank1
    from plausible.methods.refined import Refined
    from plausible.methods.sgld import SGLD
    from plausible.methods.vogn import VOGN

__all__ = [
    "DVI",
    "IVON",
    "MAP",
    "MDL",
    "SGLD",
    "VOGN",
    "Ensemble",
    "Flow",
    "FullRank",
    "Graves",
    "Laplace",
    "LowRank",
    "MatrixNormal",
    "MeanField",
    "Method",
    "MultiplicativeFlow",
    "Plan",
    "Radial",
    "Rank1",
    "Refined",
    "Traits",
    "create",
    "registry",
]

_HOMES = {
    "DVI": "dvi",
    "Ensemble": "ensemble",
    "Flow": "flow",
    "FullRank": "full_rank",
    "Graves": "graves",
    "IVON": "ivon",
    "Laplace": "laplace",
    "LowRank": "low_rank",
    "MAP": "map",
    "MatrixNormal": "matrix_normal",
    "MDL": "mdl",
    "MeanField": "mean_field",
    "MultiplicativeFlow": "multiplicative_flow",
    "Radial": "radial",
    "Rank1": "rank_one",
    "Refined": "refined",
    "SGLD": "sgld",
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
