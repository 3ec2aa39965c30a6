"""What a fit stores: it comes back as it was, and damage is an error in words."""

import json

import numpy as np
import pytest
import torch

import plausible as pl
from plausible.apps.report.collecting import collect
from plausible.apps.report.findings import RECORD, TENSORS, Findings
from plausible.apps.report.runs import findings_of


def same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("name", ["curve", "several", "counts", "classes", "binary", "chains", "nothing"])
def test_evidence_survives_the_disk(runs, name, tmp_path):
    stored = Findings.read(runs[name])
    stored.write(tmp_path)
    again = Findings.read(tmp_path)
    for field in ("title", "facts", "data", "notes", "log_likelihood", "history", "diagnostics", "draws"):
        assert getattr(again, field) == getattr(stored, field)
    same(again.traces, stored.traces)
    for one, two in zip(again.outputs, stored.outputs, strict=True):
        assert (one.name, one.kind, one.classes, one.metrics, one.examples) == (
            two.name,
            two.kind,
            two.classes,
            two.metrics,
            two.examples,
        )
        same(one.arrays, two.arrays)
        same(one.band, two.band)


def test_stored_predictions_are_those_of_the_posterior(runs):
    import csv

    output = Findings.read(runs["curve"]).outputs[0]
    with (runs["curve"] / "heldout.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for column, array in {
        "actual_y": output.arrays["y"],
        "mean": output.arrays["mean"],
        "row": output.arrays["rows"],
        "lower": output.arrays["quantiles"][0],
        "upper": output.arrays["quantiles"][-1],
    }.items():
        np.testing.assert_allclose([float(row[column]) for row in rows], array, rtol=1e-5, atol=1e-6)
    inside = np.mean([float(r["lower"]) <= float(r["actual_y"]) <= float(r["upper"]) for r in rows])
    assert np.mean(np.abs(2 * output.arrays["pit"] - 1) <= 0.9) == pytest.approx(inside)


def test_examples_are_rows_of_the_table(runs):
    evidence = Findings.read(runs["classes"])
    output = evidence.outputs[0]
    lines = (runs["classes"].parent / "classes.csv").read_text(encoding="utf-8").splitlines()
    assert len(output.examples) == 12
    order = output.ordered
    assert set(output.examples) == {*order[:6].tolist(), *order[-6:].tolist()}
    for index, cells in output.examples.items():
        assert lines[int(output.arrays["rows"][index])].startswith(f'"{cells["x"]}"')


def test_a_band_is_in_the_units_of_the_table(runs):
    output = Findings.read(runs["curve"]).outputs[0]
    band = output.band
    at = np.interp(band["x_heldout"], band["x"], band["mean"])
    np.testing.assert_allclose(at, output.arrays["mean"], atol=0.05)
    assert band["x"][0] < band["x_train"].min() < band["x_train"].max() < band["x"][-1]
    assert len(band["x_train"]) == len(band["y_train"]) == 144
    assert not Findings.read(runs["several"]).outputs[0].band


def test_chains_are_told_apart():
    torch.manual_seed(0)
    x, y = torch.randn(60, 1), torch.randn(60, 1)
    posterior = pl.fit(torch.nn.Linear(1, 1), (x, y), pl.Ensemble(pl.SGLD(epochs=20, lr=1e-3), members=3), progress=False)
    evidence = collect(posterior, x, y)
    values, functions = evidence.traces["values"], posterior.functions(x).double().numpy()
    draws = len(posterior) // 3
    assert values.shape == (3, draws, 4)
    for place, row in enumerate(evidence.traces["inputs"]):
        for chain in range(3):
            np.testing.assert_allclose(values[chain, :, place], functions[chain::3, row, 0])
    assert evidence.diagnostics["rhat"] >= evidence.traces["rhat"].max() - 1e-6
    assert evidence.draws == len(posterior)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / TENSORS).write_bytes((run / TENSORS).read_bytes()[:-9]), "damaged"),
        (lambda run: (run / TENSORS).unlink(), "missing"),
        (lambda run: (run / RECORD).write_text("{"), "damaged"),
        (lambda run: (run / RECORD).write_text((run / RECORD).read_text().replace("continuous", "discrete!!")), "changed"),
        (lambda run: (run / "run.json").write_text("[]"), "damaged"),
    ],
)
def test_damage_is_said(runs, tmp_path, damage, message):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(runs["curve"], run)
    damage(run)
    with pytest.raises(ValueError, match=message):
        pl.report.write(run)


def test_a_later_format_and_nonsense_with_a_right_checksum(runs, tmp_path):
    import shutil

    from plausible.core.storage import read_json, write_json

    run = tmp_path / "run"
    shutil.copytree(runs["curve"], run)
    content = read_json(run / RECORD)
    write_json(run / RECORD, {**content, "format": 99})
    with pytest.raises(ValueError, match="format 99"):
        findings_of(run)
    outputs = json.loads(json.dumps(content["outputs"]))
    for change in ({"kind": "colours"}, {"kind": "classes"}, {"examples": [1]}):
        write_json(run / RECORD, {**content, "outputs": [{**outputs[0], **change}]})
        with pytest.raises(ValueError, match="damaged"):
            findings_of(run)


def test_a_run_of_an_older_version_shows_its_scores(runs, tmp_path, parse):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(runs["classes"], run)
    for name in (RECORD, TENSORS, "report.html"):
        (run / name).unlink()
    page = parse(pl.report.write(run).read_text(encoding="utf-8"))
    assert "were not stored" in page.text
    assert "Brier score" in page.text
    assert "log joint" in page.text
    (run / "metrics.json").unlink()
    page = parse(pl.report.write(run).read_text(encoding="utf-8"))
    assert "No rows were held out" not in page.text
    assert "The scores of this run are missing" in page.text
    assert "Rows were held out of training (96)" in page.text
    shutil.copytree(runs["nothing"], tmp_path / "nothing")
    (tmp_path / "nothing" / RECORD).unlink()
    assert "No rows were held out" in pl.report.write(tmp_path / "nothing").read_text(encoding="utf-8")
