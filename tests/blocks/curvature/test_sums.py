"""Sums of curvatures: exact where they can be, and of the right trace, scale and order where not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.curvature.estimating import estimate
from plausible.blocks.curvature.kronecker import Kronecker
from plausible.blocks.curvature.structures import Curvature, added
from plausible.core.data import ArrayData
from plausible.core.model import Model
from plausible.core.weights import Weights

STRUCTURES = ("diag", "block", "kron", "ekfac", "full", "lowrank")


class Words(nn.Module):
    """A table, an adapter-like pair of matrices over positions, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(7, 3), nn.Linear(3, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.first(self.words(x)))).mean(1))


def problem(rows: int, seed: int) -> tuple[Model, ArrayData]:
    torch.manual_seed(0)
    network = Words().double()
    stream = torch.Generator().manual_seed(seed)
    batch = pl.Batch(torch.randint(7, (rows, 5), generator=stream), torch.randint(3, (rows,), generator=stream))
    model = Model.build(network, pl.likelihoods.Categorical(), pl.priors.Gaussian(), batch, num_data=rows)
    return model, ArrayData(batch, rows)


def curvature(structure: str, seed: int = 0, rows: int = 12) -> Curvature:
    model, data = problem(rows, seed)
    return estimate(model, model.initial, data, structure=structure, rank=60)  # type: ignore[arg-type]


def matrix(of: Curvature, precision: float = 0.0, scale: float = 1.0) -> Tensor:
    """H written down, from its products with unit vectors."""
    model, _ = problem(4, 0)
    own = {name: model.initial[name] for name in of.names}
    size = sum(value.numel() for value in own.values())
    parts = torch.eye(size, dtype=torch.float64).split([value.numel() for value in own.values()], 1)
    unit: Weights = {n: part.reshape(size, *v.shape) for (n, v), part in zip(own.items(), parts)}
    taus = {name: torch.tensor(precision, dtype=torch.float64) for name in own}
    found = of.product(unit, taus, torch.tensor(scale, dtype=torch.float64))
    return torch.cat([found[name].reshape(size, -1) for name in own], 1)


@pytest.mark.parametrize("structure", ["diag", "block", "full", "lowrank"])
def test_sums_are_exact(structure: str) -> None:
    first, second = curvature(structure, 1), curvature(structure, 2)
    torch.testing.assert_close(matrix(added(first, second, (0.5, 2.0))), 0.5 * matrix(first) + 2 * matrix(second))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_equal_terms_add_up_and_the_trace_is_kept(structure: str) -> None:
    first, second = curvature(structure, 1), curvature(structure, 2)
    torch.testing.assert_close(matrix(added(first, first)), 2 * matrix(first))
    together = matrix(added(first, second))
    torch.testing.assert_close(together.trace(), matrix(first).trace() + matrix(second).trace())
    torch.testing.assert_close(together, together.T)
    assert float(torch.linalg.eigvalsh(together).min()) > -1e-9


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_sums_are_nearer_than_added_factors(structure: str) -> None:
    first, second = curvature(structure, 1), curvature(structure, 2)
    exact = matrix(first) + matrix(second)
    ours = (matrix(added(first, second)) - exact).norm() / exact.norm()
    alone = (2 * matrix(first) - exact).norm() / exact.norm()
    assert float(ours) < 0.5 * float(alone)
    assert float(ours) < 0.2


def test_other_weights_and_other_structures_are_refused() -> None:
    with pytest.raises(ValueError, match="curvatures of other weights cannot be added"):
        added(curvature("block"), curvature("full"))
    with pytest.raises(ValueError, match="kinds 'diagonal' and 'dense' cannot be added: use one structure="):
        added(curvature("diag"), curvature("block"))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_kronecker_sums_keep_both_partial_traces(structure: str) -> None:
    """What is kept of a sum over the inputs of a layer, and over its outputs, is exact."""
    first, second = curvature(structure, 1), curvature(structure, 2)
    together = added(first, second)
    for number, (one, two, block) in enumerate(zip(first.blocks, second.blocks, together.blocks)):
        if not isinstance(block, Kronecker) or block.into is None:
            continue
        for trace in (inner, outer):
            torch.testing.assert_close(trace(block), trace(one) + trace(two), msg=lambda text, n=number: f"block {n}: {text}")


def inner(block: Kronecker) -> Tensor:
    return torch.einsum("gij,goj,gkj->gik", block.into, block.values, block.into)


def outer(block: Kronecker) -> Tensor:
    return torch.einsum("gpo,goj,gqo->gpq", block.out, block.values, block.out)
