"""NUTS: its trees against a literal recursion, its law on densities that are known, divergences, detailed balance."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from plausible import likelihoods, priors
from plausible.blocks.chains import convergence as diagnostics
from plausible.blocks.chains import trees
from plausible.blocks.chains.density import Density, Evaluation, FunctionDensity, ModelDensity, Point, run
from plausible.blocks.chains.integrators import Dense, Diagonal, Metric
from plausible.blocks.chains.trees import explore, width
from plausible.blocks.kernels.native import native_density
from plausible.core.data import ArrayData, Batch
from plausible.core.model import Model
from plausible.methods.chains.nuts import NUTS

# ---------------------------------------------------------------------------------------------------------------------
# The algorithm as it is written down: one chain, one leapfrog at a time, recursive


class Walked(NamedTuple):
    straight: bool
    states: list[Point]


class Reference:
    """Stan's transition (Betancourt 2017, with the checks across subtrees) for one chain, given the directions of its doublings."""

    def __init__(self, target: Density, metric: Metric, start: Point, step: float):
        self.target, self.metric, self.step = target, metric, step
        self.energy = self._energy(start)
        self.backward = self.forward = start
        self.tree, self.probability = [start], torch.ones(1, dtype=torch.float64)
        self.accepted, self.count, self.depth, self.divergent = 0.0, 0, 0, False

    def _energy(self, point: Point) -> float:
        return float(self.metric.kinetic(point.momentum) - self.target.value(point.log_likelihood, point.log_prior))

    def _gain(self, point: Point) -> float:
        gain = self.energy - self._energy(point)
        return gain if math.isfinite(gain) else -math.inf

    def _criterion(self, one: Point, other: Point, momenta: list[Point]) -> bool:
        total = torch.stack([point.momentum[0] for point in momenta]).sum(0)
        return all(float(self.metric.velocity(end.momentum)[0] @ total) > 0 for end in (one, other))

    def _together(self, one: list[Point], other: list[Point]) -> bool:
        return (
            self._criterion(one[0], other[-1], one + other)
            and self._criterion(one[0], other[0], [*one, other[0]])
            and self._criterion(one[-1], other[-1], [one[-1], *other])
        )

    def _build(self, start: Point, depth: int, sign: int) -> Walked:
        if depth == 0:
            step = torch.tensor([sign * self.step], dtype=torch.float64)
            point = self._leapfrog(start, step)
            gain = self._gain(point)
            self.accepted, self.count = self.accepted + min(1.0, math.exp(min(gain, 0.0))), self.count + 1
            self.divergent = self.divergent or gain < -1000
            return Walked(gain >= -1000, [point])
        one = self._build(start, depth - 1, sign)
        if not one.straight:
            return one
        other = self._build(one.states[-1], depth - 1, sign)
        states = one.states + other.states
        return Walked(other.straight and self._together(one.states, other.states), states)

    def _leapfrog(self, point: Point, step: Tensor) -> Point:
        p = point.momentum + 0.5 * step * point.gradient
        q = point.position + step * self.metric.velocity(p)
        found = self.target.evaluate(q)
        return Point(q, p + 0.5 * step * found.gradient, *found)

    def run(self, forwards: list[bool]) -> Reference:
        old = [self.tree[0]]
        weight = torch.zeros(1, dtype=torch.float64)  # log, of each state of the tree, in the order of time
        for ahead in forwards:
            half = self._build(self.forward if ahead else self.backward, self.depth, 1 if ahead else -1)
            if not half.straight:
                break
            self.depth += 1
            gains = torch.tensor([self._gain(point) for point in half.states], dtype=torch.float64)
            take = (gains.logsumexp(0) - weight.logsumexp(0)).exp().clamp(max=1)
            inside, kept = take * gains.softmax(0), (1 - take) * self.probability
            walked = old if ahead else old[::-1]
            straight = self._together(walked, half.states)
            if ahead:
                self.forward, old, self.probability = half.states[-1], old + half.states, torch.cat([kept, inside])
                weight = torch.cat([weight, gains])
            else:
                self.backward, old = half.states[-1], half.states[::-1] + old
                self.probability, weight = torch.cat([inside.flip(0), kept]), torch.cat([gains.flip(0), weight])
            if not straight:
                break
        self.tree = old
        return self


class Gaussian(Density):
    """N(1, Σ), its gradient written out."""

    dtype = torch.float64

    def __init__(self, covariance: Tensor):
        self.size, self.inverse = len(covariance), torch.linalg.inv(covariance)

    def evaluate(self, position: Tensor) -> Evaluation:
        gradient = (1 - position) @ self.inverse
        return Evaluation(0.5 * ((position - 1) * gradient).sum(-1), torch.zeros(len(position), dtype=torch.float64), gradient)


def _banana(q: Tensor) -> Tensor:
    return -0.5 * q[..., 0].square() - 2 * (q[..., 1] - q[..., 0].square()).square() - 0.1 * q[..., 0]


def _metrics() -> list[Metric]:
    covariance = torch.tensor([[1.5, 0.4], [0.4, 0.6]], dtype=torch.float64)
    return [Diagonal(torch.tensor([0.7, 1.9], dtype=torch.float64)), Dense(covariance, torch.linalg.cholesky(covariance))]


def _directions(uniform: Tensor, max_depth: int, length: int) -> list[list[bool]]:
    columns = [width(depth, length) for depth in range(max_depth)]
    return [[bool(u >= 0.5) for u in row] for row in uniform[:, columns]]


@pytest.mark.parametrize("length", [1, 64, pytest.param(4, marks=pytest.mark.slow)])
def test_same_trees_as_recursion(length: int) -> None:
    """Depth, states, acceptance and divergences of many chains agree with the recursion, whatever the length of blocks."""
    chains, max_depth = 40, 6
    target = FunctionDensity(_banana, 2)
    stream = torch.Generator().manual_seed(length)
    position, noise = torch.randn(2, chains, 2, generator=stream, dtype=torch.float64)
    step = torch.rand(chains, generator=stream, dtype=torch.float64).mul(4).sub(3.8).exp()  # 0.02 … 1.2
    step[::10] = 6.0  # these run away
    uniform = torch.rand(chains, width(max_depth, length), generator=stream, dtype=torch.float64)
    for metric in _metrics():
        start = Point(position, metric.momentum(noise), *target.evaluate(position))
        found = explore(target, metric, start, step, max_depth, uniform, length)
        depths = []
        for c, forwards in enumerate(_directions(uniform, max_depth, length)):
            one = Reference(target, metric, Point(*(part[c : c + 1] for part in start)), float(step[c])).run(forwards)
            depths.append(one.depth)
            assert (one.depth, one.divergent) == (int(found.depth[c]), bool(found.divergent[c]))
            assert float(found.acceptance[c]) == pytest.approx(one.accepted / one.count, rel=1e-8)
            assert one.count <= float(found.leapfrogs[c]) < one.count + length
            gaps = [float((point.position[0] - found.position[c]).abs().max()) for point in one.tree]
            assert min(gaps) < 1e-9  # what was chosen is a state of the tree
            chosen = one.tree[gaps.index(min(gaps))]
            assert float(found.energy[c]) == pytest.approx(one._energy(chosen), abs=1e-8)
            torch.testing.assert_close(found.gradient[c], chosen.gradient[0], atol=1e-8, rtol=1e-8)
        assert len(set(depths)) >= 5
        assert int(found.divergent.sum()) >= 3


@pytest.mark.parametrize("length", [2, 64])
def test_choice_inside_a_tree(length: int) -> None:
    """On given trajectories, states are chosen with the probabilities of biased progressive sampling: χ² over all states."""
    starts, copies, max_depth = 8, 4_000, 4
    target, metric = FunctionDensity(_banana, 2), _metrics()[0]
    stream = torch.Generator().manual_seed(1)
    position, momentum = torch.randn(2, starts, 2, generator=stream, dtype=torch.float64).repeat_interleave(copies, 1)
    start = Point(position, momentum, *target.evaluate(position))
    uniform = torch.rand(starts * copies, width(max_depth, length), generator=stream, dtype=torch.float64)
    for depth in range(max_depth):
        column = width(depth, length)
        uniform[:, column] = uniform[::copies, column].repeat_interleave(copies)  # one trajectory for all copies
    step = 0.2
    found = explore(target, metric, start, torch.full_like(uniform[:, 0], step), max_depth, uniform, length)
    chi, free, surely = 0.0, 0, 0
    for c, forwards in enumerate(_directions(uniform[::copies], max_depth, length)):
        rows = slice(c * copies, (c + 1) * copies)
        one = Reference(target, metric, Point(*(part[rows][:1] for part in start)), step).run(forwards)
        states = torch.cat([point.position for point in one.tree])
        counts = torch.bincount(torch.cdist(found.position[rows], states).argmin(1), minlength=len(states)).double()
        possible = one.probability > 0
        assert (counts[~possible] == 0).all()
        expected = copies * one.probability[possible]
        chi += float(((counts[possible] - expected).square() / expected).sum())
        free, surely = free + int(possible.sum()) - 1, surely + int((~possible).sum())
    assert free > 25
    assert surely > 5
    assert chi < free + 5 * math.sqrt(2 * free)


# ---------------------------------------------------------------------------------------------------------------------
# Laws


def _within_error(draws: Tensor, expected: Tensor | float, z: float = 5.0) -> None:
    """Means over draws `[draws, chains, …]` agree with what is expected, by standard errors from effective sizes."""
    chains = draws.reshape(*draws.shape[:2], -1).transpose(0, 1)
    error = chains.reshape(-1, chains.shape[-1]).std(0) / diagnostics.ess(chains).sqrt()
    gap = (chains.mean((0, 1)) - torch.as_tensor(expected, dtype=chains.dtype).reshape(-1)).abs()
    assert bool((gap < z * error).all()), (gap / error).tolist()


@pytest.mark.parametrize(
    "metric", ["diag", "dense", *(pytest.param(metric, marks=pytest.mark.slow) for metric in ("lowrank", "unit"))]
)
def test_moments_of_a_correlated_gaussian(metric: str) -> None:
    """Means, variances and a covariance, with variances from 0.01 to 4 learned on the way."""
    covariance = torch.tensor([[4.0, 1.8, 0.0], [1.8, 1.0, 0.0], [0.0, 0.0, 0.01]], dtype=torch.float64)
    method = NUTS(draws=30, chains=150, warmup=60, metric=metric)  # type: ignore[arg-type]
    found = run(method, Gaussian(covariance), torch.zeros(150, 3, dtype=torch.float64))
    q = found["position"]
    _within_error(q, torch.ones(3))
    _within_error((q - 1).square(), covariance.diagonal())
    _within_error((q[..., 0] - 1) * (q[..., 1] - 1), 1.8)
    assert 0.6 < float(found["acceptance"].mean()) < 0.98
    assert found["step_size"].std(0).max() == 0


def test_moments_of_a_skewed_density() -> None:
    """x = log of a Gamma(2) variable: E[eˣ] = Var[eˣ] = 2, E[x] = 1 − γ."""
    target = FunctionDensity(lambda q: (2 * q - q.exp()).sum(-1), 2)
    x = run(NUTS(draws=40, chains=200, warmup=60), target, torch.zeros(200, 2, dtype=torch.float64))["position"]
    _within_error(x.exp(), torch.full((2,), 2.0))
    _within_error(x.exp().square(), torch.full((2,), 6.0))
    _within_error(x, torch.full((2,), 1 - 0.5772156649015329))


@pytest.mark.parametrize("step", [0.25, 0.6])
def test_one_transition_keeps_the_law(step: float) -> None:
    """Chains that start at exact draws of a bent density are at exact draws after a transition (Gandy and Scott 2020).

    x ~ N(0, 1), y | x ~ N(x², ½): x, the residual √2(y − x²) and their sum are normal; χ² of each over twenty equal bins.
    """
    chains = 20_000
    stream = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, chains, generator=stream, dtype=torch.float64)
    start = torch.stack([x, x.square() + residual / math.sqrt(2)], 1)
    target = FunctionDensity(lambda q: -0.5 * q[:, 0].square() - (q[:, 1] - q[:, 0].square()).square(), 2)
    found = run(NUTS(draws=1, chains=chains, warmup=0, step_size=step, adapt=False, max_depth=6), target, start)
    after = found["position"][0]
    assert float((after - start).norm(dim=1).median()) > 0.5  # they moved
    if step == 0.6:
        assert float(found["acceptance"].mean()) < 0.8  # and errors are large enough to be seen
    residual = (after[:, 1] - after[:, 0].square()) * math.sqrt(2)
    for value in (after[:, 0], residual, (after[:, 0] + residual) / math.sqrt(2)):
        counts = torch.histc(torch.special.ndtr(value), bins=20, min=0, max=1)
        chi = float(((counts - chains / 20) ** 2 / (chains / 20)).sum())
        assert chi < 19 + 5 * math.sqrt(2 * 19)


def test_detailed_balance_without_adaptation() -> None:
    """From the stationary law as many transitions go from bin i to bin j as back; nothing adapts."""
    chains = 40_000
    stream = torch.Generator().manual_seed(4)
    start = torch.rand(chains, 2, generator=stream, dtype=torch.float64).log().neg().sum(1, keepdim=True).log()  # log Gamma(2)
    method = NUTS(draws=1, chains=chains, warmup=0, step_size=1.1, adapt=False, max_depth=3)
    found = run(method, FunctionDensity(lambda q: (2 * q - q.exp()).sum(-1), 1), start)
    assert (found["step_size"] == 1.1).all()
    assert (found["state"].adaptation.metric.inverse_mass == 1).all()
    edges = torch.tensor([-0.5, 0.2, 0.6, 1.0], dtype=torch.float64)
    flows = torch.zeros(5, 5, dtype=torch.float64)
    places = torch.bucketize(start[:, 0], edges), torch.bucketize(found["position"][0, :, 0].contiguous(), edges)
    flows.index_put_(places, torch.ones(chains, dtype=torch.float64), accumulate=True)
    assert float(flows.diagonal().sum()) < 0.6 * chains
    above = torch.triu_indices(5, 5, 1)
    there, back = flows[above[0], above[1]], flows.mT[above[0], above[1]]
    chi = float(((there - back).square() / (there + back)).sum())
    assert chi < 10 + 5 * math.sqrt(20)


def test_funnel_diverges() -> None:
    """Neal's funnel has divergences at a large step and hardly any at a small one; no divergent state is ever kept."""

    def funnel(q: Tensor) -> Tensor:
        return -q[:, 0].square() / 18 - 0.5 * (q[:, 1:].square() * torch.exp(-q[:, :1]) + q[:, :1]).sum(-1)

    start = torch.randn(400, 10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    start[:, 0] *= 3
    start[:, 1:] *= (start[:, :1] / 2).exp()  # exact draws
    counts = []
    for step in (0.5, 0.02):
        found = run(
            NUTS(draws=3, chains=400, warmup=0, step_size=step, adapt=False, max_depth=7), FunctionDensity(funnel, 10), start
        )
        counts.append(float(found["divergent"].mean()))
        for name, value in found.items():
            assert name == "state" or bool(value.isfinite().all()), name
    assert counts[0] > 0.02
    assert counts[1] < 0.25 * counts[0]


@pytest.mark.parametrize("dropping", [16, 10**9])
def test_chains_do_not_meddle(dropping: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain moves as it would alone: others that finish earlier, or run away, leave no trace, left out or kept (as on a GPU)."""
    monkeypatch.setattr(trees, "DROPPING", dropping)

    class Watched(FunctionDensity):
        def evaluate(self, position: Tensor) -> Evaluation:
            rows.add(len(position))
            return super().evaluate(position)

    rows: set[int] = set()
    beta = torch.tensor([1.0, 0.1, 0.5, 1.0], dtype=torch.float64)
    precision = torch.tensor([[1.0, 2.0], [0.1, 0.1], [1.0, 1.0], [5.0, 1.0]], dtype=torch.float64)
    target = Watched(_banana, 2).bound(beta=beta, precision=precision)
    stream = torch.Generator().manual_seed(6)
    position, momentum = torch.randn(2, 4, 2, generator=stream, dtype=torch.float64) * 0.7
    masses = torch.rand(4, 2, generator=stream, dtype=torch.float64) + 0.5
    step = torch.tensor([19.0, 0.3, 0.02, 0.05], dtype=torch.float64)
    uniform = torch.rand(4, width(8, 8), generator=stream, dtype=torch.float64)
    start = Point(position, momentum, *target.evaluate(position))
    together = explore(target, Diagonal(masses), start, step, 8, uniform, 8)
    assert len(set(together.depth.tolist())) > 2
    assert together.divergent.tolist() == [1, 0, 0, 0]
    assert (len(rows) > 1) == (dropping == 16)  # some were left out on the way
    for c in range(4):
        row = slice(c, c + 1)
        alone = explore(
            target.bound(beta=beta[row], precision=precision[row]),
            Diagonal(masses[row]),
            Point(*(part[row] for part in start)),
            step[row],
            8,
            uniform[row],
            8,
        )
        for a, b in zip(alone, together):
            torch.testing.assert_close(a, b[row], atol=1e-12, rtol=1e-12)


@pytest.mark.compile
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "length"), [(torch.float64, 4), (torch.float64, 64), (torch.float32, 64)])
def test_native_trees(dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code walks the same trees and chooses the same states, with powers, precisions and masses of each chain's own."""
    chains, max_depth = 24, 7
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=dtype)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    batch = Batch(x, x[:, :1].sin())
    model = Model.build(network, likelihoods.Gaussian(0.3), priors.Gaussian(1.0), batch, num_data=40)
    target = native_density(ModelDensity(model, ArrayData(batch, 40), chains))
    assert target is not None
    size = target.size
    position = 0.3 * torch.randn(chains, size, dtype=dtype)
    target = target.bound(beta=torch.rand(chains, dtype=torch.float64), precision=torch.rand(chains, size, dtype=dtype) + 0.5)
    step = torch.rand(chains, dtype=torch.float64).mul(4).sub(4.5).exp()
    step[::8] = 30.0
    uniform = torch.rand(chains, width(max_depth, length), dtype=torch.float64)
    for masses in (torch.rand(size, dtype=dtype) + 0.5, torch.rand(chains, size, dtype=dtype) + 0.5):
        metric = Diagonal(masses)
        start = Point(position, metric.momentum(torch.randn_like(position)), *target.evaluate(position))
        found = explore(target, metric, start, step, max_depth, uniform, length)
        with monkeypatch.context() as patch:
            patch.setattr(type(target), "trees", lambda *_: None)
            expected = explore(target, metric, start, step, max_depth, uniform, length)
        assert len(set(found.depth.tolist())) > 4
        assert found.divergent.sum() >= 3
        tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        for name, value in found._asdict().items():
            if name == "leapfrogs":  # whole blocks against single states
                assert (value <= expected.leapfrogs).all()
                assert (value > expected.leapfrogs - length).all()
            else:
                torch.testing.assert_close(value, getattr(expected, name), rtol=tolerance, atol=tolerance, msg=name)


def test_settings() -> None:
    for settings, message in [
        ({"max_depth": 0}, "max_depth must be a whole number of at least 1, got 0"),
        ({"max_depth": 30}, "max_depth counts doublings, at most 20"),
        ({"target_acceptance": 1.0}, "target_acceptance must be finite and above 0 and below 1"),
        ({"metric": "full"}, "metric must be one of"),
        ({"adapt": False}, "adapt=False needs a step_size"),
        ({"step_size": -1.0}, "step_size must be finite and above 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            NUTS(**settings)
