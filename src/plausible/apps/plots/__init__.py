"""Figures for notebooks, by matplotlib: each function draws on `ax` (new axes by default) and returns the Axes.

They show what the report shows, from a `Predictive` (or plain arrays, as in `plausible.metrics`) and targets. Colours are
those of the current matplotlib style. Needs the extra `plot`.
"""

from plausible.apps.plots.chains import (
    autocorrelation,
    chain_trace,
    energy,
    ess_growth,
    rank,
    rank_histogram,
    trace,
    training_trace,
)
from plausible.apps.plots.comparing import evidence, sweep
from plausible.apps.plots.geometry import curve, surface
from plausible.apps.plots.heldout import (
    example_images,
    example_rows,
    ood_histogram,
    pit_histogram,
    predictions,
    predictive_band,
    quantile_calibration,
    reliability,
    risk_coverage,
)
from plausible.apps.plots.pruning import pruned_weights, snr, snr_cdf, weight_histogram

__all__ = [
    "autocorrelation",
    "chain_trace",
    "curve",
    "energy",
    "ess_growth",
    "evidence",
    "example_images",
    "example_rows",
    "ood_histogram",
    "pit_histogram",
    "predictions",
    "predictive_band",
    "pruned_weights",
    "quantile_calibration",
    "rank",
    "rank_histogram",
    "reliability",
    "risk_coverage",
    "snr",
    "snr_cdf",
    "surface",
    "sweep",
    "trace",
    "training_trace",
    "weight_histogram",
]
