"""`plausible fidelity`: a saved run beside a reference, such as a run of long chains, on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Run, Seed, option

if TYPE_CHECKING:
    from plausible.analysis.fidelity import Fidelity
    from plausible.apps.cli.runs import Record


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

    result = compared(run, reference, data, training, draws, seed)
    if json:
        typer.echo(dumps(result.to_dict(), indent=2, ensure_ascii=False))
    else:
        view.show(result)


def compared(run: Path, reference: Path, data: Path | None, training: Path | None, draws: int | None, seed: int) -> Fidelity:
    """The comparison of two saved runs, in the units that the networks were trained in."""
    import torch

    from plausible.analysis.fidelity import fidelity as measure
    from plausible.apps.cli.files import read_table
    from plausible.apps.cli.runs import load

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
        fitted, held = _rows_of_the_fit(record, training)
    if data is not None:
        table = read_table(data)
        features = record.preprocessor.transform(table)
        for line in features.notes:
            note(line)
        known = all(name in table.columns for name in record.target.names)
        y = torch.from_numpy(record.target.encode(table.take(features.kept))) if known else None
        held = torch.from_numpy(features.inputs), y
    x, y = held if held is not None and len(held[0]) else (None, None)
    return measure(posterior, truth, x, y, data=fitted, draws=draws, seed=seed)


def _rows_of_the_fit(record: Record, path: Path) -> tuple[Any, Any]:
    """Training and held-out rows as the network saw them, split as `plausible fit` did."""
    import torch

    from plausible.apps.cli.files import read_table
    from plausible.apps.cli.training import split
    from plausible.apps.tables import complete

    table = read_table(path)
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
