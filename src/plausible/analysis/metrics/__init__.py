"""How good predictions are: scores, calibration, selective prediction, detection, agreement with a reference.

Every metric takes a `Predictive`, or plain arrays (torch, NumPy or lists), and targets, and returns a Python float, or
tensors where one value per example or per bin is natural. All are computed in float64 on the CPU. `mask` is boolean and
shaped like the targets, True where one was observed. What arrays may look like is said in `plausible.metrics.inputs`.
"""

from plausible.analysis.metrics.calibration import (
    Reliability,
    classwise_ece,
    coverage,
    ece,
    interval_width,
    pit,
    quantile_calibration,
    reliability,
)
from plausible.analysis.metrics.detection import (
    RiskCoverage,
    aurc,
    ood_aupr,
    ood_auroc,
    ood_fpr95,
    risk_coverage,
    uncertainty_score,
)
from plausible.analysis.metrics.ranked import crps
from plausible.analysis.metrics.scaling import calibrated_log_loss, temperature
from plausible.analysis.metrics.scores import accuracy, agreement, brier, log_likelihood, log_loss, mae, rmse, total_variation
from plausible.analysis.metrics.summaries import summary, summary_by_output

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "agreement",
    "aurc",
    "brier",
    "calibrated_log_loss",
    "classwise_ece",
    "coverage",
    "crps",
    "ece",
    "interval_width",
    "log_likelihood",
    "log_loss",
    "mae",
    "ood_aupr",
    "ood_auroc",
    "ood_fpr95",
    "pit",
    "quantile_calibration",
    "reliability",
    "risk_coverage",
    "rmse",
    "summary",
    "summary_by_output",
    "temperature",
    "total_variation",
    "uncertainty_score",
]
