"""Plain-language verdicts on held-out predictions; over- or underconfidence is only claimed where chance cannot explain it.

Each test asks what a right prediction would show (see `statistics`), two-sided, at the level `SUPPORT` of 1 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from plausible import metrics
from plausible.report.evidence import Output
from plausible.report.statistics import association, chance_ece, hits, improvement, normal, uniform
from plausible.report.words import number, percent

LEVEL = 0.9
FEW = 30
"""Held-out examples below which silence of a test says little."""


class Verdict(NamedTuple):
    """`tone` is good, bad, unclear or plain; `headline` one sentence; `detail` and `advice` may be empty."""

    tone: str
    headline: str
    detail: str = ""
    advice: str = ""


def verdicts(output: Output) -> list[Verdict]:
    """All verdicts on one target, the calibration first."""
    if not output.arrays:
        return []
    found = of_numbers(output) if output.numeric else of_classes(output)
    return [*found, usefulness(output)]


def of_numbers(output: Output) -> list[Verdict]:
    """Coverage of intervals, bias, shape, and the error beside that of a constant."""
    return [coverage(output), shape(output), skill(output)]


def coverage(output: Output, level: float = LEVEL) -> Verdict:
    """The number of targets inside their interval against Binomial(M, level).

    Through u = F(y), inside where |2u − 1| ≤ level: for counts u is randomised, so that the law holds for them as well.
    """
    values, count = output.arrays["pit"], output.count
    inside = int((np.abs(2 * values - 1) <= level + 1e-12).sum())
    share = inside / count
    error = math.sqrt(level * (1 - level) / count)
    test = hits(np.full(count, level), inside)
    first = f"{percent(level)} intervals cover {percent(share)} of the held-out targets"
    margin = f"With {count:,} rows the standard error of a share of {percent(level)} is {number(100 * error, 2)} points"
    if output.kind == "counts":
        margin += ", and intervals of counts, which end at whole numbers, were trimmed at random to hold exactly that"
    if test.supported and test.direction < 0:
        return Verdict(
            "bad",
            f"Intervals cover {percent(share)} where {percent(level)} was promised: overconfident.",
            f"{margin}; chance does not explain the difference.",
            "Do not take the intervals at their word. Widen what the model may be unsure of: an ensemble or a sampler instead of a "
            "single fit, more members or chains, an earlier stop where it overfits, noise that varies with the input "
            "(likelihood heteroscedastic) or has heavy tails (student-t).",
        )
    if test.supported:
        return Verdict(
            "bad",
            f"Intervals cover {percent(share)} where {percent(level)} was promised: underconfident.",
            f"{margin}; chance does not explain the difference.",
            "Intervals are wider than they need to be. Often the fit is not finished: train longer. Or the prior holds the "
            "weights back, the noise is taken to be the same everywhere (try heteroscedastic), or a few outliers widen it "
            "(try student-t).",
        )
    if count < FEW:
        return Verdict(
            "unclear",
            f"{first}; {count} rows are too few to tell whether they keep their promise.",
            f"{margin}.",
            "Hold out more rows (--test-fraction), or compare over several splits.",
        )
    return Verdict("good", f"{first}: {_kept('promised', share - level, error)}.", f"{margin}.")


def _kept(what: str, difference: float, error: float) -> str:
    """As promised within one standard error; beyond it only not shown to be otherwise."""
    return f"as {what}" if abs(difference) <= error else "no further off than chance explains"


def shape(output: Output) -> Verdict:
    """The mean of u = F(y) against ½ ± 1/√(12M), then all of its law by Kolmogorov's test."""
    values, count = output.arrays["pit"], output.count
    lean = normal(float((values.mean() - 0.5) * math.sqrt(12 * count)))
    if lean.supported:
        side = "low" if lean.direction > 0 else "high"
        return Verdict(
            "bad",
            f"Predictions are too {side}: {percent(float((values > 0.5).mean()))} of the targets lie above their predicted "
            "median where 50 % should.",
            f"The mean of the probability integral transform is {number(float(values.mean()))} instead of 0.5.",
            "A bias on held-out rows: train longer, weaken the prior, or look whether held-out rows differ from the others.",
        )
    if uniform(values).supported:
        return Verdict(
            "bad",
            "The predicted distributions have the wrong shape.",
            "Their centre is right, but the probability integral transform below is not flat: high at both ends means "
            "overconfident, high in the middle underconfident.",
            "Try another likelihood: heteroscedastic where the spread depends on the input, student-t for outliers.",
        )
    if count < FEW:
        return Verdict("unclear", f"No bias is seen, but {count} rows would show only a large one.")
    return Verdict("good", "No bias: targets fall evenly over their predicted distributions.")


def skill(output: Output) -> Verdict:
    """Squared errors against those of the mean of the held-out targets, paired."""
    y, losses = output.arrays["y"], output.losses
    baseline = (y - y.mean()) ** 2
    test = improvement(losses, baseline)
    rmse = math.sqrt(float(losses.mean()))
    if not baseline.any():
        return Verdict("plain", f"The typical error (RMSE) is {number(rmse)}; all held-out targets are the same.")
    explained = 1 - float(losses.mean() / baseline.mean())
    if test.supported and test.direction > 0:
        return Verdict(
            "good",
            f"The mean explains {percent(explained)} of the variance: its typical error (RMSE) is {number(rmse)}, "
            f"that of a constant {number(float(y.std()))}.",
        )
    compared = f"RMSE {number(rmse)}, that of the mean alone {number(float(y.std()))}"
    return Verdict(
        *_doubt(explained > 0, output.count, f"a constant: {compared}", "Predictions are"),
        "",
        "Train longer or with another learning rate, and ask whether the inputs say anything about the target.",
    )


def _doubt(ahead: bool, count: int, rival: str, subject: str) -> tuple[str, str]:
    """Tone and headline where being better than a rival is not supported: ahead by chance, or not ahead at all."""
    if ahead or count < FEW:
        return "unclear", f"{subject} not shown to be better than {rival}; {count:,} rows leave it open."
    return "bad", f"{subject} no better than {rival}."


def of_classes(output: Output) -> list[Verdict]:
    """Stated confidence against hits, the calibration error against that of chance, accuracy against the largest class."""
    probs, y, count = output.arrays["probs"].astype(np.float64), output.arrays["y"], output.count
    probs = probs / probs.sum(-1, keepdims=True)
    confidence, right = probs.max(-1), probs.argmax(-1) == y
    return [confident(confidence, right), calibrated(output, probs, confidence), accurate(output, right, count)]


def confident(confidence: np.ndarray, right: np.ndarray) -> Verdict:
    """The number of right answers against the Poisson binomial law of the stated confidences."""
    count, said, share = len(right), float(confidence.mean()), float(right.mean())
    error = math.sqrt(float((confidence * (1 - confidence)).sum())) / count
    test = hits(confidence, int(right.sum()))
    margin = (
        f"If every stated probability were right, {percent(said, 1)} ± {number(100 * error, 2)} points would be right"
    )
    sentence = f"The answers claim to be right {percent(said)} of the time and are right {percent(share)}"
    if test.supported and test.direction < 0:
        return Verdict(
            "bad", f"{sentence}: overconfident.", f"{margin} (standard error, {count:,} rows).",
            "Do not act on the stated probabilities as they are. Average more: an ensemble or a sampler, more members, a "
            "stronger prior, fewer epochs; or scale the logits by a temperature fitted on other held-out data.",
        )  # fmt: skip
    if test.supported:
        return Verdict(
            "bad", f"{sentence}: underconfident.", f"{margin} (standard error, {count:,} rows).",
            "The answers are better than they claim. Train longer, or weaken the prior.",
        )  # fmt: skip
    if count < FEW:
        return Verdict("unclear", f"{sentence}; {count} rows are too few to tell more.", f"{margin}.")
    return Verdict("good", f"{sentence}: {_kept('claimed', share - said, error)}.", f"{margin}.")


def calibrated(output: Output, probs: np.ndarray, confidence: np.ndarray) -> Verdict:
    """The calibration error against what right probabilities would show by chance (consistency resampling)."""
    found, limit = metrics.ece(probs, output.arrays["y"]), chance_ece(confidence)
    detail = (
        f"Right probabilities would show up to {number(limit, 2)} in 99 of 100 such samples of {output.count:,} rows."
    )
    if found > limit:
        return Verdict(
            "bad", f"The calibration error is {number(found, 2)}, more than chance gives.", detail,
            "Look at the reliability diagram: below the line probabilities claim too much, above it too little.",
        )  # fmt: skip
    tone = "good" if output.count >= FEW else "unclear"
    return Verdict(tone, f"The calibration error is {number(found, 2)}, which chance explains.", detail)


def accurate(output: Output, right: np.ndarray, count: int) -> Verdict:
    """Hits against always answering the most frequent class, paired."""
    codes, counts = np.unique(output.arrays["y"], return_counts=True)
    common = codes[counts.argmax()]
    constant = output.arrays["y"] == common
    share, base = float(right.mean()), float(constant.mean())
    error = math.sqrt(share * (1 - share) / count)
    test = improvement(1.0 - right, 1.0 - constant)
    sentence = f"{percent(share)} of the answers are right (± {number(100 * error, 2)} points)"
    if test.supported and test.direction > 0:
        return Verdict("good", f"{sentence}; always saying the most frequent class gives {percent(base)}.")
    if len(codes) == 1:
        return Verdict("plain", f"{sentence}; all held-out rows are of one class.")
    return Verdict(
        *_doubt(share > base, count, f"always saying the most frequent class ({percent(base)})", f"{sentence},"),
        "",
        "Train longer or with another learning rate, and ask whether the inputs say anything about the target.",
    )


def usefulness(output: Output) -> Verdict:
    """Whether stated uncertainty and loss go together (Spearman): what a risk-coverage curve shows."""
    uncertainty, losses = output.uncertainty, output.losses
    order = np.argsort(uncertainty, kind="stable")
    half = order[: max(1, len(order) // 2)]
    if output.numeric:
        parts = [f"RMSE {number(math.sqrt(float(part.mean())))}" for part in (losses[half], losses)]
    else:
        parts = [f"{percent(float(part.mean()), 1)} wrong" for part in (losses[half], losses)]
    compared = f"The more certain half: {parts[0]}; all rows: {parts[1]}."
    found = association(uncertainty, losses)
    if not output.numeric and not losses.any():
        return Verdict("plain", "There is no wrong answer that the uncertainty could have warned of.")
    if found is None or float(uncertainty.std()) < 1e-6 * float(uncertainty.mean()):
        return Verdict(
            "plain",
            "Every prediction is equally uncertain, so uncertainty cannot say which ones to trust.",
            "One noise for all rows, and draws that do not disagree.",
            "An ensemble or a sampler adds disagreement; likelihood heteroscedastic adds noise that varies.",
        )
    rho, test = found
    if test.supported and test.direction > 0:
        return Verdict("good", f"Uncertainty finds the errors (rank correlation {number(rho, 2)}).", compared)
    if test.supported:
        return Verdict(
            "bad", f"Uncertainty points the wrong way (rank correlation {number(rho, 2)}).", compared,
            "Rows that are called certain err more: do not select by uncertainty.",
        )  # fmt: skip
    return Verdict(
        "unclear", "It is not shown that uncertain predictions err more.", compared,
        "Where errors are pure noise of one size this is as it should be; otherwise hold out more rows.",
    )  # fmt: skip
