"""Curvature of all weights: blocks put together, estimated in one pass over the data with bounded memory.

    H = Σ_n weight_n J_nᵀ F_n J_n   (Gauss-Newton, Fisher),   Σ_n weight_n g_n g_nᵀ   (empirical),   or the Hessian of −log p(D | w)

`estimate` makes a `Curvature`; with a scale s and precisions τ of the prior it answers for Λ = s·H + diag(τ) what `Block` answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from plausible.curvature import losses
from plausible.curvature.blocks import KINDS, Block, Dense, Diagonal, flat, named
from plausible.curvature.gram import keep_freed_memory
from plausible.curvature.kronecker import Kronecker, Sharing
from plausible.curvature.layers import Layer, Part
from plausible.curvature.linearising import Linearisation
from plausible.curvature.low_rank_block import LowRank
from plausible.curvature.subset import Subset
from plausible.curvature.tally import Tally
from plausible.data import Batch, Data, num_rows
from plausible.engine.memory import available
from plausible.engine.progress import Progress
from plausible.model import Model
from plausible.weights import Weights

log = logging.getLogger("plausible")

StructureName = Literal["diag", "block", "kron", "ekfac", "lowrank", "full"]
CurvatureName = Literal["ggn", "fisher", "empirical", "hessian"]
STRUCTURES = ("diag", "block", "kron", "ekfac", "lowrank", "full")
CURVATURES = ("ggn", "fisher", "empirical", "hessian")
SMALL = 1024
"""Vectors up to this size (norms, bare parameters) get a dense block among Kronecker factors, larger ones a diagonal."""
WORKSPACE = 2**29
"""Bytes for the activations and gradients of one chunk of the data."""
ROWS = 2560
"""Examples times columns that a CPU looks at together: matrix products gain no more from others, and these stay in its caches."""
EXAMPLES = 256
"""Examples of a chunk on a CPU; fewer where one alone fills the workspace."""
HESSIAN_LIMIT = 20_000
"""Weights up to which the diagonal of a Hessian is read off its products."""


class Curvature:
    """H of all random weights, in blocks."""

    def __init__(self, blocks: Sequence[Block], structure: str):
        self.blocks, self.structure = list(blocks), structure

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it covers."""
        return tuple(name for block in self.blocks for name in block.names)

    @property
    def size(self) -> int:
        """How many weights."""
        return sum(block.size for block in self.blocks)

    @property
    def chosen(self) -> int:
        """How many numbers are random: all, or those of a subnetwork."""
        return sum(block.chosen if isinstance(block, Subset) else block.size for block in self.blocks)

    def log_det(self, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """Log det Λ, in float64."""
        return torch.stack([block.log_det(precision, scale).double() for block in self.blocks]).sum()

    def variances(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """The diagonal of Λ⁻¹, by weight."""
        return _joined(block.variances(precision, scale) for block in self.blocks)

    def draw(self, noise: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ^{-1/2} ξ, for ξ with a leading axis."""
        return _joined(block.draw(noise, precision, scale) for block in self.blocks)

    def product(self, vectors: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """Λ v, for v with a leading axis."""
        return _joined(block.product(vectors, precision, scale) for block in self.blocks)

    def quadratic(self, vector: Weights, precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """vᵀΛ⁻¹v for one v, in float64."""
        return torch.stack([block.quadratic(vector, precision, scale) for block in self.blocks]).sum()

    def covariance(self, parts: Sequence[Part], precision: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """SᵀJ Λ⁻¹ JᵀS for each example: [B, K, K]."""
        total: Tensor | None = None
        for block, own in zip(self.blocks, _assigned(self.blocks, parts)):
            found = block.covariance(own, precision, scale)
            total = found if total is None else total + found
        assert total is not None
        return total

    def effective(self, precision: Mapping[str, Tensor], scale: Tensor) -> Weights:
        """1 − τ (Λ⁻¹)_ii: how far the data, and not the prior, determine each weight (MacKay 1992); between 0 and 1."""
        variances = self.variances(precision, scale)
        return {n: torch.where(v > 0, 1 - precision[n] * v, 0.0) for n, v in variances.items()}

    def to(self, device: torch.device) -> Curvature:
        """The same on another device."""
        return Curvature([block.to(device) for block in self.blocks], self.structure)

    def tensors(self) -> dict[str, Tensor]:
        """What is saved: names are `number.name`."""
        return {f"{i}.{name}": v for i, block in enumerate(self.blocks) for name, v in block.tensors().items()}

    def describe(self) -> list[dict[str, Any]]:
        """The kinds and layers of the blocks, as JSON."""
        return [
            {"kind": block.kind, "layers": [_layer_record(layer) for layer in block.layers]} for block in self.blocks
        ]

    @classmethod
    def restored(
        cls, structure: str, description: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
    ) -> Curvature:
        """The inverse of `describe` and `tensors`."""
        blocks = []
        for i, entry in enumerate(description):
            layers = [_layer_from(record) for record in entry["layers"]]
            own = {k.partition(".")[2]: v for k, v in tensors.items() if k.partition(".")[0] == str(i)}
            blocks.append(KINDS[entry["kind"]].restored(layers, own))
        return cls(blocks, structure)


def _joined(found: Any) -> Weights:
    return {name: value for part in found for name, value in part.items()}


def _layer_record(layer: Layer) -> dict[str, Any]:
    return {
        "names": list(layer.names), "kind": layer.kind, "shapes": [list(s) for s in layer.shapes], "biased": layer.biased,
        "weighted": layer.weighted, "transposed": layer.transposed, "groups": layer.groups,
    }  # fmt: skip


def _layer_from(record: Mapping[str, Any]) -> Layer:
    shapes = tuple(tuple(int(n) for n in shape) for shape in record["shapes"])
    return Layer(
        tuple(record["names"]), record["kind"], shapes, bool(record["biased"]), bool(record["weighted"]),
        bool(record["transposed"]), int(record["groups"]),
    )  # fmt: skip


def _assigned(blocks: Sequence[Block], parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that each block is about; a layer whose bias is in a block of its own is divided."""
    known = {part.layer.names: part for part in parts}
    found = []
    for block in blocks:
        own = []
        for layer in block.layers:
            if layer.names in known:
                own.append(known[layer.names])
            else:
                whole = next(part for part in parts if set(layer.names) <= set(part.layer.names))
                own.append(_divided(whole, layer))
        found.append(own)
    return found


def _divided(part: Part, layer: Layer) -> Part:
    """The weight or the bias of a layer alone."""
    if layer.weighted:
        return Part(layer, part.columns[..., :-1], part.rows)
    rows = part.rows.flatten(3).unsqueeze(3)
    return Part(layer, rows.new_ones(*rows.shape[1:4], 1), rows)


def _apart(layer: Layer) -> list[Layer]:
    """The weight and the bias of a layer as two."""
    weight = replace(layer, names=layer.names[:1], shapes=layer.shapes[:1], biased=False)
    return [weight, Layer(layer.names[1:], "matrix", layer.shapes[1:], biased=True, weighted=False)]


# ---------------------------------------------------------------------------------------------------------------------
# Estimation


def plan(
    layers: Sequence[Layer], structure: str, precision: Mapping[str, Tensor] | None = None, sharing: Sharing = "expand"
) -> list[Block]:
    """Empty blocks for these layers."""
    if structure == "diag":
        return [Diagonal([layer]) for layer in layers]
    if structure == "block":
        return [Dense([layer]) for layer in layers]
    if structure == "full":
        return [Dense(layers)]
    found: list[Block] = []
    for layer in layers:
        if layer.kind == "vector":
            found.append((Dense if layer.size <= SMALL else Diagonal)([layer]))
            continue
        both = layer.biased and layer.weighted
        equal = precision is None or not both or torch.equal(*(precision[name] for name in layer.names))
        found += [Kronecker([own], sharing) for own in ([layer] if equal else _apart(layer))]
    return found


def forecast(layers: Sequence[Layer], structure: str, rank: int = 0) -> int:
    """How many numbers a structure of these layers keeps."""
    if structure == "lowrank":
        return 3 * rank * sum(layer.size for layer in layers)
    return sum(block.elements(block.layers) for block in plan(layers, structure))


def require(needed: int, device: torch.device, structure: str) -> None:
    """A MemoryError with the forecast, before the work, where it cannot fit."""
    free = available(device)
    log.debug("structure=%r keeps about %.2f GiB", structure, needed / 2**30)
    if free is not None and needed > free:
        raise MemoryError(
            f"structure={structure!r} needs about {needed / 2**30:,.1f} GiB for these weights and {free / 2**30:,.1f} GiB are free "
            f"on {device}; use structure='kron' or 'diag', fewer weights (where='last'), or another device"
        )


def estimate(
    model: Model,
    weights: Mapping[str, Tensor],
    data: Data,
    *,
    structure: StructureName = "kron",
    curvature: CurvatureName = "ggn",
    names: Sequence[str] | None = None,
    precision: Mapping[str, Tensor] | None = None,
    sharing: Sharing = "expand",
    rank: int = 20,
    chunk: int | None = None,
    progress: bool | None = False,
    seed: int = 0,
    chosen: Tensor | None = None,
    tally: Tally | None = None,
) -> Curvature:
    """H of the random weights (or those in `names`) at `weights`, over all of the data.

    `precision` are those of the prior: weights and biases of a layer share Kronecker factors where theirs agree. `chunk` examples
    are looked at together; None chooses so many that matrix products are efficient, in at most half a GiB. `chosen` are numbers of
    elements, in the order of the layers: the full matrix of these alone. `tally` is filled on the way, except by "lowrank" and by
    the Hessian, which do not look at the layers.
    """
    model = model.restricted([n for n in names or model.random if not n.startswith("likelihood.")])
    first = next(iter(data.chunks(3)))
    at = Linearisation(model, weights, first.x)
    layers = at.all_layers
    device, item = next(iter(at.weights.values())).device, next(iter(at.weights.values())).element_size()
    needed = forecast(layers, structure, rank) if chosen is None else 5 * len(chosen) ** 2
    require(item * needed, device, structure)
    if structure == "lowrank":
        from plausible.curvature.low_rank import leading

        values, vectors = leading(model, at.weights, data, rank, kind=curvature, seed=seed, progress=progress)
        return Curvature([LowRank(layers, values, vectors)], structure)
    if curvature == "hessian":
        return _hessian(model, at, data, structure, chunk)
    blocks = plan(layers, structure, precision, sharing) if chosen is None else [Subset(layers, chosen)]
    last = is_final(at, model)
    fast = last and structure == "kron" and curvature != "empirical" and len(model.output_shape) == 1
    columns = 1 if curvature == "empirical" else losses.num_roots(
        model.likelihood, at.outputs(first.x), model.noise(weights), targets=first.y
    )  # fmt: skip
    columns = 1 if fast else columns + (tally is not None)
    cached = device.type == "cpu" and structure in ("diag", "kron", "ekfac") and chosen is None
    together = min(columns, max(2, ROWS // (chunk or EXAMPLES))) if cached else columns
    size = chunk or choose_chunk(at, together if structure != "ekfac" else columns, device, None if fast else EXAMPLES)
    if device.type == "cpu":
        keep_freed_memory()
    passes = 2 if structure == "ekfac" else 1
    with Progress(f"curvature ({structure})", passes * data.num_data, "examples", progress) as bar:
        done = 0
        for turn in range(passes):
            for batch in data.chunks(size):
                wanted = tally if turn == 0 else None
                if fast:
                    _add_final(at, blocks, batch, model, wanted)
                else:
                    roots = _roots(model, weights, batch, curvature, wanted)
                    slices = at.slices(batch.x, roots, together if turn == 0 else None)
                    _add(blocks, slices, _counted(batch), wanted, correcting=turn == 1)
                done += num_rows(batch.x)
                bar.update(done)
            for block in blocks:
                if turn == 0:
                    block.finish()
                elif isinstance(block, Kronecker):
                    block.corrected()
    return Curvature(blocks, structure)


def _counted(batch: Batch) -> Tensor | None:
    """Example weights, 0 for examples of which nothing was observed."""
    if batch.mask is None:
        return batch.weight
    seen = (batch.mask.flatten(1).any(1) if batch.mask.ndim > 1 else batch.mask).float()
    return seen if batch.weight is None else seen * batch.weight


@torch.no_grad()
def _add(
    blocks: Sequence[Block], slices: Iterator[tuple[Tensor, list[Part]]], weight: Tensor | None, tally: Tally | None,
    correcting: bool,
) -> None:  # fmt: skip
    """Add a chunk, slice by slice of its columns; that of the tally is the first."""
    for number, (_, parts) in enumerate(slices):
        if tally is not None and not number:
            parts = tally.take(parts)
        for block, own in zip(blocks, _assigned(blocks, parts)):
            if not correcting:
                block.add(own, weight, again=number > 0)
            elif isinstance(block, Kronecker):
                block.correct(own[0])
        del parts, own  # before the next ones are made


def choose_chunk(at: Linearisation, columns: int, device: torch.device, enough: int | None = None) -> int:
    """So many examples that matrix products are efficient, in at most `WORKSPACE` bytes or a quarter of what is free.

    On a CPU `enough` are, by default as many as make 4,096 rows with their columns.
    """
    free = available(device)
    one = at.bytes_per_example(columns)
    if free is not None and one > free:
        raise MemoryError(
            f"the Jacobian of one example needs about {one / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free on {device}; "
            "use fewer weights (where=), or another device"
        )
    budget = WORKSPACE * (8 if device.type == "cuda" else 1)
    budget = budget if free is None else min(budget, max(free // 4, 2**24))
    enough = (enough or max(128, min(1024, 4096 // max(columns, 1)))) if device.type == "cpu" else 8192
    return int(max(1, min(enough, budget // (3 * at.bytes_per_example(columns)))))


def _roots(
    model: Model, weights: Mapping[str, Tensor], batch: Batch, curvature: str, tally: Tally | None
) -> Callable[[Tensor], Tensor]:
    """S of a batch: SSᵀ = F, or the gradient of the log-likelihood; times √weight. For a tally its column is added."""
    noise = model.noise(weights)

    def roots(outputs: Tensor) -> Tensor:
        if curvature == "empirical":
            found = losses.gradient(model.likelihood, outputs, batch.y, noise, batch.mask)[None]
        else:
            found = losses.root(model.likelihood, outputs, noise, batch.mask, targets=batch.y)
        if batch.weight is not None:
            found = found * batch.weight.sqrt().reshape(1, -1, *[1] * (found.ndim - 2))
        return found if tally is None else torch.cat([tally.slope(model, weights, batch, outputs)[None], found])

    return roots


def is_final(at: Linearisation, model: Model) -> bool:
    """Whether the only layer is one whose outputs are those of the network."""
    layers = at.all_layers
    if len(layers) != 1 or layers[0].kind != "matrix" or len(model.output_shape) != 1 or not layers[0].weighted:
        return False
    return at.final and layers[0].matrix_shape[:2] == (1, model.output_shape[0]) and not layers[0].transposed


def _add_final(at: Linearisation, blocks: Sequence[Block], batch: Batch, model: Model, tally: Tally | None) -> None:
    """The factors of a last layer, whose gradients are those of the outputs."""
    batch = batch._replace(weight=_counted(batch))

    def column(f: Tensor) -> Tensor:
        return (torch.zeros_like(f) if tally is None else tally.slope(model, at.weights, batch, f))[None]

    outputs, parts = at(batch.x, column)
    if tally is not None:
        tally.take(parts)
    b = losses.summed(model.likelihood, outputs, model.noise(at.weights), batch.weight, batch.mask, targets=batch.y)
    c = parts[0].columns[:, 0, 0]
    for block in blocks:
        assert isinstance(block, Kronecker)
        whole = block.layer.names == parts[0].layer.names
        own = c if whole else c[:, :-1] if block.layer.weighted else torch.ones_like(c[:, :1])
        block.add_final(own, b, batch.weight)


def _hessian(model: Model, at: Linearisation, data: Data, structure: str, chunk: int | None) -> Curvature:
    """Blocks of the exact Hessian, from its products with unit vectors."""
    from plausible.curvature.products import hessian_product

    layers = at.all_layers
    size = sum(layer.size for layer in layers)
    if structure not in ("diag", "block", "full"):
        raise ValueError(
            f"curvature='hessian' has no Kronecker factors (structure={structure!r}): use structure='diag', 'block', 'full' or "
            "'lowrank', or curvature='ggn'"
        )
    if size > HESSIAN_LIMIT:
        raise ValueError(
            f"curvature='hessian' takes a pass over the data for every weight, and there are {size:,}; use curvature='ggn', "
            "structure='lowrank', or fewer weights (where='last')"
        )
    blocks = plan(layers, structure)
    like = {name: at.weights[name] for layer in layers for name in layer.names}
    for block in blocks:
        own = block.size
        rows = []
        for start in range(0, own, 64):
            count = min(64, own - start)
            unit = torch.zeros(
                count, own, dtype=next(iter(like.values())).dtype, device=next(iter(like.values())).device
            )
            unit[torch.arange(count), torch.arange(start, start + count)] = 1.0
            vectors = {n: torch.zeros(count, *v.shape).to(v) for n, v in like.items()}
            vectors.update(named(block.layers, unit))
            found = flat(block.layers, hessian_product(model, at.weights, data, vectors, chunk=chunk))
            rows.append(found if isinstance(block, Dense) else found[torch.arange(count), start + torch.arange(count)])
        whole = torch.cat(rows)
        if isinstance(block, Dense):
            block.matrix = (whole + whole.T) / 2
        else:
            negative = int((whole < 0).sum())
            if negative:
                log.warning("%d of %d diagonal entries of the Hessian are negative and were set to 0", negative, own)
            block.values = block.layers[0].split(whole.clamp(min=0))  # type: ignore[attr-defined]
    return Curvature(blocks, structure)
