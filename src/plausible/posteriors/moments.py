"""Gaussian posteriors of networks through which moments are known: predictions in closed form beside those by draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.moments.expectations import located, noise_variance
from plausible.blocks.moments.gaussians import Moments, Weight
from plausible.blocks.moments.networks import Network, chain, propagate
from plausible.core.data import num_rows, take
from plausible.posteriors.laws import LawPosterior

ROWS = 1024
"""Inputs at a time: a covariance of wide layers takes as many D × D numbers."""


class PredictiveMoments(NamedTuple):
    """Mean and variance of the targets, all [N, K]: variance = epistemic + aleatoric."""

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor

    @property
    def variance(self) -> Tensor:
        return self.epistemic + self.aleatoric


class MomentsPosterior(LawPosterior):
    """q(w) = Π N(w_i; μ_i, σ_i²) with moments of f(x) in closed form: `moments`, `predictive_moments`.

    `functions` and `predict` use draws of the weights, as everywhere.
    """

    kind = "moments"

    def moments(self, x: Any) -> Moments:
        """Mean [N, O] and covariance [N, O, O] of f(x) without sampling, by the settings of the fit."""
        return Moments(*(torch.cat(parts) for parts in zip(*((m.mean, m.matrix) for m in self._propagated(x)))))

    def predictive_moments(self, x: Any) -> PredictiveMoments:
        """Mean and variance of y at x without sampling, its epistemic part Var E(y | f) and its aleatoric part E Var(y | f).

        For Gaussian noise: fixed, learned (E σ² = e^{2μ + 2v} for log σ ~ N(μ, v)), or from the inputs (Σ_mm + e^{⟨ℓ⟩ + Σ_ℓℓ/2} for
        a log variance ℓ); for other likelihoods use `predict`.
        """
        noise = self._likelihood_weights()
        parts = [(*located(self.likelihood, f), noise_variance(self.likelihood, f, noise)) for f in self._propagated(x)]
        return PredictiveMoments(*(torch.cat(each) for each in zip(*parts)))

    def _likelihood_weights(self) -> dict[str, Weight]:
        means, scales, names = self.means, self.scales, self.model.likelihood_names
        return {n: Weight(means[n], scales[n] ** 2) if n in means else Weight(self.points[n]) for n in names}

    def _propagated(self, x: Any) -> list[Moments]:
        inputs = self.inputs(x)
        variances = {name: scale * scale for name, scale in self.scales.items()}
        layers = chain(self.model.network, self.method_name)
        # the points hold the buffers too
        network = Network(layers, {**self.points, **self.means}, variances, self.points)
        full, terms = getattr(self.method, "covariance", "full") == "full", getattr(self.method, "terms", 4)
        with torch.no_grad():
            return [
                propagate(network, take(inputs, slice(start, start + ROWS)), full=full, terms=terms)[0]
                for start in range(0, num_rows(inputs), ROWS)
            ]
