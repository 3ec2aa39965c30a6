"""Accumulate: a stage that is known after one or more passes over the data, fed batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from plausible.core.data import Batch, Data, Estimator, StreamData, num_rows
from plausible.core.model import Model
from plausible.core.weights import Weights
from plausible.engine.method import Info, Plan, Run, Stage, Traits

ENDLESS = 2**62


class PassState:
    """An estimator, how far its passes are, and at the end their `result`. `estimator` None: there is nothing to do."""

    def __init__(self, estimator: Estimator[Any] | None, data: Data):
        self.estimator, self.data = estimator, data
        self.batches = self.seen = 0  # batches of this pass, examples of all
        self.over, self.result = estimator is None, None
        self._feed: Iterator[Batch] | None = None

    @property
    def total(self) -> int:
        """Examples of all passes together; the estimator may be content with fewer passes."""
        return 0 if self.estimator is None else self.estimator.passes * self.data.num_data

    @property
    def resumable(self) -> bool:
        """False for a loader: it gives its batches in another order the next time, so an interrupted pass begins anew."""
        return not isinstance(self.data, StreamData) or self.data.indexable

    def advance(self) -> None:
        """Add the next batch; after the last one, ask the estimator whether it needs another pass."""
        assert self.estimator is not None
        if self._feed is None:  # also in a resumed pass, which skips what it has seen
            self._feed = iter(self.data.chunks(self.estimator.chunk))
            for _ in range(self.batches):
                next(self._feed)
        batch = next(self._feed, None)
        if batch is not None:
            self.estimator.add(batch)
            self.batches, self.seen = self.batches + 1, self.seen + num_rows(batch.x)
            return
        self._feed, self.batches = None, 0
        self.over = not self.estimator.next_pass()

    def tensors(self) -> dict[str, Tensor]:
        if self.estimator is None or not self.resumable:
            return {}
        return {**self.estimator.tensors(), "pass/place": torch.tensor([self.batches, self.seen, int(self.over)])}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self.estimator is None or "pass/place" not in tensors:
            return
        self.estimator.restore({name: value for name, value in tensors.items() if name != "pass/place"})
        self.batches, self.seen, over = tensors["pass/place"].tolist()
        self.over = bool(over)


class Pass(Stage):
    """The base of stages that add something up over the data.

    A subclass defines `estimator`, `kept`, and where the estimator's result is not yet what it wants, `concluded`.
    """

    traits: ClassVar[Traits] = Traits(verb="accumulate", divisible=False, keeps_draws=False, mixed_precision=False)

    def estimator(self, model: Model, run: Run[Any]) -> Estimator[Any] | None:
        """What is fed with the data; None where there is nothing to do."""
        raise NotImplementedError

    def concluded(self, model: Model, run: Run[Any], result: Any) -> Any:  # noqa: ARG002
        """What becomes `state.result`, from what the estimator's `finish` returned; not None."""
        return result

    def plan(self, num_data: int, per_epoch: int | None = None) -> Plan:  # noqa: ARG002
        # how many batches there are is known when a pass has ended
        return Plan(steps=ENDLESS, per_epoch=ENDLESS, batch_size=None, unit="examples")

    def start(self, model: Model, run: Run[Any], key: Tensor) -> PassState:  # noqa: ARG002
        return PassState(self.estimator(model, run), run.data)

    def step(self, model: Model, run: Run[Any], state: PassState, batch: Batch) -> tuple[PassState, Info]:  # noqa: ARG002
        if not state.over:
            state.advance()
        if state.over and state.estimator is not None:
            state.result = self.concluded(model, run, state.estimator.finish())
        return state, {}

    def kept(self, model: Model, run: Run[Any], state: PassState) -> Weights:
        raise NotImplementedError(f"{type(self).__name__} must define kept(model, run, state): what its state.result leaves")

    def finished(self, state: PassState) -> bool:
        return state.over and (state.estimator is None or state.result is not None)

    def caption(self, state: PassState) -> str:
        return "" if state.estimator is None else state.estimator.note
