"""What is known at a mode: the curvature there, the prior's precisions, the evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plausible.blocks.curvature.estimating import Tally, start
from plausible.blocks.curvature.products import log_joint_gradient, log_prior_gradient
from plausible.blocks.curvature.structures import Curvature, added
from plausible.blocks.curvature.tuning import Evidence, Tune, gaussian_log_prior, tune
from plausible.core.data import Batch, Data, Estimator, accumulate, take
from plausible.core.likelihoods import LOG_SCALE, unscaled
from plausible.core.likelihoods import Gaussian as Normal
from plausible.core.model import Model
from plausible.core.priors import Gaussian, Hierarchical, Prior
from plausible.core.priors.composed import by_name, leaves
from plausible.core.priors.earlier import earlier_posterior
from plausible.core.special import flushed, widest
from plausible.core.weights import Weights
from plausible.core.words import log
from plausible.posteriors import doubts
from plausible.posteriors.linearised import CurvedGaussian, LaplacePosterior, centre, gaussian_rule, rule_centre
from plausible.posteriors.verdicts import Verdict

if TYPE_CHECKING:
    from plausible.methods.laplace.laplace import Laplace


FAR = 0.3
"""Posterior standard deviations from the mode, root mean square over the weights, from which a warning is due."""


@dataclass
class Mode:
    """Weights at a mode, the curvature there, and the precisions of the prior: from these follow the evidence and the posterior.

    Λ = scale · curvature + diag(precision). `started` says how to get one; `judge` then fills in `log_likelihood`, `log_det` and
    the `report`, without which there is no evidence. `tally` is what the pass over the data added up beside the curvature.
    """

    method: Laplace
    model: Model
    weights: Weights
    data: Data
    names: tuple[str, ...]
    curvature: Curvature
    precision: Weights
    scale: float
    tally: Tally
    report: dict[str, Any] = field(default_factory=dict)
    log_likelihood: Tensor | None = None
    log_det: Tensor | None = None

    @classmethod
    def started(
        cls, method: Laplace, model: Model, weights: Weights, data: Data, names: tuple[str, ...], chosen: Tensor | None = None
    ) -> tuple[Estimator[Curvature], Callable[[Curvature], Mode]]:
        """What finds the curvature at these weights, to be fed with the data, and a function from its result to the mode."""
        restricted = model.restricted(names)
        earlier = earlier_posterior(model.prior, names, weights)
        if earlier is None:
            precision = prior_precision(restricted, weights, names, method.structure)
        else:
            precision = dict(earlier.precision)
        tally = Tally()
        how = {
            name: getattr(method, name)
            for name in ("structure", "curvature", "sharing", "rank", "chunk", "negligible", "columns")
        }
        estimator = start(restricted, weights, data, precision=precision, chosen=chosen, tally=tally, **how)

        def conclude(curvature: Curvature) -> Mode:
            scale = 1.0 / float(model.temperature)
            tempered = {name: value * scale for name, value in precision.items()}
            if earlier is not None:  # what its data and these say together
                curvature, scale = added(earlier.curvature, curvature, (earlier.scale * scale, scale)), 1.0
            return cls(method, model, weights, data, names, curvature, tempered, scale, tally)

        return estimator, conclude

    # A mode as named tensors, and back: what one stage hands to the next, and what checkpoints hold

    def tensors(self) -> Weights:
        first = self.weights[self.names[0]]
        curvature = {"structure": self.curvature.structure, "blocks": self.curvature.describe()}
        about = json.dumps({**curvature, "scale": self.scale, "report": self.report}).encode()
        assert self.log_likelihood is not None
        assert self.log_det is not None
        # stages hand on tensors alone, so words travel as bytes
        layout = torch.tensor(list(about), dtype=torch.uint8, device=first.device)
        numbers = {"log likelihood": self.log_likelihood, "log det": self.log_det, "layout": layout}
        tensors = {f"weight.{n}": v for n, v in self.weights.items()} | {f"precision.{n}": v for n, v in self.precision.items()}
        tensors |= {f"curvature.{n}": v for n, v in self.curvature.tensors().items()}
        return {**tensors, **numbers}

    @classmethod
    def restored(cls, method: Laplace, model: Model, data: Data, names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Mode:
        about = json.loads(bytes(tensors["layout"].tolist()))
        parts: dict[str, Weights] = {"weight": {}, "precision": {}, "curvature": {}}
        for key, value in tensors.items():
            part, dot, name = key.partition(".")
            if dot:
                parts[part][name] = value
        curvature = Curvature.restored(about["structure"], about["blocks"], parts["curvature"])
        weights, precision = parts["weight"], parts["precision"]
        mode = cls(method, model, weights, data, names, curvature, precision, float(about["scale"]), Tally(), about["report"])
        mode.log_likelihood, mode.log_det = tensors["log likelihood"].cpu(), tensors["log det"].cpu()
        return mode

    @property
    def factor(self) -> Tensor:
        """`scale` as a tensor of the weights' type, on their device."""
        first = self.weights[self.names[0]]
        return torch.tensor(self.scale, dtype=first.dtype, device=first.device)

    def tuned(self, how: Tune | None) -> tuple[Weights, Weights]:
        """The precisions of the prior that maximise the evidence at this mode, and the weights with the noise that does."""
        residuals = {n: self.weights[n] - centre(self.model, n) for n in self.names}
        if self.curvature.chosen < self.curvature.size:  # the other elements are points
            # their distance from the prior's centre must not pull at its precision
            free = self.curvature.variances(self.precision, self.factor)
            residuals = {n: torch.where(free[n] > 0, r, 0.0) for n, r in residuals.items()}
        tunable = tunable_noise(self.model)
        squares, count = _standardised_squares(self.model, self.weights, self.data) if tunable else (None, 0.0)
        best = tune(self.curvature, residuals, self.precision, self.factor, how, squares, count)
        weights = dict(self.weights)
        for name in self.model.likelihood_names if tunable else ():
            weights[name] = weights[name] + 0.5 * math.log(best.variance)
        return best.precision, weights

    def judge(self) -> None:
        """Fill in the log-likelihood, log det Λ, and in `report` how far these weights are from a mode.

        A ValueError where some weights have infinite variance, since neither data nor prior say anything about them.
        """
        if self.tally.log_likelihood is not None:
            self.log_likelihood = self.tally.log_likelihood.cpu()
            # the pass that added up the curvature has added up slope and log-likelihood on its way
            _, pull = log_prior_gradient(self.model, self.weights)
            slope = self.tally.gradient
            gradient = {n: flushed((slope.pop(n) + pull.pop(n)).div_(self.model.temperature)) for n in self.names}
        else:
            value, gradient = log_joint_gradient(self.model, self.weights, self.data)
            prior = self.model.log_prior(self.weights).detach().double()
            self.log_likelihood = (value.double() * self.model.temperature - prior).cpu()
        with torch.no_grad():
            # gᵀΛ⁻¹g: how far a Newton step would go, in posterior standard deviations
            square = float(self.curvature.quadratic({n: gradient[n] for n in self.names}, self.precision, self.factor))
            self.log_det = self.curvature.log_det(self.precision, self.factor).cpu()
        if not (math.isfinite(square) and math.isfinite(float(self.log_det))):
            raise ValueError(
                "neither the data nor the prior say anything about some weights, so their variance is infinite: use a proper "
                "prior, e.g. prior=priors.Gaussian(1.0)"
            )
        norms = [torch.linalg.vector_norm(gradient[n], dtype=widest(gradient[n].device)) for n in self.names]
        if self.tally.columns is not None:
            self.report["columns"] = self.tally.columns
        self.report["gradient_norm"] = float(torch.stack(norms).norm())
        self.report["distance"] = math.sqrt(max(square, 0.0) / self.curvature.chosen)

    def better(self, other: Mode) -> bool:
        """Whether the evidence is as high as that of `other`, to a tenth of a nat; yes for tempered models, which have none."""
        here, there = self.evidence(), other.evidence()
        return here is None or there is None or float(here.total) > float(there.total) - 0.1

    def warn(self) -> None:
        """Warn where these weights are far from a mode."""
        if self.report["distance"] > FAR:
            norm, away = self.report["gradient_norm"], self.report["distance"]
            headline = "The network is not at a mode of this posterior: the gradient of the log joint has norm "
            headline += f"{norm:.3g}, and weights are about {away:.2g} posterior standard deviations away on average."
            why = "The Gaussian is centred at the wrong place and the evidence is off."
            what = "Train longer, or use the prior (weight decay) that the network was trained with."
            doubts.warn([Verdict("unclear", headline, why, what)])

    def evidence(self) -> Evidence | None:
        """Log p(D), taken apart; None for tempered models."""
        if self.model.temperature != 1.0:
            return None
        assert self.log_likelihood is not None
        assert self.log_det is not None
        with torch.no_grad():
            count = self.curvature.chosen
            volume = 0.5 * count * math.log(2 * math.pi) - 0.5 * self.log_det
            # elements outside of a subnetwork are points, which the evidence is given
            masks = {}
            if count < self.curvature.size:
                masks = {n: v > 0 for n, v in self.curvature.variances(self.precision, self.factor).items()}
            if all(gaussian_rule(self.model.prior, n) for n in self.names):
                residuals = {n: self.weights[n] - centre(self.model, n) for n in self.names}
                prior = gaussian_log_prior(residuals, self.precision, masks).cpu()
            elif any(not self.model.prior.rule(n).independent for n in self.names):
                prior = self.model.prior.log_prob({n: self.weights[n] for n in self.names}).double().cpu()
            else:
                each = {n: self.model.prior.elementwise(n, self.weights[n].double()) for n in self.names}
                prior = torch.stack([(v[masks[n]] if n in masks else v).sum().double() for n, v in each.items()]).sum().cpu()
        return Evidence(self.log_likelihood, prior, volume)

    def posterior(self, record: Mapping[str, Any]) -> LaplacePosterior:
        model = self.model.restricted(self.names)
        if isinstance(model.prior, Relevance):  # the precisions are in the posterior; what is saved has no room for them
            model = model.with_settings(prior=model.prior.base)
        means = {n: self.weights[n] for n in self.names}
        points = {n: self.weights[n] for n in (*model.points, *model.buffers)}
        law, predictive = CurvedGaussian(means, self.curvature, self.precision, self.scale), self.method.predictive
        return LaplacePosterior(self.method, model, record, law, points, predictive, self.evidence(), self.report)


class Relevance(Prior):
    """N(w; loc, 1/τ) with a precision for every element of the weights in `precision`; the others follow `base`."""

    def __init__(self, base: Prior, precision: Weights):
        self.base, self.tau = base, precision

    def rule(self, name: str) -> Prior:
        return self.base.rule(name)

    def elementwise(self, name: str, weight: Tensor) -> Tensor:
        if name not in self.tau:
            return self.base.elementwise(name, weight)
        tau = self.tau[name].to(weight)
        return 0.5 * (tau / (2 * math.pi)).log() - 0.5 * tau * (weight - rule_centre(self.base, name, weight)).square()

    def draw(self, name: str, like: Tensor, generator: torch.Generator, draws: tuple[int, ...]) -> Tensor:
        if name not in self.tau:
            return self.base.draw(name, like, generator, draws)
        noise = torch.randn((*draws, *like.shape), generator=generator, device=generator.device)
        return rule_centre(self.base, name, like) + noise * self.tau[name].to(noise).rsqrt()


def check_gaussian(model: Model) -> None:
    """Refuse priors that have no precision to tune."""
    for name in model.random:
        if not name.startswith("likelihood.") and not gaussian_rule(model.prior, name):
            raise ValueError(
                f"Laplace: tune needs Gaussian priors, whose precisions it sets; the prior of {name!r} is {model.prior.rule(name)}"
            )


def all_gaussian(model: Model) -> bool:
    """Whether every random weight of the network has a Gaussian prior."""
    return all(n.startswith("likelihood.") or gaussian_rule(model.prior, n) for n in model.random)


def prior_precision(model: Model, weights: Weights, names: tuple[str, ...], structure: str) -> Weights:
    """−∂² log p(w)/∂w² of each element; a 0-d tensor where all elements of a weight have the same.

    Kronecker factors take the mean over a layer. Priors with heavy tails curve the other way far out; there it counts as 0. Under
    hierarchical priors it is E(τ | w), the curvature of the Gaussian that they are given their precisions.
    """
    precisions = _expected_precisions(model, weights, names)
    for name in (name for name in names if name not in precisions):
        leaf = weights[name].detach()
        if leaf.ndim and gaussian_rule(model.prior, name) and not isinstance(model.prior, Relevance):
            leaf = leaf[:1]  # its elements have one precision, and the fan-in is that of any row
        leaf = leaf.double().requires_grad_()
        with torch.enable_grad():
            total = model.prior.elementwise(name, leaf).sum() + 0 * leaf.sum()  # a flat prior has no graph of its own
            slope = torch.autograd.grad(total, leaf, create_graph=True)[0]
            second = torch.autograd.grad(slope.sum(), leaf, allow_unused=True)[0] if slope.requires_grad else None
        value = torch.zeros_like(leaf) if second is None else -second.detach()
        if negative := int((value < 0).sum()):
            log.warning(
                "the prior of %s is not log-concave at %d of %d weights: it counts as flat there", name, negative, value.numel()
            )
        precisions[name] = value.clamp(min=0).to(weights[name].dtype)
    for name, value in precisions.items():
        if bool(torch.isclose(value, value.flatten()[0], rtol=1e-6, atol=0).all()):
            precisions[name] = value.flatten()[0].clone()  # and not the mean, which rounds
        elif structure in ("kron", "ekfac"):
            log.warning("Kronecker factors take the mean curvature of the prior over %s", name)
            precisions[name] = value.mean()
    return precisions


def _expected_precisions(model: Model, weights: Weights, names: tuple[str, ...]) -> Weights:
    """E(τ | w) of weights with hierarchical priors, shaped like them."""
    expected = {}
    for leaf in leaves(model.prior, {name: weights[name] for name in model.initial}):
        if isinstance(leaf.prior, Hierarchical):
            scaled = {n: weights[n].detach().double() * factor**0.5 for n, factor in leaf.factors.items()}
            for n, value in leaf.prior.expected_precision(scaled).items():
                if n in names:
                    expected[n] = (value * leaf.factors[n]).expand(weights[n].shape).to(weights[n].dtype).contiguous()
    return expected


def with_precision(model: Model, precision: Weights, names: tuple[str, ...]) -> Model:
    """The model with Gaussian priors of these precisions."""
    if any(value.ndim for value in precision.values()):
        base = model.prior.base if isinstance(model.prior, Relevance) else model.prior
        return model.with_settings(prior=Relevance(base, dict(precision)))
    tuned = [(n, Gaussian(float(precision[n]) ** -0.5, centre(model, n))) for n in names]
    rest = [(n, model.prior.rule(n)) for n in model.initial if n not in names]
    return model.with_settings(prior=by_name(dict(tuned + rest)))


def tunable_noise(model: Model) -> bool:
    """Whether the likelihood is Gaussian with one learned scale."""
    likelihood = unscaled(model.likelihood)
    return isinstance(likelihood, Normal) and likelihood.scale == "learned" and LOG_SCALE in model.initial


def _standardised_squares(model: Model, weights: Weights, data: Data) -> tuple[float, float]:
    """Σ weight·(y − f)²/σ² and how many targets."""

    def sums(batch: Batch) -> Tensor:
        f = model.outputs(weights, batch.x)
        z = (f - model.likelihood.standardised(batch.y)[1].to(f.dtype)) * torch.exp(-weights[LOG_SCALE])
        weight = torch.ones_like(z) if batch.weight is None else batch.weight.reshape(-1, *[1] * (z.ndim - 1)).expand_as(z)
        if batch.mask is not None:
            weight = weight * batch.mask
        return torch.stack([(z.double().square() * weight).sum(), weight.double().sum()])

    total, count = accumulate(sums, data).tolist()
    return total, count


def widest_elements(diagonal: Curvature, precision: Weights, count: int) -> Tensor:
    """Numbers of the `count` elements with the largest marginal variance, by a diagonal curvature, in the order of the layers."""
    first = next(iter(precision.values()))
    variances = diagonal.variances(precision, torch.ones((), dtype=first.dtype, device=first.device))
    whole = torch.cat([variances[n].reshape(-1) for block in diagonal.blocks for n in block.names])
    if count > len(whole):
        raise ValueError(f"Laplace: where={count} asks for more weights than there are ({len(whole):,})")
    return whole.topk(count).indices.sort().values


def check_deterministic(model: Model, weights: Weights, data: Data) -> None:
    """Refuse networks that give other outputs the second time: they have no curvature."""
    # two rows are enough: what is random differs in the first already
    x = next(iter(data.chunks(2))).x
    with torch.no_grad():
        first, second = (model.outputs(weights, take(x, slice(0, 2))) for _ in range(2))
    if not torch.equal(first, second):
        raise ValueError(
            "the network gives different outputs for the same inputs, also in evaluation mode: its curvature is not defined; "
            "remove what draws random numbers there (functional dropout with training=True, say)"
        )
