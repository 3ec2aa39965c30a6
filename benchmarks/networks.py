"""Steps of real networks on a CUDA GPU: a ResNet-18 and a vision transformer on images of 32 × 32, in batches of 128.

Every method against the same loop by hand, eager and captured in a CUDA graph, with TensorFloat-32 for matrix products; memory is
what building and running a candidate takes at its peak. `python -m benchmarks.networks small` tries the code on any machine.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plausible as pl
from benchmarks.laplace_problem import resnet18
from benchmarks.steps import BATCH, ours
from benchmarks.timing import interleave, micro, ratio

STEPS, ROWS, ENDLESS = 24, 2560, 10_000
FIXED = {"epochs": ENDLESS, "batch_size": BATCH, "lr": 1e-3}
METHODS: dict[str, pl.Method] = {
    "MAP": pl.MAP(**FIXED),
    "SGLD": pl.SGLD(epochs=ENDLESS, batch_size=BATCH, lr=1e-9),
    "SGHMC": pl.SGHMC(epochs=ENDLESS, batch_size=BATCH, lr=1e-9),
    "MeanField, weights": pl.MeanField(estimator="weights", **FIXED),
    "IVON": pl.IVON(epochs=ENDLESS, batch_size=BATCH),
    "MeanField, local": pl.MeanField(**FIXED),
    "Rank1, 4 components": pl.Rank1(components=4, **FIXED),
    "MC dropout": pl.MCDropout(**FIXED),
    "sparse VD": pl.SparseVD(**FIXED),
}
BROAD = ("MAP", "MeanField, weights", "IVON")  # also in bfloat16


class Patches(nn.Module):
    """A vision transformer of 10.7 million weights: patches of 4 × 4, six blocks of width 384 with six heads."""

    def __init__(self, classes: int, width: int = 384, depth: int = 6):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.empty(64, width))
        self.reset_parameters()
        block = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.last = nn.Linear(width, classes)

    def reset_parameters(self) -> None:
        """The places anew."""
        nn.init.normal_(self.place, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).mT + self.place
        return self.last(self.blocks(tokens).mean(1))


def by_hand(net: nn.Module, x: Tensor, y: Tensor, steps: int, captured: bool) -> Callable[[], int]:
    """Shuffled batches, fused Adam; captured: the step as one CUDA graph that is replayed."""
    net = copy.deepcopy(net).train()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, fused=x.is_cuda, capturable=captured)
    rows = torch.zeros(BATCH, dtype=torch.int64, device=x.device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()

    replay: Callable[[], None] = step
    kept = step  # and with it the weights, whose memory the graph writes to
    if captured:
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay

    def run() -> int:
        order = torch.randperm(len(x), device=x.device)
        for k in range(steps):
            start = k * BATCH % (len(x) - BATCH + 1)
            rows.copy_(order[start : start + BATCH])
            replay()
        return steps if kept else 0

    return run


def contest(
    name: str, net: nn.Module, x: Tensor, y: Tensor, steps: int, without: Collection[str]
) -> dict[str, dict[str, float]]:
    """Time and memory of every candidate on one network."""
    cuda = x.is_cuda
    mode = "captured" if cuda else "eager"
    makers: dict[str, Callable[[], Callable[[], int]]] = {"plain loop": lambda: by_hand(net, x, y, steps, False)}
    if cuda:
        makers["plain loop, captured"] = lambda: by_hand(net, x, y, steps, True)
    for method, single in METHODS.items():
        makers[method] = lambda single=single: ours(net, x, y, steps, mode, None, single)  # type: ignore[misc]
        if method in BROAD:
            makers[f"{method}, bfloat16"] = lambda single=single: ours(  # type: ignore[misc]
                net, x, y, steps, mode, None, single, precision=torch.bfloat16
            )
    makers["MAP, 4 stacked"] = lambda: ours(net, x, y, steps, mode, 4)
    if name.startswith("ResNet"):
        last = copy.deepcopy(net).to(memory_format=torch.channels_last)  # `to` would change the weights of all candidates
        images = x.to(memory_format=torch.channels_last)
        makers["MAP, channels last"] = lambda: ours(last, images, y, steps, mode)
        makers["MAP, channels last, bfloat16"] = lambda: ours(last, images, y, steps, mode, precision=torch.bfloat16)
    found: dict[str, dict[str, float]] = {}
    candidates: dict[str, Callable[[], int]] = {}
    for candidate, make in makers.items():
        if candidate in without:
            continue
        print(f"  (building {candidate})", flush=True)
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            run = make()
            run()
        except (RuntimeError, ValueError, ArithmeticError) as error:
            print(f"  {candidate:30} failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        candidates[candidate] = run
        found[candidate] = {"GiB": (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0}
    times = interleave(candidates, rounds=5, budget=40)
    base = "plain loop, captured" if cuda else "plain loop"
    weights = sum(p.numel() for p in net.parameters()) / 1e6
    print(f"{name}, {weights:.1f} million weights")
    for candidate, values in times.items():
        found[candidate] |= {"ms": micro(values) / 1000, "ratio": ratio(times, candidate, base)}
        one = found[candidate]
        print(f"  {candidate:30} {one['ms']:8.2f} ms   {one['ratio']:6.2f} × {base}   {one['GiB']:6.2f} GiB", flush=True)
    return found


def main(small: bool = False, without: Collection[str] = ()) -> dict[str, dict[str, dict[str, float]]]:
    """All candidates on both networks, but those that are left out."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and not small else "cpu"
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}, batch {BATCH}")
    rows, steps = (ROWS, STEPS) if device == "cuda" else (BATCH, 1)
    x, y = torch.randn(rows, 3, 32, 32, device=device), torch.randint(10, (rows,), device=device)
    nets = {"vision transformer": Patches(10), "ResNet-18": resnet18(10)}
    if small:
        nets = {"small transformer": Patches(10, 48, 1)}
    result = {name: contest(name, net.to(device), x, y, steps, without) for name, net in nets.items()}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.networks", description=__doc__)
    parser.add_argument("size", nargs="?", choices=["small"], help="small: any machine, no result")
    parser.add_argument("--without", action="append", default=[], help="leave a candidate out")
    given = parser.parse_args()
    main(given.size == "small", given.without)
