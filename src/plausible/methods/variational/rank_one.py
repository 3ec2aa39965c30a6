"""Rank-1 Bayesian networks: points for the weights, Gaussian factors for outputs and inputs, several components."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from plausible.blocks.families.rank_one import SIDES, RankOneFamily
from plausible.blocks.variational import maximise
from plausible.core import random
from plausible.core.model import Model
from plausible.core.priors import Gaussian
from plausible.core.schedules import Cosine
from plausible.core.serialise import check_count, check_number, register
from plausible.core.weights import Weights, select
from plausible.engine.method import Patience, Plan, Run, Traits, check_patience, plan_patiently
from plausible.methods.variational.reparameterised import Reparameterised, parameters_of

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian


@register
@dataclass(frozen=True)
class Rank1(Reparameterised):
    """W_k = W ∘ (s_k r_kᵀ),  maximising  (1/K) Σ_k [E log p(D | W_k) − KL(q(s_k, r_k) ‖ p)] + log p(W)

    Shared weights trained as points, times Gaussian rank-one factors, in several components (Dusenberry et al. 2020).

    For each random weight with two axes or more s_k multiplies its outputs and r_k its inputs (the channels of convolutions),
    with prior N(1, prior_scale²); W and all other weights are points under the model's prior, biases one for each component
    with `biases`. Points follow single rows of small data: `holdout` and `patience` are those of `MAP`, and end the training by how
    the mean weights predict rows that were set aside, where no `epochs` are given. Every step passes its whole batch through
    every component; draws are from the components in turn. Cost: `components` × `samples` forward and backward passes a step, and
    n + p more means and scales for each component and weight [n, p].
    """

    components: int = 4
    prior_scale: float = 0.1
    spread: float = 0.1
    biases: bool = True
    patience: Patience = "auto"
    holdout: float | None = None

    landing: ClassVar[bool] = False  # type: ignore[misc]  # the KL is exact, and has no log q of the weights
    name: ClassVar[str] = "rank1"
    traits: ClassVar[Traits] = replace(
        Reparameterised.traits,
        shaping=("prior_scale", "spread", "holdout"),
        bias="variances only along the outputs and inputs of each weight, around weights that are points",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "components", at_least=1)
        check_number(self, "prior_scale", above=0)
        check_number(self, "spread", at_least=0)
        if not isinstance(self.biases, bool):
            raise TypeError(f"Rank1: biases must be True or False, got {self.biases!r}")
        check_patience(self)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return plan_patiently(self, num_data, per_epoch)

    def judged(self, model: Model, run: Run[RankOneFamily], variables: Weights) -> Weights:
        return {**select(variables, (*model.points, *model.buffers)), **run.prepared.means(parameters_of(variables))}

    def family(self, weights: Weights) -> RankOneFamily:
        return RankOneFamily(weights, self.components, self.prior_scale, self.spread, self.biases)

    @classmethod
    def conforming(cls) -> Rank1:
        # Full batches; two components, which find the same optimum where there is one
        narrow: dict[str, Any] = {"initial_scale": 0.05, "spread": 0.02}
        return cls(components=2, epochs=150, batch_size=None, lr=Cosine(0.1), samples=2, antithetic=True, **narrow)

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        """Mean and covariance of W ∘ (s rᵀ) at the maximum of the bound, whose likelihood needs the first two moments alone."""
        x, y, example = problem.data()
        start_at = dict(problem.network().named_parameters())["weight"].detach().double()
        one = RankOneFamily({"w": start_at}, 1, self.prior_scale, 0.0, biases=False)
        prior = Gaussian(problem.scale)

        def moments(theta: Weights) -> tuple[Tensor, Tensor]:
            point = theta["point of w"][0]
            (s, s_scale), (r, r_scale) = (one._factor(theta, f"{side} of w") for side in SIDES)
            s, r = s[0], r[0]
            second = (s.square() + s_scale[0].square()) * (torch.outer(r, r) + torch.diag(r_scale[0].square()))
            mean = point * s * r
            return mean, torch.outer(point, point) * second - torch.outer(mean, mean)

        def bound(theta: Weights) -> Tensor:
            mean, covariance = moments(theta)
            squares = (y[:, 0] - x @ mean).square() + ((x @ covariance) * x).sum(1)
            points = one.log_prior_of_points(prior, theta)
            return -0.5 * (example * squares).sum() / problem.noise**2 - one.closed(prior, theta).value + points

        # there is no closed form: the bound is maximised, in float64 and without sampling
        start = one.start(dict(one.like), self.initial_scale, random.key(0))
        return moments(maximise(bound, start))
