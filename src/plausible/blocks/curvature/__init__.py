"""Curvature of the log-likelihood in the weights: products without the Jacobian, and structures added up over the data."""

from plausible.blocks.curvature import losses
from plausible.blocks.curvature.estimating import estimate, start
from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.low_rank import leading
from plausible.blocks.curvature.products import empirical_product, ggn_product, hessian_product, log_joint_gradient
from plausible.blocks.curvature.structures import Curvature

__all__ = [
    "Curvature",
    "Layer",
    "Linearisation",
    "Part",
    "empirical_product",
    "estimate",
    "ggn_product",
    "hessian_product",
    "leading",
    "log_joint_gradient",
    "losses",
    "start",
]
