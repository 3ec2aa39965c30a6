"""`plausible diagnose`: the chains of a run → a table, a verdict in plain words, figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plausible.apps.cli.errors import guarded, note
from plausible.apps.cli.options import Debug, Encoding, Markdown, Run, option

if TYPE_CHECKING:
    from plausible.apps.cli.runs import Record
    from plausible.apps.report.verdicts import Verdict
    from plausible.posteriors.draws import DrawsPosterior

ROWS = 50
"""Inputs at which functions are judged at most, evenly spaced over the table."""


@guarded
def diagnose(
    run: Run,
    data: Annotated[
        Path | None, option(f"A table with the run's input columns: up to {ROWS} of its rows are looked at.")
    ] = None,
    top: Annotated[int, option("Rows of the table: those that have converged least.", shown=True)] = 10,
    plots: Annotated[Path | None, option("Draw traces, ranks, autocorrelations, energies.", metavar="FOLDER")] = None,
    arviz: Annotated[Path | None, option("Write the draws as NetCDF, for arviz.", metavar="FILE")] = None,
    encoding: Encoding = None,
    markdown: Markdown = False,
    debug: Debug = False,  # noqa: ARG001
) -> None:
    """Say whether the chains of a run have converged: R̂, effective draws, standard errors, divergences, energies.

    With --data in function space, f(x) at rows of the table, where permuting hidden units does not matter. Without it the table
    shows the weights, and functions are judged by what the fit stored about its held-out rows.

    Example: plausible diagnose run --data houses.csv --plots figures
    """
    from plausible.apps.cli import runs, view
    from plausible.posteriors.diagnostics import summary_table
    from plausible.posteriors.verdicts import judged

    if top < 1:
        raise ValueError(f"--top must be at least 1, got {top}")
    record, posterior = runs.load(run)
    chains = _chains(record, posterior)
    x, rows = (None, []) if data is None else _inputs(record, data, encoding)
    weights = chains.diagnostics()
    known = _stored(run) or weights if x is None else chains.diagnostics(x)
    table = summary_table(chains, x).worst(top)
    if x is not None:  # in words of the file: the network's output at a row
        names = (re.sub(r"^f\(x(\d+)\)", lambda match: f"f(row {rows[int(match[1])]})", name) for name in table.names)
        table = replace(table, names=tuple(names))
    view.show(table, markdown)
    functions = x is not None or known is not weights
    verdicts = judged(known, weights if functions else None, functions=functions)
    typer.echo("\n".join(["", *numbers(known, weights), "", *map(said, verdicts)]))
    if plots is not None:
        note(f"figures: {', '.join(str(path) for path in _drawn(chains, x, plots))}")
    if arviz is not None:
        try:
            exported = chains.to_arviz(x)
        except ImportError as error:
            raise ValueError(f"--arviz: {error}") from error
        arviz.parent.mkdir(parents=True, exist_ok=True)
        exported.to_netcdf(str(arviz))
        note(f"draws: {arviz}")


def said(verdict: Verdict) -> str:
    """A verdict in one paragraph."""
    return " ".join(part for part in (verdict.headline, verdict.detail, verdict.advice) if part)


def numbers(known: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """What is known of the run as a whole, in a few lines."""
    lines = []
    if "rhat" in known:
        where = "f(x)" if known is not weights else "weights"
        beside = f" (weights: {weights['rhat']:.3f})" if known is not weights and "rhat" in weights else ""
        lines.append(
            f"{where}: worst R̂ {known['rhat']:.3f}{beside}, effective draws at least {known['ess_bulk']:,.0f} in the bulk and "
            f"{known['ess_tail']:,.0f} in the tails"
        )
    words = {
        "divergences": "divergences {:,}",
        "acceptance": "acceptance {:.2f}",
        "step_size": "step size {:.3g}",
        "leapfrogs": "gradients a transition {:,.0f}",
        "ebfmi": "least E-BFMI {:.2f}",
    }
    if "acceptance" in known:
        told = [form.format(known[name]) for name, form in words.items() if known.get(name) is not None]
        lines.append("transitions: " + ", ".join(told))
    if "seconds" in known:
        rate = f", {known['ess_per_second']:,.1f} effective draws a second" if "ess_per_second" in known else ""
        lines.append(f"time: {known['seconds']:,.3g} s{rate}")
    return lines


def _chains(record: Record, posterior: Any) -> DrawsPosterior:
    from plausible.apps.report.words import plural
    from plausible.posteriors.diagnostics import LEAST
    from plausible.posteriors.draws import DrawsPosterior

    if isinstance(posterior, DrawsPosterior) and posterior.ordered and len(posterior) // posterior.chains >= LEAST:
        return posterior
    what = plural(len(posterior), "draw") if isinstance(posterior, DrawsPosterior) else "no stored draws"
    raise ValueError(
        f"a run by {record.method} with {what} has no chains to diagnose; samplers such as nuts, hmc and sgld have some"
    )


def _inputs(record: Record, data: Path, encoding: str | None) -> tuple[Any, list[int]]:
    """Some rows of the table as inputs of the network, and their numbers in the file."""
    import numpy as np
    import torch

    from plausible.apps.files import read_table

    table = read_table(data, encoding)
    features = record.preprocessor.transform(table)
    for line in features.notes:
        note(line)
    if not len(features.inputs):
        raise ValueError(f"every row of {data} has missing values, and this run leaves such rows out")
    places = np.unique(np.linspace(0, len(features.inputs) - 1, ROWS).astype(int))
    numbered = table[record.preprocessor.names[0]]
    rows = [numbered.row(int(row)) for row in np.flatnonzero(features.kept)[places]]
    return torch.from_numpy(features.inputs[places]), rows


def _stored(run: Path) -> dict[str, Any] | None:
    """Diagnostics of function values that the fit stored, where it has."""
    from plausible.apps.report.findings import RECORD, Findings

    known = dict(Findings.read(run).diagnostics) if (run / RECORD).is_file() else {}
    return known if known.get("rhat") is not None else None


def _drawn(chains: DrawsPosterior, x: Any, folder: Path) -> list[Path]:
    from plausible.apps import plots
    from plausible.apps.plots.base import new_figure, save_figure
    from plausible.posteriors.diagnostics import has_momenta

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--plots {folder} is a file; name a folder")
    wanted: dict[str, Any] = {"trace": lambda ax: plots.trace(chains, x, ax=ax)}
    if chains.chains > 1:
        wanted["rank"] = lambda ax: plots.rank(chains, x, ax=ax)
    wanted["autocorrelation"] = lambda ax: plots.autocorrelation(chains, x, ax=ax)
    if has_momenta(chains, getattr(chains, "statistics", {})):
        wanted["energy"] = lambda ax: plots.energy(chains, ax=ax)
    files = []
    for name, draw in wanted.items():
        try:
            figure, ax = new_figure()
        except ImportError as error:
            raise ValueError(f"--plots: {error}") from error
        draw(ax)
        files += save_figure(figure, folder / name, ("png",))
    return files
