"""What the ranks of a run have left, put together: every one of them then holds the whole.

Draws come in the order in which one process would have kept them: time after time, at each time member after member. They are sent
in one piece where they are held in memory, and shard by shard to a folder of each rank where they were streamed to disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from plausible.core import weights as tree
from plausible.core.model import Model
from plausible.core.storage import DiskDraws, DrawStore, DrawWriter, MemoryDraws
from plausible.engine.method import Method, Run

if TYPE_CHECKING:
    from plausible.engine.method import Fitted
    from plausible.engine.ranks import Ranks


class Left(NamedTuple):
    """What one rank tells the others that it has left.

    It kept `each` draws at each of `times` moments, tensors of the names, shapes and types in `like`; they count where `keeps`.
    """

    keeps: bool
    members: int
    each: int
    times: int
    on_disk: bool
    like: dict[str, tuple[tuple[int, ...], torch.dtype]]
    history: dict[str, list[float]]
    steps: int
    seconds: float
    mode: str


def gather(team: Ranks, method: Method, model: Model, run: Run[Any], fitted: Fitted, folder: Path | None) -> Fitted:
    """All draws, means of the history over members, the longest time; the states where a posterior is made of those.

    `method` is what ran here. Ranks that were stopped at different steps count up to the last that all have.
    """
    store = fitted.draws if team.keeps else None
    last = method.stages()[-1]
    each = 0 if store is None else len(next(iter(last.kept(model, run, fitted.state).values())))
    first = {} if store is None else store.get([0], "cpu")
    here = Left(
        team.keeps,
        method.members or 1,
        each,
        0 if store is None else len(store) // each,
        isinstance(store, DiskDraws),
        {name: (tuple(value.shape[1:]), value.dtype) for name, value in first.items()},
        fitted.history,
        fitted.steps,
        fitted.seconds,
        fitted.mode,
    )
    everybody: list[Left] = team.exchange(here)
    active = [left for left in everybody if left.keeps]
    gathered = fitted._replace(
        draws=_draws(team, store, everybody, folder, model.device),
        history=mean_history(active),
        steps=min(left.steps for left in active),
        seconds=max(left.seconds for left in everybody),
        mode=everybody[0].mode,
    )
    if team.member_numbers is None or team.method.traits.keeps_draws:
        return gathered
    if fitted.left:
        return gathered._replace(left=_left(team, fitted.left, model.device))
    return gathered._replace(state=_state(team, fitted.state, everybody))


def _draws(
    team: Ranks, store: DrawStore | None, everybody: list[Left], folder: Path | None, device: torch.device
) -> DrawStore | None:
    active = [rank for rank, left in enumerate(everybody) if left.keeps]
    times = min(everybody[rank].times for rank in active)
    if not times:
        return None
    like, on_disk = everybody[active[0]].like, any(left.on_disk for left in everybody)
    total = sum(left.each for left in everybody)
    size = total * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in like.values())
    # in pieces of about a shard where draws may not fit into memory
    chunk = max(1, DrawWriter.SHARD_BYTES // max(1, size)) if on_disk else times
    writer = DrawWriter(None if folder is None else folder / "gathered")
    joined: tree.Weights = {}
    failure: Exception | None = None  # kept until all pieces have been sent, so that nobody waits for this rank
    for start in range(0, times, chunk):
        count = min(chunk, times - start)
        pieces = []
        for rank in active:
            each = everybody[rank].each
            piece = {n: torch.empty((count * each, *shape), dtype=dtype) for n, (shape, dtype) in like.items()}
            try:
                if rank == team.rank and store is not None:
                    piece = store.get(range(start * each, (start + count) * each), "cpu")
            except (OSError, ValueError) as error:
                failure = error
            pieces.append({n: team.send(rank, value).unflatten(0, (count, each)) for n, value in piece.items()})
        # time after time, at each time member after member, as one process would have kept them
        joined = {name: torch.cat([piece[name] for piece in pieces], 1).flatten(0, 1) for name in like}
        if on_disk and active != [team.rank] and failure is None:
            try:
                for row in range(count * total):
                    writer.add({name: value[row].clone() for name, value in joined.items()})
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    team.exchange(None)
    if active == [team.rank] and store is not None:
        return store
    return writer.store() if on_disk else MemoryDraws(tree.to(joined, device))


def _left(team: Ranks, left: tree.Weights, device: torch.device) -> tree.Weights:
    """What the members of all ranks have left, under their numbers in the whole ensemble."""
    assert team.member_numbers is not None
    numbered = {}
    for name, value in left.items() if team.keeps else ():
        member, _, rest = name.partition("/")
        numbered[f"{team.member_numbers.start + int(member)}/{rest}"] = value
    layouts = team.exchange([(name, tuple(value.shape), value.dtype) for name, value in numbered.items()])
    everything = {}
    for rank, layout in enumerate(layouts):
        for name, shape, dtype in layout:
            here = numbered[name] if rank == team.rank else torch.empty(shape, dtype=dtype)
            everything[name] = team.send(rank, here).to(device)
    return everything


def _state(team: Ranks, state: Any, everybody: list[Left]) -> Any:
    """The states of all members, stacked."""
    active = [(rank, left.members) for rank, left in enumerate(everybody) if left.keeps]

    def joined(leaf: Tensor) -> Tensor:
        shapes = [(rank, leaf if rank == team.rank else leaf.new_empty((members, *leaf.shape[1:]))) for rank, members in active]
        return torch.cat([team.send(rank, like) for rank, like in shapes])

    return tree.tree_map(joined, state)


def mean_history(active: list[Left]) -> dict[str, list[float]]:
    """Means over members of what each rank logged, for the epochs that all of them have."""
    total = sum(left.members for left in active)
    means = {}
    for name in active[0].history:
        epochs = zip(*(left.history.get(name, ()) for left in active))
        means[name] = [sum(v * left.members for v, left in zip(values, active)) / total for values in epochs]
    return means
