"""The only loops of the library: iterate a step over batches, sample chains on the full data, accumulate a sum over one pass.

Progress bars, checkpoints, compilation, capture, stacking, devices, interrupts and ranks live here once, and nowhere else.
"""

from plausible.engine.accumulate import accumulate
from plausible.engine.checkpoint import Checkpoint
from plausible.engine.loop import DivergenceError, Fitted, Options, iterate, run, sample
from plausible.engine.policy import decide
from plausible.engine.ranks import RankError

__all__ = [
    "Checkpoint",
    "DivergenceError",
    "Fitted",
    "Options",
    "RankError",
    "accumulate",
    "decide",
    "iterate",
    "run",
    "sample",
]
