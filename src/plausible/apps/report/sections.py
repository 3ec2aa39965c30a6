"""The parts of the page, from top to bottom."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from plausible.apps.report import figures
from plausible.apps.report.diagnosis import counted, diagnosis
from plausible.apps.report.stored import QUANTILES, Evidence, Output
from plausible.apps.report.style import document
from plausible.apps.report.verdicts import Verdict, verdicts
from plausible.apps.report.words import better, cell, definitions, escape, label, number, percent, plural, score, table

EXAMPLES = 6
_TAGS = {"good": "✓ fine", "bad": "▲ warning", "unclear": "? unclear", "plain": "• note"}
_CELLS = 8  # columns of an example that are shown


def page(evidence: Evidence, images: Mapping[int, np.ndarray] | None = None) -> str:
    """The whole page; `images` are pictures of held-out inputs by their row."""
    warnings = diagnosis(evidence)
    judged = [(output, verdicts(output)) for output in evidence.outputs]
    parts = [
        ("summary", "In short", summary(evidence, judged, warnings)),
        ("fitted", "What was fitted", definitions({k: _fact(k, v) for k, v in evidence.facts.items()})),
        ("data", "The data", data(evidence)),
        ("scores", "Held-out scores", scores(evidence)),
        ("calibration", "Can it be taken at its word?", calibration(evidence)),
        ("examples", "Least and most certain", examples(evidence, images or {})),
        ("training", "Training", training(evidence)),
        ("diagnostics", "Diagnostics", diagnostics(evidence, warnings)),
    ]
    parts = [(key, title, body) for key, title, body in parts if body]
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in parts)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{title}</h2>{text}</section>' for key, title, text in parts
    )
    return document(
        f"{evidence.title} · plausible report",
        f'<a class="skip" href="#main">Skip to the report</a><header><h1>{escape(evidence.title)}</h1>'
        f'<nav aria-label="Parts of the report"><ul>{links}</ul></nav></header>'
        f'<main id="main">{body}</main>'
        f'<footer class="page-foot"><p>Written by {escape(evidence.facts.get("versions", "plausible"))}. All '
        "numbers come from rows that were held out of training, unless said otherwise.</p></footer>",
    )


def _fact(name: str, words: str) -> str:
    return f"<code>{escape(words)}</code>" if name in ("method", "likelihood", "prior") else escape(words)


def said(found: Sequence[Verdict]) -> str:
    """Verdicts as a list, each with its tone in words."""
    items = []
    for verdict in found:
        parts = [
            f'<p class="says"><span class="tag">{_TAGS[verdict.tone]}</span>{escape(verdict.headline)}</p>',
            f'<p class="detail">{escape(verdict.detail)}</p>' if verdict.detail else "",
            f"<p><b>What to do:</b> {escape(verdict.advice)}</p>" if verdict.advice else "",
        ]
        items.append(f'<li class="verdict {verdict.tone}">{"".join(parts)}</li>')
    return f'<ul class="verdicts">{"".join(items)}</ul>' if items else ""


def summary(evidence: Evidence, judged: Sequence[tuple[Output, Sequence[Verdict]]], warnings: Sequence[Verdict]) -> str:
    """What a reader who stops here should know."""
    parts = []
    several = len(judged) > 1
    for output, found in judged:
        parts.append(f"<h3>{escape(output.name)}</h3>" if several and found else "")
        parts.append(said(found))
    if not any(found for _, found in judged):
        parts.append(said([unjudged(evidence)]))
    serious = [verdict for verdict in warnings if verdict.tone in ("bad", "plain")]
    if serious:
        parts.append("<h3>About the fit</h3>" if several or judged else "")
        parts.append(said(serious))
    count = sum(counted(found) for _, found in judged) + counted(warnings)
    text = "no warning" if not count else f"{count} warning{'s' * (count > 1)}"
    return f"<p>{text[:1].upper()}{text[1:]}.</p>" + "".join(parts)


def unjudged(evidence: Evidence) -> Verdict:
    """Why there is no verdict: nothing was held out, or what was found there is lost, or only its scores are left."""
    if not evidence.outputs:
        why = (
            "No rows were held out of training (--test-fraction 0), so nothing can be said about how good the predictions are. "
            "Scores on training rows would flatter them, and are not shown."
        )
    elif any(output.metrics for output in evidence.outputs):
        why = (
            "The held-out predictions of this run were not stored, so only its scores can be shown. Fit it again to see "
            "calibration and examples."
        )
    else:
        held = evidence.facts.get("held-out examples", "some")
        return Verdict(
            "unclear",
            "The scores of this run are missing.",
            f"Rows were held out of training ({held}), but neither their predictions (evidence.json) nor their scores "
            "(metrics.json) are in the folder of the run.",
            "Bring the files back, or fit again.",
        )
    return Verdict("unclear", "There is nothing to judge the predictions by.", why)


def data(evidence: Evidence) -> str:
    """Columns and targets, and what was decided about them."""
    rows = [(escape(name), escape(role), escape(what)) for name, role, what in evidence.data]
    shown = table("Columns of the table", ("column", "role", "what it is"), rows, kind="words") if rows else ""
    held = max((output.count for output in evidence.outputs), default=0)
    lines = [f"{plural(held, 'example')} {'was' if held == 1 else 'were'} held out." if held else "", *evidence.notes]
    return shown + "".join(f'<p class="note">{escape(line)}</p>' for line in lines if line)


def scores(evidence: Evidence) -> str:
    """All metrics, a column for each target."""
    outputs = [output for output in evidence.outputs if output.metrics]
    if not outputs:
        return ""
    rows = []
    if evidence.log_likelihood is not None:
        together = ", all targets together" if len(outputs) > 1 else ""
        blank = [""] * (len(outputs) - 1)
        rows.append((label("log_likelihood") + together, number(evidence.log_likelihood, 4), *blank, better("log_likelihood")))
    for key in outputs[0].metrics:
        cells = [score(key, output.metrics[key]) if key in output.metrics else "" for output in outputs]
        rows.append((escape(label(key, outputs[0].kind)), *cells, better(key, outputs[0].kind)))
    heads = ("score", *(escape(output.name) for output in outputs), "better")
    count = max(output.count for output in outputs)
    note = (
        '<p class="note">Log-likelihood: how much probability the prediction gave to what then happened. CRPS: the same in the '
        "units of the target, 0 is perfect. Calibration errors: how far stated and observed frequencies lie apart; for few rows "
        "they are above 0 even if all is well.</p>"
    )
    caption = f"Scores on {plural(count, 'held-out row')}" if count else "Scores on held-out rows"
    return table(caption, heads, rows, kind="scores") + note


def calibration(evidence: Evidence) -> str:
    """Reliability or PIT, bands, predictions and truth, risk and coverage."""
    parts = []
    for output in evidence.outputs:
        if not output.arrays:
            continue
        found: list[str] = []
        if output.numeric:
            if output.band:
                xlabel = next((name for name, role, _ in evidence.data if role == "input"), "x")
                found += [figures.band(output, xlabel), figures.uncertainties(output, xlabel)]
            found += [figures.pit(output), figures.quantiles(output), figures.predictions(output)]
        else:
            found.append(figures.reliability(output))
        found.append(figures.risk(output))
        heading = f"<h3>{escape(output.name)}</h3>" if len(evidence.outputs) > 1 else ""
        parts.append(f'{heading}<div class="grid">{"".join(found)}</div>')
    return "".join(parts)


def examples(evidence: Evidence, images: Mapping[int, np.ndarray]) -> str:
    """The rows about which the predictions are least and most certain."""
    parts = []
    for output in evidence.outputs:
        if not output.arrays:
            continue
        order = output.ordered
        several = len(evidence.outputs) > 1
        parts.append(f"<h3>{escape(output.name)}</h3>" if several else "")
        count = min(EXAMPLES, output.count)
        ends = [("Least certain", order[::-1][:count]), ("Most certain", order[:count])]
        for title, chosen in ends if output.count > 1 else [("The only held-out example", order)]:
            level = "h4" if several else "h3"
            caption = f"{title}: predictions of {output.name}"
            shown = [i for i in chosen.tolist() if int(output.arrays["rows"][i]) in images]
            parts.append(f"<{level}>{title}</{level}>")
            parts.append(faces(output, shown, images) if shown else example_rows(output, chosen.tolist(), caption))
    return "".join(parts)


def answer(output: Output, index: int) -> tuple[str, str, str, bool]:
    """(predicted, uncertainty, truth, whether it missed), as text."""
    arrays = output.arrays
    if output.numeric:
        low, high = float(arrays["quantiles"][0, index]), float(arrays["quantiles"][-1, index])
        y = float(arrays["y"][index])
        spread = f"± {number(float(output.uncertainty[index]))}"
        return (
            f"{number(float(arrays['mean'][index]))} ({number(low)} to {number(high)})",
            spread,
            number(y),
            not low <= y <= high,
        )
    best, truth = int(arrays["probs"][index].argmax()), int(arrays["y"][index])
    said_ = f"{output.classes[best]} ({percent(float(arrays['probs'][index, best]))})"
    return said_, f"{number(float(arrays['entropy'][index]), 2)} nats", output.classes[truth], best != truth


def example_rows(output: Output, chosen: Iterable[int], caption: str) -> str:
    """Examples as a table: answer, truth, and the cells of the row."""
    chosen = list(chosen)
    columns = list(next((output.examples[i] for i in chosen if i in output.examples), {}))[:_CELLS]
    level = f"{100 * (QUANTILES[-1] - QUANTILES[0]):.0f} %"
    spread = "std" if output.numeric else "entropy"
    heads = ("row", f"predicted ({level} interval)" if output.numeric else "predicted", spread, "truth")
    rows = []
    for index in chosen:
        predicted, uncertain, truth, missed = answer(output, index)
        shown = escape(truth)
        if missed:
            shown += f' <span class="miss">({"outside" if output.numeric else "wrong"})</span>'
        cells = [escape(cell(str(output.examples.get(index, {}).get(name, "")))) for name in columns]
        called = int(output.arrays["rows"][index])
        rows.append((f"{called}", escape(predicted), escape(uncertain), shown, *cells))
    return table(caption, (*heads, *map(escape, columns)), rows, kind="rows", hidden=True)


def faces(output: Output, chosen: Sequence[int], images: Mapping[int, np.ndarray]) -> str:
    """Examples as pictures."""
    items = []
    for index in chosen:
        predicted, uncertain, truth, missed = answer(output, index)
        words = f"{predicted}; truth {truth}"
        picture = base64.b64encode(png(images[int(output.arrays["rows"][index])])).decode()
        mark = f'<span class="miss">truth: {escape(truth)}</span>' if missed else f"truth: {escape(truth)}"
        items.append(
            f'<li><img src="data:image/png;base64,{picture}" alt="Example: {escape(words)}">'
            f"<br>{escape(predicted)}<br>{escape(uncertain)}<br>{mark}</li>"
        )
    return f'<ul class="faces">{"".join(items)}</ul>'


def png(pixels: np.ndarray) -> bytes:
    """Grey [H, W] or colour [H, W, 3] pixels in [0, 1] → the bytes of a PNG file."""
    data = (np.clip(np.nan_to_num(pixels), 0, 1) * 255).round().astype(np.uint8)
    high, wide = data.shape[:2]
    lines = b"".join(b"\0" + row.tobytes() for row in data)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", wide, high, 8, 2 if data.ndim == 3 else 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")


def training(evidence: Evidence) -> str:
    """Traces of what was logged."""
    found = figures.training(evidence.history)
    return f'<div class="grid">{"".join(found)}</div>' if found else ""


def diagnostics(evidence: Evidence, warnings: Sequence[Verdict]) -> str:
    """Warnings about the fit with what to do, the numbers, and the chains."""
    words = {
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
    known = {name: value for name, value in evidence.diagnostics.items() if value is not None}
    rows = [
        (escape(words.get(name, name.replace("_", " "))), f"{value:,}" if isinstance(value, int) else number(float(value), 4))
        for name, value in known.items()
    ]
    parts = [said(warnings) or "<p>Nothing to report.</p>"]
    if "rhat" in known:  # without it, chains are members that have nothing to agree on
        parts.append(table("Diagnostics of function values", ("quantity", "value"), rows, kind="scores"))
    if "values" in evidence.traces:
        found = figures.chain_traces(evidence.traces)
        if evidence.traces["values"].shape[0] > 1:
            found.append(figures.chain_ranks(evidence.traces))
        if "rhat" in evidence.traces:
            found.append(figures.convergence(evidence.traces))
        if "energy" in evidence.traces:
            found.append(figures.energies(evidence.traces))
        parts.append(f'<h3>Chains</h3><div class="grid">{"".join(found)}</div>')
    return "".join(parts)
