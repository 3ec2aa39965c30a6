"""On a CUDA GPU: captured and stacked steps against the eager PyTorch loop."""

from __future__ import annotations

import json

import torch

from benchmarks.steps import ours, plain_loop, problem
from benchmarks.timing import interleave, micro, ratio

SIZES = (784, 400, 400, 10)


def main(members: tuple[int, ...] = (8, 32, 128)) -> dict[str, float]:
    net, x, y = problem(SIZES, 60_000, "cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, MLP {'-'.join(map(str, SIZES))}, batch 128, Adam")
    times = interleave(
        {
            "plain loop": plain_loop(net, x, y, 200),
            "MAP eager": ours(net, x, y, 200, "eager"),
            "MAP captured": ours(net, x, y, 1024, "captured"),
            "MAP compiled and captured": ours(net, x, y, 1024, "compiled+captured"),
        }
    )
    result = {name: micro(values) for name, values in times.items()}
    for name, value in result.items():
        print(f"  {name:28} {value:9.1f} µs a step   {ratio(times, name, 'plain loop'):6.3f} × plain")
    for count in members:
        stacked = interleave({"s": ours(net, x, y, 512, "compiled+captured", count)}, rounds=5)
        result[f"{count} stacked, per member"] = micro(stacked["s"]) / count
        print(f"  {count:4} stacked, compiled and captured: {micro(stacked['s']) / count:7.2f} µs per member-step")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
