"""Plain-language verdicts on held-out predictions; over- or underconfidence is only claimed where chance cannot explain it.

Each verdict asks what a right prediction would show (see `statistics`), two-sided, at the level `SUPPORT` of 1 %, which
the tests behind it share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from plausible.analysis import metrics
from plausible.apps.report.findings import Findings, Output
from plausible.apps.report.statistics import (
    Test,
    association,
    chance_ece,
    hits,
    improvement,
    normal,
    powerless,
    signs,
    spread,
    uniform,
)
from plausible.core.words import number, percent, plural
from plausible.posteriors.verdicts import Verdict as Verdict
from plausible.posteriors.verdicts import judged

LEVEL = 0.9
FEW = 30
"""Held-out examples below which silence of a test says little."""

TESTS = 3
"""Tests of u = F(y) behind one verdict at most, its mean, spread and law; all that are made of u take that share of 1 %."""

COLLAPSED = 1e-4
"""Epistemic share of the variance (of the entropy for classes) below which draws are taken to be one and the same."""


class Advice(NamedTuple):
    """What to do about a fit of one kind of method: to make it less sure, to make it surer, and to let it learn more."""

    widen: str
    average: str
    longer: str

    @property
    def narrow(self) -> str:
        return (
            f"Often the fit is not finished: {self.longer}. Or the prior holds the weights back, the noise is taken to be the same "
            "everywhere (try heteroscedastic), or a few outliers widen it (try student-t)."
        )

    @property
    def learn(self) -> str:
        return f"{self.longer.capitalize()}, and ask whether the inputs say anything about the target."


_NOISE = "noise that varies with the input (likelihood heteroscedastic) or has heavy tails (student-t)"
_DOUBTED = "Do not act on the stated probabilities as they are."
_SCALED = "scale the logits by a temperature fitted on other held-out data"
_TRAINED = "train longer or with another learning rate"
ADVICE = {
    "point": Advice(
        f"Widen what the model may be unsure of: an ensemble or a sampler instead of a single fit, an earlier stop, {_NOISE}.",
        f"{_DOUBTED} Average: an ensemble or a sampler instead of a single fit; or a stronger prior, fewer epochs; or {_SCALED}.",
        _TRAINED,
    ),
    "variational": Advice(
        f"Widen what the model may be unsure of: a family with correlations, an ensemble or a sampler; {_NOISE}.",
        f"{_DOUBTED} Try a family with correlations, an ensemble or a sampler, or a stronger prior; or {_SCALED}.",
        _TRAINED,
    ),
    "chains": Advice(
        f"The chains average over the weights already, so see that they agree, then doubt the model: {_NOISE}, another prior.",
        f"{_DOUBTED} See that the chains agree, then try a stronger prior or another network; or {_SCALED}.",
        "draw longer chains (warmup and draws; with --method auto more --time)",
    ),
    "draws": Advice(
        f"Widen what the model may be unsure of: more members or draws, an earlier stop where it overfits, a sampler, {_NOISE}.",
        f"{_DOUBTED} Average more members or draws, or take a stronger prior, fewer epochs; or {_SCALED}.",
        _TRAINED,
    ),
}


def verdicts(output: Output, family: str = "draws") -> list[Verdict]:
    """All verdicts on one target, the calibration first, with advice for the `family` of the method."""
    advice = ADVICE[family]
    if not output.arrays:
        return []
    if output.numeric:
        return [coverage(output, advice), shape(output, advice), skill(output, advice), usefulness(output)]
    probs = output.arrays["probs"].astype(np.float64)
    probs = probs / probs.sum(-1, keepdims=True)
    confidence, right = probs.max(-1), probs.argmax(-1) == output.arrays["y"]
    sure = [confident(confidence, right, advice), calibrated(output, probs, confidence)]
    return [*sure, accurate(output, right, advice), usefulness(output)]


def widths(output: Output, level: float = LEVEL) -> tuple[int, Test, Test]:
    """How many targets lie inside their interval, the test of that against Binomial(M, level), and that of the spread of u.

    Through u = F(y), inside where |2u − 1| ≤ level: for counts u is randomised, so that the law holds for them as well. Each
    is one of the `TESTS` that u is put to.
    """
    values = output.arrays["pit"]
    inside = int((np.abs(2 * values - 1) <= level + 1e-12).sum())
    return inside, hits(np.full(output.count, level), inside).among(TESTS), spread(values).among(TESTS)


def coverage(output: Output, advice: Advice = ADVICE["draws"], level: float = LEVEL) -> Verdict:
    """Over- or underconfident where the number of targets inside says so, or the spread of u and the share inside agree."""
    values, count = output.arrays["pit"], output.count
    inside, number_inside, around = widths(output, level)
    share = inside / count
    error = math.sqrt(level * (1 - level) / count)
    subject, margin = "intervals", f"With {plural(count)} the standard error of a share of {percent(level)} is "
    margin += f"{number(100 * error, 2)} points"
    if output.kind == "counts":
        low, high = output.arrays["quantiles"][[0, -1]]
        whole = float(((low <= output.arrays["y"]) & (output.arrays["y"] <= high)).mean())
        subject += " with randomised ends"
        margin += (
            f". Whole-number intervals hold more than {percent(level)} of a right prediction, so hits on their ends count in "
            f"part, by lot; with both ends counted in full, as in the scores, {percent(whole, 1)} of the targets lie inside"
        )
    promised = f"{subject.capitalize()} cover {percent(share)} where {percent(level)} was promised"
    crowded = around.supported and (share - level) * around.direction < 0
    if number_inside.supported or crowded:
        wide = number_inside.direction > 0 if number_inside.supported else around.direction < 0
        if not number_inside.supported:
            promised += f", and targets crowd {'in the middle' if wide else 'at the ends'} of what was predicted"
            margin += f". {_deviation(values)}"
        reason = f"{margin}; chance does not explain the difference."
        if wide:
            return Verdict("bad", f"{promised}: underconfident.", reason, f"Intervals are wider than needed. {advice.narrow}")
        return Verdict("bad", f"{promised}: overconfident.", reason, f"Do not take the intervals at their word. {advice.widen}")
    first = f"{percent(level)} {subject} cover {percent(share)} of the held-out targets"
    more = "Hold out more rows (--test-fraction), or compare over several splits."
    if count < FEW:
        too_few = f"{_few(count)} to tell whether they keep their promise"
        return Verdict("unclear", f"{first}; {too_few}.", f"{margin}.", more)
    if _blind(np.full(count, level), share - level, error, TESTS):
        return Verdict("unclear", f"{first}; {_open(count, share > level)}.", f"{margin}.", more)
    return Verdict("good", f"{first}: {_kept('promised', share - level, error)}.", f"{margin}.")


def _kept(what: str, difference: float, error: float) -> str:
    """As promised within one standard error; beyond it only not shown to be otherwise."""
    return f"as {what}" if abs(difference) <= error else "no further off than chance explains"


def _blind(probabilities: np.ndarray, difference: float, error: float, tests: int = 1) -> bool:
    """Whether data point to a side, by more than a standard error, on which no number of hits could be called."""
    return abs(difference) > error and powerless(probabilities, 1 if difference > 0 else -1, tests)


def _open(count: int, above: bool) -> str:
    return f"with {plural(count)} even {'all' if above else 'none'} of them could be chance"


def _few(count: int) -> str:
    return f"{plural(count)} {'is' if count == 1 else 'are'} too few"


def _deviation(values: np.ndarray) -> str:
    """√mean (u − ½)² in words; 1/√12 for uniform u."""
    spread = math.sqrt(float(((values - 0.5) ** 2).mean()))
    return f"The probability integral transform deviates from ½ by {number(spread)} (root mean square) instead of 0.289"


def shape(output: Output, advice: Advice = ADVICE["draws"]) -> Verdict:
    """The mean of u = F(y) against ½ ± 1/√(12M), then its spread around ½, then all of its law by Kolmogorov's test.

    Narrow predictions spread u further than 1/√12, and its mean with it: that is allowed for before a bias is claimed.
    """
    values, count = output.arrays["pit"], output.count
    # Intervals that are too narrow spread u, and its mean with it; that alone is no bias.
    deviation = max(1 / math.sqrt(12), float(values.std()))
    lean = normal(float(values.mean() - 0.5) * math.sqrt(count) / deviation).among(TESTS)
    _, number_inside, around = widths(output)
    if lean.supported:
        side = "low" if lean.direction > 0 else "high"
        return Verdict(
            "bad",
            f"Predictions are too {side}: {percent(float((values > 0.5).mean()))} of the targets lie above their predicted "
            "median where 50 % should.",
            f"The mean of the probability integral transform is {number(float(values.mean()))} instead of 0.5.",
            f"A bias on held-out rows: {advice.longer}, weaken the prior, or look whether held-out rows differ from the others.",
        )
    torn = number_inside.supported and number_inside.direction == around.direction  # the middle and the ends disagree
    if around.supported and not torn:
        wide = around.direction < 0
        said = f"The predicted distributions are too {'wide: under' if wide else 'narrow: over'}confident."
        return Verdict("bad", said, f"Their centre is right. {_deviation(values)}.", advice.narrow if wide else advice.widen)
    if around.supported or uniform(values).among(TESTS).supported:
        return Verdict(
            "bad",
            "The predicted distributions have the wrong shape.",
            "Their centre is right, and they are not too wide or too narrow as a whole, but the probability integral transform "
            "below is not flat.",
            "Try another likelihood: heteroscedastic where the spread depends on the input, student-t for outliers.",
        )
    if count < FEW:
        return Verdict("unclear", f"No bias is seen, but {plural(count)} would show only a large one.")
    return Verdict("good", "No bias: targets fall as evenly over their predicted distributions as chance allows.")


def skill(output: Output, advice: Advice = ADVICE["draws"]) -> Verdict:
    """Squared errors against those of the mean of the held-out targets, paired: by their mean, and by their signs.

    No constant has a smaller mean squared error than that mean, so more smaller errors only count where the mean is smaller.
    """
    y, losses = output.arrays["y"], output.losses
    baseline = (y - y.mean()) ** 2
    rmse = math.sqrt(float(losses.mean()))
    if output.count == 1:
        return Verdict("plain", f"The error of the only held-out row is {number(rmse)}; a constant cannot be compared.")
    if not baseline.any():
        return Verdict("plain", f"The typical error (RMSE) is {number(rmse)}; all held-out targets are the same.")
    explained = 1 - float(losses.mean() / baseline.mean())
    # A few large errors rule the mean of squares, and signs ignore sizes: either may show what the other misses.
    tests = [test(losses, baseline).among(2) for test in (improvement, signs)]
    if explained > 0 and any(test.supported and test.direction > 0 for test in tests):
        return Verdict(
            "good",
            f"The mean explains {percent(explained)} of the variance: its typical error (RMSE) is {number(rmse)}, "
            f"that of a constant {number(float(y.std()))}.",
        )
    compared = f"RMSE {number(rmse)}, that of the mean alone {number(float(y.std()))}"
    return _doubt(explained > 0, output.count, f"a constant: {compared}", "Predictions are", advice)


def _doubt(ahead: bool, count: int, rival: str, subject: str, advice: Advice) -> Verdict:
    """Where being better than a rival is not supported: ahead by chance, or not ahead at all."""
    if ahead or count < FEW:
        left = f"{plural(count)} {'leaves' if count == 1 else 'leave'} it open"
        return Verdict("unclear", f"{subject} not shown to be better than {rival}; {left}.", "", advice.learn)
    return Verdict("bad", f"{subject} no better than {rival}.", "", advice.learn)


def confident(confidence: np.ndarray, right: np.ndarray, advice: Advice) -> Verdict:
    """The number of right answers against the Poisson binomial law of the stated confidences."""
    count, said, share = len(right), float(confidence.mean()), float(right.mean())
    error = math.sqrt(float((confidence * (1 - confidence)).sum())) / count
    test = hits(confidence, int(right.sum()))
    margin = f"If every stated probability were right, {percent(said, 1)} ± {number(100 * error, 2)} points would be right"
    sentence = f"The answers claim to be right {percent(said)} of the time and are right {percent(share)}"
    if test.supported:
        reason = f"{margin} (standard error, {plural(count)})."
        if test.direction < 0:
            return Verdict("bad", f"{sentence}: overconfident.", reason, advice.average)
        better = f"The answers are better than they claim: {advice.longer}, or weaken the prior."
        return Verdict("bad", f"{sentence}: underconfident.", reason, better)
    if count < FEW:
        return Verdict("unclear", f"{sentence}; {_few(count)} to tell more.", f"{margin}.")
    if _blind(confidence, share - said, error):
        return Verdict("unclear", f"{sentence}; {_open(count, share > said)}.", f"{margin}.", "Hold out more rows.")
    return Verdict("good", f"{sentence}: {_kept('claimed', share - said, error)}.", f"{margin}.")


def calibrated(output: Output, probs: np.ndarray, confidence: np.ndarray) -> Verdict:
    """The calibration error against what right probabilities would show by chance (consistency resampling)."""
    error, limit = metrics.ece(probs, output.arrays["y"]), chance_ece(confidence)
    detail = f"Right probabilities would show up to {number(limit, 2)} in 99 of 100 such samples of {plural(output.count)}."
    said = f"The calibration error is {number(error, 2)}"
    if error > limit:
        look = "Look at the reliability diagram: below the line probabilities claim too much, above it too little."
        return Verdict("bad", f"{said}, more than chance gives.", detail, look)
    return Verdict("good" if output.count >= FEW else "unclear", f"{said}, which chance explains.", detail)


def accurate(output: Output, right: np.ndarray, advice: Advice) -> Verdict:
    """Hits against always answering the most frequent class, paired."""
    codes, counts = np.unique(output.arrays["y"], return_counts=True)
    constant = output.arrays["y"] == codes[counts.argmax()]
    share, base = float(right.mean()), float(constant.mean())
    error = math.sqrt(share * (1 - share) / output.count)
    test = improvement(1.0 - right, 1.0 - constant)
    if output.count == 1:
        return Verdict("plain", f"The answer to the only held-out row is {'right' if right.all() else 'wrong'}.")
    sentence = f"{percent(share)} of the answers are right (± {number(100 * error, 2)} points)"
    if test.supported and test.direction > 0:
        return Verdict("good", f"{sentence}; always saying the most frequent class gives {percent(base)}.")
    if len(codes) == 1:
        return Verdict("plain", f"{sentence}; all held-out rows are of one class.")
    return _doubt(
        share > base, output.count, f"always saying the most frequent class ({percent(base)})", f"{sentence},", advice
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
    related = association(uncertainty, losses)
    if not output.numeric and not losses.any():
        return Verdict("plain", "There is no wrong answer that the uncertainty could have warned of.")
    if output.count < 3:
        return Verdict("unclear", f"{_few(output.count)} to tell whether uncertain predictions err more.")
    if float(uncertainty.std()) <= 1e-6 * float(uncertainty.mean()):
        alike = "Every prediction is equally uncertain, so uncertainty cannot say which ones to trust."
        return Verdict("plain", alike, *_alike(output))
    if related is None:
        return Verdict("plain", "Every prediction errs alike, so there is nothing that uncertainty could tell apart.")
    rho, test = related
    strength = f"(rank correlation {number(rho, 2)})"
    if test.supported and test.direction > 0:
        return Verdict("good", f"Uncertainty finds the errors {strength}.", compared)
    if test.supported:
        wary = "Rows that are called certain err more: do not select by uncertainty."
        return Verdict("bad", f"Uncertainty points the wrong way {strength}.", compared, wary)
    alike = "errors are pure noise of one size" if output.numeric else "all rows are equally hard to tell"
    more = f"Where {alike} this is as it should be; otherwise hold out more rows."
    return Verdict("unclear", "It is not shown that uncertain predictions err more.", compared, more)


def _alike(output: Output) -> tuple[str, str]:
    if not output.numeric:
        return ("The stated probability of the answer is the same for all rows.", "An ensemble or a sampler adds disagreement.")
    varying = "likelihood heteroscedastic adds noise that varies."
    if float((output.arrays["epistemic"] / np.maximum(output.uncertainty**2, 1e-300)).max()) < COLLAPSED:
        adds = f"An ensemble or a sampler adds disagreement; {varying}"
        return "One noise for all rows, and draws that do not disagree.", adds
    return "One noise for all rows, and draws that disagree equally on all of them.", varying.capitalize()


KL_SHARE = 0.9


def diagnosis(findings: Findings) -> list[Verdict]:
    """Everything worth saying about the fit, the worst first."""
    apart = findings.diagnostics.get("rhat_weights")
    chains = judged(findings.diagnostics, None if apart is None else {"rhat": apart})
    said = [*chains, *collapse(findings), *kl(findings), *unfinished(findings)]
    if "interrupted" in findings.facts:
        said.append(Verdict("bad", "The fit was stopped before its planned end.", "", "Resume it."))
    order = {"bad": 0, "unclear": 1, "plain": 2, "good": 3}
    return sorted(said, key=lambda verdict: order[verdict.tone])


def epistemic_share(findings: Findings) -> float | None:
    """The largest, over targets, of the median share of uncertainty that is disagreement of draws."""
    shares = []
    for output in findings.outputs:
        if output.arrays and output.numeric:
            total = output.arrays["epistemic"] + output.arrays["aleatoric"]
            shares.append(float(np.median(output.arrays["epistemic"] / np.maximum(total, 1e-300))))
        elif output.arrays:
            shares.append(float(output.arrays["information"].sum() / max(float(output.arrays["entropy"].sum()), 1e-300)))
    return max(shares) if shares else None


_APART = {
    "chains": "Draw longer chains, from starting points of their own.",
    "variational": "Train longer, or start with a larger scale.",
    "draws": (
        "Of an ensemble start members anew (init=fresh); of a sampler raise the step size, the temperature (1) or the number of "
        "steps; of a Gaussian at a mode look at its prior, which may hold all weights at 0."
    ),
}


def family(findings: Findings) -> str:
    """What kind of method it was, as far as advice depends on it: a name of `ADVICE`."""
    if findings.draws == 1:
        return "point"
    if findings.diagnostics.get("acceptance") is not None:
        return "chains"
    return "variational" if "elbo" in findings.history else "draws"


def collapse(findings: Findings) -> list[Verdict]:
    """No epistemic uncertainty: by design with one draw, an alarm with more."""
    if findings.draws == 1:
        single = "This method keeps one set of weights and has no epistemic uncertainty."
        why = (
            "All stated uncertainty is noise in the data: far from the training rows predictions are as certain as among them."
        )
        return [Verdict("plain", single, why, "Where that matters use an ensemble or a sampler: --method ensemble.")]
    share = epistemic_share(findings)
    if share is None:
        return []
    what = "of the variance" if findings.outputs[0].numeric else "of the entropy"
    if share < COLLAPSED:
        return [
            Verdict(
                "bad",
                f"The posterior has collapsed: {findings.draws} draws disagree on {percent(share, 2)} {what}.",
                "They are copies of one another in all but name; epistemic uncertainty is missing, not small.",
                _APART[family(findings)],
            )
        ]
    return [Verdict("plain", f"Disagreement of draws (epistemic) is {percent(share)} {what}; the rest is noise.")]


def kl(findings: Findings) -> list[Verdict]:
    """The share of the KL term in a variational objective at the end of training."""
    terms = {name.lower(): values for name, values in findings.history.items() if values}
    name = next((name for name in terms if name == "kl" or name.endswith("_kl") or name.startswith("kl_")), None)
    fit = next((terms[n] for n in ("expected_log_likelihood", "log_likelihood", "nll") if n in terms), None)
    if name is None or fit is None or not abs(terms[name][-1]) + abs(fit[-1]):
        return []
    share = abs(terms[name][-1]) / (abs(terms[name][-1]) + abs(fit[-1]))
    if not share >= KL_SHARE:
        return []
    return [
        Verdict(
            "bad",
            f"KL is {percent(share)} of the objective.",
            "The distance to the prior outweighs the data: weights stay near the prior and predictions underfit.",
            "Use a prior that fits the network (scaled by fan-in), a smaller network or more data; tempering the KL (a cold "
            "posterior) is a remedy with a price, so state it.",
        )
    ]


def unfinished(findings: Findings, least: int = 10, rise: float = 0.05) -> list[Verdict]:
    """Whether the objective still rose at the end: the last fifth of the epochs against the fifth before."""
    name = next((n for n in ("elbo", "log_joint", "log_likelihood") if findings.history.get(n)), None)
    if family(findings) == "chains":  # the warm-up of chains is judged by whether they agree
        return []
    if name is None or len(findings.history[name]) < least:
        return []
    values = np.asarray(findings.history[name], dtype=np.float64)
    fifth = len(values) // 5
    last, before, first = values[-fifth:], values[-2 * fifth : -fifth], values[:fifth]
    gained, total = float(np.median(last) - np.median(before)), float(np.median(last) - np.median(first))
    noise = float(np.median(np.abs(np.diff(values[-2 * fifth :])))) if fifth > 1 else 0.0
    if not (total > 0 and gained > rise * total and gained > 2 * noise):
        return []
    rising = f"Training may not have finished: {name.replace('_', ' ')} was still rising."
    share = f"The last fifth of the epochs brought {percent(gained / total)} of the whole gain."
    longer = "Train longer (epochs) or with a larger learning rate, and see whether held-out scores improve."
    return [Verdict("unclear", rising, share, longer)]
