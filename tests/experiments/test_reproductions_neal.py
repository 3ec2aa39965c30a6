"""Neal's priors and data as his software has them, and what is made of chains over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import plausible as pl
from experiments import in_between, load, neal_hmc
from experiments.frame import Request
from experiments.mackay import network
from experiments.running import Folder
from plausible.blocks.chains.gibbs import Hierarchy


@pytest.mark.parametrize(
    ("name", "groups", "rows"),
    [
        ("regression", ["0.weight", "0.bias", "2.weight"], 100),
        ("binary", ["0.weight", "0.bias", "2.weight"], 300),
        ("classes", ["0.weight", "0.bias", "2.weight", "2.bias"], 400),
        ("classes-ard", [*(f"0.weight[{i}]" for i in range(4)), "0.bias", "2.weight", "2.bias"], 400),
        ("robot-ard", ["0.weight[0]", "0.weight[1]", "0.bias", "2.weight"], 200),
    ],
)
def test_groups_of_weights_have_the_precisions_of_neals_specification(
    name: str, groups: list[str], rows: int, data_folder: Path
) -> None:
    data, units, prior, _ = neal_hmc.NETWORKS[name]
    (x, _), (held_out, _), likelihood, outputs = neal_hmc.rows(data)
    assert (len(x), len(held_out)) == (rows, 400 if data == "robot_arm" else 1000)
    assert outputs == {"neal_classes": 3, "robot_arm": 2}.get(data, 1)
    weights = {n: p.detach() for n, p in network((units,), x.shape[1], outputs).named_parameters()}
    if isinstance(likelihood, pl.likelihoods.Gaussian):
        weights["likelihood.log_scale"] = torch.zeros((), dtype=torch.float64)
    found = Hierarchy.of(prior, weights)
    assert found is not None
    assert sorted(found.names) == sorted(groups)
    assert torch.allclose(found.shape / found.rate, torch.full_like(found.rate, 1 / 0.05**2))
    assert torch.allclose(2 * found.shape, torch.full_like(found.shape, 0.5))
    out = found.label == found.names.index("2.weight")
    assert torch.equal(found.factor[out], torch.full((units * outputs,), float(units), dtype=torch.float64))


def test_errors_are_those_of_the_mean_over_all_chains(data_folder: Path) -> None:
    data, (x, y), likelihood, outputs = neal_hmc.rows("neal_classes")
    module = network((4,), 4, outputs).float()
    method = pl.HMC(draws=8, chains=2, warmup=8, leapfrogs=5)
    prior = neal_hmc.prior(offset=None)
    posterior = pl.fit(module, data, method, likelihood=likelihood, prior=prior, progress=False, compile=False)
    found = neal_hmc.measured(posterior, x, y)
    probabilities = posterior.functions(x, None).softmax(-1)
    assert found["error"] == pytest.approx(100 * float((probabilities.mean(0).argmax(-1) != y).double().mean()))
    each = [100 * float((probabilities[c::2].mean(0).argmax(-1) != y).double().mean()) for c in range(2)]
    assert found["worst_chain"] == pytest.approx(max(each))
    expected = probabilities.mean(0).gather(1, y[:, None]).log().mean()
    assert found["log_likelihood"] == pytest.approx(float(expected), rel=1e-4)
    assert math.isnan(found["noise"])
    assert found["gradients"] == pytest.approx(2 * 8 * 5, rel=0.5)


def test_inputs_that_carry_nothing_are_held_against_the_weakest_that_does() -> None:
    scales = {f"0.weight[{i}]": [[0.0, 0.0, value, 9.0, 9.0]] for i, value in enumerate((2.0, 4.0, 0.1, 0.3))}
    assert neal_hmc.apart({"classes-ard": {"scales": scales}}) == [pytest.approx(0.15)]
    assert neal_hmc.apart({}) is None


@pytest.mark.slow
def test_tables_have_a_row_for_each_method_and_group(tiny: Callable[[str], Path]) -> None:
    found = load("neal-hmc")
    results = Folder(tiny("neal-hmc"), "neal-hmc", "tiny").results(found)
    errors, chains, scales = neal_hmc.sheet(results)
    assert [row[:2] for row in errors.rows[:2]] == [("curve, 8 units", "HMC"), ("curve, 8 units", "Laplace")]
    assert len(chains.rows) == 4
    assert len(scales.rows) == 3 + 3 + 4 + 7
    assert len(results["regression"]["curve"]["mean"]) == len(neal_hmc.GRID)
    assert results["regression-laplace"]["starts"] == 3


def test_chains_of_the_clusters_say_how_far_to_trust_them() -> None:
    settings = in_between.cell("curve", "hmc").settings["tiny"]
    found = in_between.run(settings, Request(seeds=2, device="cpu", compile=False, progress=False))
    assert [len(found[key]) for key in ("rhat", "ess", "divergences", "std", "between")] == [2] * 5
    assert all(value >= 0.9 for value in found["rhat"])
    assert found["std"][0] != found["std"][1]
