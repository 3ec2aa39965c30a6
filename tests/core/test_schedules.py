"""Schedules follow their formulas, at every step, inside and outside of transforms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plausible.core.schedules import Constant, Cosine, Cyclical, Exponential, Linear, Polynomial, Schedule, Steps, as_schedule
from plausible.core.serialise import decode, encode

TOTAL = 37


def wave(t: int) -> float:
    return 0.1 + (0.5 - 0.1) * 0.5 * (1 + math.cos(math.pi * t / TOTAL))


def warm(t: int) -> float:  # ceil(0.2 * 37) = 8 steps of warm-up
    return 0.5 * (t + 1) / 8 if t < 8 else 0.5 * 0.5 * (1 + math.cos(math.pi * (t - 8) / (TOTAL - 8)))


def cycle(t: int) -> float:  # Zhang et al. (2020), eq. 1, with k = t + 1 and ceil(37 / 4) = 10
    k = t + 1
    return 0.3 / 2 * (math.cos(math.pi * ((k - 1) % 10) / 10) + 1)


CASES: list[tuple[Schedule, Callable[[int], float]]] = [
    (Constant(0.3), lambda t: 0.3),
    (Linear(0.5, 0.1), lambda t: 0.5 - 0.4 * t / TOTAL),
    (Linear(0.0, 1.0), lambda t: t / TOTAL),
    (Cosine(0.5, 0.1), wave),
    (Cosine(0.5, warmup=0.2), warm),
    (Exponential(0.5, 1e-4), lambda t: 0.5 * (1e-4 / 0.5) ** (t / TOTAL)),
    (Steps(0.5, (0.75, 0.5), 0.2), lambda t: 0.5 * 0.2 ** ((t >= 0.5 * TOTAL) + (t >= 0.75 * TOTAL))),
    (Polynomial(0.02, 10.0, 0.55), lambda t: 0.02 * (10.0 + t) ** -0.55),
    (Cyclical(0.3, 4), cycle),
]
IDS = [type(schedule).__name__ for schedule, _ in CASES]


@pytest.mark.parametrize(("schedule", "formula"), CASES, ids=IDS)
def test_formula_at_every_step(schedule: Schedule, formula: Callable[[int], float]) -> None:
    for t in range(TOTAL):
        value = schedule(torch.tensor(t), TOTAL)
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(formula(t), rel=2e-6, abs=1e-8)


@pytest.mark.parametrize(("schedule", "formula"), CASES, ids=IDS)
def test_traced_and_vmapped(schedule: Schedule, formula: Callable[[int], float]) -> None:
    steps = torch.arange(TOTAL)
    alone = torch.stack([schedule(step, TOTAL) for step in steps])
    torch.testing.assert_close(torch.func.vmap(lambda step: schedule(step, TOTAL))(steps), alone)
    torch._dynamo.reset()
    traced = torch.compile(lambda step: schedule(step, TOTAL), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(steps[5]), alone[5])


@pytest.mark.parametrize(("schedule", "formula"), CASES, ids=IDS)
def test_beyond_the_end_and_in_short_runs(schedule: Schedule, formula: Callable[[int], float]) -> None:
    assert 0 <= schedule(torch.tensor(10 * TOTAL), TOTAL).item() <= 1
    for total in (1, 2, 3):
        assert math.isfinite(schedule(torch.tensor(0), total).item())
    if not isinstance(schedule, Polynomial | Cyclical):  # one goes on by its nature, one ends inside a wave
        held = schedule(torch.tensor(10 * TOTAL), TOTAL)
        torch.testing.assert_close(held, schedule(torch.tensor(TOTAL), TOTAL))


@pytest.mark.parametrize(("schedule", "formula"), CASES, ids=IDS)
def test_stored_as_json(schedule: Schedule, formula: Callable[[int], float]) -> None:
    back = decode(json.loads(json.dumps(encode(schedule))))
    assert back == schedule
    assert hash(back) == hash(schedule)


def test_polynomial_between_two_values() -> None:
    schedule = Polynomial.between(0.1, 0.001, total=1000, gamma=0.6)
    assert schedule(torch.tensor(0), 1).item() == pytest.approx(0.1, rel=1e-5)
    assert schedule(torch.tensor(1000), 1).item() == pytest.approx(0.001, rel=1e-5)
    with pytest.raises(ValueError, match="0 < end < start"):
        Polynomial.between(0.1, 0.2, total=10)
    with pytest.raises(ValueError, match="total"):
        Polynomial.between(0.2, 0.1, total=0)


def test_numbers_become_constants() -> None:
    assert as_schedule(0.1) == Constant(0.1)
    assert as_schedule(1) == Constant(1.0)
    cosine = Cosine(0.1)
    assert as_schedule(cosine) is cosine


@pytest.mark.parametrize("value", [0, 0.0, -1e-3, math.inf, math.nan])
def test_rates_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"lr must be positive and finite, got"):
        as_schedule(value)
    with pytest.raises(ValueError, match="temperature must be positive"):
        as_schedule(value, name="temperature")


@pytest.mark.parametrize("value", ["fast", None, True, lambda t: t])
def test_other_things_are_no_schedule(value: Any) -> None:
    with pytest.raises(TypeError, match="lr must be a positive number or a schedule"):
        as_schedule(value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Constant(0.0),
        lambda: Linear(-1.0, 0.0),
        lambda: Linear(1.0, math.inf),
        lambda: Cosine(0.0),
        lambda: Cosine(0.1, end=-1.0),
        lambda: Cosine(0.1, warmup=1.0),
        lambda: Exponential(0.1, 0.0),
        lambda: Steps(0.1, (0.5, 1.0)),
        lambda: Steps(0.1, ("half",)),  # type: ignore[arg-type]
        lambda: Steps(0.1, factor=0.0),
        lambda: Polynomial(0.1, b=0.0),
        lambda: Polynomial(0.1, gamma=-1.0),
        lambda: Cyclical(0.1, cycles=0),
    ],
)
def test_bad_settings(build: Callable[[], Schedule]) -> None:
    with pytest.raises(ValueError, match="must be"):
        build()


def test_whole_cycles_only() -> None:
    with pytest.raises(TypeError, match="cycles must be a whole number"):
        Cyclical(0.1, cycles=2.5)  # type: ignore[arg-type]
