"""Reproductions of dropout methods: what they measure, against brute force, and their reduced forms."""

from __future__ import annotations

import math
import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import plausible as pl
from experiments import dropouts, load, sparse, uci_dropout
from experiments.frame import Request
from experiments.running import Folder, run, wanted
from plausible.blocks.stochastic import Noise
from plausible.blocks.unit_noise import Site, with_noisy_inputs
from plausible.core import random


def reduced(name: str, out: Path, data: bool = True) -> None:
    """Every claim of the reduced form is met."""
    if data and not (Path(os.environ.get("PLAUSIBLE_DATA") or "nowhere")).is_dir():
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


@pytest.mark.slow
def test_concrete_rates_by_the_number_of_rows(tmp_path: Path) -> None:
    reduced("concrete-dropout", tmp_path, data=False)


@pytest.mark.slow
def test_dropout_on_a_small_table(tmp_path: Path) -> None:
    reduced("uci-dropout", tmp_path)


def test_a_bank_is_so_many_networks() -> None:
    torch.manual_seed(0)
    bank = uci_dropout.Bank((0.1, 0.5), splits=3, inputs=4, units=5).eval()
    x = torch.randn(7, 3, 4)
    outputs = bank(x)
    for rate, split in product(range(2), range(3)):
        hidden = (x[:, split] @ bank.first[rate, split] + bank.first_bias[rate, split]).relu()
        alone = hidden @ bank.second[rate, split] + bank.second_bias[rate, split]
        torch.testing.assert_close(outputs[:, 3 * rate + split], alone[:, 0])
    # with dropout: E f of a linear part is kept, at each rate
    bank.train()
    with torch.no_grad():
        bank.first_bias.fill_(50.0)  # every unit is on
        many = torch.stack([bank(x) for _ in range(2000)])
        error = many.std(0) / 2000**0.5
        assert ((many.mean(0) - bank.eval()(x)).abs() < 5 * error).all()
        assert (many.std(0)[:, 3:].mean() / many.std(0)[:, :3].mean()).item() == pytest.approx(3.0, rel=0.15)  # √(α/α')


def test_scores_are_those_of_the_protocol() -> None:
    """Log (1/T) Σ N(y; f, 1/τ) in the units of y, for each rate and split, from the draws that the posterior gives."""
    torch.manual_seed(0)
    rows = [(torch.randn(30, 2).double(), 5 + 3 * torch.randn(30, 1).double()) for _ in range(2)]
    settings = uci_dropout.Grid("boston", splits=2, epochs=1, draws=150, units=3)
    found, _ = uci_dropout.scored(settings, rows, rows, Request(seeds=1, device="cpu", compile=False, progress=False), 0)
    scores = torch.tensor(found["ll"])
    assert scores.shape == (4, 3, 2)
    # of the mean alone, which T draws of so small rates hardly leave: N(y; f̄, 1/τ) on average
    for t, tau in enumerate(uci_dropout.PRECISIONS["boston"]):
        point = 0.5 * (math.log(tau) - math.log(2 * math.pi) - tau * torch.tensor(found["rmse"][0]).square())
        torch.testing.assert_close(scores[0, t], point, rtol=0, atol=0.05)


def test_the_mask_of_the_figure_is_that_of_training() -> None:
    rate = torch.tensor(0.3)
    weights = with_noisy_inputs({"w": torch.ones(1, 1)}, {"w": Site(1, 1)}, {"w": rate}, Noise(random.key(0), 0), "concrete")
    drawn = nn.functional.linear(torch.ones(20_000, 1), weights["w"])[:, 0] * (1 - rate)
    u = (torch.arange(20_000) + 0.5) / 20_000
    torch.testing.assert_close(drawn.sort().values, dropouts.mask(u, 0.3, 0.1).sort().values, rtol=0, atol=0.08)


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
