"""The page of a comparison: tables and dot plots in one HTML file, for light, dark and small screens."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plausible
from plausible.apps.compare.published import PUBLISHED
from plausible.apps.compare.study import Study
from plausible.apps.compare.tables import HEADLINE, SHOWN, Row, Summary
from plausible.apps.report.style import STYLE, document

NAMES = {
    "log_likelihood": "log-likelihood",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_90": "inside 90 %",
    "quantile_calibration": "calibration error",
}
MARKS = {"better": ("▲", "better"), "worse": ("▼", "worse"), "no difference": ("=", "no difference"), "": ("", "")}


def write(path: Path, study: Study, summary: Summary, *, published: bool = True) -> None:
    """Write the page."""
    shown = published and study.kind == "random"
    sections = "".join(_section(summary, dataset, shown) for dataset in study.datasets)
    text = (
        BODY.replace("[[title]]", html.escape(study.title))
        .replace("[[ranks]]", _ranks(study, summary))
        .replace("[[sections]]", sections)
        .replace("[[against]]", html.escape(summary.against))
        .replace("[[kind]]", "published random" if study.kind == "random" else "gap")
        .replace("[[methods]]", _methods(study))
        .replace("[[made]]", f"plausible {plausible.__version__}, seed {study.seed}")
    )
    path.write_text(document(study.title, text, STYLE + STYLE_OF_DOTS), encoding="utf-8")


def _section(summary: Summary, dataset: str, published: bool) -> str:
    rows = [row for row in summary.rows if row.dataset == dataset]
    count = max((row.metrics["rmse"].splits for row in rows if row.metrics), default=0)
    head = "".join(f'<th scope="col">{NAMES[name]}</th>' for name in SHOWN)
    body = "".join(_row(row) for row in rows)
    if published:
        for source, value in PUBLISHED["log_likelihood"][dataset].items():
            other = PUBLISHED["rmse"][dataset].get(source)
            cells = [_mean(*value), "–" if other is None else _mean(*other)] + ["–"] * (len(SHOWN) + 2 - 2)
            body += f'<tr class="published"><th scope="row">{html.escape(source)}</th>' + "".join(
                f"<td>{c}</td>" for c in cells
            )
            body += "</tr>"
    failures = "".join(
        f"<li><b>{html.escape(row.label)}</b>, {html.escape(text)}</li>" for row in rows for text in row.failures
    )
    note = f'<p class="alarm">Failed fits, left out of the means:</p><ul>{failures}</ul>' if failures else ""
    return (
        f'<section aria-labelledby="{dataset}"><h2 id="{dataset}">{html.escape(dataset)}</h2>'
        f"{_dots(rows, dataset, published)}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Scores on {dataset}"><table>'
        f"<caption>Means over {count} splits, ± standard error</caption>"
        f'<thead><tr><th scope="col">method</th>{head}<th scope="col">seconds</th><th scope="col">MiB</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}</section>"
    )


def _row(row: Row) -> str:
    label = f'<th scope="row">{html.escape(row.title)}</th>'
    if not row.metrics:
        return (
            f'<tr>{label}<td class="alarm" colspan="{len(SHOWN) + 2}">{"failed" if row.failures else "not run yet"}</td></tr>'
        )
    cells = []
    for name in SHOWN:
        text = row.metrics[name].text() if name in row.metrics else "–"
        if name in row.differences:
            gap = row.differences[name]
            mark, words = MARKS[gap.verdict]
            difference = f"{gap.value:+.3g} ± {gap.error:.2g}: {words}"
            text += f' <span class="mark" title="{difference}" role="img" aria-label="{words}">{mark}</span>'
        cells.append(text)
    cells.append(f"{row.seconds:.1f}")
    cells.append("–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}")
    return f"<tr>{label}" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _mean(value: float, error: float) -> str:
    shown = f"{value:.2f}".replace("-", "−")
    return shown if math.isnan(error) else f"{shown} ± {error:.2f}"


def _dots(rows: Sequence[Row], dataset: str, published: bool) -> str:
    """Log-likelihoods as dots with bars of two standard errors, published ones hollow."""
    points: list[tuple[str, float, float, bool]] = [
        (row.label, row.metrics["log_likelihood"].value, row.metrics["log_likelihood"].error, True)
        for row in rows
        if row.metrics
    ]
    if published:
        points += [(s, v.value, v.error, False) for s, v in PUBLISHED["log_likelihood"][dataset].items()]
    points = [(n, v, 0.0 if math.isnan(e) else e, own) for n, v, e, own in points if math.isfinite(v)]
    if not points:
        return ""
    left, width, line = 240, 400, 24
    low, high = min(v - 2 * e for _, v, e, _ in points), max(v + 2 * e for _, v, e, _ in points)
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    place = lambda v: left + width * (v - low) / (high - low)  # noqa: E731
    height = line * len(points) + 40
    parts = []
    for tick in _ticks(low, high):
        x = place(tick)
        parts.append(f'<line class="rule" x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height - 32}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - 16}" text-anchor="middle">{tick:g}</text>'.replace(">-", ">−")
        )
    for i, (name, value, error, own) in enumerate(points):
        y = 16 + line * i
        kind = "own" if own else "theirs"
        parts.append(
            f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{html.escape(name if len(name) < 34 else name[:32] + "…")}</text>'
        )
        parts.append(
            f'<line class="{kind}" x1="{place(value - 2 * error):.1f}" y1="{y}" x2="{place(value + 2 * error):.1f}" y2="{y}"/>'
        )
        parts.append(f'<circle class="{kind}" cx="{place(value):.1f}" cy="{y}" r="4.5"/>')
    spoken = "; ".join(f"{n} {v:.2f}" for n, v, _, _ in points)
    caption = "Test log-likelihood, higher is better; bars are two standard errors"
    caption += ", hollow dots are published results." if published else "."
    return (
        f'<figure tabindex="0"><svg viewBox="0 0 {left + width + 20} {height}" role="img" aria-label="Log-likelihood on {dataset}: '
        f'{html.escape(spoken)}">{"".join(parts)}</svg><figcaption>{caption}</figcaption></figure>'
    )


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(k for k in (1, 2, 5, 10) if (high - low) / (k * step) <= 6)
    first = math.ceil(low / step)
    return [round(k * step, 10) for k in range(first, math.floor(high / step) + 1)]


def _ranks(study: Study, summary: Summary) -> str:
    if len(study.candidates) < 2 or not summary.ranks:
        return ""
    head = "".join(f'<th scope="col">{NAMES[name]}</th>' for name in HEADLINE)
    body = "".join(
        f'<tr><th scope="row">{html.escape(c.label)}</th>'
        + "".join(f"<td>{summary.ranks[name][c.label]:.2f}</td>" for name in HEADLINE)
        + "</tr>"
        for c in study.candidates
    )
    return (
        '<section aria-labelledby="ranks"><h2 id="ranks">Mean ranks</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Mean ranks"><table><caption>Over {summary.ranked} splits on which every method has a result, data sets '
        f'weighing equally; 1 is best</caption><thead><tr><th scope="col">method</th>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div></section>"
    )


def _methods(study: Study) -> str:
    entries: list[Any] = []
    for candidate in study.candidates:
        plain = {k: v for k, v in candidate.plain().items() if v not in ({}, None)}
        if not candidate.grid:
            plain.pop("validation", None)
        entries.append(f"<dt>{html.escape(candidate.label)}</dt><dd><code>{html.escape(json.dumps(plain))}</code></dd>")
    return f"<dl>{''.join(entries)}</dl>"


STYLE_OF_DOTS = """
.skip { position: absolute; left: -999rem; } .skip:focus { left: 1rem; top: 1rem; padding: 0.5rem 1rem; background: var(--card); }
caption { text-align: left; padding: 0.6rem 0.8rem 0; font-size: 0.875rem; color: var(--soft); }
figure { overflow-x: auto; margin: 1.25rem 0; }
svg { display: block; width: 100%; min-width: 30rem; max-width: 44rem; height: auto; font-size: 13px; fill: var(--ink); }
svg .tick { fill: var(--soft); } svg .rule { stroke: var(--line); }
line.own { stroke: var(--main); stroke-width: 2.5; } circle.own { fill: var(--main); }
line.theirs { stroke: var(--edge); stroke-width: 1.5; } circle.theirs { fill: var(--card); stroke: var(--edge); stroke-width: 1.5; }
th, td { padding: 0.5rem 0.7rem; } tr.published th, tr.published td { color: var(--soft); font-weight: 400; }
.mark { color: var(--main); } .alarm { color: var(--alarm); }
"""

BODY = """<a class="skip" href="#main">Skip to the results</a>
<main id="main">
<h1>[[title]]</h1>
<p>Each method was fitted to the training rows of the same [[kind]] splits, standardised by them, and scored on the test rows in the
units of the target. ± is the standard error over splits. ▲ better and ▼ worse than [[against]] by the paired differences (5 %,
Student's t, corrected for splits that share their training rows); = not to be told apart.</p>
[[ranks]]
[[sections]]
<details><summary>Methods and settings</summary>[[methods]]</details>
<footer>[[made]]</footer>
</main>"""
