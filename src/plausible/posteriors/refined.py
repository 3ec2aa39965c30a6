"""Draws of a Gaussian guess that a sampler has refined, with a bound on the evidence from their importance weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from plausible.blocks.refinement import GroupSlopes, Guess, refined_group
from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.storage import MemoryDraws
from plausible.core.weights import Weights
from plausible.core.words import log
from plausible.engine.method import Fitted
from plausible.posteriors.base import data_for, record_of
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.saving import Content

MEAN, SPREAD, LOG_WEIGHTS, STEP_SIZE, WHOLE = "q0 mean of ", "q0 scale of ", "log W", "q0 step size", "on all data"
"""Names of what a run leaves beside the draws."""


class RefinedPosterior(DrawsPosterior):
    """Stored draws w_T, refined from w_0 ~ q₀, equally weighted; `guess` has q₀ and the sampler.

    `log_weights` [S] are the log W of the draws (before further refinements) where they were refined on all data, else None. Then
    `log_evidence` is log mean W, a stochastic lower bound on log p(D), and `diagnostics()` has the effective number of weights.
    """

    kind = "refined"

    guess: Guess
    log_weights: Tensor | None = None

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, chains: int = 1) -> Self:  # noqa: ARG003
        """From the draws that a run left; those that the sampler sent to infinity are left out, with a warning."""
        left = fitted.left
        means, scales = ({n: left[f"{part}{n}"][0] for n in model.random} for part in (MEAN, SPREAD))
        guess = Guess(means, scales, float(left[STEP_SIZE]), method.refinements, method.trajectory)
        names = (*model.initial, *model.buffers)
        drawn, log_weights = _finite({name: left[name] for name in names}, left[LOG_WEIGHTS].cpu(), model.random)
        whole = bool(left[WHOLE])
        drawn = {name: value.contiguous() for name, value in drawn.items()}
        posterior = cls(method, model, record_of(fitted), MemoryDraws(drawn))
        posterior.guess, posterior.log_weights = guess, log_weights if whole else None
        if whole:
            fixed = {name: left[name][0] for name in model.points}
            posterior.log_evidence = _log_mean(log_weights) - _log_prior_of_points(model, fixed)
        return posterior

    def importance_weighted_bound(self, data: Any, samples: int = 100, seed: int = 0) -> float:
        """Log (1/S) Σ_s W_s over S new draws, refined on all of `data`: at most log p(D) on average, and closer for larger S.

        W = p(w_T, D) Π N(r'_t) / (q₀(w_0) Π N(r_t)) as in `plausible.refinement`; for S = 1 its mean is the bound E log W, and
        E W = p(D) makes it one for every S (Burda, Grosse & Salakhutdinov 2016). `data` is what `fit` takes; that on which the
        posterior was fitted gives the evidence of that fit. Cost: S·(1 + T·leapfrog) gradients on all of the data.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be a whole number of at least 1, got {samples!r}")
        model = self.model
        # points and buffers are the same in every draw
        row = tree.index(self.store.get([0], self.device), 0)
        fixed = {name: row[name] for name in (*model.points, *model.buffers)}
        slopes = GroupSlopes(model, fixed, data_for(model, data), whole=True)
        size = slopes.group(samples, tree.num_elements(self.guess.means))
        sizes = [min(size, samples - start) for start in range(0, samples, size)]
        parts = [refined_group(self.guess, slopes, count, seed, number)[1] for number, count in enumerate(sizes)]
        return _log_mean(torch.cat(parts)) - _log_prior_of_points(model, fixed)

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """Those of stored draws, with `importance_ess`, (ΣW)²/ΣW²: near 1 where one draw outweighs all, and the bound is loose."""
        report = super().diagnostics(x)
        if self.log_weights is not None:
            report["importance_ess"] = float(torch.exp(2 * self.log_weights.logsumexp(0) - (2 * self.log_weights).logsumexp(0)))
        return report

    def content(self) -> Content:
        plain, guess = super().content(), self.guess
        tensors = {"mean": guess.means, "scale": guess.scales}
        if self.log_weights is not None:
            tensors["log_weights"] = {"": self.log_weights}
        sampler = {name: getattr(guess, name) for name in ("step_size", "refinements", "leapfrog")}
        return Content(tensors, {**plain.settings, "guess": sampler}, plain.draws)

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        like, sampler = tree.select(model.initial, model.random), content.settings["guess"]
        numbers = float(sampler["step_size"]), int(sampler["refinements"]), int(sampler["leapfrog"])
        posterior = super().rebuilt(method, model, run, content)
        posterior.guess = Guess(content.group("mean", like), content.group("scale", like), *numbers)
        posterior.log_weights = content.tensors.get("log_weights", {}).get("")
        return posterior


def _finite(drawn: Weights, weights: Tensor, random: Iterable[str]) -> tuple[Weights, Tensor]:
    each = [drawn[name].reshape(len(weights), -1).isfinite().all(1) for name in random]
    good = torch.stack(each).all(0).cpu() & ~weights.isnan()
    if bool(good.all()):
        return drawn, weights
    if not bool(good.any()):
        raise ArithmeticError(
            "no refined draw is finite: the sampler's steps are too long; start with a smaller step_size, or keep it with "
            "learn_step_size=False"
        )
    log.warning(
        "%d of %d refined draws are not finite and are left out: the sampler's steps are too long, and a smaller step_size helps",
        int((~good).sum()),
        len(good),
    )
    where = good.nonzero().squeeze(1)
    return {name: value[where.to(value.device)] for name, value in drawn.items()}, torch.where(good, weights, -torch.inf)


def _log_prior_of_points(model: Model, fixed: Weights) -> float:
    """Log p(points)/T, which the log joint has in it: evidence is that of the data given the points."""
    points = {name: fixed[name] for name in model.points}
    return float(model.prior.log_prob(points)) / model.temperature if points else 0.0


def _log_mean(log_weights: Tensor) -> float:
    """Over all draws; those that were lost count as W = 0."""
    return float(log_weights.logsumexp(0)) - math.log(len(log_weights))
