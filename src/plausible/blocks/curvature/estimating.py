"""The curvature of a model at its weights, estimated in a few passes over the data with bounded memory.

H = Σ_n weight_n J_nᵀ F_n J_n   (Gauss-Newton, Fisher),   Σ_n weight_n g_n g_nᵀ   (empirical),   or the Hessian of −log p(D | w)

`start` gives an `Estimator` (see `plausible.core.data`), which whoever has the data feeds with them; `estimate` does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plausible.blocks.curvature import losses
from plausible.blocks.curvature.columns import Choice, Columns, Portions, parted
from plausible.blocks.curvature.dense import Dense, ExactHessian, Subset
from plausible.blocks.curvature.kronecker import Kronecker, Sharing
from plausible.blocks.curvature.layers import Layer, Part, keep_freed_memory
from plausible.blocks.curvature.linearising import Linearisation
from plausible.blocks.curvature.low_rank import Eigenpairs, LowRank
from plausible.blocks.curvature.structures import Block, Curvature, CurvatureName, Diagonal, StructureName, apart, assigned
from plausible.core import memory
from plausible.core.data import Batch, Data, Estimator, Watch, run_passes
from plausible.core.model import Model
from plausible.core.transforms import value_and_gradient
from plausible.core.weights import Weights
from plausible.core.words import log

# vectors up to this size (norms, bare parameters) get a dense block among Kronecker factors, larger ones a diagonal
SMALL = 1024
WORKSPACE = 2**29  # bytes for the activations and gradients of one chunk of the data
# examples times columns that a CPU looks at together: matrix products gain no more from others, and these stay in its caches
ROWS = 2560
# examples of a chunk on a CPU, twice as many where they have few columns; fewer where one alone fills the workspace
EXAMPLES = 256


class Tally:
    """Σ_n weight_n log p(y_n | f_n), in float64 (None before the first batch), and its gradient, by weight.

    Cost: one more column beside those of the curvature, and a product of the size of the weights.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.layers: Sequence[Layer] = ()

    @property
    def log_likelihood(self) -> Tensor | None:
        return self.sums.get("log likelihood")

    @property
    def columns(self) -> float | None:
        """Columns of the outputs' Fisher that were looked at, on average over the examples."""
        return float(self.sums["columns"]) if "columns" in self.sums else None

    @property
    def gradient(self) -> Weights:
        totals = ((layer, self.sums.get(f"slope.{layer.names[0]}")) for layer in self.layers)
        return {n: v for layer, total in totals if total is not None for n, v in layer.named(total).items()}

    def slope(self, model: Model, weights: Mapping[str, Tensor], batch: Batch, outputs: Tensor) -> Tensor:
        """∂/∂f of a batch's part of the sum, [B, *O]; adds its value."""
        noise = model.noise(weights)

        def total(at: Weights) -> tuple[Tensor, tuple[()]]:
            each = model.likelihood.log_prob(at["f"], batch.y, noise)
            each = each if batch.mask is None else torch.where(batch.mask, each, torch.zeros_like(each))
            each = each.flatten(1).sum(1) if each.ndim > 1 else each
            return (each if batch.weight is None else each * batch.weight).sum(), ()

        value, _, slope = value_and_gradient(total, {"f": outputs})
        before = self.sums.get("log likelihood")
        self.sums["log likelihood"] = value.double() if before is None else before + value
        return slope["f"]

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """Add the gradient, which is in the first column of the parts; the parts without that column."""
        for part in parts:
            name = f"slope.{part.layer.names[0]}"
            self.sums[name] = Part(part.layer, part.columns, part.rows[:1]).summed(self.sums.get(name))
        return [Part(part.layer, part.columns, part.rows[1:]) for part in parts]


def estimate(model: Model, weights: Mapping[str, Tensor], data: Data, *, watch: Watch = None, **settings: Any) -> Curvature:
    """H of the random weights at `weights`, over all of the data: `start` with these `settings`, run to its end.

    `watch` is told the number of examples that were seen so far, and a note.
    """
    return run_passes(start(model, weights, data, **settings), data, watch)


def start(
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
    columns: int | None = None,
    seed: int = 0,
    chosen: Tensor | None = None,
    tally: Tally | None = None,
) -> Estimator[Curvature]:
    """An estimator of H of the random weights (or those in `names`) at `weights`; of the data it looks at a few examples.

    `precision` are those of the prior: weights and biases of a layer share Kronecker factors where theirs agree. `chunk`
    examples are looked at together; None chooses so many that matrix products are efficient, in at most half a GiB. Columns of
    the outputs' Fisher that have at most the share `negligible` of what is known about any output are left out; `columns` are so
    many random combinations of them for each example, by which H is right in expectation. `chosen` are
    numbers of elements, in the order of the layers: the full matrix of these alone. `tally` is filled on the way, except by
    "lowrank" and by the Hessian, which do not look at the layers.
    """
    model = model.restricted([n for n in names or model.random if not n.startswith("likelihood.")])
    first = next(iter(data.chunks(3)))
    at = Linearisation(model, weights, first.x)
    layers = at.all_layers
    like = next(iter(at.weights.values()))
    needed = forecast(layers, structure, rank) if chosen is None else 5 * len(chosen) ** 2
    require(like.element_size() * needed, like.device, structure)
    if structure == "lowrank":
        pairs = _LowRank(model, at.weights, data, rank, kind=curvature, seed=seed)
        pairs.layers = layers
        return pairs
    if curvature == "hessian":
        return ExactHessian(model, at.weights, data, plan(layers, structure), structure, chunk)
    blocks = plan(layers, structure, precision, sharing) if chosen is None else [Subset(layers, chosen)]
    return _Sums(at, data, first, blocks, structure, curvature, chunk, negligible, tally, columns, seed)


class _Sums:
    """The `Estimator` of blocks that are sums over the data.

    Of each chunk of examples the parts of JᵀS for the columns S are added to the blocks, slice by slice. A second pass corrects
    the eigenvalues of Kronecker factors where the structure is "ekfac".
    """

    note = ""

    def __init__(
        self,
        at: Linearisation,
        data: Data,
        first: Batch,
        blocks: Sequence[Block],
        structure: str,
        curvature: str,
        chunk: int | None,
        negligible: float,
        tally: Tally | None,
        columns: int | None,
        seed: int,
    ):
        self.sketched, self.columns, self.seed = 0, columns, seed
        self.model, self.at, self.blocks, self.structure, self.tally = at.model, at, list(blocks), structure, tally
        # corrected eigenvalues need the eigenbases, which one pass over the data must find first
        self.passes, self.turn = 2 if structure == "ekfac" else 1, 0
        self.device, self.noise = next(iter(at.weights.values())).device, at.model.noise(at.weights)
        self.num_data, self.wished = data.num_data, chunk
        self.empirical = curvature == "empirical"
        self.final = is_final(at, at.model) and structure == "kron" and not self.empirical
        # blocks that never write a Jacobian down are limited by the CPU's caches, the others by their own matrices
        self.cached = self.device.type == "cpu" and structure in ("diag", "kron", "ekfac") and not isinstance(blocks[0], Subset)
        self._sizes: dict[tuple[int, bool], tuple[int, int]] = {}
        if tally is not None:
            tally.layers = at.all_layers
        for block in self.blocks:
            if isinstance(block, Kronecker):
                # a restored block has sums, and nothing was added to it that would tell
                block.dtype = next(iter(at.weights.values())).dtype
        if self.device.type == "cpu":
            keep_freed_memory()
        sizes = lambda columns: self._size(columns)[0]  # noqa: E731
        self._portions = partial(Portions, self._fisher, sizes, first, negligible, data.resident)
        self.portions = None if self.empirical or self.final else self._portions()

    @property
    def chunk(self) -> int:
        return self._size(1)[0] if self.portions is None else self.portions.chunk

    def _size(self, count: int) -> tuple[int, int]:
        """How many examples with so many columns, and how many of the columns, are looked at together."""
        tallied = self.tally is not None and self.turn == 0
        if (count, tallied) not in self._sizes:
            together, enough = 1, None
            if not self.final:
                together = columns = count + tallied
                enough = max(EXAMPLES, min(2 * EXAMPLES, ROWS // columns)) if self.cached else EXAMPLES
                if self.cached:
                    together = min(columns, max(2, ROWS // (self.wished or enough)))
            self._sizes[count, tallied] = self.wished or choose_jacobian_chunk(self.at, together, self.device, enough), together
        return self._sizes[count, tallied]

    def add(self, batch: Batch) -> None:
        if self.portions is None:
            for part in parted(batch, self._size(1)[0]):
                if self.final:
                    self._add_final(part)
                else:
                    self._add(part, partial(self._gradients, part), self._size(1)[1])
            return
        for part, choice in self.portions.of(batch):
            together = self._size(self.portions.columns if choice is None else choice.columns)[1]

            def columns(outputs: Tensor, part: Batch = part, choice: Choice | None = choice) -> Columns:
                return Columns(self._fisher(part, outputs), choice, part.weight, self._slope(part, outputs))

            self._add(part, columns, together)

    @torch.no_grad()
    def _add(self, batch: Batch, columns: Callable[[Tensor], Tensor | Columns], together: int) -> None:
        """Add some examples, slice by slice of their columns; that of the tally is the first."""
        weight = _counted(batch)
        for number, (_, parts) in enumerate(self.at.slices(batch.x, columns, together)):
            if self.tally is not None and self.turn == 0 and not number:
                parts = self.tally.take(parts)
            for block, block_parts in zip(self.blocks, assigned(self.blocks, parts)):
                if self.turn == 0:
                    block.add(block_parts, weight, again=number > 0)
                elif isinstance(block, Kronecker):
                    block.correct(block_parts[0])
            del parts, block_parts  # before the next ones are made
        for block in self.blocks:
            block.close()

    def _add_final(self, batch: Batch) -> None:
        """The factors of a last layer, whose gradients are those of the outputs."""
        # B comes from the outputs alone, so that examples without targets must be taken out by weight
        batch = batch._replace(weight=_counted(batch))

        def column(f: Tensor) -> Tensor:
            slope = self._slope(batch, f)
            return (torch.zeros_like(f) if slope is None else slope)[None]

        outputs, parts = self.at(batch.x, column)
        if self.tally is not None:
            self.tally.take(parts)
        b = losses.summed(self.model.likelihood, outputs, self.noise, batch.weight, batch.mask, targets=batch.y)
        c = parts[0].columns[:, 0, 0]
        for block in self.blocks:
            assert isinstance(block, Kronecker)
            whole = block.layer.names == parts[0].layer.names
            # the factor of a bias alone has an input of 1
            inputs = c if whole else c[:, :-1] if block.layer.weighted else torch.ones_like(c[:, :1])
            block.add_final(inputs, b, batch.weight)

    def _fisher(self, batch: Batch, outputs: Tensor | None = None) -> Any:
        outputs = self.at.outputs(batch.x) if outputs is None else outputs
        fisher = losses.output_fisher(self.model.likelihood, outputs, self.noise, batch.mask, batch.y)
        if self.columns is None or fisher.num_roots <= self.columns:
            return fisher
        self.sketched += 1  # each batch has signs of its own
        return losses.Sketch(fisher, self.columns, self.seed + self.sketched)

    def _gradients(self, batch: Batch, outputs: Tensor) -> Tensor:
        score = losses.gradient(self.model.likelihood, outputs, batch.y, self.noise, batch.mask)
        if batch.weight is not None:
            # its outer product then has the weight itself
            score = score * batch.weight.sqrt().reshape(-1, *[1] * (score.ndim - 1))
        first = self._slope(batch, outputs)
        return score[None] if first is None else torch.stack([first, score])

    def _slope(self, batch: Batch, outputs: Tensor) -> Tensor | None:
        if self.tally is None or self.turn > 0:
            return None
        return self.tally.slope(self.model, self.at.weights, batch, outputs)

    def next_pass(self) -> bool:
        for block in self.blocks:
            if self.turn == 0 or isinstance(block, Kronecker):
                block.finish()
        if self.portions is not None:
            used = self.portions.used / self.num_data
            log.debug("%.1f of %d columns for each example", used, self.portions.columns)
            if self.tally is not None and self.turn == 0:
                self.tally.sums["columns"] = torch.tensor(used, dtype=torch.float64)
        self.turn += 1
        if self.turn == self.passes:
            return False
        if self.portions is not None:  # with chunks of another size: there is no tally any more
            self.portions = self._portions()
        return True

    def finish(self) -> Curvature:
        return Curvature(self.blocks, self.structure)

    def tensors(self) -> dict[str, Tensor]:
        state = {"turn": torch.tensor(self.turn), "sketched": torch.tensor(self.sketched)}
        state |= {f"block {i}.sum.{n}": v for i, block in enumerate(self.blocks) for n, v in block.sums.items()}
        if self.turn:
            state |= {f"block {i}.kept.{n}": v for i, block in enumerate(self.blocks) for n, v in block.tensors().items()}
        if self.portions is not None:
            state |= {f"portions.{n}": v for n, v in self.portions.tensors().items()}
        return state if self.tally is None else state | {f"tally.{n}": v for n, v in self.tally.sums.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        def below(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}

        self.turn = int(tensors["turn"])
        for i, block in enumerate(self.blocks):
            if self.turn:
                self.blocks[i] = block = block.restored(block.layers, below(f"block {i}.kept."))
            block.sums.update(below(f"block {i}.sum."))
        if self.portions is not None:
            self.portions = self._portions()
            self.portions.restore(below("portions."))
        self.sketched = int(tensors["sketched"])
        if self.tally is not None:
            self.tally.sums.update(below("tally."))


class _LowRank(Eigenpairs):
    layers: Sequence[Layer]

    def finish(self) -> Curvature:  # type: ignore[override]
        return Curvature([LowRank(self.layers, *super().finish())], "lowrank")


def _counted(batch: Batch) -> Tensor | None:
    """How much each example counts [B]: its weight, and 0 where none of its targets was observed; None where all count alike."""
    if batch.mask is None:
        return batch.weight
    seen = (batch.mask.flatten(1).any(1) if batch.mask.ndim > 1 else batch.mask).float()
    return seen if batch.weight is None else seen * batch.weight


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and what it takes
def plan(
    layers: Sequence[Layer], structure: str, precision: Mapping[str, Tensor] | None = None, sharing: Sharing = "expand"
) -> list[Block]:
    """The empty blocks of a structure; weight and bias of a layer share Kronecker factors only where their precisions agree."""
    if structure == "diag":
        return [Diagonal([layer]) for layer in layers]
    if structure == "block":
        return [Dense([layer]) for layer in layers]
    if structure == "full":
        return [Dense(layers)]
    blocks: list[Block] = []
    for layer in layers:
        if layer.kind == "vector":
            blocks.append((Dense if layer.size <= SMALL else Diagonal)([layer]))
            continue
        equal = True
        if precision is not None and layer.biased and layer.weighted:
            a, b = (precision[name] for name in layer.names)  # one number up to the rounding of how they were had?
            equal = a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-5, atol=0.0))
        blocks += [Kronecker([one], sharing) for one in ([layer] if equal else apart(layer))]
    return blocks


def forecast(layers: Sequence[Layer], structure: str, rank: int = 0) -> int:
    """How many numbers the structure will keep."""
    if structure == "lowrank":
        return 3 * rank * sum(layer.size for layer in layers)
    return sum(block.elements(block.layers) for block in plan(layers, structure))


def require(needed: int, device: torch.device, structure: str) -> None:
    """Raise a MemoryError where the `needed` bytes are more than are free."""
    free = memory.available(device)
    log.debug("structure=%r keeps about %.2f GiB", structure, needed / 2**30)
    if free is not None and needed > free:
        raise MemoryError(
            f"structure={structure!r} needs about {needed / 2**30:,.1f} GiB for these weights and {free / 2**30:,.1f} GiB are free "
            f"on {device}; use structure='kron' or 'diag', fewer weights (where='last'), or another device"
        )


def choose_jacobian_chunk(at: Linearisation, columns: int, device: torch.device, enough: int | None = None) -> int:
    """How many examples to take at a time.

    So many that matrix products are efficient, in at most `WORKSPACE` bytes or a quarter of what is free. On a
    CPU `enough` are, by default as many as make 4,096 rows with their columns.
    """
    one = at.bytes_per_example(columns)
    advice = "use fewer weights (where=), or another device"
    free = memory.require_memory(one, device, "the Jacobian of one example", advice)
    # a GPU wants larger products to be busy
    budget = WORKSPACE * (8 if device.type == "cuda" else 1)
    budget = budget if free is None else min(budget, max(free // 4, 2**24))
    enough = (enough or max(128, min(1024, 4096 // max(columns, 1)))) if device.type == "cpu" else 8192
    return int(max(1, min(enough, budget // (3 * one))))


def is_final(at: Linearisation, model: Model) -> bool:
    """Whether the only layer is one whose outputs are those of the network."""
    layers = at.all_layers
    if len(layers) != 1 or layers[0].kind != "matrix" or len(model.output_shape) != 1 or not layers[0].weighted:
        return False
    return at.final and layers[0].matrix_shape[:2] == (1, model.output_shape[0]) and not layers[0].transposed
