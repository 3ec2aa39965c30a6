"""What uncertainty is good for: telling inputs from outside apart, and handing uncertain cases to somebody else.

Detection takes predictions for inputs of both kinds and the name of the score that parts them, higher for outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plausible.analysis.metrics.inputs import (
    CLASSES,
    chosen,
    class_probabilities,
    labelled,
    mutual_information,
    point_predictions,
    predictive_targets,
    probability_kind,
)
from plausible.core.special import double
from plausible.posteriors.predictive import Predictive

SCORES = ("entropy", "mutual_information", "epistemic", "variance", "max_probability")


def ood_auroc(inside: Any, outside: Any, score: str = "entropy") -> float:
    """P(score of an outside input > score of an inside one) + ½ P(equal): 1 is perfect, ½ is guessing.

    The area under the ROC curve, exact with ties (Hendrycks & Gimpel 2017). Scores: see `uncertainty_score`. Cost: a sort.
    """
    values, positive = _pooled(inside, outside, score)
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    # A tie counts as half a win: with mid-ranks the area is exact, and no threshold has to be swept.
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]  # mid-ranks
    out, total = int(positive.sum()), len(values)
    return float((ranks[positive].sum() - out * (out + 1) / 2) / (out * (total - out)))


def ood_aupr(inside: Any, outside: Any, score: str = "entropy", *, positive: str = "outside") -> float:
    """Σ_k (R_k − R_{k−1})·P_k over thresholds of the score: average precision of finding the `positive` kind.

    "outside" is found by a high score, "inside" by a low one. Unlike the AUROC it depends on how many there are of each:
    guessing gives the share of positives.
    """
    values, wanted = _pooled(inside, outside, score)
    if chosen("positive", positive, ("outside", "inside")) == "inside":
        values, wanted = -values, ~wanted
    # Examples of one score are one threshold; otherwise the order of the rows would decide about ties.
    levels, place = values.unique(return_inverse=True)
    size = torch.zeros(len(levels), dtype=torch.float64)
    hits = size.scatter_add(0, place, wanted.double()).flip(0)  # from the highest score down, ties together
    hits_so_far = hits.cumsum(0)
    precision = hits_so_far / size.scatter_add(0, place, torch.ones_like(values)).flip(0).cumsum(0)
    return float((hits * precision).sum() / hits_so_far[-1])


def ood_fpr95(inside: Any, outside: Any, score: str = "entropy") -> float:
    """The share of outside inputs that pass as inside when at least 95 % of the inside ones pass (Liang et al. 2018).

    Those pass whose score is at most τ, the least inside score that lets 95 % of them through. 0 is perfect.
    """
    values, positive = _pooled(inside, outside, score)
    within = values[~positive].sort().values
    threshold = within[(95 * len(within) + 99) // 100 - 1]  # the ⌈0.95 n⌉-th smallest
    return float((values[positive] <= threshold).double().mean())


def uncertainty_score(predictive: Any, score: str, name: str = "predictive") -> Tensor:
    """How uncertain each prediction is, float64 [N, ...], higher for less certain.

    | score | numbers | classes and yes/no targets |
    |---|---|---|
    | "entropy" | | H[y], all uncertainty, in nats |
    | "mutual_information" | | I[y; s], the disagreement of draws, in nats |
    | "epistemic" | Var_s E[y given f_s] | its sum over classes |
    | "variance" | Var[y] | its sum over classes |
    | "max_probability" | | 1 − max_k p_k |

    Plain probabilities are [N] (yes/no), [N, C], or [S, N, C] of S draws, which "mutual_information" and "epistemic" need.
    """
    chosen("score", score, SCORES)
    if not isinstance(predictive, Predictive):
        return _of_probabilities(class_probabilities(predictive, name), score, name)
    classes = predictive.likelihood.kind in CLASSES
    if not classes and score not in ("epistemic", "variance"):
        raise TypeError(
            f"score={score!r} does not exist for the {predictive.likelihood.kind} targets of {predictive.likelihood}: "
            "use score='epistemic' or score='variance'"
        )
    if score == "max_probability":
        values = 1 - class_probabilities(predictive, name).amax(-1)
    else:
        values = double(getattr(predictive, score))[0].cpu()
        if score in ("epistemic", "variance") and predictive.likelihood.kind == "classes":
            values = values.sum(-1)
        elif score in ("epistemic", "variance") and classes:
            values = 2 * values  # of both classes, as for one-hot vectors
    if bool(values.isnan().any()):
        raise ValueError(f"{name} gives a {score} of NaN: its outputs are not finite")
    return values


def _of_probabilities(probs: Tensor, score: str, name: str) -> Tensor:
    if probs.ndim > 3:
        raise ValueError(
            f"{name} has shape {list(probs.shape)}, expected probabilities [N], [N, classes] or [draws, N, classes]: "
            "pass a Predictive for anything larger"
        )
    if score in ("mutual_information", "epistemic"):
        if probs.ndim < 3:
            raise ValueError(
                f"score={score!r} measures the disagreement of draws, but {name} has shape {list(probs.shape)}: pass a "
                "Predictive or the probabilities of draws, [draws, N, classes]"
            )
        if score == "epistemic":
            return probs.var(0, correction=0).sum(-1)
        return mutual_information(probs)[1]
    mean = probs.mean(0) if probs.ndim == 3 else probs
    if score == "variance":
        return (mean * (1 - mean)).sum(-1)
    return torch.special.entr(mean).sum(-1) if score == "entropy" else 1 - mean.amax(-1)


def _classes(given: Any) -> Tensor | None:
    """Something whose last axis counts classes; None for numbers."""
    if isinstance(given, Predictive):
        return given.probs[:1] if given.likelihood.kind == "classes" else None
    return class_probabilities(given)


def _pooled(inside: Any, outside: Any, score: str) -> tuple[Tensor, Tensor]:
    """Scores of all inputs, [N + M], one each (the mean over outputs where there are several), and which are outside."""
    parts = []
    for name, given in (("inside", inside), ("outside", outside)):
        if isinstance(given, Predictive) and not given.num_inputs:
            raise ValueError(f"{name} is empty: detection needs inputs of both kinds")
        values = uncertainty_score(given, score, name)
        parts.append(values.reshape(len(values), -1).mean(-1))
    # The entropy of ten classes is larger than that of two, whatever the inputs are.
    sizes = [given.shape[-1] for given in map(_classes, (inside, outside)) if given is not None]
    if len(set(sizes)) > 1:
        raise ValueError(f"inside has {sizes[0]} classes and outside {sizes[1]}: their {score} cannot be compared")
    return torch.cat(parts), torch.arange(sum(map(len, parts))) >= len(parts[0])


class RiskCoverage(NamedTuple):
    """`risk[k]` is the mean loss of the k + 1 most certain of M examples, a share `coverage[k]` of them; float64 [M]."""

    coverage: Tensor
    risk: Tensor


def risk_coverage(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None) -> RiskCoverage:
    """risk(k/M) = 1/k Σ_{i ≤ k} loss_(i), examples in the order of their uncertainty (Geifman & El-Yaniv 2017).

    The loss is the error, 0 or 1, for classes, and the squared error of the mean for numbers. `score` names the
    uncertainty as in `uncertainty_score`; None is "max_probability" for classes and "variance" for numbers. Examples of
    equal uncertainty are averaged, as if in random order: the curve does not depend on the order of the rows.
    """
    if probability_kind(predictive):
        answers = labelled(predictive, y, mask)
        losses, observed = (answers.probs.argmax(-1) != answers.labels).double(), answers.observed
    else:
        mean, target = point_predictions(predictive, y, mask)
        losses, observed = (mean - target).square(), predictive_targets(predictive, y, mask)[1]
    if not isinstance(predictive, Predictive) and score in (None, "max_probability", "entropy", "variance"):
        # already checked and averaged over draws, whatever the shape was
        values = uncertainty_score(answers.probs, score or "max_probability")
    else:
        score = score or ("max_probability" if probability_kind(predictive) else "variance")
        values = uncertainty_score(predictive, score)[observed]
    return curve(losses, values)


def curve(losses: Tensor, uncertainty: Tensor) -> RiskCoverage:
    """The curve of losses [M] by uncertainty [M]: within a tie every example has the mean loss of the tie."""
    levels, place, counts = uncertainty.unique(return_inverse=True, return_counts=True)
    # Within a tie any order is as good; the mean loss is what a random one has on average.
    mean_loss = torch.zeros(len(levels), dtype=torch.float64).scatter_add(0, place, losses) / counts
    number = torch.arange(1, len(losses) + 1, dtype=torch.float64)
    return RiskCoverage(number / len(losses), mean_loss.repeat_interleave(counts).cumsum(0) / number)


def aurc(predictive: Any, y: Any, score: str | None = None, *, mask: Any = None) -> float:
    """1/M Σ_k risk(k/M): the area under the risk-coverage curve, lower is better (Geifman, Uziel & El-Yaniv 2019).

    Useless uncertainty gives the plain risk; so compare it with the error rate (or the squared RMSE) of the same predictions.
    """
    return float(risk_coverage(predictive, y, score, mask=mask).risk.mean())
