"""What `fit` is given, checked and turned into what the engine reads: device, model, data, and what makes a run this run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plausible.core import serialise
from plausible.core.data import ArrayData, Batch, Data, as_data, select_rows
from plausible.core.likelihoods import Likelihood, infer
from plausible.core.model import Model
from plausible.core.networks import Where, check_inputs
from plausible.core.priors import Prior, as_prior
from plausible.core.weights import Weights
from plausible.engine.checkpoint import Checkpoint
from plausible.engine.method import Method

log = logging.getLogger("plausible")


def prepare(
    network: nn.Module | Model,
    data: Any,
    likelihood: Likelihood | None,
    prior: Prior | Mapping[str, Prior] | None,
    where: Where,
    output: Callable[[Any], Tensor] | None,
    device: torch.device,
    num_data: int | None,
    mask: Any,
    precision: str | None,
    method: Method,
) -> tuple[Model, Data]:
    """The model of a network or a model, and the data as the engine reads them; all is checked that can be before the work."""
    module = network.network if isinstance(network, Model) else network
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = torch.float32 if first is None else first.dtype
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        hint = f"; write {likelihood.__name__}()" if isinstance(likelihood, type) else ""
        raise TypeError(f"likelihood must be one of plausible.likelihoods, got {likelihood!r}{hint}")
    prepared = as_data(data, dtype=dtype, device=device, mask=mask, num_data=num_data)
    example = _example(prepared)
    if isinstance(network, Model):
        if any(v is not None for v in (likelihood, prior, where, output, precision)):
            raise ValueError("a Model brings its own likelihood, prior, where, output and precision: leave those arguments out")
        model = network.to(device)
        if model.num_data != prepared.num_data:
            raise ValueError(f"the Model was made for {model.num_data} examples and data has {prepared.num_data}")
        with torch.no_grad():
            check_inputs(model, example.x)
    else:
        if likelihood is None:
            likelihood = infer(example.y)
            log.info(
                "likelihood: %s, inferred from targets of type %s", likelihood, str(example.y.dtype).removeprefix("torch.")
            )
        if prior is None:
            log.info("prior: Gaussian(scale=1.0) on every weight, the default")
        model = Model.build(
            network,
            likelihood,
            as_prior(prior),
            example,
            num_data=prepared.num_data,
            where=where,
            output=output,
            device=device,
            precision=_as_precision(precision, method),
            check_targets=not isinstance(prepared, ArrayData),
        )
    if isinstance(prepared, ArrayData):
        batch = prepared.batch
        shape = torch.Size((prepared.num_data, *model.output_shape))
        targets = model.likelihood.check(shape, batch.y, mask=batch.mask)
        return model, ArrayData(batch._replace(y=targets), prepared.num_data)

    def check(y: Tensor, mask: Any) -> Tensor:
        return model.likelihood.check(torch.Size((len(y), *model.output_shape)), y, mask=mask)

    return model, replace(prepared, check=check)


def _example(data: Data, rows: int = 8) -> Batch:
    """A few examples to learn the shapes from."""
    if isinstance(data, ArrayData):
        return select_rows(data.batch, slice(rows))
    first = next(iter(data.chunks(rows)), None)
    if first is None:
        raise ValueError("data is empty: the loader gave no batch")
    return select_rows(first, slice(rows))


def _as_precision(precision: str | None, method: Method) -> torch.dtype | None:
    if precision in (None, "float32"):
        return None
    if precision not in ("bfloat16", "tf32"):
        raise ValueError(f"precision must be None, 'float32', 'tf32' or 'bfloat16', got {precision!r}")
    if not method.traits.mixed_precision:
        raise ValueError(f"{type(method).__name__} needs full precision: its energies or solves would be wrong in {precision}")
    return torch.bfloat16 if precision == "bfloat16" else None


def as_checkpoint(checkpoint: str | Path | Checkpoint | None) -> Checkpoint | None:
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if not isinstance(checkpoint, (str, Path)):
        raise TypeError(f"checkpoint must be a folder or a Checkpoint, got {type(checkpoint).__name__}")
    return Checkpoint(checkpoint)


def digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of named tensors."""
    total = hashlib.blake2b(digest_size=8)
    for name, value in weights.items():
        flat = value.detach().cpu().contiguous().reshape(-1)
        total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def identity(
    method: Method, model: Model, data: Data, seed: int, precision: str | None = None, starts: Weights | None = None
) -> dict[str, Any]:
    """What must agree for a checkpoint to be this run's."""
    everything = (*model.network.named_parameters(), *model.network.named_buffers())
    fixed = {name: value for name, value in everything if name not in model.initial and name not in model.buffers}
    return {
        "method": serialise.encode(method, strict=False),
        "likelihood": serialise.encode(model.likelihood, strict=False),
        "prior": serialise.encode(model.prior, strict=False),
        "weights": {name: list(value.shape) for name, value in model.initial.items()},
        "random": list(model.random),
        "network": repr(model.network),
        "output": model.output is not None,
        "init": None if starts is None else digest(starts),
        "fixed": digest(fixed),
        "temperature": model.temperature,
        "precision": "tf32" if precision == "tf32" else None if model.precision is None else "bfloat16",
        "seed": seed,
        "num_data": data.num_data,
        "data": data.fingerprint(),
        "device": model.device.type,
    }
