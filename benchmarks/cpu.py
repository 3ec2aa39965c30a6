"""On the CPU: MAP and stacked ensembles against plain loops, the cost of importing, the overhead of `fit`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import plausible as pl
from benchmarks.steps import mlp, ours, plain_loop, problem
from benchmarks.timing import interleave, micro, ratio

LARGE, SMALL = (784, 400, 400, 10), (8, 50, 50, 1)


def steps(sizes: tuple[int, ...], rows: int, count: int, members: tuple[int, ...]) -> dict[str, float]:
    """Steps of one network in all modes, and stacked ones per member, in units of the plain loop."""
    net, x, y = problem(sizes, rows, "cpu")
    candidates = {"plain loop": plain_loop(net, x, y, count)}
    candidates["MAP eager"] = ours(net, x, y, count, "eager")
    candidates["MAP compiled"] = ours(net, x, y, count, "compiled")
    for number in members:
        candidates[f"{number} stacked"] = ours(net, x, y, max(4, count // number), "compiled", number)
    times = interleave(candidates)
    print(f"MLP {'-'.join(map(str, sizes))}, batch 128, Adam")
    result = {}
    for name, values in times.items():
        many = int(name.split()[0]) if "stacked" in name else 1
        result[name] = ratio(times, name, "plain loop") / many
        gain = f"{1 / result[name]:6.2f}× faster than {many} plain loops" if many > 1 else f"{result[name]:6.3f} × plain"
        print(f"  {name:14} {micro(values) / many:9.1f} µs per model-step   {gain}")
    return result


def threads() -> dict[str, float]:
    """Time of a MAP step on one thread over that on two, for networks on both sides of where the engine changes over."""
    result = {}
    print("MAP eager, one thread over two (below 1: one is faster)")
    for sizes in ((8, 50, 50, 1), (8, 200, 200, 1), (100, 200, 10), LARGE):
        net, x, y = problem(sizes, 4096, "cpu")
        step = ours(net, x, y, 32, "eager")

        def on(number: int, step: Callable[[], int] = step) -> Callable[[], int]:
            def run() -> int:
                torch.set_num_threads(number)
                return step()

            return run

        times = interleave({"one": on(1), "two": on(2)})
        name, work = "-".join(map(str, sizes)), sum(p.numel() for p in net.parameters()) * 128
        result[f"threads: {name}"] = ratio(times, "one", "two")
        print(f"  {name:16} {work / 1e6:6.1f} million multiplications   {result[f'threads: {name}']:6.3f}")
    torch.set_num_threads(2)
    return result


def importing(rounds: int = 7) -> float:
    """Time of importing plausible's `fit` over that of `import torch`, in fresh interpreters."""
    statements = {"torch": "import torch", "plausible": "from plausible import fit"}
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(rounds):
        for name, statement in statements.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", statement], check=True)
            times[name].append(time.perf_counter() - start)
    found = statistics.median(b / a for a, b in zip(times["torch"], times["plausible"]))
    print(f"from plausible import fit: {found:.3f} × import torch ({statistics.median(times['torch']):.2f} s)")
    return found


def overhead(rounds: int = 7) -> float:
    """Seconds that `fit` takes beyond its steps: a run of one step, uncompiled."""
    net, x, y = mlp(*SMALL), torch.randn(1000, SMALL[0]), torch.randn(1000, SMALL[-1])
    values = []
    for _ in range(rounds):
        start = time.perf_counter()
        pl.fit(net, (x, y), pl.MAP(epochs=1, batch_size=None), compile=False, progress=False)
        values.append(time.perf_counter() - start)
    print(f"fit with one step, uncompiled: first call {values[0]:.3f} s, median {statistics.median(values):.3f} s")
    return statistics.median(values)


def main(parts: tuple[str, ...] = ("import", "small", "large", "threads")) -> dict[str, float]:
    torch.set_num_threads(2)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    result: dict[str, float] = {}
    if "import" in parts:
        result = {"import": importing(), "overhead of fit in seconds": overhead()}
    for name, sizes, rows, count, members in (("small", SMALL, 4096, 64, (8, 32)), ("large", LARGE, 8192, 16, (8,))):
        if name not in parts:
            continue
        result |= {f"{name}: {key}": value for key, value in steps(sizes, rows, count, members).items()}
    if "threads" in parts:
        result |= threads()
    return result


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or ("import", "small", "large", "threads"))
