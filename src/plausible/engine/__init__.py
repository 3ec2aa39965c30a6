"""The only loops of the library: iterate a step over batches, accumulate a sum over one pass, sample on the full data.

Stages, progress bars, checkpoints, compilation, capture, stacking, devices, interrupts and ranks live here once, and nowhere else.
"""

from plausible.engine.checkpoint import Checkpoint
from plausible.engine.method import DivergenceError, Fitted, Run
from plausible.engine.ranks import RankError
from plausible.engine.running import Options, run

__all__ = ["Checkpoint", "DivergenceError", "Fitted", "Options", "RankError", "Run", "run"]
