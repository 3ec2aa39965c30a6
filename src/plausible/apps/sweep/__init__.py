"""Many settings as one program: `sweep` stacks those that share shapes on a leading axis and trains them together.

`grid.py` the settings and which of them can be stacked, `stacked.py` the step over all of them, `running.py` `sweep` and what it
gives, `files.py` sweeps from TOML files, for the command line.
"""

from plausible.apps.sweep.grid import Grid
from plausible.apps.sweep.running import Sweep, sweep

__all__ = ["Grid", "Sweep", "sweep"]
