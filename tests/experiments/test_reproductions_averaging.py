"""Corruptions do what their names say, and scores are those of averaged probabilities."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from experiments import averaging, load
from experiments.averaging import blurred, log_score, noisy, rotated
from experiments.frame import Request
from experiments.running import Folder, run


def test_no_strength_is_no_corruption() -> None:
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for corrupt, strengths in averaging.CORRUPTIONS.values():
        assert strengths[0] == 0
        torch.testing.assert_close(corrupt(x, 0.0), x, rtol=0, atol=1e-5)


def test_a_quarter_turn_is_a_rotation_and_blur_and_noise_have_their_size() -> None:
    x = torch.zeros(1, 1, 28, 28)
    x[0, 0, 5:9, 10:20] = 1.0
    turned = rotated(x, 90.0)
    assert any(torch.allclose(turned, torch.rot90(x, k, (2, 3)), atol=1e-4) for k in (1, 3))
    dot = torch.zeros(1, 1, 28, 28)
    dot[0, 0, 14, 14] = 1.0
    spread = blurred(dot, 1.5)[0, 0]
    place = torch.arange(28.0) - 14
    assert float(spread.sum()) == pytest.approx(1.0, abs=1e-4)
    assert float((spread.sum(0) * place.square()).sum()) == pytest.approx(1.5**2, rel=0.02)
    grey = torch.full((4, 1, 28, 28), 0.5)
    assert float((noisy(grey, 0.1) - grey).std()) == pytest.approx(0.1, rel=0.03)


def test_a_score_is_the_log_of_the_mean_probability() -> None:
    probabilities = torch.zeros(2, 1, 10)
    probabilities[0, 0, 3], probabilities[1, 0, 3] = 0.9, 0.1
    assert log_score(probabilities, torch.tensor([3])) == pytest.approx(math.log(0.5))


def test_levels_and_gains_are_means_by_seed() -> None:
    def scores(first: float, second: float) -> dict[str, list[list[float]]]:
        return {"rotation": [[first, second], [first - 1, second - 3]]}

    found = {"ensemble-2": scores(-1.0, -2.0), "multiswag-1": scores(-2.0, -2.0)}
    results = {"models": {"scores": found, "members": 2}}
    assert averaging.gain("ensemble-last", "multiswag-1")(results) == [1.0, 0.0]
    by_temperature = {"0": [-9.0, -9.0], "0.1": [-1.0, -2.0], "1": [-1.5, -2.0]}
    assert averaging.warmest({"temperatures": {"scores": by_temperature}}) == [0.5, 0.0]


@pytest.mark.long
@pytest.mark.skipif("PLAUSIBLE_DATA" not in os.environ, reason="needs Fashion-MNIST")
def test_modes_and_paths_gain_in_the_reduced_size(tmp_path: Path) -> None:
    found, folder = load("averaging"), Folder(tmp_path, "averaging", "reduced")
    run(found, "reduced", ["models", "paths"], folder, Request(seeds=3, device="cpu", progress=False))
    results = folder.results(found)
    judged = {claim.label: claim for part in found.parts for claim in part.judged("reduced", results)}
    assert judged["corrupted images: the ensemble over SWAG of one mode"].verdict == "holds"
    assert all(claim.ours.value > 0 for label, claim in judged.items() if label.startswith("VGG type"))
