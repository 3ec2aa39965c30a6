"""To a mode on all data, one iteration at a time: L-BFGS, and damped Gauss-Newton steps where the curvature is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.lbfgs import _strong_wolfe

from plausible.blocks.curvature.dense import Dense
from plausible.blocks.curvature.structures import Curvature, flat, flat_precision, named
from plausible.core.special import widest
from plausible.core.weights import Weights

LogJoint = Callable[[Weights], tuple[Tensor, Weights]]  # weights → the log joint and its gradient
Loss = Callable[[Tensor], tuple[float, Tensor]]  # a vector → a loss and its gradient
# weights → the curvature there (of `Dense` blocks), the precisions of the prior, the scale of the likelihood
CurvatureAt = Callable[[Weights], tuple[Curvature, Weights, Tensor]]

LIMIT = 2000  # weights up to which factorising the curvature at every step is worth it
SETTLED = 1e-6  # mean squared distance to the mode, in posterior standard deviations, at which climbing ends
STILL = 1e-9  # change of the loss, or of every coordinate, below which L-BFGS ends
FLAT = 1e-8  # largest slope at which L-BFGS ends


class Descent(NamedTuple):
    """Where L-BFGS stands: place, loss and gradient there, the lowest place so far, and the last steps with their changes of slope.

    Rows of `steps` and `changes` `[memory, P]` are in the order of time, the last `filled` of them in use.
    """

    place: Tensor
    loss: Tensor
    gradient: Tensor
    best: Tensor
    best_loss: Tensor
    steps: Tensor
    changes: Tensor
    filled: Tensor
    evaluations: Tensor
    over: Tensor


def begin_descent(place: Tensor, function: Loss, memory: int) -> Descent:
    """Before the first iteration of L-BFGS from `place`; the last `memory` steps will be remembered."""
    loss, gradient = function(place)
    number = torch.zeros((), dtype=torch.int64)
    history = torch.zeros(memory, place.numel(), dtype=place.dtype, device=place.device)
    here = torch.tensor(loss, dtype=torch.float64)
    over = torch.tensor(not float(gradient.abs().max()) > FLAT)  # NaN too
    start = (place.clone(), here, gradient, place.clone(), here.clone())
    return Descent(*start, history, history.clone(), number, number + 1, over)


def descend(at: Descent, function: Loss, evaluations: int) -> Descent:
    """One iteration of L-BFGS with a line search by the strong Wolfe conditions (Nocedal & Wright 2006, §7.2).

    The descent is over when it has taken `evaluations` of the function in all iterations together, or nothing moves any more.
    """
    direction, first = _direction(at), int(at.filled) == 0
    slope = at.gradient.dot(direction)
    if not float(slope) < -STILL:
        return at._replace(over=torch.ones_like(at.over))
    lowest: list[tuple[float, Tensor]] = []

    def along(start: Tensor, length: float, ray: Tensor) -> tuple[float, Tensor]:
        value, gradient = function(start + length * ray)
        lowest.append((value, start + length * ray))
        return value, gradient

    # without curvature the gradient says nothing of a length; with it the Newton step of 1 is right
    length = min(1.0, 1.0 / float(at.gradient.abs().sum())) if first else 1.0
    left = max(1, evaluations - int(at.evaluations))
    loss, gradient, length, used = _strong_wolfe(
        along, at.place, length, direction, float(at.loss), at.gradient, slope, max_ls=left
    )
    step = float(length) * direction
    best_loss, best = min([(float(at.best_loss), at.best), *lowest], key=lambda pair: pair[0] if pair[0] == pair[0] else 1e308)
    steps, changes, count = at.steps, at.changes, at.filled
    change = gradient - at.gradient
    if float(change.dot(step)) > 1e-10:  # curvature that is not positive would spoil the directions
        steps, changes = torch.roll(steps, -1, 0), torch.roll(changes, -1, 0)
        steps[-1], changes[-1] = step, change
        count = (count + 1).clamp(max=len(steps))
    done = int(at.evaluations) + int(used)
    still = float(step.abs().max()) <= STILL or abs(float(loss) - float(at.loss)) < STILL
    over = torch.tensor(done >= evaluations or still or not float(gradient.abs().max()) > FLAT)
    here, lowest_loss = (torch.tensor(float(value), dtype=torch.float64) for value in (loss, best_loss))
    place = (at.place + step, here, gradient.clone(), best.clone(), lowest_loss)
    return Descent(*place, steps, changes, count, torch.tensor(done), over)


def _direction(at: Descent) -> Tensor:
    """−H⁻¹g by the compact form of the last steps S and changes Y (Byrd, Nocedal & Schnabel 1994).

        H⁻¹g = γg + S R⁻ᵀ((D + γYYᵀ)R⁻¹Sg − γYg) − γYᵀR⁻¹Sg,   R the upper triangle of SYᵀ, D its diagonal

    The two loops of the textbook say the same in some hundred small operations, which cost more than a gradient of a small network.
    """
    if not (count := int(at.filled)):
        return at.gradient.neg()
    wide = widest(at.gradient.device)  # double precision, where there is one: R is badly conditioned along a valley
    gradient, steps, changes = (part.to(wide) for part in (at.gradient, at.steps[-count:], at.changes[-count:]))
    cross, inner = steps @ changes.T, changes @ changes.T
    # γ of the last pair scales the initial Hessian (Shanno & Phua 1978)
    ratio = cross[-1, -1] / inner[-1, -1]
    upper = cross.triu()
    u = torch.linalg.solve_triangular(upper, (steps @ gradient).unsqueeze(1), upper=True)
    right = cross.diagonal().unsqueeze(1) * u + ratio * (inner @ u) - ratio * (changes @ gradient).unsqueeze(1)
    w = torch.linalg.solve_triangular(upper.T, right, upper=False)
    along = ratio * gradient + steps.T @ w.squeeze(1) - ratio * (changes.T @ u.squeeze(1))
    return along.neg().to(at.gradient.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Gauss-Newton
class Climb(NamedTuple):
    """Where the climb stands: weights, the log joint and its gradient there, the damping and how fast it grows."""

    weights: Weights
    value: Tensor
    slope: Weights
    damping: Tensor
    growth: Tensor
    over: Tensor


def begin_climb(weights: Weights, joint: LogJoint) -> Climb:
    """Before the first Gauss-Newton step from these weights."""
    value, slope = joint(weights)
    number = torch.ones((), dtype=torch.float64)
    return Climb(weights, value, slope, 1e-3 * number, 2 * number, torch.zeros((), dtype=torch.bool))


def climb(at: Climb, curved: CurvatureAt, joint: LogJoint) -> Climb:
    """One damped Gauss-Newton step, w ← w + (Λ + μ diag Λ)⁻¹ ∇ log p(w, D), taken where it raises the log joint.

    μ falls where the log joint rises as the quadratic model says, and grows where it does not (Levenberg 1944, Marquardt 1963,
    Nielsen 1999). Plain gradients creep along the valleys of small networks; this arrives. Cost: the curvature, one
    factorisation, one gradient.
    """
    curvature, precision, scale = curved(at.weights)
    damping = float(at.damping)
    step, expected = _solved(curvature, at.slope, precision, scale, damping)
    moved = {**at.weights, **{name: at.weights[name] + step[name] for name in step}}
    reached, slope = joint(moved)
    gain = float(reached - at.value)
    if not gain >= 0:  # nan too
        damping *= float(at.growth)
        return at._replace(
            damping=torch.full_like(at.damping, damping), growth=2 * at.growth, over=torch.tensor(damping > 1e12)
        )
    decrement = sum(float((step[name] * at.slope[name]).sum()) for name in step)
    # Nielsen's cubic: smooth in the gain ratio, where Marquardt's factor jumps
    damping *= max(1 / 5, 1 - (2 * min(gain / max(expected, 1e-300), 1.0) - 1) ** 3)
    over = torch.tensor(decrement < SETTLED * curvature.size)
    return Climb(moved, reached, slope, torch.full_like(at.damping, damping), torch.full_like(at.growth, 2.0), over)


def can_climb(size: int) -> bool:
    """Whether so many weights are few enough to factorise their curvature at every step."""
    return size <= LIMIT


def _solved(
    curvature: Curvature, slope: Mapping[str, Tensor], precision: Weights, scale: Tensor, damping: float
) -> tuple[Weights, float]:
    """(Λ + μ diag Λ)⁻¹ g =: s by name, and gᵀs − ½sᵀΛs, by which the log joint should rise."""
    steps: Weights = {}
    expected = 0.0
    for block in curvature.blocks:
        assert isinstance(block, Dense)
        assert block.matrix is not None
        right = flat(block.layers, {name: slope[name][None] for name in block.names}).double()[0]
        matrix = (scale * block.matrix + torch.diag(flat_precision(block.layers, precision))).double()
        # in units of each weight's own curvature: steps do not depend on how weights are scaled
        extra = damping * matrix.diagonal().clamp(min=1e-12)
        step = torch.linalg.solve(matrix + torch.diag(extra), right)
        expected += float(0.5 * (step * (right + extra * step)).sum())
        steps |= named(block.layers, step.to(slope[block.names[0]].dtype))
    return steps, expected
