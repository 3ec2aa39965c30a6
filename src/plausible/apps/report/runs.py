"""Findings of a run of the command line: collected by the fit, read back for the report.

What older runs did not store is said on the page, not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plausible.apps.dates import written
from plausible.apps.report.findings import RECORD, Findings, Output
from plausible.apps.report.words import number
from plausible.apps.tables import Dates, Numeric, listed

if TYPE_CHECKING:
    from plausible.apps.cli.runs import Record
    from plausible.apps.preparing import Prepared
    from plausible.apps.tables import Table
    from plausible.posteriors.base import Posterior
    from plausible.posteriors.predictive import Predictive

GRID, BEYOND = 200, 0.15  # points of a predictive band, and how far it goes beyond the training rows


def findings_of(folder: Path) -> Findings:
    """What the fit stored; for runs that have no such file, what `run.json`, `metrics.json` and the posterior say."""
    from plausible.apps.cli import runs

    record = runs.read_record(folder)
    return Findings.read(folder) if (folder / RECORD).is_file() else _older(folder, record)


def from_fit(
    record: Record, posterior: Posterior, data: Prepared, predictive: Predictive | None, scores: Mapping[str, Any] | None
) -> Findings:
    """Keep the predictions of the held-out rows of a fit (None: there are none), follow its chains, and describe it."""
    import torch

    from plausible.apps.report.collecting import Axis, collect
    from plausible.apps.report.effects import effects

    train, test = data.inputs
    about = described(record, data) | {"traced": torch.from_numpy(test if data.test.rows else train)}
    done = effects(posterior, data)
    if predictive is None:
        return replace(collect(posterior, **about), effects=done)
    column = record.preprocessor.columns[0]
    only = len(record.preprocessor.columns) == 1 and not record.target.classes
    if only and isinstance(column, Numeric) and not column.indicator:
        seen = train[:, 0].astype(np.float64)
        low, high = float(seen.min()), float(seen.max())
        pad = BEYOND * (high - low) or 1.0
        grid = np.linspace(low - pad, high + pad, GRID)
        units, shown, known = (column.mean + column.std * part for part in (grid, test[:, 0], seen))
        inputs = torch.from_numpy(grid[:, None].astype(np.float32))
        about["axis"] = Axis(units, inputs, shown, (known, record.target.observed(data.train)))
    found = collect(posterior, **about, **held_out(record, data.test, test, predictive, scores))
    return replace(found, effects=done)


def held_out(
    record: Record, table: Table, inputs: np.ndarray, predictive: Predictive, scores: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What `collect` is told of held-out rows, and of what was predicted for them."""
    import torch

    target = record.target
    return {
        "x": torch.from_numpy(inputs),
        "y": torch.from_numpy(target.observed(table)),
        "names": target.names,
        "classes": target.classes or None,
        "restore": target.restore,
        "predictive": predictive,
        "scores": scores,
        "rows": [table[target.names[0]].row(index) for index in range(table.rows)],
        "cells": lambda index: {name: table[name].cells[index] or "missing" for name in record.preprocessor.names},
    }


def described(record: Record, data: Prepared | None = None) -> dict[str, Any]:
    """Title, facts, data and notes from `run.json`; with the rows of the fit, also how the classes of targets are spread."""
    target, settings = record.target, record.settings
    layers = "-".join(map(str, record.layers))
    facts = {
        "task": f"{target.task} of {', '.join(target.names)}",
        "method": record.method,
        "network": f"{layers} perceptron, {record.activation}",
        "likelihood": target.likelihood,
        "prior": "Default()"
        if settings.get("prior_scale", 1.0) is None
        else f"Gaussian(scale={settings.get('prior_scale', 1.0)})",
        "training examples": f"{record.rows.get('train', 0):,}",
        "held-out examples": f"{record.rows.get('heldout', 0):,}",
        "seed": str(record.seed),
    }
    if data is not None:  # the posterior knows its method with all settings, its likelihood and its prior
        facts = {name: words for name, words in facts.items() if name not in ("method", "likelihood", "prior")}
    if "choice" in settings:
        facts["chosen because"] = str(settings["choice"]).partition(": ")[2]
    if "data" in settings:
        facts["data"] = str(settings["data"])
    rows = [(name, "target", _target_words(record, index, data)) for index, name in enumerate(target.names)]
    for column in record.preprocessor.columns:
        if isinstance(column, Numeric):
            words = f"number, mean {number(column.mean)}, standard deviation {number(column.std)}"
            words += f", gaps filled by {number(column.fill)}" if column.indicator else ""
        elif isinstance(column, Dates):
            words = f"date, {written(column.first)} to {written(column.last)}"
            words += f", gaps filled by {written(column.fill)}" if column.indicator else ""
        else:
            words = f"{len(column.levels)} categories: {listed(column.levels, 6)}"
        rows.append((column.name, "input", words))
    notes = tuple(data.notes) if data is not None else record.preprocessor.notes
    source = f", {settings['data']}" if "data" in settings else ""
    title = f"{', '.join(target.names)} by {record.method}{source}"
    return {"title": title, "facts": facts, "data": tuple(rows), "notes": tuple(dict.fromkeys(notes))}


def _target_words(record: Record, index: int, data: Prepared | None) -> str:
    target = record.target
    if target.classes:
        labels = target.classes[index]
        if data is None:
            return f"{len(labels)} classes: {listed(labels, 6)}"
        cells = data.train[target.names[index]].cells
        return f"{len(labels)} classes in training: {listed([f'{name} ({cells.count(name):,})' for name in labels], 8)}"
    if target.loc:
        return f"number, mean {number(target.loc[index])}, standard deviation {number(target.scale[index])}"
    if data is None:
        return "counts"
    values = data.train[target.names[index]].numbers
    return f"counts from {number(values.min())} to {number(values.max())}, mean {number(values.mean())}"


def _older(folder: Path, record: Record) -> Findings:
    from plausible.core.storage import read_json

    run = read_json(folder / "posterior" / "posterior.json").get("run", {})
    about = described(record)
    if "seconds" in run:
        about["facts"]["time"] = f"{run.get('steps', 0):,} steps in {float(run['seconds']):.3g} s"
    about["facts"]["versions"] = f"plausible {record.version}"
    history = {name: [float(v) for v in values] for name, values in run.get("history", {}).items()}
    findings = Findings(**about, history=history)
    path = folder / "metrics.json"
    kind = record.target.make_likelihood().kind
    if not path.is_file():  # rows that were held out and whose scores are lost are outputs of which nothing is known
        lost = record.target.names if record.rows.get("heldout") else ()
        return replace(findings, outputs=tuple(Output(name, kind) for name in lost))
    metrics = read_json(path)
    try:
        outputs = tuple(
            Output(str(name), kind, metrics={str(key): float(value) for key, value in values.items()})
            for name, values in metrics["targets"].items()
        )
        return replace(findings, outputs=outputs, log_likelihood=float(metrics["log_likelihood"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
