"""Save, load and move: what a posterior consists of, written once for all kinds.

A posterior says its `Content`: named tensors, plain settings, perhaps stored draws and parts that are posteriors themselves, and
how to be rebuilt from them. Everything else is here: a folder of safetensors and JSON that executes nothing and refuses what
does not fit.

posterior.json          format, library version, kind, settings, method, likelihood, prior, names and shapes, history, checksums
fixed.safetensors       parameters, buffers and other tensors of the network that were not inferred; an input and what is
                        answered there, by which another network of the same shapes is known
tensors.safetensors     the named tensors
draws-….safetensors     the draws, in shards
masks.safetensors       of a pruned posterior: which weights were kept
part-…/                 the parts of a mixture, each with such files
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plausible._version import __version__
from plausible.core import serialise, storage
from plausible.core import weights as tree
from plausible.core.attributes import attributes, put_back
from plausible.core.likelihoods import Likelihood
from plausible.core.model import Model
from plausible.core.networks import private_copy
from plausible.core.priors import Prior, as_prior
from plausible.core.storage import DiskDraws, DrawStore, DrawWriter, MemoryDraws
from plausible.core.weights import Weights, index, num_bytes
from plausible.engine.checkpoint import plain
from plausible.posteriors import probing

if TYPE_CHECKING:
    from plausible.posteriors.base import Posterior

FORMAT = 3
EARLIER: dict[str, Any] = {
    "format": 2,
    "attributes": {},
    "copied": False,
    "probe": None,
}  # the format before, and what it did not say
IN_MEMORY = 512 * 2**20
"""Bytes of draws up to which they are read into memory by `load`."""
_NAMES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}

kinds: dict[str, type[Posterior]] = {}
"""The word for a kind of posterior in files → its class, which registers itself."""


@dataclass(frozen=True)
class Content:
    """What a posterior consists of.

    tensors: groups of named tensors, such as `{"mean": {name: tensor}, "scale": {…}}`; a group's name has no dot.
    settings: plain JSON data.
    draws: a store of draws, which may lie on disk.
    parts: the posteriors that a mixture is made of.
    """

    tensors: Mapping[str, Weights] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    draws: DrawStore | None = None
    parts: Sequence[Posterior] = ()

    @property
    def stored(self) -> DrawStore:
        """The draws, of kinds that need some."""
        if self.draws is None:
            raise ValueError("posterior.json is damaged: it holds no draws")
        return self.draws

    def group(self, name: str, like: Mapping[str, Tensor]) -> Weights:
        """The tensors of a group that are named as `like`, in its order; a ValueError where one is missing or has another shape."""
        tensors = self.tensors.get(name, {})
        for key, value in like.items():
            if key not in tensors or tensors[key].shape != value.shape:
                problem = f"{name} of {key!r} is missing or has another shape"
                raise ValueError(f"tensors.safetensors does not fit posterior.json: {problem}")
        return {key: tensors[key] for key in like}


def placed(posterior: Posterior, model: Model, device: torch.device) -> Posterior:
    """The same posterior of a model that is on another device, with its tensors there."""
    content = posterior.content()
    moved = Content(
        tree.to(dict(content.tensors), device),
        content.settings,
        None if content.draws is None else storage.moved(content.draws, device),
        [placed(part, model.restricted(part.model.random).with_settings(part.model.prior), device) for part in content.parts],
    )
    result = posterior.rebuilt(posterior.method, model, posterior.record, moved)
    result.log_evidence, result._masks = posterior.log_evidence, tree.to(posterior._masks, device)
    return result


def example_of(model: Model) -> Tensor:
    """A tensor of the type and on the device that the model computes with."""
    network = model.network
    held = (value for part in (model.initial.values, network.parameters, network.buffers) for value in part())
    return next((value for value in held if value.is_floating_point()), torch.zeros(()))


def save(posterior: Posterior, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a folder of safetensors and JSON: no pickle, and into a temporary sibling first, which is renamed when it is whole.

    `overwrite=True` puts the new folder in the place of an older posterior's, and of nothing else.
    """
    if not isinstance(overwrite, bool):
        raise TypeError(f"overwrite must be True or False, got {overwrite!r}")
    target = storage.as_path(path).resolve()
    existed = target.exists()
    storage.prepare_folder(target, overwrite=overwrite)
    if not existed:
        target.rmdir()
    elif any(target.iterdir()):
        _refuse_foreign(target, path)
    temporary = storage.beside(target)
    temporary.mkdir()
    try:
        storage.write_json(temporary / "posterior.json", _write(posterior, temporary))
        _put(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Path(path)


def _refuse_foreign(target: Path, path: str | Path) -> None:
    """Leave a folder alone that holds anything but a saved posterior."""
    if not (target / "posterior.json").exists():
        raise FileExistsError(
            f"path={str(path)!r} is not empty and holds no posterior; overwrite=True replaces only a saved posterior"
        )
    for found in target.rglob("*"):
        place = found.relative_to(target).as_posix()
        if not _OURS.fullmatch(place):
            raise FileExistsError(
                f"path={str(path)!r} holds {place!r} beside a posterior: overwrite=True would delete it; move it away, or choose "
                "another path"
            )


_OURS = re.compile(
    r"(part-\d{3}/)*(part-\d{3}|posterior\.json|(fixed|tensors|masks|draws-\d{5})\.safetensors|\.[\w.-]+\.[0-9a-f]{12})"
)
"""What `save` writes, and what of it a kill leaves."""


def _put(temporary: Path, target: Path) -> None:
    """Rename a folder into its place; what was there goes away only afterwards, and comes back if that fails."""
    if not target.exists():
        os.rename(temporary, target)
        return
    if storage.exchange(temporary, target):
        shutil.rmtree(temporary, ignore_errors=True)
        return
    old = storage.beside(target)
    # a folder cannot be renamed onto another that is not empty
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(posterior: Posterior, folder: Path) -> dict[str, Any]:
    """Write the tensors into a folder and return what the JSON says."""
    model = posterior.model
    trained = set(model.initial) | set(model.buffers)
    everything = {**dict(model.network.named_parameters()), **dict(model.network.named_buffers())}
    fixed = {name: value.detach() for name, value in everything.items() if name not in trained}
    plain_ones = attributes(model.network, model.attributes)
    structure, probe = probing.probed(posterior)
    dtypes = {name: value.dtype for name, value in {**model.initial, **model.buffers}.items()}
    return {
        "format": FORMAT,
        "library": __version__,
        "method": serialise.encode(posterior.method, strict=False),
        "likelihood": serialise.encode(model.likelihood, strict=False),
        "prior": serialise.encode(model.prior, strict=False),
        "num_data": model.num_data,
        "temperature": model.temperature,
        "precision": None if model.precision is None else str(model.precision).removeprefix("torch."),
        "output": None if model.output is None else getattr(model.output, "__name__", type(model.output).__name__),
        "output_shape": list(model.output_shape),
        "target_ndim": model.target_ndim,
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "weights": {name: list(value.shape) for name, value in model.initial.items()},
        "buffers": {name: list(value.shape) for name, value in model.buffers.items()},
        "fixed": {name: list(value.shape) for name, value in fixed.items()},
        "random": list(model.random),
        "attributes": {name: list(value.shape) for name, value in plain_ones.items()},
        "copied": model.copied,
        "probe": structure,
        "fixed_sha256": storage.write_tensors(folder / "fixed.safetensors", {**fixed, **plain_ones, **probe}),
        **plain(_write_content(posterior, folder)),
    }


def _write_content(posterior: Posterior, folder: Path) -> dict[str, Any]:
    """Write what a posterior consists of, and the masks of a pruned one; returns what the JSON says of it."""
    content = posterior.content()
    groups = {f"{group}.{name}": value for group, named in content.tensors.items() for name, value in named.items()}
    writer = DrawWriter(folder)  # in shards of bounded size
    for shard in () if content.draws is None else content.draws.shards():
        for i in range(len(next(iter(shard.values())))):
            writer.add(index(shard, i))
    writer.flush()
    parts = []
    for k, part in enumerate(content.parts):
        inner = folder / f"part-{k:03d}"
        inner.mkdir()
        parts.append({**_write_content(part, inner), **_own(part.model, posterior.model)})
    return {
        "kind": posterior.kind,
        "log_evidence": posterior.log_evidence,
        "run": posterior.record,
        "settings": dict(content.settings),
        "tensors_sha256": storage.write_tensors(folder / "tensors.safetensors", groups) if groups else None,
        "masks_sha256": storage.write_tensors(folder / "masks.safetensors", posterior._masks) if posterior._masks else None,
        "draws": writer.files if content.draws is not None else None,
        "parts": parts,
    }


def _read_content(folder: Path, stored: Mapping[str, Any], method: Any, model: Model) -> Posterior:
    device = example_of(model).device
    tensors: dict[str, Weights] = {}
    if stored["tensors_sha256"] is not None:
        for key, value in storage.read_tensors(folder / "tensors.safetensors", stored["tensors_sha256"]).items():
            group, _, name = key.partition(".")
            tensors.setdefault(group, {})[name] = value.to(device)
    inner = getattr(method, "method", method)  # parts are the results of the method that an ensemble repeats
    content = Content(
        tensors,
        stored["settings"],
        None if stored["draws"] is None else _read_draws(folder, stored["draws"], model),
        [
            _read_content(folder / f"part-{k:03d}", part, inner, _with_own(model, part))
            for k, part in enumerate(stored["parts"])
        ],
    )
    run = stored["run"]  # JSON has no infinity
    record = {**run, "history": {name: [float(v) for v in values] for name, values in run.get("history", {}).items()}}
    masks: Weights = {}
    if stored["masks_sha256"] is not None:
        masks = storage.read_tensors(folder / "masks.safetensors", stored["masks_sha256"])
        for name, mask in masks.items():
            shape = model.initial[name].shape
            if mask.dtype != torch.bool or mask.shape[mask.ndim - len(shape) :] != shape:
                raise ValueError(f"{folder / 'masks.safetensors'} is damaged: the mask of {name!r} does not fit the weight")
    posterior = kinds[stored["kind"]].rebuilt(method, model, record, content)
    posterior._masks = tree.to(masks, device)
    posterior.log_evidence = None if stored["log_evidence"] is None else float(stored["log_evidence"])
    return posterior


def _own(model: Model, whole: Model) -> dict[str, Any]:
    """In what the model of a part differs from that of the mixture: which weights are random, and their prior."""
    own: dict[str, Any] = {} if model.random == whole.random else {"random": list(model.random)}
    return own if model.prior == whole.prior else {**own, "prior": serialise.encode(model.prior, strict=False)}


def _with_own(model: Model, part: Mapping[str, Any]) -> Model:
    """The model of a part; a prior of the user's own code is the one that was passed for the mixture."""
    random, prior = part.get("random"), part.get("prior")
    known = prior is not None and not _has_opaque(prior)
    narrowed = model if random is None else model.restricted(random)
    return narrowed.with_settings(serialise.decode(prior)) if known else narrowed


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
    folder = storage.as_path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"path={str(folder)!r} is not a folder; expected one written by posterior.save()")
    content = storage.read_json(folder / "posterior.json")
    if content.get("format") == EARLIER["format"]:
        content = {**EARLIER, **content}
    elif content.get("format") != FORMAT:
        raise ValueError(
            f"{str(folder)!r} has format {content.get('format')!r}, written by plausible {content.get('library')}; "
            f"this is plausible {__version__}, which reads format {FORMAT}"
        )
    private, rules = private_copy(network), None if prior is None else as_prior(prior)
    try:
        # kinds register themselves when their file is imported
        if not _kinds(content) <= set(kinds):
            for discover in serialise.discoveries:  # methods bring the kinds of their posteriors
                discover()
        if unknown := _kinds(content) - set(kinds):
            raise ValueError(f"{str(folder)!r} holds a posterior of unknown kind {unknown.pop()!r}; it needs a newer plausible")
        _refuse_mismatch(private, content)
        if content["output"] is not None and output is None:
            code = f"output={content['output']}, which is code and not in the file"
            raise ValueError(f"this posterior was fitted with {code}: pass output= again")
        return _read(folder, content, private, output, likelihood, rules)
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"{folder / 'posterior.json'} is damaged: {type(error).__name__}: {error}") from error


def _kinds(content: Mapping[str, Any]) -> set[Any]:
    """The kinds of a stored posterior and of its parts."""
    return {content.get("kind"), *(kind for part in content.get("parts") or () for kind in _kinds(part))}


def _read(
    folder: Path,
    content: Mapping[str, Any],
    network: nn.Module,
    output: Callable[[Any], Tensor] | None,
    likelihood: Likelihood | None,
    prior: Prior | None,
) -> Posterior:
    """The posterior that the JSON and the tensors of a folder describe, in a private copy of the network."""
    device = next((p.device for p in (*network.parameters(), *network.buffers())), torch.device("cpu"))
    fixed = storage.read_tensors(folder / "fixed.safetensors", content["fixed_sha256"])
    holders = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    _require_shapes(fixed, content["fixed"], folder / "fixed.safetensors")
    for name in content["fixed"]:
        holders[name].data = fixed[name].to(device)
    held = content["attributes"]
    _require_shapes(fixed, held, folder / "fixed.safetensors")
    put_back(network, {name: fixed[name] for name in held})
    dtypes = {name: DTYPES[dtype] for name, dtype in content["dtypes"].items()}
    output_shape = tuple(content["output_shape"])
    if not all(isinstance(size, int) for size in output_shape):
        raise TypeError(f"output_shape {content['output_shape']!r}")
    chosen = _decoded(content["likelihood"], likelihood, "likelihood", Likelihood)
    noise = chosen.initial_weights(output_shape, dtype=torch.float32, device="meta")  # shapes alone: nothing is allocated yet
    stored = {name: shape for name, shape in content["weights"].items() if name.startswith("likelihood.")}
    if {name: list(value.shape) for name, value in noise.items()} != stored:
        weights = f"its weights are {sorted(noise)}, saved were {sorted(stored)}"
        raise ValueError(f"likelihood={chosen!r} does not fit the saved posterior: {weights}")
    if sum(value.nbytes for value in noise.values()) > (held_bytes := storage.size(folder)):
        raise ValueError(
            f"{folder / 'posterior.json'} is damaged: its files of {held_bytes:,} bytes do not hold weights of those shapes"
        )
    # starting weights are no part of a posterior: zeros say names, shapes and types
    initial = {n: torch.zeros(s, dtype=dtypes[n], device=device) for n, s in content["weights"].items()}
    model = Model(
        network,
        chosen,
        _decoded(content["prior"], prior, "prior", Prior),
        num_data=int(content["num_data"]),
        initial=initial,
        random=tuple(content["random"]),
        buffers={name: holders[name].detach().to(dtypes[name], copy=True) for name in content["buffers"]},
        output=output,
        output_shape=output_shape,
        target_ndim=int(content["target_ndim"]),
        temperature=float(content["temperature"]),
        precision=None if content["precision"] is None else DTYPES[content["precision"]],
        attributes=tuple(held),
        copied=bool(content["copied"]),
    )
    stored_method = content["method"]
    if _has_opaque(stored_method):  # it, or one inside it, is the user's own code: the name is all there is
        method: Any = serialise.Opaque(str(stored_method.get("opaque") or stored_method.get("type")))
    else:
        method = serialise.decode(stored_method)
    posterior = _read_content(folder, content, method, model)
    probing.compare(posterior, content["probe"], fixed)
    return posterior


def _has_opaque(stored: Any) -> bool:
    """Whether somewhere inside stands the place of an object that could not be stored."""
    if isinstance(stored, Mapping):
        return "opaque" in stored or any(map(_has_opaque, stored.values()))
    return isinstance(stored, list) and any(map(_has_opaque, stored))


def _decoded(stored: Any, given: Any, name: str, expected: type) -> Any:
    if given is not None:
        if not isinstance(given, expected):
            raise ValueError(f"{name} must be one of plausible.{name}s, or your own of that kind, got {given!r}")
        return given
    if _has_opaque(stored):
        who = stored.get("opaque") or f"{stored.get('type')}, which contains code of your own,"
        what = "another posterior" if who.startswith("Earlier(") else "your own code"
        raise ValueError(f"the {name} {who} is {what} and not in the file: pass {name}= again")
    return serialise.decode(stored, expect=expected)


def _require_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]], where: Path) -> None:
    for name, shape in expected.items():
        if name not in tensors or list(tensors[name].shape) != list(shape):
            given = f"shape {tuple(tensors[name].shape)}" if name in tensors else "nothing"
            raise ValueError(f"{where} is damaged: it has {given} for {name!r}, expected shape {tuple(shape)}")


def _refuse_mismatch(network: nn.Module, content: Mapping[str, Any]) -> None:
    """Compare names and shapes with the given module and name the first difference."""
    shapes = {**content["weights"], **content["fixed"], **content["buffers"]}
    stored = {name: tuple(shape) for name, shape in shapes.items() if not name.startswith("likelihood.")}
    given = {n: tuple(v.shape) for n, v in [*network.named_parameters(), *network.named_buffers()]}
    for name, shape in stored.items():
        if name not in given:
            raise ValueError(f"network does not fit the saved posterior: it has no {name!r} (saved with shape {shape})")
        if given[name] != shape:
            raise ValueError(f"network does not fit the saved posterior: {name!r} has shape {given[name]}, saved was {shape}")
    for name in given:
        if name not in stored:
            raise ValueError(f"network does not fit the saved posterior: its {name!r} was not in the network that was fitted")


def _read_draws(folder: Path, shards: Sequence[Mapping[str, Any]], model: Model) -> DrawStore:
    """Check every shard; small stores are read into memory, large ones stay on disk."""
    expected = {name: list(value.shape) for name, value in [*model.initial.items(), *model.buffers.items()]}
    parts: list[Weights] = []
    total = 0
    disk = DiskDraws(folder, shards)
    for part, shard in zip(disk.shards(), shards):
        _require_shapes(index(part, 0), expected, folder / shard["file"])
        total += num_bytes(part)
        # every shard is read, for its checksum; large stores are let go again
        parts = [*parts, part] if total <= IN_MEMORY else []
    if not total:
        raise ValueError(f"{str(folder)!r} is damaged: it holds no draws")
    if total > IN_MEMORY:
        return disk
    device = example_of(model).device
    return MemoryDraws({name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]})
