"""Decisions by expected utility: a* = argmax_a E_y u(a, y), the reject option, and what knowing more would be worth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plausible.analysis.decisions.inputs import draw_probabilities, mean_probabilities, need, outcomes, refuse
from plausible.analysis.metrics.inputs import CLASSES, NUMBERS, chosen
from plausible.core.conversion import as_tensor
from plausible.posteriors.predictive import Predictive

REJECT = -1
"""The action of handing an input over; the last column of `Decision.utilities`."""


@dataclass(frozen=True, eq=False)
class Decision:
    """The best of A actions for each input, and how much better than the others it is expected to be.

    `action` int64 [N, ...] indexes `actions`, −1 where the input was rejected; `expected_utility` [N, ...] is its utility and
    `utilities` [N, ..., A] those of all actions (with `reject=` a last column for rejecting). `standard_error`, shaped like
    `utilities`, is that of Monte Carlo, 0 where expectations are exact. `margin` [N, ...] is the advantage over the second
    best (infinite with one action), and `margin_error` its standard error: both were judged on the same samples, so it is far
    smaller than the two errors suggest. Where the margin is within two of them, take more samples, or either action.
    """

    action: Tensor
    expected_utility: Tensor
    utilities: Tensor
    actions: tuple[Any, ...]
    standard_error: Tensor
    margin: Tensor
    margin_error: Tensor

    def __len__(self) -> int:
        return len(self.action)

    @property
    def rejected(self) -> Tensor:
        """Which inputs are handed over, boolean [N, ...]."""
        return self.action == REJECT

    @property
    def chosen(self) -> list[Any]:
        """The actions themselves, as they were given, nested like `action`; None where rejected."""

        def named(index: Any) -> Any:
            if isinstance(index, list):
                return [named(part) for part in index]
            return None if index == REJECT else self.actions[index]

        return named(self.action.tolist())


def decide(
    predictive: Any,
    utility: Any,
    *,
    actions: Sequence[Any] | None = None,
    reject: float | None = None,
    samples: int = 1000,
    seed: int = 0,
    outcomes: str = "classes",
) -> Decision:
    """a* = argmax_a E_y u(a, y), for each input (von Neumann & Morgenstern 1944; Berger 1985). Higher utility is better.

    Classes: `utility` is a matrix [A, C], one [N, A, C] per input, or a callable `utility(action, y)`, called with each of
    `actions` (default: the classes) and each class, an integer tensor without axes; it returns a number. `predictive` is a
    `Predictive` or probabilities; the expectation is exact.

    Numbers and counts: a callable `utility(action, y)` and a finite set of `actions`. y has shape [n, N, *outputs]: n ≥
    `samples` samples by `seed`, spread evenly over the draws and the same for all actions. The utilities are returned for
    each target (the shape of y), for each input ([n, N]) or as one number. Plain samples [n, N, ...] are taken with
    outcomes="numbers". Costs the memory of the samples and A calls; for the smooth cases see `quantile_action`.

    `reject` is the cost of handing an input to somebody who finds the truth and acts on it: u(reject, y) = max_a u(a, y) −
    cost, the same for all classes where the best utility is. It is chosen where the value of perfect information exceeds
    the cost. For 0/1 utilities that is 1 − max p > cost (Chow 1970). Rejecting at a utility of its own is a further row of
    the matrix.
    """
    if reject is not None and (isinstance(reject, bool) or not isinstance(reject, Real) or not 0 <= reject < math.inf):
        raise ValueError(f"reject must be the cost of rejecting an input, a finite number of at least 0, got {reject!r}")
    cost = None if reject is None else float(reject)
    if _numeric(predictive, outcomes):
        return _sampled_decision(_Samples.of(predictive, utility, actions, samples, seed), cost)
    probs = mean_probabilities(predictive)
    matrix, names = _matrix(utility, actions, probs)
    utilities = _expected(matrix, probs)
    if cost is not None:
        utilities = torch.cat([utilities, _perfect(matrix, probs).unsqueeze(-1) - cost], -1)
    margin, _ = _margin(utilities)
    return _decision(utilities, names, cost is not None, torch.zeros_like(utilities), margin, torch.zeros_like(margin))


def value_of_perfect_information(
    predictive: Any,
    utility: Any,
    *,
    actions: Sequence[Any] | None = None,
    samples: int = 1000,
    seed: int = 0,
    outcomes: str = "classes",
) -> Tensor:
    """E_y max_a u(a, y) − max_a E_y u(a, y) ≥ 0 for each input: the most that learning y before acting can be worth.

    Raiffa & Schlaifer (1961). In the units of the utility, shaped like the targets. Arguments as in `decide`. Exact for
    classes; for numbers both terms come from the same samples, and the maximum over noisy means makes it slightly small.
    """
    if _numeric(predictive, outcomes):
        drawn = _Samples.of(predictive, utility, actions, samples, seed)
        return (drawn.best().mean((0, 1)) - drawn.means().amax(-1)).clamp(min=0)
    probs = mean_probabilities(predictive)
    matrix, _ = _matrix(utility, actions, probs)
    return (_perfect(matrix, probs) - _expected(matrix, probs).amax(-1)).clamp(min=0)


def value_of_epistemic_information(
    predictive: Any, utility: Any, *, actions: Sequence[Any] | None = None, samples: int = 1000, seed: int = 0
) -> Tensor:
    """E_s max_a E[u(a, y) | f_s] − max_a E_y u(a, y) ≥ 0: what knowing the right draw, but not the noise, would be worth.

    The part of the value of perfect information that more training data could deliver (Raiffa & Schlaifer 1961: the model is
    what is learned); never more than the whole. Needs draws: a `Predictive`, or class probabilities [S, N, C]. Arguments
    otherwise as in `decide`. Exact for classes. For numbers each draw has m = `samples`/S samples, and the maximum over the
    noisy means of a draw makes it too large by up to the order of 1/√m; take `samples` well above the number of draws.
    """
    if _numeric(predictive, "classes"):
        drawn = _Samples.of(predictive, utility, actions, samples, seed)
        informed = functools.reduce(torch.maximum, (values.mean(0) for values in drawn.evaluated()))
        return (informed.mean(0) - drawn.means().amax(-1)).clamp(min=0)
    parts, matrix = [], None
    for rows, probs in draw_probabilities(predictive, "the value of epistemic information"):
        if matrix is None:
            inputs = predictive.num_inputs if isinstance(predictive, Predictive) else probs.shape[1]
            matrix, _ = _matrix(utility, actions, probs[0], inputs)
        utilities = matrix[rows] if matrix.ndim == 3 else matrix
        informed = _expected(utilities, probs).amax(-1).mean(0)
        parts.append(informed - _expected(utilities, probs.mean(0)).amax(-1))
    return torch.cat(parts).clamp(min=0)


def _expected(matrix: Tensor, probs: Tensor) -> Tensor:
    """Σ_c u(a, c)·p_c: [A, C] or [N, A, C] with [..., C] → [..., A]."""
    return (matrix @ probs.unsqueeze(-1)).squeeze(-1)


def _perfect(matrix: Tensor, probs: Tensor) -> Tensor:
    """Σ_c p_c·max_a u(a, c), [...]."""
    return (matrix.amax(-2) * probs).sum(-1)


def _matrix(utility: Any, actions: Any, probs: Tensor, inputs: int | None = None) -> tuple[Tensor, tuple[Any, ...]]:
    """Utilities [A, C] or [N, A, C] in float64, and the actions."""
    classes = probs.shape[-1]
    if callable(utility):
        names = tuple(range(classes)) if actions is None else _actions(actions)
        rows = [[_number(utility, action, label) for label in torch.arange(classes)] for action in names]
        return torch.tensor(rows, dtype=torch.float64), names
    matrix = as_tensor(utility, "utility").double().cpu()
    expected = f"[actions, {classes}], one column for each class"
    inputs = len(probs) if inputs is None else inputs
    each = matrix.ndim == 3 and probs.ndim == 2  # a matrix for each input
    if each:
        expected = f"[{inputs}, actions, {classes}] for {inputs} inputs, or [actions, {classes}]"
    if not (each or matrix.ndim == 2) or matrix.shape[-1] != classes or (each and len(matrix) != inputs):
        hint = ": pass utility.T" if matrix.ndim == 2 and matrix.shape[0] == classes else ""
        raise ValueError(f"utility has shape {list(matrix.shape)}, expected {expected}{hint}")
    if not matrix.shape[-2]:
        raise ValueError("utility has no rows: there must be at least one action")
    refuse(~torch.isfinite(matrix), "utility must be finite", "use a large negative number for what must not happen")
    names = tuple(range(matrix.shape[-2])) if actions is None else _actions(actions)
    if len(names) != matrix.shape[-2]:
        raise ValueError(f"actions has {len(names)} entries, but utility has {matrix.shape[-2]} rows: name each row")
    return matrix, names


def _number(utility: Callable[[Any, Tensor], Any], action: Any, label: Tensor) -> float:
    value = as_tensor(utility(action, label), "the result of utility(action, y)")
    if value.ndim:
        raise ValueError(
            f"utility(action, y) gave shape {list(value.shape)} for action {action!r} and class {int(label)}, expected one "
            "number: for classes it is called with one class at a time"
        )
    if not math.isfinite(float(value)):
        raise ValueError(
            f"utility must be finite, got {float(value)} for action {action!r} and class {int(label)}: use a large "
            "negative number for what must not happen"
        )
    return float(value)


@dataclass(frozen=True)
class _Samples:
    """A utility, and the samples y, [m, S, N, *O], on which every action is judged."""

    utility: Callable[[Any, Tensor], Any]
    actions: tuple[Any, ...]
    y: Tensor
    shape: torch.Size  # of utilities: [m·S, N] or [m·S, N, *O]

    @classmethod
    def of(cls, predictive: Any, utility: Any, actions: Any, samples: int, seed: int) -> _Samples:
        if not callable(utility):
            raise TypeError(
                f"utility must be a callable utility(action, y) for numbers, got {type(utility).__name__}: a matrix is for "
                "classes"
            )
        if actions is None:
            raise ValueError("actions must be given for numbers: the finite set to choose from, such as range(0, 100, 5)")
        names, y = _actions(actions), outcomes(predictive, samples, seed)
        flat = y.flatten(0, 1)
        shapes = (as_tensor(utility(action, flat), "the result of utility(action, y)").shape for action in names)
        return cls(utility, names, y, next(filter(len, shapes), flat.shape[:2]))  # the first that is no plain number

    def evaluated(self) -> Iterator[Tensor]:
        """The utilities of one action after the other, [m, S, N, ...]."""
        flat = self.y.flatten(0, 1)
        if self.shape not in (flat.shape, flat.shape[:2]):
            raise ValueError(
                f"utility(action, y) gave shape {list(self.shape)}, expected that of y, {list(flat.shape)}, one utility for "
                f"each sample and input, {list(flat.shape[:2])}, or one number"
            )
        for action in self.actions:
            value = as_tensor(self.utility(action, flat), "the result of utility(action, y)").double().cpu()
            if value.ndim and value.shape != self.shape:
                raise ValueError(
                    f"utility(action, y) gave shape {list(value.shape)} for action {action!r} and {list(self.shape)} for "
                    "another: it must be the same for all actions"
                )
            refuse(~torch.isfinite(value), f"utility must be finite, but is not for action {action!r}")
            yield value.expand(self.shape).unflatten(0, self.y.shape[:2])

    def means(self) -> Tensor:
        return torch.stack([values.mean((0, 1)) for values in self.evaluated()], -1)

    def best(self) -> Tensor:
        """The utility of the best action for each sample, [m, S, N, ...]."""
        return functools.reduce(torch.maximum, self.evaluated())


def _sampled_decision(drawn: _Samples, cost: float | None) -> Decision:
    """Two passes over the actions: first their means, then the samples of the best two, to compare them in pairs."""

    def columns() -> Iterator[Tensor]:
        yield from drawn.evaluated()
        if cost is not None:
            yield drawn.best() - cost

    # Utilities of all actions and samples may not fit into memory together: they are computed twice rather than kept.
    moments = [(values.mean((0, 1)), _spread(values)) for values in columns()]
    utilities, errors = (torch.stack(column, -1) for column in zip(*moments))
    margin, pair = _margin(utilities)
    error = torch.zeros_like(margin)
    if pair is not None:
        difference: Tensor | None = None
        for index, values in enumerate(columns()):
            if bool((pair == index).any()):
                sign = (pair[..., 0] == index).double() - (pair[..., 1] == index).double()
                difference = sign * values if difference is None else difference + sign * values
        if difference is not None:
            error = _spread(difference)
    return _decision(utilities, drawn.actions, cost is not None, errors, margin, error)


def _spread(values: Tensor) -> Tensor:
    """The standard error of the mean of [m, S, ...], m independent values from each of S strata."""
    # Samples are spread evenly over the draws, so only what scatters within a draw is Monte Carlo error.
    return (values.var(0).mean(0) / (values.shape[0] * values.shape[1])).sqrt()


def _decision(
    utilities: Tensor, actions: tuple[Any, ...], reject: bool, errors: Tensor, margin: Tensor, margin_error: Tensor
) -> Decision:
    expected, action = utilities.max(-1)
    if reject:
        action = torch.where(action == len(actions), REJECT, action)
    return Decision(action, expected, utilities, actions, errors, margin, margin_error)


def _margin(utilities: Tensor) -> tuple[Tensor, Tensor | None]:
    """The best utility minus the second best, [...], and which two they are, [..., 2]."""
    if utilities.shape[-1] < 2:
        return torch.full_like(utilities[..., 0], math.inf), None
    best = utilities.topk(2, -1)
    return best.values[..., 0] - best.values[..., 1], best.indices


def _numeric(predictive: Any, outcomes: str) -> bool:
    """Whether y is a number here, and not a class."""
    chosen("outcomes", outcomes, ("classes", "numbers"))
    if not isinstance(predictive, Predictive):
        return outcomes == "numbers"
    need(predictive, CLASSES + NUMBERS, "which decisions do not know", "classes, yes/no targets, numbers or counts")
    return predictive.likelihood.kind in NUMBERS


def _actions(actions: Any) -> tuple[Any, ...]:
    if isinstance(actions, (Tensor, np.ndarray)):
        actions = actions.tolist()
    if isinstance(actions, str) or not hasattr(actions, "__iter__"):
        raise TypeError(f"actions must be a sequence of actions, got {actions!r}")
    names = tuple(actions)
    if not names:
        raise ValueError("actions is empty: there must be at least one action")
    return names
