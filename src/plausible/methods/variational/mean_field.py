"""Mean-field variational inference: independent Gaussians over the weights, by gradients of the evidence bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plausible.core.schedules import Cosine
from plausible.core.serialise import register
from plausible.methods.variational.independent import Independent


@register
@dataclass(frozen=True)
class MeanField(Independent):
    """q(w) = Π N(w_i; μ_i, σ_i²),  σ = softplus(ρ),  maximising  E_q log p(D | w) − KL(q ‖ p)

    Independent Gaussians over the weights by stochastic gradients of the evidence bound (Bayes by Backprop, Blundell et al. 2015).

    Means start at the module's weights, scales at `initial_scale`, or with `relative_scale` δ at δ·|w| for pretrained weights.
    `estimator` says how noise enters: "weights" (one draw of the weights a step), "local" (reparameterised outputs) or "flipout";
    weights to which the last two do not apply are sampled, and `posterior.summary()` says which. `kl_weights` is "uniform" (the
    bound), "blundell" (2^{M−i}/(2^M − 1) within an epoch of M batches), a number, or a schedule such as a warm-up. The KL is a
    sum in nats: in closed form for Gaussian, Laplace and flat priors, by the sampled weights for others. `landing` estimates
    all of it by the sampled weights and lets the gradient flow through them alone ("sticking the landing", Roeder et al. 2017),
    which has no variance where q is exact. `empirical_bayes` takes for each weight tensor the scale of a centred Gaussian prior
    that maximises the bound, with "shared" one mean and one scale for all weights (Graves 2011). Cost: `samples` forward and
    backward passes a step (twice that for the last two estimators), and as many normal numbers as weights or outputs.
    """

    name: ClassVar[str] = "mean-field"

    @classmethod
    def conforming(cls) -> MeanField:
        """Full batches, so that noise comes from the weights alone, the rate falling to nothing."""
        return cls(epochs=800, batch_size=None, lr=Cosine(0.05), samples=2, initial_scale=0.1)
