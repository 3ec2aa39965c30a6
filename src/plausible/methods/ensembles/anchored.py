"""Anchored ensembles: every member is the mode of a posterior whose prior mean, and whose targets, were drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.core import random
from plausible.core.data import Batch, num_rows
from plausible.core.likelihoods import Gaussian, unscaled
from plausible.core.model import Model
from plausible.core.schedules import Cosine, rate
from plausible.core.serialise import check_count, check_switch, register
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights, clone, tensors
from plausible.engine.method import Fitted, Info, Method, Plan, Run, Stage, Traits, check_choice
from plausible.methods.ensembles.ensemble import Stacked
from plausible.methods.points.map import MAP
from plausible.posteriors.draws import IndependentDraws


@register
@dataclass(frozen=True)
class Anchored(Method):
    """w_k = argmax log p(D + ε_k | w) + log N(w; a_k, Σ),  a_k ~ N(0, Σ) the prior,  ε_k ~ the noise of the targets

    An ensemble whose members are pulled to weights drawn from the prior, not to 0 (Pearce et al. 2020).

    Where data say little, members disagree as the prior does; without anchors they all return to 0. With `noise`, where the
    likelihood is Gaussian, each row's targets are moved by noise of their own in every member: of a linear model the members are
    then exact and independent draws of the posterior (Osband et al. 2018). Without, as in Pearce et al., they are narrower. `mode`
    says how a member is trained, and which rows are held out. The prior must be a centred Gaussian. Cost: that of an ensemble.
    """

    mode: MAP = field(default_factory=MAP)
    members: int = 5  # type: ignore[misc]
    noise: bool = False
    init: Literal["fresh", "given", "prior"] = "fresh"

    name: ClassVar[str] = "anchored"
    traits: ClassVar[Traits] = Traits(divisible=False, bias="exact for linear models, and else near the modes")

    def __post_init__(self) -> None:
        if not isinstance(self.mode, MAP) or self.mode.adversarial:
            raise TypeError(f"Anchored: mode must be MAP(…) without adversarial, which trains the members, got {self.mode!r}")
        check_count(self, "members")
        check_switch(self, "noise")
        check_choice(self, "init", ("fresh", "given", "prior"))

    def stages(self) -> tuple[Stage, ...]:
        return (Stacked(Anchoring(self.mode, self.noise), self.members, self.init),)

    @classmethod
    def conforming(cls) -> Anchored:
        return cls(MAP(epochs=300, batch_size=None, lr=Cosine(0.1)), members=400, noise=True)

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> IndependentDraws:
        return IndependentDraws.of(self, model, fitted)


class AnchoredState(NamedTuple):
    weights: Weights
    buffers: Weights
    optimiser: Any
    anchors: Weights
    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class Anchoring(Stage):
    """The training of one member. Its key decides its anchors and the noise of its targets."""

    mode: MAP
    noise: bool

    traits: ClassVar[Traits] = Traits(divisible=False, noisy=True)

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:
        return self.mode.plan(num_data, per_epoch)

    def prepare(self, model: Model, run: Run[Any]) -> None:
        if model.closed is None:
            raise ValueError(
                f"Anchored: the prior must be a centred Gaussian for every weight, such as priors.Gaussian(), got {model.prior!r}"
            )

    def start(self, model: Model, run: Run[Any], key: Tensor) -> AnchoredState:
        assert model.closed is not None
        known = {name: model.closed[name] for name in model.random if name not in model.likelihood_names and model.closed[name]}
        normal = random.normal(random.fold(key, 19), 0, {name: model.initial[name] for name in known})
        anchors = {name: value * math.sqrt(model.temperature / known[name]) for name, value in normal.items()}
        weights, step = clone(model.initial), torch.zeros((), dtype=torch.int64, device=key.device)
        return AnchoredState(weights, clone(model.buffers), self.mode.optimiser.init(weights), anchors, key.clone(), step)

    def step(self, model: Model, run: Run[Any], state: AnchoredState, batch: Batch) -> tuple[AnchoredState, Info]:
        noisy = self.noise and isinstance(unscaled(model.likelihood), Gaussian)

        def objective(weights: Weights, part: Batch, buffered: Weights, anchors: Weights, key: Tensor) -> tuple[Tensor, Any]:
            buffers = {name: value.clone() for name, value in buffered.items()}  # a training pass writes into them
            outputs = model.outputs({**weights, **buffers}, part.x, train=True)
            if noisy:  # targets moved up are outputs moved down, and the noise of standardised ones is in the units of outputs
                scale = unscaled(model.likelihood)(outputs, model.noise(weights)).stddev
                each = row_noise(part, key).to(outputs.dtype) * math.sqrt(model.temperature)
                if part.weight is not None:  # a row of weight 3 is three rows, of which each has its noise
                    each = each * part.weight.clamp(min=1e-12).rsqrt().view(-1, *[1] * (each.ndim - 1)).to(each.dtype)
                outputs = outputs - scale * each
            rows = model.log_likelihood_of(outputs, weights, part)
            total = (rows if part.weight is None else rows * part.weight).sum() * (model.num_data / num_rows(part.x))
            prior = model.log_prior({name: w - anchors[name] if name in anchors else w for name, w in weights.items()})
            value = -(total + prior) / (model.num_data * model.temperature)
            return value, (total.detach(), prior.detach(), buffers)

        found = value_and_gradient(objective, state.weights, batch, state.buffers, state.anchors, state.key)
        _, (likelihood, prior, buffers), grads = found
        lr = rate(self.mode.lr, state.step, run.steps)
        weights, optimiser = self.mode.optimiser.update(state.weights, grads, state.optimiser, lr, {})
        info = {"log_joint": (likelihood + prior) / model.temperature, "log_likelihood": likelihood, "log_prior": prior}
        return AnchoredState(weights, buffers, optimiser, state.anchors, state.key, state.step + 1), info


# ---------------------------------------------------------------------------------------------------------------------
# Noise that belongs to a row, in whatever batch it comes


def row_noise(batch: Batch, key: Tensor) -> Tensor:
    """N(0, 1) shaped like y: a function of the key and of what is in the row, so that equal rows have equal noise."""
    bits = torch.cat([_bits(part) for part in (*tensors(batch.x), batch.y)], dim=1)
    place = _mixed(torch.arange(bits.shape[1], device=bits.device)) | 1
    row = _mixed((_mixed(bits) * place).sum(1) + key[0].to(torch.int64) * 0x9E3779B9 + key[1].to(torch.int64))
    outputs = torch.arange(math.prod(batch.y.shape[1:]), device=bits.device)
    numbers = _mixed(row.unsqueeze(1) + 0x632BE59BD9B4E019 * (outputs + 1))
    one, two = (((_mixed(numbers + shift) >> 11) & (2**53 - 1)).double() * 2.0**-53 for shift in (1, 2))
    return ((-2 * torch.log1p(-one)).sqrt() * torch.cos(2 * math.pi * two)).view(batch.y.shape)


def _bits(part: Tensor) -> Tensor:
    """What is in each row as whole numbers, [B, n]."""
    flat = part.reshape(part.shape[0], -1)
    return flat.float().contiguous().view(torch.int32).long() if flat.is_floating_point() else flat.long()


def _mixed(number: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014), in whole numbers that wrap around."""
    number = (number ^ ((number >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    number = (number ^ ((number >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return number ^ ((number >> 31) & (2**33 - 1))
