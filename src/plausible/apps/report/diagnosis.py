"""Warnings about the fit itself: chains that disagree, a KL term that drowns the data, a collapsed posterior."""

from __future__ import annotations

import numpy as np

from plausible.apps.report.findings import Findings
from plausible.apps.report.verdicts import COLLAPSED, Verdict
from plausible.apps.report.words import percent
from plausible.posteriors.verdicts import judged

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


def collapse(findings: Findings) -> list[Verdict]:
    """No epistemic uncertainty: by design with one draw, an alarm with more."""
    if findings.draws == 1:
        return [
            Verdict(
                "plain",
                "This method keeps one set of weights and has no epistemic uncertainty.",
                "All stated uncertainty is noise in the data: far from the training rows predictions are as certain as among "
                "them.",
                "Where that matters use an ensemble or a sampler: --method ensemble.",
            )
        ]
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
                "For an ensemble use init=fresh and minibatches; for a sampler raise the step size, the temperature (1) or the "
                "number of steps; for variational methods train longer or start with a larger scale.",
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
    if name is None or len(findings.history[name]) < least:
        return []
    values = np.asarray(findings.history[name], dtype=np.float64)
    fifth = len(values) // 5
    last, before, first = values[-fifth:], values[-2 * fifth : -fifth], values[:fifth]
    gained, total = float(np.median(last) - np.median(before)), float(np.median(last) - np.median(first))
    noise = float(np.median(np.abs(np.diff(values[-2 * fifth :])))) if fifth > 1 else 0.0
    if not (total > 0 and gained > rise * total and gained > 2 * noise):
        return []
    return [
        Verdict(
            "unclear",
            f"Training may not have finished: {name.replace('_', ' ')} was still rising.",
            f"The last fifth of the epochs brought {percent(gained / total)} of the whole gain.",
            "Train longer (--epochs) or with a larger learning rate, and see whether held-out scores improve.",
        )
    ]
