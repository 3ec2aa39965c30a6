"""Training steps: ours against a plain PyTorch loop with fused Adam."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plausible as pl
from plausible.core import random
from plausible.core.data import as_data
from plausible.engine.method import Run
from plausible.engine.source import Source
from plausible.engine.stepper import Captured, StepMode, make

BATCH = 128


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def problem(sizes: tuple[int, ...], rows: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = mlp(*sizes).to(device)
    x = torch.randn(rows, sizes[0], device=device)
    y = torch.randint(10, (rows,), device=device) if sizes[-1] == 10 else torch.randn(rows, sizes[-1], device=device)
    return net, x, y


def plain_loop(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> Callable[[], int]:
    """What a user writes by hand: shuffled indices, fused Adam, eager."""
    net = copy.deepcopy(net)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

    def run() -> int:
        order = torch.randperm(len(x), device=x.device)
        for i in range(steps):
            start = i * BATCH % (len(x) - BATCH + 1)
            rows = order[start : start + BATCH]
            optimiser.zero_grad()
            f = net(x[rows])
            loss = F.cross_entropy(f, y[rows]) if y.ndim == 1 else F.mse_loss(f, y[rows])
            loss.backward()
            optimiser.step()
        return steps

    return run


def ours(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    mode: StepMode,
    members: int | None = None,
    single: pl.Method | None = None,
    prior: pl.priors.Prior | None = None,
    precision: torch.dtype | None = None,
) -> Callable[[], int]:
    """The engine's own stepper in the given mode, of MAP or of the method given."""
    data = as_data((x, y), dtype=torch.float32, device=x.device)
    likelihood = pl.likelihoods.Categorical() if y.ndim == 1 else pl.likelihoods.Gaussian(scale=1.0)
    model = pl.Model.build(
        net,
        likelihood,
        prior or pl.priors.Gaussian(),
        data.rows(torch.arange(8, device=x.device)),
        num_data=len(x),
        device=x.device,
        precision=precision,
    )
    single = single or pl.MAP(epochs=10_000, batch_size=BATCH, lr=1e-3)
    method = single if members is None else pl.Ensemble(single, members=members)
    stage = method.stages()[0]
    of_run = Run.alone(stage, model, data)
    source = Source(data, stage.plan(len(x)), seed=0, members=members)
    state = stage.start(model, of_run, random.key(0, device=x.device))
    stepper, used = make(mode, stage.step, model, of_run, state, source)
    if used != mode:
        raise RuntimeError(f"asked for {mode} steps and got {used} ones")
    position = 0

    def run() -> int:
        nonlocal position
        done = 0
        while done < steps:
            count = min(steps - done, Captured.LENGTH)
            stepper.advance(position, count, lambda _: False)
            position, done = position + count, done + count
        return steps

    return run
