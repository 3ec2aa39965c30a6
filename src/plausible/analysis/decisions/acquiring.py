"""Which inputs to have labelled: scores for active learning, higher for what teaches more."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, distributions

from plausible.analysis.decisions.inputs import aligned, filled, function_draws, gathered, need, refuse
from plausible.analysis.metrics.detection import uncertainty_score
from plausible.analysis.metrics.inputs import CLASSES, NUMBERS
from plausible.core.distributions import Affine
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

_BLOCK = 2**22  # entries of a covariance that are held at once


def bald(predictive: Any) -> Tensor:
    """I[y; f] = H[y] − E_s H[y | f_s] in nats, [N, ...]: how much the label would say about the model (Houlsby et al. 2011).

    Classes: the mutual information of `Predictive`, or of probabilities [S, N, C]. High where the draws disagree, and not where
    all of them expect a coin toss. Gaussian likelihoods: ½ log Var[y] − E_s ½ log Var[y | f_s], exact where the mixture is
    Gaussian and otherwise too large, because no distribution of that variance has a larger entropy. Cost: one pass.
    """
    if not isinstance(predictive, Predictive) or predictive.likelihood.kind in CLASSES:
        return uncertainty_score(_checked(predictive), "mutual_information")
    _checked(predictive)

    def log_noise(_: slice, given: Any) -> Tensor:
        base = given
        while isinstance(base, Affine):
            base = base.base
        if not isinstance(base, distributions.Normal):
            raise TypeError(
                f"bald knows classes and Gaussian likelihoods, predictive has {predictive.likelihood}: use "
                "epistemic_variance or expected_variance_reduction"
            )
        return given.variance.log().mean(0)

    conditional = gathered(predictive, log_noise, draws=predictive.num_draws, what="an information")
    total = double(predictive.variance)[0].cpu()
    refuse(~torch.isfinite(total), "the variance of predictive must be finite")
    return 0.5 * (total.log() - conditional).clamp(min=0)


def epistemic_variance(predictive: Any) -> Tensor:
    """Var_s E[y | f_s], [N, ...], for classes summed over them: where the draws disagree (Cohn, Ghahramani & Jordan 1996).

    A `Predictive`, or probabilities [S, N, C].
    """
    return uncertainty_score(_checked(predictive), "epistemic")


def expected_variance_reduction(predictive: Any, reference: Any = None, *, noise: Any = None) -> Tensor:
    """1/M Σ_t Cov(f_t, f_n)² / (Var f_n + σ_n²), [N]: how much observing y_n is expected to lower the variance of f elsewhere.

    Active learning after Cohn (Cohn, Ghahramani & Jordan 1996; for Gaussian processes Seo et al. 2000), exact where f is
    jointly Gaussian; the covariances are those of the draws, so give it many. Unlike `epistemic_variance` it prefers inputs
    that say something about many others.

    `predictive` is about the N candidates and `reference` about the M inputs that matter (None: the candidates), with *the same
    draws*: predictions of one posterior with equal `draws` and `seed`, or arrays [S, N] and [S, M]. `noise` is the variance σ² of
    an observation, a number or one per candidate; by default the aleatoric variance of the predictive. Cost: S·N·M.
    """
    functions = function_draws(predictive)
    others = functions if reference is None else function_draws(reference, "reference")
    if len(others) != len(functions):
        raise ValueError(
            f"reference has {len(others)} draws and predictive {len(functions)}: both must be the same draws of one "
            "posterior, predicted with equal draws= and seed="
        )
    variance = observation_noise(predictive, functions, noise) + functions.var(0, correction=0)
    left, right = (values - values.mean(0) for values in (others, functions))
    parts = []
    # The covariance [M, N] is never whole in memory: its columns are squared and averaged block by block.
    for block in right.split(max(1, _BLOCK // left.shape[1]), dim=1):
        covariance = left.T @ block / len(left)  # [M, n]
        parts.append(covariance.square().mean(0))
    # An input without any variance can teach nothing; the clamp only keeps its quotient from being 0/0.
    return torch.where(variance > 0, torch.cat(parts) / variance.clamp(min=torch.finfo(variance.dtype).tiny), 0.0)


def observation_noise(predictive: Any, functions: Tensor, noise: Any) -> Tensor:
    """σ² of an observation of each input, [N]: as given, or the aleatoric variance of a `Predictive`."""
    count = functions.shape[1]
    if noise is None:
        if not isinstance(predictive, Predictive):
            raise ValueError("noise must be given with plain draws: the variance of an observation around the function")
        variance = double(predictive.aleatoric)[0].cpu().reshape(count)
    else:
        variance = aligned(noise, (count,), "noise").expand(count)
    refuse(~((variance >= 0) & (variance < math.inf)), "noise must be a finite variance, not negative", values=variance)
    return variance


def _checked(predictive: Any) -> Any:
    """The predictive, or an array that is not empty."""
    if isinstance(predictive, Predictive):
        need(predictive, CLASSES + NUMBERS, "which this score does not know", "classes, numbers or counts")
        return predictive
    return filled(predictive, "predictive")
