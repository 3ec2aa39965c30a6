"""The commands and their options; what they do is in the modules they import when they run."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from plausible.apps.cli import datasets, diagnosing, errors, fidelity, pruning, sweeping
from plausible.apps.cli import models as evidence
from plausible.apps.cli.errors import Debug, Quiet, guarded, note

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


class Task(enum.StrEnum):
    """What to predict."""

    auto = "auto"
    regression = "regression"
    classification = "classification"


class Likelihood(enum.StrEnum):
    """How targets scatter around the network's outputs."""

    auto = "auto"
    gaussian = "gaussian"
    categorical = "categorical"
    bernoulli = "bernoulli"
    poisson = "poisson"
    negative_binomial = "negative-binomial"
    student_t = "student-t"
    heteroscedastic = "heteroscedastic"


class Activation(enum.StrEnum):
    """The nonlinearity of the hidden layers."""

    relu = "relu"
    tanh = "tanh"
    silu = "silu"
    gelu = "gelu"


class Missing(enum.StrEnum):
    """What to do about missing values."""

    refuse = "refuse"
    drop = "drop"
    impute = "impute"


class Device(enum.StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Compile(enum.StrEnum):
    """Whether to compile the training step."""

    auto = "auto"
    yes = "yes"
    no = "no"


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.", show_default=False)]
MODEL, TRAINING, DATA, OUTPUT = "The model", "Training", "The data", "Output"


def words(text: str | None) -> tuple[str, ...]:
    """`a, b` → `("a", "b")`."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def widths(text: str) -> tuple[int, ...]:
    """`50,50` → `(50, 50)`; `none` or nothing is a linear model."""
    if text.strip().lower() in ("", "none", "0"):
        return ()
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise ValueError(f"--hidden takes layer widths such as 50,50 (or none for a linear model), got {text!r}")
    return found


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
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
    data: Annotated[Path, typer.Argument(help="A table with a header: .csv, .tsv or .parquet.", show_default=False)],
    target: Annotated[
        list[str], typer.Option("--target", "-t", help="Column to predict; repeat for several.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run.", show_default=False)],
    method: Annotated[str, typer.Option("--method", "-m", help="See: plausible methods.")] = "ensemble",
    task: Annotated[
        Task,
        typer.Option(
            metavar="NAME",
            help="regression, classification, or auto: text and up to 20 different integers are classes.",
            rich_help_panel=MODEL,
        ),
    ] = Task.auto,
    likelihood: Annotated[
        Likelihood,
        typer.Option(
            metavar="NAME",
            help="gaussian, student-t, heteroscedastic, poisson, negative-binomial, categorical, "
            "bernoulli, or auto: gaussian for numbers, categorical for classes.",
            rich_help_panel=MODEL,
        ),
    ] = Likelihood.auto,
    prior_scale: Annotated[
        float, typer.Option(help="Standard deviation of the Gaussian prior of the weights.", rich_help_panel=MODEL)
    ] = 1.0,
    hidden: Annotated[
        str, typer.Option(help="Widths of the hidden layers; none: a linear model.", rich_help_panel=MODEL)
    ] = "50,50",
    activation: Annotated[
        Activation,
        typer.Option(metavar="NAME", help="relu, tanh, silu or gelu, after each hidden layer.", rich_help_panel=MODEL),
    ] = Activation.relu,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training rows.", rich_help_panel=TRAINING, show_default="the method's")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per step.", rich_help_panel=TRAINING, show_default="the method's")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", rich_help_panel=TRAINING, show_default="the method's")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another setting of the method, such as members=10; repeat for several. See: plausible methods NAME.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the first weights and the training.", rich_help_panel=TRAINING)] = 0,
    device: Annotated[
        Device, typer.Option(metavar="NAME", help="cpu, cuda, mps, or auto: the fastest there is.", rich_help_panel=TRAINING)
    ] = Device.auto,
    compile_: Annotated[
        Compile,
        typer.Option(
            "--compile",
            metavar="NAME",
            help="Compile the training step: yes, no, or auto: where it pays.",
            rich_help_panel=TRAINING,
        ),
    ] = Compile.auto,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint/--no-checkpoint", help="Keep OUT.checkpoint while fitting.", rich_help_panel=TRAINING)
    ] = True,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with an interrupted fit; all else as before.", rich_help_panel=TRAINING, show_default=False
        ),
    ] = False,
    test_fraction: Annotated[float, typer.Option(help="Rows held out for the scores; 0: none.", rich_help_panel=DATA)] = 0.1,
    missing: Annotated[
        Missing,
        typer.Option(
            metavar="NAME",
            help="Missing cells (empty, NA, NaN, null, ?): refuse, drop their rows, or impute the median or a category "
            "of their own with an indicator.",
            rich_help_panel=DATA,
        ),
    ] = Missing.refuse,
    drop_columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="Columns to leave out.", rich_help_panel=DATA, show_default=False)
    ] = None,
    categorical: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Numeric columns that are codes.", rich_help_panel=DATA, show_default=False),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Fit a Bayesian network to a table, print held-out scores and write the run to a folder.

    Numeric columns are standardised, text columns become categories, constant ones are left out; all of it is kept with
    the run. Numeric targets are standardised inside, predictions come in original units.

    Example: plausible fit houses.csv --target price --method ensemble --out run
    """
    from plausible.apps.cli import training, view

    options = training.Options(
        data=data,
        targets=tuple(target),
        method=method,
        out=out,
        task=task.value,
        likelihood=likelihood.value,
        prior_scale=prior_scale,
        hidden=widths(hidden),
        activation=activation.value,
        settings={"epochs": epochs, "batch_size": batch_size, "lr": lr},
        extras=tuple(set_ or ()),
        test_fraction=test_fraction,
        seed=seed,
        missing=missing.value,
        drop_columns=words(drop_columns),
        categorical=words(categorical),
        device=device.value,
        compile="auto" if compile_ is Compile.auto else compile_ is Compile.yes,
        checkpoint=checkpoint,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
    )
    record, metrics = training.fit(options)
    if not quiet:
        view.scores(record, metrics)
        note(f"saved in {out}; next: plausible report {out}, plausible predict {out} new.csv --out predictions.csv")


@app.command(no_args_is_help=True)
@guarded
def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    data: Annotated[Path, typer.Argument(help="A table with the run's input columns.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="CSV file to write; - is standard output.", show_default=False)],
    level: Annotated[float, typer.Option(help="Probability inside lower and upper.")] = 0.9,
    draws: Annotated[int | None, typer.Option(help="Posterior draws to average.", show_default="all there are")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse categories that training has not seen.", show_default=False)
    ] = False,
    device: Annotated[
        Device, typer.Option(metavar="NAME", help="cpu, cuda, mps, or auto: the fastest there is.")
    ] = Device.auto,
    overwrite: Overwrite = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Predict every row of a table with a saved run, in the order of the file.

    Numbers: mean, std, epistemic, aleatoric, lower, upper, in the units of the target; epistemic (what more data would
    tell) and aleatoric (noise) are variances and add up to the square of std. Classes: prediction, p_CLASS, entropy and
    mutual_information (its epistemic part), in nats. Several targets: each column starts with the target's name.

    Example: plausible predict run new.csv --out predictions.csv
    """
    from plausible.apps.cli import prediction

    path = None if str(out) == "-" else out
    rows = prediction.predict(
        run, data, path, level=level, draws=draws, seed=seed, strict=strict, overwrite=overwrite, device=device.value
    )
    if path is not None:
        note(f"{rows} rows written to {out}")


@app.command(no_args_is_help=True)
@guarded
def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file to write; replaced if it is there.", show_default="RUN/report.html"),
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
app.command(no_args_is_help=True)(evidence.evidence)
app.command(no_args_is_help=True)(fidelity.fidelity)


@app.command()
@guarded
def info(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    debug: Debug = False,  # noqa: ARG001
) -> None:
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
    study: Annotated[Path | None, typer.Argument(help="A study in TOML.", show_default=False)] = None,
    datasets: Annotated[
        str | None, typer.Option(metavar="A,B", help="UCI sets; see: plausible data list.", show_default=False)
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names of methods, or labels of the study.", show_default=False)
    ] = None,
    splits: Annotated[
        str | None, typer.Option(metavar="N", help="How many splits, or which (0,3,7), or all.", show_default="all")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="LABEL", help="The one to compare with.", show_default="the first")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.", show_default="the study's, or 0")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes.", show_default="the cores")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("comparison"),
    published: Annotated[bool, typer.Option(help="Show the published results that the study has.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Print a study to start from and stop.", show_default=False)] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Compute everything again.", show_default=False)] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Compare methods on data sets under one protocol: a table, results.json and a page.

    Results are kept fit by fit: a stopped comparison goes on where it was, and a changed method alone is fitted again.
    A fit that fails is shown as failed, the rest goes on, and the exit code is 1.

    Example: plausible compare study.toml --splits 5
    """
    if show:
        from plausible.apps.compare.study import example

        typer.echo(example(), nl=False)
        return
    from plausible.apps.cli import comparing

    asked = comparing.study_of(study, words(datasets), words(methods), splits, reference=reference, seed=seed)
    good = comparing.compare(asked, out, jobs=jobs, overwrite=overwrite, quiet=quiet, published=published)
    if not good:
        raise typer.Exit(1)


app.command(no_args_is_help=True)(sweeping.sweep)


@app.command()
@guarded
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the page.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, rougher results.", show_default=False)] = False,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
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
    """The entry point of the `plausible` command."""
    app()
