"""`plausible diagnose` and what `plausible fit` says about chains when it has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from plausible.apps.cli import app, runs
from plausible.apps.report.findings import Findings
from plausible.posteriors.diagnostics import summary_table

SHORT = (
    "--set",
    "draws=60",
    "--set",
    "warmup=40",
    "--set",
    "leapfrogs=4",
    "--set",
    "chains=2",
    "--hidden",
    "3",
    "--compile",
    "no",
)


def plausible(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A table, the folder of a short run of chains on it, and what was said while it was fitted."""
    folder = tmp_path_factory.mktemp("diagnose")
    rng = np.random.default_rng(0)
    x = rng.normal(size=70)
    lines = ["size,price", *(f"{a:.4f},{np.sin(a) + 0.1 * rng.normal():.4f}" for a in x)]
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    result = plausible("fit", table, "-t", "price", "-o", folder / "run", "-m", "hmc", *SHORT)
    assert result.exit_code == 0, result.output
    return table, folder / "run", result.output


def test_fit_says_whether_chains_agree(fitted: Any) -> None:
    _, run, said = fitted
    rhat = Findings.read(run).diagnostics["rhat"]
    shown = f"{rhat:.3f}" if rhat <= 1.05 else f"{rhat:.2f}"
    assert f"R̂ is {shown}" in said or f"R̂ of f(x) is {shown}" in said
    assert Findings.read(run).diagnostics["rhat_weights"] > 1


def test_with_data_the_table_is_that_of_functions(fitted: Any, tmp_path: Path) -> None:
    table, run, _ = fitted
    result = plausible(
        "diagnose", run, "--data", table, "--top", 3, "--plots", tmp_path / "figures", "--arviz", tmp_path / "run.nc"
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "2 chains of 60 draws"
    assert sum(line.startswith("f(row ") for line in lines) == 3
    record, posterior = runs.load(run)
    from plausible.apps.files import read_table

    places = np.unique(np.linspace(0, 69, 50).astype(int))
    x = record.preprocessor.transform(read_table(table)).inputs[places]
    found = summary_table(posterior, x).worst(1)
    assert f"f(row {places[int(found.names[0][3:-1])] + 1})" in lines[2]
    assert lines[2].endswith(f"{float(found['rhat'][0]):.3f}")
    assert f"worst R̂ {posterior.diagnostics(x)['rhat']:.3f} (weights: {posterior.diagnostics()['rhat']:.3f})" in result.stdout
    assert "acceptance" in result.stdout
    pictures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert pictures == ["autocorrelation.png", "energy.png", "rank.png", "trace.png"]
    assert (tmp_path / "run.nc").stat().st_size > 1000


def test_without_data_weights_are_shown_and_functions_judged_by_what_was_stored(fitted: Any) -> None:
    _, run, _ = fitted
    result = plausible("diagnose", run, "--markdown", "--top", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "| quantity | mean | sd | mcse | ESS bulk | ESS tail | R̂ |"
    assert lines[2].startswith(("| 0.", "| 2.", "| likelihood."))
    assert f"f(x): worst R̂ {Findings.read(run).diagnostics['rhat']:.3f}" in result.stdout


def test_report_of_chains_shows_energies(fitted: Any) -> None:
    _, run, _ = fitted
    assert plausible("report", run).exit_code == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Energies." in page
    assert "least E-BFMI" in page
    assert "over 100 transitions" in page


def test_runs_without_chains_are_refused(fitted: Any, tmp_path: Path) -> None:
    table, run, _ = fitted
    for method, words in (("map", "with 1 draw"), ("mean-field", "with no stored draws")):
        out = tmp_path / method
        assert (
            plausible("fit", table, "-t", "price", "-o", out, "-m", method, "--epochs", 1, "--hidden", 2, "-q").exit_code == 0
        )
        result = plausible("diagnose", out)
        assert result.exit_code == 1
        assert f"a run by {method} {words} has no chains to diagnose" in result.stderr
    result = plausible("diagnose", run, "--top", 0)
    assert result.exit_code == 1
    assert "--top must be at least 1" in result.stderr
