"""What the Laplace benchmark fits: networks, random or trained, and their data."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Job:
    """What one process does: `who` fits `structure` over the weights `where` of `network`, or predicts with that."""

    who: str
    task: Literal["fit", "predict"]
    structure: Literal["diag", "kron", "full"]
    where: Literal["all", "last"]
    rows: int
    points: int
    network: Literal["mlp", "trained", "resnet", "classes"] = "mlp"
    device: str = "cpu"
    file: str = ""
    negligible: float = 0.0


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.second_norm = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        changes = stride > 1 or into != out
        self.around = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        return (h + (x if self.around is None else self.around(x))).relu()


def resnet18(classes: int) -> nn.Sequential:
    """For images of 32 × 32: 11.2 million weights."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for into, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        blocks += [Residual(into, out, stride), Residual(out, out, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)).eval()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))


@contextlib.contextmanager
def trained(wanted: bool, points: int = 10_000, epochs: int = 20) -> Iterator[str | None]:
    """A file with the network trained on images of MNIST, and these; None where it is not wanted or there are no images."""
    import plausible as pl

    if not wanted:
        yield None
        return
    try:
        x, y = pl.datasets.load("mnist").train
    except FileNotFoundError as error:
        print(f"no contests of a trained network: {error}")
        yield None
        return
    x, y = x[:points].reshape(points, -1).float(), y[:points]
    torch.manual_seed(0)
    net = perceptron()
    likelihood, prior = pl.likelihoods.Categorical(), pl.priors.Gaussian(1.0)
    found = pl.fit(net, (x, y), pl.MAP(epochs=epochs), likelihood=likelihood, prior=prior, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trained.pt")
        torch.save({"x": x, "y": y, "weights": {n: v[0] for n, v in found.weights().items()}}, file)
        yield file


def with_file(job: Job, file: str | None) -> Job | None:
    """The job with the file of the trained network; None where it needs one that is not there."""
    if job.network != "trained":
        return job
    return None if file is None else replace(job, file=file)


def problem(job: Job) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, inputs and labels of a job, the same in every process."""
    torch.manual_seed(0)
    rows = max(job.rows, job.points)
    if job.network == "trained":
        kept = torch.load(job.file)
        net = perceptron()
        net.load_state_dict(kept["weights"])
        return net.to(job.device), kept["x"][:rows].to(job.device), kept["y"][:rows].to(job.device)
    if job.network == "resnet":
        net, x, classes = resnet18(10), torch.randn(rows, 3, 32, 32), 10
    elif job.network == "classes":
        net, classes = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3_100)), 3_100
        x = torch.randn(rows, 64)
    else:
        net = perceptron()
        with torch.no_grad():
            net[-1].weight.mul_(4)  # so that the classes differ in probability
        x, classes = torch.rand(rows, 784), 10
    y = torch.randint(classes, (rows,))
    return net.to(job.device), x.to(job.device), y.to(job.device)
