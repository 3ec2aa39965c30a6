"""On a CUDA GPU: 1,024 chains of the perceptron's posterior in one program, leapfrogs and effective draws of f(x) per second."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

import torch
from torch import nn

import plausible as pl
from benchmarks.mcmc_problem import HIDDEN, INPUTS, NOISE, ROWS, problem
from benchmarks.timing import interleave, micro
from plausible.blocks.chains import convergence
from plausible.blocks.chains.compiled import CapturedDensity
from plausible.blocks.chains.density import ModelDensity, Point
from plausible.blocks.kernels.fused import fused_density
from plausible.core.data import as_data


def main(chains: int = 1024, leapfrogs: int = 50, draws: int = 200, warmup: int = 300) -> dict[str, float]:
    """Trajectories of 50 leapfrogs: eager, captured, compiled and captured, fused into one kernel; then HMC and ChEES whole."""
    x, y, watched = (torch.from_numpy(part).cuda() for part in problem())
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).cuda()
    data = as_data((x, y), dtype=torch.float32, device=x.device)
    model = pl.Model.build(
        net, pl.likelihoods.Gaussian(scale=NOISE), pl.priors.Gaussian(), data.all(), num_data=ROWS, device="cuda"
    )
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {chains:,} chains, trajectories of {leapfrogs} leapfrogs"
    )
    result: dict[str, float] = {}
    for count in (1, 64, chains):
        eager = ModelDensity(model, data, count)
        captured, compiled = CapturedDensity.of(eager), CapturedDensity.of(eager)
        compiled.inner = True
        q = 0.1 * torch.randn(count, eager.size, device="cuda")
        point = Point(q, torch.randn_like(q), *eager.evaluate(q))
        step, mass = torch.full((count,), 1e-3, device="cuda"), torch.ones(eager.size, device="cuda")

        def path(target: ModelDensity, point: Point = point, step: torch.Tensor = step, mass: torch.Tensor = mass) -> int:
            with torch.no_grad():
                target.leapfrogs(point, step, mass, leapfrogs)
            return leapfrogs

        fused = fused_density(eager)
        ways = {"eager": eager, "captured": captured, "compiled and captured": compiled, "fused": fused}
        times = interleave({name: functools.partial(path, target) for name, target in ways.items() if target}, rounds=7)
        for name, values in times.items():
            each = micro(values)
            result[f"{name}, {count} chains, µs per leapfrog"] = each
            speed = 1e6 * count / each
            print(f"  {count:5} chains, {name:22} {each:9.1f} µs per leapfrog, {speed:14,.0f} chain-leapfrogs per second")
    for method in (
        pl.HMC(draws=draws, chains=chains, warmup=warmup, leapfrogs=200),
        pl.ChEES(draws=draws, chains=chains, warmup=warmup),
    ):
        start = time.perf_counter()
        warm: Any = pl.fit(model, data, method, compile=True, progress=False)
        first = time.perf_counter() - start
        start = time.perf_counter()
        more = warm.extend(draws, progress=False)
        seconds = time.perf_counter() - start
        f = more.functions(watched)[-draws * chains :].reshape(draws, chains, -1).transpose(0, 1)
        size, mixed = convergence.ess_bulk(f), convergence.rhat(f)
        work = float(more.statistics["leapfrogs"][:, -draws:].sum())
        name = type(method).__name__
        result |= {
            f"{name}, effective draws per second": float(size.median()) / seconds,
            f"{name}, leapfrogs per second": work / seconds,
            f"{name}, worst R̂ of f": float(mixed.max()),
            f"{name}, seconds with warm-up": first,
        }
        print(
            f"  {name}: {float(size.median()) / seconds:,.0f} effective draws of f(x) per second (worst input "
            f"{float(size.min()) / seconds:,.0f}), {work / seconds:,.0f} leapfrogs per second, R̂ {float(mixed.max()):.3f}; "
            f"first fit {first:.1f} s, {seconds:.1f} s for {draws} more draws of {chains:,} chains"
        )
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
