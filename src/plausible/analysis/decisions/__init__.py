"""What to do about uncertainty: the action of highest expected utility, what knowing more is worth, where to look next.

Everything takes a `Predictive`, or plain arrays (torch, NumPy or lists), and returns float64 tensors on the CPU. What arrays
may look like is said in `plausible.decisions.inputs`.
"""

from plausible.analysis.decisions.acquiring import bald, epistemic_variance, expected_variance_reduction
from plausible.analysis.decisions.batches import Selection, select_batch
from plausible.analysis.decisions.numbers import (
    Amount,
    expected_excess,
    expected_shortfall,
    linex_action,
    linex_cost,
    newsvendor,
    newsvendor_profit,
    quantile_action,
    quantile_cost,
)
from plausible.analysis.decisions.optimising import (
    expected_improvement,
    probability_of_improvement,
    thompson,
    upper_confidence_bound,
)
from plausible.analysis.decisions.utilities import (
    Decision,
    decide,
    value_of_epistemic_information,
    value_of_perfect_information,
)

__all__ = [
    "Amount",
    "Decision",
    "Selection",
    "bald",
    "decide",
    "epistemic_variance",
    "expected_excess",
    "expected_improvement",
    "expected_shortfall",
    "expected_variance_reduction",
    "linex_action",
    "linex_cost",
    "newsvendor",
    "newsvendor_profit",
    "probability_of_improvement",
    "quantile_action",
    "quantile_cost",
    "select_batch",
    "thompson",
    "upper_confidence_bound",
    "value_of_epistemic_information",
    "value_of_perfect_information",
]
