"""Networks that look at their weights again in the backward pass, when the weights of the pass are no longer in them.

Two kinds do so. Blocks under `torch.utils.checkpoint` are run a second time: `blocks` sees to it that they find the weights of
their pass. A `torch.autograd.Function` of somebody's own may ask its module for parameters (solvers of differential equations by
adjoints do): `own_copy` gives each pass a network of its own, and `needs_copies` finds out who needs one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from plausible.core.attributes import duplicate

library: Any = torch.utils.checkpoint
Again = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def blocks(again: Again | None) -> Iterator[None]:
    """Checkpointed blocks inside are run again under `again()`; with None (and without gradients) they are plain calls.

    Re-entrant ones are run as the others: `torch.autograd.grad` cannot differentiate them.
    """
    without, function = library._checkpoint_without_reentrant_generator, library.CheckpointFunction

    def generator(block: Callable[..., Any], *settings: Any, **keywords: Any) -> Iterator[None]:
        def rerun(*args: Any, **kwargs: Any) -> Any:
            assert again is not None
            with again(), blocks(again):  # as at first, also for blocks inside this one
                return block(*args, **kwargs)

        if again is None or not torch.is_grad_enabled():
            yield  # checkpoint() calls the block itself
        else:
            yield from without(rerun, *settings, **keywords)

    # checkpoint() looks both up here, whoever holds a reference to it
    library._checkpoint_without_reentrant_generator = generator
    library.CheckpointFunction = _NotReentrant
    try:
        yield
    finally:
        library._checkpoint_without_reentrant_generator, library.CheckpointFunction = without, function


class _NotReentrant:
    @staticmethod
    def apply(block: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return library.checkpoint(block, *args, use_reentrant=False, preserve_rng_state=preserve)


# ---------------------------------------------------------------------------------------------------------------------
def own_copy(network: nn.Module, variables: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network that holds these tensors for parameters and buffers for as long as it lives."""
    held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return duplicate(network, {id(value): variables.get(name, value) for name, value in held.items()})


def foreign(outputs: Tensor) -> bool:
    """Whether a `torch.autograd.Function` of somebody's own took part in these outputs."""
    todo, seen = [outputs.grad_fn], {outputs.grad_fn}
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        for source, _ in node.next_functions if node is not None else ():
            if source is not None and source not in seen:
                seen.add(source)
                todo.append(source)
    return False


def needs_copies(run: Callable[[bool], tuple[Tensor, Mapping[str, Tensor]]]) -> bool:
    """Whether the gradient is right only if every pass has an `own_copy`; a ValueError where it is not right even then.

    `run(own)` gives outputs and the leaves they came from, with a copy of its own for the pass or without.
    """
    outputs, _ = run(False)
    if not outputs.requires_grad or not foreign(outputs):
        return False
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)).to(outputs)

    def gradient(own: bool) -> list[Tensor | None]:
        outputs, leaves = run(own)
        return list(torch.autograd.grad((outputs * direction).sum(), list(leaves.values()), allow_unused=True))

    # what a loop of the user's would find: also what a backward pass puts into the parameters by itself
    outputs, leaves = run(True)
    (outputs * direction).sum().backward()
    right = [leaf.grad for leaf in leaves.values()]
    if _agree(gradient(False), right):
        return False
    if _agree(gradient(True), right):
        return True
    raise ValueError(
        "network has a torch.autograd.Function whose backward pass puts gradients into parameters by itself, where nobody who asks "
        "for gradients finds them; take the form without it (checkpoints with use_reentrant=False, solvers without adjoints)"
    )


def _agree(found: list[Tensor | None], right: list[Tensor | None]) -> bool:
    for a, b in zip(found, right):
        if a is None or b is None:
            if bool((a if b is None else b) is not None and (a if b is None else b).any()):  # type: ignore[union-attr]
                return False
        elif not torch.allclose(a, b, rtol=1e-2, atol=1e-3 * float(b.abs().max())):
            return False
    return True
