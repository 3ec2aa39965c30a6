"""Means and covariances of a layer's outputs, and how affine maps with independent Gaussian weights change them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Moments(NamedTuple):
    """Mean [N, D] and covariance of N random vectors, one for each example.

    The covariance is None for numbers that are certain, [N, D] for independent elements (their variances), [N, D, D] otherwise.
    """

    mean: Tensor
    covariance: Tensor | None = None

    @property
    def variance(self) -> Tensor:
        """[N, D]."""
        if self.covariance is None:
            return torch.zeros_like(self.mean)
        return self.covariance if self.covariance.ndim == self.mean.ndim else self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def matrix(self) -> Tensor:
        """[N, D, D]."""
        full = self.covariance is not None and self.covariance.ndim > self.mean.ndim
        return self.covariance if full else torch.diag_embed(self.variance)  # type: ignore[return-value]


class Weight(NamedTuple):
    """A weight of independent Gaussians: mean and variance of the same shape; None as variance is a point."""

    mean: Tensor
    variance: Tensor | None = None


def linear(x: Moments, weight: Weight, bias: Weight | None = None, *, full: bool = True) -> Moments:
    """Moments of Wx + b with independent W, b and x: exact, whatever the law of x.

    mean = W̄ m + b̄,  covariance = W̄ Σ W̄ᵀ + diag(V_W (m² + diag Σ) + V_b), V the variances of the weights. Outputs of certain or
    independent inputs with random weights alone are independent; otherwise they are not, and `full=False` leaves their
    covariances out, of inputs and outputs (the variances stay exact where inputs are independent). Cost:
    one matrix product with V more; with `full` N·D_in·D·(D_in + D) for D_in inputs and D outputs.
    """
    mean = F.linear(x.mean, weight.mean, None if bias is None else bias.mean)
    own: Tensor | None = None
    if weight.variance is not None:
        second = x.mean * x.mean if x.covariance is None else x.mean * x.mean + x.variance
        own = F.linear(second, weight.variance)
    if bias is not None and bias.variance is not None:
        own = bias.variance.expand_as(mean) if own is None else own + bias.variance
    if x.covariance is None:
        return Moments(mean, own)
    if not full:
        passed = F.linear(x.variance, weight.mean * weight.mean)
        return Moments(mean, passed if own is None else passed + own)
    if x.covariance.ndim == x.mean.ndim:
        rows = weight.mean * x.covariance.unsqueeze(-2)  # [N, D, D_in]
    else:
        rows = weight.mean @ x.covariance
    matrix = rows @ weight.mean.transpose(-1, -2)
    return Moments(mean, matrix if own is None else matrix + torch.diag_embed(own))


def scaled(x: Moments, scale: Weight | None, shift: Weight | None) -> Moments:
    """Moments of scale ∘ x + shift, element by element, with independent scale, shift and x: exact.

    covariance = (s̄ s̄ᵀ) ∘ Σ + diag(V_s (m² + diag Σ) + V_shift).
    """
    mean, covariance = x.mean, x.covariance
    own: Tensor | None = None
    if scale is not None:
        if scale.variance is not None:
            own = scale.variance * (mean * mean + x.variance)
        if covariance is not None:
            both = scale.mean * scale.mean
            full = covariance.ndim > mean.ndim
            covariance = covariance * (scale.mean.unsqueeze(-1) * scale.mean.unsqueeze(-2) if full else both)
        mean = mean * scale.mean
    if shift is not None:
        mean = mean + shift.mean
        if shift.variance is not None:
            own = shift.variance.expand_as(mean) if own is None else own + shift.variance
    if own is not None:
        full = covariance is not None and covariance.ndim > mean.ndim
        covariance = own if covariance is None else covariance + (torch.diag_embed(own) if full else own)
    return Moments(mean, covariance)
