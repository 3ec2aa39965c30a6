"""Every scheme leads back, preserves volume, and has the order it claims."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plausible.blocks.chains.density import Density, Evaluation, FunctionDensity, Point
from plausible.blocks.chains.integrators import SCHEMES, Dense, Diagonal, Metric, gradients, integrate, scheme_for, stability

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def _bent(q: Tensor) -> Tensor:
    """Skewed and coupled, so that no error cancels by symmetry."""
    return -0.25 * q.pow(4).sum(-1) - (q[..., 0] * q[..., 1]).square() - q[..., 0] + (0.5 * q[..., 1]).sin()


class Counting(FunctionDensity):
    calls = 0

    def evaluate(self, position: Tensor) -> Evaluation:
        self.calls += 1
        return super().evaluate(position)


def _start(target: Density, chains: int = 5, seed: int = 0) -> Point:
    stream = torch.Generator().manual_seed(seed)
    position, momentum = torch.randn(2, chains, target.size, generator=stream, dtype=torch.float64)
    return Point(position, momentum, *target.evaluate(position))


def _energy(target: Density, metric: Metric, point: Point) -> Tensor:
    return metric.kinetic(point.momentum) - target.value(point.log_likelihood, point.log_prior)


def _metrics() -> list[Metric]:
    covariance = torch.tensor([[1.5, 0.4], [0.4, 0.6]], dtype=torch.float64)
    return [Diagonal(torch.tensor([0.7, 1.9], dtype=torch.float64)), Dense(covariance, torch.linalg.cholesky(covariance))]


@every_scheme
def test_reversible(scheme: str) -> None:
    """Turned round, a path leads back to where it began; so does a path of negative steps."""
    target = FunctionDensity(_bent, 2)
    start = _start(target)
    step = torch.linspace(0.05, 0.15, 5, dtype=torch.float64)
    for metric in _metrics():
        end = integrate(target, metric, start, step, 7, scheme)
        assert (end.position - start.position).abs().max() > 0.1
        back = integrate(target, metric, end._replace(momentum=-end.momentum), step, 7, scheme)
        torch.testing.assert_close(back.position, start.position, atol=1e-12, rtol=0)
        torch.testing.assert_close(back.momentum, -start.momentum, atol=1e-12, rtol=0)
        against = integrate(target, metric, end, -step, 7, scheme)
        torch.testing.assert_close(against.position, start.position, atol=1e-12, rtol=0)
        torch.testing.assert_close(against.gradient, start.gradient, atol=1e-11, rtol=0)


@every_scheme
def test_volume(scheme: str) -> None:
    """The Jacobian of a path has determinant 1, and is symplectic: JᵀΩJ = Ω."""

    class Smooth(Density):
        size, dtype = 2, torch.float64

        def evaluate(self, position: Tensor) -> Evaluation:
            gradient = torch.func.vmap(torch.func.grad(lambda q: _bent(q)))(position)
            return Evaluation(_bent(position), torch.zeros(len(position), dtype=torch.float64), gradient)

    target, metric = Smooth(), _metrics()[1]
    start = _start(target, chains=1)

    def path(state: Tensor) -> Tensor:
        q, p = state[None, :2], state[None, 2:]
        end = integrate(target, metric, Point(q, p, *target.evaluate(q)), torch.tensor([0.2], dtype=torch.float64), 5, scheme)
        return torch.cat([end.position[0], end.momentum[0]])

    jacobian = torch.func.jacrev(path)(torch.cat([start.position[0], start.momentum[0]]))
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1, abs=1e-10)
    unit, none = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    omega = torch.cat([torch.cat([none, unit], 1), torch.cat([-unit, none], 1)])
    torch.testing.assert_close(jacobian.mT @ omega @ jacobian, omega, atol=1e-10, rtol=0)
    assert (jacobian - torch.eye(4, dtype=torch.float64)).abs().max() > 0.1


@every_scheme
def test_order(scheme: str) -> None:
    """Halving the step divides the error of the energy by 2^order, for every chain, over the same time."""
    target, metric = FunctionDensity(_bent, 2), _metrics()[0]
    start = _start(target)
    errors = []
    for count in (20, 40, 80):
        end = integrate(target, metric, start, torch.full((5,), 1.0 / count, dtype=torch.float64), count, scheme)
        errors.append((_energy(target, metric, end) - _energy(target, metric, start)).abs())
    ratio = (errors[1] / errors[2]).log2()
    torch.testing.assert_close(ratio, torch.full_like(ratio, scheme_for(scheme).order), atol=0.15, rtol=0)
    assert not torch.allclose(errors[1] / errors[2], torch.ones_like(ratio), atol=0.5)


@every_scheme
def test_paths_and_cost(scheme: str) -> None:
    """A kept path goes through the ends of shorter ones; each step costs `gradients` evaluations."""
    target, metric = Counting(_bent, 2), _metrics()[1]
    start = _start(target)
    step = torch.tensor([0.1, -0.1, 0.05, 0.2, -0.02], dtype=torch.float64)
    target.calls = 0
    path = integrate(target, metric, start, step, 3, scheme, keep=True)
    assert target.calls == 3 * gradients(scheme)
    assert path.position.shape == (5, 3, 2)
    assert path.log_prior.shape == (5, 3)
    for i in range(3):
        end = integrate(target, metric, start, step, i + 1, scheme)
        for name, value in end._asdict().items():
            torch.testing.assert_close(getattr(path, name)[:, i], value, atol=1e-13, rtol=0, msg=name)


def test_diagonal_and_dense_agree() -> None:
    """A diagonal metric, written as a dense one, gives the same leapfrogs: the delegated path and the general one."""
    target = FunctionDensity(_bent, 2)
    start, masses = _start(target), torch.tensor([0.7, 1.9], dtype=torch.float64)
    step = torch.full((5,), 0.1, dtype=torch.float64)
    one = integrate(target, Diagonal(masses), start, step, 6, keep=True)
    other = integrate(target, Dense(masses.diag(), masses.sqrt().diag()), start, step, 6, keep=True)
    for a, b in zip(one, other):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=0)


@every_scheme
def test_oscillator(scheme: str) -> None:
    """On a harmonic oscillator a step turns by arccos(trace/2), for leapfrog 2 arcsin(ε/2); above `stability` |trace| > 2."""
    target, metric = FunctionDensity(lambda q: -0.5 * q.square().sum(-1), 1), Diagonal(torch.ones(1, dtype=torch.float64))
    limit = stability(scheme)
    step = torch.tensor([0.3 * limit, 0.98 * limit, 1.002 * limit], dtype=torch.float64)
    one = torch.ones(3, 1, dtype=torch.float64)
    start = Point(one, 0 * one, *target.evaluate(one))
    one = integrate(target, metric, start, step, 1, scheme).position[:, 0]  # = cos of the angle, by symmetry
    path = integrate(target, metric, start, step, 400, scheme, keep=True).position[..., 0]
    angle = one[:2].arccos()
    torch.testing.assert_close(path[:2], (angle[:, None] * torch.arange(1, 401)).cos(), atol=1e-8, rtol=0)
    assert one[2].abs() > 1
    assert path[2].abs().max() > path[:2].abs().max() + 0.01
    if scheme == "leapfrog":
        assert limit == pytest.approx(2)
        torch.testing.assert_close(angle, 2 * (step[:2] / 2).arcsin())


def test_higher_orders_pay() -> None:
    """At equal cost, and small steps, each later scheme has a smaller error than leapfrog."""
    target, metric = FunctionDensity(_bent, 2), _metrics()[0]
    start = _start(target)
    errors = {}
    for scheme in SCHEMES:
        count = 240 // gradients(scheme)
        end = integrate(target, metric, start, torch.full((5,), 2.0 / count, dtype=torch.float64), count, scheme)
        errors[scheme] = float((_energy(target, metric, end) - _energy(target, metric, start)).abs().mean())
    assert all(error < errors["leapfrog"] for name, error in errors.items() if name != "leapfrog"), errors
    assert errors["omelyan"] < 0.1 * errors["forest-ruth"]
    assert math.isfinite(errors["leapfrog"])
    assert errors["leapfrog"] > 1e-6


def test_unknown_scheme() -> None:
    with pytest.raises(ValueError, match=r"integrator must be one of 'leapfrog'.*got 'euler'"):
        scheme_for("euler")
