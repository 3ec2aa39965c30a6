"""How near a posterior is to a reference: `plausible.fidelity(posterior, reference, x, y, data=…)`."""

from plausible.analysis.fidelity.measuring import fidelity
from plausible.analysis.fidelity.result import Fidelity, Measure, Region

__all__ = ["Fidelity", "Measure", "Region", "fidelity"]
