"""`plausible compare`: run a study, show a progress bar and tables, write results.json and a page."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from plausible.apps.cli import view
from plausible.apps.cli.errors import Interrupted, note
from plausible.apps.cli.options import numbers
from plausible.apps.compare import page
from plausible.apps.compare.runner import run, stored, write
from plausible.apps.compare.study import Candidate, Cell, Study, read
from plausible.apps.compare.tables import MARKS, Summary, summarise
from plausible.apps.preparing import TableOptions
from plausible.core.tables import rich_table

SHORT = {"log_likelihood": "log-lik.", "rmse": "RMSE", "crps": "CRPS", "coverage_90": "in 90 %"}
SHORT |= {"accuracy": "accuracy", "brier": "Brier", "ece": "ECE"}


def study_of(file: Path | None, datasets: Sequence[str], methods: Sequence[str], splits: str | None, **rest: Any) -> Study:
    """The study of a file, narrowed or changed by options; or one made of options alone."""
    if file is None and not (datasets and methods):
        raise ValueError(
            "nothing to compare: give a table with --target, a study file (--show prints one to start from), or --datasets and "
            "--methods"
        )
    if file is not None and file.suffix.lower() != ".toml" and file.exists():
        raise ValueError(f"{file} is no study in TOML; if it is a table, name the column to predict: --target")
    changes = {key: value for key, value in rest.items() if value is not None}
    if splits is not None:
        changes["splits"] = _splits(splits)
    if file is None:
        return Study(tuple(datasets), tuple(Candidate(name, name) for name in methods), **changes)
    base = read(file)
    if datasets:
        changes["datasets"] = tuple(datasets)
    if methods:
        from plausible.methods import registry

        known = {candidate.label: candidate for candidate in base.candidates}
        for label in methods:
            if label not in known and label not in registry:
                raise ValueError(f"--methods: {label!r} is neither in the study ({', '.join(known)}) nor a method's name")
        changes["candidates"] = tuple(known.get(label) or Candidate(label, label) for label in methods)
        if base.reference not in methods and "reference" not in changes:
            changes["reference"] = None
    return replace(base, **changes)


def own_study(
    options: TableOptions, hidden: tuple[int, ...], methods: Sequence[str], splits: str | None, time: str | None, **rest: Any
) -> Study:
    """Methods and baselines on folds of a table."""
    from plausible.apps.compare import own

    table = own.read(options, hidden)
    for line in table.notes:
        note(line)
    changes = {key: value for key, value in rest.items() if value is not None}
    return own.study(table, methods, time, splits=None if splits is None else _splits(splits), **changes)


def _splits(text: str) -> int | tuple[int, ...] | None:
    if text == "all":
        return None
    chosen = numbers(text, int)
    if not chosen or min(chosen) < 0 or chosen == (0,):
        raise ValueError(f"--splits takes a number of splits, numbers from 0 with commas between, or all; got {text!r}")
    return chosen[0] if len(chosen) == 1 else chosen


def compare(
    study: Study, out: Path, *, jobs: int | None, overwrite: bool, quiet: bool, published: bool, to: Path | None = None
) -> bool:
    """Run what is missing and show everything, the page in the file `to`; False where a cell failed."""
    to = out / "index.html" if to is None else to
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file, expected a folder")
    ours = (out / "study.json").exists()
    if out.exists() and any(out.iterdir()) and not ours:
        raise ValueError(f"--out {out} is not empty and holds no comparison: choose another folder")
    if overwrite and ours:
        for file in (out / "cells").rglob("*.json"):
            file.unlink()
    out.mkdir(parents=True, exist_ok=True)
    cells = list(study.cells())
    if not cells:
        raise ValueError("no split is left to run: the data sets have no splits of these numbers")
    if jobs is None:
        jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    there = sum("metrics" in (stored(study, out, cell) or {}) for cell in cells)
    if there and not quiet:
        note(f"{there} of {len(cells)} fits are in {out} already")
    try:
        with _progress(len(cells), there, quiet) as told:
            results = run(study, out, jobs=jobs, told=told)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; what was computed is in {out}, and the same command goes on from there") from None
    summary = summarise(study, results)
    write(out / "results.json", {"study": study.plain(), **summary.plain()})
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        page.write(to, study, summary, published=published)
        written = f"a page in {to}"
    except ImportError as error:
        written = f"no page: {error}"
    if not quiet:
        show(study, summary, published=published)
        note(f"results in {out / 'results.json'}, {written}")
    failures = [f"failed: {row.label} on {row.dataset}, {text}" for row in summary.rows for text in row.failures]
    for line in failures[:5]:
        note(line)
    if len(failures) > 5:
        note(f"and {len(failures) - 5} more; see results.json")
    return not failures


@contextlib.contextmanager
def _progress(total: int, there: int, quiet: bool) -> Any:
    """A bar on a terminal; otherwise a line for each tenth."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        marks = {round(total * k / 10) for k in range(1, 11)}

        def told(done: int, _: int, cell: Cell, result: Any) -> None:
            if done in marks or "error" in result:
                note(f"{done} of {total} fits" + (f" ({cell} failed)" if "error" in result else ""))

        yield told
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fits", total=total, completed=there)
        yield lambda done, _, cell, __: bar.update(task, completed=done, description=str(cell))


def show(study: Study, summary: Summary, *, published: bool) -> None:
    printer = view.console()
    if not printer.is_terminal:
        printer.width = 120
    names = [name for name in study.shown if name in SHORT and not (study.own and name in ("crps", "brier"))]
    for dataset in study.datasets:
        rows = summary.ranked_rows(dataset) if study.own else [row for row in summary.rows if row.dataset == dataset]
        splits = max((row.splits for row in rows), default=0)
        columns = [SHORT[name] for name in names]
        heads = ("method", *columns, "seconds", "MiB")
        if study.own:
            heads = ("method", f"less {summary.against}'s", *columns, "seconds")
        table = rich_table(
            heads, words=("method",), title=f"{study.title if study.own else dataset}, {splits} splits", pad_edge=False
        )
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            if not row.metrics:
                table.add_row(row.label, *["failed" if row.failures else "–"] + ["–"] * (len(heads) - 2))
                continue
            marks = {key: f" {MARKS[difference.verdict]}" for key, difference in row.differences.items()}
            values = [row.metrics[key].short() + marks.get(key, "") for key in names]
            if study.own:
                less = row.differences.get("log_likelihood")
                values.insert(0, "–" if less is None else less.text())
            peak = "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}"
            table.add_row(row.title, *values, f"{row.seconds:.1f}", *([] if study.own else [peak]))
        if published and study.kind == "random":
            for source, results in study.published.get(dataset, {}).items():
                table.add_row(f"({source})", *(str(results.get(metric, "–")) for metric in ("log_likelihood", "rmse")))
        printer.print(table)
    if len(study.candidates) > 1 and summary.ranks:
        heads = ("method", *(SHORT[name] for name in study.headline))
        title = f"mean ranks over {summary.ranked} splits (1 is best)"
        labels = [candidate.label for candidate in study.candidates]
        ranks = [(label, *(f"{summary.ranks[name][label]:.2f}" for name in study.headline)) for label in labels]
        if not study.own:
            printer.print(rich_table(heads, ranks, words=("method",), title=title, pad_edge=False))
        told = (
            f" “less {summary.against}'s” is the paired difference of log-likelihoods with its standard error."
            if study.own
            else ""
        )
        printer.print(
            f"± is the standard error over splits. ▲ better, ▼ worse than {summary.against} by the paired differences, = not to be "
            "told apart (5 %, Student's t, corrected for splits that share their training rows)."
            + (told if study.own else " In brackets: published.")
        )
