"""Save and load: a folder of safetensors and JSON that executes nothing and refuses what does not fit.

posterior.json          format, library version, kind, method, likelihood, prior, names and shapes, history, checksums
fixed.safetensors       parameters and buffers of the network that were not inferred
draws-….safetensors     the draws, in shards
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plausible import serialise, storage
from plausible._version import __version__
from plausible.likelihoods import Likelihood
from plausible.model import Model, _private_copy
from plausible.posterior import Posterior, kinds
from plausible.priors import Prior, as_prior
from plausible.storage import DiskDraws, DrawStore, DrawWriter, MemoryDraws
from plausible.weights import index, num_bytes

FORMAT = 1
IN_MEMORY = 512 * 2**20


def save(posterior: Posterior, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a posterior to a new folder: into a temporary sibling first, renamed when it is whole."""
    target = Path(path)
    existed = target.exists()
    storage.prepare_folder(target, overwrite=overwrite)
    if not existed:
        target.rmdir()
    model = posterior.model
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        os.chmod(temporary, 0o755)
        trained = set(model.initial) | set(model.buffers)
        everything = {**dict(model.network.named_parameters()), **dict(model.network.named_buffers())}
        fixed = {name: value.detach() for name, value in everything.items() if name not in trained}
        content = {
            "format": FORMAT,
            "library": __version__,
            "kind": posterior.kind,
            "method": serialise.encode(posterior.method, strict=False),
            "likelihood": serialise.encode(model.likelihood, strict=False),
            "prior": serialise.encode(model.prior, strict=False),
            "num_data": model.num_data,
            "temperature": model.temperature,
            "output": None if model.output is None else getattr(model.output, "__name__", type(model.output).__name__),
            "output_shape": list(model.output_shape),
            "target_ndim": model.target_ndim,
            "dtype": str(next(iter(model.initial.values())).dtype).removeprefix("torch."),
            "weights": {name: list(value.shape) for name, value in model.initial.items()},
            "buffers": {name: list(value.shape) for name, value in model.buffers.items()},
            "fixed": {name: list(value.shape) for name, value in fixed.items()},
            "random": list(model.random),
            "fixed_sha256": storage.write_tensors(temporary / "fixed.safetensors", fixed),
            "run": _plain(posterior.run | {"history": posterior.history}),
            **_plain(posterior._write(temporary)),
        }
        storage.write_json(temporary / "posterior.json", content)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _plain(value: Any) -> Any:
    """JSON without NaN or infinity."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return str(value)
    return value


def load(
    path: str | Path,
    network: nn.Module,
    *,
    output: Callable[[Any], Tensor] | None = None,
    likelihood: Likelihood | None = None,
    prior: Prior | Mapping[str, Prior] | None = None,
) -> Posterior:
    """A saved posterior for this network: no data needed, nothing from the file is executed.

    `output`, and a likelihood or prior of your own, are code and therefore not in the file: pass them again.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"path={str(folder)!r} is not a folder; expected one written by posterior.save()")
    content = storage.read_json(folder / "posterior.json")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{str(folder)!r} has format {content.get('format')!r}, written by plausible {content.get('library')}; "
            f"this is plausible {__version__}, which reads format {FORMAT}"
        )
    if content["kind"] not in kinds:
        raise ValueError(
            f"{str(folder)!r} holds a posterior of unknown kind {content['kind']!r}; it needs a newer plausible"
        )
    private = _private_copy(network)
    _refuse_mismatch(private, content)
    if content["output"] is not None and output is None:
        raise ValueError(
            f"this posterior was fitted with output={content['output']}, which is code and not in the file: pass output= again"
        )
    fixed = storage.read_tensors(folder / "fixed.safetensors", content["fixed_sha256"])
    dtype = getattr(torch, content["dtype"])
    private = private.to(dtype)
    device = next(private.parameters()).device
    holders = {**dict(private.named_parameters()), **dict(private.named_buffers())}
    with torch.no_grad():
        for name, value in fixed.items():
            holders[name].copy_(value)
    shapes = {**content["weights"], **content["buffers"]}
    empty = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in content["weights"].items()}
    model = Model(
        private,
        _decoded(content["likelihood"], likelihood, "likelihood"),
        _decoded(content["prior"], None if prior is None else as_prior(prior), "prior"),
        num_data=int(content["num_data"]),
        initial=empty,
        random=tuple(content["random"]),
        buffers={name: holders[name].detach().clone() for name in content["buffers"]},
        output=output,
        output_shape=tuple(content["output_shape"]),
        target_ndim=int(content["target_ndim"]),
        temperature=float(content["temperature"]),
    )
    run = dict(content["run"])
    run["history"] = {name: [float(v) for v in values] for name, values in run.get("history", {}).items()}
    method = serialise.decode(content["method"])
    posterior = kinds[content["kind"]]._read(folder, {**content, "run": run}, method, model)
    first = posterior.weights(1)
    for name, value in first.items():
        if list(value.shape[1:]) != shapes[name]:
            raise ValueError(
                f"{str(folder)!r} is damaged: {name} has shape {tuple(value.shape[1:])}, expected {tuple(shapes[name])}"
            )
    return posterior


def _decoded(stored: Any, given: Any, name: str) -> Any:
    if given is not None:
        return given
    value = serialise.decode(stored)
    if isinstance(value, serialise.Opaque):
        raise ValueError(f"the {name} {value.name} is your own code and not in the file: pass {name}= again")
    return value


def _refuse_mismatch(network: nn.Module, content: Mapping[str, Any]) -> None:
    """Compare names and shapes with the given module and name the first difference."""
    stored = {
        n: tuple(s)
        for part in ("weights", "fixed", "buffers")
        for n, s in content[part].items()
        if not n.startswith("likelihood.")
    }
    given = {n: tuple(v.shape) for n, v in [*network.named_parameters(), *network.named_buffers()]}
    for name, shape in stored.items():
        if name not in given:
            raise ValueError(f"network does not fit the saved posterior: it has no {name!r} (saved with shape {shape})")
        if given[name] != shape:
            raise ValueError(
                f"network does not fit the saved posterior: {name!r} has shape {given[name]}, saved was {shape}"
            )
    for name in given:
        if name not in stored:
            raise ValueError(
                f"network does not fit the saved posterior: its {name!r} was not in the network that was fitted"
            )


def write_shards(folder: Path, store: DrawStore) -> list[dict[str, Any]]:
    """Write a store's draws into shard files of bounded size."""
    writer = DrawWriter(folder)
    for shard in store.shards():
        for i in range(len(next(iter(shard.values())))):
            writer.add(index(shard, i))
    writer.flush()
    return writer.files


def read_shards(folder: Path, shards: Sequence[Mapping[str, Any]], model: Model) -> DrawStore:
    """Check every shard; small stores are read into memory, large ones stay on disk."""
    parts = []
    total = 0
    for shard in shards:
        part = storage.read_tensors(folder / shard["file"], shard["sha256"])
        total += num_bytes(part)
        if total <= IN_MEMORY:
            parts.append(part)
    if total > IN_MEMORY:
        return DiskDraws(folder, shards)
    device = next(iter(model.initial.values())).device
    joined = {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}
    return MemoryDraws(joined)
