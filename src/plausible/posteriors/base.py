"""What a posterior is: draws of functions, prediction, diagnostics, save. Whatever the method, all goes through f(x)."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from plausible.core import random
from plausible.core import weights as tree
from plausible.core.conversion import refuse_nothing_left
from plausible.core.data import ArrayData, Data, as_data, num_rows, read_inputs, take
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.networks import choose_device
from plausible.core.serialise import Opaque
from plausible.core.tables import Table
from plausible.core.turns import alone
from plausible.core.weights import Weights
from plausible.engine.method import Fitted
from plausible.posteriors import compression, pruning, saving, showing
from plausible.posteriors.predictive import Draws, Predictive
from plausible.posteriors.saving import Content, example_of, kinds


class Posterior(ABC):
    """p(w | D), or what a method made of it: draws of f(x), of weights where there are any, and predictions, all with a seed.

    `method`, `model` and `run` say where it comes from. `history` holds the mean of each logged term per epoch, `log_evidence` an
    estimate of log p(D) where the method has one: given the weights trained as points, where there are some, and under the prior
    that was fitted, where a method fits it. `parts` are the posteriors of which this one is a mixture.

    A subclass has a `kind`, the word for it in files, and defines `num_draws`, `evaluate`, `content` and `rebuilt`; saving, loading
    and moving follow. For `evaluate` the same `draws` and `seed` must mean the same functions whatever the inputs, since large
    inputs come in blocks. There need be no weights. Where there are, it defines `weights` and `starting_points`; with `networks`
    it can be pruned, and its draws must then be 0 where `masks` are False (see `kept`). See docs/extending.md.
    """

    kind: ClassVar[str] = ""
    log_evidence: float | None = None
    parts: Sequence[Posterior] = ()
    _masks: Weights = {}  # noqa: RUF012  replaced, never written to

    def __init__(self, method: Any, model: Model, run: Mapping[str, Any]):
        self.method, self.model = method, model
        self.run = dict(run)
        self.history: dict[str, list[float]] = self.run.pop("history", {})

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        if cls.__dict__.get("kind"):  # its own, not one that it inherits
            kinds[cls.kind] = cls

    # -----------------------------------------------------------------------------------------------------------------
    # What each kind says

    @abstractmethod
    def num_draws(self, draws: int | None) -> int:
        """How many draws there will be where `draws` were asked for (None: as many as this kind gives by itself)."""

    @abstractmethod
    def evaluate(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        """f(x) for these draws, [S, n, *outputs], with the likelihood's weights for each, [S, …]; `batch_size` inputs at a time."""

    @abstractmethod
    def content(self) -> Content:
        """What it consists of, apart from method, model, run, evidence and masks."""

    @classmethod
    @abstractmethod
    def rebuilt(cls, method: Any, model: Model, run: Mapping[str, Any], content: Content) -> Self:
        """The inverse of `content`."""

    def weights(self, draws: int | None = None, seed: int = 0) -> Weights:  # noqa: ARG002
        """Draws of the random weights, named, stacked on a leading axis."""
        raise TypeError(f"a {type(self).__name__} has no draws of weights, only of functions: use functions or predict")

    def starting_points(self, members: int) -> Weights:  # noqa: ARG002
        """Weights (points and buffers among them) at which `members` later runs can start, on a leading axis."""
        return self.weights()

    def networks(self) -> list[tuple[Weights, Weights | None]]:
        """Means and scales (None: there are none) of the random weights of each network: one, or one for each chain."""
        raise TypeError(f"a {type(self).__name__} has no means and scales of weights, so it cannot be pruned")

    def try_inputs(self, inputs: Any) -> tuple[int, ...]:
        """Evaluate one example, whose outputs have this shape.

        Inputs that do not fit are then an error of `predict`, and not of the first look at its result.
        """
        return tuple(self._evaluated(take(inputs, slice(0, 1)), 1, 0).outputs.shape[2:])

    def status(self, name: str) -> str:
        """How the weight of this name was inferred, in words."""
        model = self.model
        return "inferred" if name in model.random else "trained as a point" if name in model.initial else "fixed"

    # -----------------------------------------------------------------------------------------------------------------
    # Functions and predictions

    def functions(self, x: Any, draws: int | None = None, seed: int = 0) -> Tensor:
        """Coherent function draws f_s(x): [draws, N, *outputs]. One draw is one function over all inputs.

        x: inputs, or a data set or loader as `fit` takes it (not shuffled), whose inputs are read into memory.
        Where targets were standardised for the fit (`likelihoods.Scaled`), functions are given in their units, in float64.
        """
        return self.likelihood.in_units(self._evaluated(self.inputs(x), check_draws(draws), seed).outputs)

    def predict(self, x: Any, draws: int | None = None, seed: int = 0, batch_size: int | None = None) -> Predictive:
        """The Bayesian model average at x: a mixture over draws, evaluated in parts of `batch_size` inputs.

        x: inputs, or a data set or loader as `fit` takes it (not shuffled), whose inputs are read into memory.
        Nothing but one example is evaluated here; the rest is when the `Predictive` is asked for something, of a copy of x.
        """
        inputs, draws, shape = self._asked(x, draws, seed, batch_size)
        return Predictive(
            self.likelihood,
            lambda rows: self._evaluated(take(inputs, rows), draws, seed, batch_size),
            num_inputs=num_rows(inputs),
            num_draws=self.num_draws(draws),
            output_shape=shape,
        )

    def _asked(self, x: Any, draws: int | None, seed: int, batch_size: int | None) -> tuple[Any, int | None, tuple[int, ...]]:
        """The arguments of `predict`, checked: the inputs as tensors, the number of draws, and the shape of an input's outputs."""
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be a whole number, got {seed!r}")
        inputs = self.inputs(x, own=True)
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size must be a whole number of at least 1, or None, got {batch_size!r}")
        shape = self.try_inputs(inputs)
        return inputs, check_draws(draws), shape

    def inputs(self, x: Any, *, own: bool = False) -> Any:
        """The inputs x, or those of a data set or loader, as tensors of the network's type, on its device; `own`: as a copy."""
        like = example_of(self.model)
        inputs = read_inputs(x, dtype=like.dtype, device=like.device, own=own)
        if num_rows(inputs) == 0:
            raise ValueError("x is empty: there is nothing to predict")
        return inputs

    def _evaluated(self, inputs: Any, draws: int | None, seed: int, batch_size: int | None = None) -> Draws:
        """`evaluate` as others call it: without gradients, with torch's generators left as they were, and errors that name x."""
        with torch.no_grad(), random.isolated(seed, self.device), naming_x():  # networks may draw numbers themselves
            values = self.evaluate(inputs, draws, seed, batch_size)
        self.check_shape(values.outputs.shape[2:])
        return values

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse outputs of another shape than those of the fit."""
        if not self.model.may_give(shape):
            fitted = tuple(self.model.output_shape)
            raise ValueError(f"x gives outputs of shape {tuple(shape)} per example, the data it was fitted on gave {fitted}")

    # -----------------------------------------------------------------------------------------------------------------
    # Pruning

    prune = pruning.prune
    compress = compression.compress
    size_on_disk = compression.size_on_disk

    @property
    def masks(self) -> Weights:
        """Of a pruned posterior: True where a weight was kept, by name, shaped like the weight; empty if nothing was pruned.

        Where there are several chains or parts, each is pruned by itself, and they are stacked on a leading axis.
        """
        return self._masks

    def masked(self, masks: Weights) -> Self:
        """The same posterior with these masks; a bound on the evidence no longer holds for it."""
        pruned = copy.copy(self)
        pruned._masks, pruned.log_evidence = masks, None
        return pruned

    def kept(self, weights: Weights) -> Weights:
        """Weights, or draws of them on a leading axis, with 0 where a weight was pruned."""
        return pruning.zeroed(weights, self._masks)

    # -----------------------------------------------------------------------------------------------------------------
    # About the posterior

    @property
    def likelihood(self) -> Likelihood:
        return self.model.likelihood

    @property
    def device(self) -> torch.device:
        return example_of(self.model).device

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run before its end."""
        return bool(self.run.get("interrupted", False))

    @property
    def record(self) -> dict[str, Any]:
        """The run with its history: what a posterior remembers of where it comes from."""
        return {**self.run, "history": self.history}

    @property
    def method_name(self) -> str:
        return self.method.name if isinstance(self.method, Opaque) else type(self.method).__name__

    def diagnostics(self, x: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """How far to trust the draws: `draws`, `chains`, and where there are enough `rhat`, `ess_bulk`, `ess_tail`.

        With `x` on the function values f(x), where permuting hidden units does not matter; otherwise on the weights.
        `divergences` counts transitions that failed (0 for methods without any).
        """
        return {"draws": None, "chains": 1, "divergences": 0}

    def verdict(self, x: Any = None) -> str:  # noqa: ARG002
        """Whether the chains can be trusted, in plain words with numbers and what to do; with `x` judged by the functions f(x).

        Only posteriors of stored draws have chains; others raise a TypeError.
        """
        raise TypeError(f"a {type(self).__name__} has no chains: it does not keep draws in their order")

    def to_arviz(self, x: Any = None) -> Any:  # noqa: ARG002
        """Stored draws as arviz's `InferenceData`: weights by name, `f` at `x`, statistics of transitions (extra `mcmc`)."""
        raise TypeError(f"a {type(self).__name__} has no chains: it does not keep draws in their order")

    def _rounded_away(self) -> dict[str, str]:
        """The random weights in half precision that are equal in all draws, and what to say of them."""
        narrow = [n for n in self.model.random if self.model.initial[n].dtype in (torch.bfloat16, torch.float16)]
        try:
            drawn = self.weights(4) if narrow and self.num_draws(4) > 1 else {}
        except TypeError:  # it has none
            drawn = {}
        if not drawn:
            return {}
        equal = [name for name in narrow if name in drawn and bool((drawn[name] == drawn[name][:1]).all())]
        kind = str(self.model.initial[narrow[0]].dtype).removeprefix("torch.")
        return dict.fromkeys(equal, f", but equal in all draws: {kind} rounds their differences away, fit network.float()")

    def summary(self) -> Table:
        """What was inferred, weight by weight: `print` it, or let a notebook show it."""
        model, masks = self.model, self.masks
        named = {**dict(model.network.named_parameters()), **model.noise(model.initial)}
        lost = self._rounded_away()
        rows = [
            (
                name,
                tuple(weight.shape),
                self.status(name) + lost.get(name, "") + _sparsity([masks[name]] if name in masks else []),
            )
            for name, weight in named.items()
        ]
        head = f"{self.method_name} posterior, {type(model.likelihood).__name__} likelihood"
        title = f"{head}, {model.num_data:,} examples{_sparsity(list(masks.values()))}"
        return Table(("weight", "shape", "status"), rows, title, words=("weight", "shape", "status"))

    def _repr_html_(self) -> str:
        return showing.posterior_html(self)

    def __repr__(self) -> str:
        count = tree.num_elements(tree.select(self.model.initial, self.model.random))
        who = f"{type(self).__name__} by {self.method_name}"
        return f"<{who}: {count:,} random weights, {self.model.num_data:,} examples>"

    def to(self, device: torch.device | str) -> Self:
        """The same posterior on another device."""
        target = choose_device(self.model.network, device)
        return saving.placed(self, self.model.to(target), target)  # type: ignore[return-value]

    save = saving.save


@contextlib.contextmanager
def naming_x() -> Iterator[None]:
    """Turn errors of the network inside the block into a ValueError that names x; threads take turns with it."""
    try:
        with alone():
            yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"the network could not be run on x: {type(error).__name__}: {error}") from error


def _sparsity(masks: Sequence[Tensor]) -> str:
    """`, 75.0 % of 1,200 weights pruned` for these masks; nothing where there are none."""
    total, kept = sum(mask.numel() for mask in masks), sum(int(mask.sum()) for mask in masks)
    return f", {100 * (1 - kept / total):.1f} % of {total:,} weights pruned" if total else ""


def check_draws(draws: int | None) -> int | None:
    """A number of draws that was asked for, checked."""
    if draws is None:
        return None
    if isinstance(draws, bool) or not isinstance(draws, (int, np.integer)) or draws < 1:
        raise ValueError(f"draws must be a whole number of at least 1, or None for all, got {draws!r}")
    return int(draws)


def record_of(fitted: Fitted) -> dict[str, Any]:
    """What a posterior remembers of its run."""
    record = {name: getattr(fitted, name) for name in ("history", "steps", "seconds", "mode", "interrupted")}
    return {**record, "stages": [list(stage) for stage in fitted.stages]}


def data_for(model: Model, data: Any, mask: Any = None) -> Data:
    """Data as `fit` takes them, checked against a model that was fitted before."""
    like = example_of(model)
    return checked(model, as_data(data, dtype=like.dtype, device=like.device, mask=mask))


def checked(model: Model, data: Data) -> Data:
    """The data with their targets checked by the likelihood: those of arrays now, those of a stream batch by batch as they come."""
    own = model.output_shape

    def check(y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # batches of a stream may be padded to lengths of their own
        positions = own[:-1] if isinstance(data, ArrayData) else tuple(y.shape[1 : len(own)])
        shape = (*positions, own[-1]) if len(positions) == len(own) - 1 else own
        targets = model.likelihood.check(torch.Size((len(y), *shape)), y, mask=mask)
        return targets, model.likelihood.observed(y, mask)

    if isinstance(data, ArrayData):
        y, mask = check(data.batch.y, data.batch.mask)
        refuse_nothing_left(data.batch.weight, mask)
        return replace(data, batch=data.batch._replace(y=y, mask=mask))
    return replace(data, check=check)
