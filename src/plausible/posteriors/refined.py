"""Draws of a Gaussian guess that a sampler has refined, with a bound on the evidence from their importance weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from plausible.blocks.refinement import Slope, log_initial, refine, slope_of_draws
from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import ArrayData, Batch, Data, StreamData
from plausible.core.draws import ROWS, at_once
from plausible.core.model import Model
from plausible.core.storage import DrawStore, MemoryDraws
from plausible.core.weights import Weights
from plausible.posteriors.base import data_for, record_of
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.saving import Content

if TYPE_CHECKING:
    from plausible.engine import Fitted

log = logging.getLogger("plausible")

COPIES = 4
"""How many times more memory an example takes with its gradients and momenta than in a forward pass."""


class Guess(NamedTuple):
    """q₀ = Π N(means, scales²) by name, and the sampler: step size ε in units of the scales, refinements, leapfrog steps."""

    means: Weights
    scales: Weights
    step_size: float
    refinements: int
    leapfrog: int


class RefinedPosterior(DrawsPosterior):
    """Stored draws w_T, refined from w_0 ~ q₀, equally weighted; `guess` has q₀ and the sampler.

    `log_weights` [S] are the log W of the draws (before further refinements) where they were refined on all data, else None. Then
    `log_evidence` is log mean W, a stochastic lower bound on log p(D), and `diagnostics()` has the effective number of weights.
    """

    kind = "refined"

    def __init__(
        self,
        method: Any,
        model: Model,
        run: Mapping[str, Any],
        store: DrawStore,
        guess: Guess,
        log_weights: Tensor | None = None,
    ):
        super().__init__(method, model, run, store)
        self.guess, self.log_weights = guess, log_weights

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, chains: int = 1) -> Self:  # noqa: ARG003
        """Refine draws from the last state of a run, on the data that it saw."""
        state, data = fitted.state, fitted.prepared
        means = {name: state.weights[name].detach().clone() for name in model.random}
        scales = {name: state.log_scales[name].detach().exp() for name in model.random}
        fixed = {name: state.weights[name].detach().clone() for name in model.points}
        fixed |= {name: value.detach().clone() for name, value in state.buffers.items()}
        guess = Guess(means, scales, float(state.log_step_size.exp()), method.refinements, method.trajectory)
        high, low = state.key.tolist()
        size = None if isinstance(data, StreamData) else method.plan(data.num_data).batch_size
        whole = isinstance(data, ArrayData) and size in (None, data.num_data)
        slopes = _Slopes(model, fixed, data, whole=whole, size=size)
        drawn, weights = _refined(guess, slopes, method.draws_kept, (high << 32) + low, further=method.further)
        count = len(next(iter(drawn.values())))
        everything = drawn | {name: value.expand(count, *value.shape).clone() for name, value in fixed.items()}
        ordered = {name: everything[name] for name in (*model.initial, *model.buffers)}
        posterior = cls(method, model, record_of(fitted), MemoryDraws(ordered), guess, weights if whole else None)
        posterior.log_evidence = _log_mean(weights) - _log_prior_of_points(model, fixed) if whole else None
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
        row = tree.index(self.store.get([0], self.device), 0)
        fixed = {name: row[name] for name in (*model.points, *model.buffers)}
        log_weights = _refined(self.guess, _Slopes(model, fixed, data_for(model, data), whole=True), samples, seed)[1]
        return _log_mean(log_weights) - _log_prior_of_points(model, fixed)

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
        guess = Guess(content.group("mean", like), content.group("scale", like), *numbers)
        return cls(method, model, run, content.stored, guess, content.tensors.get("log_weights", {}).get(""))


class _Slopes:
    """Slopes for the draws of one group: on all data, or for each draw on a batch of its own."""

    def __init__(self, model: Model, fixed: Weights, data: Data, *, whole: bool, size: int | None = None):
        self.model, self.fixed, self.data, self.whole, self.size = model, fixed, data, whole, size
        self._stream: Iterator[Batch] = iter(())

    def group(self, draws: int, elements: int) -> int:
        """How many draws to refine at once: one where a loader cuts the batches."""
        if not self.whole and isinstance(self.data, StreamData):
            return 1
        rows = 1 if self.whole or self.size is None else self.size
        return min(draws, at_once(elements, rows, copies=COPIES))

    def __call__(self, count: int, stream: torch.Generator) -> Slope:
        if self.whole:
            size = max(64, ROWS // (COPIES * count))
            return slope_of_draws(self.model, self.fixed, lambda: self.data.chunks(size))
        if isinstance(self.data, ArrayData):
            rows = torch.randint(self.data.num_data, (count, self.size or 1), generator=stream)
            batch = self.data.rows(rows.to(self.data.batch.y.device))
        else:
            batch = tree.tree_map(lambda part: part.unsqueeze(0), self._next())
        return slope_of_draws(self.model, self.fixed, lambda: [batch], own=True)

    def _next(self) -> Batch:
        assert isinstance(self.data, StreamData)
        batch = next(self._stream, None)
        if batch is None:
            self._stream = self.data.passes()
            batch = next(self._stream)
        return batch


@torch.no_grad()
def _refined(guess: Guess, slopes: _Slopes, draws: int, seed: int, further: int = 0) -> tuple[Weights, Tensor]:
    """Refined draws, stacked, and the log W of each.

    Draws that the sampler sent to infinity are left out, with a warning; their log W is −∞ and stays.
    """
    first = next(iter(guess.means.values()))
    step_size = torch.full((), guess.step_size, dtype=first.dtype, device=first.device)
    groups, weights = [], []
    size = slopes.group(draws, tree.num_elements(guess.means))
    with random.isolated(seed, first.device):  # for networks that draw numbers themselves, and for loaders
        for number, start in enumerate(range(0, draws, size)):
            count, stream = min(size, draws - start), random.generator(seed, 13, number)

            def normals(count: int = count, stream: torch.Generator = stream) -> Weights:
                return {
                    name: torch.randn((count, *mean.shape), generator=stream, dtype=mean.dtype).to(mean.device)
                    for name, mean in guess.means.items()
                }

            standard = normals()
            current = {name: mean + guess.scales[name] * standard[name] for name, mean in guess.means.items()}
            momenta = [normals() for _ in range(guess.refinements)]
            end = refine(slopes(count, stream), current, guess.scales, momenta, step_size, guess.leapfrog)
            weights.append((end.value + end.ratio - log_initial(standard, guess.scales, end.value)).cpu())
            current, value = end.weights, end.value
            for _ in range(further):
                end = refine(slopes(count, stream), current, guess.scales, [normals()], step_size, guess.leapfrog)
                level = torch.rand(count, generator=stream, dtype=torch.float64).log().to(value.device)
                accept = level < end.value + end.ratio - value  # min{1, exp(H − H')}: a draw that is not finite stays
                accept = accept if slopes.whole else torch.ones_like(accept)
                value = torch.where(accept, end.value, value)
                current = {
                    name: torch.where(accept.reshape(-1, *[1] * (old.ndim - 1)), end.weights[name], old)
                    for name, old in current.items()
                }
            groups.append(current)
    return _finite(tree.concatenate(groups), torch.cat(weights))


def _finite(drawn: Weights, weights: Tensor) -> tuple[Weights, Tensor]:
    good = (
        torch.stack([value.reshape(len(value), -1).isfinite().all(1) for value in drawn.values()]).all(0).cpu()
        & ~weights.isnan()
    )
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
