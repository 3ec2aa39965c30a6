"""What a comparison takes of each posterior: its draws of f at the same inputs, in blocks that tell how much they scatter.

Averages over draws are kept block by block. Leaving out one block at a time gives the standard error of whatever is computed
from them (the jackknife), also where draws are correlated: a block is a stretch of one chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plausible.posteriors.base import Posterior
from plausible.posteriors.draws import DrawsPosterior
from plausible.posteriors.gaussian_predictive import GaussianPredictive
from plausible.posteriors.predictive import Draws, Predictive

BLOCKS = 10
"""Blocks that draws are divided into, at least where there are as many draws."""
FRESH = 1000
"""Draws of posteriors that are drawn anew, where no number is asked for."""
_ELEMENTS = 2**21  # of draws at once, where distribution functions are evaluated

CLASSES = ("classes", "binary")


@dataclass(frozen=True)
class Averages:
    """Means over the draws of each block, [blocks, …], and the numbers of draws, [blocks]."""

    means: Tensor
    sizes: Tensor

    def mean(self, without: int | None = None) -> Tensor:
        """Over all draws, or over all but those of one block."""
        return torch.tensordot(self._shares(without), self.means, dims=1)

    def log_mean_exp(self, without: int | None = None) -> Tensor:
        """Log of the mean of exponentials, where `means` are logarithms of such means."""
        shares = self._shares(without).log().reshape(-1, *[1] * (self.means.ndim - 1))
        return (self.means + shares).logsumexp(0)

    def _shares(self, without: int | None) -> Tensor:
        sizes = self.sizes.double().clone()
        if without is not None:
            sizes[without] = 0
        return sizes / sizes.sum()


@dataclass(frozen=True)
class Sorted:
    """Draws [S, …], sorted along their first axis, with the block of each; or a Gaussian's mean and standard deviation."""

    draws: Tensor | None = None
    blocks: Tensor | None = None
    mean: Tensor | None = None
    scale: Tensor | None = None

    def without(self, block: int | None) -> Sorted:
        """The same without the draws of one block."""
        if block is None or self.draws is None or self.blocks is None:
            return self
        keep = (self.blocks != block).movedim(0, -1)
        left = self.draws.movedim(0, -1)[keep].reshape(*self.draws.shape[1:], -1).movedim(-1, 0)
        return Sorted(left)

    def spread(self) -> Tensor:
        return self.scale if self.draws is None else self.draws.std(0, correction=0)  # type: ignore[return-value]


@dataclass(frozen=True)
class Side:
    """One of two posteriors at the inputs of a comparison: a predictive in closed form, or one of `draws` in `blocks` [S]."""

    predictive: Predictive
    blocks: Tensor
    chain: Tensor

    @classmethod
    def of(cls, posterior: Posterior, x: Any, draws: int | None, seed: int, name: str) -> Side:
        """From a posterior; the draws are those of `seed`, whatever the inputs."""
        wanted = draws if draws is not None or stored(posterior) else FRESH
        try:
            closed = posterior.predict(x, draws, seed=seed)
            if isinstance(closed, GaussianPredictive):
                return cls(closed, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            predictive = closed if wanted == draws else posterior.predict(x, wanted, seed=seed)
            drawn = predictive._draws(slice(0, predictive.num_inputs))
        except ValueError as error:
            raise ValueError(f"{name} cannot be evaluated at x: {error}") from error
        weights = {name: weight.detach().cpu() for name, weight in drawn.weights.items()}
        whole = Predictive.from_functions(drawn.outputs.detach().cpu(), predictive.likelihood, weights)
        chain, blocks = divide(len(drawn.outputs), getattr(posterior, "chains", 1) if wanted is None else 1)
        return cls(whole, blocks, chain)

    @property
    def closed_form(self) -> bool:
        return isinstance(self.predictive, GaussianPredictive)

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.max()) + 1

    def halves(self) -> tuple[Side, Side] | None:
        """The draws of one half of the chains and of the other, or of the earlier and the later half of one chain."""
        if self.closed_form or len(self.blocks) < 2:
            return None
        chains = int(self.chain.max()) + 1
        order = torch.arange(len(self.blocks))
        # Halves of one chain share where it started; with several, half of the chains is the more honest rival.
        early = self.chain < chains // 2 if chains > 1 else order < len(order) // 2
        return self._part(early), self._part(~early)

    def _part(self, chosen: Tensor) -> Side:
        outputs, weights = self._drawn()
        some = {name: weight[chosen] for name, weight in weights.items()}
        part = Predictive.from_functions(outputs[chosen], self.predictive.likelihood, some)
        return Side(part, self.blocks[chosen].unique(return_inverse=True)[1], self.chain[chosen])

    def functions(self) -> Sorted:
        """f(x), sorted, [S, N, …] in float64; logits of classes less their mean over the classes, which predictions do not see."""
        centred = self.predictive.likelihood.kind == "classes"
        if isinstance(self.predictive, GaussianPredictive):
            law = self.predictive._moments(slice(0, self.predictive.num_inputs))
            mean, variance = law.mean.double().cpu(), law.variance.double().cpu()
            if centred:
                full = law.matrix.double().cpu()
                away = torch.eye(full.shape[-1], dtype=full.dtype) - 1 / full.shape[-1]
                mean, variance = mean @ away, (away @ full @ away).diagonal(dim1=-2, dim2=-1)
            return Sorted(mean=mean, scale=variance.clamp(min=0).sqrt())
        f = self._drawn().outputs.double()
        f = (f - f.mean(-1, keepdim=True) if centred else f).flatten(2) if f.ndim > 2 else f.unsqueeze(-1)
        draws, order = f.sort(dim=0)
        return Sorted(draws, self.blocks[order])

    def expectations(self) -> Averages:
        """E[y | f] of the draws, and the squares of what it differs by from its mean: [blocks, 2, N, …]."""
        if self.closed_form:
            pair = torch.stack([self.predictive.mean, self.predictive.epistemic]).double().cpu()
            return Averages(pair[None], torch.ones(1))
        outputs, weights = self._drawn()
        law: Any = self.predictive.likelihood(outputs.double(), {n: w.double() for n, w in weights.items()})
        kind = self.predictive.likelihood.kind
        each = law.logits.softmax(-1) if kind == "classes" else law.logits.sigmoid() if kind == "binary" else law.mean
        return self._averages(torch.stack([each, (each - each.mean(0)).square()], 1))

    def log_densities(self, y: Any) -> Averages:
        """Log p(y | x), [blocks, N]."""
        if self.closed_form:
            return Averages(self.predictive.log_prob(y).double().cpu()[None], torch.ones(1))
        targets, observed = self.predictive._targets(y).cpu(), self.predictive.likelihood.observed(torch.as_tensor(y).cpu())
        outputs, weights = self._drawn()
        wide = {n: w.double() for n, w in weights.items()}
        each = self.predictive.likelihood.log_prob(outputs.double(), targets, wide)
        each = each if observed is None else torch.where(observed, each, 0.0)
        each = each.flatten(2).sum(-1) if each.ndim > 2 else each
        sums = torch.stack([each[self.blocks == k].logsumexp(0) for k in range(self.num_blocks)])
        return Averages(sums - self._sizes().log()[:, None], self._sizes())

    def below(self, places: Tensor) -> Averages:
        """P(y ≤ places), [K, N, …] → [blocks, K, N, …]."""
        if isinstance(self.predictive, GaussianPredictive):
            values = torch.stack([self.predictive.cdf(place) for place in places])
            return Averages(values.double().cpu()[None], torch.ones(1))
        outputs, weights = self._drawn()
        wide = {n: w.double() for n, w in weights.items()}
        # Distribution functions of all draws at all places would not fit into memory: inputs are taken in parts.
        size = max(1, _ELEMENTS // math.prod((len(outputs), *outputs.shape[2:])))
        parts = []
        for start in range(0, outputs.shape[1], size):
            law: Any = self.predictive.likelihood(outputs[:, start : start + size].double(), wide)
            at = [self._averages(law.cdf(place[start : start + size])).means for place in places]
            parts.append(torch.stack(at, 1))
        return Averages(torch.cat(parts, 2), self._sizes())

    def quartiles(self) -> Tensor:
        return self.predictive.quantile([0.25, 0.5, 0.75]).double().cpu()

    def _drawn(self) -> Draws:
        return self.predictive._draws(slice(0, self.predictive.num_inputs))

    def _sizes(self) -> Tensor:
        return torch.bincount(self.blocks, minlength=self.num_blocks).double()

    def _averages(self, each: Tensor) -> Averages:
        """Of values for each draw, [S, …]."""
        sizes = self._sizes()
        sums = torch.zeros(len(sizes), *each.shape[1:], dtype=torch.float64).index_add_(0, self.blocks, each.double())
        return Averages(sums / sizes.reshape(-1, *[1] * (each.ndim - 1)), sizes)


def stored(posterior: Posterior) -> bool:
    """Whether the draws are there already, all of them meant by None."""
    if posterior.parts:
        return all(stored(part) for part in posterior.parts)
    return isinstance(posterior, DrawsPosterior)


def divide(count: int, chains: int) -> tuple[Tensor, Tensor]:
    """The chain and the block of each of `count` draws, [count] each: stretches of chains, draw r being of chain r mod `chains`."""
    row = torch.arange(count)
    chains = chains if chains > 0 and count % chains == 0 else 1
    length, chain = count // chains, row % chains
    # Draws are stored with the chain as the fastest index, and a block must not mix chains.
    each = max(1, min(length, -(-BLOCKS // chains)))
    return chain, chain * each + (row // chains) * each // length


def jackknife(statistic: Callable[[int | None, int | None], float], first: int, second: int) -> tuple[float, float]:
    """The statistic and its standard error: it is called with the block of either side that is left out, or None.

    Var = Σ_sides (G − 1)/G Σ_g (θ₋g − θ̄₋)²; a side with one block (a point, a closed form) adds none.
    """
    variance = 0.0
    for side, count in enumerate((first, second)):
        if count > 1:
            left = torch.tensor([statistic(*((k, None) if side == 0 else (None, k))) for k in range(count)])
            variance += float((count - 1) / count * (left - left.mean()).square().sum())
    return statistic(None, None), math.sqrt(variance)
