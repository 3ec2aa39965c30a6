"""What a metric is given, checked once: a `Predictive` or plain arrays, and the targets.

Everything leaves as float64 on the CPU. Each observed target counts as one example: N inputs with K outputs are N·K
examples, and a mask leaves out those that were not observed. Plain arrays are told apart by the shape of the targets:

    probabilities   y's shape + [C]         classes, C last           [S, *y's shape, C]   those of S draws, averaged
                    y's shape               P(y = 1) of yes/no targets
    numbers         y's shape               point predictions         [S, *y's shape]      samples of y
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plausible.core.conversion import as_targets, as_tensor
from plausible.core.likelihoods import Bernoulli, Categorical
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

CLASSES = ("classes", "binary")
NUMBERS = ("continuous", "counts")

SUM_TOLERANCE = 1e-3
"""How far the probabilities of a row may be from one in sum; they are then divided by that sum.

Rounding n numbers to a type of precision ε moves a sum of one by at most ε/2: 5e-4 for float16. The arrays may have
been stored so and widened since, whatever their type is now; 1e-3 also lets in probabilities printed with four digits.
"""

_EXACT = 1e-12  # sums this near to one differ from it by the order of the additions


@dataclass(frozen=True)
class Labelled:
    """M examples with class probabilities [M, C], the true classes [M], and the input each belongs to [M]."""

    probs: Tensor
    labels: Tensor
    rows: Tensor
    observed: Tensor  # [N, ...], which targets these are
    binary: bool  # yes/no targets, whose classes are (1 − p, p)
    _logs: Callable[[], Tensor]

    def log_probs(self) -> Tensor:
        """Log p, [M, C]; where plain probabilities were rounded to 0, of the smallest that their type can tell from 0."""
        return self._logs()

    @property
    def truth(self) -> Tensor:
        return F.one_hot(self.labels, self.probs.shape[-1]).to(self.probs)


def labelled(predictive: Any, y: Any, mask: Any = None) -> Labelled:
    """Class probabilities and classes, for `Categorical` and `Bernoulli` predictives and plain probabilities."""
    if isinstance(predictive, Predictive):
        target, observed = predictive_targets(predictive, y, mask, CLASSES, "class probabilities")
        probs, binary = class_probabilities(predictive), predictive.likelihood.kind == "binary"

        def logs() -> Tensor:
            return double(predictive._log_probs())[0].cpu().reshape(-1, probs.shape[-1])[observed.flatten()]
    else:
        probs, target, observed, floor = _raw_labelled(predictive, y, mask)
        binary = len(floor) == 2

        def logs() -> Tensor:
            return probs.maximum(floor).log().reshape(-1, probs.shape[-1])[observed.flatten()]

    # Labels and positions of one input are examples of their own, but keep its row: some scores are means over inputs.
    keep = observed.flatten()
    rows = torch.arange(len(observed)).repeat_interleave(keep.numel() // len(observed))
    flat = probs.reshape(-1, probs.shape[-1])
    return Labelled(flat[keep], target.long().flatten()[keep], rows[keep], observed, binary, logs)


def _raw_labelled(predictive: Any, y: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities [N, ..., C], targets, which were observed, and the least that each class's probability can be."""
    target, observed = _targets(y, mask)
    given = _floats(predictive, "predictive", "class probabilities")
    # A probability that was rounded to 0 may be anything below the least number of its type, and its logarithm is that number's.
    limits = torch.finfo(given.dtype)
    smallest = torch.tensor([limits.tiny * limits.eps], dtype=torch.float64)
    if given.shape == target.shape:
        _refuse_one_hot(given, target)
        target = Bernoulli().check(given.shape, target, observed)
        above = torch.cat([torch.tensor([limits.eps / 4], dtype=torch.float64), smallest])  # 1 − p is coarser than p
        return _two_columns(_unit(given)), target, observed, above
    if target.shape not in (given.shape[:-1], given.shape[1:-1]):
        raise ValueError(
            f"predictive has shape {list(given.shape)} and y {list(target.shape)}: expected probabilities "
            f"{[*target.shape, 'classes']}, those of draws {['draws', *target.shape, 'classes']}, or P(y = 1) of shape "
            f"{list(target.shape)}"
        )
    probs = _normalised(given, "predictive")
    probs = probs if probs.ndim == target.ndim + 1 else probs.mean(0)
    return probs, Categorical().check(probs.shape, target, observed), observed, smallest


def class_probabilities(predictive: Any, name: str = "predictive") -> Tensor:
    """Probabilities with the class axis last, checked: [N, ..., C] of a `Predictive`, as they come for an array.

    A yes/no target has the two classes (1 − p, p); so does an array with one axis.
    """
    if isinstance(predictive, Predictive):
        _need_kind(predictive, CLASSES, "class probabilities")
        probs = double(predictive.probs)[0].cpu()
        _refuse(~torch.isfinite(probs), f"the probabilities of {name} must be finite")
        _refuse_empty(probs.shape, name)
        return _two_columns(probs) if predictive.likelihood.kind == "binary" else probs
    given = _floats(predictive, name, "class probabilities")
    _refuse_empty(given.shape, name)
    return _two_columns(_unit(given, name)) if given.ndim == 1 else _normalised(given, name)


def predictive_targets(
    predictive: Predictive, y: Any, mask: Any, kinds: tuple[str, ...] = CLASSES + NUMBERS, what: str = ""
) -> tuple[Tensor, Tensor]:
    """Targets that fit the predictive, in float64 or int64, and which of them were observed; both shaped like y."""
    _need_kind(predictive, kinds, what)
    target, observed = _targets(y, mask)
    shape = (predictive.num_inputs, *predictive.output_shape)
    said = predictive.likelihood.observed(target, observed)
    assert said is not None
    if not bool(said.any()):
        raise ValueError("y has no target but ignored ones: nothing is left to measure")
    return predictive.likelihood.check(shape, target, observed), said


def numeric(values: Any, y: Any, mask: Any = None, *, samples: bool, name: str = "predictive") -> tuple[Tensor, ...]:
    """Plain point predictions, or samples of y with a leading axis, with targets and which of them were observed."""
    target, observed = _targets(y, mask)
    wide = sampled(values, name) if samples else _finite(_floats(values, name, "predictions"), name)
    if not target.is_floating_point():
        raise TypeError(
            f"y holds {target.dtype}, but this metric compares real numbers: pass y as floats, or for classes use "
            "accuracy, brier or log_loss"
        )
    if wide.shape[int(samples) :] != target.shape:
        expected = ["samples"] * samples + list(target.shape)
        raise ValueError(f"{name} has shape {list(wide.shape)}, expected {expected} for y of shape {list(target.shape)}")
    return wide, target.double(), observed


def sampled(values: Any, name: str = "predictive") -> Tensor:
    """Samples of y, [S, N, ...]."""
    given = _floats(values, name, "samples of y")
    if given.ndim < 2:
        raise ValueError(f"{name} has shape {list(given.shape)}, expected samples of y: [samples, *shape of y]")
    _refuse_empty(given.shape, name)
    return _finite(given, name)


def point_predictions(predictive: Any, y: Any, mask: Any = None) -> tuple[Tensor, Tensor]:
    """Predictive means, or the plain array itself, and targets: one of each for every observed target, [M]."""
    if not isinstance(predictive, Predictive):
        mean, target, observed = numeric(predictive, y, mask, samples=False)
    else:
        target, observed = predictive_targets(predictive, y, mask, NUMBERS, "a mean in the units of the target")
        mean = double(predictive.mean)[0].cpu()
        _refuse(~torch.isfinite(mean), "the mean of predictive must be finite")
    return mean[observed], target[observed].double()


def probability_kind(predictive: Any) -> bool:
    """Whether this is judged by class probabilities, and not as numbers."""
    return not isinstance(predictive, Predictive) or predictive.likelihood.kind in CLASSES


def whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def chosen(name: str, value: Any, options: tuple[str, ...]) -> str:
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return str(value)


def _targets(y: Any, mask: Any) -> tuple[Tensor, Tensor]:
    target, observed = as_targets(y, mask, dtype=torch.float64)
    target = target.cpu()
    _refuse_empty(target.shape, "y")
    observed = torch.ones(target.shape, dtype=torch.bool) if observed is None else observed.cpu()
    if not bool(observed.any()):
        raise ValueError("mask hides every target: nothing is left to measure")
    return target, observed


def _need_kind(predictive: Predictive, kinds: tuple[str, ...], what: str) -> None:
    if predictive.likelihood.kind not in kinds:
        instead = "accuracy, brier, ece, log_likelihood" if kinds == NUMBERS else "rmse, crps, coverage, pit, log_likelihood"
        raise TypeError(
            f"this metric needs {what}, which the {predictive.likelihood.kind} targets of {predictive.likelihood} do "
            f"not have: use {instead} and the like"
        )


def _floats(values: Any, name: str, what: str) -> Tensor:
    given = as_tensor(values, name).cpu()
    if not given.is_floating_point():
        raise TypeError(f"{name} must be a Predictive or {what} in floating point, got {given.dtype}: not labels or counts")
    if given.ndim == 0:
        raise ValueError(f"{name} must have an axis of examples, got a single number")
    return given


def _finite(given: Tensor, name: str) -> Tensor:
    _refuse(~torch.isfinite(given), f"{name} must be finite")
    return given.double()


def _normalised(given: Tensor, name: str) -> Tensor:
    """Rows that are probabilities up to rounding, divided by their sum."""
    if given.shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {list(given.shape)}, one class only: with one class there is nothing to predict; pass "
            "one column per class, or P(y = 1) in the shape of y for yes/no targets"
        )
    probs, name = given.double(), f"the probabilities in {name}"
    fix = "pass torch.softmax(logits, -1), classes on the last axis"
    _refuse(~torch.isfinite(probs), f"{name} must be finite", "look for the division or the logarithm that made them")
    _refuse(probs < 0, f"{name} must not be negative", fix)
    total = probs.sum(-1)
    tolerance = max(SUM_TOLERANCE, torch.finfo(given.dtype).eps)
    _refuse((total - 1).abs() > tolerance, f"{name} must sum to one in each row, within {tolerance:.1g}", fix, total)
    total = torch.where((total - 1).abs() <= _EXACT, 1.0, total)  # as they are, to the bit: edges of bins, ties
    return probs / total.unsqueeze(-1)


def _unit(given: Tensor, name: str = "predictive") -> Tensor:
    """Probabilities of yes: in [0, 1], with a rounding above it forgiven."""
    probs = given.double()
    # Asked the positive way, because a NaN fails every comparison.
    bad = ~((probs >= 0) & (probs <= 1 + torch.finfo(given.dtype).eps))  # a NaN fails both
    _refuse(bad, f"{name}, taken as P(y = 1), must lie in [0, 1]", "pass torch.sigmoid(logits)", probs)
    return probs.clamp(max=1)


def _two_columns(probs: Tensor) -> Tensor:
    return torch.stack([1 - probs, probs], -1)


def _refuse(bad: Tensor, rule: str, fix: str = "", values: Tensor | None = None) -> None:
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        got = f"got {values[tuple(where)].item():.6g}" if values is not None else "it is not"
        got = f"{got} at index {where} ({int(bad.sum())} such)"
        raise ValueError(f"{rule}; {got}{': ' * bool(fix)}{fix}")


def _refuse_empty(shape: torch.Size, name: str) -> None:
    if 0 in shape:
        raise ValueError(f"{name} is empty (shape {list(shape)}): a metric needs at least one example")


def _refuse_one_hot(probs: Tensor, target: Tensor) -> None:
    """One-hot rows with rows of probabilities have the shapes of several yes/no labels, and are not that."""
    if target.ndim < 2 or target.shape[-1] < 2:
        return
    exclusive = (probs.double().sum(-1) - 1).abs() <= SUM_TOLERANCE
    if bool(exclusive.all()) and bool((target.double().sum(-1) == 1).all()):
        raise ValueError(
            f"y of shape {list(target.shape)} looks one-hot, as the rows of predictive sum to one: pass y.argmax(-1)"
        )


def mutual_information(probs: Tensor) -> tuple[Tensor, Tensor]:
    """H[y] and I[y; s] in nats, [N, ...], of the class probabilities of S draws, [S, N, ..., C].

    Rounding may leave an information of −1e-17, or one just above the entropy: neither may leave a negative part.
    """
    entropy = torch.special.entr(probs.mean(0)).sum(-1)
    information = entropy - torch.special.entr(probs).sum(-1).mean(0)
    return entropy, torch.minimum(information.clamp(min=0), entropy)
