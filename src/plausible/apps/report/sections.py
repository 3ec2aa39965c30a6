"""Findings → the page: what the template `report.html.j2` shows, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plausible.apps.pages import Shown, png, render
from plausible.apps.report import figures
from plausible.apps.report.findings import QUANTILES, Findings, Output
from plausible.apps.report.verdicts import Verdict, diagnosis, family, verdicts
from plausible.apps.report.words import better, cell, label, number, percent, plural, score

EXAMPLES = 6
EFFECTS, LINES = 6, 6  # columns whose effect is drawn, and classes in one figure, at most
_CELLS = 8  # columns of an example that are shown
_DIAGNOSTICS = {
    "draws": "draws",
    "chains": "chains",
    "rhat": "worst R̂",
    "ess_bulk": "least effective draws, bulk",
    "ess_tail": "least effective draws, tails",
    "divergences": "divergences",
    "rhat_weights": "worst R̂ of weights",
    "mcse": "largest error of a mean, in standard deviations",
    "acceptance_least": "acceptance of the worst chain",
    "leapfrogs": "gradients a transition",
    "saturated": "share of trajectories cut at max_depth",
    "ebfmi": "least E-BFMI",
    "ess_per_second": "effective draws a second",
}


def page(findings: Findings, images: Mapping[int, np.ndarray] | None = None) -> str:
    about_fit = diagnosis(findings)
    judged = [(output.name, verdicts(output, family(findings))) for output in findings.outputs]
    held = max((output.count for output in findings.outputs), default=0)
    held_out = [f"{plural(held, 'example')} {'was' if held == 1 else 'were'} held out."] if held else []
    return render(
        "report.html.j2",
        title=findings.title,
        facts=findings.facts,
        data=findings.data,
        notes=[*held_out, *findings.notes],
        judged=judged,
        unjudged=[] if any(about for _, about in judged) else [unjudged(findings)],
        serious=[verdict for verdict in about_fit if verdict.tone in ("bad", "plain")],
        warnings=sum(verdict.tone == "bad" for about in (*(about for _, about in judged), about_fit) for verdict in about),
        scores=scores(findings),
        calibration=calibration(findings),
        examples=examples(findings, images or {}),
        importance=figures.importance(findings.effects, _unit(findings)) if findings.effects else None,
        effects=effects(findings),
        numeric=any(output.numeric for output in findings.outputs),
        training=figures.training(findings.history, findings.trained),
        diagnosis=about_fit,
        diagnostics=diagnostics(findings),
        chains=chains(findings.traces),
    )


def unjudged(findings: Findings) -> Verdict:
    """Why there is no verdict: nothing was held out, or what was found there is lost, or only its scores are left."""
    headline, advice = "There is nothing to judge the predictions by.", ""
    if not findings.outputs:
        why = (
            "No rows were held out of training (--test-fraction 0), so nothing can be said about how good the predictions are. "
            "Scores on training rows would flatter them, and are not shown."
        )
    elif any(output.metrics for output in findings.outputs):
        why = "The held-out predictions of this run were not stored, so only its scores can be shown. "
        why += "Fit it again to see calibration and examples."
    else:
        headline, advice = "The scores of this run are missing.", "Bring the files back, or fit again."
        held = f"Rows were held out of training ({findings.facts.get('held-out examples', 'some')})"
        files = "neither their predictions (evidence.json) nor their scores (metrics.json)"
        why = f"{held}, but {files} are in the folder of the run."
    return Verdict("unclear", headline, why, advice)


def scores(findings: Findings) -> dict[str, Any] | None:
    outputs = [output for output in findings.outputs if output.metrics]
    if not outputs:
        return None
    rows = []
    if findings.log_likelihood is not None:
        together = ", all targets together" if len(outputs) > 1 else ""
        blank = [""] * (len(outputs) - 1)
        rows.append((label("log_likelihood") + together, number(findings.log_likelihood, 4), *blank, better("log_likelihood")))
    kind = outputs[0].kind
    for key in outputs[0].metrics:
        cells = [score(key, output.metrics[key]) if key in output.metrics else "" for output in outputs]
        rows.append((label(key, kind), *cells, better(key, kind)))
    count = max(output.count for output in outputs)
    caption = f"Scores on {plural(count, 'held-out row')}" if count else "Scores on held-out rows"
    return {"caption": caption, "heads": ("score", *(output.name for output in outputs), "better"), "rows": rows}


def _heading(findings: Findings, output: Output) -> str:
    return output.name if len(findings.outputs) > 1 else ""


def calibration(findings: Findings) -> list[tuple[str, list[Shown]]]:
    """Reliability or PIT, bands, predictions and truth, risk and coverage of each target."""
    parts = []
    for output in findings.outputs:
        if not output.arrays:
            continue
        shown: list[Shown] = []
        if output.numeric:
            if output.band:
                xlabel = next((name for name, role, _ in findings.data if role == "input"), "x")
                shown += [figures.band(output, xlabel), figures.uncertainties(output, xlabel)]
            shown += [figures.pit(output), figures.quantiles(output), figures.predictions(output)]
        else:
            shown += [figure for figure in (figures.confusion(output), figures.reliability(output)) if figure is not None]
        parts.append((_heading(findings, output), [*shown, figures.risk(output)]))
    return parts


def _unit(findings: Findings) -> str:
    output = findings.outputs[0] if findings.outputs else None
    if output is None:
        return "in the units of the target"
    return f"in units of {output.name}" if output.numeric else "in probability"


def effects(findings: Findings) -> list[Shown]:
    """Partial dependence on the most important columns, a line for each target or class (of two classes the second)."""
    outputs, chosen = findings.outputs, slice(None)
    names = [output.name for output in outputs] or [name for name, role, _ in findings.data if role == "target"]
    what = names[0] if len(names) == 1 else "prediction"
    if outputs and outputs[0].classes and len(outputs) == 1:
        names, what = list(outputs[0].classes), "probability"
        if len(names) == 2:
            names, what, chosen = names[1:], f"P({names[1]})", slice(-1, None)
    elif outputs and outputs[0].classes:
        what = "probability of the second class"
    if not findings.effects or findings.effects[0].arrays["effect"][:, chosen].shape[1] != len(names):
        return []  # classes whose names are not known, as nothing was held out
    shown = []
    for index, one in enumerate(findings.effects[:EFFECTS]):
        arrays = {**one.arrays, "effect": one.arrays["effect"][:, chosen][:, :LINES]}
        shown.append(figures.effect(replace(one, arrays=arrays), names[:LINES], what, index))
    return shown


def examples(findings: Findings, images: Mapping[int, np.ndarray]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows about which the predictions are least and most certain, as pictures or as a table."""
    parts = []
    for output in findings.outputs:
        if not output.arrays:
            continue
        order = output.ordered.tolist()
        ends = {"Least certain": order[::-1][:EXAMPLES], "Most certain": order[:EXAMPLES]}
        shown = []
        for title, chosen in (ends if output.count > 1 else {"The only held-out example": order}).items():
            answers = [answer(output, index) for index in chosen]
            pictured = [each for each in answers if each["row"] in images]
            for each in pictured:
                each["picture"] = png(images[each["row"]])
            caption = f"{title}: predictions of {output.name}"
            shown.append({"title": title, "caption": caption, "faces": pictured, **_table(output, answers)})
        parts.append((_heading(findings, output), shown))
    return parts


def answer(output: Output, index: int) -> dict[str, Any]:
    arrays = output.arrays
    if output.numeric:
        low, high, y = (float(value) for value in (*arrays["quantiles"][[0, -1], index], arrays["y"][index]))
        predicted = f"{number(float(arrays['mean'][index]))} ({number(low)} to {number(high)})"
        uncertain, truth, missed = f"± {number(float(output.uncertainty[index]))}", number(y), not low <= y <= high
    else:
        best, code = int(arrays["probs"][index].argmax()), int(arrays["y"][index])
        predicted = f"{output.classes[best]} ({percent(float(arrays['probs'][index, best]))})"
        uncertain, truth = f"{number(float(arrays['entropy'][index]), 2)} nats", output.classes[code]
        missed = best != code
    row, cells = int(arrays["rows"][index]), output.examples.get(index, {})
    return {"row": row, "predicted": predicted, "uncertain": uncertain, "truth": truth, "missed": missed, "cells": cells}


def _table(output: Output, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from markupsafe import Markup  # of jinja2, an extra

    columns = list(next((each["cells"] for each in answers if each["cells"]), {}))[:_CELLS]
    level = f"{100 * (QUANTILES[-1] - QUANTILES[0]):.0f} %"
    said = (f"predicted ({level} interval)", "std") if output.numeric else ("predicted", "entropy")
    miss = "outside" if output.numeric else "wrong"
    rows = []
    for each in answers:
        missed = Markup('{} <span class="miss">({})</span>').format(each["truth"], miss)
        cells = [cell(str(each["cells"].get(name, ""))) for name in columns]
        truth = missed if each["missed"] else each["truth"]
        rows.append((str(each["row"]), each["predicted"], each["uncertain"], truth, *cells))
    return {"heads": ("row", *said, "truth", *columns), "rows": rows}


def diagnostics(findings: Findings) -> list[tuple[str, str]]:
    """The numbers of the chains; none without R̂, as chains are then members that have nothing to agree on."""
    known = {name: value for name, value in findings.diagnostics.items() if value is not None}
    if "rhat" not in known:
        return []
    return [
        (_DIAGNOSTICS.get(name, name.replace("_", " ")), f"{value:,}" if isinstance(value, int) else number(float(value), 4))
        for name, value in known.items()
    ]


def chains(traces: Mapping[str, np.ndarray]) -> list[Shown]:
    if "values" not in traces:
        return []
    several = traces["values"].shape[0] > 1
    shown = [
        *figures.chain_traces(traces),
        figures.chain_ranks(traces) if several else None,
        figures.convergence(traces) if "rhat" in traces else None,
        figures.energies(traces) if "energy" in traces else None,
    ]
    return [figure for figure in shown if figure is not None]
