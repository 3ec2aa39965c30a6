"""`plausible fit`: a table → split, inputs, network, posterior, held-out scores → the folder of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import plausible
from plausible import Posterior, Predictive
from plausible.apps.assembling import build
from plausible.apps.cli import prediction, runs
from plausible.apps.cli.errors import Interrupted, note
from plausible.apps.preparing import Prepared, TableOptions, prepare
from plausible.apps.report.findings import Findings
from plausible.apps.report.runs import from_fit
from plausible.apps.tables import mlp
from plausible.core import serialise
from plausible.core.data import Batch, as_data
from plausible.core.likelihoods import Gaussian, StudentT
from plausible.core.memory import available
from plausible.core.model import Model
from plausible.core.networks import choose_device
from plausible.core.priors import Default
from plausible.methods.automatic.auto import Auto, problem_of
from plausible.methods.automatic.rule import Candidate, Problem

LEVEL = 0.9


@dataclass(frozen=True)
class FitOptions(TableOptions):
    """Everything `plausible fit` was asked for."""

    out: Path = Path("run")
    method: str = "auto"
    time: str | None = None
    prior_scale: float | None = None
    hidden: tuple[int, ...] = (50, 50)
    activation: str = "relu"
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    extras: Sequence[str] | None = None
    device: str = "auto"
    compile: str = "auto"
    checkpoint: bool = True
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    debug: bool = False


def say(options: FitOptions, *lines: str) -> None:
    for line in () if options.quiet else lines:
        note(line)


def check(options: FitOptions) -> None:
    """Values that no later stage would refuse as plainly."""
    if not options.targets:
        raise ValueError("--target is missing: the name of the column to predict")
    if len(set(options.targets)) < len(options.targets):
        raise ValueError(f"--target names a column twice: {', '.join(options.targets)}")
    if not 0 <= options.test_fraction < 1:
        raise ValueError(f"--test-fraction must be at least 0 and below 1, got {options.test_fraction}")
    if options.prior_scale is not None and not 0 < options.prior_scale < float("inf"):
        raise ValueError(f"--prior-scale must be positive and finite, got {options.prior_scale}")
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, got {options.seed}")


def method_of(options: FitOptions) -> Any:
    """The method with its settings; those of training belong to one that is named, a time to the one that chooses."""
    common = {"epochs": options.epochs, "batch_size": options.batch_size, "lr": options.lr}
    given = [f"--{name.replace('_', '-')}" for name, value in common.items() if value is not None]
    if options.method == Auto.name and given:
        raise ValueError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for a method that is named, such as --method ensemble; "
            "auto chooses its own by --time"
        )
    if options.method != Auto.name and options.time is not None:
        raise ValueError(f"--time is for --method auto, which chooses by it; {options.method} runs as long as its settings say")
    return build(options.method, common | {"time": options.time}, options.extras or ())


def fit(options: FitOptions) -> tuple[runs.Record, dict[str, Any] | None, Findings]:
    """Run the whole of `plausible fit`; returns the record, the held-out scores (None without such rows), and what was found."""
    check(options)
    options = replace(options, out=options.out.resolve())
    method = method_of(options)
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
    law = "" if _open(options, data) else f" ({record.target.likelihood})"
    about = f"{record.target.task} of {', '.join(record.target.names)}{law} by {record.method}"
    rows = f"{data.train.rows} training rows, {data.test.rows} held out"
    say(options, f"{about}: {rows}, {layers} {record.activation} network")
    posterior = infer(record, data, method, options)
    record = chosen(record, posterior)
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
    return record, metrics, evidence


def recommended(options: FitOptions, memory: str | None) -> tuple[Problem, list[Candidate]]:
    """What the rule of `auto` looks at, and all methods that it knows, the one that it would take first."""
    check(options)
    auto = Auto(options.time, memory)
    data = prepare(replace(options, test_fraction=0))
    say(options, *data.notes)
    network = mlp(len(data.preprocessor.features), options.hidden, data.target.outputs, options.activation)
    x, y = torch.from_numpy(data.inputs[0]), torch.from_numpy(data.target.encode(data.train))
    device = choose_device(network, options.device)
    model = Model.build(network, data.target.make_likelihood(), Default(), Batch(x[:8], y[:8]), num_data=len(x), device=device)
    problem = problem_of(model, as_data((x, y), dtype=torch.float32, device=device))
    return problem, auto.candidates(problem, available(device))


def _open(options: FitOptions, data: Prepared) -> bool:
    """Whether the likelihood of numbers is left to the method that is chosen."""
    return options.likelihood == "auto" and options.method == Auto.name and not data.target.classes


def chosen(record: runs.Record, posterior: Posterior) -> runs.Record:
    """The record with the method that was chosen and why, and with the likelihood that came with it."""
    if "choice" not in posterior.run:
        return record
    law = {Gaussian: "gaussian", StudentT: "student-t"}.get(type(posterior.likelihood), record.target.likelihood)
    settings = {**record.settings, "method": serialise.encode(posterior.method), "choice": posterior.run["choice"]}
    target = replace(record.target, likelihood=law)
    return replace(record, method=posterior.method.name, target=target, settings=settings)


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
                likelihood=None if _open(options, data) else data.target.make_likelihood(),
                prior=None if options.prior_scale is None else plausible.priors.Gaussian(scale=options.prior_scale),
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
