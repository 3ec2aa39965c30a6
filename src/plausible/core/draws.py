"""A function of many draws of the weights: all of them at once where `vmap` can, in chunks that fit into memory.

Whoever needs f(x; w) for many w asks here, so that there is one way of stacking, one fallback and one rule about memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plausible.core import weights as tree
from plausible.core.data import num_rows, take
from plausible.core.weights import Weights
from plausible.core.words import log

if TYPE_CHECKING:
    from plausible.core.model import Model


NUMBERS = 2**26  # numbers that the draws held at once have together: 256 MiB in float32
ROWS = 2**17  # draws × inputs that are evaluated at once
PART = 4096  # inputs that are evaluated at once where nobody says how many
# numbers of a draw × inputs from which draws are evaluated one by one: their products fill the machine by themselves
LARGE = 10**7
# networks for which `vmap` has failed: their draws are evaluated one by one from then on
LOOPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def at_once(numbers: int, rows: int = 1, *, copies: int = 1, block: int = 1) -> int:
    """How many draws to evaluate at once, a multiple of `block`: the one rule about memory.

    Each draw has so many `numbers` and is evaluated on `rows` inputs; `copies` says how many times more memory an input takes than
    in a forward pass.
    """
    most = min(NUMBERS // max(1, numbers), ROWS // max(1, rows * copies))
    return block * max(1, most // block)


def map_draws(function: Callable[[Weights], Any], stacked: Weights, network: nn.Module) -> Any:
    """`function(w)` of each draw w of stacked weights, stacked again: by `vmap`, or one by one where the network does not allow it.

    Whether it does is found out by trying, logged once, and remembered for the network.
    """
    count = len(next(iter(stacked.values())))

    def one_by_one() -> Any:
        return tree.stack([function(tree.index(stacked, k)) for k in range(count)])

    if count == 1:
        # vmap over one draw costs more than the draw
        result = function({name: value[0] for name, value in stacked.items()})
        return result.unsqueeze(0) if isinstance(result, Tensor) else tree.stack([result])
    if network in LOOPED:
        return one_by_one()
    try:
        return torch.func.vmap(function)(stacked)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        results = one_by_one()  # where this fails too, the inputs are at fault and not vmap
        log.debug("vmap over draws failed (%s): they are evaluated one by one", error)
        LOOPED.add(network)
        return results


def outputs_of_draws(
    model: Model,
    source: Callable[[int, int], Weights],
    total: int,
    inputs: Any,
    *,
    fixed: Mapping[str, Tensor] | None = None,
    batch_size: int | None = None,
    block: int = 1,
) -> tuple[Tensor, Weights]:
    """f(x; w) for `total` draws, [S, N, *outputs], and the likelihood's own weights of each, by name [S, …].

    `source(first, count)` gives draws number first … first + count − 1, stacked; each is asked for once, `block` of them or a
    multiple at a time. `fixed` are weights and buffers that all draws share; what depends on nothing else is computed once.
    """
    fixed, rows = dict(fixed or {}), num_rows(inputs)
    device = next(iter(model.initial.values())).device
    numbers = max(1, tree.num_elements({n: w for n, w in {**model.initial, **model.buffers}.items() if n not in fixed}))
    # Large draws are evaluated one by one. On a GPU only where their noise is drawn in blocks between the products: stored draws
    # are stacked there, which launches fewer kernels.
    single = numbers * rows > LARGE and (device.type == "cpu" or block > 1)
    part = PART
    if single and isinstance(inputs, Tensor) and inputs.ndim == 2:
        # small parts of large products stay in the caches of a CPU, large ones keep a GPU busy
        part = 1024 if device.type == "cpu" else 16384
    part = batch_size or min(rows, part)
    chunk = block if single else at_once(numbers, part, block=block)
    outputs: Tensor | None = None
    noise = []
    for first in range(0, total, chunk):
        count = min(chunk, total - first)
        stacked = source(first, count)
        shared = {name: fixed[name].expand(count, *fixed[name].shape) for name in model.likelihood_names if name in fixed}
        noise.append(model.noise({**shared, **stacked}))
        # Weights outside, inputs inside: large weights then stay in the caches while all inputs pass by.
        for place, draws in [(k, tree.index(stacked, slice(k, k + 1))) for k in range(count)] if single else [(0, stacked)]:
            for start in range(0, rows, part):
                x = inputs if part >= rows else take(inputs, slice(start, start + part))
                values = map_draws(lambda w, x=x: model.outputs({**fixed, **w}, x), draws, model.network)  # type: ignore[misc]
                if values.ndim < 2 or values.shape[1] != num_rows(x):
                    # not broadcast into place: a network that loses the axis of inputs is an error here
                    raise ValueError(f"x: the network gives {list(values.shape[1:])} for {num_rows(x)} inputs")
                if len(values) == total and part >= rows:
                    outputs = values
                    continue
                if outputs is None:
                    # allocated once and filled: a list of parts would need the memory twice
                    outputs = values.new_empty(total, rows, *values.shape[2:])
                at = first + place
                outputs[at : at + len(values), start : start + num_rows(x)] = values
    assert outputs is not None
    return outputs, noise[0] if len(noise) == 1 else tree.concatenate(noise)
