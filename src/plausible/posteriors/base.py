"""The posterior: draws of functions, draws of weights where there are any, prediction, diagnostics, save.

Whatever the method, everything downstream goes through `functions(x)`. This file has the common part and the two kinds that need
nothing else: stored draws, and mixtures of posteriors.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.data import as_inputs, num_rows, take
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.networks import Where
from plausible.core.serialise import Opaque
from plausible.core.storage import DrawStore, MemoryDraws
from plausible.core.weights import Weights
from plausible.posteriors.predictive import Draws, Predictive

if TYPE_CHECKING:
    from plausible.engine import Fitted

log = logging.getLogger("plausible")
kinds: dict[str, type[Posterior]] = {}
Result = TypeVar("Result")


class Posterior(ABC):
    """p(w | D), or what a method made of it: draws of f(x), of weights, and predictions, all with a seed.

    `history` holds the mean of each logged term per epoch, `log_evidence` an estimate of log p(D) where the method has one: given
    the weights trained as points, where there are some, and under the prior that was fitted, where a method fits it.
    """

    kind: ClassVar[str] = ""
    log_evidence: float | None = None
    _stackable = True
    _masks: Weights = {}  # noqa: RUF012  replaced, never written to

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any]):
        self.method, self.model = method, model
        self.run = dict(run)
        self.history: dict[str, list[float]] = self.run.pop("history", {})

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if cls.__dict__.get("kind"):  # its own, not one that it inherits
            kinds[cls.kind] = cls

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the model."""
        return self.model.likelihood

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(iter(self.model.initial.values())).device

    @property
    def masks(self) -> Weights:
        """Of a pruned posterior: True where a weight was kept, by name, shaped like the weight; empty if nothing was pruned.

        Where there are several chains or parts, each is pruned by itself, and they are stacked on a leading axis.
        """
        return self._masks

    @property
    def interrupted(self) -> bool:
        """Whether the run was ended early by Ctrl-C."""
        return bool(self.run.get("interrupted", False))

    # -----------------------------------------------------------------------------------------------------------------
    # What each kind of posterior provides

    @abstractmethod
    def plan_draws(self, draws: int | None, seed: int) -> Any:
        """Decide which draws are meant, once, so that every part of the inputs sees the same ones."""

    @abstractmethod
    def count(self, plan: Any) -> int:
        """How many draws a plan has."""

    @abstractmethod
    def evaluate(self, plan: Any, x: Any) -> Draws:
        """f(x) for the planned draws, [S, n, *outputs], with the likelihood's weights for each: [S, …]."""

    @abstractmethod
    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """Draws of the random weights, named, stacked on a leading axis."""

    @abstractmethod
    def _moved(self, model: Model, device: torch.device) -> Posterior:
        """The same posterior with its tensors on another device."""

    @abstractmethod
    def _write(self, folder: Path) -> dict[str, Any]:
        """Write the tensors into a folder; return what the JSON must say to find them."""

    @classmethod
    @abstractmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> Posterior:
        """The inverse of `_write`."""

    def starting_points(self, members: int) -> Weights:  # noqa: ARG002
        """Weights (points and buffers among them) at which `members` later runs can start, on a leading axis."""
        return self.weights()

    # -----------------------------------------------------------------------------------------------------------------
    # Functions and predictions

    def functions(self, x: Any, draws: int | None = None, seed: int = 0) -> Tensor:
        """Coherent function draws f_s(x): [draws, N, *outputs]. One draw is one function over all inputs."""
        inputs = self._inputs(x)
        plan = self.plan_draws(_check_draws(draws), seed)
        return self._evaluate_in_parts(plan, inputs, None, seed).outputs

    def predict(self, x: Any, draws: int | None = None, seed: int = 0, batch_size: int | None = None) -> Predictive:
        """The Bayesian model average at x: a mixture over draws, evaluated in parts of `batch_size` inputs."""
        inputs = self._inputs(x)
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size must be a whole number of at least 1, or None, got {batch_size!r}")
        self._try(inputs)
        plan = self.plan_draws(_check_draws(draws), seed)
        return Predictive(
            self.likelihood,
            lambda rows: self._evaluate_in_parts(plan, take(inputs, rows), batch_size, seed),
            num_inputs=num_rows(inputs),
            num_draws=self.count(plan),
            output_shape=self.model.output_shape,
        )

    def _inputs(self, x: Any) -> Any:
        first = next(iter(self.model.initial.values()))
        inputs = as_inputs(x, dtype=first.dtype, device=first.device)
        if num_rows(inputs) == 0:
            raise ValueError("x is empty: there is nothing to predict")
        return inputs

    def _try(self, inputs: Any) -> None:
        """Run the network on one example, so that `predict` refuses inputs that do not fit and not the first question to it."""
        model, first = self.model, take(inputs, slice(0, 1))
        with torch.no_grad():
            outputs = _running(lambda: model.outputs({**model.initial, **model.buffers}, first))
        self._check_shape(outputs.shape[1:])

    def _evaluate_in_parts(self, plan: Any, inputs: Any, batch_size: int | None, seed: int) -> Draws:
        count = num_rows(inputs)
        size = batch_size or max(1, min(count, 4096))
        parts: list[Draws] = []
        with torch.no_grad(), random.isolated(seed, self.device):  # for networks that draw numbers themselves
            for start in range(0, count, size):
                rows = slice(start, start + size)
                parts.append(_running(lambda rows=rows: self.evaluate(plan, take(inputs, rows))))  # type: ignore[misc]
        outputs = parts[0].outputs if len(parts) == 1 else torch.cat([part.outputs for part in parts], dim=1)
        self._check_shape(outputs.shape[2:])
        return Draws(outputs, parts[0].weights)

    def _stacked_outputs(self, stacked: Weights, x: Any, count: int) -> Tensor:
        def one_by_one() -> Tensor:
            return torch.stack([self.model.outputs(tree.index(stacked, i), x) for i in range(count)])

        if count == 1 or not self._stackable:
            return one_by_one()
        try:
            return torch.func.vmap(lambda w: self.model.outputs(w, x))(stacked)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            outputs = one_by_one()  # where this fails too, x is at fault and not vmap
            log.debug("vmap over draws failed (%s): they are evaluated one by one", error)
            self._stackable = False
            return outputs

    def _check_shape(self, shape: Sequence[int]) -> None:
        if tuple(shape) != tuple(self.model.output_shape):
            raise ValueError(
                f"x gives outputs of shape {tuple(shape)} per example, the data it was fitted on gave "
                f"{tuple(self.model.output_shape)}"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # Pruning

    def prune(
        self,
        fraction: float | None = None,
        *,
        threshold: float | None = None,
        by: Literal["snr", "magnitude", "log_alpha"] = "snr",
        where: Where = None,
        per_layer: bool = False,
    ) -> Self:
        """The same posterior with the least useful weights at exactly 0 in every draw; see `plausible.pruning.prune`."""
        from plausible.analysis.pruning import prune

        return prune(self, fraction, threshold=threshold, by=by, where=where, per_layer=per_layer)

    def _networks(self) -> list[tuple[Weights, Weights | None]]:
        """Means and scales (None: there are none) of the random weights of each network: one, or one for each chain.

        A kind that says them can be pruned, and its draws must then be 0 where `_masks` is False.
        """
        raise TypeError(f"a {type(self).__name__} has no means and scales of weights, so it cannot be pruned")

    def _masked(self, masks: Weights) -> Self:
        """The same posterior with these masks; a bound on the evidence no longer holds for it."""
        pruned = copy.copy(self)
        pruned._masks, pruned.log_evidence = masks, None
        return pruned

    def _kept(self, weights: Weights) -> Weights:
        """Weights, or draws of them on a leading axis, with 0 where a weight was pruned."""
        return {n: torch.where(self._masks[n], w, 0.0) if n in self._masks else w for n, w in weights.items()}

    # -----------------------------------------------------------------------------------------------------------------
    # About the posterior

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """How far to trust the draws: `draws`, `chains`, and where there are enough `rhat`, `ess_bulk`, `ess_tail`.

        With `x` on the function values f(x), where permuting hidden units does not matter; otherwise on the weights.
        `divergences` counts transitions that failed (0 for methods without any).
        """
        return {"draws": None, "chains": 1, "divergences": 0}

    def verdict(self, x: Any = None) -> str:
        """Whether the chains can be trusted, in plain words with numbers and what to do; with `x` judged by the functions f(x).

        Only posteriors of stored draws have chains; others raise a TypeError.
        """
        from plausible.posteriors.verdicts import verdict

        return verdict(self, x)

    def to_arviz(self, x: Any = None) -> Any:
        """Stored draws as arviz's `InferenceData`: weights by name, `f` at `x`, statistics of transitions (extra `mcmc`)."""
        from plausible.posteriors.arviz_export import to_arviz

        return to_arviz(self, x)

    def summary(self) -> str:
        """What was inferred, weight by weight."""
        model, masks = self.model, self.masks
        rows = []
        named = {**dict(model.network.named_parameters()), **model.noise(model.initial)}
        for name, weight in named.items():
            status = self._status(name) + _sparsity([masks[name]] if name in masks else [])
            rows.append((name, "×".join(map(str, weight.shape)) or "scalar", status))
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        body = "\n".join(f"  {n:<{wide[0]}}  {s:<{wide[1]}}  {status}" for n, s, status in rows)
        head = f"{self._method_name} posterior, {type(model.likelihood).__name__} likelihood"
        return f"{head}, {model.num_data:,} examples{_sparsity(list(masks.values()))}\n{body}"

    def _status(self, name: str) -> str:
        model = self.model
        return "inferred" if name in model.random else "trained as a point" if name in model.initial else "fixed"

    def __repr__(self) -> str:
        count = tree.num_elements({n: self.model.initial[n] for n in self.model.random})
        data = f"{self.model.num_data:,} examples"
        return f"<{type(self).__name__} by {self._method_name}: {count:,} random weights, {data}>"

    @property
    def _method_name(self) -> str:
        return self.method.name if isinstance(self.method, Opaque) else type(self.method).__name__

    def to(self, device: torch.device | str) -> Posterior:
        """The same posterior on another device."""
        from plausible.fitting import choose_device

        target = choose_device(self.model.network, device)
        return self._placed(self.model.to(target), target)

    def _placed(self, model: Model, device: torch.device) -> Posterior:
        """`_moved`, with what every kind has."""
        moved = self._moved(model, device)
        moved.log_evidence, moved._masks = self.log_evidence, tree.to(self._masks, device)
        return moved

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write a folder of safetensors and JSON: no pickle, nothing half written."""
        from plausible.posteriors.saving import save

        return save(self, path, overwrite=overwrite)


def _running(network: Callable[[], Result]) -> Result:
    """Call the network; its errors become one that names x."""
    try:
        return network()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"the network could not be run on x: {type(error).__name__}: {error}") from error


def _sparsity(masks: Sequence[Tensor]) -> str:
    """`, 75.0 % of 1,200 weights pruned` for these masks; nothing where there are none."""
    total, kept = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
    return f", {100 * (1 - kept / total):.1f} % of {total:,} weights pruned" if total else ""


def _check_draws(draws: int | None) -> int | None:
    if draws is None:
        return None
    if isinstance(draws, bool) or not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ValueError(f"draws must be a whole number of at least 1, or None for all, got {draws!r}")
    return int(draws)


def record_of(fitted: Fitted) -> dict[str, Any]:
    """What a posterior remembers of its run."""
    return {
        "history": fitted.history,
        "steps": fitted.steps,
        "seconds": fitted.seconds,
        "mode": fitted.mode,
        "interrupted": fitted.interrupted,
    }


class DrawsPosterior(Posterior):
    """Stored draws, equally weighted: a point, an ensemble, the states of chains. Draw r belongs to chain r mod `chains`."""

    kind = "draws"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], store: DrawStore, chains: int = 1):
        super().__init__(method, model, run)
        self.store, self.chains = store, chains

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, chains: int = 1) -> DrawsPosterior:
        """From what a run left."""
        if fitted.draws is None:
            raise ValueError(f"{type(method).__name__} kept no draws: the run ended during burn-in")
        return cls(method, model, record_of(fitted), fitted.draws, chains)

    def __len__(self) -> int:
        return len(self.store)

    def plan_draws(self, draws: int | None, seed: int) -> list[int]:
        """Row numbers: all of them, fewer without replacement, more by resampling."""
        total = len(self.store)
        if draws is None or draws == total:
            return list(range(total))
        stream = random.generator(seed, 7)
        if draws < total:
            return sorted(torch.randperm(total, generator=stream)[:draws].tolist())
        return torch.randint(total, (draws,), generator=stream).tolist()

    def count(self, plan: Sequence[int]) -> int:
        """Number of rows."""
        return len(plan)

    def evaluate(self, plan: Sequence[int], x: Any) -> Draws:
        """All rows by vmap in chunks, or one by one where vmap has no rule; repeated rows are computed once."""
        distinct = sorted(set(plan))
        per_draw = max(1, sum(4 * max(1, torch.Size(s).numel()) for s in self.store.shapes().values()))
        chunk = max(1, min(len(distinct), 2**28 // per_draw, max(1, 2**17 // max(1, num_rows(x)))))
        outputs, noises = [], []
        for start in range(0, len(distinct), chunk):
            rows = distinct[start : start + chunk]
            stacked = self.store.get(rows, self.device)
            outputs.append(self._stacked_outputs(stacked, x, len(rows)))
            noises.append(self.model.noise(stacked))
        values, noise = torch.cat(outputs), tree.concatenate(noises)
        if len(distinct) != len(plan) or list(plan) != distinct:
            position = {row: i for i, row in enumerate(distinct)}
            order = torch.tensor([position[row] for row in plan], device=values.device)
            values, noise = values[order], tree.index(noise, order)
        return Draws(values, noise)

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """Draws of the random weights, named, stacked on a leading axis."""
        found = self.store.get(self.plan_draws(_check_draws(draws), seed), self.device)
        return {name: found[name].clone() for name in self.model.random}  # the store may have given its own tensors

    def diagnostics(self, x: Any = None) -> dict[str, Any]:
        """R̂ and effective sample sizes over all draws in chain order, of f(x) or of the weights; see `Posterior`."""
        from plausible.posteriors.summaries import convergence

        return convergence(self, x)

    def _networks(self) -> list[tuple[Weights, Weights | None]]:
        """Those of each chain over its draws; no scales where a chain has one draw."""
        from plausible.analysis.pruning import chain_moments

        return chain_moments(self.store, self.model.random, self.chains)

    def _masked(self, masks: Weights) -> Self:
        """With a store whose draws are 0 where a weight was pruned."""
        from plausible.analysis.pruning import pruned_store

        pruned = super()._masked(masks)
        pruned.store = pruned_store(self.store, masks, self.chains)
        return pruned

    def _moved(self, model: Model, device: torch.device) -> DrawsPosterior:
        store = MemoryDraws(tree.to(self.store.stacked, device)) if isinstance(self.store, MemoryDraws) else self.store
        return DrawsPosterior(self.method, model, {**self.run, "history": self.history}, store, self.chains)

    def _write(self, folder: Path) -> dict[str, Any]:
        from plausible.posteriors.saving import write_shards

        return {"shards": write_shards(folder, self.store), "chains": self.chains}

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> DrawsPosterior:
        from plausible.posteriors.saving import history_of, read_shards

        store = read_shards(folder, content["shards"], model)
        return cls(method, model, history_of(content["run"]), store, int(content["chains"]))


class MixturePosterior(Posterior):
    """An equal mixture of posteriors: an ensemble of a method whose result is not a set of draws."""

    kind = "mixture"

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any], parts: Sequence[Posterior]):
        super().__init__(method, model, run)
        self.parts = list(parts)

    @classmethod
    def of(cls, method: Any, model: Model, fitted: Fitted, parts: Sequence[Posterior]) -> MixturePosterior:
        """From what a run left."""
        return cls(method, model, record_of(fitted), parts)

    def plan_draws(self, draws: int | None, seed: int) -> list[tuple[Posterior, Any]]:
        """An equal share for each part (the first parts get what is left over)."""
        plans = []
        for k, part in enumerate(self.parts):
            share = None if draws is None else draws // len(self.parts) + (k < draws % len(self.parts))
            if share != 0:
                plans.append((part, part.plan_draws(share, seed + k)))
        return plans

    def count(self, plan: Sequence[tuple[Posterior, Any]]) -> int:
        """Draws of all parts."""
        return sum(part.count(own) for part, own in plan)

    def evaluate(self, plan: Sequence[tuple[Posterior, Any]], x: Any) -> Draws:
        """The parts' functions, one after the other."""
        found = [part.evaluate(own, x) for part, own in plan]
        return Draws(torch.cat([f.outputs for f in found]), tree.concatenate([dict(f.weights) for f in found]))

    def starting_points(self, members: int) -> Weights:  # noqa: ARG002
        """One of each part."""
        return tree.concatenate([tree.index(part.starting_points(1), slice(-1, None)) for part in self.parts])

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:
        """The parts' weights, joined."""
        _check_draws(draws)
        found = []
        for k, part in enumerate(self.parts):
            share = None if draws is None else draws // len(self.parts) + (k < draws % len(self.parts))
            if share != 0:
                found.append(part.weights(share, seed + k))
        return tree.concatenate(found)

    @property
    def masks(self) -> Weights:
        """Those of the parts, stacked: name → [parts, *shape]."""
        return tree.stack([part.masks for part in self.parts])

    def _moved(self, model: Model, device: torch.device) -> MixturePosterior:
        parts = [part._placed(model, device) for part in self.parts]
        return MixturePosterior(self.method, model, {**self.run, "history": self.history}, parts)

    def _write(self, folder: Path) -> dict[str, Any]:
        from plausible.posteriors.saving import write_kind

        parts = []
        for k, part in enumerate(self.parts):
            own = folder / f"part-{k:03d}"
            own.mkdir()
            parts.append({"kind": part.kind, "run": part.run | {"history": part.history}, **write_kind(part, own)})
        return {"parts": parts}

    @classmethod
    def _read(cls, folder: Path, content: Mapping[str, Any], method: Any, model: Model) -> MixturePosterior:
        from plausible.posteriors.saving import history_of, read_kind

        inner = getattr(method, "method", method)
        parts = [read_kind(folder / f"part-{k:03d}", part, inner, model) for k, part in enumerate(content["parts"])]
        return cls(method, model, history_of(content["run"]), parts)
