"""Saved runs beside one another: `plausible evidence` compares models, `plausible fidelity` a run and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Encoding, Markdown, Run, Seed, numbers, option

if TYPE_CHECKING:
    from plausible.analysis.evidence import Comparison
    from plausible.analysis.fidelity import Fidelity
    from plausible.apps.cli.runs import Record


@guarded
def evidence(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of two runs or more.", show_default=False)],
    prior: Annotated[str | None, option("Prior probabilities, one for each run.", metavar="P,Q", shown="all alike")] = None,
    symmetries: Annotated[bool, option("Count modes that are copies of the one found.", "--symmetries")] = False,
    plot: Annotated[Path | None, option("Draw evidence against the held-out log-likelihood.", metavar="FILE")] = None,
    markdown: Markdown = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Compare runs of the same data by their evidence: Bayes factors, and the probability of each model given the data.

    For runs of laplace, and of variational methods, whose evidence is a lower bound.

    Example: plausible evidence narrow wide --plot evidence.png
    """
    from plausible.apps.cli import view

    probabilities = None if prior is None else numbers(prior)
    if probabilities is not None and len(probabilities) != len(runs):
        raise ValueError(f"--prior takes {len(runs)} numbers with commas between, one for each run, got {prior!r}")
    comparison, held_out = opened(runs, probabilities, symmetries)
    view.show(comparison, markdown)
    if plot is not None:
        note(f"figure: {_drawn(comparison, held_out, plot)}")


def opened(runs: list[Path], prior: Sequence[float] | None, symmetries: bool) -> tuple[Comparison, dict[str, float | None]]:
    """The runs compared, and the held-out log-likelihood of each where it has one."""
    from plausible.analysis.evidence import compare
    from plausible.apps.cli.runs import load
    from plausible.core.storage import read_json

    names = [str(run) for run in runs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(repeated)} is named twice; give different runs")
    loaded = {name: load(run) for name, run in zip(names, runs)}
    first = loaded[names[0]][0]
    for name, (record, _) in loaded.items():
        if record.target.to_dict() != first.target.to_dict() or record.rows != first.rows:
            raise ValueError(
                f"evidence compares models of the same data: {names[0]} and {name} have other targets or training rows; fit them "
                "to the same table with the same --seed, --test-fraction and --missing"
            )
    paths = {name: run / "metrics.json" for name, run in zip(names, runs)}
    held_out = {name: read_json(path)["log_likelihood"] if path.is_file() else None for name, path in paths.items()}
    return compare({name: posterior for name, (_, posterior) in loaded.items()}, prior, symmetries=symmetries), held_out


def _drawn(comparison: Comparison, held_out: dict[str, float | None], path: Path) -> Path:
    from plausible.apps.plots import evidence as draw
    from plausible.apps.plots.base import new_figure, save_figure

    missing = [name for name, value in held_out.items() if value is None]
    if missing:
        raise ValueError(f"--plot needs held-out rows, and {', '.join(missing)} has none; fit with --test-fraction above 0")
    figure, ax = new_figure()
    draw(comparison, held_out, ax=ax)
    return save_figure(figure, path.with_suffix(""), (path.suffix.lstrip(".") or "png",))[0]


@guarded
def fidelity(
    run: Run,
    reference: Annotated[
        Path, typer.Argument(help="The run that it is held against, such as one of nuts.", show_default=False)
    ],
    data: Annotated[
        Path | None, option("A table of rows to compare at, with targets or without.", shown="held-out rows")
    ] = None,
    training: Annotated[Path | None, option("The table that both were fitted to: adds weights and regions.")] = None,
    draws: Annotated[int | None, option("Posterior draws of either.", shown="all there are, or 1000")] = None,
    seed: Seed = 0,
    encoding: Encoding = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Say how near a run is to a reference run of the same rows: predictions, functions, weights, epistemic variance.

    Each number has its standard error and the noise floor, which is what two halves of the reference score. With --training,
    which must be the table of both fits, the Stein discrepancy of the weights and the epistemic variance inside, between and
    outside the data are there too; without --data the rows are those that were held out of it.

    Example: plausible fidelity run chains --training houses.csv
    """
    from json import dumps

    from plausible.apps.cli import view

    result = compared(run, reference, data, training, draws, seed, encoding)
    if json:
        typer.echo(dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        view.show(result)


def compared(
    run: Path,
    reference: Path,
    data: Path | None,
    training: Path | None,
    draws: int | None,
    seed: int,
    encoding: str | None = None,
) -> Fidelity:
    """The comparison of two saved runs, in the units that the networks were trained in."""
    import torch

    from plausible.analysis.fidelity import fidelity as measure
    from plausible.apps.cli.runs import load
    from plausible.apps.files import read_table

    if data is None and training is None:
        raise ValueError("give --data, rows to compare at, or --training, the table that both runs were fitted to")
    (record, posterior), (other, truth) = load(run), load(reference)
    for name, one, two in (
        ("target", record.target.to_dict(), other.target.to_dict()),
        ("inputs", record.preprocessor.to_dict()["columns"], other.preprocessor.to_dict()["columns"]),
        ("training rows", dict(record.rows), dict(other.rows)),
    ):
        if one != two:
            raise ValueError(
                f"{run} and {reference} have other {name}: fit both to the same table with the same --seed, --test-fraction and "
                "--missing"
            )
    fitted = held = None
    if training is not None:
        fitted, held = _rows_of_the_fit(record, training, encoding)
    if data is not None:
        table = read_table(data, encoding)
        features = record.preprocessor.transform(table)
        for line in features.notes:
            note(line)
        known = all(name in table.columns for name in record.target.names)
        y = torch.from_numpy(record.target.encode(table.take(features.kept))) if known else None
        held = torch.from_numpy(features.inputs), y
    x, y = held if held is not None and len(held[0]) else (None, None)
    return measure(posterior, truth, x, y, data=fitted, draws=draws, seed=seed)


def _rows_of_the_fit(record: Record, path: Path, encoding: str | None) -> tuple[Any, Any]:
    """Training and held-out rows as the network saw them, split as `plausible fit` did."""
    import torch

    from plausible.apps.files import read_table
    from plausible.apps.preparing import split
    from plausible.apps.tables import complete

    table = record.preprocessor.readable(read_table(path, encoding), [])
    names = list(record.target.names)
    if absent := [name for name in names if name not in table.columns]:
        raise ValueError(f"--training {path} has no column {absent[0]!r}, which the run predicts")
    needed = [*names, *record.preprocessor.names] if record.preprocessor.missing == "drop" else names
    table = table.take(complete(table, needed))
    parts = [table.take(rows) for rows in split(table.rows, float(record.settings["test_fraction"]), record.seed)]
    if parts[0].rows != record.rows["train"]:
        raise ValueError(
            f"--training {path} leaves {parts[0].rows} rows for training, the run had {record.rows['train']}: it is not the "
            "table of the fit"
        )
    return tuple(
        (torch.from_numpy(record.preprocessor.transform(part).inputs), torch.from_numpy(record.target.encode(part)))
        for part in parts
    )  # type: ignore[return-value]
