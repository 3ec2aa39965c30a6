"""Have the chains converged? Numbers for draws [chains, draws, …] of anything, and a table for a posterior."""

from __future__ import annotations

from typing import Any

from plausible.blocks.chains.convergence import (
    LIMIT,
    ebfmi,
    ess,
    ess_bulk,
    ess_mean,
    ess_quantile,
    ess_tail,
    mcse,
    mcse_quantile,
    mcse_sd,
    rhat,
    summarise,
    summary,
)
from plausible.posteriors.summaries import SummaryTable, tabulate


def summary_table(posterior: Any, x: Any = None, names: Any = None) -> SummaryTable:
    """One row for each function value f(x), or each weight: mean, sd, mcse, ess_bulk, ess_tail, rhat; see `SummaryTable`.

    x: inputs at which functions are looked at, where permuting hidden units does not matter. Without it the table has the random
    weights, or those whose names match `names` (patterns such as "0.*").
    """
    return tabulate(posterior, x, names)


__all__ = [
    "LIMIT",
    "SummaryTable",
    "ebfmi",
    "ess",
    "ess_bulk",
    "ess_mean",
    "ess_quantile",
    "ess_tail",
    "mcse",
    "mcse_quantile",
    "mcse_sd",
    "rhat",
    "summarise",
    "summary",
    "summary_table",
]
