"""Sparse variational dropout on MNIST (Molchanov, Ashukha and Vetrov 2017): errors, sparsity, sizes and speed of two LeNets.

Both are trained on the 60,000 training images, with pixels in [0, 1], by the paper's settings: Adam, batches of 100, 200 epochs, a
rate that falls to 0 along a line, the divergence by its approximation, weighted by 0 for 5 epochs and by 1 from the 20th. Errors
are those of `posterior.compress()`, a plain network with the mean weights that are left. The same layers are trained with groups
too (whole units go), and on images whose labels are drawn at random, beside binary dropout.
"""

from __future__ import annotations

import copy
import io
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from experiments import figures
from experiments.frame import SIZES, Bound, Cell, Part, Reproduction, Request, Results, Sheet, Size, number
from plausible.apps import datasets
from plausible.apps.compare.tables import mean
from plausible.core import random
from plausible.core.likelihoods import Categorical
from plausible.core.networks import choose_device
from plausible.core.priors import Flat, Prior
from plausible.core.schedules import Linear, Schedule
from plausible.core.serialise import register
from plausible.engine import Checkpoint
from plausible.engine.watching import Monitor
from plausible.fitting import fit
from plausible.methods import Ensemble, MCDropout, Method, SparseVD
from plausible.posteriors.base import Posterior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Network = Literal["lenet-300-100", "lenet-5"]
PATCH = 100
SHADES = "abcdefghijklmnopqrstuvwxy"
"""Values of a picture from the lowest to the highest, 0 in the middle: one letter a weight."""


@register(name="experiments.Late")
@dataclass(frozen=True)
class Late(Schedule):
    """`value` for the first half of the steps, then down to 0 along a line."""

    value: float

    def __call__(self, step: Tensor, total: int) -> Tensor:
        return self.value * (2 * (1 - step.float() / total)).clamp(0.0, 1.0)


@dataclass(frozen=True)
class Digits:
    """A LeNet on the first `train` images of MNIST, with their labels or with `random_labels`.

    `pictures` is the number of times that the weights are looked at on the way; `speed` is the batch that the compressed network is
    timed with, on one thread, beside the dense one.
    """

    network: Network
    method: Method
    train: int = 60_000
    test: int = 10_000
    random_labels: bool = False
    prior: Prior | None = None
    pictures: int = 0
    speed: int = 0


def network(kind: Network) -> nn.Sequential:
    """784 – 300 – 100 – 10, or LeNet-5-Caffe: 20 and 50 kernels of 5 × 5, each with a pool, and 500 units; ReLU."""
    if kind == "lenet-300-100":
        dense = (nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
        return nn.Sequential(nn.Flatten(), *dense)
    maps = (nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*maps, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


@lru_cache(maxsize=1)
def _images() -> Any:
    return datasets.mnist()


def run(settings: Digits, request: Request) -> dict[str, Any]:
    """Train all seeds, stacked, and measure each compressed network: numbers by seed."""
    module = network(settings.network)
    device = choose_device(module, request.device)
    found = _images()
    x, y = (part[: settings.train].to(device) for part in found.train)
    x_test, y_test = (part[: settings.test].to(device) for part in found.test)
    if settings.random_labels:
        y = torch.randint(10, y.shape, generator=random.generator(request.seed, 71)).to(device)
    monitors = [_monitor(settings)] if settings.pictures else []
    posterior = fit(
        module,
        (x, y),
        Ensemble(settings.method, members=request.seeds),
        likelihood=Categorical(),
        prior=settings.prior,
        seed=request.seed,
        device=request.device,
        compile=request.compile,
        precision=request.precision,
        progress=request.progress,
        callbacks=monitors,
        checkpoint=None if request.checkpoint is None else Checkpoint(request.checkpoint, seconds=120),
    )
    if posterior.interrupted:
        raise KeyboardInterrupt("the same command goes on from here")
    if request.keep is not None:
        posterior.save(request.keep, overwrite=True)
    parts = posterior.parts
    sizes = {
        "layers": [name for name, weight in module.named_parameters() if weight.ndim > 1],
        **_by_seed([measured(part, module, (x, y), (x_test, y_test), settings.speed) for part in parts]),
    }
    records = [record for monitor in monitors for record in monitor.records]
    return {**sizes, "pictures": records, "training_seconds": posterior.run["seconds"], "mode": posterior.run["mode"]}


def _monitor(settings: Digits) -> Monitor:
    plan = settings.method.plan(settings.train)
    return Monitor(lambda _, posterior: picture(posterior.parts[0]), max(1, plan.steps // plan.per_epoch // settings.pictures))


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


@torch.no_grad()
def measured(
    part: Posterior, dense: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], batch: int
) -> dict[str, Any]:
    """Errors in per cent of the compressed network, sparsity in per cent, sizes in bytes and, for a `batch`, times in ms."""
    compressed = part.compress()
    predicted = compressed(test[0]).argmax(-1)
    weights = {name: weight for name, weight in dense.named_parameters() if weight.ndim > 1}
    kept = [int(part.masks[name].sum()) if name in part.masks else weight.numel() for name, weight in weights.items()]
    total = sum(weight.numel() for weight in weights.values())
    found: dict[str, Any] = {
        "error": _error(predicted, test[1]),
        "training_error": _error(compressed(train[0]).argmax(-1), train[1]),
        "classes": len(predicted.unique()),
        "sparsity": 100 * (1 - sum(kept) / total),
        "by_layer": [100 * (1 - left / weight.numel()) for left, weight in zip(kept, weights.values())],
        "compression": total / max(sum(kept), 1),
        "bytes": part.size_on_disk(),
        "dense_bytes": _size(dense),
        "units": [len(weight) for weight in compressed.parameters() if weight.ndim > 1],
    }
    found["smaller"] = found["dense_bytes"] / found["bytes"]
    if batch:
        both = {"dense": copy.deepcopy(dense).cpu(), "compressed": compressed.cpu()}
        times = timed(both, test[0][:1].cpu().expand(batch, -1, -1, -1).contiguous())
        found |= {f"{name}_ms": value for name, value in times.items()}
        found["faster"] = times["dense"] / times["compressed"]
    return found


def _error(predicted: Tensor, y: Tensor) -> float:
    return round(100 * float((predicted != y).double().mean()), 6)


def _size(module: nn.Module) -> int:
    """Bytes of a module's file, as PyTorch writes it."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return len(file.getvalue())


def timed(modules: dict[str, nn.Module], x: Tensor, repeats: int = 30) -> dict[str, float]:
    """Milliseconds of a forward pass on one thread: the median over repeats, taken in turns."""
    threads, each = torch.get_num_threads(), {name: list[float]() for name in modules}
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            for name, module in modules.items():
                began = time.perf_counter()
                module(x)
                each[name].append(1000 * (time.perf_counter() - began))
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(values) for name, values in each.items()}


def picture(part: Posterior) -> dict[str, Any]:
    """What is left of the first kernels and of a corner of the first dense layer of LeNet-5: one letter a weight."""
    means = part.kept(part.networks()[0][0])
    kernels, patch = means["0.weight"], means["7.weight"][:PATCH, :PATCH]
    # side by side: 4 rows of 5 kernels
    tiles = kernels[:, 0].unflatten(0, (4, 5)).transpose(1, 2).flatten(2).flatten(0, 1)
    sparsity = {name: round(100 * (1 - float(mask.double().mean())), 3) for name, mask in part.masks.items()}
    return {"kernels": shaded(tiles), "patch": shaded(patch), "sparsity": sparsity}


def shaded(values: Tensor) -> list[str]:
    """Rows of letters: 0 is the middle one, the ends lie at ± the 99.5 % quantile of what is not 0."""
    there = values[values != 0].abs()
    scale = float(there.float().quantile(0.995)) if len(there) else 1.0
    middle = len(SHADES) // 2
    steps = (values / scale * middle).round().clamp(-middle, middle).long() + middle
    # what is there is seen, however small it is
    steps = torch.where((values != 0) & (steps == middle), middle + values.sign().long(), steps)
    return ["".join(SHADES[k] for k in row) for row in steps.tolist()]


def _by_seed(found: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [one[name] for one in found] for name in found[0]}


# ---------------------------------------------------------------------------------------------------------------------
# What is shown

PUBLISHED = {"lenet-300-100": ("1.92 %", "98.9-97.2-62.0", "68"), "lenet-5": ("0.75 %", "67-98-99.8-95", "280")}


def table(results: Results) -> list[Sheet]:
    """Errors, sparsity by layer, sizes and times of every network."""
    rows = []
    for cell, result in results.items():
        layers = "-".join(f"{mean(column).value:.1f}" for column in zip(*result["by_layer"]))
        units = "-".join(f"{mean(column).value:.0f}" for column in zip(*result["units"]))
        ours = [mean(result[key]).text() for key in ("error", "training_error", "compression")]
        size = f"{mean(result['bytes']).value / 1000:.1f} of {mean(result['dense_bytes']).value / 1000:.0f}"
        speed = (
            f"{mean(result['compressed_ms']).value:.2f} of {mean(result['dense_ms']).value:.2f}" if "faster" in result else "–"
        )
        rows.append((cell, *ours, layers, units, size, speed, f"{result['training_seconds']:.0f}", result["mode"]))
    head = (
        "network", "test error %", "training error %", "compression", "sparsity by layer %", "units by layer", "kB of dense",
        "ms of dense", "training seconds", "mode",
    )  # fmt: skip
    return [Sheet("Compressed networks, mean over seeds", head, tuple(rows))]


def draw(results: Results) -> Figure:
    """The kernels and the patch, from left to right as training goes on."""
    import numpy as np

    records = results["lenet-5"]["pictures"]
    figure, axes = figures.new(2, len(records), (2.2 * len(records), 4.9))
    middle = len(SHADES) // 2
    for column, record in enumerate(records):
        for row, (key, layer) in enumerate((("kernels", "0.weight"), ("patch", "7.weight"))):
            ax = axes[row, column] if len(records) > 1 else axes[row]
            shades = np.array([[SHADES.index(letter) - middle for letter in line] for line in record[key]])
            ax.imshow(shades, cmap="RdBu", vmin=-middle, vmax=middle, interpolation="nearest")
            ax.set(xticks=[], yticks=[], title=f"epoch {record['epoch']}: {record['sparsity'].get(layer, 0):.1f} % gone")
            if key == "kernels":
                for k in range(1, 5):
                    ax.axvline(5 * k - 0.5, color="0.6", linewidth=0.6)
                    ax.axhline(5 * k - 0.5, color="0.6", linewidth=0.6) if k < 4 else None
    return figure


PLAIN, CAFFE, GROUPS, RANDOM, BINARY = "lenet-300-100", "lenet-5", "groups", "random-sparse-vd", "random-dropout"
CLAIMS = {
    "full": [
        Bound("LeNet-300-100: test error", number(PLAIN, "error"), 1.92, high=1.95),
        Bound("LeNet-300-100: compression", number(PLAIN, "compression"), 68, low=68, unit="×"),
        Bound("LeNet-300-100: smaller on disk", number(PLAIN, "smaller"), low=60, unit="×"),
        Bound("LeNet-5-Caffe: test error", number(CAFFE, "error"), 0.75, high=0.80),
        Bound("LeNet-5-Caffe: compression", number(CAFFE, "compression"), 280, low=280, unit="×"),
        Bound("LeNet-300-100 by units: faster at batch 1,000", number(GROUPS, "faster"), low=5, unit="×"),
        Bound("random labels, Sparse VD: sparsity", number(RANDOM, "sparsity"), 100, low=99.9),
        Bound("the same: classes that are predicted", number(RANDOM, "classes"), 1, low=1, high=1, unit=""),
        Bound("random labels, binary dropout: training error", number(BINARY, "training_error"), "0", high=1),
    ],
    "reduced": [
        Bound("LeNet-300-100: test error", number(PLAIN, "error"), 1.92, high=14),
        Bound("LeNet-300-100: compression", number(PLAIN, "compression"), 68, low=50, unit="×"),
        Bound("LeNet-300-100: smaller on disk", number(PLAIN, "smaller"), low=60, unit="×"),
        Bound("LeNet-5-Caffe: test error", number(CAFFE, "error"), 0.75, high=14),
        Bound("LeNet-5-Caffe: compression", number(CAFFE, "compression"), 280, low=100, unit="×"),
        Bound("LeNet-300-100 by units: test error", number(GROUPS, "error"), high=16),
        Bound("LeNet-300-100 by units: faster at batch 1,000", number(GROUPS, "faster"), unit="×"),
        Bound("random labels, Sparse VD: sparsity", number(RANDOM, "sparsity"), 100, low=99.9),
        Bound("the same: classes that are predicted", number(RANDOM, "classes"), 1, low=1, high=1, unit=""),
        Bound("random labels, binary dropout: training error", number(BINARY, "training_error"), "0", high=2),
    ],
    "tiny": [],
}


def molchanov(epochs: int, lr: Schedule, groups: bool = False) -> SparseVD:
    """The paper's training; a shorter one needs a larger rate."""
    return SparseVD(epochs=epochs, batch_size=100, lr=lr, kl="molchanov", groups=groups)


def binary(epochs: int) -> MCDropout:
    """Dropout of a fifth of the hidden units, to the end."""
    return MCDropout(rate=0.2, epochs=epochs, batch_size=100, lr=1e-3, patience=None)


SETTINGS: dict[str, dict[Size, Digits]] = {
    PLAIN: {
        "full": Digits("lenet-300-100", molchanov(200, Late(1e-3))),
        "reduced": Digits("lenet-300-100", molchanov(16, Late(1e-2)), train=5_000, test=2_000),
        "tiny": Digits("lenet-300-100", molchanov(2, Late(1e-2)), train=200, test=100),
    },
    CAFFE: {
        "full": Digits("lenet-5", molchanov(200, Linear(1e-3)), pictures=8),
        "reduced": Digits("lenet-5", molchanov(8, Linear(1e-2)), train=3_000, test=1_000, pictures=4),
        "tiny": Digits("lenet-5", molchanov(2, Linear(1e-2)), train=100, test=50, pictures=2),
    },
    GROUPS: {
        "full": Digits("lenet-300-100", molchanov(200, Late(1e-3), groups=True), speed=1_000),
        "reduced": Digits("lenet-300-100", molchanov(20, Late(2e-2), groups=True), train=3_000, test=2_000, speed=1_000),
        "tiny": Digits("lenet-300-100", molchanov(2, Late(1e-2), groups=True), train=200, test=100, speed=10),
    },
    RANDOM: {
        "full": Digits("lenet-300-100", molchanov(400, Late(1e-3)), train=5_000, random_labels=True),
        "reduced": Digits("lenet-300-100", molchanov(120, Late(1e-2)), train=500, test=1_000, random_labels=True),
    },
    BINARY: {
        "full": Digits("lenet-300-100", binary(400), train=5_000, random_labels=True, prior=Flat()),
        "reduced": Digits("lenet-300-100", binary(100), train=500, test=500, random_labels=True, prior=Flat()),
    },
}
EVERY: dict[Size, Sequence[str]] = {size: [name for name, sizes in SETTINGS.items() if size in sizes] for size in SIZES}
REPRODUCTIONS = {
    "sparse": Reproduction(
        "sparse",
        "Sparse variational dropout",
        "Variational Dropout Sparsifies Deep Neural Networks. Dmitry Molchanov, Arsenii Ashukha and Dmitry Vetrov. ICML, 2017.",
        tuple(Cell(name, run, sizes) for name, sizes in SETTINGS.items()),
        (
            Part("table", "1", "Errors, sparsity, sizes and speed", EVERY, CLAIMS, table),
            Part(
                "figure",
                "weights",
                "LeNet-5's first kernels and a corner of its first dense layer",
                dict.fromkeys(SIZES, (CAFFE,)),
                draw=draw,
            ),
        ),
        "sparse",
        seeds={"full": 1, "reduced": 1, "tiny": 1},
    )
}
