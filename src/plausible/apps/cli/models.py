"""`plausible evidence`: saved runs of the same data, compared by the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Markdown, numbers, option

if TYPE_CHECKING:
    from plausible.analysis.evidence import Comparison


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
