"""Mean-field steps against a plain deterministic loop with fused Adam, and prediction against its matrix products alone.

`python -m benchmarks.variational`: network 784-400-400-10, batch 128, one sample, Adam.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import plausible as pl
from benchmarks.steps import BATCH, mlp, ours, plain_loop, problem
from benchmarks.timing import interleave, micro, ratio
from plausible.fitting import tensor_float

SIZES = (784, 400, 400, 10)
MIXTURE = pl.priors.ScaleMixture()


def mean_field(estimator: str) -> pl.MeanField:
    return pl.MeanField(epochs=10_000, batch_size=BATCH, lr=1e-3, estimator=estimator)


def cpu() -> dict[str, float]:
    net, x, y = problem(SIZES, 8192, "cpu")
    times = interleave(
        {
            "plain loop": plain_loop(net, x, y, 16),
            "weights": ours(net, x, y, 16, "compiled", single=mean_field("weights")),
            "weights, scale mixture": ours(net, x, y, 16, "compiled", single=mean_field("weights"), prior=MIXTURE),
            "local": ours(net, x, y, 16, "compiled", single=mean_field("local")),
            "flipout": ours(net, x, y, 16, "compiled", single=mean_field("flipout")),
            "weights, eager": ours(net, x, y, 16, "eager", single=mean_field("weights")),
            "local, eager": ours(net, x, y, 16, "eager", single=mean_field("local")),
        },
        rounds=15,
        budget=150,
    )
    result = {}
    for name, values in times.items():
        result[name] = ratio(times, name, "plain loop")
        print(f"  {name:24} {micro(values):9.1f} µs a step   {result[name]:6.3f} × plain")
    return result


def gpu(members: tuple[int, ...] = (8, 32, 128)) -> dict[str, float]:
    print(f"{torch.cuda.get_device_name()}, float32 products: {torch.get_float32_matmul_precision()}")
    net, x, y = problem(SIZES, 50_000, "cuda")
    result = {}
    candidates: dict[str, Callable[[], int]] = {"plain loop": plain_loop(net, x, y, 200)}
    for estimator in ("weights", "local"):
        candidates[estimator] = ours(net, x, y, 1024, "compiled+captured", single=mean_field(estimator))
    candidates["weights, scale mixture"] = ours(
        net, x, y, 1024, "compiled+captured", single=mean_field("weights"), prior=MIXTURE
    )
    times = interleave(candidates)
    for name, values in times.items():
        result[name] = micro(values)
        print(f"  {name:28} {result[name]:9.1f} µs a step   {ratio(times, name, 'plain loop'):6.3f} × plain", flush=True)
    for estimator, prior in (("weights", None), ("weights", MIXTURE), ("local", None)):
        for count in members:
            if count < max(members) and (prior is not None or estimator == "local"):
                continue
            run = ours(net, x, y, 512, "compiled+captured", count, single=mean_field(estimator), prior=prior)
            name = f"{count} stacked, {estimator}{', scale mixture' if prior else ''}"
            result[name] = micro(interleave({"s": run}, rounds=5)["s"]) / count
            print(f"  {name}: {result[name]:7.2f} µs per model-step", flush=True)
    return result


def prediction(device: str, draws: int = 100, rows: int = 10_000) -> dict[str, float]:
    """`predict(x, draws=100)` on 10,000 inputs over the matrix products of the same weights alone."""
    _, x, y = problem(SIZES, rows, device)
    posterior = pl.fit(mlp(*SIZES).to(device), (x, y), pl.MeanField(epochs=1), device=device, progress=False)
    drawn = posterior.weights(4 if device == "cpu" else draws)
    weights = [value for name, value in drawn.items() if name.endswith("weight")]

    def products() -> int:
        done = 0
        while done < draws:
            for k in range(len(weights[0])):
                h: Tensor = x
                for weight in weights:
                    h = h @ weight[k].T
                done += 1
        return 1

    def predicted() -> int:
        posterior.predict(x, draws=draws).probs  # noqa: B018
        return 1

    times = interleave({"products": products, "predict": predicted}, rounds=7, budget=120)
    found = ratio(times, "predict", "products")
    print(
        f"  predict, {draws} draws, {rows:,} inputs, {device}: {micro(times['predict']) / 1e3:.1f} ms, {found:.3f} × products"
    )
    return {f"prediction, {device}": found}


def main() -> None:
    """Arguments: the device, "tf32" for TensorFloat-32 products, and how many members are stacked."""
    words = sys.argv[1:]
    print(f"torch {torch.__version__}, MLP {'-'.join(map(str, SIZES))}, batch {BATCH}, one sample, Adam")
    device = next((w for w in words if w in ("cpu", "cuda")), "cuda" if torch.cuda.is_available() else "cpu")
    result = prediction(device)
    members = tuple(int(w) for w in words if w.isdigit()) or (8, 32, 128)
    with tensor_float("tf32" in words):
        result |= gpu(members) if device == "cuda" else cpu()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
