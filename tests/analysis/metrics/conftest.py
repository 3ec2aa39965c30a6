"""Predictions to measure: probabilities that are neither right nor calibrated, and mixtures over draws."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from plausible.core.likelihoods import Categorical, Gaussian
from plausible.posteriors.predictive import Predictive


class Classified(NamedTuple):
    logits: Tensor  # [S, N, C] float64
    predictive: Predictive
    probs: Tensor  # [N, C]
    y: Tensor  # [N]


@pytest.fixture(params=[0, 1])
def classified(request: pytest.FixtureRequest) -> Classified:
    """300 inputs, 4 classes, 5 draws; two thirds of the labels follow the probabilities, the others are noise."""
    generator = torch.Generator().manual_seed(request.param)
    logits = 1.5 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    logits = logits + torch.randn(5, 300, 4, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1).mean(0)
    y = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    y[::3] = torch.randint(4, (100,), generator=generator)
    return Classified(logits, Predictive.from_functions(logits, Categorical()), probs, y)


class Measured(NamedTuple):
    means: Tensor  # [S, N, 2] float64
    predictive: Predictive
    y: Tensor  # [N, 2]


@pytest.fixture
def measured() -> Measured:
    """200 inputs, two outputs with noise 0.5 and 2, 6 draws; targets drawn from the predictive itself."""
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(6, 200, 2, generator=generator, dtype=torch.float64)
    predictive = Predictive.from_functions(means, Gaussian((0.5, 2.0)))
    return Measured(means, predictive, predictive.sample(1, seed=3)[0])


@pytest.fixture(scope="session")
def hmc() -> tuple[np.ndarray, np.ndarray]:
    """The predictive of Hamiltonian Monte Carlo for CIFAR-10's test images (Izmailov et al. 2021), and their classes."""
    import os

    root = Path(os.environ.get("PLAUSIBLE_DATA", "")) if os.environ.get("PLAUSIBLE_DATA") else None
    if root is None or not (root / "hmc").is_dir():
        pytest.skip("PLAUSIBLE_DATA names no folder with hmc/")
    probs = np.load(root / "hmc/cifar10_resnet20_frn_predictive.npz")["probs"]
    with lzma.open(root / "cifar10/test_batch.bin.xz") as file:
        records = np.frombuffer(file.read(), np.uint8).reshape(-1, 3073)
    return probs, records[:, 0].astype(np.int64)
