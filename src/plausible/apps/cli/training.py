"""`plausible fit`: a table → split, inputs, network, posterior, held-out scores → the folder of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import plausible
from plausible import Posterior, Predictive
from plausible.apps.assembling import build
from plausible.apps.cli import diagnosing, prediction, runs
from plausible.apps.cli.errors import Interrupted, note
from plausible.apps.cli.files import read_table
from plausible.apps.report.runs import from_fit
from plausible.apps.responses import Response, decide, standardised
from plausible.apps.tables import ID_ROWS, Preprocessor, Table, complete, listed, refuse_gaps
from plausible.core import serialise

LEVEL = 0.9


@dataclass(frozen=True)
class FitOptions:
    """Everything `plausible fit` was asked for."""

    data: Path
    targets: Sequence[str]
    out: Path
    method: str
    task: str
    likelihood: str
    prior_scale: float
    hidden: tuple[int, ...]
    activation: str
    epochs: int | None
    batch_size: int | None
    lr: float | None
    extras: Sequence[str] | None
    seed: int
    device: str
    compile: str
    checkpoint: bool
    resume: bool
    test_fraction: float
    missing: str
    drop_columns: tuple[str, ...]
    categorical: tuple[str, ...]
    overwrite: bool
    quiet: bool
    debug: bool


@dataclass(frozen=True)
class Prepared:
    """Training and held-out rows, ready for the network."""

    preprocessor: Preprocessor
    target: Response
    train: Table
    test: Table
    inputs: tuple[np.ndarray, np.ndarray]
    notes: tuple[str, ...]


def say(options: FitOptions, *lines: str) -> None:
    for line in () if options.quiet else lines:
        note(line)


def select(table: Table, options: FitOptions, notes: list[str]) -> tuple[Table, list[str]]:
    """The table without dropped and saved-index columns, and the names of its inputs."""
    named = {"--target": options.targets, "--drop-columns": options.drop_columns, "--categorical": options.categorical}
    for option, names in named.items():
        for name in names:
            try:
                table[name]
            except ValueError as error:
                raise ValueError(f"{option}: {error}") from None
            if option == "--target" and name in options.drop_columns:
                raise ValueError(f"{name!r} is both --target and in --drop-columns")
    table = table.without(options.drop_columns)
    for name, column in list(table.columns.items()):
        if name.startswith("unnamed ") and (column.kind == "empty" or column.counts_up):
            what = "is empty" if column.kind == "empty" else "counts the rows"
            notes.append(f"column {name.removeprefix('unnamed ')} has no name and {what}: left out")
            table = table.without([name])
        elif column.counts_up and table.rows >= ID_ROWS:
            notes.append(f"column {name!r} counts the rows; if it means nothing, add --drop-columns {name!r}")
    return table, [name for name in table.columns if name not in options.targets]


def usable(table: Table, inputs: Sequence[str], options: FitOptions, notes: list[str]) -> Table:
    """The rows that can be learnt from, by the rule for missing values; a missing target is never filled in."""
    if options.missing == "refuse":
        refuse_gaps(table, [*options.targets, *inputs], "add --missing impute (median or a category) or --missing drop")
        return table
    needed = [*options.targets, *inputs] if options.missing == "drop" else list(options.targets)
    kept = complete(table, needed)
    lost = int((~kept).sum())
    if lost == table.rows:
        counts = listed([f"{name} ({count})" for name, count in table.gaps(needed).items()], 12)
        raise ValueError(f"every row has missing values: {counts} of {table.rows}; try --drop-columns or --missing impute")
    if lost:
        notes.append(f"{lost} of {table.rows} rows left out: missing {'values' if options.missing == 'drop' else 'targets'}")
    return table.take(kept) if lost else table


def split(rows: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Seeded training and held-out row indices, each in the order of the file."""
    held = round(rows * fraction) if fraction == 0 else max(1, round(rows * fraction))
    if rows - held < 2:
        raise ValueError(f"{rows} rows leave {max(0, rows - held)} to train on after --test-fraction {fraction}; 2 are needed")
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def prepare(options: FitOptions) -> Prepared:
    """Read the file, decide what each column is, split the rows, and fit the preprocessing on the training rows."""
    notes: list[str] = []
    table, inputs = select(read_table(options.data), options, notes)
    if not inputs:
        raise ValueError(f"{options.data} has no input columns besides the target")
    table = usable(table, inputs, options, notes)
    target, lines = decide(table, options.targets, options.task, options.likelihood)
    train, test = map(table.take, split(table.rows, options.test_fraction, options.seed))
    # What is text in the whole table is text in the training rows, even where those happen to look like numbers.
    words = {name for name in inputs if table[name].kind == "text"} | set(options.categorical)
    preprocessor = Preprocessor.fit(train, inputs, missing=options.missing, categorical=words)
    encoded, held = preprocessor.transform(train), preprocessor.transform(test)
    notes += [*lines, *preprocessor.notes, *(f"held-out rows: {line}" for line in held.notes)]
    return Prepared(preprocessor, standardised(target, train), train, test, (encoded.inputs, held.inputs), tuple(notes))


def check(options: FitOptions) -> None:
    """Values that no later stage would refuse as plainly."""
    if not options.targets:
        raise ValueError("--target is missing: the name of the column to predict")
    if len(set(options.targets)) < len(options.targets):
        raise ValueError(f"--target names a column twice: {', '.join(options.targets)}")
    if not 0 <= options.test_fraction < 1:
        raise ValueError(f"--test-fraction must be at least 0 and below 1, got {options.test_fraction}")
    if not 0 < options.prior_scale < float("inf"):
        raise ValueError(f"--prior-scale must be positive and finite, got {options.prior_scale}")
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")


def fit(options: FitOptions) -> tuple[runs.Record, dict[str, Any] | None]:
    """Run the whole of `plausible fit`; returns the record and the held-out scores (None without held-out rows)."""
    check(options)
    options = replace(options, out=options.out.resolve())
    common = {"epochs": options.epochs, "batch_size": options.batch_size, "lr": options.lr}
    method = build(options.method, common, options.extras or ())
    runs.prepare(options.out, overwrite=options.overwrite, resume=options.resume, inputs=options.data)
    data = prepare(options)
    say(options, *data.notes)
    kept = {"prior_scale": options.prior_scale, "test_fraction": options.test_fraction, "data": options.data.name}
    record = runs.Record(
        data.preprocessor,
        data.target,
        options.hidden,
        options.activation,
        options.method,
        settings={"method": serialise.encode(method), **kept},
        rows={"train": data.train.rows, "heldout": data.test.rows},
        seed=options.seed,
        version=plausible.__version__,
    )
    layers = "-".join(map(str, record.layers))
    about = f"{record.target.task} of {', '.join(record.target.names)} ({record.target.likelihood}) by {record.method}"
    rows = f"{data.train.rows} training rows, {data.test.rows} held out"
    say(options, f"{about}: {rows}, {layers} {record.activation} network")
    posterior = infer(record, data, method, options)
    metrics: dict[str, Any] | None = None
    predictive: Predictive | None = None
    heldout: dict[str, list[Any]] = {}
    if data.test.rows:
        predictive = data.target.restore(posterior.predict(torch.from_numpy(data.inputs[1])))
        observed = torch.from_numpy(data.target.observed(data.test))
        metrics = prediction.held_out(data.target, predictive, observed.to(posterior.device), LEVEL)
        heldout = prediction.held_out_columns(data.target, data.test, predictive, LEVEL)
    evidence = from_fit(record, posterior, data, predictive, metrics)
    runs.write(options.out, record, posterior, metrics, heldout, evidence)
    say(options, *diagnosing.after_fit(evidence.diagnostics))
    return record, metrics


def infer(record: runs.Record, data: Prepared, method: Any, options: FitOptions) -> Posterior:
    """`plausible.fit` on the training rows, with a checkpoint beside the run where asked for."""
    checkpoint = runs.checkpoint_folder(options.out) if options.checkpoint else None
    if options.resume and checkpoint is None:
        raise ValueError("--resume needs the checkpoint: leave out --no-checkpoint")
    if checkpoint is not None and not options.resume:
        runs.discard_checkpoint(options.out)
    elif checkpoint is not None and not checkpoint.exists():
        say(options, f"nothing to resume: {checkpoint} does not exist; starting from the beginning")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        network = record.network()
    posterior: Posterior | None = None
    # Ctrl-C comes as an exception before the first step, and as an interrupted posterior after it.
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="stopped by Ctrl-C")
            posterior = plausible.fit(
                network,
                (torch.from_numpy(data.inputs[0]), torch.from_numpy(data.target.encode(data.train))),
                method,
                likelihood=data.target.make_likelihood(),
                prior=plausible.priors.Gaussian(scale=options.prior_scale),
                seed=options.seed,
                device=options.device,
                compile={"yes": True, "no": False}.get(options.compile, "auto"),  # type: ignore[arg-type]
                progress=False if options.quiet else None,
                checkpoint=checkpoint,
            )
    except KeyboardInterrupt:
        pass
    finally:
        if checkpoint is not None:
            runs.discard_checkpoint(options.out, unless_useful=True)
    if posterior is None or posterior.interrupted:
        kept = checkpoint is not None and checkpoint.exists()
        go_on = f"the checkpoint is in {checkpoint}; run the same command with --resume to go on"
        raise Interrupted(go_on if kept else "nothing was saved")
    return posterior
