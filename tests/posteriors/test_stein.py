"""The Stein discrepancy of draws: small for exact ones, and least where steps are neither too small nor too large."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import plausible as pl
from plausible.core.storage import MemoryDraws
from plausible.diagnostics import stein_discrepancies
from plausible.posteriors.draws import DrawsPosterior
from plausible.testing import LinearGaussian

PROBLEM = LinearGaussian(num_data=200)
LIMIT = 4 / float(torch.linalg.eigvalsh(PROBLEM.precision()).max())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y, _ = PROBLEM.data()
    return x.float(), y.float()


def drawn(count: int, *, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> DrawsPosterior:
    """Draws around the exact mean, `scale` times as wide, moved by so many standard deviations."""
    like: Any = PROBLEM.fit(pl.MAP(epochs=1))
    mean, covariance = PROBLEM.posterior()
    root = torch.linalg.cholesky(covariance)
    stream = torch.Generator().manual_seed(seed)
    noise = scale * torch.randn(count, 3, generator=stream, dtype=torch.float64) + shift
    draws = (mean + noise @ root.T).float().unsqueeze(1)
    return DrawsPosterior(like.method, like.model, like.run, MemoryDraws({"weight": draws}))


def test_of_exact_draws_it_falls_with_their_number() -> None:
    few, many = (
        sum(stein_discrepancies([drawn(count, seed=k)], data(), length=0.1)[0] ** 2 for k in range(4)) for count in (50, 800)
    )
    assert few / many == pytest.approx(16, rel=0.4)


@pytest.mark.parametrize("wrong", [{"scale": 1.6}, {"scale": 0.4}, {"shift": 0.7}])
def test_it_sees_laws_that_are_too_wide_too_narrow_or_elsewhere(wrong: dict[str, float]) -> None:
    right, other = stein_discrepancies([drawn(400), drawn(400, **wrong)], data())
    assert other > 1.8 * right


def test_it_finds_the_step_where_effective_draws_mislead() -> None:
    rates = [share * LIMIT for share in (1e-4, 0.2, 0.9)]
    chains = [PROBLEM.fit(pl.SGLD(epochs=2500, batch_size=None, lr=lr, burn_in=0.2, thin=10)) for lr in rates]
    found = stein_discrepancies(chains, data())
    assert found[1] < 0.5 * min(found[0], found[2])
    effective = [chain.diagnostics()["ess_bulk"] for chain in chains]
    assert effective[2] > 1.5 * effective[1]
    precision = PROBLEM.precision()
    whitened = (chains[2].weights()["weight"].squeeze(1).double() - PROBLEM.posterior()[0]) @ torch.linalg.cholesky(precision)
    assert float(whitened.square().mean()) > 2  # the bias of the step that effective draws would choose


def test_what_is_no_law_of_the_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="a list of posteriors"):
        stein_discrepancies([], data())
    with pytest.raises(ValueError, match="length must be positive"):
        stein_discrepancies([drawn(5)], data(), length=math.nan)
    with pytest.raises(ValueError, match="all draws are the same"):
        stein_discrepancies([PROBLEM.fit(pl.MAP(epochs=1))], data())
    with pytest.raises(TypeError, match="has no chains"):
        stein_discrepancies([PROBLEM.fit(pl.Laplace())], data())
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    normed = pl.fit(net, data(), pl.SGLD(epochs=2, lr=1e-5), progress=False, compile=False)
    with pytest.raises(ValueError, match="differs between draws"):
        stein_discrepancies([normed], data())
