"""The Laplace approximation as a posterior: N(w*, Λ⁻¹), and the linearised network f(x; w*) + J(x)(w − w*) under it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plausible.blocks.curvature.dense import Subset
from plausible.blocks.curvature.estimating import choose_chunk, is_final
from plausible.blocks.curvature.kronecker import Kronecker
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.low_rank import projected
from plausible.blocks.curvature.structures import Curvature
from plausible.blocks.curvature.tuning import Evidence, gaussian_log_prior
from plausible.blocks.variational import expected_log_prior
from plausible.core import random, storage
from plausible.core import weights as tree
from plausible.core.data import num_rows, take
from plausible.core.model import Model
from plausible.core.priors import FanIn, Gaussian, Prior
from plausible.core.weights import Weights
from plausible.posteriors.base import _check_draws, _running
from plausible.posteriors.fresh import DRAWS, FreshDraws
from plausible.posteriors.gaussian_predictive import GaussianPredictive
from plausible.posteriors.predictive import Draws, Predictive

MANY_OUTPUTS = 256
"""Outputs of an input from which their covariances are left out where variances can be had without them."""


class LaplacePosterior(FreshDraws):
    """N(w*, Λ⁻¹) with Λ = s·H + diag(τ): `means` w*, `curvature` H, `precision` τ by name, `scale` s.

    Functions are those of the linearised network, f(x; w*) + J(x)(w − w*), or with `predictive="sampled"` of the network itself.
    `predict(x)` is then in closed form; with `draws` it is the mixture over that many functions.
    """

    kind = "laplace"

    def __init__(
        self,
        method: Any,
        model: Model,
        run: Mapping[str, Any],
        means: Weights,
        points: Weights,
        curvature: Curvature,
        precision: Weights,
        scale: float,
        predictive: str,
        evidence: Evidence | None = None,
        report: Mapping[str, Any] | None = None,
    ):
        super().__init__(method, model, run)
        self.means, self.points, self.curvature, self.precision = means, points, curvature, precision
        self.scale, self.predictive = scale, predictive
        self.evidence = evidence
        self.report = dict(report or {})
        self.log_evidence = None if evidence is None else float(evidence.total)
        self._at: Linearisation | None = None

    # -----------------------------------------------------------------------------------------------------------------
    # Weights

    @property
    def _factor(self) -> Tensor:
        first = next(iter(self.means.values()))
        return torch.tensor(self.scale, dtype=first.dtype, device=first.device)

    @cached_property
    def scales(self) -> Weights:  # type: ignore[override]
        """Standard deviations of the weights, by name."""
        with torch.no_grad():
            found = {n: v.clamp(min=0).sqrt() for n, v in self.curvature.variances(self.precision, self._factor).items()}
        return self._kept({name: found[name] for name in self.means})

    def _sampled(self, first: int, count: int, seed: int) -> Weights:
        """Draws number first … first+count−1, stacked, with the points beside them."""
        sizes = [mean.numel() for mean in self.means.values()]
        noise = self._noise(first, count, seed, sum(sizes), next(iter(self.means.values())))
        parts = noise.split_with_sizes(sizes, dim=1)
        xi = {n: part.reshape(count, *m.shape).to(m) for (n, m), part in zip(self.means.items(), parts)}
        with torch.no_grad():
            moved = self.curvature.draw(xi, self.precision, self._factor)
        drawn = self._kept({name: mean + moved[name] for name, mean in self.means.items()})
        return drawn | {name: value.expand(count, *value.shape) for name, value in self.points.items()}

    def precision_product(self, vectors: Weights) -> Weights:
        """Λv for one set of weights, without a leading axis: the curvature of −log of this posterior."""
        lead = {name: value[None] for name, value in vectors.items()}
        return {n: v[0] for n, v in self.curvature.product(lead, self.precision, self._factor).items()}

    @property
    def precision_log_det(self) -> Tensor:
        """Log det Λ: 0-d, in float64."""
        with torch.no_grad():
            return self.curvature.log_det(self.precision, self._factor)

    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats: −H(q) − E_q log p, where the prior has no closed form over `samples` draws.

        Elements that are points (pruned, or outside a subnetwork) are left out.
        """
        wide = {name: mean.double() for name, mean in self.means.items()}
        scales = {name: scale.double() for name, scale in self.scales.items()}
        free = {name: scale > 0 for name, scale in scales.items()}
        if all(gaussian_rule(self.model.prior, name) for name in wide):
            tau = {name: value.double() / self.scale for name, value in self.precision.items()}
            residuals = {name: mean - centre(self.model, name) for name, mean in wide.items()}
            spread = sum(0.5 * (tau[n] * s.square()).sum() for n, s in scales.items())
            return float(-self._entropy() - (gaussian_log_prior(residuals, tau, free) - spread))
        closed, rest = expected_log_prior(self.model.prior, wide, {n: s.clamp(min=1e-150) for n, s in scales.items()})
        for name in (n for n in free if n not in rest and not bool(free[n].all())):
            closed = closed - self.model.prior.elementwise(name, wide[name])[~free[name]].sum()
        if rest and any(not getattr(self.model.prior.rule(name), "independent", True) for name in rest):
            whole = self.weights(samples, seed)
            each = torch.func.vmap(lambda w: self.model.prior.log_prob(w))(tree.select(whole, rest))
            closed = closed + each.double().mean()
        elif rest:
            stream = random.generator(seed, 11)
            for _ in range(samples):
                for n in rest:
                    noise = torch.randn(wide[n].shape, generator=stream, dtype=torch.float64).to(wide[n])
                    each = self.model.prior.elementwise(n, wide[n] + scales[n] * noise)
                    closed = closed + each[free[n]].sum() / samples
        return float(-self._entropy() - closed)

    def _entropy(self) -> float:
        """H(q), in nats."""
        with torch.no_grad():
            log_det = float(self.curvature.log_det(self.precision, self._factor))
        return 0.5 * self.curvature.chosen * (1 + math.log(2 * math.pi)) - 0.5 * log_det

    # -----------------------------------------------------------------------------------------------------------------
    # Functions

    @property
    def linearised(self) -> bool:
        """Whether functions are those of the linearised network."""
        return self.predictive != "sampled"

    def with_predictive(self, predictive: str) -> LaplacePosterior:
        """The same Gaussian over the weights, seen by another of the predictives "linearised", "probit", "bridge" and "sampled"."""
        from plausible.methods.laplace.laplace import PREDICTIVES

        if predictive not in PREDICTIVES:
            known = ", ".join(map(repr, PREDICTIVES))
            raise ValueError(f"predictive must be one of {known}, got {predictive!r}")
        other = copy(self)
        other.predictive = predictive
        return other

    def _linearisation(self, x: Any) -> Linearisation:
        if self._at is None:
            self._at = Linearisation(self.model, {**self.means, **self.points}, take(x, slice(0, 3)))
        return self._at

    def _evaluate_in_parts(self, plan: tuple[int, int], inputs: Any, batch_size: int | None, seed: int) -> Draws:
        """Draws of the linearised network by products J·(w − w*); those of the network itself as every law over weights."""
        if not self.linearised:
            return super()._evaluate_in_parts(plan, inputs, batch_size, seed)
        total, stream = plan
        rows = num_rows(inputs)
        elements = max(1, sum(mean.numel() for mean in self.means.values()))
        at = _running(lambda: self._linearisation(inputs))
        columns = math.prod(self.model.output_shape)
        size = batch_size or choose_chunk(at, columns, self.device)
        step = max(1, min(total, 2**26 // elements))
        blocks = []
        for first in range(0, total, step):
            drawn = self._sampled(first, min(step, total - first), stream)
            blocks.append({name: drawn[name] - mean for name, mean in self.means.items()})
        outputs: Tensor | None = None
        with torch.no_grad(), random.isolated(seed, self.device):
            for start in range(0, rows, size):
                x = take(inputs, slice(start, start + size))
                f, found = _running(lambda x=x: self._along(at, x, blocks))  # type: ignore[misc]
                self._check_shape(f.shape[1:])
                if outputs is None:
                    outputs = f.new_empty(total, rows, *f.shape[1:])
                outputs[:, start : start + size] = f + found.reshape(total, *f.shape)
        assert outputs is not None
        noise = {name: self.points[name] for name in self.model.likelihood_names}
        return Draws(outputs, {name: value.expand(total, *value.shape) for name, value in noise.items()})

    def _along(self, at: Linearisation, x: Any, blocks: list[Weights]) -> tuple[Tensor, Tensor]:
        """f(x; w*) [B, *O] and J(x)δ for all δ: [S, B, O]."""
        with torch.enable_grad():
            f, parts = at(x, unit_columns)
        found = []
        for moved in blocks:
            each = [projected(part, moved) for part in parts]  # [S, K, B]
            found.append(torch.stack(each).sum(0).transpose(1, 2))
        return f, torch.cat(found)

    def moments(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean [N, *outputs] and covariance [N, P, P] of f(x), over the P outputs of each input.

        Of a last layer with more than 256 outputs variances [N, *outputs] alone.
        """
        inputs = self._inputs(x)
        return self._moments(inputs)

    def _moments(self, inputs: Any) -> tuple[Tensor, Tensor]:
        at = self._linearisation(inputs)
        columns = math.prod(self.model.output_shape)
        many = columns > MANY_OUTPUTS and self._final(inputs)
        size = choose_chunk(at, 1 if many else columns, self.device)
        means, covariances = [], []
        rows = num_rows(inputs)
        for start in range(0, rows, size):
            x = take(inputs, slice(start, start + size))
            f, parts = at(x, (lambda f: torch.zeros_like(f)[None]) if many else unit_columns)
            with torch.no_grad():
                if many:
                    block = self.curvature.blocks
                    c = parts[0].columns[:, 0, 0]
                    covariances.append(_final_variances(block, c, self.precision, self._factor))
                else:
                    covariances.append(self.curvature.covariance(parts, self.precision, self._factor))
            means.append(f)
        return torch.cat(means), torch.cat(covariances)

    def _final(self, inputs: Any) -> bool:
        known = all(isinstance(block, Kronecker) for block in self.curvature.blocks)
        return known and is_final(self._linearisation(inputs), self.model)

    def predict(self, x: Any, draws: int | None = None, seed: int = 0, batch_size: int | None = None) -> Predictive:
        """In closed form, or with `draws` (and where functions are sampled) the mixture over that many functions."""
        if not self.linearised or draws is not None:
            return super().predict(x, draws, seed, batch_size)
        _check_draws(draws)
        inputs = self._inputs(x)
        self._try(inputs)
        plan = self.plan_draws(None, seed)
        return GaussianPredictive(
            self.likelihood,
            lambda rows: _running(lambda: self._moments(take(inputs, rows))),
            num_inputs=num_rows(inputs),
            output_shape=self.model.output_shape,
            noise={name: self.points[name] for name in self.model.likelihood_names},
            way="integral" if self.predictive == "linearised" else self.predictive,  # type: ignore[arg-type]
            draws=lambda rows: self._evaluate_in_parts(plan, take(inputs, rows), batch_size, seed),
            num_draws=DRAWS,
            seed=seed,
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Evidence

    def log_marginal(self, precision: Mapping[str, Tensor] | None = None) -> Tensor:
        """Log p(D) with these precisions of a Gaussian prior (default: its own), at the same mode: 0-d, differentiable in them.

        Given for every weight tensor, as one number or one for each element.
        """
        if self.evidence is None:
            raise ValueError("this posterior has no evidence: it was tempered")
        if not all(gaussian_rule(self.model.prior, name) for name in self.means):
            raise ValueError(f"log_marginal is for Gaussian priors, which have precisions; this one is {self.model.prior}")
        tau = dict(self.precision if precision is None else precision)
        if set(tau) != set(self.means):
            raise ValueError(f"precision must be given for the weights {', '.join(self.means)}, got {', '.join(tau)}")
        residuals = {n: m - centre(self.model, n) for n, m in self.means.items()}
        prior = gaussian_log_prior(residuals, tau, self._random_elements())
        volume = 0.5 * self.curvature.chosen * math.log(2 * math.pi) - 0.5 * self.curvature.log_det(tau, self._factor)
        return self.evidence.log_likelihood.to(prior) + prior + volume

    def _random_elements(self) -> Weights:
        """Masks of a subnetwork; empty where all elements are random."""
        if not any(isinstance(block, Subset) for block in self.curvature.blocks):
            return {}
        return {name: scale > 0 for name, scale in self.scales.items()}

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Also `gradient_norm` of the log joint at the mode, `distance`: how far from it, in posterior deviations, and `columns`.

        These are the backward passes that an example took on average, where there is one for each column of the outputs' Fisher.
        """
        return super().diagnostics(x) | self.report | {"effective": self.effective}

    @cached_property
    def effective(self) -> float:
        """How many weights the data, and not the prior, determine: Σ 1 − τ_i (Λ⁻¹)_ii (MacKay 1992)."""
        masks = self._random_elements()
        each = {n: 1 - self.precision[n] * s.square() for n, s in self.scales.items()}
        return sum(float((v[masks[n]] if n in masks else v).double().sum()) for n, v in each.items())

    def _status(self, name: str) -> str:
        block = next((b for b in self.curvature.blocks if name in b.names), None)
        if block is None:
            return super()._status(name)
        words = {
            "diagonal": "diagonal",
            "dense": "full covariance",
            "kronecker": "Kronecker factors",
            "low-rank": "low rank",
            "subset": "subnetwork",
        }
        return f"inferred, {words[block.kind]}"

    # -----------------------------------------------------------------------------------------------------------------

    def _moved(self, model: Model, device: torch.device) -> LaplacePosterior:
        means, points, precision = (tree.to(part, device) for part in (self.means, self.points, self.precision))
        return LaplacePosterior(
            self.method,
            model,
            {**self.run, "history": self.history},
            means,
            points,
            self.curvature.to(device),
            precision,
            self.scale,
            self.predictive,
            self.evidence,
            self.report,
        )

    def _write(self, folder: Path) -> dict[str, Any]:
        named = {f"mean.{n}": v for n, v in self.means.items()} | {f"point.{n}": v for n, v in self.points.items()}
        named |= {f"precision.{n}": v for n, v in self.precision.items()}
        named |= {f"curvature.{n}": v.contiguous() for n, v in self.curvature.tensors().items()}
        return {
            "laplace_sha256": storage.write_tensors(folder / "laplace.safetensors", named),
            "structure": self.curvature.structure,
            "blocks": self.curvature.describe(),
            "scale": self.scale,
            "predictive": self.predictive,
            "report": self.report,
            "evidence": None if self.evidence is None else [float(v) for v in self.evidence],
        }

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> LaplacePosterior:
        from plausible.posteriors.saving import history_of

        path = folder / "laplace.safetensors"
        found = storage.read_tensors(path, content["laplace_sha256"])
        device = next(iter(model.initial.values())).device
        parts: dict[str, dict[str, Tensor]] = {"mean": {}, "point": {}, "precision": {}, "curvature": {}}
        for key, value in found.items():
            part, _, name = key.partition(".")
            parts[part][name] = value.to(device)
        expected = {**model.initial, **model.buffers}
        for part, names in (("mean", model.random), ("point", (*model.points, *model.buffers))):
            for name in names:
                if name not in parts[part] or parts[part][name].shape != expected[name].shape:
                    raise ValueError(f"{path} does not fit posterior.json: {part} of {name!r} is missing or has another shape")
        curvature = Curvature.restored(str(content["structure"]), content["blocks"], parts["curvature"])
        evidence = content.get("evidence")
        return cls(
            method,
            model,
            history_of(content["run"]),
            {n: parts["mean"][n] for n in model.random},
            {n: parts["point"][n] for n in (*model.points, *model.buffers)},
            curvature,
            parts["precision"],
            float(content["scale"]),
            str(content["predictive"]),
            None if evidence is None else Evidence(*(torch.tensor(v, dtype=torch.float64) for v in evidence)),
            content.get("report") or {},
        )


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
