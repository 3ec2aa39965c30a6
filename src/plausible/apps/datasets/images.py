"""MNIST, Fashion-MNIST, CIFAR-10 and the reference predictive for it."""

from __future__ import annotations

import gzip
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plausible.apps.datasets import places
from plausible.apps.datasets.acquire import ensure
from plausible.apps.datasets.catalogue import entry
from plausible.apps.datasets.digests import reading, unpacked
from plausible.apps.datasets.results import Dataset

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCH, RECORD = 10_000, 1 + 3 * 32 * 32  # images in a batch, bytes of an image with its label


def read_idx(path: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """A gzipped idx file of bytes (two zeros, type 8, dimensions, sizes, data) → uint8 of this shape."""
    header = 4 + 4 * len(shape)
    expected = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
    with reading(path, name):
        raw = gzip.decompress(path.read_bytes())
        if raw[:header] != expected or len(raw) != header + int(np.prod(shape)):
            raise ValueError(f"not an idx file of bytes {list(shape)}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=header).reshape(shape)


def pixels(x: Tensor, raw: bool) -> Tensor:
    return x if raw else x.float().div_(255)


def idx_set(name: str, classes: tuple[str, ...], raw: bool) -> Dataset:
    """MNIST and its like: 60,000 + 10,000 images of 28×28."""
    paths = ensure(entry(name))

    def part(count: int, images: Path, labels: Path) -> tuple[Tensor, Tensor]:
        x = read_idx(images, name, (count, 28, 28)).unsqueeze(1)
        return pixels(x, raw), read_idx(labels, name, (count,)).long()

    return Dataset(name, part(60_000, paths[0], paths[1]), part(10_000, paths[2], paths[3]), classes=classes)


def mnist(raw: bool = False) -> Dataset:
    """Handwritten digits: x float32 `[N, 1, 28, 28]` in [0, 1] (uint8 where `raw`), y int64 `[N]`; 60,000 + 10,000."""
    return idx_set("mnist", tuple("0123456789"), raw)


def fashion_mnist(raw: bool = False) -> Dataset:
    """Articles of clothing, in shapes and sizes as `mnist`."""
    return idx_set("fashion_mnist", FASHION, raw)


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """10,000 records of a label and 3×32×32 pixels → images uint8 and labels int64."""
    with reading(path, "cifar10"):
        raw = unpacked(path)
        if len(raw) != BATCH * RECORD:
            raise ValueError(f"{len(raw):,} bytes unpacked, expected {BATCH * RECORD:,}")
    records = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(BATCH, RECORD)
    return records[:, 1:].reshape(BATCH, 3, 32, 32), records[:, 0].long()


def cifar10(raw: bool = False, parts: Sequence[int] = (1, 2, 3, 4, 5)) -> Dataset:
    """Small photographs: x float32 `[N, 3, 32, 32]` in [0, 1] (uint8 where `raw`), y int64 `[N]`; 50,000 + 10,000.

    parts: which of the five training batches of 10,000, in this order; each is about a balanced sample of the whole. As
    float32 all of it takes 0.7 GB, raw a quarter of that.
    """
    chosen = tuple(parts)
    if not chosen or len(set(chosen)) < len(chosen) or any(part not in (1, 2, 3, 4, 5) for part in chosen):
        raise ValueError(f"parts must be different numbers of training batches, 1 to 5, got {parts!r}")
    known = entry("cifar10")
    here = tuple(part for part in (1, 2, 3, 4, 5) if places.find(known.files[part - 1]) is not None)
    hint = f"parts={here} reads the training batches that are here" if here else ""
    paths = ensure(known, [known.files[part - 1] for part in chosen] + [known.files[5]], hint=hint)
    *batches, (x_test, y_test) = [read_batch(path) for path in paths]
    x, y = (torch.cat(parts) for parts in zip(*batches))
    return Dataset("cifar10", (pixels(x, raw), y), (pixels(x_test, raw), y_test), classes=CIFAR10)


def cifar10_hmc() -> Tensor:
    """Class probabilities of full-batch HMC for CIFAR-10's test images in the order of `cifar10().test`, `[10000, 10]`.

    The Bayesian model average of Izmailov et al. 2021: ResNet-20 with filter response normalisation and swish, no
    augmentation, prior variance 1/5. A yardstick for `metrics.agreement` and `metrics.total_variation`.
    """
    (path,) = ensure(entry("cifar10_hmc"))
    with reading(path, "cifar10_hmc"):
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as content:
            probs = content["probs"]
        if probs.shape != (10_000, 10):
            raise ValueError(f"probs has shape {probs.shape}, expected (10000, 10)")
    return torch.from_numpy(probs.astype(np.float32))
