"""How near a posterior is to a reference: `plausible.fidelity(posterior, reference, x, y, data=…)`.

The module is the function: calling it is calling `plausible.fidelity.fidelity`. Beside it are the result, `Fidelity`, and the
parts that it is made of: `distances`, `stein`, `regions`.
"""

import inspect
import sys
from types import ModuleType

from plausible.fidelity.measuring import fidelity
from plausible.fidelity.result import Fidelity, Measure, Region

__all__ = ["Fidelity", "Measure", "Region", "fidelity"]


class _CallableModule(ModuleType):
    """Called like its function: `pl.fidelity(…)` and `from plausible.fidelity import Fidelity` both work, in any order."""

    __call__ = staticmethod(fidelity)


__signature__ = inspect.signature(fidelity)
sys.modules[__name__].__class__ = _CallableModule
