"""Toy densities and a logistic regression: exact laws are laws, drivers take the steps that are meant, numbers are reached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import control_variates, load, toy_chains
from experiments.frame import Request
from experiments.running import Folder, run, wanted

QUIET = Request(seeds=2, device="cpu", compile=False, progress=False)


def test_the_data_of_the_mixture_come_from_its_components() -> None:
    """Var y = 2 + ¼; the average of a draw from each has variance 1."""
    y = toy_chains.sample_mixture(100_000)
    assert float(y.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(y.var()) == pytest.approx(2.25, abs=0.04)


def test_the_exact_posterior_of_the_mixture_has_two_modes_and_no_distance_to_its_own_draws() -> None:
    exact = toy_chains.exact_cells()
    assert float(exact.sum()) == pytest.approx(1.0)
    below, above = exact.sum(0)[: toy_chains.CELLS // 2], exact.sum(0)[toy_chains.CELLS // 2 :]
    assert float(below.sum()) == pytest.approx(0.48, abs=0.02)
    assert float(max(below[-1], above[0])) < 0.6 * float(min(below.max(), above.max()))
    places = torch.multinomial(exact.flatten(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    (low1, high1), (low2, high2) = toy_chains.EXTENT
    one = low1 + (high1 - low1) * (places // toy_chains.CELLS + 0.5) / toy_chains.CELLS
    two = low2 + (high2 - low2) * (places % toy_chains.CELLS + 0.5) / toy_chains.CELLS
    assert toy_chains.total_variation(torch.stack([one, two], 1)) < 0.02
    assert toy_chains.total_variation(torch.stack([one, -two], 1)) > 0.2


def test_friction_takes_away_what_noisy_gradients_add() -> None:
    calm, naive = (toy_chains.run_well(toy_chains.OnWell(c, 8000), QUIET) for c in (3.0, 0.0))
    assert max(calm["total_variation"]) < 0.05  # of which the number of draws makes 0.03
    assert min(naive["total_variation"]) > 0.1
    assert min(naive["square"]) > 1.1 * max(calm["square"])


@pytest.mark.long
@pytest.mark.parametrize("part", ["mixture", "grid"])
def test_the_reduced_numbers_are_reached(part: str, tmp_path: Path) -> None:
    found, request = load("toy-chains"), Request(seeds=3, device="cpu", progress=False)
    cells = [name for name in wanted(found, "reduced", ()) if name.startswith(part)]
    results = run(found, "reduced", cells, Folder(tmp_path, "toy-chains", "reduced"), request)
    word = {"mixture": "mixture", "grid": "25 Gaussians"}[part]
    judged = [claim for claim in found.part("table", "1").judged("reduced", results) if claim.label.startswith(word)]
    assert len(judged) >= 3
    assert {claim.label: claim.verdict for claim in judged if claim.verdict != "met"} == {}


def test_the_curvature_of_the_regression_is_that_of_its_log_joint() -> None:
    settings = control_variates.sizes(None)["tiny"]
    x, y = (part.double() for part in control_variates.data(settings))
    mode = 0.1 * torch.arange(10).double()[None]

    def negative(w: torch.Tensor) -> torch.Tensor:
        f = x @ w.T
        loss = torch.nn.functional.binary_cross_entropy_with_logits(f, y, reduction="sum")
        return loss + w.square().sum() / (2 * control_variates.SCALE**2)

    exact = torch.autograd.functional.hessian(negative, mode).view(10, 10)
    torch.testing.assert_close(control_variates.curvature(x, mode), exact)


@pytest.mark.long
def test_control_variates_lower_the_discrepancy_and_effective_draws_mislead(tmp_path: Path) -> None:
    found, request = load("control-variates"), Request(seeds=3, device="cpu", progress=False)
    run(found, "reduced", ["plain", "start"], Folder(tmp_path, "control-variates", "reduced"), request)
    results = Folder(tmp_path, "control-variates", "reduced").results(found)
    judged = [claim for claim in found.part("table", "1").judged("reduced", results) if claim.verdict != "not run"]
    assert len(judged) == 3
    assert {claim.verdict for claim in judged} == {"holds", "met"}
