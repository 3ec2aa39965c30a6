"""The Laplace approximation as a posterior: N(w*, Λ⁻¹), and the linearised network f(x; w*) + J(x)(w − w*) under it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from plausible.blocks.curvature.dense import Subset
from plausible.blocks.curvature.estimating import choose_jacobian_chunk, is_final
from plausible.blocks.curvature.kronecker import Kronecker
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.low_rank import projected
from plausible.blocks.curvature.structures import Curvature
from plausible.blocks.curvature.tuning import Evidence, gaussian_log_prior
from plausible.blocks.variational import expected_log_prior
from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import num_rows, take
from plausible.core.draws import at_once
from plausible.core.model import Model
from plausible.core.priors import FanIn, Gaussian, Prior
from plausible.core.turns import cached
from plausible.core.weights import Weights
from plausible.posteriors.base import naming_x
from plausible.posteriors.gaussian_predictive import GaussianPredictive
from plausible.posteriors.laws import DRAWS, Law, LawPosterior
from plausible.posteriors.predictive import Draws, Predictive
from plausible.posteriors.pruning import zeroed
from plausible.posteriors.saving import Content

PREDICTIVES = ("linearised", "probit", "bridge", "sampled")
MANY_OUTPUTS = 256
"""Outputs of an input from which their covariances are left out where variances can be had without them."""


class CurvedGaussian(Law):
    """N(w*, Λ⁻¹) with Λ = s·H + diag(τ): `means` w*, `curvature` H, `precision` τ by name, `scale` s."""

    kind = "curved"

    def __init__(self, means: Weights, curvature: Curvature, precision: Weights, scale: float):
        self.means, self.curvature, self.precision, self.scale = means, curvature, precision, scale
        self.settings = {"structure": curvature.structure, "blocks": curvature.describe(), "scale": scale}
        self.independent = curvature.structure == "diag"

    @property
    def tensors(self) -> dict[str, Weights]:
        factors = {name: value.contiguous() for name, value in self.curvature.tensors().items()}
        return {"mean": self.means, "precision": self.precision, "curvature": factors}

    @classmethod
    def rebuilt(cls, method: Any, model: Model, content: Content) -> Self:  # noqa: ARG003
        settings = content.settings
        means = content.group("mean", tree.select(model.initial, model.random))
        curvature = Curvature.restored(str(settings["structure"]), settings["blocks"], content.tensors["curvature"])
        if {name for block in curvature.blocks for name in block.names} != set(means):
            raise ValueError("posterior.json is damaged: its curvature is of other weights than those that are random")
        return cls(means, curvature, content.tensors["precision"], float(settings["scale"]))

    def to(self, device: torch.device) -> Self:
        return type(self)(tree.to(self.means, device), self.curvature.to(device), tree.to(self.precision, device), self.scale)

    @cached
    def factor(self) -> Tensor:
        first = next(iter(self.means.values()))
        return torch.tensor(self.scale, dtype=first.dtype, device=first.device)

    @cached
    @torch.no_grad()
    def scales(self) -> Weights:  # type: ignore[override]
        variances = self.curvature.variances(self.precision, self.factor)
        return {name: variances[name].clamp(min=0).sqrt() for name in self.means}

    @cached
    def noise(self) -> Tensor:
        return next(iter(self.means.values())).new_empty(1).expand(tree.num_elements(self.means))

    @torch.no_grad()
    def sample(self, noise: Tensor, first: int) -> Weights:  # noqa: ARG002
        parts = noise.split_with_sizes([mean.numel() for mean in self.means.values()], dim=1)
        standard = {n: part.reshape(len(part), *m.shape).to(m) for (n, m), part in zip(self.means.items(), parts)}
        moves = self.curvature.draw(standard, self.precision, self.factor)
        return {name: mean + moves[name] for name, mean in self.means.items()}

    def log_density(self, weights: Weights) -> Tensor:
        away = {name: weights[name] - mean for name, mean in self.means.items()}
        # Λ is a sum of structures, whose products are cheap; it is never formed
        product = self.precision_product(away)
        square = torch.stack([(away[name] * product[name]).sum() for name in away]).sum()
        return 0.5 * (self.precision_log_det - square - self.curvature.chosen * math.log(2 * math.pi))

    def precision_product(self, vectors: Weights) -> Weights:
        """Λv for one set of weights, without a leading axis: the curvature of −log of this density."""
        lead = {name: value[None] for name, value in vectors.items()}
        return {n: v[0] for n, v in self.curvature.product(lead, self.precision, self.factor).items()}

    @property
    @torch.no_grad()
    def precision_log_det(self) -> Tensor:
        """Log det Λ: 0-d, in float64."""
        return self.curvature.log_det(self.precision, self.factor)

    def random_elements(self) -> Weights:
        """Masks of a subnetwork; empty where all elements are random."""
        if not any(isinstance(block, Subset) for block in self.curvature.blocks):
            return {}
        return {name: scale > 0 for name, scale in self.scales.items()}

    def kl(self, prior: Prior, masks: Weights, samples: int = 1000, seed: int = 0) -> float:
        """−H(q) − E_q log p, where the prior has no closed form over `samples` draws.

        Elements that are points (pruned, or outside a subnetwork) are left out.
        """
        wide = {name: mean.double() for name, mean in zeroed(self.means, masks).items()}
        scales = {name: scale.double() for name, scale in zeroed(self.scales, masks).items()}
        free = {name: scale > 0 for name, scale in scales.items()}
        log_det = float(self.precision_log_det)
        entropy = 0.5 * self.curvature.chosen * (1 + math.log(2 * math.pi)) - 0.5 * log_det
        if all(gaussian_rule(prior, name) for name in wide):
            # precisions of a tempered posterior are tempered too; the prior's own are meant here
            tau = {name: value.double() / self.scale for name, value in self.precision.items()}
            residuals = {name: mean - rule_centre(prior, name, mean) for name, mean in wide.items()}
            spread = sum(0.5 * (tau[n] * s.square()).sum() for n, s in scales.items())
            return float(-entropy - (gaussian_log_prior(residuals, tau, free) - spread))
        closed, rest = expected_log_prior(prior, wide, {n: s.clamp(min=1e-150) for n, s in scales.items()})
        # what points added is taken out again: they have no density
        for name in (n for n in free if n not in rest and not bool(free[n].all())):
            closed = closed - prior.elementwise(name, wide[name])[~free[name]].sum()
        # a prior that ties weights together needs draws of all of them at once
        if rest and any(not getattr(prior.rule(name), "independent", True) for name in rest):
            whole = zeroed(self.draws(0, samples, seed), masks)
            each = torch.func.vmap(lambda w: prior.log_prob(w))(tree.select(whole, rest))
            closed = closed + each.double().mean()
        elif rest:
            stream = random.generator(seed, 11)
            for _ in range(samples):
                for n in rest:
                    noise = torch.randn(wide[n].shape, generator=stream, dtype=torch.float64).to(wide[n])
                    each = prior.elementwise(n, wide[n] + scales[n] * noise)
                    closed = closed + each[free[n]].sum() / samples
        return float(-entropy - closed)

    def status(self, name: str) -> str:
        words = {"dense": "full covariance", "kronecker": "Kronecker factors", "low-rank": "low rank", "subset": "subnetwork"}
        block = next((b for b in self.curvature.blocks if name in b.names), None)
        return "inferred" if block is None else f"inferred, {words.get(block.kind, block.kind)}"


class LaplacePosterior(LawPosterior):
    """The Gaussian around a mode, seen through the linearised network.

    Functions are f(x; w*) + J(x)(w − w*), or with `predictive="sampled"` those of the network itself. `predict(x)` is then in
    closed form; with `draws` it is the mixture over that many functions. `evidence` takes log p(D) apart, `report` says how near
    the mode the weights are.
    """

    kind = "laplace"
    law: CurvedGaussian

    def __init__(
        self,
        method: Any,
        model: Model,
        run: Mapping[str, Any],
        law: CurvedGaussian,
        points: Weights,
        predictive: str,
        evidence: Evidence | None = None,
        report: Mapping[str, Any] | None = None,
    ):
        super().__init__(method, model, run, law, points)
        self.predictive, self.evidence, self.report = predictive, evidence, dict(report or {})
        self.log_evidence = None if evidence is None else float(evidence.total)
        self._at: Linearisation | None = None

    def content(self) -> Content:
        plain = super().content()
        evidence = None if self.evidence is None else [float(v) for v in self.evidence]
        seen = {"predictive": self.predictive, "report": self.report, "evidence": evidence}
        return replace(plain, settings={**plain.settings, **seen})

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        plain, settings = LawPosterior.rebuilt(method, model, run, content), content.settings
        evidence = settings["evidence"]
        parts = None if evidence is None else Evidence(*(torch.tensor(v, dtype=torch.float64) for v in evidence))
        law: Any = plain.law
        return cls(method, model, run, law, plain.points, str(settings["predictive"]), parts, settings["report"])

    @property
    def curvature(self) -> Curvature:
        return self.law.curvature

    @property
    def precision(self) -> Weights:
        """τ of the prior, by name."""
        return self.law.precision

    @property
    def scale(self) -> float:
        """What the curvature of the likelihood is multiplied by: 1, or 1/temperature."""
        return self.law.scale

    def precision_product(self, vectors: Weights) -> Weights:
        """Λv for one set of weights, without a leading axis: the curvature of −log of this posterior."""
        return self.law.precision_product(vectors)

    @property
    def precision_log_det(self) -> Tensor:
        """Log det Λ: 0-d, in float64."""
        return self.law.precision_log_det

    @property
    def linearised(self) -> bool:
        """Whether functions are those of the linearised network."""
        return self.predictive != "sampled"

    def with_predictive(self, predictive: str) -> LaplacePosterior:
        """The same Gaussian over the weights, seen by another of the predictives "linearised", "probit", "bridge" and "sampled"."""
        if predictive not in PREDICTIVES:
            raise ValueError(f"predictive must be one of {', '.join(map(repr, PREDICTIVES))}, got {predictive!r}")
        other = copy(self)
        other.predictive = predictive
        return other

    def _linearisation(self, x: Any) -> Linearisation:
        if self._at is None:
            self._at = Linearisation(self.model, {**self.means, **self.points}, take(x, slice(0, 3)))
        return self._at

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        """Draws of the linearised network by products J·(w − w*); those of the network itself as every law over weights."""
        if not self.linearised:
            return super().evaluate(inputs, draws, seed, batch_size)
        total, rows, means = self.num_draws(draws), num_rows(inputs), self.means
        at = self._linearisation(inputs)
        size = batch_size or choose_jacobian_chunk(at, math.prod(self.model.output_shape), self.device)
        # as many draws at a time as fit beside the weights; all of them are needed for each block of inputs
        step = at_once(tree.num_elements(means))
        blocks = []
        for first in range(0, total, step):
            drawn = self.kept(self.law.draws(first, min(step, total - first), seed))
            blocks.append({name: drawn[name] - mean for name, mean in means.items()})
        outputs: Tensor | None = None
        for start in range(0, rows, size):
            with torch.enable_grad():
                f, parts = at(take(inputs, slice(start, start + size)), unit_columns)
            self.check_shape(f.shape[1:])
            along = [torch.stack([projected(part, delta) for part in parts]).sum(0) for delta in blocks]  # [S, K, B] each
            moved = torch.cat(along).transpose(1, 2)
            if outputs is None:
                outputs = f.new_empty(total, rows, *f.shape[1:])
            outputs[:, start : start + size] = f + moved.reshape(total, *f.shape)
        assert outputs is not None
        noise = {name: self.points[name] for name in self.model.likelihood_names}
        return Draws(outputs, {name: value.expand(total, *value.shape) for name, value in noise.items()})

    def moments(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean [N, *outputs] and covariance [N, P, P] of f(x), over the P outputs of each input.

        Of a last layer with more than 256 outputs variances [N, *outputs] alone.
        """
        return self._moments(self.inputs(x))

    def _moments(self, inputs: Any) -> tuple[Tensor, Tensor]:
        at = self._linearisation(inputs)
        columns = math.prod(self.model.output_shape)
        known = all(isinstance(block, Kronecker) for block in self.curvature.blocks)
        many = columns > MANY_OUTPUTS and known and is_final(at, self.model)
        size = choose_jacobian_chunk(at, 1 if many else columns, self.device)
        means, covariances = [], []
        for start in range(0, num_rows(inputs), size):
            x = take(inputs, slice(start, start + size))
            # the Jacobian of a last layer is its input, which one backward pass of zeros records
            f, parts = at(x, (lambda f: torch.zeros_like(f)[None]) if many else unit_columns)
            with torch.no_grad():
                if many:
                    inner = parts[0].columns[:, 0, 0]
                    covariances.append(_final_variances(self.curvature.blocks, inner, self.precision, self.law.factor))
                else:
                    covariances.append(self.curvature.covariance(parts, self.precision, self.law.factor))
            means.append(f)
        return torch.cat(means), torch.cat(covariances)

    def predict(self, x: Any, draws: int | None = None, seed: int = 0, batch_size: int | None = None) -> Predictive:
        """In closed form, or with `draws` (and where functions are sampled) the mixture over that many functions."""
        if not self.linearised or draws is not None:
            return super().predict(x, draws, seed, batch_size)
        inputs, _, shape = self._asked(x, draws, seed, batch_size)
        if shape != self.model.output_shape:
            raise ValueError(
                f"x gives outputs of shape {shape} per example and the fit had {self.model.output_shape}: predictions in "
                "closed form are for that; pass draws=, or fit with predictive='sampled'"
            )

        def moments(rows: slice) -> tuple[Tensor, Tensor]:
            with naming_x():
                return self._moments(take(inputs, rows))

        return GaussianPredictive(
            self.likelihood,
            moments,
            num_inputs=num_rows(inputs),
            output_shape=self.model.output_shape,
            noise={name: self.points[name] for name in self.model.likelihood_names},
            way="integral" if self.predictive == "linearised" else self.predictive,  # type: ignore[arg-type]
            draws=lambda rows: self._evaluated(take(inputs, rows), None, seed, batch_size),
            num_draws=DRAWS,
            seed=seed,
        )

    def log_marginal(self, precision: Mapping[str, Tensor] | None = None) -> Tensor:
        """Log p(D) with these precisions of a Gaussian prior (default: its own), at the same mode: 0-d, differentiable in them.

        Given for every weight tensor, as one number or one for each element.
        """
        if self.evidence is None:
            raise ValueError("this posterior has no evidence: it was tempered")
        if not all(gaussian_rule(self.model.prior, name) for name in self.means):
            raise ValueError(f"log_marginal is for Gaussian priors, which have precisions; this one is {self.model.prior}")
        tau, means = dict(self.precision if precision is None else precision), self.means
        if set(tau) != set(means):
            raise ValueError(f"precision must be given for the weights {', '.join(means)}, got {', '.join(tau)}")
        residuals = {n: m - centre(self.model, n) for n, m in means.items()}
        prior = gaussian_log_prior(residuals, tau, self.law.random_elements())
        # log of the posterior's volume: (2π)^{k/2} det Λ^{−½}
        volume = 0.5 * self.curvature.chosen * math.log(2 * math.pi) - 0.5 * self.curvature.log_det(tau, self.law.factor)
        return self.evidence.log_likelihood.to(prior) + prior + volume

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Also `gradient_norm` of the log joint at the mode, `distance`: how far from it, in posterior deviations, and `columns`.

        These are the backward passes that an example took on average, where there is one for each column of the outputs' Fisher.
        """
        return super().diagnostics(x) | self.report | {"effective": self.effective}

    @cached
    def effective(self) -> float:
        """How many weights the data, and not the prior, determine: Σ 1 − τ_i (Λ⁻¹)_ii (MacKay 1992)."""
        masks = self.law.random_elements()
        each = {n: 1 - self.precision[n] * s.square() for n, s in self.scales.items()}
        return sum(float((v[masks[n]] if n in masks else v).double().sum()) for n, v in each.items())


def unit_columns(f: Tensor) -> Tensor:
    """One column for each output: [P, B, *outputs]."""
    count = math.prod(f.shape[1:])
    return torch.eye(count, dtype=f.dtype, device=f.device).reshape(count, 1, *f.shape[1:]).expand(-1, len(f), *f.shape[1:])


def _final_variances(blocks: Any, columns: Tensor, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
    """Of a last layer, whose weight and bias are in one block or in two: [B, out]."""
    if len(blocks) == 1:
        return blocks[0].final(columns, precision, scale)
    return blocks[0].final(columns[:, :-1], precision, scale) + blocks[1].final(columns[:, -1:], precision, scale)


def gaussian_rule(prior: Prior, name: str) -> bool:
    """Whether the prior of this weight is Gaussian."""
    rule: Any = prior.rule(name)
    while isinstance(rule, FanIn):
        rule = rule.prior.rule(name)
    return isinstance(rule, Gaussian)


def rule_centre(prior: Prior, name: str, weight: Tensor) -> float:
    """The centre of a Gaussian prior."""
    rule: Any = prior.rule(name)
    factor = 1.0
    while isinstance(rule, FanIn):
        factor *= math.prod(weight.shape[1:]) ** -0.5 if weight.ndim > 1 else 1.0
        rule = rule.prior.rule(name)
    return factor * float(getattr(rule, "loc", 0.0))


def centre(model: Model, name: str) -> float:
    """The centre of the Gaussian prior of this weight."""
    return rule_centre(model.prior, name, model.initial[name])
