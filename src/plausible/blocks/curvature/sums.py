"""s₁H₁ + s₂H₂ of two curvatures of the same weights: what the data of one task and those of the next say together."""

from __future__ import annotations

import torch
from torch import Tensor

from plausible.blocks.curvature.blocks import Block, Dense, Diagonal, flat, named
from plausible.blocks.curvature.kronecker import Kronecker, eigen
from plausible.blocks.curvature.low_rank_block import LowRank
from plausible.blocks.curvature.structures import Curvature


def added(first: Curvature, second: Curvature, scales: tuple[Tensor | float, Tensor | float] = (1.0, 1.0)) -> Curvature:
    """s₁H₁ + s₂H₂ in the same structure.

    Diagonals and dense matrices add up exactly. A sum of Kronecker products is none: it is taken in the eigenbases of its two
    partial traces, with its own diagonal there as eigenvalues. That has the trace of the sum, is exact where both terms have the
    same bases, and takes the memory of one term however many tasks there were. (Adding the factors, A₁ + A₂ and B₁ + B₂, would
    count A₁ ⊗ B₂ and A₂ ⊗ B₁ too.) Of low-rank terms the leading eigenpairs of the sum are kept, as many as the larger one has.

    Cost: three decompositions of matrices of the layer's width; nothing is seen of the data.
    """
    if [block.layers for block in first.blocks] != [block.layers for block in second.blocks]:
        raise ValueError(
            f"curvatures of other weights cannot be added: one is of {', '.join(first.names)}, the other of "
            f"{', '.join(second.names)}; fit the same network with the same structure= and where= each time"
        )
    pairs = zip(first.blocks, second.blocks)
    return Curvature([_sum(_scaled(one, scales[0]), _scaled(two, scales[1])) for one, two in pairs], first.structure)


def _scaled(block: Block, scale: Tensor | float) -> Block:
    """s·H."""
    linear = {"matrix", "values", *(block.names if isinstance(block, Diagonal) else ())}
    return block.restored(block.layers, {n: scale * v if n in linear else v for n, v in block.tensors().items()})


def _sum(first: Block, second: Block) -> Block:
    match first, second:
        case Diagonal(), Diagonal():
            return Diagonal(first.layers, {name: value + second.values[name] for name, value in first.values.items()})
        case Dense(), Dense():
            return Dense(first.layers, first.tensors()["matrix"] + second.tensors()["matrix"])
        case Kronecker(), Kronecker():
            return _kronecker(first, second)
        case LowRank(), LowRank():
            return _low_rank(first, second)
    raise ValueError(
        f"curvatures of kinds {first.kind!r} and {second.kind!r} cannot be added: use one structure= for all tasks"
    )


def _kronecker(first: Kronecker, second: Kronecker) -> Kronecker:
    terms = (first, second)
    outer, inner = [], []
    for term in terms:  # partial traces, over inputs and over outputs
        outer.append((term.out * term.values.sum(2)[:, None]) @ term.out.transpose(-1, -2))
        if term.into is not None:
            inner.append((term.into * term.values.sum(1)[:, None]) @ term.into.transpose(-1, -2))
    basis = {"out": eigen(outer[0] + outer[1], first.out.dtype)[1]}
    if inner:  # tables have the standard basis on that side
        basis["into"] = eigen(inner[0] + inner[1], first.out.dtype)[1]
    values = torch.stack([_diagonal(term, basis["out"], basis.get("into")) for term in terms]).sum(0)
    return Kronecker.restored(first.layers, {"values": values, **basis})


def _diagonal(term: Kronecker, out: Tensor, into: Tensor | None) -> Tensor:
    """The diagonal of a term in other bases: [G, out, in]."""
    found = (out.transpose(-1, -2) @ term.out).square() @ term.values
    if into is None or term.into is None:
        return found
    return found @ (into.transpose(-1, -2) @ term.into).square().transpose(-1, -2)


def _low_rank(first: LowRank, second: LowRank) -> LowRank:
    vectors = torch.cat([flat(term.layers, term.vectors) for term in (first, second)]).double()
    basis, factor = torch.linalg.qr(vectors.T)
    values, turn = torch.linalg.eigh((factor * torch.cat([first.values, second.values]).double()) @ factor.T)
    kept = max(len(first.values), len(second.values))
    leading = (basis @ turn[:, -kept:]).T.to(first.values.dtype)
    return LowRank(first.layers, values[-kept:].to(first.values.dtype), named(first.layers, leading))
