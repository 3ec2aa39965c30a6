"""Where to look: at the data, between them and outside, as inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from plausible.core import random

MOST = 100
"""Inputs of a region."""
WIDER = 3.0
"""A gap counts where it is this many times as wide as the median distance between neighbours."""
NAMES = ("inside", "between", "outside")


def find(x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Inputs inside, between and outside the data x [N, D] (leading axes of an input are flattened): up to `MOST` each.

    inside: training inputs. outside: on the rays from the centre through training inputs, at 1.25 to 2 times the largest
    distance (in standard deviations of the columns). between: with one column that varies, the middle four fifths of the widest
    gap; with several, those midpoints of two training inputs that are farthest from any of them. Where no place between is
    `WIDER` times as empty as the surroundings of a training input, that region is left out.
    """
    shape = x.shape[1:]
    flat = x.reshape(len(x), -1).double()
    centre, scale = flat.mean(0), flat.std(0, correction=0)
    varies = scale > 0
    if not bool(varies.any()):
        return {"inside": x[:1].clone()}
    stream = random.generator(seed, 61)
    picked = torch.randperm(len(x), generator=stream)[:MOST].sort().values.to(x.device)
    # In standard deviations, so that no column rules the distances by its unit; a constant one has none.
    units = torch.where(varies, (flat - centre) / torch.where(varies, scale, 1.0), 0.0)
    chosen = {"inside": units[picked]}
    if (gap := _between(units, varies, stream)) is not None:
        chosen["between"] = gap
    chosen["outside"] = _outside(units, len(picked))
    regions = {name: (centre + scale * places).to(x.dtype).reshape(-1, *shape) for name, places in chosen.items()}
    regions["inside"] = x[picked]  # to the bit
    return regions


def _between(units: Tensor, varies: Tensor, stream: torch.Generator) -> Tensor | None:
    if int(varies.sum()) == 1:
        column = int(varies.nonzero()[0])
        line = units[:, column].sort().values
        gaps = line.diff()
        widest = int(gaps.argmax()) if len(gaps) else 0
        if not len(gaps) or gaps[widest] <= WIDER * gaps.median():
            return None
        share = torch.linspace(0.1, 0.9, min(MOST, 41), dtype=units.dtype, device=units.device)
        places = units.new_zeros(len(share), units.shape[1])
        places[:, column] = line[widest] + share * gaps[widest]
        return places
    rows = units.unique(dim=0)
    if len(rows) < 4:
        return None
    nearest = torch.cdist(rows, rows).fill_diagonal_(torch.inf).amin(1)
    first, second = (torch.randint(len(rows), (2000,), generator=stream).to(units.device) for _ in range(2))
    middle = 0.5 * (rows[first] + rows[second])
    empty = torch.cdist(middle, rows).amin(1)
    best = empty.argsort(descending=True)[:MOST]
    best = best[empty[best] > WIDER * nearest.median()]
    return middle[best] if len(best) else None


def _outside(units: Tensor, count: int) -> Tensor:
    radius = units.norm(dim=1)
    away = units[radius > 0]
    rays = (away / away.norm(dim=1, keepdim=True))[torch.linspace(0, len(away) - 1, count).long().to(units.device)]
    return rays * radius.max() * torch.linspace(1.25, 2.0, len(rays), dtype=units.dtype, device=units.device)[:, None]
