"""What a pass for the curvature says besides, against a pass of its own; columns together against one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import plausible as pl
from plausible.blocks.curvature.estimating import Tally, estimate
from plausible.blocks.curvature.linearising import Linearisation, can_batch, gradients
from plausible.blocks.curvature.products import log_joint_gradient, log_prior_gradient
from plausible.core.data import as_data
from plausible.core.model import Model
from tests.helpers.networks import NETWORKS, build


@pytest.mark.parametrize("name", NETWORKS)
def test_likelihood_and_gradient_are_those_of_a_pass_of_their_own(name: str) -> None:
    net, x = build(name, rows=7)
    y, weight = torch.randint(0, 2, (7,)), torch.rand(7).double() + 0.5
    data = as_data((x, y, weight), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(0.7), data.all(), num_data=7)
    point = {**model.initial, **model.buffers}
    value, gradient = log_joint_gradient(model, point, data)
    prior, pull = log_prior_gradient(model, point)
    for structure, curvature in (("diag", "ggn"), ("kron", "empirical"), ("ekfac", "ggn")):
        tally = Tally()
        estimate(model, point, data, structure=structure, curvature=curvature, chunk=3, tally=tally)  # type: ignore[arg-type]
        torch.testing.assert_close(tally.log_likelihood, value - prior)
        for weights, found in tally.gradient.items():
            torch.testing.assert_close(found, gradient[weights] - pull[weights], msg=lambda m, n=weights: f"{n}: {m}")
        assert set(tally.gradient) == set(model.initial)


def test_a_last_layer_alone_with_masked_targets() -> None:
    torch.manual_seed(0)
    net, x, y = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(9, 3), torch.randn(9, 2))
    mask = torch.rand(9, 2) < 0.6
    data = as_data((x, y), dtype=torch.float64, device=torch.device("cpu"), mask=mask)
    likelihood = pl.likelihoods.Gaussian(scale=0.5)
    model = Model.build(net, likelihood, pl.priors.Gaussian(), data.all(), num_data=9, where="last")
    tally = Tally()
    estimate(model, model.initial, data, chunk=4, tally=tally)
    value, gradient = log_joint_gradient(model, model.initial, data)
    prior, pull = log_prior_gradient(model, model.initial)
    torch.testing.assert_close(tally.log_likelihood, value - prior)
    assert set(tally.gradient) == {"2.weight", "2.bias"}
    for name, found in tally.gradient.items():
        torch.testing.assert_close(found, gradient[name] - pull[name])


class Once(torch.autograd.Function):
    """x³, by an operation that has no rule for several gradients at once."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return torch.from_numpy(grad.numpy() * 3 * x.detach().numpy() ** 2)


class Cube(nn.Module):
    """`Once` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("cube", [True, False])
def test_columns_together_and_one_after_the_other(cube: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), Cube() if cube else nn.Tanh(), nn.Linear(4, 2)).double()
    x, columns = torch.randn(5, 3).double(), torch.randn(3, 5, 2).double()

    def graph() -> tuple[Tensor, list[Tensor]]:
        first = net[0](x)
        return net[2](net[1](first)), [first, torch.zeros(2, 2, requires_grad=True).double()]

    assert can_batch(*graph(), columns) is not cube
    single = gradients(*graph(), columns, together=False)
    outputs, inner = graph()
    for k, column in enumerate(columns):
        own = torch.autograd.grad((outputs * column).sum(), inner[0], retain_graph=True)[0]
        torch.testing.assert_close(single[0][k], own)
    assert not single[1].any()
    if not cube:
        for a, b in zip(gradients(*graph(), columns, together=True), single):
            torch.testing.assert_close(a, b)


def test_a_network_with_such_an_operation_is_linearised_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), Cube(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3).double(), torch.randint(0, 2, (5,))
    data = as_data((x, y), dtype=torch.float64, device=torch.device("cpu"))
    model = Model.build(net, pl.likelihoods.Categorical(), pl.priors.Gaussian(), data.all(), num_data=5)
    at = Linearisation(model, model.initial, x)
    _, parts = at(x, lambda f: torch.eye(2).double()[:, None].expand(-1, len(f), -1))
    assert at.batched is False
    h = net[0](x)
    expected = torch.einsum("ko,bo,bi->kboi", net[2].weight, 3 * h**2, x)
    torch.testing.assert_close(parts[0].layer.split(parts[0].jacobian())["0.weight"], expected)
