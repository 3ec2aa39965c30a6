"""The commands and their options; what they do is in the modules they import when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from plausible.apps.cli import datasets, diagnosing, errors, models, pruning, sweeping
from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import (
    Debug,
    Device,
    Draws,
    Encoding,
    Overwrite,
    Quiet,
    Run,
    Seed,
    Target,
    Time,
    numbers,
    option,
    words,
)

app = typer.Typer(
    name="plausible",
    help="Neural networks that know what they do not know: fit a table, predict with uncertainty.",
    epilog="Start with: plausible fit data.csv --target price --out run, then plausible predict run new.csv.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(datasets.app, name="data")

Task = Literal["auto", "regression", "classification"]
Likelihood = Literal[
    "auto", "gaussian", "categorical", "bernoulli", "poisson", "negative-binomial", "student-t", "heteroscedastic"
]
MODEL, TRAINING, DATA = "The model", "Training", "The data"
TABLE = "A table with a header: .csv, .tsv, .json, .jsonl (each also with .gz) or .parquet."
COLUMNS = ("drop_columns", "keep_columns", "categorical")
THEIRS = "the method's"
FASTEST = "cpu, cuda, mps, or auto: the fastest there is."


Hidden = Annotated[str, option("Widths of the hidden layers; none: a linear model.", panel=MODEL, shown=True)]
Activation = Annotated[
    Literal["relu", "tanh", "silu", "gelu"],
    option("relu, tanh, silu or gelu, after each hidden layer.", metavar="NAME", panel=MODEL, shown=True),
]
Missing = Annotated[
    Literal["refuse", "drop", "impute"],
    option(
        "Missing cells (empty, NA, NaN, null, ?) and words among numbers: refuse, drop their rows, or impute the median or a "
        "category of their own with an indicator.",
        metavar="NAME",
        panel=DATA,
        shown=True,
    ),
]
Drop = Annotated[str | None, option("Columns to leave out.", metavar="A,B", panel=DATA)]
Keep = Annotated[str | None, option("Columns to learn from though they look like identifiers.", metavar="A,B", panel=DATA)]
Codes = Annotated[str | None, option("Numeric columns that are codes.", metavar="A,B", panel=DATA)]


def widths(text: str) -> tuple[int, ...]:
    """`50,50` → `(50, 50)`; `none` or nothing is a linear model."""
    if text.strip().lower() in ("", "none", "0"):
        return ()
    layers = numbers(text, int)
    if min(layers, default=0) < 1:
        raise ValueError(f"--hidden takes layer widths such as 50,50 (or none for a linear model), got {text!r}")
    return layers


def in_parts(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, with lists in the place of texts with commas."""
    return given | {"hidden": widths(given["hidden"])} | {name: words(given[name]) for name in COLUMNS}


def show_version(wanted: bool) -> None:
    if wanted:
        import plausible

        typer.echo(f"plausible {plausible.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
    debug: Debug = False,
) -> None:
    """Neural networks that know what they do not know: fit a table, predict with uncertainty."""
    errors.tracebacks = debug


@app.command(no_args_is_help=True)
@guarded
def fit(
    data: Annotated[Path, typer.Argument(help=TABLE, show_default=False)],
    targets: Target,
    out: Annotated[Path, option("Folder for the run.", "--out", "-o")],
    method: Annotated[str, option("auto chooses one; see: plausible methods.", "--method", "-m", shown=True)] = "auto",
    time: Time = None,
    task: Annotated[
        Task,
        option(
            "regression, classification, or auto: text and up to 20 different integers are classes.",
            metavar="NAME",
            panel=MODEL,
            shown=True,
        ),
    ] = "auto",
    likelihood: Annotated[
        Likelihood,
        option(
            "gaussian, student-t, heteroscedastic, poisson, negative-binomial, categorical, "
            "bernoulli, or auto: categorical for classes; for numbers gaussian, or what --method auto chooses.",
            metavar="NAME",
            panel=MODEL,
            shown=True,
        ),
    ] = "auto",
    prior_scale: Annotated[
        float | None, option("Standard deviation of a Gaussian prior of the weights.", panel=MODEL, shown="by fan-in")
    ] = None,
    hidden: Hidden = "50,50",
    activation: Activation = "relu",
    epochs: Annotated[int | None, option("Passes over the training rows.", panel=TRAINING, shown=THEIRS)] = None,
    batch_size: Annotated[int | None, option("Rows per step.", panel=TRAINING, shown=THEIRS)] = None,
    lr: Annotated[float | None, option("Learning rate.", panel=TRAINING, shown=THEIRS)] = None,
    extras: Annotated[
        list[str] | None,
        option(
            "Another setting of the method, such as members=10; repeat for several. See: plausible methods NAME.",
            "--set",
            metavar="KEY=VALUE",
            panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[int, option("Of the split, the first weights and the training.", panel=TRAINING, shown=True)] = 0,
    device: Annotated[Device, option(FASTEST, metavar="NAME", panel=TRAINING, shown=True)] = "auto",
    compile: Annotated[
        Literal["auto", "yes", "no"],
        option("Compile the training step: yes, no, or auto: where it pays.", metavar="NAME", panel=TRAINING, shown=True),
    ] = "auto",
    checkpoint: Annotated[
        bool, option("Keep OUT.checkpoint while fitting.", "--checkpoint/--no-checkpoint", panel=TRAINING, shown=True)
    ] = True,
    resume: Annotated[bool, option("Go on with an interrupted fit; all else as before.", "--resume", panel=TRAINING)] = False,
    test_fraction: Annotated[float, option("Rows held out for the scores; 0: none.", panel=DATA, shown=True)] = 0.1,
    missing: Missing = "refuse",
    drop_columns: Drop = None,
    keep_columns: Keep = None,
    categorical: Codes = None,
    encoding: Encoding = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fit a Bayesian network to a table, print held-out scores with a verdict, and write the run to a folder.

    Numeric columns are standardised, text columns become categories, dates what the calendar says of them; identifiers and
    constant columns are left out. All of it is kept with the run. Numeric targets are standardised inside, predictions come in
    original units.

    Example: plausible fit houses.csv --target price --out run --time 60s
    """
    # The fields of `FitOptions` are the parameters of this command, which are all that is local so far.
    given = in_parts(locals())
    from plausible.apps.cli import training, view

    record, metrics, findings = training.fit(training.FitOptions(**given))
    if not quiet:
        view.scores(record, metrics)
        view.verdicts(findings)
        note(f"saved in {out}; next: plausible report {out}, plausible predict {out} new.csv --out predictions.csv")


@app.command(no_args_is_help=True)
@guarded
def predict(
    run: Run,
    data: Annotated[Path, typer.Argument(help="A table with the run's input columns.", show_default=False)],
    out: Annotated[Path, option("File to write, by its ending; - is standard output, as CSV.", "--out", "-o")],
    level: Annotated[float, option("Probability inside lower and upper.", shown=True)] = 0.9,
    draws: Draws = None,
    seed: Seed = 0,
    strict: Annotated[bool, option("Refuse categories that training has not seen.", "--strict")] = False,
    device: Annotated[Device, option(FASTEST, metavar="NAME", shown=True)] = "auto",
    encoding: Encoding = None,
    overwrite: Overwrite = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Predict every row of a table with a saved run, in the order of the file; with the target in it, scores are printed.

    Numbers: mean, std, epistemic, aleatoric, lower, upper, in the units of the target; epistemic (what more data would
    tell) and aleatoric (noise) are variances and add up to the square of std. Classes: prediction, p_CLASS, entropy and
    mutual_information (its epistemic part), in nats. Several targets: each column starts with the target's name. Identifiers
    of the table come first, as they are.

    Example: plausible predict run new.csv --out predictions.csv
    """
    from plausible.apps.cli import prediction, view

    path = None if str(out) == "-" else out
    record, rows, metrics = prediction.predict(
        run,
        data,
        path,
        level=level,
        draws=draws,
        seed=seed,
        strict=strict,
        overwrite=overwrite,
        device=device,
        encoding=encoding,
    )
    if metrics is not None:
        view.scores(record, metrics, "scored row", aside=path is None)
    if path is not None:
        note(f"{rows} rows written to {out}")


@app.command(no_args_is_help=True)
@guarded
def recommend(
    data: Annotated[Path, typer.Argument(help=TABLE, show_default=False)],
    targets: Target,
    time: Time = None,
    memory: Annotated[str | None, option("What a fit may take, such as 4G or 500M.", shown="what is free")] = None,
    hidden: Hidden = "50,50",
    activation: Activation = "relu",
    device: Annotated[Device, option(FASTEST, metavar="NAME", shown=True)] = "auto",
    task: Annotated[Task, option("regression, classification or auto.", metavar="NAME", panel=DATA, shown=True)] = "auto",
    missing: Missing = "impute",
    drop_columns: Drop = None,
    keep_columns: Keep = None,
    categorical: Codes = None,
    encoding: Encoding = None,
    debug: Debug = False,
) -> None:
    """Say which methods suit a table within a time and a memory, in the order in which `--method auto` tries them, and why.

    Nothing is fitted: times are estimated from rows, weights and device.

    Example: plausible recommend houses.csv --target price --time 60s --memory 4G
    """
    given = in_parts(locals())
    from plausible.apps.cli import training, view

    given.pop("memory")
    problem, candidates = training.recommended(training.FitOptions(**given), memory)
    view.candidates(problem, candidates)


@app.command(no_args_is_help=True)
@guarded
def report(
    run: Run,
    out: Annotated[
        Path | None, option("HTML file to write; replaced if it is there.", "--out", "-o", shown="RUN/report.html")
    ] = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Write a page about a run: what was fitted, how good its predictions and its uncertainty are, what to do about it.

    One file with everything in it, for light and dark screens, phones and screen readers. It needs no data: the fit has
    stored its held-out predictions.

    Example: plausible report run
    """
    from plausible.apps.report import write

    note(f"report written to {write(run, out)}")


app.command(no_args_is_help=True)(diagnosing.diagnose)
app.command(no_args_is_help=True)(pruning.prune)
app.command(no_args_is_help=True)(models.evidence)
app.command(no_args_is_help=True)(models.fidelity)


@app.command()
@guarded
def info(run: Run, debug: Debug = False) -> None:  # noqa: ARG001
    """Summarise a saved run: data, network, method, held-out scores."""
    from plausible.apps.cli import runs, view

    view.run(run, runs.read_record(run))


@app.command()
@guarded
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see its settings.", show_default=False)] = None,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """List the inference methods, or show the settings of one."""
    from plausible.apps.cli import view

    view.methods() if name is None else view.method(name)


@app.command()
@guarded
def compare(
    study: Annotated[
        Path | None, typer.Argument(help="A table, with --target, or a study in TOML.", show_default=False)
    ] = None,
    targets: Annotated[list[str] | None, option("Column of the table to predict.", "--target", "-t", panel=DATA)] = None,
    datasets: Annotated[str | None, option("UCI sets; see: plausible data list.", metavar="A,B")] = None,
    methods: Annotated[str | None, option("Names of methods, or labels of the study.", metavar="A,B")] = None,
    splits: Annotated[str | None, option("How many splits, or which (0,3,7), or all.", metavar="N", shown="all")] = None,
    reference: Annotated[str | None, option("The one to compare with.", metavar="LABEL", shown="the first")] = None,
    seed: Annotated[int | None, option("Of everything random.", shown="the study's, or 0")] = None,
    jobs: Annotated[int | None, option("Processes.", "--jobs", "-j", shown="the cores")] = None,
    out: Annotated[Path, option("Folder for the results.", "--out", "-o", shown=True)] = Path("comparison"),
    page: Annotated[Path | None, option("File of the page.", metavar="FILE", shown="OUT/index.html")] = None,
    time: Time = None,
    hidden: Hidden = "50,50",
    task: Annotated[Task, option("regression, classification or auto.", metavar="NAME", panel=DATA, shown=True)] = "auto",
    missing: Missing = "refuse",
    drop_columns: Drop = None,
    keep_columns: Keep = None,
    categorical: Codes = None,
    encoding: Encoding = None,
    published: Annotated[bool, option("Show the published results that the study has.", shown=True)] = True,
    show: Annotated[bool, option("Print a study to start from and stop.", "--show")] = False,
    overwrite: Annotated[bool, option("Compute everything again.", "--overwrite")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Compare methods on a table of your own, or on published data sets: a ranking, results.json and a page.

    On a table: methods at their defaults, a linear model and a constant, on five folds of its rows, with paired differences and
    their standard errors. On UCI sets: what a study or --datasets and --methods say, on the published splits.

    Results are kept fit by fit: a stopped comparison goes on where it was, and a changed method alone is fitted again.
    A fit that fails is shown as failed, the rest goes on, and the exit code is 1.

    Example: plausible compare houses.csv --target price --time 20s
    """
    if show:
        from plausible.apps.compare.study import example

        typer.echo(example(), nl=False)
        return
    from plausible.apps.cli import comparing

    given = {"reference": reference, "seed": seed}
    if targets and study is not None:
        from plausible.apps.preparing import TableOptions

        table = TableOptions(
            study,
            tuple(targets),
            task,
            missing=missing,
            drop_columns=words(drop_columns),
            keep_columns=words(keep_columns),
            categorical=words(categorical),
            encoding=encoding,
        )
        asked = comparing.own_study(table, widths(hidden), words(methods), splits, time, **given)
    else:
        asked = comparing.study_of(study, words(datasets), words(methods), splits, **given)
    good = comparing.compare(asked, out, jobs=jobs, overwrite=overwrite, quiet=quiet, published=published, to=page)
    if not good:
        raise typer.Exit(1)


app.command(no_args_is_help=True)(sweeping.sweep)


@app.command()
@guarded
def demo(
    out: Annotated[Path, option("Folder for the page.", "--out", "-o", shown=True)] = Path("demo"),
    quick: Annotated[bool, option("Fewer steps, rougher results.", "--quick")] = False,
    seed: Annotated[int, option("Of everything random.", shown=True)] = 0,
    overwrite: Overwrite = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Run a method of each family on two small problems and write a page with tables and plots."""
    from plausible.apps.cli.demo import run

    run(out, quick, seed, overwrite)


@app.command()
def version() -> None:
    """Print the version."""
    show_version(True)


def main() -> None:
    app()
