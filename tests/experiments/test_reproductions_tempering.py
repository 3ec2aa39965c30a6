"""The evidence by quadrature is an integral, and copies of networks are found again."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from experiments import mode_hopping, small_nets
from experiments.mode_hopping import copies, followed
from experiments.small_nets import NOISE, SCALE, linear_evidence, quadrature

Z = 5.0


def test_output_layer_is_integrated_exactly() -> None:
    x, y = small_nets.rows("two-units")
    units = torch.tanh(torch.linspace(-2, 2, 6, dtype=torch.float64).reshape(3, 2, 1) * x.T)
    features = torch.cat([units, torch.ones_like(units[:, :1])], dim=1)
    covariance = NOISE**2 * torch.eye(len(x), dtype=torch.float64) + SCALE**2 * features.mT @ features
    law = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
    assert torch.allclose(linear_evidence(units, y), law.log_prob(y.squeeze(1)))


@pytest.mark.parametrize(("problem", "side"), [("one-unit", 10), ("two-units", 3), ("classes", 3)])
def test_quadrature_is_the_mean_likelihood_under_the_prior(problem: small_nets.Problem, side: int) -> None:
    """Over many draws from the prior: of the hidden units, and for classes of all weights."""
    x, y = small_nets.rows(problem)
    stream, hidden = torch.Generator().manual_seed(0), 2 if problem == "two-units" else 1
    draws = SCALE * torch.randn(100_000, 2 * hidden + 2, generator=stream, dtype=torch.float64)
    units = torch.tanh(draws[:, :hidden, None] * x.T + draws[:, hidden : 2 * hidden, None])  # [S, H, N]
    if problem == "classes":
        f = draws[:, 2:3] * units.squeeze(1) + draws[:, 3:]
        likelihood = torch.nn.functional.logsigmoid((2 * y.flatten() - 1) * f).sum(1)
    else:
        likelihood = linear_evidence(units, y)
    ratio = (likelihood - quadrature(problem, side)).exp()
    error = float(ratio.std()) / math.sqrt(len(ratio))
    assert error < 0.05
    assert abs(float(ratio.mean()) - 1) < Z * error + 0.03  # grids of the tests are coarse


def test_copies_are_the_same_function() -> None:
    units = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = copies(units)
    assert len(found) == 48
    assert len({tuple(copy.flatten().tolist()) for copy in found}) == 48
    x = torch.tensor([[0.3, -1.2], [2.0, 0.4]], dtype=torch.float64)
    values = torch.einsum("ch,chn->cn", found[..., 3], torch.tanh(found[..., :2] @ x.T + found[..., 2:3]))
    assert torch.allclose(values, values[:1].expand_as(values))


def test_chains_are_followed_from_copy_to_copy() -> None:
    """Chain 0 stays, chain 1 hops to the mirror image of its first unit and back; a draw between two copies counts as neither."""
    best = torch.tensor([[2.0, 0.0, 1.0, 3.0], [0.0, -2.0, 0.5, 2.0]])
    mirrored = best * torch.tensor([[-1.0], [1.0]])
    between = best * torch.tensor([[-0.1], [1.0]])
    draws = torch.stack([best, best, best + 0.1, between, best - 0.1, mirrored, best, best])  # draw by draw, two chains
    posterior = SimpleNamespace(
        chains=2,
        weights=lambda: {"0.weight": draws[..., :2], "0.bias": draws[..., 2], "2.weight": draws[..., 3].unsqueeze(1)},
        statistics={"log_likelihood": torch.zeros(2, 4), "log_prior": torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]])},
    )
    labels = followed(posterior)
    assert labels[:, 0].unique().numel() == 1
    assert (labels[:, 1] == labels[0, 0]).tolist() == [True, True, False, True]


def test_both_samplers_pay_the_same_for_a_draw() -> None:
    hmc, tempering = mode_hopping.METHODS["hmc"], mode_hopping.METHODS["tempering"]
    assert hmc.leapfrogs * hmc.thin == (tempering.leapfrogs + 1) * tempering.temperatures  # type: ignore[attr-defined]
