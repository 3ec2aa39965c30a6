"""The curvature of a model at its weights, estimated in one pass over the data with bounded memory.

H = Σ_n weight_n J_nᵀ F_n J_n   (Gauss-Newton, Fisher),   Σ_n weight_n g_n g_nᵀ   (empirical),   or the Hessian of −log p(D | w)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from plausible.blocks.curvature import losses
from plausible.blocks.curvature.blocks import Block, Dense, Diagonal, flat, named
from plausible.blocks.curvature.columns import Choice, Columns, Portions
from plausible.blocks.curvature.gram import keep_freed_memory
from plausible.blocks.curvature.kronecker import Kronecker, Sharing
from plausible.blocks.curvature.layers import Layer, Part
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.low_rank_block import LowRank
from plausible.blocks.curvature.output_fisher import OutputFisher
from plausible.blocks.curvature.structures import Curvature, CurvatureName, StructureName, apart, assigned
from plausible.blocks.curvature.subset import Subset
from plausible.blocks.curvature.tally import Tally
from plausible.core.data import Batch, Data, num_rows
from plausible.core.memory import available
from plausible.core.model import Model
from plausible.engine.progress import Progress

log = logging.getLogger("plausible")

SMALL = 1024
"""Vectors up to this size (norms, bare parameters) get a dense block among Kronecker factors, larger ones a diagonal."""
WORKSPACE = 2**29
"""Bytes for the activations and gradients of one chunk of the data."""
ROWS = 2560
"""Examples times columns that a CPU looks at together: matrix products gain no more from others, and these stay in its caches."""
EXAMPLES = 256
"""Examples of a chunk on a CPU, twice as many where they have few columns; fewer where one alone fills the workspace."""
HESSIAN_LIMIT = 20_000
"""Weights up to which the diagonal of a Hessian is read off its products."""


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
        equal = precision is None or not both or _agree(*(precision[name] for name in layer.names))
        found += [Kronecker([own], sharing) for own in ([layer] if equal else apart(layer))]
    return found


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two precisions are the same number, up to the rounding of how they were had."""
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-5, atol=0.0))


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
    negligible: float = 0.0,
    progress: bool | None = False,
    seed: int = 0,
    chosen: Tensor | None = None,
    tally: Tally | None = None,
) -> Curvature:
    """H of the random weights (or those in `names`) at `weights`, over all of the data.

    `precision` are those of the prior: weights and biases of a layer share Kronecker factors where theirs agree. `chunk`
    examples are looked at together; None chooses so many that matrix products are efficient, in at most half a GiB. Columns of
    the outputs' Fisher that have at most the share `negligible` of what is known about any output are left out. `chosen` are
    numbers of elements, in the order of the layers: the full matrix of these alone. `tally` is filled on the way, except by
    "lowrank" and by the Hessian, which do not look at the layers.
    """
    model = model.restricted([n for n in names or model.random if not n.startswith("likelihood.")])
    first = next(iter(data.chunks(3)))
    at = Linearisation(model, weights, first.x)
    layers = at.all_layers
    device, item = next(iter(at.weights.values())).device, next(iter(at.weights.values())).element_size()
    needed = forecast(layers, structure, rank) if chosen is None else 5 * len(chosen) ** 2
    require(item * needed, device, structure)
    if structure == "lowrank":
        from plausible.blocks.curvature.low_rank import leading

        values, vectors = leading(model, at.weights, data, rank, kind=curvature, seed=seed, progress=progress)
        return Curvature([LowRank(layers, values, vectors)], structure)
    if curvature == "hessian":
        return _hessian(model, at, data, structure, chunk)
    blocks = plan(layers, structure, precision, sharing) if chosen is None else [Subset(layers, chosen)]
    fast = is_final(at, model) and structure == "kron" and curvature != "empirical" and len(model.output_shape) == 1
    if device.type == "cpu":
        keep_freed_memory()
    cached = device.type == "cpu" and structure in ("diag", "kron", "ekfac") and chosen is None
    passes = 2 if structure == "ekfac" else 1
    with Progress(f"curvature ({structure})", passes * data.num_data, "examples", progress) as bar:
        done = 0
        for turn in range(passes):
            own = tally if turn == 0 else None
            whole = _Pass(at, model, curvature, chunk, cached, own)
            for batch, slices in whole.final(data) if fast else whole(data, first, negligible):
                if slices is None:
                    _add_final(at, blocks, batch, model, own)
                else:
                    _add(blocks, slices, _counted(batch), own, correcting=turn == 1)
                done += num_rows(batch.x)
                bar.update(done)
            for block in blocks:
                if turn == 0:
                    block.finish()
                elif isinstance(block, Kronecker):
                    block.corrected()
    return Curvature(blocks, structure)


class _Pass:
    """One pass over the data: chunks, and of each the parts of JᵀS for its columns S, slice by slice."""

    def __init__(self, at: Linearisation, model: Model, curvature: str, chunk: int | None, cached: bool, tally: Tally | None):
        self.at, self.model, self.curvature, self.tally = at, model, curvature, tally
        self.chunk, self.cached = chunk, cached
        self.noise = model.noise(at.weights)
        self._known: dict[int, tuple[int, int]] = {}

    def __call__(
        self, data: Data, first: Batch, negligible: float
    ) -> Iterator[tuple[Batch, Iterator[tuple[Tensor, list[Part]]]]]:
        """Chunks and their slices; `first` is any batch."""
        if self.curvature == "empirical":
            size, together = self.sizes(1)
            for batch in data.chunks(size):
                yield batch, self.at.slices(batch.x, partial(self.gradients, batch), together)
            return
        portions = Portions(self.fisher, lambda columns: self.sizes(columns)[0], first, negligible)
        for batch, own in portions(data):
            together = self.sizes(portions.columns if own is None else own.columns)[1]
            yield batch, self.at.slices(batch.x, partial(self.columns, batch, own), together)
        log.debug("%.1f of %d columns for each example", portions.used / data.num_data, portions.columns)
        if self.tally is not None:
            self.tally.columns = portions.used / data.num_data

    def final(self, data: Data) -> Iterator[tuple[Batch, None]]:
        """Chunks of examples of which the last layer's inputs are enough."""
        size = self.chunk or choose_chunk(self.at, 1, next(iter(self.at.weights.values())).device)
        return ((batch, None) for batch in data.chunks(size))

    def fisher(self, batch: Batch, outputs: Tensor | None = None) -> OutputFisher:
        """F of a batch."""
        outputs = self.at.outputs(batch.x) if outputs is None else outputs
        return losses.output_fisher(self.model.likelihood, outputs, self.noise, batch.mask, batch.y)

    def columns(self, batch: Batch, choice: Choice | None, outputs: Tensor) -> Columns:
        """S of a batch, SSᵀ = F, times √weight; that of a tally comes first."""
        return Columns(self.fisher(batch, outputs), choice, batch.weight, self.slope(batch, outputs))

    def gradients(self, batch: Batch, outputs: Tensor) -> Tensor:
        """The same for the gradient of the log-likelihood."""
        found = losses.gradient(self.model.likelihood, outputs, batch.y, self.noise, batch.mask)
        if batch.weight is not None:
            found = found * batch.weight.sqrt().reshape(-1, *[1] * (found.ndim - 1))
        first = self.slope(batch, outputs)
        return found[None] if first is None else torch.stack([first, found])

    def slope(self, batch: Batch, outputs: Tensor) -> Tensor | None:
        """The column of the tally."""
        return None if self.tally is None else self.tally.slope(self.model, self.at.weights, batch, outputs)

    def sizes(self, count: int) -> tuple[int, int]:
        """How many examples with so many columns, and how many of the columns, are looked at together."""
        if count not in self._known:
            columns, device = count + (self.tally is not None), next(iter(self.at.weights.values())).device
            enough = max(EXAMPLES, min(2 * EXAMPLES, ROWS // columns)) if self.cached else EXAMPLES
            together = min(columns, max(2, ROWS // (self.chunk or enough))) if self.cached else columns
            self._known[count] = self.chunk or choose_chunk(self.at, together, device, enough), together
        return self._known[count]


def _counted(batch: Batch) -> Tensor | None:
    """Example weights, 0 for examples of which nothing was observed."""
    if batch.mask is None:
        return batch.weight
    seen = (batch.mask.flatten(1).any(1) if batch.mask.ndim > 1 else batch.mask).float()
    return seen if batch.weight is None else seen * batch.weight


@torch.no_grad()
def _add(
    blocks: Sequence[Block],
    slices: Iterator[tuple[Tensor, list[Part]]],
    weight: Tensor | None,
    tally: Tally | None,
    correcting: bool,
) -> None:
    """Add a chunk, slice by slice of its columns; that of the tally is the first."""
    for number, (_, parts) in enumerate(slices):
        if tally is not None and not number:
            parts = tally.take(parts)
        for block, own in zip(blocks, assigned(blocks, parts)):
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
    from plausible.blocks.curvature.products import hessian_product

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
            unit = torch.zeros(count, own, dtype=next(iter(like.values())).dtype, device=next(iter(like.values())).device)
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
