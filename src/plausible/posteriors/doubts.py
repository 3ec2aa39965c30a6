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

from plausible.blocks.chains import convergence
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
"""Nats a row behind the constant prediction from which it is said; variational posteriors near their prior cannot follow single
rows, and do as badly on others: of them it is said from `WORSE_BOUND` on."""
WORSE_BOUND = 0.01
LEAST_DRAWS = 20
"""Draws from which a row is predicted as if it had been left out."""
STILL_RISING = 1.5
"""R̂ of the log-likelihood along a single chain, halves compared, from which it is on its way."""
RISE = 0.01
"""Nats a row by which it rose, at least."""
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
    gain: float | None = None
    """What a row that is left out gains over the constant prediction, and the standard error of that; of draws without `unseen`."""
    gain_error: float = 0.0
    rise: float | None = None
    """By how much the second half of a single chain explains the rows better than the first where halves differ for certain."""
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
    elif known.seen < known.constant - (WORSE_BOUND if known.bound else WORSE):
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


def idle(known: Facts) -> Verdict | None:
    """Draws that may know no more than the constant: of pure noise they predict new rows worse."""
    if known.gain is None or known.gain > 2 * known.gain_error or worse(known) is not None:
        return None
    return Verdict(
        "unclear",
        f"{known.who} predicts a row that is left out {abs(known.gain):.2g} ± {known.gain_error:.1g} nats "
        f"{'better' if known.gain > 0 else 'worse'} than the mean and scatter of the targets.",
        "The inputs may say nothing about the targets, and then new rows are predicted worse than by these.",
        "Compare with a constant on rows of your own, or try a smaller network or narrower priors.",
    )


def rising(known: Facts) -> Verdict | None:
    """A single chain that is still on its way."""
    if known.rise is None:
        return None
    return Verdict(
        "unclear",
        f"The second half of the draws explains the rows {known.rise:.2g} nats better than the first.",
        "The chain is still on its way to the posterior.",
        "Run longer (more epochs), standardise the inputs, start from a fit (init=), or run several chains with pl.Ensemble.",
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


RULES = (infinite, worse, idle, collapsed, apart, disagreeing, rising)


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
    here = posterior.predict(near.x, draws)
    there = None if far is None else posterior.predict(far.x, draws)
    noise = errors = gain = gain_error = rise = unseen = None
    y = data.batch.y
    if posterior.likelihood.kind == "continuous":
        std = y.double().std(correction=0)
        noise = float(here.aleatoric.double().mean().sqrt() / std) if std > 0 else None
        if far is not None and there is not None and noise:
            errors = float((there.mean.double() - far.y.double()).square().mean().sqrt() / std) / noise
    if far is not None and there is not None:
        unseen = there.log_prob(far.y).double()
    chains = posterior.run.get("chains", getattr(posterior, "chains", 1)) or 1
    bound = "elbo" in posterior.history or "kl" in posterior.history
    if posterior.method.traits.keeps_draws and far is None and here.num_draws >= LEAST_DRAWS and not bound:
        each = here.log_prob_by_draw(near.y).double()
        if (gains := _gains(posterior.likelihood, each, near.y, y)) is not None:
            gain, gain_error = float(gains.mean()), float(gains.std()) / len(gains) ** 0.5
        # cycles begin anew each time
        alone = chains == 1 and getattr(posterior, "ordered", False) and not hasattr(posterior.method, "cycles")
        rise = _rise(each.mean(1)) if alone else None
    return Facts(
        who=type(posterior.method).__name__,
        rows=data.num_data,
        weights=size,
        seen=float(here.log_prob(near.y).double().mean()),
        constant=constant(posterior.likelihood, y),
        unseen=None if unseen is None else float(unseen.mean()),
        noise=noise,
        errors=errors,
        error=0.0 if unseen is None else float(unseen.std()) / len(unseen) ** 0.5,
        trained=not posterior.method.traits.keeps_draws or posterior.num_draws(None) <= getattr(posterior, "chains", 1),
        bound=bound,
        rhat=_rhat(posterior, near) if chains > 1 else None,
        gain=gain,
        gain_error=gain_error or 0.0,
        rise=rise,
        infinite=_infinite(posterior.likelihood, here),
    )


def constant(likelihood: Likelihood, y: Tensor) -> float | None:
    """The mean log density of targets under their own mean and scatter, or frequencies: what inputs have to improve on."""
    found = _constant(likelihood, y, y)
    return None if found is None else float(found[0].mean())


def _constant(likelihood: Likelihood, y: Tensor, every: Tensor) -> tuple[Tensor, int] | None:
    """The log densities of targets by the mean and scatter, or frequencies, of `every` one; and how many numbers these are."""
    if likelihood.kind == "continuous":
        flat, whole = (part.double().reshape(len(part), -1) for part in (y, every))
        variances = whole.var(0, correction=0)
        if not bool((variances > 0).all()):
            return None
        squares = (flat - whole.mean(0)).square() / variances
        return -0.5 * (squares + (2 * math.pi * variances).log()).sum(1), 2 * whole.shape[1]
    if likelihood.kind in ("classes", "binary") and y.ndim == 1:
        known, counts = torch.unique(every, return_counts=True)
        return (counts[torch.searchsorted(known, y)].double() / len(every)).log(), len(known) - 1
    return None


def left_out(each: Tensor) -> Tensor:
    """Log p(y_n | all other rows), [N], from log densities [S, N] under draws that saw all rows.

    By importance weights 1/p(y_n | w_s), each at most √S times their mean (Ionides 2008).
    """
    most = (-each).logsumexp(0) - 0.5 * math.log(len(each))
    weights = torch.minimum(-each, most)
    return (weights + each).logsumexp(0) - weights.logsumexp(0)


def _gains(likelihood: Likelihood, each: Tensor, y: Tensor, every: Tensor) -> Tensor | None:
    """By how much each row, left out, is predicted better than by the constant, whose numbers were found with it."""
    if (found := _constant(likelihood, y, every)) is None:
        return None
    logs, count = found
    return left_out(each) - (logs - count / len(every))


def _rise(path: Tensor) -> float | None:
    """The rise of the mean log-likelihood from the first to the second half of a chain, where the halves are apart."""
    first, second = path.chunk(2)
    found = float(second.mean() - first.mean())
    return found if found > RISE and float(convergence.rhat(path[None, :, None])) > STILL_RISING else None


def _some(data: ArrayData, count: int) -> Batch:
    """Evenly spaced rows."""
    at = torch.linspace(0, data.num_data - 1, min(count, data.num_data)).round().long()
    return select_rows(data.batch, at.to(data.batch.y.device))


def _infinite(likelihood: Likelihood, pred: Predictive) -> int:
    """Rows without a finite variance; 0 for a likelihood that has none by its nature."""
    df = getattr(unscaled(likelihood), "df", "learned")
    if not isinstance(df, str) and df <= 2:
        return 0
    return int((~torch.isfinite(pred.variance)).reshape(len(pred), -1).any(1).sum())


def _rhat(posterior: Posterior, batch: Batch) -> float | None:
    value = posterior.diagnostics(take(batch.x, slice(CHAIN_ROWS))).get("rhat")
    return None if value is None else float(value)
