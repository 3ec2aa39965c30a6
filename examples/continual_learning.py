"""Three tasks, one after the other: each posterior is the prior of the next, and what was learned first is kept.

A wavy border between two classes is seen strip by strip. Run: python examples/continual_learning.py [--quick].
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import plausible as pl

STRIPS = ((-3.0, -1.0), (-1.0, 1.0), (1.0, 3.0))


def task(strip: tuple[float, float], rows: int, seed: int) -> tuple[Tensor, Tensor]:
    low, high = strip
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed))
    x = torch.stack([low + (high - low) * x[:, 0], 4 * x[:, 1] - 2], 1)
    return x, (x[:, 1] > torch.sin(2 * x[:, 0])).long()


def main(quick: bool = False) -> None:
    tasks = [task(strip, 150, k) for k, strip in enumerate(STRIPS)]
    tests = [task(strip, 500, 10 + k) for k, strip in enumerate(STRIPS)]
    mode = pl.MAP(epochs=10 if quick else 300, lr=0.02)
    ways = {
        "training on": (mode, False),
        "diagonal": (pl.Laplace(structure="diag", mode=mode), True),
        "Kronecker factors": (pl.Laplace(structure="kron", mode=mode), True),
        "full": (pl.Laplace(structure="full", mode=mode), True),
    }
    print("accuracy on each task, after all three")
    for name, (method, carry) in ways.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))
        posterior = pl.fit(net, tasks[0], method, progress=False)
        for data in tasks[1:]:
            prior = pl.priors.Earlier(posterior) if carry else None
            posterior = pl.fit(net, data, method, prior=prior, init=posterior, progress=False)
        scores = [pl.metrics.accuracy(posterior.predict(x), y) for x, y in tests]
        print(f"{name:18}", *(f"{score:.2f}" for score in scores), f"  mean {sum(scores) / len(scores):.2f}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
