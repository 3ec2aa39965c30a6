"""Posteriors whose weights are drawn anew whenever they are asked: what they share, whatever their law."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import num_rows, take
from plausible.core.weights import Weights
from plausible.posteriors.base import Posterior, _check_draws, _running
from plausible.posteriors.predictive import Draws

DRAWS = 100
"""Draws that are taken where none are asked for."""

LARGE = 10**7
"""Weights × inputs from which draws are evaluated one by one: their products fill the machine."""


BLOCK = 10
"""Draws whose noise comes out of one generator, on a GPU."""


class FreshDraws(Posterior):
    """A law over the weights: draw s is a function of the seed and s, so that more draws begin with the same ones.

    A subclass says `_sampled`, and `means` and `scales`, which give signal-to-noise ratios and pruning.
    """

    means: Weights
    scales: Weights

    @abstractmethod
    def _sampled(self, first: int, count: int, seed: int) -> Weights:
        """Draws number first … first+count−1, stacked, with all weights and buffers that have no distribution beside them."""

    def plan_draws(self, draws: int | None, seed: int) -> tuple[int, int]:
        """How many, and the seed."""
        return (DRAWS if draws is None else draws), seed

    def count(self, plan: tuple[int, int]) -> int:
        """How many."""
        return plan[0]

    def _evaluate_in_parts(self, plan: tuple[int, int], inputs: Any, batch_size: int | None, seed: int) -> Draws:
        """Weights are drawn once for all parts of the inputs; a few draws at a time, so that memory stays bounded."""
        total, stream = plan
        rows = num_rows(inputs)
        elements = max(1, tree.num_elements(tree.select(self.model.initial, self.model.random)))
        vectors = isinstance(inputs, Tensor) and inputs.ndim == 2
        # Large products gain nothing by stacking; small parts stay in the caches of a CPU, large ones keep a GPU busy.
        large = elements * rows > LARGE
        most = 4096 if not (large and vectors) else 1024 if self.device.type == "cpu" else 16384
        part = batch_size or min(rows, most)
        block = BLOCK if self.device.type != "cpu" else 1
        chunk = block if large else block * max(1, min(-(-total // block), 2**26 // elements // block, 2**17 // part // block))
        outputs: Tensor | None = None
        noises = []
        with torch.no_grad(), random.isolated(seed, self.device):  # for networks that draw numbers themselves
            for first in range(0, total, chunk):
                count = min(chunk, total - first)
                stacked = self._sampled(first, count, stream)
                noises.append(self.model.noise(stacked))
                pieces = [(0, count, stacked)] if not large else [(k, 1, tree.index(stacked, k)) for k in range(count)]
                for at, size, weights in pieces:
                    for start in range(0, rows, part):
                        x = inputs if part >= rows else take(inputs, slice(start, start + part))
                        found = _running(lambda x=x, w=weights, n=size: self._outputs_of(w, x, n, large))  # type: ignore[misc]
                        if outputs is None:
                            self._check_shape(found.shape[1 if large else 2 :])
                            outputs = found.new_empty(total, rows, *self.model.output_shape)
                        if large:
                            outputs[first + at, start : start + part] = found
                        else:
                            outputs[first : first + size, start : start + part] = found
        assert outputs is not None
        return Draws(outputs, tree.concatenate(noises))

    def _outputs_of(self, weights: Weights, x: Any, count: int, single: bool) -> Tensor:
        """f(x) for one draw [n, *outputs], or for `count` stacked ones [count, n, *outputs]."""
        return self.model.outputs(weights, x) if single else self._stacked_outputs(weights, x, count)

    def _noise(self, first: int, count: int, seed: int, size: int, like: Tensor) -> Tensor:
        """N(0, 1) for draws number first … first+count−1: [count, size], each a function of the seed and its number.

        On a GPU blocks of draws come out of one generator, which costs less than one each.
        """
        if self.device.type == "cpu":
            flat = [random.normals(seed, 9, k, count=size, like=like) for k in range(first, first + count)]
            return torch.stack(flat) if count > 1 else flat[0][None]
        blocks = range(first // BLOCK, -(-(first + count) // BLOCK))
        drawn = [random.normals(seed, 9, k, count=BLOCK * size, like=like).view(BLOCK, size) for k in blocks]
        whole = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
        start = first - blocks[0] * BLOCK
        return whole[start : start + count]

    def evaluate(self, plan: tuple[int, int], x: Any) -> Draws:
        """All draws by vmap in chunks, or one by one where vmap has no rule or the products are large."""
        return self._evaluate_in_parts(plan, x, None, plan[1])

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """Draws of the random weights, named, stacked on a leading axis."""
        total, seed = self.plan_draws(_check_draws(draws), seed)
        return tree.select(self._sampled(0, total, seed), self.model.random)

    def starting_points(self, members: int) -> Weights:
        """The means for one run, draws for several; with the weights and buffers that have no distribution."""
        drawn = self._sampled(0, members, 0)
        return drawn if members > 1 else drawn | {name: mean[None] for name, mean in self.means.items()}

    @abstractmethod
    def kl(self, samples: int = 1000, seed: int = 0) -> float:
        """KL(q ‖ p) against the prior, in nats; where there is no closed form over `samples` draws."""

    def snr(self, decibels: bool = False) -> Weights:
        """|μ|/σ of each weight, by name; in decibels 20·log₁₀(|μ|/σ). That of a pruned weight is 0, or −∞ decibels."""
        ratios = {n: torch.where(mean == 0, 0.0, mean.abs() / self.scales[n]) for n, mean in self.means.items()}
        return {name: 20 * ratio.log10() for name, ratio in ratios.items()} if decibels else ratios

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """`kl` in nats (None where it is not known), and the quartiles of the signal-to-noise ratios.

        Those are of the weights that have a scale and were not pruned. Draws are independent, so there are no chains to judge.
        """
        ratios = torch.cat([ratio.flatten() for ratio in self._left(self.snr()).values()]).double().cpu()
        ratios = ratios[ratios.isfinite()]
        quartiles = torch.full((3,), torch.nan)
        if len(ratios):
            quartiles = torch.quantile(
                ratios[:: -(-len(ratios) // 100_000)], torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
            )
        report: dict[str, Any] = {"draws": None, "chains": 1, "divergences": 0}
        return report | {"kl": self._known_kl(), "snr_quartiles": quartiles.tolist()}

    def _known_kl(self) -> float | None:
        return self.kl(samples=100)

    def _left(self, values: Weights) -> Weights:
        """What belongs to weights that were not pruned: [kept] for those that have a mask."""
        return {name: value[self._masks[name]] if name in self._masks else value for name, value in values.items()}

    def _networks(self) -> list[tuple[Weights, Weights | None]]:
        """Means and scales of the marginals."""
        return [(self.means, self.scales)]
