"""`plausible prune`: a run and a share of weights → a smaller run, with a table of what it costs and a figure."""

from __future__ import annotations

import enum
import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plausible.apps.cli.errors import Debug, guarded, note

if TYPE_CHECKING:
    import numpy as np

    from plausible.analysis.pruning import PruningTable
    from plausible.apps.cli.runs import Record
    from plausible.apps.tables import Table
    from plausible.posteriors.base import Posterior


class Criterion(enum.StrEnum):
    """What says that a weight matters."""

    snr = "snr"
    magnitude = "magnitude"
    log_alpha = "log-alpha"


FIGURE = "pruning.png"


@guarded
def prune(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    fraction: Annotated[
        float | None, typer.Option(help="Share of the weights to set to 0, such as 0.75.", show_default=False)
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Or: all with snr or magnitude below it, log-alpha above it.", show_default=False)
    ] = None,
    by: Annotated[
        Criterion,
        typer.Option(metavar="NAME", help="snr (mean by spread), magnitude, or log-alpha (the scale of snr squared)."),
    ] = Criterion.snr,
    data: Annotated[
        Path | None, typer.Option(help="A table with the target, to measure the error; that of the fit: its held-out rows.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the pruned run.", show_default="RUN-pruned")
    ] = None,
    fractions: Annotated[str, typer.Option(metavar="A,B", help="Shares that the table shows.")] = "0,0.25,0.5,0.75,0.9,0.95",
    biases: Annotated[bool, typer.Option("--biases", help="Prune biases too.", show_default=False)] = False,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="The same share in every layer.", show_default=False)] = False,
    draws: Annotated[int | None, typer.Option(help="Posterior draws to average.", show_default="all there are")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.", show_default=False)] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Set the least useful weights of a run to 0, and show what that costs.

    Without --fraction and --threshold nothing is written: the table shows what each share would cost. With one of them the
    pruned run is written to --out, for plausible predict, info and report, with a figure where matplotlib is installed.

    Example: plausible prune run --fraction 0.75 --data houses.csv --out small
    """
    from plausible.apps.cli import view

    asked = Asked(fraction, threshold, by.value.replace("-", "_"), "all" if biases else None, per_layer)
    shares = _shares(fractions)
    target = (out or run.resolve().with_name(f"{run.resolve().name}-pruned")).resolve()
    if asked.writes:
        _refuse_place(target, run, data, overwrite=overwrite)
    if draws is not None and draws < 1:
        raise ValueError(f"--draws must be at least 1, got {draws}")
    opened = Opened.of(run, data)
    pruned = asked.applied(opened.posterior) if asked.writes else None
    if asked.fraction is not None:
        shares = sorted({*shares, asked.fraction})
    view.console().print(opened.table(asked, shares, draws, seed))
    if pruned is None:
        note(f"nothing was written; to keep a pruned run: plausible prune {run} --fraction 0.75")
        return
    _write(target, opened, asked, pruned, draws, seed)
    note(f"{_words(pruned)}; saved in {target}; next: plausible predict {target} new.csv --out predictions.csv")


@dataclass(frozen=True)
class Asked:
    """What to prune."""

    fraction: float | None
    threshold: float | None
    by: Any
    where: str | None
    per_layer: bool

    @property
    def writes(self) -> bool:
        """Whether a pruned run is wanted, and not the table alone."""
        return self.fraction is not None or self.threshold is not None

    def applied(self, posterior: Posterior) -> Posterior:
        """The pruned posterior; errors speak of options."""
        try:
            return posterior.prune(
                self.fraction, threshold=self.threshold, by=self.by, where=self.where, per_layer=self.per_layer
            )
        except ValueError as error:
            raise ValueError(_as_options(str(error))) from error


@dataclass(frozen=True)
class Opened:
    """A run with its posterior, and rows to measure the error on: none, held-out ones, or those of another table."""

    record: Record
    posterior: Posterior
    rows: Table | None
    inputs: np.ndarray | None

    @classmethod
    def of(cls, run: Path, data: Path | None) -> Opened:
        """Read the run, and the table where one is given."""
        from plausible.apps.cli import runs

        record = runs.read_record(run)
        rows = inputs = None
        if data is None:
            note("no --data, so no errors: the table shows sizes only")
        else:
            rows, inputs = _rows(run, record, data)
        return cls(record, runs.load(run, "auto")[1], rows, inputs)

    @property
    def observed(self) -> Any:
        """The targets of the rows, in original units."""
        import torch

        assert self.rows is not None
        return torch.from_numpy(self.record.target.observed(self.rows)).to(self.posterior.device)

    def table(self, asked: Asked, shares: list[float], draws: int | None, seed: int) -> PruningTable:
        """What each share costs."""
        import torch

        from plausible.analysis import pruning

        scored: dict[str, Any] = {}
        if self.inputs is not None:
            scored = {"x": torch.from_numpy(self.inputs), "y": self.observed, "restore": self.record.target.restore}
        try:
            return pruning.table(
                self.posterior,
                shares,
                by=asked.by,
                where=asked.where,
                per_layer=asked.per_layer,
                draws=draws,
                seed=seed,
                **scored,
            )
        except ValueError as error:
            raise ValueError(_as_options(str(error))) from error


def _shares(text: str) -> list[float]:
    try:
        found = sorted({float(word) for word in text.split(",")})
    except ValueError:
        found = [-1.0]
    if not all(0 <= share <= 1 for share in found):
        raise ValueError(f"--fractions takes shares from 0 to 1 such as 0,0.5,0.75, got {text!r}")
    return found


def _as_options(message: str) -> str:
    """A message of the library in the words of the command line."""
    message = re.sub(r"\bby='(\w+)'", lambda found: f"--by {found[1].replace('_', '-')}", message)
    return re.sub(r"\b(fractions?|threshold|per_layer)\b", lambda found: f"--{found[1].replace('_', '-')}", message)


def _refuse_place(target: Path, run: Path, data: Path | None, *, overwrite: bool) -> None:
    """Refuse an output folder before any work is done; a run never replaces itself."""
    from plausible.apps.cli import runs

    if target.resolve() == run.resolve() or run.resolve() in target.resolve().parents:
        raise ValueError(f"--out {target} is the run itself or inside it; name another folder, so that the whole run is kept")
    runs.prepare(target, overwrite=overwrite, resume=False, inputs=data or run)


def _rows(run: Path, record: Record, data: Path) -> tuple[Table, np.ndarray]:
    """The rows of a table that can be measured, with their inputs; of the table of the fit, its held-out rows."""
    from plausible.apps.cli.files import read_table
    from plausible.apps.tables import complete

    table = read_table(data)
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
    features = record.preprocessor.transform(table) if table.rows else None
    for line in features.notes if features is not None else ():
        note(line)
    table = table.take(features.kept) if features is not None else table
    if features is None or not table.rows:
        raise ValueError(f"{data} has no row with a target and all inputs: nothing can be measured")
    return table, features.inputs


def _held_out(run: Path, record: Record, table: Table) -> np.ndarray | None:
    """Where the held-out rows of the fit stand in a table, if it is the one of the fit; None if it is another."""
    import csv

    import numpy as np

    path = run / "heldout.csv"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        kept = list(csv.DictReader(file))
    first = table[record.target.names[0]]
    places = {first.row(index): index for index in range(table.rows)}
    found = [places.get(int(entry["row"]), -1) for entry in kept]
    same = (
        bool(found)
        and min(found) >= 0
        and all(
            table[name].cells[place] == entry[f"actual_{name}"]
            for entry, place in zip(kept, found)
            for name in record.target.names
        )
    )
    return np.array(found) if same else None


def _words(posterior: Posterior) -> str:
    total = sum(mask.numel() for mask in posterior.masks.values())
    left = sum(int(mask.sum()) for mask in posterior.masks.values())
    return f"{left:,} of {total:,} weights are left"


def _write(target: Path, opened: Opened, asked: Asked, pruned: Posterior, draws: int | None, seed: int) -> None:
    """The folder of the pruned run, with the scores of the rows where there are any, and the figure."""
    import torch

    from plausible.apps.cli import prediction, runs
    from plausible.apps.cli.training import LEVEL
    from plausible.apps.report.collecting import collect
    from plausible.apps.report.runs import described

    rows = 0 if opened.rows is None else opened.rows.rows
    record = replace(
        opened.record,
        settings={
            **opened.record.settings,
            "pruned": {
                "by": asked.by,
                "fraction": asked.fraction,
                "threshold": asked.threshold,
                "biases": asked.where == "all",
                "per_layer": asked.per_layer,
                "left": _words(pruned),
            },
        },
        rows={**opened.record.rows, "heldout": rows},
    )
    about = described(record)
    common: dict[str, Any] = {
        "title": f"{about.title}, pruned",
        "data": about.data,
        "notes": about.notes,
        "facts": {**about.facts, "pruning": _words(pruned)},
    }
    metrics, heldout = None, {}
    if opened.rows is None or opened.inputs is None:
        evidence = collect(pruned, **common)
    else:
        goal, table, observed = record.target, opened.rows, opened.observed
        predictive = goal.restore(pruned.predict(torch.from_numpy(opened.inputs), draws, seed))
        metrics = prediction.held_out(goal, predictive, observed, LEVEL)
        numbers = [table[goal.names[0]].row(index) for index in range(rows)]
        heldout = {"row": numbers, **{f"actual_{name}": list(table[name].cells) for name in goal.names}}
        heldout |= prediction.columns(goal, predictive, LEVEL)
        evidence = collect(
            pruned,
            torch.from_numpy(opened.inputs),
            observed.cpu(),
            names=goal.names,
            classes=goal.classes or None,
            restore=goal.restore,
            predictive=predictive,
            scores=metrics,
            rows=numbers,
            cells=lambda i: {name: table[name].cells[i] or "missing" for name in record.preprocessor.names},
            **common,
        )
    runs.write(target, record, pruned, metrics, heldout, evidence)
    if importlib.util.find_spec("matplotlib") is None:
        note("no figure: it needs matplotlib, pip install 'plausible[plot]'")
        return
    _draw(target / FIGURE, opened.posterior, pruned, asked)


def _draw(path: Path, before: Posterior, after: Posterior, asked: Asked) -> None:
    """The ratios with the cut, where there are spreads, and the weights before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from plausible.apps import plots

    share = 1 - sum(int(m.sum()) for m in after.masks.values()) / sum(m.numel() for m in after.masks.values())
    ratios = asked.by != "magnitude"
    figure = Figure(figsize=(13 if ratios else 5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3 if ratios else 1, squeeze=False)[0]
    if ratios:
        plots.snr(before, (share,), where=asked.where, ax=axes[0])
        plots.snr_cdf(before, (share,), where=asked.where, ax=axes[1])
    plots.pruned_weights(before, after, where=asked.where, ax=axes[-1])
    figure.savefig(path, dpi=120)
