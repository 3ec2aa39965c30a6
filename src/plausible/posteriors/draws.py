"""Posteriors that are stored draws of the weights: a point, an ensemble, the states of chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from plausible.core import random, storage
from plausible.core import weights as tree
from plausible.core.data import take
from plausible.core.draws import outputs_of_draws
from plausible.core.model import Model
from plausible.core.storage import DrawStore, MemoryDraws
from plausible.core.weights import Weights
from plausible.engine.method import Fitted
from plausible.posteriors import arviz_export, diagnostics, verdicts
from plausible.posteriors.base import Posterior, check_draws, naming_x, record_of
from plausible.posteriors.predictive import Draws
from plausible.posteriors.saving import Content


class DrawsPosterior(Posterior):
    """Stored draws, equally weighted. Draw r belongs to chain r mod `chains`.

    `store` may hold more named tensors of each draw than the weights and buffers of the model: statistics of transitions, say.
    """

    kind = "draws"
    ordered: ClassVar[bool] = True  # draws of a chain follow each other

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], store: DrawStore, chains: int = 1):
        super().__init__(method, model, run)
        self.store, self.chains = store, chains

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, chains: int = 1) -> Self:
        """From the draws that the run kept; of an ensemble those of all members."""
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended before the first was due")
        return cls(method, model, record_of(fitted), fitted.draws, chains)

    @classmethod
    def left(cls, method: Any, model: Model, fitted: Fitted) -> Self:
        """From what the last of several stages left (`fitted.left`); in an ensemble that is of one member alone."""
        return cls(method, model, record_of(fitted), MemoryDraws(fitted.left))

    def content(self) -> Content:
        return Content(draws=self.store, settings={"chains": self.chains})

    @classmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        return cls(method, model, run, content.stored, int(content.settings["chains"]))

    def __len__(self) -> int:
        return len(self.store)

    def num_draws(self, draws: int | None) -> int:
        return len(self) if draws is None else draws

    def rows(self, draws: int | None, seed: int) -> list[int]:
        """The numbers of the stored draws to use where `draws` were asked for: fewer without replacement, more by resampling."""
        total = len(self)
        if draws is None or draws == total:
            return list(range(total))
        stream = random.generator(seed, 7)
        if draws < total:
            # in the order of the store, which reads each shard once
            return sorted(torch.randperm(total, generator=stream)[:draws].tolist())
        return torch.randint(total, (draws,), generator=stream).tolist()

    def _weights_of(self, rows: Sequence[int]) -> Weights:
        stored = self.store.get(rows, self.device)
        return {name: stored[name] for name in (*self.model.initial, *self.model.buffers) if name in stored}

    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        rows = self.rows(draws, seed)
        distinct = sorted(set(rows))  # repeated rows are computed once
        source = lambda first, count: self._weights_of(distinct[first : first + count])  # noqa: E731
        values, noise = outputs_of_draws(self.model, source, len(distinct), inputs, batch_size=batch_size)
        if rows != distinct:
            # back to the order that was asked for
            position = {row: i for i, row in enumerate(distinct)}
            order = torch.tensor([position[row] for row in rows], device=values.device)
            values, noise = values[order], tree.index(noise, order)
        return Draws(values, noise)

    def try_inputs(self, inputs: Any) -> tuple[int, ...]:
        return try_network(self, inputs)

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        stored = self.store.get(self.rows(check_draws(draws), seed), self.device)
        return {name: stored[name].clone() for name in self.model.random}  # the store may have given its own tensors

    def starting_points(self, members: int) -> Weights:
        """The last states of the chains or members, or, of a single chain, draws spread evenly over it."""
        total = len(self)
        if self.chains > 1:
            return self._weights_of(range(total - self.chains, total))
        return self._weights_of(sorted({round(total * (k + 1) / members) - 1 for k in range(members)} - {-1}))

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        return diagnostics.convergence(self, x)

    def verdict(self, x: Any = None) -> str:
        return verdicts.verdict(self, x)

    def to_arviz(self, x: Any = None) -> Any:
        return arviz_export.to_arviz(self, x)

    def networks(self) -> list[tuple[Weights, Weights | None]]:
        """Means and standard deviations over the draws of each chain; no deviations where a chain has one draw."""
        return chain_moments(self.store, self.model.random, self.chains)

    def masked(self, masks: Weights) -> Self:
        pruned = super().masked(masks)
        pruned.store = storage.pruned(self.store, masks, self.chains)
        return pruned


class IndependentDraws(DrawsPosterior):
    """Stored draws of a law that is known: no chain, whose draws would depend on each other, and so nothing to converge."""

    kind = "independent draws"
    ordered = False

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        return {"draws": len(self), "chains": 1, "divergences": 0}

    def verdict(self, x: Any = None) -> str:  # noqa: ARG002
        return f"The {len(self):,} draws are independent: there is no chain that could fail to converge."


def try_network(posterior: Posterior, inputs: Any) -> tuple[int, ...]:
    """Run the network on one example with weights that are at hand, which costs less than a draw."""
    model, first = posterior.model, take(inputs, slice(0, 1))
    with torch.no_grad(), random.isolated(0, posterior.device), naming_x():  # networks may draw numbers themselves
        outputs = model.outputs({**model.initial, **model.buffers}, first)
    posterior.check_shape(outputs.shape[1:])
    return tuple(outputs.shape[1:])


def chain_moments(store: DrawStore, names: Sequence[str], chains: int) -> list[tuple[Weights, Weights | None]]:
    """Mean and standard deviation (n − 1 below) over the draws of each chain, float64 on the CPU; no deviation of a single draw.

    Two passes over the store, a shard in memory at a time.
    """
    counts = [len(range(k, len(store), chains)) for k in range(chains)]

    def sums(term: Callable[[str, Tensor, int], Tensor]) -> list[Weights]:
        totals: list[Weights] = [{} for _ in range(chains)]
        start = 0
        for shard in store.shards():
            for k in range(chains):
                for name in names:
                    part = term(name, shard[name][(k - start) % chains :: chains].cpu().double(), k).sum(0)
                    totals[k][name] = totals[k][name] + part if name in totals[k] else part
            start += len(next(iter(shard.values())))
        return totals

    means = [{n: s / counts[k] for n, s in part.items()} for k, part in enumerate(sums(lambda _, draws, __: draws))]
    if min(counts) < 2:
        return [(mean, None) for mean in means]
    # around the mean, in a second pass: a sum of squares less a square would cancel
    squares = sums(lambda name, draws, k: (draws - means[k][name]).square())
    scales = [{n: (s / (counts[k] - 1)).sqrt() for n, s in part.items()} for k, part in enumerate(squares)]
    return list(zip(means, scales))
