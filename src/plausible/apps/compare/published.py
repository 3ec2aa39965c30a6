"""Published results under the same protocol: one hidden layer of 50 units, 20 splits (mean and standard error).

VI: Graves 2011, PBP: Hernández-Lobato and Adams 2015, both as printed there; MC dropout: Gal and Ghahramani 2016, and tuned by
Mukhoti et al. 2018; deep ensembles: Lakshminarayanan et al. 2017, whose ± are standard deviations over the splits and are
divided by √20 here; DVI: Wu et al. 2019; HMC: Bui et al. 2016, quoted from
memory and not checked against its source.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SOURCES = ("VI", "PBP", "MC dropout 2016", "MC dropout 2018", "deep ensembles", "DVI", "HMC")


class Published(NamedTuple):
    """A published mean and its standard error."""

    value: float
    error: float


_LOG_LIKELIHOOD = """
boston   -2.90 .07  -2.57 .09  -2.46 .06  -2.40 .04  -2.41 .25  -2.41 .02  -2.27 .03
concrete -3.39 .02  -3.16 .02  -3.04 .02  -2.93 .02  -3.06 .18  -3.06 .01  -2.72 .02
energy   -2.39 .03  -2.04 .02  -1.99 .02  -1.21 .01  -1.38 .22  -1.01 .06  -0.93 .01
kin8nm    0.90 .01   0.90 .01   0.95 .01   1.14 .01   1.20 .02   1.13 nan   1.35 .00
naval     3.73 .12   3.73 .01   3.80 .01   4.45 .00   5.63 .05   6.29 .04   7.31 .00
power    -2.89 .01  -2.84 .01  -2.80 .01  -2.80 .01  -2.79 .04  -2.80 nan  -2.70 .00
protein  -2.99 .01  -2.97 .00  -2.89 .00  -2.87 .00  -2.83 .02  -2.85 nan  -2.77 .00
wine     -0.98 .01  -0.97 .01  -0.93 .01  -0.93 .01  -0.94 .12  -0.90 .01  -0.91 .02
yacht    -3.43 .16  -1.63 .02  -1.55 .03  -1.25 .01  -1.18 .21  -0.47 .03  -1.62 .01
"""

_RMSE = """
boston   4.32 .29  3.01 .18  2.97 .19  2.90 .18  3.28 1.00
concrete 7.19 .12  5.67 .09  5.23 .12  4.82 .16  6.03 .58
energy   2.65 .08  1.80 .05  1.66 .04  0.539 .014  2.09 .29
kin8nm   0.10 .00  0.10 .00  0.10 .00  0.0789 .0006  0.09 .00
naval    0.01 .00  0.01 .00  0.01 .00  0.000743 .000046  0.00 .00
power    4.33 .04  4.12 .03  4.02 .04  4.01 .04  4.11 .17
protein  4.84 .03  4.73 .01  4.36 .01  4.27 .02  4.71 .06
wine     0.65 .01  0.64 .01  0.62 .01  0.62 .01  0.64 .04
yacht    6.89 .67  1.02 .05  1.11 .09  0.67 .05  1.58 .48
"""


def _table(text: str) -> dict[str, dict[str, Published]]:
    found = {}
    for line in text.split("\n"):
        name, *numbers = line.split() or [""]
        if not name:
            continue
        values = [float(n) for n in numbers]
        pairs = {s: Published(v, e) for s, v, e in zip(SOURCES, values[::2], values[1::2])}
        splits = 5 if name == "protein" else 20
        own = pairs["deep ensembles"]
        pairs["deep ensembles"] = Published(own.value, own.error / math.sqrt(splits))
        found[name] = pairs
    return found


PUBLISHED = {"log_likelihood": _table(_LOG_LIKELIHOOD), "rmse": _table(_RMSE)}
"""metric → data set → source → (mean, standard error)."""
