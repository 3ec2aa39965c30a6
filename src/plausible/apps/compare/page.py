"""The page of a comparison: tables and dot plots in one HTML file, for light, dark and small screens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import plausible
from plausible.apps.compare.study import Study
from plausible.apps.compare.tables import NAMES, Summary
from plausible.apps.pages import Shown, render, shown


def write(path: Path, study: Study, summary: Summary, *, published: bool = True) -> None:
    """Write the page; `published` shows the results that the study has, beside the random splits they are for."""
    ranked = len(study.candidates) > 1 and bool(summary.ranks)
    text = render(
        "compare.html.j2",
        title=study.title,
        kind=study.kind,
        against=summary.against,
        ranked=summary.ranked,
        rank_heads=[NAMES[name] for name in study.headline],
        ranks=[
            (c.label, *(f"{summary.ranks[name][c.label]:.2f}" for name in study.headline)) for c in study.candidates if ranked
        ],
        heads=[*(NAMES[name] for name in study.shown), "seconds", "MiB"],
        shown=study.shown,
        notes=() if study.own is None else study.own.notes,
        sections=[_section(study, summary, dataset, published) for dataset in study.datasets],
        methods=[(candidate.label, json.dumps(_settings(candidate.plain()))) for candidate in study.candidates],
        made=f"plausible {plausible.__version__}, seed {study.seed}",
    )
    path.write_text(text, encoding="utf-8")


def _section(study: Study, summary: Summary, dataset: str, published: bool) -> dict[str, Any]:
    rows = summary.ranked_rows(dataset) if study.own else [row for row in summary.rows if row.dataset == dataset]
    theirs = study.published.get(dataset, {}) if published and study.kind == "random" else {}
    dots = [(row.label, *row.metrics["log_likelihood"][:2], False) for row in rows if row.metrics]
    dots += [(name, *result["log_likelihood"], True) for name, result in theirs.items() if "log_likelihood" in result]
    points = [(name, at, 0.0 if math.isnan(error) else error, old) for name, at, error, old in dots if math.isfinite(at)]
    return {
        "name": dataset,
        "splits": max((row.splits for row in rows), default=0),
        "rows": rows,
        "published": theirs,
        "failures": [(row.label, text) for row in rows for text in row.failures],
        "figure": _figure(points, dataset) if points else None,
    }


def _figure(points: list[tuple[str, float, float, bool]], dataset: str) -> Shown:
    """Log-likelihoods as dots with bars of two standard errors, published ones hollow."""
    from plausible.apps.plots.comparing import draw_scores

    spoken = "; ".join(f"{name} {value:.2f}" for name, value, *_ in points)
    hollow = ", hollow dots are published results" if any(old for *_, old in points) else ""
    return shown(
        lambda ax: draw_scores(ax, points, "test log-likelihood"),
        "",
        f"scores {dataset}",
        f"Log-likelihood on {dataset}: {spoken}",
        f"Test log-likelihood, higher is better; bars are two standard errors{hollow}.",
        size=(7.5, 0.9 + 0.3 * len(points)),
    )


def _settings(plain: dict[str, Any]) -> dict[str, Any]:
    """Those that say something: no empty ones, and no share of validation rows without a grid."""
    left_out = () if plain["grid"] else ("validation",)
    return {key: value for key, value in plain.items() if value not in ({}, None) and key not in left_out}
