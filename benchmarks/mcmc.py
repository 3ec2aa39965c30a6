"""Chains: leapfrogs and effective draws of f(x) per second, ours and peers' in one run.

`python -m benchmarks.mcmc`: 500 rows, 10 inputs, one layer of 50 tanh units, 601 weights (`benchmarks.mcmc_problem`). Peers are
looked for in the environment of the interpreter that `PLAUSIBLE_PEERS` names; what is not there is left out. Every candidate is a
process of its own and takes its turn; times are medians over rounds, ratios medians of those within a round. First trajectories of
50 leapfrogs, whole transitions with their momenta and decisions, of one chain and of four. Then samplers: all start where networks
are initialised, warm up, and draw; f(x) at 50 inputs is compared between them, and effective draws are counted by the same
estimator, `convergence.ess`.

`python -m benchmarks.mcmc leapfrogs` or `… samplers` does half of it; `… samplers NAME …` some of the samplers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.mcmc_peers import LEAPFROGS, LENGTH, STEP, numpyro_nuts, pyro_nuts
from benchmarks.mcmc_problem import HIDDEN, INPUTS, NOISE, outputs, problem, start
from benchmarks.workers import Worker, serve

OURS = ("ours", "ours, eager")
SINGLE = ("ours, eager", "by hand", "hamiltorch", "Pyro", "Pyro, JIT")
"""What runs on one thread, because PyTorch's small operations are slower on two."""
PEERS = {
    "blackjax": "blackjax",
    "numpyro": "numpyro",
    "hamiltorch": "hamiltorch",
    "Pyro": "pyro",
    "Pyro, JIT": "pyro",
    "by hand": "torch",
}
"""Name of a candidate → the module it needs."""


@dataclass(frozen=True)
class Job:
    """What one process does: trajectories, or a sampler with these settings, whose draws go to a file in `folder`."""

    who: str
    task: Literal["leapfrogs", "sample"]
    chains: int = 1
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    threads: int = 2

    @property
    def own(self) -> bool:
        """Whether it runs under this interpreter."""
        return self.who.startswith("ours") or self.who == "by hand"


# Ours -----------------------------------------------------------------------------------------------------------------


def own_target(chains: int, form: str = "native") -> Any:
    """The density in its native, compiled or eager form."""
    import torch
    from torch import nn

    import plausible as pl
    from plausible.blocks.chains.compiled import CompiledDensity
    from plausible.blocks.chains.density import ModelDensity
    from plausible.blocks.kernels.native import native_density
    from plausible.core.data import as_data

    x, y, _ = map(torch.from_numpy, problem())
    data = as_data((x, y), dtype=torch.float32, device=torch.device("cpu"))
    net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    likelihood, prior = pl.likelihoods.Gaussian(scale=NOISE), pl.priors.Gaussian()
    model = pl.Model.build(net, likelihood, prior, data.all(), num_data=len(x), device="cpu")
    target = ModelDensity(model, data, chains)
    if form == "eager":
        return target
    found = native_density(target) if form == "native" else CompiledDensity.of(target)
    if found is None:
        raise RuntimeError("there is no native code for this machine")
    return found


def own_leapfrogs(chains: int, form: str) -> Callable[[int], None]:
    """Transitions of `HMC` without adaptation."""
    import torch

    import plausible as pl
    from plausible.core import random

    method = pl.HMC(draws=1, chains=chains, warmup=0, leapfrogs=LENGTH, jitter=0.0, adapt=False, step_size=STEP)
    target, first = own_target(chains, form), torch.from_numpy(start(chains))
    with torch.no_grad():
        held = [method.started(target, first, random.key(0))]

    def run(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                held[0] = method.advanced(target, held[0])[0]

    return run


def own_sampler(name: str, chains: int, seed: int, **settings: Any) -> dict[str, Any]:
    """A sampler of the library over its native target: warm-up and draws timed apart, and the making of the code before both."""
    import torch

    import plausible as pl
    from plausible.core import random

    begun = time.perf_counter()
    target = own_target(chains)
    found: dict[str, Any] = {"compile": time.perf_counter() - begun}
    method = getattr(pl, name)(chains=chains, **settings)
    first = torch.from_numpy(start(chains, seed + 1))
    positions = []
    with torch.no_grad(), random.isolated(seed, first.device):
        begun, worked = time.perf_counter(), time.process_time()
        state = method.started(target, first, random.key(seed))
        for part, count in (("warmup_", method.warmup), ("", method.draws * method.thin)):
            leapfrogs = 0.0
            for number in range(count):
                state, _ = method.advanced(target, state)
                leapfrogs += float(state.statistics["leapfrogs"].sum())
                if not part and (number + 1) % method.thin == 0:
                    positions.append(state.position[:chains].numpy().copy())
            found |= {part + "seconds": time.perf_counter() - begun, part + "leapfrogs": leapfrogs}
            found["cpu"] = time.process_time() - worked
            begun, worked = time.perf_counter(), time.process_time()
    found["warmup"] = found.pop("warmup_seconds")
    step, acceptance = (float(state.statistics[key].mean()) for key in ("step_size", "acceptance"))
    return {**found, "step_size": step, "acceptance": acceptance, "positions": np.stack(positions, axis=1)}


# A process ------------------------------------------------------------------------------------------------------------


def child(job: Job) -> None:
    """Do a job when asked."""
    if job.task == "leapfrogs":
        count = 2 if job.who.startswith(("Pyro", "hamiltorch", "ours, eager")) else 20
        if job.who.startswith("ours"):
            run = own_leapfrogs(job.chains, job.who.partition(", ")[2] or "native")
        else:
            run = LEAPFROGS[job.who](job.chains)
        run(count)
        serve(lambda: run(count), count=lambda: {"leapfrogs": count * LENGTH})
    else:
        serve(lambda: None, sample=lambda: sampled(job))


def sampled(job: Job) -> dict[str, Any]:
    """Draw, keep the draws in a file, and answer the numbers."""
    if job.who == "numpyro":
        found = numpyro_nuts(job.chains, job.settings["warmup"], job.settings["draws"], job.seed)
    elif job.who == "Pyro":
        with np.load(job.settings["like"]) as other:
            found = pyro_nuts(
                float(other["step_size"]),
                other["inverse_mass"],
                other["positions"][0, -1],
                job.settings["draws"],
                job.seed,
                jit=True,
            )
    else:
        settings = dict(job.settings)
        found = own_sampler(settings.pop("method"), job.chains, job.seed, **settings)
    path = Path(job.folder) / f"{abs(hash(json.dumps(asdict(job)))):x}.npz"
    np.savez(path, **found)
    return {key: value for key, value in found.items() if np.ndim(value) == 0} | {"path": str(path)}


def peer_python(module: str) -> str | None:
    """An interpreter that can import a module."""
    for python in filter(None, (os.environ.get("PLAUSIBLE_PEERS"), sys.executable)):
        with contextlib.suppress(OSError):
            if not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
                return python
    return None


@contextlib.contextmanager
def workers(jobs: Sequence[Job], limit: float) -> Iterator[list[Worker]]:
    """Processes for jobs, each under an interpreter that has what it needs; ended afterwards."""
    started: list[Worker] = []
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "XLA_FLAGS")}
    try:
        for job in jobs:
            os.environ["OMP_NUM_THREADS"] = str(job.threads)
            os.environ["XLA_FLAGS"] = (
                "" if job.threads > 1 else "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
            )
            python = sys.executable if job.own else peer_python(PEERS[job.who])
            words = [python or sys.executable, "-m", "benchmarks.mcmc", "child", json.dumps(asdict(job))]
            started.append(Worker(words, limit, quiet=not job.own))
        yield started
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        for worker in started:
            worker.close()


def verdict(met: bool) -> str:
    """In a word."""
    return "met" if met else "MISSED"


# Reports --------------------------------------------------------------------------------------------------------------


def available(names: Sequence[str]) -> list[str]:
    """Candidates whose libraries are there."""
    return [name for name in names if name not in PEERS or peer_python(PEERS[name]) is not None]


def leapfrogs(rounds: int = 7, budget: float = 120.0, limit: float = 600.0) -> dict[str, Any]:
    """Microseconds of a leapfrog, all chains together, for one chain and for four."""
    found: dict[str, Any] = {}
    for chains, names in ((1, (*OURS, *PEERS)), (4, ("ours", "blackjax", "by hand", "numpyro"))):
        jobs = [Job(name, "leapfrogs", chains, threads=1 if name in SINGLE else 2) for name in available(names)]
        with workers(jobs, limit) as running:
            counts = [(worker.ask("count") or {"leapfrogs": 1})["leapfrogs"] for worker in running]
            begun = time.perf_counter()
            for number in range(1, rounds + 1):
                for worker in running:
                    worker.turn(number)
                if number > 2 and time.perf_counter() - begun > budget:
                    break
        print(f"{chains} chain{'s' if chains > 1 else ''}, a leapfrog in trajectories of {LENGTH}, whole transitions")
        mine = running[0]
        for job, worker, count in zip(jobs, running, counts):
            if not worker.times:
                print(f"  {job.who:16} failed, or took more than {limit:.0f} s")
                continue
            ratio = worker.ratio(mine) * counts[0] / count
            row = {"µs": 1e6 * worker.seconds / count, "cpu µs": 1e6 * worker.cpu / count, "ratio": ratio}
            found[f"{job.who}, {chains}"] = row
            print(
                f"  {job.who:16} {row['µs']:9.1f} µs {row['cpu µs']:9.1f} µs of processors {row['ratio']:8.2f} × our time",
                flush=True,
            )
    for chains, factor, aim in ((1, 1 / 1.2, "1/1.2"), (4, 1.5, "1.5")):
        if (other := found.get(f"blackjax, {chains}")) is not None:
            met = verdict(other["ratio"] >= factor)
            print(f"  {chains}: blackjax takes {other['ratio']:.2f} × our time (aim {aim}: {met})")
    return found


SAMPLERS: dict[str, list[Job]] = {
    "numpyro NUTS, 1 chain": [Job("numpyro", "sample", 1, settings={"warmup": 300, "draws": 300})],
    "ours, HMC, 4 chains": [Job("ours", "sample", 4, settings={"method": "HMC", "warmup": 400, "draws": 400})],
    "ours, HMC, low rank, 4 chains": [
        Job("ours", "sample", 4, settings={"method": "HMC", "metric": "lowrank", "warmup": 400, "draws": 400, "leapfrogs": 75})
    ],
    "ours, NUTS, 4 chains": [Job("ours", "sample", 4, settings={"method": "NUTS", "warmup": 300, "draws": 200})],
    "ours, ChEES, 8 chains": [Job("ours", "sample", 8, settings={"method": "ChEES", "warmup": 400, "draws": 200})],
    "Pyro NUTS, JIT, 1 chain": [Job("Pyro", "sample", 1, settings={"draws": 30}, threads=1)],
    "numpyro NUTS, 2 processes of 1 chain": [
        Job("numpyro", "sample", 1, seed, {"warmup": 300, "draws": 300}, threads=1) for seed in (1, 2)
    ],
    "numpyro NUTS, 4 chains vectorised": [Job("numpyro", "sample", 4, settings={"warmup": 300, "draws": 100})],
}
"""Samplers and the processes they consist of, side by side. Pyro's takes minutes to warm up, so it gets numpyro's step size and
masses, starts at a draw of its, and is not charged for any of it."""


def samplers(only: Sequence[str] = (), limit: float = 900.0) -> dict[str, Any]:
    """Effective draws of f(x) per second at 50 inputs, the median and the worst, with warm-up and without."""
    import torch

    from plausible.blocks.chains import convergence

    watched, found, draws = problem()[2], dict[str, Any](), dict[str, torch.Tensor]()
    like = ""
    with tempfile.TemporaryDirectory() as folder:
        for name, jobs in SAMPLERS.items():
            if (only and not any(part in name for part in only)) or not available([jobs[0].who]):
                continue
            if jobs[0].who == "Pyro" and not like:
                continue
            more = {"like": like} if jobs[0].who == "Pyro" else {}
            jobs = [replace(job, folder=folder, settings={**job.settings, **more}) for job in jobs]
            with workers(jobs, limit) as running, ThreadPoolExecutor(len(jobs)) as pool:
                answers = list(pool.map(lambda worker: worker.ask("sample"), running))
            if not all(answers):
                print(f"{name}: failed, or took more than {limit:.0f} s", flush=True)
                continue
            told = [answer for answer in answers if answer is not None]
            if name.startswith("numpyro NUTS, 1"):
                like = told[0]["path"]
            f = torch.cat([torch.from_numpy(outputs(np.load(t["path"])["positions"], watched)) for t in told])
            seconds, warm = (max(t[key] for t in told) for key in ("seconds", "warmup"))
            size, rhat = convergence.ess(f), float(convergence.rhat(f).max())
            steps = sum(t["leapfrogs"] for t in told)
            row = {
                "draws": f.shape[0] * f.shape[1],
                "per second": float(size.median()) / seconds,
                "worst": float(size.min()) / seconds,
                "per processor second": float(size.median()) / sum(t["cpu"] for t in told),
                "with warm-up": float(size.median()) / (seconds + warm),
                "per 1000 leapfrogs": 1e3 * float(size.median()) / steps,
                "µs": 1e6 * seconds / steps,
                "rhat": rhat,
                "compile": max(t["compile"] for t in told),
                "seconds": seconds,
                "warm-up": warm,
                "step_size": told[0].get("step_size", float("nan")),
                "leapfrogs": steps / f.shape[0] / f.shape[1],
            }
            found[name], draws[name] = row, f
            print(
                f"  {name:40} {row['per second']:8.2f} effective draws a second ({row['per processor second']:.2f} a processor's "
                f"second, worst input {row['worst']:.2f}, with warm-up {row['with warm-up']:.2f}); "
                f"{row['per 1000 leapfrogs']:.2f} per 1000 leapfrogs, {row['µs']:.0f} µs each, "
                f"{row['leapfrogs']:.0f} a draw; R̂ {rhat:.3f}; {seconds:.0f} s, warm-up {warm:.0f} s, "
                f"compiling {row['compile']:.0f} s",
                flush=True,
            )
    _agree(draws)
    best = max((row["per second"] for name, row in found.items() if name.startswith("ours")), default=float("nan"))
    for name, aim in (
        ("numpyro NUTS, 1 chain", 3),
        ("numpyro NUTS, 2 processes of 1 chain", 3),
        ("Pyro NUTS, JIT, 1 chain", 20),
    ):
        if name in found:
            times = best / found[name]["per second"]
            print(f"  our best: {times:.1f} × {name} (aim {aim}: {verdict(times >= aim)})")
    return found


def _agree(draws: dict[str, Any]) -> None:
    """Differences between means of f(x) of two samplers in their Monte Carlo standard errors; the largest of 50 is some 2.5."""
    from plausible.blocks.chains import convergence

    def moments(f: Any) -> tuple[Any, Any]:
        return f.mean((0, 1)), f.flatten(0, 1).var(0) / convergence.ess(f)

    names = list(draws)
    for name in names[1:]:
        (one, first), (two, second) = moments(draws[names[0]]), moments(draws[name])
        z = (one - two) / (first + second).sqrt()
        largest, usual = float(z.abs().max()), float(z.square().mean().sqrt())
        print(f"  means of f(x), {name} less {names[0]}: at most {largest:.1f} standard errors, root mean square {usual:.2f}")


def main() -> None:
    """Arguments: nothing, "leapfrogs", or "samplers" and parts of their names."""
    words = sys.argv[1:]
    warnings.simplefilter("ignore")
    if words[:1] == ["child"]:
        return child(Job(**json.loads(words[1])))
    import torch

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {INPUTS}-{HIDDEN}-1 tanh, 500 rows; load {os.getloadavg()[0]:.1f}"
    )
    result: dict[str, Any] = {}
    if words[:1] != ["samplers"]:
        result |= leapfrogs()
    if words[:1] != ["leapfrogs"]:
        result |= samplers(words[1:])
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
