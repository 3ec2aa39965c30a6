"""Means and covariances through networks whose weights are independent Gaussians: no sampling.

`propagate` carries them through the layers, `expected_log_prob` says what they are worth, `elementwise` declares activations of
your own; `DVI` and `MDL` are built on these.
"""

from plausible.blocks.moments.expectations import LogVarianceGaussian, expected_log_prob, expected_logsumexp
from plausible.blocks.moments.gaussians import RULES, Moments, Weight, activated, elementwise, linear, rectified, scaled
from plausible.blocks.moments.networks import Link, Network, chain, propagate

__all__ = [
    "RULES",
    "Link",
    "LogVarianceGaussian",
    "Moments",
    "Network",
    "Weight",
    "activated",
    "chain",
    "elementwise",
    "expected_log_prob",
    "expected_logsumexp",
    "linear",
    "propagate",
    "rectified",
    "scaled",
]
