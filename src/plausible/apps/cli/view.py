"""Tables on the terminal: scores, methods and their settings, saved runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from plausible.apps.report.words import label, plural
from plausible.core.tables import rich_table

if TYPE_CHECKING:
    from plausible.apps.cli.runs import Record
    from plausible.apps.report.findings import Findings
    from plausible.methods.automatic.rule import Candidate, Problem


def console() -> Console:
    """Standard output, with column and class names taken literally."""
    return Console(markup=False, highlight=False, emoji=False)


def show(result: Any, markdown: bool = False) -> None:
    """A result that has a table: in colours on a terminal, as text in a pipe, or in Markdown."""
    screen = console()
    if markdown:
        typer.echo(result.to_markdown())
    elif screen.is_terminal:
        screen.print(result)
    else:
        typer.echo(str(result))


def number(key: str, value: float) -> str:
    """A score as text: shares as percentages, the rest with four digits."""
    if key.startswith(("coverage_", "accuracy")):
        return f"{100 * value:.1f} %"
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{value:.4g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


TONES = {"good": "✓", "bad": "▲", "unclear": "?", "plain": "•"}


def verdicts(findings: Findings) -> None:
    """What the report says in short: whether predictions can be taken at their word, and what to do where not."""
    from plausible.apps.report.verdicts import diagnosis, family
    from plausible.apps.report.verdicts import verdicts as judged

    screen = console()
    several = len(findings.outputs) > 1
    kind = family(findings)
    said = [(f"{output.name}: " if several else "", verdict) for output in findings.outputs for verdict in judged(output, kind)]
    said += [("", verdict) for verdict in diagnosis(findings)]
    for name, verdict in said:
        advice = f" {verdict.advice}" if verdict.advice and verdict.tone in ("bad", "unclear") else ""
        screen.print(f"{TONES[verdict.tone]} {name}{verdict.headline}{advice}", soft_wrap=not screen.is_terminal)


def candidates(problem: Problem, found: Sequence[Candidate]) -> None:
    """Methods in the order in which `auto` tries them; those that do not fit come last, with what is against them."""
    from plausible.core.words import size
    from plausible.methods.automatic.rule import duration

    screen = console()
    where = "on the GPU" if problem.gpu else f"on {plural(problem.threads, 'thread')}"
    table = rich_table(
        ("", "method", "time", "memory", "why"),
        words=("", "method", "why"),
        title=f"{plural(problem.rows, 'row')}, {plural(problem.weights, 'weight')}, {where}",
    )
    for index, one in enumerate(found, start=1):
        why = f"not: {one.against}" if one.against else one.reason
        name = one.method.name + (" (last layer)" if getattr(one.method, "where", "all") == "last" else "")
        table.add_row(str(index), name, f"about {duration(one.seconds)}", size(one.memory), why)
    screen.print(table)
    best = found[0]
    if best.against:
        screen.print("Nothing fits: give more time or memory, or a smaller network (--hidden).")
        best = min(found, key=lambda one: one.seconds)
    screen.print(f"plausible fit … --method auto takes {best.method.name}: {best.method!r}", soft_wrap=True)


def scores(record: Record, metrics: Mapping[str, Any] | None, noun: str = "held-out row", *, aside: bool = False) -> None:
    """The scores as a table; `aside` on standard error, where standard output has results."""
    screen = Console(markup=False, highlight=False, emoji=False, stderr=aside)
    if metrics is None:
        screen.print("no held-out rows (--test-fraction 0), so no scores")
        return
    names = list(metrics["targets"])
    title = f"{plural(metrics['rows'], noun)}, {record.method}"
    table = rich_table(("score", *names), words=("score",), title=title)
    total = number("log_likelihood", metrics["log_likelihood"])
    words = label("log_likelihood") + (", all targets together" if len(names) > 1 else "")
    table.add_row(words, total, *[""] * (len(names) - 1))
    for key in metrics["targets"][names[0]]:
        table.add_row(label(key), *(number(key, metrics["targets"][name][key]) for name in names))
    screen.print(table)


def run(folder: Path, record: Record) -> None:
    target = record.target
    table = Table(show_header=False, box=box.SIMPLE, title=f"run {folder}", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("task", f"{target.task}, {target.likelihood} likelihood")
    table.add_row("target", ", ".join(target.names))
    for name, classes in zip(target.names, target.classes):
        table.add_row("classes" if len(target.names) == 1 else f"classes of {name}", ", ".join(classes))
    table.add_row("input columns", ", ".join(record.preprocessor.names))
    table.add_row("network", f"{'-'.join(map(str, record.layers))}, {record.activation}")
    table.add_row("method", record.method)
    table.add_row("settings", settings_text(record.settings))
    table.add_row("rows", f"{record.rows['train']} for training, {record.rows['heldout']} held out")
    table.add_row("missing values", record.preprocessor.missing)
    table.add_row("seed", str(record.seed))
    table.add_row("written by", f"plausible {record.version}")
    console().print(table)
    for line in record.preprocessor.notes:
        console().print(f"note: {line}")
    if (folder / "metrics.json").is_file():
        from plausible.core.storage import read_json

        scores(record, read_json(folder / "metrics.json"))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Nested settings in one paragraph: `epochs=20, method=(…)`."""
    parts = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            kind = f"{value['type']} " if "type" in value else ""
            value = f"{kind}({settings_text({k: v for k, v in value.items() if k != 'type'})})"
        elif not isinstance(value, str):
            value = json.dumps(value)
        parts.append(f"{key}={value}")
    return ", ".join(parts)


def methods() -> None:
    from plausible import methods as known
    from plausible.engine.method import summary

    heads = ("method", "kind", "what it does")
    rows = [(name, kind(method), summary(method)) for name, method in sorted(known.registry.items())]
    console().print(rich_table(heads, rows, words=heads))
    console().print("plausible methods NAME shows the settings; plausible fit --method NAME --set key=value uses them")


def kind(method_class: Any) -> str:
    """Combinator, sampler, optimiser …: from the settings and the declared traits."""
    settings = {field.name for field in dataclasses.fields(method_class)}
    if isinstance(method_class.traits, property) or "method" in settings:
        return "combinator"
    return "sampler" if {"burn_in", "thin"} & settings or method_class.traits.verb == "sample" else "optimiser"


def method(name: str) -> None:
    from plausible import methods as known

    chosen = known.create(name)
    console().print(inspect.cleandoc(type(chosen).__doc__ or ""), soft_wrap=True)
    rows = [(field.name, repr(getattr(chosen, field.name))) for field in dataclasses.fields(chosen)]  # type: ignore[arg-type]
    console().print(rich_table(("setting", "default"), rows, words=("setting", "default")))
