"""What all kinds of dropout share: training that is ended by held-out rows, and noise on the inputs of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from plausible.blocks.stochastic import Noise
from plausible.blocks.unit_noise import Site, alpha_of, survey, with_noisy_inputs
from plausible.core import random
from plausible.core.data import Batch
from plausible.core.model import Model
from plausible.core.networks import Where, choose
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.schedules import Cosine, Schedule
from plausible.core.serialise import check_number
from plausible.core.weights import Weights, clone, select
from plausible.engine.method import BatchSize, Fitted, Patience, Plan, Run, Traits, check_patience, plan_patiently
from plausible.methods.variational.bound import Bound, Terms
from plausible.posteriors.laws import LawPosterior
from plausible.posteriors.unit_noise import UnitNoise

if TYPE_CHECKING:
    from plausible.testing import LinearGaussian

RATE = 0.1
"""Where neither method nor network says one."""


@dataclass(frozen=True, kw_only=True)
class Patient(Bound):
    """The settings of training, with those of `MAP` for its end by held-out rows."""

    epochs: int | None = None
    batch_size: BatchSize = "auto"
    lr: float | Schedule = field(default_factory=lambda: Cosine(5e-3, warmup=0.02))
    optimiser: Optimiser = field(default_factory=AdamW)
    patience: Patience = "auto"
    holdout: float | None = None

    traits: ClassVar[Traits] = replace(Bound.traits, shaping=("holdout",))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patience(self)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return plan_patiently(self, num_data, per_epoch)


class Sites(NamedTuple):
    """Where noise enters, by the name of the weight; empty where the network has dropout of its own."""

    sites: dict[str, Site]


@dataclass(frozen=True, kw_only=True)
class UnitDropout(Patient):
    """E_z log p(D | θ diag(z)) + log p(θ√(1 + α)),  z of mean 1 and variance α for each input of a layer

    The base of dropout methods: a subclass says its `kind` of noise and its `rates`. The second term is E_z log p(θ diag(z)) for
    centred Gaussian priors, and for others the prior at weights of the same mean square.
    """

    where: Where = None

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.where):
            raise TypeError(f"{type(self).__name__}: where must be a pattern of weight names or several, such as '2.weight'")

    def rates(self, parameters: Weights, sites: Mapping[str, Site]) -> Weights:
        """The rate p of each weight, by name: 0-d or [units]."""
        raise NotImplementedError

    def objective_of_rates(self, rates: Weights, sites: Mapping[str, Site]) -> Tensor | float:
        """What the rates themselves add to the bound."""
        return 0.0

    def prepare(self, model: Model, run: Run[Any]) -> Sites:
        return Sites(self._sites(model, run))

    def _sites(self, model: Model, run: Run[Any]) -> dict[str, Site]:
        """Before every layer but the first; of a single layer before that one."""
        example = next(iter(run.data.chunks(2)))
        fixed = {**select(model.initial, model.points), **model.buffers}
        weights = {name: value for name, value in select(model.initial, model.random).items() if value.ndim > 1}
        found = survey(lambda noisy: model.outputs({**model.initial, **fixed, **noisy}, example.x), weights)
        if not found:
            raise ValueError(
                f"{type(self).__name__}: no weight that is inferred has inputs that could be dropped: dropout is for linear, "
                "convolutional, recurrent and attention layers"
            )
        if self.where is not None:
            chosen = choose(select(model.initial, found), self.where, (), "selects no layer for dropout")
            found = {name: found[name] for name in found if name in chosen}
        else:
            found = dict(list(found.items())[1:]) or found
        self._refuse_own_gradients(model, found, example.x)
        return found

    def _refuse_own_gradients(self, model: Model, sites: Mapping[str, Site], x: Any) -> None:
        """A backward pass of the network's own (an ODE's adjoint) differentiates by its parameters, behind which the noise is."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in model.initial.items()}
        rates = {name: torch.full((), RATE, dtype=leaves[name].dtype, device=leaves[name].device) for name in sites}
        noise = Noise(random.key(0, device=model.device), torch.zeros((), dtype=torch.int64, device=model.device))
        noisy = with_noisy_inputs(leaves, sites, rates, noise, "dropout")
        try:
            with torch.enable_grad():
                outputs = model.outputs({**leaves, **model.buffers, **noisy}, x)
                torch.autograd.grad(outputs.sum(), list(leaves.values()), allow_unused=True)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise ValueError(
                f"{type(self).__name__}: the network has a backward pass of its own, as adjoints have, which sees "
                "nothing of noise on inputs: solve by plain autograd (odeint), or use MeanField, IVON or an Ensemble"
            ) from None

    def parameters(self, model: Model, run: Run[Sites], key: Tensor) -> Weights:
        return clone(model.initial)

    def estimate(
        self, model: Model, run: Run[Sites], parameters: Weights, batch: Batch, buffers: Weights, key: Tensor, step: Tensor
    ) -> Terms:
        sites, weights = run.prepared.sites, {name: parameters[name] for name in model.initial}
        rates = self.rates(parameters, sites)
        noisy = with_noisy_inputs(weights, sites, rates, Noise(key, step), self.kind)
        total = model.scaled_log_likelihood({**weights, **buffers, **noisy}, batch, train=True)
        # √(1 + α) = 1/√(1 − p)
        widths = {name: (1 + alpha_of(rate)).sqrt().expand(sites[name].units) for name, rate in rates.items()}
        widened = {name: sites[name].scaled(weights[name], width) for name, width in widths.items()}
        prior = model.log_prior({**weights, **widened})
        bound = (total + prior) / model.temperature + self.objective_of_rates(rates, sites)
        return Terms(bound, {"log_joint": bound, "log_likelihood": total, "log_prior": prior}, buffers)

    def posterior(self, model: Model, run: Run[Sites], fitted: Fitted) -> LawPosterior:
        sites = run.prepared.sites
        means = clone(select(fitted.state.weights, tuple(sites)))
        rates = {
            name: p.detach().expand(sites[name].units).clone() for name, p in self.rates(fitted.state.weights, sites).items()
        }
        law = UnitNoise(means, rates, sites, "gaussian" if self.kind == "gaussian" else "dropout")
        return LawPosterior.of(self, model.restricted(sites), fitted, law)

    @classmethod
    def conforming(cls) -> UnitDropout:
        return cls(epochs=600, batch_size=None, lr=Cosine(0.05))

    def conjugate(self, problem: LinearGaussian) -> tuple[Tensor, Tensor]:
        rate = getattr(self, "rate", None) or RATE
        return self.noisy_ridge(problem, rate / (1 - rate))

    @staticmethod
    def noisy_ridge(problem: LinearGaussian, alpha: float) -> tuple[Tensor, Tensor]:
        """Noise on inputs, averaged, is a penalty besides the prior's: α times the diagonal of the precision that data give."""
        x, y, w = problem.data()
        data = x.T @ (w[:, None] * x) / problem.noise**2
        penalty = alpha * data.diagonal() + (1 + alpha) / problem.scale**2
        mean = torch.linalg.solve(data + torch.diag(penalty), x.T @ (w[:, None] * y) / problem.noise**2).squeeze(1)
        return mean, torch.diag(alpha * mean**2)


def check_rate(method: Any) -> None:
    if method.rate is not None:
        check_number(method, "rate", above=0)
        if not method.rate < 1:
            raise ValueError(
                f"{type(method).__name__}: rate is the share of inputs that is dropped, below 1, got {method.rate}"
            )
