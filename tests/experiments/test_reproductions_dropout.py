"""Reproductions of dropout methods: what they measure, against brute force, and their reduced forms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import plausible as pl
from experiments import load, sparse
from experiments.frame import Request
from experiments.running import Folder, run, wanted


def reduced(name: str, out: Path) -> None:
    """Every claim of the reduced form is met."""
    if not (Path(os.environ.get("PLAUSIBLE_DATA") or "nowhere")).is_dir():
        pytest.skip("PLAUSIBLE_DATA is not there")
    found = load(name)
    request = Request(found.seeds["reduced"], device="cpu", progress=False)
    results = run(found, "reduced", wanted(found, "reduced", ()), Folder(out, name, "reduced"), request)
    judged = [one for part in found.parts for one in part.judged("reduced", results)]
    assert judged
    assert [one for one in judged if one.verdict in ("not met", "refuted", "not run")] == []


@pytest.mark.slow
def test_sparse_networks_of_digits(tmp_path: Path) -> None:
    reduced("sparse", tmp_path)


def test_late_rates_are_constant_and_then_fall_to_zero() -> None:
    rate = sparse.Late(0.1)
    assert [round(float(rate(torch.tensor(step), 100)), 6) for step in (0, 50, 75, 100)] == [0.1, 0.1, 0.05, 0.0]


def test_pictures_show_what_is_left() -> None:
    (row,) = sparse.shaded(torch.tensor([[0.0, 1.0, -1.0, 0.5, 1e-6, -1e-6]]))
    assert row == "mya" + "sn" + "l"
    assert sparse.shaded(torch.zeros(2, 3)) == ["mmm", "mmm"]


@pytest.mark.filterwarnings("ignore:.*predicts its own rows")
def test_what_is_measured_of_a_compressed_network() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 1, 2, 2), torch.randint(3, (40,))
    dense = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    posterior = pl.fit(dense, (x, y), pl.SparseVD(epochs=3), compile=False, progress=False)
    masks = {name: torch.rand_like(posterior.means[name]) < 0.5 for name in ("1.weight", "3.weight")}
    found = sparse.measured(posterior.masked(masks), dense, (x, y), (x, y), batch=5)
    left = [int(mask.sum()) for mask in masks.values()]
    assert found["compression"] == pytest.approx(42 / sum(left))
    assert found["by_layer"] == pytest.approx([100 - 100 * left[0] / 24, 100 - 100 * left[1] / 18])
    weights = {name: torch.where(masks[name], mean, 0.0) for name, mean in posterior.means.items()}
    wrong = (posterior.model.outputs({**posterior.points, **weights}, x).argmax(-1) != y).float().mean()
    assert found["error"] == found["training_error"] == pytest.approx(100 * float(wrong), abs=1e-4)
    assert found["faster"] == pytest.approx(found["dense_ms"] / found["compressed_ms"])
