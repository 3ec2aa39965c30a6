"""Published experiments, each in one file with its settings, the published numbers and the tolerance: `python -m experiments`.

`load(name)` gives a `Reproduction`: cells that are trained one by one, and tables and figures made of their results.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.frame import Reproduction

__all__ = ["NAMES", "load"]

NAMES = {
    "blundell-2015": "blundell",
    "singh": "singh",
    "singh-faithful": "singh",
    "gradient-variance": "gradient_variance",
    "permuted-mnist": "permuted_mnist",
    "laplace-lora": "adapters",
    "mackay": "mackay",
    "neal": "mackay",
    "neal-hmc": "neal_hmc",
    "robot-arm-hmc": "neal_hmc",
    "immer-2021": "immer",
    "in-between": "in_between",
    "last-layer": "last_layer",
    "fidelity": "fidelity",
    "small-net-evidence": "small_nets",
    "two-moons-modes": "mode_hopping",
    "toy-chains": "toy_chains",
    "averaging": "averaging",
    "control-variates": "control_variates",
    "uci-hmc": "uci_hmc",
    "defaults": "defaults",
    "sparse": "sparse",
    "concrete-dropout": "concrete",
    "uci-dropout": "uci_dropout",
    "dropouts": "dropouts",
    "zoo": "zoo",
}
"""Name of each reproduction → the file it is in."""


def load(name: str) -> Reproduction:
    """The reproduction of this name."""
    if name not in NAMES:
        raise ValueError(f"there is no reproduction {name!r}; there are: {', '.join(NAMES)}")
    return import_module(f"experiments.{NAMES[name]}").REPRODUCTIONS[name]
