"""`plausible prune`: a run and a share of weights → a smaller run, with a table of what it costs and a figure."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Draws, Encoding, Overwrite, Run, Seed, numbers, option

if TYPE_CHECKING:
    import numpy as np

    from plausible.apps.cli.runs import Record
    from plausible.apps.tables import Table
    from plausible.posteriors.base import Posterior
    from plausible.posteriors.predictive import Predictive

FIGURE = "pruning.png"


@guarded
def prune(
    run: Run,
    fraction: Annotated[float | None, option("Share of the weights to set to 0, such as 0.75.")] = None,
    threshold: Annotated[float | None, option("Or: all with snr or magnitude below it, log-alpha above it.")] = None,
    by: Annotated[
        Literal["snr", "magnitude", "log-alpha"],
        option("snr (mean by spread), magnitude, or log-alpha (the scale of snr squared).", metavar="NAME", shown=True),
    ] = "snr",
    data: Annotated[
        Path | None, option("A table with the target, to measure the error; that of the fit: its held-out rows.")
    ] = None,
    out: Annotated[Path | None, option("Folder for the pruned run.", "--out", "-o", shown="RUN-pruned")] = None,
    fractions: Annotated[str, option("Shares that the table shows.", metavar="A,B", shown=True)] = "0,0.25,0.5,0.75,0.9,0.95",
    biases: Annotated[bool, option("Prune biases too.", "--biases")] = False,
    per_layer: Annotated[bool, option("The same share in every layer.", "--per-layer")] = False,
    draws: Draws = None,
    seed: Seed = 0,
    encoding: Encoding = None,
    overwrite: Overwrite = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Set the least useful weights of a run to 0, and show what that costs.

    Without --fraction and --threshold nothing is written: the table shows what each share would cost. With one of them the
    pruned run is written to --out, for plausible predict, info and report, with a figure where matplotlib is installed.

    Example: plausible prune run --fraction 0.75 --data houses.csv --out small
    """
    import torch

    from plausible.analysis.pruning import table
    from plausible.apps.cli import runs, view

    how: dict[str, Any] = {"by": by.replace("-", "_"), "where": "all" if biases else None, "per_layer": per_layer}
    shares = sorted(set(numbers(fractions)))
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"--fractions takes shares from 0 to 1 such as 0,0.5,0.75, got {fractions!r}")
    writes = fraction is not None or threshold is not None
    target = (out or run.resolve().with_name(f"{run.resolve().name}-pruned")).resolve()
    if writes:
        if target == run.resolve() or run.resolve() in target.parents:
            raise ValueError(
                f"--out {target} is the run itself or inside it; name another folder, so that the whole run is kept"
            )
        runs.prepare(target, overwrite=overwrite, resume=False, inputs=data or run)
    if draws is not None and draws < 1:
        raise ValueError(f"--draws must be at least 1, got {draws}")
    record = runs.read_record(run)
    rows, scored = None, dict[str, Any]()
    if data is None:
        note("no --data, so no errors: the table shows sizes only")
    else:
        rows = _rows(run, record, data, encoding)
    posterior = runs.load(run, "auto")[1]
    if rows is not None:
        observed = torch.from_numpy(record.target.observed(rows[0])).to(posterior.device)
        scored = {"x": torch.from_numpy(rows[1]), "y": observed, "restore": record.target.restore}
    with _in_options():
        pruned = posterior.prune(fraction, threshold=threshold, **how) if writes else None
        shown = shares if fraction is None else sorted({*shares, fraction})
        view.console().print(table(posterior, shown, draws=draws, seed=seed, **how, **scored))
    if pruned is None:
        note(f"nothing was written; to keep a pruned run: plausible prune {run} --fraction 0.75")
        return
    total = sum(mask.numel() for mask in pruned.masks.values())
    left = sum(int(mask.sum()) for mask in pruned.masks.values())
    words = f"{left:,} of {total:,} weights are left"
    asked = {"by": how["by"], "fraction": fraction, "threshold": threshold, "biases": biases, "per_layer": per_layer}
    record = replace(
        record,
        settings={**record.settings, "pruned": {**asked, "left": words}},
        rows={**record.rows, "heldout": 0 if rows is None else rows[0].rows},
    )
    predictive = None
    if rows is not None:
        predictive = record.target.restore(pruned.predict(scored["x"], draws, seed))
    _write(target, record, pruned, words, rows, predictive, scored.get("y"))
    try:
        _draw(target / FIGURE, posterior, pruned, how, 1 - left / total)
    except ImportError:
        note("no figure: it needs matplotlib, pip install 'plausible[plot]'")
    note(f"{words}; saved in {target}; next: plausible predict {target} new.csv --out predictions.csv")


@contextmanager
def _in_options() -> Iterator[None]:
    """Errors of the library in the words of the command line."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"\bby='(\w+)'", lambda match: f"--by {match[1].replace('_', '-')}", str(error))
        options = r"\b(fractions?|threshold|per_layer)\b"
        raise ValueError(re.sub(options, lambda match: f"--{match[1].replace('_', '-')}", message)) from error


def _rows(run: Path, record: Record, data: Path, encoding: str | None) -> tuple[Table, np.ndarray]:
    """The rows of a table that can be measured, with their inputs; of the table of the fit, its held-out rows."""
    from plausible.apps.files import read_table
    from plausible.apps.tables import complete

    table = read_table(data, encoding)
    for name in record.target.names:
        table[name]  # refused by name where it is missing
    if (held := _held_out(run, record, table)) is not None:
        note(f"{data} is the table of the fit: its {len(held)} held-out rows are measured")
        table = table.take(held)
    elif data.name == record.settings.get("data"):
        note(f"warning: {data} may hold rows that the run was fitted to; their error is too small")
    known = complete(table, record.target.names)
    for name, labels in zip(record.target.names, record.target.classes):
        for index, cell in enumerate(table[name].cells):
            if cell is not None and cell not in labels:
                row = table[name].row(index)
                raise ValueError(f"target {name!r} has a class that the run does not know, {cell!r} in row {row} of {data}")
    table = table.take(known)
    if table.rows:
        features = record.preprocessor.transform(table)
        for line in features.notes:
            note(line)
        table = table.take(features.kept)
    if not table.rows:
        raise ValueError(f"{data} has no row with a target and all inputs: nothing can be measured")
    return table, features.inputs


def _held_out(run: Path, record: Record, table: Table) -> np.ndarray | None:
    """Where the held-out rows of the fit stand in a table, if it is the one of the fit; None if it is another."""
    import numpy as np

    path = run / "heldout.csv"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        kept = list(csv.DictReader(file))
    first = table[record.target.names[0]]
    places = {first.row(index): index for index in range(table.rows)}
    rows = [places.get(int(entry["row"]), -1) for entry in kept]
    if min(rows, default=-1) < 0:
        return None
    for name in record.target.names:
        if [table[name].cells[row] for row in rows] != [entry[f"actual_{name}"] for entry in kept]:
            return None
    return np.array(rows)


def _write(
    target: Path,
    record: Record,
    pruned: Posterior,
    words: str,
    rows: tuple[Table, np.ndarray] | None,
    predictive: Predictive | None,
    observed: Any,
) -> None:
    """The folder of the pruned run, with the scores of the rows where there are any."""
    from plausible.apps.cli import prediction, runs
    from plausible.apps.cli.training import LEVEL
    from plausible.apps.report.collecting import collect
    from plausible.apps.report.runs import described, held_out

    about = described(record)
    about |= {"title": f"{about['title']}, pruned", "facts": {**about["facts"], "pruning": words}}
    metrics, heldout = None, {}
    if rows is not None and predictive is not None:
        metrics = prediction.held_out(record.target, predictive, observed, LEVEL)
        heldout = prediction.held_out_columns(record.target, rows[0], predictive, LEVEL)
        about |= held_out(record, *rows, predictive, metrics)
    runs.write(target, record, pruned, metrics, heldout, collect(pruned, **about))


def _draw(path: Path, before: Posterior, after: Posterior, how: Mapping[str, Any], share: float) -> None:
    """The ratios with the cut, where there are spreads, and the weights before and after."""
    from plausible.apps import plots
    from plausible.apps.plots.base import new_figure

    ratios, where = how["by"] != "magnitude", how["where"]
    figure, axes = new_figure(1, 3 if ratios else 1, (13 if ratios else 5, 4), squeeze=False)
    if ratios:
        plots.snr(before, (share,), where=where, ax=axes[0, 0])
        plots.snr_cdf(before, (share,), where=where, ax=axes[0, 1])
    plots.pruned_weights(before, after, where=where, ax=axes[0, -1])
    figure.savefig(path, dpi=120)
