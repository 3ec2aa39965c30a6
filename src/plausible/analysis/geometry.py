"""The shape of a posterior around its draws: log densities on planes and curves through the weights, and how flat it is somewhere.

Batch norms have, at every point, the statistics of up to 1,024 rows at the very weights. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from plausible.blocks import curves
from plausible.blocks.batch_norm import BatchNorms
from plausible.core import random
from plausible.core.data import ArrayData, Batch, Data
from plausible.core.model import Model
from plausible.core.weights import Weights, flatten, select, stack, unflatten
from plausible.engine.running import Options, run
from plausible.methods.averages.base import TrajectoryAverage
from plausible.methods.averages.swa import SWA
from plausible.methods.subspaces.connecting import Connection
from plausible.posteriors.base import Posterior, data_for
from plausible.posteriors.draws import DrawsPosterior

__all__ = ["Curve", "Flatness", "Surface", "connect", "flatness", "plane", "surface"]

ROWS = 1024


@dataclass(frozen=True, eq=False)
class Surface:
    """Log densities on a grid of a plane: `log_likelihood` and `log_joint` [rows of y, columns of x], both over N, in nats a row.

    `x` and `y` are the coordinates of columns and rows; `points` [n, 2] is where the draws lie that the plane was laid by.
    """

    x: Tensor
    y: Tensor
    log_likelihood: Tensor
    log_joint: Tensor
    points: Tensor


@dataclass(frozen=True, eq=False)
class Curve:
    """Log densities at `t` [size] on a curve from one network (0) to another (1), and on the straight line between them.

    `log_likelihood` and `log_joint` are over N, in nats a row, as are `straight_log_likelihood` and `straight_log_joint`. `bend`
    are the weights by which the curve goes, `kind` is "bezier" or "chain".
    """

    t: Tensor
    log_likelihood: Tensor
    log_joint: Tensor
    straight_log_likelihood: Tensor
    straight_log_joint: Tensor
    bend: Weights
    kind: str

    @property
    def wall(self) -> float:
        """By how much the loss on the curve rises above that of the worse end, in nats a row."""
        return _wall(self.log_likelihood)

    @property
    def straight_wall(self) -> float:
        """The same on the straight line."""
        return _wall(self.straight_log_likelihood)


class Flatness(NamedTuple):
    """By how much the log-likelihood of a row falls, on average over perturbations, with the standard error of that mean."""

    drop: float
    error: float


def plane(posterior: Posterior, data: Any, draws: Sequence[int] = (0, 1, 2), *, size: int = 21, margin: float = 0.3) -> Surface:
    """The plane through three draws, with the first at (0, 0) and the second at (‖w₂ − w₁‖, 0) (Garipov et al. 2018, §5).

    `data` are those of the fit, or held out ones for their likelihood. `margin` is how far the grid goes beyond the three, as a
    share of their extent. Cost: size² passes over the data.
    """
    model, rows = posterior.model, data_for(posterior.model, data)
    if len(draws) != 3 or len(set(draws)) < 3:
        raise ValueError(f"draws must be the numbers of three different draws, got {tuple(draws)}")
    first, second, third = (flatten(_point(posterior, number)).double() for number in draws)
    along = second - first
    across = third - first - ((third - first) @ along) / (along @ along).clamp(min=1e-300) * along
    lengths = [float(along.norm()), float(across.norm())]
    if min(lengths) <= 1e-6 * max(*lengths, 1e-300):
        raise ValueError(f"draws {tuple(draws)} lie on one line, through which there are many planes: choose others")
    axes = torch.stack([along / lengths[0], across / lengths[1]])
    points = torch.stack([(place - first) @ axes.T for place in (first, second, third)])
    low, high = points.amin(0), points.amax(0)
    room = margin * (high - low)
    grid = [torch.linspace(float(a), float(b), _size(size), dtype=torch.float64) for a, b in zip(low - room, high + room)]
    return _surface(model, rows, first, axes, grid, points)


def surface(posterior: Posterior, data: Any, draw: int = 0, *, radius: float = 1.0, size: int = 21, seed: int = 0) -> Surface:
    """Around one draw, along two random directions whose filters are as long as those of the weights (Li et al. 2018).

    A filter is what one output unit or channel has; vectors, such as biases, stay where they are. At a distance of 1 each filter
    has moved by its own length, so that networks that differ by the scale of their layers look alike. Cost: size² passes over the
    data.
    """
    model, rows = posterior.model, data_for(posterior.model, data)
    centre = _point(posterior, draw)
    axes = torch.stack([flatten(_filters(centre, random.generator(seed, 23, k))).double() for k in range(2)])
    grid = [torch.linspace(-radius, radius, _size(size), dtype=torch.float64)] * 2
    return _surface(model, rows, flatten(centre).double(), axes, grid, torch.zeros(1, 2, dtype=torch.float64))


def connect(
    first: Posterior,
    second: Posterior,
    data: Any,
    *,
    draws: tuple[int, int] = (0, 0),
    kind: Literal["bezier", "chain"] = "bezier",
    path: TrajectoryAverage | None = None,
    size: int = 31,
    seed: int = 0,
) -> Curve:
    """A curve of low loss from a draw of `first` to a draw of `second`, two posteriors of one network (Garipov et al. 2018).

    The curve is a quadratic Bézier curve by a bend, or a chain of two straight lines that meet there ("chain"). The bend begins
    halfway and is trained on `data`, those of the fit, to lower the loss at random places of the curve; `path` says how, by its
    `optimiser`, `lr`, `epochs` and `batch_size` (`SWA(mode=None)` by default). Two members of an ensemble are
    `connect(ensemble, ensemble, data, draws=(0, 1))`. Cost: that of the training, and 2·size passes over the data.
    """
    if kind not in curves.KINDS:
        raise ValueError(f"kind must be 'bezier' or 'chain', got {kind!r}")
    path = path or SWA(mode=None)
    if not isinstance(path, TrajectoryAverage):
        raise TypeError(f"path must be SWA(…) or SWAG(…), whose optimiser trains the bend, got {path!r}")
    model, rows = first.model, data_for(first.model, data)
    ends = [_point(posterior, number) for posterior, number in zip((first, second), draws)]
    shapes = [{name: tuple(weight.shape) for name, weight in end.items()} for end in ends]
    if shapes[0] != shapes[1]:
        raise ValueError("first and second must be posteriors of one network: their weights have other names or shapes")
    if all(bool((weight == ends[1][name]).all()) for name, weight in ends[0].items()):
        raise ValueError(f"both ends are the same weights: give two posteriors, or two numbers of draws, not {draws}")
    ends = [{name: weight.to(model.device) for name, weight in end.items()} | model.buffers for end in ends]
    with random.isolated(seed, model.device):
        _, _, fitted = run(Connection(path, kind), model, rows, Options(seed, starts=stack(ends), progress=False))
    assert fitted.draws is not None
    bend = {name: weight[0] for name, weight in select(fitted.draws.get([0], model.device), model.initial).items()}
    density, t = _Density(model, rows), torch.linspace(0, 1, _size(size), dtype=torch.float64)
    one, two = ({name: end[name] for name in bend} for end in ends)
    with random.isolated(seed, model.device):
        curved = [density(curves.point(curves.shares(kind, place), one, bend, two)) for place in t.float()]
        straight = [density({name: torch.lerp(one[name], two[name], float(place)) for name in bend}) for place in t]
    values = torch.tensor([curved, straight], dtype=torch.float64)
    return Curve(t, values[0, :, 0], values[0, :, 1], values[1, :, 0], values[1, :, 1], bend, kind)


def flatness(
    posterior: Posterior, data: Any, draw: int = 0, *, radius: float = 0.1, samples: int = 20, seed: int = 0
) -> Flatness:
    """E [log p(D | w) − log p(D | w + radius·d)]/N over random directions d with filters as long as those of w.

    The smaller, the flatter. Weights of the likelihood and vectors stay where they are. Cost: `samples` passes over the data.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples must be a whole number of at least 2, got {samples!r}")
    model, rows = posterior.model, data_for(posterior.model, data)
    density, centre = _Density(model, rows), _point(posterior, draw)
    here, _ = density(centre)
    drops = []
    for k in range(samples):
        moved = _filters(centre, random.generator(seed, 24, k))
        drops.append(here - density({name: w + radius * moved[name] for name, w in centre.items()})[0])
    values = torch.tensor(drops, dtype=torch.float64)
    return Flatness(float(values.mean()), float(values.std() / samples**0.5))


# ---------------------------------------------------------------------------------------------------------------------


class _Density:
    """log p(D | w)/N and log p(w, D)/N at any weights."""

    def __init__(self, model: Model, data: Data):
        self.model, self.data, self.norms = model, data, BatchNorms.of(model)
        step = -(-data.num_data // ROWS)
        few = data.rows(slice(None, None, step)) if isinstance(data, ArrayData) else next(iter(data.chunks(ROWS)))
        self.inputs = few.x

    @torch.no_grad()
    def __call__(self, weights: Weights) -> tuple[float, float]:
        buffers = {**self.model.buffers, **(self.norms.statistics(weights, self.inputs) if self.norms else {})}
        total = sum(float(self._of(weights | buffers, batch)) for batch in self.data.chunks(ROWS))
        prior = float(self.model.log_prior(weights)) / self.model.num_data
        return total / self.data.num_data, total / self.data.num_data + prior

    def _of(self, weights: Weights, batch: Batch) -> Tensor:
        each = self.model.log_likelihood(weights, batch).double()
        return (each if batch.weight is None else each * batch.weight).sum()


def _surface(model: Model, data: Data, origin: Tensor, axes: Tensor, grid: Sequence[Tensor], points: Tensor) -> Surface:
    density = _Density(model, data)
    x, y = grid
    values = torch.empty(2, len(y), len(x), dtype=torch.float64)
    with random.isolated(0, model.device):
        for j, up in enumerate(y):
            for i, right in enumerate(x):
                place = (origin + right * axes[0] + up * axes[1]).to(next(iter(model.initial.values())))
                values[:, j, i] = torch.tensor(density(unflatten(place, model.initial)), dtype=torch.float64)
    return Surface(x, y, values[0], values[1], points)


def _point(posterior: Posterior, number: int) -> Weights:
    """All weights of a draw."""
    if not isinstance(posterior, DrawsPosterior):
        raise TypeError(f"a {type(posterior).__name__} has no stored draws to look around; use MAP, an ensemble or a sampler")
    if not 0 <= number < len(posterior):
        raise ValueError(f"draw {number} is not one of the {len(posterior)} draws, which count from 0")
    held = posterior.store.get([number], posterior.device)
    return {name: held[name][0] for name in posterior.model.initial}


def _filters(weights: Weights, stream: torch.Generator) -> Weights:
    """A random direction: each filter as long as that of the weights, 0 for vectors and for weights of the likelihood."""
    moved = {}
    for name, weight in weights.items():
        if weight.ndim < 2 or name.startswith("likelihood."):
            moved[name] = torch.zeros_like(weight)
            continue
        noise = torch.randn(weight.shape, generator=stream, dtype=torch.float64).to(weight)
        lengths = [part.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1)) for part in (weight, noise)]
        moved[name] = noise * (lengths[0] / lengths[1])
    return moved


def _wall(log_likelihood: Tensor) -> float:
    return float(torch.minimum(log_likelihood[0], log_likelihood[-1]) - log_likelihood.min())


def _size(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise ValueError(
            f"size must be a whole number of at least 2, the points along the curve or each side of the grid, got {size!r}"
        )
    return size
