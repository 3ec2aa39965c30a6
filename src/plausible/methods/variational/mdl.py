"""Minimum description length: the noisiest weights that still describe the data, in nats or bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from plausible.blocks.moments.gaussians import RULES
from plausible.blocks.moments.networks import Link
from plausible.blocks.variational import entropy
from plausible.core import likelihoods
from plausible.core import weights as tree
from plausible.core.data import as_data
from plausible.core.model import Model
from plausible.core.optimisers import AdamW, Optimiser
from plausible.core.priors.composed import precision_of
from plausible.core.schedules import Cosine, Schedule
from plausible.core.serialise import check_count, register
from plausible.core.weights import Weights, select
from plausible.engine.method import BatchSize, Fitted, Run, check_choice
from plausible.methods.variational.by_moments import PRIOR, ByMoments, kl
from plausible.posteriors.laws import DiagonalGaussian
from plausible.posteriors.moments import MomentsPosterior
from plausible.posteriors.saving import Content

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@register
@dataclass(frozen=True)
class MDL(ByMoments):
    """description length = E_q[−log p(D | w)] + KL(q ‖ coding prior),  q(w) = Π N(w_i; μ_i, σ_i²)

    The noisiest weights that still describe the data: what a network costs to send, misfits and weights together, with an exact
    expected error (Hinton & van Camp 1993).

    For networks with one hidden layer (or none) and Gaussian noise. Given x the hidden units are independent, so that mean and
    variance of the outputs follow from those of each unit. Weights are sent as noisy values, at KL(q ‖ coding prior) nats by
    bits-back coding. `coding` is "gaussian" (for each weight tensor a centred Gaussian of the best variance, mean(μ² + σ²)),
    "mixture" (`components` Gaussians shared by all weights, which adapt to them) or "prior" (the model's; then this is
    mean-field inference). Over the first `warmup` of the steps the weights' cost rises to its full size, since an adaptive
    coding prior otherwise shrinks with the weights before they have learned anything. Cost a step: two forward and backward
    passes.
    """

    epochs: int | None = None
    batch_size: BatchSize = None
    lr: float | Schedule = field(default_factory=lambda: Cosine(1e-2))
    coding: Literal["gaussian", "mixture", "prior"] = "gaussian"
    components: int = 5
    initial_scale: float = 0.02
    warmup: float = 0.25
    optimiser: Optimiser = field(default_factory=AdamW)

    name: ClassVar[str] = "mdl"
    covariance = "diagonal"  # not a setting: the error needs no more than the variance of each output
    normalises: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "coding", ("gaussian", "mixture", "prior"))
        check_count(self, "components", at_least=2)

    def check_layers(self, model: Model, layers: tuple[Link, ...]) -> None:
        kinds = [type(layer.module) for layer in layers if type(layer.module) is not nn.Flatten]
        hidden = [kind for i, kind in enumerate(kinds) if not (kind is nn.BatchNorm1d and i == 1)]
        plain = [kind for kind in hidden if kind not in RULES]
        if plain not in ([nn.Linear], [nn.Linear, nn.Linear]) or len(hidden) - len(plain) > 1 or hidden[-1] in RULES:
            words = "–".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"MDL: the network is {words}, expected Linear–activation–Linear: one hidden layer, for which the expected error "
                "is exact; DVI takes deeper ones"
            )
        likelihood = likelihoods.unscaled(model.likelihood)
        if not isinstance(likelihood, likelihoods.Gaussian):
            raise ValueError(
                f"MDL: the likelihood is {type(likelihood).__name__}, expected Gaussian, whose expected squared error is exact; "
                "DVI takes other likelihoods"
            )
        if self.coding != "prior" and any(not precision_of(model.prior, n, model.initial[n]) for n in _coded(model.random)):
            raise ValueError(
                f"MDL: coding={self.coding!r} replaces the centred Gaussian prior of the weights by one that fits them, and this "
                "prior is another: use coding='prior'"
            )

    def prior_start(self, model: Model) -> Weights:
        """The mixture: proportions alike, means across the range of the starting weights."""
        if self.coding != "mixture":
            return {}
        values = torch.cat([model.initial[name].flatten() for name in _coded(model.random)])
        scale = values.square().mean().sqrt().clamp_min(1e-2)
        # components spread over two standard deviations of the weights, so that each has some to hold
        places = torch.linspace(-1, 1, self.components, dtype=values.dtype, device=values.device)
        return {
            "logits": torch.zeros_like(places),
            "means": 2 * scale * places,
            "log scales": torch.zeros_like(places) + scale.log(),
        }

    def weights_cost(self, model: Model, means: Weights, scales: Weights, prior: Weights) -> Tensor:
        """The nats that the weights cost, by the coding prior."""
        if self.coding == "prior":
            return kl("MDL", model, means, scales)
        coded = _coded(means)
        rest = [name for name in means if name not in coded]
        cost = kl("MDL", model, select(means, rest), select(scales, rest))
        if self.coding == "mixture":
            each = [mixture_cost(means[n], scales[n], prior, model.temperature).sum() for n in coded]
            return cost + torch.stack(each).sum()
        fits = [0.5 * means[n].numel() * (means[n].square() + scales[n].square()).mean().log() for n in coded]
        count = sum(means[n].numel() for n in coded)
        expected = -torch.stack(fits).sum() - count * (HALF_LOG_2PI + 0.5)
        return cost - entropy(select(scales, coded)) - expected / model.temperature

    @classmethod
    def conforming(cls) -> MDL:
        return cls(epochs=200, batch_size=None, lr=Cosine(0.1), coding="prior")

    def posterior(self, model: Model, run: Run[Any], fitted: Fitted) -> CodedPosterior:
        scales = {name: torch.exp(rho) for name, rho in fitted.state.rhos.items()}
        posterior = CodedPosterior.of(self, model, fitted, DiagonalGaussian.of(model, fitted, scales))
        posterior.coding = tree.clone(fitted.state.part(PRIOR))
        return posterior


def mixture_cost(mean: Tensor, scale: Tensor, mixture: Mapping[str, Tensor], temperature: float = 1.0) -> Tensor:
    """−log Σ_j π_j e^{−KL(q ‖ N_j)}: the nats of one weight under a mixture of Gaussians N_j, for each element of `mean`.

    The weight is sent by component j with probability ∝ π_j e^{−KL_j}, and the choice comes back as free bits; no shorter than
    KL(q ‖ Σ π_j N_j), and equal to it where components do not overlap (Hinton & van Camp 1993, §7).
    """
    centred = mean.unsqueeze(-1) - mixture["means"]
    log_scale = scale.log().unsqueeze(-1)
    variance = torch.exp(2 * mixture["log scales"])
    second = centred * centred + (scale * scale).unsqueeze(-1)
    expected = -HALF_LOG_2PI - mixture["log scales"] - 0.5 * second / variance
    entropies = log_scale + HALF_LOG_2PI + 0.5
    return -entropies.squeeze(-1) - torch.logsumexp(mixture["logits"].log_softmax(-1) + expected, -1) / temperature


def _coded(names: Any) -> list[str]:
    return [name for name in names if not name.startswith("likelihood.")]


class DescriptionLength(NamedTuple):
    """What it costs to send the data: misfits, and the weights with which they were computed."""

    data: float
    weights: float
    unit: str = "nats"

    @property
    def total(self) -> float:
        return self.data + self.weights

    @property
    def bits(self) -> DescriptionLength:
        """The same in bits: nats over log 2."""
        if self.unit == "bits":
            return self
        return DescriptionLength(self.data / math.log(2), self.weights / math.log(2), "bits")


class CodedPosterior(MomentsPosterior):
    """What `MDL` found: q(w), and the `coding` prior's parameters where they were learned."""

    kind = "coded"
    coding: Weights = {}  # noqa: RUF012  replaced, never written to

    def description_length(self, data: Any = None, *, precision: float | None = None) -> DescriptionLength:
        """The cost of the data the network was fitted on, or of `data` (x, y), and that of the weights, in nats.

        Without `data` the misfits are those of the last epoch (in an ensemble, averaged over its members). Real numbers cost −log
        of a density, which may be negative; with targets written to a given `precision`, −log(density · precision) is what each of
        them takes.
        """
        model, method = self.model, self.method
        if not isinstance(method, MDL):
            raise ValueError("the settings of the method are not known, so its coding prior is not either")
        if self.masks:
            raise ValueError("weights that were pruned cannot be sent as noisy values: ask before pruning")
        if precision is not None and not (math.isfinite(precision) and precision > 0):
            raise ValueError(f"precision must be positive and finite, the step to which targets are written, got {precision}")
        with torch.no_grad():
            weights = float(method.weights_cost(model, self.means, self.scales, self.coding))
            if data is None:
                if not self.history.get("log_likelihood"):
                    raise ValueError(
                        "no misfits are known of a member of an ensemble, or of a run that ended in its first epoch: pass data"
                    )
                misfits = -self.history["log_likelihood"][-1]
                count = model.num_data * math.prod(model.likelihood.target_shape((1, *model.output_shape)))
            else:
                first = next(iter(model.initial.values()))
                given = as_data(data, dtype=first.dtype, device=first.device).all()
                y = model.likelihood.check((len(given.y), *model.output_shape), given.y, mask=given.mask)
                variances = {name: scale * scale for name, scale in self.scales.items()}
                scale = model.num_data / len(y)
                means = {**self.points, **self.means}
                expected, _ = method.expected(model, None, means, variances, self.points, given._replace(y=y), train=False)
                count = y.numel() if given.mask is None else int(given.mask.sum())
                misfits = -float(expected) / scale
        if precision is not None:
            # a number written to a step h takes −log(density · h) nats
            misfits -= count * math.log(precision)
        return DescriptionLength(misfits, weights)

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """As for Gaussians, with the description length in nats."""
        report = super().diagnostics(x)
        if isinstance(self.method, MDL) and not self.masks and self.history.get("log_likelihood"):
            length = self.description_length()
            report["description_length"] = {"data": length.data, "weights": length.weights}
        return report

    def content(self) -> Content:
        plain = super().content()
        return replace(plain, tensors={**plain.tensors, "coding": self.coding})

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        posterior = super().rebuilt(method, model, run, content)
        posterior.coding = dict(content.tensors.get("coding", {}))
        return posterior
