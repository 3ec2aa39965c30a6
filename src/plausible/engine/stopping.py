"""Early stopping: the weights that were best on held-out examples, and for how long nothing was better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plausible.core.data import Batch, Data, accumulate, num_rows
from plausible.core.model import Model
from plausible.core.weights import Weights, clone, index, tree_map


class Stopping:
    """Judges states, which have `weights` and `buffers`, by the mean log-likelihood of `held`, for each member on its own.

    What has to predict is what `judged` makes of them: the network's own weights and buffers. A member whose patience has run out
    is not judged again, however long the others train.
    """

    def __init__(
        self, state: Any, held: Data, patience: int, members: int | None, judged: Callable[[Weights], Weights] = lambda w: w
    ):
        self.held, self.patience, self.members, self.judged = held, patience, members, judged
        device = next(iter(state.weights.values())).device
        shape = () if members is None else (members,)
        # one tree of tensors, so that it travels with checkpoints
        self.tree: dict[str, Any] = {
            "best": clone({**state.weights, **state.buffers}),
            "value": torch.full(shape, -torch.inf, device=device),
            "stale": torch.zeros(shape, dtype=torch.int64, device=device),
        }
        self._weight: float | None = None

    @property
    def over(self) -> bool:
        return bool((self.tree["stale"] >= self.patience).all())

    def judge(self, model: Model, state: Any) -> float:
        """Judge a state by its held-out log-likelihood, of which the mean over members is returned."""
        variables = {**state.weights, **state.buffers}

        def total(batch: Batch) -> Tensor:
            if self.members is None:
                return _log_likelihood(model, self.judged(variables), batch)
            each = [_log_likelihood(model, self.judged(index(variables, k)), batch) for k in range(self.members)]
            return torch.stack(each)

        if self._weight is None:  # the number of held-out examples, or the sum of their weights
            self._weight = float(accumulate(_weight, self.held)) or 1.0
        value = accumulate(total, self.held) / self._weight
        stale, best = self.tree["stale"], self.tree["value"]
        # a member that was stopped alone would not have seen this epoch
        judged = torch.where(stale >= self.patience, -torch.inf, value)
        better = judged > best

        def choose(now: Tensor, old: Tensor) -> Tensor:
            return torch.where(better.reshape(better.shape + (1,) * (now.ndim - better.ndim)), now, old)

        self.tree = {
            "best": tree_map(choose, variables, self.tree["best"]),
            "value": torch.where(better, judged, best).to(best.dtype),
            "stale": torch.where(better, 0, stale + 1),
        }
        return float(value.mean())

    def best_of(self, state: Any) -> Any:
        """The state at the weights that were best; as it is where nothing has been judged."""
        if not bool(torch.isfinite(self.tree["value"]).all()):
            return state
        best = self.tree["best"]
        return state._replace(
            weights={name: best[name] for name in state.weights}, buffers={name: best[name] for name in state.buffers}
        )


def _weight(batch: Batch) -> Tensor:
    return torch.tensor(float(num_rows(batch.x)) if batch.weight is None else float(batch.weight.sum()))


def _log_likelihood(model: Model, variables: Any, batch: Batch) -> Tensor:
    each = model.log_likelihood(variables, batch)
    return (each if batch.weight is None else each * batch.weight).sum()
