"""Interleaved timing: candidates take turns, and the median of the ratios counts; clocks of shared machines drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def interleave(candidates: dict[str, Callable[[], int]], rounds: int = 11, budget: float = 60.0) -> dict[str, list[float]]:
    """Run the candidates in turn; each returns how many steps it did. Seconds per step, one entry a round."""
    cuda = torch.cuda.is_available()
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    begun = time.perf_counter()
    for done in range(rounds):
        for name, run in candidates.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            steps = run()
            if cuda:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / steps)
        if done >= 2 and time.perf_counter() - begun > budget:
            break
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of time(name) / time(base)."""
    return statistics.median(a / b for a, b in zip(times[name], times[base]))


def micro(times: list[float]) -> float:
    """Median in microseconds."""
    return statistics.median(times) * 1e6
