"""Momenta have the law N(0, M), velocities are M⁻¹p, and what is learned from draws is the covariance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plausible.blocks.chains.adaptation import Covariances, Variances
from plausible.blocks.chains.integrators import KINDS, Dense, Diagonal, LowRank, Metric, low_rank_from, metric_for, shrunk

SIZE = 4


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _low_rank(chains: int | None, seed: int = 0) -> LowRank:
    front = () if chains is None else (chains,)
    vectors = torch.linalg.qr(_random(*front, SIZE, 2, seed=seed))[0]
    return LowRank(
        _random(*front, SIZE, seed=seed + 1).exp(),
        torch.cat([vectors, torch.zeros(*front, SIZE, 1, dtype=torch.float64)], -1),
        torch.cat([_random(*front, 2, seed=seed + 2).mul(1.5).exp(), torch.ones(*front, 1, dtype=torch.float64)], -1),
    )


def _cases() -> dict[str, tuple[Metric, Tensor]]:
    """Metrics, shared and by chain, with their inverse masses as matrices `[…, P, P]`."""
    found: dict[str, tuple[Metric, Tensor]] = {}
    for chains in (None, 3):
        front = () if chains is None else (chains,)
        masses = _random(*front, SIZE).exp()
        found[f"diag {chains}"] = Diagonal(masses), torch.diag_embed(masses)
        root = _random(*front, SIZE, SIZE)
        matrix = root @ root.mT + 0.1 * torch.eye(SIZE, dtype=torch.float64)
        found[f"dense {chains}"] = Dense(matrix, torch.linalg.cholesky(matrix)), matrix
        low = _low_rank(chains)
        middle = torch.eye(SIZE, dtype=torch.float64) + low.vectors @ torch.diag_embed(low.values - 1) @ low.vectors.mT
        found[f"lowrank {chains}"] = low, low.scale.unsqueeze(-1) * middle * low.scale.unsqueeze(-2)
    return found


@pytest.mark.parametrize("case", _cases())
def test_laws(case: str) -> None:
    """Velocity M⁻¹p, kinetic energy ½pᵀM⁻¹p, momenta a linear map A of noise with AAᵀ = M; over paths too, and by rows."""
    metric, inverse = _cases()[case]
    momentum = _random(3, SIZE, seed=5)
    velocity = (inverse @ momentum.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(metric.velocity(momentum), velocity)
    torch.testing.assert_close(metric.kinetic(momentum), 0.5 * (momentum * velocity).sum(-1))
    single = type(metric)(*(part.float() for part in metric))
    assert single.kinetic(momentum.float()).dtype == torch.float64

    images = torch.stack(
        [metric.momentum(e.expand(3, SIZE)) for e in torch.eye(SIZE, dtype=torch.float64)], -1
    )  # [3, P, P] = A
    torch.testing.assert_close(images @ images.mT, torch.linalg.inv(inverse).expand(3, SIZE, SIZE))

    path = _random(3, 6, SIZE, seed=6)
    for i in range(6):
        torch.testing.assert_close(metric.velocity(path)[:, i], metric.velocity(path[:, i]))
        torch.testing.assert_close(metric.kinetic(path)[:, i], metric.kinetic(path[:, i]))
    some = torch.tensor([2, 0])
    torch.testing.assert_close(metric.rows(some).velocity(momentum[some]), velocity[some])
    torch.testing.assert_close(metric.rows(some).momentum(momentum[some]), metric.momentum(momentum)[some])


@pytest.mark.parametrize("kind", KINDS)
def test_unit(kind: str) -> None:
    """Every kind begins at M = I."""
    momentum = _random(3, SIZE)
    metric = metric_for(kind, momentum)
    torch.testing.assert_close(metric.velocity(momentum), momentum)
    torch.testing.assert_close(metric.momentum(momentum), momentum)
    torch.testing.assert_close(metric.kinetic(momentum), 0.5 * momentum.square().sum(-1))


def test_shrinkage() -> None:
    """Stan's: n/(n+5) of what was found, and 10⁻³ · 5/(n+5) of the diagonal."""
    matrix = torch.tensor([[2.0, 0.5], [0.5, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(shrunk(matrix, 20.0), 20 / 25 * matrix + 1e-3 * 5 / 25 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(shrunk(matrix.diagonal(), 20.0), shrunk(matrix, 20.0).diagonal())
    count, nothing = torch.tensor(3.0), torch.zeros(1, 2, dtype=torch.float64)
    found = Covariances(count, nothing, torch.zeros(2, 2, dtype=torch.float64)).metric(torch.float32)  # no rank at all
    assert isinstance(found, Dense)
    assert found.factor.isfinite().all()
    assert found.covariance.dtype == torch.float32
    diagonal = Variances(count, nothing, nothing).metric(torch.float32)
    assert isinstance(diagonal, Diagonal)
    assert float(diagonal.inverse_mass[0]) == pytest.approx(5e-3 / 8)


@pytest.mark.parametrize("count", [12, 400])
def test_low_rank_finds_both_ends(count: int) -> None:
    """Wide directions show in draws, narrow ones in gradients: with many or few draws Σ^(−½) M⁻¹ Σ^(−½) is near 1."""
    size = 30
    wide, narrow = torch.linalg.qr(_random(size, 2, seed=3))[0].unbind(-1)
    base = torch.eye(size, dtype=torch.float64) + 99 * wide.outer(wide) - 0.99 * narrow.outer(narrow)
    scale = _random(size, seed=4).exp()
    covariance = scale[:, None] * base * scale
    factor = torch.linalg.cholesky(covariance)
    draws = _random(count, size, seed=7) @ factor.mT
    gradients = -torch.linalg.solve(covariance, draws.mT).mT
    metric = low_rank_from(draws - draws.mean(0), gradients - gradients.mean(0), 10, torch.float64)
    assert metric.vectors.shape == (size, 10)
    assert metric.values.shape == (10,)
    found = metric.velocity(torch.eye(size, dtype=torch.float64))
    half = torch.linalg.inv(factor)
    spread = torch.linalg.eigvalsh(half @ found @ half.mT)
    diagonal = (draws - draws.mean(0)).square().mean(0)
    before = torch.linalg.eigvalsh(half @ diagonal.diag() @ half.mT)
    # condition numbers: steps a trajectory needs go with the root
    assert spread[-1] / spread[0] < (150 if count < size else 4.5), spread
    assert before[-1] / before[0] > 500


def test_low_rank_leaves_the_unit_alone() -> None:
    """Directions whose variance is between ½ and 2 are not kept: a diagonal target needs none."""
    draws = _random(500, 6, seed=1) * torch.arange(1, 7)
    gradients = -draws / torch.arange(1, 7).square()
    metric = low_rank_from(draws, gradients, 4, torch.float64)
    torch.testing.assert_close(metric.values, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(metric.scale, torch.arange(1, 7, dtype=torch.float64), rtol=1e-6, atol=0)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="metric must be one of 'diag', 'dense', 'lowrank', 'unit', got 'full'"):
        metric_for("full", torch.zeros(2))  # type: ignore[arg-type]
