"""What to doubt about a fit, in words: said once, when it is over, from some of its rows.

Rows of the fit, and those that were set aside where early stopping had some, are compared with each other and with predicting
the mean and the scatter of the targets whatever the inputs.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plausible.core.data import ArrayData, Batch, Data, select_rows, take
from plausible.core.likelihoods import Likelihood, Scaled, unscaled
from plausible.core.model import Model
from plausible.core.weights import num_elements
from plausible.core.words import log, number, percent, plural
from plausible.posteriors.base import Posterior
from plausible.posteriors.predictive import Predictive
from plausible.posteriors.verdicts import RHAT_BAD, Verdict, text

ROWS, DRAWS = 256, 100
CHAIN_ROWS = 64
"""Inputs at which chains are compared."""
WORK = 3e9
"""Weights × rows × draws that are looked at, at most: a fraction of a second."""
LEAST_ROWS = 8
WORSE = 0.05
"""Nats a row behind the constant prediction from which it is said."""
APART = 1.0
"""Nats between rows of the fit and rows that were set aside."""
COLLAPSED = 3.0
"""Root mean square error of rows that were set aside, in standard deviations of the noise that the fit has found."""
NOTHING_LEFT = 0.05
"""Noise in standard deviations of the targets that is called collapsed where nothing was set aside and weights outnumber rows."""
DISAGREE = 1.1
"""R̂ of f(x) from which it is said unasked; `posterior.verdict(x)` is stricter."""
OFF = 10.0
"""How far from 0 ± 1 targets may be for a network that was just made."""


class FitWarning(UserWarning):
    """What a fit should be doubted for. The same texts are in `posterior.run["doubts"]`."""


@dataclass(frozen=True)
class Facts:
    """What the rules go by; log densities are means over rows, in nats; None: not known."""

    who: str
    rows: int
    weights: int
    seen: float
    constant: float | None = None
    unseen: float | None = None
    noise: float | None = None
    """Standard deviation of the noise, in those of the targets."""
    errors: float | None = None
    """Root mean square error of rows that were set aside, in standard deviations of the noise."""
    error: float = 0.0
    """Standard error of `unseen`."""
    trained: bool = False
    """Whether weights were trained: a noise that chains have found is one of many, and not the end of a path."""
    bound: bool = False
    rhat: float | None = None
    infinite: int = 0
    """How many of the rows that were looked at have a predictive variance that is not finite."""


def before(model: Model, data: Data, *, fresh: bool) -> list[Verdict]:
    """What can be seen before any work is done: outputs that are no logits, targets far from what a `fresh` network says."""
    found = []
    squashed = _squashed(model, data.rows(slice(LEAST_ROWS)).x) if isinstance(data, ArrayData) else ""
    if squashed:
        found.append(
            Verdict(
                "bad",
                f"The network ends in a {squashed}, and {type(model.likelihood).__name__} takes logits: probabilities are squashed "
                "twice.",
                "",
                f"Leave the {squashed} out, or fit with output=torch.{'log' if squashed == 'softmax' else 'logit'}.",
            )
        )
    if model.likelihood.kind != "continuous" or not isinstance(data, ArrayData):
        return found
    if data.num_data > 1 and not _distinct(data.batch.y):
        found.append(
            Verdict(
                "bad",
                "The targets hardly differ: their standard deviation is within the rounding of their type.",
                "There is nothing to learn, or what there was is lost.",
                "Pass them in float64, or take their mean off.",
            )
        )
    elif fresh and not isinstance(model.likelihood, Scaled):
        mean, std = float(data.batch.y.double().mean()), float(data.batch.y.double().std(correction=0))
        if abs(mean) > OFF * max(1.0, std) or std > OFF:
            found.append(
                Verdict(
                    "unclear",
                    f"Targets of mean {number(mean)} and standard deviation {number(std)} are far from what a new network says.",
                    "The likelihood that was given speaks in their unit.",
                    "Standardise them, give likelihoods.Scaled, or leave the likelihood out: they are then standardised inside.",
                )
            )
    return found


def _distinct(y: Tensor) -> bool:
    """Whether targets differ by more than their type can resolve, of at least one output."""
    flat = y.double().flatten(1) if y.ndim > 1 else y.double()[:, None]
    return bool((flat.std(0, correction=0) > 16 * torch.finfo(y.dtype).eps * flat.abs().amax(0)).any())


def _squashed(model: Model, x: Any) -> str:
    """What makes probabilities of the outputs: a softmax (not below 0, with sums of 1), a sigmoid at the end, or "" nothing."""
    if model.likelihood.kind not in ("classes", "binary"):
        return ""
    with torch.no_grad():
        outputs = model.outputs({**model.initial, **model.buffers}, x)
    if model.likelihood.kind == "binary":
        ends = isinstance(list(model.network.modules())[-1], torch.nn.Sigmoid)
        return "sigmoid" if ends and bool(((outputs >= 0) & (outputs <= 1)).all()) else ""
    return "softmax" if bool((outputs >= 0).all()) and bool(((outputs.sum(-1) - 1).abs() < 1e-3).all()) else ""


def after(posterior: Posterior, data: Data, held: Data | None = None) -> list[Verdict]:
    """What a fit should be doubted for, the worst first; `data` are its rows, `held` those that were set aside."""
    if not isinstance(data, ArrayData) or not isinstance(held, ArrayData | None):
        return []  # streams are not read once more
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = facts(posterior, data, held)
    except Exception as error:  # a look must not cost what was fitted: prediction itself will say what is wrong
        log.info("the fit was not looked at: %s: %s", type(error).__name__, error)
        return []
    return [] if known is None else [said for rule in RULES if (said := rule(known)) is not None]


def warn(doubts: Sequence[Verdict]) -> None:
    """Say them as warnings of whoever called into the library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("plausible."):
        level, frame = level + 1, frame.f_back
    for one in doubts:
        warnings.warn(text([one]), FitWarning, stacklevel=level)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def infinite(known: Facts) -> Verdict | None:
    """Variances that overflowed, though no term of the training did."""
    if not known.infinite:
        return None
    return Verdict(
        "bad",
        f"The predictive variance is infinite or NaN at {plural(known.infinite, 'row')} of the data.",
        "A learned scale or the weights have run away: a rate was too high, or targets are in an unusual unit.",
        "Standardise the targets, remove outliers, lower lr, or leave the likelihood out, which standardises inside.",
    )


def worse(known: Facts) -> Verdict | None:
    """No better than a prediction that ignores the inputs."""
    if known.constant is None:
        return None
    if known.unseen is not None and known.unseen < known.constant - WORSE - 2 * known.error:
        behind, rows = known.constant - known.unseen, "rows that were set aside"
    elif known.seen < known.constant - WORSE:
        behind, rows = known.constant - known.seen, "its own rows"
    else:
        return None
    if known.bound:
        why = f"With {plural(known.weights, 'weight')} for {plural(known.rows)} a variational posterior stays near the prior."
        advice = "Try method='auto' or 'hmc', a smaller network, or narrower priors."
    elif known.rhat is not None:
        why, advice = "Chains may not have reached the posterior.", "Run them longer, or start from a fit (init=)."
    else:
        why, advice = "", "Train longer, look at posterior.history, or try method='auto'."
    return Verdict(
        "bad", f"{known.who} predicts {rows} {behind:.2g} nats worse than the mean and scatter of the targets.", why, advice
    )


def collapsed(known: Facts) -> Verdict | None:
    """A learned noise that is far below the errors, or next to nothing."""
    advice = "Leave patience at 'auto', so that held-out rows end the training, give the noise, or try method='auto'."
    if known.errors is not None and known.errors > COLLAPSED:
        return Verdict(
            "bad",
            f"The noise has collapsed: errors on rows that were set aside are {known.errors:.1f} times as large.",
            "Intervals are far too narrow.",
            advice,
        )
    if known.errors is None and known.trained and known.noise is not None and known.noise < NOTHING_LEFT:
        if known.weights < known.rows:
            return None
        return Verdict(
            "unclear",
            f"The noise has shrunk to {percent(known.noise, 1)} of the targets' standard deviation, with "
            f"{plural(known.weights, 'weight')} for {plural(known.rows)} and none set aside.",
            "Unless the data are that clean, intervals are far too narrow.",
            advice,
        )
    return None


def apart(known: Facts) -> Verdict | None:
    """Rows of the fit and rows that were set aside."""
    if known.unseen is None or known.seen - known.unseen < APART + 2 * known.error:
        return None
    return Verdict(
        "unclear",
        f"Rows that were set aside are predicted {known.seen - known.unseen:.2g} nats worse than those of the fit.",
        "The network follows what is particular to its rows.",
        "Use a smaller network, narrower priors, more data, or method='auto'.",
    )


def disagreeing(known: Facts) -> Verdict | None:
    """Chains that predict different things."""
    if known.rhat is None or known.rhat < DISAGREE:
        return None
    return Verdict(
        "unclear",
        f"The chains disagree about f(x): the worst R̂ is {number(known.rhat)}, and {RHAT_BAD} would be the limit.",
        "Intervals may be narrower than the posterior.",
        "Run longer (more warmup and draws, posterior.extend); posterior.verdict(x) says more.",
    )


RULES = (infinite, worse, collapsed, apart, disagreeing)


# ---------------------------------------------------------------------------------------------------------------------
# Facts


def facts(posterior: Posterior, data: ArrayData, held: ArrayData | None = None) -> Facts | None:
    """None where targets are partly unobserved, and where rows are few or the network too large for a look."""
    size = num_elements(posterior.model.initial)
    draws = min(posterior.num_draws(None), DRAWS)
    count = int(min(ROWS, WORK / (size * draws)))
    if data.batch.mask is not None or data.num_data < LEAST_ROWS or count < LEAST_ROWS:
        return None
    near, far = _some(data, count), _some(held, count) if held is not None and held.num_data >= LEAST_ROWS else None
    noise = errors = None
    y = data.batch.y
    if posterior.likelihood.kind == "continuous":
        std = y.double().std(correction=0)
        noise = float(_predictive(posterior, near, draws).aleatoric.double().mean().sqrt() / std) if std > 0 else None
        if far is not None and noise:
            mean = _predictive(posterior, far, draws).mean
            errors = float((mean.double() - far.y.double()).square().mean().sqrt() / std) / noise
    chains = posterior.run.get("chains", getattr(posterior, "chains", 1)) or 1
    return Facts(
        who=type(posterior.method).__name__,
        rows=data.num_data,
        weights=size,
        seen=_density(posterior, near, draws),
        constant=constant(posterior.likelihood, y),
        unseen=None if far is None else _density(posterior, far, draws),
        noise=noise,
        errors=errors,
        error=0.0 if far is None else _error(posterior, far, draws),
        trained=not posterior.method.traits.keeps_draws or posterior.num_draws(None) <= getattr(posterior, "chains", 1),
        bound="elbo" in posterior.history or "kl" in posterior.history,
        rhat=_rhat(posterior, near) if chains > 1 else None,
        infinite=_infinite(posterior, near, draws),
    )


def constant(likelihood: Likelihood, y: Tensor) -> float | None:
    """The mean log density of targets under their own mean and scatter, or frequencies: what inputs have to improve on."""
    if likelihood.kind == "continuous":
        variances = y.double().flatten(1).var(0, correction=0) if y.ndim > 1 else y.double().var(correction=0)[None]
        return float(-0.5 * (1 + (2 * math.pi * variances).log()).sum()) if bool((variances > 0).all()) else None
    if likelihood.kind in ("classes", "binary") and y.ndim == 1:
        shares = torch.unique(y, return_counts=True)[1].double() / len(y)
        return float((shares * shares.log()).sum())
    return None


def _some(data: ArrayData, count: int) -> Batch:
    """Evenly spaced rows."""
    at = torch.linspace(0, data.num_data - 1, min(count, data.num_data)).round().long()
    return select_rows(data.batch, at.to(data.batch.y.device))


def _predictive(posterior: Posterior, batch: Batch, draws: int) -> Predictive:
    return posterior.predict(batch.x, draws)


def _infinite(posterior: Posterior, batch: Batch, draws: int) -> int:
    """Rows without a finite variance; 0 for a likelihood that has none by its nature."""
    df = getattr(unscaled(posterior.likelihood), "df", "learned")
    if not isinstance(df, str) and df <= 2:
        return 0
    pred = _predictive(posterior, batch, draws)
    return int((~torch.isfinite(pred.variance)).reshape(len(pred), -1).any(1).sum())


def _density(posterior: Posterior, batch: Batch, draws: int) -> float:
    return float(_predictive(posterior, batch, draws).log_prob(batch.y).double().mean())


def _error(posterior: Posterior, batch: Batch, draws: int) -> float:
    logs = _predictive(posterior, batch, draws).log_prob(batch.y).double()
    return float(logs.std()) / len(logs) ** 0.5


def _rhat(posterior: Posterior, batch: Batch) -> float | None:
    value = posterior.diagnostics(take(batch.x, slice(CHAIN_ROWS))).get("rhat")
    return None if value is None else float(value)
